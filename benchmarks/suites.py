"""Suites, from suites.toml: the cases of each, how they are timed, and how they are compared and drawn."""

import dataclasses
import itertools
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.cases import OPERATIONS, Case
from benchmarks.shapes import SHAPES


class Grid(NamedTuple):
    """All combinations of these names."""

    shapes: Sequence[str]
    operations: Sequence[str]
    variants: Sequence[str]
    skews: Sequence[str] = ("equal", "lognormal")
    kernels: Sequence[str] = ("bfloat16",)

    def cases(self, seed: int) -> Iterator[Case]:
        axes = self.shapes, self.operations, self.kernels, self.skews, self.variants
        for shape, operation, kernel, skew, variant in itertools.product(*axes):
            fixed = OPERATIONS[operation].kernel_dtype
            yield Case(operation, SHAPES[shape], variant, skew, kernel if fixed is None else fixed, seed)


@dataclasses.dataclass(frozen=True)
class Suite:
    """Cases that are measured together."""

    grids: Sequence[Grid]
    clock: str = "device"  # A name in `benchmarks.runner.CLOCKS`, or `none` to count only.
    seconds: float = 1.0  # Budget of one measurement.
    calls: int | None = None  # Calls per block; by default the number that fits in the budget.
    verify: bool = False  # Compare every result with that of `jax_grouped` first.
    against: str = "jax_grouped"  # Variant that speeds are relative to.
    plot: str = "rates"  # `rates`, `speeds`, `shares` or `scaling`, as `benchmarks.plot` draws them.
    first: Sequence[Grid] = ()  # Cases that come first, whatever is chosen.
    device: str | None = None  # Device that is compiled for, if not the one that JAX finds.

    def cases(self, seed: int = 0, chosen: Mapping[str, Sequence[str]] | None = None) -> list[Case]:
        """Returns the cases, each once; chosen names take the place of those that the grids have on an axis."""
        grids = [*self.first, *(grid._replace(**(chosen or {})) for grid in self.grids)]
        return list(dict.fromkeys(case for grid in grids for case in grid.cases(seed)))


def _read() -> Iterator[tuple[str, Suite]]:
    tables: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
    for name, own in tables.items():
        table = tables[name] = {**tables.get(own.get("like", ""), {}), **own}
        options = {key: value for key, value in table.items() if key not in (*Grid._fields, "like")}
        axes = {key: value for key, value in table.items() if key in Grid._fields}
        grids = [Grid(**{**axes, **grid}) for grid in table.get("grids", [{}])]
        first = [Grid(**grid) for grid in table.get("first", [])]
        yield name, Suite(**{**options, "grids": grids, "first": first})


SUITES = dict(_read())

#: Suites of README.md.
PAGE = [name for name in SUITES if name != "products"]
