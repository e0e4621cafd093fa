"""The text that `train_moe` reads, its loss curve, and its pictures."""

from pathlib import Path

import numpy as np
import pytest

from jax_grouped.examples import text_data
from jax_grouped.examples.loss_curve import Losses, draw, draw_load, format_losses, read_losses
from jax_grouped.examples.settings import UsageError

ROWS = [Losses(0, None, 6.0), Losses(1, 5.5, None), Losses(2, 5.0, 4.5)]


def test_windows_depend_on_seed_and_step_alone_and_reach_the_ends_of_the_text() -> None:
    data = np.arange(10_000, dtype=np.uint16)

    windows = text_data.random_windows(data, sequence=64, batch=8, seed=1, step=2)

    assert np.array_equal(windows - windows[:, :1], np.tile(np.arange(65), (8, 1)))
    assert np.array_equal(windows, text_data.random_windows(data, 64, 8, 1, 2))
    for seed, step in ((1, 3), (2, 2)):
        assert not np.array_equal(windows, text_data.random_windows(data, 64, 8, seed, step))
    random = text_data.random_windows(data[:34], sequence=32, batch=64, seed=0, step=0)
    assert sorted(set(random[:, 0])) == [0, 1]
    assert text_data.even_windows(data[:34], sequence=32, count=3)[:, 0].tolist() == [0, 0, 1]


def test_a_folder_is_read_in_one_order_without_hidden_and_binary_files(tmp_path: Path) -> None:
    for name, content in {
        "a.txt": b"a" * 100,
        "b/c.md": b"c" * 100,
        "binary": b"\0" * 100,
        ".hidden": b"h" * 100,
        ".git/config": b"g" * 100,
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)

    corpus = text_data.read_corpus(str(tmp_path), sequence=8)

    assert bytes(corpus.train) + bytes(corpus.held_out) in (b"a" * 100 + b"c" * 100, b"c" * 100 + b"a" * 100)
    assert len(corpus.held_out) == 10
    assert corpus.sha256 == text_data.read_corpus(str(tmp_path), sequence=8).sha256


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
