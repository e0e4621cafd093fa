"""`grouped_dense` with a recipe under plain `jax.jit` with sharded arrays: two operations that XLA can split.

Scales lie where group sizes put them, so XLA cannot split the quantized arrays of one device. Here every device
quantizes its own part inside of the operations, and what waits for the backward pass is `x` itself.
"""

import abc
import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_grouped.core.groups import Groups
from jax_grouped.fp8.arrays import KernelCache, ScaledArray
from jax_grouped.fp8.layout import feature_grain
from jax_grouped.fp8.recipes import DelayedScaling, Float8BlockScaling, Recipe
from jax_grouped.fp8.state import PerTensor
from jax_grouped.kernels.partition import (
    GROUP_DIMENSIONS,
    Gathers,
    Local,
    Operation,
    Result,
    Split,
    apply,
    lie_on_mesh,
    own_groups,
)
from jax_grouped.kernels.product import RESULTS, part_dtype
from jax_grouped.ops.bias import add_bias
from jax_grouped.ops.gather import gather_kernels
from jax_grouped.ops.gemm import gemm
from jax_grouped.ops.inputs import DenseSpec, Inputs, Weights
from jax_grouped.ops.quantize import quantize_stack, quantize_tokens
from jax_grouped.ops.quantize_kernel import cache_dimensions, check_for_gradients, kernel_spec


def is_split(x: jax.Array, weights: Weights, spec: DenseSpec) -> bool:
    """Tells whether `fprop` and `gradients` of this module are to be called."""
    return spec.recipe is not None and lie_on_mesh(x, weights.kernel, like=[spec.partitions.out])


def fprop(inputs: Inputs, spec: DenseSpec, scales: PerTensor | None) -> tuple[jax.Array, dict[str, jax.Array] | None]:
    """Returns the result, and the largest values of both operands if their scales are given."""
    x, weights, groups, _ = inputs
    cache = weights.kernel_cache
    assert isinstance(cache, KernelCache | None)
    kernels = (weights.kernel,) if cache is None else (cache.columnwise.data, cache.columnwise.scale_inv)
    operation = _Fprop(spec, cache is not None)
    given = [getattr(scales, name) for name in operation.scales]
    y, *amax = apply(operation, x, *kernels, *groups, *given, like=[spec.partitions.out])
    if weights.bias is not None:
        y = add_bias(y, weights.bias, groups)
    if scales is None:
        return y, None
    return y, {"input": amax[0], "kernel": amax[1] if cache is None else cache.amax}


class Gradients(NamedTuple):
    """Results of the backward pass; the last two are None without a bias, and without given scales."""

    x: jax.Array
    kernel: jax.Array
    bias: jax.Array | None
    amax: jax.Array | None


def gradients(inputs: Inputs, spec: DenseSpec, scales: PerTensor | None, dy: jax.Array) -> Gradients:
    """Returns the gradients, and the largest values of `dy` if its scales are given."""
    x, weights, groups, _ = inputs
    cache, accumulator = weights.kernel_cache, weights.dkernel_accumulator
    assert isinstance(cache, KernelCache | None)
    kernels: tuple[jax.Array, ...] = (weights.kernel,)
    if cache is not None:
        check_for_gradients(cache.rowwise)
        assert cache.rowwise is not None
        kernels = cache.rowwise.data, cache.rowwise.scale_inv
    out = weights.kernel if accumulator is None else accumulator
    operation = _Gradients(spec, cache is not None, out.dtype, accumulator is not None)
    accumulators = () if accumulator is None else (accumulator,)
    given = [getattr(scales, name) for name in operation.scales]
    specs = spec.partitions
    like = [specs.x, specs.kernel, *([] if spec.bias_dtype is None else [specs.bias])]
    dx, dkernel, *more = apply(operation, x, *kernels, dy, *groups, *accumulators, *given, like=like)
    dbias = None if spec.bias_dtype is None else more.pop(0).astype(spec.bias_dtype)
    return Gradients(dx, dkernel, dbias, more.pop() if more else None)


