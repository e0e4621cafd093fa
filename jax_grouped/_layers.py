"""Code that the linen and NNX layers share: checks of options, shapes, calls of the products, caches, states."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import threading
import warnings
import weakref
from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple, ParamSpec, TypeVar

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
    as_int32,
    canonical_dtype,
    check_type,
    is_bound,
    promoted_type,
    repr_of_changes,
    shown,
    static_bool,
    static_number,
    static_size,
    vary_alike,
)
from jax_grouped.fp8.arrays import KernelCache
from jax_grouped.fp8.recipes import DelayedScaling, Recipe, recipe_error
from jax_grouped.fp8.state import Fp8State, part_of_state
from jax_grouped.kernels.activations import Activation, is_gated
from jax_grouped.moe.experts import grouped_mlp
from jax_grouped.moe.layer import MoEMetrics, moe_mlp
from jax_grouped.moe.parallel import Parallel
from jax_grouped.moe.routing import Router, Routing, checked_mask, masked
from jax_grouped.ops import inputs
from jax_grouped.ops.dense import grouped_dense, stacklevel_of_user
from jax_grouped.ops.inputs import Lora, Weights, flat_shape, flat_weights
from jax_grouped.ops.quantize import quantize_kernel

Initializer = Callable[..., Any]
P = ParamSpec("P")
T = TypeVar("T")
#: Draws uniform numbers between `-1 / sqrt(K)` and `1 / sqrt(K)`, as PEFT does, for `a` of adapters.
_default_a_init = jax.nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform", 1, 2, 0)
#: Names of the axes of experts, of the model's features `K` and of the experts' features `F`; None for none.
LogicalAxes = tuple[str | None, str | None, str | None]


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
        down: of the second projection's kernels, also those of a shared expert.
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

    __repr__ = repr_of_changes


@dataclasses.dataclass(frozen=True)
class LoraConfig:
    """Adapters of low rank on the kernels of a layer (arXiv:2106.09685), each a `jax_grouped.Lora`.

    Attributes:
        rank: `r`, such as 16.
        scale: factor of the adapters' products; `lora_alpha / r` of PEFT.
        a_init: initialiser of `a`, called with `(key, (E, K, r), param_dtype)`. The default is that of PEFT: uniform
            between `-1 / sqrt(K)` and `1 / sqrt(K)`.
        b_init: initialiser of `b`, `(E, r, ...)`. By default the adapters add nothing at first.

    Raises:
        TypeError, ValueError: `rank` is no positive integer, or `scale` no finite number.

    Example:
        lora = jg.linen.LoraConfig(rank=4, scale=2.0)
        layer = jg.linen.GroupedDense(16, num_groups=2, lora=lora)

        variables = layer.init(jax.random.key(0), jnp.ones((8, 32)), jnp.array([5, 3]))

        assert variables["lora"]["lora_a"].shape == (2, 32, 4) and not variables["lora"]["lora_b"].any()
    """

    rank: int
    scale: float = 1.0
    a_init: Initializer = _default_a_init
    b_init: Initializer = jax.nn.initializers.zeros

    def __post_init__(self) -> None:
        object.__setattr__(self, "rank", static_size("rank", self.rank, least=1))
        object.__setattr__(self, "scale", static_number("scale", self.scale))
        if not math.isfinite(self.scale):
            raise ValueError(f"scale must be finite, got {self.scale}.")

    def shapes(self, kernel: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns the shapes of `a` and `b` for a kernel of this shape."""
        return (*kernel[:2], self.rank), (kernel[0], self.rank, *kernel[2:])

    def adapter(self, a: jax.Array, b: jax.Array, kernel: tuple[int, ...]) -> Lora:
        """Returns the adapter of these parameters. Raises ValueError unless they have the shapes for a kernel."""
        if (shapes := (a.shape, b.shape)) != self.shapes(kernel):
            raise ValueError(f"lora_a and lora_b must have shapes {self.shapes(kernel)}, got {shapes}.")
        return Lora(a, b if self.scale == 1 else b * self.scale)


#: Fields of the layers that are sizes.
_SIZES = ("features", "in_features", "out_features", "hidden_features", "shared_features", "num_groups", "num_experts")


