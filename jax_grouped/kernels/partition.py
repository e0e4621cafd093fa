"""Operations on arrays whose dimensions can be split over the devices of a mesh, and calls of them on sharded arrays.

The collectives of a plan are the least that its shardings need:

- A dimension that operands and results share is split everywhere. That costs nothing.
- A result of parts of another dimension is summed over them with one `psum` or, where only a part of the sum is
  wanted, one `psum_scatter`; a largest value is found with one `pmax`.
- A dimension that cannot be split, or not evenly, is gathered. So is one of two that are split over the same axis. An
  operation may gather an operand itself, to send it in another form.

XLA cannot look into a custom call, so it would gather every operand on every device. With axes of type `Auto`, only XLA
knows how arrays are split: `jax.experimental.custom_partitioning` tells Shardy which dimensions of an operation can be,
and asks for the program of one device. With axes of type `Explicit`, the types of arrays say how they are split, and a
`jax.shard_map` runs that program. A program on one device, and one inside `jax.shard_map` or `jax.pmap`, has no trace
of all this.
"""

import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import batching, mlir
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jaxlib.mlir import ir

from jax_grouped.core.groups import Groups, clamp_offset, part_sizes
from jax_grouped.kernels.primitive import refuse_derivatives

#: Dimensions of the arrays of `Groups`, which are not split.
GROUP_DIMENSIONS = ("g", "o")


@dataclasses.dataclass(frozen=True)
class Split:
    """A dimension of one call: the mesh axes that it is split over, and the number of its parts.

    `stored` are mesh axes over which one operand stores this dimension in parts. The local function gathers it.
    """

    axes: tuple[str, ...] = ()
    parts: int = 1
    stored: tuple[str, ...] = ()

    def index(self) -> jax.Array | int:
        """Returns the part that this device has."""
        return jax.lax.axis_index(self.axes) if self.axes else 0


#: The split of each dimension by its name.
Splits = Mapping[str, Split]


@dataclasses.dataclass(frozen=True)
class Result:
    """A result: its dimensions, those that it is reduced over, and how.

    Of one that is `kept_whole`, nobody splits dimensions that the operation cannot split. XLA would split a few blocks
    over a part of a mesh axis, for which `custom_partitioning` has no words: it raises an IndivisibleError.
    """

    dimensions: str
    over: str = ""
    how: Literal["sum", "max"] = "sum"
    kept_whole: bool = False


@dataclasses.dataclass(frozen=True)
class Operation:
    """A function of arrays, and how it can be split. Instances are static: they compare and hash by value.

    Dimensions of an array are words in one string. Equal words are the same dimension.

    Attributes:
        local: the function of one device, `local(spec, splits, *arrays)`; one of a module, as it is compared by
            identity. Results that have to be reduced over devices are those of its parts. Parts that are summed may
            have a wider type: the sum is rounded once.
        spec: what `local` needs beside the arrays, hashable.
        operands: the dimensions of each operand.
        results: the results.
        splittable: the dimensions that can be split. Of two that are split over one axis, the first one stays split.
        added: positions of an operand, and of a result to which it is added, None without one. Both have the same
            dimensions. Where the result is summed over devices, the local function is called without the operand.
        gathered: position of an operand that the local function gathers itself, and the dimensions along which it may
            be stored in parts; None without one.
        grains: numbers that the sizes of parts are multiples of, for dimensions that have one.
    """

    local: Callable[..., Sequence[jax.Array]]
    spec: Any
    operands: tuple[str, ...]
    results: tuple[Result, ...]
    splittable: tuple[str, ...]
    added: tuple[int, int] | None = None
    gathered: tuple[int, tuple[str, ...]] | None = None
    grains: tuple[tuple[str, int], ...] = ()

    @property
    def dimensions(self) -> list[str]:
        """The dimensions of all arrays."""
        arrays = (*self.operands, *(result.dimensions for result in self.results))
        return list(dict.fromkeys(name for array in arrays for name in array.split()))

    def whole(self, *arrays: jax.Array) -> list[jax.Array]:
        """Returns the results of one device that has everything."""
        return list(self.local(self.spec, collections.defaultdict(Split), *arrays))

    def batched(self, mapped: tuple[bool, ...]) -> "Operation":
        """Returns the operation under `jax.vmap` of some operands: the batch is one more dimension to split."""
        batch = f"batch{sum(name.startswith('batch') for name in self.dimensions)}"
        return dataclasses.replace(
            self,
            local=_map_local,
            spec=(self, mapped),
            operands=tuple(
                f"{batch} {names}" if is_mapped else names
                for names, is_mapped in zip(self.operands, mapped, strict=True)
            ),
            results=tuple(
                dataclasses.replace(result, dimensions=f"{batch} {result.dimensions}") for result in self.results
            ),
            splittable=(batch, *self.splittable),
        )


