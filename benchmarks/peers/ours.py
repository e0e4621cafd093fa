"""This library: products, layers under a recipe, products of quantized operands, and quantization."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_grouped as jg
from benchmarks.cases import DTYPE, LAYERS, QUANTIZATIONS, Arrays, Case, as_trained, quantization_arguments
from benchmarks.peers import VARIANTS, JaxWork, NotOfferedError, jax_layers
from jax_grouped.core.groups import Groups
from jax_grouped.examples.settings import RECIPES
from jax_grouped.kernels.product import GemmSpec, Product, multiply
from jax_grouped.moe import Weights

_initial_step = jax.jit(jax_layers.gradients, static_argnums=0)
_quantize_kernel = jax.jit(jg.quantize_kernel, static_argnames=("recipe", "for_gradients"))


@jax_layers.find_layer
def _ragged_dot(x: jax.Array, kernel: jax.Array, sizes: jax.Array) -> jax.Array:
    # A float32 kernel, as mixed-precision training has, gets a float32 gradient.
    return (jg.ragged_dot if kernel.dtype == x.dtype else jg.grouped_dense)(x, kernel, sizes)


product = functools.partial(jax_layers.layer_work, layer=_ragged_dot)


@functools.cache  # One function for each, so that JAX compiles it once for all group sizes.
def _layer(recipe: jg.Recipe | None, top_k: int, logits_dtype: str) -> jax_layers.Layer:
    def layer(x: jax.Array, router: jax.Array | None, weights: Sequence[Weights], sizes: jax.Array) -> jax.Array:
        if len(weights) == 1:
            return jg.grouped_dense(x, group_sizes=sizes, recipe=recipe, **weights[0]._asdict())
        gate_up, down = weights
        if router is None:
            return jg.moe.grouped_mlp(x, gate_up, down, sizes, recipe=recipe)
        logits = jg.moe.router_logits(x, router).astype(logits_dtype)
        return jg.moe.moe_mlp(x, logits, gate_up, down, router=jg.moe.Router(top_k), recipe=recipe)[0]

    return layer


def _layer_work(case: Case, sets: list[Arrays], recipe: jg.Recipe | None = None, cached: bool = False) -> JaxWork:
    """Makes `grouped_dense`, `grouped_mlp` or `moe_mlp`; experts alone have the rows that a random router gives."""
    shape, sizes, logits_dtype = case.shape, jnp.asarray(case.sizes), "float32"
    if case.operation in LAYERS:
        sets = [as_trained(arrays) for arrays in sets]
        rng = np.random.default_rng(case.seed)
        counts = rng.multinomial(shape.tokens * shape.top_k, np.ones(shape.num_groups) / shape.num_groups)
        sizes = jnp.asarray(counts, jnp.int32)
        if VARIANTS[case.variant].backend is not None:
            logits_dtype = "bfloat16"  # As peers round them.
    layer = _layer(recipe, shape.top_k, logits_dtype)
    x, router, kernels, dy = jax_layers.split(case, sets[0])
    states: list[Any] = [None] * len(kernels)
    scales: list[Any] = [None] * len(kernels)
    if isinstance(recipe, jg.DelayedScaling):
        # One step from the initial state: then the scales bring the operands into the range of FP8, as in training.
        # It has no caches: those of scale 1 would underflow.
        initial = jg.Fp8State.initial(recipe, shape.num_groups)
        weights = [Weights(kernel, fp8_state=initial) for kernel in kernels]
        states = _initial_step(layer, x, router, weights, dy, sizes)[-1]
        scales = [state.scales(recipe).kernel for state in states]

    def make_weights(kernel: jax.Array, index: int) -> Weights:
        cache: Any = None
        if cached and recipe is not None:
            cache = _quantize_kernel(kernel, recipe=recipe, scale=scales[index])
        elif cached:
            if kernel.dtype == DTYPE:
                raise NotOfferedError
            cache = kernel.astype(DTYPE)
        return Weights(kernel, None, cache, states[index])

    return jax_layers.layer_work(case, sets, layer, make_weights, sizes)


def layer_product(case: Case, sets: list[Arrays]) -> JaxWork:
    recipe, *cached = case.variant.split()
    return _layer_work(case, sets, RECIPES[recipe], bool(cached))


layer_moe = layer_product
moe = _layer_work  # Without a recipe, whatever the variant's is.


def inference_moe(case: Case, sets: list[Arrays]) -> JaxWork:
    """Makes the forward pass of `moe_mlp` whose experts are in memory in FP8 alone."""
    if case.operation != "moe forward":
        raise NotOfferedError
    name, _, *options = case.variant.split()

    def run(x: jax.Array, router: jax.Array, caches: Sequence[jg.KernelCache]) -> jax.Array:
        logits, weights = jg.moe.router_logits(x, router), map(Weights.from_cache, caches)
        with jg.config.override(batch_invariant="invariant" in options):
            return jg.moe.moe_mlp(x, logits, *weights, router=jg.moe.Router(case.shape.top_k), recipe=RECIPES[name])[0]

    arguments = []
    for arrays in sets:
        x, router, *kernels, _ = as_trained(arrays)
        caches = [_quantize_kernel(kernel, recipe=RECIPES[name], for_gradients=False) for kernel in kernels]
        arguments.append((x, router, caches))
    return JaxWork(run, arguments)


def option_moe(case: Case, sets: list[Arrays]) -> JaxWork:
    """Makes the steps of `moe_mlp` with an option; adapters have gradients in place of the kernels."""
    name, option = case.variant.split()
    recipe, shape, rank = RECIPES[name], case.shape, 16
    if case.operation == "moe experts":
        raise NotOfferedError
    router = jg.moe.Router(shape.top_k)

    def forward(trained: Any, x: jax.Array, kernel: jax.Array, weights: Sequence[Weights], choice: Any) -> jax.Array:
        field = "lora" if option == "adapted" else "kernel"
        parts = [part._replace(**{field: own}) for part, own in zip(weights, trained, strict=True)]
        mask = jnp.arange(x.shape[0]) % 8 > 0 if option == "masked" else None
        routing: Any = dict(router=router, experts=choice, mask=mask)
        return jg.moe.moe_mlp(x, jg.moe.router_logits(x, kernel), *parts, recipe=recipe, **routing)[0]

    def run(trained: Any, x: jax.Array, kernel: jax.Array, weights: Any, choice: Any, dy: jax.Array) -> Any:
        with jg.config.override(batch_invariant=option == "invariant"):
            if case.operation == "moe forward":
                return forward(trained, x, kernel, weights, choice)
            y, pull_back = jax.vjp(lambda *own: forward(own[0], own[1], own[2], weights, choice), trained, x, kernel)
            return y, *pull_back(dy)

    arguments = []
    for arrays in sets:
        x, kernel, *kernels, dy = as_trained(arrays)
        weights, choice = [Weights(own) for own in kernels], None
        trained: Sequence[Any] = kernels
        if option == "replayed":
            choice = jg.moe.top_k_routing(jg.moe.router_logits(x, kernel), router).experts
        if option == "adapted":
            trained = [jg.Lora(own[:, :, :rank], jnp.full_like(own[:, :rank], 1e-3)) for own in kernels]
        if option == "adapted" and recipe is not None:
            weights = [Weights.from_cache(_quantize_kernel(own, recipe=recipe, for_gradients=False)) for own in kernels]
        arguments.append((trained, x, kernel, weights, choice, dy))
    return JaxWork(run, arguments)


def quantized_product(case: Case, sets: list[Arrays]) -> JaxWork:
    """Makes a single product of operands that are quantized before the clock starts."""
    products: dict[str, Product] = {"fprop": "fprop", "dgrad": "dgrad", "wgrad": "wgrad", "wgrad f32": "wgrad"}
    if case.operation not in products:
        raise NotOfferedError
    recipe: Any = RECIPES["block" if case.variant.endswith("block") else "current"]
    dtype = jnp.dtype("float32" if case.operation == "wgrad f32" else "bfloat16")
    spec, sizes = GemmSpec(products[case.operation], case.shape.num_groups, dtype), jnp.asarray(case.sizes)

    @jax.jit
    def quantize(x: jax.Array, kernel: jax.Array, dy: jax.Array) -> Any:
        options: Any = {"mode": recipe.token_mode, "pow2_scales": recipe.pow2_scales}
        if spec.product == "wgrad":
            options |= {"rowwise": False, "columnwise": True}
            return [jg.grouped_quantize(rows, sizes, **options).columnwise for rows in (x, dy)]
        quantized = jg.quantize_kernel(kernel, recipe=recipe)
        if spec.product == "fprop":
            return jg.grouped_quantize(x, sizes, **options).rowwise, quantized.columnwise
        return jg.grouped_quantize(dy, sizes, **options).rowwise, quantized.rowwise

    def run(a: jg.ScaledArray, b: jg.ScaledArray, sizes: jax.Array) -> jax.Array:
        return multiply(a, b, Groups(sizes, jnp.zeros((1,), jnp.int32)), spec)

    return JaxWork(run, [(*quantize(*arrays), sizes) for arrays in sets])


def quantization(case: Case, sets: list[Arrays]) -> JaxWork:
    operation, arguments = QUANTIZATIONS[case.operation], quantization_arguments(case, sets)
    if operation.mode is None:
        raise NotOfferedError

    def quantize(sizes: jax.Array, scale: jax.Array | None, x: jax.Array, activation_input: Any = None) -> Any:
        if operation.kernels:
            return jg.quantize_kernel(x.reshape(sizes.shape[0], -1, x.shape[1]), jg.Float8BlockScaling())
        options: Any = {name: name in operation.orientations for name in ("rowwise", "columnwise")}
        options |= {"activation": operation.activation, "activation_input": activation_input, "dbias": operation.dbias}
        return jg.grouped_quantize(x, sizes, operation.mode, scale=scale, **options)

    def run(*arguments: Any) -> list[jax.Array]:
        # Not the result itself: it also holds the group sizes, which XLA would copy.
        result = quantize(*arguments)
        arrays = [getattr(result, name, None) for name in ("amax", "dbias")]
        for scaled in (result.rowwise, result.columnwise):
            arrays += [] if scaled is None else [scaled.data, scaled.scale_inv]
        return [array for array in arrays if array is not None]

    if not operation.inverse:
        return JaxWork(run, arguments)
    quantized = [jax.jit(quantize)(*inputs) for inputs in arguments]
    dequantize = functools.partial(jg.grouped_dequantize, dtype=jnp.bfloat16)
    return JaxWork(dequantize, [(pair.rowwise or pair.columnwise,) for pair in quantized])
