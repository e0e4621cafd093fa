"""Cases: group sizes, what is counted, and what the variants compute."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_grouped as jg
from benchmarks import cases, shapes
from benchmarks.cases import OPERATIONS, PRODUCTS, Case, draw, relative_difference
from benchmarks.peers import VARIANTS
from benchmarks.shapes import SHAPES, SKEWS, TEST_SKEWS, Shape

pytestmark = pytest.mark.slow

TINY = Shape("tiny", 2, 256, 128, 128)
FEW_GROUPS = [Shape(f"{groups} groups", groups, 130, 8, 8) for groups in (1, 2, 3, 37)]

# Groups of 5, 0 and 130 rows; one row belongs to none. Features: one block of 128 and a short one.
THREE_GROUPS = SimpleNamespace(shape=Shape("", 3, 136, 144), sizes=np.array([5, 0, 130], np.int32), valid_rows=135)
READ, ROWWISE = 2 * 135 * 144, 135 * 144
COLUMNWISE = (16 + 144) * 144  # 5 rows become 16, 130 become 144.
SCALES_ROWWISE = 4 * 2 * (8 + 132)  # Two blocks of features by rows up to a multiple of 4.
SCALES_COLUMNWISE = 4 * (1 + 2) * 144  # One block of 5 rows and two of 130 by features.
BLOCK_1D = ROWWISE + COLUMNWISE + SCALES_ROWWISE + SCALES_COLUMNWISE


def results(operation: str, variant: str, skew: str = "equal", **options: Any) -> Any:
    case = Case(operation, TINY, variant, skew, **options)
    return VARIANTS[variant].prepare(case, draw(OPERATIONS[operation].arrays(case), 0)[:2]).results()


def test_rows_outside_groups_neither_count_nor_differ() -> None:
    numbers = {"backward": 2, "dense": 3, "accumulating": 3, "mlp": 4.5}
    for name in PRODUCTS:
        case = Case(name, SHAPES["odd"], "", "tail")
        got = jnp.full((257, 4), 1.1).at[case.valid_rows :].set(jnp.nan)
        assert OPERATIONS[name].count(case) == numbers.get(name, 1) * 2 * (257 * 3 // 4) * 130 * 37
        assert relative_difference((got,), (jnp.ones((257, 4)),), case) == pytest.approx(0.1)


def test_bytes_are_counted_as_laid_out() -> None:
    expected = {
        "copy": 2 * 2 * 136 * 144,
        "dbias block_1d both": READ + BLOCK_1D + 4 * 3 * 144,
        "current tensor both": 2 * READ + ROWWISE + COLUMNWISE + 2 * 4 * 3,
        # Tiles of 512 bytes in both orientations: for two blocks of features by three of rows.
        "mx both": READ + ROWWISE + COLUMNWISE + 2 * 512 * 2 * 3,
        # Reads three arrays and quantizes two, side by side: three blocks of features.
        "swiglu backward block_1d both": 3 * READ + 2 * (BLOCK_1D - SCALES_ROWWISE) + 4 * 3 * (8 + 132),
        "dequantize block_1d columnwise": COLUMNWISE + SCALES_COLUMNWISE + 2 * 136 * 144,
    }
    assert {name: OPERATIONS[name].count(THREE_GROUPS) for name in expected} == expected


def test_small_operands_rotate_and_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "_BYTES_IN_ROTATION", 1e6)
    arrays = (jax.ShapeDtypeStruct((256, 512), jnp.bfloat16),)
    sets = draw(arrays, 0)
    assert len(sets) == 4
    assert not np.array_equal(sets[0][0], sets[1][0])
    assert len(draw(arrays, 0, part=0.5)) == 8
    # Few tokens read the kernels that they choose.
    assert cases.part_read(Case("moe forward", SHAPES["decode 1"], "bf16")) == 8 / 128


def test_a_step_gives_the_result_all_gradients_and_states_and_an_accumulating_one_adds() -> None:
    y, dx, dkernel, *states = results("dense", "delayed cached", kernel_dtype="float32")
    case = Case("accumulating", TINY, "delayed cached", kernel_dtype="float32")
    work = VARIANTS["delayed cached"].prepare(case, draw(OPERATIONS["accumulating"].arrays(case), 0)[:1])
    got_y, got_dx, *_, once = map(np.array, work.results())
    work.block(1)
    # A state's arrays, by name: of each tensor the history, the mark and the scale.
    assert len(states) == len(dataclasses.fields(jg.Fp8State))
    assert min(scale.min() for scale in states[2::3]) > 16
    # Rounding both operands to three bits of mantissa, gradients to two, leaves less than 0.1.
    expected = results("dense", "bf16", kernel_dtype="float32")
    for got in ((y, dx, dkernel), (got_y, got_dx, once)):
        assert [array.dtype.name for array in got] == ["bfloat16", "bfloat16", "float32"]
        assert relative_difference(got, expected, case) < 0.1
    np.testing.assert_allclose(np.array(work.results()[-1]), 3 * once, rtol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("variant", "bound"),
    # Both operands of FP8 products were rounded to three bits.
    [
        *[(name, 1e-2) for name in ("SonicMoE", "TransformerEngine", "torch compiled")],
        *[(f"TransformerEngine {recipe} cached", 0.1) for recipe in ("block", "current")],
        ("DeepGEMM", 0.05),
    ],
)
@pytest.mark.filterwarnings("ignore")  # Those of torch and of what it compiles with.
def test_peers_give_our_results(variant: str, bound: float) -> None:
    try:
        VARIANTS[variant].load()
    except ImportError as error:  # The peer is not installed: the tests do not require it.
        pytest.skip(str(error))
    shape, operations, skews = Shape("few experts", 8, 512, 256, 512, 2), ("moe forward", "moe"), ("equal",)
    if variant == "DeepGEMM":
        shape, operations, skews = Shape("three groups", 3, 640, 256, 384), ("fprop", "dgrad"), ("equal", "lognormal")
    for case in [Case(operation, shape, variant, skew) for operation in operations for skew in skews]:
        sets = draw(OPERATIONS[case.operation].arrays(case), 0)[:1]
        got, ours = (VARIANTS[name].prepare(case, sets).results() for name in (variant, "jax_grouped"))
        assert [array.shape for array in got] == [array.shape for array in ours], case
        assert relative_difference(got, ours, case) < bound, case


def test_sizes_add_up_and_follow_from_the_seed() -> None:
    for shape, skew in ((shape, skew) for shape in (*FEW_GROUPS, *SHAPES.values()) for skew in TEST_SKEWS):
        sizes, same, other = (shapes.group_sizes(shape, skew, seed) for seed in (3, 3, 1))
        np.testing.assert_array_equal(sizes, same)
        assert (sizes.dtype, sizes.shape) == (np.int32, (shape.num_groups,)), (shape, skew)
        if skew in ("lognormal", "zipf", "tail") and min(shape.num_groups, shape.tokens) > 30:
            assert (sizes != other).any(), (shape, skew)
        if skew in SKEWS:
            # A skew that leaves groups out can leave all of a few out.
            nothing_left = skew == "all_empty" or (shape.num_groups <= 2 and "empty_" in skew and not sizes.any())
            expected = 0 if nothing_left else shape.tokens * 3 // 4 if skew == "tail" else shape.tokens
            assert (sizes.min() >= 0, sizes.sum()) == (True, expected), (shape, skew)


def test_group_ends_skip_negative_sizes_and_rows_that_do_not_exist() -> None:
    ends = shapes.group_ends(np.array([2, -5, 3, shapes.INT32.max, shapes.INT32.max], np.int32), 9)
    assert ends.tolist() == [2, 2, 5, 9, 9]
    for shape in FEW_GROUPS:
        sizes = shapes.group_sizes(shape, "hostile")
        assert sizes.max() == shapes.INT32.max
        assert shape.num_groups < 37 or sizes.min() == shapes.INT32.min
        assert shapes.group_ends(sizes, shape.tokens)[-1] == shape.tokens
