"""Definitions of the operations, row by row, in NumPy and float64."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_grouped import config
from jax_grouped.kernels.primitive import cuda_devices


def at_equal_distances(items: np.ndarray, most: int) -> np.ndarray:
    """Returns all of a row of items, or `most` of them at equal distances."""
    places = np.arange(len(items)) * min(most, len(items)) + len(items) // 2
    return items[np.diff(places // max(len(items), 1), append=min(most, len(items))) > 0]


def local_groups(
    group_sizes: np.ndarray, num_groups: int, capacity: int, offset: int = 0
) -> Iterator[tuple[int, slice]]:
    """Yields every local group with its rows. Negative sizes count as 0, and rows past the capacity do not exist."""
    start = 0
    for index, size in enumerate(group_sizes.tolist()):
        end = min(start + max(size, 0), capacity)
        if 0 <= index - offset < num_groups:
            yield index - offset, slice(start, end)
        start = end


def fprop(x: np.ndarray, kernel: np.ndarray, group_sizes: np.ndarray, offset: int = 0) -> np.ndarray:
    """Computes `y [T, N]` of `x [T, K]` and `kernel [G, K, N]`."""
    y = np.zeros((x.shape[0], kernel.shape[2]))
    for group, rows in local_groups(group_sizes, kernel.shape[0], x.shape[0], offset):
        y[rows] = x[rows].astype(np.float64) @ kernel[group].astype(np.float64)
    return y


def dgrad(dy: np.ndarray, kernel: np.ndarray, group_sizes: np.ndarray, offset: int = 0) -> np.ndarray:
    """Computes `dx [T, K]` of `dy [T, N]` and `kernel [G, K, N]`."""
    return fprop(dy, kernel.swapaxes(1, 2), group_sizes, offset)


def wgrad(x: np.ndarray, dy: np.ndarray, group_sizes: np.ndarray, num_groups: int, offset: int = 0) -> np.ndarray:
    """Computes `dkernel [G, K, N]` of `x [T, K]` and `dy [T, N]`."""
    dkernel = np.zeros((num_groups, x.shape[1], dy.shape[1]))
    for group, rows in local_groups(group_sizes, num_groups, x.shape[0], offset):
        dkernel[group] = x[rows].astype(np.float64).T @ dy[rows].astype(np.float64)
    return dkernel


def bias_grad(dy: np.ndarray, group_sizes: np.ndarray, num_groups: int, offset: int = 0) -> np.ndarray:
    """Computes `dbias [G, N]` of `dy [T, N]`."""
    dbias = np.zeros((num_groups, dy.shape[1]))
    for group, rows in local_groups(group_sizes, num_groups, dy.shape[0], offset):
        dbias[group] = dy[rows].astype(np.float64).sum(axis=0)
    return dbias


def add_bias(y: np.ndarray, bias: np.ndarray, group_sizes: np.ndarray, offset: int = 0) -> np.ndarray:
    """Adds each row's `bias [G, N]` to `y [T, N]`; rows outside every local group stay unchanged."""
    y = y.copy()
    for group, rows in local_groups(group_sizes, bias.shape[0], y.shape[0], offset):
        y[rows] += bias[group].astype(np.float64)
    return y


def relative_error(got: np.ndarray, expected: np.ndarray) -> float:
    """Returns the Frobenius norm of the difference over that of `expected` (over 1 if that is 0); infinite on NaN."""
    got = np.asarray(got, np.float64)
    if got.shape != expected.shape or not np.all(np.isfinite(got)):
        return float("inf")
    scale = np.linalg.norm(expected) or 1.0
    return float(np.linalg.norm(got - expected) / scale)


