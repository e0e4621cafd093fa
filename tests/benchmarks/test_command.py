"""The command: what suites print, write and draw, stored results, the page's commands, and what goes wrong."""

import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import __main__ as command
from benchmarks import memory, plot, suites
from benchmarks.__main__ import main
from benchmarks.peers import VARIANTS, Variant
from benchmarks.rows import Record
from benchmarks.shapes import Shape
from benchmarks.suites import PAGE, SUITES, SWEEPS

pytestmark = pytest.mark.slow

PAGE_FOLDER = Path(command.__file__).parent
PNG = b"\x89PNG\r\n\x1a\n"
JAX = ("--variants", "jax_grouped", "jax.lax.ragged_dot")
#: Options that leave a few cases of each suite.
FEW = {
    "products": ("--shapes", "qwen3", *JAX),
    "bf16_ragged_dot": JAX,
    "bf16_sustained": ("--shapes", "qwen3", "dsv3 up", "--peers", "jax_grouped"),
    "bf16_device_clock": ("--shapes", "qwen3", "--skews", "tail"),
    "fp8_products": ("--shapes", "qwen3", "--ops", "fprop"),
    "quantize": ("--shapes", "small", "--skews", "equal"),
    "step": ("--shapes", "qwen3", "--skews", "equal", "--variants", "bf16", "delayed cached"),
    "step_accumulating": ("--shapes", "qwen3", "--variants", "bf16", "block"),
    "step_mlp": ("--shapes", "qwen3", "--kernels", "float32", "--variants", "bf16", "current"),
    "step_launch": ("--layers", "dense", "--variants", "bf16", "block cached"),
    "scaling": ("--variants", "bf16"),
    "memory": (),
}


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes every shape small. The command sets the variable; this undoes that after each test."""
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    tiny = {name: Shape(name, 2, 256, 128, 128 if shape.N else 0) for name, shape in suites.SHAPES.items()}
    monkeypatch.setattr(suites, "SHAPES", tiny)
    monkeypatch.setattr(plot, "SWEEPS", {name: [tiny[of.name] for of in sweep] for name, sweep in SWEEPS.items()})
    monkeypatch.setattr(memory, "planned_bytes", lambda *_: 3 * 2**30)


@pytest.mark.parametrize("name", SUITES)
def test_a_suite_is_measured_written_shown_and_drawn(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, picture = tmp_path / "rows.json", tmp_path / "rows.png"
    draws = ["--plot", str(picture)] if SUITES[name].plot else []

    assert main(["run", name, *FEW[name], "--calls", "1", "--seconds", "60", "--json", str(file), *draws]) == 0

    printed, record = capsys.readouterr().out, Record.read(file)
    assert [row.note for row in record.rows] == [""] * len(record.rows)
    for row in record.rows:
        assert f"{row.case}: " in printed
        assert row.rate("GiB") == 3 or row.fastest <= row.milliseconds <= row.slowest
        assert (row.clock, row.backend, row.calls) in [("none", "", None), ("host", row.backend, 1)]
        assert row.difference is None or row.difference < 1e-2
    assert picture.read_bytes().startswith(PNG) if draws else not picture.exists()
    assert main(["show", str(file)]) == 0
    assert printed.endswith(capsys.readouterr().out)


@pytest.mark.parametrize("file", sorted(PAGE_FOLDER.glob("results/*.json")), ids=lambda path: path.stem)
def test_stored_results_are_those_of_a_suite_and_are_shown_and_drawn(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    if "fidelity" in file.name:
        pytest.skip("drawn from the runs' own files")
    record, picture = Record.read(file), tmp_path / "rows.png"

    assert main(["show", str(file), *(["--plot", str(picture)] if SUITES[record.suite].plot else [])]) == 0

    assert {row.case for row in record.rows} <= set(SUITES[record.suite].cases())
    assert record.device in capsys.readouterr().out
    assert not SUITES[record.suite].plot or picture.read_bytes().startswith(PNG)


def test_the_commands_of_the_page_are_those_of_the_program() -> None:
    text = (PAGE_FOLDER / "README.md").read_text().replace("\\\n", "")
    commands = re.findall(r"^(?:JAX_PLATFORMS=cpu )?python3 -m benchmarks (.*)$", text, re.MULTILINE)

    parsed = [command._parser().parse_args(shlex.split(line)) for line in commands]

    assert {name for arguments in parsed for name in getattr(arguments, "suites", [])} == set(PAGE)
    assert all((PAGE_FOLDER / figure).exists() for figure in re.findall(r"\((results/[^)]+)\)", text))


def test_one_that_fails_does_not_keep_the_others_from_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[list[str]] = []

    def run(arguments: list[str], *, check: bool) -> Any:
        ran.append(arguments[2:])
        return SimpleNamespace(returncode=int("step" in arguments))

    monkeypatch.setattr(subprocess, "run", run)

    assert main(["page", "step", "memory", "--results", str(tmp_path), "--device", "here"]) == 1
    assert main(["run", "--seconds", "1", "scaling", "quantize", "--skews", "equal"]) == 0

    file = f"{tmp_path}/here"
    assert ran == [
        ["benchmarks", "run", "step", "--json", f"{file}_step.json", "--plot", f"{file}_step.png"],
        ["benchmarks", "run", "memory", "--json", f"{file}_memory.json"],
        ["benchmarks", "run", "--seconds", "1", "scaling", "--skews", "equal"],
        ["benchmarks", "run", "--seconds", "1", "quantize", "--skews", "equal"],
    ]
    assert capsys.readouterr().err == "failed: step\n"


def test_a_peer_that_fails_gives_a_row_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def product(*_: Any) -> None:
        raise MemoryError("RESOURCE_EXHAUSTED: 56 GiB\nand a long report")

    monkeypatch.setitem(sys.modules, "benchmarks.peers.fails", SimpleNamespace(product=product))
    monkeypatch.setitem(VARIANTS, "jax.lax.ragged_dot", Variant("fails", "jax"))
    monkeypatch.setitem(sys.modules, "torch", None)
    file = tmp_path / "rows.json"
    options = ["--ops", "fprop", "--skews", "equal", "--variants", "jax.lax.ragged_dot", "jax_grouped"]

    assert main(["run", "bf16_ragged_dot", *options, "torch._grouped_mm", "--json", str(file)]) == 0

    failed, worked = Record.read(file).rows
    assert (failed.note, failed.milliseconds) == ("MemoryError: RESOURCE_EXHAUSTED: 56 GiB", None)
    assert worked.milliseconds > 0
    assert "skipped torch._grouped_mm: ModuleNotFoundError: import of torch halted" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "steps"], "argument SUITE: invalid choice: 'steps'"),
        (["run", "step", "--shapes", "qwen4"], "argument --shapes: invalid choice: 'qwen4'"),
        (["run", "step", "--peers", "mx"], "argument --variants/--peers: invalid choice: 'mx'"),
        (["run", "step", "--variants", "jax.numpy"], "nothing was measured"),
        (["run", "step", "--calls", "many"], "argument --calls: invalid int value: 'many'"),
        (["run", "step", "--plot", "nowhere/rows.png"], "nowhere/rows.png: there is no folder nowhere"),
        (["run", "step", "scaling", "--json", "rows.json"], "--json and --plot take one suite"),
        (["show", "nowhere.json"], "[Errno 2] No such file or directory: 'nowhere.json'"),
        (["show", str(PAGE_FOLDER / "results/h200_fidelity.json")], f"{PAGE_FOLDER}/results/h200_fidelity.json holds"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_wrong_arguments_end_in_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(arguments)

    assert exit_.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"python3 -m benchmarks {arguments[0]}: error: {message}")
