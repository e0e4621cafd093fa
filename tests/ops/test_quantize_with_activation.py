"""The backward form of an activation that also quantizes the activation's result: the bits of two quantizations."""

import dataclasses
import operator
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_grouped as jg
from jax_grouped import ScalingMode
from jax_grouped.backends.spec import Activation, QuantizeSpec, is_gated
from jax_grouped.core.groups import Groups
from jax_grouped.ops.quantize import quantize_tokens, quantize_with_activation
from tests.ops.quantize_cases import ACTIVATIONS, as_bytes, each_activation, some
from tests.programs import custom_calls, lowered

ROWS = 520
#: Groups of one row block, of two, of few rows, and of none, and rows of no group.
SIZES = jnp.array([130, 0, 1, 290, 60])
MODES = [ScalingMode.BLOCK_1D, ScalingMode.TENSOR, ScalingMode.MX]
OFFSET = jnp.zeros(1, jnp.int32)


def make(
    activation: Activation, mode: ScalingMode, *, features: int = 256, dtype: str = "bfloat16", rows: int = ROWS
) -> tuple[list[jax.Array], QuantizeSpec]:
    """Returns operands with some numbers that are not finite, and a spec, with scales that are given for `TENSOR`."""
    keys = jax.random.split(jax.random.key(features), 3)
    wide = 2 * features if is_gated(activation) else features
    dy = jax.random.normal(keys[0], (rows, features)).at[3:5, ::50].set(jnp.inf).astype(dtype)
    inputs = jax.random.normal(keys[1], (rows, wide)).at[140, 7].set(jnp.nan).astype(dtype)
    given = mode == ScalingMode.TENSOR
    scales = [2.0 ** jnp.arange(5), 3.0 + jnp.arange(5)] if given else []
    spec = QuantizeSpec(
        mode,
        "float8_e5m2",
        num_groups=5,
        columnwise=True,
        given_scale=given,
        activation=activation,
        backward=True,
        weighted=True,
        inner_products=True,
        activated=True,
        pow2_scales=features == 144,
    )
    return [dy, *scales[:1], inputs, jax.random.normal(keys[2], (rows,)), *scales[1:]], spec


def quantize(operands: list[jax.Array], spec: QuantizeSpec, sizes: jax.Array = SIZES) -> Any:
    dy, *more = operands
    return quantize_with_activation(dy, Groups(sizes, OFFSET), *more, spec=spec)


def quantize_apart(operands: list[jax.Array], spec: QuantizeSpec, sizes: jax.Array = SIZES) -> Any:
    dy, *more = operands
    own_scale = [more.pop()] if spec.given_scale else []
    *_, inputs, weights = more
    groups = Groups(sizes, OFFSET)
    return (
        quantize_tokens(dy, groups, *more, spec=dataclasses.replace(spec, activated=False)),
        quantize_tokens(inputs, groups, *own_scale, weights, spec=spec.of_activation()),
    )


