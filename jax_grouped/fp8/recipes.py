"""Scaling modes and recipes: the scaling and the FP8 type of each tensor. All are static under `jit`."""

from __future__ import annotations

import dataclasses
import enum
from typing import ClassVar, Literal

import jax.numpy as jnp
from jax.typing import DTypeLike

from jax_grouped.core.values import canonical_dtype, shown, static_bool, static_number, static_size

#: FP8 types and their largest finite values. OCP 8-bit floating point specification, revision 1.0.
FP8_MAX = {jnp.dtype(jnp.float8_e4m3fn): 448.0, jnp.dtype(jnp.float8_e5m2): 57344.0}


class ScalingMode(enum.Enum):
    """Set of elements that share a scale. Blocks never cross a group: the last block of a group or row may be shorter.

    Attributes:
        TENSOR: the whole group.
        BLOCK_1D: 128 consecutive elements along the quantized axis (DeepSeek-V3, arXiv:2412.19437).
        BLOCK_2D: 128 x 128 elements, for kernels.
        MX: 32 consecutive elements; the scale is a power of two in one byte (OCP Microscaling Formats 1.0).

    Example:
        x = jnp.ones((16, 32))
        quantized = jg.grouped_quantize(x, jnp.array([10, 4]), jg.ScalingMode.TENSOR, columnwise=True)

        assert jg.grouped_dequantize(quantized.rowwise)[0, 0] == 1
    """

    TENSOR = "tensor"
    BLOCK_1D = "block_1d"
    BLOCK_2D = "block_2d"
    MX = "mx"


def canonical_epsilon(value: float) -> float:
    """Converts `amax_epsilon` to a float."""
    epsilon = static_number("amax_epsilon", value)
    if not 0.0 <= epsilon <= float(jnp.finfo(jnp.float32).max):
        raise ValueError(f"amax_epsilon must be finite in float32 and not negative, got {value}.")
    return epsilon


class _Types:
    """Base of the recipes, which checks and normalises their fields."""

    #: Scaling modes of tokens and gradients, and of kernels.
    token_mode: ClassVar[ScalingMode]
    kernel_mode: ClassVar[ScalingMode]
    fwd_dtype: DTypeLike
    grad_dtype: DTypeLike

    def __post_init__(self) -> None:
        for name in ("fwd_dtype", "grad_dtype"):
            object.__setattr__(self, name, canonical_dtype(name, getattr(self, name), FP8_MAX))
        if hasattr(self, "amax_epsilon"):
            object.__setattr__(self, "amax_epsilon", canonical_epsilon(self.amax_epsilon))
        if hasattr(self, "pow2_scales"):
            object.__setattr__(self, "pow2_scales", static_bool("pow2_scales", self.pow2_scales))


@dataclasses.dataclass(frozen=True)
class Float8BlockScaling(_Types):
    """Blocks of 1x128 for tokens and gradients, 128x128 for kernels, scaled by their own largest value. Needs Hopper.

    DeepSeek-V3 was trained with this recipe (arXiv:2412.19437, section 3.3).

    Attributes:
        fwd_dtype: FP8 type of tokens and kernels.
        grad_dtype: FP8 type of gradients.
        pow2_scales: round scales down to powers of two, which adds no rounding error of its own.
        amax_epsilon: blocks whose largest value is below this are scaled as if it were this.

    Raises:
        TypeError: a type is not one of the two FP8 types, or another field is not of its type.
        ValueError: `amax_epsilon` is negative or not finite.

    Example:
        x, kernel, group_sizes = jnp.ones((16, 32)), jnp.ones((2, 32, 16)), jnp.array([10, 4])

        y = jg.grouped_dense(x, kernel, group_sizes, recipe=jg.Float8BlockScaling())

        assert jnp.allclose(y[:14], 32, rtol=1e-3)
    """

    token_mode: ClassVar[ScalingMode] = ScalingMode.BLOCK_1D
    kernel_mode: ClassVar[ScalingMode] = ScalingMode.BLOCK_2D
    fwd_dtype: DTypeLike = jnp.float8_e4m3fn
    grad_dtype: DTypeLike = jnp.float8_e4m3fn
    pow2_scales: bool = True
    amax_epsilon: float = 0.0


