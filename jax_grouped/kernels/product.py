"""Grouped products: the three of a layer, of operands of any type; of unquantized ones, differentiable."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from jax_grouped.core.config import config
from jax_grouped.core.groups import FEATURE_ALIGNMENT, Groups, clamp_offset, round_up
from jax_grouped.core.values import added_axes, promoted_type, sum_dtype, vary_alike, varying_axes
from jax_grouped.fp8.arrays import ScaledArray
from jax_grouped.fp8.layout import QuantizedLayout, pad_to
from jax_grouped.fp8.recipes import ScalingMode
from jax_grouped.kernels import primitive
from jax_grouped.kernels.partition import GROUP_DIMENSIONS, Operation, Result, Splits, apply, own_groups
from jax_grouped.kernels.primitive import bind, define, group_table_size, in_whole_batch
from jax_grouped.kernels.quantization import (
    MODES,
    QuantizeSpec,
    dequantize_cuda,
    dequantize_xla,
    quantize_cuda,
    quantize_permuted_cuda,
    quantize_permuted_xla,
    quantize_xla,
)
from jax_grouped.kernels.rows import activate, permute_cuda, permute_rows, permute_xla, row_tokens
from jax_grouped.kernels.tiles import multiply_tiles

Product = Literal["fprop", "dgrad", "wgrad"]
#: Types of narrow kernels, whose numbers bfloat16 and float16 hold exactly.
NARROW_TYPES = tuple(
    jnp.dtype(dtype) for dtype in (jnp.int4, jnp.uint4, jnp.int8, jnp.uint8, jnp.float8_e4m3fn, jnp.float8_e5m2)
)
#: cuBLASLt's own recommendation for Hopper.
WORKSPACE_BYTES = 32 * 1024 * 1024
#: Most groups of a product that gathers its rows, of all batch elements: `kMostGatheredGroups` in csrc.
MAX_GATHERED_GROUPS = 65536
#: Most features, besides those of the gathered rows, with which a product that gathers takes less time than a copy and
#: cuBLASLt's product (measured on an H200 with the layers of `benchmarks/shapes.toml`).
_MOST_GATHERED_FEATURES, _MOST_GATHERED_WGRAD_FEATURES = 1792, 1024
#: Most features of a product of gathered tokens with SwiGLU with which one kernel takes less time than the steps apart
#: (measured on an H200, as above).
_MOST_SWIGLU_FEATURES = 2048
#: Limits of FP8 products, measured likewise: most features of a result whose tokens are gathered, most input features
#: of a product with SwiGLU, and for both the least average number of tokens per group.
_MOST_GATHERED_FP8_FEATURES, _MOST_SWIGLU_DEPTH, _LEAST_FUSED_TOKENS = 2048, 4096, 256
#: Most bytes to which the groups of a narrow kernel are converted at once, unless a single one is larger.
_CONVERTED_BYTES = 2**25
#: Whether XLA computes a product a second time where a scan keeps it and something else reads it, if no barrier follows
#: (openxla/xla#45799).
_REPEATS_KEPT_PRODUCTS = (0, 11) <= jax.__version_info__ < (0, 12)
#: Values of the enumerations in `csrc/`.
_PRODUCTS = get_args(Product)
_GATHERED = (None, "a", "b")
#: Dimensions of the operands and results of products: t tokens, e kernels, k and n their features.
_OPERANDS = {"fprop": ("t k", "e k n"), "dgrad": ("t n", "e k n"), "wgrad": ("t k", "t n")}
#: Results are summed over `e` too: a device's part is zero in the rows of other devices' groups.
RESULTS = {
    "fprop": Result("t n", over="k e"),
    "dgrad": Result("t k", over="n e"),
    "wgrad": Result("e k n", over="t"),
}


@dataclasses.dataclass(frozen=True)
class GemmSpec:
    """The static part of a grouped product `(a, b, group_sizes, group_offset, *scales, *more) -> out`.

    | product | a           | b                  | out               |
    |---------|-------------|--------------------|-------------------|
    | `fprop` | x `[T,K]`   | kernel `[G,K,N]`   | y `[T,N]`         |
    | `dgrad` | dy `[T,N]`  | kernel `[G,K,N]`   | dx `[T,K]`        |
    | `wgrad` | x `[T,K]`   | dy `[T,N]`         | dkernel `[G,K,N]` |

    With quantized operands, `scales` are those of a and of b. Both operands are contiguous along the contracted axis,
    as Hopper's FP8 matmul requires: `fprop` reads x rowwise and the kernel columnwise, `dgrad` reads dy and the kernel
    rowwise, `wgrad` reads x and dy columnwise. Tokens and kernels have the modes `BLOCK_1D` and `BLOCK_2D`, or both
    `TENSOR`, or both `MX`.

    Without scales, a kernel may be narrow: it has one of the `NARROW_TYPES` beside tokens of another type. Its numbers
    are then converted to that type a few groups at a time.

    `more` is an accumulator, or the `order` and `inverse` of a permutation, or nothing. As an operation, only `wgrad`
    takes an accumulator: an array like the result, to which the product is added. With a permutation, one unquantized
    operand is given as the tokens of which the permutation makes its rows, as `permute_rows` does. With a quantization
    too, the operation quantizes the rows of a, and `scales` are those of b alone.

    Attributes:
        product: which of the three.
        num_groups: `G`, the number of local kernels; `group_sizes` may describe more groups.
        out_dtype: type of the result.
        precision: applies to float32 operands; see `jax_grouped.ragged_dot`.
        a, b: layouts of the data and scales of quantized operands; None for unquantized operands.
        gathered: the operand that is given as tokens: a, with `wgrad` a or b; None without a permutation.
        quantization: how the gathered rows of a are quantized, rowwise and in blocks; None if they are not.
        expected_tokens: number of tokens in groups by which algorithms are chosen; 0 for all `T`.
        zero_other_rows: whether rows of no group are zero in the result of `fprop` and `dgrad`, which costs their
            writes. Otherwise they hold anything, and the permutation must have a pair for each row of a group.
        batch_invariant: the setting of this name, for `fprop` and `dgrad`.
    """

    product: Product
    num_groups: int
    out_dtype: np.dtype
    precision: jax.lax.Precision = jax.lax.Precision.DEFAULT
    a: QuantizedLayout | None = None
    b: QuantizedLayout | None = None
    gathered: Literal["a", "b"] | None = None
    quantization: QuantizeSpec | None = None
    expected_tokens: int = 0
    zero_other_rows: bool = True
    batch_invariant: bool = dataclasses.field(default_factory=functools.partial(getattr, config, "batch_invariant"))

    @property
    def weight_operands(self) -> tuple[int, ...]:
        """Positions of the operands that are weights: b, and its scales."""
        if self.product == "wgrad":
            return ()
        return (1,) if self.a is None else (1, 5) if self.quantization is None else (1, 4)


def product_result(a: Any, b: Any, *more: Any, spec: GemmSpec, batch: int = 1) -> jax.ShapeDtypeStruct:
    """Returns shape and type of the result for a whole batch; `more[2]` is `order` if unquantized rows are gathered."""
    a, b = a.shape, b.shape
    if spec.gathered == "a" and spec.a is None:
        a = (*more[2].shape, a[1])
    if spec.a is not None and spec.b is not None:
        a, rows = (batch * spec.a.tokens, spec.a.features), spec.b.stack_rows
        b = (spec.b.tokens, spec.b.features) if rows is None else (0, rows, spec.b.features)
    match spec.product:
        case "fprop":
            shape: tuple[int, ...] = (a[0], b[2])
        case "dgrad":
            shape = (a[0], b[1])
        case "wgrad":
            shape = (batch * spec.num_groups, a[1], b[1])
    return jax.ShapeDtypeStruct(shape, spec.out_dtype)


class Gathered(NamedTuple):
    """Rows of tokens as an operand: `permute_rows(x, order, inverse)`, which the product itself gathers if it can."""

    x: jax.Array
    order: jax.Array
    inverse: jax.Array

    @property
    def dtype(self) -> np.dtype:
        """Type of the rows."""
        return self.x.dtype

    def astype(self, dtype: DTypeLike) -> "Gathered":
        """Returns the rows in another type."""
        return self._replace(x=self.x.astype(dtype))

    def copied_unless_fast(self, product: Product, features: int, *, zero_tail: bool) -> "Gathered | jax.Array":
        """Returns the rows, copied if the product, with this many more features, would take longer to gather them."""
        return self if _gathers_fast(product, features) else permute_rows(*self, zero_tail)


class RowsToQuantize(NamedTuple):
    """Rows of tokens as operand a of a quantized product, which quantizes them, or each token once if it gathers.

    A product that gathers reads tokens that are FP8 already, with the scales of a stack as `x_scale`, as they are;
    others quantize the rows again.
    """

    rows: Gathered
    quantization: QuantizeSpec
    x_scale: jax.Array | None = None


#: Operand of a product. With a recipe, a `ScaledArray`, or `RowsToQuantize` for a. Without, a plain array, or
#: `Gathered` rows for a or, in wgrad, b.
Operand = ScaledArray | RowsToQuantize | jax.Array | Gathered


def multiply(
    a: Operand,
    b: Operand,
    groups: Groups,
    spec: GemmSpec,
    accumulator: jax.Array | None = None,
    out_spec: PartitionSpec | None = None,
) -> jax.Array:
    """Returns the product that `spec` names, added to the accumulator if there is one, an array like the result.

    Unquantized operands are multiplied in the smallest type that holds both, or beside a kernel of one of the
    `NARROW_TYPES` in that of the tokens, and the product is differentiable any number of times. Quantized products and
    products with an accumulator have no derivative here. Over mesh axes of type `Explicit`, the type of a plain product
    is sharded as `out_spec` says. Inside `jax.shard_map`, operands vary alike, but a kernel may vary over fewer axes.
    """
    if isinstance(b, ScaledArray):
        a, spec, scales = _unpack_quantized(a, b, spec)
        return _multiply(a, b.data, groups, spec, None, scales, accumulator)
    assert not isinstance(a, ScaledArray | RowsToQuantize)
    assert not isinstance(b, RowsToQuantize)
    if a.dtype != b.dtype and b.dtype not in NARROW_TYPES:
        dtype = promoted_type(a.dtype, b.dtype)
        a, b = a.astype(dtype), b.astype(dtype)
    if accumulator is not None:
        return _multiply(_rows(a), _rows(b), groups, spec, out_spec, accumulator=accumulator)
    gathered: Literal["a", "b"] | None = None
    if isinstance(a, Gathered) or isinstance(b, Gathered):
        gathered = "a" if isinstance(a, Gathered) else "b"
    return _differentiable(a, b, groups, dataclasses.replace(spec, gathered=gathered), out_spec)


def _unpack_quantized(
    a: Operand, b: ScaledArray, spec: GemmSpec
) -> tuple[jax.Array | Gathered, GemmSpec, tuple[jax.Array, ...]]:
    """Returns a, the spec and the scales of a product of quantized operands, as the operation takes them."""
    if isinstance(a, RowsToQuantize):
        quantization = a.quantization
        scales: tuple[jax.Array, ...] = (b.scale_inv,)
        if a.x_scale is not None:
            quantization, scales = dataclasses.replace(quantization, given=("x_scale",)), (*scales, a.x_scale)
        layout = quantization.layout(a.rows.x.shape, columnwise=False)
        spec = dataclasses.replace(spec, a=layout, b=b.layout, gathered="a", quantization=quantization)
        return a.rows, spec, scales
    assert isinstance(a, ScaledArray)
    return a.data, dataclasses.replace(spec, a=a.layout, b=b.layout), (a.scale_inv, b.scale_inv)


def _rows(operand: jax.Array | Gathered) -> jax.Array:
    return permute_rows(*operand) if isinstance(operand, Gathered) else operand


def gradient_type(dtype: np.dtype, dy: np.dtype) -> np.dtype:
    """Returns the type of products with a gradient: that of operands, or float32 if float16 lacks its range."""
    return jnp.dtype(jnp.float32) if dtype == jnp.float16 and dy != jnp.float16 else dtype


def _multiply(
    a: jax.Array | Gathered,
    b: jax.Array | Gathered,
    groups: Groups,
    spec: GemmSpec,
    out_spec: PartitionSpec | None = None,
    scales: Sequence[jax.Array] = (),
    accumulator: jax.Array | None = None,
) -> jax.Array:
    permutation = [array for operand in (a, b) if isinstance(operand, Gathered) for array in operand[1:]]
    a, b = [operand.x if isinstance(operand, Gathered) else operand for operand in (a, b)]
    accumulators = () if accumulator is None else (accumulator,)
    operands = vary_alike(a, b, *groups, *scales, *permutation, *accumulators)
    shapes = [array.shape for array in (a, b, groups.sizes, *permutation)]
    if 0 in (spec.num_groups, *itertools.chain(*shapes)):
        out = product_result(a, b, *groups, *permutation, spec=spec)
        nothing = jnp.zeros(out.shape, out.dtype) if accumulator is None else operands[-1]
        return vary_alike(nothing, operands[0])[0]
    if spec.a is not None or spec.gathered is not None:
        return bind(GEMM, *operands, spec=spec)[0]
    result = RESULTS[spec.product]
    operation = Operation(
        _multiply_part,
        spec,
        operands=(*_OPERANDS[spec.product], *GROUP_DIMENSIONS, *["e k n"] * len(accumulators)),
        results=(result,),
        # Dimensions of the result go before those that it is summed over, and tokens before all.
        splittable=tuple(dict.fromkeys(["t", *result.dimensions.split(), "e", "k", "n"])),
        added=(4, 0) if accumulators else None,
    )
    return apply(operation, *operands, like=[out_spec])[0]


#: `_multiply` without scales and an accumulator. Its rules get the defaults of these too, and return None for them.
_differentiable: jax.custom_vjp[jax.Array] = jax.custom_vjp(_multiply, nondiff_argnums=(3, 4))


def _multiply_forward(
    a: Any, b: Any, groups: Groups, spec: GemmSpec, out_spec: PartitionSpec | None, *_: Any
) -> tuple[jax.Array, Any]:
    return _differentiable(a, b, groups, spec, out_spec), (a, b, groups)


def _multiply_backward(spec: GemmSpec, _: PartitionSpec | None, residuals: Any, gradient: jax.Array) -> tuple[Any, ...]:
    # The three products are each other's derivatives, so one rule serves all. Gradients have the types of `a` and `b`.
    a, b, groups = residuals
    if spec.gathered is not None:
        spec = dataclasses.replace(spec, gathered=None)

        def multiply_rows(a: Any, b: Any) -> Any:
            return _differentiable(_rows(a), _rows(b), groups, spec, None)

        _, pull_back = jax.vjp(multiply_rows, a, b)
        return (*pull_back(gradient), None, None, None)
    like_a, like_b = (jax.typeof(operand).sharding.spec for operand in (a, b))
    out_dtype = a.dtype
    b_dtype, dtype, b_axes = b.dtype, gradient_type(out_dtype, gradient.dtype), varying_axes(b)
    a, b, g = (array if array.dtype in NARROW_TYPES else array.astype(dtype) for array in (a, b, gradient))

    def product(
        name: Product, lhs: jax.Array, rhs: jax.Array, like: PartitionSpec, out_dtype: np.dtype = out_dtype
    ) -> jax.Array:
        return _differentiable(lhs, rhs, groups, GemmSpec(name, spec.num_groups, out_dtype, spec.precision), like)

    def dkernel(x: jax.Array, dy: jax.Array) -> Any:
        if jnp.issubdtype(b_dtype, jnp.integer):
            return np.zeros(b.shape, jax.dtypes.float0)
        if axes := added_axes(b_axes, x, dy, groups):
            own = product("wgrad", x, dy, like_b, sum_dtype(out_dtype))
            return jax.lax.psum(own, axes).astype(b_dtype)
        return product("wgrad", x, dy, like_b).astype(b_dtype)

    match spec.product:
        case "fprop":
            da, db = product("dgrad", g, b, like_a), dkernel(a, g)
        case "dgrad":
            da, db = product("fprop", g, b, like_a), dkernel(g, a)
        case "wgrad":
            da, db = product("dgrad", b, g, like_a), product("fprop", a, g, like_b)
    return da, db, None, None, None


_differentiable.defvjp(_multiply_forward, _multiply_backward)


def _multiply_part(
    spec: GemmSpec, splits: Splits, a: jax.Array, b: jax.Array, sizes: jax.Array, offset: jax.Array, *more: jax.Array
) -> list[jax.Array]:
    """Returns a device's part of a product of plain arrays."""
    spec = dataclasses.replace(
        spec,
        num_groups=spec.num_groups // splits["e"].parts,
        out_dtype=part_dtype(spec.out_dtype, splits) if spec.product == "wgrad" else spec.out_dtype,
        # Rows of other devices' groups are added up with theirs, so they must be zero.
        zero_other_rows=spec.zero_other_rows or splits["e"].parts > 1,
    )
    groups = own_groups(Groups(sizes, offset), splits, rows=a.shape[0], num_groups=spec.num_groups)
    return bind(GEMM, a, b, *groups, *more, spec=spec)


