"""Calls of operations on sharded arrays: by plain `jax.jit`, and by the types of the arrays.

XLA cannot look into a custom call, so it would gather every operand on every device. With axes of type `Auto`, only XLA
knows how arrays are split: `jax.experimental.custom_partitioning` tells Shardy which dimensions of an operation can be,
and asks for the program of one device. With axes of type `Explicit`, the types of arrays say how they are split, and a
`jax.shard_map` runs that program.

A program on one device, and one inside `jax.shard_map` or `jax.pmap`, has no trace of all this.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import batching, mlir
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jaxlib.mlir import ir

from jax_grouped.backends.operation import Batched, Local, Operation, Result, axes_of, plan
from jax_grouped.backends.primitives import refuse_derivatives


def apply(operation: Operation, *arrays: jax.Array, like: Sequence[PartitionSpec | None] = (None,)) -> list[jax.Array]:
    """Returns the results of an operation, which XLA can split if the arrays lie on a mesh of several devices.

    Arrays whose types are sharded, over mesh axes of type `Explicit`, are split as these say. The types of the results
    are sharded as `like` says, which has a spec for each of the first results, or None where the operands leave no
    choice. If they do leave one, a ValueError is raised.
    """
    avals = [*map(jax.typeof, arrays)]
    if mesh := _explicit_mesh_of(avals, like):
        return _apply_to_types(operation, _with_devices(mesh, arrays), avals, arrays, like)
    mesh = _auto_mesh_of(avals)
    if mesh is None:
        return operation.whole(*arrays)
    results = _PARTITIONED.bind(*arrays, operation=operation, program=_program(operation, arrays))

    def constrained(x: jax.Array, result: Result) -> jax.Array:
        if not result.kept_whole:
            return x
        names = result.dimensions.split()
        entries = (PartitionSpec.UNCONSTRAINED if name in operation.splittable else None for name in names)
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*entries)))

    return [*map(constrained, results, operation.results)]


def lie_on_mesh(*arrays: jax.Array, like: Sequence[PartitionSpec | None] = ()) -> bool:
    """Tells whether an operation on the arrays can be split: JAX knows one mesh, and XLA or the types do the rest.

    The types are those of the arrays, and of results that are sharded as `like` says.
    """
    avals = [*map(jax.typeof, arrays)]
    return _explicit_mesh_of(avals, like) is not None or _auto_mesh_of(avals) is not None


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


def _explicit_mesh_of(avals: Sequence[Any], like: Sequence[PartitionSpec | None]) -> Any | None:
    """Returns the mesh of the arrays, or the one that is set, if the type of any operand or result is sharded."""
    specs = [*(aval.sharding.spec for aval in avals), *(spec for spec in like if spec is not None)]
    if not any(axes is not None for spec in specs for axes in spec):
        return None
    meshes = *(aval.sharding.mesh for aval in avals), jax.sharding.get_abstract_mesh()
    return next((mesh for mesh in meshes if {*mesh.axis_types} == {AxisType.Explicit}), None)


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
        jax.ShapeDtypeStruct(of.shape, of.dtype, sharding=NamedSharding(mesh, spec or PartitionSpec()))
        for of, spec in zip(shapes, given, strict=True)
    ]
    planned = plan(operation, mesh, avals, wanted)

    def placed(x: jax.Array, spec: PartitionSpec | None) -> jax.Array:
        return x if spec is None else jax.sharding.reshard(x, NamedSharding(mesh, spec))

    run = jax.shard_map(
        planned.of_device, mesh=mesh, in_specs=tuple(planned.operands), out_specs=planned.results, check_vma=False
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


def _auto_mesh_of(avals: Sequence[Any]) -> Any | None:
    """Returns the mesh of several devices that JAX knows for the arrays, if it leaves all axes to XLA."""
    meshes = {aval.sharding.mesh for aval in avals if not aval.sharding.mesh.empty}
    if len(meshes) > 1:  # JAX refuses to partition a program with several.
        return None
    mesh = meshes.pop() if meshes else jax.sharding.get_abstract_mesh()
    return mesh if mesh.size > 1 and {*mesh.axis_types} == {AxisType.Auto} else None


def _program(operation: Operation, arrays: Sequence[Any]) -> Any:
    """Returns the operation as a jaxpr; as a parameter, it makes JAX tell lowering rules which devices there are."""
    function = custom_partitioning(lambda *arrays: _call(operation.whole, *arrays, keeps_locations=True))
    results = [result.dimensions for result in operation.results]
    of_results = {name for result in results for name in result.split()}
    # Shardy wants them in the order in which they occur.
    contracted = [name for name in operation.dimensions if name in operation.splittable and name not in of_results]
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
        return _call(planned.of_device, *arrays, keeps_locations=False)

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
    mesh = _auto_mesh_of(avals)
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
