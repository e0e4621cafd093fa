"""Processes that compute together."""

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

SECONDS = 240


def free_port() -> str:
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return str(listener.getsockname()[1])


@contextlib.contextmanager
def started(
    module: str,
    arguments: Sequence[str],
    environments: Sequence[Mapping[str, str]],
    folder: Path,
    seconds: float = SECONDS,
) -> Iterator[None]:
    """Runs a module in a process for each environment, on CPUs unless that says where.

    Waits at the end of the context for their success.
    """
    paths, processes = [folder / f"{number}.err" for number in range(len(environments))], []
    for path, environment in zip(paths, environments, strict=True):
        with path.open("w") as errors:
            command = [sys.executable, "-m", module, *arguments]
            variables = os.environ | {"JAX_PLATFORMS": "cpu"} | environment
            root = Path(__file__).parents[1]
            processes.append(subprocess.Popen(command, stdout=errors, stderr=errors, cwd=root, env=variables))
    try:
        yield
        # If one has failed, others might wait for it forever.
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and None in [process.poll() for process in processes]:
            if any(process.poll() for process in processes):
                break
            time.sleep(0.1)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    codes = [process.returncode for process in processes]
    assert codes == [0] * len(processes), "\n".join(path.read_text() for path in paths)
