"""JAX primitives for the operations that have a CUDA kernel.

A primitive has one lowering for CUDA, through custom calls, and one for every other platform, in plain JAX. JAX chooses
when it lowers a program, by the platform alone. So a program for a GPU can be lowered, exported and inspected on a
machine without a GPU. `jax_grouped.ops` defines the derivatives.

Under `jax.vmap` a primitive stays one call, and the batch becomes more groups. Operands and results keep their rank and
concatenate the batch elements along their first axis. `batches` gives the number of batch elements in each operand.
Every operand holds all of them, except that kernels may be fewer: each then serves a run of consecutive batch elements.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir, partial_eval
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from jax_grouped.backends import cuda, cuda_gemm, cuda_routing, extension
from jax_grouped.backends.reference import gemm as reference_gemm
from jax_grouped.backends.reference import quantize as reference_quantize
from jax_grouped.backends.reference import routing as reference_routing
from jax_grouped.backends.reference import rows as reference_rows
from jax_grouped.backends.reference import tiles as reference_tiles
from jax_grouped.backends.spec import Activation, GemmSpec, QuantizeSpec, RouteSpec, batched, grouped_pairs
from jax_grouped.core.config import config
from jax_grouped.core.varying import vary_alike
from jax_grouped.fp8.layout import QuantizedLayout

#: Rows and groups are counted in `int32`.
_COUNT_LIMIT = 2**31


def _define(
    name: str,
    results: Callable[..., Sequence[jax.ShapeDtypeStruct]],
    xla_impl: Callable[..., tuple[jax.Array, ...]],
    cuda_impl: Callable[..., tuple[jax.Array, ...]],
    *,
    shares_weights: bool = False,
    dce_rule: Callable[..., Any] | None = None,
) -> Primitive:
    """Returns a primitive with a list of results. Bind it with the parameters from `common_params` and its own.

    Args:
        name: name of the primitive in a jaxpr.
        results: returns shapes and types of the results of one batch element, from its abstract operands and the
            keywords.
        xla_impl: lowering of one batch element for platforms other than CUDA, and for CUDA if the backend is set to
            `xla`.
        cuda_impl: lowering for CUDA of `batch` batch elements.
        shares_weights: whether the static `spec` names operands that are kernels, which several batch elements can
            share.
        dce_rule: reduces an equation to the results that are read; without it, an equation stays whole or goes.
    """
    primitive = Primitive(f"jax_grouped_{name}")
    primitive.multiple_results = True

    def abstract_eval(*operands: Any, backend: str, batches: tuple[int, ...], **static: Any) -> Any:
        del backend
        _refuse_sharded_types(*operands)
        slices = [
            jax.ShapeDtypeStruct((x.shape[0] // count, *x.shape[1:]), x.dtype)
            for x, count in zip(operands, batches, strict=True)
        ]
        structs = [batched(result, batches[0]) for result in results(*slices, **static)]
        if batches[0] != 1:
            _refuse_large_batches(batches[0], *operands, *structs)
        first = operands[0]

        def aval(result: jax.ShapeDtypeStruct) -> Any:
            sharding = NamedSharding(first.sharding.mesh, PartitionSpec(*(None,) * len(result.shape)))
            return first.update(shape=result.shape, dtype=result.dtype, weak_type=False, sharding=sharding)

        return [aval(result) for result in structs]

    primitive.def_abstract_eval(abstract_eval)

    @functools.cache
    def jitted(**params: Any) -> Callable[..., list[jax.Array]]:
        return jax.jit(functools.partial(primitive.bind, **params))

    def impl(*args: jax.Array, **params: Any) -> list[jax.Array]:
        # Keep jit on under `jax.disable_jit`: a primitive has no steps that could be run one by one.
        with jax.disable_jit(False):
            return jitted(**params)(*args)

    primitive.def_impl(impl)

    refuse_derivatives(primitive)

    @functools.cache
    def on_xla_once(**static: Any) -> Callable[..., tuple[jax.Array, ...]]:
        # `jit` lets JAX trace the implementation once for all programs with operands of these shapes.
        return jax.jit(functools.partial(xla_impl, **static))

    def on_xla(*args: jax.Array, backend: str, batches: tuple[int, ...], **static: Any) -> tuple[jax.Array, ...]:
        del backend
        batch = batches[0]
        if batch == 1:
            return on_xla_once(**static)(*args)

        def one(element: jax.Array) -> tuple[jax.Array, ...]:
            slices = (
                jax.lax.dynamic_index_in_dim(_unfold(x, count), element // (batch // count), keepdims=False)
                for x, count in zip(args, batches, strict=True)
            )
            return on_xla_once(**static)(*slices)

        return tuple(_fold(result) for result in jax.lax.map(one, jnp.arange(batch, dtype=jnp.int32)))

    def on_cuda(*, backend: str, batches: tuple[int, ...], **static: Any) -> Callable[..., tuple[jax.Array, ...]]:
        if backend == "xla":
            return functools.partial(on_xla, backend=backend, batches=batches, **static)
        cuda.require_usable()
        cuda.check_batch(batches[0])
        if getattr(static.get("spec"), "autotune", False):
            extension.keep_tuned_algorithms()
        return functools.partial(cuda_impl, batch=batches[0], **static)

    mlir.register_lowering(primitive, _lowering(lambda **params: functools.partial(on_xla, **params)))
    mlir.register_lowering(primitive, _lowering(on_cuda), platform="cuda")

    def batching_rule(
        args: Sequence[jax.Array], axes: Sequence[int | None], *, batches: tuple[int, ...], **params: Any
    ) -> tuple[list[jax.Array], list[int]]:
        size = next(x.shape[axis] for x, axis in zip(args, axes, strict=True) if axis is not None)
        if size == 0:
            return _nothing(functools.partial(primitive.bind, batches=batches, **params), args, axes)
        weights = params["spec"].weight_operands if shares_weights else ()
        # Data and scales of weights must have one batch size: share both or neither.
        shared = all(axes[i] is None and batches[i] == 1 for i in weights)
        operands, counts = [], []
        for i, (x, axis, count) in enumerate(zip(args, axes, batches, strict=True)):
            if shared and i in weights:
                operands.append(x)
                counts.append(1)
            else:
                elements = jnp.broadcast_to(x, (size, *x.shape)) if axis is None else jnp.moveaxis(x, axis, 0)
                operands.append(_fold(elements))
                counts.append(size * count)
        results = primitive.bind(*operands, batches=tuple(counts), **params)
        return [_unfold(result, size) for result in results], [0] * len(results)

    batching.primitive_batchers[primitive] = batching_rule
    if dce_rule is not None:
        partial_eval.dce_rules[primitive] = dce_rule

    return primitive


def refuse_derivatives(primitive: Primitive) -> None:
    """Makes the primitive raise when it is differentiated."""

    def jvp(*_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(
            f"{primitive.name} has no derivative of its own: ragged_dot and grouped_dense have gradients, in reverse "
            "mode, which are of first order with a recipe or a dkernel_accumulator; quantization has none."
        )

    ad.primitive_jvps[primitive] = jvp


def common_params(operands: Sequence[jax.Array]) -> dict[str, Any]:
    """Returns the parameters that all primitives have, for operands without a batch."""
    return dict(backend=config.backend, batches=(1,) * len(operands))


def _fold(x: jax.Array) -> jax.Array:
    """Reshapes `[B, L, ...] -> [B * L, ...]`."""
    return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])


def _unfold(x: jax.Array, batch: int) -> jax.Array:
    """Reshapes `[B * L, ...] -> [B, L, ...]`."""
    return x.reshape(batch, x.shape[0] // batch, *x.shape[1:])


def _nothing(
    function: Callable[..., list[jax.Array]], args: Sequence[jax.Array], axes: Sequence[int | None]
) -> tuple[list[jax.Array], list[int]]:
    """Returns the results of an empty batch, and their batch axes."""
    slices = [
        jax.ShapeDtypeStruct(x.shape if axis is None else x.shape[:axis] + x.shape[axis + 1 :], x.dtype)
        for x, axis in zip(args, axes, strict=True)
    ]
    results = [jnp.zeros((0, *result.shape), result.dtype) for result in jax.eval_shape(function, *slices)]
    return [vary_alike(result, args[0])[0] for result in results], [0] * len(results)


def _refuse_large_batches(batch: int, *avals: Any) -> None:
    """Raises if the batch has more rows or groups than int32 can count."""
    for aval in avals:
        # Other one-dimensional arrays hold elements, not rows or groups. A dimension may be symbolic in an export.
        counts = len(aval.shape) > 1 or jnp.issubdtype(aval.dtype, jnp.integer)
        if counts and isinstance(aval.shape[0], int) and aval.shape[0] >= _COUNT_LIMIT:
            raise ValueError(
                f"jax.vmap over {batch} calls of jax_grouped makes one with {aval.shape[0]} rows or groups, which must "
                "be fewer than 2^31: use jax.vmap over fewer, or jax.lax.map."
            )


def _refuse_sharded_types(*avals: Any) -> None:
    """Raises if an argument's type carries a sharding, as on a mesh with explicit axes."""
    for aval in avals:
        if any(axis is not None for axis in aval.sharding.spec):
            raise ValueError(
                f"jax_grouped takes no array whose type is sharded over explicit mesh axes, got {aval}: "
                "call it inside jax.shard_map, where every device sees its own rows."
            )


