"""`grouped_dense` in FP8: numbers, states of delayed scaling, and what transformations make of both.

The `cuda` backend is compared with the `xla` backend on the same device, and that with NumPy on the same quantized
numbers.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax.linen import fp8_ops
from jax.sharding import PartitionSpec as P

import jax_grouped as jg
from benchmarks import shapes
from tests import oracle, quantize_oracle
from tests.exports import exported
from tests.meshes import data_mesh
from tests.operands import random_operands
from tests.ops.dense_cases import some_state
from tests.ops.quantize_cases import assert_same_trees, poison, some
from tests.states import NAMES, fp8_state

HISTORY = 3
DELAYED = jg.DelayedScaling(amax_history_len=HISTORY, margin=1.0)
RECIPES: dict[str, jg.Recipe] = {
    "block": jg.Float8BlockScaling(),
    "current": jg.Float8CurrentScaling(),
    "delayed": DELAYED,
    "block-e5m2": jg.Float8BlockScaling(grad_dtype="float8_e5m2", pow2_scales=False, amax_epsilon=0.5),
    "current-e4m3": jg.Float8CurrentScaling(grad_dtype="float8_e4m3fn", pow2_scales=True),
    "mxfp8": jg.MXFP8BlockScaling(),
}
#: Recipes whose operands have another layout, or other scales.
LAYOUTS = "block", "current", "delayed"
DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}

SHAPE = shapes.Shape("patterns", num_groups=8, tokens=320, K=144, N=272)
SIZES = np.array([37, 0, 130, 1, 0, 16, 40, 20], np.int32)


class Case(NamedTuple):
    """Operands, with poison in the rows of no group."""

    x: Any
    kernel: Any
    bias: Any
    dy: Any
    sizes: Any


class Results(NamedTuple):
    """Results of forward and backward pass, and the next state of delayed scaling."""

    y: Any
    dx: Any
    dkernel: Any
    dbias: Any
    state: jg.Fp8State | None


def random_case(
    sizes: np.ndarray = SIZES,
    dtype: str = "bfloat16",
    *,
    shape: shapes.Shape = SHAPE,
    seed: int = 0,
    magnitude: float = 4.0,
) -> Case:
    at = random_operands(shape, sizes, np.float32, magnitude=magnitude, seed=seed)
    x, dy = at.x.astype(DTYPES[dtype]), at.dy.astype(DTYPES[dtype])
    for tokens in (x, dy):
        poison(tokens[shapes.group_ends(sizes, shape.tokens)[-1] :])
    # A bias would hide the products of small numbers.
    bias = at.bias if magnitude < 10 else np.zeros_like(at.bias)
    return Case(x, at.kernel, bias, dy, sizes)


def initial_state(name: str, seed: int = 0) -> jg.Fp8State | None:
    return random_state(seed) if name == "delayed" else None


random_state = functools.partial(some_state, num_groups=SHAPE.num_groups)


def compute(
    recipe: jg.Recipe,
    state: jg.Fp8State | None,
    case: Case,
    cache: jg.KernelCache | None = None,
    wrap: Callable[..., Any] = lambda function: function,
    **options: Any,
) -> Results:
    def dense(x: jax.Array, kernel: jax.Array, bias: jax.Array, state: jg.Fp8State | None) -> jax.Array:
        return jg.grouped_dense(
            x, kernel, case.sizes, bias, recipe=recipe, fp8_state=state, kernel_cache=cache, **options
        )

    y, vjp = jax.vjp(wrap(dense), *(jnp.asarray(array) for array in case[:3]), state)
    return Results(y, *vjp(jnp.asarray(case.dy)))


@functools.cache
def jitted(name: str) -> jax.stages.Wrapped:
    """Jits once per recipe; the sizes are data."""
    return jax.jit(functools.partial(compute, RECIPES[name]))


def numpy_scale(state: jg.Fp8State, name: str) -> np.ndarray:
    """Returns the scales that a state gives in this step."""
    amax = np.asarray(getattr(state, f"{name}_amax_history")).max(axis=1)
    largest = np.float32(57344 if name == "output_grad" else 448)
    with np.errstate(divide="ignore"):
        scale = largest / (amax * np.float32(2))  # The margin is 1.
    return np.where(amax > 0, scale, np.asarray(getattr(state, f"{name}_scale")))


def exact(name: str, case: Case, state: jg.Fp8State | None) -> Results:
    """Computes the results in float64, from the numbers that the operands are quantized to."""
    recipe = RECIPES[name]
    scales = [None] * 3 if state is None else [numpy_scale(state, operand) for operand in NAMES]
    options = {name: getattr(recipe, name) for name in ("pow2_scales", "amax_epsilon") if hasattr(recipe, name)}

    def quantize(x: np.ndarray, sizes: np.ndarray | None, dtype: Any, scale: Any) -> quantize_oracle.Quantized:
        mode = recipe.kernel_mode if sizes is None else recipe.token_mode
        return quantize_oracle.quantize(x, sizes, mode, dtype=jnp.dtype(dtype).name, scale=scale, **options)

    x = quantize(case.x, case.sizes, recipe.fwd_dtype, scales[0])
    kernel = quantize(case.kernel, None, recipe.fwd_dtype, scales[1])
    dy = quantize(case.dy, case.sizes, recipe.grad_dtype, scales[2])
    sizes, groups = case.sizes, len(case.sizes)
    y = oracle.fprop(x.rowwise.dequantized, kernel.columnwise.dequantized, sizes)
    return Results(
        y=oracle.add_bias(y, case.bias, sizes),
        dx=oracle.dgrad(dy.rowwise.dequantized, kernel.rowwise.dequantized, sizes),
        dkernel=oracle.wgrad(x.columnwise.dequantized, dy.columnwise.dequantized, sizes, groups),
        dbias=oracle.bias_grad(case.dy, sizes, groups),
        state=None if state is None else next_state(state, case),
    )


def next_state(state: jg.Fp8State, case: Case) -> jg.Fp8State:
    """Returns the state with the scales of this step, and the largest values of each group before the older ones."""
    fields = {}
    for name, array in (("input", case.x), ("kernel", case.kernel), ("output_grad", case.dy)):
        groups = [slice(group, group + 1) for group in range(len(case.sizes))]
        if name != "kernel":
            groups = [rows for _, rows in oracle.local_groups(case.sizes, len(case.sizes), len(array))]
        amax = [np.max(np.abs(array[group].astype(np.float32)), initial=0) for group in groups]
        history = np.asarray(getattr(state, f"{name}_amax_history"))[:, :-1]
        fields[f"{name}_amax_history"] = jnp.asarray(np.concatenate([np.array(amax)[:, None], history], axis=1))
        fields[f"{name}_scale"] = jnp.asarray(numpy_scale(state, name))
    return fp8_state(**fields)


def check(backend: str, name: str, case: Case, state: jg.Fp8State | None = None) -> None:
    """Compares group by group, and states to the bit; without a state, with one that has seen these numbers once."""
    groups = len(case.sizes)
    if name == "delayed" and state is None:
        state = jitted(name)(jg.Fp8State.initial(DELAYED, groups), case).state
    got = jitted(name)(state, case)
    with jg.config.override(backend="xla"):
        expected = jitted(name)(state, case) if backend == "cuda" else exact(name, case, state)
    assert [array.dtype for array in got[:4]] == [case.x.dtype, case.x.dtype, np.float32, np.float32]
    for one, other in zip(got[:2], expected[:2], strict=True):
        tolerance = oracle.fp8_tolerance(one.dtype.name)
        oracle.assert_groups_close(one, np.asarray(other, np.float64), case.sizes, groups, tolerance)
        if backend == "cuda" and one.size >= 1000:
            # Results that differ by 3e-4 before they are rounded to 16 bits differ by 1e-3 in the mean afterwards.
            assert oracle.relative_error(one, np.asarray(other, np.float64)) <= 2e-3
    oracle.assert_kernels_close(got.dkernel, np.asarray(expected.dkernel, np.float64), oracle.fp8_tolerance())
    oracle.assert_kernels_close(got.dbias, np.asarray(expected.dbias, np.float64), 1e-5)
    if state is not None:
        # A mark that does not fit makes the next results NaN.
        for field in (f"{operand}_{what}" for operand in NAMES for what in ("amax_history", "scale")):
            np.testing.assert_array_equal(getattr(got.state, field), getattr(expected.state, field), field)


def pattern_sizes(pattern: int) -> np.ndarray:
    """Returns 1 to 40 rows for each group whose bit is 0, none for the others."""
    rows = np.random.default_rng(pattern).integers(1, 41, SHAPE.num_groups)
    empty = pattern >> np.arange(SHAPE.num_groups) & 1
    return np.where(empty, 0, rows).astype(np.int32)


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_patterns_of_empty_groups_and_skews(backend: str, name: str) -> None:
    patterns = range(256) if backend == "cuda" and name in LAYOUTS else (0b10011100, 0b11111111)
    for dtype in some(backend, DTYPES, 1 + list(RECIPES).index(name)):
        for pattern in patterns:
            check(backend, name, random_case(pattern_sizes(pattern), dtype, seed=pattern, magnitude=1e3))
        for skew in ("lognormal", "tail", "hostile"):
            check(backend, name, random_case(shapes.group_sizes(SHAPE, skew), dtype, magnitude=1e3))
        check(backend, name, random_case(dtype=dtype), initial_state(name))


@pytest.mark.slow
@pytest.mark.parametrize("backend", [pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True)
@pytest.mark.parametrize("name", LAYOUTS)
def test_other_shapes(backend: str, name: str) -> None:
    # More groups than a block has threads; features and tokens of every kind.
    for groups, tokens, K, N in ((1025, 1025, 16, 48), (6, 257, 2880, 48), (6, 37, 48, 2880), (6, 1, 272, 16)):
        shape = shapes.Shape("other", groups, tokens, K, N)
        for skew in ("lognormal", "tail", "hostile", "alternate_empty", "one_hot", "all_empty"):
            sizes = shapes.group_sizes(shape, skew)
            check(backend, name, random_case(sizes, "float32", shape=shape, magnitude=1e3))


def test_what_gives_no_scale_keeps_the_last_one_and_the_latest_amax_can_decide_alone() -> None:
    largest = [0.0, np.nan, np.inf, 3e38, 7.0, 0.0, 0.0, 0.0, 1e-37]
    last = [8.0, 8.0, 8.0, 8.0, 8.0, 0.0, -np.inf, np.nan, 8.0]
    state = jg.Fp8State.initial(DELAYED, len(last))
    history = jnp.tile(jnp.array(largest)[:, None], (1, HISTORY))
    fields = {**vars(state), "kernel_amax_history": history, "kernel_scale": jnp.array(last)}
    scales = jax.jit(lambda s: s.scales(DELAYED).kernel)(fp8_state(**fields))
    np.testing.assert_array_equal(scales, np.float32([8, 8, 8, 8, 32, 1, 1, 1, 2.0**126]))
    latest = jg.DelayedScaling(amax_history_len=HISTORY, amax_compute_algo="most_recent")
    history = np.asarray(random_state().input_amax_history)[:, 0]
    present = history > 0
    np.testing.assert_array_equal(random_state().scales(latest).input[present], np.float32(448) / history[present])


def test_the_state_alone_gets_its_next_value_too(backend: str) -> None:
    case, state = random_case(), random_state()

    def loss(state: jg.Fp8State) -> jax.Array:
        y = jg.grouped_dense(jnp.asarray(case.x), jnp.asarray(case.kernel), SIZES, recipe=DELAYED, fp8_state=state)
        return jnp.sum(jnp.where(jnp.isnan(case.dy), 0, y * case.dy))

    assert_same_trees(jax.jit(jax.grad(loss))(state), jitted("delayed")(state, case).state)


def quantize_kernel(name: str, case: Case, state: jg.Fp8State | None) -> jg.KernelCache:
    scale = None if state is None else state.scales(DELAYED).kernel
    return jg.quantize_kernel(jnp.asarray(case.kernel), RECIPES[name], scale=scale)


def test_exported_steps_with_a_cache_and_rematerialization_give_the_same_bits(backend: str) -> None:
    for name in some(backend, ("block", "current", "delayed", "mxfp8"), 0):
        case, state = random_case(), initial_state(name)
        cache = quantize_kernel(name, case, state)

        def step(state: jg.Fp8State | None, cache: jg.KernelCache, name: str = name, case: Case = case) -> Any:
            # The product reads the cache: a kernel of NaN changes nothing.
            unreadable = case._replace(kernel=np.full_like(case.kernel, np.nan))
            return jax.tree.leaves(compute(RECIPES[name], state, unreadable, cache, wrap=jax.checkpoint)), cache

        got, returned = exported(step, state, cache)(state, cache)

        assert returned.recipe == cache.recipe
        assert returned.columnwise.layout == cache.columnwise.layout

        assert_same_trees(got, jax.tree.leaves(jitted(name)(state, case)))


def test_microbatches_add_gradients_of_kernels_and_combine_states_by_maximum(backend: str) -> None:
    policies = jax.checkpoint_policies
    choices = [policies.save_only_these_names(*jg.CHECKPOINT_NAMES), policies.nothing_saveable]
    case, state = random_case(), random_state()
    xs = jnp.stack([jnp.asarray(case.x), 3 * jnp.asarray(case.x), jnp.asarray(case.x) / 2])
    dy = jnp.where(jnp.isnan(case.dy), 0, case.dy)

    @functools.partial(jax.jit, static_argnums=2)
    @functools.partial(jax.grad, argnums=(0, 1))
    def total(state: jg.Fp8State, kernel: jax.Array, policy: Callable[..., bool]) -> jax.Array:
        shared = state.astype(fp8_ops.fp32_max_grad)
        cache = quantize_kernel("delayed", case._replace(kernel=kernel), jax.lax.stop_gradient(state))

        @functools.partial(jax.checkpoint, policy=policy)
        def dense(x: jax.Array) -> jax.Array:
            return jg.grouped_dense(x, kernel, SIZES, recipe=DELAYED, fp8_state=shared, kernel_cache=cache)

        def microbatch(total: jax.Array, x: jax.Array) -> tuple[jax.Array, None]:
            return total + jnp.sum((dense(x) * dy).astype(jnp.float32)), None

        return jax.lax.scan(microbatch, jnp.zeros(()), xs)[0]

    parts = [jitted("delayed")(state, case._replace(x=x)) for x in xs]
    states = [part.state for part in parts]
    for policy in some(backend, choices, 0):
        next_state, dkernel = total(state, jnp.asarray(case.kernel), policy)
        assert_same_trees(next_state, jax.tree.map(lambda *leaves: functools.reduce(jnp.maximum, leaves), *states))
        assert_close(dkernel, sum(part.dkernel for part in parts))


def assert_close(got: Any, expected: Any, tolerance: float = 1e-6) -> None:
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert oracle.relative_error(one, np.asarray(other, np.float64)) <= tolerance


def test_devices_add_gradients_of_kernels_and_combine_states_by_maximum(backend: str) -> None:
    devices = min(2, jax.device_count())
    cases = [random_case(seed=seed) for seed in range(devices)]
    xs, dys = (np.concatenate([getattr(case, name) for case in cases]) for name in ("x", "dy"))
    for name in some(backend, LAYOUTS, 2):
        state = initial_state(name)
        sharded = jax.shard_map(
            functools.partial(compute, RECIPES[name]),
            mesh=data_mesh(devices),
            in_specs=(P(), Case(P("data"), P(), P(), P("data"), P()), P()),
            out_specs=Results(P("data"), P("data"), P(), P(), P()),
        )

        got = jax.jit(sharded)(state, cases[0]._replace(x=xs, dy=dys), quantize_kernel(name, cases[0], state))

        parts = [jitted(name)(state, cases[0]._replace(x=case.x, dy=case.dy)) for case in cases]
        assert_close(got[:2], [jnp.concatenate(arrays) for arrays in zip(*(part[:2] for part in parts), strict=True)])
        assert_close(got[2:4], [sum(arrays) for arrays in zip(*(part[2:4] for part in parts), strict=True)])
        states = [part.state for part in parts]
        assert_same_trees(got.state, jax.tree.map(lambda *leaves: functools.reduce(jnp.maximum, leaves), *states))


def test_devices_with_states_of_their_own_can_share_everything_else(backend: str) -> None:
    devices = min(2, jax.device_count())
    states, case = [random_state(seed) for seed in range(devices)], random_case()

    def own(states: jg.Fp8State, x: jax.Array, kernel: jax.Array, bias: jax.Array, dy: jax.Array) -> jg.Fp8State:
        state = jax.tree.map(lambda leaf: leaf[0], states)
        dy = jax.lax.pcast(dy, "data", to="varying")
        after = compute(DELAYED, state, Case(x, kernel, bias, dy, SIZES)).state
        return jax.tree.map(lambda leaf: leaf[None], after)

    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)
    specs = dict(in_specs=(P("data"), P(), P(), P(), P()), out_specs=P("data"))
    after = jax.jit(jax.shard_map(own, mesh=data_mesh(devices), **specs))(stacked, *case[:4])
    for i, state in enumerate(states):
        assert_same_trees(jax.tree.map(lambda leaf, i=i: leaf[i], after), jitted("delayed")(state, case).state)


def test_vmap_gives_every_element_what_the_plain_call_gives(backend: str) -> None:
    cases = [random_case(sizes, seed=seed) for seed, sizes in enumerate((SIZES, SIZES[::-1]))]
    cases[1] = cases[1]._replace(kernel=cases[0].kernel, bias=cases[0].bias)
    x, _, _, dy, sizes = (np.stack(arrays) for arrays in zip(*cases, strict=True))
    for name in some(backend, ("block", "current", "delayed", "mxfp8"), 2):
        states = [initial_state(name, seed) for seed in range(2)]
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)
        batch = Case(x, cases[0].kernel, cases[0].bias, dy, sizes)
        got = jax.jit(jax.vmap(jitted(name), (0, Case(0, None, None, 0, 0))))(stacked, batch)
        for i in range(2):
            element, expected = jax.tree.map(lambda leaf, i=i: leaf[i], got), jitted(name)(states[i], cases[i])
            assert_same_trees(element.state, expected.state)
            assert_close(element[:4], expected[:4], oracle.fp8_tolerance("bfloat16"))


def test_expert_shards_with_group_offset_add_up_to_the_whole(backend: str) -> None:
    case, half = random_case(), SHAPE.num_groups // 2
    step = jax.jit(lambda case, offset: compute(RECIPES["block"], None, case, group_offset=offset))
    halves = [step(case._replace(kernel=case.kernel[i : i + half], bias=case.bias[i : i + half]), i) for i in (0, half)]
    added = [halves[0][i] + halves[1][i] for i in (0, 1)]
    joined = [jnp.concatenate([part[i] for part in halves]) for i in (2, 3)]
    assert_close([*added, *joined], jitted("block")(None, case)[:4])


def test_arrays_without_elements(backend: str) -> None:
    for tokens, K, N, groups in ((0, 16, 32, 2), (6, 0, 32, 2), (6, 16, 0, 2), (6, 16, 32, 0)):
        case = Case(np.ones((tokens, K)), np.ones((groups, K, N)), np.zeros((groups, N)), np.ones((tokens, N)), None)
        case = case._replace(sizes=np.array([1, 2])[:groups], dy=case.dy.astype(np.float32))
        for name in some(backend, LAYOUTS[:2], tokens + K // 16):
            got = jitted(name)(None, case)
            assert [array.shape for array in got[:4]] == [case.dy.shape, *(array.shape for array in case[:3])]
            assert not any(np.any(array) for array in got[:3])


def test_residuals_take_half_of_what_they_take_in_bf16() -> None:
    def residual_bytes(recipe: Any, shape: shapes.Shape) -> int:
        def forward(x: jax.Array, kernel: jax.Array, sizes: jax.Array) -> Any:
            return jax.vjp(lambda x, kernel: jg.grouped_dense(x, kernel, sizes, recipe=recipe), x, kernel)[1]

        sizes = [(shape.tokens, shape.K), (shape.num_groups, shape.K, shape.N), (shape.num_groups,)]
        arguments = map(jax.ShapeDtypeStruct, sizes, (jnp.bfloat16, jnp.float32, jnp.int32))
        leaves = jax.tree.leaves(jax.eval_shape(forward, *arguments))
        return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)

    # Padding between groups and the scales make it more than half.
    for shape, name in ((shapes.SHAPES["dsv3 up"], "block"), (shapes.SHAPES["qwen3"], "current")):
        assert residual_bytes(RECIPES[name], shape) < 0.51 * residual_bytes(None, shape)


def test_sums_of_zero_stay_zero_where_the_scales_overflow_float32(backend: str) -> None:
    first_half, odd_row = jnp.arange(128) < 64, jnp.arange(48)[:, None] % 2
    x, dy = 1e38 * first_half * (1 - odd_row), 1e38 * first_half * odd_row
    kernel = 1e38 * jnp.tile(~first_half[:, None] * ~first_half, (2, 1, 1))
    for name in some(backend, LAYOUTS[:2], 1):
        case = Case(x, kernel, jnp.zeros((2, 128)), dy, jnp.array([20, 28]))
        for result in jitted(name)(None, case)[:3]:
            np.testing.assert_array_equal(result, 0)
