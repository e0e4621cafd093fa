"""The README's Python runs as it is printed, from top to bottom, and its versions are the package's."""

import pathlib
import re
import tomllib

import pytest

from tests.project import markdown

pytestmark = pytest.mark.slow

ROOT = pathlib.Path(__file__).parents[2]
README = ROOT / "README.md"


def test_the_examples_run() -> None:
    names = markdown.run(README)
    assert names["y"].shape == names["tokens"].shape == (1024, 256)
    assert int(names["metrics"].expert_load.sum()) == 2 * 1024
    assert names["params"]["params"]["kernel"].shape == (8, 256, 512)
    assert names["gradient"].shape == names["experts"].shape


def test_its_versions_of_python_are_those_of_the_package_which_has_no_upper_bound() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (tested,) = re.findall(r"^\| Python \| ([^;|]+?) *[;|]", README.read_text(), re.MULTILINE)
    classified = [word.rpartition(" ")[2] for word in project["classifiers"] if re.search(r":: 3\.\d+$", word)]
    assert tested.split(", ") == classified
    assert project["requires-python"] == f">={classified[0]}"
