"""Quantization under JAX's transformations: each must give the very bytes that the plain call gives."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import PartitionSpec as P

import jax_grouped as jg
from jax_grouped import ScalingMode
from tests import quantize_oracle
from tests.exports import exported
from tests.meshes import data_mesh
from tests.ops.quantize_cases import assert_same_trees, each_mode

TOKENS, FEATURES = 48, 32
SIZES = jnp.array([7, 0, 21, 1, 13])
BLOCK, CURRENT = jg.Float8BlockScaling(), jg.Float8CurrentScaling()


@pytest.fixture(autouse=True)
def _backend(backend: str) -> None:
    """Runs every test of this module on every backend."""


def tokens(seed: int = 0) -> jax.Array:
    x = jax.random.normal(jax.random.key(seed), (TOKENS, FEATURES))
    return x.at[int(SIZES.sum()) :].set(jnp.nan).at[-1].set(jnp.finfo(x.dtype).max)


def kernels(seed: int = 0) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), (4, 32, 48))


def quantize(x: jax.Array, sizes: jax.Array = SIZES, mode: ScalingMode = ScalingMode.BLOCK_1D) -> jg.GroupedQuantized:
    return jg.grouped_quantize(x, sizes, mode, columnwise=True, dbias=True)


def contents(quantized: jg.GroupedQuantized) -> tuple[jax.Array, ...]:
    """Returns all specified arrays: flat arrays end with unspecified bytes."""
    rowwise, columnwise = quantized.rowwise, quantized.columnwise
    return (
        rowwise.data,
        jg.grouped_dequantize(rowwise),
        jg.grouped_dequantize(columnwise),
        quantized.amax,
        quantized.dbias,
    )


def quantized_contents(
    x: jax.Array, sizes: jax.Array = SIZES, mode: ScalingMode = ScalingMode.BLOCK_1D
) -> tuple[jax.Array, ...]:
    return contents(quantize(x, sizes, mode))


def stacked(trees: list[Any]) -> Any:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def test_transformed_functions_give_the_same_result() -> None:
    expected = quantized_contents(tokens())
    assert_same_trees(jax.jit(jax.checkpoint(quantized_contents))(tokens()), expected)
    with jax.disable_jit():
        assert_same_trees(quantized_contents(tokens()), expected)


def test_gradients_pass_beside_what_is_quantized() -> None:
    x = jnp.nan_to_num(tokens())

    def loss(x: jax.Array) -> jax.Array:
        quantized = quantize(jax.lax.stop_gradient(x))
        return jnp.sum(x * jg.grouped_dequantize(quantized.columnwise))

    gradient = jax.grad(jax.checkpoint(loss))(x)
    np.testing.assert_array_equal(gradient, jg.grouped_dequantize(quantize(x).columnwise))


def test_quantized_arrays_are_carried_by_loops() -> None:
    first, second = quantize(tokens(0)), quantize(tokens(1))

    def swap(pair: tuple[Any, Any], _: None) -> tuple[tuple[Any, Any], jax.Array]:
        return pair[::-1], jg.grouped_dequantize(pair[0].rowwise)

    got, seen = jax.jit(lambda pair: jax.lax.scan(swap, pair, None, length=3))((first, second))
    assert_same_trees(contents(got[0]), contents(second))
    assert_same_trees(seen, stacked([jg.grouped_dequantize(q.rowwise) for q in (first, second, first)]))


@pytest.mark.parametrize(
    "make", [lambda: quantize(tokens()), lambda: jg.quantize_kernel(kernels(), BLOCK)], ids=["tokens", "kernels"]
)
def test_quantized_arrays_are_pytrees(make: Callable[[], Any]) -> None:
    quantized = make()
    leaves, structure = jax.tree.flatten(quantized)
    assert all(isinstance(leaf, jax.Array) for leaf in leaves)
    assert_same_trees(jax.tree.unflatten(structure, leaves), quantized)
    assert_same_trees(jax.tree.map(lambda leaf: leaf, quantized), quantized)
    assert_same_trees(jax.jit(lambda q: q)(quantized), quantized)
    assert hash(structure) == hash(jax.tree.structure(make()))
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(quantized)]
    assert paths[:2] == [".rowwise.data", ".rowwise.scale_inv"]
    # The layout is static: arrays of another one are another type of tree.
    assert structure != jax.tree.structure(quantize(tokens()[:, :16]))


def test_donated_caches_keep_their_bytes() -> None:
    step = jax.jit(
        lambda kernel, previous, skip: jg.quantize_kernel(kernel, BLOCK, previous=previous, skip=skip),
        donate_argnums=1,
    )
    for skip, seed in ((True, 0), (False, 1)):
        previous = jg.quantize_kernel(kernels(0), BLOCK)
        got = step(kernels(1), previous, jnp.array(skip))
        assert_same_trees(got, jg.quantize_kernel(kernels(seed), BLOCK))
        assert previous.rowwise.data.is_deleted()


def test_quantized_arrays_pass_between_shard_maps() -> None:
    devices = min(4, jax.device_count())
    mesh = data_mesh(devices)
    xs = jnp.concatenate([tokens(seed) for seed in range(devices)])
    sizes = jnp.tile(SIZES, devices)
    split = jax.jit(jax.shard_map(quantize, mesh=mesh, in_specs=(P("data"), P("data")), out_specs=P("data")))
    read = jax.jit(jax.shard_map(contents, mesh=mesh, in_specs=P("data"), out_specs=P("data")))
    expected = [quantized_contents(tokens(seed)) for seed in range(devices)]
    got = read(split(xs, sizes))
    assert_same_trees(got, jax.tree.map(lambda *parts: jnp.concatenate(parts), *expected))


def test_shard_map_quantizes_each_devices_kernels() -> None:
    def step(kernel: jax.Array, skip: jax.Array) -> tuple[jg.KernelCache, ...]:
        first = jg.quantize_kernel(kernel, CURRENT)
        return first, jg.quantize_kernel(2 * kernel, CURRENT, previous=first, skip=skip)

    split = jax.shard_map(step, mesh=data_mesh(4), in_specs=(P("data"), P()), out_specs=P("data"))
    for skip, factor in ((True, 1), (False, 2)):
        first, second = jax.jit(split)(kernels(), jnp.array(skip))
        # A shard's layout describes its own part only, so it differs from that of the whole.
        for got, kernel in ((first, kernels()), (second, factor * kernels())):
            whole = jg.quantize_kernel(kernel, CURRENT)
            assert_same_trees(jax.tree.leaves(got), jax.tree.leaves(whole))


def test_exported_kernels_give_the_same_result() -> None:
    def step(kernel: jax.Array, leaves: list[jax.Array], skip: jax.Array) -> list[jax.Array]:
        previous = jax.tree.unflatten(structure, leaves)
        return jax.tree.leaves(jg.quantize_kernel(kernel, BLOCK, previous=previous, skip=skip))

    previous = jg.quantize_kernel(kernels(0), BLOCK)
    leaves, structure = jax.tree.flatten(previous)
    call = exported(step, kernels(1), leaves, jnp.array(True))
    assert_same_trees(call(kernels(1), leaves, jnp.array(True)), leaves)
    expected = jax.tree.leaves(jg.quantize_kernel(kernels(1), BLOCK))
    assert_same_trees(call(kernels(1), leaves, jnp.array(False)), expected)


@each_mode
def test_a_number_of_tokens_can_be_left_open(mode: ScalingMode) -> None:
    # The number of row blocks that groups need depends on whether there are more tokens than groups.
    (open_tokens,) = export.symbolic_shape("tokens", constraints=[f"tokens >= {len(SIZES)}"])
    x = jax.ShapeDtypeStruct((open_tokens, FEATURES), jnp.float32)
    call = exported(lambda x, sizes: quantized_contents(x, sizes, mode), x, SIZES)
    for count in (TOKENS, len(SIZES)):
        x = tokens()[:count]
        data, rowwise, columnwise, amax, _ = call(x, SIZES)
        expected = quantize_oracle.quantize(np.asarray(x), np.asarray(SIZES), mode)
        assert_same_trees(data, expected.rowwise.data)
        assert_same_trees(rowwise, expected.rowwise.dequantized)
        assert_same_trees(columnwise, expected.columnwise.dequantized)
        assert_same_trees(amax, expected.amax)


@each_mode
def test_nan_in_the_tail_is_nothing_to_debug(mode: ScalingMode) -> None:
    x = tokens()
    with jax.debug_nans(True):
        data, *_ = jax.jit(lambda x: quantized_contents(x, mode=mode))(x)
    assert_same_trees(data, quantize_oracle.quantize(np.asarray(x), np.asarray(SIZES), mode).rowwise.data)
