"""What the linen and the NNX layers share: an initialiser, what they compute, and when kernels are quantized anew."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from jax_grouped import _checks
from jax_grouped.arrays import KernelCache
from jax_grouped.dense import grouped_dense
from jax_grouped.dense_inputs import Weights
from jax_grouped.fp8_state import Fp8State
from jax_grouped.moe.exchange import axis_size
from jax_grouped.moe.layer import MoEMetrics, moe_mlp
from jax_grouped.quantize import quantize_kernel
from jax_grouped.recipes import DelayedScaling, Recipe

Initializer = Callable[..., Any]


def default_kernel_init(key: jax.Array, shape: tuple[int, ...], dtype: DTypeLike = jnp.float32) -> jax.Array:
    """The initialiser of Flax's Dense for every group of kernels `[E, K, ...]`.

    Args:
        key: for the random numbers.
        shape: `(E, K, ...)`; all axes after `K` are features.
        dtype: type of the result.

    Returns:
        Random numbers of variance `1 / K`, a truncated normal distribution.

    Example:
        kernel = jg.linen.default_kernel_init(jax.random.key(0), (2, 32, 16))

        assert jnp.allclose(kernel.std(), 32**-0.5, rtol=0.1)
    """
    init = jax.nn.initializers.variance_scaling(
        1.0, "fan_in", "truncated_normal", in_axis=1, out_axis=range(2, len(shape)), batch_axis=0
    )
    return init(key, shape, dtype)


def dense(
    x: jax.Array,
    group_sizes: ArrayLike,
    weights: Weights,
    *,
    recipe: Recipe | None,
    dtype: DTypeLike | None,
    precision: jax.lax.PrecisionLike,
) -> jax.Array:
    """The linear layer of each group, computed in `dtype`."""
    # Only x is converted: grouped_dense computes in its type, and gives parameters gradients in theirs.
    dtype = dtype or jnp.result_type(x, weights.kernel)
    x = jnp.asarray(x, dtype)
    return grouped_dense(x, group_sizes=group_sizes, recipe=recipe, precision=precision, **weights._asdict())


def mixture(
    layer: Any,
    x: jax.Array,
    router: Callable[[jax.Array], jax.Array],
    gate_up: Weights,
    down: Weights,
    selection_bias: jax.Array | None,
    **axes: Any,
) -> tuple[jax.Array, MoEMetrics]:
    """What a `MoEMlp`, `layer`, makes of tokens `[..., K]` with these parts, on devices along these axes."""
    tokens = jnp.reshape(x, (-1, jnp.shape(x)[-1]))
    y, metrics = moe_mlp(
        jnp.asarray(tokens, layer.dtype or jnp.result_type(x, gate_up.kernel)),
        router(tokens),
        gate_up,
        down,
        top_k=layer.top_k,
        score=layer.score,
        normalize_weights=layer.normalize_weights,
        weight_scale=layer.weight_scale,
        selection_bias=selection_bias,
        capacity_factor=layer.capacity_factor,
        recipe=layer.recipe,
        precision=layer.precision,
        exchange_method=layer.exchange_method,
        **axes,
    )
    return y.reshape(jnp.shape(x)), metrics


def check_caching(recipe: Recipe | None, cache_kernel: bool, is_first_microbatch: ArrayLike | None) -> None:
    """Raises unless there is something to cache wherever a cache is asked for.

    Raises:
        ValueError: there is not.
    """
    if (cache_kernel and recipe is None) or (is_first_microbatch is not None and not cache_kernel):
        raise ValueError(
            "is_first_microbatch needs a layer with a recipe and cache_kernel=True, and cache_kernel=True needs a "
            f"recipe: got recipe {recipe!r}, cache_kernel {cache_kernel} and is_first_microbatch {is_first_microbatch}."
        )


def changes_cache(is_first_microbatch: ArrayLike | None) -> bool:
    """Whether the program may store another cache: whether the flag is True, or is read on the device."""
    return is_first_microbatch is not None and (not _is_static(is_first_microbatch) or bool(is_first_microbatch))


def _is_static(is_first_microbatch: ArrayLike) -> bool:
    return isinstance(is_first_microbatch, bool | np.bool_)


def quantized(kernel: jax.Array, recipe: Recipe | None, fp8_state: Fp8State | None, **options: Any) -> KernelCache:
    """`jax_grouped.quantize_kernel`, with the scales of the state where the recipe has one; it has no gradient."""
    assert recipe is not None
    scale = None
    if isinstance(recipe, DelayedScaling):
        assert fp8_state is not None
        # As float32 first: Flax's type whose sum is the maximum passes through stop_gradient.
        scale = jax.lax.stop_gradient(fp8_state.astype(jnp.float32)).scales(recipe).kernel
    return quantize_kernel(kernel, recipe, scale=scale, **options)


def requantized(
    kernel: jax.Array,
    recipe: Recipe | None,
    fp8_state: Fp8State | None,
    *,
    stored: KernelCache,
    is_first_microbatch: ArrayLike,
) -> KernelCache:
    """The kernel quantized anew if this is the first microbatch, and what is stored if not."""
    stored = jax.lax.stop_gradient(stored)
    if _is_static(is_first_microbatch):
        return quantized(kernel, recipe, fp8_state) if is_first_microbatch else stored
    skip = ~_checks.canonical_flag("is_first_microbatch", is_first_microbatch)
    return quantized(kernel, recipe, fp8_state, previous=stored, skip=skip)


def local_size(name: str, size: int, axis_name: str | None) -> int:
    """What one device of the axis has of so many features or experts.

    Raises:
        ValueError: they cannot be split evenly, or there is no such axis.
    """
    devices = 1 if axis_name is None else axis_size(axis_name)
    if size % devices:
        raise ValueError(f"{name} must be a multiple of the {devices} devices of the axis {axis_name!r}, got {size}.")
    return size // devices
