"""Models that the real Qwix quantizes, with our products."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_grouped as jg

qwix = pytest.importorskip("qwix", reason="needs the extra adapters: qwix")

T, K, N, E = 48, 64, 32, 4
SIZES = jnp.array([20, 0, 17, 11], jnp.int32)
BLOCK = jg.Float8BlockScaling()
FP8 = dict(weight_qtype=jnp.float8_e4m3fn, act_qtype=jnp.float8_e4m3fn)


class Experts(nn.Module):
    """Two grouped products, of which the first is JAX's own."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        init = nn.initializers.lecun_normal(batch_axis=0)
        up = self.param("up", init, (E, K, N))
        down = self.param("down", init, (E, N, K))
        return jg.ragged_dot(jax.nn.relu(jax.lax.ragged_dot(x, up, SIZES)), down, SIZES)


def results(model: nn.Module, params: Any, x: jax.Array) -> Any:
    def loss(params: Any, x: jax.Array) -> Any:
        y = model.apply({"params": params}, x)
        return jnp.sum(jnp.sin(y)), y

    return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(params, x)


def inputs() -> tuple[Any, jax.Array]:
    x = jax.random.normal(jax.random.key(0), (T, K))
    return Experts().init(jax.random.key(1), x)["params"], x


@pytest.mark.parametrize("recipe", [BLOCK, jg.Float8CurrentScaling()], ids=["block", "current"])
def test_both_products_of_a_model_are_computed_by_the_recipe(recipe: jg.Recipe) -> None:
    from jax_grouped.adapters.qwix import QtProvider

    params, x = inputs()
    provider = QtProvider([qwix.QtRule(module_path=".*", **FP8)], recipe=recipe)

    got = results(qwix.quantize_model(Experts(), provider), params, x)

    class InFp8(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            init = nn.initializers.lecun_normal(batch_axis=0)
            up, down = self.param("up", init, (E, K, N)), self.param("down", init, (E, N, K))
            hidden = jax.nn.relu(jg.grouped_dense(x, up, SIZES, recipe=recipe))
            return jg.grouped_dense(hidden, down, SIZES, recipe=recipe)

    expected = results(InFp8(), params, x)
    jax.tree.map(lambda *of: np.testing.assert_allclose(*of, rtol=1e-5, atol=1e-5), got, expected)
    plain = results(Experts(), params, x)
    assert not np.allclose(got[0][1], plain[0][1], rtol=1e-3, atol=1e-3)


def test_products_without_a_rule_stay_as_they_are() -> None:
    from jax_grouped.adapters.qwix import QtProvider

    params, x = inputs()
    provider = QtProvider([qwix.QtRule(module_path="elsewhere", **FP8)], recipe=BLOCK)

    got = results(qwix.quantize_model(Experts(), provider), params, x)

    jax.tree.map(lambda *of: np.testing.assert_allclose(*of, rtol=1e-5, atol=1e-5), got, results(Experts(), params, x))


def test_qwix_quantizes_our_product_itself_without_a_recipe() -> None:
    from jax_grouped.adapters.qwix import QtProvider

    class Ours(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            up = self.param("up", nn.initializers.lecun_normal(batch_axis=0), (E, K, N))
            return jg.ragged_dot(x, up, SIZES)

    class Theirs(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            up = self.param("up", nn.initializers.lecun_normal(batch_axis=0), (E, K, N))
            return jax.lax.ragged_dot(x, up, SIZES)

    params, x = inputs()
    rules = [qwix.QtRule(module_path=".*", weight_qtype=jnp.int8, act_qtype=jnp.int8)]

    got = results(qwix.quantize_model(Ours(), QtProvider(rules)), {"up": params["up"]}, x)

    expected = results(qwix.quantize_model(Theirs(), qwix.QtProvider(rules)), {"up": params["up"]}, x)
    jax.tree.map(lambda *of: np.testing.assert_allclose(*of, rtol=1e-5, atol=1e-5), got, expected)
    assert not np.allclose(got[0][1], results(Ours(), {"up": params["up"]}, x)[0][1], rtol=1e-4, atol=1e-4)


def test_recipes_with_a_state_are_refused() -> None:
    from jax_grouped.adapters.qwix import QtProvider

    with pytest.raises(ValueError, match=r"^recipe must be one without a state, got DelayedScaling\.$"):
        QtProvider([], recipe=jg.DelayedScaling())
