"""`grouped_dense`: a grouped matmul with bias, the functional form of the layer."""

import functools
from typing import Any

import jax
from jax.typing import ArrayLike, DTypeLike

from jax_grouped._checks import GroupSizes
from jax_grouped.arrays import KernelCache
from jax_grouped.dense_inputs import DenseSpec, Inputs, Weights, canonical_inputs
from jax_grouped.dense_products import Saved, forward, fprop, gradients, primal_values
from jax_grouped.fp8_state import Fp8State
from jax_grouped.recipes import Recipe


def grouped_dense(
    x: jax.Array,
    kernel: jax.Array,
    group_sizes: GroupSizes,
    bias: jax.Array | None = None,
    *,
    recipe: Recipe | None = None,
    fp8_state: Fp8State | None = None,
    kernel_cache: KernelCache | None = None,
    dkernel_accumulator: jax.Array | None = None,
    group_offset: ArrayLike | None = None,
    preferred_element_type: DTypeLike | None = None,
    precision: jax.lax.PrecisionLike = None,
) -> jax.Array:
    """Applies a linear layer per group: row `i` becomes `x[i] @ kernel[g] + bias[g]`, `g` being the row's group.

    The product is computed in the type of `x`. Gradients come out in each argument's own type: a float32 `kernel` with
    bfloat16 `x` gets a float32 gradient straight from the matmul's accumulator. Rows outside every group are zero in
    the result and in the gradient of `x`, whatever `x` holds there.

    With a recipe, the three products are of FP8 numbers, accumulated in float32: `x`, `kernel` and the gradient of the
    result are quantized from their own types, each once. Hopper's tensor cores keep about 14 bits of a partial sum, so
    there even a float32 result has a relative error of 1e-4 to 3e-4. With `Float8BlockScaling` that is the training of
    DeepSeek-V3 (arXiv:2412.19437, section 3.3). What is kept for the backward pass is FP8 too, under the names of
    `jax_grouped.CHECKPOINT_NAMES` for the policies of `jax.checkpoint`. Gradients are straight-through: those of the
    product of the quantized numbers, as if quantization were the identity. They are of first order, as are those with
    an accumulator.

    Args:
        x: `[T, K]` tokens, bfloat16, float16 or float32; rows of group 0 first, then group 1, and so on.
        kernel: `[G, K, N]`; without a recipe, converted to the type of `x` if it has another.
        group_sizes: `[G]` (`[E]`, `E >= G`, with `group_offset`) integers, rows per group, read on the device only.
            Negative ones count as 0, and rows past `T` do not exist.
        bias: `[G, N]` or None.
        recipe: one of the recipes, with `K` and `N` multiples of 16; None to compute in the type of `x`.
            `Float8BlockScaling` needs Hopper. `MXFP8BlockScaling` needs Blackwell to be fast: on Hopper its products
            are of the same numbers in bfloat16.
        fp8_state: with `DelayedScaling`, what it remembers of earlier steps, first `Fp8State.initial(recipe, G)`. Its
            gradient is its next value.
        kernel_cache: `quantize_kernel(kernel, recipe)`, which microbatches share: `kernel` is then not read. Its
            gradient is that of `kernel`; the cache has none.
        dkernel_accumulator: `[G, K, N]` in the type of `kernel`: its gradient is then this plus what it would be, added
            by the matmul itself, in place where the accumulator's memory can be had (donate it, or carry it through a
            `jax.lax.scan`). It is added in every use, so take the gradient where there is one: of a single call, inside
            the steps of a `scan`, the `vmap` or the `shard_map`. Where the result does not reach the loss, JAX asks for
            no gradient, and it is zero. `grouped_dense_wgrad` takes an accumulator with none of these conditions.
        group_offset: scalar or `[1]` integer: `kernel` holds the groups `[group_offset, group_offset + G)`.
        preferred_element_type: type of the result. Default: the type of `x`.
        precision: as in `jax_grouped.ragged_dot`; matters for float32 `x` only. Not with a recipe.

    Returns:
        `[T, N]`.

    Raises:
        TypeError: an argument, or the recipe, has a type that is not supported.
        ValueError: an argument has a shape that does not fit, `kernel_cache` is of another kernel or recipe, or the
            recipe needs an argument that is missing, or takes none that is there.

    Example:
        x, kernel, bias = jnp.ones((16, 32)), jnp.ones((2, 32, 16)), jnp.ones((2, 16))
        group_sizes = jnp.array([10, 4])

        y = jg.grouped_dense(x, kernel, group_sizes, bias)
        y_fp8 = jg.grouped_dense(x, kernel, group_sizes, bias, recipe=jg.Float8BlockScaling())

        assert y[:14].tolist() == 14 * [16 * [33.0]] and not y[14:].any()
        assert jnp.allclose(y_fp8, y, rtol=1e-3)
    """
    inputs, spec = canonical_inputs(
        x,
        Weights(kernel, bias, kernel_cache, fp8_state, dkernel_accumulator),
        group_sizes,
        group_offset,
        recipe=recipe,
        preferred_element_type=preferred_element_type,
        precision=precision,
    )
    return _dense(inputs, spec)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _dense(inputs: Inputs, spec: DenseSpec) -> jax.Array:
    return fprop(inputs, spec, for_gradients=False)[0]


def _forward(primals: Any, spec: DenseSpec) -> tuple[jax.Array, Saved]:
    return forward(primal_values(primals), spec)


def _backward(spec: DenseSpec, saved: Saved, dy: Any) -> tuple[Any]:
    del spec
    return (gradients(saved, None if isinstance(dy, jax.custom_derivatives.SymbolicZero) else dy),)


_dense.defvjp(_forward, _backward, symbolic_zeros=True)
