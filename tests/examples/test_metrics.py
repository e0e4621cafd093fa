"""The metrics of a run: their file, also of a run that diverges, and the picture of the load."""

import math
from pathlib import Path

from jax_grouped.examples.metrics import Metrics, draw_load, line_of, read_metrics

ROWS = [Metrics(step, 0.5, [1.25], [[0.25, 0.75]], [0.0], [3.0]) for step in range(1, 31)]


def test_lines_are_read_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(map(line_of, ROWS)) + line_of(ROWS[0])[:9])

    assert read_metrics(path) == ROWS
    assert read_metrics(path, last_step=2) == ROWS[:2]


def test_what_is_no_number_is_null_and_stays_so(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(line_of(ROWS[0]._replace(gradient_norm=math.nan, amax=[math.inf])))

    (read,) = read_metrics(path)

    assert read == ROWS[0]._replace(gradient_norm=None, amax=[None])
    assert line_of(read) == path.read_text()


def test_the_picture_has_a_panel_per_block_and_few_ticks() -> None:
    axes, colorbar = draw_load(ROWS, "a model").axes

    (image,) = axes.images
    assert image.get_array().shape == (2, 30)
    assert image.get_array()[:, 0].tolist() == [0.5, 1.5], "multiples of an even share"
    assert [label.get_text() for label in axes.get_xticklabels()] == [str(step) for step in range(1, 31, 3)]
    assert colorbar.get_ylabel() == "load / even share"
