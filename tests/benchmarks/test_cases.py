"""Cases: what they count, and what the variants compute."""

import dataclasses
import sys
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_grouped as jg
from benchmarks import cases
from benchmarks.cases import LAYERS, OPERATIONS, PRODUCTS, Case, draw, relative_difference
from benchmarks.peers import VARIANTS, NotOfferedError
from benchmarks.shapes import SHAPES, Shape

pytestmark = pytest.mark.slow

TINY = Shape("tiny", 2, 256, 128, 128)

# Groups of 5, 0 and 130 rows; one row belongs to none. Features: one block of 128 and a short one.
THREE_GROUPS = SimpleNamespace(shape=Shape("", 3, 136, 144), sizes=np.array([5, 0, 130], np.int32), valid_rows=135)
THREE_GROUPS.tokens = lambda features: jax.ShapeDtypeStruct((136, features), jnp.bfloat16)
READ = 2 * 135 * 144
ROWWISE = 135 * 144
# 5 rows become 16, 130 become 144.
COLUMNWISE = (16 + 144) * 144
# Two blocks of features by rows up to a multiple of 4; one block of 5 rows and two of 130 by features.
SCALES_ROWWISE = 4 * 2 * (8 + 132)
SCALES_COLUMNWISE = 4 * (1 + 2) * 144
BLOCK_1D = ROWWISE + COLUMNWISE + SCALES_ROWWISE + SCALES_COLUMNWISE


def results(
    operation: str, variant: str, skew: str = "lognormal", shape: Shape = TINY, kernel: str = "bfloat16"
) -> Any:
    case = Case(operation, shape, variant, skew, kernel)
    return VARIANTS[variant].prepare(case, draw(OPERATIONS[operation].arrays(case), 0)[:2]).results()


def test_rows_outside_groups_neither_count_nor_differ() -> None:
    for name, number in zip(PRODUCTS, [1, 1, 1, 1, 2, 3, 3, 4.5], strict=True):
        case = Case(name, SHAPES["odd"], "", "tail")
        got = jnp.full((257, 4), 1.1).at[case.valid_rows :].set(jnp.nan)

        assert OPERATIONS[name].count(case) == number * 2 * (257 * 3 // 4) * 130 * 37
        assert relative_difference((got,), (jnp.ones((257, 4)),), case) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("copy", 2 * 2 * 136 * 144),
        ("dbias block_1d both", READ + BLOCK_1D + 4 * 3 * 144),
        ("delayed tensor rowwise", READ + ROWWISE + 4 * 3),
        ("current tensor both", 2 * READ + ROWWISE + COLUMNWISE + 2 * 4 * 3),
        # One byte per 32 features by rows up to a multiple of 16; per feature and 32 rows, of which there are 1 and 5.
        ("mx both", READ + ROWWISE + COLUMNWISE + 5 * (16 + 144) + 144 * (1 + 5)),
        ("silu_mul block_1d both", 2 * READ + BLOCK_1D),
        # Reads three arrays and quantizes two, side by side: three blocks of features.
        ("silu_mul backward block_1d both", 3 * READ + 2 * (BLOCK_1D - SCALES_ROWWISE) + 4 * 3 * (8 + 132)),
        ("dequantize block_1d columnwise", COLUMNWISE + SCALES_COLUMNWISE + 2 * 136 * 144),
    ],
)
def test_bytes_are_counted_as_laid_out(name: str, expected: int) -> None:
    assert OPERATIONS[name].count(THREE_GROUPS) == expected


def test_small_operands_rotate_and_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "_BYTES_IN_ROTATION", 1e6)
    arrays = (jax.ShapeDtypeStruct((256, 512), jnp.bfloat16),)
    sets = draw(arrays, 0)

    assert len(sets) == 4
    assert not np.array_equal(sets[0][0], sets[1][0])
    assert len(draw(arrays, 0, part=0.5)) == 8


def test_few_tokens_read_the_kernels_that_they_choose() -> None:
    parts = [cases.part_read(Case(operation, SHAPES["decode 1"], "bf16")) for operation in ("moe forward", "dense")]

    assert parts == [8 / 128, 1]


def test_a_step_gives_the_result_all_gradients_and_states_of_an_earlier_step() -> None:
    y, dx, dkernel, *states = results("dense", "delayed cached", kernel="float32")

    assert [of.dtype.name for of in (y, dx, dkernel)] == ["bfloat16", "bfloat16", "float32"]
    # A state's arrays, by name: of each tensor the history, the mark and the scale.
    assert len(states) == len(dataclasses.fields(jg.Fp8State))
    assert min(scale.min() for scale in states[2::3]) > 16


@pytest.mark.parametrize("variant", ["bf16", "block", "delayed cached"])
def test_an_accumulating_step_adds_to_the_gradient_of_earlier_steps(variant: str) -> None:
    case = Case("accumulating", TINY, variant, kernel_dtype="float32")
    work = VARIANTS[variant].prepare(case, draw(OPERATIONS["accumulating"].arrays(case), 0)[:1])

    y, dx, *_, once = map(np.array, work.results())
    work.block(1)

    # Rounding both operands to three bits of mantissa, gradients to two, leaves less than 0.1.
    assert relative_difference((y, dx, once), results("dense", "bf16", "equal", kernel="float32"), case) < 0.1
    np.testing.assert_allclose(np.array(work.results()[-1]), 3 * once, rtol=1e-5)