def part_dtype(dtype: np.dtype, splits: Splits) -> np.dtype:
    """Returns the type of a device's part of the gradient of kernels, which has the type `dtype` once it is summed."""
    return sum_dtype(dtype) if splits["t"].parts > 1 else dtype


def multiply_xla(
    a: jax.Array,
    b: jax.Array,
    group_sizes: jax.Array,
    group_offset: jax.Array,
    *more: jax.Array,
    spec: GemmSpec,
) -> jax.Array:
    """Returns the product that `spec` names. With quantized operands, only the accumulation in float32 rounds."""

    def numbers(data: jax.Array, scale_inv: jax.Array, layout: QuantizedLayout) -> jax.Array:
        if layout.stack_rows is None:
            return dequantize_xla(data, scale_inv, group_sizes, group_offset, layout=layout, out_dtype=jnp.float32)
        tokens = dequantize_xla(data, scale_inv, layout.stack_sizes(), layout=layout, out_dtype=jnp.float32)
        return tokens.reshape(layout.num_groups, layout.stack_rows, layout.features)

    if spec.quantization is not None:
        (b_scale, *x_scale), permutation = more[:-2], more[-2:]
        groups = group_sizes, group_offset
        a, *a_scale = quantize_permuted_xla(a, *permutation, *groups, *x_scale, spec=spec.quantization)
        spec, more = dataclasses.replace(spec, gathered=None, quantization=None), (*a_scale, b_scale)
    if spec.gathered is not None:
        a, b = (permute_xla(x, *more) if name == spec.gathered else x for name, x in (("a", a), ("b", b)))
        spec, more = dataclasses.replace(spec, gathered=None), ()
    elif spec.a is not None and spec.b is not None:
        a, b = numbers(a, more[0], spec.a), numbers(b, more[1], spec.b)
        more = more[2:]
        spec = dataclasses.replace(spec, a=None, b=None, precision=jax.lax.Precision.HIGHEST)
    return multiply_tiles(
        a,
        b,
        group_sizes,
        group_offset,
        *more,
        product=spec.product,
        out=product_result(a, b, spec=spec),
        num_groups=spec.num_groups,
        precision=spec.precision,
        zero_other_rows=spec.zero_other_rows,
        batch_invariant=spec.batch_invariant,
    )


