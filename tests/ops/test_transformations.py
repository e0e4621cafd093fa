"""The operations under JAX's transformations: each must give what the plain call gives."""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jax_grouped as jg
from benchmarks import shapes
from jax_grouped import ScalingMode
from tests import quantize_oracle
from tests.meshes import data_mesh
from tests.operands import normal
from tests.ops.quantize_cases import MODES, SHAPE, assert_quantized, assert_same_trees, some, tokens
from tests.oracle import assert_trees_close
from tests.quantize_oracle import assert_same_bits

BATCH, TOKENS, GROUPS, IN, OUT = 3, 24, 5, 16, 8
#: Group sizes of three batch elements. One element's groups add up to all rows, and two leave a tail.
SIZES = np.array([[4, 0, 9, 3, 5], [0, 11, 0, 0, 13], [7, 2, 1, 0, 0]], np.int32)
OFFSETS = np.array([[1], [2], [0]], np.int32)


@pytest.fixture(autouse=True)
def _backend(backend: str) -> None:
    """Runs every test of this module on every backend."""


def operands(groups: int = GROUPS, seed: int = 0) -> tuple[jax.Array, ...]:
    """Returns `x`, `kernel`, `bias`, `dy` of every batch element; NaN in the rows of no group."""
    rng = np.random.default_rng(seed)
    x, dy = (rng.standard_normal((BATCH, TOKENS, features), np.float32) for features in (IN, OUT))
    for element, sizes in enumerate(SIZES):
        for array in (x, dy):
            array[element, sizes.sum() :] = np.nan
    kernel, bias = rng.standard_normal((BATCH, groups, IN, OUT), np.float32), rng.standard_normal((BATCH, groups, OUT))
    return tuple(jnp.asarray(array, jnp.float32) for array in (x, kernel, bias, dy))


def plain_operands(seed: int = 0) -> tuple[jax.Array, ...]:
    """Returns `x`, `kernel` and `bias` for the first sizes."""
    return tuple(array[0] for array in operands(seed=seed)[:3])


def dense(x: jax.Array, kernel: jax.Array, bias: jax.Array, sizes: Any = SIZES[0], offset: Any = None) -> jax.Array:
    return jg.grouped_dense(x, kernel, sizes, bias, precision="highest", group_offset=offset)


def loss(*arguments: Any) -> jax.Array:
    return jnp.sum(jnp.sin(dense(*arguments)))


def test_gradients_under_jit_and_checkpoint_and_results_without_jit() -> None:
    arguments = plain_operands()
    wrapped = jax.jit(jax.checkpoint(loss, policy=jax.checkpoint_policies.nothing_saveable))
    got = jax.jit(jax.value_and_grad(wrapped, (0, 1, 2)))(*arguments)
    assert_trees_close(got, jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(*arguments))
    with jax.disable_jit():
        y = jg.ragged_dot(jnp.ones((4, 8)), jnp.ones((1, 8, 8)), jnp.array([3]))
    np.testing.assert_array_equal(y[:, 0], [8, 8, 8, 0])


def mlp(x: jax.Array, kernel: jax.Array) -> jax.Array:
    gate_up = jnp.concatenate([kernel, kernel], axis=2)
    return jg.moe.grouped_mlp(x, gate_up, kernel, SIZES[0], recipe=jg.Float8BlockScaling())


fp8_dense = functools.partial(jg.grouped_dense, group_sizes=SIZES[0], recipe=jg.Float8BlockScaling())


