"""The example `train_moe`: its language model in both of Flax's APIs, and whole runs, on one device and on several."""

import json
import re
import shutil
import textwrap
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import jax_grouped as jg
from jax_grouped.examples import moe_lm, moe_lm_nnx, parallel, training
from jax_grouped.examples.loss_curve import Losses, format_losses, held_out_points, read_losses, train_points
from jax_grouped.examples.moe_lm import VOCABULARY
from jax_grouped.examples.parallel import StepMetrics, programs
from jax_grouped.examples.settings import Devices, parse
from tests.examples.programs import TINY, files_in, prepared, read_rows, succeed
from tests.meshes import need_devices

pytestmark = pytest.mark.slow

#: With microbatches that share kernels.
DELAYED = "--layer nnx --recipe delayed --microbatches 2"


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_run_learns_and_leaves_its_files(finished: tuple[Path, str]) -> None:
    folder, out = finished
    losses, metrics = read_losses(folder / "loss.csv"), read_metrics(folder)

    assert [step for step, _ in train_points(losses)] == [*range(1, 13)]
    assert [step for step, _ in held_out_points(losses)] == [0, 3, 6, 9, 12]
    assert losses[-1].held_out < losses[0].held_out - 1
    before, after = losses[0].held_out, losses[-1].held_out
    assert f"held-out loss: {before:.3f} nats per byte before training, {after:.3f} after, or " in out
    assert ", 1 layer, " in out
    assert "\ndone: step 12, at " in out
    assert f"\nfiles in {folder}:\n" in out
    assert all((folder / name).read_bytes().startswith(b"\x89PNG") for name in ("loss.png", "load.png"))
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["12", "8"]
    shown_losses = [Losses(row["step"], row.get("train_loss"), row.get("held_out_loss")) for row in metrics]
    assert format_losses(shown_losses) == (folder / "loss.csv").read_text()
    metrics = [row for row in metrics if "held_out_loss" in row and row["step"]]
    for row in metrics:
        assert np.shape(row["expert_load"]) == (1, 4)
        assert np.sum(row["expert_load"]) == pytest.approx(1)
        assert 0.9 < row["balance_loss"][0] < 4
        assert row["dropped"] == [0]
        assert 1 < row["amax"][0] < 100, "tokens have a norm of 1 per value"
        assert row["gradient_norm"] > 0

    writer = mock.Mock()
    training._add_events(writer, losses, metrics)
    shown: dict[str, list[tuple[int, float]]] = {}
    for tag, value, step in (call.args for call in writer.add_scalar.call_args_list):
        shown.setdefault(tag, []).append((step, value))
    assert shown["loss/train"] == train_points(losses)
    assert shown["loss/held_out"] == held_out_points(losses)
    assert [step for step, _ in shown["amax/block_0"]] == [3, 6, 9, 12]
    assert shown["amax/block_0"] == [(row["step"], row["amax"][0]) for row in metrics]
    assert shown["expert_load/block_0/expert_3"] == [(row["step"], row["expert_load"][0][3]) for row in metrics]
    (events,) = (folder / "tensorboard").iterdir()
    assert events.read_bytes().count(b"loss/train") == 12


def test_metrics_that_are_no_numbers_are_null() -> None:
    blocks = parallel.BlockMetrics(*(np.array(value) for value in ([np.inf], [[1, 3]], [1], [2.0])))

    row = training._metrics_row(5, StepMetrics(np.float32(1), np.float32("nan"), blocks))

    values = {"balance_loss": [None], "expert_load": [[0.25, 0.75]], "dropped": [0.25], "amax": [2.0]}
    assert row == {"step": 5, "gradient_norm": None, **values}


def test_a_finished_run_writes_the_same_text_when_asked_again(finished: tuple[Path, str], finished_copy: Path) -> None:
    _, out = finished
    text = out[out.index("sample, after a held-out text that ends in ") :]

    again = succeed("--out", finished_copy, "--resume", "--sample", 20)

    assert "the run was at step 12 already" in again
    assert again.endswith(text)
    assert len(textwrap.dedent(text.split("\n", 1)[1])) >= 20
    assert files_in(finished_copy) == files_in(finished[0])


