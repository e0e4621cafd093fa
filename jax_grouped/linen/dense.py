"""The layer of one grouped product, and its variables."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
from jax.typing import ArrayLike, DTypeLike

from jax_grouped import _layers
from jax_grouped._layers import Initializer, default_kernel_init
from jax_grouped.fp8.arrays import KernelCache
from jax_grouped.fp8.recipes import DelayedScaling, Recipe
from jax_grouped.fp8.state import Fp8State
from jax_grouped.ops.dense import DenseResiduals, grouped_dense
from jax_grouped.ops.inputs import GroupSizes, Weights, flat_weights

#: Name of the collection of quantized kernels that microbatches share.
KERNEL_CACHE = "kernel_cache"


def set_canonical_fields(layer: nn.Module) -> None:
    """Checks the static fields of a layer, and sets them to Python's own numbers."""
    annotations = {field.name: field.type for field in dataclasses.fields(layer)}
    for name, value in _layers.canonical_fields(annotations, vars(layer)).items():
        object.__setattr__(layer, name, value)


class GroupedDense(nn.Module):
    """A linear layer per group: `flax.linen.Dense` for mixture-of-experts models.

    The parameters are `kernel` `[E, K, N]` and, with `use_bias`, `bias` `[E, N]`. Wrap the initialisers with
    `flax.linen.with_logical_partitioning` to name their axes, for example `("expert", "embed", "mlp")`.

    With `DelayedScaling` the arrays of `jax_grouped.Fp8State` are variables too, in Flax's collection
    `_overwrite_with_gradient` under the names of its fields. Their gradient is their next value. If the `params` of a
    `flax.training.train_state.TrainState` are all variables, the collection `params` and this one, it replaces the
    arrays with their gradient and shows its optimizer only the parameters. If several microbatches or devices each have
    a gradient, combine those of this collection by maximum, as `Fp8State` explains, never by a sum:
    `jax_grouped.accumulate_gradients`, `reduce_gradients` and `overwrite_with_gradient` do this.

    With `cache_kernel`, microbatches share one quantization of the kernel: a `jax_grouped.KernelCache` or, without a
    recipe, the kernel in `dtype`. It is the variable `kernel` of the collection `kernel_cache`. It is no parameter and
    has no gradient: do not differentiate with respect to it, and keep it out of checkpoints. `init` makes it from the
    initial kernel, and `apply(..., is_first_microbatch=True, mutable=["kernel_cache"])` returns a new one beside the
    result.

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
        cache_kernel: whether to have the collection `kernel_cache`, for calls with `is_first_microbatch`. Without a
            recipe it holds the kernel in `dtype`, which must then be given.

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
        set_canonical_fields(self)

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
            ValueError: there is `is_first_microbatch` without `cache_kernel`, or `cache_kernel` with neither a recipe
                nor a `dtype`. Or the collection `kernel_cache` would have to be written but is not mutable, or
                `accumulate_into` is not like the kernel.
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
            dtype=self.dtype,
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
        recipe, cache_kernel, dtype: as in `GroupedDense`.

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
    dtype: DTypeLike | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        set_canonical_fields(self)

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
        _layers.check_caching(self.recipe, self.dtype, self.cache_kernel, is_first_microbatch)
        groups, _, *features = self.shape
        kernel = None
        if not self._is_in_fp8_alone():
            kernel = self.param("kernel", self.kernel_init, self.shape, self.param_dtype)
        bias = None
        if self.bias_init is not None:
            bias = self.param("bias", self.bias_init, (groups, *features), self.param_dtype)
        state = self._fp8_state(self.recipe) if isinstance(self.recipe, DelayedScaling) else None
        if kernel is None:
            stored: KernelCache = self.get_variable(KERNEL_CACHE, "kernel")
            return _layers.in_fp8_alone(stored, bias, state, self.param_dtype, is_first_microbatch)
        cache = None
        if self.cache_kernel:
            cache = self._kernel_cache(kernel, _layers.own_state(state, kernel, fsdp_axis), is_first_microbatch)
        return Weights(kernel, bias, cache, state)

    def _is_in_fp8_alone(self) -> bool:
        """Tells whether the variables are from `quantize_for_inference`."""
        has_kernel = self.is_initializing() or self.has_variable("params", "kernel")
        return not has_kernel and self.recipe is not None and self.has_variable(KERNEL_CACHE, "kernel")

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

        state = Fp8State(**{name: variable(name) for name in names})
        assert self.scope is not None
        # A scope is made anew for every call, but not that of the whole model.
        return _layers.state_for_call(self.scope.root, self.scope.path, state)

    def _kernel_cache(
        self, kernel: jax.Array, state: Fp8State | None, is_first_microbatch: ArrayLike | None
    ) -> KernelCache | jax.Array | None:
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
        variable = self.variable(KERNEL_CACHE, "kernel", _layers.make_cache, kernel, self.recipe, self.dtype, state)
        if is_first_microbatch is None:
            return None
        if changes:
            variable.value = _layers.make_cache(
                kernel, self.recipe, self.dtype, state, stored=variable.value, is_first_microbatch=is_first_microbatch
            )
        return variable.value
