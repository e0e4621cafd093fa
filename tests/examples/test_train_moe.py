"""The example `train_moe`: its model against a plain one, its data, and whole runs on tiny sizes."""

import contextlib
import csv
import functools
import io
import json
import re
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_grouped.examples import loss_curve, moe_lm, settings, text_data, training
from jax_grouped.examples.train_moe import main

Params = dict[str, dict[str, jax.Array]]

TINY = shlex.split(
    "--d-model 32 --layers 1 --heads 2 --experts 4 --batch 4 --sequence 32 --learning-rate 0.01 "
    "--eval-every 3 --save-every 4"
)


def run(*flags: object) -> tuple[int, str, str]:
    """Exit status, standard output and standard error of the program."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main([str(flag) for flag in flags])
    return status, out.getvalue(), err.getvalue()


def read_rows(folder: Path) -> list[list[str]]:
    with (folder / "loss.csv").open(newline="") as file:
        return list(csv.reader(file))


@pytest.fixture(scope="module")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(f"{number} squared is {number**2}.\n" for number in range(1000)))
    return path


@pytest.fixture(scope="module")
def finished(text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of a run of 12 steps, and what the run printed."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    status, out, err = run("--data", text_file, "--out", folder, "--steps", 12, *TINY)
    assert status == 0, err
    return folder, out


@pytest.fixture
def finished_copy(finished: tuple[Path, str], tmp_path: Path) -> Path:
    return shutil.copytree(finished[0], tmp_path / "run")


def test_a_run_learns_and_leaves_its_files(finished: tuple[Path, str]) -> None:
    folder, out = finished
    rows = read_rows(folder)

    assert rows[0] == ["step", "train_loss", "held_out_loss"]
    assert [row[0] for row in rows[1:]] == [str(step) for step in range(13)]
    assert [row[0] for row in rows[1:] if row[2]] == ["0", "3", "6", "9", "12"]
    before, after = float(rows[1][2]), float(rows[-1][2])
    assert after < before - 1
    assert f"held-out loss before: {before:.3f} nats per byte" in out
    assert f"held-out loss after: {after:.3f} nats per byte" in out
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["12", "8"]
    for path in ("loss.png", "loss.csv", "checkpoints/12"):
        assert str(folder / path) in out


def test_a_resumed_run_has_the_curve_of_an_uninterrupted_one(
    finished: tuple[Path, str], text_file: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    status, _, err = run("--data", text_file, "--out", folder, "--steps", 6, *TINY)
    assert status == 0, err
    # What a process leaves that is killed between two checkpoints, while writing a row.
    with (folder / "loss.csv").open("a") as file:
        file.write("7,1.000000,\n8,1.0")

    status, out, err = run("--out", folder, "--resume", "--steps", 12)

    assert status == 0, err
    assert "resuming at step 6" in out
    assert read_rows(folder) == read_rows(finished[0])


def test_a_run_that_cools_down_ends_at_a_rate_of_zero_and_is_not_extended() -> None:
    flags = ["--steps", "100", "--cool-down", "40", "--learning-rate", "0.5"]
    chosen = settings.parse(flags)
    rate = training.learning_rate(chosen)
    assert [round(float(rate(step)), 3) for step in (20, 60, 80, 90, 100)] == [0.5, 0.5, 0.25, 0.125, 0.0]
    with pytest.raises(settings.UsageError, match=r"was started with --steps 100, not 200"):
        settings.parse_resumed(["--resume", "--steps", "200"], chosen.recorded())


def test_delayed_scaling_resumes_with_what_it_remembers(text_file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    status, out, err = run("--data", text_file, "--out", folder, "--steps", 6, "--recipe", "delayed", *TINY)
    assert status == 0, err
    interrupted = shutil.copytree(folder, tmp_path / "interrupted")
    shutil.rmtree(interrupted / "checkpoints" / "6")

    status, resumed_out, err = run("--out", interrupted, "--resume")

    assert status == 0, err
    assert "resuming at step 4" in resumed_out
    model = next(line for line in out.splitlines() if line.startswith("model: "))
    assert model.endswith("recipe delayed")
    assert model in resumed_out
    rows = read_rows(interrupted)
    assert rows == read_rows(folder)
    assert float(rows[-1][2]) < float(rows[1][2])


@pytest.mark.parametrize(
    ("recipe", "types"),
    [
        ("bf16", set()),
        ("block", {"f8_e4m3fn"}),
        ("current", {"f8_e4m3fn", "f8_e5m2"}),
        ("delayed", {"f8_e4m3fn", "f8_e5m2"}),
        ("mxfp8", {"f8_e4m3fn", "f8_e8m0fnu"}),
    ],
)
def test_a_recipe_computes_all_experts_and_nothing_else_in_fp8(recipe: str, types: set[str]) -> None:
    flags = settings.parse(["--recipe", recipe, "--layers", "2"])
    state = jax.eval_shape(functools.partial(training.create_state, flags))

    step = str(training.train_step.trace(state, jax.ShapeDtypeStruct((2, 17), "uint8")).jaxpr)

    assert set(re.findall(r"f8_\w+", step)) == types
    # Two layers, of which each has two matmuls with three products.
    assert step.count("scaled_matmul[") == (12 if types else 0)
    assert training.parameter_count(flags) == training.parameter_count(settings.parse(["--layers", "2"]))


def test_resuming_a_finished_run_says_so(finished: tuple[Path, str], finished_copy: Path) -> None:
    status, out, _ = run("--out", finished_copy, "--resume")

    assert status == 0
    assert "the run was at step 12 already" in out
    assert read_rows(finished_copy) == read_rows(finished[0])


def test_a_new_run_moves_the_earlier_one(finished: tuple[Path, str], finished_copy: Path, text_file: Path) -> None:
    status, out, err = run("--data", text_file, "--out", finished_copy, "--steps", 1, *TINY)

    assert status == 0, err
    assert f"has been moved to {finished_copy / 'earlier-1'}" in out
    assert read_rows(finished_copy / "earlier-1") == read_rows(finished[0])
    assert (finished_copy / "earlier-1" / "checkpoints" / "12").is_dir()
    assert [row[0] for row in read_rows(finished_copy)[1:]] == ["0", "1"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--bogus", "unrecognized arguments: --bogus"),
        ("--steps 0", "argument --steps: must be a positive integer, got '0'"),
        ("--batch 2.5", "argument --batch: must be a positive integer, got '2.5'"),
        ("--seed -1", "argument --seed: must be an integer from 0 to 2147483647, got '-1'"),
        ("--learning-rate nan", "argument --learning-rate: must be a positive number, got 'nan'"),
        ("--cool-down -1", "argument --cool-down: must be an integer of at least 0, got '-1'"),
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


@pytest.mark.parametrize("content", [None, "", "[1]", '{"steps": 12}'])
def test_damaged_settings_are_reported(content: str | None, finished_copy: Path) -> None:
    file = finished_copy / "settings.json"
    file.unlink()
    if content is not None:
        file.write_text(content)

    status, _, err = run("--out", finished_copy, "--resume")

    assert status == 2
    assert "settings.json is missing or damaged" in err or "the run has no record of" in err


@pytest.mark.parametrize("module", ["flax", "matplotlib", "optax", "orbax", "tqdm"])
def test_missing_extras_are_named(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(sys.modules):
        if name.partition(".")[0] == module or name.startswith("jax_grouped.examples."):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)

    status, _, err = run()

    assert status == 2
    assert f"{module}" in err
    assert "python3 -m pip install 'jax_grouped[examples]'" in err


def test_settings_are_recorded_in_full(finished: tuple[Path, str]) -> None:
    recorded = json.loads((finished[0] / "settings.json").read_text())

    assert settings.parse_resumed([], recorded).recorded() == {
        name: value for name, value in recorded.items() if name != "text_sha256"
    }


def test_windows_depend_on_seed_and_step_alone() -> None:
    data = np.arange(10_000, dtype=np.uint16)

    windows = text_data.random_windows(data, sequence=64, batch=8, seed=1, step=2)

    assert windows.shape == (8, 65)
    assert np.array_equal(windows - windows[:, :1], np.tile(np.arange(65), (8, 1)))
    assert np.array_equal(windows, text_data.random_windows(data, 64, 8, 1, 2))
    assert not np.array_equal(windows, text_data.random_windows(data, 64, 8, 1, 3))
    assert not np.array_equal(windows, text_data.random_windows(data, 64, 8, 2, 2))


def test_windows_reach_the_ends_of_the_text() -> None:
    data = np.arange(34)

    random = text_data.random_windows(data, sequence=32, batch=64, seed=0, step=0)

    assert sorted(set(random[:, 0])) == [0, 1]
    assert text_data.even_windows(data, sequence=32, count=3)[:, 0].tolist() == [0, 0, 1]


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
    (tmp_path / "dangling").symlink_to("nowhere")

    corpus = text_data.read_corpus(str(tmp_path), sequence=8)

    assert bytes(corpus.train) + bytes(corpus.held_out) in (b"a" * 100 + b"c" * 100, b"c" * 100 + b"a" * 100)
    assert len(corpus.held_out) == 10
    assert corpus.sha256 == text_data.read_corpus(str(tmp_path), sequence=8).sha256


def test_the_default_text_is_the_standard_library() -> None:
    corpus = text_data.read_corpus(None, sequence=128)

    text = bytes(corpus.train) + bytes(corpus.held_out)
    assert len(text) > 1_000_000
    assert b"class ArgumentParser" in text


def test_a_file_that_is_no_curve_is_reported(tmp_path: Path) -> None:
    (tmp_path / "loss.csv").write_text("something,else\n1,2\n")

    with pytest.raises(settings.UsageError, match="is not a loss curve"):
        loss_curve.LossCurve(tmp_path).cut(5)


@pytest.mark.parametrize("top_k", [1, 2, 5])
def test_routing_sorts_the_pairs_by_expert(top_k: int) -> None:
    tokens, experts = 37, 5
    # No token likes expert 2: its group is empty unless every expert is chosen.
    logits = jax.random.normal(jax.random.key(0), (tokens, experts)).at[:, 2].add(-100)

    routing = moe_lm.route(logits, top_k)

    chosen = np.argsort(-np.asarray(logits), axis=1)[:, :top_k]
    assert routing.group_sizes.tolist() == np.bincount(chosen.ravel(), minlength=experts).tolist()
    assert np.array_equal(chosen.ravel()[routing.order], np.sort(chosen.ravel()))
    assert np.array_equal(np.asarray(routing.order)[routing.inverse], np.arange(tokens * top_k))
    np.testing.assert_allclose(jnp.sum(routing.weights, axis=1), 1, rtol=1e-6)


@pytest.mark.parametrize(("logits", "loss"), [(jnp.zeros((8, 4)), 1.0), (jnp.zeros((8, 4)).at[:, 1].set(100), 4.0)])
def test_the_balance_loss_is_that_of_the_paper(logits: jax.Array, loss: float) -> None:
    # All experts at equal odds give 1 however ties are broken; one expert for all tokens gives E.
    assert float(moe_lm.route(logits, top_k=1).balance_loss) == pytest.approx(loss)


def plain_experts(params: Params, x: jax.Array, chosen: np.ndarray) -> jax.Array:
    """What `MoEMLP` promises, a token and an expert at a time."""
    outputs = []
    for token, experts in zip(x, chosen, strict=True):
        probabilities = jax.nn.softmax(token @ params["router"]["kernel"])[experts]
        output = jnp.zeros_like(token)
        for weight, expert in zip(probabilities / jnp.sum(probabilities), experts, strict=True):
            hidden = jax.nn.gelu(token @ params["up"]["kernel"][expert] + params["up"]["bias"][expert])
            output += weight * (hidden @ params["down"]["kernel"][expert] + params["down"]["bias"][expert])
        outputs.append(output)
    return jnp.stack(outputs)


@pytest.mark.parametrize("top_k", [1, 3])
def test_experts_and_their_gradients_match_a_loop_over_tokens(top_k: int) -> None:
    x, dy = jax.random.normal(jax.random.key(1), (2, 12, 16))
    layer = moe_lm.MoEMLP(num_experts=6, top_k=top_k, hidden=24, dtype=jnp.float32)
    params = jax.jit(layer.init)(jax.random.key(2), x)["params"]
    # The initial biases are zero, which would hide how they are used.
    params = jax.tree.map(lambda p: p + 0.1 * jax.random.normal(jax.random.key(3), p.shape), params)
    chosen = np.argsort(-np.asarray(x @ params["router"]["kernel"]), axis=1)[:, :top_k]

    def with_gradients(layer: Callable[[Params, jax.Array], jax.Array]) -> tuple[jax.Array, tuple[Params, jax.Array]]:
        def compute(params: Params, x: jax.Array) -> tuple[jax.Array, tuple[Params, jax.Array]]:
            y, vjp = jax.vjp(layer, params, x)
            return y, vjp(dy)

        with jax.default_matmul_precision("highest"):
            return jax.jit(compute)(params, x)

    actual = with_gradients(lambda params, x: layer.apply({"params": params}, x)[0])
    expected = with_gradients(lambda params, x: plain_experts(params, x, chosen))

    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), actual, expected)


def test_no_prediction_sees_a_later_byte() -> None:
    model = moe_lm.MoELanguageModel(
        d_model=16, num_layers=2, num_heads=2, num_experts=4, top_k=2, d_ff=16, dtype=jnp.float32
    )
    tokens = jax.random.randint(jax.random.key(0), (1, 12), 0, moe_lm.VOCABULARY)
    params = jax.jit(model.init)(jax.random.key(1), tokens)
    predict = jax.jit(model.apply)

    logits = predict(params, tokens)[0]
    changed = predict(params, tokens.at[0, 8].add(1))[0]

    np.testing.assert_allclose(logits[:, :8], changed[:, :8], rtol=1e-5, atol=1e-5)
    assert float(jnp.max(jnp.abs(logits[:, 8:] - changed[:, 8:]))) > 1e-3
