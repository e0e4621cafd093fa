"""Flax linen layers.

Their variables lie in these collections, of which `init` makes all but the last:

- `params`: the parameters. Wrap the initialisers with `flax.linen.with_logical_partitioning` to name their axes.
- `_overwrite_with_gradient`, with `DelayedScaling`: the arrays of `jax_grouped.Fp8State`, under the names of its
  fields. Their gradient is their next value. A `flax.training.train_state.TrainState` whose `params` are both
  collections replaces the arrays with their gradient, and shows its optimizer only the parameters. Combine several
  gradients of this collection by maximum, not by a sum, as `Fp8State` explains: `jax_grouped.accumulate_gradients`,
  `reduce_gradients` and `overwrite_with_gradient` do so.
- `kernel_cache`, with `cache_kernel`: as `kernel`, the quantization that microbatches share, a
  `jax_grouped.KernelCache` or, without a recipe, the kernel in `dtype`. It has no gradient: do not differentiate with
  respect to it, and keep it out of checkpoints. `init` makes it from the initial kernel, and
  `apply(..., is_first_microbatch=True, mutable=["kernel_cache"])` returns a new one beside the result.
- `lora`, with `lora`: adapters, `lora_a` `[E, K, r]` and `lora_b` `[E, r, N]`, for kernels that are not trained.
  `jax.grad` with respect to this collection computes nothing of the kernels' gradients.
- `router_state`, of a router with `use_selection_bias`: the bias, `selection_bias` `float32[E]`.
- `moe_metrics`, with `sow_metrics`: the `jax_grouped.moe.MoEMetrics` of calls, as `metrics`.

After `quantize_for_inference`, kernels are there in FP8 alone.

On several devices, `MoEMlp.init` always makes the whole parameters. Under plain `jax.jit`, `apply` takes them whole
too, and splits the computation as `jax_grouped.moe.moe_mlp` says. Inside `jax.shard_map` it takes this device's part.
Store, and so split, `gate_up` as `P(experts, None, None, features)` of the axes that `parallel` names, with one `None`
if it has no gate. Store `down` as `P(experts, features)`, states as `P(experts)`, and the router and all of the shared
expert whole. With `fsdp`, the experts of kernels, biases and caches are split over `(experts, fsdp)`, in this order.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from jax_grouped import _layers
from jax_grouped._layers import Initializer, LogicalAxes
from jax_grouped._layers import LoraConfig as LoraConfig
from jax_grouped._layers import MoEInitializers as MoEInitializers
from jax_grouped._layers import default_kernel_init as default_kernel_init
from jax_grouped.core.values import as_array
from jax_grouped.fp8.arrays import KernelCache
from jax_grouped.fp8.recipes import DelayedScaling, Recipe, recipe_error
from jax_grouped.fp8.state import Fp8State
from jax_grouped.kernels.activations import Activation
from jax_grouped.moe.layer import MoEMetrics
from jax_grouped.moe.parallel import Parallel
from jax_grouped.moe.routing import Router, Routing
from jax_grouped.ops.dense import DenseResiduals, grouped_dense, grouped_dense_fwd
from jax_grouped.ops.inputs import GroupSizes, Weights, flat_weights

try:
    import flax.linen as nn
    from flax.core import Scope
    from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
    from flax.traverse_util import flatten_dict, unflatten_dict
except ModuleNotFoundError as error:
    raise ModuleNotFoundError('jax_grouped.linen needs Flax: python3 -m pip install "flax>=0.12"') from error

__all__ = [
    "KERNEL_CACHE",
    "LORA",
    "MOE_METRICS",
    "ROUTER_STATE",
    "GroupedDense",
    "GroupedKernel",
    "LoraConfig",
    "MoEInitializers",
    "MoEMlp",
    "default_kernel_init",
    "quantize_for_inference",
]


def __dir__() -> list[str]:
    return __all__


#: Name of the collection of quantized kernels that microbatches share.
KERNEL_CACHE = "kernel_cache"
#: Name of the collection of adapters of layers with `lora`. Differentiate it alone to leave the other variables frozen.
LORA = "lora"
#: Name of the collection of what a router keeps besides its parameters: the bias for the choice of experts.
ROUTER_STATE = "router_state"
#: Name of the collection of the metrics of layers with `sow_metrics`.
MOE_METRICS = "moe_metrics"


@nn.compact
def _weights(
    layer: GroupedDense | GroupedKernel,
    is_first_microbatch: ArrayLike | None,
    x: jax.Array | None = None,
    fsdp_axis: Hashable | None = None,
) -> Weights:
    """Returns weights in the shapes of the parameters, which `init` makes. `GroupedDense` has as many rows as `x`."""
    if isinstance(layer, GroupedKernel):
        shape, bias_init = layer.shape, layer.bias_init
    else:
        x = as_array("x", x)
        if x.ndim == 0:
            raise ValueError("x must have shape [T, K], got ().")
        shape = (layer.num_groups, x.shape[-1], layer.features)
        bias_init = layer.bias_init if layer.use_bias else None
    recipe, initializing = layer.recipe, layer.is_initializing()
    if is_first_microbatch is not None and not layer.cache_kernel:
        raise ValueError("is_first_microbatch needs a layer with cache_kernel=True.")
    has_cache = layer.has_variable(KERNEL_CACHE, "kernel")
    kernel: jax.Array | None = None
    # After `quantize_for_inference`, there is a cache alone.
    if initializing or layer.has_variable("params", "kernel") or recipe is None or not has_cache:
        kernel = layer.param("kernel", layer.kernel_init, shape, layer.param_dtype)
    bias = None
    if bias_init is not None:
        bias = layer.param("bias", bias_init, (shape[0], *shape[2:]), layer.param_dtype)
    elif not initializing and layer.has_variable("params", "bias"):
        # Flax would pass over it, and a trained bias would be lost in silence.
        raise ValueError(
            f"params has a bias that {layer.name or 'the layer'} does not add: pass use_bias=True, or bias_init to a "
            "GroupedKernel."
        )

    state = None
    if isinstance(recipe, DelayedScaling):
        names = [field.name for field in dataclasses.fields(Fp8State)]
        # Flax would create the variables again in every step if their collection were mutable.
        if not initializing and not all(layer.has_variable(OVERWRITE_WITH_GRADIENT, name) for name in names):
            raise ValueError(
                f"DelayedScaling needs the collection {OVERWRITE_WITH_GRADIENT}, which init makes beside params: pass "
                f"apply both, as {{'params': ..., '{OVERWRITE_WITH_GRADIENT}': ...}}."
            )

        def initial(name: str) -> jax.Array:
            return getattr(Fp8State.initial(recipe, shape[0]), name)

        arrays = {name: layer.variable(OVERWRITE_WITH_GRADIENT, name, initial, name).value for name in names}
        assert layer.scope is not None
        # A scope is made anew for every call, but not that of the whole model.
        state = _layers.state_for_call(layer.scope.root, layer.scope.path, Fp8State(**arrays))

    lora = None
    if layer.lora is not None:
        if not initializing and not all(layer.has_variable(LORA, name) for name in ("lora_a", "lora_b")):
            raise ValueError(
                f"lora needs the collection {LORA}, which init makes beside params: pass apply both, as "
                f"{{'params': ..., '{LORA}': ...}}."
            )

        def initial_factor(init: Initializer, shape: tuple[int, ...]) -> jax.Array:
            return init(layer.make_rng("params"), shape, layer.param_dtype)

        a_shape, b_shape = layer.lora.shapes(shape)
        a = layer.variable(LORA, "lora_a", initial_factor, layer.lora.a_init, a_shape)
        b = layer.variable(LORA, "lora_b", initial_factor, layer.lora.b_init, b_shape)
        lora = layer.lora.adapter(a.value, b.value, shape)

    if kernel is None:
        stored = layer.variables[KERNEL_CACHE]["kernel"]
        return _layers.weights_in_fp8_alone(stored, bias, state, lora, layer.param_dtype, is_first_microbatch)
    cache = None
    if layer.cache_kernel and (initializing or is_first_microbatch is not None):
        changes = _layers.changes_cache(is_first_microbatch)
        if changes and not layer.is_mutable_collection(KERNEL_CACHE):
            raise ValueError(
                f"The collection {KERNEL_CACHE} is not mutable, and is_first_microbatch={is_first_microbatch} writes "
                f'it: pass mutable=["{KERNEL_CACHE}"] to apply, or is_first_microbatch=False to read it only.'
            )
        if not (changes or initializing or has_cache):
            raise ValueError(
                f"is_first_microbatch={is_first_microbatch} needs the collection {KERNEL_CACHE}: pass apply the one "
                "that the first microbatch returned."
            )
        make = functools.partial(_layers.make_cache, kernel, recipe, layer.dtype, state, fsdp_axis=fsdp_axis)
        variable = layer.variable(KERNEL_CACHE, "kernel", make)
        if is_first_microbatch is not None:
            if changes:
                variable.value = make(stored=variable.value, is_first_microbatch=is_first_microbatch)
            cache = variable.value
    return Weights(kernel, bias, cache, state, lora=lora)


class GroupedDense(nn.Module):
    """A linear layer per group: `flax.linen.Dense` for mixture-of-experts models.

    The parameters are `kernel` `[E, K, N]` and, with `use_bias`, `bias` `[E, N]`. `jax_grouped.linen` lists the other
    variables, and says how to train them.

    Attributes:
        features: `N`, the size of each output row.
        num_groups: `E`, the number of groups (experts).
        use_bias: whether to add a bias per group.
        dtype: type of the computation and the result. Default: the promotion of the input's and parameters' types.
        param_dtype: type of the parameters. Their gradients have it too, straight from the matmul.
        precision: of float32 products: "default", "high" or "highest", see `jax_grouped.ragged_dot`.
        kernel_init: called with `(key, (E, K, N), param_dtype)`. The default initialises every group as Dense does.
        bias_init: called with `(key, (E, N), param_dtype)`.
        recipe: how the products are computed in FP8, see `jax_grouped.grouped_dense`; None to compute in `dtype`.
        cache_kernel: whether to have the collection `kernel_cache`, for calls with `is_first_microbatch`. Without a
            recipe, `dtype` must then be given.
        lora: adapters on the kernel, in the collection `lora`; None for none.

    Example:
        layer = jg.linen.GroupedDense(16, num_groups=2)
        x, group_sizes = jnp.ones((16, 32)), jnp.array([10, 4])

        variables = layer.init(jax.random.key(0), x, group_sizes)
        y = layer.apply(variables, x, group_sizes)

        assert variables["params"]["kernel"].shape == (2, 32, 16)
        assert y.shape == (16, 16) and not y[14:].any()
    """

    features: int
    num_groups: int
    use_bias: bool = True
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32
    precision: jax.lax.PrecisionLike = None
    kernel_init: Initializer = default_kernel_init
    bias_init: Initializer = nn.initializers.zeros_init()
    recipe: Recipe | None = None
    cache_kernel: bool = False
    lora: LoraConfig | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _layers.make_canonical(vars(self))

    def __call__(
        self,
        x: jax.Array,
        group_sizes: GroupSizes,
        *,
        is_first_microbatch: ArrayLike | None = None,
        accumulate_into: jax.Array | None = None,
    ) -> jax.Array:
        """Applies each group's layer to its rows.

        Args:
            x: `[T, K]`, rows of group 0 first, then group 1, and so on.
            group_sizes: `int[E]`, rows per group.
            is_first_microbatch: whether the kernel may have changed since it was last quantized. True quantizes it and
                stores the result. False multiplies by the stored kernel, and does not read the parameter. A boolean
                scalar on the device makes the choice there, so that one program serves all microbatches, with a few
                more CUDA kernels. None quantizes, and does not store.
            accumulate_into: the gradient of the kernel so far, an array like it. The kernel's gradient is then this
                plus that of the call; see `dkernel_accumulator` of `jax_grouped.grouped_dense`.

        Returns:
            `[T, N]`; rows past `sum(group_sizes)` are zero.

        Raises:
            ValueError: there is `is_first_microbatch` without `cache_kernel`, the collection `kernel_cache` would have
                to be written but is not mutable or to be read but is missing, there is no state of `DelayedScaling`, or
                `accumulate_into` is not like the kernel.
        """
        weights = self._weights(is_first_microbatch, x)
        return _layers.apply_dense(self, grouped_dense, x, weights, group_sizes, accumulate_into)

    def fwd(
        self, x: jax.Array, group_sizes: GroupSizes, *, is_first_microbatch: ArrayLike | None = None
    ) -> tuple[jax.Array, DenseResiduals]:
        """Applies the layer as a call does. Returns `[T, N]`, and residuals for a backward pass in halves.

        `jax_grouped.grouped_dense_dgrad` and `grouped_dense_wgrad` take them, which delays the kernel's gradient. JAX
        does not differentiate the result. Call it as `layer.apply(variables, x, group_sizes, method="fwd")`.
        """
        weights = self._weights(is_first_microbatch, x)
        return _layers.apply_dense(self, grouped_dense_fwd, x, weights, group_sizes)

    _weights = _weights


class GroupedKernel(nn.Module):
    """The variables of one stack of kernels, for layers made of `jax_grouped.grouped_dense` and its like.

    They are the variables of `GroupedDense`, which describes each.

    Attributes:
        shape: `(E, K, ...)` of the parameter; its last axes are `N` features for the product and the quantization.
        kernel_init: called with `(key, shape, param_dtype)`.
        bias_init: called with `(key, (E, ...), param_dtype)`; None for no bias.
        param_dtype: type of the parameters.
        recipe: recipe of the products, for the state and the cache that it needs; None for products in `dtype`.
        cache_kernel: whether to have the collection `kernel_cache`, for calls with `is_first_microbatch`.
        dtype: type of a cache without a recipe. The weights keep their own.
        lora: adapters on the kernel, in the collection `lora`; None for none.

    Example:
        weights, variables = jg.linen.GroupedKernel((2, 32, 16)).init_with_output(jax.random.key(0))
        transposed = weights.kernel.transpose(0, 2, 1)

        assert jg.ragged_dot(jnp.ones((16, 16)), transposed, jnp.array([10, 4])).shape == (16, 32)
    """

    shape: tuple[int, ...]
    kernel_init: Initializer = default_kernel_init
    bias_init: Initializer | None = None
    param_dtype: DTypeLike = jnp.float32
    recipe: Recipe | None = None
    cache_kernel: bool = False
    dtype: DTypeLike | None = None
    lora: LoraConfig | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _layers.make_canonical(vars(self))

    def __call__(self, is_first_microbatch: ArrayLike | None = None) -> Weights:
        """Returns the product's weights, `kernel [E, K, N]` and what else there is; other fields are None."""
        return flat_weights(self.stored(is_first_microbatch))

    def stored(self, is_first_microbatch: ArrayLike | None = None, *, fsdp_axis: Hashable | None = None) -> Weights:
        """Returns the same in the parameters' shapes; inside `jax.shard_map`, parts along `fsdp_axis`, states whole."""
        return self._weights(is_first_microbatch, fsdp_axis=fsdp_axis)

    _weights = _weights


