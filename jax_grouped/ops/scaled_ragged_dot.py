"""`scaled_ragged_dot`, the grouped product of arrays that the caller has quantized."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jax_grouped.core.values import as_array
from jax_grouped.fp8.arrays import ScaledArray
from jax_grouped.fp8.layout import QuantizedLayout
from jax_grouped.fp8.recipes import ScalingMode
from jax_grouped.kernels.product import GemmSpec, Product
from jax_grouped.ops import checks
from jax_grouped.ops.checks import GroupSizes
from jax_grouped.ops.gemm import gemm

_E5M2 = jnp.dtype(jnp.float8_e5m2)
#: Scaling modes of the second operand, by those of the first: of kernels, and of tokens.
_KERNEL_MODES: Mapping[ScalingMode, ScalingMode] = {
    ScalingMode.TENSOR: ScalingMode.TENSOR,
    ScalingMode.BLOCK_1D: ScalingMode.BLOCK_2D,
    ScalingMode.MX: ScalingMode.MX,
}
_TOKEN_MODES: Mapping[ScalingMode, ScalingMode] = {mode: mode for mode in _KERNEL_MODES}


def scaled_ragged_dot(
    lhs: ScaledArray,
    rhs: ScaledArray,
    group_sizes: GroupSizes,
    *,
    preferred_element_type: DTypeLike = jnp.bfloat16,
    accumulator: jax.Array | None = None,
) -> jax.Array:
    """Multiplies FP8 arrays group by group: the products of `grouped_dense`, for differentiation rules of your own.

    Both operands are quantized along the axis that is summed over, and that determines the product:

    | `lhs` | `rhs` | result | as in |
    |---|---|---|---|
    | tokens `[T, K]`, rowwise | stack `[G, K, N]`, columnwise | `[T, N]` | the forward pass |
    | tokens `[T, N]`, rowwise | stack `[G, K, N]`, rowwise | `[T, K]` | the gradient of tokens |
    | tokens `[T, K]`, columnwise | tokens `[T, N]`, columnwise | `[G, K, N]` | the gradient of kernels |

    Sums are in float32; `grouped_dense` says how exact they are on Hopper. Rows of no group are zero. There is no
    derivative. Under plain `jax.jit`, arrays that are split over devices are gathered: call it inside `jax.shard_map`.

    Args:
        lhs: from `grouped_quantize`, with `TENSOR`, `BLOCK_1D` or `MX`.
        rhs: of the same mode; a stack that belongs to `BLOCK_1D` is of `BLOCK_2D`. From `grouped_quantize` or
            `quantize_kernel`. `MX` needs `swizzled_scales` in both, and at most one operand is float8_e5m2.
        group_sizes: `[G]` integers, those with which the tokens were quantized.
        preferred_element_type: type of the result, bfloat16, float16 or float32.
        accumulator: for the third product, an array like its result to which it is added, by the matmul itself.

    Returns:
        The product.

    Raises:
        TypeError: an argument has a type that is not supported.
        ValueError: the operands do not fit each other.

    Example:
        x, kernel, group_sizes = jnp.ones((16, 32)), jnp.ones((2, 32, 16)), jnp.array([10, 4])
        tokens = jg.grouped_quantize(x, group_sizes, jg.ScalingMode.TENSOR).rowwise
        kernels = jg.grouped_quantize(kernel, None, jg.ScalingMode.TENSOR, columnwise=True).columnwise

        y = jg.scaled_ragged_dot(tokens, kernels, group_sizes)

        assert y.shape == (16, 16) and jnp.allclose(y[:14], 32, rtol=0.01) and not y[14:].any()
    """
    for name, operand in (("lhs", lhs), ("rhs", rhs)):
        if not isinstance(operand, ScaledArray):
            raise TypeError(f"{name} must be a ScaledArray, got {type(operand).__name__}.")
        checks.check_scaled(operand)
    product = _product(lhs.layout, rhs.layout)
    _check_operands(lhs, rhs, product)
    checks.check_dtype("preferred_element_type", preferred_element_type)
    num_groups = lhs.layout.num_groups
    kernels = jax.ShapeDtypeStruct((num_groups, 1, 1), lhs.dtype)
    groups = checks.canonical_groups(group_sizes, None, "lhs", kernels, capacity=lhs.layout.tokens)
    spec = GemmSpec(product, num_groups, preferred_element_type)
    if accumulator is not None:
        accumulator = as_array("accumulator", accumulator)
        if product != "wgrad":
            raise ValueError("accumulator is for the product of two columnwise arrays of tokens.")
        shape = (num_groups, lhs.layout.features, rhs.layout.features)
        dtype = jnp.dtype(preferred_element_type)
        if accumulator.shape != shape or accumulator.dtype != dtype:
            raise ValueError(
                f"accumulator must be like the result, {dtype.name} {shape}, got {accumulator.dtype.name} "
                f"{accumulator.shape}."
            )
    return gemm(lhs, rhs, groups, spec, accumulator)


def _product(lhs: QuantizedLayout, rhs: QuantizedLayout) -> Product:
    """Returns the product whose operands have these orientations."""
    if lhs.stack_rows is None:
        if rhs.stack_rows is not None and not lhs.columnwise:
            return "fprop" if rhs.columnwise else "dgrad"
        if rhs.stack_rows is None and lhs.columnwise and rhs.columnwise:
            return "wgrad"
    raise ValueError(
        "The operands must be rowwise tokens and a stack, or two columnwise arrays of tokens, got "
        f"{_described(lhs)} and {_described(rhs)}."
    )


def _described(layout: QuantizedLayout) -> str:
    side = "columnwise" if layout.columnwise else "rowwise"
    return f"{side} tokens" if layout.stack_rows is None else f"a {side} stack"


def _check_operands(lhs: ScaledArray, rhs: ScaledArray, product: Product) -> None:
    """Raises unless sizes, modes and types fit the product."""
    a, b = lhs.layout, rhs.layout
    summed = {"fprop": (a.features, b.stack_rows), "dgrad": (a.features, b.features), "wgrad": (a.tokens, b.tokens)}
    sizes = summed[product]
    if sizes[0] != sizes[1] or a.num_groups != b.num_groups:
        raise ValueError(
            f"lhs and rhs must have as many groups, and the same size along the axis of the sum, got {a.num_groups} "
            f"groups of {lhs.shape} and {b.num_groups} of {rhs.shape}."
        )
    expected = (_TOKEN_MODES if product == "wgrad" else _KERNEL_MODES).get(a.mode)
    if b.mode != expected:
        raise ValueError(f"This product has no operands of {a.mode} and {b.mode}.")
    if a.mode == ScalingMode.MX and not (a.swizzled_scales and b.swizzled_scales):
        raise ValueError("With ScalingMode.MX, both operands need swizzled_scales.")
    if lhs.dtype == rhs.dtype == _E5M2:
        raise TypeError("Of lhs and rhs, only one may be float8_e5m2.")
    for name, operand in (("lhs", lhs), ("rhs", rhs)):
        checks.check_fp8_features(name, operand.shape, operand.layout.features, "features")
