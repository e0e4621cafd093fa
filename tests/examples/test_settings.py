"""The options of `train_moe`, the text that it reads, its loss curve, and errors about what does not fit."""

import functools
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from unittest import mock

import jax
import numpy as np
import pytest

import jax_grouped as jg
from jax_grouped.examples import parallel, processes, settings, text_data
from jax_grouped.examples.loss_curve import Losses, draw, format_losses, format_metrics, read_losses
from jax_grouped.examples.settings import UsageError, parse
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
        assert settings.count_devices(parse(flags.split()), available=8) == devices
    for flags, message in {
        "--parallel pmap --batch 12": "--batch 12 must be a multiple of --devices * --microbatches, here 8 * 1",
        "--parallel expert --devices 4 --expert-devices 3": "--devices 4 must be a multiple of --expert-devices 3",
        "--parallel expert --experts 6": "--experts 6 must be a multiple of --expert-devices, here 8",
    }.items():
        with pytest.raises(UsageError, match=re.escape(message)):
            settings.count_devices(parse(flags.split()), available=8)


def test_several_processes_use_all_their_devices() -> None:
    assert settings.count_devices(parse(["--parallel", "expert"]), available=4, processes=2) == (4, 4)
    for flags in ("--parallel pmap", "--parallel expert --devices 2"):
        with pytest.raises(UsageError, match=r"is for one process|must be all 4 of the 2 processes"):
            settings.count_devices(parse(flags.split()), available=4, processes=2)


def test_processes_are_joined_where_there_are_several(monkeypatch: pytest.MonkeyPatch) -> None:
    initialize, slurm = mock.Mock(), {"SLURM_NTASKS": "2", "SLURM_STEP_NODELIST": "a[0-1]"}
    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    for flags, variables, expected in [
        ("--coordinator host:1234 --num-processes 2 --process-id 0", {}, ("host:1234", 2, 0)),
        ("", slurm, (None, None, None)),
        ("", {"OMPI_COMM_WORLD_SIZE": "2"}, (None, None, None)),
        ("", {}, None),
        ("", {"SLURM_NTASKS": "2"}, None),
        ("", {**slurm, "SLURM_STEP_NUM_TASKS": "1"}, None),
        ("--num-processes 1", slurm, None),
    ]:
        initialize.reset_mock()
        with mock.patch.dict(os.environ, variables):
            processes.join_processes(parse(flags.split()))
        assert (initialize.call_args and initialize.call_args.args) == expected, (flags, variables)


def test_processes_that_cannot_join_the_others_say_so() -> None:
    hasty = "from jax_grouped.examples import processes, train_moe; processes.JOIN_SECONDS = 1; train_moe.main()"
    command = [sys.executable, "-c", hasty, "--coordinator", "localhost:1", "--num-processes", "2"]
    for flags, message in ([], "The process id"), (["--process-id", "1"], "have not come in 1 seconds: name them"):
        ended = subprocess.run([*command, *flags], capture_output=True, text=True, check=False, timeout=60)
        assert message in ended.stderr
        assert ended.stderr.strip().count("\n") == 0


@pytest.mark.parametrize("process", [0, 1])
def test_one_of_several_processes_tells_why_none_starts(process: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "process_index", lambda: process)
    first = process == 0
    for other_failed, error, raised in [
        (0, OSError(), OSError),
        (1, OSError(), OSError if first else SystemExit),
        (1, None, SystemExit),
        (0, None, UsageError if first else SystemExit),  # The other has another digest, 0.
    ]:
        rows = functools.partial(np.insert, obj=2 if first else 0, values=[other_failed, 0])
        monkeypatch.setattr(processes.multihost_utils, "process_allgather", lambda mine, f=rows: f(mine).reshape(2, 2))
        with pytest.raises(raised), processes.in_all_processes():
            if error:
                raise error


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


def test_missing_extras_are_named() -> None:
    program = "import sys; sys.modules['orbax'] = None; from jax_grouped.examples.train_moe import main; main()"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    message = "orbax is missing: python3 -m pip install 'jax_grouped[examples]'"
    assert ended.stderr == f"train_moe: error: {message}\n"


