"""SonicMoE (arXiv:2512.14080), a layer of experts in PyTorch, on the very arrays that JAX holds."""

import importlib
from typing import Any

from benchmarks.cases import Arrays, Case
from benchmarks.peers import NotOfferedError
from benchmarks.peers.torch_peer import Tensors, TorchWork, tensors, torch

sonicmoe: Any = importlib.import_module("sonicmoe")


def moe(case: Case, sets: list[Arrays]) -> TorchWork:
    """Makes the layer. The first call compiles for about a minute."""
    if case.operation == "moe experts":
        raise NotOfferedError
    inputs, _ = tensors(case, sets)
    shape = case.shape
    layer = sonicmoe.MoE(
        num_experts=shape.num_groups,
        num_experts_per_tok=shape.top_k,
        hidden_size=shape.K,
        intermediate_size=shape.N // 2,
        activation_function=sonicmoe.enums.ActivationType.SWIGLU,
        add_bias=False,
        std=shape.K**-0.5,
    ).to(device="cuda", dtype=torch.bfloat16)
    parameters = [layer.router.weight, layer.c_fc.weight, layer.c_proj.weight]

    def call(x: Any, *kernels_and_dy: Any) -> Tensors:
        y = layer(x)[0]
        if case.operation == "moe forward":
            return (y.detach(),)
        return y.detach(), *torch.autograd.grad(y, [x, *parameters], kernels_and_dy[-1])

    # Its kernels are its own: it keeps gate and up in alternating columns, and scales what it initialises.
    return TorchWork(call, [(of[0].requires_grad_(), *of[1:]) for of in inputs])