@pytest.mark.parametrize(("transform", "layer"), [(jax.checkpoint, fp8_dense), (jax.jit, mlp)], ids=["dense", "mlp"])
def test_calls_of_one_layer_may_differ_in_what_has_a_gradient(transform: Callable, layer: Callable) -> None:
    x = normal(0, (TOKENS, IN), jnp.bfloat16)
    kernels = [normal(seed, (GROUPS, IN, IN), jnp.bfloat16) for seed in range(3)]

    def gradient(layer: Callable) -> tuple[jax.Array, jax.Array]:
        def loss(first: jax.Array, last: jax.Array) -> jax.Array:
            # Only the kernel, only the tokens, and both.
            return jnp.sum(layer(layer(layer(x, first), kernels[1]), last).astype(jnp.float32))

        return jax.jit(jax.grad(loss, (0, 1)))(kernels[0], kernels[2])

    # JAX traces the transformed layer once.
    assert_trees_close(gradient(transform(layer)), gradient(layer))


def test_shard_map_sums_the_derivatives_of_replicated_kernels() -> None:
    devices = min(4, jax.device_count())
    group = np.repeat(np.arange(GROUPS + 1), [*SIZES[0], TOKENS - SIZES[0].sum()])
    member = (group[:, None] == np.arange(GROUPS)).astype(np.float32)

    def cached(x: jax.Array, kernel: jax.Array, bias: jax.Array) -> jax.Array:
        return jg.grouped_dense(x, kernel, SIZES[0], bias, precision="highest", kernel_cache=kernel.astype(x.dtype))

    def by_definition(x: jax.Array, kernel: jax.Array, bias: jax.Array) -> jax.Array:
        x = jnp.where(group[:, None] < GROUPS, x, 0)
        with jax.default_matmul_precision("highest"):
            return jnp.einsum("tg,tk,gkn->tn", member, x, kernel) + member @ bias

    def derivatives(function: Callable[..., jax.Array]) -> Callable[..., Any]:
        """Returns derivatives of first and second order."""

        def squares(xs: jax.Array, kernel: jax.Array, bias: jax.Array) -> Any:
            def total(*weights: jax.Array) -> jax.Array:
                return sum(jnp.sum(jnp.sin(function(x, *weights))) for x in xs)

            gradients = jax.grad(total, (0, 1))(kernel, bias)
            return sum(jnp.sum(gradient**2) for gradient in gradients), gradients

        return jax.grad(squares, argnums=(0, 1, 2), has_aux=True)

    xs = jnp.stack([plain_operands(seed)[0] for seed in range(devices)])
    _, kernel, bias = plain_operands()
    sharded = jax.shard_map(
        derivatives(cached),
        mesh=data_mesh(devices),
        in_specs=(P("data"), P(), P()),
        out_specs=((P("data"), P(), P()), P()),
    )
    assert_trees_close(jax.jit(sharded)(xs, kernel, bias), jax.jit(derivatives(by_definition))(xs, kernel, bias), 1e-3)


def stacked(trees: list[Any]) -> Any:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def element(tree: Any, index: int | tuple[int, ...]) -> Any:
    return jax.tree.map(lambda leaf: leaf[index], tree)


@jax.jit
def forward_and_backward(
    x: jax.Array, kernel: jax.Array, bias: jax.Array, dy: jax.Array, sizes: jax.Array, offset: jax.Array
) -> tuple[jax.Array, ...]:
    """Computes `y`, `dx`, `dkernel` and `dbias`."""
    y, vjp = jax.vjp(functools.partial(dense, sizes=sizes, offset=offset), x, kernel, bias)
    return y, *vjp(dy)


#: Axes of the arguments that are mapped. There are three kernels for five groups.
MAPPED: dict[str, tuple[int | None, ...]] = {
    "all but kernel and bias": (0, None, None, 0, 0, 0),
    "offset": (None, None, None, None, None, 0),
    "other axes": (1, 3, 2, 2, 1, 1),
    "kernel": (None, 0, None, None, None, None),
    "all but sizes and offset": (0, 0, 0, 0, None, None),
}


