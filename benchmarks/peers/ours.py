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
from jax_grouped.backends.spec import GemmSpec, Product
from jax_grouped.core.groups import Groups
from jax_grouped.moe import Weights
from jax_grouped.ops.gemm import gemm

_initial_step = jax.jit(jax_layers.gradients, static_argnums=0)
_quantize_kernel = jax.jit(jg.quantize_kernel, static_argnames=("recipe", "for_gradients"))
_dequantize = functools.partial(jg.grouped_dequantize, dtype=jnp.bfloat16)


@jax_layers.layer_of
def _ragged_dot(x: jax.Array, kernel: jax.Array, sizes: jax.Array) -> jax.Array:
    # A float32 kernel, as mixed-precision training has, gets a float32 gradient.
    return (jg.ragged_dot if kernel.dtype == x.dtype else jg.grouped_dense)(x, kernel, sizes)


def product(case: Case, sets: list[Arrays]) -> JaxWork:
    """Makes `ragged_dot`."""
    return jax_layers.layer_work(case, sets, _ragged_dot)


# One function for each, here and below, so that JAX compiles it once for all group sizes.
@functools.cache
def _layer(recipe: jg.Recipe | None, top_k: int, logits_dtype: str) -> jax_layers.Layer:
    def layer(x: jax.Array, router: jax.Array | None, weights: Sequence[Weights], sizes: jax.Array) -> jax.Array:
        if len(weights) == 1:
            return jg.grouped_dense(x, group_sizes=sizes, recipe=recipe, **weights[0]._asdict())
        gate_up, down = weights
        if router is None:
            return jg.moe.grouped_mlp(x, gate_up, down, sizes, recipe=recipe)
        logits = jg.moe.router_logits(x, router).astype(logits_dtype)
        return jg.moe.moe_mlp(x, logits, gate_up, down, top_k=top_k, recipe=recipe)[0]

    return layer


def layer_product(
    case: Case,
    sets: list[Arrays],
    recipe: jg.Recipe | None,
    cached: bool,
    sizes: Any = None,
    logits_dtype: str = "float32",
) -> JaxWork:
    """Makes `grouped_dense`, `grouped_mlp` or `moe_mlp` under a recipe."""
    layer = _layer(recipe, case.shape.top_k, logits_dtype)
    group_sizes = jnp.asarray(case.sizes if sizes is None else sizes, jnp.int32)
    x, router, kernels, dy = jax_layers.split(case, sets[0])
    states: list[Any] = [None] * len(kernels)
    scales: list[Any] = [None] * len(kernels)
    if isinstance(recipe, jg.DelayedScaling):
        # One step from the initial state: then the scales bring the operands into the range of FP8, as in training.
        # It has no caches: those of scale 1 would underflow.
        initial = jg.Fp8State.initial(recipe, case.shape.num_groups)
        weights = [Weights(kernel, fp8_state=initial) for kernel in kernels]
        states = _initial_step(layer, x, router, weights, dy, group_sizes)[-1]
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

    return jax_layers.layer_work(case, sets, layer, make_weights, group_sizes)


def layer_moe(
    case: Case, sets: list[Arrays], recipe: jg.Recipe | None, cached: bool, logits_dtype: str = "float32"
) -> JaxWork:
    """Makes `moe_mlp` with a router, or `grouped_mlp` on the rows that a random router would give each expert."""
    groups, rows = case.shape.num_groups, case.shape.tokens * case.shape.top_k
    sizes = np.random.default_rng(case.seed).multinomial(rows, np.ones(groups) / groups)
    return layer_product(case, [as_trained(arrays) for arrays in sets], recipe, cached, sizes, logits_dtype)


def moe(case: Case, sets: list[Arrays]) -> JaxWork:
    """Makes the layer without a recipe; beside a peer with the peers' logits, which are rounded to bfloat16."""
    is_peer = VARIANTS[case.variant].backend is not None
    return layer_moe(case, sets, None, cached=False, logits_dtype="bfloat16" if is_peer else "float32")


def inference_moe(case: Case, sets: list[Arrays], recipe: jg.Recipe) -> JaxWork:
    """Makes the forward pass of `moe_mlp` whose experts are in memory in FP8 alone."""
    if case.operation != "moe forward":
        raise NotOfferedError

    def run(x: jax.Array, router: jax.Array, caches: Sequence[jg.KernelCache]) -> jax.Array:
        logits, weights = jg.moe.router_logits(x, router), map(Weights.of_cache, caches)
        return jg.moe.moe_mlp(x, logits, *weights, top_k=case.shape.top_k, recipe=recipe)[0]

    arguments = []
    for arrays in sets:
        x, router, *kernels, _ = as_trained(arrays)
        caches = [_quantize_kernel(kernel, recipe=recipe, for_gradients=False) for kernel in kernels]
        arguments.append((x, router, caches))
    return JaxWork(run, arguments)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _operands(product: Product, recipe: Any, sizes: jax.Array, x: jax.Array, kernel: jax.Array, dy: jax.Array) -> Any:
    """Quantizes both operands of a product."""
    tokens = functools.partial(
        jg.grouped_quantize, group_sizes=sizes, mode=recipe.token_mode, pow2_scales=recipe.pow2_scales
    )
    if product == "wgrad":
        return [tokens(rows, rowwise=False, columnwise=True).columnwise for rows in (x, dy)]
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
    operation: Quantization, sizes: jax.Array, scale: jax.Array | None, x: jax.Array, activation_input: Any = None
) -> Any:
    if operation.kernels:
        return jg.quantize_kernel(x.reshape(sizes.shape[0], -1, x.shape[1]), jg.Float8BlockScaling())
    return jg.grouped_quantize(
        x,
        sizes,
        operation.mode,
        scale=scale,
        rowwise="rowwise" in operation.orientations,
        columnwise="columnwise" in operation.orientations,
        dbias=operation.dbias,
        activation=operation.activation,
        activation_input=activation_input,
    )


@functools.cache
def _quantization(operation: Quantization) -> Callable[..., list[jax.Array]]:
    def run(*arguments: Any) -> list[jax.Array]:
        # Not the result itself: it also holds the group sizes, which XLA would copy.
        result = _quantize(operation, *arguments)
        arrays = [getattr(result, name, None) for name in ("amax", "dbias")]
        for scaled in (result.rowwise, result.columnwise):
            arrays += [] if scaled is None else [scaled.data, scaled.scale_inv]
        return [array for array in arrays if array is not None]

    return run


def quantization(case: Case, sets: list[Arrays]) -> JaxWork:
    """Makes `grouped_quantize`, `quantize_kernel` or `grouped_dequantize`."""
    operation, arguments = QUANTIZATIONS[case.operation], quantization_arguments(case, sets)
    if operation.mode is None:
        raise NotOfferedError
    if not operation.inverse:
        return JaxWork(_quantization(operation), arguments)
    quantized = [jax.jit(_quantize, static_argnums=0)(operation, *inputs) for inputs in arguments]
    return JaxWork(_dequantize, [(pair.rowwise or pair.columnwise,) for pair in quantized])
