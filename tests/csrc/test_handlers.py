"""The custom calls check their arguments: a program written by hand gets an error, not a fault.

A handler checks before it uses the GPU, so the tests call the handlers on the CPU. They need the CUDA extension and a
C++ compiler, and no GPU.
"""

import ctypes
import re
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import pytest

from jax_grouped.kernels import extension, product, quantization
from tests.csrc.compiler import COMPILER, compiled
from tests.custom_calls import (
    BF16,
    BLOCK_SCALES,
    F32,
    FP8,
    GROUPS,
    I32,
    OF_BLOCKS,
    OF_EXPERTS,
    ROWS,
    SILU,
    SWIGLU,
    TABLE,
    TILES,
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
    pytest.mark.skipif(extension.load() is None, reason="the CUDA extension is not built"),
]


@pytest.fixture(scope="module", autouse=True)
def _handlers_on_the_cpu(tmp_path_factory: pytest.TempPathFactory) -> None:
    out = tmp_path_factory.mktemp("build") / "without_stream.so"
    options = ("-shared", "-fPIC", "-isystem", jax.ffi.include_dir())
    library = compiled(out, "tests/csrc/without_stream.cc", options=options)
    wrap = ctypes.CDLL(str(library)).WithoutStream
    wrap.argtypes, wrap.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
    module = extension.load()
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


def refuses(call: Callable[..., jax.Array], change: dict, message: str) -> None:
    name = f"jax_grouped_{call.__name__}"
    with pytest.raises(jax.errors.JaxRuntimeError, match=re.escape(f"{name}: {message}")):
        jax.block_until_ready(call(**change))


def cases(*cases: tuple[dict, str]) -> pytest.MarkDecorator:
    """Each case changes arguments of a call and has the error's message, which is also the case's id."""
    return pytest.mark.parametrize(("change", "message"), [pytest.param(*case, id=case[1]) for case in cases])


@cases(
    (dict(a=(32, 16, 1)), "the rank of a must be 2, got 3."),
    (dict(b=(16, 24)), "the rank of b must be 3, got 2."),
    (dict(a=(32, 8)), "a's shape[1] must be 16, got 8."),
    (dict(d=(31, 24)), "the result's shape[0] must be 32, got 31."),
    (dict(d=(32, 16)), "the result's shape[1] must be 24, got 16."),
    (dict(b=(4, 16, 20), d=(32, 20)), "feature sizes must be positive multiples of 8 below 2^31, got 20."),
    (dict(b=(0, 16, 24)), "there must be groups and rows."),
    (dict(a=(0, 16), d=(0, 24)), "there must be groups and rows."),
    (dict(a_type=F32), "a must be bfloat16 or float16."),
    (dict(a_type=jnp.float16), "a and b must have one type."),
    (dict(d_type=jnp.float16), "the result must have the type of a and b, or be float32."),
    (dict(scratch=16), f"the bytes of scratch must be at least {product.scratch_bytes(1, 4)}, got 16."),
    (dict(workspace=16), f"the bytes of workspace must be at least {product.WORKSPACE_BYTES}, got 16."),
    (dict(product=3), "product must be 0 (fprop), 1 (dgrad) or 2 (wgrad), got 3."),
    (dict(scaled=True), "a and b must be float8_e4m3fn or float8_e5m2."),
    (
        dict(scaled=True, tokens=32, a_type=FP8, b_type=FP8, b=(4, 32, 16), d=(32, 32)),
        "the number of scales and accumulators must be 2, got 0.",
    ),
    (dict(more=[((32, 24), BF16)]), "the number of scales and accumulators must be 0, got 1."),
    (dict(accumulate=True), "the number of scales and accumulators must be 1, got 0."),
    (dict(accumulate=True, more=[((32, 24), F32)]), "the accumulator must have the result's type."),
    (
        dict(accumulate=True, more=[((32, 16), BF16)]),
        "the number of elements of the accumulator must be 768, got 512.",
    ),
    (dict(gathered=2), "gathered must be 0 (none), 1 (a) or, for wgrad, 2 (b), got 2."),
    (dict(gathered=1, accumulate=True), "rows are gathered for 16-bit operands without an accumulator only."),
    (dict(gathered=1), "the number of row_indices must be 1, got 0."),
    (dict(gathered=1, more=[((32,), F32)]), "row_indices must be int32."),
    (dict(gathered=1, a=(40, 16), more=[((40,), I32)]), "the size of row_indices must be 32, got 40."),
    (
        dict(gathered=1, a=(0, 16), more=[((32,), I32)]),
        f"rows are gathered from 1 to 2^31 - 1 rows in at most {product.MAX_GATHERED_GROUPS} groups, got 0 rows and 4 ",
    ),
    (
        dict(product=2, gathered=2, b=(40, 24), d=(4, 16, 16), more=[((32,), I32)]),
        "b's shape[1] must be 16, got 24.",
    ),
    (
        dict(weight_batch=3),
        "weight_batch must divide the batch size and the number of weights, and be the batch size for wgrad, "
        "got 3 of 1 and 4 weights.",
    ),
    (dict(expected_tokens=-1), "expected_tokens must be from 0 to 2147483647, got -1."),
    (dict(expected_tokens=2**62, offset=(4,)), f"expected_tokens must be from 0 to 2147483647, got {2**62}."),
    (
        dict(scaled=True, tokens=2**62, a_type=FP8, b_type=FP8, b=(4, 32, 16), d=(32, 32), offset=(4,)),
        f"tokens must be from 0 to {(2**31 - 1) // 4}, got {2**62}.",
    ),
    (
        dict(offset=(3,), scratch=product.scratch_bytes(3, 4)),
        "group_offset must have 1 to 65535 entries, a divisor of the number of group sizes, groups and tokens, got 3.",
    ),
)
def test_gemm_refuses(change: dict, message: str) -> None:
    refuses(gemm, change, message)


