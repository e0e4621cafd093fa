"""The layer of a whole mixture of experts."""

from collections.abc import Mapping

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.core import Scope
from jax.typing import ArrayLike, DTypeLike

from jax_grouped import _layers
from jax_grouped._layers import Initializer, LogicalAxes, MoEInitializers
from jax_grouped.fp8.recipes import Recipe
from jax_grouped.kernels.activations import Activation
from jax_grouped.linen.dense import GroupedKernel, set_canonical_fields
from jax_grouped.moe.layer import MoEMetrics
from jax_grouped.moe.options import Parallel, Router
from jax_grouped.ops.inputs import Weights

#: Name of the collection of what a router keeps besides its parameters: the bias for the choice of experts.
ROUTER_STATE = "router_state"


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
    this device's part of them. Best stored, and so split for `shard_map`, are `gate_up` as `P(experts, None, None,
    features)` of the axes that `parallel` names, with one `None` if there is no gate, `down` as `P(experts, features)`,
    states as `P(experts)`, and the router whole. With an `fsdp` axis, the experts of kernels, biases and caches are
    split over `(experts, fsdp)`, in this order.

    Attributes:
        num_experts: `E`, on all devices together.
        hidden_features: `F`, features inside an expert, on all devices together.
        router: how experts are chosen and weighted, see `jg.moe.Router`. With `top_k=1`, pass `normalize=False`: a
            normalised weight is always 1, and a router with such weights learns from balance losses only. The
            constructor warns of it. A `selection_bias` of the layer's own is a variable of the collection
            `ROUTER_STATE`, whose next value `jg.moe.update_selection_bias` returns.
        parallel: how the experts and the tokens are split over devices, see `jg.moe.Parallel`.
        activation: that of the experts, see `jg.moe.grouped_mlp`.
        shared_features: features of an expert that all tokens share, which computes as the others do; None for none.
            It has no bias. Every device computes it for its own tokens.
        recipe: how the experts compute in FP8; None to compute in `dtype`.
        cache_kernel: as in `GroupedDense`.
        use_bias: whether the experts' products add a bias.
        dtype: type of the experts' computation and of the result. Default: the promotion of the input's and
            parameters' types.
        param_dtype: type of the parameters. Their gradients have it too, straight from the matmul.
        precision: as in `jax_grouped.ragged_dot`; matters in float32 only.
        initializers: of the parameters.
        logical_axes: names of the axes of experts, of `K` and of `F`, such as `("expert", "embed", "mlp")`. The
            parameters then carry them, as with `flax.linen.with_logical_partitioning`.

    Example:
        layer = jg.linen.MoEMlp(num_experts=4, hidden_features=16, router=jg.moe.Router(top_k=2))
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
    hidden_features: int
    router: Router
    parallel: Parallel = Parallel()
    activation: Activation = "swiglu"
    shared_features: int | None = None
    recipe: Recipe | None = None
    cache_kernel: bool = False
    use_bias: bool = False
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32
    precision: jax.lax.PrecisionLike = None
    initializers: MoEInitializers = MoEInitializers()
    logical_axes: LogicalAxes | None = None

    def __post_init__(self) -> None:
        is_bound = isinstance(self.parent, Scope)  # Flax makes such copies of a layer that the user has made.
        super().__post_init__()
        set_canonical_fields(self)
        if not is_bound:
            _layers.check_moe_options(self.router, self.parallel, self.activation, self.num_experts)
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
            accumulate_into: gradients so far of kernels, by the names `gate_up`, `down`, and of a shared expert
                `shared_gate_up`, `shared_down`, or some of these; as in `GroupedDense`. Inside `jax.shard_map`, the
                kernels of a shared expert, which all devices have, need `jax.lax.pcast`.

        Returns:
            `[..., K]`, and the metrics.

        Raises:
            ValueError: a size does not fit, or as in `GroupedDense`.
        """
        features = _layers.num_features(x, "[..., K]")
        options, parallel, initializers = self.router, self.parallel, self.initializers
        if self.is_initializing() and not _layers.has_sharded_type(x):
            # `init` makes the whole parameters, also inside `jax.shard_map`, and takes any number of tokens.
            parallel = Parallel()
        experts = _layers.local_size("num_experts", self.num_experts, parallel.storage_axes)
        hidden = _layers.local_size("hidden_features", self.hidden_features, (parallel.features,))

        names = _layers.axis_names(self.logical_axes, self.activation)

        def named(init: Initializer, parameter: str) -> Initializer:
            return nn.with_logical_partitioning(init, names[parameter]) if names else init

        def kernel(name: str, shape: tuple[int, ...], kernel_init: Initializer, *, use_bias: bool) -> GroupedKernel:
            return GroupedKernel(
                shape,
                kernel_init=named(kernel_init, name),
                bias_init=named(initializers.bias, f"{name} bias") if use_bias else None,
                param_dtype=self.param_dtype,
                recipe=self.recipe,
                cache_kernel=self.cache_kernel,
                dtype=self.dtype,
                name=name,
            )

        def weights(name: str, shape: tuple[int, ...], kernel_init: Initializer) -> Weights:
            given = self.variables.get("params", {}).get(name, {})
            _layers.check_part(name, given, shape, (*parallel.storage_axes, parallel.features))
            experts_kernel = kernel(name, shape, kernel_init, use_bias=self.use_bias)
            return experts_kernel.stored(is_first_microbatch, fsdp_axis=parallel.fsdp)

        router = nn.Dense(
            self.num_experts,
            use_bias=options.use_bias,
            dtype=jnp.float32,
            param_dtype=self.param_dtype,
            kernel_init=named(initializers.router, "router"),
            bias_init=named(initializers.bias, "router bias"),
            name="router",
        )
        if options.use_selection_bias and (selection_bias is None or self.is_initializing()):
            init = named(nn.initializers.zeros_init(), "selection_bias")
            own = self.variable(ROUTER_STATE, "selection_bias", init, None, (self.num_experts,), jnp.float32)
            selection_bias = own.value
        gate_up = weights(
            "gate_up", _layers.gate_up_shape(experts, features, hidden, self.activation), initializers.gate_up
        )
        down = weights("down", (experts, hidden, features), initializers.down)
        shared_expert: list[Weights] = []
        if self.shared_features is not None:
            shape = _layers.gate_up_shape(1, features, self.shared_features, self.activation)
            shared_kernels = (
                kernel("shared_gate_up", shape, initializers.gate_up, use_bias=False),
                kernel("shared_down", (1, self.shared_features, features), initializers.down, use_bias=False),
            )
            shared_expert = [kernel.stored(is_first_microbatch) for kernel in shared_kernels]
        return _layers.apply_moe(
            self, options, parallel, x, router, gate_up, down, selection_bias, shared, shared_expert, accumulate_into
        )
