"""The Python of Markdown pages, which runs as it is printed."""

from pathlib import Path
from typing import Any

from sybil import Document
from sybil.parsers.markdown import PythonCodeBlockParser


def run(page: Path) -> dict[str, Any]:
    """Runs all blocks from top to bottom in one namespace, and returns it."""
    document = Document.parse(str(page), PythonCodeBlockParser())
    for block in document:
        block.evaluate()
    return document.namespace