def _map_local(spec: tuple[Operation, tuple[bool, ...]], splits: Splits, *arrays: jax.Array) -> Sequence[jax.Array]:
    inner, mapped = spec
    if len(arrays) < len(mapped) and inner.added is not None:
        mapped = mapped[: inner.added[0]] + mapped[inner.added[0] + 1 :]
    in_axes = tuple(0 if is_mapped else None for is_mapped in mapped)
    return jax.vmap(functools.partial(inner.local, inner.spec, splits), in_axes=in_axes)(*arrays)


def own_groups(groups: Groups, splits: Splits, *, rows: int, num_groups: int) -> Groups:
    """Returns the groups of a device that has `rows` rows, a part of `t`, and `num_groups` kernels, a part of `e`."""
    sizes, offset = groups
    if splits["t"].axes:
        sizes = part_sizes(sizes, splits["t"].index() * rows, rows, splits["t"].parts * rows)
    if splits["e"].axes:
        first = clamp_offset(offset, splits["e"].parts * num_groups, sizes.shape[0])
        offset = first + splits["e"].index() * num_groups
    return Groups(sizes, offset)


class Plan(NamedTuple):
    """A partition of one call: what a device computes, and how the arrays are split."""

    run: Callable[..., list[jax.Array]]
    results: list[PartitionSpec]
    operands: list[PartitionSpec]


def plan(operation: Operation, mesh: Mesh | AbstractMesh, operands: Sequence[Any], results: Sequence[Any]) -> Plan:
    """Plans the call from the shapes and shardings that its operands have, and that its results shall have."""
    named_operands = [(names.split(), array) for names, array in zip(operation.operands, operands, strict=True)]
    named_results = [(one.dimensions.split(), array) for one, array in zip(operation.results, results, strict=True)]
    grains = dict(operation.grains)

    def find_split(array: Any, dimension: int, grain: int) -> Split:
        axes = split_axes(array.sharding, dimension)
        parts = math.prod(mesh.shape[axis] for axis in axes)
        # One part is the whole, but its axes belong to the types of results.
        return Split(axes, parts) if parts == 1 or array.shape[dimension] % (parts * grain) == 0 else Split()

    # A dimension is split as in the first operand that is split along it, else as in the first result. Axes are not
    # free if another dimension has them already, or if a result with this dimension is split over them along another.
    splits = dict.fromkeys(operation.dimensions, Split())
    taken: set[str] = set()
    for side, name in itertools.product((named_operands, named_results), operation.splittable):
        others = {
            axis
            for names, array in named_results
            if name in names
            for dimension, other in enumerate(names)
            if other != name
            for axis in split_axes(array.sharding, dimension)
        }
        for names, array in side:
            if name in names and not splits[name].axes:
                split = find_split(array, names.index(name), grains.get(name, 1))
                if not (taken | others) & {*split.axes}:
                    splits[name] = split
                    taken |= {*split.axes}

    gathered, stored_along = operation.gathered or (None, ())
    if gathered is not None:
        names, array = named_operands[gathered]
        taken = {axis for name in names for axis in splits[name].axes}
        for dimension, name in enumerate(names):
            split = find_split(array, dimension, grains.get(name, 1))
            if split.parts > 1 and name in stored_along and not splits[name].axes and not taken & {*split.axes}:
                splits[name] = dataclasses.replace(splits[name], stored=split.axes)
                taken |= {*split.axes}

    operand_specs = [
        PartitionSpec(*(splits[name].axes or (splits[name].stored if i == gathered else ()) or None for name in names))
        for i, (names, _) in enumerate(named_operands)
    ]
    result_specs, reductions = [], []
    for result, (names, array) in zip(operation.results, named_results, strict=True):
        summed = [axis for name in result.over.split() for axis in splits[name].axes]
        entries = [splits[name].axes or None for name in names]
        scatters = []
        for dimension, name in enumerate(names):
            split = find_split(array, dimension, 1)
            free = result.how == "sum" and not splits[name].axes and {*split.axes} <= {*summed}
            if split.axes and free:
                scatters.append((dimension, split.axes))
                entries[dimension] = split.axes
                summed = [axis for axis in summed if axis not in split.axes]
        result_specs.append(PartitionSpec(*entries))
        reductions.append((result.how, scatters, tuple(summed)))

    added, to = operation.added or (None, 0)
    if added is not None:
        operand_specs[added] = result_specs[to]
        _, scatters, axes = reductions[to]
        if not (scatters or axes):
            added = None  # The local function adds it.

    def run(*arrays: jax.Array) -> list[jax.Array]:
        given = [array for i, array in enumerate(arrays) if i != added]
        reduced = []
        for part, (how, scatters, axes) in zip(
            operation.local(operation.spec, splits, *given), reductions, strict=True
        ):
            for dimension, over in scatters:
                part = jax.lax.psum_scatter(part, over, scatter_dimension=dimension, tiled=True)
            if axes:
                part = (jax.lax.psum if how == "sum" else jax.lax.pmax)(part, axes)
            reduced.append(part)
        if added is not None:
            reduced[to] += arrays[added].astype(reduced[to].dtype)
        return [array.astype(result.dtype) for array, result in zip(reduced, results, strict=True)]

    return Plan(run, result_specs, operand_specs)


