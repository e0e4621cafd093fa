"""The options of `train_moe`, and its errors about those that do not fit."""

import errno
import json
import os
import re
import sys
from pathlib import Path

import jax
import pytest

import jax_grouped as jg
from jax_grouped import examples
from jax_grouped.examples import settings, step
from jax_grouped.examples.settings import parse
from jax_grouped.kernels import product
from tests.examples.programs import TINY, run


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--bogus", "unrecognized arguments: --bogus"),
        ("--steps 0", "--steps must be at least 1, got 0"),
        ("--batch 2.5", "argument --batch: invalid int value: '2.5'"),
        ("--seed -1", "--seed must be at least 0, got -1"),
        ("--seed 2147483648", "--seed must be at most 2147483647, got 2147483648"),
        ("--learning-rate nan", "--learning-rate must be a positive number, got nan"),
        ("--cool-down -1", "--cool-down must be at least 0, got -1"),
        ("--cool-down 251", "--cool-down 251 is more than --steps 250"),
        ("--recipe fp4", "argument --recipe: invalid choice: 'fp4' (choose from"),
        ("--top-k 9", "--top-k 9 is more than --experts 8"),
        ("--heads 3", "--d-model 128 must be a multiple of 2 * --heads = 6"),
        (
            "--recipe block --d-model 24",
            "--d-model 24 must be a multiple of 16: the FP8 matmuls of --recipe block need",
        ),
        (
            "--recipe delayed --d-ff 40",
            "--d-ff 40 must be a multiple of 16: the FP8 matmuls of --recipe delayed need it",
        ),
        ("--data missing.txt", "missing.txt is not a file or a folder"),
        ("--data empty", "empty holds 0 bytes of text, --sequence 128 needs 2580"),
        ("--data long.txt --out long.txt", "--out: cannot write long.txt: File exists"),
        ("--data long.txt --out long.txt/run", "--out: cannot write long.txt/run: Not a directory"),
        ("--resume --out missing", "--resume: there is no checkpoint in missing"),
        ("--layer haiku", "argument --layer: invalid choice: 'haiku' (choose from"),
        ("--parallel tensor", "argument --parallel: invalid choice: 'tensor' (choose from"),
        ("--devices 2", "--devices 2 needs --parallel pmap or --parallel expert"),
        ("--parallel pmap --expert-devices 2", "--expert-devices 2 needs --parallel expert"),
        ("--scaling", "--scaling compares several devices with one: it needs --parallel pmap or --parallel expert"),
        ("--data long.txt --microbatches 3", "--batch 16 must be a multiple of --devices * --microbatches, here 1 * 3"),
        ("--data long.txt --parallel pmap --devices 999", "--devices 999 is more than the "),
    ],
)
def test_an_error_is_one_clear_line(flags: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    Path("long.txt").write_text("text " * 1000)

    status, out, err = run(*flags.split())

    assert (status, out) == (2, "")
    assert err.startswith("train_moe: error: ")
    assert message in err
    assert err.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "long.txt"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--parallel pmap --batch 12", "--batch 12 must be a multiple of --devices * --microbatches, here 8 * 1"),
        ("--parallel expert --devices 4 --expert-devices 3", "--devices 4 must be a multiple of --expert-devices 3"),
        ("--parallel expert --experts 6", "--experts 6 must be a multiple of --expert-devices, here 8"),
    ],
)
def test_what_is_split_over_devices_is_split_evenly(flags: str, message: str) -> None:
    with pytest.raises(settings.UsageError, match=re.escape(message)):
        settings.devices_of(parse(flags.split()), available=8)


@pytest.mark.parametrize(
    ("flags", "devices"),
    [
        ("", (1, 1)),
        ("--parallel pmap", (8, 1)),
        ("--parallel expert", (8, 8)),
        ("--parallel expert --devices 4 --expert-devices 2", (4, 2)),
    ],
)
def test_all_devices_are_used_unless_fewer_are_asked_for(flags: str, devices: tuple[int, int]) -> None:
    assert settings.devices_of(parse(flags.split()), available=8) == devices


