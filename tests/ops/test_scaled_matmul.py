"""Products of quantized operands against NumPy in float64, on the very same operands; `scaled_ragged_dot`."""

import dataclasses
import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jax_grouped as jg
from benchmarks import shapes
from jax_grouped import ScalingMode
from jax_grouped.core.groups import Groups
from jax_grouped.fp8.layout import QuantizedLayout
from jax_grouped.kernels import primitive
from jax_grouped.kernels.product import GemmSpec, Product, multiply
from tests import oracle, quantize_oracle
from tests.operands import normal, random_operands
from tests.ops.quantize_cases import some
from tests.programs import custom_calls, lowered, struct, types
from tests.refusals import assert_refused

pytestmark = pytest.mark.slow

PRODUCTS: list[Product] = ["fprop", "dgrad", "wgrad"]
#: Modes of tokens and of kernels.
MODES = {
    "block": (ScalingMode.BLOCK_1D, ScalingMode.BLOCK_2D),
    "tensor": (ScalingMode.TENSOR, ScalingMode.TENSOR),
    "mx": (ScalingMode.MX, ScalingMode.MX),
}
E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
E8M0_NAN = 0xFF
TYPE_PAIRS = [(E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3)]

#: Two blocks of rows and of either kind of features, some of them short.
SHAPE = shapes.Shape("unaligned", num_groups=5, tokens=300, K=144, N=272)
RAGGED = np.array([1, 37, 0, 130, 2], np.int32)

#: Groups of many blocks of tokens.
LONG_GROUPS = shapes.Shape("long groups", num_groups=2, tokens=1600, K=144, N=272)
#: Deepest sum for which Hopper has a kernel of the library for tokens and weights. Tiles must also be few, or full with
#: 256 tokens per group.
DEEPEST = 4096
#: Most tokens per group for which it has another one, for sums of any depth.
SMALL_GROUP = 64
FULL_TILES = dataclasses.replace(SHAPE, tokens=1300)
FULL_TILES_OF_MANY = shapes.Shape("many full tiles", num_groups=37, tokens=37 * 256, K=528, N=784)


@dataclasses.dataclass(frozen=True)
class Operand:
    """Quantized numbers as the product reads them, and their values."""

    data: np.ndarray
    scale_inv: np.ndarray
    layout: QuantizedLayout
    dequantized: np.ndarray


@dataclasses.dataclass(frozen=True)
class Case:
    """The operands of one product, with its groups and its result in float64."""

    a: Operand
    b: Operand
    sizes: np.ndarray
    offset: int
    product: Product
    expected: np.ndarray

    @property
    def arrays(self) -> tuple[jax.Array, ...]:
        offset = np.array([self.offset], np.int32)
        # The oracle gives E8M0 numbers as bytes.
        e8m0 = {np.dtype(np.uint8): ml_dtypes.float8_e8m0fnu}
        scales = [one.scale_inv.view(e8m0.get(one.scale_inv.dtype, np.float32)) for one in (self.a, self.b)]
        arrays = self.a.data, scales[0], self.b.data, scales[1], self.sizes, offset
        return tuple(jnp.asarray(array) for array in arrays)

    def multiply(self, *arrays: jax.Array, out_dtype: str = "float32") -> jax.Array:
        a_data, a_scale, b_data, b_scale, sizes, offset, *accumulator = arrays
        a = jg.ScaledArray(a_data, a_scale, None, self.a.layout)
        b = jg.ScaledArray(b_data, b_scale, None, self.b.layout)
        spec = GemmSpec(self.product, self.a.layout.num_groups, jnp.dtype(out_dtype))
        return multiply(a, b, Groups(sizes, offset), spec, *accumulator)

    def check(self, out_dtype: str = "float32") -> None:
        out = self.multiply(*self.arrays, out_dtype=out_dtype)
        assert out.dtype == out_dtype
        self.compare(np.asarray(out), oracle.fp8_tolerance(out_dtype))

    def check_accumulation(self) -> None:
        accumulator = normal(0, self.expected.shape)
        self.compare_accumulated(self.multiply(*self.arrays, accumulator), accumulator)

    def compare_accumulated(self, out: jax.Array, accumulator: jax.Array) -> None:
        self.compare(np.asarray(out, np.float64) - np.asarray(accumulator), 2 * oracle.fp8_tolerance())

    def compare(self, out: np.ndarray, tolerance: float) -> None:
        if self.product == "wgrad":
            oracle.assert_kernels_close(out, self.expected, tolerance)
        else:
            groups = self.a.layout.num_groups
            oracle.assert_groups_close(out, self.expected, self.sizes, groups, tolerance, self.offset)


