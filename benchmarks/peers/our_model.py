"""A whole model of this library's layers, under Flax linen, in one program per step."""

import functools
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import jax_grouped as jg
from benchmarks.model import Model
from jax_grouped.examples.moe_lm import rotate_by_position
from jax_grouped.examples.settings import RECIPES

_DTYPE = jnp.bfloat16
_BALANCE_WEIGHT = 0.01  # Of the load-balancing loss.
_ACCUMULATED = ("gate_up", "down")  # Kernels to whose gradients a microbatch adds its own in the product.


class LanguageModel(nn.Module):
    """Tokens `int[B, S]` to logits `bf16[B, S, vocabulary]` and the mean balance loss."""

    model: Model
    recipe: jg.Recipe | None
    cached: bool
    projections: bool  # Attention's projections have the recipe and the cache too, as groups of their own.

    @nn.compact
    def __call__(self, tokens: jax.Array, is_first: bool | None = None, sums: Any = None) -> Any:
        model, norm = self.model, functools.partial(nn.RMSNorm, dtype=_DTYPE)
        options: Any = {"dtype": _DTYPE, "recipe": self.recipe, "cache_kernel": self.cached}
        implementation: Literal["cudnn"] | None = "cudnn" if jax.default_backend() == "gpu" else None

        def project(x: jax.Array, features: int) -> jax.Array:
            if not self.projections or (self.recipe is None and not self.cached):
                return nn.Dense(features, use_bias=False, dtype=_DTYPE)(x)
            rows = x.reshape(-1, x.shape[-1])
            dense = jg.linen.GroupedDense(features, 1, use_bias=False, **options)
            return dense(rows, jnp.array([len(rows)]), is_first_microbatch=is_first).reshape(*x.shape[:-1], features)

        x = nn.Embed(model.vocabulary, model.features, dtype=_DTYPE)(tokens)
        losses = []
        for index in range(model.layers):
            heads = project(norm()(x), model.qkv_features).reshape(*x.shape[:-1], -1, model.head_features)
            query, key, value = jnp.split(heads, (model.heads, model.heads + model.kv_heads), axis=2)
            query, key = rotate_by_position(norm()(query)), rotate_by_position(norm()(key))
            mixed = jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation=implementation)
            x = x + project(mixed.reshape(*x.shape[:-1], -1), model.features)
            name = f"experts_{index}"
            router = jg.moe.Router(model.top_k)
            experts = jg.linen.MoEMlp(model.experts, model.hidden, router, **options, name=name)
            total = None if sums is None else sums[name]
            y, metrics = experts(norm()(x), is_first_microbatch=is_first, accumulate_into=total)
            losses.append(metrics.balance_loss)
            x = x + y
        logits = nn.Dense(model.vocabulary, use_bias=False, dtype=_DTYPE)(norm()(x))
        return logits, jnp.mean(jnp.stack(losses))


def training(model: Model, variant: str) -> tuple[Any, Any]:
    """Returns a step of the model, which returns its loss, and the most bytes in use; all state is in float32."""
    recipe, cached = RECIPES[variant.split()[0]], "cached" in variant
    network = LanguageModel(model, recipe, cached, "projections" in variant)
    optimizer = jg.overwrite_with_gradient(optax.adam(1e-4))
    shape = model.microbatches, model.sequences, model.sequence + 1
    tokens = jax.random.randint(jax.random.key(0), shape, 0, model.vocabulary, jnp.int32)

    @jax.jit
    def start(key: jax.Array) -> Any:
        variables = dict(network.init(key, tokens[0, :1, :-1]))
        variables.pop(jg.linen.KERNEL_CACHE, None)  # Each step's first microbatch makes it.
        return variables, optimizer.init(variables)

    def objective(variables: Any, cache: Any, sums: Any, windows: jax.Array) -> Any:
        is_first = sums is None if cached else None
        (logits, balance), cache = network.apply(
            {**variables, **cache}, windows[:, :-1], is_first, sums, mutable=[jg.linen.KERNEL_CACHE]
        )
        logits = logits.astype(jnp.float32)
        # Unlike Optax's loss, this one has a gradient that is no scatter.
        is_label = windows[:, 1:, None] == jnp.arange(logits.shape[-1])
        loss = jnp.mean(jax.nn.logsumexp(logits, axis=-1) - jnp.sum(logits, axis=-1, where=is_label))
        return (loss + _BALANCE_WEIGHT * balance) / model.microbatches, (loss, cache)

    differentiate = jax.grad(objective, has_aux=True)

    def add(variables: Any, cache: Any, total: Any, windows: jax.Array) -> Any:
        sums = {
            name: {projection: layer[projection]["kernel"] for projection in _ACCUMULATED}
            for name, layer in total["params"].items()
            if name.startswith("experts_")
        }
        gradients, (loss, _) = differentiate(variables, cache, sums, windows)

        def choose(path: Any, added: jax.Array, gradient: jax.Array) -> jax.Array:
            names = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
            return gradient if names[-1] == "kernel" and names[-2] in _ACCUMULATED else added

        # The compiler drops the sums that are not chosen.
        return jax.tree.map_with_path(choose, jg.accumulate_gradients(total, gradients), gradients), loss

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(variables: Any, state: Any) -> Any:
        # The first microbatch stores its gradients and quantized kernels. The others add theirs, and read these.
        gradients, (first_loss, cache) = differentiate(variables, {}, None, tokens[0])
        add_to = functools.partial(add, variables, cache)
        gradients, losses = jax.lax.scan(add_to, gradients, tokens[1:])
        updates, state = optimizer.update(gradients, state, variables)
        return jg.apply_updates(variables, updates), state, (first_loss + jnp.sum(losses)) / model.microbatches

    carry = start(jax.random.key(1))

    def take_step() -> jax.Array:
        nonlocal carry
        *carry, loss = step(*carry)
        return loss

    def find_peak_bytes() -> int:
        return (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)

    return take_step, find_peak_bytes
