"""Flax NNX layers. In their examples, `nnx` is `flax.nnx`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from jax_grouped import _layers
from jax_grouped._layers import Initializer, LogicalAxes
from jax_grouped._layers import LoraConfig as LoraConfig
from jax_grouped._layers import MoEInitializers as MoEInitializers
from jax_grouped._layers import default_kernel_init as default_kernel_init
from jax_grouped.fp8.arrays import KernelCache
from jax_grouped.fp8.recipes import DelayedScaling, Recipe
from jax_grouped.fp8.state import Fp8State
from jax_grouped.kernels.activations import Activation
from jax_grouped.moe.layer import MoEMetrics
from jax_grouped.moe.parallel import Parallel
from jax_grouped.moe.routing import Router, Routing
from jax_grouped.ops.dense import DenseResiduals, grouped_dense, grouped_dense_fwd
from jax_grouped.ops.inputs import GroupSizes, Weights, flat_weights

try:
    from flax import linen, nnx
    from flax.traverse_util import flatten_dict
except ModuleNotFoundError as error:
    raise ModuleNotFoundError('jax_grouped.nnx needs Flax: python3 -m pip install "flax>=0.12"') from error

__all__ = [
    "TRAINED",
    "Fp8Variable",
    "GroupedDense",
    "GroupedKernel",
    "KernelCacheVariable",
    "LoraConfig",
    "MoEInitializers",
    "MoEMlp",
    "SelectionBias",
    "SownMetrics",
    "default_kernel_init",
    "linen_variables",
    "load_variables",
    "quantize_for_inference",
]


def __dir__() -> list[str]:
    return __all__


class Fp8Variable(nnx.Param[Fp8State]):
    """The `jax_grouped.Fp8State` of a layer with `DelayedScaling`. Its gradient is its next value.

    It is an `nnx.Param`, so that training of the parameters includes it. To tell the two apart, name this class first:
    `nnx.split(model, jg.nnx.Fp8Variable, nnx.Param, ...)`.

    Example:
        layer = jg.nnx.GroupedDense(32, 16, 2, recipe=jg.DelayedScaling(), rngs=nnx.Rngs(0))

        assert isinstance(layer.fp8_state, jg.nnx.Fp8Variable)
        assert isinstance(layer.fp8_state.get_value(), jg.Fp8State)
    """

    overwrite_with_gradient = True


class KernelCacheVariable(nnx.Variable[KernelCache | jax.Array]):
    """The `jax_grouped.KernelCache` that microbatches share or, without a recipe, the kernel in the layer's `dtype`.

    It has no gradient and needs no checkpoint.

    Example:
        recipe = jg.Float8BlockScaling()
        layer = jg.nnx.GroupedDense(32, 16, 2, recipe=recipe, cache_kernel=True, rngs=nnx.Rngs(0))

        assert isinstance(layer.kernel_cache, jg.nnx.KernelCacheVariable)
        assert layer.kernel_cache.get_value().amax.shape == (2,)
    """


#: Filter of the variables with gradients: parameters, and the states of delayed scaling.
TRAINED = (nnx.Param, Fp8Variable)


class GroupedKernel(nnx.Module):
    """The variables of one stack of kernels, for layers made of `jax_grouped.grouped_dense` and its like.

    Attributes:
        kernel: `nnx.Param`, `(E, K, ...)`; its last axes are `N` features for the product and the quantization. None
            after `quantize_for_inference`.
        bias: `nnx.Param`, `(E, ...)`, or None.
        fp8_state: `Fp8Variable` with `DelayedScaling`, or None.
        kernel_cache: `KernelCacheVariable` with `cache_kernel`, or None.
        lora_a, lora_b: `nnx.LoRAParam` with `lora`, `(E, K, r)` and `(E, r, ...)`, or None.

    Args:
        shape: of `kernel`.
        kernel_init: called with `(key, shape, param_dtype)`.
        bias_init: called with `(key, (E, ...), param_dtype)`; None for no bias.
        param_dtype: type of the parameters.
        recipe: recipe of the products, for the state and the cache that it needs; None for products in `dtype`.
        cache_kernel: whether to have a `KernelCacheVariable`, for calls with `is_first_microbatch`.
        dtype: type of a cache without a recipe. The weights keep their own.
        lora: adapters on the kernel; None for none.
        kernel_metadata: for the `nnx.Param` of the kernel, for example `out_sharding=("expert", "embed", "mlp")`.
        bias_metadata: for that of the bias.
        rngs: source of the initialisers' keys.

    Example:
        experts = jg.nnx.GroupedKernel((2, 32, 16), rngs=nnx.Rngs(0))
        transposed = experts.weights().kernel.transpose(0, 2, 1)

        assert jg.ragged_dot(jnp.ones((16, 16)), transposed, jnp.array([10, 4])).shape == (16, 32)
    """

    @_layers.with_canonical_arguments
    def __init__(
        self,
        shape: tuple[int, ...],
        *,
        kernel_init: Initializer = default_kernel_init,
        bias_init: Initializer | None = None,
        param_dtype: DTypeLike = jnp.float32,
        recipe: Recipe | None = None,
        cache_kernel: bool = False,
        dtype: DTypeLike | None = None,
        lora: LoraConfig | None = None,
        kernel_metadata: Mapping[str, Any] = MappingProxyType({}),
        bias_metadata: Mapping[str, Any] = MappingProxyType({}),
        rngs: nnx.Rngs,
    ):
        groups, _, *features = shape
        self.recipe = recipe
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.rank = len(shape)
        kernel = kernel_init(rngs.params(), shape, param_dtype)
        self.kernel: nnx.Param[jax.Array] | None = nnx.Param(kernel, **kernel_metadata)
        self.bias: nnx.Param[jax.Array] | None = nnx.data(None)
        if bias_init is not None:
            self.bias = nnx.Param(bias_init(rngs.params(), (groups, *features), param_dtype), **bias_metadata)
        self.fp8_state: Fp8Variable | None = nnx.data(None)
        if isinstance(recipe, DelayedScaling):
            self.fp8_state = Fp8Variable(Fp8State.initial(recipe, groups))
        self.lora = lora
        self.lora_a: nnx.LoRAParam[jax.Array] | None = nnx.data(None)
        self.lora_b: nnx.LoRAParam[jax.Array] | None = nnx.data(None)
        if lora is not None:
            a_metadata: dict[str, Any] = {}
            b_metadata: dict[str, Any] = {}
            if axes := kernel_metadata.get("out_sharding"):
                a_metadata["out_sharding"], b_metadata["out_sharding"] = (*axes[:2], None), (axes[0], None, *axes[2:])
            a_shape, b_shape = lora.shapes(shape)
            self.lora_a = nnx.LoRAParam(lora.a_init(rngs.params(), a_shape, param_dtype), **a_metadata)
            self.lora_b = nnx.LoRAParam(lora.b_init(rngs.params(), b_shape, param_dtype), **b_metadata)
        self.kernel_cache: KernelCacheVariable | None = nnx.data(None)
        if cache_kernel:
            self.kernel_cache = KernelCacheVariable(self._make_cache())

    def weights(self, is_first_microbatch: ArrayLike | None = None) -> Weights:
        """Returns the product's weights, `kernel [E, K, N]` and what else there is; other fields are None."""
        return flat_weights(self.stored(is_first_microbatch))

    def stored(self, is_first_microbatch: ArrayLike | None = None, *, fsdp_axis: Hashable | None = None) -> Weights:
        """Returns the same in the parameters' shapes; inside `jax.shard_map`, parts along `fsdp_axis`, states whole."""
        if is_first_microbatch is not None and self.kernel_cache is None:
            raise ValueError("is_first_microbatch needs a layer with cache_kernel=True.")
        bias = None if self.bias is None else self.bias[...]
        state = None if self.fp8_state is None else _layers.state_for_call(self, None, self.fp8_state.get_value())
        lora = None
        if self.lora is not None:
            assert self.lora_a is not None
            assert self.lora_b is not None
            kernel_shape = (self.lora_a.shape[0], self.lora_a.shape[1], *self.lora_b.shape[2:])
            lora = self.lora.adapter(self.lora_a[...], self.lora_b[...], kernel_shape)
        if self.kernel is None:
            assert self.kernel_cache is not None
            stored: Any = self.kernel_cache.get_value()
            return _layers.weights_in_fp8_alone(stored, bias, state, lora, self.param_dtype, is_first_microbatch)
        kernel, cache = self.kernel[...], None
        if self.kernel_cache is not None and is_first_microbatch is not None:
            cache = _layers.make_cache(
                kernel,
                self.recipe,
                self.dtype,
                state,
                fsdp_axis=fsdp_axis,
                stored=self.kernel_cache.get_value(),
                is_first_microbatch=is_first_microbatch,
            )
            if _layers.changes_cache(is_first_microbatch):
                self.kernel_cache.set_value(cache)
        return Weights(kernel, bias, cache, state, lora=lora)

    def _make_cache(self, *, for_gradients: bool = True) -> KernelCache | jax.Array:
        """Returns a cache of the kernel. Raises ValueError if it is a stack of several layers' kernels."""
        kernel, _, _, state, *_ = self.stored()
        if kernel.ndim != self.rank:
            raise ValueError(f"kernel {kernel.shape} is stacked, as by nnx.vmap: quantize layers one by one.")
        return _layers.make_cache(kernel, self.recipe, self.dtype, state, for_gradients=for_gradients)


