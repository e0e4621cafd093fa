"""Products of sharded arrays under plain `jax.jit`: collectives, types of results, and the results of one device."""

import functools
import itertools
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
from tests.meshes import TYPES, make_mesh, typed_mesh
from tests.operands import normal
from tests.parallel.sharded import (
    AXES,
    BOTH,
    CASES,
    DATA,
    GROUPS,
    IN,
    LAST,
    OUT,
    OUT_OF_KERNEL,
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

    def assert_close(got: jax.Array, wanted: jax.Array) -> None:
        # Devices add terms in another order, so that a sum that cancels has the rounding of the largest ones.
        rounding = float(jnp.finfo(jnp.float32).eps * jnp.max(jnp.abs(wanted)))
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5 + rounding)

    jax.tree.map(assert_close, results, expected)
    return results, collectives(compiled)


@pytest.mark.parametrize(
    ("case", "kind", "name"),
    [
        ("tokens over two axes", "auto", None),
        ("tokens and features out", "auto", None),
        ("tokens and features in", "auto", None),
        ("tokens and experts", "auto", None),
        ("tokens over two axes", "auto", "mxfp8"),
        ("tokens and features out", "auto", "block"),
        ("tokens and experts", "auto", "delayed"),
        ("tokens and features out", "explicit", "delayed"),
        ("tokens and features in", "explicit", None),
        ("tokens and experts", "explicit", "block"),
    ],
)
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


def test_a_batch_is_split_like_any_dimension() -> None:
    x, kernel, *_ = operands()
    batch, kernels = jnp.stack([x, 2 * x]), jnp.stack([kernel, -kernel])
    forward = jax.vmap(product, in_axes=(0, None))

    _, none = run(make_mesh(AXES), forward, (P("data", "model"), WHOLE), (batch, kernel))
    assert not none
    mesh = typed_mesh("explicit", AXES)
    result, none = run(mesh, forward, (P(None, "data"), WHOLE), (batch, kernel))
    assert not none
    assert result.sharding.is_equivalent_to(NamedSharding(mesh, P(None, "data")), 3)

    def loss(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(jax.vmap(product)(x, kernel)))

    _, sums = run(make_mesh(AXES), jax.grad(loss, argnums=1), (P(None, "model"), P("data")), (batch, kernels))
    assert sums == {"all-reduce": 1}


def test_an_accumulator_of_a_batch_is_added_once() -> None:
    x, kernel, _, dy = operands()
    x, accumulator = jnp.nan_to_num(x), 10 * jnp.ones((GROUPS, IN, OUT))

    def accumulate(x: jax.Array, dy: jax.Array, accumulator: jax.Array) -> jax.Array:
        def result(kernel: jax.Array) -> jax.Array:
            return jg.grouped_dense(x, kernel, SIZES, dkernel_accumulator=accumulator, precision="highest")

        return jax.vjp(result, kernel)[1](dy)[0]

    function = jax.vmap(accumulate, in_axes=(0, 0, None))
    specs = (P(None, "data"), P(None, "data"), WHOLE)
    _, collected = run(make_mesh(AXES), function, specs, (jnp.stack([x, 2 * x]), jnp.stack([dy, dy]), accumulator))

    assert collected == {"all-reduce": 1}


@pytest.mark.parametrize(("name", "where"), [(None, "auto"), ("delayed", "explicit"), ("block", "shard_map")])
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


