"""The custom calls check their arguments: a program written by hand gets an error, not a fault."""

import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_grouped.backends import cuda, extension
from jax_grouped.core.groups import gemm_scratch_bytes

pytestmark = pytest.mark.gpu

BF16, F32, I32, FP8 = jnp.bfloat16, jnp.float32, jnp.int32, jnp.float8_e4m3fn


@pytest.fixture(autouse=True)
def _registered() -> None:
    cuda.require_usable()


def matmul(
    a: tuple[int, ...] = (32, 16),
    b: tuple[int, ...] = (4, 16, 24),
    d: tuple[int, ...] = (32, 24),
    a_type: jax.typing.DTypeLike = BF16,
    b_type: jax.typing.DTypeLike = BF16,
    d_type: jax.typing.DTypeLike = BF16,
    scratch: int = gemm_scratch_bytes(1, 4),
    workspace: int = cuda.WORKSPACE_BYTES,
    product: int = 0,
    offset: tuple[int, ...] = (1,),
    weight_batch: int = 1,
    scaled: bool = False,
    tokens: int = 0,
    accumulate: bool = False,
    autotune: bool = False,
) -> jax.Array:
    results = [
        jax.ShapeDtypeStruct(d, d_type),
        jax.ShapeDtypeStruct((scratch,), jnp.uint8),
        jax.ShapeDtypeStruct((workspace,), jnp.uint8),
    ]
    call = jax.ffi.ffi_call("jax_grouped_gemm", results, vmap_method="sequential")
    arguments = (jnp.ones(a, a_type), jnp.ones(b, b_type), jnp.full(4, 8, I32), jnp.zeros(offset, I32))
    attributes = dict(
        product=np.int32(product),
        scaled=scaled,
        a_mode=np.int32(0),
        b_mode=np.int32(0),
        tokens=np.int64(tokens),
        weight_batch=np.int64(weight_batch),
        accumulate=accumulate,
        autotune=autotune,
    )
    return call(*arguments, **attributes)[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(a=(32, 16, 1)), "the rank of a must be 2, got 3."),
        (dict(b=(16, 24)), "the rank of b must be 3, got 2."),
        (dict(a=(32, 8)), "a's shape[1] must be 16, got 8."),
        (dict(d=(31, 24)), "the result's shape[0] must be 32, got 31."),
        (dict(d=(32, 16)), "the result's shape[1] must be 24, got 16."),
        (dict(b=(4, 16, 20), d=(32, 20)), "feature sizes must be positive multiples of 8 below 2^31, got 20."),
        (dict(b=(0, 16, 24)), "groups and tokens must not be 0."),
        (dict(a_type=F32), "a must be bfloat16 or float16."),
        (dict(a_type=jnp.float16), "a and b must have one type."),
        (dict(d_type=jnp.float16), "the result must have the type of a and b, or be float32."),
        (dict(scratch=16), f"the bytes of scratch must be at least {gemm_scratch_bytes(1, 4)}, got 16."),
        (dict(workspace=16), f"the bytes of workspace must be at least {cuda.WORKSPACE_BYTES}, got 16."),
        (dict(product=3), "product must be 0 (fprop), 1 (dgrad) or 2 (wgrad), got 3."),
        (dict(scaled=True), "a and b must be float8_e4m3fn or float8_e5m2."),
        (
            dict(scaled=True, tokens=32, a_type=FP8, b_type=FP8, b=(4, 32, 16), d=(32, 32)),
            "scaled operands bring two scales, got 0 further operands.",
        ),
        (dict(accumulate=True), "the accumulator is missing."),
        (
            dict(weight_batch=3),
            "weight_batch must divide the batch size and the number of weights, and be the batch size for wgrad, "
            "got 3 of 1 and 4 weights.",
        ),
        (
            dict(offset=(3,), scratch=gemm_scratch_bytes(3, 4)),
            "group_offset must have 1 to 65535 entries, a divisor of the number of group sizes, groups and tokens, "
            "got 3.",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_matmul_refuses(change: dict, message: str) -> None:
    with pytest.raises(jax.errors.JaxRuntimeError, match=re.escape(f"jax_grouped_gemm: {message}")):
        jax.block_until_ready(matmul(**change))


def test_matmul_accepts_what_the_library_gives_it() -> None:
    assert float(matmul()[0, 0]) == 16


def test_algorithms_are_chosen_once_and_can_be_listed() -> None:
    matmul()
    module = extension.load()
    assert module is not None
    lines = module.describe_plans()
    matmul()
    assert module.describe_plans() == lines
    (line,) = [line for line in lines if "fprop bf16 -> bf16, E 4 T 32 K 16 N 24: algorithm" in line]
    assert line.endswith(", heuristic")


def test_timed_algorithms_are_listed_as_such_and_kept() -> None:
    def line() -> str:
        module = extension.load()
        assert module is not None
        (found,) = [line for line in module.describe_plans() if "fprop bf16 -> bf16, E 4 T 32 K 16 N 40:" in line]
        return found

    shapes = dict(b=(4, 16, 40), d=(32, 40))
    assert float(matmul(**shapes, autotune=True)[0, 0]) == 16
    timed = line()
    assert timed.endswith(", tuned")
    matmul(**shapes)
    assert line() == timed


def test_cublaslt_is_the_copy_that_jax_loads() -> None:
    jax.block_until_ready(matmul() @ jnp.ones((24, 24), BF16))
    maps = pathlib.Path("/proc/self/maps").read_text()
    assert len(set(re.findall(r"\S*/libcublasLt\.so\S*", maps))) == 1
