"""The options of `train_moe`, and its errors about those that do not fit."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import jax_grouped as jg
from jax_grouped.examples import parallel, settings
from jax_grouped.examples.settings import parse
from jax_grouped.kernels import product
from tests.examples.programs import TINY, run


def assert_one_line(message: str, *flags: object) -> None:
    status, out, err = run(*flags)
    assert (status, out) == (2, ""), flags
    assert err.startswith("train_moe: error: ")
    assert message in err
    assert err.count("\n") == 1


def test_options_that_do_not_fit_end_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    Path("long.txt").write_text("text " * 1000)
    for flags, message in {
        "--steps 0": "--steps must be at least 1 ",
        "--top-k 9": "--top-k 9 is more than --experts 8",
        "--heads 3": "--d-model 128 must be a multiple of 2 * --heads = 6",
        "--recipe block --d-model 24": "--recipe block needs multiples of 16 as --d-model and --d-ff",
        "--data missing.txt": "missing.txt: No such file or directory",
        "--data empty": "empty holds 0 bytes of text, --sequence 128 needs 2580",
        "--data long.txt --out long.txt": "cannot read or write long.txt: File exists",
        "--resume --out missing": "--resume: there is no checkpoint in missing",
        "--devices 2": "--devices needs --parallel",
        "--data long.txt --microbatches 3": "--batch 16 must be a multiple of --devices * --microbatches, here 1 * 3",
    }.items():
        assert_one_line(message, *flags.split())
        assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "long.txt"], flags


def test_work_is_split_evenly_over_all_devices_unless_fewer_are_asked_for() -> None:
    for flags, devices in {
        "": (1, 1),
        "--parallel pmap": (8, 1),
        "--parallel expert": (8, 8),
        "--parallel expert --devices 4 --expert-devices 2": (4, 2),
    }.items():
        assert settings.devices_of(parse(flags.split()), available=8) == devices
    for flags, message in {
        "--parallel pmap --batch 12": "--batch 12 must be a multiple of --devices * --microbatches, here 8 * 1",
        "--parallel expert --devices 4 --expert-devices 3": "--devices 4 must be a multiple of --expert-devices 3",
        "--parallel expert --experts 6": "--experts 6 must be a multiple of --expert-devices, here 8",
    }.items():
        with pytest.raises(settings.UsageError, match=re.escape(message)):
            settings.devices_of(parse(flags.split()), available=8)


def test_a_resumed_run_has_the_recorded_settings_and_may_change_its_devices() -> None:
    flags = ["--parallel", "expert", "--devices", "4", "--expert-devices", "2", "--d-model", "64", "--data", "text"]
    recorded = parse(flags).recorded()

    same = parse(["--resume", "--steps", "500"], recorded)
    other = parse(["--resume", "--parallel", "pmap"], recorded)

    assert same.recorded() == {**recorded, "steps": 500}
    assert other.recorded() == {**recorded, "parallel": "pmap", "devices": None, "expert_devices": None}


def test_what_the_machine_refuses_ends_in_one_line(
    text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse_product(*_: object, **__: object) -> None:
        raise RuntimeError("Products of blocks of 128 need a Hopper GPU, got another: use another recipe.")

    flags = ["--data", text_file, "--out", tmp_path / "run", "--recipe", "block", *TINY]
    monkeypatch.setattr(jg.config, "backend", "xla")
    # Called when a product is lowered, as what finds out about GPUs is.
    monkeypatch.setattr(product, "dequantize_xla", refuse_product)
    assert_one_line("error: Products of blocks of 128 need a Hopper GPU, got another: use another recipe.", *flags)


def test_a_run_resumes_only_as_it_was(finished_copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("other.txt").write_text("text " * 1000)
    for flags, message in {
        "--layer nnx": "was started with --layer linen, not nnx",
        "--data other.txt": "other.txt has changed since the run",
    }.items():
        assert_one_line(message, "--out", finished_copy, "--resume", *flags.split())


def test_missing_extras_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("flax", "orbax"):
        program = f"import sys; sys.modules['{module}'] = None; from jax_grouped.examples.train_moe import main; main()"
        ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
        message = f"{module} is missing: python3 -m pip install 'jax_grouped[examples]'"
        assert ended.stderr == f"train_moe: error: {message}\n"


def test_a_run_that_cools_down_ends_at_a_rate_of_zero_and_is_not_extended() -> None:
    chosen = parse(["--steps", "100", "--cool-down", "40", "--learning-rate", "0.5"])
    rate = parallel.learning_rate(chosen)
    assert [round(float(rate(number)), 3) for number in (20, 60, 80, 90, 100)] == [0.5, 0.5, 0.25, 0.125, 0.0]
    with pytest.raises(settings.UsageError, match=r"was started with --steps 100, not 200"):
        parse(["--resume", "--steps", "200"], chosen.recorded())
