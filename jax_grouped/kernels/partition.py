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

import abc
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

from jax_grouped.core.groups import Groups, part_sizes
from jax_grouped.kernels.primitive import refuse_derivatives

#: Dimensions of the arrays of `Groups`, which are not split.
GROUP_DIMENSIONS = ("g", "o")

#: From a device's arrays to its results.
Local = Callable[..., Sequence[jax.Array]]


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


class Gathers(NamedTuple):
    """Position of an operand, and the dimensions along which it may be stored in parts."""

    operand: int
    dimensions: tuple[str, ...]


class Operation(abc.ABC):
    """A function of arrays, and how it can be split. Instances are static: they compare and hash by value.

    Dimensions of an array are words in one string. Equal words are the same dimension.

    Attributes:
        operands: the dimensions of each operand.
        results: the results.
        splittable: the dimensions that can be split. Of two that are split over one axis, the first one stays split.
        added: positions of an operand, and of a result to which it is added, None without one. Both have the same
            dimensions. Where the result is summed over devices, the local function is called without the operand.
    """

    @property
    @abc.abstractmethod
    def operands(self) -> tuple[str, ...]: ...

    @property
    @abc.abstractmethod
    def results(self) -> tuple[Result, ...]: ...

    @property
    @abc.abstractmethod
    def splittable(self) -> tuple[str, ...]: ...

    @property
    def added(self) -> tuple[int, int] | None:
        return None

    @property
    def gathers(self) -> Gathers | None:
        """The operand that the local function gathers itself; None if there is none."""
        return None

    @abc.abstractmethod
    def local(self, splits: Mapping[str, Split]) -> Local:
        """Returns the function of one device. Results that have to be reduced over devices are those of its parts.

        Parts that are summed may have a wider type than the result: the sum is rounded once.
        """

    def grain(self, dimension: str) -> int:
        """Returns the number that the size of a part is a multiple of."""
        del dimension
        return 1

    @property
    def dimensions(self) -> list[str]:
        """The dimensions of all arrays."""
        arrays = (*self.operands, *(result.dimensions for result in self.results))
        return list(dict.fromkeys(name for array in arrays for name in array.split()))

    def whole(self, *arrays: jax.Array) -> list[jax.Array]:
        """Returns the results of one device that has everything."""
        return list(self.local(collections.defaultdict(Split))(*arrays))


@dataclasses.dataclass(frozen=True)
class Batched(Operation):
    """An operation under `jax.vmap`. The batch is one more dimension that can be split."""

    inner: Operation
    mapped: tuple[bool, ...]  # whether each operand is mapped, along its first axis

    @property
    def _name(self) -> str:
        return f"batch{sum(name.startswith('batch') for name in self.inner.dimensions)}"

    @property
    def operands(self) -> tuple[str, ...]:
        return tuple(
            f"{self._name} {names}" if mapped else names
            for names, mapped in zip(self.inner.operands, self.mapped, strict=True)
        )

    @property
    def results(self) -> tuple[Result, ...]:
        return tuple(
            dataclasses.replace(result, dimensions=f"{self._name} {result.dimensions}") for result in self.inner.results
        )

    @property
    def splittable(self) -> tuple[str, ...]:
        return (self._name, *self.inner.splittable)

    @property
    def added(self) -> tuple[int, int] | None:
        return self.inner.added

    @property
    def gathers(self) -> Gathers | None:
        return self.inner.gathers

    def grain(self, dimension: str) -> int:
        return self.inner.grain(dimension)

    def local(self, splits: Mapping[str, Split]) -> Local:
        function = self.inner.local(splits)

        def mapped_function(*arrays: jax.Array) -> Sequence[jax.Array]:
            given = len(arrays) == len(self.mapped)
            mapped = [
                is_mapped
                for i, is_mapped in enumerate(self.mapped)
                if given or self.added is None or i != self.added[0]
            ]
            return jax.vmap(function, in_axes=tuple(0 if is_mapped else None for is_mapped in mapped))(*arrays)

        return mapped_function


