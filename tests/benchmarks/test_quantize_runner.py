"""The program that measures quantization: what it prints, writes and draws, and how it fails."""

import dataclasses
import json
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_grouped as jg
from benchmarks.quantize import cases, peers
from benchmarks.quantize.__main__ import main
from benchmarks.quantize.cases import CASES, SHAPES, SKEWS, Tokens, combinations, make_case, normal_sets
from benchmarks.quantize.peers import LOADERS, Peer
from benchmarks.quantize.records import Row, with_timing
from benchmarks.quantize.runner import Plan, copy_work, run
from benchmarks.quantize.table import table
from benchmarks.records import Record
from benchmarks.timing import Timing
from tests.benchmarks.programs import assert_ends_in_one_line

pytestmark = pytest.mark.slow

TINY = Tokens("tiny", 2, 256, 128)
TINY_COPY = Tokens("copy", 1, 32, 64)
PNG = b"\x89PNG\r\n\x1a\n"
# Enough for XLA's own rounding of a division.
TOLERANCE = 1e-6


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    # The program sets it if it isn't set; this undoes that after each test.
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


@pytest.fixture
def tiny_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """The program with a small shape in place of the one whose name is `small`."""
    monkeypatch.setitem(cases.SHAPES, "small", dataclasses.replace(TINY, name="small"))
    monkeypatch.setattr(cases, "COPY", TINY_COPY)


def a_plan(*rows: tuple[Tokens, str, str], peers: dict[str, Peer]) -> Plan:
    return Plan(TINY_COPY, list(rows), peers, seed=0, seconds=10, calls=2, device_clock=False)


def a_row(**changes) -> Row:
    row = Row(
        SHAPES["dsv3 32"],
        "equal",
        0,
        "bfloat16",
        "block_1d both",
        "block_1d",
        "both",
        "jax_grouped",
        "cuda",
        "host",
        956_301_312,
    )
    return dataclasses.replace(row, **changes)


def a_record(*rows: Row) -> Record[Row]:
    return Record("2030-01-01T00:00:00+00:00", "NVIDIA H200", {"jax": "0.0"}, {"seed": 0}, list(rows))


def ours_and(name: str) -> dict[str, Peer]:
    return {name: LOADERS[name]() for name in ("jax_grouped", name)}


def test_every_case_is_measured() -> None:
    plan = a_plan(*((TINY, "equal", name) for name in CASES), peers={"jax_grouped": LOADERS["jax_grouped"]()})

    copy, *rows = run(plan)

    assert copy.case == "copy"
    assert copy.gbps == pytest.approx(copy.bytes_moved / copy.milliseconds / 1e6)
    assert [row.case for row in rows] == list(CASES)
    assert [row.reason for row in rows] == [None] * len(CASES)
    assert {row.backend for row in (copy, *rows)} == {"xla"}
    for row in rows:
        assert row.calls == 2
        assert row.fastest <= row.milliseconds <= row.slowest
        assert row.gbps == pytest.approx(row.bytes_moved / row.milliseconds / 1e6)
        assert row.of_copy == pytest.approx(row.gbps / copy.gbps)


def test_the_table_has_every_case_and_shape_once() -> None:
    rows = combinations(list(SHAPES), list(SKEWS), list(CASES))

    assert len(set(rows)) == len(rows)
    assert {name for _, _, name in rows} == set(CASES)
    assert {shape.name for shape, _, _ in rows} == set(SHAPES)


def test_rows_are_chosen_by_shape_skew_and_case() -> None:
    rows = combinations(["qwen3 8", "small"], ["lognormal"], ["block_1d both", "mx both"])

    assert rows == [(SHAPES["qwen3 8"], "lognormal", "block_1d both")]


@pytest.mark.usefixtures("tiny_table")
def test_writes_rows_and_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results, picture = tmp_path / "rows.json", tmp_path / "rows.png"
    arguments = ["--shapes", "small", "--peers", "jax_grouped", "jax.numpy", "--calls", "2", "--seconds", "10"]

    status = main([*arguments, "--json", str(results), "--plot", str(picture)])

    record = json.loads(results.read_text())
    ours = record["rows"][1]
    assert status == 0
    assert [(row["case"], row["peer"]) for row in record["rows"]] == [
        ("copy", "jax.numpy.copy"),
        ("block_1d rowwise", "jax_grouped"),
        ("block_1d rowwise", "jax.numpy"),
        ("block_1d both", "jax_grouped"),
        ("block_1d both", "jax.numpy"),
        ("delayed tensor both", "jax_grouped"),
        ("current tensor both", "jax_grouped"),
    ]
    assert ours["shape"] == {"name": "small", "num_groups": 2, "tokens": 256, "features": 128}
    assert (ours["skew"], ours["seed"], ours["dtype"]) == ("equal", 0, "bfloat16")
    assert (ours["mode"], ours["orientation"], ours["backend"], ours["clock"]) == ("block_1d", "rowwise", "xla", "host")
    assert all(row["reason"] is None for row in record["rows"])
    assert {"jax", "jaxlib", "jax_grouped"} <= record["versions"].keys()
    assert picture.read_bytes().startswith(PNG)
    assert "G2 T256 C128" in capsys.readouterr().out


