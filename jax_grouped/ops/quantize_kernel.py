"""`quantize_kernel`, which microbatches share, and the checks of its result."""

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_grouped.core.values import as_array, static_bool
from jax_grouped.fp8.arrays import KernelCache, ScaledArray
from jax_grouped.fp8.recipes import DelayedScaling, MXFP8BlockScaling, Recipe, ScalingMode, check_recipe
from jax_grouped.kernels.partition import Local, Operation, Result, Split, apply
from jax_grouped.kernels.quantization import QuantizeSpec
from jax_grouped.ops import checks
from jax_grouped.ops.quantize import Oriented, quantize_stack


def quantize_kernel(
    kernel: jax.Array,
    recipe: Recipe,
    *,
    previous: KernelCache | None = None,
    skip: ArrayLike | None = None,
    scale: jax.Array | None = None,
    for_gradients: bool = True,
) -> KernelCache:
    """Quantizes a stack of kernels in both orientations, as fprop and dgrad read them.

    Microbatches share the result. With `previous` and a `skip` on the device, a step that is traced or captured once
    quantizes again only when the weights have changed. The result has no gradient. `grouped_dense` takes both the
    kernel and the cache, and gives `kernel` its gradient.

    Args:
        kernel: `[E, K, N]`, bfloat16, float16 or float32; `K` and `N` multiples of 16.
        recipe: how to scale, and to which type (`fwd_dtype`).
        previous: the result of an earlier call with the same shapes and recipe. Inside `jit` its memory is reused.
        skip: boolean scalar on the device: if true, `kernel` is not read, and the result is `previous`.
        scale: `float32[E]`, for `DelayedScaling` only, which needs it: `fp8_state.scales(recipe).kernel`.
        for_gradients: whether to make the orientation that the gradient of the tokens needs. Without it, the result
            takes half the memory of kernels in bfloat16. It serves inference, where `grouped_dense` needs no `kernel`.

    Returns:
        Both orientations and the largest values; `rowwise` is None without `for_gradients`.

    Raises:
        TypeError: an argument has a type that is not supported.
        ValueError: an argument has a shape that does not fit, or of `previous` and `skip` only one is given.

    Example:
        kernel, group_sizes = jnp.ones((2, 32, 16)), jnp.array([10, 4])
        recipe = jg.Float8BlockScaling()

        cache = jg.quantize_kernel(kernel, recipe)
        y = jg.grouped_dense(jnp.ones((16, 32)), kernel, group_sizes, recipe=recipe, kernel_cache=cache)

        assert jnp.allclose(y[:14], 32, rtol=1e-3)
    """
    kernel = jax.lax.stop_gradient(as_array("kernel", kernel))
    checks.check_stack("kernel", kernel)
    check_recipe(recipe, optional=False)
    if (previous is None) != (skip is None):
        raise ValueError("previous and skip must be given together: skip says whether to return previous.")
    if (scale is not None) != isinstance(recipe, DelayedScaling):
        needs = "needs" if isinstance(recipe, DelayedScaling) else "takes no"
        raise ValueError(f"{type(recipe).__name__} {needs} scale, one per kernel.")
    checks.check_fp8_kernel("kernel", kernel.shape)

    rowwise = static_bool("for_gradients", for_gradients)
    spec = dataclasses.replace(kernel_spec(kernel.shape, recipe), rowwise=rowwise)
    operands, kept = {}, []
    if scale is not None:
        operands["scale"] = checks.canonical_scale(scale, spec.num_groups)
    if previous is not None:
        check_cache("previous", previous, "the result", kernel.shape, recipe)
        if (previous.rowwise is not None) != rowwise:
            raise ValueError("previous must have been made with the same for_gradients.")
        operands["skip"], kept = checks.canonical_flag("skip", skip), _arrays(previous)
    spec = dataclasses.replace(spec, given=tuple(operands))
    *arrays, amax = apply(_QuantizeKernel(spec), kernel, *operands.values(), *kept)
    tokens = kernel.shape[0] * kernel.shape[1], kernel.shape[2]
    *row_arrays, data, scale_inv = arrays
    column = ScaledArray(data, scale_inv, None, spec.layout(tokens, columnwise=True))
    row = None
    if rowwise:
        row = ScaledArray(row_arrays[0], row_arrays[1], None, spec.layout(tokens, columnwise=False))
    return KernelCache(row, column, amax, recipe)