def own_groups(groups: Groups, splits: Mapping[str, Split], *, rows: int, num_groups: int) -> Groups:
    """Returns the groups of a device that has `rows` rows, a part of `t`, and `num_groups` kernels, a part of `e`."""
    sizes, offset = groups
    if splits["t"].axes:
        sizes = part_sizes(sizes, splits["t"].index() * rows, rows, splits["t"].parts * rows)
    if splits["e"].axes:
        # Beyond these limits no kernel has a group.
        offset = jnp.clip(offset, -splits["e"].parts * num_groups, sizes.shape[0]) + splits["e"].index() * num_groups
    return Groups(sizes, offset)


class Plan(NamedTuple):
    """A partition of one call: what a device computes, and how the arrays are split."""

    run: Callable[..., list[jax.Array]]
    results: list[PartitionSpec]
    operands: list[PartitionSpec]


def plan(operation: Operation, mesh: Mesh | AbstractMesh, operands: Sequence[Any], results: Sequence[Any]) -> Plan:
    """Plans the call from the shapes and shardings that its operands have, and that its results shall have."""
    named_operands = [*zip(operation.operands, operands, strict=True)]
    named_results = [*zip((result.dimensions for result in operation.results), results, strict=True)]
    splits = _splits(operation, mesh, [*named_operands, *named_results])
    gathers = operation.gathers
    if gathers is not None:
        splits |= _storage(operation, mesh, *named_operands[gathers.operand], gathers.dimensions, splits)

    def spec(names: str, *, stored: bool = False) -> PartitionSpec:
        dimension_splits = [splits[name] for name in names.split()]
        return PartitionSpec(
            *((split.axes or split.stored if stored else split.axes) or None for split in dimension_splits)
        )

    reductions = [_Reduction.find(mesh, *pair, splits) for pair in zip(operation.results, results, strict=True)]
    operand_specs = [
        spec(names, stored=gathers is not None and i == gathers.operand) for i, names in enumerate(operation.operands)
    ]
    result_specs = [
        reduction.scattered(spec(names)) for (names, _), reduction in zip(named_results, reductions, strict=True)
    ]
    local = operation.local(splits)
    added, to = operation.added or (None, 0)
    if added is not None:
        operand_specs[added] = result_specs[to]
        if not reductions[to].exists:
            added = None  # The local function adds it.

    def run(*arrays: jax.Array) -> list[jax.Array]:
        partial = local(*(array for i, array in enumerate(arrays) if i != added))
        whole = [reduce(result) for reduce, result in zip(reductions, partial, strict=True)]
        if added is not None:
            whole[to] += arrays[added].astype(whole[to].dtype)
        return [array.astype(result.dtype) for array, result in zip(whole, results, strict=True)]

    return Plan(run, result_specs, operand_specs)


def _splits(operation: Operation, mesh: Mesh | AbstractMesh, arrays: Sequence[tuple[str, Any]]) -> dict[str, Split]:
    """Returns how each dimension is split: as the first operand that is split along it, else as the first result.

    Axes are not free if another dimension has them already, or if a result with this dimension is split over them along
    another one.
    """
    splits = dict.fromkeys(operation.dimensions, Split())
    taken: set[str] = set()
    operands, results = arrays[: len(operation.operands)], arrays[len(operation.operands) :]
    for side, wanted in itertools.product((operands, results), operation.splittable):
        others = {
            axis
            for names, array in results
            if wanted in names.split()
            for dimension, name in enumerate(names.split())
            if name != wanted
            for axis in axes_of(array.sharding, dimension)
        }
        for names, array in side:
            if wanted not in names.split() or splits[wanted].axes:
                continue
            dimension = names.split().index(wanted)
            axes = axes_of(array.sharding, dimension)
            parts = math.prod(mesh.shape[axis] for axis in axes)
            # One part is the whole, but its axes belong to the types of results.
            divides = parts == 1 or array.shape[dimension] % (parts * operation.grain(wanted)) == 0
            if axes and divides and not (taken | others) & {*axes}:
                splits[wanted] = Split(axes, parts)
                taken |= {*axes}
    return splits


