"""The parts of the language model that are the same functions in both of Flax's APIs."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

#: Every byte is a token.
VOCABULARY = 256


def embed(tokens: jax.Array, table: jax.Array, dtype: DTypeLike) -> jax.Array:
    """The rows `[B, S, D]` of a table `[256, D]` for bytes `int[B, S]`."""
    # As a product, because the gradient of a look-up is a scatter-add: with so few rows for all tokens, a GPU's
    # atomics would queue up there, and add in another order in every run.
    return jax.nn.one_hot(tokens, VOCABULARY, dtype=dtype) @ table.astype(dtype)


def causal_attention(qkv: jax.Array) -> jax.Array:
    """Attention of every position to itself and the earlier ones, from `[B, S, 3, H, C]` to `[B, S, H, C]`."""
    query, key, value = (qkv[:, :, i] for i in range(3))
    return jax.nn.dot_product_attention(rotate_by_position(query), rotate_by_position(key), value, is_causal=True)


def rotate_by_position(x: jax.Array) -> jax.Array:
    """Rotary position embedding (https://arxiv.org/abs/2104.09864) of queries or keys `[B, S, H, C]`, `C` even."""
    sequence, half = x.shape[1], x.shape[3] // 2
    frequency = 10000.0 ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = jnp.arange(sequence, dtype=jnp.float32)[:, None, None] * frequency
    first, second = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
