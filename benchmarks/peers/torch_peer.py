"""PyTorch's grouped product, on the very arrays that JAX holds.

Both frameworks then share one GPU: see `benchmarks.__main__` for how its memory is divided.
"""

import importlib
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.cases import Case
from benchmarks.shapes import group_ends
from benchmarks.timing import Work

Tensors = tuple[Any, ...]


class TorchWork:
    """Calls of `call` on one of several sets of tensors after another, timed by CUDA events."""

    def __init__(self, torch: ModuleType, call: Callable[..., Tensors], sets: list[Tensors]):
        self._torch = torch
        self._call = call
        self._inputs = sets
        self._on_gpu = jax.default_backend() == "gpu"

    def results(self) -> tuple[jax.Array, ...]:
        tensors = self._call(*self._inputs[0])
        self._synchronize()
        return tuple(jnp.from_dlpack(tensor.contiguous()) for tensor in tensors)

    def block(self, calls: int) -> float:
        start = self._now()
        for call in range(calls):
            self._call(*self._inputs[call % len(self._inputs)])
        end = self._now()
        self._synchronize()
        return start.elapsed_time(end) / 1e3 if self._on_gpu else end - start

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = self._torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _synchronize(self) -> None:
        if self._on_gpu:
            self._torch.cuda.synchronize()


def _load_torch() -> ModuleType:
    torch = importlib.import_module("torch")
    if jax.default_backend() == "gpu" and not torch.cuda.is_available():
        raise RuntimeError("JAX runs on a GPU, but this torch sees none")
    return torch


def _tensors(torch: ModuleType, case: Case) -> tuple[list[Tensors], Any]:
    """`(x, kernel, dy)` of every set of a case's inputs, and where each group ends."""
    if jax.default_backend() == "gpu":
        # What earlier cases left in torch's pool is memory that no one else can use.
        torch.cuda.empty_cache()
    # The two frameworks' streams know nothing of each other.
    jax.block_until_ready(case.inputs)
    offs = torch.from_dlpack(jax.block_until_ready(jnp.asarray(group_ends(case.sizes, case.shape.tokens))))
    return [jax.tree.map(torch.from_dlpack, tuple(inputs)) for inputs in case.inputs], offs


def load_grouped_mm() -> Callable[[Case], Work]:
    """`torch._grouped_mm`. A float32 kernel is converted first, its gradient after the product, which is bfloat16."""
    torch = _load_torch()
    grouped_mm = torch._grouped_mm

    def prepare(case: Case) -> Work:
        sets, offs = _tensors(torch, case)

        def dgrad(kernel: Any, dy: Any) -> Any:
            return grouped_mm(dy, kernel.transpose(-2, -1), offs=offs)

        def wgrad(x: Any, dy: Any) -> Any:
            return grouped_mm(x.t(), dy, offs=offs)

        if case.op == "accumulating step":
            sums = torch.zeros_like(torch.from_dlpack(case.inputs[0].kernels[0]))

        def step(x: Any, kernel: Any, dy: Any) -> Tensors:
            weights = kernel.to(x.dtype)
            return grouped_mm(x, weights, offs=offs), dgrad(weights, dy), wgrad(x, dy)

        def mlp_step(x: Any, kernels: tuple[Any, Any], dy: Any) -> Tensors:
            gate_up, down = (kernel.to(x.dtype) for kernel in kernels)
            hidden = grouped_mm(x, gate_up, offs=offs).detach().requires_grad_()
            gate, up = hidden.chunk(2, dim=-1)
            activated = torch.nn.functional.silu(gate) * up
            y = grouped_mm(activated.detach(), down, offs=offs)
            (dhidden,) = torch.autograd.grad(activated, hidden, dgrad(down, dy))
            gradients = wgrad(x, dhidden), wgrad(activated.detach(), dy)
            return y, dgrad(gate_up, dhidden), *(gradient.to(kernels[0].dtype) for gradient in gradients)

        def call(x: Any, kernel: Any, dy: Any) -> Tensors:
            match case.op:
                case "fprop":
                    return (grouped_mm(x, kernel, offs=offs),)
                case "dgrad":
                    return (dgrad(kernel, dy),)
                case "wgrad":
                    return (wgrad(x, dy),)
                case "wgrad f32":
                    return (wgrad(x, dy).float(),)
                case "backward":
                    return (dgrad(kernel, dy), wgrad(x, dy))
                case "step":
                    y, dx, dkernel = step(x, kernel, dy)
                    return y, dx, dkernel.to(kernel.dtype)
                case "accumulating step":
                    y, dx, dkernel = step(x, kernel, dy)
                    return y, dx, sums.add_(dkernel)
                case "mlp step":
                    return mlp_step(x, kernel, dy)
                case _:
                    raise ValueError(f"unknown operation {case.op!r}")

        return TorchWork(torch, call, sets)

    return prepare


def load_scaled_grouped_mm() -> Callable[[Case], Work]:
    """`torch._scaled_grouped_mm` of e4m3 operands with a scale for every row of one and every column of the other.

    They are quantized before the clock starts. Sums are those of tensor cores (`use_fast_accum`), as in torchao.
    """
    torch = _load_torch()

    def quantize(x: Any) -> Tensors:
        """Rows of numbers, each with the inverse of its own scale."""
        amax = x.abs().amax(-1, keepdim=True).float().clamp(min=1e-12)
        largest = torch.finfo(torch.float8_e4m3fn).max
        return (x * (largest / amax)).clamp(-largest, largest).to(torch.float8_e4m3fn), (amax / largest).squeeze(-1)

    def quantize_columns(x: Any, ends: list[int]) -> Tensors:
        """The columns of `x` as rows, each with a scale for every group: `[groups * columns]`."""
        pairs = [quantize(rows.t()) for rows in x.tensor_split(ends)[:-1]]
        data = torch.cat([data for data, _ in pairs], -1).contiguous()
        return data, torch.cat([scale for _, scale in pairs])

    def prepare(case: Case) -> Work:
        sets, offs = _tensors(torch, case)
        ends = offs.tolist()

        def operands(x: Any, kernel: Any, dy: Any) -> Tensors:
            match case.op:
                case "fprop":
                    return *quantize(x), *quantize(kernel.transpose(-2, -1).contiguous())
                case "dgrad":
                    return *quantize(dy), *quantize(kernel)
                case "wgrad":
                    return *quantize_columns(x, ends), *quantize_columns(dy, ends)
                case _:
                    raise ValueError(f"{case.op!r} is no single product with bfloat16 results")

        def call(a: Any, a_scale: Any, b: Any, b_scale: Any) -> Tensors:
            result = torch._scaled_grouped_mm(
                a,
                b.transpose(-2, -1),
                a_scale,
                b_scale,
                offs=offs,
                out_dtype=torch.bfloat16,
                use_fast_accum=True,
            )
            return (result,)

        return TorchWork(torch, call, [operands(*inputs) for inputs in sets])

    return prepare
