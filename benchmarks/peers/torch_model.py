"""The model of `our_model` in PyTorch: compiled, with `torch._grouped_mm`, or with SonicMoE's layer of experts."""

import importlib
from typing import Any

import numpy as np

from benchmarks.model import Model
from benchmarks.peers.torch_peer import experts_layer, torch

functional = torch.nn.functional


def _rotate(x: Any) -> Any:
    """Applies rotary position embedding to `[B, S, H, C]`."""
    half = x.shape[3] // 2
    frequency = 10000.0 ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angle = torch.arange(x.shape[1], device=x.device, dtype=torch.float32)[:, None, None] * frequency
    first, second = x.float().split(half, dim=-1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def _norm(x: Any, scale: Any) -> Any:
    return functional.rms_norm(x, (x.shape[-1],), scale, 1e-6)


def training(model: Model, variant: str) -> tuple[Any, Any]:
    """Returns a step of the model, which returns its loss, and the most bytes in use."""
    is_sonic = variant == "SonicMoE"
    if is_sonic:
        layer = importlib.import_module("benchmarks.peers.sonic_moe").experts_layer(model.top_k)
    else:
        layer = experts_layer(model.experts, model.top_k)
    masters, copies = [], []  # In float32, as gradients and Adam are; and in bfloat16, converted once a step.

    def make_parameter(*shape: int, contracted: int = -2) -> Any:
        """Returns ones, or random numbers that keep the deviation of what is multiplied along the axis `contracted`."""
        if len(shape) == 1:
            master = torch.ones(shape, device="cuda")
        else:
            master = torch.randn(shape, device="cuda").mul_(shape[contracted] ** -0.5)
        master.grad = torch.zeros_like(master)
        masters.append(master)
        copies.append(master.to(torch.bfloat16).requires_grad_())
        return copies[-1]

    def make_block() -> dict[str, Any]:
        D, E, F = model.features, model.experts, model.hidden
        # Kernels of experts as the layer takes them: SonicMoE's, or those of `our_model`.
        kernels = {"router": (D, E), "gate_up": (E, D, 2 * F), "down": (E, F, D)}
        if is_sonic:
            kernels = {"router": (E, D), "gate_up": (E, 2 * F, D), "down": (E, D, F)}
        return {
            "attention_norm": make_parameter(D),
            "query_norm": make_parameter(model.head_features),
            "key_norm": make_parameter(model.head_features),
            "experts_norm": make_parameter(D),
            "qkv": make_parameter(D, model.qkv_features),
            "out": make_parameter(model.attention_features, D),
            **{name: make_parameter(*shape, contracted=-1 if is_sonic else -2) for name, shape in kernels.items()},
        }

    blocks = [make_block() for _ in range(model.layers)]
    embedding = make_parameter(model.vocabulary, model.features, contracted=-1)
    logits = make_parameter(model.features, model.vocabulary)
    norm = make_parameter(model.features)
    optimizer = torch.optim.Adam(masters, lr=1e-4, fused=True)
    shape = model.microbatches, model.sequences, model.sequence + 1
    tokens = torch.from_numpy(np.random.default_rng(0).integers(model.vocabulary, size=shape)).cuda()

    def attend(x: Any, weights: dict[str, Any]) -> Any:
        """Returns `x` with the result of attention, and that result for the experts, normed."""
        heads = (_norm(x, weights["attention_norm"]) @ weights["qkv"]).unflatten(-1, (-1, model.head_features))
        query, key, value = heads.split((model.heads, model.kv_heads, model.kv_heads), dim=2)
        query, key = _rotate(_norm(query, weights["query_norm"])), _rotate(_norm(key, weights["key_norm"]))
        parts = (part.transpose(1, 2) for part in (query, key, value))
        grouped = model.kv_heads < model.heads
        mixed = functional.scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=grouped).transpose(1, 2)
        x = x + mixed.flatten(2) @ weights["out"]
        return x, _norm(x, weights["experts_norm"])

    def apply(x: Any, weights: dict[str, Any]) -> Any:
        x, normed = compiled_attend(x, weights)
        y = layer(normed.flatten(0, 1), weights["router"], weights["gate_up"], weights["down"])
        return x + y.view_as(x)

    def mean_loss(x: Any, targets: Any) -> Any:
        scores = _norm(x, norm) @ logits
        return functional.cross_entropy(scores.flatten(0, 1).float(), targets.flatten())

    def store(targets: list[Any], values: Any, add: bool) -> None:
        for target, value in zip(targets, values, strict=True):
            if add:
                target.add_(value)
            else:
                target.copy_(value)

    compiled_attend, compiled_loss = (torch.compile(function, dynamic=False) for function in (attend, mean_loss))
    apply_block = apply if is_sonic else torch.compile(apply, dynamic=False)
    compiled_store = torch.compile(store, dynamic=False)  # PyTorch's own operations on two types are slow.

    def step() -> Any:
        total = 0.0
        for index, window in enumerate(tokens):
            x = functional.embedding(window[:, :-1], embedding)
            for block in blocks:
                x = apply_block(x, block)
            loss = compiled_loss(x, window[:, 1:]) / model.microbatches
            # The first gradients take the place of the last step's.
            compiled_store([master.grad for master in masters], torch.autograd.grad(loss, copies), add=index > 0)
            total = total + loss.detach()
        optimizer.step()
        with torch.no_grad():
            compiled_store(copies, masters, add=False)
        return total

    return step, torch.cuda.max_memory_allocated
