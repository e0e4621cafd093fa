"""One interface to the language model in both of Flax's APIs: pure functions of its variables."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

import jax_grouped as jg
import jax_grouped.examples.moe_lm as moe_lm
import jax_grouped.examples.moe_lm_nnx as moe_lm_nnx
from jax_grouped.examples.settings import RECIPES, Settings
from jax_grouped.ops.gradients import OVERWRITE_WITH_GRADIENT

#: Nested mappings of arrays: `params`, and below `_overwrite_with_gradient` the states of delayed scaling.
Variables = Mapping[str, Any]

#: The quantized kernels that microbatches share, a pytree; None where there are none.
Cache = Any


class LanguageModel(NamedTuple):
    """A language model over bytes.

    Attributes:
        init: makes the variables, from a key; the whole ones, on however many devices it is used.
        apply: `(variables, tokens int[B, S], cache, is_first_microbatch)` to the logits of the bytes after them,
            `f32[B, S, 256]`, the metrics of the blocks, and the cache for the microbatches that follow. As
            in `jax_grouped.linen.MoEMlp`, `is_first_microbatch` may be a boolean on the device, or None to leave the
            cache alone. Without a cache it must be True or None.
        shares_kernels: true if there is a cache; `is_first_microbatch` must be None if not.
    """

    init: Callable[[jax.Array], Variables]
    apply: Callable[..., tuple[jax.Array, moe_lm.BlockMetrics, Cache]]
    shares_kernels: bool


def language_model(s: Settings, parallel: jg.moe.Parallel = jg.moe.Parallel()) -> LanguageModel:
    """Returns the model of a run."""
    recipe = RECIPES[s.recipe]
    shares_kernels = recipe is not None and s.microbatches > 1
    experts = dict(
        num_experts=s.experts,
        hidden_features=s.d_ff,
        router=jg.moe.Router(s.top_k, capacity_factor=s.capacity_factor),
        parallel=parallel,
        recipe=recipe,
        cache_kernel=shares_kernels,
    )
    sizes = dict(d_model=s.d_model, num_layers=s.layers, num_heads=s.heads, dtype=jnp.bfloat16, experts=experts)
    return LanguageModel(*(_linen if s.layer == "linen" else _nnx)(sizes), shares_kernels)


def _linen(sizes: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    model = moe_lm.MoELanguageModel(**sizes)
    collection = jg.linen.KERNEL_CACHE

    def init(key: jax.Array) -> Variables:
        variables = model.init(key, jnp.zeros((1, 1), jnp.int32))
        return {name: tree for name, tree in variables.items() if name != collection}

    def apply(variables: Variables, tokens: jax.Array, cache: Cache = None, is_first_microbatch: Any = None) -> Any:
        stored = {} if cache is None else {collection: cache}
        (logits, metrics), changed = model.apply(
            {**variables, **stored}, tokens, is_first_microbatch=is_first_microbatch, mutable=[collection]
        )
        return logits, metrics, changed.get(collection)

    return init, apply


def _nnx(sizes: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    # States of delayed scaling are parameters, too, so they are taken first.
    kinds = (jg.nnx.Fp8Variable, nnx.Param, jg.nnx.KernelCacheVariable)

    create = functools.partial(moe_lm_nnx.MoELanguageModel, **sizes)
    # The variables are put back into these.
    graph, *states = nnx.split(nnx.eval_shape(lambda: create(rngs=nnx.Rngs(0))), *kinds)

    def init(key: jax.Array) -> Variables:
        fp8, params, _ = (nnx.to_pure_dict(state) for state in nnx.split(create(rngs=nnx.Rngs(key)), *kinds)[1:])
        return {"params": params, **({OVERWRITE_WITH_GRADIENT: fp8} if fp8 else {})}

    def apply(variables: Variables, tokens: jax.Array, cache: Cache = None, is_first_microbatch: Any = None) -> Any:
        fp8, params, caches = jax.tree.map(lambda leaf: leaf, states)
        nnx.replace_by_pure_dict(params, variables["params"])
        nnx.replace_by_pure_dict(fp8, variables.get(OVERWRITE_WITH_GRADIENT, {}))
        if cache is None:
            # Never read: the variables must be there to be written.
            caches = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), caches)
        else:
            nnx.replace_by_pure_dict(caches, cache)
        model = nnx.merge(graph, fp8, params, caches)
        logits, metrics = model(tokens, is_first_microbatch=is_first_microbatch)
        return logits, metrics, nnx.to_pure_dict(nnx.state(model, jg.nnx.KernelCacheVariable)) or None

    return init, apply
