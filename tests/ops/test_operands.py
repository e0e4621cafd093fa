"""The operands of the tests of grouped products."""

import dataclasses

import numpy as np
import pytest

from benchmarks import shapes
from benchmarks.shapes import TEST_SHAPES, Shape
from tests.operands import random_operands


@pytest.mark.parametrize("shape", TEST_SHAPES, ids=lambda shape: shape.name)
@pytest.mark.parametrize("skew", ["tail", "hostile"])
def test_operands_fit_the_shape_follow_from_the_seed_and_poison_the_tail(shape: Shape, skew: str) -> None:
    sizes = shapes.group_sizes(shape, skew)

    x, kernel, bias, dy = arrays = dataclasses.astuple(random_operands(shape, sizes, np.float16))

    end, T, E, K, N = shapes.group_ends(sizes, shape.tokens)[-1], shape.tokens, shape.num_groups, shape.K, shape.N
    assert [array.shape for array in arrays] == [(T, K), (E, K, N), (E, N), (T, N)]
    assert {array.dtype.name for array in arrays} == {"float16"}
    assert all(np.isfinite(array[:end]).all() and np.isnan(array[end:]).all() for array in (x, dy))
    assert np.isfinite(kernel).all()
    assert np.isfinite(bias).all()
    np.testing.assert_array_equal(random_operands(shape, sizes, np.float16).dy, dy)
    assert not np.array_equal(random_operands(shape, sizes, np.float16, seed=1).kernel, kernel)


def test_magnitudes_of_experts_differ_by_ten_thousand() -> None:
    shape = Shape("wide", 5, 500, 200, 200)

    drawn = random_operands(shape, shapes.group_sizes(shape, "equal"))

    by_rows = [rows.std() for rows in drawn.x.reshape(5, 100, 200)]
    for deviations in (drawn.kernel.std(axis=(1, 2)), by_rows):
        np.testing.assert_allclose(np.sort(deviations), [1e-2, 1e-1, 1, 1e1, 1e2], rtol=0.05)
