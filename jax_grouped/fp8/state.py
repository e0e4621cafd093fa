"""The state of delayed scaling: the largest values of earlier steps. The next scales follow from it."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterable, Mapping
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from jax_grouped.core.config import config
from jax_grouped.core.values import varying_axes
from jax_grouped.fp8 import numerics
from jax_grouped.fp8.arrays import register_pytree
from jax_grouped.fp8.recipes import DelayedScaling

#: A mark is this factor times the square of its amax. If something clips both to one number, the mark fits only if that
#: number is 1 over this factor, at which nobody clips.
_MARK = 0.7

#: Relative difference between a mark and what it should be that counts as rounding.
_ROUNDING = 2.0**-16


class PerTensor(NamedTuple):
    """One value for each quantized tensor: `x`, `kernel`, and the gradient of the result."""

    input: jax.Array
    kernel: jax.Array
    output_grad: jax.Array


@register_pytree
@dataclasses.dataclass(frozen=True)
class Fp8State:
    """State of `DelayedScaling` between steps, for `E` groups and a history of `H` steps.

    The gradient of `jax_grouped.grouped_dense` with respect to its `fp8_state` is the state's next value: the gradient
    replaces the state, and an optimizer does not update it. Flax's FP8 operations do the same, and these are their
    names. If several microbatches or devices have gradients of one state, combine them by the larger of each number,
    where JAX would add gradients up:

    - Separate gradients: `jax.tree.map(jnp.maximum, one, other)`; of a batch, `jnp.max` over its axis.
    - One state used twice, or in the steps of a `jax.lax.scan`: `loss(state.astype(fp32_max_grad))` inside the function
      that is differentiated, with Flax's type whose sum is the maximum, `flax.linen.fp8_ops.fp32_max_grad`. A layer
      that is called several times needs this only inside of transformations such as `nn.remat` and `nn.scan`.
    - `jax.vmap` over tokens: map over a copy of the state per element as well.
    - `jax.shard_map` with its checks on: do nothing; a replicated state's next value is the maximum over the devices.
    - `jax.pmap`, and `jax.shard_map` without checks: take the gradient inside, then `jax.lax.pmax` of it.

    A layer whose result does not reach the loss, as in the branch of a `jax.lax.cond` that is not taken, gets a
    gradient of zeros. Zeros are no next value: `jax_grouped.overwrite_with_gradient` and `jax_grouped.apply_updates`
    keep the state where the next scale is 0. Elsewhere, a scale of 0 counts as 1.

    The marks detect arithmetic on a state. A step of an optimizer, a mean, a sum or a factor changes an amax and its
    mark differently; a maximum keeps them together. The results for a group whose mark does not fit are NaN. With
    `jax_grouped.config.check`, a ValueError says why.

    Attributes:
        input_amax_history: `float32[E, H]`, the largest finite absolute values of each group of `x`, the latest step's
            first; 0 for none.
        input_amax_mark: `float32[E]`, 0.7 times the square of the latest amax.
        input_scale: `float32[E]`, the factor of the last multiplication before rounding to FP8.
        kernel_amax_history: `float32[E, H]`, the largest values of each `kernel`.
        kernel_amax_mark: `float32[E]`, 0.7 times the square of the latest.
        kernel_scale: `float32[E]`, the factor of the kernel's last multiplication.
        output_grad_amax_history: `float32[E, H]`, the largest values of the result's gradient.
        output_grad_amax_mark: `float32[E]`, 0.7 times the square of the latest.
        output_grad_scale: `float32[E]`, the factor of the gradient's last multiplication.

    Example:
        recipe = jg.DelayedScaling(amax_history_len=4)
        x, kernel, group_sizes = jnp.ones((16, 32)), jnp.ones((2, 32, 16)), jnp.array([10, 4])

        def loss(state):
            return jg.grouped_dense(x, kernel, group_sizes, recipe=recipe, fp8_state=state).sum()

        state = jax.jit(jax.grad(loss))(jg.Fp8State.initial(recipe, num_groups=2))

        assert state.input_amax_history.tolist() == [[1, 0, 0, 0], [1, 0, 0, 0]]
    """

    input_amax_history: jax.Array
    input_amax_mark: jax.Array
    input_scale: jax.Array
    kernel_amax_history: jax.Array
    kernel_amax_mark: jax.Array
    kernel_scale: jax.Array
    output_grad_amax_history: jax.Array
    output_grad_amax_mark: jax.Array
    output_grad_scale: jax.Array

    @classmethod
    def initial(cls, recipe: DelayedScaling, num_groups: int) -> Self:
        """Returns the state before the first step: empty histories, and scales of 1."""
        if not isinstance(recipe, DelayedScaling):
            raise TypeError(f"recipe must be DelayedScaling, which alone has a state, got {recipe!r}.")
        fields = {}
        for name in PerTensor._fields:
            fields[f"{name}_amax_history"] = jnp.zeros((num_groups, recipe.amax_history_len), jnp.float32)
            fields[f"{name}_amax_mark"] = jnp.zeros((num_groups,), jnp.float32)
            fields[f"{name}_scale"] = jnp.ones((num_groups,), jnp.float32)
        return cls(**fields)

    def astype(self, dtype: DTypeLike) -> Self:
        """Returns the state in another type: Flax's `fp32_max_grad`, whose sum is the maximum, or back in float32."""
        return jax.tree.map(lambda x: jax.lax.convert_element_type(x, dtype), self)

    def scales(self, recipe: DelayedScaling) -> PerTensor:
        """Returns the factors that the next product's operands are multiplied by before rounding, `float32[E]` each.

        A factor is `fp8_max / (amax * 2**margin)`, with `amax` from the history (Micikevicius et al.,
        arXiv:2209.05433). Where that is zero or not finite, as with an empty history, the factor is the scale of the
        state, or 1 if that is no scale either. It is NaN where the state's marks do not fit.
        """
        histories = self._histories(PerTensor._fields)
        largest = jnp.max(histories, axis=2) if recipe.amax_compute_algo == "max" else histories[:, :, 0]
        largest = numerics.flush(largest * np.float32(2.0**recipe.margin))
        dtypes = recipe.fwd_dtype, recipe.fwd_dtype, recipe.grad_dtype
        scales = []
        for name, amax, dtype, fits in zip(PerTensor._fields, largest, dtypes, self.intact(), strict=True):
            last = _float32(getattr(self, f"{name}_scale"))
            last = jnp.where((last > 0) & jnp.isfinite(last), numerics.clamp_scale(last), 1)
            known = (amax > 0) & jnp.isfinite(amax)
            scale = numerics.scale_from_amax(jnp.where(known, amax, 1), dtype, 0.0, pow2=False)
            scales.append(jnp.where(fits, jnp.where(known, scale, last), jnp.nan))
        return PerTensor(*scales)

    def intact(self) -> PerTensor:
        """Tells for each tensor and group whether the mark fits, `bool[E]` each."""
        fit = []
        for name in PerTensor._fields:
            expected = _mark(_float32(getattr(self, f"{name}_amax_history"))[..., 0])
            fit.append(jnp.abs(_float32(getattr(self, f"{name}_amax_mark")) - expected) <= _ROUNDING * expected)
        return PerTensor(*fit)

    def _histories(self, names: Iterable[str]) -> jax.Array:
        """Stacks the histories of some tensors: a GPU then launches as many kernels for all of them as for one."""
        return jnp.stack([_float32(getattr(self, f"{name}_amax_history")) for name in names])

    def after(self, recipe: DelayedScaling, amax: dict[str, jax.Array]) -> Self:
        """Returns the next state: the used scales, and the histories with `amax` added, `float32[E]` for each name."""
        reduced = []
        for name, x in amax.items():
            # The maximum over the mesh axes over which only `x` varies, in a type that is sharded as the history's.
            history = getattr(self, f"{name}_amax_history")
            axes = tuple(sorted(varying_axes(x) - varying_axes(history), key=str))
            largest = jax.lax.pmax(x, axes) if axes else x
            mesh, spec = jax.typeof(history).sharding.mesh, jax.typeof(history).sharding.spec
            if AxisType.Explicit in mesh.axis_types and jax.typeof(largest).sharding.spec != spec[:1]:
                largest = jax.sharding.reshard(largest, NamedSharding(mesh, PartitionSpec(*spec[:1])))
            reduced.append(largest)
        newest = jnp.stack(reduced)
        histories = jnp.concatenate([newest[:, :, None], self._histories(amax)[:, :, :-1]], axis=2)
        fields = {f"{name}_amax_history": history for name, history in zip(amax, histories, strict=True)}
        fields |= {f"{name}_scale": scale for name, scale in self.scales(recipe)._asdict().items()}
        fields |= {f"{name}_amax_mark": mark for name, mark in zip(amax, _mark(newest), strict=True)}
        following = dataclasses.replace(self, **fields)
        return jax.tree.map(lambda x, like: jax.lax.convert_element_type(x, like.dtype), following, self)


