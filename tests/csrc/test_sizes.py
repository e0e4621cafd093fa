"""Sizes of buffers: Python, which allocates them, and C++, which uses them, compute the same.

Needs a C++ compiler, and neither CUDA nor a GPU.
"""

import itertools
import math
import pathlib
import subprocess
from collections.abc import Callable, Iterator

import pytest

from jax_grouped.core.groups import ROW_BLOCKS, max_row_blocks
from jax_grouped.fp8.layout import QuantizedLayout
from jax_grouped.fp8.recipes import ScalingMode
from jax_grouped.kernels import bias, primitive, product, quantization, routing
from tests.csrc.compiler import COMPILER, compiled

pytestmark = pytest.mark.skipif(not COMPILER, reason="there is no C++ compiler")

BATCHES = (1, 3)
GROUPS = (1, 3, 4, 8, 257, 1024)
ROWS = (1, 15, 16, 17, 128, 129, 4096, 1_000_003)
FEATURES = (16, 128, 144, 2880)
STACK_ROWS = (1, 16, 100, 512, 2880)

Call = tuple[str, tuple[int, ...], int]


def sizes_of_groups() -> Iterator[Call]:
    """Calls of C++ functions, with the value that Python computes."""
    for rows in (*ROWS, 2**30):
        yield "routing_blocks", (rows,), routing.count_blocks(rows)
    for groups in GROUPS:
        yield "group_table", (groups,), primitive.group_table_size(groups)
        for batch in BATCHES:
            yield "gemm_scratch", (batch, groups), product.scratch_bytes(batch, groups)
        for rows in ROWS:
            yield "bias_grad_tiles", (rows, groups), bias.count_partial_sums(rows, groups)
            for height in ROW_BLOCKS:
                yield "row_blocks", (rows, groups, height), max_row_blocks(rows, groups, height)
            for batch in BATCHES:
                yield "quantize_scratch", (batch, rows, groups), batch * quantization.scratch_bytes(rows, groups)


def sizes_of_layouts() -> Iterator[Call]:
    """As above, of the data and scales of quantized arrays."""
    ragged = [(rows, groups, None) for rows, groups in itertools.product(ROWS, GROUPS)]
    stacks = [(rows * groups, groups, rows) for rows, groups in itertools.product(STACK_ROWS, GROUPS)]
    for mode, columnwise, batch, features, (tokens, groups, stack_rows) in itertools.product(
        ScalingMode, (False, True), BATCHES, FEATURES, ragged + stacks
    ):
        layout = QuantizedLayout(mode, columnwise, tokens, features, groups, stack_rows)
        arguments = (list(ScalingMode).index(mode), columnwise, batch, tokens, features, groups)
        arguments = (*map(int, arguments), stack_rows or 0)
        yield "data", arguments, batch * math.prod(layout.data_shape)
        yield "scale", arguments, batch * math.prod(layout.scale_shape)


@pytest.mark.parametrize("calls", [sizes_of_groups, sizes_of_layouts], ids=lambda calls: calls.__name__)
def test_python_and_cpp_compute_the_same_sizes(calls: Callable[[], Iterator[Call]], tmp_path: pathlib.Path) -> None:
    program = compiled(tmp_path / "print_sizes", "tests/csrc/print_sizes.cc")
    expected = list(calls())
    lines = [" ".join(map(str, (name, *arguments))) for name, arguments, _ in expected]
    printed = subprocess.run([program], input="\n".join(lines), capture_output=True, text=True, check=True).stdout
    sizes = map(int, printed.split())
    assert [(*call, size) for call, size in zip(expected, sizes, strict=True) if call[2] != size] == []
