"""The custom calls check their arguments: a program written by hand gets an error, not a fault.

A handler checks before it uses the GPU, so the tests call the handlers on the CPU. They need the CUDA extension and a
C++ compiler, and no GPU.
"""

import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jax_grouped.kernels import primitive, product
from tests.csrc.compiler import COMPILER, compiled
from tests.custom_calls import (
    BF16,
    BLOCK_SCALES,
    BLOCK_SHAPE,
    EXPERT_SHAPE,
    F32,
    FP8,
    GROUPS,
    I32,
    ROW_SCALES,
    SILU,
    SWIGLU,
    activation_grad,
    bias_grad,
    dequantize,
    gemm,
    group_pairs,
    permute_rows,
    quantize,
    quantize_permuted,
    route,
    sum_rows,
)

pytestmark = [
    pytest.mark.skipif(not COMPILER, reason="there is no C++ compiler"),
    pytest.mark.skipif(primitive.load_extension() is None, reason="the CUDA extension is not built"),
]


@pytest.fixture(scope="module", autouse=True)
def _handlers_on_the_cpu(tmp_path_factory: pytest.TempPathFactory) -> None:
    out = tmp_path_factory.mktemp("build") / "without_stream.so"
    options = ("-shared", "-fPIC", "-isystem", jax.ffi.include_dir())
    library = compiled(out, "tests/csrc/without_stream.cc", options=options)
    wrap = ctypes.CDLL(str(library)).WithoutStream
    wrap.argtypes, wrap.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
    module = primitive.load_extension()
    assert module is not None
    for index, (name, stages) in enumerate(module.handlers().items()):
        wrapped = wrap(index, address(stages["execute"]))
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(wrapped), platform="cpu")


def address(capsule: object) -> int:
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.argtypes, get.restype = [ctypes.py_object, ctypes.c_char_p], ctypes.c_void_p
    return get(capsule, b"xla._CUSTOM_CALL_TARGET")


@pytest.fixture(autouse=True)
def _on_the_cpu() -> Iterator[None]:
    with jax.default_device(jax.devices("cpu")[0]):
        yield


BLOCK_1D, MX = 1, 3
#: Operands of an activation's backward form, and the results for the activation's own result.
BACKWARD = dict(backward=True, activation=SILU, more=[((32, 16), BF16)])
ACTIVATED = [((1280,), FP8), ((4,), F32), ((4,), F32)]
SCALED = dict(scaled=True, a_type=FP8, b_type=FP8, b=(4, 32, 16), d=(32, 32))
#: A quantization of permuted tokens with given scales, and the counts and sums of blocks of pairs.
GIVEN = dict(given_scale=True, scale=((GROUPS,), F32), more=[((GROUPS,), F32)], amax=[((GROUPS,), F32)])
#: A product whose activation has the data and scales of these rows.
ROWS_SCALE = ((ROW_SCALES,), F32)
ACTIVATING = dict(
    scaled=True,
    a_mode=BLOCK_1D,
    b_mode=2,
    tokens=32,
    a=(32, 128),
    b=(4, 256, 128),
    d=(32, 256),
    a_type=FP8,
    b_type=FP8,
    more=[ROWS_SCALE, ((4, 2, 4), F32)],
    activated=[((32, 128), FP8), ROWS_SCALE],
)
COUNTED = dict(blocks=[(BLOCK_SHAPE, I32), (BLOCK_SHAPE, F32)])