@dataclasses.dataclass(frozen=True)
class _QuantizeKernel(Operation):
    """The quantization of kernels in both orientations, whose results are arrays: e kernels, k and n their features.

    Devices can have some of the kernels each. The other dimensions are those of stored data and scales.
    """

    spec: QuantizeSpec
    splittable = ("e",)

    @property
    def operands(self) -> tuple[str, ...]:
        previous = ("f", *self._dimensions) if "skip" in self.spec.given else ()
        return "e k n", *["e"] * ("scale" in self.spec.given), *previous

    @property
    def results(self) -> tuple[Result, ...]:
        *arrays, amax = self._dimensions
        data_and_scales = (Result(names, kept_whole=i % 2 == 1) for i, names in enumerate(arrays))
        return *data_and_scales, Result(amax)

    @property
    def _dimensions(self) -> tuple[str, ...]:
        return cache_dimensions(self.spec)[0 if self.spec.rowwise else 2 :]

    def local(self, splits: Mapping[str, Split]) -> Local:
        spec = dataclasses.replace(self.spec, num_groups=self.spec.num_groups // splits["e"].parts)

        def run(kernel: jax.Array, *more: jax.Array) -> list[jax.Array]:
            return _arrays(quantize_stack(kernel, spec, **spec.named(more)))

        return run


def _arrays(cache: KernelCache | Oriented) -> list[Any]:
    """Returns the arrays of a cache, in the order of the operation's results."""
    orientations = (scaled for scaled in (cache.rowwise, cache.columnwise) if scaled is not None)
    return [*itertools.chain.from_iterable((scaled.data, scaled.scale_inv) for scaled in orientations), cache.amax]


def check_for_gradients(rowwise: object | None) -> None:
    """Raises ValueError if a cache has been made without the orientation that dgrad reads."""
    if rowwise is None:
        raise ValueError("kernel_cache has no orientation for gradients: make it with for_gradients=True.")


def cache_dimensions(spec: QuantizeSpec) -> tuple[str, str, str, str, str]:
    """Returns the dimensions of the arrays of a `KernelCache`, as an `Operation` names them."""
    scales = {ScalingMode.TENSOR: ("e", "e")}.get(spec.mode, ("e r s", "e c d"))
    if spec.swizzled_scales:
        scales = "e r", "e c"
    return "e k n", scales[0], "e n k", scales[1], "e"


def kernel_spec(shape: tuple[int, ...], recipe: Recipe) -> QuantizeSpec:
    """Returns the spec with which `recipe` quantizes kernels `[E, K, N]`, in both orientations."""
    return QuantizeSpec(
        recipe.kernel_mode,
        recipe.fwd_dtype,
        num_groups=shape[0],
        stack_rows=shape[1],
        columnwise=True,
        **scaling_options(recipe),
    )


def scaling_options(recipe: Recipe) -> dict[str, Any]:
    """Returns a recipe's options about scales, as keyword arguments of `QuantizeSpec`."""
    return dict(
        pow2_scales=getattr(recipe, "pow2_scales", False),
        amax_epsilon=getattr(recipe, "amax_epsilon", 0.0),
        # Products need scales in the order that Blackwell's matmul reads.
        swizzled_scales=isinstance(recipe, MXFP8BlockScaling),
    )


def check_cache(name: str, cache: Any, like: str, shape: tuple[int, ...], recipe: Recipe) -> None:
    """Raises unless `cache` is what `quantize_kernel` returns for kernels `[E, K, N]` of this shape and this recipe."""
    if not isinstance(cache, KernelCache):
        raise TypeError(f"{name} must be a KernelCache, got {type(cache).__name__}.")
    spec, made_with = kernel_spec(shape, recipe), cache.recipe
    fields: list[tuple[str, Any, Any]] = []
    if made_with is not None:
        fields.append(("recipe", type(recipe).__name__, type(made_with).__name__))
        fields += [
            (f"recipe.{field}", getattr(recipe, field, None), getattr(made_with, field, None))
            for field in ("fwd_dtype", "pow2_scales", "amax_epsilon")
        ]
    for orientation, columnwise in (("rowwise", False), ("columnwise", True)):
        got, expected = getattr(cache, orientation), spec.layout((shape[0] * shape[1], shape[2]), columnwise=columnwise)
        if got is None and not columnwise:
            continue
        fields += [(f"{orientation}.dtype", spec.dtype, got.dtype), (f"{orientation}.shape", shape, got.shape)]
        fields += [
            (f"{orientation}.layout.{field}", value, getattr(got.layout, field))
            for field, value in vars(expected).items()
        ]
    for field, wanted, got in fields:
        if got != wanted:
            raise ValueError(
                f"{name} must be of the same shape and recipe as {like}: {field} must be {wanted}, got {got}."
            )
    for scaled in filter(None, (cache.rowwise, cache.columnwise)):
        checks.check_scaled(scaled)
    if cache.amax.shape != (spec.num_groups,) or cache.amax.dtype != jnp.float32:
        raise ValueError(f"{name}.amax must be float32[{spec.num_groups}], got {jax.typeof(cache.amax)}.")
