"""`jg.autotune` without a GPU: the call that it wraps, the programs that ask for tuning, and the file of choices."""

import functools
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_grouped as jg
from jax_grouped.kernels import extension
from tests.programs import custom_calls, lowered, struct

X, KERNEL, SIZES = jnp.ones((16, 32)), jnp.ones((2, 32, 16)), jnp.array([10, 4])


@pytest.fixture
def _xla() -> Iterator[None]:
    """Leaves a GPU alone: choices made on it would hold for the tests that follow in this process."""
    with jg.config.override(backend="xla", autotune=False):
        yield


@pytest.mark.usefixtures("_xla")
def test_the_result_is_that_of_the_function() -> None:
    program = jax.jit(jg.ragged_dot, static_argnames="preferred_element_type")
    arguments, options = (X, KERNEL, SIZES), dict(preferred_element_type=jnp.bfloat16)

    y = jg.autotune(program, *arguments, **options)

    assert y.dtype == jnp.bfloat16
    np.testing.assert_array_equal(y, program(*arguments, **options))


@pytest.mark.usefixtures("_xla")
def test_a_function_is_traced_again_to_be_tuned_and_only_then() -> None:
    seen = []

    @jax.jit
    def program(x: jax.Array) -> jax.Array:
        seen.append(jg.config.autotune)
        return jg.ragged_dot(x, KERNEL, SIZES)

    for call in (program, functools.partial(jg.autotune, program)) * 2:
        call(X)

    assert seen == [False, True]


@pytest.mark.usefixtures("_xla")
def test_the_setting_is_as_before_after_an_error() -> None:
    def fail() -> None:
        assert jg.config.autotune
        raise KeyError("of the function")

    with pytest.raises(KeyError, match="of the function"):
        jg.autotune(fail)

    assert not jg.config.autotune


@pytest.mark.parametrize("autotune", [False, True], ids=["not tuned", "tuned"])
@pytest.mark.parametrize("recipe", [None, jg.Float8BlockScaling()], ids=["bfloat16", "block"])
def test_every_product_for_a_gpu_asks_for_tuning_and_the_file(
    autotune: bool, recipe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = []
    monkeypatch.setattr(extension, "keep_tuned_algorithms", lambda: files.append("asked for"))

    def step(x: jax.Array, kernel: jax.Array, sizes: jax.Array) -> Any:
        y, vjp = jax.vjp(lambda x, kernel: jg.grouped_dense(x, kernel, sizes, recipe=recipe), x, kernel)
        return y, vjp(y)

    with jg.config.override(autotune=autotune):
        text = lowered(step, struct((16, 32)), struct((2, 32, 16)), struct((2,), jnp.int32))

    calls = custom_calls(text, "jax_grouped_gemm")
    assert len(calls) == 3
    assert all(f"autotune = {str(autotune).lower()}" in call for call in calls)
    assert bool(files) == autotune


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Gives the files that the extension is told from here on, in place of a real extension."""
    told: list[str] = []
    monkeypatch.setattr(extension, "load", lambda: SimpleNamespace(set_autotune_file=told.append))
    return told


@pytest.mark.parametrize(
    ("variables", "file"),
    [
        (dict(JAX_GROUPED_AUTOTUNE_CACHE="named/choices"), "named/choices"),
        (dict(XDG_CACHE_HOME="cache"), "cache/jax_grouped/algorithms.tsv"),
        (dict(HOME="home"), "home/.cache/jax_grouped/algorithms.tsv"),
        (dict(JAX_GROUPED_AUTOTUNE_CACHE=""), None),
        # A file is where a folder should be.
        (dict(JAX_GROUPED_AUTOTUNE_CACHE="a file/choices"), None),
    ],
    ids=["named", "cache", "home", "none", "not writable"],
)
def test_choices_are_kept_in_the_file_of_the_environment(
    variables: dict[str, str], file: str | None, files: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a file").touch()
    for name in ("JAX_GROUPED_AUTOTUNE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value and str(tmp_path / value))

    # Without the memory of the process.
    extension.keep_tuned_algorithms.__wrapped__()

    assert files == ([] if file is None else [str(tmp_path / file)])
    assert file is None or (tmp_path / file).parent.is_dir()