@cases(
    (dict(dy=(32, 16, 1)), "the rank of dy must be 2, got 3."),
    (dict(dy_type=FP8), "dy must be bfloat16, float16 or float32."),
    (dict(dbias=(64,)), "the rank of dbias must be 2, got 1."),
    (dict(dbias=(4, 8)), "dbias's shape[1] must be 16, got 8."),
    (dict(dy=(0, 16)), "there must be groups and rows."),
    (dict(dbias=(0, 16)), "there must be groups and rows."),
    (dict(dy=(32, 0), dbias=(4, 0)), "dy must have features."),
    (dict(offset=(3,)), "group_offset must have 1 to 65535 entries, a divisor of the number of group sizes, groups"),
    (
        dict(partial_sums=(1, 16)),
        f"the size of partial_sums must be at least {16 * TILES}, got 16.",
    ),
    (dict(tables=4), f"the size of tables must be at least {TABLE}, got 4."),
)
def test_bias_grad_refuses(change: dict, message: str) -> None:
    refuses(bias_grad, change, message)


BLOCK_1D, MX = 1, 3
#: Operands of an activation's backward form, and the results for the activation's own result.
BACKWARD = dict(backward=True, activation=SILU, more=[((32, 16), BF16)])
ACTIVATED = [((1280,), FP8), ((4,), F32), ((4,), F32)]