def make_canonical(fields: dict[str, Any]) -> None:
    """Converts the sizes and flags among a layer's fields to Python's own numbers.

    Raises unless these and `recipe` and `dtype` have their types, the recipe takes the numbers of features, and
    `cache_kernel` has something to cache.
    """
    recipe, dtype = fields.get("recipe"), fields.get("dtype")
    if not isinstance(recipe, Recipe | None):
        raise recipe_error(recipe)
    if not isinstance(fields.get("lora"), LoraConfig | None):
        raise TypeError(f"lora must be a LoraConfig or None, got {shown(fields['lora'])}.")
    if dtype is not None:
        canonical_dtype("dtype", dtype)
    for name, value in list(fields.items()):
        if name in ("use_bias", "cache_kernel", "use_shared_gate", "sow_metrics"):
            fields[name] = static_bool(name, value)
        elif name == "shape":
            fields[name] = tuple([static_size(name, size) for size in value])
        elif name in _SIZES and (value is not None or name != "shared_features"):
            fields[name] = size = static_size(name, value)
            if recipe is not None and name.endswith("features") and size % FP8_ALIGNMENT:
                raise ValueError(f"{name} must be a multiple of {FP8_ALIGNMENT} with a recipe, got {size}.")
    if fields.get("use_shared_gate") and fields.get("shared_features") is None:
        raise ValueError("use_shared_gate=True needs shared_features.")
    if fields.get("cache_kernel") and recipe is None and dtype is None:
        raise ValueError("cache_kernel=True needs a recipe, or a dtype that the kernel is converted to.")


def with_canonical_arguments(init: Callable[P, None]) -> Callable[P, None]:
    """Wraps a constructor, which then gets its arguments as `make_canonical` leaves them."""
    signature = inspect.signature(init)

    @functools.wraps(init)
    def checked(*args: P.args, **kwargs: P.kwargs) -> None:
        bound = signature.bind(*args, **kwargs)
        make_canonical(bound.arguments)
        init(*bound.args, **bound.kwargs)

    return checked


def check_moe_options(
    router: Router, parallel: Parallel, activation: Activation, num_experts: int, logical_axes: LogicalAxes | None
) -> None:
    """Checks the options of a `MoEMlp`. Warns of a router that the model's loss does not train."""
    check_type("router", router, Router)
    check_type("parallel", parallel, Parallel)
    inputs.check_activation_name(activation)
    if logical_axes is not None and (
        isinstance(logical_axes, str) or not hasattr(logical_axes, "__len__") or len(logical_axes) != 3
    ):
        raise ValueError(f"logical_axes must name the axes of experts, K and F, got {logical_axes!r}.")
    if router.top_k == 1 < num_experts and router.normalize:
        warnings.warn(
            "top_k=1 with normalize=True makes every token's weight 1, whatever the router computes: only balance "
            "losses train it. Pass normalize=False, so that the model's loss does.",
            stacklevel=stacklevel_of_user(),
        )


