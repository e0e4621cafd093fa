"""Every public name says what it takes, returns and raises, and has an example that runs."""

import ast
import dataclasses
import inspect
import re
import textwrap
import types
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jax_grouped as jg
from tests.project.public_names import public_names

pytestmark = pytest.mark.slow

PACKAGE = Path(jg.__file__).parent

#: Names of values that cannot have a docstring, but for a comment where they are defined.
CONSTANTS = {
    "jg.CHECKPOINT_NAMES",
    "jg.CUSTOM_CALL_TARGETS",
    "jg.OUTPUT_NAME",
    "jg.Recipe",
    "jg.linen.KERNEL_CACHE",
    "jg.linen.ROUTER_STATE",
    "jg.nnx.TRAINED",
}

DOCUMENTED = {name: value for name, value in public_names().items() if name not in CONSTANTS}


def section(name: str, title: str) -> str:
    """Returns the section of a docstring below a title, without its indentation; empty if there is none."""
    doc = inspect.getdoc(DOCUMENTED[name]) or ""
    (*_, text) = re.findall(rf"^{title}:\n((?:(?: {{4}}.*)?\n)+)", doc + "\n", re.MULTILINE) or [""]
    return textwrap.dedent(text)


@pytest.mark.parametrize("name", DOCUMENTED)
def test_the_example_runs(name: str) -> None:
    example = section(name, "Example")
    assert example.strip(), f"the docstring of {name} has no section Example"
    assert "assert " in example
    assert re.search(rf"\b{name.rsplit('.', 1)[-1]}\b", example), f"the example of {name} does not use it"
    exec(compile(example, f"example of {name}", "exec"), {"jax": jax, "jnp": jnp, "jg": jg})


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
            source = ast.parse(textwrap.dedent(inspect.getsource(value)))
            raises = any(isinstance(node, ast.Raise) or _is_check(node) for node in ast.walk(source))
            assert section(name, "Returns"), name
            assert items(section(name, "Raises")) or not raises, name


def _is_check(node: ast.AST) -> bool:
    """Tells whether a call is to a function that raises unless arguments fit."""
    if not isinstance(node, ast.Call):
        return False
    called = ast.unparse(node.func).rsplit(".", 1)[-1].lstrip("_")
    return called.startswith(("check", "canonical"))


def test_constants_have_a_comment() -> None:
    sources = "\n".join(path.read_text() for path in PACKAGE.rglob("*.py"))
    for name in CONSTANTS:
        assert name in public_names()
        assert re.search(rf"^(#: .*\n)+{name.rsplit('.', 1)[-1]} = ", sources, re.MULTILINE), name