@cases(
    (dict(mode=4), "there is no scaling mode 4."),
    (dict(activation=9), "there is no activation 9."),
    (dict(activation=SWIGLU, x=(32, 40)), "quantized features must be a positive multiple of 16 below 2^31, got 20."),
    (dict(activation=SWIGLU, x=(32, 33)), "x's shape[1] must be 32, got 33."),
    (dict(x_type=jnp.int32), "x must be bfloat16, float16, float32 or FP8."),
    (dict(x=(32, 16, 1)), "the rank of x must be 2, got 3."),
    (dict(x=(0, 16)), "x must have rows."),
    (dict(x=(32, 24)), "quantized features must be a positive multiple of 16 below 2^31, got 24."),
    (dict(amax=((0,), F32)), "there must be groups and rows."),
    (dict(amax=((4,), BF16)), "amax must be float32."),
    (dict(offset=(3,)), "group_offset must have 1 to 65535 entries, a divisor of the number of group sizes, groups"),
    (
        dict(stack_rows=7),
        "stack_rows must be 0, or the number of rows divided by the number of groups, got 7 for 32 rows in 4 groups.",
    ),
    (dict(stack_rows=-8), "stack_rows must be 0, or the number of rows divided by the number of groups, got -8"),
    (dict(given_scale=True, mode=BLOCK_1D), "scales can be given for whole groups only."),
    (dict(given_scale=True, more=[((4,), BF16)]), "scale must be float32."),
    (dict(given_scale=True, more=[((3,), F32)]), "the size of scale must be 4, got 3."),
    (dict(gathered=True, activation=SILU), "rows are gathered without an activation only."),
    (dict(gathered=True, more=[((32,), F32)]), "row_indices must be int32."),
    (dict(gathered=True, more=[((0,), jnp.int32)]), "row_indices must have entries."),
    (dict(weighted=True), "weights of rows need an activation."),
    (dict(weighted=True, activation=SILU, more=[((4,), F32)]), "the size of row_weights must be 32, got 4."),
    (dict(backward=True), "backward needs an activation."),
    (dict(backward=True, activation=SILU, more=[((32, 16), F32)]), "activation_input must have x's type."),
    (
        dict(backward=True, activation=SILU, more=[((32, 32), BF16)]),
        "the number of elements of activation_input must be 512, got 1024.",
    ),
    (dict(inner_products=True, activation=SILU), "inner products are those of a backward form."),
    (dict(activated=ACTIVATED, activation=SILU), "the activation's result is quantized with a backward form only."),
    (
        dict(activated=ACTIVATED, **BACKWARD, cached=True),
        "the activation's result of a backward form cannot be",
    ),
    (
        dict(
            activated=ACTIVATED,
            **(BACKWARD | dict(more=[((4,), F32), ((32, 16), BF16), ((3,), F32)])),
            given_scale=True,
        ),
        "the size of activated_scale must be 4, got 3.",
    ),
    (
        dict(activated=[((1264,), FP8), *ACTIVATED[1:]], **BACKWARD),
        "the number of columnwise elements must be 1280, got",
    ),
    (dict(activated=[((1280,), jnp.float8_e5m2), *ACTIVATED[1:]], **BACKWARD), "the activation's result must become"),
    (dict(activated=[*ACTIVATED[:2], ((3,), F32)], **BACKWARD), "the size of activated_amax must be 4, got 3."),
    (dict(rowwise=False), "rowwise or columnwise must be true."),
    (dict(data=((32, 16), BF16)), "the results must be of one type, float8_e4m3fn or float8_e5m2."),
    (dict(data=((32, 8), FP8)), "the number of rowwise elements must be 512, got 256."),
    (dict(scale=((8,), F32)), "the number of rowwise scales must be 4, got 8."),
    (dict(mode=MX), "the rowwise scales must be float8_e8m0fnu."),
    (dict(dbias=[((4, 16), BF16)]), "dbias must be float32."),
    (dict(dbias=[((4, 8), F32)]), "the size of dbias must be 64, got 32."),
    (dict(dbias=[((4, 16), F32)]), "the size of the partial sums must be at least 64, got 0."),
    (dict(dbias=[((4, 16), F32)], cached=True), "dbias cannot be cached."),
    (dict(partial_sums=((0,), BF16)), "the partial sums must be float32."),
    (dict(scratch=16), f"the bytes of scratch must be at least {quantization.scratch_bytes(ROWS, GROUPS)}, got 16."),
    (dict(x_type=FP8), "an FP8 x is quantized in mode BLOCK_1D without an activation only."),
    (dict(x_type=FP8, mode=1), "the attributes ask for more operands than there are."),
    (dict(given_scale=True), "the attributes ask for more operands than there are."),
    (dict(more=[((4,), F32)]), "the number of operands after those of the attributes must be 0, got 1."),
    (dict(surplus=[((4,), F32)]), "the number of surplus results must be 0, got 1."),
    (dict(cached=True, more=[((1,), F32)]), "skip must be boolean."),
    (dict(cached=True, more=[((2,), bool)]), "the size of skip must be 1, got 2."),
    (
        dict(cached=True, more=[((1,), bool), ((32, 16), FP8)]),
        "the number of operands after those of the attributes must be 3, got 1.",
    ),
    (
        dict(cached=True, more=[((1,), bool), ((32, 8), FP8), ((4,), F32), ((4,), F32)]),
        "the bytes of a previous result must be 512, got 256.",
    ),
)
def test_quantize_refuses(change: dict, message: str) -> None:
    refuses(quantize, change, message)