def test_shows_an_earlier_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results, picture = tmp_path / "rows.json", tmp_path / "rows.png"
    a_record(a_row(milliseconds=0.25, gbps=3825.0, of_copy=0.9)).write(results)

    status = main(["--load", str(results), "--plot", str(picture)])

    assert status == 0
    assert picture.read_bytes().startswith(PNG)
    assert "NVIDIA H200" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shapes", "qwen4"], "argument --shapes: invalid choice: 'qwen4'"),
        (["--peers", "torch"], "argument --peers: invalid choice: 'torch'"),
        (["--skews", "tail"], "argument --skews: invalid choice: 'tail'"),
        (["--cases", "block"], "argument --cases: invalid choice: 'block'"),
        (["--shapes", "small", "--cases", "mx both"], "the table has no row with such a shape, skew and case"),
        (["--seconds", "0"], "argument --seconds: must be positive, got 0"),
        (["--json", "nowhere/rows.json"], "nowhere/rows.json: there is no folder nowhere"),
        (["--load", "nowhere.json"], "--load: "),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_wrong_arguments_end_in_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert_ends_in_one_line(main, "python3 -m benchmarks.quantize", arguments, message, capsys)


def test_a_peer_that_fails_gives_a_row_with_the_reason() -> None:
    def fails(case: cases.Case):
        raise MemoryError("RESOURCE_EXHAUSTED: 56 GiB\nand a long report")

    failing = Peer(fails, "xla", frozenset(CASES.values()))

    _, row = run(a_plan((TINY, "equal", "mx both"), peers={"fails": failing}))

    assert row.reason == "MemoryError: RESOURCE_EXHAUSTED: 56 GiB"
    assert row.milliseconds is None


def test_a_peer_has_no_row_for_what_it_does_not_offer() -> None:
    rows = run(a_plan((TINY, "equal", "mx both"), peers=ours_and("jax.numpy")))

    assert [row.peer for row in rows] == ["jax.numpy.copy", "jax_grouped"]


@pytest.mark.parametrize(
    ("shape", "name", "reason"),
    [
        (Tokens("short groups", 4, 256, 128), "block_1d both", "needs equal groups with a multiple of 128 rows"),
        (Tokens("uneven groups", 3, 384, 128), "block_1d both", "needs equal groups with a multiple of 128 rows"),
        (Tokens("short block", 2, 256, 144), "block_1d rowwise", "needs features that are a multiple of 128"),
    ],
    ids=lambda value: value.name if isinstance(value, Tokens) else None,
)
def test_plain_formulas_say_which_sizes_they_need(shape: Tokens, name: str, reason: str) -> None:
    skew = "lognormal" if shape.name == "uneven groups" else "equal"

    with pytest.raises(ValueError, match=reason):
        LOADERS["jax.numpy"]().prepare(make_case(shape, skew, CASES[name], 0))


@pytest.mark.parametrize("name", ["block_1d rowwise", "delayed tensor rowwise", "current tensor rowwise"])
def test_plain_formulas_quantize_rows_as_this_library_does(name: str) -> None:
    case = make_case(TINY, "lognormal", CASES[name], 0)

    data, *_ = LOADERS["jax.numpy"]().prepare(case).results()

    _, expected, _ = LOADERS["jax_grouped"]().prepare(case).results()
    np.testing.assert_array_equal(bits(data), bits(expected))


def test_plain_formulas_quantize_columns_as_this_library_does() -> None:
    case = make_case(TINY, "equal", CASES["block_1d both"], 0)

    *_, data, scale_inv = LOADERS["jax.numpy"]().prepare(case).results()

    *_, expected, expected_scale_inv = LOADERS["jax_grouped"]().prepare(case).results()
    # The arrays of this library have room for other group sizes behind the last group.
    np.testing.assert_array_equal(bits(data).reshape(-1), bits(expected)[: data.size])
    np.testing.assert_allclose(scale_inv.reshape(-1), expected_scale_inv[: scale_inv.size], rtol=TOLERANCE)


