"""Flax linen layers."""

import dataclasses
from collections.abc import Mapping, Sequence

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
    import flax.linen as nn
    from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
except ModuleNotFoundError as error:
    raise ModuleNotFoundError('jax_grouped.linen needs Flax: python3 -m pip install "flax>=0.12"') from error

__all__ = ["KERNEL_CACHE", "ROUTER_STATE", "GroupedDense", "GroupedKernel", "MoEMlp", "default_kernel_init"]

#: Name of the collection of quantized kernels that microbatches share.
KERNEL_CACHE = "kernel_cache"
#: Name of the collection of what a router keeps besides its parameters: the bias for the choice of experts.
ROUTER_STATE = "router_state"


class GroupedDense(nn.Module):
    """A linear layer per group: `flax.linen.Dense` for mixture-of-experts models.

    The parameters are `kernel` `[E, K, N]` and, with `use_bias`, `bias` `[E, N]`. Wrap the initialisers with
    `flax.linen.with_logical_partitioning` to name their axes, for example `("expert", "embed", "mlp")`.

    With `DelayedScaling` the arrays of `jax_grouped.Fp8State` are variables too, in Flax's collection
    `_overwrite_with_gradient` under the names of its fields. Their gradient is their next value. If the `params` of a
    `flax.training.train_state.TrainState` are all variables, the collection `params` and this one, it replaces the
    arrays with their gradient and shows its optimizer only the parameters. If several microbatches, devices or uses of
    one layer each have a gradient, combine those of this collection by maximum, as `Fp8State` explains, never by a sum:
    `jax_grouped.accumulate_gradients`, `reduce_gradients` and `overwrite_with_gradient` do this.

    With `cache_kernel`, microbatches share one quantization of the kernel: a `jax_grouped.KernelCache`, the variable
    `kernel` of the collection `kernel_cache`. It is no parameter and has no gradient: do not differentiate with respect
    to it, and keep it out of checkpoints. `init` makes it from the initial kernel, and
    `apply(..., is_first_microbatch=True, mutable=["kernel_cache"])` returns a new one beside the result.

    Attributes:
        features: `N`, the size of each output row.
        num_groups: `E`, the number of groups (experts).
        use_bias: whether to add a bias per group.
        dtype: type of the computation and the result. Default: the promotion of the input's and parameters' types.
        param_dtype: type of the parameters. Their gradients have it too, straight from the matmul.
        precision: as in `jax_grouped.ragged_dot`; matters in float32 only.
        kernel_init: called with `(key, (E, K, N), param_dtype)`. The default is Dense's, with the group axis as a batch
            axis: every group is initialised as a Dense layer would be.
        bias_init: called with `(key, (E, N), param_dtype)`.
        recipe: how the products are computed in FP8, as in `jax_grouped.grouped_dense`; None to compute in `dtype`.
        cache_kernel: whether to have the collection `kernel_cache`, for calls with `is_first_microbatch`. Needs a
            recipe.

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

    def __post_init__(self) -> None:
        super().__post_init__()
        _layers.check_layer(self.recipe, dict(num_groups=self.num_groups), dict(features=self.features))

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
            ValueError: there is `is_first_microbatch` without `cache_kernel`, or `cache_kernel` without a recipe, or
                the collection `kernel_cache` would have to be written but is not mutable, or `accumulate_into` is not
                like the kernel.
        """
        weights = self._weights(x, is_first_microbatch)
        weights = _layers.accumulating(weights, "GroupedDense", accumulate_into)
        x = _layers.converted(x, weights, self.dtype)
        return grouped_dense(
            x, group_sizes=group_sizes, recipe=self.recipe, precision=self.precision, **weights._asdict()
        )

    def fwd(
        self, x: jax.Array, group_sizes: GroupSizes, *, is_first_microbatch: ArrayLike | None = None
    ) -> tuple[jax.Array, DenseResiduals]:
        """Applies the layer as a call does, and returns residuals for a backward pass in halves.

        `jax_grouped.grouped_dense_dgrad` and `grouped_dense_wgrad` take them, which delays the kernel's gradient. JAX
        does not differentiate the result. Call it as `layer.apply(variables, x, group_sizes, method="fwd")`.

        Args:
            x: as in a call.
            group_sizes: likewise.
            is_first_microbatch: likewise.

        Returns:
            `[T, N]`, and the residuals.

        Raises:
            ValueError: as in a call.
        """
        return _layers.fwd(self, x, self._weights(x, is_first_microbatch), group_sizes)

    @nn.compact
    def _weights(self, x: jax.Array, is_first_microbatch: ArrayLike | None) -> Weights:
        kernel = GroupedKernel(
            (self.num_groups, _layers.num_features(x, "[T, K]"), self.features),
            kernel_init=self.kernel_init,
            bias_init=self.bias_init if self.use_bias else None,
            param_dtype=self.param_dtype,
            recipe=self.recipe,
            cache_kernel=self.cache_kernel,
        )
        # Put the variables of `kernel` directly into this layer's scope.
        nn.share_scope(self, kernel)
        return kernel(is_first_microbatch)


