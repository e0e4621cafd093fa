"""Quantization of rows that it gathers, and of rows that it weights: the bits of rows that were written before."""

import dataclasses
import itertools
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_grouped as jg
from jax_grouped import ScalingMode
from jax_grouped.core.groups import Groups
from jax_grouped.kernels import quantization
from jax_grouped.kernels.activations import Activation, is_gated
from jax_grouped.kernels.quantization import QuantizeSpec
from jax_grouped.ops.quantize import quantize_permuted, quantize_tokens
from tests import oracle, quantize_oracle
from tests.operands import normal
from tests.ops.quantize_cases import ACTIVATIONS, FP8_TYPES, INPUT_TYPES, as_bytes, assert_quantized, some

TOKENS, FEATURES = 90, 144
SIZES = jnp.array([130, 0, 1, 60])
MODES = [ScalingMode.TENSOR, ScalingMode.BLOCK_1D, ScalingMode.MX]


def tokens(dtype: str = "bfloat16") -> jax.Array:
    """Returns tokens with numbers that are not finite in one of them."""
    return normal(0, (TOKENS, FEATURES)).at[7, ::3].set(jnp.inf).astype(dtype)


def row_indices() -> jax.Array:
    """Returns indices of 200 rows, nine of them too many, with repetitions and with some that are outside."""
    indices = np.random.default_rng(0).integers(0, TOKENS, 200)
    indices[[3, 140]] = -1, TOKENS
    indices[[4, 5]] = np.iinfo(np.int32).min, np.iinfo(np.int32).max
    return jnp.asarray(indices, jnp.int32)


def assert_gathered(
    got: jg.GroupedQuantized, x: jax.Array, indices: jax.Array, sizes: jax.Array, mode: ScalingMode, **options: Any
) -> None:
    """Compares with the quantization of rows that were written."""
    exist = (indices >= 0) & (indices < x.shape[0])
    rows = jnp.where(exist[:, None], x[jnp.where(exist, indices, 0)], 0)
    expected = quantize_oracle.quantize(np.asarray(rows.astype(jnp.float32)), np.asarray(sizes), mode, **options)
    assert_quantized(f"{mode},", got, expected)
    if got.dbias is not None:
        np.testing.assert_array_equal(got.dbias, jg.grouped_quantize(rows, sizes, mode, dbias=True).dbias)


@pytest.mark.parametrize("dtype", INPUT_TYPES)
def test_gathered_rows_have_the_bits_of_written_rows(backend: str, dtype: str) -> None:
    x, indices = tokens(dtype), row_indices()
    kinds = [*((mode, None) for mode in MODES), (ScalingMode.TENSOR, 2.0 ** jnp.arange(4))]
    for mode, scale in some(backend, kinds, 3 - [*INPUT_TYPES].index(dtype)):
        options = dict(row_indices=indices, columnwise=True, scale=scale, dbias=True)
        got = jg.grouped_quantize(x, SIZES, mode, **options)

        assert_gathered(got, x, indices, SIZES, mode, scale=None if scale is None else np.asarray(scale))


