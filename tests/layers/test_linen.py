"""`jg.linen.GroupedDense` next to `flax.linen.Dense`."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jax_grouped as jg

SIZES = jnp.array([3, 0, 5])


def initialised(layer: nn.Module, x: jax.Array) -> dict:
    return jax.jit(layer.init)(jax.random.key(0), x, SIZES)["params"]


def test_each_group_computes_what_dense_computes(backend: str) -> None:
    x = jax.random.normal(jax.random.key(1), (10, 4))
    layer = jg.linen.GroupedDense(6, num_groups=3, precision="highest", bias_init=nn.initializers.normal(1.0))
    params = initialised(layer, x)
    y = jax.jit(layer.apply)({"params": params}, x, SIZES)
    dense = nn.Dense(6, precision="highest")
    for group, rows in [(0, slice(0, 3)), (2, slice(3, 8))]:
        own = {"kernel": params["kernel"][group], "bias": params["bias"][group]}
        np.testing.assert_allclose(y[rows], dense.apply({"params": own}, x[rows]), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(y[8:], 0)


def test_parameters_have_dense_shapes_with_a_group_axis() -> None:
    params = initialised(jg.linen.GroupedDense(6, 3, param_dtype=jnp.bfloat16), jnp.ones((10, 4)))
    assert jax.tree.map(lambda p: (p.shape, p.dtype.name), params) == {
        "kernel": ((3, 4, 6), "bfloat16"),
        "bias": ((3, 6), "bfloat16"),
    }
    assert set(initialised(jg.linen.GroupedDense(6, 3, use_bias=False), jnp.ones((10, 4)))) == {"kernel"}


def test_default_initialiser_scales_by_a_groups_own_inputs() -> None:
    kernel = initialised(jg.linen.GroupedDense(256, 3), jnp.ones((10, 64)))["kernel"]
    np.testing.assert_allclose(kernel.std(axis=(1, 2)), 64**-0.5, rtol=0.05)
    assert not np.array_equal(kernel[0], kernel[1])


@pytest.mark.parametrize(
    ("x_dtype", "dtype", "param_dtype", "expected"),
    [
        ("float32", None, "float32", "float32"),
        ("bfloat16", None, "float32", "float32"),
        ("bfloat16", None, "bfloat16", "bfloat16"),
        ("float32", "bfloat16", "float32", "bfloat16"),
        ("bfloat16", "float16", "float32", "float16"),
    ],
)
def test_types_follow_dense(x_dtype: str, dtype: str | None, param_dtype: str, expected: str) -> None:
    x = jnp.ones((10, 4), x_dtype)
    layer = jg.linen.GroupedDense(8, 3, dtype=dtype, param_dtype=param_dtype)
    params = initialised(layer, x)
    loss = jax.jit(jax.value_and_grad(lambda p: layer.apply({"params": p}, x, SIZES).astype(jnp.float32).sum()))
    y, gradient = loss(params)
    assert jax.eval_shape(layer.apply, {"params": params}, x, SIZES).dtype == expected
    dense = nn.Dense(8, dtype=dtype, param_dtype=param_dtype)
    assert jax.eval_shape(dense.init_with_output, jax.random.key(0), x)[0].dtype == expected
    assert all(leaf.dtype == param_dtype for leaf in jax.tree.leaves(gradient))
    assert jnp.isfinite(y)


def test_the_kernels_gradient_is_added_to_what_is_given() -> None:
    x = jax.random.normal(jax.random.key(1), (10, 4))
    layers = jg.linen.GroupedDense(6, 3), jg.nnx.GroupedDense(4, 6, 3, rngs=nnx.Rngs(0))
    params = initialised(layers[0], x)
    nnx.update(layers[1], params)

    def of_linen(params: dict, into: jax.Array | None) -> jax.Array:
        return jnp.sum(jnp.sin(layers[0].apply({"params": params}, x, SIZES, accumulate_into=into)))

    def of_nnx(layer: jg.nnx.GroupedDense, into: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(layer(x, SIZES, accumulate_into=into)))

    total = jax.grad(of_linen)(params, jnp.full((3, 4, 6), 2.0))

    plain = jax.grad(of_linen)(params, None)
    np.testing.assert_allclose(total["kernel"], plain["kernel"] + 2, rtol=1e-5, atol=1e-6)
    nnx_total = nnx.grad(of_nnx)(layers[1], jnp.full((3, 4, 6), 2.0))
    np.testing.assert_allclose(nnx_total["kernel"][...], total["kernel"], rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match=r"accumulate_into must be like the kernel of GroupedDense, .* got \(\(3, 6\)"):
        of_nnx(layers[1], jnp.zeros((3, 6)))


@pytest.mark.parametrize("api", ["linen", "nnx"])
@pytest.mark.parametrize("recipe", [None, jg.Float8BlockScaling()], ids=["float32", "block"])
def test_the_backward_pass_in_halves_gives_the_gradients_of_a_call(api: str, recipe: jg.Recipe | None) -> None:
    x, dy = (jax.random.normal(jax.random.key(i), (10, size)) for i, size in ((1, 32), (2, 16)))
    linen = jg.linen.GroupedDense(16, 3, recipe=recipe)
    params = initialised(linen, x)

    def call(params: dict, x: jax.Array) -> jax.Array:
        return linen.apply({"params": params}, x, SIZES)

    if api == "linen":
        y, residuals = linen.apply({"params": params}, x, SIZES, method="fwd")
    else:
        layer = jg.nnx.GroupedDense(32, 16, 3, recipe=recipe, rngs=nnx.Rngs(0))
        nnx.update(layer, params)
        y, residuals = layer.fwd(x, SIZES)
    dx, pending = jg.grouped_dense_dgrad(residuals, dy)
    dkernel, dbias = jg.grouped_dense_wgrad(pending)

    expected, pull_back = jax.vjp(call, params, x)
    dparams, expected_dx = pull_back(dy)
    got = (y, dx, dkernel, dbias)
    for of, wanted in zip(got, (expected, expected_dx, dparams["kernel"], dparams["bias"]), strict=True):
        np.testing.assert_allclose(of, wanted, rtol=1e-5, atol=1e-5)


def test_logical_partitioning_names_reach_the_parameters() -> None:
    layer = jg.linen.GroupedDense(
        6,
        3,
        kernel_init=nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("expert", "embed", "mlp")),
        bias_init=nn.with_logical_partitioning(nn.initializers.zeros, ("expert", "mlp")),
    )
    specs = nn.get_partition_spec(layer.init(jax.random.key(0), jnp.ones((10, 4)), SIZES))["params"]
    assert specs["kernel"] == jax.sharding.PartitionSpec("expert", "embed", "mlp")
    assert specs["bias"] == jax.sharding.PartitionSpec("expert", "mlp")


def test_a_train_step_learns_one_linear_map_per_group(backend: str) -> None:
    import optax
    from flax.training.train_state import TrainState

    x = jax.random.normal(jax.random.key(1), (64, 4))
    sizes = jnp.array([20, 0, 40])
    targets = jg.ragged_dot(x, jax.random.normal(jax.random.key(2), (3, 4, 6)), sizes)
    layer = jg.linen.GroupedDense(6, 3)
    params = layer.init(jax.random.key(0), x, sizes)["params"]
    state = TrainState.create(apply_fn=layer.apply, params=params, tx=optax.adam(0.03))

    @jax.jit
    def step(state: TrainState) -> tuple[TrainState, jax.Array]:
        def loss(params: dict) -> jax.Array:
            return jnp.mean((state.apply_fn({"params": params}, x, sizes) - targets) ** 2)

        value, gradient = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=gradient), value

    losses = []
    for _ in range(200):
        state, value = step(state)
        losses.append(float(value))
    assert losses[-1] < 0.01 * losses[0]
