"""The custom calls of products of quantized operands: how many there are, and what they take."""

import re

import jax
import pytest

from jax_grouped.kernels import extension
from jax_grouped.kernels.product import Product
from tests.ops.scaled_matmul_cases import Case, each_mode, each_product, make_case
from tests.programs import custom_calls, lowered, struct, types

pytestmark = pytest.mark.slow


@pytest.fixture
def _blackwell(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lowers for a GPU with products of every format, whatever GPU is here."""
    monkeypatch.setattr(extension, "has_mx_products", lambda: True)
    monkeypatch.setattr(extension, "require_block_scaling", lambda: None)


for_blackwell = pytest.mark.usefixtures("_blackwell")


def call_of(case: Case, batch: int | None = None, *, kernel_axis: int | None = None, scale_axis: int | None = None):
    """Returns the operands' types of the one custom call, and the number of elements that have weights of their own."""
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
    assert "scaled = true" in call
    (weight_batch,) = re.findall(r"weight_batch = (\d+) : i64", call)
    return types(call)[0], int(weight_batch)


@for_blackwell
@each_mode
@each_product
def test_a_product_is_one_custom_call_that_copies_no_kernel_under_vmap(product: Product, mode: str) -> None:
    case = make_case(product, mode)
    operands, weight_batch = call_of(case)
    assert weight_batch == 1
    batched, weight_batch = call_of(case, 3)
    assert weight_batch == (3 if product == "wgrad" else 1)
    if product != "wgrad":
        assert (batched[1], batched[5]) == (operands[1], operands[5])


@for_blackwell
@each_mode
def test_kernels_and_their_scales_are_shared_together(mode: str) -> None:
    case = make_case("fprop", mode)
    for axes in ((0, 0), (None, 0), (0, None)):
        operands, weight_batch = call_of(case, 3, kernel_axis=axes[0], scale_axis=axes[1])
        assert weight_batch == 3
        assert [operand.split("x")[0] for operand in (operands[1], operands[5])] == ["15", "15"]


@each_product
def test_hopper_multiplies_mx_numbers_in_bfloat16(product: Product, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extension, "has_mx_products", lambda: False)
    case = make_case(product, "mx")
    calls = custom_calls(lowered(case.multiply, *(struct(array.shape, array.dtype) for array in case.arrays)))
    targets = [call.split("@")[1].split("(")[0] for call in calls]
    assert targets == ["jax_grouped_dequantize", "jax_grouped_dequantize", "jax_grouped_gemm"]