def _float32(x: jax.Array) -> jax.Array:
    return jax.lax.convert_element_type(x, jnp.float32)


def _mark(amax: jax.Array) -> jax.Array:
    """Returns the mark of an amax, which grows with it; 0 if the value is not an amax."""
    # The squares are far enough from the ends of float32 that the result is exact to rounding.
    return jnp.where(amax > 0, _MARK * jnp.square(jnp.clip(amax, 2.0**-60, 2.0**60)), 0)


def part_of_state(state: Fp8State, axis_name: Hashable, groups: int) -> Fp8State:
    """Returns this device's part of a state, in float32: its `groups` groups, where devices have them in order."""
    start = groups * jax.lax.axis_index(axis_name)
    return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, start, groups), state.astype(jnp.float32))


def check_state(state: Fp8State | None, recipe: object, num_groups: int) -> None:
    """Raises unless `state` is there if the recipe is delayed scaling, fits it, and is absent otherwise."""
    if not isinstance(recipe, DelayedScaling):
        if state is not None:
            raise ValueError(f"fp8_state is for DelayedScaling, got recipe {recipe!r}.")
        return
    if state is None:
        raise ValueError(
            f"DelayedScaling needs fp8_state: start with jax_grouped.Fp8State.initial(recipe, num_groups={num_groups})."
        )
    if not isinstance(state, Fp8State):
        raise TypeError(f"fp8_state must be a jax_grouped.Fp8State, got {type(state).__name__}.")
    for field in dataclasses.fields(Fp8State):
        array = getattr(state, field.name)
        expected = (num_groups, recipe.amax_history_len) if field.name.endswith("_history") else (num_groups,)
        if array.shape != expected:
            raise ValueError(
                f"fp8_state.{field.name} must have shape {expected} for {num_groups} groups and amax_history_len "
                f"{recipe.amax_history_len}, got {array.shape}."
            )
        # Flax's type whose sum is the maximum.
        if getattr(array.dtype, "float_dtype", array.dtype) != jnp.float32:
            raise TypeError(f"fp8_state.{field.name} must be float32, got {array.dtype.name}.")
    if config.check:
        check_marks(vars(state))


