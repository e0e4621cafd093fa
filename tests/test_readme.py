"""The README's Python runs as it is printed, from top to bottom."""

import pathlib

import pytest

from tests import markdown

pytestmark = pytest.mark.slow

README = pathlib.Path(__file__).parents[1] / "README.md"


def test_the_examples_run() -> None:
    names = markdown.run(README)
    assert names["y"].shape == names["tokens"].shape == (1024, 256)
    assert int(names["metrics"].expert_load.sum()) == 2 * 1024
    assert names["params"]["params"]["kernel"].shape == (8, 256, 512)
    assert names["gradient"].shape == names["experts"].shape
