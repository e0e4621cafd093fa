"""The Python of Markdown pages, which runs as it is printed."""

import re
from pathlib import Path
from typing import Any

_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def blocks(page: Path) -> list[str]:
    """The page's blocks of Python, each on the lines where it stands, for tracebacks."""
    text = page.read_text()
    return ["\n" * text.count("\n", 0, block.start(1)) + block[1] for block in _BLOCK.finditer(text)]


def run(page: Path) -> dict[str, Any]:
    """Runs all blocks from top to bottom in one namespace, and returns it."""
    names: dict[str, Any] = {"__name__": page.stem}
    for block in blocks(page):
        exec(compile(block, str(page), "exec"), names)
    return names
