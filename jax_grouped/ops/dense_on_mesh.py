"""`grouped_dense` with a recipe under plain `jax.jit` with sharded arrays: two operations that XLA can split.

Scales lie where group sizes put them, so XLA cannot split the quantized arrays of one device. Here every device
quantizes its own part inside of the operations, and what waits for the backward pass is `x` itself.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_grouped.backends.operation import Local, Operation, Result, Split
from jax_grouped.backends.partition import apply, lie_on_mesh
from jax_grouped.core.groups import Groups
from jax_grouped.fp8.layout import feature_grain
from jax_grouped.fp8.recipes import DelayedScaling
from jax_grouped.fp8.state import PerTensor
from jax_grouped.ops.bias import add_bias
from jax_grouped.ops.gemm import GROUP_DIMENSIONS, RESULTS, gemm, own_groups
from jax_grouped.ops.inputs import DenseSpec, Inputs, Weights
from jax_grouped.ops.quantize import quantize_stack, quantize_tokens
from jax_grouped.ops.quantize_kernel import kernel_spec


def is_split(x: jax.Array, weights: Weights, spec: DenseSpec) -> bool:
    """Tells whether `fprop` and `gradients` of this module are to be called. A cache of the kernel is not split."""
    return spec.recipe is not None and weights.kernel_cache is None and lie_on_mesh(x, weights.kernel)


def fprop(inputs: Inputs, spec: DenseSpec, scales: PerTensor | None) -> tuple[jax.Array, dict[str, jax.Array] | None]:
    """Returns the result, and the largest values of both operands if their scales are given."""
    x, weights, groups, _ = inputs
    given = () if scales is None else (scales.input, scales.kernel)
    y, *amax = apply(_Fprop(spec), x, weights.kernel, *groups, *given, like=[spec.partitions.out])
    if weights.bias is not None:
        y = add_bias(y, weights.bias, groups)
    return y, dict(zip(("input", "kernel"), amax, strict=True)) if amax else None


class Gradients(NamedTuple):
    """Results of the backward pass; the last two are None without a bias, and without given scales."""

    x: jax.Array
    kernel: jax.Array
    bias: jax.Array | None
    amax: jax.Array | None


def gradients(inputs: Inputs, spec: DenseSpec, scales: PerTensor | None, dy: jax.Array) -> Gradients:
    """Returns the gradients, and the largest values of `dy` if its scales are given."""
    x, weights, groups, _ = inputs
    accumulator = weights.dkernel_accumulator
    out = weights.kernel if accumulator is None else accumulator
    operation = _Gradients(spec, out.dtype, accumulator is not None)
    given = (*(() if accumulator is None else (accumulator,)), *(() if scales is None else scales))
    of = spec.partitions
    like = [of.x, of.kernel, *([] if spec.bias_dtype is None else [of.bias])]
    dx, dkernel, *more = apply(operation, x, weights.kernel, dy, *groups, *given, like=like)
    dbias = None if spec.bias_dtype is None else more.pop(0).astype(spec.bias_dtype)
    return Gradients(dx, dkernel, dbias, more.pop() if more else None)


@dataclasses.dataclass(frozen=True)
class _Pass(Operation):
    """A pass: t tokens, e kernels, k and n their features."""

    spec: DenseSpec
    splittable = ("t", "e", "n", "k")

    @property
    def _has_scales(self) -> bool:
        return isinstance(self.spec.recipe, DelayedScaling)

    def grain(self, dimension: str) -> int:
        assert self.spec.recipe is not None
        return feature_grain(self.spec.recipe.token_mode) if dimension in {"k", "n"} else 1

    def _own(self, x: jax.Array, kernel: jax.Array) -> DenseSpec:
        """Returns the spec of a device that has these parts."""
        own = jax.ShapeDtypeStruct(kernel.shape, self.spec.kernel.dtype)
        return dataclasses.replace(self.spec, tokens=x.shape[0], kernel=own)


@dataclasses.dataclass(frozen=True)
class _Fprop(_Pass):
    @property
    def operands(self) -> tuple[str, ...]:
        return "t k", "e k n", *GROUP_DIMENSIONS, *["e", "e"] * self._has_scales

    @property
    def results(self) -> tuple[Result, ...]:
        amax = Result("e", over="t k", how="max"), Result("e", over="k n", how="max")
        return RESULTS["fprop"], *amax * self._has_scales

    def local(self, splits: Mapping[str, Split]) -> Local:
        def run(
            x: jax.Array, kernel: jax.Array, sizes: jax.Array, offset: jax.Array, *scales: jax.Array
        ) -> Sequence[jax.Array]:
            spec = self._own(x, kernel)
            assert spec.recipe is not None
            groups = own_groups(Groups(sizes, offset), splits, rows=x.shape[0], num_groups=kernel.shape[0])
            tokens = quantize_tokens(x, groups, *scales[:1], spec=spec.x_spec(columnwise=False))
            columnwise = dataclasses.replace(kernel_spec(kernel.shape, spec.recipe), rowwise=False)
            kernels = quantize_stack(kernel, *scales[1:], spec=columnwise)
            assert tokens.rowwise is not None
            assert kernels.columnwise is not None
            y = gemm(tokens.rowwise, kernels.columnwise, groups, spec.gemm("fprop", spec.out_dtype))
            return [y, *(of.amax for of in (tokens, kernels) if self._has_scales and of.amax is not None)]

        return run


@dataclasses.dataclass(frozen=True)
class _Gradients(_Pass):
    kernel_dtype: jnp.dtype
    accumulates: bool

    @property
    def operands(self) -> tuple[str, ...]:
        accumulators = ["e k n"] * self.accumulates
        return "t k", "e k n", "t n", *GROUP_DIMENSIONS, *accumulators, *["e"] * 3 * self._has_scales

    @property
    def results(self) -> tuple[Result, ...]:
        biases = [Result("e n", over="t")] * (self.spec.bias_dtype is not None)
        amax = [Result("e", over="t n", how="max")] * self._has_scales
        return RESULTS["dgrad"], RESULTS["wgrad"], *biases, *amax

    @property
    def added(self) -> tuple[int, int] | None:
        return (5, 1) if self.accumulates else None

    def local(self, splits: Mapping[str, Split]) -> Local:
        def run(
            x: jax.Array, kernel: jax.Array, dy: jax.Array, sizes: jax.Array, offset: jax.Array, *more: jax.Array
        ) -> Sequence[jax.Array]:
            spec = self._own(x, kernel)
            assert spec.recipe is not None
            groups = own_groups(Groups(sizes, offset), splits, rows=x.shape[0], num_groups=kernel.shape[0])
            scales = more[-3:] if self._has_scales else ()
            (accumulator,) = more[: len(more) - len(scales)] or (None,)
            tokens = quantize_tokens(x, groups, *scales[:1], spec=spec.x_spec(rowwise=False))
            rowwise = dataclasses.replace(kernel_spec(kernel.shape, spec.recipe), rowwise=True, columnwise=False)
            kernels = quantize_stack(kernel, *scales[1:2], spec=rowwise)
            gradient = quantize_tokens(dy, groups, *scales[2:], spec=spec.dy_spec())
            assert tokens.columnwise is not None
            assert kernels.rowwise is not None
            assert gradient.rowwise is not None
            assert gradient.columnwise is not None
            dx = gemm(gradient.rowwise, kernels.rowwise, groups, spec.gemm("dgrad", spec.x_dtype))
            wgrad = spec.gemm("wgrad", self.kernel_dtype)
            dkernel = gemm(tokens.columnwise, gradient.columnwise, groups, wgrad, accumulator)
            optional = gradient.dbias, gradient.amax if self._has_scales else None
            return [dx, dkernel, *(of for of in optional if of is not None)]

        return run
