"""Named shapes, from shapes.toml, and group sizes for the benchmarks and the tests; every value follows from a seed."""

import dataclasses
import tomllib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

INT32 = np.iinfo(np.int32)


@dataclasses.dataclass(frozen=True)
class Shape:
    """The static sizes of one grouped matmul: `x [T, K]` times `kernel [E, K, N]`."""

    name: str
    num_groups: int
    tokens: int
    K: int
    N: int = 0  # 0 where only `x` is read.
    top_k: int = 0  # Experts that a router sends each token to: then the matmul has `T * top_k` rows.

    @property
    def dims(self) -> str:
        """Returns the sizes in short, for tables and test ids."""
        sizes = {"E": self.num_groups, "T": self.tokens, "K": self.K, "N": self.N, "k": self.top_k}
        return " ".join(f"{name}{size}" for name, size in sizes.items() if size)


_TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())

#: Shapes of steps by the number that differs among them.
SWEEPS = {
    "tokens": [Shape(f"{2**i} tokens", 32, 32 * 2**i, 7168, 4096) for i in range(4, 14)],
    "decode": [Shape(f"decode {2**i}", 128, 2**i, 2048, 1536, 8) for i in range(9)],
    "experts": [Shape(f"{2**i} experts", 2**i, 32768, 2048, 1536) for i in range(10)],
}

SHAPES = {name: Shape(name, *sizes) for table in _TABLES.values() for name, sizes in table.items()}
SHAPES |= {shape.name: shape for sweep in SWEEPS.values() for shape in sweep}
TEST_SHAPES = tuple(SHAPES[name] for name in _TABLES["tests"])

#: Weights of groups, from their number and a random generator.
_WEIGHTS: dict[str, Callable[[int, np.random.Generator], npt.NDArray[np.generic]]] = {
    "equal": lambda groups, _: np.ones(groups),
    "lognormal": lambda groups, rng: rng.lognormal(sigma=0.6, size=groups),
    "zipf": lambda groups, rng: 1 / rng.permutation(np.arange(1, groups + 1)),
    "one_hot": lambda groups, rng: np.eye(groups)[rng.integers(groups)],
    "empty_first": lambda groups, _: np.arange(groups) != 0,
    "empty_last": lambda groups, _: np.arange(groups) != groups - 1,
    "empty_adjacent": lambda groups, _: ~np.isin(np.arange(groups), (groups // 2 - 1, groups // 2)),
    "alternate_empty": lambda groups, _: np.arange(groups) % 2 == 0,
    "tail": lambda groups, rng: rng.lognormal(sigma=0.6, size=groups),
    "all_empty": lambda groups, _: np.zeros(groups),
    "hostile": lambda groups, _: np.ones(groups),
}

#: Distributions of rows over groups. `tail` leaves a quarter of the rows in no group, `all_empty` every row.
SKEWS = tuple(_WEIGHTS)[:-1]

TEST_SKEWS = tuple(_WEIGHTS)  # `hostile` has sizes that no router gives: negative ones, and sums beyond 32 bits.


def group_sizes(shape: Shape, skew: str, seed: int = 0) -> npt.NDArray[np.int32]:
    """Returns rows per group, `int32[E]`, that sum to `T` unless the skew leaves rows or every group out."""
    rows = shape.tokens * 3 // 4 if skew == "tail" else shape.tokens
    ends = np.cumsum(_WEIGHTS[skew](shape.num_groups, np.random.default_rng(seed)))
    sizes = np.diff(np.rint(ends / (ends[-1] or 1) * rows), prepend=0).astype(np.int32)
    if skew == "hostile":
        sizes[::3] = -7
        sizes[1::6] = INT32.min
        # The first one takes all rows that are left; after the second, a 32-bit sum is negative.
        sizes[[shape.num_groups // 2, -1]] = INT32.max
    return sizes


def group_ends(group_sizes: npt.NDArray[np.int32], tokens: int) -> npt.NDArray[np.int32]:
    """Returns the end of each group's rows, `int32[E]`: negative sizes count as 0, rows past `tokens` do not exist."""
    ends = np.cumsum(np.maximum(group_sizes, 0), dtype=np.int64)
    return np.minimum(ends, tokens).astype(np.int32)
