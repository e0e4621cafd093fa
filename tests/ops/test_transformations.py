"""The operations under JAX's transformations: each must give what the plain call gives."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads

import jax_grouped as jg
from tests.meshes import data_mesh
from tests.oracle import assert_trees_close

GROUPS, TOKENS, IN, OUT = 5, 48, 16, 24
SIZES = jnp.array([7, 0, 21, 1, 13])


@pytest.fixture(autouse=True)
def _backend(backend: str) -> None:
    """Runs every test of this module on every backend."""


def operands(seed: int = 0) -> tuple[jax.Array, jax.Array, jax.Array]:
    keys = jax.random.split(jax.random.key(seed), 3)
    x = jax.random.normal(keys[0], (TOKENS, IN)).at[int(SIZES.sum()) :].set(jnp.nan)
    return x, jax.random.normal(keys[1], (GROUPS, IN, OUT)), jax.random.normal(keys[2], (GROUPS, OUT))


def dense(x: jax.Array, kernel: jax.Array, bias: jax.Array, sizes: jax.Array = SIZES) -> jax.Array:
    return jg.grouped_dense(x, kernel, sizes, bias, precision="highest")


def loss(x: jax.Array, kernel: jax.Array, bias: jax.Array, sizes: jax.Array = SIZES) -> jax.Array:
    return jnp.sum(jnp.sin(dense(x, kernel, bias, sizes)))


GRADIENT = jax.grad(loss, argnums=(0, 1, 2))


def test_derivatives_of_first_and_second_order_match_differences() -> None:
    x, kernel, bias = operands()
    # Tails are poisoned for the other tests; numerical differences need numbers.
    check_grads(loss, (jnp.nan_to_num(x), kernel, bias), order=2, modes=["rev"], atol=0.1, rtol=0.1)


def test_gradient_survives() -> None:
    policy = jax.checkpoint_policies.nothing_saveable
    value_and_gradients = jax.value_and_grad(jax.jit(jax.checkpoint(loss, policy=policy)), argnums=(0, 1, 2))
    value, gradients = jax.jit(value_and_gradients)(*operands())
    assert_trees_close(value, loss(*operands()))
    assert_trees_close(gradients, GRADIENT(*operands()))


def mlp(x: jax.Array, kernel: jax.Array) -> jax.Array:
    gate_up = jnp.concatenate([kernel, kernel], axis=2)
    return jg.moe.grouped_mlp(x, gate_up, kernel, SIZES, recipe=jg.Float8BlockScaling())


@pytest.mark.parametrize(
    ("transform", "layer"),
    [
        (jax.jit, lambda x, kernel: jg.grouped_dense(x, kernel, SIZES)),
        (jax.checkpoint, lambda x, kernel: jg.grouped_dense(x, kernel, SIZES, recipe=jg.Float8BlockScaling())),
        (jax.jit, mlp),
    ],
    ids=["bf16", "block", "mlp"],
)
def test_calls_of_one_layer_may_differ_in_what_has_a_gradient(transform: Callable, layer: Callable) -> None:
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (TOKENS, IN), jnp.bfloat16)
    kernels = [jax.random.normal(key, (GROUPS, IN, IN), jnp.bfloat16) for key in keys]

    def gradient(layer: Callable) -> tuple[jax.Array, jax.Array]:
        def loss(first: jax.Array, last: jax.Array) -> jax.Array:
            # Only the kernel, only the tokens, and both.
            return jnp.sum(layer(layer(layer(x, first), kernels[1]), last).astype(jnp.float32))

        return jax.jit(jax.grad(loss, (0, 1)))(kernels[0], kernels[2])

    # JAX traces the transformed layer once.
    assert_trees_close(gradient(transform(layer)), gradient(layer))


def test_disabled_jit_gives_the_same_result() -> None:
    with jax.disable_jit():
        y = dense(*operands())
    assert_trees_close(y, dense(*operands()))


def test_shard_map_sums_the_gradients_of_replicated_kernels() -> None:
    devices = min(4, jax.device_count())
    mesh = data_mesh(devices)
    xs = jnp.concatenate([operands(seed)[0] for seed in range(devices)])
    sizes = jnp.tile(SIZES, devices)
    _, kernel, bias = operands()

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=(P("data"), P(), P(), P("data")), out_specs=(P("data"), P(), P()))
    def sharded(x: jax.Array, kernel: jax.Array, bias: jax.Array, sizes: jax.Array) -> tuple[jax.Array, ...]:
        return GRADIENT(x, kernel, bias, sizes)

    dx, dkernel, dbias = sharded(xs, kernel, bias, sizes)
    parts = [GRADIENT(operands(seed)[0], kernel, bias) for seed in range(devices)]
    assert_trees_close(dx, jnp.concatenate([part[0] for part in parts]))
    assert_trees_close(dkernel, sum(part[1] for part in parts), 1e-4)
    assert_trees_close(dbias, sum(part[2] for part in parts), 1e-4)


def test_shard_map_has_the_second_derivatives_of_replicated_kernels() -> None:
    devices = 4
    xs = jnp.stack([operands(seed)[0] for seed in range(devices)])
    kernel = operands()[1]

    def value(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(jg.grouped_dense(x, kernel, SIZES, precision="highest")))

    def squares(xs: jax.Array, kernel: jax.Array) -> jax.Array:
        dkernel = jax.grad(lambda kernel: sum(value(x, kernel) for x in xs))(kernel)
        return jnp.sum(dkernel**2)

    derivatives = jax.grad(squares, argnums=(0, 1))
    specs = P("data"), P()
    sharded = jax.shard_map(derivatives, mesh=data_mesh(devices), in_specs=specs, out_specs=specs)
    assert_trees_close(jax.jit(sharded)(xs, kernel), jax.jit(derivatives)(xs, kernel), 1e-4)


def test_shard_map_over_some_axes_of_a_mesh() -> None:
    mesh = jax.make_mesh((1, 1), ("data", "other"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:1])
    sharded = jax.shard_map(
        dense, mesh=mesh, in_specs=(P("data"), P(), P(), P("data")), out_specs=P("data"), axis_names={"data"}
    )
    assert_trees_close(jax.jit(sharded)(*operands(), SIZES), dense(*operands()))


def test_expert_shards_with_group_offset_add_up_to_the_whole() -> None:
    devices = 4
    mesh = data_mesh(devices)
    x = operands()[0]
    kernel = jax.random.normal(jax.random.key(1), (2 * devices, IN, OUT))
    sizes = jnp.array([3, 9, 0, 5, 8, 1, 7, 4])

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=(P(), P("data"), P()), out_specs=P())
    def sharded(x: jax.Array, kernel: jax.Array, sizes: jax.Array) -> jax.Array:
        offset = 2 * jax.lax.axis_index("data")
        y = jg.ragged_dot(x, kernel, sizes, precision="highest", group_offset=offset)
        return jax.lax.psum(y, "data")

    assert_trees_close(sharded(x, kernel, sizes), jg.ragged_dot(x, kernel, sizes, precision="highest"))


def test_pmap_runs_every_device_on_its_own_tokens() -> None:
    devices = min(4, jax.device_count())
    xs = jnp.stack([operands(seed)[0] for seed in range(devices)])
    _, kernel, bias = operands()

    def step(x: jax.Array) -> jax.Array:
        return jax.lax.pmean(jax.grad(loss, argnums=1)(x, kernel, bias), "data")

    got = jax.pmap(step, axis_name="data", devices=jax.devices()[:devices])(xs)
    expected = sum(GRADIENT(x, kernel, bias)[1] for x in xs) / devices
    assert_trees_close(got, jnp.broadcast_to(expected, got.shape), 1e-4)


@pytest.mark.parametrize(("lhs", "rhs"), [("bfloat16", "float32"), ("float32", "bfloat16"), ("float16", "bfloat16")])
def test_mixed_types_are_taken_also_where_promotion_is_strict(lhs: str, rhs: str) -> None:
    x, kernel = operands()[0].astype(lhs), operands()[1].astype(rhs)

    def gradients(x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, ...]:
        y, pull_back = jax.vjp(lambda *operands: jg.ragged_dot(*operands, SIZES), x, kernel)
        return y, *pull_back(y)

    expected = jax.jit(gradients)(x, kernel)
    with jax.numpy_dtype_promotion("strict"):
        got = jax.jit(gradients)(x, kernel)
        result_type = jax.eval_shape(jax.lax.ragged_dot, x, kernel, SIZES).dtype

    assert [array.dtype for array in got] == [result_type, x.dtype, kernel.dtype]
    jax.tree.map(np.testing.assert_array_equal, got, expected)


FORWARD = {
    "jvp of jit": lambda f, x: jax.jvp(jax.jit(f), (x,), (x,)),
    "jvp of vmap": lambda f, x: jax.jvp(jax.vmap(f), (x[None],), (x[None],)),
    "jacfwd": lambda f, x: jax.jacfwd(f)(x),
    "hessian": lambda f, x: jax.hessian(lambda x: f(x).sum())(x),
}


@pytest.mark.parametrize("mode", FORWARD)
def test_forward_mode_is_refused_by_the_name_of_the_function(mode: str) -> None:
    x, kernel, _ = operands()
    logits, gate_up = jnp.ones((TOKENS, GROUPS)), jnp.ones((GROUPS, IN, 2 * OUT))
    down = jnp.ones((GROUPS, OUT, IN))
    functions: dict[str, Callable[[jax.Array], jax.Array]] = {
        "ragged_dot": lambda x: jg.ragged_dot(x, kernel, SIZES),
        "grouped_dense": lambda x: jg.grouped_dense(x, kernel, SIZES),
        "router_logits": lambda x: jg.moe.router_logits(x, jnp.ones((IN, GROUPS))),
        "moe_mlp": lambda x: jg.moe.moe_mlp(x, logits, gate_up, down, router=jg.moe.Router(2))[0],
    }
    for name, function in functions.items():
        with pytest.raises(TypeError, match=rf"^{name} has derivatives in reverse mode only \(jax\.grad, jax\.vjp, "):
            FORWARD[mode](function, x)
