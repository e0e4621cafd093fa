"""The loss curve of a run, and the pictures of it and of the load of the experts."""

from pathlib import Path

import pytest

from jax_grouped.examples.loss_curve import Losses, draw, draw_load, format_losses, read_losses
from jax_grouped.examples.settings import UsageError

ROWS = [Losses(0, None, 6.0), Losses(1, 5.5, None), Losses(2, 5.0, 4.5)]


def test_rows_are_read_as_they_were_written(tmp_path: Path) -> None:
    (tmp_path / "loss.csv").write_text(format_losses(ROWS))

    assert read_losses(tmp_path / "loss.csv") == ROWS


def test_a_file_that_is_no_curve_is_reported(tmp_path: Path) -> None:
    path, header = tmp_path / "loss.csv", format_losses([])
    for content in ("", "something,else\n1,2\n", f"{header}1,\udcff,\n", f"{header}2,five,\n", f"{header}2,4.5\n"):
        path.write_text(content, errors="surrogateescape")

        with pytest.raises(UsageError, match=f"{path} is not a loss curve of this program"):
            read_losses(path)


def test_the_picture_has_a_line_of_the_training_loss_and_dots_of_the_held_out_loss() -> None:
    (axes,) = draw(ROWS, "a model").axes

    assert axes.get_title() == "a model"
    train, held_out = axes.lines
    assert [list(line.get_xdata()) for line in (train, held_out)] == [[1, 2], [0, 2]]
    assert [list(line.get_ydata()) for line in (train, held_out)] == [[5.5, 5.0], [6.0, 4.5]]
    assert held_out.get_linestyle() == "None", "evaluations are steps apart"


def test_the_picture_of_the_load_has_a_panel_per_block_and_few_ticks() -> None:
    rows = [{"step": step, "expert_load": [[0.25, 0.75], [0.5, 0.5]]} for step in range(1, 31)]

    first, second, colorbar = draw_load(rows, "a model").axes

    assert [axes.images[0].get_array()[:, 0].tolist() for axes in (first, second)] == [[0.5, 1.5], [1, 1]]
    assert [label.get_text() for label in second.get_xticklabels()] == [str(step) for step in range(1, 31, 3)]
    assert colorbar.get_ylabel() == "load / even share"