class GroupedKernel(nn.Module):
    """The variables of one stack of kernels, for layers made of `jax_grouped.grouped_dense` and its like.

    They are the variables of `GroupedDense`, which describes each: `kernel`, `bias`, the state of `DelayedScaling`, and
    the quantized kernel that microbatches share.

    Attributes:
        shape: `(E, K, ...)` of the parameter; its last axes are `N` features for the product and the quantization.
        kernel_init: called with `(key, shape, param_dtype)`.
        bias_init: called with `(key, (E, ...), param_dtype)`; None for no bias.
        param_dtype: type of the parameters.
        recipe, cache_kernel: as in `GroupedDense`.

    Example:
        import flax.linen as nn

        class Transposed(nn.Module):
            @nn.compact
            def __call__(self, x, group_sizes):
                weights = jg.linen.GroupedKernel((2, 32, 16), name="experts")()
                return jg.ragged_dot(x, weights.kernel.transpose(0, 2, 1), group_sizes)

        y, _ = Transposed().init_with_output(jax.random.key(0), jnp.ones((16, 16)), jnp.array([10, 4]))

        assert y.shape == (16, 32)
    """

    shape: tuple[int, ...]
    kernel_init: Initializer = default_kernel_init
    bias_init: Initializer | None = None
    param_dtype: DTypeLike = jnp.float32
    recipe: Recipe | None = None
    cache_kernel: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        _layers.check_layer(self.recipe, {}, {})

    def __call__(self, is_first_microbatch: ArrayLike | None = None) -> Weights:
        """Returns the product's weights: `kernel [E, K, N]`, `bias [E, N]`, `fp8_state`, `kernel_cache`; some are None.

        Raises:
            ValueError: as in `GroupedDense`.
        """
        return flat_weights(self.stored(is_first_microbatch))

    @nn.compact
    def stored(self, is_first_microbatch: ArrayLike | None = None, *, fsdp_axis: str | None = None) -> Weights:
        """Returns the same with `kernel` and `bias` in the shapes of the parameters.

        Inside `jax.shard_map`, `fsdp_axis` is an axis over which they are split, unlike `fp8_state`.
        """
        _layers.check_caching(self.recipe, self.cache_kernel, is_first_microbatch)
        groups, _, *features = self.shape
        kernel = self.param("kernel", self.kernel_init, self.shape, self.param_dtype)
        bias = None
        if self.bias_init is not None:
            bias = self.param("bias", self.bias_init, (groups, *features), self.param_dtype)
        state = self._fp8_state(self.recipe) if isinstance(self.recipe, DelayedScaling) else None
        cache = None
        if self.cache_kernel:
            cache = self._kernel_cache(kernel, _layers.own_state(state, kernel, fsdp_axis), is_first_microbatch)
        return Weights(kernel, bias, cache, state)

    def _fp8_state(self, recipe: DelayedScaling) -> Fp8State:
        """Returns the variables of delayed scaling, which `init` creates."""
        # Flax would create them again in every step if their collection were mutable.
        names = [field.name for field in dataclasses.fields(Fp8State)]
        if not self.is_initializing() and not all(self.has_variable(OVERWRITE_WITH_GRADIENT, name) for name in names):
            raise ValueError(
                f"DelayedScaling needs the collection {OVERWRITE_WITH_GRADIENT}, which init makes beside params: pass "
                f"apply both, as {{'params': ..., '{OVERWRITE_WITH_GRADIENT}': ...}}."
            )

        def initial(name: str) -> jax.Array:
            return getattr(Fp8State.initial(recipe, self.shape[0]), name)

        def variable(name: str) -> jax.Array:
            return self.variable(OVERWRITE_WITH_GRADIENT, name, initial, name).value

        return Fp8State(**{name: variable(name) for name in names})

    def _kernel_cache(
        self, kernel: jax.Array, state: Fp8State | None, is_first_microbatch: ArrayLike | None
    ) -> KernelCache | None:
        """Returns the quantized kernel that this microbatch multiplies by, and stores it if it is new."""
        if is_first_microbatch is None and not self.is_initializing():
            return None
        changes = _layers.changes_cache(is_first_microbatch)
        if changes and not self.is_mutable_collection(KERNEL_CACHE):
            raise ValueError(
                f"The collection {KERNEL_CACHE} is not mutable, and is_first_microbatch={is_first_microbatch} writes "
                f'it: pass mutable=["{KERNEL_CACHE}"] to apply, or is_first_microbatch=False to read it only.'
            )
        if not changes and not self.is_initializing() and not self.has_variable(KERNEL_CACHE, "kernel"):
            raise ValueError(
                f"is_first_microbatch={is_first_microbatch} needs the collection {KERNEL_CACHE}: pass apply the one "
                "that the first microbatch returned."
            )
        variable = self.variable(KERNEL_CACHE, "kernel", _layers.quantized, kernel, self.recipe, state)
        if is_first_microbatch is None:
            return None
        if changes:
            variable.value = _layers.requantized(
                kernel, self.recipe, state, stored=variable.value, is_first_microbatch=is_first_microbatch
            )
        return variable.value


