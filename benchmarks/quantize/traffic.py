"""How many bytes a quantization must move, whoever does it."""

import math

import numpy as np
import numpy.typing as npt

import jax_grouped as jg
from benchmarks.cases import DTYPE
from benchmarks.quantize.cases import Quantization, Tokens
from benchmarks.shapes import group_ends
from jax_grouped.fp8.layout import QuantizedLayout


def bytes_that_must_move(quantization: Quantization, shape: Tokens, sizes: npt.NDArray[np.int32]) -> int:
    """Bytes that are read or written at least once.

    Read are the rows that belong to a group, twice where the scale of a whole group must be found first. Written is
    each orientation's data with the padding that its layout has (each group's rows up to a multiple of 16 where it is
    columnwise), its scales, and the bias gradient. Dequantization reads one orientation and writes every row. Group
    sizes, the largest value of each group and scales that are given are too small to count.

    Args:
        quantization: what is done.
        shape: the static sizes.
        sizes: rows per group, `int32[G]`.
    """
    rows = np.diff(group_ends(sizes, shape.tokens), prepend=0)
    features = quantization.quantized_features(shape.features)
    orientations = [
        columnwise for columnwise, made in ((False, quantization.rowwise), (True, quantization.columnwise)) if made
    ]
    quantized = sum(_quantized_bytes(quantization.mode, columnwise, rows, features) for columnwise in orientations)
    if quantization.inverse:
        return quantized + shape.tokens * features * DTYPE.itemsize
    passes = 2 if quantization.mode == jg.ScalingMode.TENSOR and not quantization.given_scale else 1
    read = passes * int(rows.sum()) * sum(quantization.input_features(shape.features)) * DTYPE.itemsize
    dbias = shape.num_groups * features * np.dtype(np.float32).itemsize if quantization.dbias else 0
    return read + quantized + dbias


def copied_bytes(shape: Tokens) -> int:
    """Bytes that a copy of `[T, C]` reads and writes."""
    return 2 * shape.tokens * shape.features * DTYPE.itemsize


def _quantized_bytes(mode: jg.ScalingMode, columnwise: bool, rows: npt.NDArray[np.int32], features: int) -> int:
    """Bytes of the data and the scales of one orientation."""
    scale_bytes = 1 if mode == jg.ScalingMode.MX else 4
    total = 0
    for size, count in zip(*np.unique(rows, return_counts=True), strict=True):
        m = int(size)
        # Regions of groups do not depend on each other, so each is that of a stack of one.
        group = QuantizedLayout(mode, columnwise, tokens=m, features=features, num_groups=1, stack_rows=m)
        total += int(count) * (math.prod(group.data_shape) + scale_bytes * math.prod(group.scale_shape))
    return total
