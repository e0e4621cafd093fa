"""This library: products, layers under a recipe, products of quantized operands, and quantization."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_grouped as jg
from benchmarks.cases import DTYPE, QUANTIZATIONS, Arrays, Case, Quantization, as_trained, quantization_arguments
from benchmarks.peers import VARIANTS, JaxWork, NotOfferedError, jax_layers
from jax_grouped.core.groups import Groups
from jax_grouped.kernels.product import GemmSpec, Product
from jax_grouped.moe import Weights
from jax_grouped.ops.gemm import gemm

_initial_step = jax.jit(jax_layers.gradients, static_argnums=0)
_quantize_kernel = jax.jit(jg.quantize_kernel, static_argnames=("recipe", "for_gradients"))
_dequantize = functools.partial(jg.grouped_dequantize, dtype=jnp.bfloat16)


@jax_layers.layer_of
def _ragged_dot(x: jax.Array, kernel: jax.Array, sizes: jax.Array) -> jax.Array:
    # A float32 kernel, as mixed-precision training has, gets a float32 gradient.
    return (jg.ragged_dot if kernel.dtype == x.dtype else jg.grouped_dense)(x, kernel, sizes)


def _make_cache(kernel: jax.Array, recipe: jg.Recipe | None, scale: jax.Array | None) -> Any:
    """Returns what microbatches share: the kernel in FP8 or, if it is not bfloat16 already, in bfloat16."""
    if recipe is not None:
        return _quantize_kernel(kernel, recipe=recipe, scale=scale)
    if kernel.dtype == DTYPE:
        raise NotOfferedError
    return kernel.astype(DTYPE)


def product(case: Case, sets: list[Arrays]) -> JaxWork:
    """Makes `ragged_dot`."""
    return jax_layers.layer_work(case, sets, _ragged_dot)


# One function for each, here and below, so that JAX compiles it once for all group sizes.
@functools.cache
def _layer(recipe: jg.Recipe | None) -> jax_layers.Layer:
    def layer(x: jax.Array, weights: Sequence[Weights], sizes: jax.Array) -> jax.Array:
        if len(weights) == 1:
            return jg.grouped_dense(x, group_sizes=sizes, recipe=recipe, **weights[0]._asdict())
        gate_up, down = weights
        return jg.moe.grouped_mlp(x, gate_up, down, sizes, recipe=recipe)

    return layer


def layer_product(case: Case, sets: list[Arrays], recipe: jg.Recipe | None, cached: bool) -> JaxWork:
    """Makes `grouped_dense` or `grouped_mlp` under a recipe."""
    layer = _layer(recipe)
    x, *kernels, dy = sets[0]
    states: list[Any] = [None] * len(kernels)
    scales: list[Any] = [None] * len(kernels)
    if isinstance(recipe, jg.DelayedScaling):
        # One step from the initial state: then the scales bring the operands into the range of FP8, as in training.
        initial = jg.Fp8State.initial(recipe, case.shape.num_groups)
        weights = [Weights(kernel, fp8_state=initial) for kernel in kernels]
        states = _initial_step(layer, x, weights, dy, jnp.asarray(case.sizes))[-1]
        scales = [state.scales(recipe).kernel for state in states]

    def make_weights(kernel: jax.Array, index: int) -> Weights:
        cache = _make_cache(kernel, recipe, scales[index]) if cached else None
        return Weights(kernel, None, cache, states[index])

    return jax_layers.layer_work(case, sets, layer, make_weights)


@functools.cache
def _moe_program(
    operation: str, top_k: int, recipe: jg.Recipe | None, logits_dtype: str = "float32"
) -> Callable[..., Any]:
    def layer(x: jax.Array, router: jax.Array, gate_up: Weights, down: Weights, sizes: jax.Array) -> jax.Array:
        if operation == "moe experts":
            return jg.moe.grouped_mlp(x, gate_up, down, sizes, recipe=recipe)
        logits = jg.moe.router_logits(x, router).astype(logits_dtype)
        return jg.moe.moe_mlp(x, logits, gate_up, down, top_k=top_k, recipe=recipe)[0]

    def run(x: jax.Array, router: Any, weights: Sequence[Weights], dy: jax.Array, sizes: jax.Array) -> Any:
        def forward(x: jax.Array, router: Any, kernels: Sequence[jax.Array], states: Sequence[Any]) -> jax.Array:
            parts = zip(weights, kernels, states, strict=True)
            gate_up, down = (of._replace(kernel=kernel, fp8_state=state) for of, kernel, state in parts)
            return layer(x, router, gate_up, down, sizes)

        kernels, states = [of.kernel for of in weights], [of.fp8_state for of in weights]
        if operation == "moe forward":
            return forward(x, router, kernels, states)
        y, pullback = jax.vjp(forward, x, router, kernels, states)
        return y, *pullback(dy)

    return run


def moe(case: Case, sets: list[Arrays]) -> JaxWork:
    """Makes the layer without a recipe; beside a peer with the peers' logits, which are rounded to bfloat16."""
    is_peer = VARIANTS[case.variant].backend is not None
    return layer_moe(case, sets, None, cached=False, logits_dtype="bfloat16" if is_peer else "float32")


