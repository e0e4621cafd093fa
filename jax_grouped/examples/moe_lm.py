"""A causal transformer language model over bytes whose feed-forward layers are mixtures of experts."""

import functools
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

import jax_grouped as jg
from jax_grouped.recipes import Recipe

#: Every byte is a token.
VOCABULARY = 256


class Routing(NamedTuple):
    """Where `T` tokens go, `k` experts each: `R = T * k` pairs of a token and an expert, one row of work each.

    Attributes:
        order: `int32[R]`, the pairs sorted by expert: row `i` is pair `order[i]`, token `order[i] // k`.
        inverse: `int32[R]`, the permutation back: pair `j` is row `inverse[j]`.
        group_sizes: `int32[E]`, rows per expert; it never leaves the device.
        weights: `f32[T, k]`, what each token's expert outputs are multiplied by; they add up to 1.
        balance_loss: `f32[]`, 1 when the experts share the tokens evenly, `E` when one gets them all.
    """

    order: jax.Array
    inverse: jax.Array
    group_sizes: jax.Array
    weights: jax.Array
    balance_loss: jax.Array


def route(logits: jax.Array, top_k: int) -> Routing:
    """Sends each token to the `top_k` experts that the softmax of its router logits, `[T, E]`, likes best.

    The balance loss is the auxiliary loss of Switch Transformers (https://arxiv.org/abs/2101.03961, equation 4).
    """
    num_experts = logits.shape[1]
    probabilities = jax.nn.softmax(logits.astype(jnp.float32))
    weights, chosen = jax.lax.top_k(probabilities, top_k)
    expert_of_pair = chosen.reshape(-1)
    order = jnp.argsort(expert_of_pair)
    group_sizes = jnp.bincount(expert_of_pair, length=num_experts)
    share = group_sizes / expert_of_pair.size
    return Routing(
        order=order,
        inverse=jnp.argsort(order),
        group_sizes=group_sizes,
        weights=weights / jnp.sum(weights, axis=1, keepdims=True),
        balance_loss=num_experts * jnp.sum(share * jnp.mean(probabilities, axis=0)),
    )


@jax.custom_vjp
def permute_rows(x: jax.Array, order: jax.Array, inverse: jax.Array) -> jax.Array:
    """`x[order]` for a permutation and its inverse.

    The gradient of a gather is a scatter-add, which a GPU does with atomics in any order. For a permutation it is also
    the gather by the inverse: faster, and the same bits in every run.
    """
    del inverse
    return x[order]


def _permute_rows_forward(x: jax.Array, order: jax.Array, inverse: jax.Array) -> tuple[jax.Array, jax.Array]:
    return x[order], inverse


def _permute_rows_backward(inverse: jax.Array, dy: jax.Array) -> tuple[Any, ...]:
    return dy[inverse], None, None


permute_rows.defvjp(_permute_rows_forward, _permute_rows_backward)


class MoEMLP(nn.Module):
    """A feed-forward layer of which every token uses the `top_k` experts that a learned router picks for it.

    Attributes:
        num_experts: `E`.
        top_k: experts per token.
        hidden: features between an expert's two layers.
        dtype: type of the experts' computation; the router is computed in float32, for its choice is discrete.
        recipe: how the experts' matmuls are computed in FP8, or None for `dtype`.
    """

    num_experts: int
    top_k: int
    hidden: int
    dtype: DTypeLike
    recipe: Recipe | None = None

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Maps tokens `[T, D]` to their weighted expert outputs `[T, D]` and the balance loss `f32[]`."""
        tokens, features = x.shape
        router = nn.Dense(self.num_experts, use_bias=False, dtype=jnp.float32, name="router")
        routing = route(router(x), self.top_k)

        rows = permute_rows(jnp.repeat(x, self.top_k, axis=0), routing.order, routing.inverse)
        layer = functools.partial(
            jg.linen.GroupedDense, num_groups=self.num_experts, dtype=self.dtype, recipe=self.recipe
        )
        hidden, output = layer(self.hidden, name="up"), layer(features, name="down")
        rows = output(nn.gelu(hidden(rows, routing.group_sizes)), routing.group_sizes)

        pairs = permute_rows(rows, routing.inverse, routing.order).reshape(tokens, self.top_k, features)
        return jnp.einsum("tkd,tk->td", pairs, routing.weights.astype(pairs.dtype)), routing.balance_loss


def rotate_by_position(x: jax.Array) -> jax.Array:
    """Rotary position embedding (https://arxiv.org/abs/2104.09864) of queries or keys `[B, S, H, C]`, `C` even."""
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
        qkv = nn.DenseGeneral(heads, use_bias=False, dtype=self.dtype, name="qkv")(x)
        query, key, value = (qkv[:, :, i] for i in range(3))
        mixed = jax.nn.dot_product_attention(rotate_by_position(query), rotate_by_position(key), value, is_causal=True)
        return nn.DenseGeneral(features, axis=(-2, -1), use_bias=False, dtype=self.dtype, name="out")(mixed)


class MoELanguageModel(nn.Module):
    """Predicts each next byte.

    Attributes:
        d_model: `D`, features of a token.
        num_layers: transformer blocks.
        num_heads: attention heads; `d_model` divided by it must be even.
        num_experts, top_k, d_ff: the mixture of experts of each block, see `MoEMLP`.
        dtype: type of the computation. Parameters are float32, and so are router, norms' statistics and logits.
        recipe: how the experts' matmuls, and only they, are computed in FP8, or None for `dtype`.
    """

    d_model: int
    num_layers: int
    num_heads: int
    num_experts: int
    top_k: int
    d_ff: int
    dtype: DTypeLike
    recipe: Recipe | None = None

    @nn.compact
    def __call__(self, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Maps bytes `int[B, S]` to the logits of the bytes after them, `f32[B, S, 256]`, and the mean balance loss."""
        # As a product, because the gradient of a look-up is a scatter-add: with so few rows for all tokens, a GPU's
        # atomics would queue up there, and add in another order in every run.
        table = nn.Embed(VOCABULARY, self.d_model, name="embed").embedding
        x = jax.nn.one_hot(tokens, VOCABULARY, dtype=self.dtype) @ table.astype(self.dtype)
        balance_losses = []
        for layer in range(self.num_layers):
            attention = CausalAttention(self.num_heads, self.dtype, name=f"attention_{layer}")
            x = x + attention(nn.RMSNorm(dtype=self.dtype, name=f"attention_norm_{layer}")(x))
            experts = MoEMLP(self.num_experts, self.top_k, self.d_ff, self.dtype, self.recipe, name=f"experts_{layer}")
            normed = nn.RMSNorm(dtype=self.dtype, name=f"experts_norm_{layer}")(x)
            y, balance_loss = experts(normed.reshape(-1, self.d_model))
            x = x + y.reshape(x.shape)
            balance_losses.append(balance_loss)
        x = nn.RMSNorm(dtype=self.dtype, name="norm")(x)
        logits = nn.Dense(VOCABULARY, use_bias=False, dtype=self.dtype, name="logits")(x)
        return logits.astype(jnp.float32), jnp.mean(jnp.stack(balance_losses))
