"""DeepGEMM: the block-scaled products of DeepSeek-V3 (1x128 and 128x128 scales), called from PyTorch.

Each of its groups begins at a multiple of 128 rows. Tokens are brought there, with zeros between groups, and operands
quantized before the clock starts.
"""

import importlib
from typing import Any

import numpy as np

from benchmarks.cases import Arrays, Case
from benchmarks.peers import NotOfferedError
from benchmarks.peers.torch_peer import Tensors, TorchWork, tensors, torch

_deep_gemm: Any = importlib.import_module("deep_gemm")
_ROWS = 128


def quantized_product(case: Case, sets: list[Arrays]) -> TorchWork:
    """Makes one of the three products. Those for weights add to a float32 result, so read the results before timing."""
    if case.operation not in ("fprop", "dgrad", "wgrad f32"):
        raise NotOfferedError
    sizes = case.sizes.tolist()
    padded = [-(-size // _ROWS) * _ROWS for size in sizes]
    starts = np.cumsum([0, *padded[:-1]])
    group_places = [start + np.arange(size) for start, size in zip(starts, sizes, strict=True)]
    places = torch.as_tensor(np.concatenate(group_places)).cuda()
    groups = torch.as_tensor(np.repeat(np.arange(len(sizes), dtype=np.int32), padded)).cuda()
    total = sum(padded)

    def in_place(tokens: Any) -> Any:
        rows = tokens.new_zeros(total, tokens.shape[1])
        rows[places] = tokens[: len(places)]
        return rows

    def scaled_tokens(tokens: Any) -> Tensors:
        data, scales = _deep_gemm.per_token_cast_to_fp8(in_place(tokens), use_ue8m0=False)
        return data, _deep_gemm.get_mn_major_tma_aligned_tensor(scales)

    def scaled_columns(tokens: Any) -> Tensors:
        data, scales = _deep_gemm.per_channel_cast_to_fp8(in_place(tokens), use_ue8m0=False)
        transposed = torch.cat([rows.t().flatten() for rows in data.split(padded)])
        return transposed, _deep_gemm.get_mn_major_tma_aligned_tensor(scales.t())

    def scaled_kernels(kernels: Any) -> Tensors:
        scaled = [_deep_gemm.per_block_cast_to_fp8(kernel, use_ue8m0=False) for kernel in kernels]
        return tuple(torch.stack(parts) for parts in zip(*scaled, strict=True))

    def operands(x: Any, kernel: Any, dy: Any) -> Tensors:
        if case.operation == "wgrad f32":
            return scaled_columns(x), scaled_columns(dy), torch.zeros_like(kernel, dtype=torch.float32)
        tokens = x if case.operation == "fprop" else dy
        kernels = kernel.transpose(1, 2).contiguous() if case.operation == "fprop" else kernel
        return scaled_tokens(tokens), scaled_kernels(kernels), tokens.new_empty(total, kernels.shape[1])

    sizes_on_device = torch.as_tensor(np.array(padded, np.int32)).cuda()

    def call(a: Any, b: Any, result: Any) -> Tensors:
        if case.operation == "wgrad f32":
            _deep_gemm.k_grouped_fp8_gemm_nt_contiguous(a, b, result, padded, sizes_on_device, c=result)
        else:
            _deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a, b, result, groups)
        return (result,)

    def read(result: Any) -> Tensors:
        if case.operation == "wgrad f32":
            return (result,)
        tokens = result.new_zeros(case.shape.tokens, result.shape[1])
        tokens[: len(places)] = result[places]
        return (tokens,)

    return TorchWork(call, [operands(*arrays) for arrays in tensors(sets)], read)
