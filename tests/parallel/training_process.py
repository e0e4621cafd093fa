"""One of several processes that train together: `python3 -m tests.parallel.training_process PORT PROCESS PROCESSES`.

The last line that it prints is a JSON list, the losses of all steps.
"""

import json
import sys

import jax

from tests.meshes import mesh_of
from tests.parallel import programs

DEVICES = 4
#: The experts' axis is the first, so it spans the processes.
AXES = dict(expert=4, data=2)


def main(port: str, process: str, processes: str) -> None:
    jax.config.update("jax_num_cpu_devices", DEVICES)
    jax.distributed.initialize(f"localhost:{port}", int(processes), int(process), initialization_timeout=60)
    losses, _ = programs.sharded(programs.model("nnx", AXES), mesh_of(AXES)).run()
    print(json.dumps(losses.tolist()))


if __name__ == "__main__":
    main(*sys.argv[1:])