def _lowering(choose: Callable[..., Callable[..., tuple[jax.Array, ...]]]) -> Callable[..., Any]:
    """Returns a lowering rule from `choose`, a function that picks the implementation by the parameters.

    The implementation sees shapes and types only. Inside `jax.shard_map`, avals also carry the mesh axes over which
    values vary. JAX has already checked these axes, and the rule drops them: it has no access to the mesh, so the
    implementation could not create arrays that vary over them.
    """

    def plain(avals: Sequence[Any]) -> list[jax.core.ShapedArray]:
        return [jax.core.ShapedArray(aval.shape, aval.dtype) for aval in avals]

    def lower(ctx: mlir.LoweringRuleContext, *args: Any, **params: Any) -> Any:
        rule = mlir.lower_fun(choose(**params), multiple_results=True)
        return rule(ctx.replace(avals_in=plain(ctx.avals_in), avals_out=plain(ctx.avals_out)), *args)

    return lower


def _gemm_results(a: Any, b: Any, group_sizes: Any, group_offset: Any, *more: Any, spec: GemmSpec) -> Any:
    del group_sizes, group_offset
    return [spec.out(a.shape, b.shape, *(operand.shape for operand in more[:1] if spec.gathered))]


def _bias_grad_results(dy: Any, group_sizes: Any, group_offset: Any, *, num_groups: int, out_dtype: DTypeLike) -> Any:
    del group_sizes, group_offset
    return [jax.ShapeDtypeStruct((num_groups, dy.shape[1]), out_dtype)]


