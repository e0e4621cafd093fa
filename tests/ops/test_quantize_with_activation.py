"""The backward form of an activation that also quantizes the activation's result: the bits of two quantizations."""

import dataclasses
import itertools
import operator
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_grouped as jg
from jax_grouped import ScalingMode
from jax_grouped.core.groups import Groups
from jax_grouped.kernels import quantization
from jax_grouped.kernels.activations import Activation, is_gated
from jax_grouped.kernels.quantization import QuantizeSpec
from jax_grouped.ops.quantize import quantize_tokens, quantize_with_activation
from tests.operands import normal
from tests.ops.quantize_cases import ACTIVATIONS, as_bytes, some
from tests.programs import custom_calls, lowered

ROWS = 520
#: Groups of one row block, of none, of a row, of three row blocks, and of half of one, and rows of no group.
SIZES = jnp.array([130, 0, 1, 290, 60])
MODES = [ScalingMode.BLOCK_1D, ScalingMode.TENSOR, ScalingMode.MX]


class Operands(NamedTuple):
    """Operands in the order of `QuantizeSpec`; those that are not given are None."""

    dy: jax.Array
    scale: jax.Array | None
    inputs: jax.Array
    weights: jax.Array | None
    activated_scale: jax.Array | None


def make(
    activation: Activation,
    mode: ScalingMode,
    *,
    features: int = 256,
    dtype: str = "bfloat16",
    fp8: str = "float8_e5m2",
    rows: int = ROWS,
    num_groups: int = 5,
    **options: Any,
) -> tuple[Operands, QuantizeSpec]:
    """Returns operands with some numbers that are not finite, and a spec, with scales that are given for `TENSOR`."""
    wide = 2 * features if is_gated(activation) else features
    dy = normal(0, (rows, features)).at[3:5, ::50].set(jnp.inf).astype(dtype)
    inputs = normal(1, (rows, wide)).at[140, 7].set(jnp.nan).astype(dtype)
    scales: tuple[Any, Any] = (None, None)
    if mode == ScalingMode.TENSOR:
        scales = 2.0 ** (jnp.arange(num_groups) % 5), 3.0 + jnp.arange(num_groups) % 7
    weights = normal(2, (rows,)) if options.pop("weighted", True) else None
    flags = dict(columnwise=True, inner_products=True, activated=True)
    spec = QuantizeSpec(mode, fp8, num_groups, activation=activation, **flags, **options)
    return Operands(dy, scales[0], inputs, weights, scales[1]), spec


def quantize(operands: Operands, spec: QuantizeSpec, sizes: jax.Array = SIZES, offset: int = 0) -> Any:
    dy, *rest = operands
    names = "scale", "activation_input", "row_weights", "activated_scale"
    given = dict(zip(names, rest, strict=True))
    return quantize_with_activation(dy, Groups(sizes, jnp.array([offset], jnp.int32)), spec, **given)


def quantize_apart(operands: Operands, spec: QuantizeSpec, sizes: jax.Array = SIZES, offset: int = 0) -> Any:
    groups = Groups(sizes, jnp.array([offset], jnp.int32))
    dy, scale, inputs, weights, activated_scale = operands
    given = dict(scale=scale, activation_input=inputs, row_weights=weights)
    alone = dataclasses.replace(spec, activated=False)
    return (
        quantize_tokens(dy, groups, dataclasses.replace(alone, inner_products=False), **given),
        quantize_tokens(inputs, groups, spec.forward(), scale=activated_scale, row_weights=weights),
        jnp.sum(quantization.quantize(dy, groups, alone, (), **given)[1]["inner_products"], axis=1),
    )


def assert_same(backend: str, label: str, got: Any, expected: Any, offset: int = 0) -> None:
    """Compares both results. XLA rounds activations as it fuses them: of its numbers a few may be the next ones."""
    differing, tolerance = (0.0, 0.0) if backend == "cuda" else (0.01, 1e-5)
    np.testing.assert_allclose(got[2], expected[2], rtol=tolerance, atol=tolerance, err_msg=label)
    for one, other in zip(got[:2], expected[:2], strict=True):
        np.testing.assert_allclose(one.amax, other.amax, rtol=tolerance, err_msg=label)
        assert (one.rowwise is None) == (other.rowwise is None)
        for copy, wanted in ((one.rowwise, other.rowwise), (one.columnwise, other.columnwise)):
            if copy is None:
                continue
            assert (copy.layout, copy.dtype) == (wanted.layout, wanted.dtype)
            arrays = [(copy.data, wanted.data)] if copy is one.rowwise else []
            # Copies of some groups hold the sizes of all, so that they cannot be dequantized as they are.
            sizes = copy.group_sizes[offset : offset + copy.layout.num_groups]
            whole = (dataclasses.replace(array, group_sizes=sizes) for array in (copy, wanted))
            arrays.append(tuple(map(jg.grouped_dequantize, whole)))
            for numbers in arrays:
                same = np.isclose(*map(as_bytes, numbers), rtol=tolerance, atol=0, equal_nan=True)
                assert np.mean(~same) <= differing, label


#: Features, types of the operands and of their numbers, and whether scales are powers of two.
FORMS = (
    (256, "bfloat16", "float8_e4m3fn", True),
    (256, "bfloat16", "float8_e5m2", False),
    (128, "float16", "float8_e5m2", True),
    (144, "bfloat16", "float8_e4m3fn", False),
    (256, "float32", "float8_e4m3fn", True),
)


