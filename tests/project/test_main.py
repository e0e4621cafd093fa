import importlib.metadata
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import jax
import pytest

import jax_grouped as jg
from jax_grouped import __main__ as main
from jax_grouped.kernels import extension

GPU = SimpleNamespace(device_kind="NVIDIA H200", compute_capability="9.0", platform="gpu")


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "devices", lambda *_: [GPU, GPU])
    monkeypatch.setattr(extension, "find_problem", lambda: None)


def run(*arguments: str, program: tuple[str, ...] = ("-m", "jax_grouped"), **environment: str):
    return subprocess.run(
        [sys.executable, *program, *arguments],
        env=os.environ | {"JAX_PLATFORMS": "cpu"} | environment,
        capture_output=True,
        text=True,
        check=False,
    )


def rows(text: str) -> dict[str, str]:
    return dict(line.split(maxsplit=1) for line in text.splitlines() if not line.startswith(" "))


def test_the_command_prints_versions_and_the_backend():
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
        (dict(JAX_GROUPED_BACKEND="gpu"), "backend (JAX_GROUPED_BACKEND) must be one of ('auto', 'xla'), got 'gpu'."),
        (dict(JAX_GROUPED_CHECK="maybe"), "JAX_GROUPED_CHECK must be 0 or 1, false or true, off or on, no or yes, got"),
    ],
    ids=["JAX does not start", "unknown backend", "unknown flag"],
)
def test_the_report_is_whole_whatever_is_wrong(environment: dict[str, str], problem: str):
    command = run(**environment)

    assert command.returncode == 1
    assert rows(command.stdout).keys() == rows(main.report(["xla"])).keys()
    assert rows(command.stdout)["backend"].startswith("none")
    assert problem in command.stdout
    assert "Traceback" not in command.stdout


def test_the_report_works_from_sources_that_are_not_installed():
    hidden = """
import importlib.metadata, runpy

found = importlib.metadata.version

def version(name):
    if name == "jax_grouped":
        raise importlib.metadata.PackageNotFoundError(name)
    return found(name)

importlib.metadata.version = version
runpy.run_module("jax_grouped", run_name="__main__", alter_sys=True)
"""
    command = run(program=("-c", hidden))

    assert command.returncode == 0, command.stderr
    assert rows(command.stdout)["jax_grouped"].startswith("not installed, imported from ")


@pytest.mark.parametrize(
    ("argument", "status", "text"),
    [
        ("--help", 0, "exit status is 0 if a backend runs, 1 if none does, and 2 for an unknown argument"),
        ("--version", 0, f"jax_grouped {jg.__version__}"),
        ("foo", 2, "python3 -m jax_grouped: error: unrecognized arguments: foo"),
    ],
)
def test_arguments(argument: str, status: int, text: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as end:
        main.main([argument])

    assert end.value.code == status
    assert text in " ".join("".join(capsys.readouterr()).split())


@pytest.mark.usefixtures("gpus")
def test_usable_gpus_run_the_cuda_backend():
    text = main.report(["cuda"])

    assert "2 x NVIDIA H200 (compute capability 9.0)" in text
    assert main.choose_backend() == ["cuda"]


@pytest.mark.usefixtures("gpus")
def test_the_xla_setting_wins_over_a_gpu():
    with jg.config.override(backend="xla"):
        assert main.choose_backend()[0] == "xla"


@pytest.mark.usefixtures("gpus")
def test_a_gpu_that_is_not_the_default_device_is_left_alone(monkeypatch: pytest.MonkeyPatch):
    cpu = SimpleNamespace(device_kind="cpu", platform="cpu")
    monkeypatch.setattr(jax, "devices", lambda platform=None: [GPU] if platform == "cuda" else [cpu])
    monkeypatch.setattr(extension, "find_problem", lambda: extension.Problem("The extension is missing.", "Build it."))

    assert main.choose_backend()[:2] == ["xla", "JAX's default device is not the GPU."]


@pytest.mark.usefixtures("gpus")
def test_a_problem_is_shown_with_its_remedy(monkeypatch: pytest.MonkeyPatch):
    problem = extension.Problem("cuBLAS 13.4.0 is loaded.", "Run: upgrade")
    monkeypatch.setattr(extension, "find_problem", lambda: problem)

    backend, found, remedy = main.choose_backend()

    assert backend.startswith("none")
    assert (found, remedy) == (problem.found, problem.remedy)


@pytest.mark.parametrize("error", [AssertionError(), RuntimeError("first line\nsecond")], ids=["no text", "two lines"])
def test_a_jax_that_does_not_start_is_one_line(error: Exception, monkeypatch: pytest.MonkeyPatch):
    def devices() -> None:
        raise error

    monkeypatch.setattr(jax, "devices", devices)
    (line,) = re.findall("^devices .*$", main.report(main.choose_backend()), re.MULTILINE)

    assert "none: JAX does not start: " in line
    assert str(error).replace("\n", " ") in line
    assert main.choose_backend()[0] == "none: JAX does not start"


PLUGIN = {"jax-cuda13-plugin"}


@pytest.mark.parametrize(
    ("platforms", "packages", "driver", "visible", "reason"),
    [
        ("cpu", PLUGIN, True, None, "JAX_PLATFORMS=cpu leaves GPUs out. To use one, unset it."),
        (None, set(), True, None, "JAX's plugin for CUDA is not installed. If this machine has a GPU, run: python3 -m"),
        (None, PLUGIN, False, None, "NVIDIA's driver (libcuda.so.1) is not found. Install it"),
        ("cuda,cpu", PLUGIN, True, "", "CUDA_VISIBLE_DEVICES hides all GPUs. To use them, unset it."),
        (None, PLUGIN, True, "0", "JAX's plugin for CUDA and NVIDIA's driver are installed: see JAX's warnings"),
    ],
    ids=["platforms", "plugin", "driver", "hidden", "unknown"],
)
def test_without_a_gpu_what_is_missing_is_said_and_nothing_that_is_there(
    platforms: str | None,
    packages: set[str],
    driver: bool,
    visible: str | None,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
):
    def version(package: str) -> str:
        if package not in packages:
            raise importlib.metadata.PackageNotFoundError(package)
        return "1.0"

    monkeypatch.setattr(extension, "cuda_devices", list)
    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(main, "_platforms", lambda: platforms or "")
    monkeypatch.setattr(main, "_has_driver", lambda: driver)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    backend, fact, advice = main.choose_backend()

    assert (backend, fact) == ("xla", "JAX sees no NVIDIA GPU.")
    assert advice.startswith(reason)
    assert ("pip install" in advice) == (not packages)