def filled(array: np.ndarray, shape: tuple[int, ...], poison: int | float) -> np.ndarray:
    """Returns an array of this shape that starts with these elements."""
    flat = np.full(math.prod(shape), poison, array.dtype)
    flat[: array.size] = array.ravel()
    return flat.reshape(shape)


def quantized_tokens(
    x: np.ndarray, sizes: np.ndarray, offset: int, num_groups: int, mode: ScalingMode, dtype: str, *, columnwise: bool
) -> Operand:
    """Returns the tokens of the groups from `offset` on, with NaN wherever nothing may be read."""
    local = dict(oracle.local_groups(sizes, num_groups, len(x), offset))
    starts = [rows.start for rows in local.values()]
    first = min(starts, default=0)
    lengths = [local[group].stop - local[group].start if group in local else 0 for group in range(num_groups)]
    quantized = quantize_oracle.quantize(x[first:], np.array(lengths), mode, dtype=dtype)
    copy = quantized.columnwise if columnwise else quantized.rowwise
    layout = QuantizedLayout(mode, columnwise, x.shape[0], x.shape[1], num_groups)
    if columnwise:
        data = filled(copy.data, layout.data_shape, quantize_oracle.NAN)
    else:
        data = np.full(layout.data_shape, quantize_oracle.NAN, np.uint8)
        data[first : first + sum(lengths)] = copy.data[: sum(lengths)]
    dequantized = np.concatenate([np.zeros((first, x.shape[1]), np.float32), copy.dequantized])
    scale_inv = filled(copy.scale_inv, layout.scale_shape, E8M0_NAN if mode == ScalingMode.MX else np.nan)
    return Operand(data.view(quantize_oracle.FP8[dtype]), scale_inv, layout, dequantized)


def quantized_kernels(kernel: np.ndarray, mode: ScalingMode, dtype: str, *, columnwise: bool) -> Operand:
    groups, rows, features = kernel.shape
    quantized = quantize_oracle.quantize(kernel, None, mode, dtype=dtype)
    copy = quantized.columnwise if columnwise else quantized.rowwise
    layout = QuantizedLayout(mode, columnwise, groups * rows, features, groups, stack_rows=rows)
    scale_inv = copy.scale_inv.reshape(layout.scale_shape)
    return Operand(copy.data.view(quantize_oracle.FP8[dtype]), scale_inv, layout, copy.dequantized)


def make_case(
    product: Product,
    mode: str,
    pair: tuple[str, str] = (E4M3, E4M3),
    shape: shapes.Shape = SHAPE,
    sizes: np.ndarray = RAGGED,
    *,
    offset: int = 0,
    magnitude: float = 1e2,
    seed: int = 0,
) -> Case:
    whole = dataclasses.replace(shape, num_groups=len(sizes))
    at = random_operands(whole, sizes, np.float32, magnitude=magnitude, seed=seed)
    kernel = at.kernel[: shape.num_groups]
    token_mode, kernel_mode = MODES[mode]

    def tokens(x: np.ndarray, dtype: str, *, columnwise: bool) -> Operand:
        return quantized_tokens(x, sizes, offset, shape.num_groups, token_mode, dtype, columnwise=columnwise)

    if product == "wgrad":
        a, b = tokens(at.x, pair[0], columnwise=True), tokens(at.dy, pair[1], columnwise=True)
        expected = oracle.wgrad(a.dequantized, b.dequantized, sizes, shape.num_groups, offset)
    else:
        forward = product == "fprop"
        a = tokens(at.x if forward else at.dy, pair[0], columnwise=False)
        b = quantized_kernels(kernel, kernel_mode, pair[1], columnwise=forward)
        multiply = oracle.fprop if forward else oracle.dgrad
        expected = multiply(a.dequantized, b.dequantized, sizes, offset)
    return Case(a, b, sizes, offset, product, expected)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("product", PRODUCTS)
def test_products_match_numpy(backend: str, product: Product, mode: str) -> None:
    for pair in some(backend, TYPE_PAIRS, PRODUCTS.index(product) + list(MODES).index(mode)):
        make_case(product, mode, pair).check()
        for skew in ("lognormal", "tail", "hostile", "empty_first", "all_empty"):
            make_case(product, mode, pair, sizes=shapes.group_sizes(SHAPE, skew)).check()


