"""The custom calls on a GPU, as a program written by hand makes them.

`tests/csrc/test_handlers.py` has the calls that they refuse.
"""

import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_grouped as jg
from jax_grouped.core.groups import Groups
from jax_grouped.kernels import primitive, quantization
from jax_grouped.kernels.quantization import QuantizeSpec
from tests.custom_calls import (
    BF16,
    FP8,
    bias_grad,
    dequantize,
    gemm,
    group_pairs,
    permute_rows,
    quantize,
    route,
    sum_rows,
)

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _registered() -> None:
    assert primitive.find_problem() is None


def test_handlers_accept_what_the_library_gives_them() -> None:
    values = {gemm: 16, bias_grad: 8, quantize: 448, dequantize: 1, permute_rows: 1, sum_rows: 2, route: 0}
    for call, value in {**values, group_pairs: 2}.items():
        assert float(call()[1, 0]) == value, call


def test_groups_of_a_stack_have_its_rows_whatever_group_sizes_hold() -> None:
    x = jax.random.normal(jax.random.key(0), (32, 256), BF16)
    spec = QuantizeSpec(jg.ScalingMode.BLOCK_2D, FP8, num_groups=4, columnwise=True, stack_rows=8)
    expected, *others = (
        quantization.quantize(x, Groups(jnp.array(sizes, jnp.int32), jnp.zeros(1, jnp.int32)), spec)[1]
        for sizes in ([8, 8, 8, 8], [1, 2, 3, 26], [2**31 - 1, -5, 0, 0])
    )
    for result in others:
        jax.tree.map(np.testing.assert_array_equal, result, expected)


def test_algorithms_are_chosen_once_and_can_be_listed() -> None:
    gemm()
    module = primitive.load_extension()
    assert module is not None
    lines = module.describe_plans()
    gemm()
    assert module.describe_plans() == lines
    assert len([line for line in lines if "fprop bf16 -> bf16, E 4 T 32 K 16 N 24: algorithm" in line]) == 1


def test_cublaslt_is_the_copy_that_jax_loads() -> None:
    jax.block_until_ready(gemm() @ jnp.ones((24, 24), BF16))
    maps = pathlib.Path("/proc/self/maps").read_text()
    assert len(set(re.findall(r"\S*/libcublasLt\.so\S*", maps))) == 1
