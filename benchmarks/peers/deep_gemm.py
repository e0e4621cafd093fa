"""DeepGEMM: the block-scaled products of DeepSeek-V3 (1x128 and 128x128 scales), called from PyTorch."""

import importlib
from typing import Any

import numpy as np

from benchmarks.cases import Arrays, Case
from benchmarks.peers import NotOfferedError
from benchmarks.peers.torch_peer import ROWS_OF_TILE, Tensors, TorchWork, tensors, torch
from jax_grouped.core.groups import round_up

_deep_gemm: Any = importlib.import_module("deep_gemm")


def quantized_product(case: Case, sets: list[Arrays]) -> TorchWork:
    """Makes a product of operands that are quantized, and aligned to tiles, before the clock starts."""
    if case.operation not in ("fprop", "dgrad"):
        raise NotOfferedError
    sizes = case.sizes.tolist()
    starts = np.cumsum([0, *(round_up(size, ROWS_OF_TILE) for size in sizes)])
    group_places = [start + np.arange(size) for start, size in zip(starts[:-1], sizes, strict=True)]
    places = torch.as_tensor(np.concatenate(group_places)).cuda()
    # Rows of no group are -1.
    groups = torch.full((int(starts[-1]),), -1, dtype=torch.int32, device="cuda")
    groups[places] = torch.as_tensor(np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)).cuda()

    def operands(x: Any, kernel: Any, dy: Any) -> Tensors:
        tokens = x if case.operation == "fprop" else dy
        rows = tokens.new_zeros(len(groups), tokens.shape[1])
        rows[places] = tokens[: len(places)]
        data, scales = _deep_gemm.per_token_cast_to_fp8(rows, use_ue8m0=False)
        kernels = kernel.transpose(1, 2).contiguous() if case.operation == "fprop" else kernel
        scaled = [_deep_gemm.per_block_cast_to_fp8(matrix, use_ue8m0=False) for matrix in kernels]
        scaled_kernels = tuple(torch.stack(parts) for parts in zip(*scaled, strict=True))
        scaled_rows = data, _deep_gemm.get_mn_major_tma_aligned_tensor(scales)
        return scaled_rows, scaled_kernels, rows.new_empty(len(groups), kernels.shape[1])

    def call(rows: Any, kernels: Any, result: Any) -> Tensors:
        _deep_gemm.m_grouped_fp8_gemm_nt_contiguous(rows, kernels, result, groups)
        return (result,)

    def read(result: Any) -> Tensors:
        tokens = result.new_zeros(case.shape.tokens, result.shape[1])
        tokens[: len(places)] = result[places]
        return (tokens,)

    return TorchWork(call, [operands(*arrays) for arrays in tensors(sets)], read)