def test_vmap_of_grouped_dense_and_its_gradients(backend: str) -> None:
    arrays = *operands(groups=3), SIZES, OFFSETS
    for mapped in some(backend, MAPPED, 0, count=2):
        axes = MAPPED[mapped]
        expected = [
            forward_and_backward(*(x[0 if axis is None else i] for x, axis in zip(arrays, axes, strict=True)))
            for i in range(BATCH)
        ]
        batch = [x[0] if axis is None else jnp.moveaxis(x, 0, axis) for x, axis in zip(arrays, axes, strict=True)]
        got = jax.jit(jax.vmap(forward_and_backward, axes))(*batch)
        assert_trees_close(got, stacked(expected))
        y, dx, *_ = got
        for i, sizes in enumerate(SIZES if axes[4] is not None else SIZES[[0] * BATCH]):
            assert not np.any(y[i, sizes.sum() :])
            assert not np.any(dx[i, sizes.sum() :])


def test_nested_vmap_with_kernels_of_the_outer_and_of_the_inner_one(backend: str) -> None:
    rng = np.random.default_rng(0)
    x, kernel = (
        jnp.asarray(rng.standard_normal((2, 3, *shape)), jnp.bfloat16) for shape in ((TOKENS, IN), (5, IN, OUT))
    )
    for outer, inner in some(backend, [(0, None), (None, None), (None, 0), (0, 0)], 0, count=2):
        dots = jax.vmap(jax.vmap(jg.ragged_dot, (0, inner, 0)), (0, outer, None))
        at = (0 if outer is None else slice(None), 0 if inner is None else slice(None))
        got = jax.jit(dots)(x, kernel[at], SIZES)
        for i, j in np.ndindex(2, 3):
            own = kernel[0 if outer is None else i, 0 if inner is None else j]
            assert_trees_close(got[i, j], jg.ragged_dot(x[i, j], own, SIZES[j]), 2e-2)


def test_gradients_of_a_shared_kernel_under_vmap_add_up_in_a_scan() -> None:
    x, kernels, biases, _ = operands(groups=3)
    weights, sizes, offsets = (kernels[0], biases[0]), jnp.asarray(SIZES), jnp.asarray(OFFSETS)

    def step(total: Any, factor: jax.Array) -> tuple[Any, None]:
        losses = jax.vmap(loss, (0, None, None, 0, 0))
        gradients = jax.grad(lambda weights: losses(factor * x, *weights, sizes, offsets).sum())(weights)
        return jax.tree.map(jnp.add, total, gradients), None

    got, _ = jax.jit(lambda: jax.lax.scan(step, jax.tree.map(jnp.zeros_like, weights), jnp.array([1.0, 2.0])))()
    gradient = jax.jit(jax.grad(loss, (1, 2)))
    each = [gradient(factor * x[i], *weights, sizes[i], offsets[i]) for factor in (1.0, 2.0) for i in range(BATCH)]
    assert_trees_close(got, jax.tree.map(lambda *parts: sum(parts), *each), 1e-4)


def test_a_batch_of_none_or_one() -> None:
    def everything(x: jax.Array, kernel: jax.Array, sizes: jax.Array) -> Any:
        y, vjp = jax.vjp(lambda x, kernel: jg.ragged_dot(x, kernel, sizes), x, kernel)
        quantized = jg.grouped_quantize(x, sizes, ScalingMode.MX, columnwise=True, dbias=True)
        # Flat arrays are unspecified past the last region.
        return y, vjp(y), quantized.rowwise.data, quantized.dbias, jg.grouped_dequantize(quantized.columnwise)

    x, kernel = (array.astype(jnp.bfloat16) for array in operands(groups=3)[:2])
    for size in (0, 1):
        got = jax.jit(jax.vmap(everything, (0, None, 0)))(x[:size], kernel[0], SIZES[:size, :3])
        expected = jax.jit(everything)(x[0], kernel[0], SIZES[0, :3])
        assert jax.tree.map(lambda leaf: leaf.shape[1:], got) == jax.tree.map(jnp.shape, expected)
        assert {len(leaf) for leaf in jax.tree.leaves(got)} == {size}
        if size:
            assert_same_trees(element(got, 0), expected)


