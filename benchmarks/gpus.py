"""Weak scaling of a whole layer over GPUs: each GPU that is added brings its own tokens and experts."""

import argparse
import dataclasses
import functools
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import tabulate
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_grouped as jg
from benchmarks import plot
from benchmarks.rows import Record
from benchmarks.runner import Span, profile
from benchmarks.shapes import SHAPES, Shape
from jax_grouped.examples.parallel import COPY_ENGINES
from jax_grouped.examples.settings import UsageError

#: Layers of one GPU.
LAYERS = {
    "dsv3": SHAPES["dsv3 layer"],
    "qwen3": dataclasses.replace(SHAPES["qwen3 layer"], num_groups=64),
}
RECIPES = {"bf16": None, "block": jg.Float8BlockScaling()}
AXIS = "expert"
_BLOCKS, _CALLS = 8, 12


class Work(NamedTuple):
    """A program and its arguments."""

    program: Any
    arguments: Sequence[Any]

    def block(self, calls: int) -> float:
        """Runs the calls back to back; returns seconds by the host's clock."""
        start = time.perf_counter()
        for _ in range(calls):
            result = self.program(*self.arguments)
        jax.block_until_ready(result)
        return time.perf_counter() - start


def milliseconds(works: Sequence[Work]) -> list[list[float]]:
    """Returns the times per call of some blocks of each program, in ascending order.

    The programs take turns: at its limit of power, a GPU changes its clock from second to second.
    """
    for work in works:
        work.block(1)  # Compiles.
    times = [[1e3 * work.block(_CALLS) / _CALLS for work in works] for _ in range(1 + _BLOCKS)][1:]
    return [sorted(of) for of in zip(*times, strict=True)]


def _mesh(gpus: int, first: int = 0) -> Mesh:
    return jax.make_mesh((gpus,), (AXIS,), axis_types=(AxisType.Auto,), devices=jax.devices()[first : first + gpus])


def layer(
    shape: Shape,
    recipe: jg.Recipe | None,
    gpus: int,
    capacity_factor: float | None,
    *,
    first: int = 0,
    **options: Any,
) -> Work:
    """Returns the forward and the backward pass of a layer under plain `jax.jit`, on this many GPUs from `first` on."""
    mesh, k = _mesh(gpus, first), shape.top_k
    tokens, experts, K, F = gpus * shape.tokens, gpus * shape.num_groups, shape.K, shape.N // 2
    shapes = (tokens, K), (K, experts), (experts, K, 2 * F), (experts, F, K), (tokens, K)
    widths, specs = (1, K, K, F, 1), (P(AXIS), P(), P(AXIS), P(AXIS), P(AXIS))
    keys = jax.random.split(jax.random.key(0), len(shapes))

    def draw(keys: jax.Array) -> list[jax.Array]:
        drawn = zip(keys, shapes, widths, strict=True)
        return [jax.random.normal(key, dims, jnp.bfloat16) * width**-0.5 for key, dims, width in drawn]

    arguments = jax.jit(draw, out_shardings=[NamedSharding(mesh, spec) for spec in specs])(keys)
    axes = dict(expert_axis=AXIS, capacity_factor=capacity_factor, **options) if gpus > 1 else {}

    def step(x: jax.Array, router: jax.Array, gate_up: jax.Array, down: jax.Array, dy: jax.Array) -> Any:
        def forward(x: jax.Array, router: jax.Array, gate_up: jax.Array, down: jax.Array) -> jax.Array:
            logits = jg.moe.router_logits(x, router)
            return jg.moe.moe_mlp(x, logits, gate_up, down, top_k=k, recipe=recipe, **axes)[0]

        y, pull_back = jax.vjp(forward, x, router, gate_up, down)
        # In a model, the gradient of the result follows from the result.
        y, dy = jax.lax.optimization_barrier((y, dy))
        return y, pull_back(dy)

    return Work(jax.jit(step, compiler_options=COPY_ENGINES if gpus > 1 else None), arguments)


def exchange(shape: Shape, gpus: int) -> Work:
    """Returns an exchange that sends this GPU's tokens to each other one, as the layer does with sums."""
    mesh = _mesh(gpus)
    x = jnp.zeros((gpus * gpus, shape.tokens, shape.K), jnp.bfloat16, device=NamedSharding(mesh, P(AXIS)))
    send = functools.partial(jax.lax.all_to_all, axis_name=AXIS, split_axis=0, concat_axis=0)
    program = jax.jit(
        jax.shard_map(send, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS)), compiler_options=COPY_ENGINES
    )
    return Work(program, (x,))


