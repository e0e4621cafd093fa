"""The layer of a whole mixture of experts."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import ArrayLike, DTypeLike

from jax_grouped import _layers
from jax_grouped._layers import Initializer, LogicalAxes, MoEInitializers
from jax_grouped.fp8.recipes import Recipe
from jax_grouped.kernels.activations import Activation
from jax_grouped.moe.layer import MoEMetrics
from jax_grouped.moe.options import Parallel, Router
from jax_grouped.nnx.dense import GroupedKernel


class SelectionBias(nnx.Variable[jax.Array]):
    """The bias of a router for the choice of experts, `float32[E]`. It has no gradient.

    Example:
        from flax import nnx

        router = jg.moe.Router(top_k=2, use_selection_bias=True)
        layer = jg.nnx.MoEMlp(32, num_experts=4, hidden_features=16, router=router, rngs=nnx.Rngs(0))

        _, metrics = layer(jnp.ones((8, 32)))
        layer.selection_bias[...] = jg.moe.update_selection_bias(layer.selection_bias[...], metrics.expert_load)

        assert isinstance(layer.selection_bias, jg.nnx.SelectionBias)
        assert jnp.abs(layer.selection_bias[...]).max() > 0
    """


class MoEMlp(nnx.Module):
    """A mixture of experts in place of a feed-forward layer: router, experts, and their weighted sum.

    This is `jax_grouped.linen.MoEMlp` for NNX. That class describes the computation, the parameters and most of the
    arguments.

    On several devices, the constructor always makes the whole parameters, which plain `jax.jit` takes too. Inside
    `jax.shard_map`, `nnx.merge` the layer from this device's part of them.

    Attributes:
        router: `nnx.Linear`, its kernel `[K, E]`.
        router_options: the `Router`.
        gate_up: `GroupedKernel` of `[E, K, 2, F]`, the gate first; of `[E, K, F]` for an `activation` without a gate.
        down: `GroupedKernel` of `[E, F, K]`.
        shared_gate_up, shared_down: `GroupedKernel` of `[1, K, 2, S]` and of `[1, S, K]` with `shared_features`, or
            None.
        selection_bias: `SelectionBias` of `float32[E]` if the router uses one, or None.

    Args:
        features: `K`, features of a token.
        num_experts, hidden_features: `E` and `F`.
        router, parallel, activation, shared_features, recipe, cache_kernel: as in linen.
        use_bias, dtype, param_dtype, precision, initializers: as in linen.
        logical_axes: likewise; the names are the `out_sharding` of each `nnx.Param`.
        rngs: source of the initialisers' keys.

    Example:
        from flax import nnx

        router = jg.moe.Router(top_k=2)
        layer = jg.nnx.MoEMlp(32, num_experts=4, hidden_features=16, router=router, rngs=nnx.Rngs(0))
        x = jnp.ones((2, 4, 32))

        y, metrics = nnx.jit(lambda layer, x: layer(x))(layer, x)

        assert y.shape == x.shape and not metrics.dropped.any()
    """

    @_layers.with_canonical_fields
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
        recipe: Recipe | None = None,
        cache_kernel: bool = False,
        use_bias: bool = False,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        precision: jax.lax.PrecisionLike = None,
        initializers: MoEInitializers = MoEInitializers(),
        logical_axes: LogicalAxes | None = None,
        rngs: nnx.Rngs,
    ):
        _layers.check_moe_options(router, parallel, activation, num_experts)
        names = _layers.axis_names(logical_axes, activation)

        def metadata(parameter: str) -> dict[str, Any]:
            return {"out_sharding": names[parameter]} if names else {}

        self.router = nnx.Linear(
            features,
            num_experts,
            use_bias=router.use_bias,
            dtype=jnp.float32,
            param_dtype=param_dtype,
            kernel_init=initializers.router,
            bias_init=initializers.bias,
            kernel_metadata=metadata("router"),
            bias_metadata=metadata("router bias"),
            rngs=rngs,
        )

        def kernel(name: str, shape: tuple[int, ...], kernel_init: Initializer, *, use_bias: bool) -> GroupedKernel:
            return GroupedKernel(
                shape,
                kernel_init=kernel_init,
                bias_init=initializers.bias if use_bias else None,
                param_dtype=param_dtype,
                recipe=recipe,
                cache_kernel=cache_kernel,
                dtype=dtype,
                kernel_metadata=metadata(name),
                bias_metadata=metadata(f"{name} bias") if use_bias else {},
                rngs=rngs,
            )

        self.features = features
        self.num_experts = num_experts
        self.hidden_features = hidden_features
        gate_up_shape = _layers.gate_up_shape(num_experts, features, hidden_features, activation)
        self.gate_up = kernel("gate_up", gate_up_shape, initializers.gate_up, use_bias=use_bias)
        self.down = kernel("down", (num_experts, hidden_features, features), initializers.down, use_bias=use_bias)
        self.shared_gate_up: GroupedKernel | None = nnx.data(None)
        self.shared_down: GroupedKernel | None = nnx.data(None)
        if shared_features is not None:
            shared_shape = _layers.gate_up_shape(1, features, shared_features, activation)
            self.shared_gate_up = kernel("shared_gate_up", shared_shape, initializers.gate_up, use_bias=False)
            self.shared_down = kernel("shared_down", (1, shared_features, features), initializers.down, use_bias=False)
        self.selection_bias: SelectionBias | None = nnx.data(None)
        if router.use_selection_bias:
            self.selection_bias = SelectionBias(jnp.zeros(num_experts, jnp.float32), **metadata("selection_bias"))
        self.router_options = router
        self.parallel = parallel
        self.activation = activation
        self.recipe = recipe
        self.dtype = dtype
        self.precision = precision

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
        parallel = self.parallel
        experts = _layers.local_size("num_experts", self.num_experts, parallel.storage_axes)
        hidden = _layers.local_size("hidden_features", self.hidden_features, (parallel.features,))
        gate_up_shape = _layers.gate_up_shape(experts, self.features, hidden, self.activation)
        self._check_part("gate_up", self.gate_up, gate_up_shape)
        self._check_part("down", self.down, (experts, hidden, self.features))
        gate_up, down = (
            kernel.stored(is_first_microbatch, fsdp_axis=parallel.fsdp) for kernel in (self.gate_up, self.down)
        )
        shared_kernels = (kernel for kernel in (self.shared_gate_up, self.shared_down) if kernel is not None)
        shared_expert = [kernel.stored(is_first_microbatch) for kernel in shared_kernels]
        if selection_bias is None and self.selection_bias is not None:
            selection_bias = self.selection_bias[...]
        return _layers.apply_moe(
            self,
            self.router_options,
            parallel,
            x,
            self.router,
            gate_up,
            down,
            selection_bias,
            shared,
            shared_expert,
            accumulate_into,
        )

    def _check_part(self, name: str, weights: GroupedKernel, shape: tuple[int, ...]) -> None:
        given = {
            name: None if parameter is None else parameter[...] for name, parameter in weights.parameters().items()
        }
        axes = (*self.parallel.storage_axes, self.parallel.features)
        _layers.check_part(name, given, shape, axes)