def multiply_cuda(
    a: jax.Array,
    b: jax.Array,
    group_sizes: jax.Array,
    group_offset: jax.Array,
    *more: jax.Array,
    spec: GemmSpec,
    batch: int,
) -> jax.Array:
    """Returns the product that `spec` names, accumulated in float32.

    What cuBLASLt and the library's kernels cannot read, the helpers below bring into forms that they can: they call
    this function again.
    """
    if spec.quantization is not None:
        groups = group_sizes, group_offset
        a, more, spec = _quantize_rows(a, b, *more, groups=groups, spec=spec, batch=batch)
    elif spec.gathered is not None:
        if not _gathers(a, b, spec, batch):
            options: dict[str, Any] = dict(zero_tail=spec.zero_other_rows, batch=batch)
            a = permute_cuda(a, *more, **options) if spec.gathered == "a" else a
            b = permute_cuda(b, *more, **options) if spec.gathered == "b" else b
            spec = dataclasses.replace(spec, gathered=None)
            return multiply_cuda(a, b, group_sizes, group_offset, spec=spec, batch=batch)
        tokens = a if spec.gathered == "a" else b
        more = (in_whole_batch(row_tokens(*more), tokens.shape[0] // batch, batch),)
    if spec.a is None and b.dtype != a.dtype:
        assert not more
        return _multiply_narrow(a, b, group_sizes, group_offset, spec=spec, batch=batch)
    operands = (a, b, group_sizes, group_offset, *more)
    if spec.a is None:
        if not _can_be_read(a, b, spec):
            return _multiply_unreadable(*operands, spec=spec, batch=batch)
    else:
        if spec.a.mode == ScalingMode.MX and not primitive.has_mx_products():
            return _in_bfloat16(*operands, spec=spec, batch=batch)
        if spec.a.mode == ScalingMode.BLOCK_1D:
            primitive.require_block_scaling()
    fixed = spec.batch_invariant and spec.product != "wgrad"
    if fixed and primitive.cuda_devices() and not primitive.has_gathering_products():
        raise NotImplementedError("batch_invariant needs GPUs of compute capability 9.0 (Hopper).")
    if fixed and spec.a is None and spec.gathered is None:
        if more:
            raise NotImplementedError("With batch_invariant, x and kernel must be bfloat16 or float16.")
        # Products that gather their rows have one order of sums, whatever their size.
        spec, operands = dataclasses.replace(spec, gathered="a"), (*operands, jnp.arange(a.shape[0], dtype=jnp.int32))
    out = product_result(*operands, spec=spec, batch=batch)
    accumulate = spec.gathered is None and len(more) > (0 if spec.a is None else 2)
    product, *_ = _call(operands, [out], spec, batch, accumulate=accumulate, batch_invariant=fixed)
    # A kernel's gradient has no other use, and is best written where the scan keeps it.
    barrier = _REPEATS_KEPT_PRODUCTS and spec.product != "wgrad"
    return jax.lax.optimization_barrier(product) if barrier else product


def _call(
    operands: Sequence[jax.Array],
    results: Sequence[jax.ShapeDtypeStruct],
    spec: GemmSpec,
    batch: int,
    *,
    accumulate: bool = False,
    batch_invariant: bool = False,
    swiglu: "SwiGluSpec | None" = None,
) -> Sequence[jax.Array]:
    """Returns these results of the custom call; those after the product are of `swiglu`."""
    scratch = jax.ShapeDtypeStruct((scratch_bytes(batch, spec.num_groups),), jnp.uint8)
    workspace = jax.ShapeDtypeStruct((WORKSPACE_BYTES,), jnp.uint8)
    weights = (results[0] if spec.product == "wgrad" else operands[1]).shape[0]
    quantization = None if swiglu is None else swiglu.quantization
    return jax.ffi.ffi_call(
        "jax_grouped_gemm",
        [*results, scratch, workspace],
        input_output_aliases={len(operands) - 1: 0} if accumulate else None,
    )(
        *operands,
        product=np.int32(_PRODUCTS.index(spec.product)),
        scaled=spec.a is not None,
        a_mode=np.int32(MODES.index(spec.a.mode) if spec.a else 0),
        b_mode=np.int32(MODES.index(spec.b.mode) if spec.b else 0),
        # The shape of columnwise tokens does not give the number of tokens.
        tokens=np.int64(spec.a.tokens if spec.a else 0),
        expected_tokens=np.int64(spec.expected_tokens),
        weight_batch=np.int64(weights // spec.num_groups),
        gathered=np.int32(_GATHERED.index(spec.gathered)),
        accumulate=accumulate,
        zero_other_rows=spec.zero_other_rows,
        batch_invariant=batch_invariant,
        swiglu=swiglu is not None,
        keeps_product=swiglu is None or swiglu.keeps_product,
        pow2_scales=quantization is not None and quantization.pow2_scales,
        amax_epsilon=np.float32(0 if quantization is None else quantization.amax_epsilon),
    )[: len(results)]


def _can_be_read(a: jax.Array, b: jax.Array, spec: GemmSpec) -> bool:
    """Tells whether cuBLASLt can read these operands and write this result without conversion."""
    aligned = {size % FEATURE_ALIGNMENT for size in (*a.shape[1:], *b.shape[1:])} <= {0}
    return aligned and a.dtype != jnp.float32 and spec.out_dtype in (a.dtype, jnp.float32)


def _gathers_fast(product: Product, features: int) -> bool:
    """Tells whether a product of 16-bit numbers that gathers rows takes less time than one after a copy of them."""
    return features <= (_MOST_GATHERED_WGRAD_FEATURES if product == "wgrad" else _MOST_GATHERED_FEATURES)


def _gathers(
    a: jax.Array, b: jax.Array, spec: GemmSpec, batch: int, *, most_features: int = _MOST_GATHERED_FEATURES
) -> bool:
    """Tells whether a kernel gathers the rows of an operand: it can, and copying them first would take longer."""
    few_groups = isinstance(batch, int) and batch * spec.num_groups <= MAX_GATHERED_GROUPS
    if not few_groups or not _can_be_read(a, b, spec) or not primitive.has_gathering_products():
        return False
    if spec.product == "wgrad":
        return _gathers_fast("wgrad", (b if spec.gathered == "a" else a).shape[1])
    return spec.batch_invariant or b.shape[2 if spec.product == "fprop" else 1] <= most_features


def gathers_fp8_fast(features: int, tokens: int, num_groups: int) -> bool:
    """Tells whether an FP8 product that gathers tokens takes less time than one of rows that are quantized before.

    `features` are those of the result, and `tokens` the rows of all groups.
    """
    return features <= _MOST_GATHERED_FP8_FEATURES and tokens >= _LEAST_FUSED_TOKENS * num_groups


def _can_fuse_fp8(b: jax.Array, spec: GemmSpec, batch: int) -> bool:
    """Tells whether a kernel can gather FP8 tokens, or compute SwiGLU of their product."""
    if not isinstance(batch, int) or not primitive.has_gathering_products():
        return False
    # The kernel's workspace has room for these groups, and it counts rows of all weights with 32 bits.
    return batch * spec.num_groups <= MAX_GATHERED_GROUPS and b.shape[0] * b.shape[1] < 2**31


def _quantize_rows(
    x: jax.Array,
    b: jax.Array,
    b_scale: jax.Array,
    *more: jax.Array,
    groups: Sequence[jax.Array],
    spec: GemmSpec,
    batch: int,
) -> tuple[jax.Array, tuple[jax.Array, ...], GemmSpec]:
    """Returns operand a, the operands after the groups, and the spec of a product whose rows of a are quantized here.

    A product that gathers rows reads tokens that are quantized once, as the rows of a single group. Its numbers are the
    same, because blocks lie within a token.
    """
    *x_scale, order, inverse = more
    quantization, spec = spec.quantization, dataclasses.replace(spec, quantization=None)
    assert quantization is not None
    if not _can_fuse_fp8(b, spec, batch):
        data, scale, *_ = quantize_permuted_cuda(x, order, inverse, *groups, *x_scale, spec=quantization, batch=batch)
        return data, (scale, b_scale), dataclasses.replace(spec, gathered=None)
    tokens = x.shape[0]
    once = dataclasses.replace(quantization, num_groups=1, gathered_rows=None, finds_amax=False)
    if x_scale:
        # [groups, blocks, rows of a group up to a multiple of 4] -> [blocks, tokens up to a multiple of 4]
        scales = jnp.moveaxis(x_scale[0][:, :, : tokens // x_scale[0].shape[0]], 0, 1)
        data, scale = x, pad_to(scales.reshape(-1, tokens), (scales.shape[0], round_up(tokens, 4))).reshape(-1)
    else:
        one_group = jnp.full((1,), tokens, jnp.int32), jnp.zeros((1,), jnp.int32)
        data, scale, _ = quantize_cuda(x, *one_group, spec=once, batch=1)
    row_indices = in_whole_batch(row_tokens(order, inverse), tokens // batch, batch)
    return data, (scale, b_scale, row_indices), spec


def _multiply_unreadable(
    a: jax.Array,
    b: jax.Array,
    group_sizes: jax.Array,
    group_offset: jax.Array,
    accumulator: jax.Array | None = None,
    *,
    spec: GemmSpec,
    batch: int,
) -> jax.Array:
    """Returns a product of operands that cuBLASLt cannot read, through products of operands that it can read."""
    shape = product_result(a, b, spec=spec, batch=batch).shape
    a = _pad_features(a, (1,))
    b = _pad_features(b, (1,) if b.ndim == 2 else (1, 2))
    inner = dataclasses.replace(spec, out_dtype=_accumulator_dtype(a.dtype, spec.out_dtype))
    if accumulator is not None:
        # The accumulator is updated in place unless cuBLASLt cannot write its type or its number of features.
        accumulator = _pad_features(accumulator, (1, 2)).astype(inner.out_dtype)
    out = accumulator
    for a_part, b_part in _factors(a, b, spec.precision) if a.dtype == jnp.float32 else [(a, b)]:
        onto = () if out is None else (out,)
        out = multiply_cuda(a_part, b_part, group_sizes, group_offset, *onto, spec=inner, batch=batch)
    assert out is not None
    return out.astype(spec.out_dtype)[tuple(slice(size) for size in shape)]


def _pad_features(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """Zero-fills feature axes up to `FEATURE_ALIGNMENT`; rows must start on 16-byte boundaries."""
    missing = [
        round_up(x.shape[axis], FEATURE_ALIGNMENT) - x.shape[axis] if axis in axes else 0 for axis in range(x.ndim)
    ]
    return jnp.pad(x, [(0, features) for features in missing]) if any(missing) else x


def _accumulator_dtype(operand: np.dtype, out: DTypeLike) -> np.dtype:
    """Returns the type in which products of operands of a type are added up: the result's if cuBLASLt can write it."""
    writable = (jnp.float32,) if operand == jnp.float32 else (operand, jnp.float32)
    return jnp.dtype(out if out in writable else jnp.float32)


def _multiply_narrow(
    a: jax.Array, b: jax.Array, group_sizes: jax.Array, group_offset: jax.Array, *, spec: GemmSpec, batch: int
) -> jax.Array:
    """Returns a product of a narrow kernel, from products of a few groups each, which are converted in turn.

    Each row belongs to one group, so a product that is added to the rows of its groups rounds nothing twice.
    """
    groups, (_, *matrix) = spec.num_groups, b.shape
    out = product_result(a, b, spec=spec, batch=batch)
    a = _pad_features(a, (1,))
    # Parts of float32 tokens, the smallest first; bfloat16 holds all of the kernel.
    factors = _bf16_parts(a, _parts(spec.precision))[::-1] if a.dtype == jnp.float32 else [a]
    total_dtype = _accumulator_dtype(a.dtype, out.dtype)
    b = b.reshape(-1, groups, *matrix)
    at_once: Any = 1
    if all(isinstance(size, int) for size in b.shape):  # In an export, sizes may be symbolic.
        at_once = min(groups, max(1, _CONVERTED_BYTES // (b.size // groups * factors[0].dtype.itemsize)))
    group_offset = clamp_offset(group_offset, groups, group_sizes.shape[0])

    def add(first: Any, count: int, total: jax.Array) -> jax.Array:
        few = jax.lax.dynamic_slice_in_dim(b, first, count, axis=1).reshape(-1, *matrix)
        few = _pad_features(few.astype(factors[0].dtype), (1, 2))
        few_spec = dataclasses.replace(spec, num_groups=count, out_dtype=total_dtype)
        for factor in factors:
            total = multiply_cuda(factor, few, group_sizes, group_offset + first, total, spec=few_spec, batch=batch)
        return total

    total = _pad_features(jnp.zeros(out.shape, total_dtype), (1,))
    total = jax.lax.fori_loop(0, groups // at_once, lambda i, total: add(i * at_once, at_once, total), total)
    if rest := groups % at_once:
        total = add(groups - rest, rest, total)
    return total.astype(out.dtype)[:, : out.shape[1]]


def _factors(a: jax.Array, b: jax.Array, precision: jax.lax.Precision) -> list[tuple[jax.Array, jax.Array]]:
    """Returns the pairs of bfloat16 factors whose products sum to a float32 product, the smallest first."""
    # Only the products of parts `i` and `j` with `i + j` below the number of parts matter.
    count = _parts(precision)
    a_parts, b_parts = _bf16_parts(a, count), _bf16_parts(b, count)
    pairs = sorted(((i, j) for i in range(count) for j in range(count - i)), key=sum, reverse=True)
    return [(a_parts[i], b_parts[j]) for i, j in pairs]


def _parts(precision: jax.lax.Precision) -> int:
    """Returns the number of bfloat16 parts that float32 is split into."""
    return 3 if precision == jax.lax.Precision.HIGHEST else 2


def _bf16_parts(x: jax.Array, count: int) -> list[jax.Array]:
    """Splits float32 into bfloat16 parts, largest first, whose sum is `x` to about 8 bits per part."""
    parts = []
    largest = float(jnp.finfo(jnp.bfloat16).max)
    for _ in range(count):
        # XLA may drop a round trip through bfloat16 as excess precision, but never a reduce_precision.
        part = jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
        # The largest float32 values would round to infinity. Clip them; the next part takes the remainder.
        part = jnp.where(jnp.isfinite(x), jnp.clip(part, -largest, largest), part)
        parts.append(part.astype(jnp.bfloat16))
        # Infinity minus infinity is NaN, which would hide the overflow in the parts that follow.
        x = jnp.where(jnp.isfinite(part), x - part, 0.0)
    return parts


def _in_bfloat16(
    a: jax.Array,
    b: jax.Array,
    group_sizes: jax.Array,
    group_offset: jax.Array,
    a_scale: jax.Array,
    b_scale: jax.Array,
    *accumulator: jax.Array,
    spec: GemmSpec,
    batch: int,
) -> jax.Array:
    """Returns the same product in bfloat16, for GPUs without matmuls of this format.

    bfloat16 represents all numbers of the format exactly.
    """

    def numbers(data: jax.Array, scale_inv: jax.Array, layout: QuantizedLayout | None, count: int) -> jax.Array:
        assert layout is not None
        options = dict(layout=layout, out_dtype=jnp.bfloat16, batch=count)
        if layout.stack_rows is None:
            return dequantize_cuda(data, scale_inv, group_sizes, group_offset, **options)
        tokens = dequantize_cuda(data, scale_inv, layout.stack_sizes(count), **options)
        return tokens.reshape(-1, layout.stack_rows, layout.features)

    weight_batch = batch if spec.product == "wgrad" else b.shape[0] // spec.num_groups
    a, b = numbers(a, a_scale, spec.a, batch), numbers(b, b_scale, spec.b, weight_batch)
    unscaled = dataclasses.replace(spec, a=None, b=None)
    return _multiply_unreadable(a, b, group_sizes, group_offset, *accumulator, spec=unscaled, batch=batch)


def scratch_bytes(batch: int, num_groups: int) -> int:
    """Returns the bytes of device memory that one grouped product needs beside its workspace (`GemmScratch` in C++)."""
    groups = batch * num_groups
    pointers = 5 * round_up(8 * groups, 16)  # pointers to A, B, D, and the scales of A and B
    sizes = 9 * round_up(4 * groups, 16)
    scalars = 16
    tables = batch * 4 * group_table_size(num_groups)
    return pointers + sizes + scalars + tables


#: `(a, b, group_sizes, group_offset, *scales, *more) -> [out]` with a `GemmSpec`, which defines `more`.
GEMM = define("gemm", product_result, multiply_xla, multiply_cuda, shares_weights=True)


@dataclasses.dataclass(frozen=True)
class SwiGluSpec:
    """`fprop` of gathered tokens or of block-scaled operands, and SwiGLU of its result.

    Rows of no group hold anything in the activation's result.

    Attributes:
        gemm: the product, `[T, 2 F]`.
        quantization: with block-scaled operands, that of the activation's result, `[T, F]`: rowwise, in blocks.
        keeps_product: whether the product is a result too.
    """

    gemm: GemmSpec
    quantization: QuantizeSpec | None = None
    keeps_product: bool = True

    @property
    def weight_operands(self) -> tuple[int, ...]:
        return self.gemm.weight_operands


def _swiglu_results(a: Any, b: Any, *more: Any, spec: SwiGluSpec, batch: int = 1) -> list[jax.ShapeDtypeStruct]:
    product = product_result(a, b, *more, spec=spec.gemm, batch=batch)
    tokens, features = product.shape
    if spec.quantization is None:
        activated = [jax.ShapeDtypeStruct((tokens, features // 2), product.dtype)]
    else:
        quantized = spec.quantization.results((tokens // batch, features))
        activated = [primitive.batched(quantized[name], batch) for name in ("row_data", "row_scale")]
    return [product, *activated] if spec.keeps_product else activated


def _activated(
    product: jax.Array, groups: Sequence[jax.Array], spec: SwiGluSpec, quantize: Callable[..., Sequence[jax.Array]]
) -> tuple[jax.Array, ...]:
    """Returns all results from the product, in steps."""
    results = (product,) if spec.keeps_product else ()
    if spec.quantization is None:
        return *results, activate(product, "swiglu")
    data, scale, _ = quantize(product, *groups, spec=spec.quantization)
    return *results, data, scale


def _swiglu_xla(a: jax.Array, b: jax.Array, *more: jax.Array, spec: SwiGluSpec) -> tuple[jax.Array, ...]:
    return _activated(multiply_xla(a, b, *more, spec=spec.gemm), more[:2], spec, quantize_xla)


def _swiglu_cuda(a: jax.Array, b: jax.Array, *more: jax.Array, spec: SwiGluSpec, batch: int) -> tuple[jax.Array, ...]:
    gemm = spec.gemm
    if gemm.a is None:
        fuses = _gathers(a, b, gemm, batch, most_features=_MOST_SWIGLU_FEATURES)
    else:
        tokens = gemm.expected_tokens or gemm.a.tokens
        is_fast = a.shape[1] <= _MOST_SWIGLU_DEPTH and tokens >= _LEAST_FUSED_TOKENS * gemm.num_groups
        fuses = is_fast and _can_fuse_fp8(b, gemm, batch)
    if not fuses:
        product = multiply_cuda(a, b, *more, spec=gemm, batch=batch)
        return _activated(product, more[:2], spec, functools.partial(quantize_cuda, batch=batch))
    results = _swiglu_results(a, b, *more, spec=dataclasses.replace(spec, keeps_product=True), batch=batch)
    groups, more = more[:2], more[2:]
    if gemm.quantization is not None:
        a, more, gemm = _quantize_rows(a, b, *more, groups=groups, spec=gemm, batch=batch)
    elif gemm.gathered is not None:
        more = (in_whole_batch(row_tokens(*more), a.shape[0] // batch, batch),)
    made = _call((a, b, *groups, *more), results, gemm, batch, swiglu=spec)
    kept = tuple(made if spec.keeps_product else made[1:])
    return jax.lax.optimization_barrier(kept) if _REPEATS_KEPT_PRODUCTS else kept


def _drop_unread(read: Sequence[bool], *inputs_and_equation: Any) -> tuple[list[bool], Any]:
    """Leaves out the product, or all that follows it, if nobody reads it."""
    equation = inputs_and_equation[-1]  # Since JAX 0.12, the flags of live inputs come before it.
    spec, count = equation.params["spec"], len(equation.invars)
    if not any(read):
        return [False] * count, None
    if spec.keeps_product and not read[0]:
        params = equation.params | dict(spec=dataclasses.replace(spec, keeps_product=False))
        equation = equation.replace(outvars=equation.outvars[1:], params=params)
    elif spec.keeps_product and not any(read[1:]):
        params = equation.params | dict(spec=spec.gemm)
        equation = equation.replace(primitive=GEMM, outvars=equation.outvars[:1], params=params)
    return [True] * count, equation


#: `(x, kernel, group_sizes, group_offset, *more) -> [*product, *activated]` with a `SwiGluSpec`; `more` is that of
#: `GEMM`, and `activated` one array, or data and scales.
SWIGLU_GEMM = define(
    "swiglu_gemm", _swiglu_results, _swiglu_xla, _swiglu_cuda, shares_weights=True, dce_rule=_drop_unread
)


def multiply_with_swiglu(
    a: Operand, b: Operand, groups: Groups, spec: SwiGluSpec
) -> tuple[jax.Array | None, Sequence[jax.Array]]:
    """Returns the product, if `spec` keeps it, and SwiGLU of it: an array, or data and scales.

    `b` is quantized and `a` a `ScaledArray` or `RowsToQuantize`, or `a` is `Gathered` and `b` a kernel of its type;
    only the latter is differentiable.
    """
    if isinstance(b, ScaledArray):
        a, gemm, scales = _unpack_quantized(a, b, spec.gemm)
        tokens, *permutation = a if isinstance(a, Gathered) else (a,)
        operands = vary_alike(tokens, b.data, *groups, *scales, *permutation)
        made = bind(SWIGLU_GEMM, *operands, spec=dataclasses.replace(spec, gemm=gemm))
    else:
        gemm = dataclasses.replace(spec.gemm, gathered="a")
        made = _differentiable_swiglu(a, b, groups, dataclasses.replace(spec, gemm=gemm))
    return (made[0], made[1:]) if spec.keeps_product else (None, made)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _differentiable_swiglu(a: Any, b: jax.Array, groups: Groups, spec: SwiGluSpec) -> list[jax.Array]:
    return bind(SWIGLU_GEMM, *vary_alike(a.x, b, *groups, a.order, a.inverse), spec=spec)


def _swiglu_backward(spec: SwiGluSpec, residuals: Any, gradients: Any) -> tuple[Any, ...]:
    a, b, groups = residuals

    def in_steps(a: Any, b: Any) -> list[jax.Array]:
        product = _differentiable(a, b, groups, spec.gemm, None)
        activated = activate(product, "swiglu")
        return [product, activated] if spec.keeps_product else [activated]

    return (*jax.vjp(in_steps, a, b)[1](gradients), None)


_differentiable_swiglu.defvjp(
    lambda a, b, groups, spec: (_differentiable_swiglu(a, b, groups, spec), (a, b, groups)), _swiglu_backward
)