def _activation_grad_results(x: Any, da: Any, weights: Any, *order: Any, activation: Activation) -> Any:
    del weights, order, activation
    inner_products = jax.ShapeDtypeStruct(da.shape[:1], jnp.float32)
    return [*(jax.ShapeDtypeStruct(of.shape, of.dtype) for of in (x, da)), inner_products]


def _permute_rows_results(x: Any, order: Any, inverse: Any, *, zero_tail: bool) -> Any:
    del inverse, zero_tail
    return [jax.ShapeDtypeStruct((order.shape[0], *x.shape[1:]), x.dtype)]


def _sum_rows_results(rows: Any, inverse: Any, *weights: Any) -> Any:
    del weights
    return [jax.ShapeDtypeStruct((inverse.shape[0], rows.shape[1]), rows.dtype)]


def _route_results(logits: Any, *bias: Any, spec: RouteSpec) -> Any:
    del bias
    return spec.results(logits.shape)


def _group_pairs_results(experts: Any, *, num_experts: int, rows: int) -> Any:
    return grouped_pairs(experts.shape, num_experts, rows)


def _route_and_group_results(logits: Any, *bias: Any, spec: RouteSpec, rows: int) -> Any:
    del bias
    tokens, num_experts = logits.shape
    of_experts = [jax.ShapeDtypeStruct((num_experts,), dtype) for dtype in (jnp.int32, jnp.float32)]
    return [*spec.results(logits.shape), *grouped_pairs((tokens, spec.top_k), num_experts, rows), *of_experts]


def _quantize_results(x: Any, *more: Any, spec: QuantizeSpec) -> Any:
    del more
    return list(spec.results(x.shape).values())


def _quantize_permuted_results(x: Any, *more: Any, spec: QuantizeSpec) -> Any:
    del more
    return spec.permuted_results(x.shape)


def _drop_unread_results(read: Sequence[bool], *inputs_and_equation: Any) -> tuple[list[bool], Any]:
    """Drops orientations, sums and copies of activations' results that no product reads.

    Differentiation rules ask for everything that any gradient needs, and under `jax.checkpoint` both passes quantize.
    """
    equation = inputs_and_equation[-1]  # Since JAX 0.12, the flags of live inputs come before it.
    spec, shape = equation.params["spec"], equation.invars[0].aval.shape
    if not any(read):
        return [False] * len(equation.invars), None
    if spec.cached:  # Its previous results are operands.
        return [True] * len(equation.invars), equation
    results = dict(zip(spec.results(shape), equation.outvars, strict=True))
    names = [name for name, is_read in zip(results, read, strict=True) if is_read]
    if all(name.startswith("activated") for name in names):
        return _quantize_activation_alone(results, equation)
    rowwise, columnwise = (any(name.startswith(side) for name in names) for side in ("row", "column"))
    if not rowwise and not columnwise:
        rowwise, columnwise = spec.rowwise, not spec.rowwise
    more = {name: name in names for name in ("dbias", "inner_products")}
    activated = spec.activated and any(name.startswith("activated") for name in names)
    # The scale that the activation's result is given is the last operand.
    dropped = int(spec.activated and spec.given_scale and not activated)
    kept = len(equation.invars) - dropped
    spec = dataclasses.replace(spec, rowwise=rowwise, columnwise=columnwise, activated=activated, **more)
    made = [results[name] for name in spec.results(shape)]
    params = {**equation.params, "spec": spec, "batches": equation.params["batches"][:kept]}
    reduced = equation.replace(invars=equation.invars[:kept], outvars=made, params=params)
    return [True] * kept + [False] * dropped, reduced


