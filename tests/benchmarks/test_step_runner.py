"""The program that measures training steps: what it prints, writes and draws, and how it fails."""

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import jax_grouped as jg
from benchmarks import device_clock, shapes
from benchmarks.cases import LAYERS, Case, make_case, random_inputs, relative_difference
from benchmarks.device_clock import Span
from benchmarks.peers import jax_peers
from benchmarks.records import Record
from benchmarks.shapes import SHAPES, Shape
from benchmarks.step.__main__ import main
from benchmarks.step.records import PARTS, Row, parts, with_timing
from benchmarks.step.runner import Plan, run
from benchmarks.step.table import parts_table, table
from benchmarks.step.variants import BASE, LOADERS, Variant
from benchmarks.timing import Timing
from tests.benchmarks.programs import assert_ends_in_one_line

pytestmark = pytest.mark.slow

TINY = Shape("tiny", 2, 80, 32, 48)
TINY_MLP = Shape("tiny", 2, 80, 32, 64)
# The others differ only in the recipe, and take long to compile.
STATE_ARRAYS = len(dataclasses.fields(jg.Fp8State))
CHOSEN = ["bf16", "block", "delayed cached"]
PNG = b"\x89PNG\r\n\x1a\n"
# What rounding both operands to three bits of mantissa leaves, with some room; gradients of e5m2 have two.
FP8_ERROR = 0.1


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    # The program sets it if it isn't set; this undoes that after each test.
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def a_plan(**variants: Variant) -> Plan:
    return Plan([TINY], ["tail"], ["float32"], variants, seed=0, seconds=10, calls=2, device_clock=False)


def a_row(variant: str = BASE, **changes) -> Row:
    row = Row(SHAPES["qwen3"], "equal", 0, "bfloat16", "float32", variant, "cuda")
    return dataclasses.replace(row, **changes)


def a_record(*rows: Row) -> Record[Row]:
    return Record("2030-01-01T00:00:00+00:00", "NVIDIA H200", {"jax": "0.0"}, {"seed": 0}, list(rows))


def tiny_case(layer: str = "dense") -> Case:
    shape = TINY_MLP if layer == "mlp" else TINY
    return make_case(shape, "tail", LAYERS[layer][0], random_inputs(shape, 0, jnp.float32, layer), 0)


def test_steps_without_and_with_a_cache_and_a_state_are_measured() -> None:
    rows = list(run(a_plan(**{name: LOADERS[name]() for name in CHOSEN})))

    assert [row.variant for row in rows] == CHOSEN
    assert [row.reason for row in rows] == [None] * len(CHOSEN)
    for row in rows:
        assert (row.skew, row.kernel_dtype, row.backend, row.calls) == ("tail", "float32", "xla", 2)
        assert row.fastest <= row.milliseconds <= row.slowest
        assert row.tflops == pytest.approx(3 * 2 * 60 * 32 * 48 / row.milliseconds / 1e9)


@pytest.mark.parametrize("name", CHOSEN)
def test_a_step_gives_the_result_and_both_gradients(name: str) -> None:
    case = tiny_case()

    y, dx, dkernel, *state = LOADERS[name]().prepare(case).results()

    expected = LOADERS[BASE]().prepare(case).results()
    assert (dx.dtype, dkernel.dtype) == (jnp.bfloat16, jnp.float32)
    assert relative_difference((y, dx, dkernel), expected, case) < FP8_ERROR
    assert len(state) == (STATE_ARRAYS if name.startswith("delayed") else 0)


def test_steps_of_an_mlp_are_measured() -> None:
    plan = dataclasses.replace(a_plan(bf16=LOADERS[BASE]()), shapes=[TINY_MLP], layers=("dense", "mlp"))

    rows = list(run(plan))

    assert [row.reason for row in rows] == [None, None]
    assert [row.title for row in rows] == ["tiny", "tiny mlp"]
    # Gate and up have 64 results together, so 32 features go into the projection back.
    products = 60 * 32 * 64 + 60 * 32 * 32
    assert rows[1].tflops == pytest.approx(3 * 2 * products / rows[1].milliseconds / 1e9)


@pytest.mark.parametrize("name", ["bf16", "delayed cached"])
def test_a_step_of_an_mlp_gives_the_result_and_three_gradients(name: str) -> None:
    case = tiny_case("mlp")

    y, dx, dgate_up, ddown, *states = LOADERS[name]().prepare(case).results()

    assert [of.shape for of in (y, dx, dgate_up, ddown)] == [(80, 32), (80, 32), (2, 32, 64), (2, 32, 32)]
    assert (dx.dtype, dgate_up.dtype, ddown.dtype) == (jnp.bfloat16, jnp.float32, jnp.float32)
    assert len(states) == (2 * STATE_ARRAYS if name.startswith("delayed") else 0)
    expected = jax_peers.load_lax()(case).results()
    assert relative_difference((y, dx, dgate_up, ddown), expected, case) < 2 * FP8_ERROR


