"""Folders of the library import only from the floors below them."""

import ast
import itertools
from pathlib import Path

import jax_grouped as jg

#: From the ground up: each may import from those before it, and from itself.
FLOORS = ("core", "fp8", "kernels", "ops", "moe", "layers", "adapters", "examples")
#: Modules and folders of another name than their floor. `__init__` and `__main__` may import anything.
MODULES = dict.fromkeys(("_layers", "linen", "nnx"), "layers")

ROOT = Path(jg.__file__).parent
SOURCES = sorted(path.relative_to(ROOT) for path in ROOT.rglob("*.py") if path.parent != ROOT or path.stem in MODULES)


def floor(parts: tuple[str, ...]) -> str | None:
    name = parts[0].removesuffix(".py")
    return MODULES.get(name, name if name in FLOORS else None)


def imported(source: Path) -> set[str]:
    """Returns the floors that a module imports from, also inside functions."""
    modules = []
    for node in ast.walk(ast.parse((ROOT / source).read_text())):
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == "jax_grouped":
            modules += [f"jax_grouped.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules.append(node.module or "")
    parts = (module.split(".")[1:] for module in modules if module.startswith("jax_grouped."))
    return {name for name in map(floor, map(tuple, filter(None, parts))) if name}


def test_imports_point_downwards() -> None:
    for source in SOURCES:
        own = floor(source.parts)
        assert own is not None, f"{source} belongs to no floor"
        allowed = set(itertools.takewhile(lambda name, own=own: name != own, FLOORS)) | {own}
        assert imported(source) <= allowed, source
