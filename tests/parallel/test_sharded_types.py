"""Arrays whose types are sharded, over mesh axes of type `Explicit`: the types of results, and what is sent."""

import functools
import itertools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_grouped as jg
from tests.meshes import TYPES, need_devices, typed_mesh
from tests.parallel.sharded import (
    AXES,
    CASES,
    GROUPS,
    IN,
    LAST,
    OUT,
    OUT_OF_KERNEL,
    RECIPES,
    SIZES,
    WHOLE,
    assert_close,
    check_step,
    collectives,
    operands,
    operands_of_fp8,
    product,
    put,
)


@pytest.fixture(autouse=True)
def _backend(backend: str) -> None:
    """Runs every test of this module on every backend."""


def explicit_mesh() -> Mesh:
    need_devices(4)
    return jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2, devices=jax.devices()[:4])


@pytest.mark.parametrize(
    ("case", "name"),
    [("tokens and features out", None), ("tokens and features in", "delayed"), ("tokens and experts", "delayed")],
)
def test_an_axis_of_one_device_is_part_of_the_types(case: str, name: str | None) -> None:
    need_devices(2)
    types = (AxisType.Explicit,) * 2
    mesh = jax.make_mesh((1, 2), ("data", "model"), axis_types=types, devices=jax.devices()[:2])
    specs, (out, *_), _ = CASES[case]

    _, (y, *_) = check_step(mesh, name, specs, out_sharding=out)

    assert jax.typeof(y).sharding.spec == P(*out, *[None] * (2 - len(out)))


