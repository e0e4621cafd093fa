"""The formulas of quantization in plain `jax.numpy`, as a user would write them: what XLA makes of them alone.

To the bit what this library gives, where nothing underflows; but no largest values of groups where scales don't need
them, and no padding, so that only some group sizes will do.
"""

import jax
import jax.numpy as jnp

from benchmarks.jax_work import Results

_FP8 = jnp.float8_e4m3fn
_FP8_MAX = float(jnp.finfo(_FP8).max)
BLOCK = 128


def _magnitude(values: jax.Array) -> jax.Array:
    return jnp.where(jnp.isfinite(values), jnp.abs(values), 0)


def _scales(amax: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The scales of blocks with these largest values, and their inverses."""
    scale = jnp.where(amax == 0, 1, jnp.clip(_FP8_MAX / amax, 2.0**-126, 2.0**126))
    return scale, 1 / scale


def _cast(values: jax.Array, scale: jax.Array) -> jax.Array:
    clipped = jnp.clip(values * scale, -_FP8_MAX, _FP8_MAX)
    return jnp.where(jnp.isfinite(values), clipped, jnp.nan).astype(_FP8)


def block_1d_rowwise(x: jax.Array) -> Results:
    """Data `[T, C]` and inverse scales `[C / 128, T]`."""
    blocks = x.astype(jnp.float32).reshape(x.shape[0], -1, BLOCK)
    scale, scale_inv = _scales(_magnitude(blocks).max(axis=2))
    return _cast(blocks, scale[:, :, None]).reshape(x.shape), scale_inv.T


def block_1d_columnwise(x: jax.Array, num_groups: int) -> Results:
    """Data `[G, C, T / G]` and inverse scales `[T / 128, C]`; the groups are equal and have a multiple of 128 rows."""
    blocks = x.astype(jnp.float32).reshape(-1, BLOCK, x.shape[1])
    scale, scale_inv = _scales(_magnitude(blocks).max(axis=1))
    data = _cast(blocks, scale[:, None, :])
    return data.reshape(num_groups, -1, x.shape[1]).swapaxes(1, 2), scale_inv


def tensor_rowwise(x: jax.Array, scale: jax.Array | None, group_sizes: jax.Array) -> Results:
    """Data `[T, C]`, inverse scales and largest values `[G]`; every row belongs to a group."""
    values = x.astype(jnp.float32)
    groups = group_sizes.shape[0]
    group = jnp.repeat(jnp.arange(groups), group_sizes, total_repeat_length=x.shape[0])
    amax = jnp.zeros(groups).at[group].max(_magnitude(values).max(axis=1))
    scale, scale_inv = _scales(amax) if scale is None else (scale, 1 / scale)
    return _cast(values, scale[group][:, None]), scale_inv, amax
