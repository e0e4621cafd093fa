"""The language model of `train_moe`, in both of Flax's APIs."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jax_grouped as jg
from jax_grouped.examples import moe_lm, moe_lm_nnx
from jax_grouped.examples.moe_lm import VOCABULARY
from jax_grouped.examples.parallel import programs
from jax_grouped.examples.settings import Devices, parse

EXPERTS = dict(num_experts=4, router=jg.moe.Router(2), hidden_features=32)
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


def test_a_recipe_computes_all_experts_and_nothing_else_in_fp8() -> None:
    for flags, types in {
        "--recipe bf16": set(),
        "--recipe block": {"f8_e4m3fn"},
        "--recipe current --layer nnx": {"f8_e4m3fn", "f8_e5m2"},
        "--recipe delayed": {"f8_e4m3fn", "f8_e5m2"},
        "--recipe mxfp8": {"f8_e4m3fn", "f8_e8m0fnu"},
    }.items():
        computed = programs(parse([*flags.split(), "--layers", "2"]), Devices(1, 1))

        step = str(computed.take_step.trace(computed.state, jax.ShapeDtypeStruct((1, 2, 17), "uint8")).jaxpr)

        assert set(re.findall(r"f8_\w+", step)) == types, flags
        # Two layers, of which each has two matmuls with three products.
        assert step.count("a=QuantizedLayout(") == (12 if types else 0), flags


def test_both_models_start_alike_whatever_computes_them() -> None:
    def deviations(*flags: str) -> list[float]:
        params = (
            programs(parse(["--layers", "1", "--d-model", "32", *flags]), Devices(1, 1)).initialise().params["params"]
        )
        return sorted(float(jnp.std(leaf)) for leaf in jax.tree.leaves(params))

    expected = deviations()
    for flags in (["--layer", "nnx"], ["--recipe", "delayed"]):
        np.testing.assert_allclose(deviations(*flags), expected, rtol=0.1, atol=1e-6)
