"""Variables of layers whose kernels are there in FP8 alone."""

from collections.abc import Mapping
from typing import Any

import flax.linen as nn
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
from flax.traverse_util import flatten_dict, unflatten_dict

from jax_grouped import _layers
from jax_grouped.fp8.arrays import KernelCache
from jax_grouped.fp8.recipes import DelayedScaling, Recipe, check_recipe
from jax_grouped.fp8.state import Fp8State
from jax_grouped.linen.dense import KERNEL_CACHE


def quantize_for_inference(variables: Mapping[str, Any], recipe: Recipe) -> dict[str, Any]:
    """Quantizes the kernels of layers with `cache_kernel`, for a forward pass that needs no other copy of them.

    `apply` takes the result in place of the variables, and gives the same numbers: in the layer's `dtype` or, if that
    is None, as if the kernels were in its `param_dtype`. In FP8, kernels take half the memory of bfloat16. There are no
    gradients. A layer can compute so on one device, and under plain `jax.jit` over any axes but one of `features`.

    Args:
        variables: as `init` returns them: with the collection `KERNEL_CACHE`, which tells which parameters to quantize.
        recipe: that of the layers.

    Returns:
        The variables without these kernels, with a `KERNEL_CACHE` of one orientation. Layers without a recipe stay as
        they are.

    Raises:
        TypeError: `recipe` is no recipe.
        ValueError: there is no `KERNEL_CACHE` of a layer with a recipe, or a parameter is missing.

    Example:
        recipe = jg.Float8BlockScaling()
        layer = jg.linen.GroupedDense(16, 2, recipe=recipe, cache_kernel=True)
        x, group_sizes = jnp.ones((16, 32)), jnp.array([10, 4])
        variables = layer.init(jax.random.key(0), x, group_sizes)

        in_fp8 = jg.linen.quantize_for_inference(variables, recipe)

        assert "kernel" not in in_fp8["params"]
        assert jnp.array_equal(layer.apply(in_fp8, x, group_sizes), layer.apply(variables, x, group_sizes))
    """
    check_recipe(recipe, optional=False)
    found = flatten_dict(variables.get(KERNEL_CACHE, {}))
    if not any(isinstance(cache, KernelCache) for cache in found.values()):
        raise ValueError(
            f"variables must have the collection {KERNEL_CACHE}, which init makes of layers with cache_kernel=True. "
            "One of them must have a recipe."
        )
    params, states = (
        flatten_dict(nn.meta.unbox(variables.get(name, {}))) for name in ("params", OVERWRITE_WITH_GRADIENT)
    )
    caches = {}
    for path, cache in found.items():
        if not isinstance(cache, KernelCache):  # Of a layer without a recipe, which stays as it is.
            caches[path] = cache
            continue
        if path not in params:
            raise ValueError(f"variables must have the parameter {'/'.join(path)}, which {KERNEL_CACHE} has.")
        state = None
        if isinstance(recipe, DelayedScaling):
            layer_state = {other[-1]: value for other, value in states.items() if other[:-1] == path[:-1]}
            if not layer_state:
                raise ValueError(f"DelayedScaling needs the collection {OVERWRITE_WITH_GRADIENT} for {'/'.join(path)}.")
            state = Fp8State(**layer_state)
        if cache.columnwise.data.shape != cache.columnwise.layout.data_shape:
            raise ValueError(f"{'/'.join(path)} is stacked, as by nn.scan: quantize layers one by one.")
        caches[path] = _layers.make_cache(params.pop(path), recipe, None, state, for_gradients=False)
    kept = {name: collection for name, collection in variables.items() if name not in ("params", KERNEL_CACHE)}
    return {"params": unflatten_dict(params), KERNEL_CACHE: unflatten_dict(caches), **kept}
