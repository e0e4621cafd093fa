"""The three products of `grouped_dense`, with what surrounds them: quantization, bias, and what waits in between.

Each is a plain function of arrays and one static value. `jax_grouped.dense` makes one rule of differentiation of them,
`jax_grouped.dense_split` hands them out one by one.
"""

import dataclasses
import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from jax_grouped.arrays import GroupedQuantized, KernelCache, ScaledArray, short_repr
from jax_grouped.backends import primitives
from jax_grouped.backends.spec import Product, ScaledMatmulSpec
from jax_grouped.bias import add_bias, bias_grad
from jax_grouped.dense_inputs import DenseSpec, Inputs
from jax_grouped.fp8_state import Fp8State
from jax_grouped.matmul import gradient_type, grouped_matmul
from jax_grouped.quantize import kernel_spec, quantize_stack, quantize_tokens
from jax_grouped.recipes import DelayedScaling

#: Names of what waits for the backward pass: the quantized tokens and kernels, and what `jax_grouped.moe.grouped_mlp`
#: applies its activation to. For `jax.checkpoint_policies.save_only_these_names(*CHECKPOINT_NAMES)`. What a policy does
#: not keep is quantized again, each time in the one orientation that is read: without the kernels, a step takes less
#: memory, and one more pass over each of them.
CHECKPOINT_NAMES = ("jax_grouped_x", "jax_grouped_kernel", "jax_grouped_hidden")

#: Numbers as a product reads them: quantized with a recipe, as they are without.
Operand = ScaledArray | jax.Array


@short_repr
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DenseResiduals:
    """What waits between the forward pass and dgrad.

    Attributes:
        x: what wgrad reads.
        kernel: what dgrad reads.
        group_sizes, group_offset: `int32[E]` and `int32[1]`.
        fp8_state: the state that the forward pass used, with `DelayedScaling`.
        amax: the largest values for the next state, by tensor; None if there is no state.
        spec: everything else.

    Example:
        y, residuals = jg.grouped_dense_fwd(jnp.ones((16, 32)), jnp.ones((2, 32, 16)), jnp.array([10, 4]))

        assert isinstance(residuals, jg.DenseResiduals)
        dx, _ = jg.grouped_dense_dgrad(residuals, jnp.ones_like(y))
    """

    x: Operand | None
    kernel: Operand | None
    group_sizes: jax.Array
    group_offset: jax.Array
    fp8_state: Fp8State | None
    amax: dict[str, jax.Array] | None
    spec: DenseSpec = dataclasses.field(metadata=dict(static=True), repr=False)


@short_repr
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PendingWgrad:
    """What waits between dgrad and wgrad, FP8 with a recipe.

    Attributes:
        x, dy: what wgrad reads.
        dbias: the gradient of the bias, which is there already; None if there is no bias.
        fp8_state: the next state of `DelayedScaling`, which is there already; None with other recipes.
        group_sizes, group_offset: `int32[E]` and `int32[1]`.
        spec: everything else.

    Example:
        y, residuals = jg.grouped_dense_fwd(jnp.ones((16, 32)), jnp.ones((2, 32, 16)), jnp.array([10, 4]))
        dx, pending = jg.grouped_dense_dgrad(residuals, jnp.ones_like(y))

        assert isinstance(pending, jg.PendingWgrad)
        dkernel, _ = jg.grouped_dense_wgrad(pending)
    """

    x: Operand | None
    dy: Operand | None
    dbias: jax.Array | None
    fp8_state: Fp8State | None
    group_sizes: jax.Array
    group_offset: jax.Array
    spec: DenseSpec = dataclasses.field(metadata=dict(static=True), repr=False)


def fprop(inputs: Inputs, spec: DenseSpec, *, for_gradients: bool) -> tuple[jax.Array, DenseResiduals]:
    """The result, and what the later steps need, of which quantized operands are there only `for_gradients`."""
    amax: dict[str, jax.Array] = {}
    x: Operand | None
    kernel: Operand | None
    if spec.recipe is None:
        x, kernel = inputs.x, inputs.kernel.astype(inputs.x.dtype)
        y = grouped_matmul(x, kernel, inputs.group_sizes, inputs.group_offset, spec.matmul("fprop", spec.out_dtype))
    else:
        tokens, kernels = _quantized(inputs, spec, for_gradients=for_gradients)
        y = _multiply("fprop", tokens.rowwise, kernels.columnwise, inputs, spec.out_dtype)
        x, kernel = tokens.columnwise, kernels.rowwise
        amax = {"input": tokens.amax, "kernel": kernels.amax}
    if inputs.bias is not None:
        y = add_bias(y, inputs.bias, inputs.group_sizes, inputs.group_offset)
    residuals = DenseResiduals(
        x=x,
        kernel=kernel,
        group_sizes=inputs.group_sizes,
        group_offset=inputs.group_offset,
        fp8_state=inputs.fp8_state,
        amax=None if inputs.fp8_state is None else amax,
        spec=spec,
    )
    return y, residuals


