"""How much memory training takes beside arguments and results: `python3 -m benchmarks.memory --help`."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import tabulate

import jax_grouped as jg
from benchmarks import cli
from benchmarks.h200 import compile_for_h200, missing
from benchmarks.records import new_record
from benchmarks.shapes import SHAPES, Shape

_DESCRIPTION = """\
Prints the GiB that XLA plans for beside arguments and results when it compiles for an H200, which need not be there:

  gradients  of one layer, from x, its kernel and dy to y, dx and the kernel's gradient
  SGD        as above, but the kernel changes in place
  pairs      an SGD step of four such layers, each with one back, in sequence, with float32 kernels
  MLPs       gradients of four MLPs in a scan: such a layer, SwiGLU, and one back from half as many features

A row says what waits for the backward pass: all that it reads, the quantized tokens alone, or nothing."""

_EPILOG = "On a machine without a GPU, JAX_PLATFORMS=cpu is needed, and JAX's plugin for CUDA all the same."

_LAYERS = 4

#: From tokens and what one layer has of the kernels to tokens.
Layer = Callable[[jax.Array, Any], jax.Array]

_KEPT: dict[str, Callable[[Layer], Layer]] = {
    "all": lambda layer: layer,
    "tokens": functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names("jax_grouped_x")),
    "nothing": jax.checkpoint,
}
_RECIPES = {"bf16": None, "block": jg.Float8BlockScaling()}
_ROWS = (("bf16", "all"), ("block", "all"), ("block", "tokens"), ("bf16", "nothing"), ("block", "nothing"))


def _in_sequence(layer: Layer, x: jax.Array, kernels: Any) -> jax.Array:
    return functools.reduce(layer, kernels, x)


def _scanned(layer: Layer, x: jax.Array, kernels: Any) -> jax.Array:
    return jax.lax.scan(lambda x, kernel: (layer(x, kernel), None), x, kernels)[0]


def _dense(x: jax.Array, kernel: jax.Array, sizes: jax.Array, recipe: Any) -> jax.Array:
    return jg.grouped_dense(x, kernel, sizes, recipe=recipe)


def _mlp(x: jax.Array, kernels: tuple[jax.Array, jax.Array], sizes: jax.Array, recipe: Any) -> jax.Array:
    return jg.moe.grouped_mlp(x, *kernels, sizes, recipe=recipe)


@dataclasses.dataclass(frozen=True)
class _Program:
    """A step of some layers.

    Attributes:
        kernels: of all layers, a tree of `jax.ShapeDtypeStruct`.
        dy: of the last layer's result.
        sgd: whether the kernels change in place; else their gradients are results.
        layer: a layer, of tokens, kernels, group sizes and a recipe.
        model: all layers, of one layer, tokens and kernels.
    """

    kernels: Any
    dy: jax.ShapeDtypeStruct
    sgd: bool = False
    layer: Callable[..., jax.Array] = _dense
    model: Callable[[Layer, jax.Array, Any], jax.Array] = _in_sequence

    def gib(self, x: jax.ShapeDtypeStruct, sizes: jax.ShapeDtypeStruct, recipe: str, kept: str) -> float:
        """The GiB that XLA plans for beside arguments and results."""

        def run(x: jax.Array, kernels: Any, sizes: jax.Array, dy: jax.Array) -> Any:
            layer = _KEPT[kept](lambda x, kernel: self.layer(x, kernel, sizes, _RECIPES[recipe]))
            y, pullback = jax.vjp(functools.partial(self.model, layer), x, kernels)
            dx, dkernels = pullback(dy)
            if not self.sgd:
                return y, dx, dkernels
            return y, dx, jax.tree.map(lambda kernel, dkernel: kernel - 1e-3 * dkernel, kernels, dkernels)

        donated = (1,) if self.sgd else ()
        analysis: Any = compile_for_h200(run, x, self.kernels, sizes, self.dy, donated=donated).memory_analysis()
        return analysis.temp_size_in_bytes / 2**30


def measure(shape: Shape) -> list[dict[str, Any]]:
    """A row for each choice of a recipe and of what is kept, with the GiB of each program."""

    def struct(dtype: str, *dims: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, jnp.dtype(dtype))

    groups, tokens, K, N = shape.num_groups, shape.tokens, shape.K, shape.N
    x, y, sizes = struct("bfloat16", tokens, K), struct("bfloat16", tokens, N), struct("int32", groups)
    kernel, back = struct("float32", groups, K, N), struct("float32", groups, N, K)
    mlps = struct("bfloat16", _LAYERS, groups, K, N), struct("bfloat16", _LAYERS, groups, N // 2, K)
    programs = {
        "gradients, bfloat16 kernel": _Program([struct("bfloat16", groups, K, N)], y),
        "gradients, float32 kernel": _Program([kernel], y),
        "SGD, float32 kernel": _Program([kernel], y, sgd=True),
        "pairs": _Program([kernel, back] * _LAYERS, x, sgd=True),
        "MLPs, bfloat16 kernels": _Program(mlps, x, layer=_mlp, model=_scanned),
    }
    return [
        {"recipe": recipe, "kept": kept}
        | {name: program.gib(x, sizes, recipe, kept) for name, program in programs.items()}
        for recipe, kept in _ROWS
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program with these arguments, or those of the command line, and returns its exit status."""
    parser = cli.new_parser("python3 -m benchmarks.memory", _DESCRIPTION, _EPILOG)
    parser.add_argument("--shape", choices=SHAPES, default="dsv3 up", metavar="SHAPE", help="(default: dsv3 up)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows here")
    arguments = parser.parse_args(argv)
    if what := missing():
        parser.error(f"needs {what}")
    shape = SHAPES[arguments.shape]
    record = dataclasses.replace(
        new_record({"shape": shape.name, "dims": shape.dims}), device="NVIDIA H200", rows=measure(shape)
    )
    print(tabulate.tabulate(record.rows, headers="keys", floatfmt=".2f"))
    print(f"\n{shape.name}, {shape.dims}, JAX {record.versions['jax']}")
    if arguments.json:
        try:
            record.write(arguments.json)
        except OSError as error:
            parser.error(str(error))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
