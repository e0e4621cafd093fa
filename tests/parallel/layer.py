"""A MoE layer under plain `jax.jit`, with its gradients, for tests that compare several devices with one."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_grouped as jg
from tests.parallel.programs import BLOCK, FP8_TOLERANCE, placed

#: `K` is more than the 128 features that have a scale in common.
T, K, F, E, TOP_K = 64, 144, 32, 8, 2
RECIPES = {"block": BLOCK}
#: Tolerances relative to the norm of an array.
TOLERANCES = {"block": FP8_TOLERANCE["xla"]}
METHODS = "gather", "padded"


def results(mesh: Mesh, recipe: str, exchange: Any = "auto") -> dict[str, np.ndarray]:
    """Returns the layer's result, load and gradients as whole arrays.

    Args:
        mesh: a mesh whose axes split the tokens; one with the name `expert` splits the experts too.
        recipe: a name among `RECIPES`.
        exchange: that of `Parallel`.
    """
    expert = "expert" if "expert" in mesh.axis_names else None
    tokens, experts = P(mesh.axis_names), P(expert)
    parallel = jg.moe.Parallel(experts=expert, batch=mesh.axis_names, exchange=exchange)
    options: dict[str, Any] = dict(router=jg.moe.Router(TOP_K), parallel=parallel, recipe=RECIPES[recipe])

    def loss(x: jax.Array, logits: jax.Array, *kernels: jax.Array) -> tuple[jax.Array, Any]:
        # The default precision of GPUs would round float32 to TF32.
        precision = "highest" if options["recipe"] is None else None
        y, metrics = jg.moe.moe_mlp(x, logits, *kernels, precision=precision, **options)
        return jnp.sum(jnp.sin(y)), (y, metrics.expert_load)

    def whole(*arrays: jax.Array) -> dict[str, jax.Array]:
        gradients, (y, load) = jax.grad(loss, argnums=(0, 1, 2, 3), has_aux=True)(*arrays)
        return dict(zip(("x", "logits", "gate_up", "down"), gradients, strict=True), y=y, load=load)

    rng = np.random.default_rng(0)
    shapes = {(T, K): tokens, (T, E): tokens, (E, K, 2 * F): experts, (E, F, K): experts}
    scales = 1, 1, K**-0.5, F**-0.5
    arrays = [
        placed(mesh, rng.standard_normal(shape, np.float32) * np.float32(scale), spec)
        for (shape, spec), scale in zip(shapes.items(), scales, strict=True)
    ]
    computed = jax.jit(whole, out_shardings=NamedSharding(mesh, P()))(*arrays)
    return jax.tree.map(np.asarray, computed)