@dataclasses.dataclass(frozen=True)
class _Pass(Operation):
    """A pass: t tokens, e kernels, k and n their features. With `cached`, kernels are quantized already."""

    spec: DenseSpec
    cached: bool

    @property
    def splittable(self) -> tuple[str, ...]:
        return ("t", "e") if self.cached else ("t", "e", "n", "k")

    @property
    def gathers(self) -> Gathers | None:
        if self.cached:
            return None
        # The scales of a part of the features are those of the whole, unless they depend on all of a kernel.
        by_features = isinstance(self.spec.recipe, Float8BlockScaling | DelayedScaling)
        return Gathers(1, ("e", "k", "n") if by_features else ("e",))

    @property
    @abc.abstractmethod
    def scales(self) -> tuple[str, ...]:
        """The fields of `PerTensor` that are operands, the last ones; none if scales are not given."""

    @property
    def _recipe(self) -> Recipe:
        assert self.spec.recipe is not None
        return self.spec.recipe

    @property
    def _has_scales(self) -> bool:
        return isinstance(self.spec.recipe, DelayedScaling)

    def grain(self, dimension: str) -> int:
        return feature_grain(self._recipe.token_mode) if dimension in {"k", "n"} else 1

    def _kernel_operands(self, *, columnwise: bool) -> tuple[str, ...]:
        if not self.cached:
            return ("e k n",)
        row_data, row_scale, column_data, column_scale, _ = cache_dimensions(
            kernel_spec(self.spec.kernel.shape, self._recipe)
        )
        return (column_data, column_scale) if columnwise else (row_data, row_scale)

    def _own(self, x: jax.Array, splits: Mapping[str, Split]) -> DenseSpec:
        """Returns the spec of one device: its tokens, and its part of the kernels."""
        whole = self.spec.kernel
        shape = tuple(size // splits[name].parts for name, size in zip("ekn", whole.shape, strict=True))
        return dataclasses.replace(self.spec, tokens=x.shape[0], kernel=jax.ShapeDtypeStruct(shape, whole.dtype))

    def _quantized(
        self,
        kernels: Sequence[jax.Array],
        scale: jax.Array | None,
        own: DenseSpec,
        splits: Mapping[str, Split],
        *,
        columnwise: bool,
    ) -> tuple[ScaledArray, jax.Array | None]:
        """Returns the kernels that this device multiplies by, and their largest values if they are quantized here."""
        groups, rows, features = own.kernel.shape
        layout = kernel_spec(own.kernel.shape, self._recipe).layout((groups * rows, features), columnwise=columnwise)
        if self.cached:
            data, scale_inv = kernels
            return ScaledArray(data, scale_inv, None, layout), None
        (kernel,) = kernels
        experts = splits["e"].stored
        if experts and scale is not None:
            start = kernel.shape[0] * jax.lax.axis_index(experts)
            scale = jax.lax.dynamic_slice_in_dim(scale, start, kernel.shape[0])
        both = kernel_spec(kernel.shape, self._recipe)
        spec = dataclasses.replace(both, rowwise=not columnwise, columnwise=columnwise)
        quantized = quantize_stack(kernel, spec, scale=scale)
        scaled = quantized.columnwise if columnwise else quantized.rowwise
        assert scaled is not None
        storage = [splits[name].stored for name in ("enk" if columnwise else "ekn")]
        if not any(storage):
            return scaled, quantized.amax
        amax = self._largest_of_all(quantized.amax, *storage) if self._has_scales else quantized.amax
        return gather_kernels(scaled, storage, layout), amax

    @staticmethod
    def _largest_of_all(amax: jax.Array, experts: tuple[str, ...], *features: tuple[str, ...]) -> jax.Array:
        """Returns the largest values of all kernels from those of parts, which are stored over these mesh axes."""
        if any(features):
            amax = jax.lax.pmax(amax, tuple(itertools.chain(*features)))
        return jax.lax.all_gather(amax, experts, tiled=True) if experts else amax


@dataclasses.dataclass(frozen=True)
class _Fprop(_Pass):
    @property
    def operands(self) -> tuple[str, ...]:
        return "t k", *self._kernel_operands(columnwise=True), *GROUP_DIMENSIONS, *["e"] * len(self.scales)

    @property
    def scales(self) -> tuple[str, ...]:
        names = ("input",) if self.cached else ("input", "kernel")
        return names if self._has_scales else ()

    @property
    def results(self) -> tuple[Result, ...]:
        amax = Result("e", over="t k", how="max"), Result("e", over="k n", how="max")
        return RESULTS["fprop"], *(amax[:1] if self.cached else amax) * self._has_scales

    def local(self, splits: Mapping[str, Split]) -> Local:
        def run(x: jax.Array, *more: jax.Array) -> Sequence[jax.Array]:
            kernels, (sizes, offset, *scales) = more[: 1 + self.cached], more[1 + self.cached :]
            spec = self._own(x, splits)
            groups = own_groups(Groups(sizes, offset), splits, rows=x.shape[0], num_groups=spec.num_groups)
            given = dict(zip(self.scales, scales, strict=True))
            tokens = quantize_tokens(x, groups, spec.x_spec(columnwise=False), scale=given.get("input"))
            kernel, amax = self._quantized(kernels, given.get("kernel"), spec, splits, columnwise=True)
            assert tokens.rowwise is not None
            y = gemm(tokens.rowwise, kernel, groups, spec.gemm("fprop", spec.out_dtype))
            return [y, *(largest for largest in (tokens.amax, amax) if self._has_scales and largest is not None)]

        return run


@dataclasses.dataclass(frozen=True)
class _Gradients(_Pass):
    kernel_dtype: jnp.dtype
    accumulates: bool

    @property
    def operands(self) -> tuple[str, ...]:
        accumulators = ["e k n"] * self.accumulates
        scales = ["e"] * len(self.scales)
        return "t k", *self._kernel_operands(columnwise=False), "t n", *GROUP_DIMENSIONS, *accumulators, *scales

    @property
    def scales(self) -> tuple[str, ...]:
        names = ("input", "output_grad") if self.cached else PerTensor._fields
        return names if self._has_scales else ()

    @property
    def results(self) -> tuple[Result, ...]:
        biases = [Result("e n", over="t")] * (self.spec.bias_dtype is not None)
        amax = [Result("e", over="t n", how="max")] * self._has_scales
        return RESULTS["dgrad"], RESULTS["wgrad"], *biases, *amax

    @property
    def added(self) -> tuple[int, int] | None:
        return (self.operands.index("o") + 1, 1) if self.accumulates else None

    def local(self, splits: Mapping[str, Split]) -> Local:
        def run(x: jax.Array, *more: jax.Array) -> Sequence[jax.Array]:
            kernels, (dy, sizes, offset, *scales) = more[: 1 + self.cached], more[1 + self.cached :]
            accumulator = scales.pop(0) if len(scales) > len(self.scales) else None
            spec = self._own(x, splits)
            groups = own_groups(Groups(sizes, offset), splits, rows=x.shape[0], num_groups=spec.num_groups)
            given = dict(zip(self.scales, scales, strict=True))
            tokens = quantize_tokens(x, groups, spec.x_spec(rowwise=False), scale=given.get("input"))
            kernel, _ = self._quantized(kernels, given.get("kernel"), spec, splits, columnwise=False)
            gradient = quantize_tokens(dy, groups, spec.dy_spec(), scale=given.get("output_grad"))
            assert tokens.columnwise is not None
            assert gradient.rowwise is not None
            assert gradient.columnwise is not None
            dx = gemm(gradient.rowwise, kernel, groups, spec.gemm("dgrad", spec.x_dtype))
            wgrad = spec.gemm("wgrad", part_dtype(self.kernel_dtype, splits))
            dkernel = gemm(tokens.columnwise, gradient.columnwise, groups, wgrad, accumulator)
            optional = gradient.dbias, gradient.amax if self._has_scales else None
            return [dx, dkernel, *(result for result in optional if result is not None)]

        return run
