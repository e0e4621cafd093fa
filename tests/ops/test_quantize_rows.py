"""Quantization of rows that it gathers, and of rows that it weights: the bits of rows that were written before."""

import dataclasses
import itertools
import operator
import re
from collections.abc import Callable
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
from tests.ops.quantize_cases import ACTIVATIONS, INPUT_TYPES, as_bytes, assert_quantized, each_activation, some
from tests.programs import custom_calls, lowered

TOKENS, FEATURES = 90, 144
SIZES = jnp.array([130, 0, 1, 60])
MODES = [ScalingMode.TENSOR, ScalingMode.BLOCK_1D, ScalingMode.MX]


def tokens(dtype: str = "bfloat16") -> jax.Array:
    """Returns tokens with numbers that are not finite in one of them."""
    return jax.random.normal(jax.random.key(0), (TOKENS, FEATURES)).at[7, ::3].set(jnp.inf).astype(dtype)


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
    rows = jnp.where(exist[:, None], x[jnp.where(exist, indices, 0)], 0).astype(jnp.float32)
    assert_quantized(f"{mode},", got, quantize_oracle.quantize(np.asarray(rows), np.asarray(sizes), mode, **options))


@pytest.mark.parametrize("dtype", INPUT_TYPES)
def test_gathered_rows_have_the_bits_of_written_rows(backend: str, dtype: str) -> None:
    x, indices = tokens(dtype), row_indices()
    kinds = [*((mode, None) for mode in MODES), (ScalingMode.TENSOR, 2.0 ** jnp.arange(4))]
    for mode, scale in some(backend, kinds, 3 - [*INPUT_TYPES].index(dtype)):
        got = jg.grouped_quantize(x, SIZES, mode, row_indices=indices, columnwise=True, scale=scale)

        assert_gathered(got, x, indices, SIZES, mode, scale=None if scale is None else np.asarray(scale))


def block_spec(dtype: str = "float8_e4m3fn", **options: Any) -> QuantizeSpec:
    return QuantizeSpec(ScalingMode.BLOCK_1D, dtype, SIZES.shape[0], **options)


def tensor_spec(dtype: str = "float8_e4m3fn") -> QuantizeSpec:
    return QuantizeSpec(ScalingMode.TENSOR, dtype, 4)


