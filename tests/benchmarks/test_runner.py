"""The program that measures: what it prints, writes and draws, and how it fails."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import cublaslt_rates, device_clock, peers
from benchmarks.__main__ import main
from benchmarks.cases import OPS, Case, make_case, random_inputs, relative_difference
from benchmarks.device_clock import CallClock, DeviceClock, Span
from benchmarks.jax_work import JaxWork
from benchmarks.records import Record, Row, with_timing
from benchmarks.runner import Plan, run
from benchmarks.shapes import SHAPES
from benchmarks.table import cublaslt_summary, table
from benchmarks.timing import BLOCKS, Timing, TooSlowError, measure
from tests.benchmarks.programs import assert_ends_in_one_line

pytestmark = pytest.mark.slow

FAST = ["--calls", "2", "--shapes", "odd", "--skews", "tail"]
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    # The program sets it if it isn't set; this undoes that after each test.
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


class FakeWork:
    """A program whose calls take the given time each."""

    def __init__(self, seconds: float):
        self.seconds = seconds
        self.blocks = []

    def results(self) -> tuple:
        return ()

    def block(self, calls: int) -> float:
        self.blocks.append(calls)
        return calls * self.seconds


def a_row(**changes) -> Row:
    row = Row(SHAPES["qwen3"], "equal", 0, "bfloat16", "fprop", "jax_grouped")
    return dataclasses.replace(row, **changes)


def a_record(*rows: Row, device: str = "NVIDIA H200") -> Record:
    return Record("2030-01-01T00:00:00+00:00", device, {"jax": "0.0"}, {"seed": 0}, list(rows))


def test_writes_rows_and_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results, picture = tmp_path / "rows.json", tmp_path / "rows.png"
    arguments = [*FAST, "--verify", "--peers", "jax_grouped", "jax.lax.ragged_dot", "--ops", *OPS]

    status = main([*arguments, "--json", str(results), "--plot", str(picture)])

    record = json.loads(results.read_text())
    ours, theirs = record["rows"][:2]
    assert status == 0
    assert [row["op"] for row in record["rows"]] == [op for op in OPS for _ in range(2)]
    assert ours["shape"] == {"name": "odd", "num_groups": 3, "tokens": 257, "K": 130, "N": 37}
    assert (ours["skew"], ours["seed"], ours["dtype"], ours["peer"]) == ("tail", 0, "bfloat16", "jax_grouped")
    assert all(row["reason"] is None for row in record["rows"])
    assert all(row["fastest"] <= row["milliseconds"] <= row["slowest"] for row in record["rows"])
    assert ours["tflops"] == pytest.approx(2 * 192 * 130 * 37 / ours["milliseconds"] / 1e9)
    assert ours["difference"] is None
    assert theirs["difference"] < 1e-2
    assert {"jax", "jaxlib", "jax_grouped"} <= record["versions"].keys()
    assert picture.read_bytes().startswith(PNG)
    assert "E3 T257 K130 N37" in capsys.readouterr().out


@pytest.mark.parametrize("peer", ["jax_grouped fp8 block", "jax_grouped fp8 tensor"])
def test_fp8_products_are_those_of_bfloat16_but_for_quantization(peer: str) -> None:
    shape = SHAPES["aligned"]
    for op in ("fprop", "dgrad", "wgrad", "wgrad f32"):
        case = make_case(shape, "lognormal", op, random_inputs(shape, 0), 0)
        expected = peers.LOADERS["jax_grouped"]()(case).results()

        assert 1e-2 < relative_difference(peers.LOADERS[peer]()(case).results(), expected, case) < 6e-2


def test_fp8_peers_have_single_products_only() -> None:
    case = make_case(SHAPES["aligned"], "equal", "backward", random_inputs(SHAPES["aligned"], 0), 0)

    with pytest.raises(ValueError, match="'backward' is no single product"):
        peers.LOADERS["jax_grouped fp8 block"]()(case)


def test_shows_an_earlier_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results, picture = tmp_path / "rows.json", tmp_path / "rows.png"
    a_record(a_row(milliseconds=1.0, tflops=712.0, of_cublaslt=1.0)).write(results)

    status = main(["--load", str(results), "--plot", str(picture)])

    assert status == 0
    assert picture.read_bytes().startswith(PNG)
    assert "NVIDIA H200" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shapes", "qwen4"], "argument --shapes: invalid choice: 'qwen4'"),
        (["--peers", "cublaslt"], "argument --peers: invalid choice: 'cublaslt'"),
        (["--skews", "hostile"], "argument --skews: invalid choice: 'hostile'"),
        (["--ops", "forward"], "argument --ops: invalid choice: 'forward'"),
        (["--seconds", "0"], "argument --seconds: must be positive, got 0"),
        (["--calls", "many"], "argument --calls: invalid int value: 'many'"),
        (["--plot", "nowhere/rows.png"], "nowhere/rows.png: there is no folder nowhere"),
        (["--load", "nowhere.json"], "--load: "),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_wrong_arguments_end_in_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert_ends_in_one_line(main, "python3 -m benchmarks", arguments, message, capsys)


def test_a_peer_that_cannot_be_imported_is_skipped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing():
        raise ModuleNotFoundError("No module named 'absent'\nmore")

    monkeypatch.setitem(peers.LOADERS, "torch._grouped_mm", missing)

    with pytest.raises(SystemExit) as exit_:
        main([*FAST, "--peers", "torch._grouped_mm"])

    captured = capsys.readouterr()
    assert exit_.value.code == 2
    assert captured.out == "skipped torch._grouped_mm: ModuleNotFoundError: No module named 'absent'\n"
    assert "nothing was measured" in captured.err


def test_a_peer_that_fails_gives_a_row_with_the_reason() -> None:
    def fails(case: Case):
        raise MemoryError("RESOURCE_EXHAUSTED: 56 GiB\nand a long report")

    working = peers.LOADERS["jax_grouped"]()
    chosen = {"fails": fails, "works": working}
    plan = Plan(
        [SHAPES["odd"]], ["equal"], ["fprop"], chosen, seed=0, seconds=1, calls=2, device_clock=False, reference=fails
    )

    failed, worked = run(plan)

    assert failed.reason == "MemoryError: RESOURCE_EXHAUSTED: 56 GiB"
    assert failed.milliseconds is None
    assert worked.milliseconds > 0
    assert worked.calls == 2


def test_calls_fill_the_budget() -> None:
    work = FakeWork(seconds=0.25)

    timing = measure(work, seconds=5)

    assert timing == Timing(milliseconds=250, fastest=250, slowest=250, calls=4)
    assert work.blocks == [1, 1, 4] + [4] * BLOCKS


def test_calls_can_be_given() -> None:
    assert measure(FakeWork(seconds=0.25), seconds=5, calls=7).calls == 7


def test_a_slow_peer_is_given_up() -> None:
    with pytest.raises(TooSlowError, match="one call takes 3 s, too long for --seconds 1"):
        measure(FakeWork(seconds=3), seconds=1)


@pytest.mark.parametrize(("op", "products"), OPS.items())
def test_useful_operations_count_rows_of_groups_only(op: str, products: int) -> None:
    case = make_case(SHAPES["odd"], "tail", op, (), 0)

    assert case.useful_operations == products * 2 * (257 * 3 // 4) * 130 * 37


def test_small_operands_rotate_and_differ() -> None:
    inputs = random_inputs(SHAPES["odd"], 0)

    assert len(inputs) == 8
    assert not np.array_equal(inputs[0].x, inputs[1].x)


def test_the_difference_is_relative_and_ignores_rows_outside_groups() -> None:
    case = make_case(SHAPES["odd"], "tail", "fprop", (), 0)
    expected = jnp.ones((257, 4))
    got = jnp.full((257, 4), 1.1).at[case.valid_rows :].set(jnp.nan)

    assert relative_difference((got,), (expected,), case) == pytest.approx(0.1)


def test_fractions_are_given_on_the_device_they_hold_for() -> None:
    case = make_case(SHAPES["qwen3"], "equal", "fprop", (), 0)
    took = case.useful_operations / 712e9
    timing = Timing(took, took, took, 1)

    on_h200 = with_timing(a_row(), timing, case, "NVIDIA H200", device_clock=True)
    elsewhere = with_timing(a_row(), timing, case, "cpu", device_clock=True)
    kept_busy = with_timing(a_row(), timing, case, "NVIDIA H200", device_clock=False)

    assert on_h200.tflops == pytest.approx(712)
    assert on_h200.of_cublaslt == pytest.approx(1)
    assert on_h200.of_dense == pytest.approx(712 / 798)
    assert elsewhere.of_cublaslt is None
    assert kept_busy.of_cublaslt is None
    assert elsewhere.of_dense is None


def test_rates_name_known_shapes_and_operations() -> None:
    for shape, skew, op in cublaslt_rates.RATES:
        assert shape in SHAPES
        assert skew in ("equal", "lognormal")
        assert op in (*OPS, "wgrad f32 accumulate")


def test_summary_names_the_row_farthest_from_cublaslt() -> None:
    record = a_record(
        a_row(of_cublaslt=0.97),
        a_row(op="wgrad", of_cublaslt=0.9),
        a_row(op="wgrad", peer="torch._grouped_mm", of_cublaslt=0.5),
        a_row(op="dgrad"),
    )

    assert cublaslt_summary(record) == (
        "jax_grouped keeps at least 95% of the bare cuBLASLt rate in 1 of 2 rows; "
        "the lowest is 90.0% (qwen3, equal, wgrad)."
    )


def test_no_summary_without_a_row_to_compare() -> None:
    assert cublaslt_summary(a_record(a_row(milliseconds=1.0))) is None


def test_speeds_are_relative_to_the_named_peer() -> None:
    record = a_record(
        a_row(milliseconds=2.0, fastest=1.9, slowest=2.2),
        a_row(milliseconds=4.0, peer="torch._grouped_mm"),
        a_row(peer="jax.lax.ragged_dot", reason="out of memory"),
    )

    header, _, ours, torch, lax, *_ = table(record, against="torch._grouped_mm").splitlines()

    assert "speed vs torch._grouped_mm" in header
    assert "difference" not in header
    assert "15.0%" in ours
    assert "2.00x" in ours
    assert "1.00x" in torch
    assert lax.endswith("out of memory")


# Of two calls, as a profile of any work shows them.
SPANS = [Span("scales", 0, 10), Span("cast", 15, 40), Span("scales", 1000, 1010), Span("cast", 1011, 1030)]


def test_the_device_clock_counts_from_the_first_kernel_to_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_clock, "profile", lambda *_: SPANS)
    clock = DeviceClock(FakeWork(1))

    assert clock.block(2) == pytest.approx(1030e-9)
    assert clock.kernel_share == pytest.approx(44 / 1030)


def test_the_clock_of_calls_leaves_out_what_lies_between_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_clock, "profile", lambda *_: SPANS)

    assert CallClock(FakeWork(1)).block(2) == pytest.approx((40 + 30) * 1e-9)


def test_the_clock_of_calls_refuses_kernels_that_it_cannot_divide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_clock, "profile", lambda *_: SPANS)

    with pytest.raises(RuntimeError, match="recorded 4 kernels, no multiple of the 3 calls"):
        CallClock(FakeWork(1)).block(3)


def test_a_profile_without_a_gpu_is_an_error() -> None:
    work = JaxWork(lambda x: (x + 1,), [(jnp.ones(3),)])
    if jax.default_backend() == "gpu":
        pytest.skip("this is about a machine without a GPU, and JAX sees one")

    with pytest.raises(RuntimeError, match="the profiler recorded no kernel on a GPU"):
        CallClock(work).block(1)


@pytest.mark.gpu
def test_the_device_clock_finds_the_product_in_a_profile() -> None:
    shape = SHAPES["aligned"]
    work = peers.LOADERS["jax_grouped"]()(make_case(shape, "equal", "fprop", random_inputs(shape, 0), 0))
    clock = DeviceClock(work)
    seconds = clock.block(5)
    assert 0 < seconds < work.block(5) + 1
    assert 0 < clock.kernel_share <= 1
