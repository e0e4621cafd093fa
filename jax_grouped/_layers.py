"""Code shared by the linen and NNX layers: the initialiser, the MoE computation, and requantization of kernels."""

import dataclasses
import functools
import inspect
import math
import threading
import warnings
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, ParamSpec, get_args, get_origin

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import get_opaque_trace_state
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike, DTypeLike

from jax_grouped.core.groups import FP8_ALIGNMENT
from jax_grouped.core.values import (
    apply_rule,
    as_array,
    axis_size,
    is_bound,
    promoted_type,
    static_bool,
    static_size,
    vary_alike,
)
from jax_grouped.fp8.arrays import KernelCache
from jax_grouped.fp8.recipes import DelayedScaling, Recipe, check_recipe
from jax_grouped.fp8.state import Fp8State, part_of_state
from jax_grouped.kernels.activations import Activation, is_gated
from jax_grouped.moe.experts import grouped_mlp
from jax_grouped.moe.layer import MoEMetrics, moe_mlp
from jax_grouped.moe.options import Parallel, Router, check_instance
from jax_grouped.ops import inputs
from jax_grouped.ops.dense import DenseResiduals, stacklevel_of_user
from jax_grouped.ops.inputs import Weights, flat_shape, flat_weights
from jax_grouped.ops.quantize import quantize_kernel
from jax_grouped.ops.split import grouped_dense_fwd

Initializer = Callable[..., Any]
P = ParamSpec("P")


def default_kernel_init(key: jax.Array, shape: tuple[int, ...], dtype: DTypeLike = jnp.float32) -> jax.Array:
    """Initialises every group of kernels `[E, K, ...]` as Flax's Dense does.

    Args:
        key: for the random numbers.
        shape: `(E, K, ...)`; all axes after `K` are features.
        dtype: type of the result.

    Returns:
        Random numbers of variance `1 / K`, a truncated normal distribution.

    Example:
        kernel = jg.linen.default_kernel_init(jax.random.key(0), (2, 32, 16))

        assert jnp.allclose(kernel.std(), 32**-0.5, rtol=0.1)
    """
    init = jax.nn.initializers.lecun_normal(in_axis=1, out_axis=range(2, len(shape)), batch_axis=0)
    return init(key, shape, dtype)


@dataclasses.dataclass(frozen=True)
class MoEInitializers:
    """Initialisers of the parameters of `MoEMlp`, each called with `(key, shape, param_dtype)`.

    Attributes:
        router: of the router's kernel, `[K, E]`.
        gate_up: of the first projection's kernels, also those of a shared expert.
        down: likewise of the second projection.
        bias: of all biases.

    Example:
        initializers = jg.linen.MoEInitializers(down=jax.nn.initializers.zeros)
        layer = jg.linen.MoEMlp(4, 16, jg.moe.Router(top_k=2), initializers=initializers)

        variables = layer.init(jax.random.key(0), jnp.ones((8, 32)))

        assert not variables["params"]["down"]["kernel"].any()
    """

    router: Initializer = jax.nn.initializers.lecun_normal()
    gate_up: Initializer = default_kernel_init
    down: Initializer = default_kernel_init
    bias: Initializer = jax.nn.initializers.zeros


def converted(x: jax.Array, weights: Weights, dtype: DTypeLike | None) -> jax.Array:
    """Returns tokens in the type of the computation.

    Weights stay as they are: `grouped_dense` computes in the type of `x`, and gives parameters gradients in theirs.
    """
    x = as_array("x", x)
    if dtype is None:
        return x.astype(promoted_type(x, weights.kernel))
    inputs.check_dtype("dtype", dtype)
    return x.astype(dtype)