class GroupedDense(GroupedKernel):
    """A linear layer per group: `flax.nnx.Linear` for mixture-of-experts models; see `jax_grouped.linen.GroupedDense`.

    With `DelayedScaling` the layer has an `Fp8Variable`, whose gradient is its next value. `nnx.grad(loss)` returns it
    beside the gradients of the parameters. Update both with an optimizer that knows of next values:
    `nnx.Optimizer(model, jg.overwrite_with_gradient(optimizer), wrt=jg.nnx.TRAINED)`. Combine several gradients of a
    state by maximum, not by a sum: `jax_grouped.accumulate_gradients` and `reduce_gradients` do so. Checkpoints, of
    `nnx.state(model, jg.nnx.TRAINED)`, need no `KernelCacheVariable`, which the constructor makes from the initial
    kernel.

    Attributes:
        kernel: `nnx.Param`, `[E, K, N]`; None after `quantize_for_inference`.
        bias: `nnx.Param`, `[E, N]`, or None.
        fp8_state: `Fp8Variable` with `DelayedScaling`, or None.
        kernel_cache: `KernelCacheVariable` with `cache_kernel`, or None.
        lora_a, lora_b: `nnx.LoRAParam` with `lora`, `[E, K, r]` and `[E, r, N]`, or None.

    Args:
        in_features: `K`, the size of each input row.
        out_features: `N`, the size of each output row.
        num_groups: `E`, the number of groups (experts).
        use_bias: whether to add a bias per group.
        dtype: type of the computation and the result. Default: the promotion of the input's and parameters' types.
        param_dtype: type of the parameters, and so of their gradients.
        precision: of float32 products: "default", "high" or "highest", see `jax_grouped.ragged_dot`.
        kernel_init: called with `(key, (E, K, N), param_dtype)`. The default initialises every group as Linear does.
        bias_init: called with `(key, (E, N), param_dtype)`.
        recipe: how the products are computed in FP8, see `jax_grouped.grouped_dense`; None to compute in `dtype`.
        cache_kernel: whether to have a `KernelCacheVariable`, for calls with `is_first_microbatch`. Without a recipe,
            `dtype` must then be given.
        lora: adapters on the kernel, `nnx.LoRAParam`: train them alone with `wrt=nnx.LoRAParam`; None for none.
        kernel_metadata: for the `nnx.Param` of the kernel, for example `out_sharding=("expert", "embed", "mlp")`.
        bias_metadata: for that of the bias.
        rngs: source of the initialisers' keys.

    Example:
        layer = jg.nnx.GroupedDense(32, 16, 2, rngs=nnx.Rngs(0))

        y = layer(jnp.ones((16, 32)), jnp.array([10, 4]))

        assert layer.kernel.shape == (2, 32, 16)
        assert y.shape == (16, 16) and not y[14:].any()
    """

    @_layers.with_canonical_arguments
    def __init__(
        self,
        in_features: int,
        out_features: int,
        num_groups: int,
        *,
        use_bias: bool = True,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        precision: jax.lax.PrecisionLike = None,
        kernel_init: Initializer = default_kernel_init,
        bias_init: Initializer = jax.nn.initializers.zeros,
        recipe: Recipe | None = None,
        cache_kernel: bool = False,
        lora: LoraConfig | None = None,
        kernel_metadata: Mapping[str, Any] = MappingProxyType({}),
        bias_metadata: Mapping[str, Any] = MappingProxyType({}),
        rngs: nnx.Rngs,
    ):
        super().__init__(
            (num_groups, in_features, out_features),
            kernel_init=kernel_init,
            bias_init=bias_init if use_bias else None,
            param_dtype=param_dtype,
            recipe=recipe,
            cache_kernel=cache_kernel,
            dtype=dtype,
            lora=lora,
            kernel_metadata=kernel_metadata,
            bias_metadata=bias_metadata,
            rngs=rngs,
        )
        self.precision = precision

    def __call__(
        self,
        x: jax.Array,
        group_sizes: GroupSizes,
        *,
        is_first_microbatch: ArrayLike | None = None,
        accumulate_into: jax.Array | None = None,
    ) -> jax.Array:
        """Applies each group's layer to its rows. Errors are those of a call of `jax_grouped.linen.GroupedDense`.

        Args:
            x: `[T, K]`, rows of group 0 first, then group 1, and so on.
            group_sizes: `int[E]`, rows per group.
            is_first_microbatch: True quantizes the kernel and stores the cache, False multiplies by the stored one. A
                boolean on the device makes the choice there. None quantizes, and does not store.
            accumulate_into: the gradient of the kernel so far, an array like it. The kernel's gradient is then this
                plus that of the call; see `dkernel_accumulator` of `jax_grouped.grouped_dense`.

        Returns:
            `[T, N]`; rows past `sum(group_sizes)` are zero.
        """
        weights = self.weights(is_first_microbatch)
        return _layers.apply_dense(self, grouped_dense, x, weights, group_sizes, accumulate_into)

    def fwd(
        self, x: jax.Array, group_sizes: GroupSizes, *, is_first_microbatch: ArrayLike | None = None
    ) -> tuple[jax.Array, DenseResiduals]:
        """Applies the layer. Returns `[T, N]`, and residuals for a backward pass in halves.

        `jax_grouped.grouped_dense_dgrad` and `grouped_dense_wgrad` take them. JAX does not differentiate the result.
        """
        weights = self.weights(is_first_microbatch)
        return _layers.apply_dense(self, grouped_dense_fwd, x, weights, group_sizes)