@cases(
    (dict(mode=-1), "there is no scaling mode -1."),
    (dict(num_groups=0), "there must be groups and rows."),
    (dict(num_groups=2**31), "num_groups must be from 0 to 2147483647, got 2147483648."),
    (dict(num_groups=2**62, offset=(4,)), f"num_groups must be from 0 to {(2**31 - 1) // 4}, got {2**62}."),
    (dict(stack_rows=16), "stack_rows must be 0, or the number of rows divided by the number of groups, got 16"),
    (dict(out=((32, 16, 1), BF16)), "the rank of the result must be 2, got 3."),
    (dict(out=((32, 16), FP8)), "the result must be bfloat16, float16 or float32."),
    (dict(out=((32, 8), BF16)), "quantized features must be a positive multiple of 16 below 2^31, got 8."),
    (dict(data=((32, 16), BF16)), "data must be float8_e4m3fn or float8_e5m2."),
    (dict(data=((32, 8), FP8)), "the number of rowwise elements must be 512, got 256."),
    (dict(scale=((4,), BF16)), "the rowwise scales must be float32."),
    (dict(table=((4,), jnp.int32)), f"the size of the group table must be at least {TABLE}, got 4."),
    (dict(table=((64,), F32)), "the group table must be int32."),
)
def test_dequantize_refuses(change: dict, message: str) -> None:
    refuses(dequantize, change, message)


@cases(
    (dict(activation=0), "there must be an activation."),
    (dict(activation=-1), "there is no activation -1."),
    (dict(x=((32, 32), F32)), "the input must be bfloat16 or float16."),
    (dict(da=((32, 16), F32)), "da must have the type of the input."),
    (dict(da=((32,), BF16)), "the rank of da must be 2, got 1."),
    (dict(da=((0, 16), BF16)), "da's shape[0] must be from 1 to 2147483647, got 0."),
    (dict(da=((32, 12), BF16)), "da's shape[1] must be a positive multiple of 8 below 2^31, got 12."),
    (dict(da=((32, 0), BF16)), "da's shape[1] must be a positive multiple of 8 below 2^31, got 0."),
    (dict(x=((32, 16), BF16)), "the input's shape[1] must be 32, got 16."),
    (dict(activation=SILU), "the input's shape[1] must be 16, got 32."),
    (dict(weights=(31,)), "the size of weights must be 32, got 31."),
    (dict(more=2 * [((32,), I32)]), "there must be at most one order, got 2 of them."),
    (dict(more=[((32,), F32)]), "order must be int32."),
    (dict(weights=(64,), more=[((31,), I32)]), "the size of order must be 32, got 31."),
    (dict(dx=((31, 32), BF16)), "dinput's shape[0] must be 32, got 31."),
    (dict(weighted=((32, 16), F32)), "weighted must have the type of the input."),
    (dict(inner_products=(1,)), "the size of inner_products must be 32, got 1."),
)
def test_activation_grad_refuses(change: dict, message: str) -> None:
    refuses(activation_grad, change, message)


@cases(
    (dict(x=((32,), BF16)), "the rank of x must be 2, got 1."),
    (dict(inverse=(32,)), "the rank of inverse must be 2, got 1."),
    (dict(inverse=(31, 2)), "inverse's shape[0] must be 32, got 31."),
    (dict(x=((0, 16), BF16), inverse=(0, 2)), "the number of tokens must be from 1 to 2147483647, got 0."),
    (dict(inverse=(32, 0)), "the number of choices must be from 1 to 67108863, got 0."),
    (dict(order=(0,), rows=((0, 16), BF16)), "the number of rows must be from 1 to 2147483647, got 0."),
    (
        dict(x=((32, 12), BF16), rows=((64, 12), BF16)),
        "the bytes of a token must be a positive multiple of 16 below 2^31, got 24.",
    ),
    (
        dict(x=((32, 0), BF16), rows=((64, 0), BF16)),
        "the bytes of a token must be a positive multiple of 16 below 2^31, got 0.",
    ),
    (dict(rows=((64, 16), F32)), "the result must have the type of x."),
    (dict(rows=((4, 16), BF16)), "the result's shape[0] must be 64, got 4."),
    (dict(rows=((64, 8), BF16)), "the result's shape[1] must be 16, got 8."),
)
def test_permute_rows_refuses(change: dict, message: str) -> None:
    refuses(permute_rows, change, message)


