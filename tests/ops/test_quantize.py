"""`grouped_quantize` and `grouped_dequantize`, bit for bit against NumPy."""

import dataclasses
import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import jax_grouped as jg
from benchmarks import shapes
from jax_grouped import ScalingMode
from tests import oracle, quantize_oracle
from tests.ops.quantize_cases import (
    AWKWARD_SIZES,
    FP8_TYPES,
    INPUT_TYPES,
    MODES,
    SHAPE,
    as_bytes,
    assert_quantized,
    awkward_values,
    each_mode,
    some,
    tokens,
)
from tests.quantize_oracle import assert_same_bits

pytestmark = pytest.mark.slow


def check(
    x: np.ndarray,
    sizes: np.ndarray | None,
    mode: ScalingMode,
    *,
    label: str = "",
    rowwise: bool = True,
    columnwise: bool = True,
    dbias: bool = False,
    out_dtype: str | None = None,
    **options: Any,
) -> jg.GroupedQuantized:
    """Quantizes `x` and compares with NumPy; `dbias`, which is not exact, is left to the caller.

    With an `out_dtype`, also dequantizes what NumPy has quantized.
    """
    flags = dict(rowwise=rowwise, columnwise=columnwise, dbias=dbias)
    given = {name: jnp.asarray(value) if name == "scale" else value for name, value in options.items()}
    got = jg.grouped_quantize(jnp.asarray(x), None if sizes is None else jnp.asarray(sizes), mode, **flags, **given)
    assert (got.rowwise is not None, got.columnwise is not None, got.dbias is not None) == (rowwise, columnwise, dbias)
    expected = quantize_oracle.quantize(x, sizes, mode, **options)
    assert_quantized(label, got, expected)
    for copy, wanted in ((got.rowwise, expected.rowwise), (got.columnwise, expected.columnwise)):
        if copy is not None and out_dtype is not None:
            numbers = jg.grouped_dequantize(from_numpy(wanted, copy), out_dtype)
            with np.errstate(over="ignore", invalid="ignore"):
                assert_same_bits(f"{label} {out_dtype}", numbers, wanted.dequantized.astype(INPUT_TYPES[out_dtype]))
    return got


def from_numpy(copy: quantize_oracle.Copy, like: jg.ScaledArray) -> jg.ScaledArray:
    """Returns what NumPy has quantized, with NaN in all unspecified bytes: nothing may read them."""

    def fill(shape: tuple[int, ...], numbers: np.ndarray, nan: float) -> np.ndarray:
        array = np.full(shape, nan, numbers.dtype)
        array.reshape(-1)[: numbers.size] = numbers.ravel()
        return array

    is_mx = like.layout.mode == ScalingMode.MX
    data = fill(like.data.shape, copy.data, quantize_oracle.NAN).view(like.data.dtype)
    scale_inv = fill(like.scale_inv.shape, copy.scale_inv, 0xFF if is_mx else np.nan).view(like.scale_inv.dtype)
    return dataclasses.replace(like, data=jnp.asarray(data), scale_inv=jnp.asarray(scale_inv))


ORIENTATIONS = (True, True), (True, False), (False, True)  # rowwise, columnwise
FORMS = [
    *itertools.product(ORIENTATIONS, FP8_TYPES, [{}]),
    *((ORIENTATIONS[0], FP8_TYPES[0], dict(pow2_scales=pow2, amax_epsilon=0.5)) for pow2 in (True, False)),
]


@each_mode
def test_every_mode_orientation_and_type(backend: str, mode: ScalingMode) -> None:
    cases = {}
    for skew in ("lognormal", "tail", "hostile", "one_hot", "empty_first", "empty_adjacent", "all_empty"):
        sizes = shapes.group_sizes(SHAPE, skew)
        cases[skew] = tokens(SHAPE, sizes), sizes
    for name, x in awkward_values().items():
        with np.errstate(invalid="ignore"):
            cases[name] = x.astype(ml_dtypes.bfloat16), AWKWARD_SIZES
    for index, form in some(backend, enumerate(FORMS), MODES.index(mode), count=2):
        (rowwise, columnwise), dtype, options = form
        flags = dict(rowwise=rowwise, columnwise=columnwise, out_dtype=[*INPUT_TYPES][index % 3])
        for name, (x, sizes) in cases.items():
            check(x, sizes, mode, label=f"{name}, {form},", dtype=dtype, **flags, **options)


