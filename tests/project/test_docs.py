"""The guide's Python runs as it is printed, what it promises about the code is so, and its links lead somewhere."""

import difflib
import functools
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from tests.meshes import need_devices
from tests.project import markdown
from tests.project.public_names import public_names

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))
REFERENCE = sorted((ROOT / "docs" / "reference").glob("*.md"))
LINKED = [ROOT / "README.md", ROOT / "benchmarks" / "README.md", *PAGES, *REFERENCE]
URLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]

#: Number of devices that a page needs.
DEVICES = {"parallelism": 4}


@functools.cache
def ran(name: str) -> dict[str, Any]:
    """Returns the names that a page has defined in the end."""
    need_devices(DEVICES.get(name, 1))
    return markdown.run(ROOT / "docs" / f"{name}.md")


@pytest.mark.parametrize("name", [page.stem for page in PAGES])
def test_every_page_runs(name: str) -> None:
    assert ran(name)


def test_the_port_has_fewer_than_ten_changed_lines_and_the_same_numbers() -> None:
    before, after = marked("getting-started", "port: before"), marked("getting-started", "port: after")
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    hunks = [(i2 - i1, j2 - j1) for tag, i1, i2, j1, j2 in matcher.get_opcodes() if tag != "equal"]
    removed, added = (sum(lines) for lines in zip(*hunks, strict=True))
    changed = sum(map(max, hunks))
    names = ran("getting-started")

    assert changed < 10
    promise = f"{changed} changed lines, a replaced line counted once: {added} added, {removed} removed"
    assert promise in " ".join(text("getting-started").split())
    assert "nn.Dense(" in "".join(before)
    assert "GroupedDense(" not in "".join(before)
    assert any(line.lstrip().startswith("for expert in") for line in before)
    looped, ported = names["looped_gradients"], names["ported_gradients"]
    for layer in ("up", "down"):
        for parameter in ("kernel", "bias"):
            expected = jnp.stack([looped[f"{layer}_{expert}"][parameter] for expert in range(4)])
            assert jnp.allclose(ported[layer][parameter], expected, rtol=1e-4, atol=1e-6)
            assert bool(jnp.all(jnp.any(expected, axis=tuple(range(1, expected.ndim)))))
    assert jnp.allclose(names["ported_y"], names["looped_y"], rtol=1e-4, atol=1e-5)


def test_each_step_of_the_migration_runs_and_only_the_recipe_changes_the_numbers() -> None:
    names = ran("migration")
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
    program = "\n".join(marked("migration", "migration: existing"))
    yield program
    for change in re.findall(r"^```diff\n(.*?)^```$", text("migration"), re.DOTALL | re.MULTILINE):
        old, new = ("\n".join(line[1:] for line in change.splitlines() if line[0] == sign) for sign in "-+")
        assert program.count(old) == 1
        program = program.replace(old, new)
        yield program


def largest_difference(actual: list[jax.Array], expected: list[jax.Array]) -> float:
    """The largest error of an array relative to its norm."""
    return max(float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b)) for a, b in zip(actual, expected, strict=True))


def text(name: str) -> str:
    return (ROOT / "docs" / f"{name}.md").read_text()


def marked(name: str, mark: str) -> list[str]:
    """The lines of the block of Python below a comment in a page."""
    pattern = rf"^<!-- {mark} -->\n```python\n(.*?)^```$"
    (block,) = re.findall(pattern, text(name), re.DOTALL | re.MULTILINE)
    return block.splitlines()


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


def links(page: Path) -> list[str]:
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    return re.findall(r"\]\(([^)]+)\)", text)


def linked_file(target: str, page: Path) -> Path | None:
    """Returns the target of a link if it is in the repository: by a path, on the project's site or at its host."""
    site, host = URLS["Documentation"], f"{URLS['Repository']}/blob/main/"
    if target.startswith(site):
        name = target.removeprefix(site).strip("/")
        files = [ROOT / "docs" / f"{name}.md", ROOT / name / "README.md"]
        return next((file for file in files if file.exists()), files[0])
    if target.startswith(host):
        return ROOT / target.removeprefix(host)
    return None if "://" in target else page.parent / target


def anchors(page: Path) -> set[str]:
    """Returns the anchors of a page: its headings, as GitHub writes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_guide_mentions_every_public_name() -> None:
    guide = "\n".join(page.read_text() for page in PAGES)
    assert not [name for name in public_names() if not re.search(rf"{re.escape(name)}\b", guide)]


def test_the_reference_has_every_public_name_once() -> None:
    text = "\n".join(page.read_text() for page in REFERENCE)
    # The class of `jg.config` is documented where it is defined.
    names = re.findall(r"^::: jax_grouped\.(?!core\.)(\S+)$", text, re.MULTILINE)
    assert sorted(names) == sorted([*(name.removeprefix("jg.") for name in public_names()), "linen", "nnx"])
