"""`grouped_quantize`, bit for bit against NumPy."""

import dataclasses
import functools
import itertools
from typing import Any

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
    each_type,
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
    scale: np.ndarray | None = None,
    **options: Any,
) -> jg.GroupedQuantized:
    """Quantizes `x` and compares with NumPy; `dbias`, which is not exact, is left to the caller."""
    got = jg.grouped_quantize(
        jnp.asarray(x),
        None if sizes is None else jnp.asarray(sizes),
        mode,
        rowwise=rowwise,
        columnwise=columnwise,
        dbias=dbias,
        scale=None if scale is None else jnp.asarray(scale),
        **options,
    )
    assert (got.rowwise is not None, got.columnwise is not None, got.dbias is not None) == (rowwise, columnwise, dbias)
    assert_quantized(label, got, quantize_oracle.quantize(x, sizes, mode, scale=scale, **options))
    return got


ORIENTATIONS = (True, False), (False, True), (True, True)  # rowwise, columnwise


@pytest.mark.parametrize("orientation", ORIENTATIONS, ids=["rowwise only", "columnwise only", "both"])
@each_mode
def test_every_mode_orientation_and_type(backend: str, mode: ScalingMode, orientation: tuple[bool, bool]) -> None:
    rowwise, columnwise = orientation
    cases = {}
    for skew in ("lognormal", "tail", "hostile", "one_hot", "empty_first", "empty_adjacent", "all_empty"):
        sizes = shapes.group_sizes(SHAPE, skew)
        cases[skew] = tokens(SHAPE, sizes), sizes
    for name, x in awkward_values().items():
        with np.errstate(invalid="ignore"):
            cases[name] = x.astype(ml_dtypes.bfloat16), AWKWARD_SIZES
    for dtype in some(backend, FP8_TYPES, MODES.index(mode) + ORIENTATIONS.index(orientation)):
        for name, (x, sizes) in cases.items():
            check(x, sizes, mode, label=f"{dtype}, {name},", dtype=dtype, rowwise=rowwise, columnwise=columnwise)


@pytest.mark.parametrize("shape", shapes.TEST_SHAPES, ids=lambda shape: shape.name.replace(" ", "-"))
def test_every_shape_and_skew(backend: str, shape: shapes.Shape) -> None:
    index = shapes.TEST_SHAPES.index(shape)
    for mode in some(backend, MODES, index):
        for skew in some(backend, shapes.TEST_SKEWS, index, count=5):
            sizes = shapes.group_sizes(shape, skew)
            check(tokens(shape, sizes), sizes, mode, label=f"{mode}, {skew},")


@each_mode
def test_features_around_the_ends_of_blocks(backend: str, mode: ScalingMode) -> None:
    sizes = np.array([127, 0, 1, 129, 40], np.int32)
    for features in some(backend, (16, 112, 128, 512), MODES.index(mode)):
        x = tokens(dataclasses.replace(SHAPE, K=features), sizes, "float16")
        check(x, sizes, mode, label=f"{features},", dtype="float8_e5m2")


#: Around the sizes of warps, thread blocks and shared memory.
GROUP_COUNTS = (1, 32, 33, 256, 257, 9000)


@pytest.mark.parametrize("groups", GROUP_COUNTS)
def test_many_groups(backend: str, groups: int) -> None:
    shape = shapes.Shape("counts", groups, tokens=300, K=16, N=1)
    for mode in some(backend, MODES, GROUP_COUNTS.index(groups)):
        for skew in some(backend, ("lognormal", "alternate_empty", "hostile"), GROUP_COUNTS.index(groups), count=2):
            sizes = shapes.group_sizes(shape, skew)
            check(tokens(shape, sizes), sizes, mode, label=f"{mode}, {skew},")


def test_every_pattern_of_empty_groups(backend: str) -> None:
    shape = shapes.Shape("patterns", num_groups=5, tokens=90, K=32, N=1)
    for mode in some(backend, MODES, MODES.index(ScalingMode.BLOCK_2D)):
        for pattern in itertools.product([0, 17], repeat=shape.num_groups):
            sizes = np.array(pattern, np.int32)
            check(tokens(shape, sizes), sizes, mode, label=f"{mode}, {pattern},")


