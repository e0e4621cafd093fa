"""The language model of `moe_lm` in Flax NNX: the same layers, initialised from the same distributions."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import ArrayLike, DTypeLike

import jax_grouped as jg
from jax_grouped.examples.moe_lm import VOCABULARY, BlockMetrics, block_metrics, causal_attention, embed


class CausalAttention(nnx.Module):
    """Multi-head attention of every position to itself and the earlier ones, `[B, S, D] -> [B, S, D]`."""

    def __init__(self, features: int, num_heads: int, dtype: DTypeLike, rngs: nnx.Rngs):
        heads = (num_heads, features // num_heads)
        self.qkv = nnx.LinearGeneral(features, (3, *heads), use_bias=False, dtype=dtype, rngs=rngs)
        self.out = nnx.LinearGeneral(heads, features, axis=(-2, -1), use_bias=False, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns the attention's result."""
        return self.out(causal_attention(self.qkv(x)))


class Block(nnx.Module):
    """Attention and a mixture of experts, each with a norm before it and added to its input."""

    def __init__(self, features: int, num_heads: int, dtype: DTypeLike, experts: Mapping[str, Any], rngs: nnx.Rngs):
        self.experts = jg.nnx.MoEMlp(features, **experts, dtype=dtype, rngs=rngs)
        self.attention_norm = nnx.RMSNorm(features, dtype=dtype, rngs=rngs)
        self.attention = CausalAttention(features, num_heads, dtype, rngs)
        self.experts_norm = nnx.RMSNorm(features, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array, is_first_microbatch: ArrayLike | None) -> tuple[jax.Array, BlockMetrics]:
        """Returns `[B, S, D]` and the block's metrics."""
        x = x + self.attention(self.attention_norm(x))
        normed = self.experts_norm(x)
        y, metrics = self.experts(normed, is_first_microbatch=is_first_microbatch)
        return x + y, block_metrics(normed, metrics)


class MoELanguageModel(nnx.Module):
    """Predicts each next byte; the arguments are the attributes of `moe_lm.MoELanguageModel`."""

    def __init__(
        self,
        d_model: int,
        num_layers: int,
        num_heads: int,
        dtype: DTypeLike,
        experts: Mapping[str, Any],
        rngs: nnx.Rngs,
    ):
        self.dtype = dtype
        self.embed = nnx.Embed(VOCABULARY, d_model, rngs=rngs)
        self.blocks = nnx.List([Block(d_model, num_heads, dtype, experts, rngs) for _ in range(num_layers)])
        self.norm = nnx.RMSNorm(d_model, dtype=dtype, rngs=rngs)
        self.logits = nnx.Linear(d_model, VOCABULARY, use_bias=False, dtype=dtype, rngs=rngs)

    def __call__(
        self, tokens: jax.Array, *, is_first_microbatch: ArrayLike | None = None
    ) -> tuple[jax.Array, BlockMetrics]:
        """Maps bytes `int[B, S]` to the logits of the bytes after them, `f32[B, S, 256]`, and the blocks' metrics."""
        x = embed(tokens, self.embed.embedding[...], self.dtype)
        metrics = []
        for block in self.blocks:
            x, block_metric = block(x, is_first_microbatch)
            metrics.append(block_metric)
        logits = self.logits(self.norm(x))
        return logits.astype(jnp.float32), jax.tree.map(lambda *each: jnp.stack(each), *metrics)