class MoEMlp(nn.Module):
    """A mixture of experts in place of a feed-forward layer: router, experts, and their weighted sum.

    No token is dropped unless there is a `capacity_factor`. Nothing is read on the host. The router computes in
    float32, because its choice is discrete. The parameters are `router/kernel` `[K, E]`, `gate_up/kernel`
    `[E, K, 2, F]` with the gate first, `down/kernel` `[E, F, K]`, and with `use_bias` `gate_up/bias` `[E, 2, F]` and
    `down/bias` `[E, K]`; with an `activation` that has no gate, `gate_up` has no axis of 2. Options add `router/bias`
    `[E]`, and `shared_gate_up/kernel` `[1, K, 2, S]` with `shared_down/kernel` `[1, S, K]`. `jax_grouped.linen` lists
    the other variables, which are below the name of each stack of kernels, and says how devices split them all.

    Attributes:
        num_experts: `E`, on all devices together.
        hidden_features: `F`, features inside an expert, on all devices together.
        router: how experts are chosen and weighted. The layer's own `selection_bias` is a variable of the collection
            `ROUTER_STATE`, whose next value `jg.moe.update_selection_bias` returns.
        parallel: how the experts and the tokens are split over devices; by default, all are on one device.
        activation: with a gate "swiglu", "geglu", "reglu" or a `jg.SwiGLU`; without one "silu", "gelu", "relu" or
            "relu_squared".
        shared_features: features of an expert that all tokens share, which computes as the others do; None for none.
            It has no bias. Every device computes it for its own tokens.
        use_shared_gate: whether the sigmoid of `x @ shared_gate/kernel`, `[K, 1]`, multiplies its result (Qwen2-MoE).
        recipe: how the experts' products are computed in FP8; None to compute in `dtype`.
        cache_kernel: whether to have the collection `kernel_cache`, for calls with `is_first_microbatch`. Without a
            recipe, `dtype` must then be given.
        use_bias: whether the experts' products add a bias.
        dtype: type of the experts' computation and the result. Default: the promotion of all types.
        param_dtype: type of all parameters, and so of their gradients.
        precision: of float32 products of experts: "default", "high" or "highest", see `jg.ragged_dot`.
        initializers: initialisers of the parameters, by kind.
        sow_metrics: whether calls also store the metrics, with the choice of experts, as `metrics` of the collection
            `MOE_METRICS`, where `apply` makes that mutable; for `jg.moe.router_loss`.
        lora: adapters on all kernels of experts, those of a shared expert too; None for none. On several devices along
            `parallel.experts`, tokens then travel as with `exchange="padded"` and `dispatch="input"`.
        logical_axes: names of the axes of experts, of `K` and of `F`, such as `("expert", "embed", "mlp")`. The
            parameters then carry them, as with `flax.linen.with_logical_partitioning`.

    Example:
        layer = jg.linen.MoEMlp(num_experts=4, hidden_features=16, router=jg.moe.Router(top_k=2))
        x = jnp.ones((2, 4, 32))

        variables = layer.init(jax.random.key(0), x)
        y, metrics = layer.apply(variables, x)
        loss = jnp.mean(y**2) + 0.01 * metrics.balance_loss

        assert variables["params"]["gate_up"]["kernel"].shape == (4, 32, 2, 16) and loss > 0
    """

    num_experts: int
    hidden_features: int
    router: Router
    parallel: Parallel = Parallel()
    activation: Activation = "swiglu"
    shared_features: int | None = None
    use_shared_gate: bool = False
    recipe: Recipe | None = None
    cache_kernel: bool = False
    use_bias: bool = False
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32
    precision: jax.lax.PrecisionLike = None
    initializers: MoEInitializers = MoEInitializers()
    sow_metrics: bool = False
    lora: LoraConfig | None = None
    logical_axes: LogicalAxes | None = None

    def __post_init__(self) -> None:
        is_bound = isinstance(self.parent, Scope)  # Flax makes such copies of a layer that the user has made.
        super().__post_init__()
        _layers.make_canonical(vars(self))
        if not is_bound:
            _layers.check_moe_options(self.router, self.parallel, self.activation, self.num_experts, self.logical_axes)

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        *,
        routing: jax.Array | Routing | Callable[[jax.Array], Any] | None = None,
        experts: jax.Array | None = None,
        mask: jax.Array | None = None,
        selection_bias: jax.Array | None = None,
        jitter_key: jax.Array | None = None,
        is_first_microbatch: ArrayLike | None = None,
        shared: jax.Array | None = None,
        accumulate_into: Mapping[str, jax.Array] | None = None,
    ) -> tuple[jax.Array, MoEMetrics]:
        """Applies to every token the experts that the router chooses for it.

        Args:
            x: `[..., K]`, tokens of any leading shape.
            routing: logits `[..., E]`, or a `jg.moe.Routing` of arrays `[..., k]`, in place of the layer's own router;
                or a function that returns them for tokens `[T, K]`.
            experts: `[..., top_k]` integers, the experts of each token, in place of a choice by the scores.
            mask: `bool[...]`, False for padding: such tokens have no experts, count in no metric, and get zeros.
            selection_bias: `[E]`, added to the scores for the choice only, in place of the layer's own.
            jitter_key: key of the random numbers of a router with `jitter`; None for none, as in evaluation. Inside
                `jax.shard_map`, fold the index of the device in.
            is_first_microbatch: True quantizes the kernels and stores the result, False multiplies by what is stored. A
                boolean on the device makes the choice there. None quantizes, and does not store.
            shared: `[..., K]`, the result of an expert that all tokens share; added to each token's sum.
            accumulate_into: the gradients of kernels so far, to which this call's are added, by name: `gate_up`,
                `down`, `shared_gate_up`, `shared_down`, or some of these. Inside `jax.shard_map`, a kernel that
                several devices have, such as the last two, needs `jax.lax.pcast`.

        Returns:
            `[..., K]`, and the metrics.

        Raises:
            TypeError: `accumulate_into` is no mapping.
            ValueError: a size does not fit, a variable or the sequences that the router needs are missing, or
                `is_first_microbatch` needs a cache that is not there.
        """
        x = as_array("x", x)
        if x.ndim == 0:
            raise ValueError("x must have shape [..., K], got ().")
        router, parallel, initializers = self.router, self.parallel, self.initializers
        if self.is_initializing() and not {*jax.typeof(x).sharding.spec} - {None}:
            # `init` makes the whole parameters, also inside `jax.shard_map`, and takes any number of tokens.
            parallel = Parallel()
        given = self.variables.get("params", {})
        forms = _layers.kernel_forms(self, x.shape[-1], parallel, self.logical_axes, given)

        def named(init: Initializer, *axes: str | None) -> Initializer:
            return init if self.logical_axes is None else nn.with_logical_partitioning(init, axes)

        def product(features: int, name: str, use_bias: bool) -> nn.Module:
            # For the backward pass of a scan, x waits as it is and not in float32.
            return nn.remat(nn.Dense, prevent_cse=False)(
                features,
                use_bias=use_bias,
                dtype=jnp.float32,
                param_dtype=self.param_dtype,
                kernel_init=named(initializers.router, forms["gate_up"].axes[1], None),
                bias_init=named(initializers.bias, None),
                name=name,
            )

        if router.use_kernel:
            if not router.use_bias and "bias" in given.get("router", {}):
                raise ValueError("params has a bias that the router does not add: pass jg.moe.Router(use_bias=True).")
            own_router = product(self.num_experts, "router", router.use_bias)
            if self.is_initializing() and routing is not None:
                own_router(jnp.reshape(x, (-1, x.shape[-1])))
            routing = own_router if routing is None else routing
        shared_gate = product(1, "shared_gate", False) if self.use_shared_gate else None
        own_bias = None
        if router.use_selection_bias and (selection_bias is None or self.is_initializing()):
            if not self.is_initializing() and not self.has_variable(ROUTER_STATE, "selection_bias"):
                raise ValueError(
                    f"use_selection_bias needs the collection {ROUTER_STATE}, which init makes beside params: pass "
                    f"apply both, as {{'params': ..., '{ROUTER_STATE}': ...}}, or pass selection_bias."
                )
            init = named(nn.initializers.zeros_init(), None)
            own = self.variable(ROUTER_STATE, "selection_bias", init, None, (self.num_experts,), jnp.float32)
            own_bias = own.value
        weights = {}
        for name, (shape, axes, is_shared) in forms.items():
            kernel_init = initializers.down if name.endswith("down") else initializers.gate_up
            bias_init = named(initializers.bias, axes[0], *axes[2:]) if self.use_bias and not is_shared else None
            lora = self.lora
            if lora is not None:
                a_init, b_init = named(lora.a_init, *axes[:2], None), named(lora.b_init, axes[0], None, *axes[2:])
                lora = dataclasses.replace(lora, a_init=a_init, b_init=b_init)
            kernel = GroupedKernel(
                shape,
                kernel_init=named(kernel_init, *axes),
                bias_init=bias_init,
                param_dtype=self.param_dtype,
                recipe=self.recipe,
                cache_kernel=self.cache_kernel,
                dtype=self.dtype,
                lora=lora,
                name=name,
            )
            weights[name] = kernel.stored(is_first_microbatch, fsdp_axis=None if is_shared else parallel.fsdp)
        y, metrics = _layers.apply_moe(
            self,
            router,
            parallel,
            x,
            weights,
            accumulate_into,
            routing=routing,
            shared_gate=shared_gate,
            selection_bias=selection_bias,
            own_bias=own_bias,
            experts=experts,
            mask=mask,
            jitter_key=jitter_key,
            shared=shared,
        )
        if self.sow_metrics and not self.is_initializing():
            self.sow(MOE_METRICS, "metrics", metrics)
        return y, metrics._replace(experts=None)