def test_many_rows_and_many_tokens(backend: str) -> None:
    # On a GPU, more rows than a launch takes, and slabs of one tile of columns and of two, the last of which has one.
    shapes = [(TOKENS, 40_000, FEATURES), (9000, 18_000, 272), (4000, 8000, 272)]
    for count, rows, features in shapes if backend == "cuda" else [(TOKENS, 700, 272)]:
        x = normal(count, (count, features), jnp.bfloat16)
        indices = jax.random.randint(jax.random.key(1), (rows,), 0, count)
        sizes = jnp.array([rows // 2, 0, rows // 2 - 50])
        for mode in some(backend, MODES, 1):
            got = jg.grouped_quantize(x, sizes, mode, row_indices=indices, columnwise=True)

            assert_gathered(got, x, indices, sizes, mode)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_columns_alone_of_gathered_rows(backend: str, dtype: str) -> None:
    # This many groups get the kernel for many rows on a GPU. The last group loses rows.
    x, sizes = tokens(dtype).at[8, 1::5].set(jnp.nan), jnp.array([130, 0, 1, *[0] * 300, 20, 9, 60])
    batch = jnp.stack([row_indices(), row_indices()[::-1]]), jnp.stack([sizes, sizes[::-1]])
    for fp8_type, pow2 in some(backend, itertools.product(FP8_TYPES, (False, True)), 3 * (dtype == "float16")):
        options: dict[str, Any] = dict(dtype=fp8_type, pow2_scales=pow2, amax_epsilon=2.0 if pow2 else 0.0)

        def quantize(indices: jax.Array, sizes: jax.Array, options: Any = options) -> jg.GroupedQuantized:
            forms = dict(row_indices=indices, rowwise=False, columnwise=True)
            return jg.grouped_quantize(x, sizes, ScalingMode.BLOCK_1D, **forms, **options)

        got = jax.jit(jax.vmap(quantize))(*batch)

        for i in range(2):
            one = [operand[i] for operand in batch]
            assert_gathered(jax.tree.map(operator.itemgetter(i), got), x, *one, ScalingMode.BLOCK_1D, **options)


def test_the_largest_values_change_no_bits(backend: str) -> None:
    # Few groups are a single launch on a GPU, whose blocks wait for each other if they find the largest values.
    x = tokens()
    for many, form in some(backend, itertools.product((0, 300), ("both", "columns", "gathered columns")), 2):
        sizes = jnp.array([50, 0, *[0] * many, 33])
        groups = Groups(sizes, jnp.zeros((1,), jnp.int32))
        spec = QuantizeSpec(ScalingMode.BLOCK_1D, "float8_e4m3fn", sizes.size, rowwise=form == "both", columnwise=True)
        indices = row_indices()[:100] if form == "gathered columns" else None
        got, expected = (
            quantize_tokens(x, groups, dataclasses.replace(spec, finds_amax=finds_amax), row_indices=indices)
            for finds_amax in (False, True)
        )

        for one, other in ((got.rowwise, expected.rowwise), (got.columnwise, expected.columnwise)):
            if other is not None:
                numbers = [as_bytes(jg.grouped_dequantize(array)) for array in (one, other)]
                np.testing.assert_array_equal(*numbers)


def test_indices_of_any_integer_type(backend: str) -> None:
    # More rows than the 8-bit and 16-bit types count.
    x, sizes = jnp.tile(jnp.arange(1.0, 70_001)[:, None], (1, 16)), jnp.array([6])
    for dtype in some(backend, ["int8", "uint16", "uint32", "int64"], 1, count=2):
        limits = np.iinfo(dtype)
        indices = np.array([0, 1, 100, limits.max, limits.min, min(limits.max, 69_999)], dtype)
        with jax.enable_x64(True):
            got = jg.grouped_quantize(x, sizes, ScalingMode.BLOCK_1D, row_indices=jnp.asarray(indices))

        assert_gathered(got, x, np.clip(indices.astype(object), -1, 70_000).astype(int), sizes, ScalingMode.BLOCK_1D)


def test_vmap_gathers_from_the_tokens_of_each(backend: str) -> None:
    xs = jnp.stack([tokens(), 3 * tokens()[::-1]])
    batches = (xs, jnp.stack([row_indices(), row_indices()[::-1]]), jnp.stack([SIZES, SIZES[::-1]]))

    def quantize(x: jax.Array, indices: jax.Array, sizes: jax.Array) -> jg.GroupedQuantized:
        return jg.grouped_quantize(x, sizes, ScalingMode.BLOCK_1D, row_indices=indices, columnwise=True)

    for axes in ((None, 0, 0), (0, None, None)):
        operands = [x[0] if axis is None else x for x, axis in zip(batches, axes, strict=True)]

        got = jax.jit(jax.vmap(quantize, axes))(*operands)

        for i in range(2):
            one = [x if axis is None else x[i] for x, axis in zip(operands, axes, strict=True)]
            assert_gathered(jax.tree.map(operator.itemgetter(i), got), *one, ScalingMode.BLOCK_1D)


def test_without_tokens(backend: str) -> None:
    for rows in (0, 3):
        x, indices = jnp.zeros((0, 32), jnp.bfloat16), jnp.zeros((rows,), jnp.int32)

        got = jg.grouped_quantize(x, jnp.array([2]), ScalingMode.TENSOR, row_indices=indices, columnwise=True)

        expected = quantize_oracle.quantize(np.zeros((rows, 32), np.float32), np.array([2]), ScalingMode.TENSOR)
        assert_quantized(f"{rows} rows,", got, expected)


def groups(sizes: Any = SIZES, offset: int = 0) -> Groups:
    return Groups(jnp.asarray(sizes), jnp.array([offset], jnp.int32))


def block_spec(dtype: str = "float8_e4m3fn", **options: Any) -> QuantizeSpec:
    return QuantizeSpec(ScalingMode.BLOCK_1D, dtype, SIZES.shape[0], **options)


def tensor_spec(dtype: str = "float8_e4m3fn", **options: Any) -> QuantizeSpec:
    return QuantizeSpec(ScalingMode.TENSOR, dtype, SIZES.shape[0], **options)


def assert_permuted(
    x: jax.Array, groups: Groups, pairs: tuple[jax.Array, jax.Array], spec: QuantizeSpec, scale: Any = None
) -> None:
    """Quantizes tokens that are read once, and compares with those that are read for each of their rows."""
    order, inverse = pairs
    scale = None if scale is None else jnp.array(scale)

    got, amax = quantize_permuted(x, groups, order, inverse, scale, spec=spec)

    expected = quantize_tokens(x, groups, spec, row_indices=order // inverse.shape[1], scale=scale)
    assert expected.rowwise is not None
    assert got.layout == expected.rowwise.layout
    np.testing.assert_array_equal(as_bytes(got.data), as_bytes(expected.rowwise.data))
    # Scales after those of the last group of BLOCK_1D are unspecified.
    local = groups.sizes[int(groups.offset[0]) :][: spec.num_groups]
    written = sum(-(-int(size) // 4) * 4 for size in local) * -(-x.shape[1] // 128)
    scales = slice(written if scale is None else None)
    np.testing.assert_array_equal(got.scale_inv[scales], expected.rowwise.scale_inv[scales])
    np.testing.assert_array_equal(amax, None if scale is None else expected.amax)


@pytest.mark.parametrize("dtype", INPUT_TYPES)
def test_tokens_that_are_quantized_once_have_the_bits_of_their_rows(backend: str, dtype: str) -> None:
    x = jnp.tile(tokens(dtype), 15)  # More than a warp quantizes at once.
    few = groups([110, 0, 1, 50])  # Fewer than all rows, none of them a multiple of 4.
    all_rows, dropping, tail = (oracle.permutation(TOKENS, 2, rows) for rows in (180, 170, 210))
    choices = oracle.permutation(TOKENS, 40, 40 * TOKENS), groups([1300, 1, 900, 1399])  # More than a warp has lanes.
    many = oracle.permutation(12 * TOKENS, 2, 2000), groups([1301, 2, 500, 90])  # Tokens for a setup kernel.
    forms = [
        (x, few, all_rows, block_spec()),
        (x, few, dropping, tensor_spec(), [0.5, 2.0, np.inf, 1e4]),
        (x, few, dropping, block_spec("float8_e5m2", pow2_scales=True)),
        (x, groups([20, 60, 30, 1, 50], 1), dropping, tensor_spec("float8_e5m2"), [np.nan, 0.0, 2.0, 1e4]),
        (x, few, tail, block_spec()),
        (x, groups([20, 60, 30, 1, 50], 1), dropping, block_spec()),
        (jnp.tile(x[:, :FEATURES], (12, 1)), many[1], many[0], block_spec()),
        (x[:, :FEATURES], choices[1], choices[0], block_spec()),
        (x[:, :FEATURES], choices[1], choices[0], tensor_spec(), [0.5, 2.0, 1.0, 1e4]),
    ]
    for form in some(backend, forms, 3 + [*INPUT_TYPES].index(dtype), count=2):
        assert_permuted(*form)


def test_a_quantized_stack_is_quantized_again_as_its_values(backend: str) -> None:
    # Rows of groups whose scales need padding, and features whose last block is short.
    stack = jnp.where(jnp.isinf(tokens()), 3, tokens()).reshape(2, TOKENS // 2, FEATURES)
    order, inverse = oracle.permutation(TOKENS, 2, 170)
    spec = block_spec(pow2_scales=True, columnwise=True)

    def make(x: Any) -> list[Any]:
        alone = dataclasses.replace(spec, columnwise=False)
        plain = quantize_tokens(x, groups(SIZES[2:]), dataclasses.replace(alone, num_groups=2))
        gathered = quantize_tokens(x, groups([110, 0, 1, 50]), spec, row_indices=order // 2)
        permuted, _ = quantize_permuted(x, groups([110, 0, 1, 50]), order, inverse, spec=alone)
        arrays = [gathered.rowwise, gathered.columnwise, permuted, plain.rowwise]
        data = [array.data for array in arrays if not array.layout.columnwise]
        # Scales and columnwise data have padding that nothing writes.
        return [*map(jg.grouped_dequantize, arrays), *data, gathered.amax, plain.amax]

    for fp8 in some(backend, ["float8_e4m3fn", "float8_e5m2"], 1):
        scaled = jg.grouped_quantize(stack, None, ScalingMode.BLOCK_1D, dtype=fp8, pow2_scales=True).rowwise
        values = jg.grouped_dequantize(scaled, jnp.bfloat16).reshape(TOKENS, FEATURES)
        for got, expected in zip(make(scaled), make(values), strict=True):
            np.testing.assert_array_equal(as_bytes(got), as_bytes(expected), fp8)


def quantize_stack_again(x: jax.Array, sizes: jax.Array) -> tuple[jax.Array, ...]:
    stack = x.at[jnp.array([7, 82])].set(1).reshape(2, 45, -1)
    scaled = jg.grouped_quantize(stack, None, ScalingMode.BLOCK_1D, pow2_scales=True).rowwise
    spec = block_spec(pow2_scales=True, columnwise=True)
    again = quantize_tokens(scaled, groups(sizes), spec, row_indices=row_indices())
    return again.rowwise.data, jg.grouped_dequantize(again.columnwise), again.amax


def quantize_tokens_once(x: jax.Array, sizes: jax.Array) -> tuple[jax.Array, ...]:
    pairs, scale = oracle.permutation(TOKENS, 2, 180), 2.0 ** jnp.arange(4)
    blocks, _ = quantize_permuted(x, groups(sizes), *pairs, spec=block_spec())
    scaled, amax = quantize_permuted(x, groups(sizes), *pairs, scale, spec=tensor_spec())
    return blocks.data, jg.grouped_dequantize(blocks), scaled.data, scaled.scale_inv, amax


def inner_products(
    dy: jax.Array,
    sizes: jax.Array,
    hidden: jax.Array | None = None,
    activation: Activation = "relu",
    mode: ScalingMode = ScalingMode.BLOCK_1D,
    **operands: Any,
) -> tuple[jax.Array, ...]:
    spec = QuantizeSpec(mode, "float8_e4m3fn", 4, columnwise=True, activation=activation, inner_products=True)
    hidden = dy + 1 if hidden is None else hidden
    _, results = quantization.quantize(dy, groups(sizes), spec, (), activation_input=hidden, **operands)
    return (jnp.sum(results["inner_products"], axis=1),)


def test_vmap_is_a_call_for_each_element(backend: str) -> None:
    operands = jnp.stack([tokens("float32"), 3 * tokens("float32")[::-1]]), jnp.stack([SIZES - 10, SIZES[::-1]])
    for function in (quantize_stack_again, quantize_tokens_once, inner_products):
        got, plain = jax.jit(jax.vmap(function))(*operands), jax.jit(function)

        for i in range(2):
            for batched, one in zip(got, plain(*(x[i] for x in operands)), strict=True):
                np.testing.assert_array_equal(as_bytes(batched[i]), as_bytes(one), function.__name__)


def test_weights_multiply_the_activation_or_its_gradient(backend: str) -> None:
    # Powers of two, so that a product by a weight is exact wherever it is taken.
    weights = jnp.where(jnp.arange(200) < 160, 2.0 ** (jnp.arange(200) % 5 - 2), 0)
    x, wide_dy = normal(2, (2, 200, 2 * FEATURES))
    for activation, backward in some(backend, itertools.product(ACTIVATIONS, [False, True]), 1, count=3):
        dy = wide_dy[:, :FEATURES] if is_gated(activation) else wide_dy
        spec = tensor_spec(columnwise=True, dbias=True, activation=activation)
        given = dict(scale=jnp.ones(4), activation_input=x if backward else None)

        got = quantize_tokens(dy if backward else x, groups(), spec, **given, row_weights=weights)

        if backward:
            expected = quantize_tokens(dy * weights[:, None], groups(), spec, **given)
            for one, other in ((got.rowwise, expected.rowwise), (got.columnwise, expected.columnwise)):
                np.testing.assert_array_equal(jg.grouped_dequantize(one), jg.grouped_dequantize(other), str(activation))
            np.testing.assert_array_equal(got.dbias, expected.dbias, str(activation))
        else:
            plain = quantize_tokens(x, groups(), spec, **given)
            # Numbers that are not subnormal in FP8 keep their mantissa.
            values, plain_values = (np.asarray(jg.grouped_dequantize(one.rowwise)) for one in (got, plain))
            wanted = plain_values * np.asarray(weights)[:, None]
            small = (np.abs(wanted) < 2**-4) | (np.abs(plain_values) < 2**-4)
            assert np.all((values == wanted) | small), activation


def test_inner_products(backend: str) -> None:
    forms = itertools.product(ACTIVATIONS, (256, 336, 48), ("bfloat16", "float32"), MODES)
    for activation, features, dtype, mode in some(backend, forms, 7, count=2):
        hidden = normal(4, (200, 2 * features if is_gated(activation) else features)).astype(dtype)
        dy = normal(5, (200, features)).astype(dtype)
        terms = quantize_oracle.activation(activation, np.asarray(hidden)) * np.asarray(dy, np.float64)
        expected = np.where(np.arange(200) < SIZES.sum(), terms.sum(axis=1), 0)

        weights = normal(6, (200,))
        (got,) = inner_products(dy, SIZES, hidden, activation, mode, row_weights=weights)

        bound = 1e-5 * np.abs(terms).sum(axis=1).max()
        label = f"{activation}, {features}, {dtype}, {mode}"
        np.testing.assert_allclose(got, expected, rtol=0, atol=bound, err_msg=label)
