"""Trees of gradients in which some are next values: their accumulation, reduction and optimizer updates.

The gradient of delayed scaling's state is the state's next value. In a tree of gradients, next values are found

- in a `jax_grouped.Fp8State`;
- below a key `_overwrite_with_gradient` of a mapping, as in the variables of Flax linen;
- in an object whose class has a true attribute `overwrite_with_gradient`, as `jax_grouped.nnx.Fp8Variable` has.

Every other gradient belongs to a parameter. Several gradients of a parameter are combined by their sum or mean, several
next values by the largest of each number. Next values measure the gradients that pass through a layer, so they depend
on the factor of the loss. To get the next values of the whole batch with any number of microbatches or devices,
multiply each loss by its fraction of the batch before differentiation, and add gradients up.

A gradient whose scale is 0 is no next value. A layer that did not run has such a gradient, and so does a step that is
skipped by gradients of zeros. The state then stays unchanged.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_grouped.core.config import config
from jax_grouped.core.values import (
    axis_size,
    is_tracked,
    promoted_type,
    static_bool,
    static_size,
    sum_dtype,
    varying_axes,
)
from jax_grouped.fp8.state import Fp8State, check_marks

if TYPE_CHECKING:
    import optax

#: Value of `flax.linen.fp8_ops.OVERWRITE_WITH_GRADIENT`, without an import of Flax.
OVERWRITE_WITH_GRADIENT = "_overwrite_with_gradient"

#: A pytree of arrays.
Tree = Any


def accumulate_gradients(total: Tree, gradients: Tree) -> Tree:
    """Adds the gradients of one more microbatch to those of earlier ones, for loops over microbatches.

    A total in bfloat16 is rounded with every microbatch: with bfloat16 parameters, start with zeros in float32.

    Args:
        total: the result for the earlier ones; before the first, zeros: `jax.tree.map(jnp.zeros_like, gradients)`.
        gradients: a tree of the same structure.

    Returns:
        The sums, and the larger of each number for next values.

    Example:
        state = jg.Fp8State.initial(jg.DelayedScaling(), num_groups=2)
        gradients = {"kernel": jnp.ones(3), "state": state}

        total = jax.tree.map(jnp.zeros_like, gradients)
        for _ in range(2):
            total = jg.accumulate_gradients(total, gradients)

        assert total["kernel"].tolist() == [2, 2, 2]
        assert total["state"].input_scale.tolist() == [1, 1]
    """
    return _map(jnp.maximum, _sum, total, gradients)


def reduce_gradients(gradients: Tree, axis_name: Hashable | tuple[Hashable, ...], *, mean: bool = True) -> Tree:
    """Combines the gradients of all devices, for `jax.pmap` and for `jax.shard_map` without its checks.

    With its checks on, `jax.shard_map` has already combined the gradients of replicated arrays: those of parameters by
    sums, those of states by maximum. This function then accepts only gradients that vary over the devices.

    Args:
        gradients: each device's own.
        axis_name: the axis of devices, or a tuple of them.
        mean: whether to take the mean; otherwise, the sum.

    Returns:
        The means or sums over the devices, and the largest of each number for next values. Sums are computed in
        float32, and rounded to the type of the gradient once.

    Raises:
        TypeError: `mean` is no boolean.
        ValueError: there is no such axis here, or JAX tracks varying axes and gradients do not vary over it.

    Example:
        def local_gradient(kernel, x):
            gradient = jax.grad(lambda kernel: jnp.sum(x @ kernel))(kernel)
            return jg.reduce_gradients(gradient, "data")

        devices = jax.devices()[:2]
        step = jax.pmap(local_gradient, axis_name="data", in_axes=(None, 0), out_axes=None, devices=devices)
        gradient = step(jnp.ones((4, 1)), jnp.ones((len(devices), 8, 4)))

        assert gradient.tolist() == 4 * [[8.0]]
    """
    axes = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    for axis in axes:
        axis_size(axis)  # Raises where there is no such axis.
    checked = {axis for axis in axes if is_tracked(axis)}
    for path, leaf in jax.tree.leaves_with_path(gradients):
        if missing := checked - varying_axes(leaf):
            name = f"The gradient {jax.tree_util.keystr(path)}".rstrip()  # A bare one has no path.
            raise ValueError(
                f"{name} does not vary over {sorted(missing, key=str)}: "
                "jax.shard_map with its checks on has summed it already, so leave reduce_gradients out, and divide by "
                "the number of devices for a mean."
            )
    combine = jax.lax.pmean if static_bool("mean", mean) else jax.lax.psum

    def reduce(x: Any) -> jax.Array:
        dtype = jnp.result_type(x)
        return combine(jnp.asarray(x, sum_dtype(dtype)), axes).astype(dtype)

    return _map(lambda x: jax.lax.pmax(x, axes), reduce, gradients)


class _Outermost(type):
    """Class whose repr, which the errors of JAX about other trees of updates show, says what to do."""

    def __repr__(cls) -> str:
        return (
            f"<class '{cls.__module__}.{cls.__qualname__}', next value of a state of DelayedScaling: put "
            "optax.apply_if_finite and the like inside of jax_grouped.overwrite_with_gradient, not around it>"
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NextValue(metaclass=_Outermost):
    """Update that replaces: anything plus this is `value`, also in `optax.apply_updates`."""

    value: jax.Array

    #: NumPy arrays leave the addition to this class.
    __array_ufunc__ = None

    def __radd__(self, other: Any) -> jax.Array:
        return self.value


class OverwriteState(NamedTuple):
    """The state of `overwrite_with_gradient`.

    Attributes:
        inner: state of the optimizer.
        next_values: largest next values since the optimizer's last step, in the tree's order; none if it steps with
            every call.
    """

    inner: Any
    next_values: tuple[jax.Array, ...]


def overwrite_with_gradient(
    optimizer: optax.GradientTransformation, *, every: int = 1
) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer of parameters for trees that also hold the states of delayed scaling.

    The optimizer has no momentum of states, does not clip by them and does not change them. Instead, their gradients
    replace them. The updates of states are not differences but replacements, to the bit: give them to
    `jax_grouped.apply_updates`, `optax.apply_updates` or `flax.nnx.Optimizer`, and do not change them on the way.

    Args:
        optimizer: for the parameters.
        every: number of calls, of one microbatch each, per step. The optimizer gets the mean of their gradients, as
            from `optax.MultiSteps(optimizer, every)`, and a state becomes the largest of its next values. Between the
            steps, parameters and states stay unchanged.

    Returns:
        A transformation whose `update` needs `params`, as the optimizer itself may.

    Raises:
        ModuleNotFoundError: Optax is not installed.
        TypeError: `every` is no integer.
        ValueError: `every` is less than 1. Or the gradients of states were changed before they came here, as by
            clipping in an `optax.chain` around the wrapper. The first `update` outside of `jax.jit` looks for that,
            and every one with `jax_grouped.config.check`. Elsewhere the next results are NaN.

    Example:
        import dataclasses

        import optax

        optimizer = jg.overwrite_with_gradient(optax.sgd(0.5))
        state = jg.Fp8State.initial(jg.DelayedScaling(), num_groups=2)
        params = {"kernel": jnp.ones(3), "state": state}
        gradients = {"kernel": 2 * jnp.ones(3), "state": dataclasses.replace(state, input_scale=2 * jnp.ones(2))}
        updates, _ = optimizer.update(gradients, optimizer.init(params), params)
        params = jg.apply_updates(params, updates)

        assert params["kernel"].tolist() == [0, 0, 0]
        assert params["state"].input_scale.tolist() == [2, 2]
    """
    try:
        import optax
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            'jax_grouped.overwrite_with_gradient needs Optax: python3 -m pip install "optax>=0.2.5"'
        ) from error

    every = static_size("every", every, least=1)
    inner = optax.with_extra_args_support(optimizer) if every == 1 else optax.MultiSteps(optimizer, every)
    is_checked = False

    def parameters(tree: Tree) -> Tree:
        return _map(lambda _: optax.MaskedNode(), lambda x: x, tree)

    def init(params: Tree) -> OverwriteState:
        known = jax.tree.leaves(_states(params)) if every > 1 else []
        return OverwriteState(inner.init(parameters(params)), tuple(map(jnp.zeros_like, known)))

    def update(updates: Tree, state: OverwriteState, params: Tree = None, **extra: Any) -> tuple[Tree, OverwriteState]:
        if params is None:
            raise ValueError("overwrite_with_gradient needs params: update(updates, state, params).")
        nonlocal is_checked
        if config.check or not is_checked:
            is_checked = _check_next_values(updates)
        # Optax itself mixes types, of counts and gradients, which a strict setting would refuse.
        with jax.numpy_dtype_promotion("standard"):
            steps, inner_state = inner.update(parameters(updates), state.inner, parameters(params), **extra)
        known, following = _states(params), _states(updates)
        collected: tuple[jax.Array, ...] = ()
        if every > 1:
            arrays, structure = jax.tree.flatten(following)
            largest = [jnp.maximum(*pair) for pair in zip(arrays, state.next_values, strict=True)]
            is_step = inner_state.mini_step == 0
            collected = tuple(jnp.where(is_step, 0, new) for new in largest)
            following = _kept_where_none(known, jax.tree.unflatten(structure, largest))
            following = jax.tree.map(lambda new, old: jnp.where(is_step, new, old), following, known)
        else:
            following = _kept_where_none(known, following)
        merged = _map(lambda _, __, new: NextValue(new), lambda _, step, __: step, updates, steps, following)
        return merged, OverwriteState(inner_state, collected)

    return optax.GradientTransformationExtraArgs(init, update)


