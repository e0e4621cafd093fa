"""Public names of the library: `dir` and `help`, docstrings with examples that run, and the pages of the guide."""

import ast
import dataclasses
import importlib
import importlib.util
import inspect
import pydoc
import re
import sys
import textwrap
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import jax_grouped as jg

DOCS = Path(__file__).parents[2] / "docs"


def public_names() -> dict[str, Any]:
    """Returns the objects behind the public names of `jax_grouped` and its modules, such as `jg.linen.GroupedDense`."""
    names = {f"jg.{name}": getattr(jg, name) for name in jg.__all__}
    for module in (jg.moe, jg.linen, jg.nnx):
        prefix = module.__name__.replace("jax_grouped", "jg")
        names |= {f"{prefix}.{name}": getattr(module, name) for name in defined_names(module)}
    return names


def defined_names(module: types.ModuleType) -> Iterator[str]:
    """Yields a module's `__all__` or, without one, the names that it defines or imports as themselves."""
    if hasattr(module, "__all__"):
        yield from module.__all__
        return
    for node in ast.parse(inspect.getsource(module)).body:
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) if not name.startswith("_"):
                yield name
            case ast.ImportFrom(names=aliases):
                yield from (alias.name for alias in aliases if alias.asname == alias.name)
            case ast.Assign(targets=[ast.Name(id=name)]) if name.isupper():
                yield name


#: Names of values that cannot have a docstring.
CONSTANTS = {
    "jg.CHECKPOINT_NAMES",
    "jg.CUSTOM_CALL_TARGETS",
    "jg.OUTPUT_NAME",
    "jg.Recipe",
    "jg.linen.KERNEL_CACHE",
    "jg.linen.LORA",
    "jg.linen.MOE_METRICS",
    "jg.linen.ROUTER_STATE",
    "jg.nnx.TRAINED",
}

DOCUMENTED = {name: value for name, value in public_names().items() if name not in CONSTANTS}


def section(name: str, title: str) -> str:
    """Returns the section of a docstring below a title, without its indentation; empty if there is none."""
    doc = inspect.getdoc(DOCUMENTED[name]) or ""
    (*_, text) = re.findall(rf"^{title}:\n((?:(?: {{4}}.*)?\n)+)", doc + "\n", re.MULTILINE) or [""]
    return textwrap.dedent(text)


@pytest.mark.docs
@pytest.mark.parametrize("name", DOCUMENTED)
def test_the_example_runs(name: str) -> None:
    example = section(name, "Example")
    assert example.strip(), f"the docstring of {name} has no section Example"
    assert "assert " in example
    assert re.search(rf"\b{name.rsplit('.', 1)[-1]}\b", example), f"the example of {name} does not use it"
    names = {"jax": jax, "jnp": jnp, "jg": jg} | ({"nnx": nnx} if name.startswith("jg.nnx.") else {})
    exec(compile(example, f"example of {name}", "exec"), names)


def test_what_is_taken_is_explained() -> None:
    for name, value in DOCUMENTED.items():
        explained = items(section(name, "Args")) | items(section(name, "Attributes"))
        assert parameters(value) <= explained, name


def items(text: str) -> set[str]:
    """The names that the lines of a section explain."""
    lines = re.findall(r"^([*\w, ]+): ", text, re.MULTILINE)
    return {item.strip("* ") for line in lines for item in line.split(",")}


def parameters(value: Any) -> set[str]:
    """Returns the parameters of a function or the fields of a class."""
    if isinstance(value, types.ModuleType | jg.config.__class__):
        return set()
    if dataclasses.is_dataclass(value):
        return {field.name for field in dataclasses.fields(value)} - {"parent", "name"}
    if isinstance(value, type) and not issubclass(value, nnx.Module):
        return set(getattr(value, "_fields", ()))
    function = value.__init__ if isinstance(value, type) else value
    return set(inspect.signature(function).parameters) - {"self"}


