"""The loss curve of a run: its file, whatever has happened to it, and its picture."""

import math
from pathlib import Path

import pytest

from jax_grouped.examples.loss_curve import HEADER, Losses, draw, lines_of, read_losses
from jax_grouped.examples.settings import UsageError

ROWS = [Losses(0, None, 6.0), Losses(1, 5.5, None), Losses(2, 5.0, 4.5)]


def test_rows_are_read_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "loss.csv"
    path.write_text(HEADER + lines_of(ROWS))

    assert read_losses(path) == ROWS
    assert read_losses(path, last_step=1) == ROWS[:2]


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


def test_the_picture_has_a_title_and_no_line_where_nothing_was_measured() -> None:
    rows = [Losses(0, None, 6.0), *(Losses(step, 5.0, None) for step in (1, 2, 5, 6)), Losses(7, 4.0, 4.5)]

    (axes,) = draw(rows, "a model").axes

    assert axes.get_title() == "a model"
    train, held_out = axes.lines
    drawn = dict(zip(*train.get_data(), strict=True))
    assert [step for step, loss in drawn.items() if not math.isnan(loss)] == [1, 2, 5, 6, 7]
    assert [step for step, loss in drawn.items() if math.isnan(loss)] == [0, 3, 4], "the line ends before the gap"
    assert list(held_out.get_xdata()) == [0, 7]
    assert held_out.get_linestyle() == "None", "evaluations are steps apart"