def apply_updates(params: Tree, updates: Tree) -> Tree:
    """Adds an optimizer's updates to parameters, and replaces states by their next values.

    Args:
        params: parameters and states.
        updates: a tree of the same structure: differences to add to parameters, and next values of states, from
            `overwrite_with_gradient` or straight from gradients.

    Returns:
        A tree of the same structure and types.

    Example:
        state = jg.Fp8State.initial(jg.DelayedScaling(), num_groups=2)
        params = {"kernel": jnp.ones(3), "state": state}
        updates = {"kernel": -0.5 * jnp.ones(3), "state": jax.tree.map(lambda leaf: leaf + 1, state)}

        params = jg.apply_updates(params, updates)

        assert params["kernel"].tolist() == [0.5, 0.5, 0.5]
        assert params["state"].input_scale.tolist() == [2, 2]
    """
    updates = jax.tree.map(lambda x: x.value if _is_replacement(x) else x, updates, is_leaf=_is_replacement)
    following = _kept_where_none(_states(params), _states(updates))

    def replace(old: jax.Array, _: Any, new: jax.Array) -> jax.Array:
        return jnp.asarray(new, jnp.result_type(old))

    def add(old: jax.Array, update: Any, _: Any) -> jax.Array:
        return _sum(old, update).astype(jnp.result_type(old))

    return _map(replace, add, params, updates, following)


