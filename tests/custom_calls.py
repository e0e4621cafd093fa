"""The custom calls as a program written by hand makes them: each argument as the library gives it, or another."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_grouped as jg
from jax_grouped.core.groups import max_row_blocks
from jax_grouped.kernels import bias, primitive, product, quantization, routing
from jax_grouped.kernels.quantization import QuantizeSpec

BF16, F32, I32, U8, FP8 = jnp.bfloat16, jnp.float32, jnp.int32, jnp.uint8, jnp.float8_e4m3fn
#: Values of attributes.
SILU, SWIGLU = 1, 5
#: The attributes of a SwiGLU with numbers, which no other activation reads.
NUMBERS = dict(limit=np.float32(7), gate_limit=np.float32(7), alpha=np.float32(1), offset=np.float32(0))

#: Every call has 4 groups of 8 rows, and 16 features of tokens.
GROUPS, ROWS, FEATURES = 4, 32, 16
TILES, TABLE = bias.count_partial_sums(ROWS, GROUPS), primitive.group_table_size(GROUPS)
#: Scales of two rows per token, in blocks of 1 x 128.
BLOCK_SCALES = 4 * max_row_blocks(2 * ROWS, GROUPS, 4)
#: Scales of a row per token.
ROW_SCALES = 4 * max_row_blocks(ROWS, GROUPS, 4)
#: Every routing has 2 of 4 experts for each of 32 tokens.
EXPERT_SHAPE, BLOCK_SHAPE = (GROUPS,), (routing.count_blocks(ROWS), GROUPS)

Shape = tuple[int, ...]
Array = tuple[Shape, jax.typing.DTypeLike]


def gemm(
    a: Shape = (ROWS, FEATURES),
    b: Shape = (GROUPS, FEATURES, 24),
    d: Shape = (ROWS, 24),
    a_type: jax.typing.DTypeLike = BF16,
    b_type: jax.typing.DTypeLike = BF16,
    d_type: jax.typing.DTypeLike = BF16,
    more: Sequence[Array] = (),
    activated: Sequence[Array] = (),
    scratch: int = product.scratch_bytes(1, GROUPS),
    workspace: int = product.WORKSPACE_BYTES,
    offset: Shape = (1,),
    **attributes: Any,
) -> jax.Array:
    defaults = dict(
        product=np.int32(0),
        scaled=False,
        a_mode=np.int32(0),
        b_mode=np.int32(0),
        tokens=np.int64(0),
        expected_tokens=np.int64(0),
        weight_batch=np.int64(1),
        gathered=np.int32(0),
        accumulate=False,
        zero_other_rows=True,
        batch_invariant=False,
        swiglu=bool(activated),
        keeps_product=True,
        pow2_scales=False,
        amax_epsilon=np.float32(0),
    )
    operands = [(a, a_type), (b, b_type), *more]
    results = [(d, d_type), *activated, ((scratch,), U8), ((workspace,), U8)]
    return call("jax_grouped_gemm", operands, results, defaults, attributes, offset)[0]


def bias_grad(
    dy: Shape = (ROWS, FEATURES),
    dy_type: jax.typing.DTypeLike = BF16,
    dbias: Shape = (GROUPS, FEATURES),
    partial_sums: Shape = (TILES, FEATURES),
    tables: int = TABLE,
    offset: Shape = (1,),
) -> jax.Array:
    results = [(dbias, F32), (partial_sums, F32), ((tables,), I32)]
    return call("jax_grouped_bias_grad", [(dy, dy_type)], results, {}, {}, offset)[0]


def quantize(
    x: Shape = (ROWS, FEATURES),
    x_type: jax.typing.DTypeLike = BF16,
    more: Sequence[Array] = (),
    data: Array = ((ROWS, FEATURES), FP8),
    scale: Array = ((GROUPS,), F32),
    amax: Array = ((GROUPS,), F32),
    dbias: Sequence[Array] = (),
    activated: Sequence[Array] = (),
    scratch: int = quantization.scratch_bytes(ROWS, GROUPS),
    partial_sums: Array = ((0, FEATURES), F32),
    surplus: Sequence[Array] = (),
    offset: Shape = (1,),
    **attributes: Any,
) -> jax.Array:
    """The first result; `dbias`, `activated` and `surplus` are lists of the results of these kinds."""
    spec = QuantizeSpec(jg.ScalingMode.TENSOR, FP8, GROUPS, dbias=bool(dbias), activated=bool(activated))
    defaults = quantization.quantize_attributes(spec) | NUMBERS
    results = [data, scale, amax, *dbias, *activated, ((scratch,), U8), partial_sums, *surplus]
    return call("jax_grouped_quantize", [(x, x_type), *more], results, defaults, attributes, offset)[0]


def quantize_permuted(
    x: Array = ((ROWS, FEATURES), BF16),
    inverse: Shape = (ROWS, 2),
    data: Array = ((2 * ROWS, FEATURES), FP8),
    scale: Array = ((BLOCK_SCALES,), F32),
    table: Shape = (TABLE,),
    offset: Shape = (1,),
    more: Sequence[Array] = (),
    amax: Sequence[Array] = (),
    **attributes: Any,
) -> jax.Array:
    defaults = dict(num_groups=np.int64(GROUPS), given_scale=False, pow2_scales=False, amax_epsilon=np.float32(0))
    operands, results = [x, (inverse, I32), *more], [data, scale, (table, I32), *amax]
    return call("jax_grouped_quantize_permuted", operands, results, defaults, attributes, offset)[0]


def dequantize(
    data: Array = ((ROWS, FEATURES), FP8),
    scale: Array = ((GROUPS,), F32),
    out: Array = ((ROWS, FEATURES), BF16),
    table: Array = ((TABLE,), I32),
    offset: Shape = (1,),
    **attributes: Any,
) -> jax.Array:
    defaults = dict(
        mode=np.int32(0),
        num_groups=np.int64(GROUPS),
        stack_rows=np.int64(0),
        columnwise=False,
    )
    return call("jax_grouped_dequantize", [data, scale], [out, table], defaults, attributes, offset)[0]


def activation_grad(
    x: Array = ((ROWS, 2 * FEATURES), BF16),
    da: Array = ((ROWS, FEATURES), BF16),
    weights: Shape = (ROWS,),
    more: Sequence[Array] = (),
    dx: Array = ((ROWS, 2 * FEATURES), BF16),
    weighted: Array = ((ROWS, FEATURES), BF16),
    inner_products: Shape = (ROWS,),
    activation: int = SWIGLU,
) -> jax.Array:
    operands, results = [x, da, (weights, F32), *more], [dx, weighted, (inner_products, F32)]
    attributes = dict(activation=np.int32(activation), **NUMBERS)
    return call("jax_grouped_activation_grad", operands, results, attributes)[2]


def permute_rows(
    x: Array = ((ROWS, FEATURES), BF16),
    order: Shape = (2 * ROWS,),
    inverse: Shape = (ROWS, 2),
    rows: Array = ((2 * ROWS, FEATURES), BF16),
) -> jax.Array:
    """Copies every token to row 1."""
    operands = [x, (order, I32), (inverse, I32)]
    return call("jax_grouped_permute_rows", operands, [rows], dict(zero_tail=True))[0]


def sum_rows(
    rows: Array = ((2 * ROWS, FEATURES), BF16),
    inverse: Shape = (ROWS, 2),
    weights: Sequence[Array] = (((ROWS, 2), F32),),
    sums: Array = ((ROWS, FEATURES), BF16),
) -> jax.Array:
    """Adds row 1 to itself, for every token."""
    return call("jax_grouped_sum_rows", [rows, (inverse, I32), *weights], [sums])[0]


def route(
    logits: Array = ((ROWS, GROUPS), BF16),
    more: Sequence[Array] = (),
    experts: Shape = (ROWS, 2),
    weights: Shape = (ROWS, 2),
    probabilities: Shape = (ROWS, GROUPS),
    block_counts: Shape = BLOCK_SHAPE,
    block_sums: Shape = BLOCK_SHAPE,
    **attributes: Any,
) -> jax.Array:
    """Routes every token to experts 0 and 1."""
    defaults = dict(
        batch=np.int64(1),
        score=np.int32(0),
        normalize_weights=True,
        expert_groups=np.int64(1),
        top_groups=np.int64(1),
        group_score=np.int32(0),
        has_bias=False,
        has_choice=False,
    )
    results = [(experts, I32), (weights, F32), (probabilities, F32), (block_counts, I32), (block_sums, F32)]
    return call("jax_grouped_route", [logits, *more], results, defaults, attributes)[0]


def group_pairs(
    experts: Shape = (ROWS, 2),
    blocks: Sequence[Array] = (),
    order: Shape = (2 * ROWS,),
    inverse: Shape = (ROWS, 2),
    group_sizes: Shape = EXPERT_SHAPE,
    dropped: Shape = (1,),
    expert_load: Shape = EXPERT_SHAPE,
    last: Array = (BLOCK_SHAPE, I32),
    batch: int = 1,
) -> jax.Array:
    """Sorts pairs that are all of expert 1. Returns the inverse."""
    results = [(shape, I32) for shape in (order, inverse, group_sizes, dropped, expert_load)]
    operands = [(experts, I32), *blocks]
    return call("jax_grouped_group_pairs", operands, [*results, last], dict(batch=np.int64(batch)))[1]


def call(
    target: str,
    operands: Sequence[Array],
    results: Sequence[Array],
    defaults: dict[str, Any] | None = None,
    attributes: dict[str, Any] | None = None,
    offset: Shape | None = None,
) -> Sequence[jax.Array]:
    """Makes a custom call whose operands are ones, with groups if there is an offset of them.

    Attributes take the types of their defaults.
    """
    arguments = [jnp.ones(*operand) for operand in operands]
    if offset is not None:
        after = 1 if target in ("jax_grouped_bias_grad", "jax_grouped_quantize") else 2
        arguments[after:after] = [jnp.full(GROUPS, ROWS // GROUPS, I32), jnp.zeros(offset, I32)]
    given = (defaults or {}) | (attributes or {})
    typed = {name: type((defaults or {})[name])(value) for name, value in given.items()}
    shapes = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in results]
    # XLA drops a call with an empty result unless it has a side effect.
    custom_call = jax.ffi.ffi_call(target, shapes, has_side_effect=offset is None, vmap_method="sequential")
    return custom_call(*arguments, **typed)
