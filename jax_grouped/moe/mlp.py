"""`grouped_mlp`: the experts' feed-forward network, two grouped products with an activation in between."""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding, PartitionSpec

from jax_grouped.core.values import as_array
from jax_grouped.core.varying import apply_rule
from jax_grouped.fp8.recipes import Recipe
from jax_grouped.kernels.activations import Activation, is_gated
from jax_grouped.kernels.partition import axes_of
from jax_grouped.ops import checks
from jax_grouped.ops.checks import GroupSizes
from jax_grouped.ops.dense import Saved, fprop, gradients, grouped_dense, primal_values, save
from jax_grouped.ops.dense_on_mesh import is_split
from jax_grouped.ops.inputs import DenseSpec, Inputs, Partitions, Weights, canonical_weights, vary_inputs
from jax_grouped.ops.residuals import CHECKPOINT_NAMES, OUTPUT_NAME
from jax_grouped.ops.rows import activate

#: Name of the input of the activation, for policies of `jax.checkpoint`.
HIDDEN_NAME = CHECKPOINT_NAMES[2]


def grouped_mlp(
    x: jax.Array,
    gate_up: jax.Array | Weights,
    down: jax.Array | Weights,
    group_sizes: GroupSizes,
    *,
    activation: Activation = "swiglu",
    recipe: Recipe | None = None,
    precision: jax.lax.PrecisionLike = None,
    out_sharding: NamedSharding | PartitionSpec | None = None,
) -> jax.Array:
    """Applies a feed-forward network per group: by default `(silu(x @ gate) * (x @ up)) @ down` (arXiv:2002.05202).

    With a recipe, the activation is fused into the quantization of the second product's input, and its derivative into
    the quantization of the first product's output gradient. Both are computed in float32, rounded once, to FP8, and
    never written in a wider type. Without a recipe they are plain JAX, and the backward pass computes the activation
    again from the first product's result, which is kept in its own type. Everything else is as in
    `jax_grouped.grouped_dense`: types, rows of no group, gradients, the values kept under
    `jax_grouped.CHECKPOINT_NAMES`, and the fields of `Weights`.

    Under plain `jax.jit` with sharded arrays, both products are split as `jax_grouped.grouped_dense` is: activation and
    quantization are then two passes, with a rounding to the type of `x` in between.

    Args:
        x: `[T, K]` tokens, bfloat16, float16 or float32; rows of group 0 first, then group 1, and so on.
        gate_up: `[E, K, 2 F]`, the gate's features first, or `Weights` with such a kernel; `[E, K, F]` with an
            activation that has no gate.
        down: `[E, F, N]`, or `Weights` with such a kernel.
        group_sizes: `[E]` integers, rows per group, read on the device only.
        activation: with a gate "swiglu", "geglu", "reglu" or a `jax_grouped.SwiGLU`; without one "silu",
            "gelu", "relu" or "relu_squared". See `jax_grouped.grouped_quantize`.
        recipe: how both products are computed in FP8, with `K`, `F` and `N` multiples of 16; None to compute in the
            type of `x`.
        precision: as in `jax_grouped.ragged_dot`; matters for float32 `x` only. Not with a recipe.
        out_sharding: as in `jax_grouped.ragged_dot`.

    Returns:
        `[T, N]` in the type of `x`.

    Raises:
        TypeError: an argument, or the recipe, has a type that is not supported.
        ValueError: an argument has a shape that does not fit, or as `jax_grouped.grouped_dense`.

    Example:
        x, gate_up, down = jnp.ones((16, 32)), jnp.ones((2, 32, 32)), jnp.ones((2, 16, 32))

        y = jg.moe.grouped_mlp(x, gate_up, down, jnp.array([10, 4]))

        assert jnp.allclose(y[:14], 16 * 32 * jax.nn.silu(32.0)) and not y[14:].any()
    """
    x = as_array("x", x)
    gate_up, down, spec = canonical_mlp(x, gate_up, down, activation, recipe, precision)
    if _is_composed(x, gate_up, down, spec, out_sharding):
        dense = functools.partial(grouped_dense, group_sizes=group_sizes, recipe=recipe, precision=precision)
        hidden = dense(x, **gate_up._asdict(), out_sharding=_hidden_spec(x, gate_up.kernel, down.kernel))
        hidden = checkpoint_name(hidden, HIDDEN_NAME)
        y = dense(activate(hidden, activation), **down._asdict(), out_sharding=out_sharding)
        return checkpoint_name(y, OUTPUT_NAME)

    groups = checks.canonical_groups(group_sizes, None, "gate_up", gate_up.kernel, capacity=x.shape[0])
    # The second product has no tokens yet: the first product computes them.
    down_inputs = Inputs(None, down, groups)  # type: ignore[arg-type]
    inputs = vary_inputs(Inputs(x, gate_up, groups), down_inputs)
    return checkpoint_name(apply_rule(_mlp, inputs, spec, "grouped_mlp"), OUTPUT_NAME)


