"""The suites: what they measure, print and write, stored results, the page's commands, and what goes wrong."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from benchmarks import __main__ as command
from benchmarks import cases, gpus, memory, model
from benchmarks.__main__ import RESULTS, main
from benchmarks.cases import SUITES
from benchmarks.peers import VARIANTS, Variant
from benchmarks.plot import FIGURES
from benchmarks.rows import Record
from benchmarks.shapes import SHAPES, Shape

pytestmark = pytest.mark.slow

FOLDER = Path(command.__file__).parent
#: Options that leave a few cases of suites, and between them measure every operation and the variants of this library.
FEW = {
    "bf16_ragged_dot": "--ops fprop backward --skews tail --variants jax_grouped jax.lax.ragged_dot",
    "fp8_products": "--shapes qwen3 --skews lognormal --ops dgrad wgrad 'wgrad f32'",
    "quantize": "--shapes small --skews equal",
    "step": "--shapes qwen3 --skews tail --kernels bfloat16 --variants bf16 'current cached' delayed",
    "step_accumulating": "--shapes qwen3 --variants bf16 block",
    "step_mlp": "--shapes qwen3 --skews tail --kernels float32 --variants bf16 'block cached'",
    "layer": "--shapes 'qwen3 layer' --ops 'moe experts' --variants 'delayed cached'",
    "options": "--shapes 'qwen3 layer' --ops moe --variants 'bf16 replayed' 'block invariant'",
    "decode": "--shapes 'decode 1' --variants bf16",
    "memory": "--shapes qwen3",
    "scaling": "--variants bf16",
}


@pytest.fixture
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = {name: Shape(name, 2, 256, 128, min(shape.N, 128), min(shape.top_k, 2)) for name, shape in SHAPES.items()}
    monkeypatch.setattr(cases, "SHAPES", tiny)
    monkeypatch.setattr(memory, "planned_bytes", lambda *_: 3 * 2**30)
    monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))  # Undoes the command's changes after the test.


@pytest.mark.usefixtures("_tiny")
@pytest.mark.parametrize("name", FEW)
def test_a_suite_is_measured_written_and_shown(name: str, tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "rows.json"
    options = ["--calls", "1", "--seconds", "60", "--verify", "--json", str(file)]
    assert main(["run", name, *shlex.split(FEW[name]), *options]) == 0
    printed, record = capsys.readouterr().out, Record.read(file)
    assert [row.note for row in record.rows] == [""] * len(record.rows)
    for row in record.rows:
        assert f"{row.case}: " in printed
        assert row.rate == 3 or row.fastest <= row.milliseconds <= row.slowest
        assert (row.clock, row.calls) == (("none", None) if name == "memory" else ("host", 1))
        # Rounding both operands to three bits of mantissa, gradients to two, twice in an MLP, leaves this difference.
        lossy = any(word in row.case.variant for word in ("fp8", "block", "current", "delayed"))
        assert row.difference is None or (1e-2 < row.difference < 0.2 if lossy else row.difference < 1e-2)
    assert main(["show", str(file)]) == 0
    assert printed.endswith(capsys.readouterr().out)


def test_stored_results_are_a_suites_and_are_shown(capsys: Any) -> None:
    for file in FOLDER.glob("results/*.json"):
        if file.stem in ("h200_fidelity", "h200_gpus", "h200_model"):
            continue  # Results of other commands than `run`.
        record = Record.read(file)
        assert main(["show", str(file)]) == 0, file
        assert {row.case for row in record.rows} <= set(SUITES[record.suite].cases()), file
        assert record.device in capsys.readouterr().out


def test_pictures_are_drawn_from_stored_results(tmp_path: Path, capsys: Any) -> None:
    assert main(["draw", "--to", str(tmp_path)]) == 0
    drawn = [Path(line) for line in capsys.readouterr().out.split()]
    assert [file.name for file in drawn] == [f"h200_{name}{theme}.svg" for name in FIGURES for theme in ("", "-dark")]
    for file in drawn:
        # The pages show what is stored; other versions of matplotlib place letters elsewhere.
        letters, stored = (re.findall(r">([^<>]+)</text>", path.read_text()) for path in (file, RESULTS / file.name))
        assert letters == stored, file.name
        assert float(re.search(r'<svg [^>]*width="([\d.]+)pt"', file.read_text())[1]) <= 690 * 72 / 96
    assert all(len(figure["variants"]) <= 6 for figure in FIGURES.values())


def test_one_that_fails_does_not_keep_the_others_from_running(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    run = Mock(side_effect=lambda words, **_: SimpleNamespace(returncode=int("step" in words)))
    monkeypatch.setattr(subprocess, "run", run)
    assert main(["run", "--seconds", "1", "step", "memory", "--json", "there/gpu_{suite}.json"]) == 1
    assert [call.args[0][3:] for call in run.call_args_list] == [
        ["run", name, "--seconds", "1", "--json", f"there/gpu_{name}.json"] for name in ("step", "memory")
    ]
    assert capsys.readouterr().err == "failed: step\n"


@pytest.mark.usefixtures("_tiny")
def test_a_peer_that_fails_gives_a_row_with_the_reason(monkeypatch: Any, tmp_path: Path, capsys: Any) -> None:
    product = Mock(side_effect=MemoryError("RESOURCE_EXHAUSTED: 56 GiB\nand a long report"))
    monkeypatch.setitem(sys.modules, "benchmarks.peers.fails", SimpleNamespace(product=product))
    monkeypatch.setitem(VARIANTS, "jax.lax.ragged_dot", Variant("fails", "jax"))
    monkeypatch.setitem(sys.modules, "torch", None)
    options = "--ops fprop --skews equal --shapes qwen3 --peers jax.lax.ragged_dot torch._grouped_mm jax_grouped --json"
    assert main(["run", "products", *options.split(), str(tmp_path / "rows.json")]) == 0
    failed, worked = Record.read(tmp_path / "rows.json").rows
    assert (failed.note, failed.milliseconds) == ("MemoryError: RESOURCE_EXHAUSTED: 56 GiB", None)
    assert worked.milliseconds > 0
    assert "skipped torch._grouped_mm: ModuleNotFoundError: import of torch halted" in capsys.readouterr().out


@pytest.mark.usefixtures("_tiny")
def test_wrong_arguments_end_in_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for module in (gpus, model):
        monkeypatch.setattr(module, "cuda_devices", list)
    fidelity = f"{FOLDER}/results/h200_fidelity.json"
    for arguments, message in {
        "run steps": "argument SUITE: invalid choice: 'steps'",
        "run step --shapes qwen4": "argument --shapes: invalid choice: 'qwen4'",
        "run step_launch --variants jax.numpy": "nothing was measured",
        "run memory --json nowhere/rows.json": "[Errno 2] No such file or directory: 'nowhere/rows.json.part'",
        "run step scaling --json rows.json": "the file of several suites needs {suite} in its name",
        f"draw --results {FOLDER}": f"{FOLDER} has no results named h200_layer.json",
        "gpus": "needs several GPUs, JAX finds 0",
        "model": "needs a GPU, and JAX sees none",
        f"show {fidelity}": f"{fidelity} holds no rows",
    }.items():
        with pytest.raises(SystemExit):
            main(arguments.split())
        last = capsys.readouterr().err.splitlines()[-1]
        assert last.startswith(f"python3 -m benchmarks {arguments.split()[0]}: error: {message}")
