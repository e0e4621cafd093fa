"""Everything that the library offers by name."""

import ast
import inspect
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import jax_grouped as jg


def public_names() -> dict[str, Any]:
    """Returns the objects behind the public names of `jax_grouped` and its modules, such as `jg.linen.GroupedDense`."""
    names = {f"jg.{name}": getattr(jg, name) for name in jg.__all__}
    for module in (jg.moe, jg.linen, jg.nnx):
        prefix = module.__name__.replace("jax_grouped", "jg")
        names |= {f"{prefix}.{name}": getattr(module, name) for name in _names_of(module)}
    return names


def _names_of(module: ModuleType) -> Iterator[str]:
    """Yields the names that a module defines, and those that it imports as themselves."""
    for node in ast.parse(inspect.getsource(module)).body:
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) if not name.startswith("_"):
                yield name
            case ast.ImportFrom(names=aliases):
                yield from (alias.name for alias in aliases if alias.asname == alias.name)
            case ast.Assign(targets=[ast.Name(id=name)]) if name.isupper():
                yield name