def fwd(layer: Any, x: jax.Array, weights: Weights, group_sizes: inputs.GroupSizes) -> tuple[jax.Array, DenseResiduals]:
    """Calls `jax_grouped.grouped_dense_fwd` for the `GroupedDense` `layer` with these weights, without accumulator."""
    named = weights._asdict()
    del named["dkernel_accumulator"]
    x = converted(x, weights, layer.dtype)
    return grouped_dense_fwd(x, group_sizes=group_sizes, recipe=layer.recipe, precision=layer.precision, **named)


def num_features(x: jax.Array, shape: str) -> int:
    """Returns the size of the last axis of `x`.

    Raises unless `x` is an array with an axis. The error for a scalar says that `x` must have `shape`.
    """
    x = as_array("x", x)
    if x.ndim == 0:
        raise ValueError(f"x must have shape {shape}, got ().")
    return x.shape[-1]


def has_sharded_type(x: jax.Array) -> bool:
    """Tells whether the type of `x` is sharded, over mesh axes of type `Explicit`."""
    return any(axes is not None for axes in jax.typeof(as_array("x", x)).sharding.spec)


#: Conversions of a layer's fields, by what their annotations begin with.
_CONVERSIONS: Mapping[Any, Callable[[str, Any], Any]] = {int: static_size, bool: static_bool}


