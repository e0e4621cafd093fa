"""The row ranges of groups, against a plain loop."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_grouped.core import groups
from jax_grouped.core.values import as_int32
from tests import oracle

pytestmark = pytest.mark.slow

INT32 = st.one_of(st.integers(0, 12), st.integers(-(2**31), 2**31 - 1))


@functools.partial(jax.jit, static_argnums=(2, 3))
def ranges(
    group_sizes: jax.Array, offset: jax.Array, num_groups: int, capacity: int
) -> tuple[groups.GroupRows, jax.Array, jax.Array]:
    rows = groups.group_rows(group_sizes, offset, num_groups, capacity)
    return rows, *groups.row_groups(rows, capacity)


@settings(max_examples=150, deadline=None)
@given(
    # Draw few shapes, because each is compiled, and many values.
    sizes=st.sampled_from([1, 4, 9]).flatmap(lambda count: st.lists(INT32, min_size=count, max_size=count)),
    offset=st.one_of(st.integers(-4, 10), INT32),
    num_groups=st.sampled_from([1, 4]),
    capacity=st.sampled_from([1, 24]),
)
def test_row_ranges_match_a_plain_loop(sizes: list[int], offset: int, num_groups: int, capacity: int) -> None:
    group_sizes = np.array(sizes, np.int32)
    rows, row_group, valid = ranges(group_sizes, np.array([offset], np.int32), num_groups, capacity)
    expected_sizes = np.zeros(num_groups, np.int32)
    expected_group = np.full(capacity, -1)
    for group, span in oracle.local_groups(group_sizes, num_groups, capacity, offset):
        expected_sizes[group] = span.stop - span.start
        expected_group[span] = group
        if expected_sizes[group]:
            assert rows.starts[group] == span.start
    np.testing.assert_array_equal(rows.sizes, expected_sizes)
    np.testing.assert_array_equal(np.where(valid, row_group, -1), expected_group)


def test_sizes_of_any_integer_type_become_int32_without_wrapping() -> None:
    most = np.iinfo(np.int32)
    for dtype in ("int8", "uint8", "int16", "uint32", "int64", "uint64"):
        limits = np.iinfo(dtype)
        values = np.array([3, limits.min, limits.max], dtype)
        expected = [min(max(int(value), most.min), most.max) for value in values]
        with jax.enable_x64(True):
            on_device = as_int32("sizes", jnp.asarray(values))
        for got in (as_int32("sizes", values), on_device):
            assert got.dtype == jnp.int32
            np.testing.assert_array_equal(got, expected, dtype)
    nested = jax.jit(lambda size: as_int32("sizes", [[size, 0], [1, size]]))(2)
    np.testing.assert_array_equal(nested, [[2, 0], [1, 2]])