def test_a_run_that_cools_down_ends_at_a_rate_of_zero_and_is_not_extended() -> None:
    chosen = parse(["--steps", "100", "--cool-down", "40", "--learning-rate", "0.5"])
    rate = parallel.learning_rate(chosen)
    assert [round(float(rate(number)), 3) for number in (20, 60, 80, 90, 100)] == [0.5, 0.5, 0.25, 0.125, 0.0]
    with pytest.raises(UsageError, match=r"was started with --steps 100, not 200"):
        parse(["--resume", "--steps", "200"], chosen.recorded())


ROWS = [Losses(0, None, 6.0), Losses(1, 5.5, None), Losses(2, 5.0, 4.5)]


def test_windows_depend_on_seed_and_step_alone_and_reach_the_ends_of_the_text() -> None:
    data = np.arange(10_000, dtype=np.uint16)

    windows = text_data.random_windows(data, sequence=64, batch=8, seed=1, step=2)

    assert np.array_equal(windows - windows[:, :1], np.tile(np.arange(65), (8, 1)))
    assert np.array_equal(windows, text_data.random_windows(data, 64, 8, 1, 2))
    for seed, step in ((1, 3), (2, 2)):
        assert not np.array_equal(windows, text_data.random_windows(data, 64, 8, seed, step))
    random = text_data.random_windows(data[:34], sequence=32, batch=64, seed=0, step=0)
    assert sorted(set(random[:, 0])) == [0, 1]
    assert text_data.even_windows(data[:34], sequence=32, count=3)[:, 0].tolist() == [0, 0, 1]


def test_a_folder_is_read_in_one_order_without_hidden_and_binary_files(tmp_path: Path) -> None:
    for name, content in {
        "a.txt": b"a" * 100,
        "b/c.md": b"c" * 100,
        "binary": b"\0" * 100,
        ".hidden": b"h" * 100,
        ".git/config": b"g" * 100,
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)

    corpus = text_data.read_corpus(str(tmp_path), sequence=8)

    assert bytes(corpus.train) + bytes(corpus.held_out) in (b"a" * 100 + b"c" * 100, b"c" * 100 + b"a" * 100)
    assert len(corpus.held_out) == 10
    assert corpus.sha256 == text_data.read_corpus(str(tmp_path), sequence=8).sha256


def test_rows_are_read_as_they_were_written_and_a_file_that_is_no_curve_is_reported(tmp_path: Path) -> None:
    path, header = tmp_path / "loss.csv", format_losses([])
    path.write_text(format_losses(ROWS))
    assert read_losses(path) == ROWS
    for content in ("", "something,else\n1,2\n", f"{header}1,\udcff,\n", f"{header}2,five,\n", f"{header}2,4.5\n"):
        path.write_text(content, errors="surrogateescape")

        with pytest.raises(UsageError, match=f"{path} is not a loss curve of this program"):
            read_losses(path)


def test_lines_of_metrics_have_the_losses_and_null_for_what_is_not_finite() -> None:
    lines = format_metrics([ROWS[0], ROWS[2], Losses(3, math.nan, None)], [{"step": 2, "dropped": [0.0]}])

    assert lines.splitlines() == [
        '{"step": 0, "held_out_loss": 6.0}',
        '{"step": 2, "train_loss": 5.0, "held_out_loss": 4.5, "dropped": [0.0]}',
        '{"step": 3, "train_loss": null}',
    ]


def test_the_picture_has_a_line_of_the_training_loss_and_dots_of_the_held_out_loss() -> None:
    (axes,) = draw(ROWS, "a model").axes

    assert axes.get_title() == "a model"
    train, held_out = axes.lines
    assert [list(line.get_xdata()) for line in (train, held_out)] == [[1, 2], [0, 2]]
    assert [list(line.get_ydata()) for line in (train, held_out)] == [[5.5, 5.0], [6.0, 4.5]]
    assert held_out.get_linestyle() == "None", "evaluations are steps apart"
