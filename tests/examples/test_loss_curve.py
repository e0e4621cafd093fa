"""The loss curve of a run: its file, which survives what happens to it, and its picture."""

import math
from pathlib import Path

import pytest

from jax_grouped.examples.loss_curve import LossCurve, Losses, read_losses
from jax_grouped.examples.settings import UsageError
from tests.examples.programs import file_size_limit

HEADER = "step,train_loss,held_out_loss\n"
ROWS = [Losses(0, None, 6.0), Losses(1, 5.5, None), Losses(2, 5.0, 4.5)]


def a_curve(folder: Path, rows: list[Losses]) -> LossCurve:
    curve = LossCurve(folder)
    curve.rows = rows
    curve.write()
    return curve


def test_rows_on_disk_are_those_in_memory(tmp_path: Path) -> None:
    curve = a_curve(tmp_path, ROWS[:1])

    curve.extend(ROWS[1:])

    assert curve.rows == read_losses(curve.csv_path) == ROWS
    assert read_losses(curve.csv_path, last_step=1) == ROWS[:2]


def test_rows_that_do_not_fit_on_the_disk_leave_the_file_as_it_was(tmp_path: Path) -> None:
    curve = a_curve(tmp_path, ROWS[:2])
    before = curve.csv_path.read_bytes()

    with file_size_limit(len(before) + 5), pytest.raises(OSError, match="File too large"):
        curve.extend(ROWS[2:])

    assert curve.csv_path.read_bytes() == before
    assert curve.rows == ROWS[:2]


def test_a_file_that_cannot_be_replaced_stays(tmp_path: Path) -> None:
    curve = a_curve(tmp_path, ROWS)
    before = curve.csv_path.read_bytes()

    with file_size_limit(len(before) - 5), pytest.raises(OSError, match="File too large"):
        curve.write()

    assert [path.name for path in tmp_path.iterdir()] == ["loss.csv"]
    assert curve.csv_path.read_bytes() == before


def test_half_a_row_at_the_end_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "loss.csv"
    path.write_text(HEADER + "9,5.000000,\n10,4.12")

    assert read_losses(path) == [Losses(9, 5.0, None)]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"step,train_loss",
        b"something,else\n1,2\n",
        HEADER.encode() + b"1,5.0,\n\xff\xfe\0\n",
        HEADER.encode() + b"1,5.0,\n2,five,\n",
        HEADER.encode() + b"1,5.0,\n2,4.5\n3,4.0,\n",
        HEADER.encode() + b"1,5.0,\n1,5.0,\n",
    ],
    ids=["empty", "half a header", "another table", "binary", "no number", "two cells", "a step twice"],
)
def test_a_file_that_is_no_curve_is_reported(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "loss.csv"
    path.write_bytes(content)

    with pytest.raises(UsageError, match=f"{path} is not a loss curve of this program"):
        read_losses(path, last_step=5)


def test_the_picture_has_a_title_and_no_line_where_nothing_was_measured(tmp_path: Path) -> None:
    rows = [Losses(0, None, 6.0), *(Losses(step, 5.0, None) for step in (1, 2, 5, 6)), Losses(7, 4.0, 4.5)]
    curve = a_curve(tmp_path, rows)

    (axes,) = curve.figure("a model").axes

    assert axes.get_title() == "a model"
    train, held_out = axes.lines
    drawn = dict(zip(*train.get_data(), strict=True))
    assert [step for step, loss in drawn.items() if not math.isnan(loss)] == [1, 2, 5, 6, 7]
    assert [step for step, loss in drawn.items() if math.isnan(loss)] == [4], "the line ends before the gap"
    assert list(held_out.get_xdata()) == [0, 7]
    assert held_out.get_linestyle() == "None", "evaluations are steps apart"
