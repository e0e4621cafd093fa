"""`ragged_dot`, the product of each group of rows with its own matrix."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike, DTypeLike

from jax_grouped.core.groups import Groups
from jax_grouped.core.values import as_array, in_reverse_mode, promoted_type, vary_alike
from jax_grouped.kernels.product import GemmSpec
from jax_grouped.ops import checks
from jax_grouped.ops.checks import GroupSizes
from jax_grouped.ops.gemm import gemm, is_narrow


def ragged_dot(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: GroupSizes,
    precision: jax.lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    group_offset: ArrayLike | None = None,
    out_sharding: NamedSharding | PartitionSpec | None = None,
) -> jax.Array:
    """Multiplies each group of rows by its own matrix; a drop-in replacement for `jax.lax.ragged_dot`.

    Row `i` of the result is `lhs[i] @ rhs[g]`, where `g` is the group that row `i` belongs to. Groups follow one
    another from row 0 on. Rows past the last group are zero in the result and in the gradient of `lhs`, whatever
    `lhs` holds there. The group sizes are read on the device only.

    Accumulation is in float32. With 16-bit inputs every product is exact. With float32 inputs the `cuda` backend
    multiplies bfloat16 parts of them. By default it takes two parts and three products (relative error about 2^-16 of
    the sum of absolute products, finer than TF32); with `precision=HIGHEST`, three parts and six products (about 2^-23,
    as float32 itself). There, an infinity in `lhs` or `rhs` may give NaN. Gradients are computed likewise. A float32
    gradient of the result is rounded to bfloat16 if the inputs are bfloat16. If they are float16, whose range it may
    exceed, it is multiplied in float32. Reverse-mode derivatives (`jax.grad`, `jax.vjp`) of any order exist.

    Under `jax.vmap` the batch becomes more groups of one call. An `rhs` that is not mapped is not copied for it.

    Args:
        lhs: `[T, K]`, bfloat16, float16 or float32.
        rhs: `[G, K, N]`, of one of these types. If the types differ, both are converted to the smallest type that holds
            both. Or int4, uint4, int8, uint8, float8_e4m3fn or float8_e5m2, such as quantized weights whose scales
            multiply the result: it is then converted to the type of `lhs`, a few groups at a time. Integers have no
            gradient. That of FP8 has its type too and no scale, so beyond the type's range it is NaN.
        group_sizes: `[G]` (`[E]`, `E >= G`, with `group_offset`) integers. Negative ones count as 0, and rows past
            `T` do not exist.
        precision: `DEFAULT`, `HIGH` or `HIGHEST`, as `jax.lax.Precision` or a string that JAX takes for one; matters
            for float32 inputs only. A `jax.lax.DotAlgorithmPreset` or its name counts as the precision that is as
            exact on the `cuda` backend: `BF16_BF16_F32` as `DEFAULT`; `TF32_TF32_F32`, `BF16_BF16_F32_X3` and those of
            float16 as `HIGH`; `F32_F32_F32`, `TF32_TF32_F32_X3`, `BF16_BF16_F32_X6` and `_X9` as `HIGHEST`. Default:
            `jax.default_matmul_precision`.
        preferred_element_type: type of the result, one of the three types above. Default: the promoted input type.
        group_offset: scalar or `[1]` integer: `rhs` holds the groups `[group_offset, group_offset + G)`. The result is
            zero in the rows of other groups.
        out_sharding: how the type of the result is sharded over mesh axes of type `Explicit`: a `NamedSharding` or its
            spec. Needed where the types of the operands leave a choice.

    Returns:
        `[T, N]`.

    Raises:
        TypeError: an argument has a type that is not supported.
        ValueError: an argument has a shape that does not fit, or `precision` is a preset of FP8 or float64 operands. As
            JAX's setting, such a preset raises with float32 inputs only. Or `lhs` and `rhs` have types that are sharded
            so that the result's is ambiguous, and there is no `out_sharding`.

    Example:
        lhs, rhs = jnp.ones((16, 32)), jnp.ones((2, 32, 16))

        y = jg.ragged_dot(lhs, rhs, jnp.array([10, 4]))

        assert y[:14].tolist() == 14 * [16 * [32.0]] and not y[14:].any()
    """
    lhs, rhs = as_array("lhs", lhs), as_array("rhs", rhs)
    checks.check_tokens("lhs", lhs)
    checks.check_kernel("rhs", rhs, "lhs", lhs, may_be_narrow=True)
    groups = checks.canonical_groups(group_sizes, group_offset, "rhs", rhs, capacity=lhs.shape[0])
    lhs, rhs, out_dtype, precision = canonical_types(lhs, rhs, precision, preferred_element_type)
    spec = GemmSpec("fprop", rhs.shape[0], out_dtype, precision)
    return multiply(lhs, rhs, groups, spec, checks.canonical_out_spec(out_sharding, lhs, rhs))


def canonical_types(
    lhs: jax.Array, rhs: jax.Array, precision: jax.lax.PrecisionLike, preferred_element_type: DTypeLike | None
) -> tuple[jax.Array, jax.Array, np.dtype, jax.lax.Precision]:
    """Returns the operands in the smallest type that holds both, the type of the result, and the precision.

    A kernel that the product converts a few groups at a time is returned as it is.
    """
    rhs_dtype = lhs.dtype if is_narrow(rhs) else rhs.dtype
    out_dtype = _result_type(lhs.dtype, rhs_dtype, preferred_element_type)
    dtype = promoted_type(lhs.dtype, rhs_dtype)
    rhs = rhs if is_narrow(rhs) else rhs.astype(dtype)
    return lhs.astype(dtype), rhs, out_dtype, checks.canonical_precision(precision, dtype)


def multiply(
    lhs: jax.Array, rhs: jax.Array, groups: Groups, spec: GemmSpec, out_spec: PartitionSpec | None
) -> jax.Array:
    """Returns the product that `spec` names, also of arrays that vary over different axes of a `jax.shard_map`."""
    lhs, rhs = in_reverse_mode("ragged_dot", (lhs, rhs))
    lhs, varying_rhs, *varying = vary_alike(lhs, rhs, *groups)
    rhs = varying_rhs if spec.product == "wgrad" else rhs  # A kernel's gradient is summed by its own rule.
    return gemm(lhs, rhs, Groups(*varying), spec, out_spec=out_spec)


def _result_type(lhs: np.dtype, rhs: np.dtype, preferred: DTypeLike | None) -> np.dtype:
    """Returns the result type of `jax.lax.ragged_dot` for these types."""
    if preferred is not None:
        checks.check_dtype("preferred_element_type", preferred)
        return jnp.dtype(preferred)
    if {lhs, rhs} == {jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16)}:
        return jnp.dtype(jnp.bfloat16)
    return promoted_type(lhs, rhs)
