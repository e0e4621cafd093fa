"""Whole layers of experts in PyTorch: a plain one with `torch._grouped_mm`, and what others share with it."""

from collections.abc import Callable
from typing import Any

from benchmarks.cases import Arrays, Case, as_trained
from benchmarks.peers import NotOfferedError
from benchmarks.peers.torch_peer import Tensors, TorchWork, tensors, torch


def leaves(case: Case, sets: list[Arrays]) -> list[Tensors]:
    """Returns the sets as tensors, all but the last of which, `dy`, get gradients; not offered without a router."""
    if case.operation == "moe experts":
        raise NotOfferedError
    inputs = tensors([as_trained(arrays) for arrays in sets])
    return [(*(of.requires_grad_() for of in differentiated), dy) for *differentiated, dy in inputs]


def call_of(operation: str, layer: Callable[..., Any]) -> Callable[..., Tensors]:
    """Returns the operation on a layer of tensors `(x, router, gate_up, down)`."""

    def forward(*arguments: Any) -> Tensors:
        with torch.no_grad():
            return (layer(*arguments[:-1]),)

    def both_passes(*arguments: Any) -> Tensors:
        *inputs, dy = arguments
        y = layer(*inputs)
        return y.detach(), *torch.autograd.grad(y, inputs, dy)

    return forward if operation == "moe forward" else both_passes


def experts_layer(num_experts: int, top_k: int) -> Callable[[Any, Any, Any, Any], Any]:
    """Returns a layer of tensors `(x, router, gate_up, down)`, of PyTorch's own operations.

    Nothing is read on the host. Logits are bfloat16. The weights of the choices multiply the activation, which is
    smaller than the results.
    """

    def layer(x: Any, router: Any, gate_up: Any, down: Any) -> Any:
        chosen, experts = (x @ router).topk(top_k)
        weights = chosen.softmax(-1, dtype=torch.float32).to(x.dtype)
        sorted_experts, order = experts.flatten().sort(stable=True)
        ends = torch.searchsorted(
            sorted_experts, torch.arange(num_experts, device=x.device), right=True, out_int32=True
        )
        rows = x.index_select(0, order // top_k)
        gate, up = torch._grouped_mm(rows, gate_up, offs=ends).chunk(2, dim=-1)
        activated = torch.nn.functional.silu(gate) * up * weights.flatten().index_select(0, order)[:, None]
        results = torch._grouped_mm(activated, down, offs=ends)
        inverse = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=x.device))
        return results.index_select(0, inverse).view(*experts.shape, -1).sum(1)

    return layer


def moe(case: Case, sets: list[Arrays], compiled: bool) -> TorchWork:
    """Makes a layer of PyTorch's own operations, called one by one or compiled."""
    layer = experts_layer(case.shape.num_groups, case.shape.top_k)
    inputs = leaves(case, sets)
    if compiled:
        torch.compiler.reset()  # Forgets other shapes, so that this one is compiled for itself.
    return TorchWork(call_of(case.operation, torch.compile(layer, dynamic=False) if compiled else layer), inputs)
