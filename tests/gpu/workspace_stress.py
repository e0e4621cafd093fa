"""Captured products replayed thousands of times in the workspaces that XLA hands out, or in workspaces of their own.

cuBLASLt keeps descriptors of the groups in its workspace, which products share one after another. If a product read
bytes that another product or an earlier replay left there, a captured step would give other bits than an uncaptured
one. `python3 -m tests.gpu.workspace_stress --help` lists the options. The exit status is 1 if anything differs.
"""

import argparse
import contextlib
import dataclasses
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import jax_grouped as jg
from benchmarks import shapes
from jax_grouped.core.groups import Groups
from jax_grouped.fp8.recipes import Recipe
from jax_grouped.kernels.product import GemmSpec, Product, multiply, multiply_cuda
from tests.gpu import replays

#: The first shape has 80 tokens per group on average and more than two tiles per multiprocessor, so cuBLASLt computes
#: fprop and dgrad. For the second, Hopper has kernels of the library for quantized operands.
SHAPES = (
    shapes.Shape("first", num_groups=112, tokens=8960, K=256, N=512),
    shapes.Shape("second", num_groups=24, tokens=3072, K=384, N=256),
)

#: Recipe of each layer, and the type of its kernel.
LAYERS: dict[str, tuple[Recipe | None, str]] = {
    "none": (None, "bfloat16"),
    "block": (jg.Float8BlockScaling(), "bfloat16"),
    "current": (jg.Float8CurrentScaling(), "bfloat16"),
    "block with float32 kernels": (jg.Float8BlockScaling(), "float32"),
}
NAMES = [f"{result} of layer {layer}" for layer in LAYERS for result in ("y", "dx", "dkernel")]

PROFILED_REPLAYS = 10

Operand = jax.Array | jg.ScaledArray


def product(name: Product, a: Any, b: Any, sizes: jax.Array, out_dtype: Any, *, inline: bool) -> jax.Array:
    """Computes one product. `inline` bypasses the primitive, so that all results of its custom call can be read."""
    groups = Groups(sizes, jnp.zeros((1,), jnp.int32))
    spec = GemmSpec(name, sizes.shape[0], out_dtype)
    if not inline:
        return multiply(a, b, groups, spec)
    if not isinstance(a, jg.ScaledArray):
        return multiply_cuda(a, b, *groups, spec=spec, batch=1)
    spec = dataclasses.replace(spec, a=a.layout, b=b.layout)
    return multiply_cuda(a.data, b.data, *groups, a.scale_inv, b.scale_inv, spec=spec, batch=1)


def orientations(recipe: Recipe | None, x: jax.Array, sizes: jax.Array | None, dtype: str) -> tuple[Operand, Operand]:
    """Returns the operands of products, rowwise and columnwise: tokens, or kernels if there are no sizes.

    Without a recipe, both are `x`.

    `dtype` is the name of the recipe's attribute.
    """
    if recipe is None:
        return x, x
    if sizes is None:
        cache = jg.quantize_kernel(x, recipe)
        return cache.rowwise, cache.columnwise
    options = dict(dtype=getattr(recipe, dtype), pow2_scales=getattr(recipe, "pow2_scales", False))
    both = jg.grouped_quantize(x, sizes, recipe.token_mode, columnwise=True, **options)
    assert both.rowwise is not None
    assert both.columnwise is not None
    return both.rowwise, both.columnwise


def step(
    x: jax.Array, dy: jax.Array, kernels: list[jax.Array], sizes: jax.Array, *, inline: bool = False
) -> list[jax.Array]:
    """Computes `y`, `dx` and `dkernel` of every layer."""
    results = []
    for (recipe, _), kernel in zip(LAYERS.values(), kernels, strict=True):
        x_row, x_column = orientations(recipe, x, sizes, "fwd_dtype")
        dy_row, dy_column = orientations(recipe, dy, sizes, "grad_dtype")
        kernel_row, kernel_column = orientations(recipe, kernel, None, "fwd_dtype")
        results += [
            product("fprop", x_row, kernel_column, sizes, x.dtype, inline=inline),
            product("dgrad", dy_row, kernel_row, sizes, x.dtype, inline=inline),
            product("wgrad", x_column, dy_column, sizes, kernel.dtype, inline=inline),
        ]
    return results


@contextlib.contextmanager
def keeping_workspaces() -> Iterator[list[jax.Array]]:
    """Lists the scratch and the workspaces of the products that are traced inside, which the library throws away."""
    kept: list[jax.Array] = []
    original = jax.ffi.ffi_call

    def ffi_call(target: str, *arguments: Any, **options: Any) -> Callable[..., Any]:
        def call(*operands: jax.Array, **attributes: Any) -> Any:
            results = original(target, *arguments, **options)(*operands, **attributes)
            if target == "jax_grouped_gemm":
                kept.extend(results[1:])
            return results

        return call

    with mock.patch.object(jax.ffi, "ffi_call", ffi_call):
        yield kept


def step_and_workspaces(workspaces: list[jax.Array], *arguments: Any) -> tuple[list[jax.Array], list[jax.Array]]:
    """Runs `step` with workspaces of its own. The given ones are donated, so the returned ones use the same memory."""
    del workspaces
    with keeping_workspaces() as kept:
        return step(*arguments, inline=True), kept


