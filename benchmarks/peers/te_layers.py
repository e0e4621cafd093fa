"""TransformerEngine for PyTorch, in CUDA graphs: its `GroupedLinear`, and layers of experts with its other parts."""

import importlib
import os
from collections.abc import Callable
from typing import Any

from benchmarks.cases import Arrays, Case
from benchmarks.peers import NotOfferedError
from benchmarks.peers.torch_peer import ROWS_OF_TILE, Tensors, TorchWork, make_call, make_leaves, tensors, torch

# The kernels of all groups are one parameter. Otherwise there may be no more than 64.
os.environ["NVTE_GROUPED_LINEAR_SINGLE_PARAM"] = "1"
_te: Any = importlib.import_module("transformer_engine.pytorch")
_router: Any = importlib.import_module("transformer_engine.pytorch.router")
_recipes: Any = importlib.import_module("transformer_engine.common.recipe")


def _linear(kernels: Any) -> Any:
    """Returns a `GroupedLinear` with the kernels `[E, K, N]`."""
    rest = iter(kernels)

    def fill(weight: Any) -> None:
        with torch.no_grad():
            weight.copy_(next(rest).t())

    # Splits on the device: FP8 then needs groups with a multiple of 128 rows, and delayed scaling is not offered.
    options = {"bias": False, "params_dtype": kernels.dtype, "init_method": fill}
    return _te.GroupedLinear(*kernels.shape, **options, single_grouped_weight=True, use_grouped_tensor=True)


def _read_variant(case: Case) -> tuple[Any, bool]:
    """Returns the class of the recipe or None, and if weights are quantized before the clock starts."""
    recipes = {"block": _recipes.Float8BlockScaling, "current": _recipes.Float8CurrentScaling}
    words = case.variant.split()
    return recipes[words[1]] if len(words) > 1 else None, "cached" in words


def _work(case: Case, layer: Callable[..., Any], sets: list[Tensors], cached: bool) -> TorchWork:
    """Makes the operation on a layer of tensors and `GroupedLinear`s, whose weights may be quantized beforehand."""
    call = make_call(case.operation, layer)
    if cached:
        for arguments in sets:
            call(*arguments, first=True)

    def read(y: Any, *gradients: Any) -> Tensors:
        pairs = zip(sets[0], gradients, strict=False)  # Forward passes have no gradients.
        return y, *(grad.transpose(1, 2) if isinstance(part, _te.GroupedLinear) else grad for part, grad in pairs)

    return TorchWork(call, sets, read, in_graphs=True)


def product(case: Case, sets: list[Arrays]) -> TorchWork:
    if case.operation != "dense" or case.kernel_dtype != "bfloat16":
        raise NotOfferedError
    case.require_all_rows()
    recipe, cached = _read_variant(case)
    if recipe and (case.sizes % ROWS_OF_TILE).any():
        raise ValueError(f"needs groups with a multiple of {ROWS_OF_TILE} rows")
    splits = torch.as_tensor(case.sizes, dtype=torch.int64, device="cuda")

    def layer(x: Any, linear: Any, first: bool = False) -> Any:
        with _te.autocast(enabled=recipe is not None, recipe=recipe and recipe()):
            return linear(x, splits, is_first_microbatch=first if cached else None)

    modules = [(x.requires_grad_(), _linear(kernel), dy) for x, kernel, dy in tensors(sets)]
    return _work(case, layer, modules, cached)


def moe(case: Case, sets: list[Arrays]) -> TorchWork:
    recipe, cached = _read_variant(case)
    top_k, swiglu = case.shape.top_k, _te.ops.ScaledSwiGLU()

    def layer(x: Any, router: Any, up: Any, down: Any, first: bool = False) -> Any:
        choose = _router.fused_topk_with_score_function
        weights, chosen = choose(x @ router, top_k, False, None, None, None, "softmax", None)
        counts = chosen.sum(0)
        splits, offsets, room = counts, None, len(x) * top_k
        if recipe:
            # As `moe_permute_and_pad_with_probs` does, which reads the number of rows on the host.
            splits = (counts + ROWS_OF_TILE - 1) // ROWS_OF_TILE * ROWS_OF_TILE
            padding = splits - counts
            offsets, room = padding.cumsum(0) - padding, room + ROWS_OF_TILE * len(counts)
        rows, row_map, row_weights = torch.ops.te_moe.permute_mask_map_fwd(x, chosen, room, weights, offsets)
        is_first = first if cached else None
        with _te.autocast(enabled=recipe is not None, recipe=recipe and recipe()):
            hidden = up(rows, splits, is_first_microbatch=is_first)
            results = down(swiglu(hidden, row_weights), splits, is_first_microbatch=is_first)
        return _te.moe_unpermute(results, row_map, restore_shape=x.shape, pad_offsets=offsets)

    leaves = make_leaves(case, sets)
    modules = [(x, router, _linear(gate_up), _linear(down), dy) for x, router, gate_up, down, dy in leaves]
    return _work(case, layer, modules, cached)
