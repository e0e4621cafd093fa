"""Whole layers of experts in PyTorch: one with `torch._grouped_mm`, and what others share with it."""

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


class _Sorted(torch.autograd.Function):  # type: ignore[misc]  # torch is imported as Any.
    """Copies of rows in another order; autograd's own gradient of `index_select` would add to memory atomically.

    Every row has `copies` places among the sorted ones: `inverse` tells the places of each row, one row after another.
    """

    @staticmethod
    def forward(context: Any, rows: Any, order: Any, inverse: Any, copies: int) -> Any:
        context.save_for_backward(inverse)
        context.copies = copies
        return rows.index_select(0, order // copies)

    @staticmethod
    def backward(context: Any, gradient: Any) -> Any:
        (inverse,) = context.saved_tensors
        return gradient.index_select(0, inverse).unflatten(0, (-1, context.copies)).sum(1), None, None, None


def experts_layer(num_experts: int, top_k: int) -> Callable[[Any, Any, Any, Any], Any]:
    """Returns a layer of tensors `(x, router, gate_up, down)`, of PyTorch's own operations, to be compiled.

    Nothing is read on the host. Logits are bfloat16. The weights of the choices multiply the activation, which is
    smaller than the results.
    """

    def layer(x: Any, router: Any, gate_up: Any, down: Any) -> Any:
        chosen, experts = (x @ router).topk(top_k)
        weights = chosen.softmax(-1, dtype=torch.float32).to(x.dtype)
        sorted_experts, order = experts.flatten().sort(stable=True)
        inverse = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=x.device))
        ends = torch.searchsorted(
            sorted_experts, torch.arange(num_experts, device=x.device), right=True, out_int32=True
        )
        gate, up = torch._grouped_mm(_Sorted.apply(x, order, inverse, top_k), gate_up, offs=ends).chunk(2, dim=-1)
        sorted_weights = _Sorted.apply(weights.flatten(), order, inverse, 1)
        activated = torch.nn.functional.silu(gate) * up * sorted_weights[:, None]
        results = torch._grouped_mm(activated, down, offs=ends)
        return _Sorted.apply(results, inverse, order, 1).view(*experts.shape, -1).sum(1)

    return layer


def moe(case: Case, sets: list[Arrays]) -> TorchWork:
    """Makes a layer of PyTorch's own operations, compiled, in CUDA graphs."""
    torch.compiler.reset()  # Forgets other shapes, so that this one is compiled for itself.
    layer = torch.compile(experts_layer(case.shape.num_groups, case.shape.top_k), dynamic=False)
    return TorchWork(call_of(case.operation, layer), leaves(case, sets), in_graphs=True)
