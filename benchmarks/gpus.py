"""Weak scaling of a whole layer over GPUs: each GPU that is added brings its own tokens and experts."""

import argparse
import dataclasses
import functools
from collections.abc import Sequence
from statistics import mean, median
from typing import Any

import jax
import jax.numpy as jnp
import tabulate
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_grouped as jg
from benchmarks.peers import JaxWork
from benchmarks.rows import Record
from benchmarks.runner import Span, profile
from benchmarks.shapes import SHAPES, Shape
from jax_grouped.examples.parallel import COPY_ENGINES
from jax_grouped.examples.settings import UsageError
from jax_grouped.kernels.primitive import cuda_devices

#: Layers of one GPU.
LAYERS = {"dsv3": SHAPES["dsv3 layer"], "qwen3": dataclasses.replace(SHAPES["qwen3 layer"], num_groups=64)}
RECIPES = {"bf16": None, "block": jg.Float8BlockScaling()}
AXIS = "expert"
_BLOCKS, _CALLS, _PROFILED_CALLS = 8, 12, 4


def _mesh(gpus: int, first: int = 0) -> Mesh:
    return jax.make_mesh((gpus,), (AXIS,), axis_types=(AxisType.Auto,), devices=jax.devices()[first : first + gpus])


def layer(shape: Shape, recipe: jg.Recipe | None, gpus: int, capacity_factor: float | None, first: int = 0) -> JaxWork:
    """Makes the forward and the backward pass of a layer under plain `jax.jit`, on this many GPUs from `first` on."""
    mesh, k = _mesh(gpus, first), shape.top_k
    tokens, experts, K, F = gpus * shape.tokens, gpus * shape.num_groups, shape.K, shape.N // 2
    shapes = (tokens, K), (K, experts), (experts, K, 2 * F), (experts, F, K), (tokens, K)
    specs = P(AXIS), P(), P(AXIS), P(AXIS), P(AXIS)

    def draw(keys: jax.Array) -> list[jax.Array]:
        drawn = zip(keys, shapes, (1, K, K, F, 1), strict=True)
        return [jax.random.normal(key, dims, jnp.bfloat16) * width**-0.5 for key, dims, width in drawn]

    shardings = [NamedSharding(mesh, spec) for spec in specs]
    arguments = jax.jit(draw, out_shardings=shardings)(jax.random.split(jax.random.key(0), len(shapes)))
    options: dict[str, Any] = dict(
        router=jg.moe.Router(k, capacity_factor=capacity_factor if gpus > 1 else None),
        parallel=jg.moe.Parallel(experts=AXIS if gpus > 1 else None),
        recipe=recipe,
    )

    def step(x: jax.Array, router: jax.Array, gate_up: jax.Array, down: jax.Array, dy: jax.Array) -> Any:
        def forward(x: jax.Array, router: jax.Array, gate_up: jax.Array, down: jax.Array) -> jax.Array:
            logits = jg.moe.router_logits(x, router)
            return jg.moe.moe_mlp(x, logits, gate_up, down, **options)[0]

        y, pull_back = jax.vjp(forward, x, router, gate_up, down)
        # In a model, the gradient of the result follows from the result.
        y, dy = jax.lax.optimization_barrier((y, dy))
        return y, pull_back(dy)

    return JaxWork(step, [arguments], options=COPY_ENGINES if gpus > 1 else None)


def exchange(shape: Shape, gpus: int) -> JaxWork:
    """Makes an exchange that sends this GPU's tokens to each other one, as the layer does with sums."""
    mesh = _mesh(gpus)
    x = jnp.zeros((gpus * gpus, shape.tokens, shape.K), jnp.bfloat16, device=NamedSharding(mesh, P(AXIS)))
    send = functools.partial(jax.lax.all_to_all, axis_name=AXIS, split_axis=0, concat_axis=0)
    program = jax.shard_map(send, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS))
    return JaxWork(program, [(x,)], options=COPY_ENGINES)


def time_in_turns(works: Sequence[JaxWork]) -> list[list[float]]:
    """Returns the milliseconds per call of some blocks of each program, in ascending order."""
    # They take turns: at its limit of power, a GPU changes its clock from second to second.
    for work in works:
        work.block(1)  # Compiles.
    turns = [[1e3 * work.block(_CALLS) / _CALLS for work in works] for _ in range(1 + _BLOCKS)]
    return [sorted(times) for times in zip(*turns[1:], strict=True)]


def exposed(spans: Sequence[Span]) -> tuple[float, float]:
    """Returns the seconds in which one GPU communicates, and those in which it does nothing else meanwhile."""
    words = "nccl", "memcpyp2p", "pushrows", "pushsums", "peerbarrier"
    communicates = [span for span in spans if any(word in span.name.lower() for word in words)]
    computes = [span for span in spans if span not in communicates]

    def measure_union(spans: Sequence[Span]) -> float:
        total = end = 0.0
        for span in spans:  # In the order of their starts.
            total += max(0.0, span.end - max(span.start, end))
            end = max(end, span.end)
        return total / 1e9

    return measure_union(communicates), measure_union(spans) - measure_union(computes)


def measure(arguments: argparse.Namespace) -> int:
    gpus = len(cuda_devices())
    if gpus < 2:
        raise UsageError(f"needs several GPUs, JAX finds {gpus}")
    record = Record.new("gpus", {"gpus": gpus, "capacity_factor": arguments.capacity_factor, **COPY_ENGINES})
    cells = []
    for name in arguments.layers:
        shape = LAYERS[name]
        (exchanges,) = time_in_turns([exchange(shape, gpus)])
        sent = (gpus - 1) * shape.tokens * shape.K * 2
        for variant in arguments.variants:
            work = layer(shape, RECIPES[variant], gpus, arguments.capacity_factor)
            works_alone = [layer(shape, RECIPES[variant], 1, None, first=gpu) for gpu in range(gpus)]
            together, *alone = time_in_turns([work, *works_alone])
            spans = profile(work.block, _PROFILED_CALLS)
            # A GPU that waits for a slower one communicates for longer.
            seconds = min(exposed([span for span in spans if span.gpu == gpu]) for gpu in range(gpus))
            medians = [median(times) for times in alone]
            row: dict[str, Any] = {
                "layer": name,
                "variant": variant,
                "gpus": gpus,
                "one_gpu_ms": alone,
                "all_gpus_ms": together,
                "efficiency": max(medians) / median(together),  # GPUs of one host differ; all wait for the slowest.
                "communication_ms": 1e3 * seconds[0] / _PROFILED_CALLS,
                "exposed_ms": 1e3 * seconds[1] / _PROFILED_CALLS,
                "link_gb_per_s": sent / (1e6 * median(exchanges)),
            }
            record.add(row, f"{name} {variant}: {row['efficiency']:.1%}", arguments.json)
            texts = {"one_gpu_ms": " ".join(f"{time:.2f}" for time in medians), "all_gpus_ms": median(together)}
            cells.append({**row, **texts, "efficiency_of_mean": mean(medians) / median(together)})
    print(tabulate.tabulate(cells, "keys", floatfmt=".3f"))
    return 0