def split_axes(sharding: Any, dimension: int) -> tuple[str, ...]:
    """Returns the mesh axes that a dimension is split over; none if the sharding does not name axes."""
    spec = getattr(sharding, "spec", ())
    entry = spec[dimension] if dimension < len(spec) else None
    return () if entry is None else entry if isinstance(entry, tuple) else (entry,)


def apply(operation: Operation, *arrays: jax.Array, like: Sequence[PartitionSpec | None] = (None,)) -> list[jax.Array]:
    """Returns the results of an operation, which XLA can split if the arrays lie on a mesh of several devices.

    Arrays whose types are sharded, over mesh axes of type `Explicit`, are split as these say. The types of the results
    are sharded as `like` says, which has a spec for each of the first results, or None where the operands leave no
    choice. If they do leave one, a ValueError is raised.
    """
    avals = [*map(jax.typeof, arrays)]
    mesh, is_explicit = _find_mesh(avals, like)
    if mesh is None:
        return operation.whole(*arrays)
    if is_explicit:
        return _apply_to_types(operation, _with_devices(mesh, arrays), avals, arrays, like)
    results = _PARTITIONED.bind(*arrays, operation=operation, program=_program(operation, arrays))

    def constrained(x: jax.Array, result: Result) -> jax.Array:
        if not result.kept_whole:
            return x
        names = result.dimensions.split()
        entries = (PartitionSpec.UNCONSTRAINED if name in operation.splittable else None for name in names)
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*entries)))

    return [*map(constrained, results, operation.results)]


def lie_on_mesh(*arrays: jax.Array, like: Sequence[PartitionSpec | None] = ()) -> bool:
    """Tells whether an operation on the arrays, with results like these, can be split: JAX knows one mesh."""
    return _find_mesh([*map(jax.typeof, arrays)], like)[0] is not None


def known_mesh(*arrays: jax.Array) -> Any | None:
    """Returns the mesh that JAX knows for the arrays, whatever its axes; None if there is none, or several."""
    meshes = {aval.sharding.mesh for aval in map(jax.typeof, arrays) if not aval.sharding.mesh.empty}
    if len(meshes) > 1:
        return None
    mesh = meshes.pop() if meshes else jax.sharding.get_abstract_mesh()
    return None if mesh.empty else _with_devices(mesh, arrays)