def test_groups_of_more_than_512_rows(backend: str) -> None:
    # 512 rows are four blocks: as many as the scales of blocks are padded to.
    shape = dataclasses.replace(SHAPE, num_groups=4, tokens=1300)
    sizes = np.array([3, 513, 0, 700], np.int32)
    for mode in some(backend, MODES, MODES.index(ScalingMode.BLOCK_2D)):
        check(tokens(shape, sizes), sizes, mode, label=f"{mode},")


@each_mode
def test_stacks_of_equal_groups(backend: str, mode: ScalingMode) -> None:
    # Many groups, groups that are cut short, and groups of 600 rows and of 2880 features.
    for shape in some(backend, [(65, 1, 16), (3, 130, 144), (2, 600, 144), (2, 16, 2880)], MODES.index(mode)):
        magnitudes = np.geomspace(1e-3, 1e3, shape[0], dtype=np.float32)[:, None, None]
        x = np.random.default_rng(0).standard_normal(shape, np.float32) * magnitudes
        got = check(x, None, mode, label=f"{shape},")
        for copy in (got.rowwise, got.columnwise):
            assert copy is not None
            assert copy.shape == x.shape
            assert copy.group_sizes is None


@each_mode
def test_power_of_two_scales_and_epsilon(backend: str, mode: ScalingMode) -> None:
    sizes = shapes.group_sizes(SHAPE, "lognormal")
    x = tokens(SHAPE, sizes)
    x[sizes[0] :][: sizes[1]] = 0  # The epsilon also counts for what is zero.
    for pow2, epsilon in some(backend, [(True, 0.5), (True, 0.0), (False, 0.5)], MODES.index(mode)):
        check(x, sizes, mode, label=f"pow2 {pow2}, {epsilon},", pow2_scales=pow2, amax_epsilon=epsilon)