def quantize_for_inference(variables: Mapping[str, Any], recipe: Recipe) -> dict[str, Any]:
    """Quantizes the kernels of layers with `cache_kernel`, for a forward pass that needs no other copy of them.

    `apply` takes the result in place of the variables, and gives the same numbers: in the layer's `dtype` or, if that
    is None, as if the kernels were in its `param_dtype`. In FP8, kernels take half the memory of bfloat16. They have no
    gradients. For those of tokens, such as adapters need, the backward pass transposes each kernel on the way, which is
    exact with all recipes but `MXFP8BlockScaling`, and takes the memory of that kernel for a moment. This works on one
    device, and under plain `jax.jit` over axes other than `features`.

    Args:
        variables: as `init` returns them: with the collection `KERNEL_CACHE`, which tells which parameters to quantize.
        recipe: that of the layers.

    Returns:
        The variables without these kernels, with a `KERNEL_CACHE` of one orientation. Layers without a recipe stay.

    Raises:
        TypeError: `recipe` is no recipe.
        ValueError: there is no `KERNEL_CACHE` of a layer with a recipe, or a parameter is missing.

    Example:
        recipe = jg.Float8BlockScaling()
        layer = jg.linen.GroupedDense(16, 2, recipe=recipe, cache_kernel=True)
        x, group_sizes = jnp.ones((16, 32)), jnp.array([10, 4])
        variables = layer.init(jax.random.key(0), x, group_sizes)

        in_fp8 = jg.linen.quantize_for_inference(variables, recipe)

        assert "kernel" not in in_fp8["params"]
        assert jnp.array_equal(layer.apply(in_fp8, x, group_sizes), layer.apply(variables, x, group_sizes))
    """
    if not isinstance(recipe, Recipe):
        raise recipe_error(recipe, optional=False)
    caches = flatten_dict(variables.get(KERNEL_CACHE, {}))
    # Those of layers without a recipe stay as they are.
    paths = [path for path, cache in caches.items() if isinstance(cache, KernelCache)]
    if not paths:
        raise ValueError(
            f"variables must have the collection {KERNEL_CACHE}, which init makes of layers with cache_kernel=True. "
            "One of them must have a recipe."
        )
    params, states = (
        flatten_dict(nn.meta.unbox(variables.get(name, {}))) for name in ("params", OVERWRITE_WITH_GRADIENT)
    )
    for path in paths:
        if path not in params:
            raise ValueError(f"variables must have the parameter {'/'.join(path)}, which {KERNEL_CACHE} has.")
        state = None
        if isinstance(recipe, DelayedScaling):
            layer_state = {other[-1]: value for other, value in states.items() if other[:-1] == path[:-1]}
            if not layer_state:
                raise ValueError(f"DelayedScaling needs the collection {OVERWRITE_WITH_GRADIENT} for {'/'.join(path)}.")
            state = Fp8State(**layer_state)
        columnwise = caches[path].columnwise
        if columnwise.data.shape != columnwise.layout.data_shape:
            raise ValueError(f"{'/'.join(path)} is stacked, as by nn.scan: quantize layers one by one.")
        caches[path] = _layers.make_cache(params.pop(path), recipe, None, state, for_gradients=False)
    kept = {name: collection for name, collection in variables.items() if name not in ("params", KERNEL_CACHE)}
    return {"params": unflatten_dict(params), KERNEL_CACHE: unflatten_dict(caches), **kept}