class SelectionBias(nnx.Variable[jax.Array]):
    """The bias of a router for the choice of experts, `float32[E]`. It has no gradient.

    Example:
        router = jg.moe.Router(top_k=2, use_selection_bias=True)
        layer = jg.nnx.MoEMlp(32, num_experts=4, hidden_features=16, router=router, rngs=nnx.Rngs(0))

        _, metrics = layer(jnp.ones((8, 32)))
        layer.selection_bias[...] = jg.moe.update_selection_bias(layer.selection_bias[...], metrics.expert_load)

        assert isinstance(layer.selection_bias, jg.nnx.SelectionBias) and layer.selection_bias[...].any()
    """


class SownMetrics(nnx.Intermediate[tuple[MoEMetrics, ...]]):
    """The metrics of the calls of a layer with `sow_metrics`, see `jax_grouped.moe.router_loss`.

    Example:
        router = jg.moe.Router(top_k=2)
        layer = jg.nnx.MoEMlp(32, num_experts=4, hidden_features=16, router=router, sow_metrics=True, rngs=nnx.Rngs(0))

        (y, _), sown = nnx.capture(layer, jg.nnx.SownMetrics)(jnp.ones((8, 32)))

        assert jg.moe.router_loss(sown, balance=0.01) > 0
    """


