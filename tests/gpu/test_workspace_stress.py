"""Products that share XLA's temporary memory give the same bits, replay after replay, as those with their own."""

import pytest

from tests.gpu import captured_runs

pytestmark = pytest.mark.gpu

REPLAYS = 300


@pytest.mark.parametrize("executables", [1, 2], ids=["one-executable", "two-executables"])
@pytest.mark.parametrize("workspaces", ["shared", "own"])
def test_replays_give_the_uncaptured_result(workspaces: str, executables: int) -> None:
    options = ["--replays", str(REPLAYS), "--workspaces", workspaces, "--executables", str(executables), "--poison"]
    captured_runs.check_replays(
        "tests.gpu.workspace_stress", *options, expected=f"{REPLAYS} replays each, 0 mismatches"
    )