def _with_devices(mesh: Any, arrays: Sequence[jax.Array]) -> Any:
    """Returns the mesh with its devices if the arrays are no tracers: then nothing else tells the devices."""
    if any(isinstance(x, jax.core.Tracer) for x in arrays):
        return mesh
    shardings = (x.sharding for x in arrays if jax.typeof(x).sharding.mesh == mesh)
    return next((sharding.mesh for sharding in shardings if isinstance(sharding, NamedSharding)), mesh)


def _find_mesh(avals: Sequence[Any], like: Sequence[PartitionSpec | None]) -> tuple[Any | None, bool]:
    """Returns the mesh over which an operation is split, None if it is not, and whether types say how.

    Types do if that of any operand or result is sharded; otherwise a mesh of several devices leaves all axes to XLA.
    """
    meshes = [aval.sharding.mesh for aval in avals]
    specs = [*[aval.sharding.spec for aval in avals], *[spec for spec in like if spec is not None]]
    if {*itertools.chain(*specs)} - {None}:
        for mesh in (*meshes, jax.sharding.get_abstract_mesh()):
            if {*mesh.axis_types} == {AxisType.Explicit}:
                return mesh, True
    known = {mesh for mesh in meshes if not mesh.empty}
    if len(known) > 1:  # JAX refuses to partition a program with several.
        return None, False
    mesh = known.pop() if known else jax.sharding.get_abstract_mesh()
    return (mesh if mesh.size > 1 and {*mesh.axis_types} == {AxisType.Auto} else None), False


def _apply_to_types(
    operation: Operation,
    mesh: Mesh | AbstractMesh,
    avals: Sequence[Any],
    arrays: Sequence[jax.Array],
    like: Sequence[PartitionSpec | None],
) -> list[jax.Array]:
    """Returns the results, split as types say. Raises if these leave a choice for results without a spec in `like`."""
    given = [*like, *[None] * (len(operation.results) - len(like))]
    axes: dict[str, set[str]] = {name: set() for name in operation.dimensions}
    for names, aval in zip(operation.operands, avals, strict=True):
        for dimension, name in enumerate(names.split()):
            axes[name].update(split_axes(aval.sharding, dimension))
    for result, spec in zip(operation.results, given, strict=True):
        if spec is not None or result.how == "max":  # Of a maximum, every device gets the same.
            continue
        read = [name for name in (result.dimensions + " " + result.over).split() if axes[name]]
        shared = len({axis for name in read for axis in axes[name]}) < sum(len(axes[name]) for name in read)
        if shared or any(name in result.over.split() for name in read):
            raise ValueError(
                "Contracting dimensions are sharded and it is ambiguous how the output should be sharded. Please "
                f"specify the output sharding via the `out_sharding` parameter. Got {avals[0]} and {avals[1]}."
            )
    shapes = jax.eval_shape(operation.whole, *(jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals))
    wanted = [
        jax.ShapeDtypeStruct(result.shape, result.dtype, sharding=NamedSharding(mesh, spec or PartitionSpec()))
        for result, spec in zip(shapes, given, strict=True)
    ]
    planned = plan(operation, mesh, avals, wanted)

    def placed(x: jax.Array, spec: PartitionSpec | None) -> jax.Array:
        return x if spec is None else jax.sharding.reshard(x, NamedSharding(mesh, spec))

    run = jax.shard_map(
        planned.run, mesh=mesh, in_specs=tuple(planned.operands), out_specs=planned.results, check_vma=False
    )
    return [*map(placed, run(*map(placed, arrays, planned.operands)), given)]


def _program(operation: Operation, arrays: Sequence[Any]) -> Any:
    """Returns the operation as a jaxpr; as a parameter, it makes JAX tell lowering rules which devices there are."""
    function = custom_partitioning(lambda *arrays: _call(operation.whole, *arrays, keeps_locations=True))
    results = [result.dimensions for result in operation.results]

    def partition(mesh: Mesh, operands: Sequence[Any], results: Sequence[Any]) -> tuple[Any, ...]:
        """Returns what `custom_partitioning` asks for, from the shapes and shardings that Shardy suggests."""
        run, *specs = plan(operation, mesh, operands, results)
        shardings = [tuple(NamedSharding(mesh, spec) for spec in side) for side in specs]
        return mesh, functools.partial(_call, run, keeps_locations=False), *shardings

    # Shardy wants the contracted dimensions in the order in which they occur.
    kept = " ".join(results).split()
    contracted = [name for name in operation.dimensions if name in operation.splittable and name not in kept]
    function.def_partition(
        partition,
        sharding_rule=f"{', '.join(operation.operands)} -> {', '.join(results)}",
        reduction_factors=tuple(contracted),
        need_replication_factors=tuple(name for name in operation.dimensions if name not in operation.splittable),
    )
    return jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays))


