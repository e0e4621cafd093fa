"""A whole model of this library's layers, under Flax linen, in one program per step."""

import functools
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import jax_grouped as jg
from benchmarks.model import Model, Training
from jax_grouped.examples.moe_lm import rotate_by_position
from jax_grouped.examples.settings import RECIPES

_DTYPE = jnp.bfloat16
#: Weight of the load-balancing loss.
_BALANCE_WEIGHT = 0.01
#: Kernels to whose gradients a microbatch adds its own in the product.
_ACCUMULATED = ("gate_up", "down")


class Projection(nn.Module):
    """A product of `[..., K]` and `[K, N]`, as a group of its own with a recipe or a cache."""

    features: int
    recipe: jg.Recipe | None
    cached: bool

    @nn.compact
    def __call__(self, x: jax.Array, is_first: bool | None) -> jax.Array:
        if self.recipe is None and not self.cached:
            return nn.Dense(self.features, use_bias=False, dtype=_DTYPE)(x)
        rows = x.reshape(-1, x.shape[-1])
        dense = jg.linen.GroupedDense(
            self.features, 1, use_bias=False, dtype=_DTYPE, recipe=self.recipe, cache_kernel=self.cached
        )
        y = dense(rows, jnp.array([len(rows)]), is_first_microbatch=is_first)
        return y.reshape(*x.shape[:-1], self.features)


class Block(nn.Module):
    """Attention and experts, `[B, S, D] -> [B, S, D]`."""

    model: Model
    recipe: jg.Recipe | None
    cached: bool
    projections: bool

    @nn.compact
    def __call__(self, x: jax.Array, is_first: bool | None, sums: Any) -> tuple[jax.Array, jax.Array]:
        model = self.model
        project = functools.partial(
            Projection, recipe=self.recipe if self.projections else None, cached=self.cached and self.projections
        )
        norm = functools.partial(nn.RMSNorm, dtype=_DTYPE)
        qkv = project(model.qkv_features, name="qkv")(norm(name="attention_norm")(x), is_first)
        heads = qkv.reshape(*x.shape[:-1], -1, model.head_features)
        query, key, value = jnp.split(heads, (model.heads, model.heads + model.kv_heads), axis=2)
        query = rotate_by_position(norm(name="query_norm")(query))
        key = rotate_by_position(norm(name="key_norm")(key))
        implementation: Literal["cudnn"] | None = "cudnn" if jax.default_backend() == "gpu" else None
        mixed = jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation=implementation)
        x = x + project(model.features, name="out")(mixed.reshape(*x.shape[:-1], -1), is_first)
        options = {"dtype": _DTYPE, "recipe": self.recipe, "cache_kernel": self.cached}
        experts = jg.linen.MoEMlp(model.experts, model.top_k, model.hidden, **options, name="experts")
        y, metrics = experts(norm(name="experts_norm")(x), is_first_microbatch=is_first, accumulate_into=sums)
        return x + y, metrics.balance_loss


class LanguageModel(nn.Module):
    """Tokens `int[B, S]` to logits `bf16[B, S, vocabulary]` and the mean balance loss."""

    model: Model
    recipe: jg.Recipe | None
    cached: bool
    projections: bool

    @nn.compact
    def __call__(
        self, tokens: jax.Array, is_first: bool | None = None, sums: Any = None
    ) -> tuple[jax.Array, jax.Array]:
        x = nn.Embed(self.model.vocabulary, self.model.features, dtype=_DTYPE, name="embed")(tokens)
        losses = []
        for index in range(self.model.layers):
            block = Block(self.model, self.recipe, self.cached, self.projections, name=f"block_{index}")
            x, loss = block(x, is_first, None if sums is None else sums[block.name])
            losses.append(loss)
        x = nn.RMSNorm(dtype=_DTYPE, name="norm")(x)
        logits = nn.Dense(self.model.vocabulary, use_bias=False, dtype=_DTYPE, name="logits")(x)
        return logits, jnp.mean(jnp.stack(losses))


def training(model: Model, recipe: str = "bf16", cached: bool = False, projections: bool = False) -> Training:
    """Makes the model, with random weights and tokens; parameters, their gradients and Adam are in float32."""
    network = LanguageModel(model, RECIPES[recipe], cached, projections)
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
            name: {projection: block["experts"][projection]["kernel"] for projection in _ACCUMULATED}
            for name, block in total["params"].items()
            if name.startswith("block_")
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

    def take() -> jax.Array:
        nonlocal carry
        *carry, loss = step(*carry)
        return loss

    def peak_bytes() -> int:
        return (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)

    return Training(take, peak_bytes)
