"""One of several processes that train together, and then compute a layer with each method of the exchange.

Run `python3 -m tests.parallel.training_process PORT PROCESS PROCESSES OUT`. It writes `OUT`, a file of type `.npz`: the
losses of all steps, and the arrays of the layer by recipe, method and name.
"""

import sys

import jax
import numpy as np

from tests.meshes import mesh_of
from tests.parallel import layer, programs

DEVICES = 4
#: The experts' axis is the first, so it spans the processes.
AXES = dict(expert=4, data=2)


def main(port: str, process: str, processes: str, out: str) -> None:
    jax.config.update("jax_num_cpu_devices", DEVICES)
    jax.distributed.initialize(f"localhost:{port}", int(processes), int(process), initialization_timeout=60)
    mesh = mesh_of(AXES)
    losses, _ = programs.sharded(programs.model("nnx", AXES), mesh).run()
    arrays = {"losses": losses}
    for recipe in layer.RECIPES:
        for method in layer.METHODS:
            layer_results = layer.results(mesh, recipe, method)
            arrays |= {f"{recipe} {method} {name}": array for name, array in layer_results.items()}
    np.savez(out, **arrays)


if __name__ == "__main__":
    main(*sys.argv[1:])
