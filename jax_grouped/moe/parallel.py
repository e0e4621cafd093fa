"""Experts on several devices: how a mesh is used, and `moe_mlp` under plain `jax.jit` with sharded arrays.

XLA cannot split the routing, because every row depends on the group sizes of all tokens. So the axes that the caller
names say what each device computes, inside a `jax.shard_map` over the mesh that the arrays lie on. The result is that
of a single device with the whole batch.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_grouped.core.values import axis_names, check_choice, is_bound, repr_of_changes, varying_axes
from jax_grouped.fp8.arrays import KernelCache, ScaledArray
from jax_grouped.kernels.partition import known_mesh
from jax_grouped.moe.routing import Routing
from jax_grouped.ops.inputs import Lora, Weights, arrays_like_kernel

#: Way in which tokens reach the devices of their experts, see `Parallel`.
ExchangeMethod = Literal["auto", "gather", "padded", "push"]
#: Type in which rows travel between devices, see `Parallel`.
RowType = Literal["fp8", "input"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parallel:
    """Options of a mixture of experts on several devices: what each mesh axis splits, and how rows travel.

    Attributes:
        experts: mesh axis, or several, that split the experts and the tokens: these travel to their experts' devices,
            and results travel back. The first of several is the slowest, in the order of experts and tokens.
        features: mesh axis that splits `F`, the features inside an expert: each device has a part of the gate's
            features, then a part of up's, and the results are summed over the axis. Inside `jax.shard_map` their
            gradients need its checks on (`check_vma=True`).
        fsdp: mesh axis, or several, that split the tokens and the storage of the experts, those along `experts` again,
            in the order of `P((experts, fsdp))`. Each pass gathers the kernels of all its devices, with a recipe as FP8
            numbers, and each device gets its part of the sum of their gradients.
        batch: further mesh axes that split the tokens of one batch, whose balance loss is that of the whole batch.
        exchange: "gather" gathers the tokens of all `D` devices on each, which applies its own experts to them, and
            sums the results of each token: `T` rows travel from each device to each other one. "padded" exchanges a row
            for each pair of a token and a choice, in room for the worst case, see `plan_exchange`: `top_k` times as
            many rows. "auto" is "gather"; with several axes of `experts`, the first is between hosts: a token travels
            once to each host that has an expert of it, and from there as with "gather". "push", which is experimental,
            has the bits of "gather": kernels write the tokens that other GPUs need into their memory. Where they cannot
            (`python3 -m jax_grouped` says why), it is "auto".
        dispatch: type of tokens, and of gradients of results, on their way to the experts. "fp8" is that of a
            `Float8BlockScaling` with `pow2_scales`, and halves their bytes; without such a recipe, and with adapters,
            they travel as they are. Tokens and gradients are then rounded along the features before they are rounded
            along the rows, for the kernels' gradients. "input" is the type of `x`.
        combine: type of results, and of gradients of tokens, on their way back: "input" is that of `x`. With "fp8",
            each device's part of a token's sum, or with exchanged rows each choice's result, is rounded to FP8.

    Raises:
        TypeError: an axis is no name of a mesh axis.
        ValueError: axes that must differ are the same, or a field has a value that is not supported.

    Example:
        parallel = jg.moe.Parallel(experts="expert", fsdp="data")

        assert parallel.token_axes == ("data", "expert") and parallel.storage_axes == ("expert", "data")
    """

    experts: str | tuple[str, ...] | None = None
    features: str | None = None
    fsdp: str | tuple[str, ...] | None = None
    batch: Sequence[str] = ()
    exchange: ExchangeMethod = "auto"
    dispatch: RowType = "fp8"
    combine: RowType = "input"

    __repr__ = repr_of_changes

    def __post_init__(self) -> None:
        if self.features is not None and not isinstance(self.features, str):
            raise TypeError(f"features must be the name of one mesh axis, got {self.features!r}.")
        for name in ("experts", "fsdp", "batch"):
            axes = getattr(self, name)
            axes = axis_names(axes) if axes is None or isinstance(axes, str) else axes
            if not isinstance(axes, Sequence) or not all(isinstance(axis, str) for axis in axes):
                raise TypeError(f"{name} must be the name of a mesh axis or a sequence of names, got {axes!r}.")
            if len({*axes}) < len(axes):
                raise ValueError(f"{name} must be different axes, got {tuple(axes)}.")
            # One axis is its name, so that equal options are equal.
            axes = tuple(axes) if name == "batch" or len(axes) > 1 else next(iter(axes), None)
            object.__setattr__(self, name, axes)
        if self.axes.count(self.features) > 1:
            raise ValueError(
                f"The features axis {self.features!r} must be none of experts, fsdp and batch, because its devices "
                f"have the same tokens, got {self.experts!r}, {self.fsdp!r} and {self.batch}."
            )
        if both := {*axis_names(self.experts)} & {*axis_names(self.fsdp)}:
            raise ValueError(
                f"fsdp must be another axis than experts, got {min(both)!r} for both: experts alone splits the experts "
                "and their storage."
            )
        check_choice("exchange", self.exchange, ExchangeMethod)
        for name in ("dispatch", "combine"):
            check_choice(name, getattr(self, name), RowType)

    @functools.cached_property
    def storage_axes(self) -> tuple[str, ...]:
        """The axes that split the storage of the experts, in the order of its parts."""
        return axis_names(self.experts) + axis_names(self.fsdp)

    @functools.cached_property
    def token_axes(self) -> tuple[str, ...]:
        """The axes that split the tokens."""
        split = axis_names(self.fsdp) + axis_names(self.experts)
        return *self.batch, *[axis for axis in split if axis not in self.batch]

    @functools.cached_property
    def axes(self) -> tuple[str, ...]:
        """The axes that split anything."""
        return self.token_axes if self.features is None else (*self.token_axes, self.features)


class MoEArrays(NamedTuple):
    """The arrays of one `moe_mlp`."""

    x: jax.Array
    #: Logits, or a routing.
    routing: jax.Array | Routing
    gate_up: Weights
    down: Weights
    selection_bias: jax.Array | None
    shared: jax.Array | None
    experts: jax.Array | None
    mask: jax.Array | None


def mesh_to_split(parallel: Parallel, *arrays: jax.Array) -> Mesh | AbstractMesh | None:
    """Returns the mesh of the arrays, or None if a surrounding `jax.shard_map` or `jax.pmap` splits the call."""
    unbound = [axis for axis in parallel.axes if not is_bound(axis)]
    if not unbound:
        return None
    if len(unbound) < len(parallel.axes):
        raise ValueError(
            f"A surrounding jax.shard_map or jax.pmap splits some of the mesh axes {list(parallel.axes)}, but not "
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
    function: Callable[[MoEArrays], tuple[Any, Any]],
    mesh: Mesh | AbstractMesh,
    parallel: Parallel,
    arrays: MoEArrays,
    *,
    gated: bool,
) -> tuple[Any, Any]:
    """Calls the function on every device with its part of the arrays. Its first result are arrays of tokens."""
    experts, hidden, _ = arrays.down.kernel.shape
    for name, size, split_over in (
        ("down must have experts", experts, parallel.storage_axes),
        ("down must have features F", hidden, (parallel.features,)),
    ):
        names = [axis for axis in split_over if axis is not None]
        parts = math.prod(mesh.shape[axis] for axis in names)
        if size % parts:
            raise ValueError(f"{name} in a multiple of {parts}, the devices along {names}, got {size}.")
    weights = arrays.gate_up, arrays.down
    is_cached = any(isinstance(each.kernel_cache, KernelCache) for each in weights)
    if is_cached and parallel.features is not None and mesh.shape[parallel.features] > 1:
        raise ValueError(
            f"A kernel cache cannot be split over the features axis {parallel.features!r}: make it inside "
            "jax.shard_map, of this device's part of the kernel."
        )
    others = [axis for axis in parallel.token_axes if axis not in parallel.storage_axes and mesh.shape[axis] > 1]
    if others and any(each.dkernel_accumulator is not None for each in weights):
        raise ValueError(
            f"dkernel_accumulator cannot be added to where mesh axes {others} split tokens: gradients are sums over "
            "these. Add the gradients of microbatches up with jax_grouped.accumulate_gradients."
        )
    if gated:
        # Each device's part is contiguous only with an axis for the gate and the other half.
        joined = [("bias", arrays.gate_up.bias, 2)]
        joined += [(name, array, 3) for name, array in arrays_like_kernel(arrays.gate_up).items()]
        split: dict[str, Any] = {
            name: x.reshape(*x.shape[:-1], 2, -1) for name, x, rank in joined if x is not None and x.ndim == rank
        }
        if (lora := arrays.gate_up.lora) is not None and lora.b.ndim == 3:
            split["lora"] = Lora(lora.a, lora.b.reshape(*lora.b.shape[:2], 2, -1))
        arrays = arrays._replace(gate_up=arrays.gate_up._replace(**split))
    free = _free_axes(mesh)
    is_explicit = {*free.values()} == {AxisType.Explicit}
    tokens, token_spec = arrays.x.shape[0], P(jax.typeof(arrays.x).sharding.spec[0])
    padding = -tokens % math.prod(mesh.shape[axis] for axis in parallel.token_axes)

    def place(x: jax.Array, spec: P) -> jax.Array:
        return jax.sharding.reshard(x, NamedSharding(mesh, spec)) if is_explicit else x

    def padded(x: jax.Array) -> jax.Array:
        return jnp.pad(place(x, P()), [(0, padding)] + [(0, 0)] * (x.ndim - 1)) if padding else x

    def run_on_part(arrays: MoEArrays) -> tuple[Any, Any]:
        leaves, structure = jax.tree.flatten(arrays, is_leaf=lambda x: isinstance(x, ScaledArray))
        for i, x in enumerate(leaves):
            if isinstance(x, ScaledArray):
                # In a kernel cache, the layout is still that of all kernels.
                groups, stack_rows = x.data.shape[0], x.layout.stack_rows
                assert stack_rows is not None
                layout = dataclasses.replace(x.layout, num_groups=groups, tokens=groups * stack_rows)
                leaves[i] = dataclasses.replace(x, layout=layout)
        return function(jax.tree.unflatten(structure, leaves))

    of_tokens = {name: getattr(arrays, name) for name in ("x", "routing", "shared", "experts", "mask")}
    arrays = arrays._replace(**jax.tree.map(padded, of_tokens))
    specs = _specs(parallel, arrays, gated=gated)
    arrays = jax.tree.map(place, arrays, specs)
    map_parts = functools.partial(jax.shard_map, mesh=mesh, axis_names={*free})
    out_specs = P(parallel.token_axes or None), P()
    if len(free) < len(mesh.axis_names):
        run = _map_inside_another(map_parts, run_on_part, specs, out_specs)
    else:
        run = map_parts(run_on_part, in_specs=(specs,), out_specs=out_specs)
    # Outside jit, shard_map does not differentiate some rules. Such a call is compiled each time.
    rows, metrics = jax.jit(run)(arrays)
    if padding:
        rows = jax.tree.map(lambda y: place(y, P())[:tokens], rows)
    return jax.tree.map(lambda y: place(y, token_spec), rows), metrics


def _map_inside_another(
    map_parts: functools.partial[Any], function: Callable[..., Any], specs: Any, out_specs: Any
) -> Any:
    """Returns `map_parts(function)`, a `jax.shard_map` inside another one, with a rule of its own for gradients.

    JAX splits the residuals of its own rule over the outer axes too, and then refuses to lower them (JAX 0.10 to 0.12).
    """
    axes = map_parts.keywords["axis_names"]
    kept_specs: list[P] = []

    @jax.custom_vjp
    def run(arrays: Any) -> Any:
        return map_parts(function, in_specs=(specs,), out_specs=out_specs)(arrays)

    def forward(arrays: Any) -> tuple[Any, Any]:
        pull_back: Any = None

        def with_residuals(arrays: Any) -> tuple[Any, list[jax.Array]]:
            nonlocal pull_back
            out, pull_back_part = jax.vjp(function, arrays)
            leaves, pull_back = jax.tree.flatten(pull_back_part)
            kept_specs[:] = [P(tuple(sorted(varying_axes(leaf) & axes)) or None) for leaf in leaves]
            return out, [leaf[None] for leaf in leaves]

        # Trace once for the specs, which the second time needs.
        jax.eval_shape(map_parts(with_residuals, in_specs=(specs,), out_specs=(out_specs, P(tuple(axes)))), arrays)
        out, leaves = map_parts(with_residuals, in_specs=(specs,), out_specs=(out_specs, kept_specs))(arrays)
        return out, jax.tree.unflatten(pull_back, leaves)

    def backward(pull_back: Any, gradient: Any) -> tuple[Any]:
        leaves, structure = jax.tree.flatten(pull_back)

        def pull_back_on_part(leaves: list[jax.Array], gradient: Any) -> Any:
            return jax.tree.unflatten(structure, [leaf[0] for leaf in leaves])(gradient)[0]

        return (map_parts(pull_back_on_part, in_specs=(kept_specs, out_specs), out_specs=specs)(leaves, gradient),)

    run.defvjp(forward, backward)
    return run


def _specs(parallel: Parallel, arrays: MoEArrays, *, gated: bool) -> Any:
    """Returns the spec of each array, in the same structure."""
    tokens, stored, halves = P(parallel.token_axes), parallel.storage_axes or None, (None,) * gated

    def weight_specs(weights: Weights, kernel: P, bias: P, *lora: Any) -> Any:
        specs = jax.tree.map(lambda _: P(stored), weights)._replace(
            bias=None if weights.bias is None else bias,
            fp8_state=jax.tree.map(lambda _: P(parallel.experts), weights.fp8_state),
            lora=None if weights.lora is None else Lora(*lora),
        )
        return specs._replace(**dict.fromkeys(arrays_like_kernel(weights), kernel))

    features = parallel.features
    gate_up = P(stored, None, *halves, features), P(stored, *halves, features)
    return jax.tree.map(lambda _: tokens, arrays)._replace(
        gate_up=weight_specs(arrays.gate_up, *gate_up, P(stored), gate_up[0]),
        down=weight_specs(arrays.down, P(stored, features), P(stored), P(stored, features), P(stored)),
        selection_bias=jax.tree.map(lambda _: P(), arrays.selection_bias),
    )
