"""The model of `our_model` in PyTorch: compiled, with `torch._grouped_mm`, or with SonicMoE's layer of experts.

Parameters, their gradients and Adam are in float32. A step converts the parameters to bfloat16 once, the router too;
the gradients of a microbatch, which are bfloat16, are added to those in float32. There is no balance loss, and PyTorch
chooses the kernel of attention. Only the experts of SonicMoE are not compiled.
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
    return functional.rms_norm(x, (x.shape[-1],), scale, 1e-6)


def _attention(model: Model, x: Any, of: dict[str, Any]) -> Any:
    """Returns `x` with the result of attention, and that result for the experts, normed."""
    heads = (_norm(x, of["attention_norm"]) @ of["qkv"]).unflatten(-1, (-1, model.head_features))
    query, key, value = heads.split((model.heads, model.kv_heads, model.kv_heads), dim=2)
    query, key = (_rotated(_norm(part, of[name])) for part, name in ((query, "query_norm"), (key, "key_norm")))
    parts = (part.transpose(1, 2) for part in (query, key, value))
    grouped = model.kv_heads < model.heads
    mixed = functional.scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=grouped).transpose(1, 2)
    x = x + mixed.flatten(2) @ of["out"]
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


def training(model: Model, experts: str) -> Training:
    """Makes the model, with random weights and tokens."""
    is_sonic = experts == "SonicMoE"
    if is_sonic:
        layer = importlib.import_module("benchmarks.peers.sonic_moe").experts_layer(model.top_k)
    else:
        layer = experts_layer(model.experts, model.top_k)
    masters, copies = [], []

    def make_parameter(shape: tuple[int, ...], contracted: int = -2) -> Any:
        """Returns ones, or random numbers that keep the deviation of what is multiplied along the axis `contracted`."""
        if len(shape) == 1:
            master = torch.ones(shape, device="cuda")
        else:
            master = torch.randn(shape, device="cuda").mul_(shape[contracted] ** -0.5)
        master.grad = torch.zeros_like(master)
        masters.append(master)
        copies.append(master.to(torch.bfloat16).requires_grad_())
        return copies[-1]

    transposed = {"router", "gate_up", "down"} if is_sonic else set()
    blocks = [
        {
            name: make_parameter(shape, -1 if name in transposed else -2)
            for name, shape in _shapes(model, is_sonic).items()
        }
        for _ in range(model.layers)
    ]
    embedding = make_parameter((model.vocabulary, model.features), -1)
    logits = make_parameter((model.features, model.vocabulary))
    norm = make_parameter((model.features,))
    optimizer = torch.optim.Adam(masters, lr=1e-4, fused=True)
    windows = np.random.default_rng(0).integers(
        model.vocabulary, size=(model.microbatches, model.sequences, model.sequence + 1)
    )
    tokens = torch.from_numpy(windows).cuda()

    def attention(x: Any, of: dict[str, Any]) -> Any:
        return _attention(model, x, of)

    def block(x: Any, of: dict[str, Any]) -> Any:
        x, normed = attend(x, of)
        return x + layer(normed.flatten(0, 1), of["router"], of["gate_up"], of["down"]).view_as(x)

    def loss_of(x: Any, targets: Any) -> Any:
        scores = _norm(x, norm) @ logits
        return functional.cross_entropy(scores.flatten(0, 1).float(), targets.flatten())

    def copy(into: list[Any], values: Any) -> None:
        for tensor, value in zip(into, values, strict=True):
            tensor.copy_(value)

    def add(into: list[Any], values: Any) -> None:
        for tensor, value in zip(into, values, strict=True):
            tensor.add_(value)

    attend = torch.compile(attention, dynamic=False)
    apply = block if is_sonic else torch.compile(block, dynamic=False)
    mean_loss = torch.compile(loss_of, dynamic=False)
    # PyTorch's own operations on two types are slow.
    copy_all, add_all = (torch.compile(function, dynamic=False) for function in (copy, add))

    def step() -> Any:
        total = 0.0
        store = copy_all  # The first gradients take the place of the last step's.
        for window in tokens:
            x = functional.embedding(window[:, :-1], embedding)
            for of in blocks:
                x = apply(x, of)
            loss = mean_loss(x, window[:, 1:]) / model.microbatches
            store([master.grad for master in masters], torch.autograd.grad(loss, copies))
            store = add_all
            total = total + loss.detach()
        optimizer.step()
        with torch.no_grad():
            copy_all(copies, masters)
        return total

    return Training(step, float, torch.cuda.max_memory_allocated)
