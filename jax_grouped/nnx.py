"""Flax NNX layers."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from jax_grouped import _layers
from jax_grouped._layers import Initializer, LogicalAxes
from jax_grouped._layers import default_kernel_init as default_kernel_init
from jax_grouped.backends.spec import Activation
from jax_grouped.fp8.arrays import KernelCache
from jax_grouped.fp8.recipes import DelayedScaling, Recipe
from jax_grouped.fp8.state import Fp8State
from jax_grouped.moe.expert_parallel import ExchangeMethod
from jax_grouped.moe.layer import MoEMetrics
from jax_grouped.moe.on_mesh import MoEAxes
from jax_grouped.moe.routing import Score
from jax_grouped.ops import checks
from jax_grouped.ops.checks import GroupSizes
from jax_grouped.ops.dense import grouped_dense
from jax_grouped.ops.inputs import Weights, flat_weights
from jax_grouped.ops.residuals import DenseResiduals

try:
    from flax import nnx
except ModuleNotFoundError as error:
    raise ModuleNotFoundError('jax_grouped.nnx needs Flax: python3 -m pip install "flax>=0.12"') from error

__all__ = [
    "TRAINED",
    "Fp8Variable",
    "GroupedDense",
    "GroupedKernel",
    "KernelCacheVariable",
    "MoEMlp",
    "SelectionBias",
    "default_kernel_init",
    "linen_variables",
    "load_variables",
]


class Fp8Variable(nnx.Param[Fp8State]):
    """The `jax_grouped.Fp8State` of a layer with `DelayedScaling`. Its gradient is its next value.

    It is an `nnx.Param`, so that training of the parameters includes it. To tell the two apart, name this class first:
    `nnx.split(model, jg.nnx.Fp8Variable, nnx.Param, ...)`.

    Example:
        from flax import nnx

        layer = jg.nnx.GroupedDense(32, 16, 2, recipe=jg.DelayedScaling(), rngs=nnx.Rngs(0))

        assert isinstance(layer.fp8_state, jg.nnx.Fp8Variable)
        assert isinstance(layer.fp8_state.get_value(), jg.Fp8State)
    """

    overwrite_with_gradient = True


class KernelCacheVariable(nnx.Variable[KernelCache]):
    """The `jax_grouped.KernelCache` that microbatches share. It has no gradient and needs no checkpoint.

    Example:
        from flax import nnx

        recipe = jg.Float8BlockScaling()
        layer = jg.nnx.GroupedDense(32, 16, 2, recipe=recipe, cache_kernel=True, rngs=nnx.Rngs(0))

        assert isinstance(layer.kernel_cache, jg.nnx.KernelCacheVariable)
        assert layer.kernel_cache.get_value().amax.shape == (2,)
    """


class SelectionBias(nnx.Variable[jax.Array]):
    """The bias of a router for the choice of experts, `float32[E]`. It has no gradient.

    Example:
        from flax import nnx

        options = dict(num_experts=4, top_k=2, hidden_features=16, use_selection_bias=True)
        layer = jg.nnx.MoEMlp(32, **options, rngs=nnx.Rngs(0))

        _, metrics = layer(jnp.ones((8, 32)))
        layer.selection_bias[...] = jg.moe.update_selection_bias(layer.selection_bias[...], metrics.expert_load)

        assert isinstance(layer.selection_bias, jg.nnx.SelectionBias)
        assert jnp.abs(layer.selection_bias[...]).max() > 0
    """


#: Filter of the variables with gradients: parameters, and the states of delayed scaling.
TRAINED = (nnx.Param, Fp8Variable)


class GroupedKernel(nnx.Module):
    """The variables of one stack of kernels, for layers made of `jax_grouped.grouped_dense` and its like.

    Attributes:
        kernel: `nnx.Param`, `(E, K, ...)`; its last axes are `N` features for the product and the quantization.
        bias: `nnx.Param`, `(E, ...)`, or None.
        fp8_state: `Fp8Variable` with `DelayedScaling`, or None.
        kernel_cache: `KernelCacheVariable` with `cache_kernel`, or None.

    Args:
        shape: of `kernel`.
        kernel_init: called with `(key, shape, param_dtype)`.
        bias_init: called with `(key, (E, ...), param_dtype)`; None for no bias.
        param_dtype: type of the parameters.
        recipe, cache_kernel, kernel_metadata, bias_metadata, rngs: as in `GroupedDense`.

    Example:
        from flax import nnx

        experts = jg.nnx.GroupedKernel((2, 32, 16), rngs=nnx.Rngs(0))
        transposed = experts.weights().kernel.transpose(0, 2, 1)

        assert jg.ragged_dot(jnp.ones((16, 16)), transposed, jnp.array([10, 4])).shape == (16, 32)
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        *,
        kernel_init: Initializer = default_kernel_init,
        bias_init: Initializer | None = None,
        param_dtype: DTypeLike = jnp.float32,
        recipe: Recipe | None = None,
        cache_kernel: bool = False,
        kernel_metadata: Mapping[str, Any] = MappingProxyType({}),
        bias_metadata: Mapping[str, Any] = MappingProxyType({}),
        rngs: nnx.Rngs,
    ):
        _layers.check_layer(recipe, {}, {})
        _layers.check_caching(recipe, cache_kernel, None)
        groups, _, *features = shape
        self.recipe = recipe
        self.kernel = nnx.Param(kernel_init(rngs.params(), shape, param_dtype), **kernel_metadata)
        self.bias: nnx.Param[jax.Array] | None = nnx.data(None)
        if bias_init is not None:
            self.bias = nnx.Param(bias_init(rngs.params(), (groups, *features), param_dtype), **bias_metadata)
        self.fp8_state: Fp8Variable | None = nnx.data(None)
        if isinstance(recipe, DelayedScaling):
            self.fp8_state = Fp8Variable(Fp8State.initial(recipe, groups))
        self.kernel_cache: KernelCacheVariable | None = nnx.data(None)
        if cache_kernel:
            weights = self.weights()
            self.kernel_cache = KernelCacheVariable(_layers.quantized(weights.kernel, recipe, weights.fp8_state))

    def weights(self, is_first_microbatch: ArrayLike | None = None) -> Weights:
        """Returns the product's weights: `kernel [E, K, N]`, `bias [E, N]`, `fp8_state`, `kernel_cache`; some are None.

        Raises:
            ValueError: as in `GroupedDense`.
        """
        return flat_weights(self.stored(is_first_microbatch))

    def stored(self, is_first_microbatch: ArrayLike | None = None, *, fsdp_axis: str | None = None) -> Weights:
        """Returns the same with `kernel` and `bias` in the shapes of the parameters.

        Inside `jax.shard_map`, `fsdp_axis` is an axis over which they are split, unlike `fp8_state`.
        """
        _layers.check_caching(self.recipe, self.kernel_cache is not None, is_first_microbatch)
        kernel = self.kernel[...]
        bias = None if self.bias is None else self.bias[...]
        state = None if self.fp8_state is None else self.fp8_state.get_value()
        cache = None
        if self.kernel_cache is not None and is_first_microbatch is not None:
            cache = _layers.requantized(
                kernel,
                self.recipe,
                _layers.own_state(state, kernel, fsdp_axis),
                stored=self.kernel_cache.get_value(),
                is_first_microbatch=is_first_microbatch,
            )
            if _layers.changes_cache(is_first_microbatch):
                self.kernel_cache.set_value(cache)
        return Weights(kernel, bias, cache, state)


