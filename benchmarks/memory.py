"""Memory that XLA plans for beside arguments and results of training steps, compiled for an H200 that is not there."""

import functools
import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies

import jax_grouped as jg
from benchmarks.shapes import Shape
from jax_grouped.kernels import primitive

_CONFIG = Path(__file__).with_name("h200.txtpb").read_text()
_LAYERS = 4
_BLOCK = jg.Float8BlockScaling()
_NO_KERNELS = jax.checkpoint_policies.save_only_these_names("jax_grouped_x", "jax_grouped_hidden")
_PLACES = {"offload_src": "device", "offload_dst": "pinned_host"}
_OFFLOADED = jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=["jax_grouped_x"], names_which_can_be_offloaded=["jax_grouped_hidden"], **_PLACES
)

#: Recipe, and residuals of a layer: all that the backward pass reads, all but the quantized kernels, nothing, or the
#: quantized tokens on the device and the input of the activation in the host's memory. Caches are arguments.
VARIANTS: dict[str, tuple[jg.Recipe | None, Callable[..., Any]]] = {
    "bf16": (None, lambda layer, **_: layer),
    "block": (_BLOCK, lambda layer, **_: layer),
    "block, cached": (_BLOCK, lambda layer, **_: layer),
    "block, kernels are not kept": (_BLOCK, functools.partial(jax.checkpoint, policy=_NO_KERNELS)),
    "bf16, nothing is kept": (None, jax.checkpoint),
    "block, nothing is kept": (_BLOCK, jax.checkpoint),
    "bf16, hidden in host memory": (None, functools.partial(jax.checkpoint, policy=_OFFLOADED)),
    "block, hidden in host memory": (_BLOCK, functools.partial(jax.checkpoint, policy=_OFFLOADED)),
}

#: Layers of a step, and the type of all kernels: one layer; four pairs of such a layer and one back, in sequence; or
#: four MLPs in a scan, each of such a layer, SwiGLU and one back. With SGD the kernels change in place; else their
#: gradients are results.
OPERATIONS = {
    "gradients, bfloat16 kernel": ("one", "bfloat16"),
    "gradients, float32 kernel": ("one", "float32"),
    "SGD, float32 kernel": ("one", "float32"),
    "SGD of four pairs": ("pairs", "float32"),
    "four MLPs": ("mlps", "bfloat16"),
}


def missing() -> str | None:
    """Returns what has to be installed first, or None if it is all there."""
    if importlib.util.find_spec("jax_plugins") is None or importlib.util.find_spec("jax_plugins.xla_cuda13") is None:
        return "JAX's plugin for CUDA (jax-cuda13-plugin and jax-cuda13-pjrt)"
    if primitive.load_extension() is None:
        return "the CUDA extension, whose handlers XLA asks what they can do"
    return None


@functools.cache
def h200s(count: int) -> Sequence[jax.Device]:
    return topologies.get_topology_desc("h200", "cuda", target_config=_CONFIG, topology=f"1x{count}x1").devices


def compile_for_h200(
    function: Callable[..., Any], *arguments: Any, donated: tuple[int, ...] = (), options: dict[str, Any] | None = None
) -> jax.stages.Compiled:
    """Compiles the function for arguments like these, of which only shapes and types are read, with XLA's options."""
    sharding = jax.sharding.SingleDeviceSharding(h200s(1)[0])
    placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), arguments)
    return jax.jit(function, out_shardings=sharding, donate_argnums=donated).lower(*placed).compile(options)


def planned_bytes(shape: Shape, operation: str, variant: str) -> int:
    """Compiles a step and returns the bytes that XLA plans for beside arguments and results."""
    if what := missing():
        raise RuntimeError(f"needs {what}")
    layers, kernel_dtype = OPERATIONS[operation]
    sgd = operation.startswith("SGD")
    recipe, keep = VARIANTS[variant]
    E, T, K, N = shape.num_groups, shape.tokens, shape.K, shape.N

    def run(x: jax.Array, kernels: Any, caches: Any, sizes: jax.Array, dy: jax.Array) -> Any:
        def layer(x: jax.Array, weights: Any) -> jax.Array:
            if layers == "mlps":
                return jg.moe.grouped_mlp(x, weights[0], weights[1], sizes, recipe=recipe)
            return jg.grouped_dense(x, group_sizes=sizes, recipe=recipe, **weights._asdict())

        def model(x: jax.Array, kernels: Any) -> jax.Array:
            weights = [jg.moe.Weights(one, kernel_cache=cache) for one, cache in zip(kernels, caches, strict=True)]
            if layers == "mlps":
                # The barriers of prevent_cse, which a scan does not need, would make XLA copy each layer's kernels.
                step = keep(layer, prevent_cse=False)
                return jax.lax.scan(lambda x, weights: (step(x, weights), None), x, weights)[0]
            return functools.reduce(keep(layer), weights, x)

        y, pullback = jax.vjp(model, x, kernels)
        dx, dkernels = pullback(dy)
        if not sgd:
            return y, dx, dkernels
        return y, dx, jax.tree.map(lambda kernel, dkernel: kernel - 1e-3 * dkernel, kernels, dkernels)

    shapes: dict[str, list[tuple[int, ...]]] = {
        "one": [(E, K, N)],
        "pairs": [(E, K, N), (E, N, K)] * _LAYERS,
        "mlps": [(_LAYERS, E, K, N), (_LAYERS, E, N // 2, K)],
    }
    kernels = tuple(jax.ShapeDtypeStruct(dims, jnp.dtype(kernel_dtype)) for dims in shapes[layers])
    quantize = functools.partial(jg.quantize_kernel, recipe=_BLOCK)
    quantize_all = jax.vmap(quantize) if layers == "mlps" else quantize
    caches = tuple(jax.eval_shape(quantize_all, kernel) if "cached" in variant else None for kernel in kernels)
    x, dy = (jax.ShapeDtypeStruct((T, features), jnp.bfloat16) for features in (K, N if layers == "one" else K))
    arguments = x, kernels, caches, jax.ShapeDtypeStruct((E,), jnp.int32), dy
    analysis: Any = compile_for_h200(run, *arguments, donated=(1,) if sgd else ()).memory_analysis()
    return analysis.temp_size_in_bytes