@cases(
    (dict(rows=((64,), BF16)), "the rank of rows must be 2, got 1."),
    (dict(inverse=(64,)), "the rank of inverse must be 2, got 1."),
    (dict(rows=((64, 16), F32)), "rows must be bfloat16 or float16."),
    (dict(sums=((32, 16), F32)), "the result must have the type of rows."),
    (dict(sums=((31, 16), BF16)), "the result's shape[0] must be 32, got 31."),
    (dict(sums=((32, 8), BF16)), "the result's shape[1] must be 16, got 8."),
    (
        dict(rows=((64, 12), BF16), sums=((32, 12), BF16)),
        "rows's shape[1] must be a positive multiple of 8 below 2^31, got 12.",
    ),
    (
        dict(rows=((64, 0), BF16), sums=((32, 0), BF16)),
        "rows's shape[1] must be a positive multiple of 8 below 2^31, got 0.",
    ),
    (dict(inverse=(0, 2), sums=((0, 16), BF16)), "the number of tokens must be from 1 to 2147483647, got 0."),
    (dict(inverse=(32, 0), weights=[]), "the number of choices must be from 1 to 67108863, got 0."),
    (dict(rows=((0, 16), BF16)), "the number of rows must be from 1 to 2147483647, got 0."),
    (dict(weights=2 * [((32, 2), F32)]), "there must be at most one array of weights, got 2."),
    (dict(weights=[((32, 2), BF16)]), "weights must be float32."),
    (dict(weights=[((31, 2), F32)]), "the size of weights must be 64, got 62."),
)
def test_sum_rows_refuses(change: dict, message: str) -> None:
    refuses(sum_rows, change, message)


#: A quantization of permuted tokens with given scales.
GIVEN = dict(given_scale=True, scale=((GROUPS,), F32), more=[((GROUPS,), F32)], amax=[((GROUPS,), F32)])


@cases(
    (dict(x=((32, 16), I32)), "x must be bfloat16, float16, float32 or FP8."),
    (dict(x=((32, 16, 1), BF16)), "the rank of x must be 2, got 3."),
    (dict(inverse=(32,)), "the rank of inverse must be 2, got 1."),
    (dict(inverse=(31, 2)), "inverse's shape[0] must be 32, got 31."),
    (dict(data=((64, 16), BF16)), "the data must be float8_e4m3fn or float8_e5m2."),
    (dict(data=((64, 32), FP8)), "the data's shape[1] must be 16, got 32."),
    (dict(x=((0, 16), BF16), inverse=(0, 2)), "x must have rows."),
    (dict(data=((0, 16), FP8)), "there must be groups and rows."),
    (dict(inverse=(32, 0)), "inverse must have choices."),
    (
        dict(x=((32, 24), BF16), data=((64, 24), FP8)),
        "quantized features must be a positive multiple of 16 below 2^31, got 24.",
    ),
    (dict(num_groups=0), "there must be groups and rows."),
    (
        dict(x=((31, 16), BF16), inverse=(31, 2), offset=(2,)),
        "the remainder of tokens by the batch size must be 0, got 1.",
    ),
    (dict(scale=((4,), F32)), f"the number of rowwise scales must be {BLOCK_SCALES}, got 4."),
    (dict(scale=((BLOCK_SCALES,), BF16)), "the rowwise scales must be float32."),
    (dict(x=((32, 16), FP8)), "the number of scales must be 1, got 0."),
    (dict(more=[((1, 1, 32), F32)]), "the number of scales must be 0, got 1."),
    (dict(x=((32, 16), FP8), more=[((32,), F32)]), "the rank of x_scale must be 3, got 1."),
    (
        dict(x=((32, 16), FP8), more=[((3, 1, 32), F32)]),
        "the groups of x_scale must divide the rows of x, got 3 groups and 32 rows.",
    ),
    (dict(x=((32, 16), FP8), more=[((1, 1, 16), F32)]), "the number of rowwise scales must be 32, got 16."),
    (dict(table=(4,)), f"the size of the group table must be at least {TABLE}, got 4."),
    (GIVEN | dict(more=[]), "the number of scales must be 1, got 0."),
    (GIVEN | dict(amax=[]), "the number of further results must be 1, got 0."),
    (dict(amax=[((GROUPS,), F32)]), "the number of further results must be 0, got 1."),
    (GIVEN | dict(more=[((3,), F32)]), f"the number of given scales must be {GROUPS}, got 3."),
    (GIVEN | dict(amax=[((3,), F32)]), f"the number of largest values must be {GROUPS}, got 3."),
    (GIVEN | dict(scale=((BLOCK_SCALES,), F32)), f"the number of rowwise scales must be {GROUPS}, got {BLOCK_SCALES}."),
    (GIVEN | dict(x=((32, 16), FP8)), "FP8 tokens have scales of their own; given_scale is for others."),
)
def test_quantize_permuted_refuses(change: dict, message: str) -> None:
    refuses(quantize_permuted, change, message)