def test_the_gradient_of_a_bfloat16_rhs_is_a_sum_that_is_rounded_once() -> None:
    mesh = make_mesh({"data": 8})
    x, kernel, _, dy = operands()
    in_bfloat16 = [jnp.nan_to_num(array).astype(jnp.bfloat16) for array in (kernel, x, dy)]

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(WHOLE, DATA, DATA, DATA), out_specs=WHOLE)
    def gradient(kernel: jax.Array, x: jax.Array, dy: jax.Array, sizes: jax.Array) -> jax.Array:
        return jax.vjp(lambda kernel: jg.ragged_dot(x, kernel, sizes, precision="highest"), kernel)[1](dy)[0]

    sizes = jnp.tile(SIZES // 8, 8)
    got, expected = gradient(*in_bfloat16, sizes), gradient(*(a.astype(jnp.float32) for a in in_bfloat16), sizes)
    # Products of other types may add up in another order.
    np.testing.assert_allclose(got.astype(jnp.float32), expected, rtol=2**-8, atol=1e-4)


def test_offsets_and_hostile_sizes_give_what_one_device_gives() -> None:
    x, kernel, *_ = operands()
    x, mesh, largest = jnp.nan_to_num(x), make_mesh(AXES), np.iinfo(np.int32).max

    @jax.jit
    def multiply(x: jax.Array, kernel: jax.Array, sizes: jax.Array, offset: int) -> jax.Array:
        return jg.ragged_dot(x, kernel, sizes, group_offset=offset, precision="highest")

    # An offset counts from the first kernel of all.
    more_sizes = np.concatenate([SIZES, SIZES // 9])
    calls: list[Any] = [((DATA, P("model")), more_sizes, offset) for offset in (-3, 1, 2, 9)]
    hostile = [largest, 1, largest, 5], [-7, 30, np.iinfo(np.int32).min, largest], [0, 0, 0, 0]
    calls += [((BOTH, WHOLE), sizes, 0) for sizes in hostile]
    for (x_spec, kernel_spec), sizes, offset in calls:
        got = multiply(put(mesh, x, x_spec), put(mesh, kernel, kernel_spec), np.int32(sizes), offset)
        expected = multiply(x, kernel, np.int32(sizes), offset)
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5, err_msg=f"{sizes} from {offset}")


def test_what_cannot_be_divided_evenly_is_gathered() -> None:
    mesh = make_mesh(AXES)
    x, kernel, *_ = operands()

    def uneven(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return product(jax.lax.with_sharding_constraint(x[:63], NamedSharding(mesh, P("data"))), kernel)

    run(mesh, uneven, (WHOLE, WHOLE), (x, kernel))
    # Parts of 96 features do not consist of blocks of 128, and would have other scales.
    compiled, _ = check_step(mesh, "block", CASES["features in"].operands, features=192)
    assert "all-gather" in collectives(compiled)


def test_transformed_programs_are_split_too() -> None:
    x, kernel, *_ = operands()
    x = jnp.nan_to_num(x)

    def loss(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(product(x, kernel)))

    def repeated(x: jax.Array, kernel: jax.Array) -> jax.Array:
        # The sum over devices has another order, so the carry has another rounding. As a mean it stays near 0.5 and its
        # rounding below 1e-7. As a sum of 1536 sines, it would make arguments of up to 685 that are off by 5e-4.
        def step(mean: jax.Array, _: None) -> tuple[jax.Array, None]:
            return mean + jax.jit(jax.checkpoint(loss))(x * mean, kernel) / (TOKENS * OUT), None

        return TOKENS * OUT * jax.lax.scan(step, jnp.float32(0.5), length=2)[0]

    def both(x: jax.Array, kernel: jax.Array) -> Any:
        second_order = jax.grad(lambda *arrays: jnp.sum(jax.grad(loss, argnums=1)(*arrays) ** 2), argnums=(0, 1))
        return second_order(x, kernel), jax.grad(repeated, argnums=(0, 1))(x, kernel)

    for kind in TYPES:
        _, collected = run(typed_mesh(kind, AXES), both, (P("data"), WHOLE), (x, kernel))
        assert {*collected} == {"all-reduce"}


def test_sharded_arrays_are_multiplied_without_jit_and_on_meshes_that_are_set_or_differ() -> None:
    mesh, (x, kernel, *_) = make_mesh(AXES), operands()
    with jax.disable_jit():
        without_jit = product(put(mesh, x, P("data")), kernel)
    typed = product(put(typed_mesh("explicit", AXES), x, P("data")), kernel)
    assert jax.typeof(typed).sharding.spec == P("data", None)
    two_meshes = put(make_mesh({"data": 4}), x, P("data")), put(make_mesh({"rows": 2, "columns": 2}), kernel, P("rows"))
    with jax.set_mesh(mesh):
        compiled = jax.jit(product, in_shardings=(NamedSharding(mesh, P("data")), None)).lower(x, kernel).compile()
        jaxpr = jax.make_jaxpr(product)(x, kernel)
    assert not collectives(compiled)
    # A jaxpr runs without the mesh that was set for it.
    (from_jaxpr,) = jax.core.eval_jaxpr(jaxpr.jaxpr, jaxpr.consts, x, kernel)

    expected = product(x, kernel)
    for result in (without_jit, typed, jax.jit(product)(*two_meshes), from_jaxpr):
        np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-5)


def test_an_exported_program_is_whole_runs_and_has_only_published_custom_calls() -> None:
    mesh = make_mesh(AXES)
    x, kernel, *_ = operands()
    arguments = put(mesh, x, P("data")), put(mesh, kernel, WHOLE)
    checks = [export.DisabledSafetyCheck.custom_call(name) for name in jg.CUSTOM_CALL_TARGETS]

    result = exported(product, *arguments)(*arguments)
    with jg.config.override(backend="auto"):  # Any machine lowers for GPUs.
        program = export.export(jax.jit(product), platforms=["cuda"], disabled_checks=checks)(*arguments)

    np.testing.assert_allclose(result, product(x, kernel), rtol=1e-5, atol=1e-5)
    assert program.nr_devices == mesh.size
    assert {*re.findall(r"custom_call @(\w+)", program.mlir_module())} == {"jax_grouped_gemm"}


def test_no_derivative_is_named_with_a_mesh_too() -> None:
    x, kernel, *_ = operands()
    x = put(make_mesh(AXES), jnp.nan_to_num(x), P("data"))

    def accumulated(kernel: jax.Array) -> jax.Array:
        """Returns a gradient that was added to an accumulator, which has no further derivative."""
        dense = functools.partial(jg.grouped_dense, dkernel_accumulator=jnp.zeros_like(kernel), precision="highest")
        return jnp.sum(jax.grad(lambda kernel: jnp.sum(jnp.sin(dense(x, kernel, SIZES))))(kernel))

    with pytest.raises(NotImplementedError, match="has no derivative of its own: ragged_dot and grouped_dense"):
        jax.grad(accumulated)(kernel)


@pytest.mark.parametrize(
    ("name", "dimension", "kind"),
    [
        ("block", "N", "explicit"),
        ("delayed", "K", "auto"),
        ("delayed", "E", "explicit"),
        ("current", "E", "explicit"),
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


@pytest.mark.parametrize(("name", "case", "kind"), [("delayed", "tokens", "explicit"), ("current", "experts", "auto")])
def test_products_of_cached_kernels_gather_no_weights_and_add_to_an_accumulator(
    name: str, case: str, kind: str
) -> None:
    recipe, state = RECIPES[name][0], initial_state(name)
    kernel, accumulator = operands_of_fp8()[1], jnp.full((GROUPS, 256, 512), 10.0)
    cache = jg.quantize_kernel(kernel, recipe, scale=None if state is None else state.scales(recipe).kernel)
    specs, (out, *_), _ = CASES[case]
    cache_spec, out = P("model") if case == "experts" else WHOLE, out if kind == "explicit" else None

    compiled, _ = check_step(
        typed_mesh(kind, AXES), name, specs, accumulator, cache, cache_spec=cache_spec, out_sharding=out
    )

    assert {*collectives(compiled)} == {"all-reduce"}


def test_a_batch_in_fp8_is_split() -> None:
    mesh = make_mesh(AXES)
    recipe, bound = RECIPES["delayed"]
    state = jax.tree.map(lambda leaf: jnp.stack([leaf] * 2), initial_state("delayed"))
    arrays = [jnp.stack([array, 0.5 * array]) for array in operands_of_fp8()]
    step = jax.jit(jax.vmap(functools.partial(step_in_fp8, recipe)))
    specs = P("data", "model"), DATA, DATA, P("data", "model")
    sharded = [put(mesh, array, spec) for array, spec in zip(arrays, specs, strict=True)]

    compiled = step.lower(*sharded, state).compile()

    assert {*collectives(compiled)} == {"all-reduce"}
    assert_close(compiled(*sharded, state), step(*arrays, state), bound)


def test_the_result_of_sharded_types_is_inferred_or_asked_for() -> None:
    mesh = typed_mesh("explicit", AXES)
    x, kernel, *_ = operands()

    def multiply(x_spec: P, kernel_spec: P, **out: Any) -> Any:
        arguments = put(mesh, x, x_spec), put(mesh, kernel, kernel_spec)
        return jax.jit(lambda *operands: jg.ragged_dot(*operands, SIZES, precision="highest", **out))(*arguments)

    assert jax.typeof(multiply(P("data"), OUT_OF_KERNEL)).sharding.spec == P("data", "model")
    assert jax.typeof(multiply(WHOLE, WHOLE, out_sharding=P("data"))).sharding.spec == P("data", None)
    expected = product(x, kernel)
    for specs, out in (
        ((LAST, LAST), P("data")),
        ((P("data"), P("data")), P(None, "model")),
        ((P("data"), P(None, "data")), P("data", "model")),
        ((WHOLE, P("model")), WHOLE),
    ):
        with pytest.raises(ValueError, match=r"ambiguous how the output should be sharded.*`out_sharding`"):
            multiply(*specs)
        y = multiply(*specs, out_sharding=NamedSharding(mesh, out) if out == WHOLE else out)
        assert y.sharding.is_equivalent_to(NamedSharding(mesh, out), 2)
        np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)


def test_a_sharding_that_is_not_there_is_refused() -> None:
    x, kernel, *_ = operands()
    numbers = jax.lax.RaggedDotDimensionNumbers((([1], [1]), ([], [])), [0], [0])
    for kind in (None, *TYPES):
        tokens = x if kind is None else put(typed_mesh(kind, AXES), x, P("data"))
        once = f"out_sharding may name each of the mesh axes {[] if kind is None else [*AXES]} once, got "
        refused = {
            "data": "out_sharding must be a NamedSharding, a PartitionSpec or None, got 'data'.",
            P(None, "experts"): f"{once}'experts' in P(None, 'experts')",
            P("data", "data"): f"{once}'data' in P('data', 'data')",
        }
        functions = (
            functools.partial(jg.ragged_dot, tokens, kernel, SIZES),
            functools.partial(jg.ragged_dot_general, tokens, kernel, SIZES, numbers),
            functools.partial(jg.grouped_dense, tokens, kernel, SIZES),
            functools.partial(jg.moe.grouped_mlp, tokens, kernel, jnp.ones((GROUPS, OUT // 2, IN)), SIZES),
        )
        for (out, message), function in itertools.product(refused.items(), functions):
            with pytest.raises((TypeError, ValueError), match="^" + re.escape(message)):
                function(out_sharding=out)


def test_a_result_in_fp8_is_sharded_as_asked_for_even_if_no_operand_is() -> None:
    mesh = typed_mesh("explicit", AXES)
    recipe, (x, kernel, *_) = RECIPES["block"][0], operands_of_fp8()
    cache = jg.quantize_kernel(kernel, recipe)

    _, (y, *_) = check_step(mesh, "block", (WHOLE, WHOLE, WHOLE, P("data")), None, cache, out_sharding=P("data"))

    assert jax.typeof(y).sharding.spec == P("data", None)

    def mlp(x: jax.Array, kernel: jax.Array, out: P | None = DATA) -> jax.Array:
        return jg.moe.grouped_mlp(x, kernel, kernel[:, :, :256], SIZES, recipe=recipe, out_sharding=out)

    y = jax.jit(mlp)(*put(mesh, (x, kernel), WHOLE))
    assert jax.typeof(y).sharding.spec == P("data", None)
    assert_close(y, jax.jit(functools.partial(mlp, out=None))(x, kernel), 0.02)
    with jax.set_mesh(mesh):  # of arrays that are not on it yet
        (y,) = jax.jit(mlp).trace(x, kernel).jaxpr.out_avals
    assert y.sharding.spec == P("data", None)


@pytest.mark.parametrize(
    ("lhs", "rhs", "dims", "out"),
    [
        (((8, 4), P("data")), ((2, 6, 4), P(None, "model")), ((([1], [2]), ([], [])), [0], [0]), None),
        (((8, 4), P("data")), ((8, 6), P("data")), ((([0], [0]), ([], [])), [0], []), P(None, "model")),
        (((3, 8, 4), P(None, "data")), ((3, 2, 4, 6), WHOLE), ((([2], [2]), ([0], [0])), [1], [1]), P(None, "data")),
        (((2, 8, 4), P("data")), ((2, 4, 6), P("data")), ((([2], [1]), ([0], [0])), [0], []), P("data")),
    ],
    ids=["dgrad", "wgrad", "batch", "ragged batch"],
)
def test_dimension_numbers_of_sharded_types(lhs: Any, rhs: Any, dims: Any, out: P | None) -> None:
    mesh = typed_mesh("explicit", AXES)
    arrays = [normal(len(shape), shape) for shape, _ in (lhs, rhs)]
    sharded = [put(mesh, array, spec) for array, (_, spec) in zip(arrays, (lhs, rhs), strict=True)]

    def step(out: NamedSharding | None, *operands: jax.Array) -> Any:
        numbers = jax.lax.RaggedDotDimensionNumbers(*dims)

        def loss(*operands: jax.Array) -> Any:
            y = jg.ragged_dot_general(*operands, jnp.array([3, 4]), numbers, precision="highest", out_sharding=out)
            return jnp.sum(jnp.sin(y)), y

        return jax.grad(loss, argnums=(0, 1), has_aux=True)(*operands)

    results = jax.jit(functools.partial(step, None if out is None else NamedSharding(mesh, out)))(*sharded)

    assert_close(jax.tree.leaves(results), jax.tree.leaves(jax.jit(functools.partial(step, None))(*arrays)), 1e-5)
    y = results[1]
    assert y.sharding.is_equivalent_to(NamedSharding(mesh, P("data", "model") if out is None else out), y.ndim)


# Sizes of an MLP. With fewer tokens, XLA prefers to gather the tokens where weights are stored over the tokens' axis.
E, T, K, F, N = 4, 256, 32, 256, 48
KERNELS = [(E, K, 2 * F), (E, F, N)]
TOKENS_AND_EXPERTS = [(T // 2, 2 * F), (T // 2, N), (T // 2, F), (T // 2, K), (E // 2, K, 2 * F), (E // 2, F, N)]
BY_EXPERTS, BY_FEATURES = (DATA, P("model"), P("model")), (WHOLE, OUT_OF_KERNEL, LAST)
STORED = DATA, P(None, "data"), P(None, None, "data")
#: Maxima of the tokens and of the result's gradient of each product are combined. A device has its kernels whole.
MAXIMA = 4 * [(E // 2,)]


@pytest.mark.parametrize(
    ("kind", "name", "specs", "expected"),
    [
        ("explicit", None, BY_EXPERTS, {"all-reduce": TOKENS_AND_EXPERTS}),
        ("auto", "delayed", BY_EXPERTS, {"all-reduce": TOKENS_AND_EXPERTS + MAXIMA}),
        ("explicit", "block", BY_FEATURES, {"all-reduce": [(T, N), (T, K)]}),
        (
            "explicit",
            "block",
            STORED,
            {"all-gather": KERNELS, "reduce-scatter": [(E, K // 2, 2 * F), (E, F, N // 2)]},
        ),
    ],
    ids=["experts", "experts, delayed", "features", "stored in parts"],
)
def test_an_mlp_sends_only_what_its_products_need(
    kind: str, name: str | None, specs: tuple[P, P, P], expected: dict[str, list[tuple[int, ...]]]
) -> None:
    mesh, (recipe, bound), sizes = typed_mesh(kind, AXES), RECIPES[name], np.array([81, 0, 77, 53])
    state = jg.Fp8State.initial(recipe, E) if isinstance(recipe, jg.DelayedScaling) else None
    rng = np.random.default_rng(0)
    shapes = (T, K), (E, K, 2 * F), (E, F, N), (T, N)
    arrays = [rng.standard_normal(shape, np.float32) for shape in shapes]
    arrays[0][sizes.sum() :] = np.nan

    def step(out: P | None, states: Any, *arrays: jax.Array) -> Any:
        def result(x: jax.Array, gate_up: jax.Array, down: jax.Array, states: Any) -> jax.Array:
            up, down = (
                jg.moe.Weights(kernel, fp8_state=state) for kernel, state in zip((gate_up, down), states, strict=True)
            )
            options = dict(recipe=recipe, precision="highest" if recipe is None else None, out_sharding=out)
            return jg.moe.grouped_mlp(x, up, down, sizes, **options)

        *inputs, dy = arrays
        y, pull_back = jax.vjp(result, *inputs, states)
        return y, *pull_back(dy)

    tokens, *kernels = specs
    placed = [put(mesh, *pair) for pair in zip(arrays, (*specs, tokens), strict=True)]
    placed_states = put(mesh, (state, state), P(*kernels[0][:1]))
    results = [NamedSharding(mesh, spec) for spec in (tokens, *specs)]
    on_mesh = jax.jit(functools.partial(step, tokens), out_shardings=(*results, None))
    compiled = on_mesh.lower(placed_states, *placed).compile()

    got, listed = sent(compiled), Counter((kind, shape, "f32") for kind, some in expected.items() for shape in some)
    # Halves of a gate are exchanged, and not gathered.
    exchanged = {"collective-permute", "all-to-all"} if specs == BY_FEATURES else set()
    assert got >= listed
    assert {part.kind for part in got - listed} == exchanged
    on_one = jax.jit(functools.partial(step, None))
    assert_close(compiled(placed_states, *placed), on_one((state, state), *arrays), bound)


def test_features_that_halves_do_not_divide_are_gathered() -> None:
    mesh = typed_mesh("explicit", {"model": 4})
    arrays = jnp.ones((8, 16)), jnp.ones((2, 16, 12)), jnp.ones((2, 6, 16))
    placed = [put(mesh, *pair) for pair in zip(arrays, (P(), OUT_OF_KERNEL, P()), strict=True)]

    got = jax.jit(jg.moe.grouped_mlp)(*placed, jnp.array([3, 4]))

    np.testing.assert_allclose(got, jg.moe.grouped_mlp(*arrays, jnp.array([3, 4])), rtol=1e-6)
