"""Fixtures of the tests of the examples: compiled programs, a text, and a finished run."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from tests.examples.programs import TINY, succeed


@pytest.fixture(scope="package", autouse=True)
def shared_programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Compiles each program of a run once; the settings of JAX that say so, for processes."""
    options = {
        "jax_compilation_cache_dir": str(tmp_path_factory.mktemp("compiled")),
        "jax_persistent_cache_min_compile_time_secs": 0,
    }
    before = {name: getattr(jax.config, name) for name in options}
    for values in (options, before):
        for name, value in values.items():
            jax.config.update(name, value)
        # JAX looks once whether there is a cache.
        compilation_cache.reset_cache()
        if values is options:
            yield {name.upper(): str(value) for name, value in options.items()}


@pytest.fixture(scope="package")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(f"{number} squared is {number**2}.\n" for number in range(1000)))
    return path


@pytest.fixture(scope="package")
def finished(text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of a run of 12 steps on one device, and what the run printed."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    flags = ["--steps", 12, *TINY, "--sample", 20, "--log", "tensorboard"]
    return folder, succeed("--data", text_file, "--out", folder, *flags)


@pytest.fixture
def finished_copy(finished: tuple[Path, str], tmp_path: Path) -> Path:
    return shutil.copytree(finished[0], tmp_path / "run")