def _batch(arrays: Sequence[jax.Array], axes: Sequence[int | None], *, operation: Operation, **_: Any) -> Any:
    size = next(x.shape[axis] for x, axis in zip(arrays, axes, strict=True) if axis is not None)
    mapped = [axis is not None for axis in axes]
    operands = [x if axis is None else jnp.moveaxis(x, axis, 0) for x, axis in zip(arrays, axes, strict=True)]
    if operation.added is not None and not mapped[i := operation.added[0]]:  # It has the dimensions of the result.
        mapped[i] = True
        operands[i] = jnp.broadcast_to(operands[i], (size, *operands[i].shape))
    results = apply(operation.batched(tuple(mapped)), *operands)
    return results, [0] * len(results)


def _results(*avals: Any, program: Any, **_: Any) -> list[Any]:
    """Returns the results' avals, which know the mesh too."""
    mesh = _find_mesh(avals, ())[0]
    if mesh is None:  # It was set while the program was traced, and no longer is.
        return program.out_avals
    return [
        aval.update(sharding=NamedSharding(mesh, PartitionSpec(*(None,) * aval.ndim))) for aval in program.out_avals
    ]


def _impl(*arrays: jax.Array, operation: Operation, **_: Any) -> list[jax.Array]:
    with jax.disable_jit(False):
        return _APPLY_JITTED(operation, *arrays)


def _lower(ctx: Any, *arrays: Any, operation: Operation, program: Any) -> Any:
    # A program that is exported stays whole: how this process splits it cannot be written down.
    whole = ctx.module_context.lowering_parameters.for_export
    function = operation.whole if whole else jaxpr_as_fun(program)
    return mlir.lower_fun(function, multiple_results=True)(ctx, *arrays)


def _call(function: Callable[..., Any], *arrays: jax.Array, keeps_locations: bool) -> tuple[jax.Array, ...]:
    """Calls a function in one step of a jaxpr, to which its constants belong: `custom_partitioning` takes none."""
    program = jax.make_jaxpr(function)(*arrays)
    return tuple(_CALL.bind(*arrays, program=program, keeps_locations=keeps_locations))


def _lower_call(ctx: Any, *arrays: Any, program: Any, keeps_locations: bool) -> Any:
    """Lowers the program. If asked to, removes the lines of Python from it and from all of the module.

    XLA takes the numbers of a partitioned program's stack frames for those of the program around it. Since JAX 0.11 it
    can then follow them in a circle for ever, in its pass `propagate-call-metadata`.
    """
    results = mlir.lower_fun(jaxpr_as_fun(program), multiple_results=True)(ctx, *arrays)

    def remove(operation: ir.Operation) -> ir.WalkResult:
        operation.location = ir.Location.name(_CALL.name)
        return ir.WalkResult.ADVANCE

    if not keeps_locations:
        ctx.module_context.module.operation.walk(remove)  # The module of a device has nothing but this program.
    return results


_APPLY_JITTED = jax.jit(apply, static_argnums=0)

_CALL = Primitive("jax_grouped_call")
_CALL.multiple_results = True
_CALL.def_abstract_eval(lambda *_, program, **__: program.out_avals)
mlir.register_lowering(_CALL, _lower_call)

_PARTITIONED = Primitive("jax_grouped_partitioned")
_PARTITIONED.multiple_results = True
_PARTITIONED.def_impl(_impl)
_PARTITIONED.def_abstract_eval(_results)
refuse_derivatives(_PARTITIONED)
batching.primitive_batchers[_PARTITIONED] = _batch
mlir.register_lowering(_PARTITIONED, _lower)