def _quantized(
    inputs: Inputs, spec: DenseSpec, *, for_gradients: bool
) -> tuple[GroupedQuantized, GroupedQuantized | KernelCache]:
    """The tokens and the kernels, in the orientations that are read."""
    recipe = spec.recipe
    assert recipe is not None
    x_scale, kernel_scale = [], []
    if isinstance(recipe, DelayedScaling):
        assert inputs.fp8_state is not None
        scales = inputs.fp8_state.scales(recipe)
        x_scale, kernel_scale = [scales.input], [scales.kernel]
    x_spec = spec.x_spec(columnwise=for_gradients)
    tokens = quantize_tokens(inputs.x, inputs.group_sizes, inputs.group_offset, *x_scale, spec=x_spec)
    if inputs.kernel_cache is not None:
        return tokens, inputs.kernel_cache
    both = kernel_spec(inputs.kernel.shape, recipe)
    return tokens, quantize_stack(inputs.kernel, *kernel_scale, spec=dataclasses.replace(both, rowwise=for_gradients))


def _multiply(
    product: Product,
    a: Operand | None,
    b: Operand | None,
    groups: Inputs | DenseResiduals | PendingWgrad,
    out_dtype: DTypeLike,
    accumulator: jax.Array | None = None,
) -> jax.Array:
    """A product of quantized operands."""
    assert isinstance(a, ScaledArray)
    assert isinstance(b, ScaledArray)
    spec = ScaledMatmulSpec(product, a.layout, b.layout, out_dtype)
    sizes, offset = groups.group_sizes, groups.group_offset
    return primitives.scaled_matmul(a.data, a.scale_inv, b.data, b.scale_inv, sizes, offset, spec, accumulator)


def _named(residuals: DenseResiduals) -> DenseResiduals:
    """The same, what comes from quantization under `CHECKPOINT_NAMES`."""

    def name(value: Any, name: str) -> Any:
        return jax.tree.map(lambda leaf: checkpoint_name(leaf, name), value)

    if residuals.spec.recipe is None:
        return residuals
    x_name, kernel_name, _ = CHECKPOINT_NAMES
    # The largest values come from the same passes: kept without a name, a policy would have these run again.
    amax = residuals.amax
    if amax is not None:
        amax = {"input": name(amax["input"], x_name), "kernel": name(amax["kernel"], kernel_name)}
    x, kernel = name(residuals.x, x_name), name(residuals.kernel, kernel_name)
    return dataclasses.replace(residuals, x=x, kernel=kernel, amax=amax)


def dgrad(
    residuals: DenseResiduals, dy: jax.Array, activated: jax.Array | None = None
) -> tuple[jax.Array, PendingWgrad]:
    """The gradient of `x`, and what wgrad needs.

    With a recipe, `dy` is quantized here, once for both, and its rows are summed in the same pass. Where the spec has
    an `output_activation`, `dy` is the gradient of what that made of `activated`, the product's result.
    """
    spec = residuals.spec
    sizes, offset = residuals.group_sizes, residuals.group_offset
    amax: dict[str, jax.Array] = {}
    dbias = None
    operand: Operand | None
    if spec.recipe is None:
        assert isinstance(residuals.kernel, jax.Array)
        operand = dy.astype(gradient_type(jnp.dtype(spec.x_dtype), dy.dtype))
        kernel = residuals.kernel.astype(operand.dtype)
        dx = grouped_matmul(operand, kernel, sizes, offset, spec.matmul("dgrad", spec.x_dtype))
    else:
        quantized = _quantized_gradient(residuals, dy, activated)
        dx = _multiply("dgrad", quantized.rowwise, residuals.kernel, residuals, spec.x_dtype)
        operand, dbias = quantized.columnwise, quantized.dbias
        amax = {"output_grad": quantized.amax}
    if spec.bias_dtype is not None:
        if dbias is None:
            dbias = bias_grad(dy, sizes, offset, spec.num_groups, jnp.dtype(spec.bias_dtype))
        dbias = dbias.astype(spec.bias_dtype)
    pending = PendingWgrad(
        x=residuals.x,
        dy=operand,
        dbias=dbias,
        fp8_state=next_state(residuals, amax),
        group_sizes=sizes,
        group_offset=offset,
        spec=spec,
    )
    return dx, pending


