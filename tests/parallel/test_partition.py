"""Plain `jax.jit` over sharded arrays: the collectives that XLA makes, and the results of one device."""

import functools
import re
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_grouped as jg
from tests.meshes import mesh_of, need_devices

GROUPS, TOKENS, IN, OUT = 4, 64, 16, 24
#: The last tokens are in no group. Parts of 8 and of 16 tokens begin inside groups.
SIZES = jnp.array([21, 0, 19, 13])
AXES = {"data": 2, "model": 2}
WHOLE = P()


@pytest.fixture(autouse=True)
def _backend(backend: str) -> None:
    """Runs every test of this module on every backend."""


@functools.cache
def operands() -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Returns `x`, whose tail is NaN, a kernel, a bias and the gradient of the result."""
    keys = jax.random.split(jax.random.key(0), 4)
    x = jax.random.normal(keys[0], (TOKENS, IN)).at[int(SIZES.sum()) :].set(jnp.nan)
    shapes = (GROUPS, IN, OUT), (GROUPS, OUT), (TOKENS, OUT)
    return x, *(jax.random.normal(key, shape) for key, shape in zip(keys[1:], shapes, strict=True))


def product(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return jg.ragged_dot(x, kernel, SIZES, precision="highest")


def dense(x: jax.Array, kernel: jax.Array, bias: jax.Array) -> jax.Array:
    return jg.grouped_dense(x, kernel, SIZES, bias, precision="highest")


def gradient_of(argument: int) -> Callable[..., jax.Array]:
    """Returns the gradient of an argument of `dense`, from all arguments and the result's gradient."""

    def gradient(*arguments: jax.Array) -> jax.Array:
        *inputs, dy = arguments
        return jax.vjp(dense, *inputs)[1](dy)[argument]

    return gradient


def put(mesh: Mesh, array: Any, spec: P) -> jax.Array:
    return jax.device_put(array, NamedSharding(mesh, spec))


def collectives(compiled: Any) -> dict[str, int]:
    """Counts the collectives of a compiled program, by name."""
    return Counter(re.findall(r" (all-\w+|reduce-scatter|collective-\w+)(?:-start)?\(", compiled.as_text()))


def run(mesh: Mesh, function: Callable[..., Any], specs: tuple[P, ...], arrays: tuple[jax.Array, ...]) -> Any:
    """Returns the results of one program and its collectives, after a comparison with one device."""
    sharded = [put(mesh, array, spec) for array, spec in zip(arrays, specs, strict=True)]
    compiled = jax.jit(function).lower(*sharded).compile()
    results = compiled(*sharded)
    expected = jax.jit(function)(*arrays)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), results, expected)
    return results, collectives(compiled)


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
    "features out": Case((WHOLE, OUT_OF_KERNEL, LAST, LAST), (LAST, WHOLE, OUT_OF_KERNEL, LAST), "dx"),
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


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", ["y", "dx", "dkernel", "dbias"])
def test_only_sums_over_shards_are_sent(case: str, name: str) -> None:
    specs, results, sums = CASES[case]
    index = ["y", "dx", "dkernel", "dbias"].index(name)
    mesh = mesh_of(AXES)
    x, kernel, bias, dy = operands()

    if name == "y":
        result, sent = run(mesh, product, specs[:2], (x, kernel))
    else:
        result, sent = run(mesh, gradient_of(index - 1), specs, (x, kernel, bias, dy))

    assert sent == ({"all-reduce": 1} if name in sums.split() else {})
    assert result.sharding.is_equivalent_to(NamedSharding(mesh, results[index]), result.ndim)


@pytest.mark.parametrize("spec", [P("data"), P(None, "data"), P(None, None, "data")], ids=str)
def test_weights_that_are_stored_in_parts_are_gathered_and_their_gradients_scattered(spec: P) -> None:
    mesh = mesh_of(AXES)
    x, kernel, _, dy = operands()

    def step(x: jax.Array, kernel: jax.Array, dy: jax.Array) -> tuple[jax.Array, ...]:
        def of_tokens(array: jax.Array) -> jax.Array:
            return jax.lax.with_sharding_constraint(array, NamedSharding(mesh, P("data")))

        y, pull_back = jax.vjp(lambda x, kernel: of_tokens(product(of_tokens(x), kernel)), x, kernel)
        dx, dkernel = pull_back(dy)
        return y, dx, jax.lax.with_sharding_constraint(dkernel, NamedSharding(mesh, spec))

    (y, dx, dkernel), sent = run(mesh, step, (P("data"), spec, P("data")), (x, kernel, dy))

    assert sent["reduce-scatter"] == 1
    assert 1 <= sent["all-gather"] <= 2  # The same copy serves both passes, if XLA sees that.
    assert {*sent} == {"all-gather", "reduce-scatter"}
    for array, expected in ((y, P("data")), (dx, P("data")), (dkernel, spec)):
        assert array.sharding.is_equivalent_to(NamedSharding(mesh, expected), array.ndim)