@cases(
    (dict(logits=((32, 4), I32)), "logits must be bfloat16, float16 or float32."),
    (dict(logits=((32,), F32)), "the rank of logits must be 2, got 1."),
    (dict(experts=(64,)), "the rank of experts must be 2, got 1."),
    (dict(score=2), "score must be 0 (softmax) or 1 (sigmoid), got 2."),
    (
        dict(batch=5),
        "batch must be from 1 to 65535 and divide the number of tokens, which must not be 0, got 5 of 32 tokens.",
    ),
    (dict(logits=((0, 4), F32)), "batch must be from 1 to 65535 and divide the number of tokens, which must not be 0"),
    (dict(logits=((32, 513), F32)), "logits's shape[1] must be from 1 to 512, got 513."),
    (dict(expert_groups=0), "expert_groups must be from 1 to 32, got 0."),
    (dict(expert_groups=3), "expert_groups must divide the number of experts, got 3 of 4."),
    (dict(expert_groups=2, top_groups=3), "top_groups must be from 1 to 2, got 3."),
    (dict(expert_groups=4, top_groups=1), "experts's shape[1] must be from 1 to 1, got 2."),
    (dict(experts=(32, 0)), "experts's shape[1] must be from 1 to 4, got 0."),
    (dict(experts=(31, 2)), "the size of experts must be 64, got 62."),
    (dict(weights=(32, 3)), "the size of weights must be 64, got 96."),
    (dict(probabilities=(32, 3)), "the size of probabilities must be 128, got 96."),
    (dict(block_counts=(2, 4)), "the size of block_counts must be 4, got 8."),
    (dict(block_sums=(1, 3)), "the size of block_sums must be 4, got 3."),
    (dict(bias=2 * [(OF_EXPERTS, F32)]), "there must be at most one operand after logits, the bias, got 2."),
    (dict(bias=[(OF_EXPERTS, BF16)]), "the bias must be float32."),
    (dict(bias=[((5,), F32)]), "the size of the bias must be 4, got 5."),
)
def test_route_refuses(change: dict, message: str) -> None:
    refuses(route, change, message)


COUNTED = dict(of_blocks=[(OF_BLOCKS, I32), (OF_BLOCKS, F32)])


@cases(
    (dict(experts=(64,)), "the rank of experts must be 2, got 1."),
    (dict(batch=0), "batch must be from 1 to 65535 and divide the number of tokens, which must not be 0, got 0 of 32"),
    (dict(experts=(32, 0)), "the number of pairs of a batch element must be from 1 to 1073741824, got 0."),
    (dict(group_sizes=(0,)), "the number of experts must be from 1 to 512, got 0."),
    (dict(group_sizes=(513,)), "the number of experts must be from 1 to 512, got 513."),
    (dict(order=(65,)), "the number of rows must be from 0 to 64, got 65."),
    (dict(batch=2, order=(63,)), "the size of order must be 62, got 63."),
    (dict(inverse=(32, 1)), "the size of inverse must be 64, got 32."),
    (dict(batch=2, group_sizes=(5,)), "the size of group_sizes must be 4, got 5."),
    (dict(dropped=(2,)), "the size of dropped must be 1, got 2."),
    (dict(expert_load=(5,)), "the size of expert_load must be 4, got 5."),
    (dict(last=(OF_BLOCKS, F32)), "block_counts must be int32."),
    (dict(last=((5,), I32)), "the size of block_counts must be 4, got 5."),
    (dict(of_blocks=[(OF_BLOCKS, I32)]), "block_counts and block_sums must be given together, got 1 of the two."),
    (dict(of_blocks=2 * [(OF_BLOCKS, F32)]), "block_counts must be int32."),
    (dict(of_blocks=2 * [(OF_BLOCKS, I32)]), "block_sums must be float32."),
    (COUNTED | dict(last=(OF_EXPERTS, I32)), "sums must be float32."),
    (COUNTED | dict(last=((5,), F32)), "the size of sums must be 4, got 5."),
)
def test_group_pairs_refuses(change: dict, message: str) -> None:
    refuses(group_pairs, change, message)


@pytest.mark.skipif(bool(extension.cuda_devices()), reason="a GPU would be given the addresses of the CPU's memory")
@pytest.mark.parametrize(
    "call",
    [bias_grad, quantize, quantize_permuted, dequantize, activation_grad, permute_rows, sum_rows, route, group_pairs],
    ids=lambda call: call.__name__,
)
def test_only_the_gpu_is_missing_to_what_the_library_gives(call: Callable[..., jax.Array]) -> None:
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"(Asking for|Launching) the .* failed: "):
        jax.block_until_ready(call())
