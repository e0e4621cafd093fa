"""Variables of NNX layers: in the structure of linen, and in FP8 alone."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import nnx
from flax.traverse_util import flatten_dict

from jax_grouped import _layers
from jax_grouped.nnx.dense import Fp8Variable, GroupedKernel
from jax_grouped.nnx.moe import SelectionBias


def load_variables(layer: nnx.Module, variables: Mapping[str, Any]) -> None:
    """Loads variables of a linen layer into the NNX layer of the same name; kernel caches are made anew.

    Args:
        layer: changed in place. Variables that have no new value stay.
        variables: arrays in the structure of linen, such as `jg.moe.from_huggingface` returns: parameters and selection
            biases, without states of `DelayedScaling`. They are converted to the types of the layer's variables, and
            put where these are.

    Returns:
        Nothing.

    Raises:
        KeyError: `variables` has neither `params` nor `router_state`.
        ValueError: the layer has no such variable, or one of another shape. The layer may have changed.

    Example:
        from flax import nnx

        options = dict(num_experts=4, hidden_features=16, router=jg.moe.Router(top_k=2))
        variables = jg.linen.MoEMlp(**options).init(jax.random.key(0), jnp.ones((8, 32)))
        layer = jg.nnx.MoEMlp(32, **options, rngs=nnx.Rngs(1))

        jg.nnx.load_variables(layer, variables)

        assert jnp.array_equal(layer.router.kernel, variables["params"]["router"]["kernel"])
    """
    if not {"params", "router_state"} & variables.keys():
        found = ", ".join(map(str, variables)) or "nothing"
        raise KeyError(f"The variables have no params and no router_state, but {found}.")
    for collection in (variables.get("params", {}), variables.get("router_state", {})):
        for path, array in flatten_dict(nn.meta.unbox(collection)).items():
            _load(layer, path, array)
    for _, module in nnx.iter_modules(layer):
        if isinstance(module, GroupedKernel) and module.kernel is not None and module.kernel_cache is not None:
            module.check_single()
            kernel, _, _, state, _ = module.stored()
            module.kernel_cache.set_value(_layers.make_cache(kernel, module.recipe, module.dtype, state))


def _load(layer: nnx.Module, path: tuple[str | int, ...], array: Any) -> None:
    """Sets one variable, where it lies and in its type."""
    variable: Any = layer
    for name in path:
        variable = variable[name] if isinstance(name, int) else getattr(variable, name, None)
    named = "/".join(map(str, path))
    if not isinstance(variable, nnx.Variable):
        raise ValueError(f"The layer has no variable {named}.")
    old = variable[...]
    if jnp.shape(old) != jnp.shape(array):
        raise ValueError(f"{named} must have shape {jnp.shape(old)}, got {jnp.shape(array)}.")
    new = np.asarray(array).astype(old.dtype) if isinstance(array, np.ndarray) else jnp.asarray(array, old.dtype)
    variable.set_value(jnp.asarray(new) if isinstance(old, jax.core.Tracer) else jax.device_put(new, old.sharding))


def quantize_for_inference(layer: nnx.Module) -> None:
    """Quantizes the kernels of a layer or model with recipes, for a forward pass that needs no other copy of them.

    Calls then give the same numbers. In FP8, kernels take half the memory of bfloat16. There are no gradients.

    Args:
        layer: changed in place: each `GroupedKernel` in it loses its `kernel`, and has a `kernel_cache` of one
            orientation. Those without a recipe stay.

    Returns:
        Nothing.

    Raises:
        ValueError: there is no layer with a recipe.

    Example:
        from flax import nnx

        layer = jg.nnx.GroupedDense(32, 16, 2, recipe=jg.Float8BlockScaling(), rngs=nnx.Rngs(0))
        x, group_sizes = jnp.ones((16, 32)), jnp.array([10, 4])
        expected = layer(x, group_sizes)

        jg.nnx.quantize_for_inference(layer)

        assert layer.kernel is None and jnp.array_equal(layer(x, group_sizes), expected)
    """
    modules = [
        module
        for _, module in nnx.iter_modules(layer)
        if isinstance(module, GroupedKernel) and module.recipe is not None
    ]
    if not modules:
        raise ValueError("quantize_for_inference needs a layer with a recipe.")
    for module in modules:
        module.quantize_for_inference()


def linen_variables(layer: nnx.Module) -> dict[str, Any]:
    """Returns the parameters and selection biases of a layer in the structure of linen: `load_variables` undone.

    Args:
        layer: any module. States of `DelayedScaling` and kernel caches are left out.

    Returns:
        `{"params": {...}}` and, if there are selection biases, `{"router_state": {...}}`, of arrays.

    Example:
        from flax import nnx

        router = jg.moe.Router(top_k=2)
        layer = jg.nnx.MoEMlp(32, num_experts=4, hidden_features=16, router=router, rngs=nnx.Rngs(0))

        assert jg.nnx.linen_variables(layer)["params"]["down"]["kernel"].shape == (4, 16, 32)
    """
    filters: dict[str, Any] = {"params": nnx.All(nnx.Param, nnx.Not(Fp8Variable)), "router_state": SelectionBias}
    collections = {name: nnx.to_pure_dict(nnx.state(layer, variables)) for name, variables in filters.items()}
    return {name: variables for name, variables in collections.items() if variables}