def assert_same(backend: str, label: str, got: Any, expected: Any, sizes: jax.Array) -> None:
    """Compares both results. XLA rounds activations as it fuses them: of its numbers a few may be the next ones."""
    differing, tolerance = (0.0, 0.0) if backend == "cuda" else (0.01, 1e-5)
    np.testing.assert_allclose(got[0].inner_products, expected[0].inner_products, tolerance, tolerance, err_msg=label)
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_allclose(one.amax, other.amax, tolerance, err_msg=label)
        assert (one.rowwise is None) == (other.rowwise is None)
        for copy, wanted in ((one.rowwise, other.rowwise), (one.columnwise, other.columnwise)):
            if copy is None:
                continue
            assert copy.layout == wanted.layout
            assert copy.dtype == wanted.dtype
            # The bytes past the last group's columns are unspecified.
            rows = int(np.sum(-(-np.asarray(sizes) // 16) * 16)) if copy.layout.columnwise else copy.layout.tokens
            data = [as_bytes(of.data).ravel()[: rows * copy.layout.features] for of in (copy, wanted)]
            numbers = [np.asarray(jg.grouped_dequantize(of)) for of in (copy, wanted)]
            assert np.mean(data[0] != data[1]) <= differing, label
            same = np.isclose(*numbers, rtol=tolerance, atol=0, equal_nan=True)
            assert np.mean(~same) <= differing, label


@pytest.mark.parametrize(
    ("features", "dtype"), [(256, "bfloat16"), (128, "float16"), (144, "bfloat16"), (256, "float32")]
)
@each_activation
def test_both_have_the_bits_of_quantizations_apart(
    backend: str, activation: Activation, features: int, dtype: str
) -> None:
    for mode in some(backend, MODES, ACTIVATIONS.index(activation) + features):
        operands, spec = make(activation, mode, features=features, dtype=dtype)

        got = quantize(operands, spec)

        assert_same(backend, f"{mode}", got, quantize_apart(operands, spec), SIZES)
        assert got[1].columnwise.dtype == jnp.float8_e4m3fn


def test_scales_that_are_found_for_whole_groups(backend: str) -> None:
    operands, spec = make("silu_mul", ScalingMode.TENSOR)
    dy, _, inputs, weights, _ = operands
    operands, spec = [dy, inputs, weights], dataclasses.replace(spec, given_scale=False)

    got = quantize(operands, spec)

    assert_same(backend, "", got, quantize_apart(operands, spec), SIZES)


def test_many_tiles_of_many_groups(backend: str) -> None:
    # Every block of the kernel takes several tiles, and groups share them.
    rows = 30_000 if backend == "cuda" else 900
    sizes = jnp.arange(5) * (rows // 11)
    for mode in some(backend, MODES[:2], 0):
        operands, spec = make("silu_mul", mode, features=384, rows=rows)

        got = quantize(operands, spec, sizes)

        assert_same(backend, f"{mode}", got, quantize_apart(operands, spec, sizes), sizes)


def test_vmap_is_one_call(backend: str) -> None:
    for mode in some(backend, MODES[:2], 1):
        operands, spec = make("silu_mul", mode)
        batch = [jnp.stack([x, x[::-1]]) for x in operands]
        sizes = jnp.stack([SIZES, SIZES[::-1]])

        got = jax.vmap(lambda operands, sizes, spec=spec: quantize(operands, spec, sizes))(batch, sizes)

        for i in range(2):
            of_element = jax.tree.map(operator.itemgetter(i), got)
            expected = quantize([x[i] for x in batch], spec, sizes[i])
            assert_same(backend, f"{mode}, {i}", of_element, expected, sizes[i])


@pytest.mark.parametrize("mode", MODES)
def test_without_rows(backend: str, mode: ScalingMode) -> None:
    operands, spec = make("silu_mul", mode)
    sized = [x[:0] if len(x) == ROWS else x for x in operands]

    gradient, activated = quantize(sized, spec)

    assert gradient.rowwise.data.shape == (0, 512)
    assert not activated.amax.any()
    if spec.given_scale:
        np.testing.assert_array_equal(gradient.rowwise.scale_inv, 1 / operands[1])
        np.testing.assert_array_equal(activated.columnwise.scale_inv, 1 / operands[-1])


@pytest.mark.parametrize("mode", MODES[:2])
def test_what_is_not_read_is_not_made(mode: ScalingMode) -> None:
    operands, spec = make("silu_mul", mode)
    for read, flags in [
        (lambda gradient, _: gradient.rowwise.data, ("true", "false", "false")),
        (lambda gradient, _: gradient.inner_products, ("true", "false", "false")),
        (lambda _, activated: activated.columnwise.data, ("true", "false", "true")),
        (lambda gradient, activated: (gradient.columnwise.data, activated.amax), ("false", "true", "true")),
    ]:
        (call,) = custom_calls(
            lowered(lambda *operands, read=read: read(*quantize(list(operands), spec)), *operands),
            "jax_grouped_quantize",
        )
        found = [re.search(rf"\b{name} = (\w+)", call)[1] for name in ("rowwise", "columnwise", "activated")]
        assert tuple(found) == flags