def _is_composed(
    x: jax.Array, gate_up: Weights, down: Weights, spec: "MlpSpec", out: NamedSharding | PartitionSpec | None
) -> bool:
    """Tells whether the products are separate operations: if there is no recipe, or if one of them can be split."""
    last = dataclasses.replace(
        spec.down, partitions=Partitions(out=checks.canonical_out_spec(out, x, gate_up.kernel, down.kernel))
    )
    return spec.up.recipe is None or is_split(x, gate_up, spec.up) or is_split(x, down, last)


def _hidden_spec(x: jax.Array, gate_up: jax.Array, down: jax.Array) -> PartitionSpec:
    """Returns the spec of the type of the activation's input: tokens as those of `x`, features as those of `gate_up`.

    Features stay whole if their axes split the tokens too, or do not divide the `F` features of each half.
    """
    x_sharding, kernel_sharding = jax.typeof(x).sharding, jax.typeof(gate_up).sharding
    axes = axes_of(kernel_sharding, 2)
    parts = math.prod(kernel_sharding.mesh.shape[axis] for axis in axes)
    is_free = not {*axes} & {*axes_of(x_sharding, 0)} and down.shape[1] % parts == 0
    return PartitionSpec(x_sharding.spec[0], kernel_sharding.spec[2] if is_free else None)


class MlpSpec(NamedTuple):
    """The activation, and the static parts of both products, which have it as theirs."""

    activation: Activation
    up: DenseSpec
    down: DenseSpec


def canonical_mlp(
    x: jax.Array | jax.ShapeDtypeStruct,
    gate_up: jax.Array | Weights,
    down: jax.Array | Weights,
    activation: Activation,
    recipe: Recipe | None,
    precision: jax.lax.PrecisionLike,
    parts: int = 1,
) -> tuple[Weights, Weights, MlpSpec]:
    """Returns both weights as arrays, and the static part of their products with tokens such as `x`.

    `parts` is that of `canonical_weights`.
    """
    gate_up, down = as_weights("gate_up", gate_up), as_weights("down", down)
    checks.check_activation_name(activation)
    check_shapes(gate_up.kernel.shape, down.kernel.shape, activation)
    if recipe is not None:
        checks.check_fp8_features("down", down.kernel.shape, down.kernel.shape[1], "F")
    gate_up, up = canonical_weights(x, gate_up, recipe, None, precision, "gate_up", parts)
    hidden = jax.ShapeDtypeStruct((x.shape[0], down.kernel.shape[1]), x.dtype)
    down, spec = canonical_weights(hidden, down, recipe, None, precision, "down", parts)
    return (
        gate_up,
        down,
        MlpSpec(
            activation,
            up=dataclasses.replace(up, output_activation=activation),
            down=dataclasses.replace(spec, input_activation=activation),
        ),
    )


def as_weights(name: str, weights: jax.Array | Weights) -> Weights:
    """Returns `Weights`, also from a bare kernel. Raises TypeError unless the kernel is an array."""
    if not isinstance(weights, Weights):
        weights = Weights(weights)
    return weights._replace(kernel=as_array(name, weights.kernel))


def check_shapes(gate_up: tuple[int, ...], down: tuple[int, ...], activation: Activation) -> None:
    """Raises ValueError unless kernels of these shapes follow each other."""
    halves, features = (2, "2 F") if is_gated(activation) else (1, "F")
    if len(gate_up) != 3 or len(down) != 3 or gate_up[0] != down[0] or gate_up[2] != halves * down[1]:
        raise ValueError(
            f"gate_up and down must have shapes [E, K, {features}] and [E, F, N] for {activation}, got {gate_up} and "
            f"{down}."
        )


class _MlpSaved(NamedTuple):
    up: Saved
    hidden: jax.Array
    down: Saved


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _mlp(inputs: tuple[Inputs, Inputs], spec: MlpSpec) -> jax.Array:
    hidden, _ = fprop(inputs[0], spec.up, for_gradients=False)
    return fprop(inputs[1]._replace(x=hidden), spec.down, for_gradients=False)[0]


def _forward(primals: Any, spec: MlpSpec) -> tuple[jax.Array, _MlpSaved]:
    up, down = map(primal_values, primals)
    hidden, up_residuals = fprop(up, spec.up, for_gradients=True)
    hidden = checkpoint_name(hidden, HIDDEN_NAME)
    y, down_residuals = fprop(down._replace(x=hidden), spec.down, for_gradients=True)
    return y, _MlpSaved(save(up, up_residuals), hidden, save(down, down_residuals))


def _backward(spec: MlpSpec, saved: _MlpSaved, dy: Any) -> tuple[tuple[Inputs, Inputs]]:
    del spec
    down = gradients(saved.down, None if isinstance(dy, jax.custom_derivatives.SymbolicZero) else dy)
    up = gradients(saved.up, down.x, saved.hidden)
    # The second product had no tokens among the inputs, so it returns no gradient of them.
    return ((up, down._replace(x=None)),)  # type: ignore[arg-type]


_mlp.defvjp(_forward, _backward, symbolic_zeros=True)
