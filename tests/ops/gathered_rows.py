"""Operands of products of which one is given as tokens."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from jax_grouped.core.groups import Groups
from jax_grouped.kernels.product import Gathered, Product

CHOICES = 3


@dataclasses.dataclass(frozen=True)
class Case:
    sizes: tuple[int, ...]
    in_features: int
    out_features: int
    tail: int = 50

    @property
    def rows(self) -> int:
        return sum(self.sizes) + self.tail


class Operands:
    """The operands of one product, of which one is gathered. The last token and the rows of no group are NaN."""

    def __init__(self, case: Case, product: Product, gathered: str, dtype: str, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        local, tokens = sum(case.sizes), max(case.rows // 2, 2)
        features = dict(
            fprop=[case.in_features], dgrad=[case.out_features], wgrad=[case.in_features, case.out_features]
        )

        def random(*shape: int) -> np.ndarray:
            return rng.standard_normal(shape, np.float32).astype(jnp.dtype(dtype))

        pairs = rng.permutation((tokens - 1) * CHOICES)
        order = np.full(case.rows, (tokens - 1) * CHOICES, np.int32)  # pairs of the last token
        order[: min(local, pairs.size)] = pairs[:local]
        order[rng.random(case.rows) < 0.05] = tokens * CHOICES  # no pair
        inverse = np.full(tokens * CHOICES, case.rows, np.int32)
        placed = order < tokens * CHOICES
        inverse[order[placed]] = np.flatnonzero(placed)

        self.groups = Groups(jnp.asarray(case.sizes, jnp.int32), jnp.zeros(1, jnp.int32))
        self.arrays, self.rows = [], []
        for name, columns in zip("ab", features[product], strict=False):
            if name == gathered:
                x = random(tokens, columns)
                x[-1] = np.nan
                self.arrays.append(Gathered(*map(jnp.asarray, (x, order, inverse.reshape(tokens, -1)))))
                self.rows.append(np.where(placed[:, None], x[np.where(placed, order, 0) // CHOICES], 0))
            else:
                x = random(case.rows, columns)
                x[local:] = np.nan
                self.arrays.append(jnp.asarray(x))
                self.rows.append(x)
        if product != "wgrad":
            weight = random(len(case.sizes), case.in_features, case.out_features)
            self.arrays.append(jnp.asarray(weight))
            self.rows.append(weight)
