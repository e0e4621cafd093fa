"""Routing in the `cuda` backend: two kernels as XLA custom calls, or the reference backend for what they do not take.

As in `cuda`, operands concatenate `batch` batch elements along their first axis.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jax_grouped.backends.reference import routing as reference
from jax_grouped.backends.spec import RouteSpec, batched, grouped_pairs
from jax_grouped.core.groups import routing_blocks

#: Most experts that the kernels take, most choices of a token, and most groups of experts: `kMostExperts`,
#: `kMostChoices` and `kMostExpertGroups` in csrc.
_MOST_EXPERTS, _MOST_CHOICES, _MOST_EXPERT_GROUPS = 512, 32, 32

#: Values of the enumeration in csrc.
_SCORES = ("softmax", "sigmoid")


def route(logits: jax.Array, *bias: jax.Array, spec: RouteSpec, batch: int) -> tuple[jax.Array, ...]:
    """Returns the results of the reference backend, from one kernel if there are few enough experts and choices."""
    if not _can_route(logits, spec, batch):
        return _by_elements(functools.partial(reference.route, spec=spec), batch, logits, *bias)
    return _route(logits, *bias, spec=spec, batch=batch)[:3]


def group_pairs(experts: jax.Array, *, num_experts: int, rows: int, batch: int) -> tuple[jax.Array, ...]:
    """Returns the results of the reference backend, from two kernels if there are few enough experts."""
    if not _can_group(experts, num_experts, batch):
        function = functools.partial(reference.group_pairs, num_experts=num_experts, rows=rows)
        return _by_elements(function, batch, experts)
    blocks = jax.ShapeDtypeStruct((batch * routing_blocks(experts.shape[0] // batch), num_experts), jnp.int32)
    return _group_pairs(experts, blocks, num_experts=num_experts, rows=rows, batch=batch)[:4]


def route_and_group(
    logits: jax.Array, *bias: jax.Array, spec: RouteSpec, rows: int, batch: int
) -> tuple[jax.Array, ...]:
    """Returns the results of the reference backend, from two kernels if there are few enough experts and choices."""
    if not _can_route(logits, spec, batch):
        function = functools.partial(reference.route_and_group, spec=spec, rows=rows)
        return _by_elements(function, batch, logits, *bias)
    num_experts = logits.shape[1]
    experts, weights, probabilities, *of_blocks = _route(logits, *bias, spec=spec, batch=batch)
    sums = jax.ShapeDtypeStruct((batch * num_experts,), jnp.float32)
    grouped = _group_pairs(experts, sums, *of_blocks, num_experts=num_experts, rows=rows, batch=batch)
    return experts, weights, probabilities, *grouped


def _can_route(logits: jax.Array, spec: RouteSpec, batch: int) -> bool:
    few = spec.top_k <= _MOST_CHOICES and spec.expert_groups <= _MOST_EXPERT_GROUPS
    return few and _can_group(logits, logits.shape[1], batch)


def _can_group(of_tokens: jax.Array, num_experts: int, batch: int) -> bool:
    # In an export, the number of tokens may be symbolic.
    known = isinstance(of_tokens.shape[0], int) and isinstance(batch, int)
    return known and of_tokens.size > 0 and num_experts <= _MOST_EXPERTS


def _by_elements(
    function: Callable[..., tuple[jax.Array, ...]], batch: int, *operands: jax.Array
) -> tuple[jax.Array, ...]:
    """Applies the reference backend's function to every batch element."""
    if batch == 1:
        return function(*operands)
    results = jax.vmap(function)(*(x.reshape(batch, x.shape[0] // batch, *x.shape[1:]) for x in operands))
    return tuple(x.reshape(batch * x.shape[1], *x.shape[2:]) for x in results)


def _route(logits: jax.Array, *bias: jax.Array, spec: RouteSpec, batch: int) -> tuple[jax.Array, ...]:
    """Returns the results of `RouteSpec`, and for each block of tokens counts and sums of probabilities by expert."""
    blocks = (batch * routing_blocks(logits.shape[0] // batch), logits.shape[1])
    of_blocks = [jax.ShapeDtypeStruct(blocks, dtype) for dtype in (jnp.int32, jnp.float32)]
    outputs = jax.ffi.ffi_call("jax_grouped_route", [*spec.results(logits.shape), *of_blocks])(
        logits,
        *bias,
        batch=np.int64(batch),
        score=np.int32(_SCORES.index(spec.score)),
        normalize_weights=spec.normalize_weights,
        expert_groups=np.int64(spec.expert_groups),
        top_groups=np.int64(spec.top_groups),
    )
    return tuple(outputs)


def _group_pairs(
    experts: jax.Array, last: jax.ShapeDtypeStruct, *of_blocks: jax.Array, num_experts: int, rows: int, batch: int
) -> tuple[jax.Array, ...]:
    """Returns the order, inverse, group sizes and dropped pairs of each batch element, the experts' loads, and `last`.

    The last result is that of sums over `of_blocks`. Without these, it is scratch memory.
    """
    element = (experts.shape[0] // batch, experts.shape[1])
    grouped = [batched(of, batch) for of in grouped_pairs(element, num_experts, rows)]
    load = jax.ShapeDtypeStruct((batch * num_experts,), jnp.int32)
    call = jax.ffi.ffi_call("jax_grouped_group_pairs", [*grouped, load, last])
    return tuple(call(experts, *of_blocks, batch=np.int64(batch)))