def test_the_result_of_sharded_types_is_inferred_or_asked_for() -> None:
    mesh = explicit_mesh()
    x, kernel, *_ = operands()

    def multiply(x_spec: P, kernel_spec: P, **out: Any) -> Any:
        arguments = put(mesh, x, x_spec), put(mesh, kernel, kernel_spec)
        return jax.jit(lambda *operands: jg.ragged_dot(*operands, SIZES, precision="highest", **out))(*arguments)

    assert jax.typeof(multiply(P("data"), OUT_OF_KERNEL)).sharding.spec == P("data", "model")
    y = multiply(WHOLE, WHOLE, out_sharding=P("data"))
    assert jax.typeof(y).sharding.spec == P("data", None)
    for specs in [(LAST, LAST), (P("data"), P("data")), (P("data"), P(None, "data")), (WHOLE, P("model"))]:
        with pytest.raises(ValueError, match=r"ambiguous how the output should be sharded.*`out_sharding`"):
            multiply(*specs)
        for out in (P("data"), P(None, "model"), P("data", "model"), NamedSharding(mesh, WHOLE)):
            y = multiply(*specs, out_sharding=out)
            spec = out.spec if isinstance(out, NamedSharding) else out
            assert y.sharding.is_equivalent_to(NamedSharding(mesh, spec), 2)
            np.testing.assert_allclose(y, product(x, kernel), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", [None, *TYPES], ids=str)
def test_a_sharding_that_is_not_there_is_refused(kind: str | None) -> None:
    x, kernel, *_ = operands()
    if kind is not None:
        x = put(typed_mesh(kind, AXES), x, P("data"))
    once = f"out_sharding may name each of the mesh axes {[] if kind is None else [*AXES]} once, got "
    refused = {
        "data": "out_sharding must be a NamedSharding, a PartitionSpec or None, got 'data'.",
        P(None, "experts"): f"{once}'experts' in P(None, 'experts')",
        P("data", "data"): f"{once}'data' in P('data', 'data')",
    }
    numbers = jax.lax.RaggedDotDimensionNumbers((([1], [1]), ([], [])), [0], [0])
    functions = (
        functools.partial(jg.ragged_dot, x, kernel, SIZES),
        functools.partial(jg.ragged_dot_general, x, kernel, SIZES, numbers),
        functools.partial(jg.grouped_dense, x, kernel, SIZES),
        functools.partial(jg.moe.grouped_mlp, x, kernel, jnp.ones((GROUPS, OUT // 2, IN)), SIZES),
    )
    for (out, message), function in itertools.product(refused.items(), functions):
        with pytest.raises((TypeError, ValueError), match="^" + re.escape(message)):
            function(out_sharding=out)


def test_a_result_in_fp8_is_sharded_as_asked_for_even_if_no_operand_is() -> None:
    mesh = explicit_mesh()
    recipe, arrays = RECIPES["block"][0], operands_of_fp8()
    cache = jg.quantize_kernel(arrays[1], recipe)

    _, (y, *_) = check_step(mesh, "block", (WHOLE, WHOLE, WHOLE, P("data")), None, cache, out_sharding=P("data"))

    assert jax.typeof(y).sharding.spec == P("data", None)

    def multiply(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return jg.grouped_dense(x, kernel, SIZES, recipe=recipe, out_sharding=P("data"))

    with jax.set_mesh(mesh):  # of arrays that are not on it yet
        assert jax.typeof(jax.jit(multiply)(*arrays[:2])).sharding.spec == P("data", None)


@pytest.mark.parametrize(("recipe", "bound"), [(None, 1e-5), (jg.Float8BlockScaling(), 0.02)], ids=["float32", "block"])
def test_a_result_of_grouped_mlp_is_sharded_as_asked_for_even_if_no_operand_is(
    recipe: jg.Recipe | None, bound: float
) -> None:
    mesh = explicit_mesh()
    x, gate_up, *_ = operands_of_fp8()
    down = gate_up[:, :, :256]
    precision = "highest" if recipe is None else None
    mlp = functools.partial(jg.moe.grouped_mlp, group_sizes=SIZES, recipe=recipe, precision=precision)

    y = jax.jit(functools.partial(mlp, out_sharding=P("data")))(*put(mesh, (x, gate_up, down), WHOLE))

    assert jax.typeof(y).sharding.spec == P("data", None)
    assert_close(y, mlp(x, gate_up, down), bound)


@pytest.mark.parametrize(
    ("lhs", "rhs", "dims", "out"),
    [
        (((8, 4), P("data")), ((2, 6, 4), P(None, "model")), ((([1], [2]), ([], [])), [0], [0]), None),
        (((8, 4), P("data")), ((8, 6), P("data")), ((([0], [0]), ([], [])), [0], []), P(None, "model")),
        (((3, 8, 4), P(None, "data")), ((3, 2, 4, 6), WHOLE), ((([2], [2]), ([0], [0])), [1], [1]), P(None, "data")),
        (((2, 8, 4), P(None, "data")), ((2, 8, 6), WHOLE), ((([1], [1]), ([0], [0])), [1], []), P(None, "data")),
        (((2, 8, 4), P("data")), ((2, 4, 6), P("data")), ((([2], [1]), ([0], [0])), [0], []), P("data")),
    ],
    ids=["dgrad", "wgrad", "batch", "wgrad of a batch", "ragged batch"],
)
def test_dimension_numbers_of_sharded_types(lhs: Any, rhs: Any, dims: Any, out: P | None) -> None:
    mesh = explicit_mesh()
    arrays = [jax.random.normal(jax.random.key(len(shape)), shape) for shape, _ in (lhs, rhs)]
    sharded = [put(mesh, array, spec) for array, (_, spec) in zip(arrays, (lhs, rhs), strict=True)]

    def step(out: NamedSharding | None, *operands: jax.Array) -> Any:
        numbers = jax.lax.RaggedDotDimensionNumbers(*dims)

        def loss(*operands: jax.Array) -> Any:
            y = jg.ragged_dot_general(*operands, jnp.array([3, 4]), numbers, precision="highest", out_sharding=out)
            return jnp.sum(jnp.sin(y)), y

        return jax.grad(loss, argnums=(0, 1), has_aux=True)(*operands)

    results = jax.jit(functools.partial(step, None if out is None else NamedSharding(mesh, out)))(*sharded)

    assert_close(jax.tree.leaves(results), jax.tree.leaves(step(None, *arrays)), 1e-5)
    y = results[1]
    assert y.sharding.is_equivalent_to(NamedSharding(mesh, P("data", "model") if out is None else out), y.ndim)


def test_weights_of_sharded_types_are_gathered_and_their_gradients_scattered() -> None:
    mesh = explicit_mesh()
    x, kernel, *_ = operands()

    def loss(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(jg.ragged_dot(x, kernel, SIZES, precision="highest", out_sharding=P("data"))))

    arguments = put(mesh, jnp.nan_to_num(x), P("data")), put(mesh, kernel, P(None, "data"))
    step = jax.jit(jax.grad(loss, argnums=1))
    assert collectives(step.lower(*arguments).compile()) == {"all-gather": 1, "reduce-scatter": 1}
    twice = jax.jit(jax.grad(lambda *arrays: jnp.sum(jax.grad(loss, argnums=1)(*arrays) ** 2), argnums=1))
    expected = jax.grad(lambda *arrays: jnp.sum(jax.grad(unsharded_loss, argnums=1)(*arrays) ** 2), argnums=1)
    assert_close(twice(*arguments), expected(jnp.nan_to_num(x), kernel), 1e-5)


def unsharded_loss(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return jnp.sum(jnp.sin(product(x, kernel)))


def test_a_batch_of_sharded_types() -> None:
    mesh = explicit_mesh()
    x, kernel, *_ = operands()
    batch = jnp.stack([x, 2 * x])
    result = jax.jit(jax.vmap(product, in_axes=(0, None)))(put(mesh, batch, P(None, "data")), put(mesh, kernel, WHOLE))

    assert result.sharding.is_equivalent_to(NamedSharding(mesh, P(None, "data")), 3)
    np.testing.assert_allclose(result, jax.vmap(product, in_axes=(0, None))(batch, kernel), rtol=1e-5, atol=1e-5)


def test_sharded_types_need_no_jit() -> None:
    mesh = explicit_mesh()
    x, kernel, *_ = operands()
    y = product(put(mesh, x, P("data")), kernel)

    assert jax.typeof(y).sharding.spec == P("data", None)
    np.testing.assert_allclose(y, product(x, kernel), rtol=1e-5, atol=1e-5)
