"""Products of quantized operands against NumPy in float64, on the very same operands."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import shapes
from jax_grouped.kernels import extension
from jax_grouped.kernels.product import Product
from tests import oracle
from tests.ops.quantize_cases import some
from tests.ops.scaled_matmul_cases import MODES, PRODUCTS, RAGGED, SHAPE, TYPE_PAIRS, each_mode, each_product, make_case

pytestmark = pytest.mark.slow

#: Groups of many blocks of tokens.
LONG_GROUPS = shapes.Shape("long groups", num_groups=2, tokens=1600, K=144, N=272)
#: Tokens, type of the result, and whether there is an accumulator.
WGRADS = [
    (16, "bfloat16", False),
    (1520, "float16", False),
    (1520, "float32", False),
    (16, "float32", True),
]

#: Deepest sum for which Hopper has a kernel of the library for tokens and weights. Tiles must also be few, or full with
#: 256 tokens per group.
DEEPEST = 3072
#: Most tokens per group for which it has another one, for sums of any depth.
SMALL_GROUP = 64
FULL_TILES = dataclasses.replace(SHAPE, tokens=1300)
FULL_TILES_OF_MANY = shapes.Shape("many full tiles", num_groups=37, tokens=37 * 256, K=528, N=784)


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
    for shape in (LONG_GROUPS, dataclasses.replace(LONG_GROUPS, K=48, N=16)):
        for sizes in ((1000, 600), (1700, 0), (0, 0)):
            make_case("wgrad", mode, shape=shape, sizes=np.array(sizes, np.int32)).check_accumulation()


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["block", "tensor"])
def test_wgrad_of_more_tiles_than_run_at_once(mode: str) -> None:
    sizes = shapes.group_sizes(FULL_TILES_OF_MANY, "lognormal").copy()
    sizes[[3, 20]] = 0
    case = make_case("wgrad", mode, shape=FULL_TILES_OF_MANY, sizes=sizes)
    case.check()
    case.check_accumulation()


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
    assert all(line.endswith("kernel of jax_grouped") == on_hopper() for line in lines)


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


@each_mode
def test_vmap_adds_to_an_accumulator_each(backend: str, mode: str) -> None:
    cases = [make_case("wgrad", mode, seed=seed) for seed in range(2)]
    arrays = [jnp.stack(parts) for parts in zip(*(case.arrays for case in cases), strict=True)]
    accumulators = jax.random.normal(jax.random.key(0), (2, *cases[0].expected.shape))

    out = jax.vmap(cases[0].multiply)(*arrays, accumulators)

    for case, got, accumulator in zip(cases, out, accumulators, strict=True):
        case.compare_accumulated(got, accumulator)


def check_vmap(product: Product, mode: str, shape: shapes.Shape) -> None:
    """Checks two elements of a batch, with kernels of their own and with the same kernels."""
    cases = [make_case(product, mode, shape=shape, seed=seed) for seed in range(2)]
    stacked = [jnp.stack(parts) for parts in zip(*(case.arrays for case in cases), strict=True)]
    for case, result in zip(cases, jax.vmap(cases[0].multiply)(*stacked), strict=True):
        case.compare(np.asarray(result), oracle.fp8_tolerance())
    if product == "wgrad":
        return
    arrays = [*stacked[:2], *cases[0].arrays[2:4], *stacked[4:]]
    out = jax.vmap(cases[0].multiply, (0, 0, None, None, 0, 0))(*arrays)
    cases[0].compare(np.asarray(out[0]), oracle.fp8_tolerance())
    reference = oracle.fprop if product == "fprop" else oracle.dgrad
    expected = reference(cases[1].a.dequantized, cases[0].b.dequantized, RAGGED)
    oracle.assert_groups_close(np.asarray(out[1]), expected, RAGGED, shape.num_groups, oracle.fp8_tolerance())