@each_type
def test_scales_are_rounded_right_over_the_whole_range_of_float32(backend: str, dtype: str) -> None:
    rng = np.random.default_rng(0)
    # One number, of any bits, decides the scale of its row; with it the products of the others round in all ways.
    first = rng.integers(0, 2**31, (4096, 1), np.uint32).view(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        x = np.concatenate([first, first * rng.uniform(-1, 1, (4096, 15)).astype(np.float32)], axis=1)
    check(x, np.array([4096], np.int32), ScalingMode.BLOCK_1D, dtype=dtype, columnwise=False)


@each_type
def test_every_16_bit_number_is_cast_right(backend: str, dtype: str) -> None:
    for x_type in some(backend, ["bfloat16", "float16"], FP8_TYPES.index(dtype)):
        x = np.arange(2**16, dtype=np.uint16).view(INPUT_TYPES[x_type]).reshape(-1, 16)
        sizes = np.array([len(x)], np.int32)
        for scale in (1.0, 0.75):
            given_scale = np.array([scale], np.float32)
            check(x, sizes, ScalingMode.TENSOR, label=f"{scale},", dtype=dtype, columnwise=False, scale=given_scale)


@each_mode
def test_optimized_programs_of_awkward_values_give_the_same_bits(backend: str, mode: ScalingMode) -> None:
    # As users compile them: elsewhere, tests on CPUs leave optimizations out.
    options = {"xla_backend_optimization_level": 3, "xla_llvm_disable_expensive_passes": False}

    def quantize(dtype: str, x: jax.Array, sizes: jax.Array) -> jg.GroupedQuantized:
        return jg.grouped_quantize(x, sizes, mode, dtype=dtype, columnwise=True)

    for dtype in some(backend, FP8_TYPES, MODES.index(mode)):
        optimized = jax.jit(functools.partial(quantize, dtype), compiler_options=options)
        for name, x in awkward_values().items():
            got = optimized(x, AWKWARD_SIZES)
            assert_quantized(f"{name}, {dtype},", got, quantize_oracle.quantize(x, AWKWARD_SIZES, mode, dtype=dtype))


GIVEN_SCALES = {
    "ordinary": [0.5, 3.0, 1e3, 1e-3, 0.0],
    "out of range": [-1.0, np.inf, -np.inf, 2.0**127, 2.0**-127],
    "nan": [np.nan, -0.0, 1.0, 1e-42, np.nan],
}


@each_type
def test_given_scales_are_used_and_brought_into_range(backend: str, dtype: str) -> None:
    for skew, (name, scales) in itertools.product(["lognormal", "tail", "empty_adjacent"], GIVEN_SCALES.items()):
        sizes = shapes.group_sizes(SHAPE, skew)
        scale = np.array(scales, np.float32)
        check(tokens(SHAPE, sizes), sizes, ScalingMode.TENSOR, label=f"{skew}, {name},", dtype=dtype, scale=scale)
    x = np.random.default_rng(0).standard_normal((3, 30, 48), np.float32)
    check(x, None, ScalingMode.TENSOR, label="stack,", scale=np.array([2.0, np.nan, 1e30], np.float32))


@each_type
def test_swizzled_scales_of_mx(backend: str, dtype: str) -> None:
    for features in some(backend, (16, 144, 544), 1 + FP8_TYPES.index(dtype)):
        shape = dataclasses.replace(SHAPE, K=features)
        for skew in ("lognormal", "one_hot", "hostile", "all_empty"):
            sizes = shapes.group_sizes(shape, skew)
            check(tokens(shape, sizes), sizes, ScalingMode.MX, label=skew, dtype=dtype, swizzled_scales=True)
    x = np.random.default_rng(0).standard_normal((3, 130, 144), np.float32)
    check(x, None, ScalingMode.MX, label="stack", dtype=dtype, swizzled_scales=True)


@pytest.mark.parametrize("dtype", ["int8", "uint32"])
def test_group_sizes_of_any_integer_type(backend: str, dtype: str) -> None:
    sizes = np.array([7, 0, 100, 127, 3]).astype(dtype)
    check(tokens(SHAPE, sizes), sizes, ScalingMode.BLOCK_1D)


def test_64_bit_sizes_of_the_host_do_not_wrap(backend: str) -> None:
    clamped = np.array([7, SHAPE.tokens - 7, 0, 0, 0], np.int32)
    x = tokens(SHAPE, clamped)
    expected = quantize_oracle.quantize(x, clamped, ScalingMode.BLOCK_1D)
    for sizes in ([7, 2**40, 1, 0, 0], np.array([7, 2**63, 1, 0, 0], np.uint64), np.array([7, 2**31, -1, 0, 0])):
        assert_quantized("", jg.grouped_quantize(x, sizes, ScalingMode.BLOCK_1D, columnwise=True), expected)


def test_same_inputs_give_the_same_bits(backend: str) -> None:
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


@each_mode
def test_dbias_sums_the_rows_of_each_group(backend: str, mode: ScalingMode) -> None:
    for dtype in some(backend, list(INPUT_TYPES), MODES.index(mode)):
        for skew in ("lognormal", "tail", "one_hot", "empty_first", "all_empty"):
            label = f"{dtype}, {skew},"
            sizes = shapes.group_sizes(SHAPE, skew)
            x = tokens(SHAPE, sizes, dtype)
            got = check(x, sizes, mode, label=label, dbias=True)
            assert_dbias(label, got.dbias, x, sizes)
            assert not np.any(np.asarray(got.dbias)[sizes == 0]), "empty groups have the sum zero"
    x = np.random.default_rng(0).standard_normal((3, 130, 144), np.float32)
    assert_dbias("stack", check(x, None, mode, label="stack", dbias=True).dbias, x.reshape(-1, 144), np.full(3, 130))


def test_dbias_shows_what_is_not_finite_in_its_own_column_only(backend: str) -> None:
    sizes = np.array([30, 0, 40, 200, 10], np.int32)
    x = tokens(SHAPE, sizes, "float32")
    x[3, 5], x[40, 7], x[60, 7], x[150, 130], x[279, 0] = np.nan, np.inf, -np.inf, -np.inf, np.nan
    assert_dbias("", check(x, sizes, ScalingMode.BLOCK_1D, dbias=True).dbias, x, sizes)


@pytest.mark.gpu
@each_mode
def test_more_than_2_to_the_31_elements(mode: ScalingMode) -> None:
    check_last_group(mode, rows=2**20 + 3, features=2064)


def check_last_group(mode: ScalingMode, rows: int, features: int) -> None:
    """Compares a group of 200 rows behind `rows` rows of the value 3, which a position that wraps would overwrite."""
    last = np.random.default_rng(0).standard_normal((200, features), np.float32).astype(ml_dtypes.bfloat16)
    expected = quantize_oracle.quantize(last, np.array([200], np.int32), mode)
    x = jnp.concatenate([jnp.full((rows, features), 3, jnp.bfloat16), jnp.asarray(last)])
    got = jg.grouped_quantize(x, jnp.array([rows, 200]), mode, columnwise=True)
    assert_same_bits("amax", got.amax, np.array([3, expected.amax[0]], np.float32))

    def slice_of(array: jax.Array, start: int, count: int) -> np.ndarray:
        return as_bytes(jax.lax.slice_in_dim(array, start, start + count))

    @functools.partial(jax.jit, static_argnums=1)
    def how_many(data: jax.Array, count: int, number: jax.Array) -> jax.Array:
        # Count in two steps: the total does not fit into 32 bits.
        same = jax.lax.slice_in_dim(data, 0, count).astype(jnp.float32) == number
        return jnp.sum(same.reshape(features, -1), axis=1, dtype=jnp.int32)

    number = got.rowwise.data[0, 0].astype(jnp.float32)
    assert np.all(how_many(got.rowwise.data, rows, number) == rows)
    assert_same_bits("rowwise", slice_of(got.rowwise.data, rows, 200), expected.rowwise.data)
    before = (rows + 15) // 16 * 16 * features
    assert np.all(how_many(got.columnwise.data, before, number) == rows)
    columnwise = slice_of(got.columnwise.data, before, expected.columnwise.data.size)
    assert_same_bits("columnwise", columnwise, expected.columnwise.data)
    for copy, last_copy in ((got.rowwise, expected.rowwise), (got.columnwise, expected.columnwise)):
        numbers = slice_of(jg.grouped_dequantize(copy, jnp.bfloat16), rows, 200)
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


def test_given_scales_are_brought_into_range_without_tokens_too(backend: str) -> None:
    scale = jnp.array([0.0, 4.0, jnp.inf])
    got = jg.grouped_quantize(jnp.ones((0, 16)), jnp.zeros(3, jnp.int32), ScalingMode.TENSOR, scale=scale)
    np.testing.assert_array_equal(got.rowwise.scale_inv, np.array([2.0**126, 0.25, 2.0**-126], np.float32))


@dataclasses.dataclass(frozen=True)
class Case:
    """Static parameters of the search below, which compiles for each."""

    tokens: int
    features: int
    groups: int
    mode: ScalingMode
    dtype: str = "float8_e4m3fn"
    options: tuple[tuple[str, Any], ...] = ()
    given_scale: bool = False

    @property
    def id(self) -> str:
        flags = [name for name, _ in self.options] + ["given scale"] * self.given_scale
        return "-".join([self.mode.value, self.dtype, f"{self.tokens}x{self.features}", *flags])


CASES = (
    Case(1, 16, 1, ScalingMode.BLOCK_1D),
    Case(150, 144, 4, ScalingMode.BLOCK_1D, "float8_e5m2"),
    Case(150, 144, 4, ScalingMode.BLOCK_2D, options=(("pow2_scales", True),)),
    Case(40, 32, 9, ScalingMode.BLOCK_2D, "float8_e5m2"),
    Case(150, 144, 4, ScalingMode.TENSOR, options=(("amax_epsilon", 1e-30),)),
    Case(150, 144, 4, ScalingMode.TENSOR, "float8_e5m2", given_scale=True),
    Case(150, 144, 4, ScalingMode.MX),
    Case(40, 32, 9, ScalingMode.MX, "float8_e5m2", options=(("swizzled_scales", True),)),
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


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_values_in_groups_of_any_sizes(backend: str, case: Case, data: st.DataObject) -> None:
    x, sizes, scale = data.draw(inputs(case))
    check(x, sizes, case.mode, dtype=case.dtype, scale=scale, **dict(case.options))