def test_wgrad_adds_to_an_accumulator(backend: str) -> None:
    for mode in some(backend, MODES, 0):
        make_case("wgrad", mode).check_accumulation()
        make_case("wgrad", mode, sizes=shapes.group_sizes(SHAPE, "all_empty")).check_accumulation()
        for shape in some(backend, [LONG_GROUPS, dataclasses.replace(LONG_GROUPS, K=48, N=16)], 1):
            for sizes in ((1000, 600), (1700, 0), (0, 0)):
                make_case("wgrad", mode, shape=shape, sizes=np.array(sizes, np.int32)).check_accumulation()


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["block", "tensor"])
def test_hopper_has_kernels_of_ours(mode: str) -> None:
    module = primitive.load_extension()
    assert module is not None
    on_hopper = jax.devices()[0].compute_capability == "9.0"

    def check_plan(case: Case, result: str, tokens: int, K: int, N: int, ours: bool = True) -> None:
        wanted = f" {case.product} ", f"{result}, E 2 T {tokens} K {K} N {N}: "
        lines = [line for line in module.describe_plans() if all(word in line for word in wanted)]
        lines = [line for line in lines if ("1x128" in line) == (mode == "block")]
        assert lines, wanted
        assert all(line.endswith("kernel of jax_grouped") == (ours and on_hopper) for line in lines), lines

    for tokens, out_dtype, accumulate in ((16, "bfloat16", False), (1520, "float16", False), (16, "float32", True)):
        shape = dataclasses.replace(LONG_GROUPS, tokens=tokens)
        case = make_case("wgrad", mode, shape=shape, sizes=np.array([tokens, 0], np.int32))
        if accumulate:
            case.check_accumulation()
        else:
            case.check(out_dtype)
        result = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}[out_dtype]
        check_plan(case, f"{'onto' if accumulate else '->'} {result}", tokens, shape.K, shape.N)
    for tokens, depth, features, ours in (
        (512, DEEPEST, 48, True),  # full tiles
        (496, DEEPEST, 48, True),  # few tiles
        (496, 48, 45 * 128, True),  # up to two tiles per multiprocessor
        (496, 48, 90 * 128, False),  # many tiles that are not full
        (512, DEEPEST + 16, 48, False),  # too deep
        (2 * SMALL_GROUP, DEEPEST + 16, 90 * 128, True),
        (2 * SMALL_GROUP + 2, DEEPEST + 16, 90 * 128, False),
    ):
        for product, K, N in (("fprop", depth, features), ("dgrad", features, depth)):
            shape = shapes.Shape("boundary", num_groups=2, tokens=tokens, K=K, N=N)
            case = make_case(product, mode, shape=shape, sizes=np.array([tokens - 7, 7], np.int32))
            case.check("bfloat16")
            check_plan(case, "-> bf16", tokens, K, N, ours)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["cuda"], indirect=True)
@pytest.mark.parametrize("mode", ["block", "tensor"])
@pytest.mark.parametrize("product", ["fprop", "dgrad"])
@pytest.mark.parametrize("kind", ["full tiles", "too deep", "small groups"])
def test_kernels_of_each_kind(backend: str, kind: str, product: Product, mode: str) -> None:
    shape = FULL_TILES
    if kind != "full tiles":
        K, N = (DEEPEST + 16, 48) if product == "fprop" else (48, DEEPEST + 16)
        tokens = 5 * SMALL_GROUP + (100 if kind == "too deep" else 0)
        shape = dataclasses.replace(SHAPE, tokens=tokens, K=K, N=N)
    for pair, out_dtype in zip(TYPE_PAIRS, ["float32", "bfloat16", "float16"], strict=True):
        for skew in ("lognormal", "tail", "hostile", "empty_first", "all_empty", "one_hot"):
            make_case(product, mode, pair, shape, shapes.group_sizes(shape, skew), magnitude=2.0).check(out_dtype)
    sizes = np.array([900, 20, 0, 31, 7, 1, 44, 13], np.int32)
    for offset in (-2, 0, 2, 4, 9, 2**31 - 1):
        make_case(product, mode, shape=shape, sizes=sizes, offset=offset).check()
    check_vmap(product, mode, shape)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["cuda"], indirect=True)
