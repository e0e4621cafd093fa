"""The layer of one grouped product, and its variables."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import ArrayLike, DTypeLike

from jax_grouped import _layers
from jax_grouped._layers import Initializer, default_kernel_init
from jax_grouped.fp8.arrays import KernelCache
from jax_grouped.fp8.recipes import DelayedScaling, Recipe
from jax_grouped.fp8.state import Fp8State
from jax_grouped.ops.dense import DenseResiduals, grouped_dense
from jax_grouped.ops.inputs import GroupSizes, Weights, flat_weights


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


class KernelCacheVariable(nnx.Variable[KernelCache | jax.Array]):
    """The `jax_grouped.KernelCache` that microbatches share or, without a recipe, the kernel in the layer's `dtype`.

    It has no gradient and needs no checkpoint.

    Example:
        from flax import nnx

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

    Args:
        shape: of `kernel`.
        kernel_init: called with `(key, shape, param_dtype)`.
        bias_init: called with `(key, (E, ...), param_dtype)`; None for no bias.
        param_dtype: type of the parameters.
        recipe, cache_kernel, dtype, kernel_metadata, bias_metadata, rngs: as in `GroupedDense`.

    Example:
        from flax import nnx

        experts = jg.nnx.GroupedKernel((2, 32, 16), rngs=nnx.Rngs(0))
        transposed = experts.weights().kernel.transpose(0, 2, 1)

        assert jg.ragged_dot(jnp.ones((16, 16)), transposed, jnp.array([10, 4])).shape == (16, 32)
    """

    @_layers.with_canonical_fields
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
        kernel_metadata: Mapping[str, Any] = MappingProxyType({}),
        bias_metadata: Mapping[str, Any] = MappingProxyType({}),
        rngs: nnx.Rngs,
    ):
        _layers.check_caching(recipe, dtype, cache_kernel, None)
        groups, _, *features = shape
        self.recipe = recipe
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.rank = len(shape)
        self.kernel: nnx.Param[jax.Array] | None = nnx.Param(
            kernel_init(rngs.params(), shape, param_dtype), **kernel_metadata
        )
        self.bias: nnx.Param[jax.Array] | None = nnx.data(None)
        if bias_init is not None:
            self.bias = nnx.Param(bias_init(rngs.params(), (groups, *features), param_dtype), **bias_metadata)
        self.fp8_state: Fp8Variable | None = nnx.data(None)
        if isinstance(recipe, DelayedScaling):
            self.fp8_state = Fp8Variable(Fp8State.initial(recipe, groups))
        self.kernel_cache: KernelCacheVariable | None = nnx.data(None)
        if cache_kernel:
            weights = self.stored()
            self.kernel_cache = KernelCacheVariable(
                _layers.make_cache(weights.kernel, recipe, dtype, weights.fp8_state)
            )

    def parameters(self) -> dict[str, nnx.Param[jax.Array] | None]:
        """Returns the parameters by name, those that are not there as None."""
        return {"kernel": self.kernel, "bias": self.bias}

    def check_single(self) -> None:
        """Raises ValueError if the kernel is a stack of several layers' kernels, which cannot be quantized together."""
        if self.kernel is not None and self.kernel[...].ndim != self.rank:
            raise ValueError(f"kernel {self.kernel[...].shape} is stacked, as by nnx.vmap: quantize layers one by one.")

    def quantize_for_inference(self) -> None:
        """Replaces the kernel by its FP8 numbers, for a forward pass; see `jax_grouped.nnx.quantize_for_inference`.

        Raises:
            ValueError: there is no recipe, or the kernel is a stack of several layers'.
        """
        if self.recipe is None:
            raise ValueError("quantize_for_inference needs a layer with a recipe.")
        if self.kernel is not None:
            self.check_single()
            weights = self.weights()
            cache = _layers.make_cache(weights.kernel, self.recipe, None, weights.fp8_state, for_gradients=False)
            self.param_dtype = self.kernel[...].dtype
            self.kernel_cache, self.kernel = KernelCacheVariable(cache), nnx.data(None)

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
        _layers.check_caching(self.recipe, self.dtype, self.kernel_cache is not None, is_first_microbatch)
        bias = None if self.bias is None else self.bias[...]
        state = None if self.fp8_state is None else _layers.state_for_call(self, None, self.fp8_state.get_value())
        if self.kernel is None:
            assert self.kernel_cache is not None
            stored: Any = self.kernel_cache.get_value()
            return _layers.in_fp8_alone(stored, bias, state, self.param_dtype, is_first_microbatch)
        kernel = self.kernel[...]
        cache = None
        if self.kernel_cache is not None and is_first_microbatch is not None:
            cache = _layers.make_cache(
                kernel,
                self.recipe,
                self.dtype,
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

    With `cache_kernel`, microbatches share one quantization of the kernel or, without a recipe, the kernel in `dtype`.
    It is a `KernelCacheVariable`. The constructor makes it from the initial kernel. Checkpoints do not need it:
    `nnx.state(model, jg.nnx.TRAINED)`.

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
        cache_kernel: whether to have a `KernelCacheVariable`, for calls with `is_first_microbatch`. Without a recipe it
            holds the kernel in `dtype`, which must then be given.
        kernel_metadata, bias_metadata: for `nnx.Param`, for example `out_sharding=("expert", "embed", "mlp")`.
        rngs: source of the initialisers' keys.

    Example:
        from flax import nnx

        layer = jg.nnx.GroupedDense(32, 16, 2, rngs=nnx.Rngs(0))

        y = layer(jnp.ones((16, 32)), jnp.array([10, 4]))

        assert layer.kernel.shape == (2, 32, 16)
        assert y.shape == (16, 16) and not y[14:].any()
    """

    @_layers.with_canonical_fields
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
        super().__init__(
            (num_groups, in_features, out_features),
            kernel_init=kernel_init,
            bias_init=bias_init if use_bias else None,
            param_dtype=param_dtype,
            recipe=recipe,
            cache_kernel=cache_kernel,
            dtype=dtype,
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