def canonical_fields(annotations: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the sizes, numbers and booleans among a layer's fields as Python's own, if a layer can be made with them.

    Raises:
        TypeError: `recipe` is not a recipe, or a field is not of its type.
        ValueError: a size is negative, or the recipe does not take that number of features.
    """
    recipe = values.get("recipe")
    check_recipe(recipe)
    fields: dict[str, Any] = {}
    for name, annotation in annotations.items():
        kinds = get_args(annotation) or (annotation,)
        convert = _CONVERSIONS.get(kinds[0])
        if convert is None or name not in values or (values[name] is None and type(None) in kinds):
            continue
        if get_origin(annotation) is tuple:
            fields[name] = tuple(convert(name, value) for value in values[name])
        else:
            fields[name] = convert(name, values[name])
    for name, size in fields.items():
        if name.endswith("features") and recipe is not None and size % FP8_ALIGNMENT:
            raise ValueError(f"{name} must be a multiple of {FP8_ALIGNMENT} with a recipe, got {size}.")
    return fields


def with_canonical_fields(init: Callable[P, None]) -> Callable[P, None]:
    """Wraps a constructor, which then gets the `canonical_fields` among its arguments."""
    signature = inspect.signature(init)
    annotations = {name: parameter.annotation for name, parameter in signature.parameters.items()}

    @functools.wraps(init)
    def checked(*args: P.args, **kwargs: P.kwargs) -> None:
        bound = signature.bind(*args, **kwargs)
        bound.arguments |= canonical_fields(annotations, bound.arguments)
        init(*bound.args, **bound.kwargs)

    return checked


def check_moe_options(router: Router, parallel: Parallel, activation: Activation, num_experts: int) -> None:
    """Checks the options of a `MoEMlp`. Warns of a router that the model's loss does not train."""
    check_instance("router", router, Router)
    check_instance("parallel", parallel, Parallel)
    inputs.check_activation_name(activation)
    if router.top_k == 1 < num_experts and router.normalize:
        warnings.warn(
            "top_k=1 with normalize=True makes every token's weight 1, whatever the router computes: only balance "
            "losses train it. Pass normalize=False, so that the model's loss does.",
            stacklevel=stacklevel_of_user(),
        )


def check_part(name: str, given: Mapping[str, Any], shape: tuple[int, ...], axes: Sequence[str | None]) -> None:
    """Raises ValueError unless the given kernel and bias are one device's part of the whole parameters."""
    split_over = [axis for axis in axes if axis is not None and is_bound(axis)]
    for parameter, part in (("kernel", shape), ("bias", (shape[0], *shape[2:]))):
        for array in jax.tree.leaves(given.get(parameter)):
            if split_over and jnp.shape(array) != part:
                raise ValueError(
                    f"{name}'s {parameter} must be this device's part, of shape {part}, got {jnp.shape(array)}: "
                    f"in_specs of jax.shard_map must split it over {split_over}."
                )


def gate_up_shape(experts: int, features: int, hidden: int, activation: Activation) -> tuple[int, ...]:
    """Returns the shape of the first projection's kernel."""
    return (experts, features, 2, hidden) if is_gated(activation) else (experts, features, hidden)


#: Names of the axes of experts, of the model's features `K` and of the experts' features `F`; None for none.
LogicalAxes = tuple[str | None, str | None, str | None]


def axis_names(logical_axes: LogicalAxes | None, activation: Activation) -> dict[str, tuple[str | None, ...]]:
    """Returns the names of the axes of each kernel and bias of `MoEMlp`; empty without names."""
    if logical_axes is None:
        return {}
    if isinstance(logical_axes, str) or not hasattr(logical_axes, "__len__") or len(logical_axes) != 3:
        raise ValueError(f"logical_axes must name the axes of experts, K and F, got {logical_axes!r}.")
    experts, features, hidden = logical_axes
    halves = (None,) if is_gated(activation) else ()
    return {
        "router": (features, None),
        "router bias": (None,),
        "selection_bias": (None,),
        "shared_gate_up": (None, features, *halves, hidden),
        "shared_down": (None, hidden, features),
        "gate_up": (experts, features, *halves, hidden),
        "gate_up bias": (experts, *halves, hidden),
        "down": (experts, hidden, features),
        "down bias": (experts, features),
    }


def apply_moe(
    layer: Any,
    options: Router,
    parallel: Parallel,
    x: jax.Array,
    router: Callable[[jax.Array], jax.Array],
    gate_up: Weights,
    down: Weights,
    selection_bias: jax.Array | None,
    shared: jax.Array | None,
    shared_expert: Sequence[Weights],
    accumulate_into: Mapping[str, jax.Array] | None,
) -> tuple[jax.Array, MoEMetrics]:
    """Applies the `MoEMlp` `layer` to tokens `[..., K]` with these options and parts.

    `shared_expert` has the weights of both projections of the layer's own shared expert, or none.
    """
    names = ["gate_up", "down", *(["shared_gate_up", "shared_down"] if shared_expert else [])]
    sums = accumulate_into or {}
    if unknown := {*sums} - {*names}:
        raise ValueError(f"accumulate_into has gradients of {', '.join(names)}, got {sorted(unknown)}.")
    gate_up, down, *shared_expert = (
        accumulating(weights, name, sums.get(name))
        for weights, name in zip((gate_up, down, *shared_expert), names, strict=True)
    )
    x = as_array("x", x)
    tokens = _as_rows(x, num_features(x, "[..., K]"))
    flat = jax.ShapeDtypeStruct(flat_shape(gate_up.kernel.shape), gate_up.kernel.dtype)
    inputs.check_kernel("gate_up", flat, "x", tokens)
    if shared is not None:
        shared = as_array("shared", shared)
        if shared.shape != x.shape:
            raise ValueError(f"shared must have the shape of x, {x.shape}, got {shared.shape}.")
        shared = _as_rows(shared, tokens.shape[1])
    rows = converted(tokens, gate_up, layer.dtype)
    if shared_expert:
        shared_gate_up, shared_down = map(flat_weights, shared_expert)
        result = grouped_mlp(
            rows,
            shared_gate_up,
            shared_down,
            jnp.array([rows.shape[0]], jnp.int32),
            activation=layer.activation,
            recipe=layer.recipe,
            precision=layer.precision,
        )
        shared = result if shared is None else shared.astype(jnp.float32) + result
    num_sequences = None
    if options.balance_sequences:
        if x.ndim < 3:
            raise ValueError(f"balance_sequences needs x of shape [..., length, K], got {x.shape}.")
        num_sequences = max(1, math.prod(x.shape[:-2]))
    y, metrics = moe_mlp(
        rows,
        router(tokens),
        gate_up,
        down,
        router=options,
        parallel=parallel,
        activation=layer.activation,
        recipe=layer.recipe,
        precision=layer.precision,
        selection_bias=selection_bias,
        num_sequences=num_sequences,
        shared=shared,
    )
    y = y.reshape(x.shape)
    return (jax.sharding.reshard(y, jax.typeof(x).sharding) if has_sharded_type(x) else y), metrics


def accumulating(weights: Weights, name: str, accumulate_into: jax.Array | None) -> Weights:
    """Returns the weights with an accumulator, if there is one. Raises ValueError unless it is like the kernel."""
    if accumulate_into is None:
        return weights
    accumulator = as_array("accumulate_into", accumulate_into)
    got, expected = ((array.shape, array.dtype.name) for array in (accumulator, weights.kernel))
    if got != expected:
        raise ValueError(f"accumulate_into must be like the kernel of {name}, {expected}, got {got}.")
    return weights._replace(dkernel_accumulator=accumulator)


def _as_rows(x: jax.Array, features: int) -> jax.Array:
    """Returns tokens `[..., K]` as `[T, K]`. In a type that is sharded, only the first axis stays so."""
    if has_sharded_type(x) and x.ndim > 2:
        sharding = jax.typeof(x).sharding
        x = jax.sharding.reshard(x, NamedSharding(sharding.mesh, PartitionSpec(sharding.spec[0])))
    return jnp.reshape(x, (-1, features))


def check_caching(
    recipe: Recipe | None, dtype: DTypeLike | None, cache_kernel: bool, is_first_microbatch: ArrayLike | None
) -> None:
    """Raises ValueError if a cache is asked for where there is nothing to cache."""
    if (cache_kernel and recipe is None and dtype is None) or (is_first_microbatch is not None and not cache_kernel):
        raise ValueError(
            "is_first_microbatch needs a layer with cache_kernel=True, and that needs a recipe, or a dtype that the "
            f"kernel is converted to: got recipe {recipe!r}, dtype {dtype}, cache_kernel {cache_kernel} and "
            f"is_first_microbatch {is_first_microbatch}."
        )


def changes_cache(is_first_microbatch: ArrayLike | None) -> bool:
    """Tells whether the program may store another cache: the flag is True, or is read on the device."""
    is_static = isinstance(is_first_microbatch, bool | np.bool_)
    return is_first_microbatch is not None and (not is_static or bool(is_first_microbatch))


def make_cache(
    kernel: jax.Array,
    recipe: Recipe | None,
    dtype: DTypeLike | None,
    fp8_state: Fp8State | None,
    *,
    stored: Any = None,
    is_first_microbatch: ArrayLike = True,
    **options: Any,
) -> KernelCache | jax.Array:
    """Quantizes the kernel, with the scales of its state if there is one, or without a recipe converts it to `dtype`.

    Returns the stored cache instead unless this is the first microbatch. It has no gradient.
    """
    kernel, stored = jax.lax.stop_gradient((kernel, stored))
    if not changes_cache(is_first_microbatch):
        return stored
    first = None
    if not isinstance(is_first_microbatch, bool | np.bool_):
        first = inputs.canonical_flag("is_first_microbatch", is_first_microbatch)
    if recipe is None:
        if first is None:
            return kernel.astype(dtype)
        kernel, stored = vary_alike(kernel, stored)
        return jax.lax.cond(first[0], lambda: kernel.astype(dtype), lambda: stored)
    scale = None
    if isinstance(recipe, DelayedScaling):
        assert fp8_state is not None
        # Convert to float32 first: Flax's type whose sum is the maximum passes through stop_gradient.
        scale = jax.lax.stop_gradient(fp8_state.astype(jnp.float32)).scales(recipe).kernel
    if first is not None:
        options |= dict(previous=stored, skip=~first)
    return quantize_kernel(kernel.reshape(*kernel.shape[:2], -1), recipe, scale=scale, **options)


def in_fp8_alone(
    cache: KernelCache,
    bias: jax.Array | None,
    state: Fp8State | None,
    param_dtype: DTypeLike,
    is_first_microbatch: ArrayLike | None,
) -> Weights:
    """Returns weights without a kernel. Raises ValueError if the flag may say to quantize it."""
    if changes_cache(is_first_microbatch):
        raise ValueError(
            f"is_first_microbatch={is_first_microbatch} quantizes the kernel, which quantize_for_inference has removed."
        )
    return Weights.from_cache(cache, bias, state, param_dtype)


def own_state(state: Fp8State | None, kernel: jax.Array, fsdp_axis: str | None) -> Fp8State | None:
    """Returns the state of this device's part of the kernel inside `jax.shard_map` over the axis, else the whole."""
    if state is None or fsdp_axis is None or not is_bound(fsdp_axis):
        return state
    return part_of_state(state, fsdp_axis, kernel.shape[0])


class _Calls(threading.local):
    """Calls of this thread, which traces alone: for each owner of states, see `state_for_call`, and path."""

    def __init__(self) -> None:
        #: The trace and the state of the last call, and the state for the next one.
        self.last: weakref.WeakKeyDictionary[Any, dict[Hashable, tuple[Any, Fp8State, Fp8State]]]
        self.last = weakref.WeakKeyDictionary()


_CALLS = _Calls()


def state_for_call(owner: Any, path: Hashable, state: Fp8State) -> Fp8State:
    """Returns the state for one call of a layer, so that the next state is the maximum over all of its calls.

    JAX adds up the gradients of an array's uses. Each call therefore uses a copy, and leaves another copy for the next
    call; the rule of `_copies` combines their gradients. `owner` lives for all calls; `path` tells its states apart.
    """
    arrays = jax.tree.leaves(state)
    # Only tracers are differentiated. Flax's type whose sum is the maximum needs no copies.
    if not all(isinstance(array, jax.core.Tracer) and array.dtype == jnp.float32 for array in arrays):
        return state
    trace = get_opaque_trace_state(convention="flax")
    calls = _CALLS.last.setdefault(owner, {})
    last_trace, last, rest = calls.get(path, (None, state, state))
    # Tracers of another trace cannot be used in this one.
    if last_trace != trace or any(a is not b for a, b in zip(arrays, jax.tree.leaves(last), strict=True)):
        rest = state
    own, rest = apply_rule(_copies, rest, None)
    calls[path] = (trace, state, rest)
    return own


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _copies(state: Fp8State, _: None) -> tuple[Fp8State, Fp8State]:
    return state, state


def _copies_forward(state: Any, _: None) -> tuple[tuple[Fp8State, Fp8State], None]:
    return _copies(jax.tree.map(lambda primal: primal.value, state), None), None


def _copies_backward(_: None, __: None, gradients: tuple[Fp8State, Fp8State]) -> tuple[Any]:
    def largest(*gradients: Any) -> Any:
        known = [x for x in gradients if not isinstance(x, jax.custom_derivatives.SymbolicZero)]
        # None stands for zero.
        return functools.reduce(jnp.maximum, known) if known else None

    return (jax.tree.map(largest, *gradients),)


_copies.defvjp(_copies_forward, _copies_backward, symbolic_zeros=True)


def local_size(name: str, size: int, axes: Sequence[str | None]) -> int:
    """Returns one device's part of `size` features or experts inside `jax.shard_map` over the axes, else `size`."""
    split_over = [axis for axis in axes if axis is not None and is_bound(axis)]
    devices = math.prod(map(axis_size, split_over))
    if size % devices:
        raise ValueError(f"{name} must be a multiple of the {devices} devices along {split_over}, got {size}.")
    return size // devices
