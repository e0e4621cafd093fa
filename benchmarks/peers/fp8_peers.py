"""FP8 products alone: of operands that were quantized before the clock starts."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

import jax_grouped as jg
from benchmarks.cases import Case, Inputs
from benchmarks.jax_work import JaxWork, Results
from benchmarks.timing import Work
from jax_grouped.backends.spec import GemmSpec, Product
from jax_grouped.core.groups import Groups
from jax_grouped.ops.gemm import gemm

#: The operations that are one product, with the type of its result.
_PRODUCTS: dict[str, tuple[Product, str]] = {
    "fprop": ("fprop", "bfloat16"),
    "dgrad": ("dgrad", "bfloat16"),
    "wgrad": ("wgrad", "bfloat16"),
    "wgrad f32": ("wgrad", "float32"),
}

Operands = tuple[jg.ScaledArray, jg.ScaledArray]
#: Whose scales come from the operands alone.
Recipe = jg.Float8BlockScaling | jg.Float8CurrentScaling


@functools.partial(jax.jit, static_argnums=(0, 1))
def _quantize(product: Product, recipe: Recipe, inputs: Inputs, sizes: jax.Array) -> Operands:
    def tokens(x: jax.Array) -> jg.ScaledArray:
        columnwise = product == "wgrad"
        quantized = jg.grouped_quantize(
            x,
            sizes,
            recipe.token_mode,
            rowwise=not columnwise,
            columnwise=columnwise,
            pow2_scales=recipe.pow2_scales,
        )
        copy = quantized.columnwise if columnwise else quantized.rowwise
        assert copy is not None
        return copy

    if product == "wgrad":
        return tokens(inputs.x), tokens(inputs.dy)
    (kernel,) = inputs.kernels
    quantized = jg.quantize_kernel(kernel, recipe=recipe)
    if product == "fprop":
        return tokens(inputs.x), quantized.columnwise
    return tokens(inputs.dy), quantized.rowwise


@functools.cache
def _program(product: Product, out_dtype: str) -> Callable[..., Results]:
    def run(a: jg.ScaledArray, b: jg.ScaledArray, sizes: jax.Array) -> Results:
        spec = GemmSpec(product, a.layout.num_groups, out_dtype)
        groups = Groups(sizes, jnp.zeros((1,), jnp.int32))
        return (gemm(a, b, groups, spec),)

    return run


def _prepare(case: Case, *, recipe: Recipe) -> Work:
    if case.op not in _PRODUCTS:
        raise ValueError(f"{case.op!r} is no single product")
    product, out_dtype = _PRODUCTS[case.op]
    sizes = jnp.asarray(case.sizes)
    sets = [(*_quantize(product, recipe, inputs, sizes), sizes) for inputs in case.inputs]
    return JaxWork(_program(product, out_dtype), sets)


def load_ours(recipe: Recipe) -> Callable[[Case], Work]:
    """This library's products under a recipe."""
    return functools.partial(_prepare, recipe=recipe)
