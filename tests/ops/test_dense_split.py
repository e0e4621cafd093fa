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
from tests.operands import normal
from tests.ops.dense_cases import BLOCK, CURRENT, DELAYED, SHAPE, SIZES, assert_close, operands, some_state
from tests.ops.quantize_cases import assert_same_trees, some
from tests.programs import custom_calls, lowered, products, struct

RECIPES = {"none": None, "block": BLOCK, "current": CURRENT, "delayed": DELAYED, "mxfp8": jg.MXFP8BlockScaling()}
KERNEL = struct((SHAPE.num_groups, SHAPE.K, SHAPE.N), jnp.float32)
X, DY = struct((SHAPE.tokens, SHAPE.K)), struct((SHAPE.tokens, SHAPE.N))


def differentiated(recipe: Any, dy: jax.Array, accumulator: jax.Array, at: Any, **options: Any) -> Any:
    """Computes `y`, `dx`, `dkernel`, `dbias` and the next state, and the accumulator with `dkernel` added."""

    def gradients(**more: Any) -> tuple[jax.Array, dict[str, Any]]:
        y, vjp = jax.vjp(lambda at: jg.grouped_dense(**at, group_sizes=SIZES, recipe=recipe, **options, **more), at)
        return y, vjp(dy)[0]

    y, plain = gradients()
    results = y, *(plain[name] for name in ("x", "kernel", "bias", "fp8_state"))
    return results, gradients(dkernel_accumulator=accumulator)[1]["kernel"]


def in_halves(recipe: Any, dy: jax.Array, accumulator: jax.Array, at: Any, **options: Any) -> Any:
    """Computes the same step by step, and the sum in float32 too."""
    y, residuals = jg.grouped_dense_fwd(**at, group_sizes=SIZES, recipe=recipe, **options)
    dx, pending = jg.grouped_dense_dgrad(residuals, dy)
    total, in_float32 = (
        jg.grouped_dense_wgrad(pending, dkernel_accumulator=accumulator.astype(dtype))[0]
        for dtype in (accumulator.dtype, jnp.float32)
    )
    return ((y, dx, *jg.grouped_dense_wgrad(pending), pending.fp8_state), total), in_float32


CHANGES: list[dict[str, Any]] = [{}, dict(kernel="bfloat16"), dict(preferred="float32"), dict(group_offset=1)]


@pytest.mark.parametrize("names", [("none",), ("block", "current", "mxfp8"), ("delayed",)], ids=lambda names: names[0])
def test_the_halves_are_the_whole_bit_for_bit_and_add_to_an_accumulator(backend: str, names: tuple[str, ...]) -> None:
    for name in some(backend, names, 0):
        for change in some(backend, CHANGES, list(RECIPES).index(name)):
            x, kernel, bias, dy = (jnp.asarray(array) for array in operands())
            kernel = kernel.astype(change.get("kernel", kernel.dtype))
            dy = dy.astype(change.get("preferred", dy.dtype))
            options = dict(preferred_element_type=change.get("preferred"), group_offset=change.get("group_offset"))
            at = dict(x=x, kernel=kernel, bias=bias, fp8_state=some_state() if name == "delayed" else None)
            accumulator = normal(0, kernel.shape).astype(kernel.dtype)

            (got, in_float32), expected = (
                jax.jit(functools.partial(function, RECIPES[name], **options))(dy, accumulator, at)
                for function in (in_halves, differentiated)
            )

            assert_same_trees(got, expected)
            (*results, _), total = got
            assert all(np.any(np.asarray(array, np.float32)) for array in results)
            assert total.dtype == kernel.dtype
            assert in_float32.dtype == jnp.float32
            tolerance = 1e-5 if kernel.dtype == jnp.float32 else 4e-3
            sums = results[2].astype(jnp.float32) + accumulator.astype(jnp.float32)
            assert_close((total, in_float32), (sums, sums), tolerance)


@functools.partial(jax.jit, static_argnums=0)
def add_gradient(recipe: Any, kernel: jax.Array, x: jax.Array, dy: jax.Array, accumulator: jax.Array) -> jax.Array:
    """Returns the accumulator with the gradient of the kernel added, by differentiation."""
    options = dict(recipe=recipe, dkernel_accumulator=accumulator)
    return jax.vjp(lambda kernel: jg.grouped_dense(x, kernel, SIZES, **options), kernel)[1](dy)[0]


def test_accumulators_with_odd_features_and_other_types(backend: str) -> None:
    types = [("bfloat16", "float32"), ("float16", "bfloat16"), ("float32", "float32")]
    for x_dtype, kernel_dtype in some(backend, types, 0, count=2):
        x, dy = jnp.ones((6, 5), x_dtype), jnp.ones((6, 3), x_dtype)
        kernel, accumulator = jnp.ones((2, 5, 3), kernel_dtype), jnp.full((2, 5, 3), 0.5, kernel_dtype)
        dense = functools.partial(jg.grouped_dense, group_sizes=jnp.array([2, 4]), dkernel_accumulator=accumulator)
        (dkernel,) = jax.vjp(functools.partial(dense, x), kernel)[1](dy)
        assert dkernel.dtype == kernel_dtype
        np.testing.assert_array_equal(dkernel[:, 0, 0].astype(jnp.float32), [2.5, 4.5])


