"""Sharded products and steps: their operands, shardings and collectives."""

import functools
import re
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_grouped as jg
from tests.operands import normal

GROUPS, TOKENS, IN, OUT = 4, 64, 16, 24
#: The last tokens are in no group. Parts of 8 and of 16 tokens begin inside groups.
SIZES = jnp.array([21, 0, 19, 13])
AXES = {"data": 2, "model": 2}
WHOLE = P()


@functools.cache
def operands() -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Returns `x`, whose tail is NaN, a kernel, a bias and the gradient of the result."""
    x = normal(0, (TOKENS, IN)).at[int(SIZES.sum()) :].set(jnp.nan)
    shapes = (GROUPS, IN, OUT), (GROUPS, OUT), (TOKENS, OUT)
    return x, *(normal(seed, shape) for seed, shape in enumerate(shapes, 1))


def product(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return jg.ragged_dot(x, kernel, SIZES, precision="highest")


def put(mesh: Mesh, array: Any, spec: P) -> jax.Array:
    return jax.device_put(array, NamedSharding(mesh, spec))


def collectives(compiled: Any) -> dict[str, int]:
    """Counts the collectives of a compiled program, by name."""
    return Counter(re.findall(r" (all-\w+|reduce-scatter|collective-\w+)(?:-start)?\(", compiled.as_text()))


class Collective(NamedTuple):
    """One array that a compiled program sends, and the shape that its collective gives it on each device."""

    kind: str
    shape: tuple[int, ...]
    dtype: str


def sent(compiled: Any) -> Counter[Collective]:
    """Counts the arrays that a program sends."""
    if jax.default_backend() != "cpu":
        # XLA for GPUs flattens arrays and sends several as one. Continuous integration, without GPUs, runs the test.
        pytest.skip("reads what programs for the CPU send")
    found = re.findall(
        r"= (.*?) (all-\w+(?:-\w+)*|reduce-scatter|collective-\w+|ragged-\w+(?:-\w+)*)\(", compiled.as_text()
    )
    return Counter(
        Collective(kind, tuple(map(int, filter(None, shape.split(",")))), dtype)
        for results, kind in found
        for dtype, shape in re.findall(r"(\w+)\[([\d,]*)\]", results)
    )


class Case(NamedTuple):
    """Specs of the operands and of the results, and the names of the results that are sums over devices."""

    operands: tuple[P, P, P, P]  # x, kernel, bias, dy
    results: tuple[P, P, P, P]  # y, dx, dkernel, dbias
    sums: str


BOTH = P(("data", "model"))
DATA, LAST = P("data"), P(None, "model")
OUT_OF_KERNEL = P(None, None, "model")
CASES = {
    "tokens": Case((DATA, WHOLE, WHOLE, DATA), (DATA, DATA, WHOLE, WHOLE), "dkernel dbias"),
    "tokens over two axes": Case((BOTH, WHOLE, WHOLE, BOTH), (BOTH, BOTH, WHOLE, WHOLE), "dkernel dbias"),
    "features in": Case((LAST, LAST, WHOLE, WHOLE), (WHOLE, LAST, LAST, WHOLE), "y"),
    "experts": Case((WHOLE, P("model"), WHOLE, WHOLE), (WHOLE, WHOLE, WHOLE, WHOLE), "y dx"),
    "tokens and features out": Case(
        (DATA, OUT_OF_KERNEL, LAST, P("data", "model")),
        (P("data", "model"), DATA, OUT_OF_KERNEL, LAST),
        "dx dkernel dbias",
    ),
    "tokens and features in": Case(
        (P("data", "model"), LAST, WHOLE, DATA), (DATA, P("data", "model"), LAST, WHOLE), "y dkernel dbias"
    ),
    "tokens and experts": Case((DATA, P("model"), WHOLE, DATA), (DATA, DATA, WHOLE, WHOLE), "y dx dkernel dbias"),
}


#: Largest error where only sums have another order. Tensor cores of Hopper keep about 14 bits of a sum of FP8 products.
BOUND = 1e-5 if jax.default_backend() == "cpu" else 1e-4
RECIPES = {
    None: (None, 1e-5),
    "block": (jg.Float8BlockScaling(), BOUND),
    "current": (jg.Float8CurrentScaling(), 0.1),  # Every device has scales of its own part.
    "delayed": (jg.DelayedScaling(amax_history_len=4), BOUND),
    "mxfp8": (jg.MXFP8BlockScaling(), BOUND),
}


def initial_state(name: str | None) -> jg.Fp8State | None:
    return jg.Fp8State.initial(RECIPES["delayed"][0], GROUPS) if name == "delayed" else None


def step_in_fp8(
    recipe: jg.Recipe | None,
    x: Any,
    kernel: Any,
    bias: Any,
    dy: Any,
    state: Any,
    accumulator: Any = None,
    cache: Any = None,
    out_sharding: Any = None,
) -> Any:
    def result(x: Any, kernel: Any, bias: Any, state: Any) -> jax.Array:
        more = dict(recipe=recipe, fp8_state=state, dkernel_accumulator=accumulator, kernel_cache=cache)
        precision = "highest" if recipe is None else None
        return jg.grouped_dense(x, kernel, SIZES, bias, precision=precision, out_sharding=out_sharding, **more)

    y, pull_back = jax.vjp(result, x, kernel, bias, state)
    return y, *pull_back(dy)


@functools.cache
def operands_of_fp8(features: int = 256) -> tuple[jax.Array, ...]:
    shapes = (TOKENS, features), (GROUPS, features, 512), (GROUPS, 512), (TOKENS, 512)
    x, *others = (normal(seed, shape) for seed, shape in enumerate(shapes, 4))
    return x.at[int(SIZES.sum()) :].set(jnp.nan), *others


@functools.cache
def on_one_device(name: str | None) -> Callable[..., Any]:
    """Jits the step of a recipe once."""
    return jax.jit(functools.partial(step_in_fp8, RECIPES[name][0]))


def check_step(
    mesh: Mesh,
    name: str | None,
    specs: tuple[P, ...],
    *more: Any,
    cache_spec: P = WHOLE,
    out_sharding: P | None = None,
    features: int = 256,
    again: bool = False,
) -> tuple[Any, Any]:
    """Compares a step with one device's; `more` is an accumulator and a cache. Returns its program and results.

    `again` compares a second run with the first one.
    """
    arrays = *operands_of_fp8(features), initial_state(name), *more
    sharded = [put(mesh, *pair) for pair in zip(arrays, (*specs, WHOLE, WHOLE, cache_spec), strict=False)]
    step = functools.partial(step_in_fp8, RECIPES[name][0], out_sharding=out_sharding)
    compiled = jax.jit(step).lower(*sharded).compile()
    results = compiled(*sharded)
    assert_close(results, on_one_device(name)(*arrays), RECIPES[name][1])
    if again:
        assert_close(compiled(*sharded), results, 0)
    return compiled, results


def assert_close(got: Any, expected: Any, bound: float) -> None:
    for a, b in zip(jax.tree.leaves(jax.device_get(got)), jax.tree.leaves(jax.device_get(expected)), strict=True):
        assert np.linalg.norm(a - b) <= bound * np.linalg.norm(b)


def assert_rounded_once(gradients: Callable[[Any], Any], parameters: Any) -> None:
    """Asserts that bfloat16 parameters have the gradients of the same numbers in float32, rounded."""

    def computed(dtype: Any) -> Any:
        return gradients(jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(dtype), parameters))

    got, expected = computed(jnp.bfloat16), computed(jnp.float32)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b.astype(jnp.bfloat16), strict=True), got, expected)