def test_every_shape_and_skew(backend: str) -> None:
    for index, shape in some(backend, enumerate(shapes.TEST_SHAPES), 0, count=4):
        for mode in some(backend, MODES, index):
            for skew in some(backend, shapes.TEST_SKEWS, index, count=5):
                sizes = shapes.group_sizes(shape, skew)
                check(tokens(shape, sizes), sizes, mode, label=f"{shape.name}, {mode}, {skew},")


#: Sizes of groups around those of blocks, and numbers of groups around those of warps, thread blocks and shared memory.
GROUPS = [
    *((features, [127, 0, 1, 129, 40]) for features in (16, 112, 128, 512)),
    # 512 rows are four blocks: as many as the scales of blocks are padded to.
    (144, [3, 513, 0, 700]),
    *(
        (16, shapes.group_sizes(shapes.Shape("", groups, 300, 16), "lognormal"))
        for groups in (1, 32, 33, 256, 257, 9000)
    ),
]


@each_mode
def test_sizes_and_numbers_of_groups(backend: str, mode: ScalingMode) -> None:
    for features, sizes in some(backend, GROUPS, 3 * MODES.index(mode) + 1):
        sizes = np.array(sizes, np.int32)
        x = tokens(shapes.Shape("", len(sizes), sizes.sum() + 3, features), sizes, "float16")
        check(x, sizes, mode, label=f"{features}, {len(sizes)},", dtype="float8_e5m2")


def test_every_pattern_of_empty_groups(backend: str) -> None:
    shape = shapes.Shape("patterns", num_groups=5, tokens=90, K=32, N=1)
    for mode in some(backend, MODES, MODES.index(ScalingMode.BLOCK_2D)):
        for pattern in itertools.product([0, 17], repeat=shape.num_groups):
            sizes = np.array(pattern, np.int32)
            check(tokens(shape, sizes), sizes, mode, label=f"{mode}, {pattern},")


@each_mode
def test_stacks_of_equal_groups(backend: str, mode: ScalingMode) -> None:
    # Many groups, groups that are cut short, and groups of 600 rows and of 2880 features.
    for shape in some(backend, [(65, 1, 16), (3, 130, 144), (2, 600, 144), (2, 16, 2880)], MODES.index(mode)):
        magnitudes = np.geomspace(1e-3, 1e3, shape[0], dtype=np.float32)[:, None, None]
        x = np.random.default_rng(0).standard_normal(shape, np.float32) * magnitudes
        options: dict[str, Any] = dict(out_dtype="float32")
        if mode == ScalingMode.TENSOR:
            options["scale"] = np.resize(np.float32([2.0, np.nan, 1e30]), shape[0])
        got = check(x, None, mode, label=f"{shape},", dbias=True, **options)
        assert_dbias("stack", got.dbias, x.reshape(-1, shape[2]), np.full(shape[0], shape[1]))
        for copy in (got.rowwise, got.columnwise):
            assert copy is not None
            assert copy.shape == x.shape
            assert copy.group_sizes is None


