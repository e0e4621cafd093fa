"""The formulas of quantization in plain `jax.numpy`, as a user would write them: without padding, for some sizes."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.cases import Arrays, Case, quantization_arguments
from benchmarks.peers import JaxWork, NotOfferedError

_FP8 = jnp.float8_e4m3fn
_FP8_MAX = float(jnp.finfo(_FP8).max)
_BLOCK = 128


def _find_amax(values: jax.Array, axis: int) -> jax.Array:
    return jnp.where(jnp.isfinite(values), jnp.abs(values), 0).max(axis=axis)


def _make_scale(amax: jax.Array) -> jax.Array:
    return jnp.where(amax == 0, 1, jnp.clip(_FP8_MAX / amax, 2.0**-126, 2.0**126))


def _cast(values: jax.Array, scale: jax.Array) -> jax.Array:
    clipped = jnp.clip(values * scale, -_FP8_MAX, _FP8_MAX)
    return jnp.where(jnp.isfinite(values), clipped, jnp.nan).astype(_FP8)


def _block_rowwise(_sizes: jax.Array, _scale: None, x: jax.Array) -> Arrays:
    """Returns data `[T, K]` and inverse scales `[K / 128, T]`."""
    blocks = x.astype(jnp.float32).reshape(x.shape[0], -1, _BLOCK)
    scale = _make_scale(_find_amax(blocks, axis=2))
    return _cast(blocks, scale[:, :, None]).reshape(x.shape), (1 / scale).T


def _block_both(sizes: jax.Array, scale: None, x: jax.Array) -> Arrays:
    """Adds data `[E, K, T / E]` and inverse scales `[T / 128, K]` of equal groups with a multiple of 128 rows."""
    blocks = x.astype(jnp.float32).reshape(-1, _BLOCK, x.shape[1])
    scales = _make_scale(_find_amax(blocks, axis=1))
    data = _cast(blocks, scales[:, None, :]).reshape(sizes.shape[0], -1, x.shape[1]).swapaxes(1, 2)
    return *_block_rowwise(sizes, scale, x), data, 1 / scales


def _tensor_rowwise(sizes: jax.Array, scale: jax.Array | None, x: jax.Array) -> Arrays:
    """Returns data `[T, K]`, inverse scales and largest values `[E]`; every row belongs to a group."""
    values = x.astype(jnp.float32)
    group = jnp.repeat(jnp.arange(sizes.shape[0]), sizes, total_repeat_length=x.shape[0])
    amax = jnp.zeros(sizes.shape[0]).at[group].max(_find_amax(values, axis=1))
    scale = _make_scale(amax) if scale is None else scale
    return _cast(values, scale[group][:, None]), 1 / scale, amax


_PROGRAMS: dict[str, Callable[..., Any]] = {
    # An argument that is returned as it is would not be touched at all.
    "copy": lambda _sizes, _scale, x: jnp.copy(x),
    "block_1d rowwise": _block_rowwise,
    "block_1d both": _block_both,
    "delayed tensor rowwise": _tensor_rowwise,
    "current tensor rowwise": _tensor_rowwise,
}


def quantization(case: Case, sets: list[Arrays]) -> JaxWork:
    if case.operation not in _PROGRAMS:
        raise NotOfferedError
    case.require_all_rows()
    if "block_1d" in case.operation and case.shape.K % _BLOCK:
        raise ValueError("needs features that are a multiple of 128")
    if case.operation == "block_1d both" and (len({*case.sizes.tolist()}) > 1 or case.sizes[0] % _BLOCK):
        raise ValueError("needs equal groups with a multiple of 128 rows")
    return JaxWork(_PROGRAMS[case.operation], quantization_arguments(case, sets))
