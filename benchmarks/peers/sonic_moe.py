"""SonicMoE (arXiv:2512.14080): layers of experts in CuTe and Triton kernels, called from PyTorch."""

import importlib
from collections.abc import Callable
from typing import Any

from benchmarks.cases import Arrays, Case
from benchmarks.peers.torch_layers import call_of, leaves
from benchmarks.peers.torch_peer import Tensors, TorchWork, torch

_sonicmoe: Any = importlib.import_module("sonicmoe")


def _laid_out(x: Any, router: Any, gate_up: Any, down: Any, dy: Any) -> Tensors:
    """Returns the kernels as `experts_layer` takes them."""
    experts, features, hidden = gate_up.shape
    pairs = gate_up.view(experts, features, 2, hidden // 2).permute(0, 3, 2, 1)
    kernels = router.t(), pairs.reshape(experts, hidden, features), down.transpose(1, 2)
    return x, *(kernel.detach().contiguous().requires_grad_() for kernel in kernels), dy


def _read(y: Any, *gradients: Any) -> Tensors:
    """Returns results with the gradients of kernels in the layout of the kernels in JAX."""
    if not gradients:
        return (y,)
    dx, drouter, dgate_up, ddown = gradients
    experts, hidden, features = dgate_up.shape
    pairs = dgate_up.view(experts, hidden // 2, 2, features).permute(0, 3, 2, 1)
    return y, dx, drouter.t(), pairs.reshape(experts, features, hidden), ddown.transpose(1, 2)


def experts_layer(top_k: int, forward_only: bool = False) -> Callable[[Any, Any, Any, Any], Any]:
    """Returns SonicMoE's own layer of tensors `(x, router, gate_up, down)`, the kernels in its default layout.

    These are `[E, K]`, `[E, 2 F, K]` with rows of gate and up in turn, and `[E, K, F]`.
    """

    def layer(x: Any, router: Any, gate_up: Any, down: Any) -> Any:
        return _sonicmoe.moe_TC_softmax_topk_layer(
            x,
            router,
            gate_up.permute(1, 2, 0),
            None,
            down.permute(1, 2, 0),
            None,
            top_k,
            torch.cuda.current_stream().cuda_stream,
            "swiglu",
            is_inference_mode_enabled=forward_only,
        )[0]

    return layer


def moe(case: Case, sets: list[Arrays]) -> TorchWork:
    """Makes SonicMoE's own layer, in CUDA graphs. Its first call compiles for minutes."""
    layer = experts_layer(case.shape.top_k, case.operation == "moe forward")
    inputs = [_laid_out(*arrays) for arrays in leaves(case, sets)]
    return TorchWork(call_of(case.operation, layer), inputs, _read, in_graphs=True)