class GroupedDense(GroupedKernel):
    """A linear layer per group: `flax.nnx.Linear` for mixture-of-experts models.

    With `DelayedScaling` the layer has an `Fp8Variable`, whose gradient is its next value. `nnx.grad(loss)` returns it
    beside the gradients of the parameters. Update both with an optimizer that knows of next values:
    `nnx.Optimizer(model, jg.overwrite_with_gradient(optimizer), wrt=jg.nnx.TRAINED)`. If several microbatches or
    devices each have a gradient, combine those of states by maximum, as `Fp8State` explains, never by a sum:
    `jax_grouped.accumulate_gradients` and `reduce_gradients` do this.

    With `cache_kernel`, microbatches share one quantization of the kernel, a `KernelCacheVariable`. The constructor
    makes it from the initial kernel. Checkpoints do not need it: `nnx.state(model, jg.nnx.TRAINED)`.

    Attributes:
        kernel: `nnx.Param`, `[E, K, N]`.
        bias: `nnx.Param`, `[E, N]`, or None.
        fp8_state: `Fp8Variable` with `DelayedScaling`, or None.
        kernel_cache: `KernelCacheVariable` with `cache_kernel`, or None.

    Args:
        in_features: `K`, the size of each input row.
        out_features: `N`, the size of each output row.
        num_groups: `E`, the number of groups (experts).
        use_bias: whether to add a bias per group.
        dtype: type of the computation and the result. Default: the promotion of the input's and parameters' types.
        param_dtype: type of the parameters. Their gradients have it too, straight from the matmul.
        precision: as in `jax_grouped.ragged_dot`; matters in float32 only.
        kernel_init: called with `(key, (E, K, N), param_dtype)`. The default is Linear's, with the group axis as a
            batch axis: every group is initialised as a Linear layer would be.
        bias_init: called with `(key, (E, N), param_dtype)`.
        recipe: how the products are computed in FP8, as in `jax_grouped.grouped_dense`; None to compute in `dtype`.
        cache_kernel: whether to have a `KernelCacheVariable`, for calls with `is_first_microbatch`. Needs a recipe.
        kernel_metadata, bias_metadata: for `nnx.Param`, for example `out_sharding=("expert", "embed", "mlp")`.
        rngs: source of the initialisers' keys.

    Example:
        from flax import nnx

        layer = jg.nnx.GroupedDense(32, 16, 2, rngs=nnx.Rngs(0))

        y = layer(jnp.ones((16, 32)), jnp.array([10, 4]))

        assert layer.kernel.shape == (2, 32, 16)
        assert y.shape == (16, 16) and not y[14:].any()
    """

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
        kernel_metadata: Mapping[str, Any] = MappingProxyType({}),
        bias_metadata: Mapping[str, Any] = MappingProxyType({}),
        rngs: nnx.Rngs,
    ):
        features = dict(in_features=in_features, out_features=out_features)
        _layers.check_layer(recipe, dict(num_groups=num_groups), features)
        super().__init__(
            (num_groups, in_features, out_features),
            kernel_init=kernel_init,
            bias_init=bias_init if use_bias else None,
            param_dtype=param_dtype,
            recipe=recipe,
            cache_kernel=cache_kernel,
            kernel_metadata=kernel_metadata,
            bias_metadata=bias_metadata,
            rngs=rngs,
        )
        self.dtype = dtype
        self.precision = precision

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
                scalar on the device makes the choice there, so that one compiled program serves all microbatches. A
                Python bool saves the CUDA kernels that would read the scalar. None quantizes, and does not store.
            accumulate_into: the gradient of the kernel so far, an array like it. The kernel's gradient is then this sum
                with that of the call added, by the matmul itself; see `dkernel_accumulator` of
                `jax_grouped.grouped_dense`.

        Returns:
            `[T, N]`; rows past `sum(group_sizes)` are zero.

        Raises:
            ValueError: there is `is_first_microbatch` without `cache_kernel`, or `accumulate_into` is not like the
                kernel.
        """
        weights = _layers.accumulating(self.weights(is_first_microbatch), "GroupedDense", accumulate_into)
        x = _layers.converted(x, weights, self.dtype)
        return grouped_dense(
            x, group_sizes=group_sizes, recipe=self.recipe, precision=self.precision, **weights._asdict()
        )

    def fwd(
        self, x: jax.Array, group_sizes: GroupSizes, *, is_first_microbatch: ArrayLike | None = None
    ) -> tuple[jax.Array, DenseResiduals]:
        """Applies the layer, and returns residuals for a backward pass in halves, as `jax_grouped.linen` describes it.

        Args:
            x: as in a call.
            group_sizes: likewise.
            is_first_microbatch: likewise.

        Returns:
            `[T, N]`, and the residuals.

        Raises:
            ValueError: as in a call.
        """
        return _layers.fwd(self, x, self.weights(is_first_microbatch), group_sizes)


class MoEMlp(nnx.Module):
    """A mixture of experts in place of a feed-forward layer: router, experts, and their weighted sum.

    This is `jax_grouped.linen.MoEMlp` for NNX. That class describes the computation, the parameters and most of the
    arguments.

    On several devices, the constructor always makes the whole parameters, which plain `jax.jit` takes too. Inside
    `jax.shard_map`, `nnx.merge` the layer from this device's part of them.

    Attributes:
        router: `nnx.Linear`, its kernel `[K, E]`.
        gate_up: `GroupedKernel` of `[E, K, 2, F]`, the gate first; of `[E, K, F]` for an `activation` without a gate.
        down: `GroupedKernel` of `[E, F, K]`.
        shared_gate_up, shared_down: `GroupedKernel` of `[1, K, 2, S]` and of `[1, S, K]` with `shared_features`, or
            None.
        selection_bias: `SelectionBias` of `float32[E]` with `use_selection_bias`, or None.

    Args:
        features: `K`, features of a token.
        num_experts, top_k, hidden_features: `E`, experts per token, and `F`.
        score, normalize_weights, weight_scale, capacity_factor: as in linen.
        use_bias, dtype, param_dtype, precision, router_init, gate_up_init, down_init, bias_init: as in linen.
        recipe, cache_kernel: as in `GroupedDense`.
        expert_axis, feature_axis, fsdp_axis, batch_axes: as in linen.
        exchange_method, quantized_exchange, quantized_combine: as in linen.
        expert_groups, top_groups, activation: as in linen.
        use_router_bias, use_selection_bias, balance_sequences, shared_features: as in linen.
        logical_axes: likewise; the names are the `out_sharding` of each `nnx.Param`.
        rngs: source of the initialisers' keys.

    Example:
        from flax import nnx

        layer = jg.nnx.MoEMlp(32, num_experts=4, top_k=2, hidden_features=16, rngs=nnx.Rngs(0))
        x = jnp.ones((2, 4, 32))

        y, metrics = nnx.jit(lambda layer, x: layer(x))(layer, x)

        assert y.shape == x.shape and int(metrics.dropped) == 0
    """

    def __init__(
        self,
        features: int,
        *,
        num_experts: int,
        top_k: int,
        hidden_features: int,
        score: Score = "softmax",
        normalize_weights: bool = True,
        weight_scale: float = 1.0,
        capacity_factor: float | None = None,
        use_bias: bool = False,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        precision: jax.lax.PrecisionLike = None,
        router_init: Initializer = nnx.nn.linear.default_kernel_init,
        gate_up_init: Initializer = default_kernel_init,
        down_init: Initializer = default_kernel_init,
        bias_init: Initializer = jax.nn.initializers.zeros,
        recipe: Recipe | None = None,
        cache_kernel: bool = False,
        expert_axis: str | None = None,
        feature_axis: str | None = None,
        fsdp_axis: str | None = None,
        batch_axes: Sequence[str] = (),
        exchange_method: ExchangeMethod = "auto",
        quantized_exchange: bool = True,
        quantized_combine: bool = False,
        expert_groups: int | None = None,
        top_groups: int | None = None,
        activation: Activation = "silu_mul",
        use_router_bias: bool = False,
        use_selection_bias: bool = False,
        balance_sequences: bool = False,
        shared_features: int | None = None,
        logical_axes: LogicalAxes | None = None,
        rngs: nnx.Rngs,
    ):
        counts = dict(num_experts=num_experts, top_k=top_k)
        sizes = dict(features=features, hidden_features=hidden_features)
        if shared_features is not None:
            sizes |= dict(shared_features=shared_features)
        _layers.check_layer(recipe, counts, sizes)
        checks.check_activation_name(activation)
        names = _layers.axis_names(logical_axes, activation)

        def metadata(parameter: str) -> dict[str, Any]:
            return {"out_sharding": names[parameter]} if names else {}

        self.router = nnx.Linear(
            features,
            num_experts,
            use_bias=use_router_bias,
            dtype=jnp.float32,
            param_dtype=param_dtype,
            kernel_init=router_init,
            bias_init=bias_init,
            kernel_metadata=metadata("router"),
            bias_metadata=metadata("router bias"),
            rngs=rngs,
        )

        def kernel(name: str, shape: tuple[int, ...], kernel_init: Initializer, *, use_bias: bool) -> GroupedKernel:
            return GroupedKernel(
                shape,
                kernel_init=kernel_init,
                bias_init=bias_init if use_bias else None,
                param_dtype=param_dtype,
                recipe=recipe,
                cache_kernel=cache_kernel,
                kernel_metadata=metadata(name),
                bias_metadata=metadata(f"{name} bias") if use_bias else {},
                rngs=rngs,
            )

        self.features = features
        self.num_experts = num_experts
        self.hidden_features = hidden_features
        gate_up_shape = _layers.gate_up_shape(num_experts, features, hidden_features, activation)
        self.gate_up = kernel("gate_up", gate_up_shape, gate_up_init, use_bias=use_bias)
        self.down = kernel("down", (num_experts, hidden_features, features), down_init, use_bias=use_bias)
        self.shared_gate_up: GroupedKernel | None = nnx.data(None)
        self.shared_down: GroupedKernel | None = nnx.data(None)
        if shared_features is not None:
            shared_shape = _layers.gate_up_shape(1, features, shared_features, activation)
            self.shared_gate_up = kernel("shared_gate_up", shared_shape, gate_up_init, use_bias=False)
            self.shared_down = kernel("shared_down", (1, shared_features, features), down_init, use_bias=False)
        self.selection_bias: SelectionBias | None = nnx.data(None)
        if use_selection_bias:
            self.selection_bias = SelectionBias(jnp.zeros(num_experts, jnp.float32), **metadata("selection_bias"))
        self.top_k = top_k
        self.score = score
        self.normalize_weights = normalize_weights
        self.weight_scale = weight_scale
        self.capacity_factor = capacity_factor
        self.dtype = dtype
        self.precision = precision
        self.recipe = recipe
        self.expert_axis = expert_axis
        self.feature_axis = feature_axis
        self.fsdp_axis = fsdp_axis
        self.batch_axes = (batch_axes,) if isinstance(batch_axes, str) else tuple(batch_axes)
        self.exchange_method = exchange_method
        self.quantized_exchange = quantized_exchange
        self.quantized_combine = quantized_combine
        self.expert_groups = expert_groups
        self.top_groups = top_groups
        self.activation = activation
        self.balance_sequences = balance_sequences

    def __call__(
        self,
        x: jax.Array,
        *,
        selection_bias: jax.Array | None = None,
        is_first_microbatch: ArrayLike | None = None,
        shared: jax.Array | None = None,
        accumulate_into: Mapping[str, jax.Array] | None = None,
    ) -> tuple[jax.Array, MoEMetrics]:
        """Applies to every token the experts that the router chooses for it.

        Args:
            x: `[..., K]`, tokens of any leading shape.
            selection_bias: `[E]`, see `jg.moe.top_k_routing`; in place of the layer's own, if it has one.
            is_first_microbatch: as in `GroupedDense`.
            shared: `[..., K]`, the result of an expert that all tokens share, see `jg.moe.moe_mlp`; added to that of
                the layer's own, if it has one.
            accumulate_into: gradients so far of the kernels of `gate_up`, `down` or both, by these names; as in
                `GroupedDense`.

        Returns:
            `[..., K]`, and the metrics.

        Raises:
            ValueError: a size does not fit, or as in `GroupedDense`.
        """
        axes = _layers.axes_of(self)
        experts = _layers.local_size("num_experts", self.num_experts, axes.stored)
        hidden = _layers.local_size("hidden_features", self.hidden_features, (axes.feature,))
        gate_up_shape = _layers.gate_up_shape(experts, self.features, hidden, self.activation)
        self._check_part("gate_up", self.gate_up, gate_up_shape, axes)
        self._check_part("down", self.down, (experts, hidden, self.features), axes)
        gate_up, down = (
            kernel.stored(is_first_microbatch, fsdp_axis=axes.fsdp) for kernel in (self.gate_up, self.down)
        )
        of_shared = (of for of in (self.shared_gate_up, self.shared_down) if of is not None)
        shared_expert = [of.stored(is_first_microbatch) for of in of_shared]
        if selection_bias is None and self.selection_bias is not None:
            selection_bias = self.selection_bias[...]
        return _layers.apply_moe(
            self, axes, x, self.router, gate_up, down, selection_bias, shared, shared_expert, accumulate_into
        )

    def _check_part(self, name: str, weights: GroupedKernel, shape: tuple[int, ...], axes: MoEAxes) -> None:
        given = {"kernel": weights.kernel[...], "bias": None if weights.bias is None else weights.bias[...]}
        _layers.check_part(name, given, shape, (*axes.stored, axes.feature))


def load_variables(layer: nnx.Module, variables: Mapping[str, Any]) -> None:
    """Loads variables of a linen layer into the NNX layer of the same name; kernel caches are made anew.

    Args:
        layer: changed in place. Variables that have no new value stay.
        variables: arrays in the structure of linen, such as `jg.moe.from_huggingface` returns. They are converted to
            the types of the layer's variables.

    Returns:
        Nothing.

    Raises:
        ValueError: the layer has no such variable, or one of another shape. The layer may have changed.

    Example:
        from flax import nnx

        options = dict(num_experts=4, top_k=2, hidden_features=16)
        variables = jg.linen.MoEMlp(**options).init(jax.random.key(0), jnp.ones((8, 32)))
        layer = jg.nnx.MoEMlp(32, **options, rngs=nnx.Rngs(1))

        jg.nnx.load_variables(layer, variables)

        assert jnp.array_equal(layer.router.kernel, variables["params"]["router"]["kernel"])
    """
    for collection in variables.values():
        for path, array in jax.tree.leaves_with_path(collection):
            names = [key.key for key in path]
            variable: Any = layer
            for name in names:
                variable = getattr(variable, name, None)
            if not isinstance(variable, nnx.Variable):
                raise ValueError(f"The layer has no variable {'/'.join(names)}.")
            if jnp.shape(variable[...]) != jnp.shape(array):
                raise ValueError(
                    f"{'/'.join(names)} must have shape {jnp.shape(variable[...])}, got {jnp.shape(array)}."
                )
            variable.set_value(jnp.asarray(array, variable[...].dtype))
    for _, module in nnx.iter_modules(layer):
        if isinstance(module, GroupedKernel) and module.kernel_cache is not None:
            stored = module.stored()
            module.kernel_cache.set_value(_layers.quantized(stored.kernel, module.recipe, stored.fp8_state))


def linen_variables(layer: nnx.Module) -> dict[str, Any]:
    """Returns the parameters and selection biases of a layer in the structure of linen: `load_variables` undone.

    Args:
        layer: any module. States of `DelayedScaling` and kernel caches are left out.

    Returns:
        `{"params": {...}}` and, if there are selection biases, `{"router_state": {...}}`, of arrays.

    Example:
        from flax import nnx

        layer = jg.nnx.MoEMlp(32, num_experts=4, top_k=2, hidden_features=16, rngs=nnx.Rngs(0))

        assert jg.nnx.linen_variables(layer)["params"]["down"]["kernel"].shape == (4, 16, 32)
    """
    filters: dict[str, Any] = {"params": nnx.All(nnx.Param, nnx.Not(Fp8Variable)), "router_state": SelectionBias}
    collections = {name: nnx.to_pure_dict(nnx.state(layer, of)) for name, of in filters.items()}
    return {name: variables for name, variables in collections.items() if variables}


def __dir__() -> list[str]:
    return sorted(__all__)