def layer_moe(
    case: Case, sets: list[Arrays], recipe: jg.Recipe | None, cached: bool, logits_dtype: str = "float32"
) -> JaxWork:
    """Makes `moe_mlp` with a router, or `grouped_mlp` on the rows that a random router would give each expert."""
    shape = case.shape
    rng = np.random.default_rng(case.seed)
    sizes = rng.multinomial(shape.tokens * shape.top_k, np.ones(shape.num_groups) / shape.num_groups)
    states: list[Any] = [None, None]

    def arguments(*arrays: jax.Array) -> tuple[Any, ...]:
        x, *router, gate_up, down, dy = as_trained(arrays)
        weights = []
        for kernel, state in zip((gate_up, down), states, strict=True):
            scale = None if state is None else state.scales(recipe).kernel
            cache = _make_cache(kernel, recipe, scale) if cached else None
            weights.append(Weights(kernel, None, cache, state))
        return x, router[0] if router else None, weights, dy, jnp.asarray(sizes, jnp.int32)

    program = _moe_program(case.operation, shape.top_k, recipe, logits_dtype)
    if isinstance(recipe, jg.DelayedScaling):
        states = [jg.Fp8State.initial(recipe, shape.num_groups)] * 2
        step = _moe_program("moe" if case.operation == "moe forward" else case.operation, shape.top_k, recipe)
        # With caches of scale 1 the numbers would underflow, so this step has none.
        x, router, weights, dy, counts = arguments(*sets[0])
        uncached = [of._replace(kernel_cache=None) for of in weights]
        states = jax.jit(step)(x, router, uncached, dy, counts)[-1]
    return JaxWork(program, [arguments(*arrays) for arrays in sets])


def inference_moe(case: Case, sets: list[Arrays], recipe: jg.Recipe) -> JaxWork:
    """Makes the forward pass of `moe_mlp` whose experts are in memory in FP8 alone."""
    if case.operation != "moe forward":
        raise NotOfferedError

    def arguments(*arrays: jax.Array) -> tuple[Any, ...]:
        x, router, *kernels, _ = as_trained(arrays)
        return x, router, [_quantize_kernel(kernel, recipe=recipe, for_gradients=False) for kernel in kernels]

    def run(x: jax.Array, router: jax.Array, caches: Sequence[jg.KernelCache]) -> jax.Array:
        logits, weights = jg.moe.router_logits(x, router), map(Weights.from_cache, caches)
        return jg.moe.moe_mlp(x, logits, *weights, top_k=case.shape.top_k, recipe=recipe)[0]

    return JaxWork(run, [arguments(*arrays) for arrays in sets])


@functools.partial(jax.jit, static_argnums=(0, 1))
def _operands(product: Product, recipe: Any, sizes: jax.Array, x: jax.Array, kernel: jax.Array, dy: jax.Array) -> Any:
    """Quantizes both operands of a product."""
    tokens = functools.partial(
        jg.grouped_quantize, group_sizes=sizes, mode=recipe.token_mode, pow2_scales=recipe.pow2_scales
    )
    if product == "wgrad":
        return [tokens(of, rowwise=False, columnwise=True).columnwise for of in (x, dy)]
    quantized = jg.quantize_kernel(kernel, recipe=recipe)
    return (tokens(x).rowwise, quantized.columnwise) if product == "fprop" else (tokens(dy).rowwise, quantized.rowwise)


@functools.cache
def _quantized_product(product: Product, out_dtype: str) -> Callable[..., jax.Array]:
    def run(a: jg.ScaledArray, b: jg.ScaledArray, sizes: jax.Array) -> jax.Array:
        spec = GemmSpec(product, a.layout.num_groups, out_dtype)
        return gemm(a, b, Groups(sizes, jnp.zeros((1,), jnp.int32)), spec)

    return run


def quantized_product(case: Case, sets: list[Arrays], recipe: jg.Recipe) -> JaxWork:
    """Makes a single product of operands that are quantized before the clock starts."""
    products: dict[str, Product] = {"fprop": "fprop", "dgrad": "dgrad", "wgrad": "wgrad", "wgrad f32": "wgrad"}
    if case.operation not in products:
        raise NotOfferedError
    kind, sizes = products[case.operation], jnp.asarray(case.sizes)
    arguments = [(*_operands(kind, recipe, sizes, *arrays), sizes) for arrays in sets]
    return JaxWork(_quantized_product(kind, "float32" if case.operation == "wgrad f32" else "bfloat16"), arguments)


def _quantize(
    of: Quantization, sizes: jax.Array, scale: jax.Array | None, x: jax.Array, activation_input: jax.Array | None = None
) -> Any:
    if of.kernels:
        return jg.quantize_kernel(x.reshape(sizes.shape[0], -1, x.shape[1]), jg.Float8BlockScaling())
    orientations: dict[str, Any] = {name: name in of.orientations for name in ("rowwise", "columnwise")}
    activation: dict[str, Any] = {"activation": of.activation, "activation_input": activation_input}
    return jg.grouped_quantize(x, sizes, of.mode, scale=scale, dbias=of.dbias, **orientations, **activation)


@functools.cache
def _quantization(of: Quantization) -> Callable[..., list[jax.Array]]:
    def run(*arguments: Any) -> list[jax.Array]:
        # Not the result itself: it also holds the group sizes, which XLA would copy.
        result = _quantize(of, *arguments)
        arrays = [getattr(result, name, None) for name in ("amax", "dbias")]
        for scaled in (result.rowwise, result.columnwise):
            arrays += [] if scaled is None else [scaled.data, scaled.scale_inv]
        return [array for array in arrays if array is not None]

    return run


def quantization(case: Case, sets: list[Arrays]) -> JaxWork:
    """Makes `grouped_quantize`, `quantize_kernel` or `grouped_dequantize`."""
    of, arguments = QUANTIZATIONS[case.operation], quantization_arguments(case, sets)
    if of.mode is None:
        raise NotOfferedError
    if not of.inverse:
        return JaxWork(_quantization(of), arguments)
    quantized = [jax.jit(_quantize, static_argnums=0)(of, *inputs) for inputs in arguments]
    return JaxWork(_dequantize, [(pair.rowwise or pair.columnwise,) for pair in quantized])
