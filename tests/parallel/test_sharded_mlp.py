"""`jg.moe.grouped_mlp` under plain `jax.jit` with sharded arrays: the results of one device, and what is sent."""

import functools
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_grouped as jg
from jax_grouped.kernels.activations import is_gated
from tests.meshes import TYPES, typed_mesh
from tests.parallel.sharded import AXES, RECIPES, Collective, assert_close, put, sent

# With fewer tokens, XLA prefers to gather the tokens where weights are stored over the tokens' axis.
E, T, K, F, N = 4, 256, 32, 256, 48
SIZES = np.array([81, 0, 77, 53])  # The last tokens are in no group.


class Case(NamedTuple):
    """Specs of the arrays, and the shapes on each device of what is sent, by kind."""

    tokens: P
    gate_up: P
    down: P
    sent: dict[str, list[tuple[int, ...]]]
    activation: Any = "swiglu"


CASES = {
    "tokens": Case(P("data"), P(), P(), {"all-reduce": [(E, K, 2 * F), (E, F, N)]}),
    "experts": Case(P(), P("model"), P("model"), {"all-reduce": [(T, 2 * F), (T, N), (T, F), (T, K)]}),
    "features": Case(P(), P(None, None, "model"), P(None, "model"), {"all-reduce": [(T, N), (T, K)]}, "relu"),
    "tokens and experts": Case(
        P("data"),
        P("model"),
        P("model"),
        {"all-reduce": [(T // 2, 2 * F), (T // 2, N), (T // 2, F), (T // 2, K), (E // 2, K, 2 * F), (E // 2, F, N)]},
    ),
    "FSDP": Case(
        P("data"),
        P(None, "data"),
        P(None, None, "data"),
        {
            "all-gather": [(E, K, 2 * F), (E, F, N)],
            "reduce-scatter": [(E, K // 2, 2 * F), (E, F, N // 2)],
        },
    ),
}


@functools.cache
def arrays(activation: Any) -> tuple[jax.Array, ...]:
    """Returns tokens, the kernels, and the gradient of the result."""
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = (T, K), (E, K, (1 + is_gated(activation)) * F), (E, F, N), (T, N)
    x, *others = (jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True))
    return x.at[SIZES.sum() :].set(jnp.nan), *others


def step(options: Mapping[str, Any], states: Any, *arrays: jax.Array) -> Any:
    """Returns the result with these options of `grouped_mlp`, and the gradients of the arrays and the states."""
    *inputs, dy = arrays

    def result(x: jax.Array, gate_up: jax.Array, down: jax.Array, states: Any) -> jax.Array:
        weights = (
            jg.moe.Weights(kernel, fp8_state=state) for kernel, state in zip((gate_up, down), states, strict=True)
        )
        return jg.moe.grouped_mlp(x, *weights, SIZES, **options)

    y, pull_back = jax.vjp(result, *inputs, states)
    return y, *pull_back(dy)


@functools.cache
def on_one_device(name: str | None, activation: Any) -> Any:
    options, states = options_and_states(name)
    run = jax.jit(functools.partial(step, options | dict(activation=activation)))
    return jax.device_get(run(states, *arrays(activation)))


def options_and_states(name: str | None) -> tuple[dict[str, Any], Any]:
    recipe = RECIPES[name][0] if name else None
    state = jg.Fp8State.initial(recipe, E) if isinstance(recipe, jg.DelayedScaling) else None
    return dict(recipe=recipe, precision="highest" if recipe is None else None), (state, state)


def run(kind: str, name: str | None, case: Case) -> Counter[Collective]:
    """Compares a step with that of one device, and returns what it sends."""
    mesh = typed_mesh(kind, AXES)
    options, states = options_and_states(name)
    specs = case.tokens, case.gate_up, case.down, case.tokens
    placed = [put(mesh, array, spec) for array, spec in zip(arrays(case.activation), specs, strict=True)]
    placed_states = put(mesh, states, P(*case.gate_up[:1]))
    results = [NamedSharding(mesh, spec) for spec in (case.tokens, *specs[:3])]

    options |= dict(activation=case.activation, out_sharding=case.tokens)
    step_on_mesh = jax.jit(functools.partial(step, options), out_shardings=(*results, None))
    compiled = step_on_mesh.lower(placed_states, *placed).compile()
    got = sent(compiled)

    bound = RECIPES[name][1] if name else 1e-5
    assert_close(compiled(placed_states, *placed), on_one_device(name, case.activation), bound)
    return got


def listed(case: Case) -> Counter[Any]:
    return Counter((kind, shape, "f32") for kind, shapes in case.sent.items() for shape in shapes)


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("name", [None, "block"])
@pytest.mark.parametrize("case", CASES)
def test_only_what_the_two_products_need_is_sent(kind: str, name: str | None, case: str) -> None:
    assert run(kind, name, CASES[case]) == listed(CASES[case])


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("name", ["current", "delayed", "mxfp8"])
def test_other_recipes_send_no_more_than_maxima(kind: str, name: str) -> None:
    case = CASES["tokens and experts"]

    got = run(kind, name, case)

    # Maxima of the tokens and of the result's gradient of each product are combined. A device has its kernels whole.
    maxima = {Collective("all-reduce", (E // 2,), "f32"): 4} if name == "delayed" else {}
    assert got == listed(case) + Counter(maxima)


@pytest.mark.parametrize("kind", TYPES)
def test_halves_of_a_gate_are_exchanged_and_not_gathered(kind: str) -> None:
    case = CASES["features"]

    got = run(kind, "block", case._replace(activation="swiglu"))

    assert {of.kind for of in got - listed(case)} == {"collective-permute", "all-to-all"}


def test_features_that_halves_do_not_divide_are_gathered() -> None:
    mesh = typed_mesh("explicit", {"model": 4})
    arrays = jnp.ones((8, 16)), jnp.ones((2, 16, 12)), jnp.ones((2, 6, 16))
    specs = P(), P(None, None, "model"), P()
    placed = [put(mesh, array, spec) for array, spec in zip(arrays, specs, strict=True)]

    got = jax.jit(lambda *of: jg.moe.grouped_mlp(*of, jnp.array([3, 4])))(*placed)

    np.testing.assert_allclose(got, jg.moe.grouped_mlp(*arrays, jnp.array([3, 4])), rtol=1e-6)
