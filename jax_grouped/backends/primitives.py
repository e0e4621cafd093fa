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
from jax_grouped.backends import cuda, cuda_quantize, xla, xla_quantize
from jax_grouped.backends.spec import MatmulSpec, QuantizeSpec
from jax_grouped.group_layout import QuantizedLayout


def _define(
    name: str,
    results: Callable[..., Sequence[jax.ShapeDtypeStruct]],
    xla_impl: Callable[..., tuple[jax.Array, ...]],
    cuda_impl: Callable[..., tuple[jax.Array, ...]],
) -> Primitive:
    """A primitive whose implementations are functions of arrays with static keyword arguments, and return a tuple.

    Args:
        name: of the primitive, as it appears in a jaxpr.
        results: shapes and types of the results, from the abstract arguments and the keywords.
        xla_impl: lowering for platforms other than CUDA, and for CUDA if the backend is set to `xla`.
        cuda_impl: lowering for CUDA.
    """
    primitive = Primitive(f"jax_grouped_{name}")
    primitive.multiple_results = True

    def abstract_eval(first: Any, *rest: Any, backend: str, **static: Any) -> Any:
        del backend
        _refuse_sharded_types(first, *rest)

        def aval(result: jax.ShapeDtypeStruct) -> Any:
            sharding = NamedSharding(first.sharding.mesh, PartitionSpec(*(None,) * len(result.shape)))
            return first.update(shape=result.shape, dtype=result.dtype, weak_type=False, sharding=sharding)

        return [aval(result) for result in results(first, *rest, **static)]

    primitive.def_abstract_eval(abstract_eval)

    @functools.cache
    def jitted(**params: Any) -> Callable[..., list[jax.Array]]:
        return jax.jit(functools.partial(primitive.bind, **params))

    def impl(*args: jax.Array, **params: Any) -> list[jax.Array]:
        # Also under `jax.disable_jit`: a primitive has no steps that could be run one by one.
        with jax.disable_jit(False):
            return jitted(**params)(*args)

    primitive.def_impl(impl)

    def on_xla(*args: jax.Array, backend: str, **static: Any) -> tuple[jax.Array, ...]:
        del backend
        return xla_impl(*args, **static)

    def on_cuda(*args: jax.Array, backend: str, **static: Any) -> tuple[jax.Array, ...]:
        if backend == "xla":
            return xla_impl(*args, **static)
        cuda.require_usable()
        return cuda_impl(*args, **static)

    mlir.register_lowering(primitive, _lowering(on_xla))
    mlir.register_lowering(primitive, _lowering(on_cuda), platform="cuda")

    def batch(
        args: Sequence[jax.Array], axes: Sequence[int | None], **params: Any
    ) -> tuple[list[jax.Array], list[int]]:
        moved = [x if axis is None else jnp.moveaxis(x, axis, 0) for x, axis in zip(args, axes, strict=True)]
        batched = [x for x, axis in zip(moved, axes, strict=True) if axis is not None]

        def one(slices: list[jax.Array]) -> list[jax.Array]:
            remaining = iter(slices)
            full = [x if axis is None else next(remaining) for x, axis in zip(moved, axes, strict=True)]
            return primitive.bind(*full, **params)

        results = jax.lax.map(one, batched)
        return results, [0] * len(results)

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


def _lowering(implementation: Callable[..., tuple[jax.Array, ...]]) -> Callable[..., Any]:
    """A lowering rule from a plain function, which sees shapes and types only.

    Inside `jax.shard_map`, values also know the mesh axes over which they vary. That is checked by now, and the mesh is
    out of reach while a rule runs, so an implementation could make no array that varies alike.
    """
    rule = mlir.lower_fun(implementation, multiple_results=True)

    def plain(avals: Sequence[Any]) -> list[jax.core.ShapedArray]:
        return [jax.core.ShapedArray(aval.shape, aval.dtype) for aval in avals]

    def lower(ctx: mlir.LoweringRuleContext, *args: Any, **params: Any) -> Any:
        return rule(ctx.replace(avals_in=plain(ctx.avals_in), avals_out=plain(ctx.avals_out)), *args, **params)

    return lower