@pytest.mark.parametrize("name", ["block_1d both", "delayed tensor rowwise", "current tensor rowwise"])
def test_plain_formulas_quantize_as_this_library_does(name: str) -> None:
    _, *expected = results(name, "jax_grouped", "equal")

    for got, array in list(zip(results(name, "jax.numpy", "equal"), expected, strict=False))[::2]:
        data, ours = (jax.lax.bitcast_convert_type(of, jnp.uint8).ravel() for of in (got, array))
        # The arrays of this library have room for other group sizes behind the last group.
        np.testing.assert_array_equal(data, ours[: data.size])


def test_plain_formulas_say_which_sizes_they_need() -> None:
    for shape, skew, reason in [
        (Shape("uneven groups", 3, 384, 128), "lognormal", "needs equal groups with a multiple of 128 rows"),
        (Shape("short block", 2, 256, 144), "equal", "needs features that are a multiple of 128"),
        (TINY, "tail", "needs every row to belong to a group"),
    ]:
        with pytest.raises(ValueError, match=reason):
            results("block_1d both", "jax.numpy", skew, shape)


@pytest.mark.gpu
@pytest.mark.parametrize("operation", ["moe forward", "moe"])
@pytest.mark.parametrize(
    ("variant", "bound"),
    [
        *[(name, 1e-2) for name in ("SonicMoE", "TransformerEngine", "torch compiled")],
        *[(f"TransformerEngine {recipe} cached", 0.1) for recipe in ("block", "current")],
    ],
)
@pytest.mark.filterwarnings("ignore")  # Those of torch and of what it compiles with.
def test_whole_layers_of_peers_give_our_results(variant: str, bound: float, operation: str) -> None:
    try:
        VARIANTS[variant].load()
    except ImportError as error:  # The peer is not installed: the tests do not require it.
        pytest.skip(str(error))
    case = Case(operation, Shape("few experts", 8, 512, 256, 512, 2), variant)
    sets = draw(OPERATIONS[operation].arrays(case), 0)[:1]

    got, ours = (VARIANTS[name].prepare(case, sets).results() for name in (variant, "jax_grouped"))

    assert [of.shape for of in got] == [of.shape for of in ours]
    assert relative_difference(got, ours, case) < bound


@pytest.mark.gpu
@pytest.mark.parametrize("skew", ["equal", "lognormal"])
@pytest.mark.parametrize("operation", ["fprop", "dgrad"])
def test_products_of_deep_gemm_give_our_results(operation: str, skew: str) -> None:
    pytest.importorskip("deep_gemm")  # The tests do not require it.
    case = Case(operation, Shape("three groups", 3, 640, 256, 384), "DeepGEMM", skew)
    sets = draw(OPERATIONS[operation].arrays(case), 0)[:1]

    got, ours = (VARIANTS[name].prepare(case, sets).results() for name in ("DeepGEMM", "jax_grouped"))

    # Both operands were rounded to three bits.
    assert relative_difference(got, ours, case) < 0.05


@pytest.mark.parametrize("operation", LAYERS)
def test_a_layer_is_compared_with_one_that_rounds_logits_as_peers_do(operation: str) -> None:
    def layer(variant: str) -> Any:
        case = Case(operation, Shape("few experts", 8, 128, 64, 64, 2), variant)
        return VARIANTS["jax_grouped"].prepare(case, draw(OPERATIONS[operation].arrays(case), 0)[:1]).results()

    ours, beside_peer = layer("block"), layer("SonicMoE")

    assert [of.shape for of in ours] == [of.shape for of in beside_peer]
    differs = any(not np.array_equal(*pair) for pair in zip(ours, beside_peer, strict=True))
    assert differs == (operation != "moe experts")


def test_transformer_engine_gets_a_quantizer_for_each_group(monkeypatch: pytest.MonkeyPatch) -> None:
    def grouped_quantize(x: jax.Array, quantizer: Any, sizes: jax.Array) -> Any:
        scales = jnp.concatenate([of_group.scale for of_group in quantizer.quantizers])
        return {"data": x.astype(jnp.float8_e4m3fn), "scale_inv": 1 / scales, "group_sizes": sizes}

    quantize = MagicMock()
    delayed, create = quantize.ScalingMode.DELAYED_TENSOR_SCALING, quantize.QuantizerFactory.create
    quantize.is_scaling_mode_supported.side_effect = lambda mode: (mode is delayed, "not here")
    create.return_value.quantizers = [MagicMock(), MagicMock()]
    modules = {
        "dense": SimpleNamespace(grouped_dense=jax.lax.ragged_dot),
        "cpp_extensions": SimpleNamespace(grouped_quantize=grouped_quantize),
        "quantize": quantize,
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, f"transformer_engine.jax.{name}", module)
    # Imported anew now, and again after this test.
    monkeypatch.setitem(sys.modules, "benchmarks.peers.transformer_engine", None)
    monkeypatch.delitem(sys.modules, "benchmarks.peers.transformer_engine")

    data, scale_inv = results("delayed tensor both", "transformer_engine.jax")

    both = quantize.QuantizeLayout.ROWWISE_COLWISE
    create.assert_called_with(scaling_mode=delayed, q_dtype=jnp.float8_e4m3fn, q_layout=both, n_groups=2)
    assert (data.shape, scale_inv.shape) == ((256, 128), (2,))
    with pytest.raises(ValueError, match="not here"):
        results("current tensor both", "transformer_engine.jax")
    with pytest.raises(NotOfferedError):
        results("block_1d both", "transformer_engine.jax")
    got, ours = (
        results("fprop", variant)[0].astype(jnp.float32) for variant in ("transformer_engine.jax", "jax_grouped")
    )
    np.testing.assert_allclose(got, ours, rtol=2.0**-7, atol=1e-3)