class Replays:
    """One shape's step, compiled twice: captured, with the workspaces asked for, and uncaptured as the reference."""

    def __init__(self, shape: shapes.Shape, count: int, *, own_workspaces: bool, poison: bool):
        keys = jax.random.split(jax.random.key(0), 2 + len(LAYERS))
        x = jax.random.normal(keys[0], (shape.tokens, shape.K), jnp.bfloat16)
        dy = jax.random.normal(keys[1], (shape.tokens, shape.N), jnp.bfloat16)
        kernels = [
            jax.random.normal(key, (shape.num_groups, shape.K, shape.N), dtype)
            for key, (_, dtype) in zip(keys[2:], LAYERS.values(), strict=True)
        ]
        self._arguments = x, dy, kernels
        self._sizes = [jnp.asarray(replays.changing_sizes(shape, index)) for index in range(count)]
        arguments = (*self._arguments, self._sizes[0])
        lowered = jax.jit(step).lower(*arguments)
        self._reference = lowered.compile(compiler_options=replays.UNCAPTURED)
        self._workspaces: list[jax.Array] = []
        if own_workspaces:
            kept = jax.eval_shape(lambda *arguments: step_and_workspaces([], *arguments)[1], *arguments)
            self._workspaces = [jnp.zeros(like.shape, like.dtype) for like in kept]
            jitted = jax.jit(step_and_workspaces, donate_argnums=0, keep_unused=True)
            captured = jitted.lower(self._workspaces, *arguments).compile(compiler_options=replays.CAPTURED)
            shared, own = (one.memory_analysis().temp_size_in_bytes for one in (self._reference, captured))
            assert own < shared, f"XLA has put the workspaces elsewhere: {own} bytes of its memory, {shared} if shared"
        else:
            captured = lowered.compile(compiler_options=replays.CAPTURED)
        self._captured = captured
        self._poison = self._poisoning(captured) if poison else None

    def _poisoning(self, captured: Any) -> Callable[[], None]:
        """Returns a function that fills workspaces with bytes that are NaN in every type."""
        if self._workspaces:
            fill = jax.jit(lambda arrays: [jnp.full_like(x, 0xFF) for x in arrays], donate_argnums=0, keep_unused=True)

            def poison_own() -> None:
                self._workspaces = fill(self._workspaces)

            return poison_own
        size = captured.memory_analysis().temp_size_in_bytes
        unrelated = jax.jit(lambda: jnp.full((size,), 0xFF, jnp.uint8))
        # Freed memory holds these bytes when the next step gets it.
        return lambda: unrelated().block_until_ready().delete()

    def expected(self) -> np.ndarray:
        """Returns the digests of the uncaptured step, which waits for each result."""
        digests = []
        for sizes in self._sizes:
            digests.append(replays.digest(self._reference(*self._arguments, sizes)))
            digests[-1].block_until_ready()
        return replays.fetch(digests, NAMES)

    def replay(self, rounds: threading.Barrier) -> np.ndarray:
        """Returns the captured step's digests. Threads launch one replay each per round; every second is poisoned."""
        digests = []
        try:
            for index in range(len(self._sizes)):
                rounds.wait()
                if self._poison is not None and index % 2:
                    self._poison()
                digests.append(replays.digest(self.launch(index)))
        except threading.BrokenBarrierError:
            return np.zeros(0)  # Another thread has failed and reports it.
        except BaseException:
            rounds.abort()
            raise
        return replays.fetch(digests, NAMES)

    def launch(self, index: int) -> list[jax.Array]:
        """Returns the results of the captured step."""
        arguments = (*self._arguments, self._sizes[index])
        if not self._workspaces:
            return self._captured(*arguments)
        results, self._workspaces = self._captured(self._workspaces, *arguments)
        return results

    def graph_launches(self) -> float:
        """Returns the graph launches per captured step."""
        profiled = range(min(PROFILED_REPLAYS, len(self._sizes)))
        events = replays.events(lambda: [self.launch(index) for index in profiled])
        return replays.occurrences(events, "GraphLaunch") / len(profiled)


def main(count: int, workspaces: str, executables: int, *, poison: bool) -> int:
    """Prints a line, and one for each executable that differs; returns the exit status."""
    own = workspaces == "own"
    stressed = [Replays(shape, count, own_workspaces=own, poison=poison) for shape in SHAPES[:executables]]
    expected = [one.expected() for one in stressed]
    rounds = threading.Barrier(executables)
    with ThreadPoolExecutor(executables) as threads:
        start = time.perf_counter()
        got = list(threads.map(lambda one: one.replay(rounds), stressed))
        milliseconds = 1e3 * (time.perf_counter() - start) / (count * executables)
    different = sum(int((a != b).any(axis=(1, 2)).sum()) for a, b in zip(got, expected, strict=True))
    launches = [one.graph_launches() for one in stressed]
    print(
        f"{workspaces} workspaces, {executables} executables{', poisoned' if poison else ''}: {count} replays each, "
        f"{different} mismatches, {milliseconds:.3f} ms per step, {min(launches):.1f} graph launches per step"
    )
    differences = [replays.first_difference(a, b, NAMES) for a, b in zip(got, expected, strict=True)]
    for shape, difference in zip(SHAPES, differences, strict=False):
        if difference:
            print(f"{shape.name} executable: {difference}")
    return int(any(differences))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replays", type=int, default=5000)
    parser.add_argument(
        "--workspaces",
        choices=("shared", "own"),
        default="shared",
        help="XLA's temporary memory, or memory of each product's own that lasts as long as the program",
    )
    parser.add_argument(
        "--executables", type=int, choices=(1, 2), default=1, help="steps of other shapes, launched from two threads"
    )
    parser.add_argument("--poison", action="store_true", help="fill workspaces with NaN before every second replay")
    options = parser.parse_args()
    sys.exit(main(options.replays, options.workspaces, options.executables, poison=options.poison))
