"""The README's Python runs as it is printed, from top to bottom."""

import pathlib
import re
from typing import Any

README = pathlib.Path(__file__).parents[1] / "README.md"


def test_the_examples_run() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", README.read_text(), re.DOTALL | re.MULTILINE)
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, str(README), "exec"), names)
    assert names["y"].shape == (1024, 512)
    assert not names["y"][974:].any(), "padding rows must be zero"
    assert names["params"]["params"]["GroupedDense_0"]["kernel"].shape == (8, 256, 1024)
    assert names["gradient"].shape == names["experts"].shape
