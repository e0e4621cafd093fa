"""`python3 -m jax_grouped`: the report, and which backend it says will run."""

import ctypes
import importlib.metadata
import os
import subprocess
import sys
from types import SimpleNamespace

import jax
import pytest

import jax_grouped as jg
from jax_grouped import __main__ as main
from jax_grouped.kernels import exchange, primitive

GPU = SimpleNamespace(device_kind="NVIDIA H200", compute_capability="9.0", platform="gpu")


def run(**environment: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"JAX_PLATFORMS": "cpu"} | environment
    command = [sys.executable, "-m", "jax_grouped"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def rows(text: str) -> dict[str, str]:
    return dict(line.split(maxsplit=1) for line in text.splitlines() if not line.startswith(" "))


def test_the_command_prints_versions_and_the_backend() -> None:
    command = run()

    assert command.returncode == 0
    facts = rows(command.stdout)
    assert facts["jax_grouped"] == jg.__version__
    assert facts["jax"] == jax.__version__
    assert "13.8 or newer needed" in facts["cuBLASLt"]
    assert facts["backend"] == "xla"


@pytest.mark.parametrize(
    ("environment", "problem"),
    [
        (dict(JAX_PLATFORMS="cuda", CUDA_VISIBLE_DEVICES=""), "none: JAX does not start"),
        (dict(JAX_GROUPED_CHECK="maybe"), "JAX_GROUPED_CHECK must be 0 or 1, false or true, off or on, no or yes, got"),
    ],
    ids=["JAX does not start", "unknown flag"],
)
def test_the_report_is_whole_whatever_is_wrong(environment: dict[str, str], problem: str) -> None:
    command = run(**environment)

    assert command.returncode == 1
    assert rows(command.stdout).keys() == rows(main.report(["xla"])).keys()
    assert rows(command.stdout)["backend"].startswith("none")
    assert problem in command.stdout
    assert "Traceback" not in command.stdout


def test_the_backend_of_a_machine_with_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "devices", lambda *_: [GPU, GPU])
    monkeypatch.setattr(primitive, "find_problem", lambda: None)
    for obstacle, line in ((None, "over NVLink"), ("they need more", "none: they need more")):
        monkeypatch.setattr(exchange, "find_obstacle", lambda obstacle=obstacle: obstacle)
        report = main.report(["cuda"])
        assert "2 x NVIDIA H200 (compute capability 9.0)" in report
        assert rows(report)["pushes"] == line
    assert main.choose_backend() == ["cuda"]
    with jg.config.override(backend="xla"):
        assert main.choose_backend()[0] == "xla"

    problem = primitive.Problem("cuBLAS 13.4.0 is loaded.", "Run: upgrade")
    monkeypatch.setattr(primitive, "find_problem", lambda: problem)
    backend, *found_and_remedy = main.choose_backend()
    assert backend.startswith("none")
    assert found_and_remedy == [problem.found, problem.remedy]

    # A GPU that is not the default device is left alone, whatever its problem.
    cpu = SimpleNamespace(device_kind="cpu", platform="cpu")
    monkeypatch.setattr(jax, "devices", lambda platform=None: [GPU] if platform == "cuda" else [cpu])
    assert main.choose_backend()[:2] == ["xla", "JAX's default device is not the GPU."]


def test_without_a_gpu_what_is_missing_is_said_and_nothing_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(primitive, "cuda_devices", list)
    everything = dict(platforms="", packages={"jax-cuda13-plugin"}, driver=True, visible="0")
    for missing, reason in (
        (dict(platforms="cpu"), "JAX_PLATFORMS=cpu leaves GPUs out. To use one, unset it."),
        (dict(packages=set()), "JAX's plugin for CUDA is not installed. If this machine has a GPU, run: python3 -m"),
        (dict(driver=False), "NVIDIA's driver (libcuda.so.1) is not found. Install it"),
        (dict(platforms="cuda,cpu", visible=""), "CUDA_VISIBLE_DEVICES hides all GPUs. To use them, unset it."),
        ({}, "JAX's plugin for CUDA and NVIDIA's driver are installed: see JAX's warnings"),
    ):
        machine = SimpleNamespace(**{**everything, **missing})

        def version(package: str, machine: SimpleNamespace = machine) -> str:
            if package not in machine.packages:
                raise importlib.metadata.PackageNotFoundError(package)
            return "1.0"

        def load(_: str, machine: SimpleNamespace = machine) -> None:
            if not machine.driver:
                raise OSError

        monkeypatch.setattr(importlib.metadata, "version", version)
        monkeypatch.setattr(main, "_platforms", lambda machine=machine: machine.platforms)
        monkeypatch.setattr(ctypes, "CDLL", load)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", machine.visible)

        backend, fact, advice = main.choose_backend()

        assert (backend, fact) == ("xla", "JAX sees no NVIDIA GPU.")
        assert advice.startswith(reason)
        assert ("pip install" in advice) == (not machine.packages)
        # Sources that are not installed are no error.
        assert rows(main.report([backend]))["jax_grouped"].startswith("not installed, imported from ")
