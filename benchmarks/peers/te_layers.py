"""TransformerEngine for PyTorch: its `GroupedLinear`, and whole layers of experts with its other parts."""

import importlib
from collections.abc import Callable
from typing import Any

from benchmarks.cases import Arrays, Case
from benchmarks.peers import NotOfferedError
from benchmarks.peers.torch_layers import leaves
from benchmarks.peers.torch_peer import Tensors, TorchWork, tensors, torch

_te: Any = importlib.import_module("transformer_engine.pytorch")
_grouped: Any = importlib.import_module("transformer_engine.pytorch.module.grouped_linear")
_recipes: Any = importlib.import_module("transformer_engine.common.recipe")


def _linear(kernel: Any, on_device: bool) -> Any:
    """Returns a `GroupedLinear` with the kernels `[E, K, N]`; its splits are on the device or on the host."""
    options = {"bias": False, "params_dtype": kernel.dtype, "device": "cuda", "use_grouped_tensor": on_device}
    linear = _te.GroupedLinear(*kernel.shape, **options)
    with torch.no_grad():
        for parameter, weight in zip(linear.parameters(), kernel, strict=True):
            parameter.copy_(weight.t())
    return linear


def _takes_splits_on_device(num_groups: int, recipe: str | None) -> bool:
    """Returns whether `GroupedLinear` can take splits on the device, with few launches for up to 64 groups."""
    scaling = None if recipe is None else getattr(_recipes, recipe)()
    return num_groups <= 64 and _grouped.is_module_grouped_tensor_path_supported(scaling, torch.bfloat16)


def _on_groups(num_groups: int, recipe: str | None) -> Callable[..., Any]:
    """Returns a function that applies `layer(rows, splits)` in the number format of a recipe, FP8 on padded groups."""
    scaling = None if recipe is None else getattr(_recipes, recipe)()
    pad, unpad = _te.Fp8Padding(num_groups), _te.Fp8Unpadding(num_groups)

    def apply(layer: Callable[[Any, list[int]], Any], rows: Any, counts: list[int]) -> Any:
        if scaling is None:
            return layer(rows, counts)
        with _te.autocast(enabled=True, recipe=scaling):
            return unpad(layer(*pad(rows, counts)), counts)

    return apply


def product(case: Case, sets: list[Arrays], recipe: str | None, cached: bool) -> TorchWork:
    """Makes the step of a `GroupedLinear`. The rows of each group are known before the clock starts."""
    if case.operation != "dense" or case.kernel_dtype != "bfloat16":
        raise NotOfferedError
    case.require_all_rows()
    num_groups, counts = case.shape.num_groups, case.sizes.tolist()
    on_groups = _on_groups(num_groups, recipe)
    # Without padding, which FP8 needs, the splits are the counts.
    unpadded = recipe is None or not (case.sizes % 128).any()
    on_device = unpadded and _takes_splits_on_device(num_groups, recipe)
    on_gpu = torch.tensor(counts, device="cuda") if on_device else None

    def call(x: Any, linear: Any, dy: Any, first: bool = False) -> Tensors:
        def layer(rows: Any, splits: list[int]) -> Any:
            return linear(rows, on_gpu if on_device else splits, is_first_microbatch=first if cached else None)

        y = on_groups(layer, x, counts)
        return y.detach(), *torch.autograd.grad(y, [x, *linear.parameters()], dy)

    def read(y: Any, dx: Any, *dweights: Any) -> Tensors:
        return y, dx, torch.stack(dweights).transpose(1, 2)

    modules = [(x.requires_grad_(), _linear(kernel, on_device), dy) for x, kernel, dy in tensors(sets)]
    if cached:
        for of in modules:
            call(*of, first=True)  # Quantizes the weights.
    return TorchWork(call, modules, read)


def moe(case: Case, sets: list[Arrays], recipe: str | None, cached: bool) -> TorchWork:
    """Makes a layer in bfloat16, or in FP8 with the recipe of this name.

    In FP8, whose groups are padded, and with more than 64 experts the host reads the number of rows of each expert.
    """
    num_experts, top_k = case.shape.num_groups, case.shape.top_k
    on_device = recipe is None and _takes_splits_on_device(num_experts, recipe)
    swiglu, on_groups = _te.ops.SwiGLU(), _on_groups(num_experts, recipe)

    def layer(x: Any, router: Any, up: Any, down: Any, first: bool | None) -> Any:
        def mlp(rows: Any, splits: list[int]) -> Any:
            hidden = up(rows, splits, is_first_microbatch=first)
            return down(swiglu(hidden), splits, is_first_microbatch=first)

        chosen, experts = (x @ router).topk(top_k)
        weights = chosen.softmax(-1, dtype=torch.float32)
        rows, row_map = _te.moe_permute(x, experts.int(), experts.numel(), map_type="index")
        counts = torch.bincount(experts.flatten(), minlength=num_experts)
        counts = counts if on_device else counts.tolist()
        return _te.moe_unpermute(on_groups(mlp, rows, counts), row_map, merging_probs=weights, map_type="index")

    def call(x: Any, router: Any, up: Any, down: Any, dy: Any, first: bool = False) -> Tensors:
        later = first if cached else None
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

    modules = [
        (x, router, _linear(gate_up, on_device), _linear(down, on_device), dy)
        for x, router, gate_up, down, dy in leaves(case, sets)
    ]
    if cached:
        for of in modules:
            call(*of, first=True)  # Quantizes the weights.
    return TorchWork(call, modules, read)
