"""The custom calls of products of quantized operands: how many there are, and what they take."""

import jax
import pytest

from jax_grouped import ScalingMode
from jax_grouped.kernels import extension
from jax_grouped.kernels.product import Product, scratch_bytes
from tests.ops.scaled_matmul_cases import PRODUCTS, Case, each_mode, each_product, make_case
from tests.programs import custom_calls, lowered, struct, types

pytestmark = pytest.mark.slow


@pytest.fixture
def _blackwell(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lowers for a GPU with products of every format, whatever GPU is here."""
    monkeypatch.setattr(extension, "has_mx_products", lambda: True)
    monkeypatch.setattr(extension, "require_block_scaling", lambda: None)


for_blackwell = pytest.mark.usefixtures("_blackwell")


def call_of(case: Case, batch: int | None = None, *, kernel_axis: int | None = None, scale_axis: int | None = None):
    """Returns the operands' and results' types and the attributes of the one custom call."""
    multiply = case.multiply
    axes = (0, 0, kernel_axis, scale_axis, 0, 0) if case.product != "wgrad" else (0,) * 6
    structs = [struct(array.shape, array.dtype) for array in case.arrays]
    if batch is not None:
        multiply = jax.vmap(multiply, axes)
        structs = [
            x if axis is None else struct((batch, *x.shape), x.dtype) for x, axis in zip(structs, axes, strict=True)
        ]
    (call,) = custom_calls(lowered(multiply, *structs))
    assert "@jax_grouped_gemm(" in call
    attributes = call.split("mhlo.backend_config = {")[1].split("}")[0]
    return *types(call), dict(pair.split(" = ") for pair in attributes.split(", "))


@for_blackwell
@each_mode
@each_product
def test_a_product_is_one_custom_call(product: Product, mode: str) -> None:
    case = make_case(product, mode)
    operands, results, attributes = call_of(case)
    a, b = case.a.layout, case.b.layout
    data, sizes, scales = operands[:2], operands[2:4], operands[4:]
    for operand, shape in zip(data + scales, (a.data_shape, b.data_shape, a.scale_shape, b.scale_shape), strict=True):
        assert operand.rsplit("x", 1)[0] == "x".join(map(str, shape))
    assert sizes == ["5xi32", "1xi32"]
    out = {"fprop": "300x272xf32", "dgrad": "300x144xf32", "wgrad": "5x144x272xf32"}[product]
    assert results == [out, f"{scratch_bytes(1, 5)}xui8", "33554432xui8"]
    assert attributes == {
        "product": f"{PRODUCTS.index(product)} : i32",
        "scaled": "true",
        "a_mode": f"{list(ScalingMode).index(a.mode)} : i32",
        "b_mode": f"{list(ScalingMode).index(b.mode)} : i32",
        "tokens": "300 : i64",
        "expected_tokens": "0 : i64",
        "weight_batch": "1 : i64",
        "gathered": "0 : i32",
        "accumulate": "false",
        "zero_other_rows": "true",
    }


@for_blackwell
@each_mode
@each_product
def test_vmap_makes_one_custom_call_that_copies_no_kernel(product: Product, mode: str) -> None:
    case = make_case(product, mode)
    operands, results, attributes = call_of(case, 3)
    assert attributes["weight_batch"] == ("3 : i64" if product == "wgrad" else "1 : i64")
    assert attributes["tokens"] == "300 : i64"
    assert operands[2:4] == ["15xi32", "3xi32"]
    assert results[1] == f"{scratch_bytes(3, 5)}xui8"
    if product != "wgrad":
        shared = [case.b.layout.data_shape, case.b.layout.scale_shape]
        weights = operands[1], operands[5]
        assert [operand.rsplit("x", 1)[0] for operand in weights] == ["x".join(map(str, s)) for s in shared]


@for_blackwell
@each_mode
def test_kernels_and_their_scales_are_shared_together(mode: str) -> None:
    case = make_case("fprop", mode)
    for axes in ((0, 0), (None, 0), (0, None)):
        operands, _, attributes = call_of(case, 3, kernel_axis=axes[0], scale_axis=axes[1])
        assert attributes["weight_batch"] == "3 : i64"
        assert [operand.split("x")[0] for operand in (operands[1], operands[5])] == ["15", "15"]


@each_product
def test_hopper_multiplies_mx_numbers_in_bfloat16(product: Product, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extension, "has_mx_products", lambda: False)
    case = make_case(product, "mx")
    calls = custom_calls(lowered(case.multiply, *(struct(array.shape, array.dtype) for array in case.arrays)))
    targets = [call.split("@")[1].split("(")[0] for call in calls]
    assert targets == ["jax_grouped_dequantize", "jax_grouped_dequantize", "jax_grouped_gemm"]


def test_scratch_has_room_for_pointers_and_a_table_per_batch_element() -> None:
    # Bases: 3 * 112 + 9 * 64 + 16 bytes for 14 groups; 2 * 112 of pointers to scales; 2 * 4 * 7 * 8 of tables.
    assert scratch_bytes(2, 7) == 928 + 224 + 448
