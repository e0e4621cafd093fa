"""A causal transformer language model over bytes whose feed-forward layers are mixtures of experts, in Flax linen."""

from collections.abc import Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

import jax_grouped as jg
from jax_grouped.examples.transformer import VOCABULARY, causal_attention, embed


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
        num_experts, top_k, d_ff: the mixture of experts of each block, `d_ff` features inside an expert.
        dtype: type of the computation. Parameters are float32, and so are router, norms' statistics and logits.
        recipe: how the experts' matmuls, and only they, are computed in FP8, or None for `dtype`.
        cache_kernel, expert_axis, batch_axes: as in `jax_grouped.linen.MoEMlp`.
    """

    d_model: int
    num_layers: int
    num_heads: int
    num_experts: int
    top_k: int
    d_ff: int
    dtype: DTypeLike
    recipe: jg.Recipe | None = None
    cache_kernel: bool = False
    expert_axis: str | None = None
    batch_axes: Sequence[str] = ()

    @nn.compact
    def __call__(
        self, tokens: jax.Array, *, is_first_microbatch: ArrayLike | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """Maps bytes `int[B, S]` to the logits of the bytes after them, `f32[B, S, 256]`, and the mean balance loss."""
        x = embed(tokens, nn.Embed(VOCABULARY, self.d_model, name="embed").embedding, self.dtype)
        balance_losses = []
        for layer in range(self.num_layers):
            attention = CausalAttention(self.num_heads, self.dtype, name=f"attention_{layer}")
            x = x + attention(nn.RMSNorm(dtype=self.dtype, name=f"attention_norm_{layer}")(x))
            experts = jg.linen.MoEMlp(
                num_experts=self.num_experts,
                top_k=self.top_k,
                hidden_features=self.d_ff,
                dtype=self.dtype,
                recipe=self.recipe,
                cache_kernel=self.cache_kernel,
                expert_axis=self.expert_axis,
                batch_axes=self.batch_axes,
                name=f"experts_{layer}",
            )
            normed = nn.RMSNorm(dtype=self.dtype, name=f"experts_norm_{layer}")(x)
            y, metrics = experts(normed, is_first_microbatch=is_first_microbatch)
            x = x + y
            balance_losses.append(metrics.balance_loss)
        x = nn.RMSNorm(dtype=self.dtype, name="norm")(x)
        logits = nn.Dense(VOCABULARY, use_bias=False, dtype=self.dtype, name="logits")(x)
        return logits.astype(jnp.float32), jnp.mean(jnp.stack(balance_losses))