def test_both_have_the_bits_of_quantizations_apart(backend: str) -> None:
    forms = itertools.product(ACTIVATIONS, FORMS, MODES)
    for activation, form, mode in some(backend, forms, 1, count=2):
        features, dtype, fp8, pow2_scales = form
        operands, spec = make(activation, mode, features=features, dtype=dtype, fp8=fp8, pow2_scales=pow2_scales)

        got = quantize(operands, spec)

        label = f"{activation}, {mode}, {form}"
        assert_same(backend, label, got, quantize_apart(operands, spec))
        assert got[1].columnwise.dtype == jnp.float8_e4m3fn


@pytest.mark.parametrize("mode", MODES[:2])
def test_values_options_and_groups_of_every_kind(backend: str, mode: ScalingMode) -> None:
    # Small groups share a pass of the kernel; its setup has other steps for many groups.
    counts = (9, 1100, 8300) if backend == "cuda" else (1100,)
    small = {count: jnp.arange(count) * 7 % 17 for count in counts}
    # Every block of the kernel takes several tiles, and groups share them.
    tiles = jnp.arange(5) * (30_000 // 11 if backend == "cuda" else 900 // 11)
    operands, spec = make("swiglu", mode)
    weights = operands.weights.at[131].set(jnp.inf).at[5].set(jnp.nan)
    scales = operands.scale, operands.activated_scale
    if mode == ScalingMode.TENSOR:
        scales = scales[0].at[3].set(jnp.nan), scales[1].at[0].set(jnp.nan)
    cases = [
        ("scales that are found", operands._replace(scale=None, activated_scale=None), spec, SIZES),
        ("not finite", Operands(operands.dy, scales[0], operands.inputs, weights, scales[1]), spec, SIZES),
        ("without weights", *make("swiglu", mode, weighted=False), SIZES),
        ("epsilon", *make("swiglu", mode, amax_epsilon=2.0, fp8="float8_e4m3fn"), SIZES),
        ("many tiles", *make("swiglu", mode, features=384, rows=11 * int(tiles[1]) + 9), tiles),
    ]
    for count, sizes in small.items():
        rows = max(int(sizes.sum()) + 40, 150)
        cases.append((f"{count} groups", *make("swiglu", mode, features=128, rows=rows, num_groups=count), sizes))
    for label, operands, spec, sizes in some(backend, cases, 4 * MODES.index(mode) + 1):
        assert_same(backend, label, quantize(operands, spec, sizes), quantize_apart(operands, spec, sizes))


def test_some_of_the_groups(backend: str) -> None:
    for mode in some(backend, MODES[:2], 1):
        operands, spec = make("swiglu", mode, num_groups=2)

        got = quantize(operands, spec, offset=2)

        assert_same(backend, f"{mode}", got, quantize_apart(operands, spec, offset=2), offset=2)
        assert not as_bytes(got[0].rowwise.data)[:130].any()
        assert not got[2][:130].any()


def test_vmap_is_one_call(backend: str) -> None:
    for mode in some(backend, MODES[:2], 1):
        operands, spec = make("swiglu", mode)
        batch = jax.tree.map(lambda x: jnp.stack([x, x[::-1]]), operands)
        sizes = jnp.stack([SIZES, SIZES[::-1]])

        got = jax.vmap(lambda operands, sizes, spec=spec: quantize(operands, spec, sizes))(batch, sizes)

        for i in range(2):
            element_results, element = (jax.tree.map(operator.itemgetter(i), array) for array in (got, batch))
            assert_same(backend, f"{mode}, {i}", element_results, quantize(element, spec, sizes[i]))


def test_without_rows(backend: str) -> None:
    for mode in MODES[:2]:
        operands, spec = make("swiglu", mode)
        scales = operands.scale, operands.activated_scale
        operands = jax.tree.map(lambda x: x[:0] if len(x) == ROWS else x, operands)

        gradient, activated, _ = quantize(operands, spec)

        assert gradient.rowwise.data.shape == (0, 512)
        assert not activated.amax.any()
        if mode == ScalingMode.TENSOR:
            np.testing.assert_array_equal(gradient.rowwise.scale_inv, 1 / scales[0])
            np.testing.assert_array_equal(activated.columnwise.scale_inv, 1 / scales[1])


@pytest.mark.parametrize("mode", MODES[:2])
def test_what_is_not_read_is_not_made(mode: ScalingMode) -> None:
    operands, spec = make("swiglu", mode)
    keeps = "true" if mode == ScalingMode.TENSOR else "false"
    for read, flags in [
        (lambda gradient, *_: gradient.rowwise.data, ("true", "true", "false", "false", keeps)),
        (lambda _, __, products: products, ("true", "true", "false", "false", keeps)),
        (lambda _, activated, __: activated.columnwise.data, ("false", "false", "true", "false", keeps)),
        (
            lambda gradient, activated, _: (gradient.columnwise.data, activated.amax),
            ("true", "false", "true", "true", "true"),
        ),
    ]:
        text = lowered(lambda operands, read=read: read(*quantize(operands, spec)), operands)
        (call,) = custom_calls(text, "jax_grouped_quantize")
        names = "backward", "rowwise", "columnwise", "activated", "finds_amax"
        assert tuple(re.search(rf"\b{name} = (\w+)", call)[1] for name in names) == flags


def test_the_result_alone(backend: str) -> None:
    for mode in some(backend, MODES[:2], 0):
        operands, spec = make("swiglu", mode)

        got = jax.jit(lambda operands, spec=spec: quantize(operands, spec)[1])(operands)

        expected = jax.jit(lambda operands, spec=spec: quantize_apart(operands, spec)[1])(operands)
        np.testing.assert_array_equal(got.amax, expected.amax)
        np.testing.assert_array_equal(*(jg.grouped_dequantize(copies.columnwise) for copies in (got, expected)))