SKEWS = ("hostile", "empty_first", "all_empty")


def batch_of_tokens() -> tuple[np.ndarray, np.ndarray]:
    """Returns tokens and sizes of every batch element, with poison in the rows of no group."""
    sizes = np.stack([shapes.group_sizes(SHAPE, skew) for skew in SKEWS])
    return np.stack([tokens(SHAPE, n, seed=seed) for seed, n in enumerate(sizes)]), sizes


def test_vmap_of_quantize_and_dequantize(backend: str) -> None:
    x, sizes = batch_of_tokens()
    for mode in some(backend, MODES, 1, count=2):
        expected = [quantize_oracle.quantize(*case, mode) for case in zip(x, sizes, strict=True)]

        def round_trip(x: jax.Array, sizes: jax.Array, mode: ScalingMode = mode) -> Any:
            got = jg.grouped_quantize(x, sizes, mode, columnwise=True)
            return got, {name: jg.grouped_dequantize(getattr(got, name)) for name in ("rowwise", "columnwise")}

        got, numbers = jax.jit(jax.vmap(round_trip, (1, 0)))(np.moveaxis(x, 0, 1), sizes)
        for i, skew in enumerate(SKEWS):
            assert_quantized(f"{mode} {skew},", element(got, i), expected[i])
        for name, values in numbers.items():
            assert_same_bits(name, values, np.stack([getattr(copies, name).dequantized for copies in expected]))


def test_quantize_one_array_by_sizes_and_scales_of_each_in_two_vmaps() -> None:
    x, sizes = batch_of_tokens()
    scales = np.array([[1, 2, 3, 4, 5], [5, 4, 3, 2, 1]], np.float32)

    def quantize(sizes: jax.Array, scale: jax.Array) -> jg.GroupedQuantized:
        return jg.grouped_quantize(x[0], sizes, ScalingMode.TENSOR, columnwise=True, scale=scale)

    got = jax.vmap(jax.vmap(quantize, (0, None)), (None, 0))(sizes[:, ::-1], scales)
    for i, j in np.ndindex(2, BATCH):
        expected = quantize_oracle.quantize(x[0], sizes[j, ::-1], ScalingMode.TENSOR, scale=scales[i])
        assert_quantized(f"scales {i}, sizes {j},", element(got, (i, j)), expected)


def test_caches_of_kernels_with_skip_of_each(backend: str) -> None:
    recipes = jg.Float8BlockScaling(), jg.Float8CurrentScaling(), jg.MXFP8BlockScaling()
    kernels = np.random.default_rng(0).standard_normal((BATCH, 2, 48, 144), np.float32)
    skip = np.array([True, False, True])
    # The batch has a kernel for each element, or one for all.
    for recipe, axis in some(backend, itertools.product(recipes, (0, None)), 0, count=2):
        cache = jax.eval_shape(functools.partial(jg.quantize_kernel, recipe=recipe), kernels[0])

        def step(kernel: jax.Array, previous: Any, skip: jax.Array, recipe: jg.Recipe = recipe) -> jg.KernelCache:
            return jg.quantize_kernel(kernel, recipe, previous=previous, skip=skip)

        previous = jax.tree.map(lambda leaf: jnp.ones((BATCH, *leaf.shape), leaf.dtype), cache)
        new = kernels[1] if axis is None else kernels
        got = jax.jit(jax.vmap(step, (axis, 0, 0)), donate_argnums=1)(new, previous, skip)
        for i in np.flatnonzero(skip):
            assert_same_trees(element(got, i), jax.tree.map(lambda leaf: jnp.ones(leaf.shape, leaf.dtype), cache))
        options = dict(pow2_scales=getattr(recipe, "pow2_scales", False))
        expected = quantize_oracle.quantize(kernels[1], None, recipe.kernel_mode, **options)
        assert_quantized(f"{recipe}, axis {axis},", element(got, 1), expected)