class MoEMlp(nnx.Module):
    """A mixture of experts in place of a feed-forward layer: router, experts, and their weighted sum.

    `jax_grouped.linen.MoEMlp` describes the computation and the parameters, `jax_grouped.linen` their split over
    devices. The constructor always makes the whole parameters. Inside `jax.shard_map`, `nnx.merge` the layer from this
    device's part of them.

    Attributes:
        router: `nnx.Linear`, its kernel `[K, E]`; None if the `Router` has `use_kernel=False`.
        router_options: the `Router`.
        gate_up: `GroupedKernel` of `[E, K, 2, F]`, the gate first; of `[E, K, F]` for an `activation` without a gate.
        down: `GroupedKernel` of `[E, F, K]`.
        shared_gate_up, shared_down: `GroupedKernel` of `[1, K, 2, S]` and `[1, S, K]` with `shared_features`, or None.
        shared_gate: `nnx.Linear`, its kernel `[K, 1]`, with `use_shared_gate`, or None.
        selection_bias: `SelectionBias` of `float32[E]` if the router uses one, or None.

    Args:
        features: `K`, features of a token.
        num_experts: `E`, on all devices together.
        hidden_features: `F`, features inside an expert, on all devices together.
        router: how experts are chosen and weighted.
        parallel: how the experts and the tokens are split over devices; by default, all are on one device.
        activation: with a gate "swiglu", "geglu", "reglu" or a `jg.SwiGLU`; without one "silu", "gelu", "relu" or
            "relu_squared".
        shared_features: `S`, features of an expert that all tokens share, without a bias; None for none.
        use_shared_gate: whether the sigmoid of `shared_gate` multiplies the shared expert's result (Qwen2-MoE).
        recipe: how the experts' products are computed in FP8; None to compute in `dtype`.
        cache_kernel: whether kernels have a `KernelCacheVariable`, for calls with `is_first_microbatch`.
        use_bias: whether the experts' products add a bias.
        dtype: type of the experts' computation and the result. Default: the promotion of all types.
        param_dtype: type of all parameters, and so of their gradients.
        precision: of float32 products of experts: "default", "high" or "highest", see `jg.ragged_dot`.
        initializers: initialisers of the parameters, by kind.
        sow_metrics: whether calls give the metrics, with the choice of experts, as `SownMetrics` to `nnx.capture`.
        lora: adapters on all kernels of experts, those of a shared expert too; None for none.
        logical_axes: names of the axes of experts, of `K` and of `F`: the `out_sharding` of each `nnx.Param`.
        rngs: source of the initialisers' keys.

    Example:
        router = jg.moe.Router(top_k=2)
        layer = jg.nnx.MoEMlp(32, num_experts=4, hidden_features=16, router=router, rngs=nnx.Rngs(0))
        x = jnp.ones((2, 4, 32))

        y, metrics = nnx.jit(lambda layer, x: layer(x))(layer, x)

        assert y.shape == x.shape and not metrics.dropped.any()
    """

    gate_up: GroupedKernel
    down: GroupedKernel

    @_layers.with_canonical_arguments
    def __init__(
        self,
        features: int,
        *,
        num_experts: int,
        hidden_features: int,
        router: Router,
        parallel: Parallel = Parallel(),
        activation: Activation = "swiglu",
        shared_features: int | None = None,
        use_shared_gate: bool = False,
        recipe: Recipe | None = None,
        cache_kernel: bool = False,
        use_bias: bool = False,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        precision: jax.lax.PrecisionLike = None,
        initializers: MoEInitializers = MoEInitializers(),
        sow_metrics: bool = False,
        lora: LoraConfig | None = None,
        logical_axes: LogicalAxes | None = None,
        rngs: nnx.Rngs,
    ):
        _layers.check_moe_options(router, parallel, activation, num_experts, logical_axes)
        self.features = features
        self.num_experts = num_experts
        self.hidden_features = hidden_features
        self.router_options = router
        self.parallel = parallel
        self.activation = activation
        self.shared_features = shared_features
        self.sow_metrics = sow_metrics
        self.recipe = recipe
        self.dtype = dtype
        self.precision = precision

        def metadata(*axes: str | None) -> dict[str, Any]:
            return {} if logical_axes is None else {"out_sharding": axes}

        forms = _layers.kernel_forms(self, features, Parallel(), logical_axes, {})
        product = functools.partial(
            nnx.Linear,
            features,
            dtype=jnp.float32,
            param_dtype=param_dtype,
            kernel_init=initializers.router,
            bias_init=initializers.bias,
            kernel_metadata=metadata(forms["gate_up"].axes[1], None),
            bias_metadata=metadata(None),
            rngs=rngs,
        )
        self.router: nnx.Linear | None = nnx.data(None)
        if router.use_kernel:
            self.router = product(num_experts, use_bias=router.use_bias)
        self.shared_gate: nnx.Linear | None = nnx.data(None)
        if use_shared_gate:
            self.shared_gate = product(1, use_bias=False)
        self.shared_gate_up: GroupedKernel | None = nnx.data(None)
        self.shared_down: GroupedKernel | None = nnx.data(None)
        for name, (shape, axes, is_shared) in forms.items():
            kernel = GroupedKernel(
                shape,
                kernel_init=initializers.down if name.endswith("down") else initializers.gate_up,
                bias_init=initializers.bias if use_bias and not is_shared else None,
                param_dtype=param_dtype,
                recipe=recipe,
                cache_kernel=cache_kernel,
                dtype=dtype,
                lora=lora,
                kernel_metadata=metadata(*axes),
                bias_metadata=metadata(axes[0], *axes[2:]),
                rngs=rngs,
            )
            setattr(self, name, kernel)
        self.selection_bias: SelectionBias | None = nnx.data(None)
        if router.use_selection_bias:
            self.selection_bias = SelectionBias(jnp.zeros(num_experts, jnp.float32), **metadata(None))

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
        """Applies to every token the experts that the router chooses. Errors are those of a call of linen's layer.

        Args:
            x: `[..., K]`, tokens of any leading shape.
            routing: logits `[..., E]`, or a `jg.moe.Routing` of arrays `[..., k]`, in place of the layer's own router;
                or a function that returns them for tokens `[T, K]`.
            experts: `[..., top_k]` integers, the experts of each token, in place of a choice by the scores.
            mask: `bool[...]`, False for padding: such tokens have no experts, count in no metric, and get zeros.
            selection_bias: `[E]`, added to the scores for the choice only, in place of the layer's own.
            jitter_key: key of the random numbers of a router with `jitter`; None for none, as in evaluation.
            is_first_microbatch: True quantizes the kernels and stores the result, False multiplies by what is stored. A
                boolean on the device makes the choice there. None quantizes, and does not store.
            shared: `[..., K]`, the result of an expert that all tokens share; added to each token's sum.
            accumulate_into: the gradients of kernels so far, to which this call's are added, by names such as `down`.

        Returns:
            `[..., K]`, and the metrics.
        """
        parameters = nnx.to_pure_dict(nnx.state(self, nnx.Param))
        forms = _layers.kernel_forms(self, self.features, self.parallel, None, parameters)
        weights = {}
        for name, (_, _, is_shared) in forms.items():
            fsdp_axis = None if is_shared else self.parallel.fsdp
            weights[name] = getattr(self, name).stored(is_first_microbatch, fsdp_axis=fsdp_axis)
        # For the backward pass of a scan, x waits as it is and not in float32.
        router, shared_gate = (
            linear and functools.partial(nnx.remat(type(linear).__call__, prevent_cse=False), linear)
            for linear in (self.router, self.shared_gate)
        )
        y, metrics = _layers.apply_moe(
            self,
            self.router_options,
            self.parallel,
            x,
            weights,
            accumulate_into,
            routing=router if routing is None else routing,
            shared_gate=shared_gate,
            selection_bias=selection_bias,
            own_bias=None if self.selection_bias is None else self.selection_bias[...],
            experts=experts,
            mask=mask,
            jitter_key=jitter_key,
            shared=shared,
        )
        if self.sow_metrics:
            self.sow(SownMetrics, "metrics", metrics)
        return y, metrics._replace(experts=None)


