"""`grouped_dense` in two halves of a backward pass, and gradients that are added to an accumulator by the matmul."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_grouped as jg
from tests.ops.dense_cases import BLOCK, CURRENT, DELAYED, SHAPE, SIZES, assert_close, operands, some_state
from tests.ops.quantize_cases import assert_same_trees, some
from tests.programs import custom_calls, lowered, products, struct
from tests.refusals import assert_refused

RECIPES = {"none": None, "block": BLOCK, "current": CURRENT, "delayed": DELAYED, "mxfp8": jg.MXFP8BlockScaling()}


def arguments(name: str) -> dict[str, Any]:
    x, kernel, bias, _ = (jnp.asarray(array) for array in operands())
    state = some_state() if name == "delayed" else None
    return dict(x=x, kernel=kernel, bias=bias, fp8_state=state)


def whole(recipe: Any, dy: jax.Array, at: dict[str, Any], **options: Any) -> tuple[Any, ...]:
    """Computes `y`, `dx`, `dkernel`, `dbias` and the next state by differentiation."""
    y, vjp = jax.vjp(lambda at: jg.grouped_dense(**at, group_sizes=SIZES, recipe=recipe, **options), at)
    (gradients,) = vjp(dy)
    return y, *(gradients[name] for name in ("x", "kernel", "bias", "fp8_state"))


def halves(recipe: Any, dy: jax.Array, at: dict[str, Any], **options: Any) -> tuple[Any, ...]:
    """Computes the same step by step."""
    accumulator = options.pop("dkernel_accumulator", None)
    y, residuals = jg.grouped_dense_fwd(**at, group_sizes=SIZES, recipe=recipe, **options)
    dx, pending = jg.grouped_dense_dgrad(residuals, dy)
    dkernel, dbias = jg.grouped_dense_wgrad(pending, dkernel_accumulator=accumulator)
    return y, dx, dkernel, dbias, pending.fp8_state


@pytest.mark.parametrize("names", [("none",), ("block", "current", "mxfp8"), ("delayed",)], ids=lambda names: names[0])
def test_the_halves_are_the_whole_bit_for_bit(backend: str, names: tuple[str, ...]) -> None:
    for name in some(backend, names, 0):
        at, dy = arguments(name), jnp.asarray(operands()[3])
        for options in some(backend, [{}, dict(group_offset=1), dict(preferred_element_type="float32")], 0):
            dy = dy.astype(options.get("preferred_element_type", dy.dtype))
            got, expected = (
                jax.jit(functools.partial(function, RECIPES[name], **options))(dy, at) for function in (halves, whole)
            )
            assert_same_trees(got, expected)
            assert all(np.any(np.asarray(array, np.float32)) for array in got[:4])


def test_what_waits_for_wgrad_is_fp8() -> None:
    def pending(dy: jax.Array, at: dict[str, Any]) -> Any:
        return jg.grouped_dense_dgrad(jg.grouped_dense_fwd(**at, group_sizes=SIZES, recipe=BLOCK)[1], dy)[1]

    waiting = jax.eval_shape(pending, jnp.asarray(operands()[3]), arguments("block"))
    large = [leaf.dtype for leaf in jax.tree.leaves(waiting) if leaf.size > 10_000]
    assert large == [jnp.float8_e4m3fn] * 2


@pytest.mark.parametrize("names", [("none",), ("block", "current", "mxfp8")], ids=lambda names: names[0])
def test_the_gradient_is_added_to_the_accumulator(backend: str, names: tuple[str, ...]) -> None:
    for name in some(backend, names, 0):
        at, dy = arguments(name), jnp.asarray(operands()[3])
        for dtype in some(backend, ["float32", "bfloat16"], len(names)):
            at["kernel"] = at["kernel"].astype(dtype)
            accumulator = jax.random.normal(jax.random.key(0), at["kernel"].shape).astype(dtype)
            pending = _pending(RECIPES[name], dy, at)
            plain, _ = jg.grouped_dense_wgrad(pending)
            got, _ = jg.grouped_dense_wgrad(pending, dkernel_accumulator=accumulator)
            assert got.dtype == dtype
            expected = plain.astype(jnp.float32) + accumulator.astype(jnp.float32)
            assert_close((got,), (expected,), 1e-5 if dtype == "float32" else 4e-3)
            assert_same_trees(_gradient(RECIPES[name], at["kernel"], at["x"], dy, accumulator), got)


@functools.partial(jax.jit, static_argnums=0)
def _pending(recipe: Any, dy: jax.Array, at: dict[str, Any]) -> Any:
    _, residuals = jg.grouped_dense_fwd(at["x"], at["kernel"], SIZES, recipe=recipe)
    return jg.grouped_dense_dgrad(residuals, dy)[1]


@functools.partial(jax.jit, static_argnums=0)
def _gradient(recipe: Any, kernel: jax.Array, x: jax.Array, dy: jax.Array, accumulator: jax.Array) -> jax.Array:
    """Returns the accumulator with the gradient of the kernel added, by differentiation."""
    options = dict(recipe=recipe, dkernel_accumulator=accumulator)
    return jax.vjp(lambda kernel: jg.grouped_dense(x, kernel, SIZES, **options), kernel)[1](dy)[0]


def test_accumulators_of_odd_features_and_other_types(backend: str) -> None:
    for x_dtype, kernel_dtype in (("bfloat16", "float32"), ("float32", "float32"), ("float16", "bfloat16")):
        x, dy = jnp.ones((6, 5), x_dtype), jnp.ones((6, 3), x_dtype)
        kernel, accumulator = jnp.ones((2, 5, 3), kernel_dtype), jnp.full((2, 5, 3), 0.5, kernel_dtype)

        def dense(kernel: jax.Array, x: jax.Array = x, accumulator: jax.Array = accumulator) -> jax.Array:
            return jg.grouped_dense(x, kernel, jnp.array([2, 4]), dkernel_accumulator=accumulator)

        (dkernel,) = jax.jit(lambda kernel, dy, dense=dense: jax.vjp(dense, kernel)[1](dy))(kernel, dy)
        assert dkernel.dtype == kernel_dtype
        np.testing.assert_array_equal(dkernel[:, 0, 0].astype(jnp.float32), [2.5, 4.5])


def test_sums_may_lie_elsewhere_than_their_accumulators(backend: str) -> None:
    # Results of a loop are parts of an array, which the accumulators are not.
    accumulators = jax.random.normal(jax.random.key(0), (2, SHAPE.num_groups, SHAPE.K, SHAPE.N))
    for name in some(backend, ["none", "block"], 0):
        at, dy = arguments(name), jnp.asarray(operands()[3])
        add = functools.partial(_gradient, RECIPES[name], at["kernel"], at["x"], dy)

        sums = jax.jit(lambda accumulators, add=add: jax.lax.map(add, accumulators))(accumulators)

        gradient = add(jnp.zeros_like(accumulators[0]))
        assert_close(tuple(sums), tuple(accumulator + gradient for accumulator in accumulators), 1e-5)


def test_microbatches_add_up_in_a_loop(backend: str) -> None:
    at = arguments("block")
    cache = jg.quantize_kernel(at["kernel"], BLOCK)
    zeros = jnp.zeros_like(at["kernel"])
    batches = [operands(seed) for seed in range(3)]
    xs, dys = (jnp.stack([jnp.asarray(batch[i]) for batch in batches]) for i in (0, 3))

    @jax.jit
    def total(kernel: jax.Array, xs: jax.Array, dys: jax.Array) -> jax.Array:
        return _accumulated(kernel, xs, dys, cache)

    parts = [_gradient(BLOCK, at["kernel"], x, dy, zeros) for x, dy in zip(xs, dys, strict=True)]
    assert_close((total(at["kernel"], xs, dys),), (parts[0] + parts[1] + parts[2],), 1e-5)


def _accumulated(kernel: jax.Array, xs: jax.Array, dys: jax.Array, cache: jg.KernelCache) -> jax.Array:
    """Returns the gradient of the kernel over all microbatches, carried from each to the next."""

    def microbatch(dkernel: jax.Array, batch: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        x, dy = batch
        options = dict(recipe=BLOCK, kernel_cache=cache, dkernel_accumulator=dkernel)
        _, vjp = jax.vjp(lambda kernel: jg.grouped_dense(x, kernel, SIZES, **options), kernel)
        return vjp(dy)[0], None

    return jax.lax.scan(microbatch, jnp.zeros_like(kernel), (xs, dys))[0]


KERNEL = struct((SHAPE.num_groups, SHAPE.K, SHAPE.N), jnp.float32)
X, DY = struct((SHAPE.tokens, SHAPE.K)), struct((SHAPE.tokens, SHAPE.N))


@pytest.mark.parametrize("name", ["none", "block"])
def test_the_accumulator_is_the_memory_of_the_gradient(name: str) -> None:
    text = lowered(functools.partial(_gradient, RECIPES[name]), KERNEL, X, DY, KERNEL)
    (call,) = [call for call in custom_calls(text) if products(call) == ["wgrad"]]
    operand = 4 if name == "none" else 6
    assert re.search(rf"output_tuple_indices = \[0\],\s*operand_index = {operand}", call), call
    assert f"return {call.split(':')[0].strip()}#0" in text, "nothing may follow the matmul"
    assert "stablehlo.add" not in text.split(call)[1]


@pytest.mark.gpu
def test_no_copy_of_the_gradient_is_made_in_a_loop() -> None:
    cache = jax.eval_shape(lambda kernel: jg.quantize_kernel(kernel, BLOCK), KERNEL)
    stacked = (struct((3, *x.shape), x.dtype) for x in (X, DY))
    text = jax.jit(_accumulated).lower(KERNEL, *stacked, cache).compile().as_text()
    shape = ",".join(map(str, KERNEL.shape))
    passes = [line for line in text.splitlines() if re.search(rf"= f32\[{shape}\]\S* (copy|add|fusion)\(", line)]
    # The carry's first value is created once, before the loop.
    assert not [line for line in passes if "broadcast" not in line], passes


@pytest.mark.gpu
def test_a_donated_accumulator_is_added_to_in_place() -> None:
    text = (
        jax.jit(functools.partial(_gradient, BLOCK), donate_argnums=3).lower(KERNEL, X, DY, KERNEL).compile().as_text()
    )
    shape = ",".join(map(str, KERNEL.shape))
    # The kernel is no parameter, because the gradient does not depend on it.
    assert "input_output_alias={ {}: (2, {}" in text, text[:500]
    assert not re.search(rf"= f32\[{shape}\]\S* (copy|add|fusion)\(", text), text


@pytest.mark.parametrize("varying", ["x", "sizes", "bias", "accumulator"])
def test_an_accumulator_needs_the_gradient_of_its_own_device(varying: str) -> None:
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices("cpu")[:2])

    def dense(kernel: jax.Array, x: jax.Array, sizes: jax.Array, bias: jax.Array, accumulator: jax.Array) -> jax.Array:
        return jg.grouped_dense(x, kernel, sizes, bias, dkernel_accumulator=accumulator)

    groups = SHAPE.num_groups
    at = dict(x=X, sizes=struct((groups,), "int32"), bias=struct((groups, SHAPE.N)), accumulator=KERNEL)
    at[varying] = struct((2 * at[varying].shape[0], *at[varying].shape[1:]), at[varying].dtype)
    specs = [P("data") if name == varying else P() for name in at]
    sharded = jax.shard_map(dense, mesh=mesh, in_specs=(P(), *specs), out_specs=P("data"))
    message = f"With dkernel_accumulator kernel {KERNEL.shape} must vary over the mesh axes ['data'] as others do"
    with pytest.raises(ValueError, match=re.escape(message)):
        jax.eval_shape(sharded, KERNEL, *at.values())


def test_wgrad_takes_a_float32_accumulator_for_a_kernel_of_16_bits(backend: str) -> None:
    at, dy = arguments("block"), jnp.asarray(operands()[3])
    kernel = at["kernel"].astype(jnp.bfloat16)
    accumulator = jnp.full(kernel.shape, 0.5, jnp.float32)
    for name in some(backend, ["none", "block"], 1):
        pending = _pending(RECIPES[name], dy, at | dict(kernel=kernel))
        plain = jg.grouped_dense_wgrad(pending, dkernel_accumulator=jnp.zeros_like(accumulator))[0]
        added = jg.grouped_dense_wgrad(pending, dkernel_accumulator=accumulator)[0]
        assert added.dtype == plain.dtype == jnp.float32
        assert_close((added,), (plain + 0.5,), 1e-6)
        assert_close((jg.grouped_dense_wgrad(pending)[0],), (plain,), 4e-3)


def test_what_does_not_fit_is_named() -> None:
    _, residuals = jg.grouped_dense_fwd(jnp.ones((6, 32)), jnp.ones((2, 32, 48)), jnp.array([2, 3]))
    _, pending = jg.grouped_dense_dgrad(residuals, jnp.ones((6, 48)))
    refused: dict[str, dict[str, Any]] = {
        "residuals must be those of grouped_dense_fwd": dict(residuals=(1, 2)),
        "dy must have the result's shape (6, 48), got (6, 32).": dict(dy=jnp.ones((6, 32))),
        "dy's type must be bfloat16, float16 or float32, got int32.": dict(dy=jnp.ones((6, 48), jnp.int32)),
    }
    assert_refused(jg.grouped_dense_dgrad, dict(residuals=residuals, dy=jnp.ones((6, 48))), refused)
    refused = {
        "pending must be that of grouped_dense_dgrad, got NoneType": dict(pending=None),
        "dkernel_accumulator must have the kernel's shape (2, 32, 48), got (3,).": dict(
            dkernel_accumulator=jnp.ones(3)
        ),
    }
    assert_refused(jg.grouped_dense_wgrad, dict(pending=pending), refused)