@pytest.mark.parametrize("name", ["bf16", "block", "delayed cached"])
def test_an_accumulating_step_adds_to_the_gradient_of_earlier_steps(name: str) -> None:
    case = tiny_case("accumulating")
    work = LOADERS[name]().prepare(case)

    y, dx, *_, once = map(np.array, work.results())
    twice = np.array(work.results()[-1])
    work.block(1)

    assert relative_difference((y, dx, once), LOADERS[BASE]().prepare(tiny_case()).results(), case) < FP8_ERROR
    np.testing.assert_allclose(twice, 2 * once, rtol=1e-5)
    np.testing.assert_allclose(np.array(work.results()[-1]), 4 * once, rtol=1e-5)


def test_delayed_scaling_starts_with_the_scales_of_an_earlier_step() -> None:
    work = LOADERS["delayed cached"]().prepare(tiny_case())

    # A state's arrays, by name: of each tensor the history, the mark and the scale.
    *_, input_scale, _, _, kernel_scale, _, _, output_grad_scale = work.results()

    for scale in (input_scale, kernel_scale, output_grad_scale):
        assert (scale > 16).all()


def test_writes_rows_and_a_picture(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(shapes.SHAPES, "tiny", TINY)
    results, picture = tmp_path / "rows.json", tmp_path / "rows.png"
    arguments = ["--shapes", "tiny", "--skews", "tail", "--variants", "bf16", "--calls", "2"]

    status = main([*arguments, "--seconds", "10", "--json", str(results), "--plot", str(picture)])

    record = json.loads(results.read_text())
    rows = record["rows"]
    assert status == 0
    assert [(row["kernel_dtype"], row["variant"]) for row in rows] == [("bfloat16", "bf16"), ("float32", "bf16")]
    assert rows[0]["shape"] == {"name": "tiny", "num_groups": 2, "tokens": 80, "K": 32, "N": 48}
    assert all((row["dtype"], row["seed"], row["reason"], row["parts"]) == ("bfloat16", 0, None, None) for row in rows)
    assert {"jax", "jaxlib", "jax_grouped"} <= record["versions"].keys()
    assert picture.read_bytes().startswith(PNG)
    printed = capsys.readouterr().out
    assert "tiny, tail, float32, bf16: " in printed
    assert "E2 T80 K32 N48" in printed
    assert "by what its kernels do" not in printed


def test_shows_an_earlier_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results, picture = tmp_path / "rows.json", tmp_path / "rows.png"
    rows = [a_row(milliseconds=9.0), a_row("block", milliseconds=6.0, parts=dict.fromkeys(PARTS, 1.0))]
    a_record(*rows).write(results)

    status = main(["--load", str(results), "--plot", str(picture)])

    printed = capsys.readouterr().out
    assert status == 0
    assert Record.read(results, Row.parse).rows == rows
    assert picture.read_bytes().startswith(PNG)
    assert "NVIDIA H200" in printed
    assert "by what its kernels do" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shapes", "qwen4"], "argument --shapes: invalid choice: 'qwen4'"),
        (["--kernels", "float16"], "argument --kernels: invalid choice: 'float16'"),
        (["--variants", "mx"], "argument --variants: invalid choice: 'mx'"),
        (["--load", "nowhere.json"], "--load: "),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_wrong_arguments_end_in_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert_ends_in_one_line(main, "python3 -m benchmarks.step", arguments, message, capsys)


def test_a_variant_that_fails_gives_a_row_with_the_reason() -> None:
    def fails(case: Case):
        raise MemoryError("RESOURCE_EXHAUSTED: 56 GiB\nand a long report")

    (row,) = run(a_plan(fails=Variant(fails, "torch")))

    assert (row.variant, row.backend, row.milliseconds) == ("fails", "torch", None)
    assert row.reason == "MemoryError: RESOURCE_EXHAUSTED: 56 GiB"


def test_parts_are_told_by_the_names_of_kernels() -> None:
    by_kernel = {
        "nvjet_sm90_qqtst_128x256_128x4_2x1_v_bz_TNT": 5.0,
        "void jax_grouped::hopper::GroupedWgrad<jax_grouped::E4m3, jax_grouped::E4m3>(jax_grouped::Arguments)": 2.5,
        "void jax_grouped::hopper::GroupedTokenProduct<jax_grouped::E4m3, jax_grouped::E4m3>(TokenArguments)": 0.5,
        "jax_grouped::hopper::(anonymous namespace)::SetUpWgrad(jax_grouped::Groups)": 0.25,
        "jax_grouped::(anonymous namespace)::ScaledMatmulSetup(jax_grouped::Groups, ScaledArguments)": 0.25,
        "void jax_grouped::(anonymous namespace)::SetUp<__nv_fp8_e4m3>(jax_grouped::QuantizeArguments)": 0.5,
        "void jax_grouped::QuantizeTiles<(jax_grouped::ScalingMode)1, true, true>(jax_grouped::QuantizeArguments)": 2.0,
        "void jax_grouped::FindAmaxKernel<jax_grouped::PlainSource>(jax_grouped::QuantizeArguments)": 1.0,
        "loop_convert_fusion": 0.125,
        "MemcpyD2D": 0.0625,
    }

    assert parts(by_kernel) == {"product": 8.0, "quantize": 3.0, "setup": 1.0, "other": 0.1875}


def test_the_device_clock_tells_the_parts_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = itertools.cycle([14e6, 12e6, 16e6, 13e6, 15e6])  # The last block is not the median one.

    def spans(*_: Any) -> list[Span]:
        """Those of the two calls in a block."""
        return [Span("QuantizeTiles", 0, 4e6), Span("nvjet", 5e6, 9e6), Span("nvjet", 10e6, next(ends))]

    monkeypatch.setattr(device_clock, "profile", spans)

    (row,) = run(dataclasses.replace(a_plan(**{BASE: LOADERS[BASE]()}), device_clock=True))

    assert row.milliseconds == pytest.approx(7)
    assert row.parts == pytest.approx({"product": 4, "quantize": 2, "setup": 0, "other": 0})
    assert "1.000" in parts_table(a_record(row))  # What lies between the kernels.


def test_calls_are_timed_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = [
        Span("product", 0, 3e6),
        Span("product", 4e6, 5e6),
        Span("product", 80e6, 83e6),
        Span("product", 84e6, 87e6),
    ]
    monkeypatch.setattr(device_clock, "profile", lambda *_: calls)

    (row,) = run(dataclasses.replace(a_plan(**{BASE: LOADERS[BASE]()}), single_calls=True))

    assert row.milliseconds == pytest.approx((5 + 7) / 2)
    assert row.parts is None


def test_rates_count_three_products() -> None:
    case = make_case(SHAPES["qwen3"], "equal", "step", (), 0)

    row = with_timing(a_row(), Timing(2.0, 1.9, 2.1, 3), case)

    assert row.tflops == pytest.approx(3 * 2 * 65536 * 2048 * 1536 / 2e9)
    assert (row.milliseconds, row.fastest, row.slowest, row.calls) == (2.0, 1.9, 2.1, 3)


def test_the_table_has_a_line_per_case_and_speeds_relative_to_bf16() -> None:
    record = a_record(
        a_row(milliseconds=9.0),
        a_row("block", milliseconds=6.0),
        a_row("torch._grouped_mm", reason="MemoryError: 56 GiB"),
        a_row("block", skew="lognormal", milliseconds=7.0),
    )

    _, _, header, _, equal, lognormal, *_ = table(record).splitlines()

    assert header.split() == ["shape", "sizes", "skew", "kernel", "bf16", "block", "note"]
    assert "9.000 1.00x" in equal
    assert "6.000 1.50x" in equal
    assert equal.endswith("torch._grouped_mm: MemoryError: 56 GiB")
    assert lognormal.split()[-1] == "7.000"


def test_no_table_of_parts_without_a_profile() -> None:
    assert parts_table(a_record(a_row(milliseconds=9.0))) is None


@pytest.mark.gpu
def test_a_profile_shows_the_parts_of_a_step() -> None:
    names = [BASE, "block"]
    plan = dataclasses.replace(a_plan(**{name: LOADERS[name]() for name in names}), device_clock=True)

    bf16, block = run(dataclasses.replace(plan, shapes=[SHAPES["aligned"]]))

    assert (bf16.reason, block.reason) == (None, None)
    assert bf16.parts["product"] > 0
    assert bf16.parts["quantize"] == 0
    assert bf16.parts["other"] > 0  # The kernel is converted.
    assert all(block.parts[part] > 0 for part in ("product", "quantize", "setup"))