@pytest.mark.parametrize("mode", ["block", "tensor"])
@pytest.mark.parametrize("tokens", [256, 40])
def test_tiles_of_many_groups(backend: str, tokens: int, mode: str) -> None:
    shape = dataclasses.replace(FULL_TILES_OF_MANY, tokens=37 * tokens)
    sizes = shapes.group_sizes(shape, "lognormal").copy()
    sizes[[3, 20]] = 0
    for product in PRODUCTS:
        case = make_case(product, mode, shape=shape, sizes=sizes)
        case.check()
        if product == "wgrad":
            case.check_accumulation()


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["cuda"], indirect=True)
@pytest.mark.parametrize("mode", ["block", "tensor"])
@pytest.mark.parametrize("groups", [256, 257], ids=["found-in-blocks", "found-by-a-setup"])
def test_small_groups_that_blocks_find_or_a_setup(backend: str, groups: int, mode: str) -> None:
    shape = shapes.Shape("small groups", groups, 4 * groups, 48, 144)
    sizes = np.random.default_rng(groups).integers(0, 7, groups + 3).astype(np.int32)
    cases: list[tuple[Product, int]] = [("fprop", 0), ("dgrad", 2), ("fprop", groups // 2)]
    for product, offset in cases:
        make_case(product, mode, shape=shape, sizes=sizes, offset=offset, magnitude=2.0).check()


SHAPES = [
    shapes.Shape("2880 in", 3, 130, 2880, 48),
    shapes.Shape("2880 out", 3, 130, 48, 2880),
    shapes.Shape("37 groups", 37, 257, 16, 32),
    shapes.Shape("one token", 3, 1, 16, 16),
]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name.replace(" ", "-"))
def test_other_shapes(backend: str, shape: shapes.Shape) -> None:
    for product in some(backend, PRODUCTS, SHAPES.index(shape)):
        for mode in some(backend, MODES, SHAPES.index(shape) // 2):
            make_case(product, mode, shape=shape, sizes=shapes.group_sizes(shape, "lognormal")).check()


@pytest.mark.parametrize("product", PRODUCTS)
def test_results_of_16_bits_for_the_groups_of_a_longer_list(backend: str, product: Product) -> None:
    shape = shapes.Shape("local", num_groups=3, tokens=130, K=48, N=144)
    sizes = np.array([20, 0, 31, 7, 1, 44, 13], np.int32)
    for mode in some(backend, MODES, PRODUCTS.index(product) + 1):
        for out_dtype in some(backend, ["bfloat16", "float16"], PRODUCTS.index(product)):
            for offset in (-2, 0, 2, 4, 6, 9, 2**31 - 1):
                make_case(product, mode, shape=shape, sizes=sizes, offset=offset, magnitude=2.0).check(out_dtype)


def test_vmap_makes_more_groups_and_shares_kernels(backend: str) -> None:
    for i, mode in some(backend, enumerate(MODES), 2, count=2):
        for product in some(backend, PRODUCTS, i):
            check_vmap(product, mode, SHAPE)


def check_vmap(product: Product, mode: str, shape: shapes.Shape) -> None:
    """Checks two elements of a batch, with kernels of their own and with the same kernels."""
    cases = [make_case(product, mode, shape=shape, seed=seed) for seed in range(2)]
    stacked = [jnp.stack(parts) for parts in zip(*(case.arrays for case in cases), strict=True)]
    for case, result in zip(cases, jax.vmap(cases[0].multiply)(*stacked), strict=True):
        case.compare(np.asarray(result), oracle.fp8_tolerance())
    if product == "wgrad":
        accumulators = normal(0, (2, *cases[0].expected.shape))
        out = jax.vmap(cases[0].multiply)(*stacked, accumulators)
        for case, got, accumulator in zip(cases, out, accumulators, strict=True):
            case.compare_accumulated(got, accumulator)
        return
    arrays = [*stacked[:2], *cases[0].arrays[2:4], *stacked[4:]]
    out = jax.vmap(cases[0].multiply, (0, 0, None, None, 0, 0))(*arrays)
    cases[0].compare(np.asarray(out[0]), oracle.fp8_tolerance())
    reference = oracle.fprop if product == "fprop" else oracle.dgrad
    expected = reference(cases[1].a.dequantized, cases[0].b.dequantized, RAGGED)
    oracle.assert_groups_close(np.asarray(out[1]), expected, RAGGED, shape.num_groups, oracle.fp8_tolerance())


def call_types(case: Case, *axes: int | None) -> tuple[list[str], int]:
    """Returns the operands' types of the one custom call, under vmap with axes, and the number of its weights."""
    structs = [struct(array.shape, array.dtype) for array in case.arrays]
    multiply = case.multiply
    if axes:
        multiply = jax.vmap(multiply, axes)
        structs = [x if axis is None else struct((3, *x.shape), x.dtype) for x, axis in zip(structs, axes, strict=True)]
    (call,) = custom_calls(lowered(multiply, *structs))
    assert "@jax_grouped_gemm(" in call
    assert "scaled = true" in call
    (weight_batch,) = re.findall(r"weight_batch = (\d+) : i64", call)
    return types(call)[0], int(weight_batch)


def test_a_product_is_one_custom_call_that_copies_no_kernel_under_vmap(monkeypatch: pytest.MonkeyPatch) -> None:
    # As for a GPU with products of every format.
    monkeypatch.setattr(primitive, "has_mx_products", lambda: True)
    monkeypatch.setattr(primitive, "require_block_scaling", lambda: None)
    for mode in MODES:
        assert call_types(make_case("wgrad", mode), *(0,) * 6)[1] == 3
        case = make_case("fprop" if mode == "block" else "dgrad", mode)
        operands, weight_batch = call_types(case)
        assert weight_batch == 1
        batched, weight_batch = call_types(case, 0, 0, None, None, 0, 0)
        assert weight_batch == 1
        assert (batched[1], batched[5]) == (operands[1], operands[5])
        # Kernels and their scales are shared together, or neither.
        for axes in ((0, 0), (None, 0), (0, None)):
            batched, weight_batch = call_types(case, 0, 0, *axes, 0, 0)
            assert weight_batch == 3
            assert [operand.split("x")[0] for operand in (batched[1], batched[5])] == ["15", "15"]


def test_hopper_multiplies_mx_numbers_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(primitive, "has_mx_products", lambda: False)
    for product in PRODUCTS:
        case = make_case(product, "mx")
        calls = custom_calls(lowered(case.multiply, *(struct(array.shape, array.dtype) for array in case.arrays)))
        targets = [call.split("@")[1].split("(")[0] for call in calls]
        assert targets == ["jax_grouped_dequantize", "jax_grouped_dequantize", "jax_grouped_gemm"]


T, K, N, E = 96, 256, 128, 4
SIZES = jnp.array([40, 0, 33, 11], jnp.int32)  # 12 rows are of no group.
RECIPES = {
    "current": jg.Float8CurrentScaling(),
    "block": jg.Float8BlockScaling(),
    "mx": jg.MXFP8BlockScaling(),
}


def operands() -> tuple[jax.Array, ...]:
    """Returns tokens, kernels and a gradient of the result."""
    shapes = (T, K), (E, K, N), (T, N)
    return tuple(normal(seed, shape, jnp.bfloat16) for seed, shape in enumerate(shapes))


def quantized(x: jax.Array, recipe: jg.Recipe, dtype: Any = jnp.float8_e4m3fn) -> jg.GroupedQuantized:
    """Returns both orientations of tokens or of a stack, as `grouped_dense` makes them."""
    stack = x.ndim == 3
    return jg.grouped_quantize(
        x,
        None if stack else SIZES,
        recipe.kernel_mode if stack else recipe.token_mode,
        dtype=dtype,
        columnwise=True,
        pow2_scales=getattr(recipe, "pow2_scales", False),
    )


def test_a_rule_of_ones_own_gives_the_bits_of_grouped_dense(backend: str) -> None:
    for name in some(backend, ["mx", "current", "block"], 0):
        check_own_rule(RECIPES[name])


def check_own_rule(recipe: jg.Recipe) -> None:
    x, kernel, dy = operands()
    start = jnp.arange(E * K * N, dtype=jnp.float32).reshape(E, K, N) / 1000

    @jax.jit
    def results(x: jax.Array, kernel: jax.Array, dy: jax.Array) -> tuple[Any, ...]:
        tokens, gradient = quantized(x, recipe), quantized(dy, recipe, recipe.grad_dtype)
        kernels = quantized(kernel, recipe)
        pair = tokens.columnwise, gradient.columnwise
        own = (
            jg.scaled_ragged_dot(tokens.rowwise, kernels.columnwise, SIZES),
            jg.scaled_ragged_dot(gradient.rowwise, kernels.rowwise, SIZES),
            jg.scaled_ragged_dot(*pair, SIZES),
        )
        y, pull_back = jax.vjp(lambda x, kernel: jg.grouped_dense(x, kernel, SIZES, recipe=recipe), x, kernel)
        in_float32 = functools.partial(jg.scaled_ragged_dot, *pair, SIZES, preferred_element_type=jnp.float32)
        return own, (y, *pull_back(dy)), in_float32(), in_float32(accumulator=start)

    own, expected, plain, added = results(x, kernel, dy)
    for got, dense_result in zip(own, expected, strict=True):
        assert got.dtype == jnp.bfloat16
        np.testing.assert_array_equal(got, dense_result)
    # The result is not that of nothing.
    np.testing.assert_allclose(own[0], jg.ragged_dot(x, kernel, SIZES), rtol=0.2, atol=3)
    np.testing.assert_allclose(added, start + plain, rtol=1e-6, atol=1e-4)
    np.testing.assert_array_equal(added[1], start[1])


def test_a_cache_of_kernels_is_an_operand_and_batches_are_more_groups(backend: str) -> None:
    x, kernel, _ = operands()
    block = RECIPES["block"]
    kernels = jg.quantize_kernel(kernel, block).columnwise

    def product(x: jax.Array) -> jax.Array:
        return jg.scaled_ragged_dot(quantized(x, block).rowwise, kernels, SIZES, preferred_element_type=jnp.float32)

    got = jax.vmap(product)(jnp.stack([x, 2 * x]))

    dense = functools.partial(jg.grouped_dense, recipe=block, preferred_element_type=jnp.float32)
    np.testing.assert_array_equal(product(x), dense(x, kernel, SIZES))
    np.testing.assert_array_equal(got, jnp.stack([product(x), product(2 * x)]))


def test_what_does_not_fit_is_named() -> None:
    x, kernel, dy = operands()
    block, current = RECIPES["block"], RECIPES["current"]

    @jax.eval_shape
    def arrays() -> tuple[Any, ...]:
        return (
            [quantized(array, block) for array in (x, dy, kernel)],
            [quantized(array, current, jnp.float8_e5m2) for array in (x, kernel)],
        )

    (tokens, gradient, kernels), e5m2 = arrays
    refused: dict[str, dict[str, Any]] = {
        "lhs must be a ScaledArray, got ArrayImpl.": dict(lhs=x),
        "The operands must be rowwise tokens and a stack, or two columnwise arrays of tokens, got lhs "
        "QuantizedLayout(mode=<ScalingMode.BLOCK_1D: 'block_1d'>, columnwise=True, ": dict(lhs=tokens.columnwise),
        "lhs and rhs must have as many groups, and the same size along the axis of the sum, got 4 groups of (96, 128) "
        "and 4 of (4, 256, 128).": dict(lhs=gradient.rowwise),
        "This product has no operands of ScalingMode.BLOCK_1D and ScalingMode.TENSOR.": dict(rhs=e5m2[1].columnwise),
        "Of lhs and rhs, only one may be float8_e5m2.": dict(lhs=e5m2[0].rowwise, rhs=e5m2[1].columnwise),
        "group_sizes must have one entry per group of lhs, which holds 4, got 3": dict(group_sizes=SIZES[:3]),
        "accumulator is for the product of two columnwise arrays of tokens.": dict(accumulator=x),
        "accumulator must be like the result, bfloat16 (4, 256, 128), got bfloat16": dict(
            lhs=tokens.columnwise, rhs=gradient.columnwise, accumulator=x
        ),
    }
    given = dict(lhs=tokens.rowwise, rhs=kernels.columnwise, group_sizes=SIZES)
    assert_refused(jg.scaled_ragged_dot, given, refused)

    def loss(scales: jax.Array) -> jax.Array:
        scaled = dataclasses.replace(tokens.rowwise, scale_inv=scales)
        return jnp.sum(jg.scaled_ragged_dot(scaled, kernels.columnwise, SIZES, preferred_element_type=jnp.float32))

    with pytest.raises(NotImplementedError, match="jax_grouped_gemm has no derivative of its own"):
        jax.eval_shape(jax.grad(loss), tokens.rowwise.scale_inv)