def _quantize_activation_alone(results: dict[str, Any], equation: Any) -> tuple[list[bool], Any]:
    """Quantizes an activation's result in the forward form, which reads no gradient, in place of a backward form."""
    spec, batches = equation.params["spec"], equation.params["batches"]
    activation_input = 3 + spec.given_scale
    kept = [activation_input, 1, 2]
    if spec.given_scale:
        kept.append(len(equation.invars) - 1)
    if spec.weighted:
        kept.append(activation_input + 1)
    params = {**equation.params, "spec": spec.of_activation(), "batches": tuple(batches[i] for i in kept)}
    made = [results[f"activated_{name}"] for name in ("data", "scale", "amax")]
    alone = equation.replace(invars=[equation.invars[i] for i in kept], outvars=made, params=params)
    return [i in kept for i in range(len(equation.invars))], alone


def _dequantize_results(
    data: Any, scale_inv: Any, group_sizes: Any, *, layout: QuantizedLayout, out_dtype: DTypeLike
) -> Any:
    del data, scale_inv, group_sizes
    return [jax.ShapeDtypeStruct((layout.tokens, layout.features), out_dtype)]


def _one(implementation: Callable[..., jax.Array]) -> Callable[..., tuple[jax.Array]]:
    """Wraps the implementation's result in a tuple."""
    return lambda *args, **static: (implementation(*args, **static),)


#: `(a, b, group_sizes, group_offset, *scales, *more) -> [out]` with a `GemmSpec`, which defines `more`.
GEMM = _define(
    "gemm", _gemm_results, _one(reference_gemm.grouped_gemm), _one(cuda_gemm.grouped_gemm), shares_weights=True
)
#: `(dy, group_sizes, group_offset) -> [dbias]` with `num_groups` and `out_dtype`.
BIAS_GRAD = _define(
    "bias_grad", _bias_grad_results, _one(reference_tiles.grouped_bias_grad), _one(cuda.grouped_bias_grad)
)
#: `(x, da, weights, *order) -> [dx, weighted, inner_products]` with `activation`, and an order or none.
ACTIVATION_GRAD = _define(
    "activation_grad", _activation_grad_results, reference_rows.activation_grad, cuda.activation_grad
)
#: `(x, order, inverse) -> [rows]` with `zero_tail`.
PERMUTE_ROWS = _define("permute_rows", _permute_rows_results, _one(reference_rows.permute), _one(cuda.permute_rows))
#: `(rows, inverse, *weights) -> [sums]`, with weights or without.
SUM_ROWS = _define("sum_rows", _sum_rows_results, _one(reference_rows.sum_rows), _one(cuda.sum_rows))
#: `(logits, *bias) -> [experts, weights, probabilities]` with a `RouteSpec`, which describes them.
ROUTE = _define("route", _route_results, reference_routing.route, cuda_routing.route)
#: `(experts) -> [order, inverse, group_sizes, dropped]` with `num_experts` and `rows`.
GROUP_PAIRS = _define("group_pairs", _group_pairs_results, reference_routing.group_pairs, cuda_routing.group_pairs)
#: `(logits, *bias) -> [*route, *group_pairs, expert_load, probability_sums]` with a `RouteSpec` and `rows`.
ROUTE_AND_GROUP = _define(
    "route_and_group", _route_and_group_results, reference_routing.route_and_group, cuda_routing.route_and_group
)
#: `(x, group_sizes, group_offset, *more) -> results` with a `QuantizeSpec`, which defines `more` and `results`.
QUANTIZE = _define(
    "quantize", _quantize_results, reference_quantize.quantize, cuda.quantize, dce_rule=_drop_unread_results
)
#: `(x, order, inverse, group_sizes, group_offset, *more) -> [row_data, row_scale, *amax]` with a `QuantizeSpec`.
QUANTIZE_PERMUTED = _define(
    "quantize_permuted", _quantize_permuted_results, reference_quantize.quantize_permuted, cuda.quantize_permuted
)
#: `(data, scale_inv, group_sizes) -> [x]` with `layout` and `out_dtype`.
DEQUANTIZE = _define("dequantize", _dequantize_results, _one(reference_quantize.dequantize), _one(cuda.dequantize))