#: What each call refuses: changes of its arguments, by the beginning of the error.
REFUSED: dict[Callable[..., jax.Array], dict[str, list[dict[str, Any]]]] = {
    gemm: {
        "a must be BF16[32, 16]": [dict(a=(32, 16, 1)), dict(a=(32, 8))],
        "a must be bfloat16": [dict(a_type=F32)],
        "a must be float8": [dict(scaled=True)],
        "a and b must have one type": [dict(a_type=jnp.float16)],
        "a and b must not both": [SCALED | dict(tokens=32, a_type=jnp.float8_e5m2, b_type=jnp.float8_e5m2)],
        "this product has no operands": [SCALED | dict(tokens=32, a_mode=BLOCK_1D)],
        "a_scale is missing": [SCALED | dict(tokens=32)],
        "b must have rank 3": [dict(b=(16, 24))],
        "b must be BF16[40, 16]": [dict(product=2, gathered=2, b=(40, 24), d=(4, 16, 16), more=[((32,), I32)])],
        "the result must be BF16[32, 24]": [dict(d=(31, 24)), dict(d=(32, 16))],
        "the result must have the type": [dict(d_type=jnp.float16)],
        "features must be": [dict(b=(4, 16, 20), d=(32, 20))],
        "the number of groups must": [dict(b=(0, 16, 24))],
        "the number of tokens must": [dict(a=(0, 16), d=(0, 24))],
        "the size of group_offset must divide": [dict(offset=(3,), scratch=product.scratch_bytes(3, 4))],
        "scratch must have room": [dict(scratch=16)],
        "workspace must have room": [dict(workspace=16)],
        "product must": [dict(product=3)],
        "gathered must": [dict(gathered=2)],
        "rows are gathered": [dict(gathered=1, accumulate=True)],
        "of scaled operands, rows": [SCALED | dict(tokens=32, gathered=1)],
        "row_indices is missing": [dict(gathered=1)],
        "row_indices must have 32": [dict(gathered=1, a=(40, 16), more=[((40,), I32)])],
        "the number of rows to gather from": [dict(gathered=1, a=(0, 16), more=[((32,), I32)])],
        "the accumulator is missing": [dict(accumulate=True)],
        "the accumulator must have 768": [
            dict(accumulate=True, more=[((32, 24), F32)]),
            dict(accumulate=True, more=[((32, 16), BF16)]),
        ],
        "weight_batch must": [dict(weight_batch=3), dict(weight_batch=3, offset=(4,))],
        "swiglu is for fprop": [dict(activated=ACTIVATING["activated"])],
        "a and b must be float8_e4m3fn with": [ACTIVATING | dict(a_type=jnp.float8_e5m2)],
        "the result must have 16": [ACTIVATING | dict(d_type=F32)],
        "half of the features must": [
            ACTIVATING | dict(b=(4, 128, 128), d=(32, 128), more=[ROWS_SCALE, ((4, 1, 4), F32)])
        ],
        "the activation's data must be": [
            ACTIVATING | dict(activated=[((32, 128), jnp.float8_e5m2), ROWS_SCALE]),
            dict(gathered=1, d=(32, 256), b=(4, 16, 256), more=[((32,), I32)], activated=[((32, 256), BF16)]),
        ],
        "the activation's data must have": [ACTIVATING | dict(activated=[((32, 64), FP8), ROWS_SCALE])],
        "the activation's scales must": [ACTIVATING | dict(activated=[((32, 128), FP8), ((4,), F32)])],
        "expected_tokens must": [dict(expected_tokens=-1), dict(expected_tokens=2**62, offset=(4,))],
        "tokens must be from 0": [SCALED | dict(tokens=2**62, offset=(4,))],
    },
    bias_grad: {
        "dy must have rank 2": [dict(dy=(32, 16, 1))],
        "dy must be bfloat16": [dict(dy_type=FP8)],
        "dy must have features": [dict(dy=(32, 0), dbias=(4, 0))],
        "dbias must": [dict(dbias=(64,)), dict(dbias=(4, 8))],
        "the number of tokens must": [dict(dy=(0, 16))],
        "the number of groups must": [dict(dbias=(0, 16))],
        "the size of group_offset must divide": [dict(offset=(3,))],
        "partial_sums must have room": [dict(partial_sums=(1, 16))],
        "tables must have room": [dict(tables=4)],
    },
    quantize: {
        "the scaling mode must": [dict(mode=4)],
        "activation must": [dict(activation=9)],
        "x must have an even": [dict(activation=SWIGLU, x=(32, 33))],
        "x must be": [dict(x_type=jnp.int32)],
        "x must have rank 2": [dict(x=(32, 16, 1))],
        "the number of rows of x must": [dict(x=(0, 16))],
        "features must": [dict(x=(32, 24)), dict(activation=SWIGLU, x=(32, 40))],
        "the number of groups must": [dict(amax=((0,), F32))],
        "amax must": [dict(amax=((4,), BF16))],
        "the size of group_offset must divide": [dict(offset=(3,))],
        "stack_rows must": [dict(stack_rows=7), dict(stack_rows=-8), dict(stack_rows=2**62 + 8)],
        "scales can be given": [dict(given_scale=True, mode=BLOCK_1D)],
        "scale must have 4": [dict(given_scale=True, more=[((4,), BF16)]), dict(given_scale=True, more=[((3,), F32)])],
        "scale is missing": [dict(given_scale=True)],
        "finds_amax must": [dict(finds_amax=False)],
        "x_scale is missing": [dict(x_type=FP8, mode=BLOCK_1D)],
        "an FP8 x": [dict(x_type=FP8)],
        "rows are gathered": [dict(gathered=True, activation=SILU)],
        "row_indices must": [dict(gathered=True, more=[((32,), F32)])],
        "the number of tokens must": [dict(gathered=True, more=[((0,), I32)])],
        "weights of rows": [dict(weighted=True), dict(backward=True)],
        "row_weights must": [dict(weighted=True, activation=SILU, more=[((4,), F32)])],
        "activation_input must have 512": [BACKWARD | dict(more=[((32, 32), BF16)])],
        "inner products": [dict(inner_products=True, activation=SILU), dict(activated=ACTIVATED, activation=SILU)],
        "dbias and the activation's result": [
            dict(activated=ACTIVATED, **BACKWARD, cached=True),
            dict(dbias=[((4, 16), F32)], cached=True),
        ],
        "activated_scale must": [
            BACKWARD | dict(activated=ACTIVATED, given_scale=True, more=[((4,), F32), ((32, 16), BF16), ((3,), F32)])
        ],
        "the columnwise data must have 1280": [dict(activated=[((1264,), FP8), *ACTIVATED[1:]], **BACKWARD)],
        "the activation's result must": [dict(activated=[((1280,), jnp.float8_e5m2), *ACTIVATED[1:]], **BACKWARD)],
        "activated_amax must": [dict(activated=[*ACTIVATED[:2], ((3,), F32)], **BACKWARD)],
        "rowwise or columnwise": [dict(rowwise=False)],
        "the rowwise data must be float8": [dict(data=((32, 16), BF16))],
        "the rowwise data must have 512": [dict(data=((32, 8), FP8))],
        "the rowwise scales must": [dict(scale=((8,), F32)), dict(mode=MX)],
        "dbias must": [dict(dbias=[((4, 16), BF16)]), dict(dbias=[((4, 8), F32)])],
        "the partial sums must have room": [dict(dbias=[((4, 16), F32)]), dict(partial_sums=((0,), BF16))],
        "scratch must have room": [dict(scratch=16)],
        "there are more operands": [dict(more=[((4,), F32)])],
        "there are more results": [dict(surplus=[((4,), F32)])],
        "skip must": [dict(cached=True, more=[((1,), F32)]), dict(cached=True, more=[((2,), bool)])],
        "every result needs a previous one": [dict(cached=True, more=[((1,), bool), ((32, 16), FP8)])],
        "a previous result must": [dict(cached=True, more=[((1,), bool), ((32, 8), FP8), ((4,), F32), ((4,), F32)])],
    },
    dequantize: {
        "the scaling mode must": [dict(mode=-1)],
        "the number of groups must": [dict(num_groups=0)],
        "num_groups must": [dict(num_groups=2**31), dict(num_groups=2**62, offset=(4,))],
        "stack_rows must": [dict(stack_rows=16)],
        "the result must have rank 2": [dict(out=((32, 16, 1), BF16))],
        "the result must be bfloat16": [dict(out=((32, 16), FP8))],
        "features must": [dict(out=((32, 8), BF16))],
        "data must be float8": [dict(data=((32, 16), BF16))],
        "data must have 512": [dict(data=((32, 8), FP8))],
        "scale_inv must": [dict(scale=((4,), BF16))],
        "the group table must": [dict(table=((4,), I32)), dict(table=((64,), F32))],
    },
    activation_grad: {
        "activation must": [dict(activation=0), dict(activation=-1)],
        "the input must be bfloat16": [dict(x=((32, 32), F32))],
        "the input must be BF16[32, ": [dict(x=((32, 16), BF16)), dict(activation=SILU)],
        "da must be BF16[32, 16]": [dict(da=((32, 16), F32))],
        "features must": [dict(da=((32,), BF16)), dict(da=((32, 12), BF16)), dict(da=((32, 0), BF16))],
        "the number of rows must": [dict(da=((0, 16), BF16))],
        "weights must have 32": [dict(weights=(31,))],
        "there are more operands": [dict(more=2 * [((32,), I32)])],
        "order must": [dict(more=[((32,), F32)]), dict(weights=(64,), more=[((31,), I32)])],
        "dinput must": [dict(dx=((31, 32), BF16))],
        "weighted must": [dict(weighted=((32, 16), F32))],
        "inner_products must": [dict(inner_products=(1,))],
    },
    permute_rows: {
        "x must be bfloat16": [dict(x=((32, 32), kind), rows=((64, 32), kind)) for kind in (jnp.int4, jnp.int8)],
        "x must have rank 2": [dict(x=((32,), BF16))],
        "inverse must be": [dict(inverse=(31, 2))],
        "the number of tokens must": [dict(x=((0, 16), BF16), inverse=(0, 2))],
        "the number of choices must": [dict(inverse=(32, 0)), dict(inverse=(32,))],
        "the number of rows must": [dict(order=(0,), rows=((0, 16), BF16))],
        "the bytes of a token must": [dict(x=((32, n), BF16), rows=((64, n), BF16)) for n in (12, 0)],
        "the result must be BF16[64, 16]": [
            dict(rows=rows) for rows in (((64, 16), F32), ((4, 16), BF16), ((64, 8), BF16))
        ],
    },
    sum_rows: {
        "rows must be bfloat16": [dict(rows=((64, 16), F32))],
        "features must": [
            dict(rows=((64,), BF16)),
            *(dict(rows=((64, n), BF16), sums=((32, n), BF16)) for n in (12, 0)),
        ],
        "the result must be BF16[32, 16]": [
            dict(sums=sums) for sums in (((32, 16), F32), ((31, 16), BF16), ((32, 8), BF16))
        ],
        "the number of tokens must": [dict(inverse=(0, 2), sums=((0, 16), BF16))],
        "the number of choices must": [dict(inverse=(32, 0), weights=[]), dict(inverse=(64,))],
        "the number of rows must": [dict(rows=((0, 16), BF16))],
        "there are more operands": [dict(weights=2 * [((32, 2), F32)])],
        "weights must have 64": [dict(weights=[((32, 2), BF16)]), dict(weights=[((31, 2), F32)])],
    },
    quantize_permuted: {
        "x must be": [dict(x=((32, 16), I32))],
        "x must have rank 2": [dict(x=((32, 16, 1), BF16))],
        "inverse must be": [dict(inverse=(31, 2))],
        "the data must be float8": [dict(data=((64, 16), BF16))],
        "the data must be F8E4M3FN[64, 16]": [dict(data=((64, 32), FP8))],
        "the number of tokens must": [dict(x=((0, 16), BF16), inverse=(0, 2)), dict(data=((0, 16), FP8))],
        "the number of choices must": [dict(inverse=(32, 0)), dict(inverse=(32,))],
        "features must": [dict(x=((32, 24), BF16), data=((64, 24), FP8))],
        "the number of groups must": [dict(num_groups=0)],
        "num_groups must": [dict(num_groups=-1), dict(num_groups=2**62, offset=(4,))],
        "the batch must divide": [dict(x=((31, 16), BF16), inverse=(31, 2), offset=(2,))],
        "the scales must have": [dict(scale=((4,), F32)), GIVEN | dict(scale=((BLOCK_SCALES,), F32))],
        "x_scale is missing": [dict(x=((32, 16), FP8))],
        "x_scale must have": [dict(x=((32, 16), FP8), more=[(shape, F32)]) for shape in ((32,), (1, 1, 16))],
        "the groups of x_scale must divide": [dict(x=((32, 16), FP8), more=[((3, 1, 32), F32)])],
        "there are more operands": [dict(more=[((1, 1, 32), F32)])],
        "there are more results": [dict(amax=[((GROUPS,), F32)])],
        "the group table must": [dict(table=(4,))],
        "scale is missing": [GIVEN | dict(more=[])],
        "scale must have 4": [GIVEN | dict(more=[((3,), F32)])],
        "amax is missing": [GIVEN | dict(amax=[])],
        "amax must have 4": [GIVEN | dict(amax=[((3,), F32)])],
        "FP8 tokens have scales": [GIVEN | dict(x=((32, 16), FP8))],
    },
    route: {
        "logits must be": [dict(logits=((32, 4), I32))],
        "logits must have rank 2": [dict(logits=((32,), F32))],
        "score must": [dict(score=3)],
        "group_score must": [dict(group_score=2)],
        "batch must": [dict(batch=5), dict(batch=0)],
        "the number of pairs": [dict(experts=(64,)), dict(logits=((0, 4), F32)), dict(experts=(32, 0))],
        "the number of experts must": [dict(logits=((32, 513), F32))],
        "expert_groups must": [dict(expert_groups=0), dict(expert_groups=3)],
        "top_groups must": [dict(expert_groups=2, top_groups=3)],
        "the number of choices must": [dict(expert_groups=4, top_groups=1)],
        "experts must": [dict(experts=(31, 2))],
        "weights must": [dict(weights=(32, 3))],
        "probabilities must": [dict(probabilities=(32, 3))],
        "block_counts must": [dict(block_counts=(2, 4))],
        "block_sums must": [dict(block_sums=(1, 3))],
        "there are more operands": [dict(more=[(EXPERT_SHAPE, F32)])],
        "the bias must": [dict(has_bias=True, more=[array]) for array in ((EXPERT_SHAPE, BF16), ((5,), F32))],
        "the choice must": [dict(has_choice=True, more=[array]) for array in (((32, 3), I32), ((32, 2), F32))],
    },
    group_pairs: {
        "experts must": [dict(experts=(64,))],
        "batch must": [dict(batch=0), dict(batch=5)],
        "the number of pairs": [dict(experts=(32, 0))],
        "the number of experts must": [dict(group_sizes=(0,)), dict(group_sizes=(513,))],
        "the number of rows must": [dict(order=(65,))],
        "order must": [dict(batch=2, order=(63,))],
        "inverse must": [dict(inverse=(32, 1))],
        "group_sizes must": [dict(batch=2, group_sizes=(5,))],
        "dropped must": [dict(dropped=(2,))],
        "expert_load must": [dict(expert_load=(5,))],
        "the last result must": [
            dict(last=(BLOCK_SHAPE, F32)),
            dict(last=((5,), I32)),
            COUNTED | dict(last=(EXPERT_SHAPE, I32)),
            COUNTED | dict(last=((5,), F32)),
        ],
        "block_counts must": [dict(blocks=2 * [(BLOCK_SHAPE, F32)])],
        "block_sums must": [dict(blocks=2 * [(BLOCK_SHAPE, I32)])],
        "block_sums is missing": [dict(blocks=[(BLOCK_SHAPE, I32)])],
    },
}


@pytest.mark.parametrize("call", REFUSED, ids=lambda call: call.__name__)
def test_calls_are_refused(call: Callable[..., jax.Array]) -> None:
    for message, changes in REFUSED[call].items():
        for change in changes:
            with pytest.raises(jax.errors.JaxRuntimeError) as error:
                jax.block_until_ready(call(**change))
            assert f": jax_grouped_{call.__name__}: {message}" in str(error.value), change


@pytest.mark.skipif(bool(primitive.cuda_devices()), reason="a GPU would be given the addresses of the CPU's memory")
@pytest.mark.parametrize("call", [call for call in REFUSED if call is not gemm], ids=lambda call: call.__name__)
def test_only_the_gpu_is_missing_to_what_the_library_gives(call: Callable[..., jax.Array]) -> None:
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"(Asking for|Launching) the .* failed: "):
        jax.block_until_ready(call())
