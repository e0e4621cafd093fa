"""Models that the real Qwix quantizes, with our products."""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_grouped as jg
from tests.operands import normal
from tests.oracle import assert_trees_close

qwix = pytest.importorskip("qwix", reason="needs the extra adapters: qwix")
adapter = pytest.importorskip("jax_grouped.adapters.qwix", reason="needs the extra adapters: qwix")

T, K, N, E = 48, 64, 32, 4
SIZES = jnp.array([20, 0, 17, 11], jnp.int32)
BLOCK = jg.Float8BlockScaling()
FP8 = dict(weight_qtype=jnp.float8_e4m3fn, act_qtype=jnp.float8_e4m3fn)


class Experts(nn.Module):
    """Two grouped products, of which the first is JAX's own."""

    first: Callable[..., jax.Array] = jax.lax.ragged_dot
    second: Callable[..., jax.Array] = jg.ragged_dot

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        init = nn.initializers.lecun_normal(batch_axis=0)
        up = self.param("up", init, (E, K, N))
        down = self.param("down", init, (E, N, K))
        return self.second(jax.nn.relu(self.first(x, up, SIZES)), down, SIZES)


@functools.cache
def inputs() -> tuple[Any, jax.Array]:
    x = normal(0, (T, K))
    return Experts().init(jax.random.key(1), x)["params"], x


def results(model: nn.Module) -> Any:
    """Returns the loss and the result, and the gradients."""

    def loss(params: Any, x: jax.Array) -> Any:
        y = model.apply({"params": params}, x)
        return jnp.sum(jnp.sin(y)), y

    return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(*inputs())


def test_the_products_that_a_rule_names_are_computed_by_the_recipe() -> None:
    def quantized(path: str) -> Any:
        provider = adapter.QtProvider([qwix.QtRule(module_path=path, **FP8)], recipe=BLOCK)
        return results(qwix.quantize_model(Experts(), provider))

    dense = functools.partial(jg.grouped_dense, recipe=BLOCK)
    got, plain = quantized(".*"), results(Experts())

    assert_trees_close(got, results(Experts(dense, dense)))
    assert not np.allclose(got[0][1], plain[0][1], rtol=1e-3, atol=1e-3)
    assert_trees_close(quantized("elsewhere"), plain)


def test_qwix_quantizes_our_product_itself_without_a_recipe() -> None:
    ours, theirs = Experts(jg.ragged_dot, jg.ragged_dot), Experts(jax.lax.ragged_dot, jax.lax.ragged_dot)
    rules = [qwix.QtRule(module_path=".*", weight_qtype=jnp.int8, act_qtype=jnp.int8)]

    got = results(qwix.quantize_model(ours, adapter.QtProvider(rules)))

    assert_trees_close(got, results(qwix.quantize_model(theirs, qwix.QtProvider(rules))))
    assert not np.allclose(got[0][1], results(ours)[0][1], rtol=1e-4, atol=1e-4)


def test_recipes_with_a_state_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^recipe must be one without a state, got DelayedScaling\.$"):
        adapter.QtProvider([], recipe=jg.DelayedScaling())
