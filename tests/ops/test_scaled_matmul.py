"""Products of quantized operands against NumPy in float64, on the very same operands."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jax_grouped as jg
from benchmarks import shapes
from jax_grouped import ScalingMode
from jax_grouped.backends import extension
from jax_grouped.backends.spec import GemmSpec, Product
from jax_grouped.core.groups import Groups, gemm_scratch_bytes
from jax_grouped.fp8.layout import QuantizedLayout
from jax_grouped.ops.gemm import gemm
from tests import oracle, quantize_oracle
from tests.operands import random_operands
from tests.ops.quantize_cases import some
from tests.programs import custom_calls, lowered, struct, types

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

#: Case with at least 768 tokens per group, for which Hopper has a kernel of the library for wgrad, also with an
#: accumulator.
LONG_GROUPS = shapes.Shape("long groups", num_groups=2, tokens=1600, K=144, N=272)
#: Tokens, type of the result, and whether there is an accumulator.
WGRADS = [
    (16, "bfloat16", False),
    (1520, "float16", False),
    (1520, "float32", False),
    (1520, "float32", True),
    (1536, "float32", True),
]

#: Deepest sum for which Hopper has a kernel of the library for tokens and weights. Tiles must also be few, or full with
#: 256 tokens per group.
DEEPEST = 3072
#: Most tokens per group for which it has another one, for sums of any depth.
SMALL_GROUP = 64
FULL_TILES = dataclasses.replace(SHAPE, tokens=1300)
FULL_TILES_OF_MANY = shapes.Shape("many full tiles", num_groups=37, tokens=37 * 256, K=528, N=784)

each_product = pytest.mark.parametrize("product", PRODUCTS)
each_mode = pytest.mark.parametrize("mode", MODES)


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
        arrays = self.a.data, self.a.scale_inv, self.b.data, self.b.scale_inv, self.sizes, offset
        return tuple(jnp.asarray(array) for array in arrays)

    def multiply(
        self,
        a_data: jax.Array,
        a_scale: jax.Array,
        b_data: jax.Array,
        b_scale: jax.Array,
        sizes: jax.Array,
        offset: jax.Array,
        *accumulator: jax.Array,
        out_dtype: str = "float32",
    ) -> jax.Array:
        a = jg.ScaledArray(a_data, a_scale, None, self.a.layout)
        b = jg.ScaledArray(b_data, b_scale, None, self.b.layout)
        spec = GemmSpec(self.product, self.a.layout.num_groups, out_dtype)
        return gemm(a, b, Groups(sizes, offset), spec, *accumulator)

    def check(self, out_dtype: str = "float32") -> None:
        out = self.multiply(*self.arrays, out_dtype=out_dtype)
        assert out.dtype == out_dtype
        self.compare(np.asarray(out), oracle.fp8_tolerance(out_dtype))

    def check_accumulation(self) -> None:
        accumulator = jnp.full(self.expected.shape, 0.5, jnp.float32)
        out = self.multiply(*self.arrays, accumulator)
        self.compare(np.asarray(out, np.float64) - 0.5, 2 * oracle.fp8_tolerance())

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


def as_scales(scale_inv: np.ndarray) -> np.ndarray:
    """Converts inverse scales to the type in arrays; the oracle gives E8M0 numbers as bytes."""
    return scale_inv.view(ml_dtypes.float8_e8m0fnu) if scale_inv.dtype == np.uint8 else scale_inv


def quantized_tokens(
    x: np.ndarray, sizes: np.ndarray, offset: int, num_groups: int, mode: ScalingMode, dtype: str, *, columnwise: bool
) -> Operand:
    """Returns the tokens of the groups from `offset` on, with NaN wherever nothing may be read."""
    local = dict(oracle.local_groups(sizes, num_groups, len(x), offset))
    starts = [rows.start for rows in local.values()]
    first = min(starts, default=0)
    lengths = [local[group].stop - local[group].start if group in local else 0 for group in range(num_groups)]
    mx = mode == ScalingMode.MX
    quantized = quantize_oracle.quantize(x[first:], np.array(lengths), mode, dtype=dtype, swizzled_scales=mx)
    copy = quantized.columnwise if columnwise else quantized.rowwise
    layout = QuantizedLayout(mode, columnwise, x.shape[0], x.shape[1], num_groups, swizzled_scales=mx)
    if columnwise:
        data = filled(copy.data, layout.data_shape, quantize_oracle.NAN)
    else:
        data = np.full(layout.data_shape, quantize_oracle.NAN, np.uint8)
        data[first : first + sum(lengths)] = copy.data[: sum(lengths)]
    dequantized = np.concatenate([np.zeros((first, x.shape[1]), np.float32), copy.dequantized])
    scale_inv = filled(copy.scale_inv, layout.scale_shape, E8M0_NAN if mx else np.nan)
    return Operand(data.view(quantize_oracle.FP8[dtype]), as_scales(scale_inv), layout, dequantized)


def quantized_kernels(kernel: np.ndarray, mode: ScalingMode, dtype: str, *, columnwise: bool) -> Operand:
    groups, rows, features = kernel.shape
    mx = mode == ScalingMode.MX
    quantized = quantize_oracle.quantize(kernel, None, mode, dtype=dtype, swizzled_scales=mx)
    copy = quantized.columnwise if columnwise else quantized.rowwise
    layout = QuantizedLayout(mode, columnwise, groups * rows, features, groups, stack_rows=rows, swizzled_scales=mx)
    scale_inv = as_scales(copy.scale_inv.reshape(layout.scale_shape))
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


@each_mode
@each_product
def test_products_match_numpy(backend: str, product: Product, mode: str) -> None:
    for pair in some(backend, TYPE_PAIRS, PRODUCTS.index(product) + list(MODES).index(mode)):
        make_case(product, mode, pair).check()
        for skew in ("lognormal", "tail", "hostile", "empty_first", "all_empty"):
            make_case(product, mode, pair, sizes=shapes.group_sizes(SHAPE, skew)).check()


@each_mode
def test_wgrad_adds_to_an_accumulator(backend: str, mode: str) -> None:
    make_case("wgrad", mode).check_accumulation()
    make_case("wgrad", mode, sizes=shapes.group_sizes(SHAPE, "all_empty")).check_accumulation()
    for sizes in ((1000, 600), (1700, 0), (0, 0)):
        make_case("wgrad", mode, shape=LONG_GROUPS, sizes=np.array(sizes, np.int32)).check_accumulation()


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["block", "tensor"])
def test_wgrad_of_more_tiles_than_run_at_once(mode: str) -> None:
    sizes = shapes.group_sizes(FULL_TILES_OF_MANY, "lognormal").copy()
    sizes[[3, 20]] = 0
    make_case("wgrad", mode, shape=FULL_TILES_OF_MANY, sizes=sizes).check()


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["block", "tensor"])
@pytest.mark.parametrize(("tokens", "out_dtype", "accumulate"), WGRADS)
def test_hopper_has_a_kernel_of_ours_for_wgrad(mode: str, tokens: int, out_dtype: str, accumulate: bool) -> None:
    shape = dataclasses.replace(LONG_GROUPS, tokens=tokens)
    case = make_case("wgrad", mode, shape=shape, sizes=np.array([tokens, 0], np.int32))
    if accumulate:
        case.check_accumulation()
    else:
        case.check(out_dtype)
    result = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}[out_dtype]
    lines = plans(mode, f"{'onto' if accumulate else '->'} {result}, E 2 T {tokens} K 144 N 272: ")
    ours = on_hopper() and not (accumulate and tokens < 1536)
    assert all(line.endswith("kernel of jax_grouped") == ours for line in lines)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["block", "tensor"])
@pytest.mark.parametrize("product", ["fprop", "dgrad"])
@pytest.mark.parametrize(
    ("tokens", "depth", "features", "ours"),
    [
        pytest.param(512, DEEPEST, 48, True, id="full tiles"),
        pytest.param(496, DEEPEST, 48, True, id="few tiles"),
        pytest.param(496, 48, 45 * 128, True, id="up to two tiles per multiprocessor"),
        pytest.param(496, 48, 90 * 128, False, id="many tiles that are not full"),
        pytest.param(512, DEEPEST + 16, 48, False, id="too deep"),
        pytest.param(2 * SMALL_GROUP, DEEPEST + 16, 90 * 128, True, id="small groups"),
        pytest.param(2 * SMALL_GROUP + 2, DEEPEST + 16, 90 * 128, False, id="groups that are too large"),
    ],
)
def test_hopper_has_a_kernel_of_ours_for_tokens(
    product: Product, mode: str, tokens: int, depth: int, features: int, ours: bool
) -> None:
    K, N = (depth, features) if product == "fprop" else (features, depth)
    shape = shapes.Shape("boundary", num_groups=2, tokens=tokens, K=K, N=N)
    make_case(product, mode, shape=shape, sizes=np.array([tokens - 7, 7], np.int32)).check("bfloat16")
    lines = plans(mode, f"-> bf16, E 2 T {tokens} K {K} N {N}: ")
    ours = ours and on_hopper()
    assert all(line.endswith("kernel of jax_grouped") == ours for line in lines if f" {product} " in line)


def plans(mode: str, wanted: str) -> list[str]:
    """Returns the descriptions of prepared problems of this scaling."""
    module = extension.load()
    assert module is not None
    lines = [line for line in module.describe_plans() if wanted in line and ("1x128" in line) == (mode == "block")]
    assert lines
    return lines


def on_hopper() -> bool:
    return jax.devices()[0].compute_capability == "9.0"


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
@pytest.mark.parametrize("product", ["fprop", "dgrad"])
@pytest.mark.parametrize("tokens", [256, 40])
def test_tiles_of_many_groups(backend: str, tokens: int, product: Product, mode: str) -> None:
    shape = dataclasses.replace(FULL_TILES_OF_MANY, tokens=37 * tokens)
    make_case(product, mode, shape=shape, sizes=shapes.group_sizes(shape, "lognormal")).check()


SHAPES = [
    shapes.Shape("2880 in", 3, 130, 2880, 48),
    shapes.Shape("2880 out", 3, 130, 48, 2880),
    shapes.Shape("37 groups", 37, 257, 16, 32),
    shapes.Shape("one token", 3, 1, 16, 16),
    # More tiles of a weight gradient than a GPU computes at once.
    shapes.Shape("many tiles", 37, 600, 528, 784),
]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name.replace(" ", "-"))
def test_other_shapes(backend: str, shape: shapes.Shape) -> None:
    for product in some(backend, PRODUCTS, SHAPES.index(shape)):
        for mode in some(backend, list(MODES), SHAPES.index(shape) // 2):
            make_case(product, mode, shape=shape, sizes=shapes.group_sizes(shape, "lognormal")).check()


@each_product
def test_results_of_16_bits_for_the_groups_of_a_longer_list(backend: str, product: Product) -> None:
    shape = shapes.Shape("local", num_groups=3, tokens=130, K=48, N=144)
    sizes = np.array([20, 0, 31, 7, 1, 44, 13], np.int32)
    for mode in some(backend, list(MODES), PRODUCTS.index(product) + 1):
        for out_dtype in some(backend, ["bfloat16", "float16"], PRODUCTS.index(product)):
            for offset in (-2, 0, 2, 4, 6, 9, 2**31 - 1):
                make_case(product, mode, shape=shape, sizes=sizes, offset=offset, magnitude=2.0).check(out_dtype)


@each_mode
def test_vmap_makes_more_groups_and_shares_kernels(backend: str, mode: str) -> None:
    for product in some(backend, PRODUCTS, list(MODES).index(mode)):
        check_vmap(product, mode, SHAPE)


def check_vmap(product: Product, mode: str, shape: shapes.Shape) -> None:
    cases = [make_case(product, mode, shape=shape, seed=seed) for seed in range(2)]
    arrays = [jnp.stack(parts) for parts in zip(*(case.arrays for case in cases), strict=True)]
    axes: list[int | None] = [0] * 6
    if product != "wgrad":
        for operand in (2, 3):
            arrays[operand], axes[operand] = cases[0].arrays[operand], None
    out = jax.vmap(cases[0].multiply, axes)(*arrays)
    cases[0].compare(np.asarray(out[0]), oracle.fp8_tolerance())
    if product == "wgrad":
        cases[1].compare(np.asarray(out[1]), oracle.fp8_tolerance())
    else:
        reference = oracle.fprop if product == "fprop" else oracle.dgrad
        expected = reference(cases[1].a.dequantized, cases[0].b.dequantized, RAGGED)
        oracle.assert_groups_close(np.asarray(out[1]), expected, RAGGED, shape.num_groups, oracle.fp8_tolerance())


@pytest.fixture
def _blackwell(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lowers for a GPU with products of every format, whatever GPU is here."""
    monkeypatch.setattr(extension, "has_mx_products", lambda: True)
    monkeypatch.setattr(extension, "require_block_scaling", lambda: None)