class KernelForm(NamedTuple):
    """Shape of a stack of kernels of a `MoEMlp`, and the names of its axes. A bias lacks the second axis."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    #: Whether it is that of an expert that all tokens share: the same on all devices, and without a bias.
    is_shared: bool


def kernel_forms(
    layer: Any, features: int, parallel: Parallel, logical_axes: LogicalAxes | None, given: Mapping[str, Any]
) -> dict[str, KernelForm]:
    """Returns the forms of the kernels of a `MoEMlp` by name; inside `jax.shard_map`, those of this device's parts.

    Raises ValueError unless the axes of `parallel` split the sizes evenly, and the `given` parameters are such parts.
    """
    sizes, bound = [], []
    for name, axes in (("num_experts", parallel.storage_axes), ("hidden_features", (parallel.features,))):
        split_over = [axis for axis in axes if axis is not None and is_bound(axis)]
        devices = math.prod([jax.lax.axis_size(axis) for axis in split_over])
        size = getattr(layer, name)
        if size % devices:
            raise ValueError(f"{name} must be a multiple of the {devices} devices along {split_over}, got {size}.")
        sizes.append(size // devices)
        bound += split_over
    experts_name, features_name, hidden_name = logical_axes or (None, None, None)
    expert, feature, hidden = (sizes[0], experts_name), (features, features_name), (sizes[1], hidden_name)
    halves = [(2, None)] if is_gated(layer.activation) else []
    stacks: dict[str, Any] = {"gate_up": [expert, feature, *halves, hidden], "down": [expert, hidden, feature]}
    if layer.shared_features is not None:
        one, shared = (1, None), (layer.shared_features, hidden_name)
        stacks |= {"shared_gate_up": [one, feature, *halves, shared], "shared_down": [one, shared, feature]}
    forms = {}
    for name, stack in stacks.items():
        shape, names = zip(*stack, strict=True)
        forms[name] = form = KernelForm(shape, names, name.startswith("shared"))
        for parameter, part in (("kernel", shape), ("bias", (shape[0], *shape[2:]))):
            for array in jax.tree.leaves(given.get(name, {}).get(parameter)):
                if bound and not form.is_shared and jnp.shape(array) != part:
                    raise ValueError(
                        f"{name}'s {parameter} must be this device's part, of shape {part}, got {jnp.shape(array)}: "
                        f"in_specs of jax.shard_map must split it over {bound}, in this order."
                    )
    return forms


def apply_dense(
    layer: Any,
    product: Callable[..., T],
    x: jax.Array,
    weights: Weights,
    group_sizes: inputs.GroupSizes,
    accumulate_into: jax.Array | None = None,
) -> T:
    """Calls `grouped_dense` or `grouped_dense_fwd` for the `GroupedDense` `layer` with these weights."""
    if accumulate_into is not None:
        weights = with_accumulator(weights, "GroupedDense", accumulate_into)
    # Without those that are None: `grouped_dense_fwd` takes no accumulator.
    named = {name: array for name, array in weights._asdict().items() if array is not None}
    if product is not grouped_dense and "lora" in named:
        raise ValueError("fwd takes no adapters: call the layer.")
    x = as_array("x", x)
    # Weights keep their types: `grouped_dense` computes in that of `x`, and gives parameters gradients in theirs.
    x = x.astype(promoted_type(x, weights.kernel) if layer.dtype is None else layer.dtype)
    return product(x, group_sizes=group_sizes, recipe=layer.recipe, precision=layer.precision, **named)


def apply_moe(
    layer: Any,
    router: Router,
    parallel: Parallel,
    x: jax.Array,
    weights: dict[str, Weights],
    accumulate_into: Mapping[str, jax.Array] | None,
    *,
    routing: jax.Array | Routing | Callable[[jax.Array], Any] | None,
    shared_gate: Callable[[jax.Array], jax.Array] | None,
    selection_bias: jax.Array | None,
    own_bias: jax.Array | None,
    experts: jax.Array | None,
    mask: jax.Array | None,
    jitter_key: jax.Array | None,
    shared: jax.Array | None,
) -> tuple[jax.Array, MoEMetrics]:
    """Applies the `MoEMlp` `layer` to tokens `[..., K]` with these options and weights, named as in `kernel_forms`."""
    if routing is None:
        raise ValueError("A router with use_kernel=False has no kernel: pass routing.")
    sums = {} if accumulate_into is None else accumulate_into
    if not isinstance(sums, Mapping):
        raise TypeError(f"accumulate_into must be a mapping such as {{'down': gradient}}, got {type(sums).__name__}.")
    if unknown := {*sums} - {*weights}:
        raise ValueError(f"accumulate_into takes gradients of {', '.join(weights)}, got {sorted(unknown)}.")
    for name, total in sums.items():
        if total is not None:
            weights[name] = with_accumulator(weights[name], name, total)
    gate_up, down, *shared_expert = weights.values()
    x = as_array("x", x)
    if x.ndim == 0:
        raise ValueError("x must have shape [..., K], got ().")
    if shared is not None:
        shared = as_array("shared", shared)
        if shared.shape != x.shape:
            raise ValueError(f"shared must have the shape of x, {x.shape}, got {shared.shape}.")
    tokens = _as_rows(x)

    def checked_rows(name: str, array: jax.Array | None) -> Any:
        if array is None:
            return None
        if array.shape[:-1] != x.shape[:-1]:
            raise ValueError(f"{name} must have the leading shape of x, {x.shape[:-1]}, got {array.shape[:-1]}.")
        return _as_rows(array)

    shared = checked_rows("shared", shared)
    experts = checked_rows("experts", None if experts is None else as_int32("experts", experts))
    mask = checked_rows("mask", None if mask is None else as_array("mask", mask)[..., None])
    if mask is not None:
        # Zeros also for the routers, whose gradients are products with all tokens.
        mask = checked_mask(mask[:, 0], tokens.shape[0])
        tokens = masked(mask, tokens, 0)
    flat = jax.ShapeDtypeStruct(flat_shape(gate_up.kernel.shape), gate_up.kernel.dtype)
    inputs.check_kernel("gate_up", flat, "x", tokens)
    routed: Any = routing
    if jitter_key is not None and (router.jitter is None or not callable(routing)):
        raise ValueError("jitter_key needs a router with jitter, and no routing that is given.")
    if callable(routing):
        seen = tokens
        if router.jitter is not None and jitter_key is not None:
            # In 16 bits, most of these numbers would be 1.
            noise = jax.random.uniform(jitter_key, seen.shape, jnp.float32, 1 - router.jitter, 1 + router.jitter)
            seen = seen.astype(jnp.float32) * noise
        routed = routing(seen)
    elif isinstance(routed, Routing):
        named = {"experts": as_int32("routing.experts", routed.experts)}
        for name in ("weights", "probabilities"):
            if getattr(routed, name) is not None:
                named[name] = as_array(f"routing.{name}", getattr(routed, name))
        routed = Routing(**{name: checked_rows(f"routing.{name}", array) for name, array in named.items()})
    elif not isinstance(routed, tuple):
        routed = checked_rows("routing", as_array("routing", routed))
    if selection_bias is None and not isinstance(routed, Routing):
        selection_bias = own_bias
    rows = tokens.astype(promoted_type(x, gate_up.kernel) if layer.dtype is None else layer.dtype)
    options: Any = dict(activation=layer.activation, recipe=layer.recipe, precision=layer.precision)
    if shared_expert:
        shared_gate_up, shared_down = map(flat_weights, shared_expert)
        group_sizes = jnp.array([rows.shape[0]], jnp.int32)
        result = grouped_mlp(rows, shared_gate_up, shared_down, group_sizes, **options)
        if shared_gate is not None:
            result = result * jax.nn.sigmoid(shared_gate(tokens))
        shared = result if shared is None else shared.astype(jnp.float32) + result
    num_sequences = None
    if router.balance_sequences:
        if x.ndim < 3:
            raise ValueError(f"balance_sequences needs x of shape [..., length, K], got {x.shape}.")
        num_sequences = max(1, math.prod(x.shape[:-2]))
    y, metrics = moe_mlp(
        rows,
        routed,
        gate_up,
        down,
        router=router,
        parallel=parallel,
        selection_bias=selection_bias,
        experts=experts,
        mask=mask,
        num_sequences=num_sequences,
        shared=shared,
        record=layer.sow_metrics,
        **options,
    )
    y = y.reshape(x.shape)
    sharding = jax.typeof(x).sharding
    return (jax.sharding.reshard(y, sharding) if {*sharding.spec} - {None} else y), metrics


def _as_rows(x: jax.Array) -> jax.Array:
    """Returns tokens `[..., K]` as `[T, K]`. In a type that is sharded, only the first axis stays so."""
    sharding = jax.typeof(x).sharding
    if x.ndim > 2 and {*sharding.spec} - {None}:
        x = jax.sharding.reshard(x, NamedSharding(sharding.mesh, PartitionSpec(sharding.spec[0])))
    return jnp.reshape(x, (-1, x.shape[-1]))


def with_accumulator(weights: Weights, name: str, total: jax.Array) -> Weights:
    """Returns weights with an accumulator of the kernel's gradient. Raises ValueError unless it is like the kernel."""
    accumulator = as_array("accumulate_into", total)
    got, expected = (f"{array.dtype.name} {array.shape}" for array in (accumulator, weights.kernel))
    if got != expected:
        raise ValueError(f"accumulate_into must be like the kernel of {name}, {expected}, got {got}.")
    return weights._replace(dkernel_accumulator=accumulator)


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
    fsdp_axis: Hashable | None = None,
    stored: Any = None,
    is_first_microbatch: ArrayLike = True,
    for_gradients: bool = True,
) -> KernelCache | jax.Array:
    """Quantizes the kernel, with the scales of its state if there is one, or without a recipe converts it to `dtype`.

    Returns the stored cache instead unless this is the first microbatch. It has no gradient. Inside `jax.shard_map`
    over `fsdp_axis`, the kernel is this device's part, and the state the whole.
    """
    if not changes_cache(is_first_microbatch):
        return stored  # Itself: behind `stop_gradient`, a scan over layers would keep a copy for the backward pass.
    kernel, stored = jax.lax.stop_gradient((kernel, stored))
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
        if fsdp_axis is not None and is_bound(fsdp_axis):
            fp8_state = part_of_state(fp8_state, fsdp_axis, kernel.shape[0])
        # Convert to float32 first: Flax's type whose sum is the maximum passes through stop_gradient.
        scale = jax.lax.stop_gradient(fp8_state.astype(jnp.float32)).scales(recipe).kernel
    previous, skip = (None, None) if first is None else (stored, ~first)
    kernel = kernel.reshape(*kernel.shape[:2], -1)
    return quantize_kernel(kernel, recipe, previous=previous, skip=skip, scale=scale, for_gradients=for_gradients)


def weights_in_fp8_alone(
    cache: KernelCache,
    bias: jax.Array | None,
    state: Fp8State | None,
    lora: Lora | None,
    param_dtype: DTypeLike,
    is_first_microbatch: ArrayLike | None,
) -> Weights:
    """Returns weights without a kernel. Raises ValueError if the flag may say to quantize it."""
    if changes_cache(is_first_microbatch):
        raise ValueError(
            f"is_first_microbatch={is_first_microbatch} needs the kernel, which quantize_for_inference has removed: "
            "pass None or False."
        )
    return Weights.from_cache(cache, bias, state, param_dtype)._replace(lora=lora)


#: The last calls of this thread, see `state_for_call`. A thread traces alone.
_CALLS = threading.local()


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
    # For each path, the trace and the state of the last call, and the state for the next one.
    calls = vars(_CALLS).setdefault("owners", weakref.WeakKeyDictionary()).setdefault(owner, {})
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