def check_marks(arrays: Mapping[str, jax.Array], where: str = "") -> None:
    """Raises ValueError on the host if the marks of a state, or of a stack of states, do not fit its histories.

    It does so even in a traced program. `arrays` are the fields of the state; there may be none.
    """

    def check(*on_device: jax.Array) -> None:
        expected, marks = map(np.asarray, on_device)
        changed = ~(np.abs(marks - expected) <= _ROUNDING * expected)
        if not np.any(changed):
            return
        groups = np.unique(np.nonzero(changed)[-1]).tolist()
        # A mark is a square. A sum of squares is smaller than the square of the sum; a mean of squares is larger.
        if np.all((marks > 0) & (marks < expected), where=changed):
            how = "has added several next values up"
            remedy = (
                "a layer with DelayedScaling was called twice between two updates, in jax.checkpoint, jax.lax.scan or "
                "the like (convert its state to Flax's fp32_max_grad before, see jax_grouped.Fp8State), or gradients "
                "were added up (use jax_grouped.accumulate_gradients and reduce_gradients)."
            )
        else:
            how = "has added to it, multiplied it or taken a mean of it"
            remedy = (
                "wrap the whole optimizer, clipping, accumulation and apply_if_finite included, as "
                "jax_grouped.overwrite_with_gradient(optimizer, every=microbatches)."
            )
        raise ValueError(
            "fp8_state must be replaced by its gradient, which is its next value, but something "
            f"{how} (groups {groups}{where}): {remedy}"
        )

    names = [name.removesuffix("_mark") for name in arrays if name.endswith("_amax_mark")]
    if not names:
        return
    expected = jnp.stack([_mark(_float32(arrays[f"{name}_history"])[..., 0]) for name in names])
    marks = jnp.stack([_float32(arrays[f"{name}_mark"]) for name in names])
    if isinstance(expected, jax.core.Tracer) or isinstance(marks, jax.core.Tracer):
        jax.debug.callback(check, expected, marks)
    else:
        check(expected, marks)