for_blackwell = pytest.mark.usefixtures("_blackwell")


def call_of(case: Case, batch: int | None = None, *, kernel_axis: int | None = None, scale_axis: int | None = None):
    """Returns the operands' and results' types and the attributes of the one custom call."""
    multiply = case.multiply
    axes = (0, 0, kernel_axis, scale_axis, 0, 0) if case.product != "wgrad" else (0,) * 6
    structs = [struct(array.shape, array.dtype) for array in case.arrays]
    if batch is not None:
        multiply = jax.vmap(multiply, axes)
        structs = [
            x if axis is None else struct((batch, *x.shape), x.dtype) for x, axis in zip(structs, axes, strict=True)
        ]
    (call,) = custom_calls(lowered(multiply, *structs))
    assert "@jax_grouped_gemm(" in call
    attributes = call.split("mhlo.backend_config = {")[1].split("}")[0]
    return *types(call), dict(pair.split(" = ") for pair in attributes.split(", "))


@for_blackwell
@each_mode
@each_product
def test_a_product_is_one_custom_call(product: Product, mode: str) -> None:
    case = make_case(product, mode)
    operands, results, attributes = call_of(case)
    a, b = case.a.layout, case.b.layout
    data, sizes, scales = operands[:2], operands[2:4], operands[4:]
    for operand, shape in zip(data + scales, (a.data_shape, b.data_shape, a.scale_shape, b.scale_shape), strict=True):
        assert operand.rsplit("x", 1)[0] == "x".join(map(str, shape))
    assert sizes == ["5xi32", "1xi32"]
    out = {"fprop": "300x272xf32", "dgrad": "300x144xf32", "wgrad": "5x144x272xf32"}[product]
    assert results == [out, f"{gemm_scratch_bytes(1, 5)}xui8", "33554432xui8"]
    assert attributes == {
        "product": f"{PRODUCTS.index(product)} : i32",
        "scaled": "true",
        "a_mode": f"{list(ScalingMode).index(a.mode)} : i32",
        "b_mode": f"{list(ScalingMode).index(b.mode)} : i32",
        "tokens": "300 : i64",
        "expected_tokens": "0 : i64",
        "weight_batch": "1 : i64",
        "gathered": "0 : i32",
        "accumulate": "false",
        "zero_other_rows": "true",
        "autotune": "false",
    }