def load_variables(layer: nnx.Module, variables: Mapping[str, Any]) -> None:
    """Loads variables of a linen layer into the NNX layer of the same name; kernel caches are made anew.

    Args:
        layer: changed in place. Variables that have no new value stay.
        variables: parameters, selection biases and adapters in the structure of linen, such as
            `jg.moe.from_huggingface` returns. They are converted to the types of the layer's variables, and put where
            these are.

    Raises:
        KeyError: `variables` has none of `params`, `router_state` and `lora`.
        ValueError: the layer has no such variable, or one of another shape. The layer may have changed.

    Example:
        options = dict(num_experts=4, hidden_features=16, router=jg.moe.Router(top_k=2))
        variables = jg.linen.MoEMlp(**options).init(jax.random.key(0), jnp.ones((8, 32)))
        layer = jg.nnx.MoEMlp(32, **options, rngs=nnx.Rngs(1))

        jg.nnx.load_variables(layer, variables)

        assert jnp.array_equal(layer.router.kernel, variables["params"]["router"]["kernel"])
    """
    names = ("params", "router_state", "lora")
    if not {*names} & variables.keys():
        found = ", ".join(map(str, variables)) or "nothing"
        raise KeyError(f"The variables have none of {', '.join(names)}, but {found}.")
    for collection in names:
        for path, array in flatten_dict(linen.meta.unbox(variables.get(collection, {}))).items():
            variable: Any = layer
            for name in path:
                variable = variable[name] if isinstance(name, int) else getattr(variable, name, None)
            named = "/".join(map(str, path))
            if not isinstance(variable, nnx.Variable):
                raise ValueError(f"The layer has no variable {named}.")
            old = variable[...]
            if jnp.shape(old) != jnp.shape(array):
                raise ValueError(f"{named} must have shape {jnp.shape(old)}, got {jnp.shape(array)}.")
            # Convert NumPy's arrays on the host.
            new = array.astype(old.dtype) if isinstance(array, np.ndarray) else jnp.asarray(array, old.dtype)
            is_traced = isinstance(old, jax.core.Tracer)
            variable.set_value(jnp.asarray(new) if is_traced else jax.device_put(new, old.sharding))
    for _, module in nnx.iter_modules(layer):
        if isinstance(module, GroupedKernel) and module.kernel is not None and module.kernel_cache is not None:
            module.kernel_cache.set_value(module._make_cache())


