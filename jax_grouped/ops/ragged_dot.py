"""Products of groups of rows: `ragged_dot`, `ragged_dot_general`, and `scaled_ragged_dot` of quantized arrays."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
from jax.typing import ArrayLike, DTypeLike

from jax_grouped.core.groups import Groups
from jax_grouped.core.values import as_array, as_int32, canonical_dtype, promoted_type, shown, vary_alike
from jax_grouped.fp8.arrays import ScaledArray
from jax_grouped.fp8.layout import QuantizedLayout
from jax_grouped.fp8.recipes import ScalingMode
from jax_grouped.kernels.product import NARROW_TYPES, GemmSpec, Product, multiply
from jax_grouped.ops import inputs
from jax_grouped.ops.inputs import GroupSizes

#: JAX's own function checks the arguments, also where a program has replaced `jax.lax.ragged_dot_general` by ours.
_JAX_RAGGED_DOT_GENERAL = jax.lax.ragged_dot_general


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
    inputs.check_tokens("lhs", lhs)
    inputs.check_kernel("rhs", rhs, "lhs", lhs, types=inputs.KERNEL_TYPES)
    groups = inputs.canonical_groups(group_sizes, group_offset, "rhs", rhs.shape[0], capacity=lhs.shape[0])
    lhs, rhs, out_dtype, precision = _canonical_types(lhs, rhs, precision, preferred_element_type)
    spec = GemmSpec("fprop", rhs.shape[0], out_dtype, precision)
    return _multiply(lhs, rhs, groups, spec, inputs.canonical_out_spec(out_sharding, lhs, rhs))


def _canonical_types(
    lhs: jax.Array, rhs: jax.Array, precision: jax.lax.PrecisionLike, preferred_element_type: DTypeLike | None
) -> tuple[jax.Array, jax.Array, np.dtype, jax.lax.Precision]:
    """Returns the operands in the smallest type that holds both, the type of the result, and the precision.

    A kernel that the product converts a few groups at a time is returned as it is.
    """
    is_narrow = rhs.dtype in NARROW_TYPES
    types = {lhs.dtype} if is_narrow else {lhs.dtype, rhs.dtype}
    dtype = out_dtype = promoted_type(*types)
    if preferred_element_type is not None:
        out_dtype = canonical_dtype("preferred_element_type", preferred_element_type)
    elif types == {jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16)}:  # As jax.lax.ragged_dot does.
        out_dtype = jnp.dtype(jnp.bfloat16)
    rhs = rhs if is_narrow else rhs.astype(dtype)
    return lhs.astype(dtype), rhs, out_dtype, inputs.canonical_precision(precision, dtype)


def _multiply(
    lhs: jax.Array, rhs: jax.Array, groups: Groups, spec: GemmSpec, out_spec: PartitionSpec | None
) -> jax.Array:
    """Returns the product that `spec` names, also of arrays that vary over different axes of a `jax.shard_map`."""
    lhs, varying_rhs, *varying = vary_alike(lhs, rhs, *groups)
    rhs = varying_rhs if spec.product == "wgrad" else rhs  # A kernel's gradient is summed by its own rule.
    return multiply(lhs, rhs, Groups(*varying), spec, out_spec=out_spec)


def ragged_dot_general(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: GroupSizes,
    ragged_dot_dimension_numbers: jax.lax.RaggedDotDimensionNumbers,
    precision: jax.lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    group_offset: ArrayLike | None = None,
    out_sharding: NamedSharding | PartitionSpec | None = None,
) -> jax.Array:
    """Multiplies groups as dimension numbers say; a drop-in replacement for `jax.lax.ragged_dot_general`.

    Three forms exist. The ragged dimension is `T` or, in the last one, a batch dimension; `B...` are any number of
    batch dimensions:

    | `lhs`          | `rhs`                                  | result            | each group                        |
    |----------------|----------------------------------------|-------------------|-----------------------------------|
    | `[B..., T, K]` | `[B..., G, K, N]` or `[B..., G, N, K]` | `[B..., T, N]`    | multiplies its rows by its matrix |
    | `[B..., T, K]` | `[B..., T, N]`                         | `[G, B..., K, N]` | sums over its rows                |
    | `[B..., M, K]` | `[B..., K, N]`                         | `[B..., M, N]`    | has no effect                     |

    Both orders of `K` and `N` in the first form are read as they are. Operands with another order of dimensions are
    transposed first. In the second form, the matrix of a group without rows is zero.

    In the first two forms, accumulation, rows of no group, gradients and `jax.vmap` are those of
    `jax_grouped.ragged_dot`. The third is one `jax.lax.dot_general`, which does not read the group sizes, as in JAX.

    Args:
        lhs: bfloat16, float16 or float32.
        rhs: one of these types, or of those that `jax_grouped.ragged_dot` converts; the second and the third form
            convert it whole.
        group_sizes: `[G]`, or `[B..., G]` if they differ in a batch (`[B..., E]`, `E >= G`, with `group_offset`),
            integers. Negative ones count as 0, and rows past `T` do not exist.
        ragged_dot_dimension_numbers: contracting and batch dimensions of `lhs` and `rhs`, the ragged dimension of
            `lhs`, and in the first form the group dimension of `rhs`.
        precision: of float32 products, or a `jax.lax.DotAlgorithmPreset`, see `jax_grouped.ragged_dot`. In the third
            form XLA multiplies with it: on a GPU, float32 is TF32 unless it is `HIGHEST`.
        preferred_element_type: type of the result, bfloat16, float16 or float32. Default: the promoted input type.
        group_offset: scalar or `[1]` integer, in the first form only: `rhs` holds the groups
            `[group_offset, group_offset + G)`. The result is zero in the rows of other groups.
        out_sharding: how the type of the result is sharded over mesh axes of type `Explicit`: a `NamedSharding` or its
            spec. Needed where the types of the operands leave a choice.

    Returns:
        An array whose dimensions have the order of the table.

    Raises:
        NotImplementedError: the dimension numbers describe none of these forms, or there is a `group_offset` in another
            form than the first.
        TypeError: an argument has a type that is not supported, or JAX raises a TypeError for these dimension numbers
            and shapes.
        ValueError: an argument has a shape or a value that `jax_grouped.ragged_dot` does not take either.

    Example:
        lhs, rhs = jnp.ones((16, 32)), jnp.ones((2, 48, 32))
        sum_over_last = jax.lax.RaggedDotDimensionNumbers((([1], [2]), ([], [])), [0], [0])

        y = jg.ragged_dot_general(lhs, rhs, jnp.array([10, 4]), sum_over_last)

        assert y.shape == (16, 48) and (y[:14] == 32).all() and not y[14:].any()
    """
    lhs, rhs = as_array("lhs", lhs), as_array("rhs", rhs)
    canonical_dtype("lhs's type", lhs.dtype)
    canonical_dtype("rhs's type", rhs.dtype, inputs.KERNEL_TYPES)
    group_sizes = as_int32("group_sizes", group_sizes)
    dims = ragged_dot_dimension_numbers
    _check_dimension_numbers(lhs, rhs, group_sizes, dims, group_offset)
    lhs, rhs, out_dtype, precision = _canonical_types(lhs, rhs, precision, preferred_element_type)
    if not dims.rhs_group_dimensions:
        rhs = rhs.astype(lhs.dtype)
    lhs_batch, rhs_batch = dims.dot_dimension_numbers[1]
    if dims.lhs_ragged_dimensions[0] in lhs_batch:
        return jax.lax.dot_general(
            lhs, rhs, dims.dot_dimension_numbers, precision, out_dtype, out_sharding=out_sharding
        )
    product, lhs_order, rhs_order = _find_form(lhs, rhs, dims)
    out_spec = inputs.canonical_out_spec(out_sharding, lhs, rhs)
    # The result begins with the batch dimensions, that of wgrad with the groups.
    batch_axis = int(product == "wgrad")
    batch_spec, element_spec = PartitionSpec(), None
    if out_spec is not None:
        end = batch_axis + len(lhs_batch)
        batch_spec, element_spec = out_spec[batch_axis:end], PartitionSpec(*out_spec[:batch_axis], *out_spec[end:])

    def element(lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array) -> jax.Array:
        if product == "wgrad":
            groups = Groups(inputs.canonical_sizes(group_sizes, lhs.shape[0]), jnp.zeros((1,), jnp.int32))
            num_groups = group_sizes.shape[0]
        else:
            groups = inputs.canonical_groups(group_sizes, group_offset, "rhs", rhs.shape[0], capacity=lhs.shape[0])
            num_groups = rhs.shape[0]
        return _multiply(lhs, rhs, groups, GemmSpec(product, num_groups, out_dtype, precision), element_spec)

    function: Callable[..., jax.Array] = element
    for _ in lhs_batch:
        function = jax.vmap(function, (0, 0, None if group_sizes.ndim == 1 else 0), batch_axis)
    lhs, rhs = lhs.transpose(*lhs_batch, *lhs_order), rhs.transpose(*rhs_batch, *rhs_order)
    out = function(lhs, rhs, group_sizes)
    return jax.sharding.reshard(out, out_sharding) if any(batch_spec) else out


def _find_form(
    lhs: jax.Array, rhs: jax.Array, dims: jax.lax.RaggedDotDimensionNumbers
) -> tuple[Product, tuple[int, ...], tuple[int, ...]]:
    """Returns the product, and the order in which it reads the dimensions of each operand but those of the batch."""
    (lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch) = dims.dot_dimension_numbers
    rhs_group = dims.rhs_group_dimensions
    lhs_kept = tuple(i for i in range(lhs.ndim) if i not in (*lhs_contracting, *lhs_batch))
    rhs_kept = tuple(i for i in range(rhs.ndim) if i not in (*rhs_contracting, *rhs_batch, *rhs_group))
    if not len(lhs_contracting) == len(lhs_kept) == len(rhs_kept) == 1:
        raise NotImplementedError(
            "ragged_dot_general supports one contracting dimension, and one other dimension of each operand beside "
            f"batch and group dimensions, got {len(lhs_contracting)} contracting, {len(lhs_kept)} other dimensions of "
            f"lhs {lhs.shape} and {len(rhs_kept)} of rhs {rhs.shape} with {dims}."
        )
    if not rhs_group:
        return "wgrad", (*lhs_contracting, *lhs_kept), (*rhs_contracting, *rhs_kept)
    product: Product = "fprop" if rhs_contracting[0] < rhs_kept[0] else "dgrad"
    return product, (*lhs_kept, *lhs_contracting), (*rhs_group, *sorted((*rhs_contracting, *rhs_kept)))


def _check_dimension_numbers(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    dims: jax.lax.RaggedDotDimensionNumbers,
    group_offset: ArrayLike | None,
) -> None:
    """Raises as JAX does unless the dimension numbers fit the shapes, and for an offset without a group dimension."""
    if not isinstance(dims, jax.lax.RaggedDotDimensionNumbers):
        raise TypeError(f"ragged_dot_dimension_numbers must be a jax.lax.RaggedDotDimensionNumbers, got {shown(dims)}.")
    sizes = group_sizes.shape
    if group_offset is not None:
        if not dims.rhs_group_dimensions:
            raise NotImplementedError(
                "ragged_dot_general supports group_offset only where rhs has a group dimension: nothing else tells how "
                f"many groups to compute. Got {dims}."
            )
        # There may be more sizes than groups.
        sizes = (*sizes[:-1], *(rhs.shape[i] for i in dims.rhs_group_dimensions if i in range(rhs.ndim)))
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (lhs.shape, rhs.shape)]
    shapes.append(jax.ShapeDtypeStruct(sizes, jnp.int32))
    # Only the shapes are checked: on a mesh, JAX would ask for out_sharding.
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
        jax.eval_shape(functools.partial(_JAX_RAGGED_DOT_GENERAL, ragged_dot_dimension_numbers=dims), *shapes)


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
            `quantize_kernel`. At most one operand is float8_e5m2.
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
        inputs.check_scaled(operand)
    product = _product(lhs.layout, rhs.layout)
    _check_operands(lhs, rhs, product)
    dtype = canonical_dtype("preferred_element_type", preferred_element_type)
    num_groups = lhs.layout.num_groups
    groups = inputs.canonical_groups(group_sizes, None, "lhs", num_groups, capacity=lhs.layout.tokens)
    spec = GemmSpec(product, num_groups, dtype)
    if accumulator is not None:
        accumulator = as_array("accumulator", accumulator)
        if product != "wgrad":
            raise ValueError("accumulator is for the product of two columnwise arrays of tokens.")
        shape = (num_groups, lhs.layout.features, rhs.layout.features)
        if accumulator.shape != shape or accumulator.dtype != dtype:
            raise ValueError(
                f"accumulator must be like the result, {dtype.name} {shape}, got {accumulator.dtype.name} "
                f"{accumulator.shape}."
            )
    return multiply(lhs, rhs, groups, spec, accumulator)


def _product(lhs: QuantizedLayout, rhs: QuantizedLayout) -> Product:
    """Returns the product whose operands have these orientations."""
    if lhs.stack_rows is None:
        if rhs.stack_rows is not None and not lhs.columnwise:
            return "fprop" if rhs.columnwise else "dgrad"
        if rhs.stack_rows is None and lhs.columnwise and rhs.columnwise:
            return "wgrad"
    rule = "The operands must be rowwise tokens and a stack, or two columnwise arrays of tokens"
    raise ValueError(f"{rule}, got lhs {lhs} and rhs {rhs}.")


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
    # Tokens of blocks of 128 elements are multiplied by kernels of blocks of 128 x 128.
    by_kernels = a.mode == ScalingMode.BLOCK_1D and product != "wgrad"
    if b.mode != (ScalingMode.BLOCK_2D if by_kernels else a.mode) or a.mode == ScalingMode.BLOCK_2D:
        raise ValueError(f"This product has no operands of {a.mode} and {b.mode}.")
    if lhs.dtype == rhs.dtype == jnp.float8_e5m2:
        raise TypeError("Of lhs and rhs, only one may be float8_e5m2.")
    for name, operand in (("lhs", lhs), ("rhs", rhs)):
        inputs.check_fp8_features(name, operand.shape, operand.layout.features, "features")
