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
    """Calls of `call(x, kernel, dy)` on a case's operands, timed by CUDA events."""

    def __init__(self, torch: ModuleType, call: Callable[..., Tensors], case: Case):
        self._torch = torch
        self._call = call
        self._inputs = [jax.tree.map(torch.from_dlpack, tuple(inputs)) for inputs in case.inputs]
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


def load_grouped_mm() -> Callable[[Case], Work]:
    """`torch._grouped_mm`. A float32 kernel is converted first, its gradient after the product, which is bfloat16."""
    torch = importlib.import_module("torch")
    if jax.default_backend() == "gpu" and not torch.cuda.is_available():
        raise RuntimeError("JAX runs on a GPU, but this torch sees none")
    grouped_mm = torch._grouped_mm

    def prepare(case: Case) -> Work:
        if jax.default_backend() == "gpu":
            # What earlier cases left in torch's pool is memory that no one else can use.
            torch.cuda.empty_cache()
        # The two frameworks' streams know nothing of each other.
        jax.block_until_ready(case.inputs)
        offs = torch.from_dlpack(jax.block_until_ready(jnp.asarray(group_ends(case.sizes, case.shape.tokens))))

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

        return TorchWork(torch, call, case)

    return prepare