def test_a_batch_is_split_like_any_dimension() -> None:
    mesh = mesh_of(AXES)
    x, kernel, *_ = operands()
    batch = jnp.stack([x, 2 * x])

    _, none = run(mesh, jax.vmap(product, in_axes=(0, None)), (P("data", "model"), WHOLE), (batch, kernel))
    assert not none

    def loss(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(jax.vmap(product)(x, kernel)))

    kernels = jnp.stack([kernel, -kernel])
    _, sums = run(mesh, jax.grad(loss, argnums=1), (P(None, "model"), P("data")), (batch, kernels))
    assert sums == {"all-reduce": 1}


@pytest.mark.parametrize("batched", [False, True])
def test_an_accumulator_is_added_once(batched: bool) -> None:
    mesh = mesh_of(AXES)
    x, kernel, _, dy = operands()
    x = jnp.nan_to_num(x)
    accumulator = 10 * jnp.ones((GROUPS, IN, OUT))

    def accumulate(x: jax.Array, dy: jax.Array, accumulator: jax.Array) -> jax.Array:
        def result(kernel: jax.Array) -> jax.Array:
            return jg.grouped_dense(x, kernel, SIZES, dkernel_accumulator=accumulator, precision="highest")

        return jax.vjp(result, kernel)[1](dy)[0]

    function = jax.vmap(accumulate, in_axes=(0, 0, None)) if batched else accumulate
    arrays = (x, dy, accumulator)
    specs = (P("data"), P("data"), WHOLE)
    if batched:
        arrays = (jnp.stack([x, 2 * x]), jnp.stack([dy, dy]), accumulator)
        specs = (P(None, "data"), P(None, "data"), WHOLE)

    _, sent = run(mesh, function, specs, arrays)

    assert sent == {"all-reduce": 1}