def assert_groups_close(
    got: np.ndarray, expected: np.ndarray, group_sizes: np.ndarray, num_groups: int, tolerance: float, offset: int = 0
) -> None:
    """Checks token arrays group by group, as large numbers would hide small ones, and that all other rows are zero."""
    got = np.asarray(got)
    assert got.shape == expected.shape, f"shape {got.shape}, expected {expected.shape}"
    covered = np.zeros(got.shape[0], bool)
    for group, rows in local_groups(group_sizes, num_groups, got.shape[0], offset):
        covered[rows] = True
        error = relative_error(got[rows], expected[rows])
        assert error <= tolerance, f"group {group}, rows {rows}: relative error {error:.3g} > {tolerance:.3g}"
    assert np.all(np.asarray(got, np.float64)[~covered] == 0), "rows outside every group are not all zero"


def assert_kernels_close(got: np.ndarray, expected: np.ndarray, tolerance: float) -> None:
    """Checks arrays with a leading group axis, group by group."""
    got = np.asarray(got)
    assert got.shape == expected.shape, f"shape {got.shape}, expected {expected.shape}"
    for group in range(got.shape[0]):
        error = relative_error(got[group], expected[group])
        assert error <= tolerance, f"group {group}: relative error {error:.3g} > {tolerance:.3g}"


def assert_trees_close(got: Any, expected: Any, tolerance: float = 1e-5) -> None:
    """Compares all numbers of two trees, in float32."""

    def compare(got: Any, expected: Any) -> None:
        got, expected = np.asarray(got, np.float32), np.asarray(expected, np.float32)
        np.testing.assert_allclose(got, expected, rtol=tolerance, atol=tolerance)

    jax.tree.map(compare, got, expected)


def permutation(tokens: int, choices: int, rows: int) -> tuple[jax.Array, jax.Array]:
    """Returns the order and the inverse of a permutation of all pairs, which drops pairs or has a tail."""
    pairs = np.random.default_rng(rows).permutation(tokens * choices).astype(np.int32)[:rows]
    order, inverse = np.full(rows, tokens * choices, np.int32), np.full(tokens * choices, rows, np.int32)
    order[: pairs.size] = pairs
    inverse[pairs] = np.arange(pairs.size)
    return jnp.asarray(order), jnp.asarray(inverse.reshape(tokens, choices))


def fp8_tolerance(out_dtype: str = "float32") -> float:
    """Returns the relative error of products of FP8 operands on the current backend."""
    # Hopper's tensor cores keep about 14 bits of partial sums (DeepSeek-V3, arXiv:2412.19437, section 3.5.2).
    if out_dtype != "float32":
        return 5e-3
    return 1e-5 if config.backend == "xla" or not cuda_devices() else 1e-3


def swiglu(hidden: np.ndarray) -> np.ndarray:
    """Computes `silu(gate) * up` of `[..., 2 F]`, the gate first."""
    gate, up = np.split(hidden, 2, axis=-1)
    return gate / (1 + np.exp(-gate)) * up


def a_loop_over_tokens(
    params: Any,
    x: np.ndarray,
    top_k: int = 2,
    score: str = "softmax",
    bias: np.ndarray | None = None,
    scale: float = 1.0,
    activation: Callable[[np.ndarray], np.ndarray] = swiglu,
) -> np.ndarray:
    """Computes the layer's definition, a token and an expert at a time, in float64."""
    p = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    outputs = []
    for token in np.asarray(x, np.float64):
        logits = token @ p["router"]["kernel"]
        scores = np.exp(logits) / np.exp(logits).sum() if score == "softmax" else 1 / (1 + np.exp(-logits))
        chosen = np.argsort(-(scores if bias is None else scores + bias))[:top_k]
        output = np.zeros_like(token)
        for expert in chosen:
            hidden = np.einsum("k,k...->...", token, p["gate_up"]["kernel"][expert]) + p["gate_up"]["bias"][expert]
            result = activation(hidden.ravel()) @ p["down"]["kernel"][expert] + p["down"]["bias"][expert]
            output += scale * scores[expert] / scores[chosen].sum() * result
        outputs.append(output)
    return np.stack(outputs)
