"""`torch._scaled_grouped_mm` of e4m3 operands with a scale for every row of one and every column of the other.

They are quantized before the clock starts. Sums are those of tensor cores (`use_fast_accum`), as in torchao.
"""

from typing import Any

from benchmarks.cases import Arrays, Case
from benchmarks.peers import NotOfferedError
from benchmarks.peers.torch_work import Tensors, TorchWork, tensors, torch


def _quantize(x: Any) -> Tensors:
    """Returns rows of numbers, each with the inverse of its own scale."""
    amax = x.abs().amax(-1, keepdim=True).float().clamp(min=1e-12)
    largest = torch.finfo(torch.float8_e4m3fn).max
    return (x * (largest / amax)).clamp(-largest, largest).to(torch.float8_e4m3fn), (amax / largest).squeeze(-1)


def _quantize_columns(x: Any, ends: list[int]) -> Tensors:
    """Returns the columns of `x` as rows, each with a scale for every group: `[groups * columns]`."""
    pairs = [_quantize(rows.t()) for rows in x.tensor_split(ends)[:-1]]
    data = torch.cat([data for data, _ in pairs], -1).contiguous()
    return data, torch.cat([scale for _, scale in pairs])


def product(case: Case, sets: list[Arrays]) -> TorchWork:
    if case.operation not in ("fprop", "dgrad", "wgrad"):
        raise NotOfferedError
    inputs, offs = tensors(case, sets)
    ends = offs.tolist()

    def operands(x: Any, kernel: Any, dy: Any) -> Tensors:
        if case.operation == "fprop":
            return *_quantize(x), *_quantize(kernel.transpose(-2, -1).contiguous())
        if case.operation == "dgrad":
            return *_quantize(dy), *_quantize(kernel)
        return *_quantize_columns(x, ends), *_quantize_columns(dy, ends)

    def call(a: Any, a_scale: Any, b: Any, b_scale: Any) -> Tensors:
        result = torch._scaled_grouped_mm(
            a, b.transpose(-2, -1), a_scale, b_scale, offs=offs, out_dtype=torch.bfloat16, use_fast_accum=True
        )
        return (result,)

    return TorchWork(call, [operands(*arrays) for arrays in inputs])