@dataclasses.dataclass(frozen=True)
class Float8CurrentScaling(_Types):
    """One scale per group and tensor, from the tensor's own largest value.

    Attributes:
        fwd_dtype: FP8 type of tokens and kernels.
        grad_dtype: FP8 type of gradients.
        pow2_scales: round scales down to powers of two.
        amax_epsilon: groups whose largest value is below this are scaled as if it were this.

    Raises:
        TypeError: a type is not one of the two FP8 types, or another field is not of its type.
        ValueError: `amax_epsilon` is negative or not finite.

    Example:
        recipe = jg.Float8CurrentScaling(grad_dtype=jnp.float8_e4m3fn)
        cache = jg.quantize_kernel(jnp.ones((2, 32, 16)), recipe)

        assert cache.amax.tolist() == [1.0, 1.0]
    """

    token_mode: ClassVar[ScalingMode] = ScalingMode.TENSOR
    kernel_mode: ClassVar[ScalingMode] = ScalingMode.TENSOR
    fwd_dtype: DTypeLike = jnp.float8_e4m3fn
    grad_dtype: DTypeLike = jnp.float8_e5m2
    pow2_scales: bool = False
    amax_epsilon: float = 0.0


@dataclasses.dataclass(frozen=True)
class DelayedScaling(_Types):
    """One scale per group and tensor, from the largest values of earlier steps.

    The next scale is `fp8_max / (amax * 2**margin)` (Micikevicius et al., arXiv:2209.05433).

    Attributes:
        fwd_dtype: FP8 type of tokens and kernels.
        grad_dtype: FP8 type of gradients.
        amax_history_len: number of steps in the history.
        amax_compute_algo: whether `amax` is the maximum of the history or its most recent entry.
        margin: headroom, in powers of two.

    Raises:
        TypeError: a type is not one of the two FP8 types, or another field is not of its type.
        ValueError: the history's length, `margin` or `amax_compute_algo` is outside of its range.

    Example:
        recipe = jg.DelayedScaling(amax_history_len=16, margin=1)
        state = jg.Fp8State.initial(recipe, num_groups=2)

        assert state.kernel_amax_history.shape == (2, 16)
    """

    token_mode: ClassVar[ScalingMode] = ScalingMode.TENSOR
    kernel_mode: ClassVar[ScalingMode] = ScalingMode.TENSOR
    fwd_dtype: DTypeLike = jnp.float8_e4m3fn
    grad_dtype: DTypeLike = jnp.float8_e5m2
    amax_history_len: int = 1024
    amax_compute_algo: Literal["max", "most_recent"] = "max"
    margin: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        length = static_size("amax_history_len", self.amax_history_len, least=1)
        object.__setattr__(self, "amax_history_len", length)
        margin = static_number("margin", self.margin)
        if not -126 <= margin <= 126:
            raise ValueError(f"margin must be a number between -126 and 126, got {self.margin!r}.")
        object.__setattr__(self, "margin", margin)
        if self.amax_compute_algo not in ("max", "most_recent"):
            raise ValueError(f"amax_compute_algo must be 'max' or 'most_recent', got {self.amax_compute_algo!r}.")


@dataclasses.dataclass(frozen=True)
class MXFP8BlockScaling(_Types):
    """Blocks of 1x32 with power-of-two scales for every tensor (OCP Microscaling Formats 1.0). Made for Blackwell.

    Attributes:
        fwd_dtype: FP8 type of tokens and kernels.
        grad_dtype: FP8 type of gradients.

    Raises:
        TypeError: a type is not one of the two FP8 types.

    Example:
        layer = jg.linen.GroupedDense(16, num_groups=2, recipe=jg.MXFP8BlockScaling())

        assert layer.recipe.kernel_mode == jg.ScalingMode.MX
    """

    token_mode: ClassVar[ScalingMode] = ScalingMode.MX
    kernel_mode: ClassVar[ScalingMode] = ScalingMode.MX
    fwd_dtype: DTypeLike = jnp.float8_e4m3fn
    grad_dtype: DTypeLike = jnp.float8_e4m3fn


#: Type of the `recipe` argument of `grouped_dense` and the layers.
Recipe = Float8BlockScaling | Float8CurrentScaling | DelayedScaling | MXFP8BlockScaling


def is_recipe_class(value: object) -> bool:
    """Tells whether `value` is one of the recipes' classes, which are not recipes themselves."""
    return isinstance(value, type) and issubclass(value, Recipe)


def recipe_error(recipe: object, *, optional: bool = True) -> TypeError:
    """Returns the error about a value that is no recipe."""
    rule = ", or None" if optional else ""
    remedy = f": pass {recipe.__name__}()" if isinstance(recipe, type) and is_recipe_class(recipe) else ""
    return TypeError(f"recipe must be a recipe such as Float8BlockScaling(){rule}, got {shown(recipe)}{remedy}.")
