"""The shapes and group sizes that every other test and every benchmark builds on."""

import numpy as np
import pytest

from benchmarks import shapes
from benchmarks.shapes import SHAPES, SKEWS, TEST_SKEWS, Shape

FEW_GROUPS = [Shape(f"{groups} groups", groups, 130, 8, 8) for groups in (1, 2, 3, 37)]


@pytest.mark.parametrize("skew", TEST_SKEWS)
def test_sizes_add_up_and_follow_from_the_seed(skew: str) -> None:
    for shape in (*FEW_GROUPS, *SHAPES.values()):
        sizes, same, other = (shapes.group_sizes(shape, skew, seed) for seed in (3, 3, 1))

        np.testing.assert_array_equal(sizes, same)
        assert (sizes.dtype, sizes.shape) == (np.int32, (shape.num_groups,))
        if skew in ("lognormal", "zipf", "tail") and min(shape.num_groups, shape.tokens) > 30:
            assert (sizes != other).any()
        if skew in SKEWS:
            # A skew that leaves groups out can leave all of a few out.
            nothing_left = skew == "all_empty" or (shape.num_groups <= 2 and "empty_" in skew and not sizes.any())
            expected = 0 if nothing_left else shape.tokens * 3 // 4 if skew == "tail" else shape.tokens
            assert (sizes.min() >= 0, sizes.sum()) == (True, expected)


def test_the_named_groups_are_empty_and_the_others_equal() -> None:
    empty = {"empty_first": [0], "empty_last": [6], "empty_adjacent": [2, 3], "alternate_empty": [1, 3, 5]}
    for skew, groups in {"equal": [], **empty, "all_empty": [0, 1, 2, 3, 4, 5, 6]}.items():
        sizes = shapes.group_sizes(Shape("seven groups", 7, 130, 8, 8), skew)

        assert np.flatnonzero(sizes == 0).tolist() == groups
        assert len({*sizes[sizes > 0] - 130 // max(1, 7 - len(groups))} - {0, 1}) == 0


def test_group_ends_skip_negative_sizes_and_rows_that_do_not_exist() -> None:
    ends = shapes.group_ends(np.array([2, -5, 3, shapes.INT32.max, shapes.INT32.max], np.int32), 9)

    assert ends.tolist() == [2, 2, 5, 9, 9]
    for shape in FEW_GROUPS:
        sizes = shapes.group_sizes(shape, "hostile")
        assert sizes.max() == shapes.INT32.max
        assert shape.num_groups < 37 or sizes.min() == shapes.INT32.min
        assert shapes.group_ends(sizes, shape.tokens)[-1] == shape.tokens
