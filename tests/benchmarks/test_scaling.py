"""The program that measures how steps scale: what it measures, writes and draws."""

from pathlib import Path

import pytest

from benchmarks import scaling
from benchmarks.records import Record
from benchmarks.shapes import SHAPES, Shape
from benchmarks.step.records import Row
from tests.benchmarks.programs import assert_ends_in_one_line

TINY = {
    "tokens": [Shape("4 tokens", 2, 8, 16, 16), Shape("8 tokens", 2, 16, 16, 16)],
    "experts": [Shape("1 experts", 1, 8, 16, 16), Shape("4 experts", 4, 8, 16, 16)],
    "skew": [Shape("tiny", 2, 8, 16, 32)],
}


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    # The program sets it if it isn't set; this undoes that after each test.
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def test_sweeps_reach_from_few_to_many() -> None:
    tokens = [shape.tokens // shape.num_groups for shape in scaling.SWEEPS["tokens"]]
    assert tokens == [16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192]
    experts = scaling.SWEEPS["experts"]
    assert [shape.num_groups for shape in experts] == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
    assert len({shape.tokens for shape in experts}) == 1


def test_intensity_counts_each_array_once() -> None:
    shape = Shape("small", 2, 8, 16, 32)
    x, kernel, dy = 8 * 16, 2 * 16 * 32, 8 * 32
    assert scaling.intensity(shape) == pytest.approx(6 * 8 * 16 * 32 / (2 * (2 * x + 2 * kernel + 2 * dy)))


def test_measures_writes_and_draws(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(scaling, "SWEEPS", TINY)
    results, picture = tmp_path / "rows.json", tmp_path / "rows.png"
    options = ["--variants", "bf16", "jax.lax.ragged_dot", "--calls", "1", "--seconds", "10"]

    status = scaling.main([*options, "--json", str(results), "--plot", str(picture)])

    rows = Record.read(results, Row.parse).rows
    assert status == 0
    assert [row.reason for row in rows] == [None] * 18
    assert [row.shape.name for row in rows[::2]] == ["4 tokens", "8 tokens", "1 experts", "4 experts", *["tiny"] * 5]
    assert [row.skew for row in rows[::2]][3:] == ["equal", "equal", "lognormal", "zipf", "alternate_empty", "one_hot"]
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert "tiny, one_hot, bfloat16, bf16: " in capsys.readouterr().out


def test_an_earlier_run_is_drawn_beside_the_limits_of_its_device(tmp_path: Path) -> None:
    results, picture = tmp_path / "rows.json", tmp_path / "rows.png"
    rows = [
        Row(shape, "equal", 0, "bfloat16", "bfloat16", "bf16", "cuda", milliseconds=1.0, tflops=500.0)
        for shape in (*scaling.SWEEPS["tokens"], SHAPES["dsv3 up"])
    ]
    Record("2030-01-01T00:00:00+00:00", "NVIDIA H200", {"jax": "0.0"}, {"seed": 0}, rows).write(results)

    assert scaling.main(["--load", str(results), "--plot", str(picture)]) == 0

    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_wrong_arguments_end_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    message = "argument --sweeps: invalid choice: 'features'"
    assert_ends_in_one_line(scaling.main, "python3 -m benchmarks.scaling", ["--sweeps", "features"], message, capsys)
