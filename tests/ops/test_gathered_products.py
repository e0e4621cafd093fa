"""Products of rows of tokens, which they gather themselves where a kernel can, against NumPy in float64."""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_grouped as jg
from jax_grouped import ScalingMode
from jax_grouped.core.groups import Groups
from jax_grouped.fp8.arrays import ScaledArray
from jax_grouped.kernels import primitive
from jax_grouped.kernels.product import (
    MAX_GATHERED_GROUPS,
    Gathered,
    GemmSpec,
    Product,
    RowsToQuantize,
    SwiGluSpec,
    multiply,
    multiply_with_swiglu,
)
from jax_grouped.kernels.quantization import QuantizeSpec
from jax_grouped.kernels.rows import permute_rows, row_tokens
from jax_grouped.ops.quantize import quantize_permuted, quantize_stack, quantize_tokens, rows_and_scales
from tests import oracle
from tests.ops.gathered_rows import Case, Operands
from tests.ops.quantize_cases import some
from tests.programs import custom_calls, lowered, products, struct, types

#: Relative Frobenius error per group. Tensor cores truncate partial sums, which shows in float32 results.
TOLERANCE = {"bfloat16": 4e-3, "float16": 5e-4, "float32": 5e-5}


def drawn(seed: int, largest: int, groups: int) -> tuple[int, ...]:
    return tuple(int(size) for size in np.random.default_rng(seed).integers(0, largest, groups))


SMALL = (37, 0, 190, 1, 0)
CASES = {
    "one group": Case((300,), 64, 256),
    "no tail": Case((128, 256, 64), 128, 512, tail=0),
    "small groups": Case(SMALL, 72, 264),
    "features of one chunk": Case((5, 70, 130), 8, 8),
    "37 groups": Case(drawn(0, 90, 37), 136, 40),
    "all empty": Case((0, 0), 64, 72),
    # No kernel can gather these.
    "in-features of no whole vectors": Case(SMALL, 70, 264),
    "out-features of no whole vectors": Case(SMALL, 72, 263),
}
#: What only a GPU cuts into tiles.
MORE_TILES = {
    "odd tiles along both axes": Case((513, 129, 385), 328, 776),
    "128 groups": Case(drawn(1, 40, 128), 192, 520),
    "several tiles per block": Case((3000, 0, 5000, 1111), 256, 1544),
    "more tiles than run at once": Case(drawn(2, 200, 40), 1024, 520),
}

FORMS: list[tuple[Product, str]] = [("fprop", "a"), ("dgrad", "a"), ("wgrad", "a"), ("wgrad", "b")]


def check(case: Case, product: Product, gathered: str, dtype: str, out_dtype: str) -> None:
    operands = Operands(case, product, gathered, dtype)
    sizes, num_groups = np.asarray(case.sizes), len(case.sizes)

    spec = GemmSpec(product, num_groups, jnp.dtype(out_dtype))
    got = jax.jit(lambda a, b, groups: multiply(a, b, groups, spec))(*operands.arrays, operands.groups)

    assert got.dtype == out_dtype
    a, b = operands.rows
    if product == "wgrad":
        oracle.assert_kernels_close(got, oracle.wgrad(a, b, sizes, num_groups), TOLERANCE[out_dtype])
    else:
        expected = (oracle.fprop if product == "fprop" else oracle.dgrad)(a, b, sizes)
        oracle.assert_groups_close(got, expected, sizes, num_groups, TOLERANCE[out_dtype])


