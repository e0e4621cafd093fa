"""The guide's Python runs as it is printed, what it promises about the code is so, and its links lead somewhere."""

import functools
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from sybil import Document
from sybil.parsers.markdown import PythonCodeBlockParser

from tests.meshes import need_devices

pytestmark = pytest.mark.docs

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))
REFERENCE = sorted((ROOT / "docs" / "reference").glob("*.md"))
LINKED = [ROOT / "README.md", ROOT / "benchmarks" / "README.md", *PAGES, *REFERENCE]
URLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]

#: Number of devices that a page needs.
DEVICES = {"parallelism": 4}


@functools.cache
def run(page: Path) -> dict[str, Any]:
    """Runs the blocks of a page from top to bottom, and returns the names that it has defined in the end."""
    need_devices(DEVICES.get(page.stem, 1))
    document = Document.parse(str(page), PythonCodeBlockParser())
    for block in document:
        block.evaluate()
    return document.namespace


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda page: page.stem)
def test_every_page_runs(page: Path) -> None:
    assert run(page)


def test_each_step_of_the_migration_runs_and_only_the_recipe_changes_the_numbers() -> None:
    names = run(ROOT / "docs" / "migration.md")
    layers = names["parameters_of_layers"](names["params"])
    results = []
    for program, params in zip(migrated(), [names["params"]] * 3 + [layers], strict=True):
        step = dict(names)
        exec(program, step)
        model = step["Experts"](num_experts=4, hidden_features=48)
        results.append(jax.tree.leaves(jax.jit(names["output_and_gradients"], static_argnums=0)(model, params)))

    existing, ragged_dot, recipe, layer = results
    assert largest_difference(ragged_dot, existing) < 1e-2
    assert 1e-3 < largest_difference(recipe, ragged_dot) < 0.1
    assert largest_difference(layer, recipe) == 0


def migrated() -> Iterator[str]:
    """The experts of the page on migration as they were, and after each of its changes."""
    page = (ROOT / "docs" / "migration.md").read_text()
    (program,) = re.findall(r"^<!-- migration: existing -->\n```python\n(.*?)\n```$", page, re.DOTALL | re.MULTILINE)
    yield program
    for change in re.findall(r"^```diff\n(.*?)^```$", page, re.DOTALL | re.MULTILINE):
        old, new = ("\n".join(line[1:] for line in change.splitlines() if line[0] == sign) for sign in "-+")
        assert program.count(old) == 1
        program = program.replace(old, new)
        yield program


def largest_difference(actual: list[jax.Array], expected: list[jax.Array]) -> float:
    """The largest error of an array relative to its norm."""
    return max(float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b)) for a, b in zip(actual, expected, strict=True))


def test_links_lead_somewhere() -> None:
    for page in LINKED:
        for link in links(page):
            target, _, anchor = link.partition("#")
            file = page if not target else linked_file(target, page)
            if file is not None:
                assert file.exists(), f"{page}: {link}"
                assert not anchor or anchor in anchors(file), f"{page}: {link}"


def test_links_of_the_readme_work_where_there_is_no_repository() -> None:
    assert all(link.startswith("https://") for link in links(ROOT / "README.md"))


def test_pictures_have_texts_tables_end_and_code_fits_the_page() -> None:
    for page in [*LINKED, ROOT / "CHANGELOG.md"]:
        # Markdown takes a line right below a row for another row.
        assert not re.search(r"^ *\|.*\n *[^|\s]", page.read_text(), re.MULTILINE), page
    for page in LINKED:
        text = page.read_text()
        assert all(len(words.split()) > 5 for words in re.findall(r"!\[([^\]]*)\]\(", text)), page
        blocks = re.findall(r"^```.*?^```$", text, re.DOTALL | re.MULTILINE)
        assert not [line for block in blocks for line in block.splitlines() if len(line) > 88], page


def links(page: Path) -> list[str]:
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    return re.findall(r"\]\(([^)]+)\)", text)


def linked_file(target: str, page: Path) -> Path | None:
    """Returns the target of a link if it is in the repository: by a path, on the project's site or at its host."""
    site = URLS["Documentation"]
    if target.startswith(site):
        name = target.removeprefix(site).strip("/")
        files = [ROOT / "docs" / f"{name}.md", ROOT / "docs" / f"{name}.py", ROOT / name / "README.md"]
        return next((file for file in files if file.exists()), files[0])
    for host in (f"{URLS['Repository']}/blob/main/", f"{URLS['Repository']}/raw/main/"):
        if target.startswith(host):
            return ROOT / target.removeprefix(host)
    return None if "://" in target else page.parent / target


def anchors(page: Path) -> set[str]:
    """Returns the anchors of a page: its headings, as GitHub writes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
