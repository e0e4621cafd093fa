"""Weak scaling over GPUs: what a profile shows of communication, and the programs, on devices of any kind."""

import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest

from benchmarks import gpus, plot
from benchmarks.__main__ import main
from benchmarks.gpus import LAYERS, exchange, exposed, layer
from benchmarks.runner import Span
from tests.meshes import need_devices

SMALL = dataclasses.replace(LAYERS["dsv3"], num_groups=4, tokens=32, K=128, N=256, top_k=2)


def test_exposed_communication_is_that_under_which_nothing_runs() -> None:
    spans = [
        Span("nvjet", 0.0, 10.0),
        Span("ncclDevKernel_AllGather", 5.0, 30.0),  # 15 alone, until the next kernel starts
        Span("nvjet", 25.0, 40.0),
        Span("ncclDevKernel_SendRecv", 50.0, 60.0),
        Span("MemcpyP2P", 52.0, 65.0),  # 15 together
    ]

    communication, alone = exposed(spans)

    assert communication * 1e9 == pytest.approx(25 + 15)
    assert alone * 1e9 == pytest.approx(15 + 15)


@pytest.mark.parametrize("variant", gpus.RECIPES)
def test_a_step_on_two_devices_is_that_of_one(variant: str) -> None:
    need_devices(2)
    twice = dataclasses.replace(SMALL, num_groups=2 * SMALL.num_groups, tokens=2 * SMALL.tokens)

    y, gradients = (lambda work: work.program(*work.arguments))(layer(SMALL, gpus.RECIPES[variant], 2, None))

    expected, expected_gradients = (lambda work: work.program(*work.arguments))(
        layer(twice, gpus.RECIPES[variant], 1, None)
    )
    for got, wanted in zip((y, *gradients), (expected, *expected_gradients), strict=True):
        got, wanted = (np.asarray(of, np.float32) for of in (got, wanted))
        assert np.linalg.norm(got - wanted) < 0.03 * np.linalg.norm(wanted)


def test_the_exchange_sends_a_part_to_each_device() -> None:
    need_devices(2)
    work = exchange(SMALL, 2)

    assert work.program(*work.arguments).shape == (4, SMALL.tokens, SMALL.K)


def test_rows_are_drawn(tmp_path: Path) -> None:
    row = dict(layer="dsv3", variant="bf16", gpus=2, one_gpu_ms=[[0.9], [1.0]], all_gpus_ms=[1.25], efficiency=0.8)
    picture = tmp_path / "gpus.png"

    plot.gpus([row | dict(exposed_ms=0.2)], "H200", picture)

    assert picture.read_bytes().startswith(b"\x89PNG")


def test_one_gpu_is_too_few(capsys: pytest.CaptureFixture[str]) -> None:
    if jax.default_backend() == "gpu" and jax.device_count() > 1:
        pytest.skip("there are several GPUs")

    with pytest.raises(SystemExit):
        main(["gpus"])

    assert "needs several GPUs, JAX finds" in capsys.readouterr().err
