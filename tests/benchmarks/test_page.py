"""The program that runs all others for the benchmarks' page."""

import importlib
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import cli, page


@pytest.mark.parametrize("name", list(page.RUNS))
def test_programs_take_their_options(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    obtained: list[Any] = []

    def obtain(parser: Any, arguments: Any, *_: Any) -> Any:
        obtained.append(arguments)
        raise SystemExit(0)

    monkeypatch.setattr(cli, "obtain", obtain)
    _, program, *options = page.command(name, tmp_path, "here")
    package = program if program == "benchmarks.scaling" else f"{program}.__main__"

    with pytest.raises(SystemExit) as ended:
        importlib.import_module(package).main(options)

    assert ended.value.code == 0
    assert (obtained[0].json, obtained[0].plot) == (tmp_path / f"here_{name}.json", tmp_path / f"here_{name}.png")


def test_one_that_fails_does_not_keep_the_others_from_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[list[str]] = []

    def run(command: list[str], *, check: bool) -> Any:
        ran.append(command)
        return SimpleNamespace(returncode=int("benchmarks.quantize" in command))

    monkeypatch.setattr(subprocess, "run", run)
    arguments = ["--results", str(tmp_path), "--device", "here", "--runs"]

    assert page.main([*arguments, "quantize", "scaling"]) == 1
    assert [command[:3] for command in ran] == [
        [sys.executable, "-m", "benchmarks.quantize"],
        [sys.executable, "-m", "benchmarks.scaling"],
    ]
    printed = capsys.readouterr()
    assert f"$ python3 -m benchmarks.scaling --clock device --json {tmp_path}/here_scaling.json" in printed.out
    assert printed.err == "failed: quantize\n"
    assert page.main([*arguments, "scaling"]) == 0


def test_a_folder_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        page.main(["--results", str(tmp_path / "none")])
    assert capsys.readouterr().err.endswith(f"error: --results: there is no folder {tmp_path}/none\n")
