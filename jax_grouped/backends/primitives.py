"""JAX primitives for the operations that have a CUDA kernel.

A primitive has one lowering for CUDA, through custom calls, and one for every other platform, in plain JAX. The choice
falls when a program is lowered and looks at nothing but the platform, so a program for a GPU can be lowered, exported
and inspected on a machine that has none. Derivatives are not defined here: `jax_grouped.matmul` has them.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from jax_grouped._config import config
from jax_grouped._varying import vary_alike
from jax_grouped.backends import cuda, xla
from jax_grouped.backends.spec import MatmulSpec


def _define(
    name: str,
    out_aval: Callable[..., tuple[tuple[int, ...], DTypeLike]],
    xla_impl: Callable[..., jax.Array],
    cuda_impl: Callable[..., jax.Array],
) -> Primitive:
    """A primitive with one result, whose implementations are functions of arrays with static keyword arguments.

    Args:
        name: of the primitive, as it appears in a jaxpr.
        out_aval: shape and type of the result, from the abstract arguments and the keywords.
        xla_impl: lowering for platforms other than CUDA, and for CUDA if the backend is set to `xla`.
        cuda_impl: lowering for CUDA.
    """
    primitive = Primitive(f"jax_grouped_{name}")

    def abstract_eval(first: Any, *rest: Any, backend: str, **static: Any) -> Any:
        del backend
        _refuse_sharded_types(first, *rest)
        shape, dtype = out_aval(first, *rest, **static)
        sharding = NamedSharding(first.sharding.mesh, PartitionSpec(*(None,) * len(shape)))
        return first.update(shape=shape, dtype=jnp.dtype(dtype), weak_type=False, sharding=sharding)

    primitive.def_abstract_eval(abstract_eval)

    @functools.cache
    def jitted(**params: Any) -> Callable[..., jax.Array]:
        return jax.jit(functools.partial(primitive.bind, **params))

    def impl(*args: jax.Array, **params: Any) -> jax.Array:
        # Also under `jax.disable_jit`: a primitive has no steps that could be run one by one.
        with jax.disable_jit(False):
            return jitted(**params)(*args)

    primitive.def_impl(impl)

    def on_xla(*args: jax.Array, backend: str, **static: Any) -> jax.Array:
        del backend
        return xla_impl(*args, **static)

    def on_cuda(*args: jax.Array, backend: str, **static: Any) -> jax.Array:
        if backend == "xla":
            return xla_impl(*args, **static)
        cuda.require_usable()
        return cuda_impl(*args, **static)

    mlir.register_lowering(primitive, _lowering(on_xla))
    mlir.register_lowering(primitive, _lowering(on_cuda), platform="cuda")

    def batch(args: Sequence[jax.Array], axes: Sequence[int | None], **params: Any) -> tuple[jax.Array, int]:
        moved = [x if axis is None else jnp.moveaxis(x, axis, 0) for x, axis in zip(args, axes, strict=True)]
        batched = [x for x, axis in zip(moved, axes, strict=True) if axis is not None]

        def one(slices: list[jax.Array]) -> jax.Array:
            remaining = iter(slices)
            full = [x if axis is None else next(remaining) for x, axis in zip(moved, axes, strict=True)]
            return primitive.bind(*full, **params)

        return jax.lax.map(one, batched), 0

    batching.primitive_batchers[primitive] = batch
    return primitive


def _refuse_sharded_types(*avals: Any) -> None:
    """Raises if an argument's type says how it is sharded, as on a mesh with explicit axes."""
    for aval in avals:
        if any(axis is not None for axis in aval.sharding.spec):
            raise ValueError(
                f"jax_grouped takes no array whose type is sharded over explicit mesh axes, got {aval}: "
                "call it inside jax.shard_map, where every device sees its own rows."
            )


def _lowering(implementation: Callable[..., jax.Array]) -> Callable[..., Any]:
    """A lowering rule from a plain function, which sees shapes and types only.

    Inside `jax.shard_map`, values also know the mesh axes over which they vary. That is checked by now, and the mesh is
    out of reach while a rule runs, so an implementation could make no array that varies alike.
    """
    rule = mlir.lower_fun(implementation, multiple_results=False)

    def plain(avals: Sequence[Any]) -> list[jax.core.ShapedArray]:
        return [jax.core.ShapedArray(aval.shape, aval.dtype) for aval in avals]

    def lower(ctx: mlir.LoweringRuleContext, *args: Any, **params: Any) -> Any:
        return rule(ctx.replace(avals_in=plain(ctx.avals_in), avals_out=plain(ctx.avals_out)), *args, **params)

    return lower


def _matmul_aval(a: Any, b: Any, group_sizes: Any, group_offset: Any, *, spec: MatmulSpec) -> Any:
    del group_sizes, group_offset
    return spec.out_shape(a.shape, b.shape), spec.out_dtype


def _bias_grad_aval(dy: Any, group_sizes: Any, group_offset: Any, *, num_groups: int, out_dtype: DTypeLike) -> Any:
    del group_sizes, group_offset
    return (num_groups, dy.shape[1]), out_dtype


_matmul_p = _define("matmul", _matmul_aval, xla.grouped_matmul, cuda.grouped_matmul)
_bias_grad_p = _define("bias_grad", _bias_grad_aval, xla.grouped_bias_grad, cuda.grouped_bias_grad)


def grouped_matmul(
    a: jax.Array, b: jax.Array, group_sizes: jax.Array, group_offset: jax.Array, spec: MatmulSpec
) -> jax.Array:
    """The product that `spec` names. `a` and `b` have one floating type; sizes and offset are `int32`."""
    shape = spec.out_shape(a.shape, b.shape)
    a, b, group_sizes, group_offset = vary_alike(a, b, group_sizes, group_offset)
    if 0 in (*a.shape, *b.shape, *group_sizes.shape, *shape):
        empty = jnp.zeros(shape, spec.out_dtype)
        return vary_alike(empty, a)[0]
    return _matmul_p.bind(a, b, group_sizes, group_offset, spec=spec, backend=config.backend)


def grouped_bias_grad(
    dy: jax.Array, group_sizes: jax.Array, group_offset: jax.Array, num_groups: int, out_dtype: DTypeLike
) -> jax.Array:
    """The sum of each group's rows, accumulated in float32: `[T, N] -> [num_groups, N]`."""
    dy, group_sizes, group_offset = vary_alike(dy, group_sizes, group_offset)
    if 0 in (*dy.shape, *group_sizes.shape, num_groups):
        empty = jnp.zeros((num_groups, dy.shape[1]), out_dtype)
        return vary_alike(empty, dy)[0]
    return _bias_grad_p.bind(
        dy, group_sizes, group_offset, num_groups=num_groups, out_dtype=jnp.dtype(out_dtype), backend=config.backend
    )
