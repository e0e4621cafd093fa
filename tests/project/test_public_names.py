"""`dir` and `help` show what the library offers, and nothing else."""

import importlib
import importlib.util
import pydoc

import pytest

import jax_grouped as jg
from tests.project.public_names import public_names


def names_below(prefix: str) -> set[str]:
    return {name.removeprefix(f"{prefix}.") for name in public_names() if name.rpartition(".")[0] == prefix}


def test_dir_shows_the_public_names_and_only_those() -> None:
    assert set(dir(jg)) == names_below("jg") | {"linen", "nnx", "__version__"}
    assert all(hasattr(jg, name) for name in dir(jg))


def test_dir_leaves_out_layers_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", {}.get)
    assert {"linen", "nnx"}.isdisjoint(dir(jg))


def test_modules_that_dir_does_not_show_can_be_imported() -> None:
    assert importlib.import_module("jax_grouped.ops.dense").grouped_dense is jg.grouped_dense
    assert jg.kernels.extension is importlib.import_module("jax_grouped.kernels.extension")


def test_dir_and_help_of_a_module_show_its_names() -> None:
    for name, module in (("jg.moe", jg.moe), ("jg.linen", jg.linen), ("jg.nnx", jg.nnx)):
        text = pydoc.plain(pydoc.render_doc(module))

        assert set(dir(module)) == set(module.__all__) == names_below(name)
        assert all(public in text for public in names_below(name))