def _matmul_results(a: Any, b: Any, group_sizes: Any, group_offset: Any, *, spec: MatmulSpec) -> Any:
    del group_sizes, group_offset
    return [jax.ShapeDtypeStruct(spec.out_shape(a.shape, b.shape), spec.out_dtype)]


def _bias_grad_results(dy: Any, group_sizes: Any, group_offset: Any, *, num_groups: int, out_dtype: DTypeLike) -> Any:
    del group_sizes, group_offset
    return [jax.ShapeDtypeStruct((num_groups, dy.shape[1]), out_dtype)]


def _quantize_results(x: Any, *more: Any, spec: QuantizeSpec) -> Any:
    del more
    return list(spec.results(x.shape).values())


def _dequantize_results(
    data: Any, scale_inv: Any, group_sizes: Any, *, layout: QuantizedLayout, out_dtype: DTypeLike
) -> Any:
    del data, scale_inv, group_sizes
    return [jax.ShapeDtypeStruct((layout.tokens, layout.features), out_dtype)]


def _one(implementation: Callable[..., jax.Array]) -> Callable[..., tuple[jax.Array]]:
    """`implementation` with its result in a tuple."""
    return lambda *args, **static: (implementation(*args, **static),)


_matmul_p = _define("matmul", _matmul_results, _one(xla.grouped_matmul), _one(cuda.grouped_matmul))
_bias_grad_p = _define("bias_grad", _bias_grad_results, _one(xla.grouped_bias_grad), _one(cuda.grouped_bias_grad))
_quantize_p = _define("quantize", _quantize_results, xla_quantize.quantize, cuda_quantize.quantize)
_dequantize_p = _define(
    "dequantize", _dequantize_results, _one(xla_quantize.dequantize), _one(cuda_quantize.dequantize)
)


def grouped_matmul(
    a: jax.Array, b: jax.Array, group_sizes: jax.Array, group_offset: jax.Array, spec: MatmulSpec
) -> jax.Array:
    """The product that `spec` names. `a` and `b` have one floating type; sizes and offset are `int32`."""
    shape = spec.out_shape(a.shape, b.shape)
    a, b, group_sizes, group_offset = vary_alike(a, b, group_sizes, group_offset)
    if 0 in (*a.shape, *b.shape, *group_sizes.shape, *shape):
        empty = jnp.zeros(shape, spec.out_dtype)
        return vary_alike(empty, a)[0]
    return _matmul_p.bind(a, b, group_sizes, group_offset, spec=spec, backend=config.backend)[0]


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
    )[0]


def grouped_quantize(
    x: jax.Array, group_sizes: jax.Array, group_offset: jax.Array, *more: jax.Array, spec: QuantizeSpec
) -> dict[str, jax.Array]:
    """The quantization that `spec` names, of `x [T, C]`; the further operands are those of `QuantizeSpec`."""
    operands = vary_alike(x, group_sizes, group_offset, *more)
    if 0 in (*x.shape, spec.num_groups):
        nothing = xla_quantize.quantize_nothing(x, *more, spec=spec)
        results = [vary_alike(result, operands[0])[0] for result in nothing]
    else:
        results = _quantize_p.bind(*operands, spec=spec, backend=config.backend)
    return dict(zip(spec.results(x.shape), results, strict=True))


def dequantize(
    data: jax.Array, scale_inv: jax.Array, group_sizes: jax.Array, *, layout: QuantizedLayout, out_dtype: DTypeLike
) -> jax.Array:
    """`data * scale_inv` in the order of what was quantized, `[T, C]`."""
    operands = vary_alike(data, scale_inv, group_sizes)
    shape = (layout.tokens, layout.features)
    if 0 in (*shape, layout.num_groups):
        return vary_alike(jnp.zeros(shape, out_dtype), operands[0])[0]
    return _dequantize_p.bind(*operands, layout=layout, out_dtype=jnp.dtype(out_dtype), backend=config.backend)[0]