class MoEMlp(nn.Module):
    """A mixture of experts in place of a feed-forward layer: router, experts, and their weighted sum.

    No token is dropped unless there is a `capacity_factor`. Nothing is read on the host. The router computes in
    float32, because its choice is discrete. The parameters are `router/kernel` `[K, E]`, `gate_up/kernel`
    `[E, K, 2, F]` with the gate first, `down/kernel` `[E, F, K]`, and with `use_bias` `gate_up/bias` `[E, 2, F]` and
    `down/bias` `[E, K]`; with an `activation` that has no gate, `gate_up` has no axis of 2. Options add `router/bias`
    `[E]`, and `shared_gate_up/kernel` `[1, K, 2, S]` with `shared_down/kernel` `[1, S, K]`. The state of
    `DelayedScaling` and the kernels that microbatches share are variables as in `GroupedDense`, below `gate_up` and
    `down`.

    On several devices, `init` always makes the whole parameters. Under plain `jax.jit`, `apply` takes them whole too,
    and splits the computation over a mesh that has the axes, as `jg.moe.moe_mlp` says. Inside `jax.shard_map` it takes
    this device's part of them. Best stored, and so split for `shard_map`, are `gate_up` as `P(expert_axis, None, None,
    feature_axis)`, with one `None` if there is no gate, `down` as `P(expert_axis, feature_axis)`, states as
    `P(expert_axis)`, and the router whole. With an `fsdp_axis`, the experts of kernels, biases and caches are split
    over `(expert_axis, fsdp_axis)`, in this order.

    Attributes:
        num_experts: `E`, on all devices together.
        top_k: experts per token.
        hidden_features: `F`, features inside an expert, on all devices together.
        score, normalize_weights, weight_scale: how the router's choices are weighted, see `jg.moe.top_k_routing`.
        capacity_factor: room for rows, in multiples of an even share, see `jg.moe.moe_mlp`; None for the worst case.
        use_bias: whether the experts' products add a bias.
        dtype: type of the experts' computation and of the result. Default: the promotion of the input's and
            parameters' types.
        param_dtype: type of the parameters. Their gradients have it too, straight from the matmul.
        precision: as in `jax_grouped.ragged_dot`; matters in float32 only.
        router_init, gate_up_init, down_init, bias_init: called with `(key, shape, param_dtype)`.
        recipe: how the experts compute in FP8; None to compute in `dtype`.
        cache_kernel: as in `GroupedDense`.
        expert_axis, feature_axis, fsdp_axis, batch_axes: as in `jg.moe.moe_mlp`.
        exchange_method, quantized_exchange, quantized_combine: likewise.
        expert_groups, top_groups: likewise.
        activation: that of the experts, see `jg.moe.grouped_mlp`.
        use_router_bias: whether the router adds a bias to its logits.
        use_selection_bias: whether the layer keeps a `selection_bias` `float32[E]`, see `jg.moe.top_k_routing`, which
            starts at 0 and has no gradient: a variable of the collection `ROUTER_STATE`, whose next value
            `jg.moe.update_selection_bias` returns.
        balance_sequences: whether the balance loss is the mean of the losses of sequences, for `x` `[..., length, K]`;
            see `num_sequences` of `jg.moe.moe_mlp`.
        shared_features: features of an expert that all tokens share, which computes as the others do; None for none.
            It has no bias. Every device computes it for its own tokens.
        logical_axes: names of the axes of experts, of `K` and of `F`, such as `("expert", "embed", "mlp")`. The
            parameters then carry them, as with `flax.linen.with_logical_partitioning`.

    Example:
        layer = jg.linen.MoEMlp(num_experts=4, top_k=2, hidden_features=16)
        x = jnp.ones((2, 4, 32))

        def loss(variables, x):
            y, metrics = layer.apply(variables, x)
            return jnp.mean(y**2) + 0.01 * metrics.balance_loss

        # Shapes only: leave eval_shape out for parameters and gradients.
        variables = jax.eval_shape(layer.init, jax.random.key(0), x)
        gradients = jax.eval_shape(jax.grad(loss), variables, x)

        assert gradients["params"]["gate_up"]["kernel"].shape == (4, 32, 2, 16)
    """

    num_experts: int
    top_k: int
    hidden_features: int
    score: Score = "softmax"
    normalize_weights: bool = True
    weight_scale: float = 1.0
    capacity_factor: float | None = None
    use_bias: bool = False
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32
    precision: jax.lax.PrecisionLike = None
    router_init: Initializer = nn.linear.default_kernel_init
    gate_up_init: Initializer = default_kernel_init
    down_init: Initializer = default_kernel_init
    bias_init: Initializer = nn.initializers.zeros_init()
    recipe: Recipe | None = None
    cache_kernel: bool = False
    expert_axis: str | None = None
    feature_axis: str | None = None
    fsdp_axis: str | None = None
    batch_axes: Sequence[str] = ()
    exchange_method: ExchangeMethod = "auto"
    quantized_exchange: bool = True
    quantized_combine: bool = False
    expert_groups: int | None = None
    top_groups: int | None = None
    activation: Activation = "silu_mul"
    use_router_bias: bool = False
    use_selection_bias: bool = False
    balance_sequences: bool = False
    shared_features: int | None = None
    logical_axes: LogicalAxes | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        counts = dict(num_experts=self.num_experts, top_k=self.top_k)
        sizes = dict(hidden_features=self.hidden_features)
        if self.shared_features is not None:
            sizes |= dict(shared_features=self.shared_features)
        _layers.check_layer(self.recipe, counts, sizes)
        checks.check_activation_name(self.activation)
        _layers.axis_names(self.logical_axes, self.activation)

    @nn.compact
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
        features = _layers.num_features(x, "[..., K]")
        axes = _layers.axes_of(self)
        if self.is_initializing() and not _layers.has_sharded_type(x):
            # `init` makes the whole parameters, also inside `jax.shard_map`, and takes any number of tokens.
            axes = MoEAxes.of()
        experts = _layers.local_size("num_experts", self.num_experts, axes.stored)
        hidden = _layers.local_size("hidden_features", self.hidden_features, (axes.feature,))

        names = _layers.axis_names(self.logical_axes, self.activation)

        def named(init: Initializer, parameter: str) -> Initializer:
            return nn.with_logical_partitioning(init, names[parameter]) if names else init

        def kernel(name: str, shape: tuple[int, ...], kernel_init: Initializer, *, use_bias: bool) -> GroupedKernel:
            return GroupedKernel(
                shape,
                kernel_init=named(kernel_init, name),
                bias_init=named(self.bias_init, f"{name} bias") if use_bias else None,
                param_dtype=self.param_dtype,
                recipe=self.recipe,
                cache_kernel=self.cache_kernel,
                name=name,
            )

        def weights(name: str, shape: tuple[int, ...], kernel_init: Initializer) -> Weights:
            given = self.variables.get("params", {}).get(name, {})
            _layers.check_part(name, given, shape, (*axes.stored, axes.feature))
            of_experts = kernel(name, shape, kernel_init, use_bias=self.use_bias)
            return of_experts.stored(is_first_microbatch, fsdp_axis=axes.fsdp)

        router = nn.Dense(
            self.num_experts,
            use_bias=self.use_router_bias,
            dtype=jnp.float32,
            param_dtype=self.param_dtype,
            kernel_init=named(self.router_init, "router"),
            bias_init=named(self.bias_init, "router bias"),
            name="router",
        )
        if self.use_selection_bias:
            init = named(nn.initializers.zeros_init(), "selection_bias")
            own = self.variable(ROUTER_STATE, "selection_bias", init, None, (self.num_experts,), jnp.float32)
            selection_bias = own.value if selection_bias is None else selection_bias
        gate_up = weights(
            "gate_up", _layers.gate_up_shape(experts, features, hidden, self.activation), self.gate_up_init
        )
        down = weights("down", (experts, hidden, features), self.down_init)
        shared_expert: list[Weights] = []
        if self.shared_features is not None:
            shape = _layers.gate_up_shape(1, features, self.shared_features, self.activation)
            of_shared = (
                kernel("shared_gate_up", shape, self.gate_up_init, use_bias=False),
                kernel("shared_down", (1, self.shared_features, features), self.down_init, use_bias=False),
            )
            shared_expert = [of.stored(is_first_microbatch) for of in of_shared]
        return _layers.apply_moe(
            self, axes, x, router, gate_up, down, selection_bias, shared, shared_expert, accumulate_into
        )


def __dir__() -> list[str]:
    return sorted(__all__)
