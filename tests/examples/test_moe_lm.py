"""The language model of `train_moe`, in both of Flax's APIs."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_grouped.examples import moe_lm, moe_lm_nnx
from jax_grouped.examples.moe_lm import VOCABULARY
from jax_grouped.examples.parallel import programs
from jax_grouped.examples.settings import Devices, parse

EXPERTS = dict(num_experts=4, top_k=2, hidden_features=32)
SIZES: dict[str, Any] = dict(d_model=16, num_layers=1, num_heads=2, dtype=jnp.float32, experts=EXPERTS)
LINEN = moe_lm.MoELanguageModel(**SIZES)


@pytest.fixture(scope="module")
def tokens() -> jax.Array:
    return jax.random.randint(jax.random.key(0), (2, 12), 0, VOCABULARY)


@pytest.fixture(scope="module")
def params(tokens: jax.Array) -> dict[str, Any]:
    return jax.jit(LINEN.init)(jax.random.key(1), tokens)["params"]


def as_in_nnx(params: dict[str, Any]) -> dict[Any, Any]:
    """Returns the linen model's parameters as the NNX model has them, whose blocks are a list."""
    blocks: dict[int, Any] = {}
    tree: dict[Any, Any] = {"blocks": blocks}
    for name, layer in params.items():
        numbered = re.fullmatch(r"(\w+)_(\d+)", name)
        if numbered:
            blocks.setdefault(int(numbered[2]), {})[numbered[1]] = layer
        else:
            tree[name] = layer
    return tree


def test_no_prediction_sees_a_later_byte(params: dict[str, Any], tokens: jax.Array) -> None:
    predict = jax.jit(LINEN.apply)

    logits = predict({"params": params}, tokens)[0]
    changed = predict({"params": params}, tokens.at[0, 8].add(1))[0]

    np.testing.assert_allclose(logits[:, :8], changed[:, :8], rtol=1e-5, atol=1e-5)
    assert float(jnp.max(jnp.abs(logits[0, 8:] - changed[0, 8:]))) > 1e-3
    np.testing.assert_array_equal(logits[1], changed[1])


def test_both_models_are_the_same_function(params: dict[str, Any], tokens: jax.Array) -> None:
    graph, state = nnx.split(nnx.eval_shape(lambda: moe_lm_nnx.MoELanguageModel(**SIZES, rngs=nnx.Rngs(0))))
    nnx.replace_by_pure_dict(state, as_in_nnx(params))

    logits, metrics = jax.jit(LINEN.apply)({"params": params}, tokens)
    logits_of_nnx, metrics_of_nnx = jax.jit(lambda state: nnx.merge(graph, state)(tokens))(state)

    np.testing.assert_allclose(logits_of_nnx, logits, rtol=1e-5, atol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), metrics_of_nnx, metrics)


def test_both_models_start_alike(params: dict[str, Any]) -> None:
    model = nnx.jit(lambda: moe_lm_nnx.MoELanguageModel(**SIZES, rngs=nnx.Rngs(2)))()
    of_nnx = nnx.to_pure_dict(nnx.state(model, nnx.Param))

    def assert_alike(path: Any, a: jax.Array, b: jax.Array) -> None:
        assert a.shape == b.shape, path
        # The smallest kernel has 64 numbers, which give the deviation to about 10 %.
        np.testing.assert_allclose(jnp.std(a), jnp.std(b), rtol=0.4, atol=1e-6, err_msg=jax.tree_util.keystr(path))
        np.testing.assert_allclose(jnp.mean(a), jnp.mean(b), atol=0.5 * float(jnp.std(a)) + 1e-6)

    jax.tree.map_with_path(assert_alike, as_in_nnx(params), of_nnx)


@pytest.mark.parametrize(
    ("flags", "types"),
    [
        ("--recipe bf16", set()),
        ("--recipe block", {"f8_e4m3fn"}),
        ("--recipe current --layer nnx", {"f8_e4m3fn", "f8_e5m2"}),
        ("--recipe delayed", {"f8_e4m3fn", "f8_e5m2"}),
        ("--recipe mxfp8", {"f8_e4m3fn", "f8_e8m0fnu"}),
    ],
)
def test_a_recipe_computes_all_experts_and_nothing_else_in_fp8(flags: str, types: set[str]) -> None:
    settings = parse([*flags.split(), "--layers", "2"])
    computed = programs(settings, Devices(1, 1))
    batch = jax.ShapeDtypeStruct((1, 2, 17), "uint8")

    step = str(computed.take_step.trace(computed.state, batch).jaxpr)

    assert set(re.findall(r"f8_\w+", step)) == types
    # Two layers, of which each has two matmuls with three products.
    assert step.count("a=QuantizedLayout(") == (12 if types else 0)


def test_the_parameters_are_as_many_whatever_computes_them() -> None:
    def count(*flags: str) -> int:
        params = programs(parse(flags), Devices(1, 1)).state.params["params"]
        return sum(leaf.size for leaf in jax.tree.leaves(params))

    assert count() == count("--layer", "nnx") == count("--recipe", "delayed") > 1_000_000