def test_the_devices_of_a_run_are_those_of_the_way_it_is_resumed() -> None:
    recorded = parse(["--parallel", "expert", "--devices", "4", "--expert-devices", "2"]).recorded()

    same = parse(["--resume"], recorded)
    other = parse(["--resume", "--parallel", "pmap"], recorded)

    assert (same.parallel, same.devices, same.expert_devices) == ("expert", 4, 2)
    assert (other.parallel, other.devices, other.expert_devices) == ("pmap", None, None)


def test_a_machine_that_cannot_run_the_step_is_told_in_one_line(
    text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("Products of blocks of 128 need a Hopper GPU, got another: use another recipe.")

    # Called when a product is lowered, as what finds out about GPUs is. The program runs in a thread of its own.
    monkeypatch.setattr(product, "dequantize_xla", refuse)
    monkeypatch.setattr(jg.config, "backend", "xla")

    status, out, err = run("--data", text_file, "--out", tmp_path / "run", "--recipe", "block", *TINY)

    assert (status, out) == (2, "")
    assert err == "train_moe: error: Products of blocks of 128 need a Hopper GPU, got another: use another recipe.\n"


@pytest.mark.parametrize("data", ["text", "text/part.txt"], ids=["folder", "file"])
def test_a_text_that_cannot_be_read_is_told_in_one_line(
    data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "text" / "part.txt"
    file.parent.mkdir()
    file.write_text("text " * 1000)

    def refuse(path: Path) -> bytes:
        # The tests may run as root, who can read every file.
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "read_bytes", refuse)

    status, out, err = run("--data", tmp_path / data, "--out", tmp_path / "run", *TINY)

    assert (status, out) == (2, "")
    assert err == f"train_moe: error: --data: cannot read {file}: Permission denied\n"
    assert not (tmp_path / "run").exists()


def test_a_jax_that_does_not_start_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def devices() -> None:
        raise AssertionError  # As with JAX_PLATFORMS=cuda and no GPU.

    monkeypatch.setattr(jax, "devices", devices)

    status, out, err = run(*TINY)

    assert (status, out) == (2, "")
    assert err.startswith("train_moe: error: JAX does not start: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--layer nnx", "was started with --layer linen, not nnx"),
        ("--batch 16", "was started with --batch 8, not 16"),
        ("--microbatches 2", "was started with --microbatches 1, not 2"),
        ("--d-model 64", "was started with --d-model 32, not 64"),
        ("--experts 8 --top-k 8", "was started with --experts 4, not 8"),
        ("--recipe block", "was started with --recipe bf16, not block"),
        ("--steps 11", "is at step 12, past --steps 11"),
        ("--data other.txt", "other.txt has changed since the run"),
    ],
)
def test_a_run_resumes_only_as_it_was(
    flags: str, message: str, finished_copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("other.txt").write_text("text " * 1000)

    status, _, err = run("--out", finished_copy, "--resume", *flags.split())

    assert status == 2
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("module", ["filelock", "flax", "matplotlib", "optax", "orbax", "tqdm"])
def test_missing_extras_are_named(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(sys.modules):
        if name.partition(".")[0] == module or name.startswith("jax_grouped.examples."):
            monkeypatch.delitem(sys.modules, name)
        if name.startswith("jax_grouped.examples."):
            # An import also sets an attribute of the package, which must be undone as well.
            child = name.removeprefix("jax_grouped.examples.")
            monkeypatch.setattr(examples, child, getattr(examples, child))
    monkeypatch.setitem(sys.modules, module, None)

    status, _, err = run("--data", "missing")

    assert status == 2
    assert f"{module}" in err
    assert "python3 -m pip install 'jax_grouped[examples]'" in err


def test_settings_are_recorded_in_full(finished: tuple[Path, str]) -> None:
    recorded = json.loads((finished[0] / "settings.json").read_text())
    del recorded["text_sha256"]

    assert parse([], recorded).recorded() == recorded


def test_a_run_that_cools_down_ends_at_a_rate_of_zero_and_is_not_extended() -> None:
    flags = ["--steps", "100", "--cool-down", "40", "--learning-rate", "0.5"]
    chosen = parse(flags)
    rate = step.learning_rate(chosen)
    assert [round(float(rate(number)), 3) for number in (20, 60, 80, 90, 100)] == [0.5, 0.5, 0.25, 0.125, 0.0]
    with pytest.raises(settings.UsageError, match=r"was started with --steps 100, not 200"):
        parse(["--resume", "--steps", "200"], chosen.recorded())
