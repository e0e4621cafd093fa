"""SonicMoE (arXiv:2512.14080): layers of experts in CuTe and Triton kernels, called from PyTorch."""

import importlib
from collections.abc import Callable
from typing import Any

from benchmarks.cases import Arrays, Case
from benchmarks.peers.torch_peer import Tensors, TorchWork, make_call, make_leaves, torch

_sonicmoe: Any = importlib.import_module("sonicmoe")


def experts_layer(top_k: int, forward_only: bool = False) -> Callable[[Any, Any, Any, Any], Any]:
    """Returns SonicMoE's layer of `x` and kernels `[E, K]`, `[E, 2 F, K]` (gate and up in turn) and `[E, K, F]`."""

    def layer(x: Any, router: Any, gate_up: Any, down: Any) -> Any:
        kernels = gate_up.permute(1, 2, 0), None, down.permute(1, 2, 0), None
        stream = torch.cuda.current_stream().cuda_stream
        options = {"is_inference_mode_enabled": forward_only}
        return _sonicmoe.moe_TC_softmax_topk_layer(x, router, *kernels, top_k, stream, "swiglu", **options)[0]

    return layer


def moe(case: Case, sets: list[Arrays]) -> TorchWork:
    """Makes SonicMoE's own layer, in CUDA graphs. Its first call compiles for minutes."""

    def lay_out(x: Any, router: Any, gate_up: Any, down: Any, dy: Any) -> Tensors:
        experts, features, hidden = gate_up.shape
        pairs = gate_up.view(experts, features, 2, hidden // 2).permute(0, 3, 2, 1)
        kernels = router.t(), pairs.reshape(experts, hidden, features), down.transpose(1, 2)
        return x, *(kernel.detach().contiguous().requires_grad_() for kernel in kernels), dy

    def read(y: Any, *gradients: Any) -> Tensors:
        if not gradients:
            return (y,)
        dx, drouter, dgate_up, ddown = gradients
        experts, hidden, features = dgate_up.shape
        pairs = dgate_up.view(experts, hidden // 2, 2, features).permute(0, 3, 2, 1)
        return y, dx, drouter.t(), pairs.reshape(experts, features, hidden), ddown.transpose(1, 2)

    layer = experts_layer(case.shape.top_k, case.operation == "moe forward")
    inputs = [lay_out(*arrays) for arrays in make_leaves(case, sets)]
    return TorchWork(make_call(case.operation, layer), inputs, read, in_graphs=True)