def bits(data: jax.Array) -> np.ndarray:
    return np.asarray(jax.lax.bitcast_convert_type(data, jnp.uint8))


def test_the_copy_writes_another_array() -> None:
    work = copy_work(TINY_COPY, 0)

    (copy,) = work.results()

    (original, _) = normal_sets(TINY_COPY.tokens, TINY_COPY.features, 0, 2)
    np.testing.assert_array_equal(copy, original)
    assert copy.unsafe_buffer_pointer() != original.unsafe_buffer_pointer()


def test_small_tokens_rotate_and_differ() -> None:
    inputs = make_case(SHAPES["small"], "equal", CASES["delayed tensor both"], 0).inputs

    assert sum(x.nbytes for x, _, _ in inputs) >= 256e6
    assert not np.array_equal(inputs[0].x, inputs[1].x)


def test_fractions_are_of_the_copy_and_of_the_device() -> None:
    row = a_row(bytes_moved=2_150_000_000)

    on_h200 = with_timing(row, Timing(1.0, 0.9, 1.1, 3), copy_gbps=4000.0, device="NVIDIA H200")
    elsewhere = with_timing(row, Timing(1.0, 0.9, 1.1, 3), copy_gbps=None, device="cpu")

    assert on_h200.gbps == pytest.approx(2150)
    assert on_h200.of_copy == pytest.approx(0.5375)
    assert on_h200.of_reference == pytest.approx(0.5)
    assert elsewhere.of_copy is None
    assert elsewhere.of_reference is None


def test_the_table_shows_rates_and_reasons() -> None:
    record = a_record(
        a_row(milliseconds=0.25, fastest=0.24, slowest=0.26, gbps=3825.0, of_copy=0.9, of_reference=0.89),
        a_row(peer="jax.numpy", reason="ValueError: needs equal groups"),
    )

    header, _, ours, plain, *_ = table(record).splitlines()

    assert "of 4.3 TB/s" in header
    assert "0.2500" in ours
    assert "8.0%" in ours
    assert "3825" in ours
    assert "90.0%" in ours
    assert "89.0%" in ours
    assert plain.endswith("ValueError: needs equal groups")


class FakeQuantizer:
    scale = None


def test_transformer_engine_gets_a_quantizer_for_each_group(monkeypatch: pytest.MonkeyPatch) -> None:
    made = {}

    def create(**options):
        made.update(options)
        return types.SimpleNamespace(quantizers=tuple(FakeQuantizer() for _ in range(options["n_groups"])))

    def grouped_quantize(x, quantizer, group_sizes):
        scales = jnp.concatenate([of_group.scale for of_group in quantizer.quantizers])
        return {"data": x.astype(jnp.float8_e4m3fn), "scale_inv": 1 / scales, "group_sizes": group_sizes}

    module = types.SimpleNamespace(
        ScalingMode=types.SimpleNamespace(DELAYED_TENSOR_SCALING="delayed", CURRENT_TENSOR_SCALING="current"),
        QuantizeLayout=types.SimpleNamespace(ROWWISE="rowwise", ROWWISE_COLWISE="both"),
        QuantizerFactory=types.SimpleNamespace(create=create),
        is_scaling_mode_supported=lambda mode: (mode == "delayed", "not here"),
    )
    extensions = types.SimpleNamespace(grouped_quantize=grouped_quantize)
    for name, part in (("", None), (".jax", None), (".jax.quantize", module), (".jax.cpp_extensions", extensions)):
        monkeypatch.setitem(sys.modules, f"transformer_engine{name}", part or types.ModuleType(name))
    peer = peers.load_transformer_engine()
    case = make_case(TINY, "lognormal", CASES["delayed tensor both"], 0)

    data, scale_inv = peer.prepare(case).results()

    assert made == {"scaling_mode": "delayed", "q_dtype": jnp.float8_e4m3fn, "q_layout": "both", "n_groups": 2}
    assert data.shape == (256, 128)
    np.testing.assert_allclose(scale_inv, 1 / case.inputs[0].scale, rtol=TOLERANCE)
    with pytest.raises(ValueError, match="not here"):
        peer.prepare(make_case(TINY, "equal", CASES["current tensor both"], 0))
    assert CASES["block_1d both"] not in peer.quantizations


@pytest.mark.gpu
def test_a_short_call_is_timed_on_the_device() -> None:
    plan = a_plan((SHAPES["small"], "equal", "block_1d both"), peers={"jax_grouped": LOADERS["jax_grouped"]()})

    _, row = run(plan)

    assert (row.clock, row.reason) == ("device", None)
    assert 0 < row.milliseconds < 1
    assert jg.ScalingMode(row.mode) == jg.ScalingMode.BLOCK_1D
