import os
import subprocess
import sys
from types import SimpleNamespace

import jax
import pytest

import jax_grouped as jg
from jax_grouped import __main__ as main
from jax_grouped.backends import extension

GPU = SimpleNamespace(device_kind="NVIDIA H200", compute_capability="9.0", platform="gpu")


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "devices", lambda *_: [GPU, GPU])
    monkeypatch.setattr(extension, "find_problem", lambda: None)


def test_the_command_prints_versions_and_the_backend():
    run = subprocess.run(
        [sys.executable, "-m", "jax_grouped"],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=True,
    )

    rows = dict(line.split(maxsplit=1) for line in run.stdout.splitlines() if not line.startswith(" "))
    assert rows["jax_grouped"] == jg.__version__
    assert rows["jax"] == jax.__version__
    assert "13.8 or newer needed" in rows["cuBLASLt"]
    assert rows["backend"] == "xla"


@pytest.mark.usefixtures("gpus")
def test_usable_gpus_run_the_cuda_backend():
    text = main.report()

    assert "2 x NVIDIA H200 (compute capability 9.0)" in text
    assert main.choose_backend() == ["cuda"]


@pytest.mark.usefixtures("gpus")
def test_the_xla_setting_wins_over_a_gpu():
    with jg.config.override(backend="xla"):
        assert main.choose_backend()[0] == "xla"


@pytest.mark.usefixtures("gpus")
def test_a_problem_is_shown_with_its_remedy(monkeypatch: pytest.MonkeyPatch):
    problem = extension.Problem("cuBLAS 13.4.0 is loaded.", "Run: upgrade")
    monkeypatch.setattr(extension, "find_problem", lambda: problem)

    backend, found, remedy = main.choose_backend()

    assert backend.startswith("none")
    assert (found, remedy) == (problem.found, problem.remedy)


def test_without_a_gpu_the_reason_is_given(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(extension, "cuda_devices", list)

    backend, reason, remedy = main.choose_backend()

    assert backend == "xla"
    assert "no NVIDIA GPU" in reason
    assert "jax[cuda13]" in remedy