def _quantized_gradient(residuals: DenseResiduals, dy: jax.Array, activated: jax.Array | None) -> GroupedQuantized:
    spec, recipe = residuals.spec, residuals.spec.recipe
    more = []
    if isinstance(recipe, DelayedScaling):
        assert residuals.fp8_state is not None
        more.append(residuals.fp8_state.scales(recipe).output_grad)
    if activated is not None:
        more.append(activated)
    return quantize_tokens(dy, residuals.group_sizes, residuals.group_offset, *more, spec=spec.dy_spec)


def next_state(residuals: DenseResiduals, amax: dict[str, jax.Array]) -> Fp8State | None:
    """The state after this step, with the largest values of the gradient, if it was quantized; None without a state."""
    if residuals.fp8_state is None:
        return None
    assert residuals.amax is not None
    assert isinstance(residuals.spec.recipe, DelayedScaling)
    return residuals.fp8_state.after(residuals.spec.recipe, residuals.amax | amax)


def wgrad(pending: PendingWgrad, accumulator: jax.Array | None) -> jax.Array:
    """The gradient of `kernel` in its own type, or the accumulator with it added."""
    spec = pending.spec
    out_dtype = spec.kernel.dtype if accumulator is None else accumulator.dtype
    if spec.recipe is not None:
        return _multiply("wgrad", pending.x, pending.dy, pending, out_dtype, accumulator)
    assert isinstance(pending.x, jax.Array)
    assert isinstance(pending.dy, jax.Array)
    operands = pending.x.astype(pending.dy.dtype), pending.dy, pending.group_sizes, pending.group_offset
    if accumulator is None:
        return grouped_matmul(*operands, spec.matmul("wgrad", out_dtype))
    return primitives.grouped_matmul(*operands, spec.matmul("wgrad", out_dtype), accumulator)


class Saved(NamedTuple):
    """What waits between the two passes of a rule of differentiation."""

    residuals: DenseResiduals
    dkernel_accumulator: jax.Array | None


def primal_values(primals: Any) -> Inputs:
    """Returns the arrays of the inputs that `jax.custom_vjp` hands to a forward rule with `symbolic_zeros`.

    Warns of a kernel that is differentiated without its state, which nothing then keeps up to date.
    """

    def differentiated(tree: Any) -> bool:
        return any(primal.perturbed for primal in jax.tree.leaves(tree))

    if primals.fp8_state is not None and differentiated(primals.kernel) and not differentiated(primals.fp8_state):
        warnings.warn(
            "fp8_state is not differentiated with the kernel, so its scales never change: give jax.grad both (in linen "
            "all variables, in NNX jax_grouped.nnx.TRAINED), and let the state's gradient take its place.",
            stacklevel=2,
        )
    return jax.tree.map(lambda primal: primal.value, primals)


def forward(inputs: Inputs, spec: DenseSpec) -> tuple[jax.Array, Saved]:
    """The result, and what its gradients need.

    That is what the gradients of all inputs need, also where some have none: JAX takes one structure for all calls of a
    program that `jax.jit` or `jax.checkpoint` has traced. It removes what nobody reads before it compiles.
    """
    y, residuals = fprop(inputs, spec, for_gradients=True)
    return y, Saved(_named(residuals), inputs.dkernel_accumulator)


def gradients(saved: Saved, dy: jax.Array | None, activated: jax.Array | None = None) -> Inputs:
    """The gradient of every input, as `dgrad` and `wgrad` give it; None for zero.

    Args:
        saved: from the forward pass.
        dy: the gradient of the result; None where that does not reach the loss.
        activated: as in `dgrad`.
    """
    residuals, accumulator = saved
    if dy is None:
        dx, dkernel, dbias, fp8_state = None, accumulator, None, next_state(residuals, {})
    else:
        dx, pending = dgrad(residuals, dy, activated)
        dkernel, dbias, fp8_state = wgrad(pending, accumulator), pending.dbias, pending.fp8_state
    # None is a gradient of zero, also of arguments that always have a value.
    return Inputs(dx, dkernel, None, None, dbias, None, fp8_state, None)  # type: ignore[arg-type]