def test_a_resumed_run_has_the_curve_of_an_uninterrupted_one(text_file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    succeed("--data", text_file, "--out", folder, "--steps", 6, *TINY, *DELAYED.split())
    interrupted = shutil.copytree(folder, tmp_path / "interrupted")
    shutil.rmtree(interrupted / "checkpoints" / "6")
    # A process that is killed leaves this; other files may be lost.
    (interrupted / "loss.csv.part").write_text("step,tra")
    (interrupted / "metrics.jsonl").unlink()

    out = succeed("--out", interrupted, "--resume")

    assert "resuming at step 4\n" in out
    assert read_rows(interrupted) == read_rows(folder)
    assert read_metrics(interrupted) == read_metrics(folder)


def test_a_run_goes_on_with_devices_that_are_used_otherwise(
    finished: tuple[Path, str], text_file: Path, tmp_path: Path
) -> None:
    need_devices(4)
    folder = tmp_path / "run"
    flags = ["--parallel", "pmap", "--devices", 2, "--microbatches", 2]
    out = succeed("--data", text_file, "--out", folder, "--steps", 6, *TINY, *flags)
    assert "pmap over 2 devices" in out

    resumed = ["--parallel", "expert", "--devices", 4, "--expert-devices", 2]
    out = succeed("--out", folder, "--resume", "--steps", 12, *resumed)

    assert "4 devices with the experts over 2" in out
    actual, expected = (read_losses(path / "loss.csv") for path in (folder, finished[0]))
    for points in (train_points, held_out_points):
        np.testing.assert_allclose(points(actual), points(expected), rtol=0.02)


@pytest.mark.parametrize(
    ("flags", "reference", "tolerance"),
    [
        ("--parallel pmap --devices 2", "", 0.03),
        ("--parallel expert --devices 4 --expert-devices 2", "", 0.03),
        # Microbatches have balance losses of their own, and those of several devices are of other tokens.
        (f"{DELAYED} --parallel expert --devices 4 --expert-devices 2", DELAYED, 0.1),
    ],
    ids=["pmap", "expert", "delayed scaling"],
)
def test_a_step_is_the_same_on_several_devices(
    flags: str, reference: str, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_devices(4)
    monkeypatch.setattr(parallel, "BALANCE_WEIGHT", 10.0)  # Most of a router's gradient is then the balance loss's.

    def take_steps(run: training.Run) -> tuple[TrainState, StepMetrics]:
        """Returns the state after two steps, and the metrics of the last one; whole arrays on the host."""
        take_step, state = run.step.compile(), run.programs.initialise()
        # Large gradients would be clipped, and that would hide a common factor.
        params = dict(state.params["params"])
        for layer in ("norm", "logits"):
            params[layer] = jax.tree.map(lambda x: jax.device_put(np.asarray(x) / 5, x.sharding), params[layer])
        state = state.replace(params={**state.params, "params": params})
        for batch in np.random.default_rng(0).integers(97, 105, size=(2, 8, 33), dtype=np.uint8):
            state, metrics = take_step(state, run.programs.split(batch))
        return jax.device_get((state, metrics))

    expected, actual = (take_steps(prepared(these)) for these in (reference, flags))

    # Beside the parameters, Adam's moments: they would show a gradient that is too large, and a balance loss that is a
    # mean over devices (0.07 in the embedding). Rounding to bfloat16 leaves up to 0.02.
    for (path, a), b in zip(jax.tree.leaves_with_path(expected), jax.tree.leaves(actual), strict=True):
        assert a.shape == b.shape
        assert np.linalg.norm(a - b) <= tolerance * np.linalg.norm(a), jax.tree_util.keystr(path)


def test_with_expert_parallelism_each_device_has_its_experts() -> None:
    need_devices(4)
    settings = parse([*TINY, "--parallel", "expert", "--recipe", "delayed"])

    state = programs(settings, Devices(4, expert=2)).state

    for path, leaf in jax.tree.leaves_with_path(state):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        experts = "/gate_up/" in name or "/down/" in name
        whole, local = leaf.shape, leaf.sharding.shard_shape(leaf.shape)
        assert local == ((whole[0] // 2, *whole[1:]) if experts else whole), name


EXPERTS = dict(num_experts=4, router=jg.moe.Router(2), hidden_features=32)
SIZES: dict[str, Any] = dict(d_model=16, num_layers=1, num_heads=2, dtype=jnp.float32, experts=EXPERTS)
LINEN = moe_lm.MoELanguageModel(**SIZES)


def as_in_nnx(params: dict[str, Any]) -> dict[Any, Any]:
    """Returns the linen model's parameters as the NNX model has them, whose blocks are a list."""
    blocks: dict[int, Any] = {}
    tree: dict[Any, Any] = {"blocks": blocks}
    for name, layer in params.items():
        numbered = re.fullmatch(r"(\w+)_(\d+)", name)
        if numbered:
            blocks.setdefault(int(numbered[2]), {})[numbered[1]] = layer
        else:
            tree[name] = layer
    return tree


def test_both_models_are_one_function_in_which_no_prediction_sees_a_later_byte() -> None:
    tokens = jax.random.randint(jax.random.key(0), (2, 12), 0, VOCABULARY)
    params = jax.jit(LINEN.init)(jax.random.key(1), tokens)["params"]
    graph, state = nnx.split(nnx.eval_shape(lambda: moe_lm_nnx.MoELanguageModel(**SIZES, rngs=nnx.Rngs(0))))
    nnx.replace_by_pure_dict(state, as_in_nnx(params))
    predict = jax.jit(LINEN.apply)

    logits, metrics = predict({"params": params}, tokens)
    nnx_logits, nnx_metrics = jax.jit(lambda state: nnx.merge(graph, state)(tokens))(state)
    changed = predict({"params": params}, tokens.at[0, 8].add(1))[0]

    np.testing.assert_allclose(nnx_logits, logits, rtol=1e-5, atol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), nnx_metrics, metrics)
    np.testing.assert_allclose(logits[:, :8], changed[:, :8], rtol=1e-5, atol=1e-5)
    assert float(jnp.max(jnp.abs(logits[0, 8:] - changed[0, 8:]))) > 1e-3
    np.testing.assert_array_equal(logits[1], changed[1])


def test_a_recipe_computes_all_experts_and_nothing_else_in_fp8() -> None:
    for flags, types in {
        "--recipe bf16": set(),
        "--recipe current --layer nnx": {"f8_e4m3fn", "f8_e5m2"},
        "--recipe mxfp8": {"f8_e4m3fn", "f8_e8m0fnu"},
    }.items():
        computed = programs(parse([*flags.split(), "--layers", "2"]), Devices(1, 1))

        step = str(computed.take_step.trace(computed.state, jax.ShapeDtypeStruct((1, 2, 17), "uint8")).jaxpr)

        assert set(re.findall(r"f8_\w+", step)) == types, flags
        # Two layers, of which each has two matmuls with three products.
        assert step.count("a=QuantizedLayout(") == (12 if types else 0), flags