def _sum(a: jax.Array, b: jax.Array) -> jax.Array:
    dtype = promoted_type(a, b)
    return jnp.asarray(a, dtype) + jnp.asarray(b, dtype)


def _is_replacement(node: Any) -> bool:
    return isinstance(node, NextValue)


def _states(tree: Tree) -> Tree:
    """Returns the tree with None for parameters."""
    return _map(lambda x: x, lambda _: None, tree)


def _kept_where_none(known: Tree, following: Tree) -> Tree:
    """Returns the next values of states, but the known values for groups whose next scale is 0."""
    reached: dict[tuple[Any, ...], jax.Array] = {}
    for path, leaf in jax.tree.leaves_with_path(following):
        if jax.tree_util.keystr(path[-1:], simple=True).endswith("_scale"):
            reached.setdefault(path[:-1], leaf != 0)

    def keep(path: tuple[Any, ...], old: jax.Array, new: jax.Array) -> jax.Array:
        if path[:-1] not in reached:
            return new
        groups = reached[path[:-1]]
        # The axes of scales come first in all arrays of a state.
        return jnp.where(groups.reshape(groups.shape + (1,) * (jnp.ndim(new) - groups.ndim)), new, old)

    return jax.tree.map_with_path(keep, known, following)


def _check_next_values(gradients: Tree) -> bool:
    """Raises ValueError if something has changed the next values of states; tells whether it could look at them."""
    states: dict[tuple[Any, ...], dict[str, jax.Array]] = {}
    for path, leaf in jax.tree.leaves_with_path(_states(gradients)):
        states.setdefault(path[:-1], {})[jax.tree_util.keystr(path[-1:], simple=True)] = leaf
    # A host sees the groups of its own devices only.
    known = all(
        not isinstance(leaf, jax.core.Tracer) and getattr(leaf, "is_fully_addressable", True)
        for arrays in states.values()
        for leaf in arrays.values()
    )
    if known or config.check:
        for path, arrays in states.items():
            check_marks(arrays, f" of {jax.tree_util.keystr(path)}" if path else "")
    return known


def _map(change_next_value: Callable[..., Any], change_other: Callable[..., Any], tree: Tree, *rest: Tree) -> Tree:
    """Calls `jax.tree.map` with one function for next values in `tree`, and another one for everything else."""

    def change(path: tuple[Any, ...], node: Tree, *others: Tree) -> Tree:
        below = any(getattr(key, "key", None) == OVERWRITE_WITH_GRADIENT for key in path)
        return jax.tree.map(change_next_value if below or _is_overwritten(node) else change_other, node, *others)

    return jax.tree.map_with_path(change, tree, *rest, is_leaf=_is_overwritten)


def _is_overwritten(node: Any) -> bool:
    return isinstance(node, Fp8State) or getattr(type(node), "overwrite_with_gradient", False) is True
