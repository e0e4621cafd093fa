"""The bytes that quantizations must move, counted by hand."""

import numpy as np
import pytest

from benchmarks.quantize.cases import CASES, Tokens
from benchmarks.quantize.traffic import bytes_that_must_move, copied_bytes

# Groups of 5, 0 and 130 rows; one row belongs to none. Features: one block of 128 and a short one.
SHAPE = Tokens("three groups", 3, 136, 144)
SIZES = np.array([5, 0, 130], np.int32)
READ = 2 * 135 * 144
ROWWISE = 135 * 144
# 5 rows become 16, 130 become 144.
COLUMNWISE = (16 + 144) * 144
# Two blocks of features by rows up to a multiple of 4; one block of 5 rows and two of 130 by features.
SCALES_ROWWISE = 4 * 2 * (8 + 132)
SCALES_COLUMNWISE = 4 * (1 + 2) * 144
BLOCK_1D = ROWWISE + COLUMNWISE + SCALES_ROWWISE + SCALES_COLUMNWISE


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("block_1d rowwise", READ + ROWWISE + SCALES_ROWWISE),
        ("block_1d columnwise", READ + COLUMNWISE + SCALES_COLUMNWISE),
        ("block_1d both", READ + BLOCK_1D),
        ("dbias block_1d both", READ + BLOCK_1D + 4 * 3 * 144),
        ("delayed tensor rowwise", READ + ROWWISE + 4 * 3),
        ("delayed tensor both", READ + ROWWISE + COLUMNWISE + 2 * 4 * 3),
        ("current tensor rowwise", 2 * READ + ROWWISE + 4 * 3),
        ("current tensor both", 2 * READ + ROWWISE + COLUMNWISE + 2 * 4 * 3),
        # One byte per 32 features by rows up to a multiple of 16; per feature and 32 rows, of which there are 1 and 5.
        ("mx both", READ + ROWWISE + COLUMNWISE + 5 * (16 + 144) + 144 * (1 + 5)),
        ("silu_mul block_1d both", 2 * READ + BLOCK_1D),
        ("dequantize block_1d rowwise", ROWWISE + SCALES_ROWWISE + 2 * 136 * 144),
        ("dequantize block_1d columnwise", COLUMNWISE + SCALES_COLUMNWISE + 2 * 136 * 144),
    ],
)
def test_bytes_are_counted_as_laid_out(name: str, expected: int) -> None:
    assert bytes_that_must_move(CASES[name], SHAPE, SIZES) == expected


def test_the_gradient_of_silu_mul_reads_three_arrays_and_quantizes_two() -> None:
    quantized = 2 * (ROWWISE + COLUMNWISE + SCALES_COLUMNWISE) + 4 * 3 * (8 + 132)

    moved = bytes_that_must_move(CASES["silu_mul backward block_1d both"], SHAPE, SIZES)

    assert moved == 3 * READ + quantized


def test_blocks_of_kernels_have_one_scale_in_each_orientation() -> None:
    kernels = Tokens("two kernels", 2, 2 * 160, 144)
    scales = 4 * 2 * (2 * 4 + 2 * 4)

    moved = bytes_that_must_move(CASES["block_2d kernels both"], kernels, np.array([160, 160], np.int32))

    assert moved == (2 + 1 + 1) * 320 * 144 + scales


def test_a_copy_reads_and_writes() -> None:
    assert copied_bytes(SHAPE) == 2 * 2 * 136 * 144