def assert_permuted(
    x: jax.Array, groups: Groups, pairs: tuple[jax.Array, jax.Array], spec: QuantizeSpec, scale: Any = None
) -> None:
    """Quantizes tokens that are read once, and compares with those that are read for each of their rows."""
    order, inverse = pairs

    got, amax = quantize_permuted(x, groups, order, inverse, scale, spec=spec)

    expected = quantize_tokens(x, groups, spec, row_indices=order // inverse.shape[1], scale=scale)
    assert expected.rowwise is not None
    assert got.layout == expected.rowwise.layout
    np.testing.assert_array_equal(as_bytes(got.data), as_bytes(expected.rowwise.data))
    # Scales after those of the last group of BLOCK_1D are unspecified.
    written = sum(-(-int(size) // 4) * 4 for size in groups.sizes) * -(-x.shape[1] // 128)
    scales = slice(written if scale is None else None)
    np.testing.assert_array_equal(got.scale_inv[scales], expected.rowwise.scale_inv[scales])
    np.testing.assert_array_equal(amax, None if scale is None else expected.amax)


@pytest.mark.parametrize("dtype", INPUT_TYPES)
def test_tokens_that_are_quantized_once_have_the_bits_of_their_rows(backend: str, dtype: str) -> None:
    x = jnp.tile(tokens(dtype), 15)  # More than a warp quantizes at once.
    sizes = jnp.array([110, 0, 1, 50])  # Fewer than all rows, none of them a multiple of 4.
    for rows in some(backend, (180, 170, 210), [*INPUT_TYPES].index(dtype)):  # All, some dropped, and a tail.
        fp8, pow2_scales = ("float8_e5m2", True) if rows == 170 else ("float8_e4m3fn", False)
        spec = block_spec(fp8, pow2_scales=pow2_scales)
        assert_permuted(x, Groups(sizes, jnp.zeros(1, jnp.int32)), oracle.permutation(TOKENS, 2, rows), spec)


def test_a_quantized_stack_is_quantized_again_as_its_values(backend: str) -> None:
    for fp8 in some(backend, ["float8_e4m3fn", "float8_e5m2"], 1):
        check_stack(fp8)


def check_stack(fp8: str) -> None:
    # Rows of groups whose scales need padding, and features whose last block is short.
    stack = jnp.where(jnp.isinf(tokens()), 3, tokens()).reshape(2, TOKENS // 2, FEATURES)
    scaled = jg.grouped_quantize(stack, None, ScalingMode.BLOCK_1D, dtype=fp8, pow2_scales=True).rowwise
    values = jg.grouped_dequantize(scaled, jnp.bfloat16).reshape(TOKENS, FEATURES)
    order, inverse = oracle.permutation(TOKENS, 2, 170)
    sizes = Groups(jnp.array([110, 0, 1, 50]), jnp.zeros(1, jnp.int32))
    spec = block_spec(pow2_scales=True, columnwise=True)

    def made(x: Any) -> list[Any]:
        alone = dataclasses.replace(spec, columnwise=False)
        plain = quantize_tokens(x, Groups(SIZES[2:], sizes.offset), dataclasses.replace(alone, num_groups=2))
        gathered = quantize_tokens(x, sizes, spec, row_indices=order // 2)
        permuted, _ = quantize_permuted(x, sizes, order, inverse, spec=alone)
        arrays = [gathered.rowwise, gathered.columnwise, permuted, plain.rowwise]
        data = [array.data for array in arrays if not array.layout.columnwise]
        # Scales and columnwise data have padding that nothing writes.
        return [*map(jg.grouped_dequantize, arrays), *data, gathered.amax, plain.amax]

    for got, expected in zip(made(scaled), made(values), strict=True):
        np.testing.assert_array_equal(as_bytes(got), as_bytes(expected))


def assert_vmap(function: Callable[..., Any], *operands: jax.Array) -> None:
    got = jax.vmap(function)(*operands)

    for i in range(len(operands[0])):
        for batched, one in zip(got, function(*(x[i] for x in operands)), strict=True):
            np.testing.assert_array_equal(as_bytes(batched[i]), as_bytes(one))


SIZES_OF_EACH = jnp.stack([SIZES - 10, SIZES[::-1]])


def test_quantized_stacks_under_vmap(backend: str) -> None:
    x = jnp.stack([tokens("float32"), 3 * tokens("float32")[::-1]]).at[:, jnp.array([7, 82])].set(1)
    spec = dataclasses.replace(block_spec(pow2_scales=True), columnwise=True)

    def quantize(x: jax.Array, sizes: jax.Array) -> Any:
        scaled = jg.grouped_quantize(x.reshape(2, 45, -1), None, ScalingMode.BLOCK_1D, pow2_scales=True).rowwise
        again = quantize_tokens(scaled, Groups(sizes, jnp.zeros(1, jnp.int32)), spec, row_indices=row_indices())
        return again.rowwise.data, jg.grouped_dequantize(again.columnwise), again.amax

    assert_vmap(quantize, x, SIZES_OF_EACH)


@pytest.mark.parametrize("mode", [ScalingMode.BLOCK_1D, ScalingMode.TENSOR])
def test_tokens_quantized_once_under_vmap(backend: str, mode: ScalingMode) -> None:
    order, inverse = oracle.permutation(TOKENS, 2, 180)
    spec, scale = (block_spec(), None) if mode == ScalingMode.BLOCK_1D else (tensor_spec(), 2.0 ** jnp.arange(4))

    def quantize(x: jax.Array, sizes: jax.Array) -> Any:
        got, amax = quantize_permuted(x, Groups(sizes, jnp.zeros(1, jnp.int32)), order, inverse, scale, spec=spec)
        return got.data, *([jg.grouped_dequantize(got)] if scale is None else [got.scale_inv, amax])

    assert_vmap(quantize, jnp.stack([tokens(), 3 * tokens()[::-1]]), SIZES_OF_EACH)


def test_tokens_read_once_with_given_scales(backend: str) -> None:
    for dtype in some(backend, INPUT_TYPES, 0):
        check_given_scales(jnp.tile(tokens(dtype), 15))  # More than a warp quantizes at once.


def check_given_scales(x: jax.Array) -> None:
    groups, scale = Groups(jnp.array([110, 0, 1, 50]), jnp.array([0])), jnp.array([0.5, 2.0, jnp.inf, 1e4])
    assert_permuted(x, groups, oracle.permutation(TOKENS, 2, 170), tensor_spec(), scale)
    groups, scale = Groups(jnp.array([20, 60, 30, 1, 50]), jnp.array([1])), jnp.array([jnp.nan, 0.0, 2.0, 1e4])
    assert_permuted(x, groups, oracle.permutation(TOKENS, 2, 170), tensor_spec("float8_e5m2"), scale)


def test_tokens_read_once_with_more_choices_than_a_warp_has_lanes(backend: str) -> None:
    pairs = oracle.permutation(TOKENS, 40, 40 * TOKENS)
    groups = Groups(jnp.array([1300, 1, 900, 1399]), jnp.zeros(1, jnp.int32))
    assert_permuted(tokens(), groups, pairs, block_spec())
    assert_permuted(tokens(), groups, pairs, tensor_spec(), jnp.array([0.5, 2.0, 1.0, 1e4]))


def test_sums_of_gathered_rows(backend: str) -> None:
    x, indices = tokens("float32").at[7].set(0), jnp.arange(200) % TOKENS

    got = jg.grouped_quantize(x, SIZES, ScalingMode.BLOCK_1D, row_indices=indices, dbias=True).dbias

    written = jg.grouped_quantize(x[indices], SIZES, ScalingMode.BLOCK_1D, dbias=True).dbias
    np.testing.assert_array_equal(got, written)


def test_many_rows_of_few_tokens(backend: str) -> None:
    rows = 40_000 if backend == "cuda" else 700  # More than a single launch takes.
    indices = jax.random.randint(jax.random.key(1), (rows,), 0, TOKENS)
    sizes = jnp.array([rows // 2, rows // 2 - 50])
    for mode in some(backend, MODES, 1):
        got = jg.grouped_quantize(tokens(), sizes, mode, row_indices=indices, columnwise=True)

        assert_gathered(got, tokens(), indices, sizes, mode)


def test_rows_of_many_tokens(backend: str) -> None:
    # On a GPU, slabs of one tile of columns, and of two tiles, of which the last slab has one.
    for count in (9000, 4000) if backend == "cuda" else (90,):
        x = jax.random.normal(jax.random.key(count), (count, 272), jnp.bfloat16)
        indices = jax.random.randint(jax.random.key(1), (2 * count,), 0, count)
        sizes = jnp.array([count, 0, count - 50])
        for mode in some(backend, MODES, 0):
            got = jg.grouped_quantize(x, sizes, mode, row_indices=indices, columnwise=True)

            assert_gathered(got, x, indices, sizes, mode)


@pytest.mark.parametrize("dtype", ["int8", "uint16", "uint32", "int64"])
def test_indices_of_any_integer_type(backend: str, dtype: str) -> None:
    limits = np.iinfo(dtype)
    indices = np.array([0, 1, 100, limits.max, limits.min, min(limits.max, 69_999)], dtype)
    # More rows than the 8-bit and 16-bit types count.
    x = jnp.tile(jnp.arange(1.0, 70_001)[:, None], (1, 16))
    with jax.enable_x64(True):
        got = jg.grouped_quantize(x, jnp.array([6]), ScalingMode.BLOCK_1D, row_indices=jnp.asarray(indices))

    assert_gathered(
        got, x, np.clip(indices.astype(object), -1, 70_000).astype(int), np.array([6]), ScalingMode.BLOCK_1D
    )


@pytest.mark.parametrize("axes", [(None, 0, 0), (0, None, None)], ids=["other rows", "other tokens"])
def test_vmap_gathers_from_the_tokens_of_each(backend: str, axes: tuple[int | None, ...]) -> None:
    xs = jnp.stack([tokens(), 3 * tokens()[::-1]])
    operands = (xs, jnp.stack([row_indices(), row_indices()[::-1]]), jnp.stack([SIZES, SIZES[::-1]]))
    operands = tuple(x[0] if axis is None else x for x, axis in zip(operands, axes, strict=True))

    def quantize(x: jax.Array, indices: jax.Array, sizes: jax.Array) -> jg.GroupedQuantized:
        return jg.grouped_quantize(x, sizes, ScalingMode.BLOCK_1D, row_indices=indices, columnwise=True)

    got = jax.jit(jax.vmap(quantize, axes))(*operands)

    for i in range(2):
        one = [x if axis is None else x[i] for x, axis in zip(operands, axes, strict=True)]
        assert_gathered(jax.tree.map(operator.itemgetter(i), got), *one, ScalingMode.BLOCK_1D)


@pytest.mark.parametrize("rows", [0, 3], ids=["no rows", "rows of no token"])
def test_without_tokens(backend: str, rows: int) -> None:
    x, indices = jnp.zeros((0, 32), jnp.bfloat16), jnp.zeros((rows,), jnp.int32)

    got = jg.grouped_quantize(x, jnp.array([2]), ScalingMode.TENSOR, row_indices=indices, columnwise=True)

    expected = quantize_oracle.quantize(np.zeros((rows, 32), np.float32), np.array([2]), ScalingMode.TENSOR)
    assert_quantized("", got, expected)


@each_activation
def test_weights_multiply_the_activation_or_its_gradient(backend: str, activation: str) -> None:
    for backward in some(backend, [False, True], ACTIVATIONS.index(activation)):
        check_weights(activation, backward)


def check_weights(activation: str, backward: bool) -> None:
    x = jax.random.normal(jax.random.key(2), (200, 2 * FEATURES))
    dy = jax.random.normal(jax.random.key(3), (200, FEATURES if is_gated(activation) else 2 * FEATURES))
    # Powers of two, so that a product by a weight is exact wherever it is taken.
    weights = jnp.where(jnp.arange(200) < 160, 2.0 ** (jnp.arange(200) % 5 - 2), 0)
    spec = QuantizeSpec(ScalingMode.TENSOR, "float8_e4m3fn", 4, columnwise=True, dbias=True, activation=activation)
    given = dict(scale=jnp.ones(4), activation_input=x if backward else None)
    groups = Groups(SIZES, jnp.zeros(1, jnp.int32))

    got = quantize_tokens(dy if backward else x, groups, spec, **given, row_weights=weights)

    if backward:
        expected = quantize_tokens(dy * weights[:, None], groups, spec, **given)
        for one, other in ((got.rowwise, expected.rowwise), (got.columnwise, expected.columnwise)):
            np.testing.assert_array_equal(jg.grouped_dequantize(one), jg.grouped_dequantize(other))
        np.testing.assert_array_equal(got.dbias, expected.dbias)
        return
    plain = quantize_tokens(x, groups, spec, **given)
    # Numbers that are not subnormal in FP8 keep their mantissa.
    values, plain_values = (np.asarray(jg.grouped_dequantize(one.rowwise)) for one in (got, plain))
    wanted = plain_values * np.asarray(weights)[:, None]
    assert np.all((values == wanted) | (np.abs(wanted) < 2**-4) | (np.abs(plain_values) < 2**-4))


def inner_products(
    dy: jax.Array, hidden: jax.Array, activation: Activation, mode: ScalingMode, **operands: Any
) -> jax.Array:
    spec = QuantizeSpec(mode, "float8_e4m3fn", 4, columnwise=True, activation=activation, inner_products=True)
    groups = Groups(SIZES, jnp.zeros(1, jnp.int32))
    _, results = quantization.quantize(dy, groups, spec, (), activation_input=hidden, **operands)
    return jnp.sum(results["inner_products"], axis=1)


@each_activation
def test_inner_products(backend: str, activation: str) -> None:
    forms = itertools.product((256, 336, 48), ("bfloat16", "float32"), MODES)
    for features, dtype, mode in some(backend, forms, 7 * ACTIVATIONS.index(activation)):
        keys = jax.random.split(jax.random.key(4), 3)
        hidden = jax.random.normal(keys[0], (200, 2 * features if is_gated(activation) else features)).astype(dtype)
        dy = jax.random.normal(keys[1], (200, features)).astype(dtype)
        terms = quantize_oracle.activation(activation, np.asarray(hidden)) * np.asarray(dy, np.float64)
        expected = np.where(np.arange(200) < SIZES.sum(), terms.sum(axis=1), 0)

        got = inner_products(dy, hidden, activation, mode, row_weights=jax.random.normal(keys[2], (200,)))

        bound = 1e-5 * np.abs(terms).sum(axis=1).max()
        np.testing.assert_allclose(got, expected, rtol=0, atol=bound, err_msg=f"{features}, {dtype}, {mode}")


def test_inner_products_under_vmap(backend: str) -> None:
    hidden, dy = jax.random.normal(jax.random.key(5), (2, 200, 96)), jax.random.normal(jax.random.key(6), (2, 200, 48))

    got = jax.vmap(lambda dy, hidden: inner_products(dy, hidden, "swiglu", ScalingMode.BLOCK_1D))(dy, hidden)

    for i in range(2):
        np.testing.assert_array_equal(got[i], inner_products(dy[i], hidden[i], "swiglu", ScalingMode.BLOCK_1D))


def test_the_custom_call_gets_both() -> None:
    x, indices, weights = tokens(), row_indices(), jnp.ones(TOKENS)

    def gathers(x: jax.Array) -> jg.GroupedQuantized:
        return jg.grouped_quantize(x, SIZES, ScalingMode.BLOCK_1D, row_indices=indices)

    def weighs(x: jax.Array) -> jg.GroupedQuantized:
        spec = block_spec(activation="relu")
        return quantize_tokens(x, Groups(SIZES, jnp.zeros(1, jnp.int32)), spec, row_weights=weights)

    for function, flags in ((gathers, (True, False)), (weighs, (False, True))):
        (call,) = custom_calls(lowered(function, x), "jax_grouped_quantize")
        assert re.findall(r"(?:gathered|weighted) = (\w+)", call) == [str(flag).lower() for flag in flags]


def test_wrong_arguments() -> None:
    x, mode = tokens(), ScalingMode.BLOCK_1D
    for options, error, message in [
        (dict(row_indices=jnp.zeros(3)), TypeError, "row_indices must be of an integer type, got float32"),
        (dict(row_indices=jnp.zeros((3, 1), jnp.int32)), ValueError, r"row_indices must have shape [R], got (3, 1)"),
        (
            dict(row_indices=row_indices(), activation="relu"),
            ValueError,
            "row_indices is for x [T, C] with group_sizes and without an activation",
        ),
    ]:
        with pytest.raises(error, match=re.escape(message)):
            jg.grouped_quantize(x, SIZES, mode, **options)
    with pytest.raises(ValueError, match="row_indices is for x"):
        jg.grouped_quantize(x.reshape(2, -1, FEATURES), None, mode, row_indices=row_indices())
