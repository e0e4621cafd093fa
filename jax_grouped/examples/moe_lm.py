"""A causal transformer language model over bytes whose feed-forward layers are mixtures of experts, in Flax linen."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

import jax_grouped as jg

#: Every byte is a token.
VOCABULARY = 256


class BlockMetrics(NamedTuple):
    """Metrics of one block's experts or, stacked, of those of all `L` blocks.

    Attributes:
        balance_loss: `f32[]`, see `jax_grouped.moe.load_balancing_loss`.
        expert_load: `int32[E]`, pairs of a token and an expert, per expert.
        dropped: `int32[]`, pairs that found no room.
        amax: `f32[]`, the largest absolute value of the tokens that go to the experts.
    """

    balance_loss: jax.Array
    expert_load: jax.Array
    dropped: jax.Array
    amax: jax.Array


def block_metrics(x: jax.Array, metrics: jg.moe.MoEMetrics) -> BlockMetrics:
    """Returns the metrics of a block whose experts got these tokens."""
    amax = jnp.max(jnp.abs(jax.lax.stop_gradient(x))).astype(jnp.float32)
    return BlockMetrics(metrics.balance_loss, metrics.expert_load, jnp.sum(metrics.dropped), amax)


def embed(tokens: jax.Array, table: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Returns the rows `[B, S, D]` of a table `[256, D]` for bytes `int[B, S]`."""
    # As a product, because the gradient of a look-up is a scatter-add: with so few rows for all tokens, a GPU's
    # atomics would queue up there, and add in another order in every run.
    return jax.nn.one_hot(tokens, VOCABULARY, dtype=dtype) @ table.astype(dtype)


def causal_attention(qkv: jax.Array) -> jax.Array:
    """Returns the attention of every position to itself and the earlier ones, `[B, S, 3, H, C] -> [B, S, H, C]`."""
    query, key, value = (qkv[:, :, i] for i in range(3))
    return jax.nn.dot_product_attention(rotate_by_position(query), rotate_by_position(key), value, is_causal=True)


def rotate_by_position(x: jax.Array) -> jax.Array:
    """Applies rotary position embedding (https://arxiv.org/abs/2104.09864) to `[B, S, H, C]`, with an even `C`."""
    sequence, half = x.shape[1], x.shape[3] // 2
    frequency = 10000.0 ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = jnp.arange(sequence, dtype=jnp.float32)[:, None, None] * frequency
    first, second = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


class CausalAttention(nn.Module):
    """Multi-head attention of every position to itself and the earlier ones, `[B, S, D] -> [B, S, D]`."""

    num_heads: int
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        features = x.shape[-1]
        heads = (3, self.num_heads, features // self.num_heads)
        mixed = causal_attention(nn.DenseGeneral(heads, use_bias=False, dtype=self.dtype, name="qkv")(x))
        return nn.DenseGeneral(features, axis=(-2, -1), use_bias=False, dtype=self.dtype, name="out")(mixed)


class MoELanguageModel(nn.Module):
    """Predicts each next byte.

    Attributes:
        d_model: `D`, features of a token.
        num_layers: transformer blocks.
        num_heads: attention heads; `d_model` divided by it must be even.
        dtype: type of the computation. Parameters are float32, and so are router, norms' statistics and logits.
        experts: further arguments of each block's `jax_grouped.linen.MoEMlp`.
    """

    d_model: int
    num_layers: int
    num_heads: int
    dtype: DTypeLike
    experts: Mapping[str, Any]

    @nn.compact
    def __call__(
        self, tokens: jax.Array, *, is_first_microbatch: ArrayLike | None = None
    ) -> tuple[jax.Array, BlockMetrics]:
        """Maps bytes `int[B, S]` to the logits of the bytes after them, `f32[B, S, 256]`, and the blocks' metrics."""
        x = embed(tokens, nn.Embed(VOCABULARY, self.d_model, name="embed").embedding, self.dtype)
        blocks = []
        for layer in range(self.num_layers):
            attention = CausalAttention(self.num_heads, self.dtype, name=f"attention_{layer}")
            x = x + attention(nn.RMSNorm(dtype=self.dtype, name=f"attention_norm_{layer}")(x))
            experts = jg.linen.MoEMlp(**self.experts, dtype=self.dtype, name=f"experts_{layer}")
            normed = nn.RMSNorm(dtype=self.dtype, name=f"experts_norm_{layer}")(x)
            y, metrics = experts(normed, is_first_microbatch=is_first_microbatch)
            x = x + y
            blocks.append(block_metrics(normed, metrics))
        x = nn.RMSNorm(dtype=self.dtype, name="norm")(x)
        logits = nn.Dense(VOCABULARY, use_bias=False, dtype=self.dtype, name="logits")(x)
        return logits.astype(jnp.float32), jax.tree.map(lambda *each: jnp.stack(each), *blocks)
