"""`moe_mlp` under plain `jax.jit` with sharded arrays: a `jax.shard_map` over the mesh that the arrays lie on.

XLA cannot split the routing, because every row depends on the group sizes of all tokens. So the axes that the caller
names say what each device computes. The result is that of a single device with the whole batch.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_grouped.core.varying import is_bound, varying_axes
from jax_grouped.fp8.arrays import KernelCache, ScaledArray
from jax_grouped.kernels.partition import known_mesh
from jax_grouped.ops.inputs import Weights, arrays_like_kernel


class MoEArrays(NamedTuple):
    """The arrays of one `moe_mlp`; the last three may be None."""

    x: jax.Array
    logits: jax.Array
    gate_up: Weights
    down: Weights
    selection_bias: jax.Array | None
    shared: jax.Array | None
    weight_scale: jax.Array | None  # None if the program knows it as a number.


class MoEAxes(NamedTuple):
    """The mesh axes of one `moe_mlp`, as it documents them."""

    expert: str | None
    feature: str | None
    fsdp: str | None
    batch: tuple[str, ...]

    @classmethod
    def make(
        cls,
        *,
        expert: str | None = None,
        feature: str | None = None,
        fsdp: str | None = None,
        batch: Sequence[str] = (),
    ) -> Self:
        """Returns the axes of a layer, whose `batch_axes` may be one name."""
        for what, name in (("expert", expert), ("feature", feature), ("fsdp", fsdp)):
            if name is not None and not isinstance(name, str):
                raise TypeError(f"{what}_axis must be the name of one mesh axis, got {name!r}.")
        if not isinstance(batch, Sequence) or not all(isinstance(name, str) for name in batch):
            raise TypeError(f"batch_axes must be a sequence of names of mesh axes, got {batch!r}.")
        axes = cls(expert, feature, fsdp, (batch,) if isinstance(batch, str) else tuple(batch))
        if feature is not None and feature in axes.tokens:
            raise ValueError(
                f"feature_axis {feature!r} must be none of expert_axis, fsdp_axis and batch_axes, because its devices "
                f"have the same tokens, got {expert!r}, {fsdp!r} and {axes.batch}."
            )
        if fsdp is not None and fsdp == expert:
            raise ValueError(
                f"fsdp_axis must be another axis than expert_axis, got {fsdp!r} for both: expert_axis alone splits the "
                "experts and their storage."
            )
        if len({*axes.batch}) < len(axes.batch):
            raise ValueError(f"batch_axes must be different axes, got {axes.batch}.")
        return axes

    @property
    def tokens(self) -> tuple[str, ...]:
        """The axes that split the tokens."""
        more = (axis for axis in (self.fsdp, self.expert) if axis is not None and axis not in self.batch)
        return (*self.batch, *more)

    @property
    def stored(self) -> tuple[str, ...]:
        """The axes that split the storage of the experts."""
        return tuple(axis for axis in (self.expert, self.fsdp) if axis is not None)

    @property
    def all(self) -> tuple[str, ...]:
        """The axes that split anything."""
        return self.tokens if self.feature is None else (*self.tokens, self.feature)


def mesh_to_split(axes: MoEAxes, *arrays: jax.Array) -> Mesh | AbstractMesh | None:
    """Returns the mesh that the arrays lie on, if the call is to be split over axes of it.

    It is not to be split if there are no axes, or if a surrounding `jax.shard_map` or `jax.pmap` splits it.
    """
    unbound = [axis for axis in axes.all if not is_bound(axis)]
    if not unbound:  # Or there are no axes.
        return None
    if len(unbound) < len(axes.all):
        raise ValueError(
            f"A surrounding jax.shard_map or jax.pmap splits some of the mesh axes {list(axes.all)}, but not "
            f"{unbound}: let it split all of them, or none."
        )
    mesh = known_mesh(*arrays)
    if missing := [axis for axis in unbound if mesh is None or axis not in mesh.axis_names]:
        raise ValueError(
            f"There is no mesh axis {missing[0]!r} here: put all arrays on one mesh with this axis (jax.device_put "
            "with a NamedSharding), set it with jax.set_mesh, or call inside jax.shard_map or jax.pmap over it."
        )
    assert mesh is not None
    if len({*_free_axes(mesh).values()}) > 1:
        raise ValueError(f"The axes of the mesh must be all Auto or all Explicit, got {mesh}.")
    return mesh


def _free_axes(mesh: Mesh | AbstractMesh) -> dict[str, AxisType]:
    """Returns the axes that no surrounding `jax.shard_map` splits, with their types."""
    types = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return {name: axis_type for name, axis_type in types if axis_type != AxisType.Manual}


def call_on_mesh(
    function: Callable[[MoEArrays], tuple[jax.Array, Any]],
    mesh: Mesh | AbstractMesh,
    axes: MoEAxes,
    arrays: MoEArrays,
    *,
    gated: bool,
) -> tuple[jax.Array, Any]:
    """Calls the function on every device with its part of the arrays."""
    _check_sizes(mesh, axes, arrays)
    if gated:
        arrays = arrays._replace(gate_up=_with_halves(arrays.gate_up))
    free = _free_axes(mesh)
    is_typed = {*free.values()} == {AxisType.Explicit}
    tokens, rows = arrays.x.shape[0], jax.typeof(arrays.x).sharding.spec[0]
    missing = -tokens % math.prod(mesh.shape[axis] for axis in axes.tokens)

    def padded(x: jax.Array | None) -> Any:
        if x is None or missing == 0:
            return x
        return jnp.pad(_placed(x, mesh, P()) if is_typed else x, [(0, missing), (0, 0)])

    arrays = arrays._replace(x=padded(arrays.x), logits=padded(arrays.logits), shared=padded(arrays.shared))
    specs = _specs(axes, arrays, gated=gated)
    if is_typed:
        arrays = jax.tree.map(lambda x, spec: _placed(x, mesh, spec), arrays, specs)

    def local(arrays: MoEArrays) -> tuple[jax.Array, Any]:
        return function(arrays._replace(gate_up=_part(arrays.gate_up), down=_part(arrays.down)))

    over = functools.partial(jax.shard_map, mesh=mesh, axis_names={*free})
    out_specs = P(axes.tokens or None), P()
    if len(free) < len(mesh.axis_names):
        run = _inside_another(over, local, specs, out_specs)
    else:
        run = over(local, in_specs=(specs,), out_specs=out_specs)
    # Outside jit, shard_map does not differentiate some rules. Such a call is compiled each time.
    y, same = jax.jit(run)(arrays)
    if missing:
        y = (_placed(y, mesh, P()) if is_typed else y)[:tokens]
    return _placed(y, mesh, P(rows)) if is_typed else y, same


def _inside_another(over: functools.partial[Any], local: Callable[..., Any], specs: Any, out_specs: Any) -> Any:
    """Returns `over(local)`, a `jax.shard_map` inside another one, with a rule of its own for gradients.

    JAX splits the residuals of its own rule over the outer axes too, and then refuses to lower them (JAX 0.10 to 0.12).
    """
    axes = over.keywords["axis_names"]
    kept_specs: list[P] = []

    @jax.custom_vjp
    def run(arrays: Any) -> Any:
        return over(local, in_specs=(specs,), out_specs=out_specs)(arrays)

    def forward(arrays: Any) -> tuple[Any, Any]:
        pull_back: Any = None

        def with_residuals(arrays: Any) -> tuple[Any, list[jax.Array]]:
            nonlocal pull_back
            out, local_pull_back = jax.vjp(local, arrays)
            leaves, pull_back = jax.tree.flatten(local_pull_back)
            kept_specs[:] = [P(tuple(sorted(varying_axes(leaf) & axes)) or None) for leaf in leaves]
            return out, [leaf[None] for leaf in leaves]

        # Trace once for the specs, which the second time needs.
        jax.eval_shape(over(with_residuals, in_specs=(specs,), out_specs=(out_specs, P(tuple(axes)))), arrays)
        out, leaves = over(with_residuals, in_specs=(specs,), out_specs=(out_specs, kept_specs))(arrays)
        return out, jax.tree.unflatten(pull_back, leaves)

    def backward(pull_back: Any, gradient: Any) -> tuple[Any]:
        leaves, structure = jax.tree.flatten(pull_back)

        def pull_back_locally(leaves: list[jax.Array], gradient: Any) -> Any:
            return jax.tree.unflatten(structure, [leaf[0] for leaf in leaves])(gradient)[0]

        return (over(pull_back_locally, in_specs=(kept_specs, out_specs), out_specs=specs)(leaves, gradient),)

    run.defvjp(forward, backward)
    return run


def _placed(x: jax.Array, mesh: Mesh | AbstractMesh, spec: P) -> jax.Array:
    return jax.sharding.reshard(x, NamedSharding(mesh, spec))


def _specs(axes: MoEAxes, arrays: MoEArrays, *, gated: bool) -> Any:
    """Returns the spec of each array, in the same structure."""
    tokens, stored, halves = P(axes.tokens), axes.stored or None, (None,) * gated

    def weight_specs(weights: Weights, kernel: Any, bias: Any) -> Any:
        specs = jax.tree.map(lambda _: P(stored), weights)._replace(
            bias=None if weights.bias is None else bias,
            fp8_state=jax.tree.map(lambda _: P(axes.expert), weights.fp8_state),
        )
        return specs._replace(**dict.fromkeys(arrays_like_kernel(weights), kernel))

    gate_up = P(stored, None, *halves, axes.feature), P(stored, *halves, axes.feature)
    specs = dict(
        gate_up=weight_specs(arrays.gate_up, *gate_up),
        down=weight_specs(arrays.down, P(stored, axes.feature), P(stored)),
    )
    specs |= {name: P() for name in ("selection_bias", "weight_scale") if getattr(arrays, name) is not None}
    return jax.tree.map(lambda _: tokens, arrays)._replace(**specs)


def _check_sizes(mesh: Mesh | AbstractMesh, axes: MoEAxes, arrays: MoEArrays) -> None:
    experts, hidden, _ = arrays.down.kernel.shape
    for name, size, split_over in (
        ("down must have experts", experts, axes.stored),
        ("down must have features F", hidden, (axes.feature,)),
    ):
        names = [axis for axis in split_over if axis is not None]
        parts = math.prod(mesh.shape[axis] for axis in names)
        if size % parts:
            raise ValueError(f"{name} in a multiple of {parts}, the devices along {names}, got {size}.")
    cached = any(isinstance(weights.kernel_cache, KernelCache) for weights in (arrays.gate_up, arrays.down))
    if cached and axes.feature is not None and mesh.shape[axes.feature] > 1:
        raise ValueError(
            f"A kernel cache cannot be split over the feature_axis {axes.feature!r}: make it inside jax.shard_map, of "
            "this device's part of the kernel."
        )
    accumulates = any(weights.dkernel_accumulator is not None for weights in (arrays.gate_up, arrays.down))
    if accumulates and (others := [axis for axis in axes.tokens if axis not in axes.stored and mesh.shape[axis] > 1]):
        raise ValueError(
            f"dkernel_accumulator cannot be added to where mesh axes {others} split tokens: gradients are sums over "
            "these. Add the gradients of microbatches up with jax_grouped.accumulate_gradients."
        )


def _with_halves(weights: Weights) -> Weights:
    """Returns `gate_up` with an axis for the gate and the other half: only then each device's part is contiguous."""

    def halves(x: Any, leading: int) -> Any:
        return x if x is None or x.ndim > leading + 1 else x.reshape(*x.shape[:leading], 2, -1)

    split = {name: halves(array, 2) for name, array in arrays_like_kernel(weights).items()}
    return weights._replace(bias=halves(weights.bias, 1), **split)


def _part(weights: Weights) -> Weights:
    """Returns weights whose cache has a layout of this device's number of kernels."""
    cache = weights.kernel_cache
    if not isinstance(cache, KernelCache):
        return weights

    def part(scaled: ScaledArray) -> ScaledArray:
        groups = scaled.data.shape[0]
        assert scaled.layout.stack_rows is not None
        layout = dataclasses.replace(scaled.layout, num_groups=groups, tokens=groups * scaled.layout.stack_rows)
        return dataclasses.replace(scaled, layout=layout)

    rowwise = None if cache.rowwise is None else part(cache.rowwise)
    return weights._replace(kernel_cache=dataclasses.replace(cache, rowwise=rowwise, columnwise=part(cache.columnwise)))