@pytest.mark.parametrize("name", [*CASES, *(pytest.param(name, marks=pytest.mark.gpu) for name in MORE_TILES)])
def test_products_of_gathered_rows(backend: str, name: str) -> None:
    cases = CASES | MORE_TILES
    types = ("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("float16", "float16")
    # Plain JAX takes every form twice.
    for form, pair in some(backend, itertools.product(FORMS, types), 5 * [*cases].index(name)):
        check(cases[name], *form, *pair)


def test_rows_of_no_group_may_hold_anything(backend: str) -> None:
    for product, gathered in some(backend, FORMS, 0):
        case = Case((37, 0, 190), 64, 128)
        operands = Operands(case, product, gathered, "bfloat16")
        copied = [permute_rows(*one) if isinstance(one, Gathered) else one for one in operands.arrays]
        spec = GemmSpec(product, 3, jnp.dtype("bfloat16"))

        for arrays in (operands.arrays, copied):
            got, expected = (
                multiply(*arrays, operands.groups, dataclasses.replace(spec, zero_other_rows=zero))
                for zero in (False, True)
            )

            rows = slice(None) if product == "wgrad" else slice(sum(case.sizes))
            np.testing.assert_array_equal(got[rows].astype(jnp.float32), expected[rows].astype(jnp.float32))


def test_gathered_products_under_vmap(backend: str) -> None:
    for product, gathered in some(backend, FORMS, 1, count=2):
        case = CASES["small groups"]
        elements = [Operands(case, product, gathered, "bfloat16", seed) for seed in range(3)]
        spec = GemmSpec(product, len(case.sizes), jnp.dtype("float32"))
        stacked = jax.tree.map(lambda *arrays: jnp.stack(arrays), *((*one.arrays, one.groups) for one in elements))

        run = jax.jit(functools.partial(multiply, spec=spec))
        got = jax.vmap(run)(*stacked)

        for one, element in zip(got, elements, strict=True):
            np.testing.assert_array_equal(one, run(*element.arrays, element.groups))


#: Depths and features of no whole stages and tiles, of whole ones, and of an odd number of halves of tiles.
QUANTIZED = {
    "several tiles": Case((513, 129, 385), 336, 272),
    "small groups": Case((37, 0, 190, 1, 0), 144, 1168),
    "half of a tile": Case((700, 0, 1, 256, 64), 384, 128),
    "for swiglu": Case((300, 0, 1, 512, 131, 600), 512, 512),
}


class RowsCase:
    """The product of rows that it quantizes, and that of rows which are quantized before."""

    def __init__(self, case: Case, product: Product, dtype: str, out_dtype: str = "bfloat16", seed: int = 0) -> None:
        given = Operands(case, product, "a", "bfloat16", seed)
        (x, order, inverse), kernel = given.arrays
        self.groups, count = given.groups, len(case.sizes)
        quantization = QuantizeSpec(ScalingMode.BLOCK_1D, dtype, count, gathered_rows=case.rows)
        kernels = jg.quantize_kernel(kernel, jg.Float8BlockScaling())
        self.kernel = kernels.columnwise if product == "fprop" else kernels.rowwise
        self.rows = RowsToQuantize(Gathered(x, order, inverse), quantization)
        # SwiGLU is in the product with as many tokens.
        self.spec = GemmSpec(product, count, jnp.dtype(out_dtype), expected_tokens=256 * count)
        alone = dataclasses.replace(quantization, gathered_rows=None)
        self.before = quantize_tokens(x, given.groups, alone, row_indices=row_tokens(order, inverse)).rowwise
        #: Rows of groups that have a token, whose results are defined.
        exist = np.asarray(order) < inverse.size
        self.defined = np.flatnonzero(exist & (np.arange(case.rows) < sum(case.sizes)))

    def multiply(self, gathers: bool) -> np.ndarray:
        def product(rows: Any, before: Any, kernel: Any, groups: Any) -> jax.Array:
            a = RowsToQuantize(rows, self.rows.quantization) if gathers else before
            return multiply(a, kernel, groups, self.spec)

        made = jax.jit(product)(self.rows.rows, self.before, self.kernel, self.groups)
        return np.asarray(made, np.float32)[self.defined]


@pytest.mark.parametrize("name", QUANTIZED)
def test_products_of_rows_that_they_quantize(backend: str, name: str) -> None:
    forms: Any = [("fprop", "float8_e4m3fn", "float32"), ("dgrad", "float8_e5m2", "bfloat16")]
    for product, dtype, out_dtype in forms:
        rows_case = RowsCase(QUANTIZED[name], product, dtype, out_dtype)
        np.testing.assert_array_equal(rows_case.multiply(gathers=True), rows_case.multiply(gathers=False))


def test_swiglu_of_rows_that_the_product_quantizes(backend: str) -> None:
    case = QUANTIZED["for swiglu"]
    rows_case = RowsCase(case, "fprop", "float8_e4m3fn")
    activated = QuantizeSpec(ScalingMode.BLOCK_1D, "float8_e4m3fn", len(case.sizes), activation="swiglu")
    spec = SwiGluSpec(rows_case.spec, activated)

    def run(x: Any, order: Any, inverse: Any, before: Any, kernel: Any, groups: Any) -> Any:
        rows = RowsToQuantize(Gathered(x, order, inverse), rows_case.rows.quantization)
        return [multiply_with_swiglu(a, kernel, groups, spec) for a in (rows, before)]

    (product, (data, scale)), (other, (other_data, other_scale)) = jax.jit(run)(
        *rows_case.rows.rows, rows_case.before, rows_case.kernel, rows_case.groups
    )
    layout = activated.layout((case.rows, product.shape[1]), columnwise=False)
    # Rows without a token have any scale.
    numbers, other_numbers = (
        jg.grouped_dequantize(ScaledArray(*rows, rows_case.groups.sizes, layout))[rows_case.defined]
        for rows in ((data, scale), (other_data, other_scale))
    )
    np.testing.assert_array_equal(product[rows_case.defined], other[rows_case.defined])
    np.testing.assert_array_equal(numbers, other_numbers)


def test_products_of_rows_that_they_quantize_under_vmap(backend: str) -> None:
    case = QUANTIZED["small groups"]
    elements = [RowsCase(case, "fprop", "float8_e4m3fn", seed=seed) for seed in range(3)]
    rows_case = elements[0]

    def product(x: Any, order: Any, inverse: Any, groups: Any) -> jax.Array:
        rows = RowsToQuantize(Gathered(x, order, inverse), rows_case.rows.quantization)
        return multiply(rows, rows_case.kernel, groups, rows_case.spec)

    stacked = jax.tree.map(lambda *arrays: jnp.stack(arrays), *((*one.rows.rows, one.groups) for one in elements))
    got = jax.jit(jax.vmap(product))(*stacked)

    for one, element in zip(np.asarray(got, np.float32), elements, strict=True):
        expected = np.asarray(jax.jit(product)(*element.rows.rows, element.groups), np.float32)
        np.testing.assert_array_equal(one[element.defined], expected[element.defined])


@pytest.mark.parametrize(("product", "dtype"), [("fprop", "float8_e4m3fn"), ("dgrad", "float8_e5m2")])
@pytest.mark.parametrize("name", QUANTIZED)
def test_products_of_tokens_that_several_devices_have_quantized(
    backend: str, name: str, product: Product, dtype: str
) -> None:
    rows_case = RowsCase(QUANTIZED[name], product, dtype)
    x, order, inverse = rows_case.rows.rows
    quantization = dataclasses.replace(rows_case.rows.quantization, pow2_scales=True)
    devices = next(count for count in (3, 2, 1) if x.shape[0] % count == 0)
    stack = dataclasses.replace(quantization, num_groups=devices, stack_rows=x.shape[0] // devices, gathered_rows=None)
    received = quantize_stack(x.reshape(devices, -1, x.shape[1]), stack).rowwise

    def run(data: Any, scale: Any, order: Any, inverse: Any, kernel: Any, groups: Any) -> list[jax.Array]:
        tokens = dataclasses.replace(received, data=data, scale_inv=scale)
        before, _ = quantize_permuted(tokens, groups, order, inverse, spec=quantization)
        rows, x_scale = rows_and_scales(tokens)
        gathered = RowsToQuantize(Gathered(rows, order, inverse), quantization, x_scale)
        return [multiply(a, kernel, groups, rows_case.spec) for a in (gathered, before)]

    more = order, inverse, rows_case.kernel, rows_case.groups
    got, expected = jax.jit(run)(received.data, received.scale_inv, *more)
    np.testing.assert_array_equal(got[rows_case.defined], expected[rows_case.defined])

    twice = [jnp.stack([array, array]) for array in (received.data, received.scale_inv)]
    for one in jax.jit(jax.vmap(lambda *tokens: run(*tokens, *more)))(*twice)[0]:
        np.testing.assert_array_equal(one[rows_case.defined], expected[rows_case.defined])


def test_second_derivatives_are_those_of_the_product_of_copied_rows(backend: str) -> None:
    for product, gathered in some(backend, FORMS, 0):
        case = Case((5, 0, 9), 8, 16, tail=0)
        operands = Operands(case, product, gathered, "float32")
        arrays = [jax.tree.map(lambda x: jnp.nan_to_num(x) if x.dtype == "float32" else x, x) for x in operands.arrays]
        spec = GemmSpec(product, 3, jnp.dtype("float32"), jax.lax.Precision.HIGHEST)

        def norm(
            values: Any, copies: bool, arrays: Any = arrays, groups: Groups = operands.groups, spec: GemmSpec = spec
        ) -> Any:
            def loss(values: Any) -> jax.Array:
                given = []
                for operand, x in zip(arrays, values, strict=True):
                    rows = operand._replace(x=x) if isinstance(operand, Gathered) else x
                    given.append(permute_rows(*rows) if isinstance(rows, Gathered) and copies else rows)
                return jnp.sum(multiply(*given, groups, spec) ** 3)

            return sum(jnp.sum(gradient**2) for gradient in jax.grad(loss)(values))

        values = [one.x if isinstance(one, Gathered) else one for one in arrays]
        results = (jax.jit(jax.grad(functools.partial(norm, copies=copies)))(values) for copies in (False, True))
        for got, expected in zip(*results, strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


class Gpu:
    def __init__(self, compute_capability: str) -> None:
        self.compute_capability = compute_capability


def test_hopper_gathers_in_the_product_and_other_gpus_copy_the_rows_first(monkeypatch: pytest.MonkeyPatch) -> None:
    def lowered_fprop(in_features: int = 16, dtype: str = "bfloat16", groups: int = 4) -> list[str]:
        def fprop(x: jax.Array, order: jax.Array, inverse: jax.Array, weight: jax.Array, sizes: jax.Array) -> jax.Array:
            spec = GemmSpec("fprop", groups, jnp.dtype("float32"))
            return multiply(Gathered(x, order, inverse), weight, Groups(sizes, jnp.zeros(1, jnp.int32)), spec)

        arrays = [struct((10, in_features), dtype), struct((20,), "int32"), struct((10, 2), "int32")]
        return custom_calls(
            lowered(fprop, *arrays, struct((groups, in_features, 24), dtype), struct((groups,), "int32"))
        )

    monkeypatch.setattr(primitive, "find_problem", lambda: None)
    monkeypatch.setattr(primitive, "cuda_devices", lambda: [Gpu("9.0")])
    (call,) = lowered_fprop()
    assert "gathered = 1 : i32" in call
    assert types(call)[0] == ["10x16xbf16", "4x16x24xbf16", "4xi32", "1xi32", "20xi32"]
    assert types(call)[1][0] == "20x24xf32"
    # The product is of copied rows where no kernel gathers.
    for change in (dict(in_features=12), dict(dtype="float32"), dict(groups=MAX_GATHERED_GROUPS + 1)):
        text = "\n".join(lowered_fprop(**change))
        assert set(products(text)) == {"fprop"}
        assert "gathered = 1" not in text
    for devices in ([], [Gpu("10.0")], [Gpu("9.0"), Gpu("10.0")]):
        monkeypatch.setattr(primitive, "cuda_devices", lambda devices=devices: devices)
        copy, product_call = lowered_fprop()
        assert "@jax_grouped_permute_rows" in copy
        assert "gathered = 0 : i32" in product_call
