"""Timing, by the host's clock and by profiles, and figures that follow from it."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from benchmarks import runner
from benchmarks.cases import OPERATIONS, Case
from benchmarks.rows import PARTS, Record, Row, table
from benchmarks.runner import BLOCKS, Span, measure
from benchmarks.shapes import SHAPES

# In profile.txtpb: two calls of two kernels.
SPANS = [Span("scales", 1000, 1010), Span("cast", 1015, 1040), Span("scales", 2000, 2010), Span("cast", 2011, 2030)]


@dataclasses.dataclass
class FakeWork:
    seconds: float
    blocks: list[int] = dataclasses.field(default_factory=list)

    def block(self, calls: int) -> float:
        self.blocks.append(calls)
        return calls * self.seconds


def a_row(operation: str = "fprop", variant: str = "jax_grouped", clock: str = "device", **fields: Any) -> Row:
    return Row(Case(operation, SHAPES["qwen3"], variant), clock, "cuda", **fields)


def test_calls_fill_the_budget_and_a_slow_peer_is_given_up() -> None:
    row, work = a_row(clock="host"), FakeWork(seconds=0.25)
    measure(row, work, seconds=5)
    assert (row.milliseconds, row.fastest, row.slowest, row.calls, row.parts) == (250, 250, 250, 4, None)
    assert work.blocks == [1, 1, 4 * BLOCKS] + [4] * BLOCKS
    measure(row, work, seconds=5, calls=7)
    assert row.calls == 7
    with pytest.raises(TimeoutError, match=r"one call takes 0\.25 s, too long for --seconds 0\.1"):
        measure(row, work, seconds=0.1)


def test_a_profile_is_read_in_the_order_in_which_kernels_start(tmp_path: Path) -> None:
    file = tmp_path / "a.xplane.pb"
    text = Path(__file__).with_name("profile.txtpb").read_text()
    file.write_bytes(jax.profiler.ProfileData.text_proto_to_serialized_xspace(text))
    assert runner.read_profile(file) == SPANS
    if jax.default_backend() != "gpu":
        with pytest.raises(RuntimeError, match="the profiler recorded no kernel on a GPU"):
            runner.profile(lambda _: jnp.ones(3).block_until_ready(), 1)


def test_the_clock_of_calls_leaves_out_what_lies_between_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "profile", lambda _, calls: SPANS[: 2 * calls])
    for clock, nanoseconds in {"device": 1030 / 2, "call": (40 + 30) / 2}.items():
        row = a_row(clock=clock)
        measure(row, FakeWork(0), seconds=1, calls=2)
        assert row.milliseconds == pytest.approx(nanoseconds / 1e6)
        assert bool(row.parts) == (clock == "device")
    with pytest.raises(RuntimeError, match="recorded 4 kernels, no multiple of the 3 calls"):
        runner.time_block(FakeWork(1), 3, "graph")


def test_parts_are_told_by_the_names_of_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    by_kernel = {
        "nvjet_sm90_qqtst_128x256_128x4_2x1_v_bz_TNT": 5500.0,
        "void jax_grouped::sm90::Fp8Wgrad<jax_grouped::E4m3, jax_grouped::E4m3>(jax_grouped::Arguments)": 2500.0,
        "jax_grouped::sm90::(anonymous namespace)::SetUpFp8Wgrad(jax_grouped::Groups)": 1000.0,
        "void jax_grouped::QuantizeTiles<(jax_grouped::ScalingMode)1, true, true>(jax_grouped::QuantizeArguments)": 2e3,
        "void jax_grouped::FindAmaxKernel<jax_grouped::PlainSource>(jax_grouped::QuantizeArguments)": 1000.0,
        "loop_convert_fusion": 187.5,
    }
    ends = iter([1.1, 1.1, 1.4, 1.2, 1.6, 1.3, 1.5])  # The median block is not the last one.
    last = [Span(name, 0, time) for name, time in by_kernel.items()]
    monkeypatch.setattr(runner, "profile", lambda *_: [*last, Span("nvjet", 5e6, 5e6 + next(ends) * 1e6)])
    row = a_row()
    measure(row, FakeWork(0), seconds=1, calls=2)
    assert row.milliseconds == pytest.approx(6.4 / 2)
    expected = {"product": (8e-3 + 1.4) / 2, "quantize": 3e-3 / 2, "setup": 1e-3 / 2, "other": 0.1875e-3 / 2}
    assert row.parts == pytest.approx(expected)
    assert tuple(row.parts) == PARTS


def read_words(*rows: Row, device: str = "NVIDIA H200") -> list[list[str]]:
    for row in rows:
        row.fastest, row.slowest = row.fastest or row.milliseconds, row.slowest or row.milliseconds
    record = Record("products", "2030-01-01T00:00:00+00:00", device, {"jax": "0.0"}, {"seed": 0}, list(rows))
    return [line.split() for line in table(record, "jax.numpy").splitlines()[2:]]


def test_the_table_shows_speeds_shares_and_reasons() -> None:
    count = OPERATIONS["fprop"].count(a_row().case)
    row, kept_busy = (a_row(clock=clock, count=count, milliseconds=count / 712e9) for clock in ("device", "host"))
    copy, ours, plain, engine, *_ = read_words(
        a_row("copy", count=4_000_000_000, milliseconds=1.0),
        a_row("mx both", count=3_600_000_000, milliseconds=1.0, fastest=0.9, slowest=1.05),
        a_row("mx both", "jax.numpy", count=3_600_000_000, milliseconds=4.0),
        a_row("mx both", "transformer_engine.jax", note="out of memory"),
    )

    # Fractions are given on the device, and of bare calls on the clock, that they hold for.
    assert read_words(row)[0][-3:] == ["712", "89%", "100.0%"]
    assert read_words(kept_busy)[0][-2:] == ["712", "89%"]
    assert read_words(row, device="cpu")[0][-1] == "712"
    assert copy[-1] == "93.0%"
    assert ours[-6:] == ["1", "15.0%", "4.00x", "3600", "90.0%", "83.7%"]
    assert plain[-4:] == ["1.00x", "900", "22.5%", "20.9%"]
    assert engine[-3:] == ["out", "of", "memory"]