def quantize_for_inference(layer: nnx.Module) -> None:
    """Quantizes the kernels of a layer or model with recipes, for a forward pass that needs no other copy of them.

    Calls then give the same numbers. In FP8, kernels take half the memory of bfloat16. They have no gradients; see
    `jax_grouped.linen.quantize_for_inference`.

    Args:
        layer: a `GroupedKernel`, or what has some; changed in place: each loses its `kernel`, and has a `kernel_cache`
            of one orientation. Those without a recipe stay.

    Raises:
        ValueError: there is no layer with a recipe.

    Example:
        layer = jg.nnx.GroupedDense(32, 16, 2, recipe=jg.Float8BlockScaling(), rngs=nnx.Rngs(0))
        x, group_sizes = jnp.ones((16, 32)), jnp.array([10, 4])
        expected = layer(x, group_sizes)

        jg.nnx.quantize_for_inference(layer)

        assert layer.kernel is None and jnp.array_equal(layer(x, group_sizes), expected)
    """
    modules = [module for _, module in nnx.iter_modules(layer) if isinstance(module, GroupedKernel) and module.recipe]
    if not modules:
        raise ValueError("quantize_for_inference needs a layer with a recipe.")
    for module in modules:
        if module.kernel is not None:
            module.kernel_cache = KernelCacheVariable(module._make_cache(for_gradients=False))
            module.param_dtype = module.kernel[...].dtype
            module.kernel = nnx.data(None)


def linen_variables(layer: nnx.Module) -> dict[str, Any]:
    """Returns the trained variables of a layer in the structure of linen: `load_variables` undone.

    Args:
        layer: any module. States of `DelayedScaling` and kernel caches are left out.

    Returns:
        `{"params": {...}}` and, if there are selection biases or adapters, `{"router_state": {...}}` and
        `{"lora": {...}}`, of arrays.

    Example:
        router = jg.moe.Router(top_k=2)
        layer = jg.nnx.MoEMlp(32, num_experts=4, hidden_features=16, router=router, rngs=nnx.Rngs(0))

        assert jg.nnx.linen_variables(layer)["params"]["down"]["kernel"].shape == (4, 16, 32)
    """
    params = nnx.All(nnx.Param, nnx.Not(Fp8Variable), nnx.Not(nnx.LoRAParam))
    filters: dict[str, Any] = {"params": params, "router_state": SelectionBias, "lora": nnx.LoRAParam}
    collections = {name: nnx.to_pure_dict(nnx.state(layer, variables)) for name, variables in filters.items()}
    return {name: variables for name, variables in collections.items() if variables}
