"""Plain `jax.jit` over sharded arrays: the collectives that XLA makes, and the results of one device."""

import functools
import math
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_grouped as jg
from tests.exports import exported
from tests.meshes import mesh_of, typed_mesh
from tests.parallel.sharded import (
    AXES,
    BOTH,
    CASES,
    DATA,
    GROUPS,
    IN,
    OUT,
    RECIPES,
    SIZES,
    TOKENS,
    WHOLE,
    Collective,
    assert_close,
    assert_rounded_once,
    check_step,
    collectives,
    initial_state,
    operands,
    operands_of_fp8,
    product,
    put,
    sent,
    step_in_fp8,
)


@pytest.fixture(autouse=True)
def _backend(backend: str) -> None:
    """Runs every test of this module on every backend."""


def run(mesh: Mesh, function: Callable[..., Any], specs: tuple[P, ...], arrays: tuple[jax.Array, ...]) -> Any:
    """Returns the results of one program and its collectives, after a comparison with one device."""
    sharded = [put(mesh, array, spec) for array, spec in zip(arrays, specs, strict=True)]
    compiled = jax.jit(function).lower(*sharded).compile()
    results = compiled(*sharded)
    expected = jax.jit(function)(*arrays)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), results, expected)
    return results, collectives(compiled)


#: Each case without a recipe, and with two recipes; each recipe with four cases, two of each type of axes.
STEPS = [(case, "auto", None) for case in CASES]
STEPS += [(case, "auto", [*RECIPES][1 + i % 4]) for i, case in enumerate(CASES)]
STEPS += [(case, "explicit", [*RECIPES][2 * i % 5]) for i, case in enumerate(CASES)]


@pytest.mark.parametrize(("case", "kind", "name"), STEPS)
def test_steps_send_sums_and_maxima_alone(case: str, kind: str, name: str | None) -> None:
    mesh = typed_mesh(kind, AXES)
    specs, expected, sums = CASES[case]
    out = None
    if kind == "explicit":
        out, expected = expected[0], (expected[0], *specs[:3])  # Gradients are sharded as their arguments.

    compiled, results = check_step(mesh, name, specs, out_sharding=out)

    checked = 4 if name is None or kind == "explicit" else 2
    for result, spec in list(zip(results, expected, strict=False))[:checked]:
        assert result.sharding.is_equivalent_to(NamedSharding(mesh, spec), result.ndim)
    # The gradient of a bias that is whole is gathered from the devices that have the kernels.
    gathered = {"all-gather"} if kind == "explicit" and name is not None and "experts" in case else set()
    assert {*collectives(compiled)} <= {"all-reduce", *gathered}
    if name is None and kind == "auto":
        shapes = dict(zip(("y", "dx", "dkernel", "dbias"), results, strict=False))
        parts = (shapes[result].sharding.shard_shape(shapes[result].shape) for result in sums.split())
        assert sent(compiled) == Counter(Collective("all-reduce", part, "f32") for part in parts)


@pytest.mark.parametrize("spec", [P("data"), P(None, "data"), P(None, None, "data")], ids=str)
def test_weights_that_are_stored_in_parts_are_gathered_and_their_gradients_scattered(spec: P) -> None:
    mesh = mesh_of(AXES)
    x, kernel, _, dy = operands()

    def step(x: jax.Array, kernel: jax.Array, dy: jax.Array) -> tuple[jax.Array, ...]:
        def on_tokens(array: jax.Array) -> jax.Array:
            return jax.lax.with_sharding_constraint(array, NamedSharding(mesh, P("data")))

        y, pull_back = jax.vjp(lambda x, kernel: on_tokens(product(on_tokens(x), kernel)), x, kernel)
        dx, dkernel = pull_back(dy)
        return y, dx, jax.lax.with_sharding_constraint(dkernel, NamedSharding(mesh, spec))

    (y, dx, dkernel), collected = run(mesh, step, (P("data"), spec, P("data")), (x, kernel, dy))

    assert collected["reduce-scatter"] == 1
    assert 1 <= collected["all-gather"] <= 2  # The same copy serves both passes, if XLA sees that.
    assert {*collected} == {"all-gather", "reduce-scatter"}
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

    _, collected = run(mesh, function, specs, arrays)

    assert collected == {"all-reduce": 1}