def exposed(spans: Sequence[Span]) -> tuple[float, float]:
    """Returns the seconds in which one GPU communicates, and those in which it does nothing else meanwhile."""
    names = "nccl", "memcpyp2p"
    communicates = [span for span in spans if any(name in span.name.lower() for name in names)]
    computes = [span for span in spans if span not in communicates]
    both, alone = _length(communicates), _length(spans) - _length(computes)
    return both / 1e9, alone / 1e9


def _length(spans: Sequence[Span]) -> float:
    """Returns the length of the union, for spans in the order of their starts."""
    total, end = 0.0, 0.0
    for span in spans:
        total += max(0.0, span.end - max(span.start, end))
        end = max(end, span.end)
    return total


def rows(gpus: int, names: Sequence[str], variants: Sequence[str], capacity_factor: float) -> Iterator[dict[str, Any]]:
    """Yields a row for each layer and variant."""
    for name in names:
        shape = LAYERS[name]
        sent = (gpus - 1) * shape.tokens * shape.K * 2
        (exchanges,) = milliseconds([exchange(shape, gpus)])
        link = sent / (1e6 * statistics.median(exchanges))
        for variant in variants:
            recipe = RECIPES[variant]
            work = layer(shape, recipe, gpus, capacity_factor)
            of_gpus = [layer(shape, recipe, 1, None, first=gpu) for gpu in range(gpus)]
            together, *alone = milliseconds([work, *of_gpus])
            calls = 4
            spans = profile(work, calls)
            # A GPU that waits for a slower one communicates for longer.
            of_each = [exposed([span for span in spans if span.gpu == gpu]) for gpu in range(gpus)]
            communication, uncovered = (1e3 * seconds / calls for seconds in min(of_each))
            yield {
                "layer": name,
                "variant": variant,
                "gpus": gpus,
                "one_gpu_ms": alone,
                "all_gpus_ms": together,
                # GPUs of one host differ, and all wait for the slowest.
                "efficiency": max(map(statistics.median, alone)) / statistics.median(together),
                "communication_ms": communication,
                "exposed_ms": uncovered,
                "link_gb_per_s": link,
            }


def measure(arguments: argparse.Namespace) -> int:
    """Measures, prints and writes the rows."""
    gpus = len(jax.devices("gpu")) if jax.default_backend() == "gpu" else 0
    if gpus < 2:
        raise UsageError(f"needs several GPUs, JAX finds {gpus}")
    record = Record.new("gpus", None, {"gpus": gpus, "capacity_factor": arguments.capacity_factor, **COPY_ENGINES})
    found = []
    for row in rows(gpus, arguments.layers, arguments.variants, arguments.capacity_factor):
        found.append(row)
        print(f"{row['layer']} {row['variant']}: {row['efficiency']:.1%}", flush=True)
        if arguments.json:
            fields = dataclasses.asdict(record) | {"rows": found}
            arguments.json.write_text(json.dumps(fields, indent=1) + "\n")
    if arguments.plot:
        plot.gpus(found, f"{record.device}, JAX {record.versions['jax']}, {record.date[:10]}", arguments.plot)
    print(_table(found, gpus))
    return 0


def _table(found: Sequence[dict[str, Any]], gpus: int) -> str:
    columns = {
        "layer": lambda row: row["layer"],
        "variant": lambda row: row["variant"],
        "1 GPU ms": lambda row: " ".join(f"{statistics.median(of):.2f}" for of in row["one_gpu_ms"]),
        f"{gpus} GPUs ms": lambda row: statistics.median(row["all_gpus_ms"]),
        "efficiency %": lambda row: 100 * row["efficiency"],
        "of mean %": lambda row: (
            100 * statistics.mean(map(statistics.median, row["one_gpu_ms"])) / statistics.median(row["all_gpus_ms"])
        ),
        "communication ms": lambda row: row["communication_ms"],
        "exposed ms": lambda row: row["exposed_ms"],
        "link GB/s": lambda row: row["link_gb_per_s"],
    }
    cells = [[value(row) for value in columns.values()] for row in found]
    return tabulate.tabulate(cells, [*columns], floatfmt=("", "", "", ".2f", ".1f", ".1f", ".2f", ".2f", ".0f"))
