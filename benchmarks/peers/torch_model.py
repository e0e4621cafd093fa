"""The model of `our_model` in PyTorch: compiled, with `torch._grouped_mm`, or with SonicMoE's layer of experts.

Parameters, their gradients and Adam are in float32. Each microbatch converts the parameters to bfloat16, as autocast
would, the router too. There is no balance loss, and PyTorch chooses the kernel of attention. Only the experts of
SonicMoE are not compiled.
"""

import importlib
from typing import Any

import numpy as np

from benchmarks.model import Model, Training
from benchmarks.peers.torch_layers import experts_layer

torch: Any = importlib.import_module("torch")
functional: Any = importlib.import_module("torch.nn.functional")


def _rotated(x: Any) -> Any:
    """Applies rotary position embedding to `[B, S, H, C]`."""
    half = x.shape[3] // 2
    frequency = 10000.0 ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angle = torch.arange(x.shape[1], device=x.device, dtype=torch.float32)[:, None, None] * frequency
    first, second = x.float().split(half, dim=-1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def _norm(x: Any, scale: Any) -> Any:
    return functional.rms_norm(x, (x.shape[-1],), scale.to(x.dtype), 1e-6)


def _attention(model: Model, x: Any, of: dict[str, Any]) -> Any:
    """Returns `x` with the result of attention, and that result for the experts, normed."""
    heads = (_norm(x, of["attention_norm"]) @ of["qkv"].to(x.dtype)).unflatten(-1, (-1, model.head_features))
    query, key, value = heads.split((model.heads, model.kv_heads, model.kv_heads), dim=2)
    query, key = (_rotated(_norm(part, of[name])) for part, name in ((query, "query_norm"), (key, "key_norm")))
    parts = (part.transpose(1, 2) for part in (query, key, value))
    grouped = model.kv_heads < model.heads
    mixed = functional.scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=grouped).transpose(1, 2)
    x = x + mixed.flatten(2) @ of["out"].to(x.dtype)
    return x, _norm(x, of["experts_norm"])


def _shapes(model: Model, pairs_of_gate_up: bool) -> dict[str, tuple[int, ...]]:
    """Shapes of a block's parameters, the experts' as the layer takes them: `our_model`'s or SonicMoE's."""
    D, E, F = model.features, model.experts, model.hidden
    kernels = {"router": (D, E), "gate_up": (E, D, 2 * F), "down": (E, F, D)}
    if pairs_of_gate_up:
        kernels = {"router": (E, D), "gate_up": (E, 2 * F, D), "down": (E, D, F)}
    norms = {"attention_norm": D, "query_norm": model.head_features, "key_norm": model.head_features, "experts_norm": D}
    projections = {"qkv": (D, model.qkv_features), "out": (model.attention_features, D)}
    return {**{name: (size,) for name, size in norms.items()}, **projections, **kernels}


def _parameter(shape: tuple[int, ...], contracted: int = -2) -> Any:
    """Returns ones, or random numbers that keep the deviation of what is multiplied along the axis `contracted`."""
    if len(shape) == 1:
        return torch.ones(shape, device="cuda", requires_grad=True)
    return torch.randn(shape, device="cuda").mul_(shape[contracted] ** -0.5).requires_grad_()


def training(model: Model, experts: str) -> Training:
    """Makes the model, with random weights and tokens."""
    is_sonic = experts == "SonicMoE"
    if is_sonic:
        layer = importlib.import_module("benchmarks.peers.sonic_moe").experts_layer(model.top_k)
    else:
        layer = experts_layer(model.experts, model.top_k)
    transposed = {"router", "gate_up", "down"} if is_sonic else set()
    blocks = [
        {name: _parameter(shape, -1 if name in transposed else -2) for name, shape in _shapes(model, is_sonic).items()}
        for _ in range(model.layers)
    ]
    embedding = _parameter((model.vocabulary, model.features), -1)
    logits = _parameter((model.features, model.vocabulary))
    norm = _parameter((model.features,))
    parameters = [embedding, logits, norm, *(of for block in blocks for of in block.values())]
    optimizer = torch.optim.Adam(parameters, lr=1e-4, fused=True)
    windows = np.random.default_rng(0).integers(
        model.vocabulary, size=(model.microbatches, model.sequences, model.sequence + 1)
    )
    tokens = torch.from_numpy(windows).cuda()

    def attention(x: Any, of: dict[str, Any]) -> Any:
        return _attention(model, x, of)

    def block(x: Any, of: dict[str, Any]) -> Any:
        x, normed = attend(x, of)
        kernels = [of[name].to(x.dtype) for name in ("router", "gate_up", "down")]
        return x + layer(normed.flatten(0, 1), *kernels).view_as(x)

    def loss_of(x: Any, targets: Any) -> Any:
        scores = _norm(x, norm) @ logits.to(x.dtype)
        return functional.cross_entropy(scores.flatten(0, 1).float(), targets.flatten())

    attend = torch.compile(attention, dynamic=False)
    apply = block if is_sonic else torch.compile(block, dynamic=False)
    mean_loss = torch.compile(loss_of, dynamic=False)

    def step() -> Any:
        total = 0.0
        for window in tokens:
            x = functional.embedding(window[:, :-1], embedding).to(torch.bfloat16)
            for of in blocks:
                x = apply(x, of)
            loss = mean_loss(x, window[:, 1:]) / model.microbatches
            loss.backward()
            total = total + loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        return total

    return Training(step, float, torch.cuda.max_memory_allocated)
