"""`MoEMlp` layers in one `scan` that computes each again for its gradients: they are those of a loop over layers."""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jax_grouped as jg
from tests.parallel.programs import batches, filled

LAYERS, K = 2, 16
OPTIONS = dict(num_experts=4, router=jg.moe.Router(2), hidden_features=32)


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
        y, metrics = nn.remat(jg.linen.MoEMlp)(**OPTIONS, name="experts")(x)
        return x + y, metrics.balance_loss


def linen_stack() -> tuple[Any, Callable[..., Any]]:
    """Returns the parameters, and a function that applies all layers."""
    options = dict(variable_axes={"params": 0}, split_rngs={"params": True}, length=LAYERS)
    stack = nn.scan(LinenBlock, **options)()
    params = filled(jax.eval_shape(stack.init, jax.random.key(0), jnp.zeros((1, K)), None))
    return params, lambda params, x: stack.apply(params, x, None)


def nnx_stack() -> tuple[Any, Callable[..., Any]]:
    @nnx.split_rngs(splits=LAYERS)
    @nnx.vmap
    def stacked(rngs: nnx.Rngs) -> jg.nnx.MoEMlp:
        return jg.nnx.MoEMlp(K, **OPTIONS, rngs=rngs)

    @nnx.scan(in_axes=(0, nnx.Carry), out_axes=(nnx.Carry, 0))
    @nnx.remat
    def apply(layer: jg.nnx.MoEMlp, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        y, metrics = layer(x)
        return x + y, metrics.balance_loss

    graph, params = nnx.split(nnx.eval_shape(lambda: stacked(nnx.Rngs(0))))
    return filled(params), lambda params, x: apply(nnx.merge(graph, params, copy=True), x)


def loop() -> tuple[Any, Callable[..., Any]]:
    params, _ = linen_stack()
    layer = jg.linen.MoEMlp(**OPTIONS)

    def apply(params: Any, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        balance_losses = []
        for i in range(LAYERS):
            of_layer = jax.tree.map(lambda leaf, i=i: leaf[i], params["params"]["experts"])
            y, metrics = layer.apply({"params": of_layer}, x)
            x = x + y
            balance_losses.append(metrics.balance_loss)
        return x, jnp.stack(balance_losses)

    return params, apply


def loss_and_gradients(stack: Callable[[], tuple[Any, Callable[..., Any]]]) -> list[jax.Array]:
    params, apply = stack()

    def loss(params: Any, x: jax.Array) -> jax.Array:
        y, balance_losses = apply(params, x)
        return jnp.mean(y**2) + jnp.sum(balance_losses)

    with jax.default_matmul_precision("highest"):
        return jax.tree.leaves(jax.jit(jax.value_and_grad(loss, (0, 1)))(params, batches(1)[0][0][0]))


@functools.cache
def expected(backend: str) -> list[jax.Array]:
    del backend
    return loss_and_gradients(loop)


@pytest.mark.parametrize("stack", [linen_stack, nnx_stack])
def test_a_scan_over_layers_has_the_gradients_of_a_loop(backend: str, stack: Any) -> None:
    got = loss_and_gradients(stack)

    # The loss, the gradients of `down`, `gate_up` and the router of all layers, and that of the tokens.
    assert len(got) == 5
    for one, other in zip(got, expected(backend), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