def test_what_functions_return_and_raise_is_explained() -> None:
    for name, value in DOCUMENTED.items():
        if inspect.isfunction(value):
            assert section(name, "Returns") or inspect.signature(value).return_annotation == "None", name
            raises = re.search(r"\b(raise|_?(check|canonical)\w*\()", inspect.getsource(value).rpartition('"""')[2])
            assert items(section(name, "Raises")) or not raises, name


def names_below(prefix: str) -> set[str]:
    return {name.removeprefix(f"{prefix}.") for name in public_names() if name.rpartition(".")[0] == prefix}


def test_dir_and_help_show_the_public_names_and_only_those(monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(dir(jg)) == names_below("jg") | {"linen", "nnx", "__version__"}
    assert all(hasattr(jg, name) for name in dir(jg))
    assert jg.kernels.primitive is importlib.import_module("jax_grouped.kernels.primitive")
    for name, module in (("jg.moe", jg.moe), ("jg.linen", jg.linen), ("jg.nnx", jg.nnx)):
        text = pydoc.plain(pydoc.render_doc(module))

        assert set(dir(module)) == set(module.__all__) == names_below(name)
        assert all(public in text for public in names_below(name))
    # Layers that cannot be imported are left out.
    monkeypatch.setattr(importlib.util, "find_spec", {}.get)
    assert {"linen", "nnx"}.isdisjoint(dir(jg))


def test_help_begins_with_what_is_ours_on_two_screens_and_types_resolve() -> None:
    for name, value in DOCUMENTED.items():
        if not isinstance(value, type | types.FunctionType):
            continue
        lines = lines_of_ours(value)
        # Before Python 3.13, a signature is one line.
        parts = lines if sys.version_info >= (3, 13) else [part for line in lines for part in line.split(", ")]

        assert len(lines) <= 120, f"{name}: {len(lines)}"
        assert [part for part in parts if len(part) > 120 and "parent: Union" not in part] == [], name
        for annotated in (value, *vars(value).values()):
            if isinstance(annotated, type | types.FunctionType):
                typing.get_type_hints(annotated, localns={"optax": optax})


def lines_of_ours(value: Any) -> list[str]:
    """Lines of `help` before inherited ones, without data: signatures, and docstrings of the class and its methods."""
    if isinstance(value, type):
        for name, method in list(vars(value).items()):
            # `nnx.tabulate` leaves copies of inherited methods in a class.
            if inspect.isfunction(method) and any(vars(base).get(name) is method for base in value.__mro__[1:]):
                delattr(value, name)
    text = pydoc.plain(pydoc.render_doc(value))
    if dataclasses.is_dataclass(value) or hasattr(value, "_fields"):
        # Not ours are generated methods, and defaults of fields that are functions.
        generated = {f"__{name}__" for name in ("init", "new", "eq", "hash", "repr", "replace", "setattr", "delattr")}
        for name in generated | {*getattr(value, "__dataclass_fields__", ())}:
            text = re.sub(rf"^ \|  {name}( =|\().*\n( \|($|   .*|  \).*)\n)*", "", text, flags=re.MULTILINE)
    return re.split(r"\n \|  -+\n \|  (?:Data |.* inherited from )", text)[0].splitlines()


def test_the_guide_mentions_every_public_name() -> None:
    guide = "\n".join(page.read_text() for page in DOCS.glob("*.md"))
    assert not [name for name in public_names() if not re.search(rf"{re.escape(name)}\b", guide)]


def test_the_reference_has_every_public_name_once() -> None:
    text = "\n".join(page.read_text() for page in (DOCS / "reference").glob("*.md"))
    # The class of `jg.config` is documented where it is defined.
    names = re.findall(r"^::: jax_grouped\.(?!core\.)(\S+)$", text, re.MULTILINE)
    assert sorted(names) == sorted([*(name.removeprefix("jg.") for name in public_names()), "linen", "nnx"])