@pytest.mark.parametrize(
    ("name", "where"), [(None, "auto"), ("block", "explicit"), ("delayed", "auto"), (None, "shard_map")]
)
def test_gradients_of_bfloat16_parameters_are_sums_that_are_rounded_once(name: str | None, where: str) -> None:
    recipe, state = RECIPES[name][0], initial_state(name)
    mesh = typed_mesh("explicit" if where == "explicit" else "auto", {"data": 8})
    options: dict[str, Any] = {}
    x, kernel, bias, dy = operands_of_fp8()
    tokens = [put(mesh, jnp.nan_to_num(array).astype(jnp.bfloat16), DATA) for array in (x, dy)]
    parameters = dict(kernel=kernel, bias=bias)
    if where != "shard_map":
        options = dict(out_sharding=DATA if where == "explicit" else None)
        parameters |= dict(dkernel_accumulator=kernel)

    def gradients(parameters: Any, sizes: jax.Array, x: jax.Array, dy: jax.Array) -> Any:
        def result(kernel: jax.Array, bias: jax.Array, state: Any) -> jax.Array:
            weights = parameters | dict(kernel=kernel, bias=bias)
            return jg.grouped_dense(x, group_sizes=sizes, **weights, recipe=recipe, fp8_state=state, **options)

        return jax.vjp(result, parameters["kernel"], parameters["bias"], state)[1](dy)[:2]

    sizes, run = SIZES, gradients
    if where == "shard_map":
        specs = WHOLE, DATA, DATA, DATA
        sizes, run = jnp.tile(SIZES // 8, 8), jax.shard_map(gradients, mesh=mesh, in_specs=specs, out_specs=WHOLE)

    assert_rounded_once(lambda array: jax.jit(run)(put(mesh, array, WHOLE), sizes, *tokens), parameters)


@pytest.mark.parametrize("where", ["stored in parts", "shard_map"])
def test_the_gradient_of_a_bfloat16_rhs_is_a_sum_that_is_rounded_once(where: str) -> None:
    mesh = mesh_of({"data": 8})
    x, kernel, _, dy = operands()
    sizes, in_bfloat16 = SIZES, [jnp.nan_to_num(array).astype(jnp.bfloat16) for array in (kernel, x, dy)]
    stored = P(None, "data") if where == "stored in parts" else WHOLE

    def gradient(kernel: jax.Array, x: jax.Array, dy: jax.Array, sizes: jax.Array) -> jax.Array:
        return jax.vjp(lambda kernel: jg.ragged_dot(x, kernel, sizes, precision="highest"), kernel)[1](dy)[0]

    run = gradient
    if where == "shard_map":
        sizes = jnp.tile(SIZES // 8, 8)
        run = jax.shard_map(gradient, mesh=mesh, in_specs=(WHOLE, DATA, DATA, DATA), out_specs=WHOLE)

    def on_mesh(*arrays: jax.Array) -> jax.Array:
        placed = [put(mesh, array, spec) for array, spec in zip(arrays, (stored, DATA, DATA), strict=True)]
        return jax.jit(run, out_shardings=placed[0].sharding)(*placed, sizes)

    got, expected = on_mesh(*in_bfloat16), on_mesh(*(array.astype(jnp.float32) for array in in_bfloat16))
    # Products of other types may add up in another order.
    np.testing.assert_allclose(got.astype(jnp.float32), expected, rtol=2**-8, atol=1e-4)


def test_an_offset_counts_from_the_first_kernel_of_all() -> None:
    x, kernel, *_ = operands()
    sizes = jnp.concatenate([SIZES, SIZES // 9])

    @jax.jit
    def part(x: jax.Array, kernel: jax.Array, offset: int) -> jax.Array:
        return jg.ragged_dot(x, kernel, sizes, group_offset=offset, precision="highest")

    sharded = put(mesh_of(AXES), x, DATA), put(mesh_of(AXES), kernel, P("model"))
    for offset in (-3, 1, 2, 9):
        np.testing.assert_allclose(part(*sharded, offset), part(x, kernel, offset), rtol=1e-5, atol=1e-5)


def test_hostile_sizes_give_what_one_device_gives() -> None:
    x, kernel, *_ = operands()
    x, multiply = jnp.nan_to_num(x), jax.jit(jg.ragged_dot)
    sharded = put(mesh_of(AXES), x, BOTH), put(mesh_of(AXES), kernel, WHOLE)
    largest = np.iinfo(np.int32).max
    for sizes in ([largest, 1, largest, 5], [-7, 30, np.iinfo(np.int32).min, largest], [0, 0, 0, 0]):
        sizes = np.int32(sizes)
        np.testing.assert_allclose(multiply(*sharded, sizes), multiply(x, kernel, sizes), rtol=1e-5, atol=1e-5)


def test_what_cannot_be_divided_evenly_is_gathered() -> None:
    mesh = mesh_of(AXES)
    x, kernel, *_ = operands()

    def uneven(x: jax.Array, kernel: jax.Array) -> jax.Array:
        rows = jax.lax.with_sharding_constraint(x[:63], NamedSharding(mesh, P("data")))
        return product(rows, kernel)

    run(mesh, uneven, (WHOLE, WHOLE), (x, kernel))


@pytest.mark.parametrize("transform", ["second order", "scan", "jit of remat"])
def test_transformed_programs_are_split_too(transform: str) -> None:
    mesh = mesh_of(AXES)
    x, kernel, *_ = operands()
    x = jnp.nan_to_num(x)

    def loss(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(product(x, kernel)))

    def repeated(x: jax.Array, kernel: jax.Array) -> jax.Array:
        # The sum over devices has another order, so the carry has another rounding. As a mean it stays near 0.5 and its
        # rounding below 1e-7. As a sum of 1536 sines, it would make arguments of up to 685 that are off by 5e-4.
        def step(mean: jax.Array, _: None) -> tuple[jax.Array, None]:
            return mean + loss(x * mean, kernel) / (TOKENS * OUT), None

        return TOKENS * OUT * jax.lax.scan(step, jnp.float32(0.5), length=2)[0]

    functions: dict[str, Callable[..., Any]] = {
        "second order": jax.grad(lambda x, kernel: jnp.sum(jax.grad(loss, argnums=1)(x, kernel) ** 2), argnums=(0, 1)),
        "scan": jax.grad(repeated, argnums=(0, 1)),
        "jit of remat": jax.grad(jax.jit(jax.checkpoint(loss)), argnums=(0, 1)),
    }
    _, collected = run(mesh, functions[transform], (P("data"), WHOLE), (x, kernel))
    assert {*collected} == {"all-reduce"}


def test_sharded_arrays_are_multiplied_without_jit() -> None:
    x, kernel, *_ = operands()
    with jax.disable_jit():
        result = product(put(mesh_of(AXES), x, P("data")), kernel)

    np.testing.assert_allclose(result, product(x, kernel), rtol=1e-5, atol=1e-5)


def test_an_exported_program_is_whole_and_runs() -> None:
    mesh = mesh_of(AXES)
    x, kernel, *_ = operands()
    arguments = put(mesh, x, P("data")), put(mesh, kernel, WHOLE)

    result = exported(product, *arguments)(*arguments)

    np.testing.assert_allclose(result, product(x, kernel), rtol=1e-5, atol=1e-5)


def test_a_program_for_several_gpus_has_only_published_custom_calls() -> None:
    mesh = mesh_of(AXES)
    x, kernel, *_ = operands()
    arguments = put(mesh, x, P("data")), put(mesh, kernel, WHOLE)
    checks = [export.DisabledSafetyCheck.custom_call(name) for name in jg.CUSTOM_CALL_TARGETS]

    with jg.config.override(backend="auto"):  # Any machine lowers for GPUs.
        program = export.export(jax.jit(product), platforms=["cuda"], disabled_checks=checks)(*arguments)

    assert program.nr_devices == mesh.size
    assert {*re.findall(r"custom_call @(\w+)", program.mlir_module())} == {"jax_grouped_gemm"}


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


def test_features_are_gathered_where_their_parts_would_have_other_scales() -> None:
    # Parts of 96 do not consist of blocks of 128.
    compiled, _ = check_step(mesh_of(AXES), "block", CASES["features in"].operands, features=192)

    assert "all-gather" in collectives(compiled)


@pytest.mark.parametrize(
    ("name", "dimension", "kind"),
    [
        ("block", "K", "auto"),
        ("block", "N", "explicit"),
        ("delayed", "K", "explicit"),
        ("delayed", "N", "auto"),
        ("delayed", "E", "explicit"),
        ("current", "E", "auto"),
        ("current", "K", "explicit"),
        ("mxfp8", "E", "explicit"),
        ("mxfp8", "N", "auto"),
    ],
)
def test_weights_that_are_stored_in_parts_travel_in_fp8(name: str, dimension: str, kind: str) -> None:
    stored = {"E": P("data"), "K": P(None, "data"), "N": P(None, None, "data")}[dimension]
    out = DATA if kind == "explicit" else None

    compiled, _ = check_step(typed_mesh(kind, {"data": 2}), name, (DATA, stored, WHOLE, DATA), out_sharding=out)

    size = operands_of_fp8()[1].size
    weights = {part.dtype for part in sent(compiled) if part.kind == "all-gather" and math.prod(part.shape) == size}
    # A scale of a whole matrix, and MX scales in the order of the matmul, are not those of some features.
    assert weights == {"u8" if dimension == "E" or name in {"block", "delayed"} else "f32"}


@pytest.mark.parametrize(
    ("name", "case", "kind"),
    [
        ("block", "tokens", "explicit"),
        ("delayed", "tokens", "auto"),
        ("current", "experts", "auto"),
        ("mxfp8", "experts", "explicit"),
    ],
)
def test_products_of_cached_kernels_gather_no_weights_and_add_to_an_accumulator(
    name: str, case: str, kind: str
) -> None:
    recipe, state = RECIPES[name][0], initial_state(name)
    kernel, accumulator = operands_of_fp8()[1], jnp.full((GROUPS, 256, 512), 10.0)
    cache = jg.quantize_kernel(kernel, recipe, scale=None if state is None else state.scales(recipe).kernel)
    specs, (out, *_), _ = CASES[case]
    options = dict(
        cache_spec=P("model") if case == "experts" else WHOLE, out_sharding=out if kind == "explicit" else None
    )

    compiled, _ = check_step(typed_mesh(kind, AXES), name, specs, accumulator, cache, **options)

    # The gradient of a bias that is whole is gathered from the devices that have the kernels.
    gathered = {"all-gather"} if kind == "explicit" and case == "experts" else set()
    assert {*collectives(compiled)} == {"all-reduce", *gathered}


def test_a_batch_in_fp8_is_split() -> None:
    mesh = mesh_of(AXES)
    recipe, bound = RECIPES["delayed"]
    state = jax.tree.map(lambda leaf: jnp.stack([leaf] * 2), initial_state("delayed"))
    arrays = [jnp.stack([array, 0.5 * array]) for array in operands_of_fp8()]
    step = jax.jit(jax.vmap(functools.partial(step_in_fp8, recipe)))
    specs = P("data", "model"), DATA, DATA, P("data", "model")
    sharded = [put(mesh, array, spec) for array, spec in zip(arrays, specs, strict=True)]

    compiled = step.lower(*sharded, state).compile()

    assert {*collectives(compiled)} == {"all-reduce"}
    assert_close(compiled(*sharded, state), step(*arrays, state), bound)