def _storage(
    operation: Operation,
    mesh: Mesh | AbstractMesh,
    names: str,
    array: Any,
    dimensions: Sequence[str],
    splits: Mapping[str, Split],
) -> dict[str, Split]:
    """Returns the splits of the dimensions that are not split, along which the gathered operand is stored in parts."""
    taken = {axis for name in names.split() for axis in splits[name].axes}
    stored = {}
    for dimension, name in enumerate(names.split()):
        axes = axes_of(array.sharding, dimension)
        parts = math.prod(mesh.shape[axis] for axis in axes)
        divides = array.shape[dimension] % (parts * operation.grain(name)) == 0
        if parts > 1 and divides and name in dimensions and not splits[name].axes and not taken & {*axes}:
            stored[name] = dataclasses.replace(splits[name], stored=axes)
            taken |= {*axes}
    return stored


@dataclasses.dataclass(frozen=True)
class _Reduction:
    """The reduction of a result over devices."""

    how: Literal["sum", "max"]
    axes: tuple[str, ...]  # over which every device gets the same
    scatters: tuple[tuple[int, tuple[str, ...]], ...]  # dimensions that a sum is split along, over further axes

    @classmethod
    def find(cls, mesh: Mesh | AbstractMesh, result: Result, array: Any, splits: Mapping[str, Split]) -> "_Reduction":
        axes = [axis for name in result.over.split() for axis in splits[name].axes]
        scatters = []
        for dimension, name in enumerate(result.dimensions.split()):
            wanted = axes_of(array.sharding, dimension)
            parts = math.prod(mesh.shape[axis] for axis in wanted)
            free = result.how == "sum" and not splits[name].axes and {*wanted} <= {*axes}
            if wanted and free and array.shape[dimension] % parts == 0:
                scatters.append((dimension, wanted))
                axes = [axis for axis in axes if axis not in wanted]
        return cls(result.how, tuple(axes), tuple(scatters))

    @property
    def exists(self) -> bool:
        return bool(self.axes or self.scatters)

    def scattered(self, spec: PartitionSpec) -> PartitionSpec:
        """Returns the spec of the whole, from that of the parts."""
        entries = [*spec]
        for dimension, axes in self.scatters:
            entries[dimension] = axes
        return PartitionSpec(*entries)

    def __call__(self, result: jax.Array) -> jax.Array:
        for dimension, axes in self.scatters:
            result = jax.lax.psum_scatter(result, axes, scatter_dimension=dimension, tiled=True)
        if not self.axes:
            return result
        return (jax.lax.psum if self.how == "sum" else jax.lax.pmax)(result, self.axes)


def axes_of(sharding: Any, dimension: int) -> tuple[str, ...]:
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
    mesh, is_explicit = _mesh_of(avals, like)
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
    return _mesh_of([*map(jax.typeof, arrays)], like)[0] is not None


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


def _mesh_of(avals: Sequence[Any], like: Sequence[PartitionSpec | None]) -> tuple[Any | None, bool]:
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
    shapes = jax.eval_shape(operation.whole, *(jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals))
    given = [*like, *[None] * (len(shapes) - len(like))]
    _refuse_choice(
        [result for result, spec in zip(operation.results, given, strict=True) if spec is None], avals, operation
    )
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


def _refuse_choice(results: Sequence[Result], avals: Sequence[Any], operation: Operation) -> None:
    """Raises if the operands' shardings do not determine those of the results."""
    axes: dict[str, set[str]] = {name: set() for name in operation.dimensions}
    for names, aval in zip(operation.operands, avals, strict=True):
        for dimension, name in enumerate(names.split()):
            axes[name].update(axes_of(aval.sharding, dimension))
    for result in results:
        if result.how == "max":
            continue  # Every device gets the same.
        read = [name for name in (result.dimensions + " " + result.over).split() if axes[name]]
        shared = len({axis for name in read for axis in axes[name]}) < sum(len(axes[name]) for name in read)
        if shared or any(name in result.over.split() for name in read):
            raise ValueError(
                "Contracting dimensions are sharded and it is ambiguous how the output should be sharded. Please "
                f"specify the output sharding via the `out_sharding` parameter. Got {avals[0]} and {avals[1]}."
            )


