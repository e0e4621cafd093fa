"""`grouped_dense` with a recipe, under transformations and beside results without one."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jax_grouped as jg
from benchmarks import shapes
from tests import oracle
from tests.meshes import data_mesh
from tests.ops.dense_cases import BLOCK, CURRENT, SHAPE, SIZES, assert_close, operands
from tests.ops.quantize_cases import assert_same_trees, some

RECIPES = {"block": BLOCK, "current": CURRENT, "mxfp8": jg.MXFP8BlockScaling()}


def forward_and_backward(
    recipe: Any,
    x: Any,
    kernel: Any,
    bias: Any,
    dy: Any,
    sizes: Any = SIZES,
    cache: Any = None,
    wrap: Callable[..., Any] = lambda function: function,
    **options: Any,
) -> tuple[jax.Array, ...]:
    """Computes `y`, `dx`, `dkernel` and `dbias`."""

    def dense(x: jax.Array, kernel: jax.Array, bias: jax.Array) -> jax.Array:
        return jg.grouped_dense(x, kernel, sizes, bias, recipe=recipe, kernel_cache=cache, **options)

    y, vjp = jax.vjp(wrap(dense), *(jnp.asarray(array) for array in (x, kernel, bias)))
    return y, *vjp(jnp.asarray(dy, y.dtype))


@functools.cache
def jitted(backend: str, name: str) -> jax.stages.Wrapped:
    """Jits once per backend and recipe; the sizes are data."""
    del backend
    return jax.jit(functools.partial(forward_and_backward, RECIPES[name]))


def test_fp8_is_near_the_exact_results(backend: str) -> None:
    for name in some(backend, ("block", "current", "mxfp8"), 1):
        for skew in ("lognormal", "tail"):
            sizes = shapes.group_sizes(SHAPE, skew)
            x, kernel, bias, dy = operands(sizes=sizes)

            y, dx, dkernel, dbias = jitted(backend, name)(x, kernel, bias, dy, sizes)

            groups = len(sizes)
            assert [array.dtype for array in (y, dx, dkernel, dbias)] == [jnp.bfloat16] * 2 + [jnp.float32] * 2
            # Rounding to 3 bits of mantissa is off by 2.6 % in the mean, and a product has two operands; e5m2 has 2.
            expected = oracle.add_bias(oracle.fprop(x, kernel, sizes), bias, sizes)
            oracle.assert_groups_close(y, expected, sizes, groups, 0.06)
            oracle.assert_groups_close(dx, oracle.dgrad(dy, kernel, sizes), sizes, groups, 0.12)
            oracle.assert_kernels_close(dkernel, oracle.wgrad(x, dy, sizes, groups), 0.12)
            oracle.assert_kernels_close(dbias, oracle.bias_grad(dy, sizes, groups), 1e-5)


def test_a_cache_gives_the_same_bits_and_kernel_its_gradient(backend: str) -> None:
    for name in some(backend, ["block", "current"], 0):
        x, kernel, bias, dy = operands()
        cache = jg.quantize_kernel(jnp.asarray(kernel), RECIPES[name])
        # The product reads the cache: a kernel of NaN changes nothing.
        step = jax.jit(functools.partial(forward_and_backward, RECIPES[name]))
        got = step(x, np.full_like(kernel, np.nan), bias, dy, SIZES, cache)
        assert_same_trees(got, jitted(backend, name)(x, kernel, bias, dy, SIZES))
        assert np.any(got[2])


def test_what_is_computed_again_is_the_same(backend: str) -> None:
    x, kernel, bias, dy = operands()
    for name in some(backend, ["block", "current", "mxfp8"], 1):
        step = jax.jit(functools.partial(forward_and_backward, RECIPES[name], wrap=jax.checkpoint))
        assert_same_trees(step(x, kernel, bias, dy), jitted(backend, name)(x, kernel, bias, dy, SIZES))


def test_microbatches_of_a_scan_share_a_cache_and_keep_what_has_a_name(backend: str) -> None:
    _, kernel, bias, _ = (jnp.asarray(array) for array in operands())
    batches = [operands(seed) for seed in range(2)]
    policies = jax.checkpoint_policies
    choices = [policies.save_only_these_names(*jg.CHECKPOINT_NAMES), policies.nothing_saveable]

    @functools.partial(jax.jit, static_argnums=3)
    def total(kernel: jax.Array, xs: jax.Array, dys: jax.Array, policy: Callable[..., bool]) -> jax.Array:
        cache = jg.quantize_kernel(kernel, BLOCK)

        @functools.partial(jax.checkpoint, policy=policy)
        def dense(x: jax.Array, kernel: jax.Array) -> jax.Array:
            return jg.grouped_dense(x, kernel, SIZES, bias, recipe=BLOCK, kernel_cache=cache)

        def step(total: jax.Array, batch: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
            x, dy = batch
            return total + jax.vjp(functools.partial(dense, x), kernel)[1](dy)[0], None

        return jax.lax.scan(step, jnp.zeros_like(kernel), (xs, dys))[0]

    xs, dys = (jnp.stack([batch[i] for batch in batches]) for i in (0, 3))
    parts = [jitted(backend, "block")(x, kernel, bias, dy, SIZES)[2] for x, _, _, dy in batches]
    for policy in some(backend, choices, 0):
        assert_close((total(kernel, xs, dys, policy),), (parts[0] + parts[1],))


def test_vmap_gives_every_element_what_the_plain_call_gives(backend: str) -> None:
    _, kernel, bias, _ = operands()
    sizes = np.stack([SIZES, SIZES[::-1]])
    batches = [operands(seed, own) for seed, own in enumerate(sizes)]
    xs, dys = (np.stack([batch[i] for batch in batches]) for i in (0, 3))
    for name in some(backend, ["block", "current", "mxfp8"], 1):
        step = jitted(backend, name)
        got = jax.jit(jax.vmap(step, (0, None, None, 0, 0)))(xs, kernel, bias, dys, sizes)
        for i in range(2):
            assert_close([array[i] for array in got], step(xs[i], kernel, bias, dys[i], sizes[i]), 1e-3)


def test_shard_map_sums_the_gradients_of_replicated_kernels(backend: str) -> None:
    devices = min(2, jax.device_count())
    mesh = data_mesh(devices)
    _, kernel, bias, _ = operands()
    batches = [operands(seed) for seed in range(devices)]
    xs, dys = (np.concatenate([batch[i] for batch in batches]) for i in (0, 3))
    sharded = jax.shard_map(
        lambda x, kernel, bias, dy, cache: forward_and_backward(CURRENT, x, kernel, bias, dy, cache=cache),
        mesh=mesh,
        in_specs=(P("data"), P(), P(), P("data"), P()),
        out_specs=(P("data"), P("data"), P(), P()),
    )
    cache = jg.quantize_kernel(jnp.asarray(kernel), CURRENT)
    got = jax.jit(sharded)(xs, kernel, bias, dys, cache)
    parts = [jitted(backend, "current")(x, kernel, bias, dy, SIZES) for x, _, _, dy in batches]
    joined = [jnp.concatenate([part[i] for part in parts]) for i in (0, 1)]
    assert_close(got, (*joined, *(sum(part[i] for part in parts) for i in (2, 3))))


def test_expert_shards_with_group_offset_add_up_to_the_whole(backend: str) -> None:
    x, kernel, bias, dy = operands()
    whole = jitted(backend, "block")(x, kernel, bias, dy, SIZES)
    step = jax.jit(lambda kernel, bias, i: forward_and_backward(BLOCK, x, kernel, bias, dy, group_offset=i))
    halves = [step(kernel[i : i + 2], bias[i : i + 2], i) for i in (0, 2)]
    added = [halves[0][i] + halves[1][i] for i in (0, 1)]
    assert_close((*added, *(jnp.concatenate([half[i] for half in halves]) for i in (2, 3))), whole)


def test_arrays_without_elements(backend: str) -> None:
    for tokens, K, N, groups in ((0, 16, 32, 2), (6, 0, 32, 2), (6, 16, 0, 2), (6, 16, 32, 0)):
        x, kernel, bias = np.ones((tokens, K)), np.ones((groups, K, N)), np.zeros((groups, N))
        sizes = np.array([1, 2])[:groups]
        for recipe in some(backend, [BLOCK, CURRENT], tokens + K // 16):
            step = jax.jit(functools.partial(forward_and_backward, recipe))
            y, dx, dkernel, dbias = step(x, kernel, bias, np.ones((tokens, N)), sizes)
            assert (y.shape, dx.shape, dkernel.shape) == ((tokens, N), x.shape, kernel.shape)
            assert dbias.shape == bias.shape
            assert not any(np.any(array) for array in (y, dx, dkernel))


def test_checked_group_sizes_raise() -> None:
    with jg.config.override(check=True), pytest.raises(ValueError, match="group_sizes must not be negative"):
        jg.grouped_dense(jnp.ones((6, 16)), jnp.ones((2, 16, 16)), jnp.array([4, 3]), recipe=BLOCK)


@pytest.mark.parametrize(
    ("shape", "recipe"), [(shapes.SHAPES["dsv3 up"], BLOCK), (shapes.SHAPES["qwen3"], CURRENT)], ids=["dsv3", "qwen3"]
)
def test_residuals_take_half_of_what_they_take_in_bf16(shape: shapes.Shape, recipe: Any) -> None:
    def residual_bytes(recipe: Any) -> int:
        def forward(x: jax.Array, kernel: jax.Array, sizes: jax.Array) -> Any:
            return jax.vjp(lambda x, kernel: jg.grouped_dense(x, kernel, sizes, recipe=recipe), x, kernel)[1]

        sizes = [(shape.tokens, shape.K), (shape.num_groups, shape.K, shape.N), (shape.num_groups,)]
        arguments = map(jax.ShapeDtypeStruct, sizes, (jnp.bfloat16, jnp.float32, jnp.int32))
        leaves = jax.tree.leaves(jax.eval_shape(forward, *arguments))
        return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)

    # Padding between groups and the scales make it more than half.
    assert residual_bytes(recipe) < 0.51 * residual_bytes(None)


@pytest.mark.parametrize("recipe", [jg.Float8BlockScaling(), jg.Float8CurrentScaling()], ids=["block", "current"])
def test_sums_of_zero_stay_zero_where_the_scales_overflow_float32(recipe: jg.Recipe, backend: str) -> None:
    first_half, odd_row = jnp.arange(128) < 64, jnp.arange(48)[:, None] % 2
    x, dy = 1e38 * first_half * (1 - odd_row), 1e38 * first_half * odd_row
    kernel = 1e38 * jnp.tile(~first_half[:, None] * ~first_half, (2, 1, 1))
    dense = functools.partial(jg.grouped_dense, group_sizes=jnp.array([20, 28]), recipe=recipe)
    y, vjp = jax.vjp(dense, x, kernel)
    for result in (y, *vjp(dy)):
        np.testing.assert_array_equal(result, 0)
