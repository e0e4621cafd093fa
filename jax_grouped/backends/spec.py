"""Static descriptions of operations, one value per operation, which every backend understands."""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jax_grouped.fp8.layout import BLOCK, QuantizedLayout
from jax_grouped.fp8.recipes import ScalingMode

Product = Literal["fprop", "dgrad", "wgrad"]
#: Types of narrow kernels, whose numbers bfloat16 and float16 hold exactly.
NARROW_TYPES = tuple(
    jnp.dtype(dtype) for dtype in (jnp.int4, jnp.uint4, jnp.int8, jnp.uint8, jnp.float8_e4m3fn, jnp.float8_e5m2)
)
#: Function from a router's logits to scores.
Score = Literal["softmax", "sigmoid"]
#: Activations of experts. Those that end in `_mul` have a gate: they take twice the features, those of the gate first,
#: and multiply its activation by the others. `jax_grouped.grouped_quantize` says what each computes.
Activation = Literal["silu_mul", "gelu_mul", "clamped_silu_mul", "silu", "gelu", "relu", "relu_squared"]


def is_gated(activation: str | None) -> bool:
    """Returns true for an activation that has a gate."""
    return activation is not None and activation.endswith("_mul")


@dataclasses.dataclass(frozen=True)
class GemmSpec:
    """The static part of a grouped product `(a, b, group_sizes, group_offset, *scales, *more) -> out`.

    | product | a           | b                  | out               |
    |---------|-------------|--------------------|-------------------|
    | `fprop` | x `[T,K]`   | kernel `[G,K,N]`   | y `[T,N]`         |
    | `dgrad` | dy `[T,N]`  | kernel `[G,K,N]`   | dx `[T,K]`        |
    | `wgrad` | x `[T,K]`   | dy `[T,N]`         | dkernel `[G,K,N]` |

    With quantized operands, `scales` are those of a and of b. Both operands are contiguous along the contracted axis,
    as Hopper's FP8 matmul requires: `fprop` reads x rowwise and the kernel columnwise, `dgrad` reads dy and the kernel
    rowwise, `wgrad` reads x and dy columnwise. Tokens and kernels have the modes `BLOCK_1D` and `BLOCK_2D`, or both
    `TENSOR`, or both `MX` with swizzled scales.

    Without scales, a kernel may be narrow: it has one of the `NARROW_TYPES` beside tokens of another type. Its numbers
    are then converted to that type a few groups at a time.

    `more` is an accumulator, or the `order` and `inverse` of a permutation, or nothing. As an operation, only `wgrad`
    takes an accumulator: an array like the result, to which the product is added. With a permutation, one unquantized
    operand is given as the tokens of which the permutation makes its rows, as `jax_grouped.ops.rows.permute_rows` does.

    Attributes:
        product: which of the three.
        num_groups: `G`, the number of local kernels; `group_sizes` may describe more groups.
        out_dtype: type of the result.
        precision: applies to float32 operands; see `jax_grouped.ragged_dot`.
        a, b: layouts of the data and scales of quantized operands; None for unquantized operands.
        gathered: the operand that is given as tokens: a, with `wgrad` a or b; None without a permutation.
        expected_tokens: number of tokens in groups by which algorithms are chosen; 0 for all `T`.
        zero_other_rows: whether rows of no group are zero in the result of `fprop` and `dgrad`, which costs their
            writes. Otherwise they hold anything, and the permutation must have a pair for each row of a group.
        autotune: whether to time algorithms where there is a choice; see `jax_grouped.config`.
    """

    product: Product
    num_groups: int
    out_dtype: DTypeLike
    precision: jax.lax.Precision = jax.lax.Precision.DEFAULT
    a: QuantizedLayout | None = None
    b: QuantizedLayout | None = None
    gathered: Literal["a", "b"] | None = None
    expected_tokens: int = 0
    zero_other_rows: bool = True
    autotune: bool = False

    def __post_init__(self) -> None:
        # Normalise the type, so that equal specs compare and hash alike.
        object.__setattr__(self, "out_dtype", jnp.dtype(self.out_dtype))

    @property
    def scaled(self) -> bool:
        """True if the operands are quantized."""
        return self.a is not None

    def out(self, a: tuple[int, ...], b: tuple[int, ...], order: tuple[int, ...] = ()) -> jax.ShapeDtypeStruct:
        """Returns shape and type of the result for operands of these shapes, and an `order` if one is gathered."""
        if self.gathered == "a":
            a = (*order, a[1])
        if self.a is not None and self.b is not None:
            a = (self.a.tokens, self.a.features)
            b = (
                (self.b.tokens, self.b.features)
                if self.b.stack_rows is None
                else (0, self.b.stack_rows, self.b.features)
            )
        match self.product:
            case "fprop":
                shape: tuple[int, ...] = (a[0], b[2])
            case "dgrad":
                shape = (a[0], b[1])
            case "wgrad":
                shape = (self.num_groups, a[1], b[1])
        return jax.ShapeDtypeStruct(shape, self.out_dtype)

    @property
    def weight_operands(self) -> tuple[int, ...]:
        """Positions of the operands that are weights: b, and its scales."""
        if self.product == "wgrad":
            return ()
        return (1, 5) if self.scaled else (1,)