@for_blackwell
@each_mode
@each_product
def test_vmap_makes_one_custom_call_that_copies_no_kernel(product: Product, mode: str) -> None:
    case = make_case(product, mode)
    operands, results, attributes = call_of(case, 3)
    assert attributes["weight_batch"] == ("3 : i64" if product == "wgrad" else "1 : i64")
    assert attributes["tokens"] == "300 : i64"
    assert operands[2:4] == ["15xi32", "3xi32"]
    assert results[1] == f"{gemm_scratch_bytes(3, 5)}xui8"
    if product != "wgrad":
        shared = [case.b.layout.data_shape, case.b.layout.scale_shape]
        weights = operands[1], operands[5]
        assert [operand.rsplit("x", 1)[0] for operand in weights] == ["x".join(map(str, s)) for s in shared]


@for_blackwell
@each_mode
def test_kernels_and_their_scales_are_shared_together(mode: str) -> None:
    case = make_case("fprop", mode)
    for axes in ((0, 0), (None, 0), (0, None)):
        operands, _, attributes = call_of(case, 3, kernel_axis=axes[0], scale_axis=axes[1])
        assert attributes["weight_batch"] == "3 : i64"
        assert [operand.split("x")[0] for operand in (operands[1], operands[5])] == ["15", "15"]


@each_product
def test_hopper_multiplies_mx_numbers_in_bfloat16(product: Product, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extension, "has_mx_products", lambda: False)
    case = make_case(product, "mx")
    calls = custom_calls(lowered(case.multiply, *(struct(array.shape, array.dtype) for array in case.arrays)))
    targets = [call.split("@")[1].split("(")[0] for call in calls]
    assert targets == ["jax_grouped_dequantize", "jax_grouped_dequantize", "jax_grouped_gemm"]


def test_scratch_has_room_for_pointers_and_a_table_per_batch_element() -> None:
    # Bases: 3 * 112 + 9 * 64 + 16 bytes for 14 groups; 2 * 112 of pointers to scales; 2 * 4 * 7 * 8 of tables.
    assert gemm_scratch_bytes(2, 7) == 928 + 224 + 448
