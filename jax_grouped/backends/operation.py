"""Operations on arrays whose dimensions can be split over the devices of a mesh, and the plans for splitting them.

The collectives of a plan are the least that its shardings need:

- A dimension that operands and results share is split everywhere. That costs nothing.
- A result of parts of another dimension is summed over them with one `psum` or, where only a part of the sum is
  wanted, one `psum_scatter`; a largest value is found with one `pmax`.
- A dimension that cannot be split, or not evenly, is gathered. So is one of two that are split over the same axis. An
  operation may gather an operand itself, to send it in another form.
"""

import abc
import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

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
        return list(self.local(dict.fromkeys(self.dimensions, Split()))(*arrays))


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
            mapped = [of for i, of in enumerate(self.mapped) if given or self.added is None or i != self.added[0]]
            return jax.vmap(function, in_axes=tuple(0 if of else None for of in mapped))(*arrays)

        return mapped_function


class Plan(NamedTuple):
    """A partition of one call: what a device computes, and how the arrays are split."""

    of_device: Callable[..., list[jax.Array]]
    results: list[PartitionSpec]
    operands: list[PartitionSpec]


def plan(operation: Operation, mesh: Mesh | AbstractMesh, operands: Sequence[Any], results: Sequence[Any]) -> Plan:
    """Plans the call from the shapes and shardings that its operands have, and that its results shall have."""
    named_operands = [*zip(operation.operands, operands, strict=True)]
    named_results = [*zip((of.dimensions for of in operation.results), results, strict=True)]
    splits = _splits(operation, mesh, [*named_operands, *named_results])
    gathers = operation.gathers
    if gathers is not None:
        splits |= _storage(operation, mesh, *named_operands[gathers.operand], gathers.dimensions, splits)

    def spec(names: str, *, stored: bool = False) -> PartitionSpec:
        of_dimensions = [splits[name] for name in names.split()]
        return PartitionSpec(*((of.axes or of.stored if stored else of.axes) or None for of in of_dimensions))

    reductions = [_Reduction.of(mesh, *pair, splits) for pair in zip(operation.results, results, strict=True)]
    operand_specs = [
        spec(names, stored=gathers is not None and i == gathers.operand) for i, names in enumerate(operation.operands)
    ]
    result_specs = [of.scattered(spec(names)) for (names, _), of in zip(named_results, reductions, strict=True)]
    local = operation.local(splits)
    added, to = operation.added or (None, 0)
    if added is not None:
        operand_specs[added] = result_specs[to]
        if not reductions[to].exists:
            added = None  # The local function adds it.

    def of_device(*arrays: jax.Array) -> list[jax.Array]:
        partial = local(*(array for i, array in enumerate(arrays) if i != added))
        whole = [of(result) for of, result in zip(reductions, partial, strict=True)]
        if added is not None:
            whole[to] += arrays[added].astype(whole[to].dtype)
        return [array.astype(result.dtype) for array, result in zip(whole, results, strict=True)]

    return Plan(of_device, result_specs, operand_specs)


def _splits(operation: Operation, mesh: Mesh | AbstractMesh, arrays: Sequence[tuple[str, Any]]) -> dict[str, Split]:
    """Returns how each dimension is split: as the first operand that is split along it, else as the first result.

    Axes are not free if another dimension has them already, or if a result with this dimension is split over them along
    another one.
    """
    splits = dict.fromkeys(operation.dimensions, Split())
    taken: set[str] = set()
    operands, results = arrays[: len(operation.operands)], arrays[len(operation.operands) :]
    for wanted, of in itertools.chain(*(itertools.product(operation.splittable, [of]) for of in (operands, results))):
        others = {
            axis
            for names, array in results
            if wanted in names.split()
            for dimension, name in enumerate(names.split())
            if name != wanted
            for axis in axes_of(array.sharding, dimension)
        }
        for names, array in of:
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
    """Returns the splits of the dimensions that are not split, along which the gathered operand is stored in parts.

    Args:
        operation: the operation.
        mesh: the mesh.
        names: the dimensions of the operand.
        array: its shape and sharding.
        dimensions: those along which the operation gathers it.
        splits: how the dimensions of the operation are split.
    """
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
    def of(cls, mesh: Mesh | AbstractMesh, result: Result, array: Any, splits: Mapping[str, Split]) -> "_Reduction":
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