def test_a_bias_may_be_a_list() -> None:
    y, residuals = jg.grouped_dense_fwd(jnp.ones((6, 5)), jnp.ones((2, 5, 3)), jnp.array([2, 4]), 2 * [[1.0, 2.0, 3.0]])
    _, pending = jg.grouped_dense_dgrad(residuals, y)
    np.testing.assert_array_equal(pending.dbias, [[12, 14, 16], [24, 28, 32]])


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["cuda"], indirect=True)
@pytest.mark.parametrize("recipe", [None, BLOCK], ids=["none", "block"])
def test_sums_may_lie_elsewhere_than_their_accumulators(backend: str, recipe: Any) -> None:
    # Results of a loop are parts of an array, which the accumulators are not.
    accumulators = normal(0, (2, *KERNEL.shape))
    x, kernel, _, dy = (jnp.asarray(array) for array in operands())
    add = functools.partial(add_gradient, recipe, kernel, x, dy)
    sums = jax.jit(lambda accumulators: jax.lax.map(add, accumulators))(accumulators)
    gradient = add(jnp.zeros_like(accumulators[0]))
    assert_close(tuple(sums), tuple(accumulator + gradient for accumulator in accumulators), 1e-5)


@jax.jit
def accumulated(kernel: jax.Array, xs: jax.Array, dys: jax.Array, cache: jg.KernelCache) -> jax.Array:
    """Returns the gradient of the kernel over all microbatches, carried from each to the next."""

    def microbatch(dkernel: jax.Array, batch: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        x, dy = batch
        options = dict(recipe=BLOCK, kernel_cache=cache, dkernel_accumulator=dkernel)
        _, vjp = jax.vjp(lambda kernel: jg.grouped_dense(x, kernel, SIZES, **options), kernel)
        return vjp(dy)[0], None

    return jax.lax.scan(microbatch, jnp.zeros_like(kernel), (xs, dys))[0]


def test_microbatches_add_up_in_a_loop(backend: str) -> None:
    batches = [operands(seed) for seed in range(3)]
    kernel = jnp.asarray(batches[0][1])
    xs, dys = (jnp.stack([jnp.asarray(batch[i]) for batch in batches]) for i in (0, 3))
    total = sum(add_gradient(BLOCK, kernel, x, dy, jnp.zeros_like(kernel)) for x, dy in zip(xs, dys, strict=True))
    assert_close((accumulated(kernel, xs, dys, jg.quantize_kernel(kernel, BLOCK)),), (total,), 1e-5)


def test_the_accumulator_is_the_memory_of_the_gradient() -> None:
    for recipe, operand in ((None, 4), (BLOCK, 6)):
        text = lowered(functools.partial(add_gradient, recipe), KERNEL, X, DY, KERNEL)
        (call,) = [call for call in custom_calls(text) if products(call) == ["wgrad"]]
        assert re.search(rf"output_tuple_indices = \[0\],\s*operand_index = {operand}", call), call
        assert f"return {call.split(':')[0].strip()}#0" in text, "nothing may follow the matmul"
        assert "stablehlo.add" not in text.split(call)[1]


@pytest.mark.gpu
def test_no_copy_of_the_gradient_is_made() -> None:
    pattern = rf"= f32\[{','.join(map(str, KERNEL.shape))}\]\S* (copy|add|fusion)\("
    cache = jax.eval_shape(lambda kernel: jg.quantize_kernel(kernel, BLOCK), KERNEL)
    stacked = (struct((3, *x.shape), x.dtype) for x in (X, DY))
    loop = accumulated.lower(KERNEL, *stacked, cache).compile().as_text()
    # The carry's first value is created once, before the loop.
    assert not [line for line in loop.splitlines() if re.search(pattern, line) and "broadcast" not in line], loop

    add = jax.jit(functools.partial(add_gradient, BLOCK), donate_argnums=3)
    donated = add.lower(KERNEL, X, DY, KERNEL).compile().as_text()
    # The kernel is no parameter, because the gradient does not depend on it.
    assert "input_output_alias={ {}: (2, {}" in donated, donated[:500]
    assert not re.search(pattern, donated), donated


def test_an_accumulator_needs_the_gradient_of_its_own_device() -> None:
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices("cpu")[:2])

    def dense(kernel: jax.Array, x: jax.Array, sizes: jax.Array, bias: jax.Array, accumulator: jax.Array) -> jax.Array:
        return jg.grouped_dense(x, kernel, sizes, bias, dkernel_accumulator=accumulator)

    groups = SHAPE.num_groups
    at = dict(x=X, sizes=struct((groups,), "int32"), bias=struct((groups, SHAPE.N)), accumulator=KERNEL)
    message = f"With dkernel_accumulator kernel {KERNEL.shape} must vary over the mesh axes ['data'] as others do"
    for varying, array in at.items():
        specs = [P("data") if name == varying else P() for name in at]
        sharded = jax.shard_map(dense, mesh=mesh, in_specs=(P(), *specs), out_specs=P("data"))
        given = at | {varying: struct((2 * array.shape[0], *array.shape[1:]), array.dtype)}
        with pytest.raises(ValueError, match=re.escape(message)):
            jax.eval_shape(sharded, KERNEL, *given.values())
