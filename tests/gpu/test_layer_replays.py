"""A captured layer of experts gives the bits of the uncaptured one, replay after replay, however tokens are routed."""

import pytest

from tests.gpu import captured_runs
from tests.gpu.layer_replays import LAYERS

pytestmark = pytest.mark.gpu

REPLAYS = 500


@pytest.mark.parametrize("layer", LAYERS)
def test_replays_give_the_uncaptured_result(layer: str) -> None:
    captured_runs.check_replays(
        *("tests.gpu.layer_replays", "--replays", str(REPLAYS), "--layers", layer),
        expected=f"{layer}: {REPLAYS} replays, 0 mismatches, {REPLAYS} distinct results",
    )
