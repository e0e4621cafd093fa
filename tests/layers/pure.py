"""`GroupedDense` of linen and of NNX as pure functions of their variables, so that one test serves both."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT

import jax_grouped as jg
from jax_grouped.fp8.recipes import Recipe

E, K, N, T = 3, 32, 16, 40
SIZES = np.array([14, 0, 20], np.int32)
CACHE = jg.linen.KERNEL_CACHE
APIS = ("linen", "nnx")

Parts = tuple[jax.Array, jax.Array, jg.Fp8State | None]


@dataclasses.dataclass(frozen=True)
class Layer:
    """Layer of `E` groups, `[T, K] -> [T, N]`. `cache` is empty without `cache_kernel`.

    `apply` maps `(trained, cache, x, is_first_microbatch)` to the result and the next cache; `parts` gives the kernel,
    the bias, and the state or None of a tree like `trained`.
    """

    trained: Any
    cache: Any
    apply: Callable[..., tuple[jax.Array, Any]]
    parts: Callable[[Any], Parts]

    def loss(self, trained: Any, cache: Any, x: jax.Array, first: Any = None) -> tuple[jax.Array, Any]:
        """Returns a loss with another gradient in every place, and the cache afterwards."""
        y, cache = self.apply(trained, cache, x, first)
        return jnp.mean((y - 1) ** 2), cache


@functools.cache
def layer(api: str, recipe: Recipe | None, *, cache_kernel: bool = False, dtype: Any = None) -> Layer:
    """Returns a layer with the same parameters for both APIs. Do not donate its arrays: it is made once."""
    options = dict(recipe=recipe, cache_kernel=cache_kernel, dtype=dtype)
    return _linen(**options) if api == "linen" else _nnx(**options)


def _linen(**options: Any) -> Layer:
    module = jg.linen.GroupedDense(N, E, **options)
    variables = filled(jax.eval_shape(module.init, jax.random.key(0), tokens(), SIZES))
    cache = {CACHE: variables.pop(CACHE)} if CACHE in variables else {}

    def apply(trained: Any, cache: Any, x: jax.Array, first: Any = None) -> tuple[jax.Array, Any]:
        return module.apply(trained | cache, x, SIZES, is_first_microbatch=first, mutable=list(cache))

    def parts(trained: Any) -> Parts:
        state = jg.Fp8State(**trained[OVERWRITE_WITH_GRADIENT]) if OVERWRITE_WITH_GRADIENT in trained else None
        return trained["params"]["kernel"], trained["params"]["bias"], state

    return Layer(variables, cache, apply, parts)


def _nnx(**options: Any) -> Layer:
    model = nnx.eval_shape(lambda: jg.nnx.GroupedDense(K, N, E, **options, rngs=nnx.Rngs(0)))
    graph, trained, cache = nnx.split(model, jg.nnx.TRAINED, jg.nnx.KernelCacheVariable)

    def apply(trained: Any, cache: Any, x: jax.Array, first: Any = None) -> tuple[jax.Array, Any]:
        model = nnx.merge(graph, trained, cache, copy=True)
        return model(x, SIZES, is_first_microbatch=first), nnx.state(model, jg.nnx.KernelCacheVariable)

    def parts(trained: Any) -> Parts:
        values = nnx.as_pure(trained)
        return values["kernel"], values["bias"], values.get("fp8_state")

    return Layer(filled(trained), filled(cache), apply, parts)


def filled(shapes: Any) -> Any:
    """Makes variables like those of `init` from their shapes, with zeros for caches: compiling `init` takes seconds."""
    rng = np.random.default_rng(0)

    def fill(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> jax.Array:
        name = jax.tree_util.keystr(path)
        if "kernel'" in name and CACHE not in name and leaf.dtype == jnp.float32 and leaf.ndim > 1:
            return jnp.asarray(rng.standard_normal(leaf.shape, np.float32) / leaf.shape[-2] ** 0.5)
        return jnp.asarray(np.full(leaf.shape, "_scale" in name and "scale_inv" not in name, leaf.dtype))

    return jax.tree.map_with_path(fill, shapes)


def cached(tree: Any) -> jg.KernelCache:
    """Returns the one `KernelCache` in a tree."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, jg.KernelCache))
    (found,) = (leaf for leaf in leaves if isinstance(leaf, jg.KernelCache))
    return found


def tokens(seed: int = 1, shape: tuple[int, ...] = ()) -> np.ndarray:
    """Returns tokens `[*shape, T, K]`, with NaN in the rows of no group."""
    x = np.random.default_rng(seed).standard_normal((*shape, T, K), np.float32)
    x[..., SIZES.sum() :, :] = np.nan
    return x
