"""Pages of the site from outside of `docs/`, links between the repository, the guide and the API reference.

Addresses are those of pyproject.toml.
"""

import posixpath
import re
import tomllib
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element, SubElement

from markdown import Extension, Markdown
from markdown.inlinepatterns import InlineProcessor
from markdown.util import AtomicString
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
URLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
#: Files outside of `docs/` that the site has, at their places in the repository.
INCLUDED = ["README.md", "CHANGELOG.md", "benchmarks/README.md", "benchmarks/results/*"]
#: A link of Markdown to a file: its path, and the rest.
FILE_LINK = re.compile(r"(?<=\]\()([\w./-]+)((?:#[\w-]+)?\))")
#: A diagram, which is put into the page, so that it has the colours of its text.
DIAGRAM = re.compile(r"!\[([^\]]*)\]\((pictures/\w+\.svg)\)")
#: A picture that has a dark form beside it.
PICTURE = re.compile(r"(!\[[^\]]*\]\([\w./-]+)(\.svg\))")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Takes the addresses of the site and the repository from the package's metadata."""
    config.site_url, config.repo_url = URLS["Documentation"], URLS["Repository"]
    config.markdown_extensions.append(_PublicNames())
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the files from outside of `docs/`."""
    for path in (path for pattern in INCLUDED for path in sorted(ROOT.glob(pattern))):
        files.append(
            File.generated(
                config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)
            )
        )
    return files


def on_page_markdown(markdown: str, page: Page, files: Files, **_: Any) -> str:
    """Makes the repository's relative links, and the README's absolute ones, lead to the site's pages.

    Links to files that the site does not have lead to the repository. MkDocs reports those to files that nobody has.
    Pictures follow the theme.
    """
    pages = {file.url: file.src_uri for file in files.documentation_pages()}
    folder = Path(page.file.abs_src_path).relative_to(ROOT).parent

    def on_site(link: re.Match[str]) -> str:
        path = posixpath.normpath(folder / link[1])
        uri = path.removeprefix("docs/")
        if uri in files.src_uris:
            return (
                posixpath.relpath(uri, posixpath.dirname(page.file.src_uri)) + link[2]
            )
        return (
            f"{URLS['Repository']}/blob/main/{path}{link[2]}"
            if (ROOT / path).exists()
            else link[0]
        )

    absolute = re.escape(URLS["Documentation"]) + r"([\w/-]+/)"
    markdown = markdown.replace(f"{URLS['Repository']}/raw/main/", "")
    markdown = FILE_LINK.sub(
        on_site, re.sub(absolute, lambda link: pages[link[1]], markdown)
    )
    markdown = DIAGRAM.sub(_diagram, markdown)
    return PICTURE.sub(
        lambda part: f"{part[1]}.svg#only-light){part[1]}-dark.svg#only-dark)", markdown
    )


def _diagram(picture: re.Match[str]) -> str:
    label = " ".join(picture[1].split())
    return f'<div class="diagram" role="img" aria-label="{label}">{(ROOT / "docs" / picture[2]).read_text()}</div>'


class _PublicNames(Extension):
    """Links from code such as `jg.ragged_dot` to the API reference."""

    def extendMarkdown(self, md: Markdown) -> None:  # noqa: N802
        """Registers the pattern before that of code."""
        pattern = r"(?<!`)`((?:jg|jax_grouped)\.([A-Za-z][\w.]*\w)[^`]*)`(?!`)"
        md.inlinePatterns.register(_PublicName(pattern, md), "public_names", 195)


class _PublicName(InlineProcessor):
    def handleMatch(self, m: re.Match[str], data: str) -> tuple[Element, int, int]:  # noqa: ARG002, N802
        link = Element("autoref", identifier=f"jax_grouped.{m[2]}", optional="")
        SubElement(link, "code").text = AtomicString(m[1])
        return link, m.start(0), m.end(0)
