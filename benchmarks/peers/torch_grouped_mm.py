"""`torch._grouped_mm`. A float32 kernel is converted first, its gradient after the product, which is bfloat16."""

import functools
from typing import Any

from benchmarks.cases import Arrays, Case
from benchmarks.peers.torch_work import Tensors, TorchWork, tensors, torch


def product(case: Case, sets: list[Arrays]) -> TorchWork:
    inputs, ends = tensors(case, sets)
    grouped_mm = functools.partial(torch._grouped_mm, offs=ends)
    accumulator = torch.zeros_like(inputs[0][1]) if case.operation == "accumulating" else None

    def dgrad(kernel: Any, dy: Any) -> Any:
        return grouped_mm(dy, kernel.transpose(-2, -1))

    def wgrad(x: Any, dy: Any) -> Any:
        return grouped_mm(x.t(), dy)

    def call(x: Any, kernel: Any, dy: Any) -> Tensors:
        if case.operation in ("wgrad", "wgrad f32"):
            return (wgrad(x, dy).to(kernel.dtype),)
        weight = kernel.to(x.dtype)
        match case.operation:
            case "fprop":
                return (grouped_mm(x, weight),)
            case "dgrad":
                return (dgrad(weight, dy),)
            case "backward":
                return dgrad(weight, dy), wgrad(x, dy).to(kernel.dtype)
        y, dx, dkernel = grouped_mm(x, weight), dgrad(weight, dy), wgrad(x, dy)
        return y, dx, dkernel.to(kernel.dtype) if accumulator is None else accumulator.add_(dkernel)

    def mlp(x: Any, gate_up: Any, down: Any, dy: Any) -> Tensors:
        weights = gate_up.to(x.dtype), down.to(x.dtype)
        hidden = grouped_mm(x, weights[0]).detach().requires_grad_()
        gate, up = hidden.chunk(2, dim=-1)
        activated = torch.nn.functional.silu(gate) * up
        y = grouped_mm(activated.detach(), weights[1])
        (dhidden,) = torch.autograd.grad(activated, hidden, dgrad(weights[1], dy))
        gradients = wgrad(x, dhidden), wgrad(activated.detach(), dy)
        return y, dgrad(weights[0], dhidden), *(gradient.to(gate_up.dtype) for gradient in gradients)

    return TorchWork(mlp if case.operation == "mlp" else call, inputs)
