"""Notebooks of the gallery as files to download. Its sources are Python in the percent format of jupytext."""

import posixpath
import re
from pathlib import PurePosixPath
from typing import Any

import jupytext
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

#: A link of Markdown from a notebook to a page of the site: its path, and its anchor.
PAGE_LINK = re.compile(r"(?<=\]\()([\w./-]+\.md)(?=#|\))")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds a notebook without outputs for each page of the gallery. Its links lead to the site."""
    for page in [file for file in files if is_notebook(file)]:
        notebook = jupytext.read(page.abs_src_path)
        notebook.metadata.kernelspec = {
            "display_name": "Python 3",
            "language": "python",
            "name": "python3",
        }
        for cell in notebook.cells:
            if cell.cell_type == "markdown":
                cell.source = PAGE_LINK.sub(
                    lambda link: address(link[1], config), cell.source
                )
        files.append(
            File.generated(
                config, name(page), content=jupytext.writes(notebook, fmt="ipynb")
            )
        )
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Adds the link to the notebook below the title."""
    if not is_notebook(page.file):
        return markdown
    link = f"[Download the notebook]({PurePosixPath(name(page.file)).name})"
    return re.sub(r"^# .*$", rf"\g<0>\n\n{link}", markdown, count=1, flags=re.MULTILINE)


def is_notebook(file: File) -> bool:
    """Tells if a file is a page of the gallery."""
    return PurePosixPath(file.src_uri).match("gallery/*.py")


def name(page: File) -> str:
    """Returns the place of a page's notebook on the site."""
    return str(PurePosixPath(page.src_uri).with_suffix(".ipynb"))


def address(path: str, config: MkDocsConfig) -> str:
    """Returns the address of a page on the site, from its path relative to a notebook."""
    path = posixpath.normpath(posixpath.join("docs/gallery", path)).removeprefix(
        "docs/"
    )
    return (
        f"{config.site_url}{path.removesuffix('.md').removesuffix('README')}".rstrip(
            "/"
        )
        + "/"
    )