@pytest.mark.parametrize("offset", [-3, 1, 2, 9])
def test_an_offset_counts_from_the_first_kernel_of_all(offset: int) -> None:
    mesh = mesh_of(AXES)
    x, kernel, *_ = operands()

    def part(x: jax.Array, kernel: jax.Array) -> jax.Array:
        sizes = jnp.concatenate([SIZES, SIZES // 9])
        return jg.ragged_dot(x, kernel, sizes, group_offset=jnp.int32(offset), precision="highest")

    run(mesh, part, (P("data"), P("model")), (x, kernel))


def test_hostile_sizes_give_what_one_device_gives() -> None:
    mesh = mesh_of(AXES)
    x, kernel, *_ = operands()
    x = jnp.nan_to_num(x)
    largest = np.iinfo(np.int32).max
    for sizes in ([largest, 1, largest, 5], [-7, 30, np.iinfo(np.int32).min, largest], [0, 0, 0, 0]):
        run(mesh, functools.partial(jg.ragged_dot, group_sizes=jnp.array(sizes)), (BOTH, WHOLE), (x, kernel))


def test_what_cannot_be_divided_evenly_is_gathered() -> None:
    mesh = mesh_of(AXES)
    x, kernel, *_ = operands()

    def uneven(x: jax.Array, kernel: jax.Array) -> jax.Array:
        rows = jax.lax.with_sharding_constraint(x[:63], NamedSharding(mesh, P("data")))
        return product(rows, kernel)

    run(mesh, uneven, (WHOLE, WHOLE), (x, kernel))


@pytest.mark.parametrize("transform", ["second order", "remat", "scan", "nested jit", "disable_jit"])
def test_transformed_programs_are_split_too(transform: str) -> None:
    mesh = mesh_of(AXES)
    x, kernel, *_ = operands()
    x = jnp.nan_to_num(x)
    loss = lambda x, kernel: jnp.sum(jnp.sin(product(x, kernel)))  # noqa: E731

    def repeated(x: jax.Array, kernel: jax.Array) -> jax.Array:
        step = lambda total, _: (total + loss(x * total, kernel), None)  # noqa: E731
        return jax.lax.scan(step, jnp.float32(0.5), length=2)[0]

    functions: dict[str, Callable[..., Any]] = {
        "second order": jax.grad(lambda x, kernel: jnp.sum(jax.grad(loss, argnums=1)(x, kernel) ** 2), argnums=(0, 1)),
        "remat": jax.grad(jax.checkpoint(loss), argnums=(0, 1)),
        "scan": jax.grad(repeated, argnums=(0, 1)),
        "nested jit": jax.grad(jax.jit(loss), argnums=(0, 1)),
    }
    if transform == "disable_jit":
        with jax.disable_jit():
            result = product(put(mesh, x, P("data")), kernel)
        np.testing.assert_allclose(result, product(x, kernel), rtol=1e-5, atol=1e-5)
        return
    _, sent = run(mesh, functions[transform], (P("data"), WHOLE), (x, kernel))
    assert {*sent} == {"all-reduce"}


def test_an_exported_program_is_whole_and_runs() -> None:
    mesh = mesh_of(AXES)
    x, kernel, *_ = operands()
    arguments = put(mesh, x, P("data")), put(mesh, kernel, WHOLE)

    exported = export.deserialize(export.export(jax.jit(product))(*arguments).serialize())

    np.testing.assert_allclose(exported.call(*arguments), product(x, kernel), rtol=1e-5, atol=1e-5)


def test_a_mesh_that_is_set_is_enough() -> None:
    mesh = mesh_of(AXES)
    x, kernel, *_ = operands()
    sharded = NamedSharding(mesh, P("data"))
    with jax.set_mesh(mesh):
        compiled = jax.jit(product, in_shardings=(sharded, None)).lower(x, kernel).compile()

    assert not collectives(compiled)


def test_arrays_on_two_meshes_are_multiplied() -> None:
    x, kernel, *_ = operands()
    arguments = put(mesh_of({"data": 4}), x, P("data")), put(mesh_of({"rows": 2, "columns": 2}), kernel, P("rows"))

    np.testing.assert_allclose(jax.jit(product)(*arguments), product(x, kernel), rtol=1e-5, atol=1e-5)


def test_a_jaxpr_runs_without_the_mesh_that_was_set_for_it() -> None:
    x, kernel, *_ = operands()
    with jax.set_mesh(mesh_of(AXES)):
        jaxpr = jax.make_jaxpr(product)(x, kernel)

    (y,) = jax.core.eval_jaxpr(jaxpr.jaxpr, jaxpr.consts, x, kernel)
    np.testing.assert_allclose(y, product(x, kernel), rtol=1e-5, atol=1e-5)


def test_no_derivative_says_the_same_with_and_without_a_mesh() -> None:
    mesh = mesh_of(AXES)
    x, kernel, *_ = operands()

    def loss(x: jax.Array) -> jax.Array:
        return jnp.sum(jg.grouped_dense_fwd(x, kernel, SIZES, precision="highest")[0])

    jax.grad(loss)(put(mesh, x, P("data")))  # Without a recipe there is one.
    with pytest.raises(NotImplementedError, match="has no derivative of its own: ragged_dot and grouped_dense"):
        jax.grad(lambda kernel: jnp.sum(accumulated(put(mesh, x, P("data")), kernel)))(kernel)


def accumulated(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Returns a gradient that was added to an accumulator, which has no further derivative."""
    accumulator = jnp.zeros_like(kernel)
    dense = functools.partial(jg.grouped_dense, dkernel_accumulator=accumulator, precision="highest")
    return jax.grad(lambda kernel: jnp.sum(jnp.sin(dense(jnp.nan_to_num(x), kernel, SIZES))))(kernel)


RECIPES = {
    "block": (jg.Float8BlockScaling(), 1e-5),
    "current": (jg.Float8CurrentScaling(), 0.1),  # Every device has scales of its own part.
    "delayed": (jg.DelayedScaling(amax_history_len=4), 1e-5),
    "mxfp8": (jg.MXFP8BlockScaling(), 1e-5),
}


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
    keys = jax.random.split(jax.random.key(1), 4)
    shapes = (TOKENS, features), (GROUPS, features, 512), (GROUPS, 512), (TOKENS, 512)
    x, *others = (jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True))
    return x.at[int(SIZES.sum()) :].set(jnp.nan), *others


def assert_close(got: Any, expected: Any, bound: float) -> None:
    for a, b in zip(jax.tree.leaves(jax.device_get(got)), jax.tree.leaves(jax.device_get(expected)), strict=True):
        assert np.linalg.norm(a - b) <= bound * np.linalg.norm(b)


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("case", ["tokens", "features out", "experts", "tokens and features in"])
def test_steps_in_fp8_send_sums_and_maxima(name: str, case: str) -> None:
    recipe, bound = RECIPES[name]
    mesh = mesh_of(AXES)
    arrays = operands_of_fp8()
    state = jg.Fp8State.initial(recipe, GROUPS) if name == "delayed" else None
    step = jax.jit(functools.partial(step_in_fp8, recipe))
    sharded = [put(mesh, array, spec) for array, spec in zip(arrays, CASES[case].operands, strict=True)]
    sharded.append(put(mesh, state, WHOLE))

    compiled = step.lower(*sharded).compile()
    results = compiled(*sharded)

    assert {*collectives(compiled)} <= {"all-reduce"}
    assert_close(results, step(*arrays, state), bound)
    for array, spec in zip(results[:2], CASES[case].results[:2], strict=True):
        assert array.sharding.is_equivalent_to(NamedSharding(mesh, spec), 2)


def test_features_are_gathered_where_their_parts_would_have_other_scales() -> None:
    mesh = mesh_of(AXES)
    arrays = operands_of_fp8(features=192)  # Parts of 96 do not consist of blocks of 128.
    step = jax.jit(functools.partial(step_in_fp8, RECIPES["block"][0]))
    specs = CASES["features in"].operands
    sharded = [put(mesh, array, spec) for array, spec in zip(arrays, specs, strict=True)]

    assert "all-gather" in collectives(step.lower(*sharded, None).compile())
    assert_close(step(*sharded, None), step(*arrays, None), 1e-5)


def test_steps_in_fp8_add_to_an_accumulator_and_read_a_cache() -> None:
    mesh = mesh_of(AXES)
    recipe, bound = RECIPES["block"]
    arrays = operands_of_fp8()
    accumulator = jnp.full((GROUPS, 256, 512), 10.0)
    step = jax.jit(functools.partial(step_in_fp8, recipe))
    sharded = [put(mesh, array, spec) for array, spec in zip(arrays, CASES["tokens"].operands, strict=True)]

    compiled = step.lower(*sharded, None, accumulator).compile()
    assert {*collectives(compiled)} == {"all-reduce"}
    assert_close(step(*sharded, None, accumulator), step(*arrays, None, accumulator), bound)

    cache = jg.quantize_kernel(arrays[1], recipe)
    assert_close(step(*sharded, None, None, cache), step(*arrays, None, None, cache), bound)


def test_a_batch_in_fp8_is_split() -> None:
    mesh = mesh_of(AXES)
    recipe, bound = RECIPES["delayed"]
    state = jax.tree.map(lambda leaf: jnp.stack([leaf] * 2), jg.Fp8State.initial(recipe, GROUPS))
    arrays = [jnp.stack([array, 0.5 * array]) for array in operands_of_fp8()]
    step = jax.jit(jax.vmap(functools.partial(step_in_fp8, recipe)))
    specs = P("data", "model"), P("data"), P("data"), P("data", "model")
    sharded = [put(mesh, array, spec) for array, spec in zip(arrays, specs, strict=True)]

    assert {*collectives(step.lower(*sharded, state).compile())} == {"all-reduce"}
    assert_close(step(*sharded, state), step(*arrays, state), bound)


@pytest.mark.parametrize("recipe", [None, jg.Float8BlockScaling(), jg.DelayedScaling()], ids=repr)
def test_a_training_step_of_a_layer_is_split(recipe: jg.Recipe | None) -> None:
    mesh = mesh_of(AXES)
    x, _, _, targets = operands_of_fp8()
    x = jnp.nan_to_num(x)
    layer = jg.linen.GroupedDense(512, GROUPS, recipe=recipe, use_bias=True)
    variables = layer.init(jax.random.key(2), x, SIZES)

    def loss(variables: Any, x: jax.Array, targets: jax.Array) -> jax.Array:
        return jnp.mean((layer.apply(variables, x, SIZES) - targets) ** 2)

    step = jax.jit(jax.value_and_grad(loss))
    sharded = put(mesh, variables, WHOLE), put(mesh, x, DATA), put(mesh, targets, DATA)

    assert {*collectives(step.lower(*sharded).compile())} == {"all-reduce"}
    assert_close(step(*sharded), step(variables, x, targets), 1e-4)


@pytest.mark.parametrize("name", [None, "block", "delayed"])
@pytest.mark.parametrize("case", CASES)
def test_types_that_are_sharded_say_what_is_sent(case: str, name: str | None) -> None:
    recipe, bound = RECIPES[name] if name else (None, 1e-5)
    mesh = explicit_mesh()
    specs, expected, _ = CASES[case]
    arrays = operands_of_fp8()
    state = jg.Fp8State.initial(recipe, GROUPS) if name == "delayed" else None
    sharded = [put(mesh, array, spec) for array, spec in zip(arrays, specs, strict=True)]

    step = functools.partial(step_in_fp8, recipe, out_sharding=expected[0])
    compiled = jax.jit(step).lower(*sharded, state).compile()
    results = compiled(*sharded, state)

    # The gradient of a bias that is whole is gathered from the devices that have the kernels.
    gathered = {"all-gather"} if recipe is not None and "experts" in case else set()
    assert {*collectives(compiled)} <= {"all-reduce", *gathered}
    assert_close(results, jax.jit(functools.partial(step_in_fp8, recipe))(*arrays, state), bound)
    # Gradients are sharded as their arguments.
    for result, spec in zip(results, (expected[0], *specs[:3]), strict=False):
        assert result.sharding.is_equivalent_to(NamedSharding(mesh, spec), result.ndim)


def explicit_mesh() -> Mesh:
    need_devices(4)
    return jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2, devices=jax.devices()[:4])


def test_the_result_of_sharded_types_is_inferred_or_asked_for() -> None:
    mesh = explicit_mesh()
    x, kernel, *_ = operands()

    def multiply(x_spec: P, kernel_spec: P, **out: Any) -> Any:
        arguments = put(mesh, x, x_spec), put(mesh, kernel, kernel_spec)
        return jax.jit(lambda *of: jg.ragged_dot(*of, SIZES, precision="highest", **out))(*arguments)

    assert jax.typeof(multiply(P("data"), OUT_OF_KERNEL)).sharding.spec == P("data", "model")
    for specs in [(LAST, LAST), (P("data"), P("data")), (P("data"), P(None, "data")), (WHOLE, P("model"))]:
        with pytest.raises(ValueError, match=r"ambiguous how the output should be sharded.*`out_sharding`"):
            multiply(*specs)
        for out in (P("data"), P(None, "model"), P("data", "model"), NamedSharding(mesh, WHOLE)):
            y = multiply(*specs, out_sharding=out)
            spec = out.spec if isinstance(out, NamedSharding) else out
            assert y.sharding.is_equivalent_to(NamedSharding(mesh, spec), 2)
            np.testing.assert_allclose(y, product(x, kernel), rtol=1e-5, atol=1e-5)


def test_weights_of_sharded_types_are_gathered_and_their_gradients_scattered() -> None:
    mesh = explicit_mesh()
    x, kernel, *_ = operands()

    def loss(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(jg.ragged_dot(x, kernel, SIZES, precision="highest", out_sharding=P("data"))))

    arguments = put(mesh, jnp.nan_to_num(x), P("data")), put(mesh, kernel, P(None, "data"))
    step = jax.jit(jax.grad(loss, argnums=1))
    assert collectives(step.lower(*arguments).compile()) == {"all-gather": 1, "reduce-scatter": 1}
    twice = jax.jit(jax.grad(lambda *of: jnp.sum(jax.grad(loss, argnums=1)(*of) ** 2), argnums=1))
    expected = jax.grad(lambda *of: jnp.sum(jax.grad(unsharded_loss, argnums=1)(*of) ** 2), argnums=1)
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