def _program(operation: Operation, arrays: Sequence[Any]) -> Any:
    """Returns the operation as a jaxpr; as a parameter, it makes JAX tell lowering rules which devices there are."""
    function = custom_partitioning(lambda *arrays: _call(operation.whole, *arrays, keeps_locations=True))
    results = [result.dimensions for result in operation.results]
    result_dimensions = {name for result in results for name in result.split()}
    # Shardy wants them in the order in which they occur.
    contracted = [
        name for name in operation.dimensions if name in operation.splittable and name not in result_dimensions
    ]
    whole = [name for name in operation.dimensions if name not in operation.splittable]
    function.def_partition(
        functools.partial(_partition, operation),
        sharding_rule=f"{', '.join(operation.operands)} -> {', '.join(results)}",
        reduction_factors=tuple(contracted),
        need_replication_factors=tuple(whole),
    )
    return jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays))


def _partition(
    operation: Operation, mesh: Mesh, operands: Sequence[Any], results: Sequence[Any]
) -> tuple[Mesh, Local, tuple[NamedSharding, ...], tuple[NamedSharding, ...]]:
    """Returns what `custom_partitioning` asks for, from the shapes and shardings that Shardy suggests."""
    planned = plan(operation, mesh, operands, results)

    def lower(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        return _call(planned.run, *arrays, keeps_locations=False)

    def shardings(specs: Sequence[PartitionSpec]) -> tuple[NamedSharding, ...]:
        return tuple(NamedSharding(mesh, spec) for spec in specs)

    return mesh, lower, shardings(planned.results), shardings(planned.operands)


def _batch(arrays: Sequence[jax.Array], axes: Sequence[int | None], *, operation: Operation, program: Any) -> Any:
    del program
    size = next(x.shape[axis] for x, axis in zip(arrays, axes, strict=True) if axis is not None)
    mapped = [axis is not None for axis in axes]
    operands = [x if axis is None else jnp.moveaxis(x, axis, 0) for x, axis in zip(arrays, axes, strict=True)]
    if operation.added is not None and not mapped[i := operation.added[0]]:  # It has the dimensions of the result.
        mapped[i] = True
        operands[i] = jnp.broadcast_to(operands[i], (size, *operands[i].shape))
    results = apply(Batched(operation, tuple(mapped)), *operands)
    return results, [0] * len(results)


def _results(*avals: Any, operation: Operation, program: Any) -> list[Any]:
    """Returns the results' avals, which know the mesh too."""
    del operation
    mesh, _ = _mesh_of(avals, ())
    if mesh is None:  # It was set while the program was traced, and no longer is.
        return program.out_avals
    return [
        aval.update(sharding=NamedSharding(mesh, PartitionSpec(*(None,) * aval.ndim))) for aval in program.out_avals
    ]


def _impl(*arrays: jax.Array, operation: Operation, program: Any) -> list[jax.Array]:
    del program
    with jax.disable_jit(False):
        return _jitted(operation)(*arrays)


@functools.cache
def _jitted(operation: Operation) -> Callable[..., list[jax.Array]]:
    return jax.jit(functools.partial(apply, operation))


def _lower(ctx: Any, *arrays: Any, operation: Operation, program: Any) -> Any:
    # A program that is exported stays whole: how this process splits it cannot be written down.
    whole = ctx.module_context.lowering_parameters.for_export
    function = operation.whole if whole else jaxpr_as_fun(program)
    return mlir.lower_fun(function, multiple_results=True)(ctx, *arrays)


def _call(function: Local, *arrays: jax.Array, keeps_locations: bool) -> tuple[jax.Array, ...]:
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
