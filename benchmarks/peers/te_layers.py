"""TransformerEngine for PyTorch: whole layers of experts from its `GroupedLinear`, SwiGLU, permutation and padding."""

import importlib
from typing import Any

from benchmarks.cases import Arrays, Case
from benchmarks.peers.torch_layers import leaves
from benchmarks.peers.torch_peer import Tensors, TorchWork, torch

_te: Any = importlib.import_module("transformer_engine.pytorch")
_recipes: Any = importlib.import_module("transformer_engine.common.recipe")


def _linear(kernel: Any) -> Any:
    """Returns a `GroupedLinear` with the kernels `[E, K, N]`."""
    linear = _te.GroupedLinear(*kernel.shape, bias=False, params_dtype=kernel.dtype, device="cuda")
    with torch.no_grad():
        for parameter, weight in zip(linear.parameters(), kernel, strict=True):
            parameter.copy_(weight.t())
    return linear


def moe(case: Case, sets: list[Arrays], recipe: str | None) -> TorchWork:
    """Makes a layer in bfloat16, or in FP8 with the recipe of this name and weights that are quantized once.

    The host reads the number of rows of each expert: without it, `GroupedLinear` needs a Blackwell GPU.
    """
    num_experts, top_k = case.shape.num_groups, case.shape.top_k
    scaling = None if recipe is None else getattr(_recipes, recipe)()
    swiglu, pad, unpad = _te.ops.SwiGLU(), _te.Fp8Padding(num_experts), _te.Fp8Unpadding(num_experts)

    def layer(x: Any, router: Any, up: Any, down: Any, first: bool | None) -> Any:
        chosen, experts = (x @ router).topk(top_k)
        weights = chosen.softmax(-1, dtype=torch.float32)
        rows, row_map = _te.moe_permute(x, experts.int(), experts.numel(), map_type="index")
        counts = splits = torch.bincount(experts.flatten(), minlength=num_experts).tolist()
        with _te.autocast(enabled=scaling is not None, recipe=scaling):
            if scaling is not None:
                rows, splits = pad(rows, counts)
            hidden = up(rows, splits, is_first_microbatch=first)
            results = down(swiglu(hidden), splits, is_first_microbatch=first)
            if scaling is not None:
                results = unpad(results, counts)
        return _te.moe_unpermute(results, row_map, merging_probs=weights, map_type="index")

    def call(x: Any, router: Any, up: Any, down: Any, dy: Any, first: bool | None = None) -> Tensors:
        later = None if scaling is None else bool(first)
        if case.operation == "moe forward":
            with torch.no_grad():
                return (layer(x, router, up, down, later),)
        y = layer(x, router, up, down, later)
        return y.detach(), *torch.autograd.grad(y, [x, router, *up.parameters(), *down.parameters()], dy)

    def read(y: Any, *gradients: Any) -> Tensors:
        if not gradients:
            return (y,)
        dx, drouter, *dweights = gradients
        dkernels = (dweights[:num_experts], dweights[num_experts:])
        return y, dx, drouter, *(torch.stack(of).transpose(1, 2) for of in dkernels)

    modules = [(x, router, _linear(gate_up), _linear(down), dy) for x, router, gate_up, down, dy in leaves(case, sets)]
    if scaling is not None:
        for of in modules:
            call(*of, first=True)  # Quantizes the weights.
    return TorchWork(call, modules, read)