def test_scales_and_casts_are_rounded_right_over_the_whole_range(backend: str) -> None:
    rng = np.random.default_rng(0)
    # One number, of any bits, decides the scale of its row; with it the products of the others round in all ways.
    first = rng.integers(0, 2**31, (4096, 1), np.uint32).view(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        rows = np.concatenate([first, first * rng.uniform(-1, 1, (4096, 15)).astype(np.float32)], axis=1)
    for dtype in some(backend, FP8_TYPES, 0):
        check(rows, np.array([4096], np.int32), ScalingMode.BLOCK_1D, dtype=dtype, columnwise=False)
    for dtype, x_type in itertools.product(FP8_TYPES, ["bfloat16", "float16"]):
        x = np.arange(2**16, dtype=np.uint16).view(INPUT_TYPES[x_type]).reshape(-1, 16)
        sizes = np.array([len(x)], np.int32)
        for scale in (1.0, 0.75):
            given_scale = np.array([scale], np.float32)
            check(x, sizes, ScalingMode.TENSOR, label=f"{scale},", dtype=dtype, columnwise=False, scale=given_scale)


def test_optimized_programs_of_awkward_values_give_the_same_bits(backend: str) -> None:
    # As users compile them: elsewhere, tests on CPUs leave optimizations out.
    options = {"xla_backend_optimization_level": 3, "xla_llvm_disable_expensive_passes": False}
    for mode, dtype in some(backend, itertools.product(MODES, FP8_TYPES), 1, count=3):
        quantize = functools.partial(jg.grouped_quantize, mode=mode, dtype=dtype, columnwise=True)
        optimized = jax.jit(quantize, compiler_options=options)
        for name, x in awkward_values().items():
            got = optimized(x, AWKWARD_SIZES)
            expected = quantize_oracle.quantize(x, AWKWARD_SIZES, mode, dtype=dtype)
            assert_quantized(f"{name}, {mode}, {dtype},", got, expected)


def test_given_scales_are_used_and_brought_into_range(backend: str) -> None:
    scales = {
        "ordinary": [0.5, 3.0, 1e3, 1e-3, 0.0],
        "out of range": [-1.0, np.inf, -np.inf, 2.0**127, 2.0**-127],
        "nan": [np.nan, -0.0, 1.0, 1e-42, np.nan],
    }
    for dtype in some(backend, FP8_TYPES, 0):
        for skew, (name, scale) in itertools.product(["lognormal", "tail", "empty_adjacent"], scales.items()):
            sizes = shapes.group_sizes(SHAPE, skew)
            given = dict(label=f"{skew}, {name},", dtype=dtype, scale=np.array(scale, np.float32))
            check(tokens(SHAPE, sizes), sizes, ScalingMode.TENSOR, **given)
    scale = jnp.array([0.0, 4.0, jnp.inf])
    got = jg.grouped_quantize(jnp.ones((0, 16)), jnp.zeros(3, jnp.int32), ScalingMode.TENSOR, scale=scale)
    np.testing.assert_array_equal(got.rowwise.scale_inv, np.array([2.0**126, 0.25, 2.0**-126], np.float32))


def test_scales_of_mx(backend: str) -> None:
    for dtype, features in some(backend, itertools.product(FP8_TYPES, (16, 144, 544)), 1):
        shape = dataclasses.replace(SHAPE, K=features)
        for skew in ("lognormal", "one_hot", "hostile", "all_empty"):
            sizes = shapes.group_sizes(shape, skew)
            options = dict(label=skew, dtype=dtype, out_dtype="bfloat16")
            check(tokens(shape, sizes), sizes, ScalingMode.MX, **options)


def test_group_sizes_of_any_integer_type_do_not_wrap(backend: str) -> None:
    for sizes in (np.array([7, 0, 100, 127, 3], np.int8), np.array([7, 0, 100, 127, 3], np.uint32)):
        check(tokens(SHAPE, sizes), sizes, ScalingMode.BLOCK_1D)
    clamped = np.array([7, SHAPE.tokens - 7, 0, 0, 0], np.int32)
    x = tokens(SHAPE, clamped)
    expected = quantize_oracle.quantize(x, clamped, ScalingMode.BLOCK_1D)
    for sizes in ([7, 2**40, 1, 0, 0], np.array([7, 2**63, 1, 0, 0], np.uint64), np.array([7, 2**31, -1, 0, 0])):
        assert_quantized("", jg.grouped_quantize(x, sizes, ScalingMode.BLOCK_1D, columnwise=True), expected)


@pytest.mark.gpu
def test_same_inputs_give_the_same_bits() -> None:
    sizes = jnp.asarray(shapes.group_sizes(SHAPE, "lognormal"))
    x = jnp.asarray(tokens(SHAPE, np.asarray(sizes)))

    def once() -> list[bytes]:
        got = jg.grouped_quantize(x, sizes, ScalingMode.BLOCK_2D, dbias=True)
        # Flat arrays are left out, for they end with bytes that are not specified.
        return [np.asarray(array).tobytes() for array in (got.rowwise.data, got.amax, got.dbias)]

    first = once()
    assert all(once() == first for _ in range(5))


def assert_dbias(label: str, got: jax.Array | None, x: np.ndarray, sizes: np.ndarray) -> None:
    """Compares within what rounding in float32 explains, whatever the order of the sum."""
    assert got is not None
    assert got.dtype == jnp.float32
    sums, x = np.asarray(got, np.float64), x.astype(np.float64)
    with np.errstate(invalid="ignore"):
        expected = oracle.bias_grad(x, sizes, len(sizes))
        bound = (sizes.max(initial=0) + 1) * 2.0**-24 * oracle.bias_grad(np.abs(x), sizes, len(sizes))
        same = (np.abs(sums - expected) <= bound) | (sums == expected) | (np.isnan(sums) & np.isnan(expected))
    assert same.all(), f"{label} dbias {sums.shape} differs first at {np.argwhere(~same)[0]}"


def test_dbias_sums_the_rows_of_each_group(backend: str) -> None:
    for mode, dtype in some(backend, itertools.product(MODES, INPUT_TYPES), 0, count=3):
        for skew in ("lognormal", "tail", "one_hot", "empty_first", "all_empty", "not finite"):
            label = f"{dtype}, {mode}, {skew},"
            sizes = shapes.group_sizes(SHAPE, "lognormal" if skew == "not finite" else skew)
            x = tokens(SHAPE, sizes, dtype)
            if skew == "not finite":  # It shows in its own column only.
                x[3, 5], x[60, 7], x[70, 7], x[150, 130], x[279, 0] = np.nan, np.inf, -np.inf, -np.inf, np.nan
            assert_dbias(label, check(x, sizes, mode, label=label, dbias=True).dbias, x, sizes)


@pytest.mark.gpu
@each_mode
def test_more_than_2_to_the_31_elements(mode: ScalingMode) -> None:
    # A group of 200 rows behind many rows of the value 3, which a position that wraps would overwrite.
    rows, features = 2**20 + 3, 2064
    last = np.random.default_rng(0).standard_normal((200, features), np.float32).astype(ml_dtypes.bfloat16)
    expected = quantize_oracle.quantize(last, np.array([200], np.int32), mode)
    x = jnp.concatenate([jnp.full((rows, features), 3, jnp.bfloat16), jnp.asarray(last)])
    got = jg.grouped_quantize(x, jnp.array([rows, 200]), mode, columnwise=True)
    assert_same_bits("amax", got.amax, np.array([3, expected.amax[0]], np.float32))

    def take_slice(array: jax.Array, start: int, count: int) -> np.ndarray:
        return as_bytes(jax.lax.slice_in_dim(array, start, start + count))

    @functools.partial(jax.jit, static_argnums=1)
    def how_many(data: jax.Array, count: int, number: jax.Array) -> jax.Array:
        # Count in two steps: the total does not fit into 32 bits.
        same = jax.lax.slice_in_dim(data, 0, count).astype(jnp.float32) == number
        return jnp.sum(same.reshape(features, -1), axis=1, dtype=jnp.int32)

    number = got.rowwise.data[0, 0].astype(jnp.float32)
    assert np.all(how_many(got.rowwise.data, rows, number) == rows)
    assert_same_bits("rowwise", take_slice(got.rowwise.data, rows, 200), expected.rowwise.data)
    before = (rows + 15) // 16 * 16 * features
    assert np.all(how_many(got.columnwise.data, before, number) == rows)
    columnwise = take_slice(got.columnwise.data, before, expected.columnwise.data.size)
    assert_same_bits("columnwise", columnwise, expected.columnwise.data)
    for copy, last_copy in ((got.rowwise, expected.rowwise), (got.columnwise, expected.columnwise)):
        numbers = take_slice(jg.grouped_dequantize(copy, jnp.bfloat16), rows, 200)
        assert_same_bits("dequantized", numbers, last_copy.dequantized.astype(ml_dtypes.bfloat16))


@each_mode
def test_arrays_without_elements(backend: str, mode: ScalingMode) -> None:
    for rows, features, groups in some(backend, [(0, 16, 3), (6, 16, 0), (6, 0, 3), (0, 0, 0)], MODES.index(mode), 2):
        got = jg.grouped_quantize(jnp.ones((rows, features)), jnp.full(groups, 2), mode, columnwise=True, dbias=True)
        assert (got.amax.shape, got.dbias.shape) == ((groups,), (groups, features))
        assert not np.any(got.amax)
        assert not np.any(got.dbias)
        for copy in (got.rowwise, got.columnwise):
            assert not np.any(as_bytes(copy.data))
            if mode == ScalingMode.TENSOR:
                np.testing.assert_array_equal(copy.scale_inv, np.ones(groups, np.float32))
            numbers = jg.grouped_dequantize(copy)
            assert copy.shape == numbers.shape == (rows, features)
            assert not np.any(numbers)
    for shape in some(backend, [(0, 16, 32), (3, 0, 32), (3, 16, 0)], MODES.index(mode)):
        got = jg.grouped_quantize(jnp.ones(shape), None, mode, columnwise=True)
        for copy in (got.rowwise, got.columnwise):
            assert copy.data.size == 0
            assert copy.shape == jg.grouped_dequantize(copy).shape == shape


class Case(NamedTuple):
    """Static parameters of the search below, which compiles for each."""

    tokens: int
    features: int
    groups: int
    mode: ScalingMode
    dtype: str
    options: dict[str, Any]
    given_scale: bool = False


CASES = (
    Case(1, 16, 1, ScalingMode.BLOCK_1D, "float8_e4m3fn", {}),
    Case(150, 144, 4, ScalingMode.BLOCK_1D, "float8_e5m2", {}),
    Case(150, 144, 4, ScalingMode.BLOCK_2D, "float8_e4m3fn", dict(pow2_scales=True)),
    Case(150, 144, 4, ScalingMode.TENSOR, "float8_e4m3fn", dict(amax_epsilon=1e-30)),
    Case(150, 144, 4, ScalingMode.TENSOR, "float8_e5m2", {}, given_scale=True),
    Case(40, 32, 9, ScalingMode.MX, "float8_e5m2", {}),
)

FLOAT32 = st.floats(width=32, allow_nan=True, allow_infinity=True, allow_subnormal=True)


@st.composite
def inputs(draw: st.DrawFn, case: Case) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Draws tokens, group sizes and given scales: rows of any magnitude or bits, and single numbers of any kind."""
    size = st.one_of(st.integers(0, case.tokens // 2), st.sampled_from([0, 16, 128]), st.integers(-(2**31), 2**31 - 1))
    sizes = draw(st.lists(size, min_size=case.groups, max_size=case.groups))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shape = (case.tokens, case.features)
    match draw(st.sampled_from(["zeros", "one magnitude", "magnitudes of rows", "bits"])):
        case "zeros":
            x = np.zeros(shape, np.float32)
        case "bits":
            x = rng.integers(0, 2**32, shape, np.uint32).view(np.float32)
        case kind:
            exponents = rng.uniform(-140, 127, (1 if kind == "one magnitude" else case.tokens, 1))
            with np.errstate(over="ignore"):
                x = (rng.standard_normal(shape) * np.exp2(exponents)).astype(np.float32)
    place = st.tuples(st.integers(0, case.tokens - 1), st.integers(0, case.features - 1), FLOAT32)
    for row, feature, value in draw(st.lists(place, max_size=8)):
        x[row, feature] = value
    scales = st.lists(FLOAT32, min_size=case.groups, max_size=case.groups)
    scale = np.array(draw(scales), np.float32) if case.given_scale else None
    return x, np.array(sizes, np.int32), scale


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.mode.value}-{case.dtype}")
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_values_in_groups_of_any_sizes(backend: str, case: Case, data: st.DataObject) -> None:
    x, sizes, scale = data.draw(inputs(case))
    options = case.options if scale is None else dict(scale=scale)
    check(x, sizes, case.mode, dtype=case.dtype, **options)