@dataclasses.dataclass(frozen=True)
class QuantizeSpec:
    """The static part of a quantization `(x, group_sizes, group_offset, *more) -> results`.

    `more` holds these operands in this order, each only if its flag is set: `x_scale`, `row_indices [R]`, `scale [G]`,
    `activation_input`, `row_weights [T]`, `activated_scale [G]` if scales are given and the activation's result is
    quantized too, and `skip` with the previous results, whose bytes are kept if `skip` is true.

    Attributes:
        mode: which elements share a scale.
        dtype: the FP8 type.
        num_groups: `G`, the number of groups to quantize; `group_sizes` may describe more.
        stack_rows: rows of every group of a stack of equal groups, None for ragged tokens.
        scaled_input: whether `x` is FP8 numbers. `x_scale` is then their inverse scales, as in a rowwise stack of
            `BLOCK_1D`, and the values are read as bfloat16 (`BLOCK_1D` without an activation only).
        gathered_rows: `R`, the number of rows, if they are gathered: row `i` is `x[row_indices[i]]`, or zero if there
            is no such row. None if `x` holds the rows themselves.
        rowwise, columnwise: the orientations to make.
        dbias: whether to sum each group's rows.
        pow2_scales: whether scales are rounded down to powers of two.
        amax_epsilon: blocks whose largest value is below this are scaled as if it were this.
        swizzled_scales: whether scales of `MX` are in the order of Blackwell's matmul.
        given_scale: whether the scales are given, one per group (`TENSOR` only).
        activation: function applied to `x` before quantization, in float32.
        backward: quantize the gradient of the activation's input instead; `x` is then the gradient of its result.
        weighted: whether the activation's result, or with `backward` its gradient, is multiplied by a weight per row.
        inner_products: whether to make, with `backward`, the inner products of each row of the activation's result with
            `x`, before weights, one per 128 features of `x`; 0 for rows of no group.
        activated: whether to make, with `backward`, also the columnwise copy of the activation's result, weighted, as
            float8_e4m3fn, and its largest values: what `of_activation` describes.
        cached: whether `skip` and previous results are given.
    """

    mode: ScalingMode
    dtype: DTypeLike
    num_groups: int
    stack_rows: int | None = None
    scaled_input: bool = False
    gathered_rows: int | None = None
    rowwise: bool = True
    columnwise: bool = False
    dbias: bool = False
    pow2_scales: bool = False
    amax_epsilon: float = 0.0
    swizzled_scales: bool = False
    given_scale: bool = False
    activation: Activation | None = None
    backward: bool = False
    weighted: bool = False
    inner_products: bool = False
    activated: bool = False
    cached: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", jnp.dtype(self.dtype))

    def of_activation(self) -> "QuantizeSpec":
        """Returns the spec of what `activated` adds: a columnwise quantization of `activation_input`'s activation."""
        return dataclasses.replace(
            self,
            dtype=jnp.float8_e4m3fn,
            rowwise=False,
            columnwise=True,
            dbias=False,
            backward=False,
            inner_products=False,
            activated=False,
        )

    def rows(self, x_rows: int) -> int:
        """Returns the number of rows of the quantized array, from that of `x`."""
        return x_rows if self.gathered_rows is None else self.gathered_rows

    def features(self, x_features: int) -> int:
        """Returns the number of features of the quantized array, from that of `x`."""
        if not is_gated(self.activation):
            return x_features
        return 2 * x_features if self.backward else x_features // 2

    def layout(self, x_shape: tuple[int, ...], *, columnwise: bool) -> QuantizedLayout:
        """Returns the layout of one orientation's data and scales, for an `x` of this shape, `[T, C]`."""
        return QuantizedLayout(
            self.mode,
            columnwise,
            tokens=self.rows(x_shape[0]),
            features=self.features(x_shape[1]),
            num_groups=self.num_groups,
            stack_rows=self.stack_rows,
            swizzled_scales=self.swizzled_scales,
        )

    @property
    def scale_dtype(self) -> np.dtype:
        """Type of the inverse scales."""
        return jnp.dtype(jnp.float8_e8m0fnu if self.mode == ScalingMode.MX else jnp.float32)

    def results(self, x_shape: tuple[int, ...]) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns shapes and types of the results, in the order that the primitive and the custom call have them."""
        results = {}
        for name, columnwise, wanted in (("row", False, self.rowwise), ("column", True, self.columnwise)):
            if wanted:
                layout = self.layout(x_shape, columnwise=columnwise)
                results[f"{name}_data"] = jax.ShapeDtypeStruct(layout.data_shape, self.dtype)
                results[f"{name}_scale"] = jax.ShapeDtypeStruct(layout.scale_shape, self.scale_dtype)
        results["amax"] = jax.ShapeDtypeStruct((self.num_groups,), jnp.float32)
        if self.dbias:
            results["dbias"] = jax.ShapeDtypeStruct((self.num_groups, self.features(x_shape[1])), jnp.float32)
        if self.inner_products:
            results["inner_products"] = jax.ShapeDtypeStruct((x_shape[0], -(-x_shape[1] // BLOCK)), jnp.float32)
        if self.activated:
            of_activation = self.of_activation().results((x_shape[0], self.features(x_shape[1])))
            results |= {
                "activated_data": of_activation["column_data"],
                "activated_scale": of_activation["column_scale"],
                "activated_amax": of_activation["amax"],
            }
        return results

    def permuted_results(self, x_shape: tuple[int, ...]) -> list[jax.ShapeDtypeStruct]:
        """Returns shapes and types of the results of `quantize_permuted`: data, scales, and amax for given scales."""
        results = self.results(x_shape)
        amax = [results["amax"]] if self.given_scale else []
        return [results["row_data"], results["row_scale"], *amax]


@dataclasses.dataclass(frozen=True)
class RouteSpec:
    """The static part of a routing `(logits, *bias) -> (experts, weights, probabilities)`.

    | array           | type and shape  | contents                                                            |
    |-----------------|-----------------|---------------------------------------------------------------------|
    | `logits`        | `[T, E]`        | bfloat16, float16 or float32                                        |
    | `bias`          | `float32[E]`    | if given, what is added to the scores for the choice                |
    | `experts`       | `int32[T, k]`   | highest sums of score and bias, best first; of equal ones, by index |
    | `weights`       | `float32[T, k]` | scores of these experts                                             |
    | `probabilities` | `float32[T, E]` | softmax, or the sigmoids divided by their sum                       |

    In the choice, a NaN counts as the lowest score. Without a bias, sigmoids are compared by their logits, and groups
    by sums of sigmoids that are divided by a common factor: float32 rounds the sigmoids themselves to 0 or 1.

    Attributes:
        top_k: `k`, at most the experts of the groups that a token may use.
        score: function from the logits to the scores, which are computed in float32.
        normalize_weights: whether a token's weights are divided by their sum, unless that is 0.
        expert_groups: number of groups of successive experts.
        top_groups: number of groups that a token's experts come from: those with the highest sum of the two highest
            numbers that the choice compares.
    """

    top_k: int
    score: Score
    normalize_weights: bool
    expert_groups: int = 1
    top_groups: int = 1

    def results(self, logits: tuple[int, ...]) -> list[jax.ShapeDtypeStruct]:
        """Returns shapes and types of the results for logits of this shape."""
        choices = (logits[0], self.top_k)
        return [
            jax.ShapeDtypeStruct(choices, jnp.int32),
            jax.ShapeDtypeStruct(choices, jnp.float32),
            jax.ShapeDtypeStruct(logits, jnp.float32),
        ]


def grouped_pairs(experts: tuple[int, ...], num_experts: int, rows: int) -> list[jax.ShapeDtypeStruct]:
    """Returns shapes and types of an order of pairs, its inverse, the group sizes, and the number of dropped pairs.

    Args:
        experts: the shape `[T, k]` of the experts.
        num_experts: `E`.
        rows: `R`.
    """
    shapes = ((rows,), experts, (num_experts,), (1,))
    return [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes]


def batched(result: jax.ShapeDtypeStruct, batch: int) -> jax.ShapeDtypeStruct:
    """Returns the shape of `batch` such arrays concatenated along their first axis: `[L, ...] -> [B * L, ...]`."""
    return jax.ShapeDtypeStruct((batch * result.shape[0], *result.shape[1:]), result.dtype)
