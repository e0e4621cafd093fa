"""Quantization under JAX's transformations, which give the bytes of the plain call, and its programs for a GPU."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jax.sharding import PartitionSpec as P

import jax_grouped as jg
from jax_grouped import ScalingMode
from tests import quantize_oracle
from tests.exports import exported
from tests.meshes import data_mesh
from tests.operands import normal
from tests.ops.quantize_cases import MODES, assert_same_trees, some
from tests.programs import custom_calls, lowered, struct, types

TOKENS, FEATURES = 48, 32
SIZES = jnp.array([7, 0, 21, 1, 13])
BLOCK, CURRENT, MX = jg.Float8BlockScaling(), jg.Float8CurrentScaling(), jg.MXFP8BlockScaling()


def tokens(seed: int = 0) -> jax.Array:
    x = normal(seed, (TOKENS, FEATURES))
    return x.at[int(SIZES.sum()) :].set(jnp.nan).at[-1].set(jnp.finfo(x.dtype).max)


def kernels(seed: int = 0) -> jax.Array:
    return normal(seed, (4, 32, 48))


def quantize(x: jax.Array, sizes: jax.Array = SIZES, mode: ScalingMode = ScalingMode.BLOCK_1D) -> jg.GroupedQuantized:
    return jg.grouped_quantize(x, sizes, mode, columnwise=True, dbias=True)


def contents(quantized: jg.GroupedQuantized) -> tuple[jax.Array, ...]:
    """Returns all specified arrays: flat arrays end with unspecified bytes."""
    rowwise, columnwise = map(jg.grouped_dequantize, (quantized.rowwise, quantized.columnwise))
    return quantized.rowwise.data, rowwise, columnwise, quantized.amax, quantized.dbias


def update(kernel: jax.Array, previous: jg.KernelCache, skip: jax.Array) -> jg.KernelCache:
    return jg.quantize_kernel(kernel, BLOCK, previous=previous, skip=skip)


def test_transformed_functions_give_the_same_result(backend: str) -> None:
    x = tokens()
    for mode in some(backend, MODES, 1, count=2):
        with jax.debug_nans(True):  # NaN in the rows of no group is nothing to debug.
            got = jax.jit(lambda x, mode=mode: contents(quantize(x, mode=mode)))(x)
        expected = quantize_oracle.quantize(np.asarray(x), np.asarray(SIZES), mode)
        assert_same_trees(got[0], expected.rowwise.data)
        assert_same_trees(got[1:4], (expected.rowwise.dequantized, expected.columnwise.dequantized, expected.amax))
    with jax.disable_jit():
        assert_same_trees(contents(quantize(x, mode=mode)), got)


def test_gradients_pass_beside_what_is_quantized(backend: str) -> None:
    x = jnp.nan_to_num(tokens())

    def loss(x: jax.Array) -> jax.Array:
        return jnp.sum(x * jg.grouped_dequantize(quantize(jax.lax.stop_gradient(x)).columnwise))

    gradient = jax.grad(jax.checkpoint(loss))(x)
    np.testing.assert_array_equal(gradient, jg.grouped_dequantize(quantize(x).columnwise))


def test_quantized_arrays_are_carried_by_loops(backend: str) -> None:
    first, second = quantize(tokens(0)), quantize(tokens(1))

    def swap(pair: tuple[Any, Any], _: None) -> tuple[tuple[Any, Any], jax.Array]:
        return pair[::-1], jg.grouped_dequantize(pair[0].rowwise)

    got, seen = jax.jit(lambda pair: jax.lax.scan(swap, pair, None, length=3))((first, second))
    assert_same_trees(contents(got[0]), contents(second))
    assert_same_trees(list(seen), [jg.grouped_dequantize(q.rowwise) for q in (first, second, first)])
    # The layout is static: arrays of another one are another type of tree.
    assert jax.tree.structure(first) == jax.tree.structure(second)
    assert jax.tree.structure(first) != jax.tree.structure(quantize(tokens()[:, :16]))


def test_quantized_arrays_pass_between_shard_maps(backend: str) -> None:
    devices = min(4, jax.device_count())
    mesh = data_mesh(devices)
    sizes = jnp.tile(SIZES, devices)
    xs = jnp.concatenate([tokens(seed) for seed in range(devices)])
    split = jax.jit(jax.shard_map(quantize, mesh=mesh, in_specs=P("data"), out_specs=P("data")))
    read = jax.jit(jax.shard_map(contents, mesh=mesh, in_specs=P("data"), out_specs=P("data")))
    expected = [contents(quantize(tokens(seed))) for seed in range(devices)]
    assert_same_trees(read(split(xs, sizes)), jax.tree.map(lambda *parts: jnp.concatenate(parts), *expected))


def test_shard_map_quantizes_each_devices_kernels(backend: str) -> None:
    def step(kernel: jax.Array, skip: jax.Array) -> tuple[jg.KernelCache, ...]:
        first = jg.quantize_kernel(kernel, CURRENT)
        return first, jg.quantize_kernel(2 * kernel, CURRENT, previous=first, skip=skip)

    split = jax.jit(jax.shard_map(step, mesh=data_mesh(4), in_specs=(P("data"), P()), out_specs=P("data")))
    for skip, factor in ((True, 1), (False, 2)):
        first, second = split(kernels(), jnp.array(skip))
        # A shard's layout describes its own part only, so it differs from that of the whole.
        for got, kernel in ((first, kernels()), (second, factor * kernels())):
            assert_same_trees(jax.tree.leaves(got), jax.tree.leaves(jg.quantize_kernel(kernel, CURRENT)))


def test_exported_and_donating_updates_give_the_same_bytes(backend: str) -> None:
    leaves, structure = jax.tree.flatten(jg.quantize_kernel(kernels(0), BLOCK))

    def exportable(kernel: jax.Array, leaves: list[jax.Array], skip: jax.Array) -> list[jax.Array]:
        return jax.tree.leaves(update(kernel, jax.tree.unflatten(structure, leaves), skip))

    call = exported(exportable, kernels(1), leaves, jnp.array(True))
    donating = jax.jit(update, donate_argnums=1)
    for skip, seed in ((True, 0), (False, 1)):
        expected = jg.quantize_kernel(kernels(seed), BLOCK)
        assert_same_trees(call(kernels(1), leaves, jnp.array(skip)), jax.tree.leaves(expected))
        previous = jg.quantize_kernel(kernels(0), BLOCK)
        assert_same_trees(donating(kernels(1), previous, jnp.array(skip)), expected)
        assert previous.rowwise.data.is_deleted()


def test_a_number_of_tokens_can_be_left_open(backend: str) -> None:
    # The number of row blocks that groups need depends on whether there are more tokens than groups.
    (open_tokens,) = export.symbolic_shape("tokens", constraints=[f"tokens >= {len(SIZES)}"])
    for mode in some(backend, MODES, 1, count=2):
        x = jax.ShapeDtypeStruct((open_tokens, FEATURES), jnp.float32)
        call = exported(lambda x, sizes, mode=mode: contents(quantize(x, sizes, mode))[:4], x, SIZES)
        for count in (TOKENS, len(SIZES)):
            x = tokens()[:count]
            expected = quantize_oracle.quantize(np.asarray(x), np.asarray(SIZES), mode)
            rowwise, columnwise = expected.rowwise, expected.columnwise
            wanted = rowwise.data, rowwise.dequantized, columnwise.dequantized, expected.amax
            assert_same_trees(call(x, SIZES), wanted)


X, GROUPS, KERNEL, SKIP = struct((300, 144)), struct((5,), jnp.int32), struct((3, 144, 272)), struct((), jnp.bool_)


def the_call(function: Any, *arguments: Any) -> str:
    """Returns the one custom call of the program."""
    (call,) = custom_calls(lowered(function, *arguments))
    return call


def test_one_custom_call_makes_everything_and_nothing_else_touches_the_tokens() -> None:
    text = lowered(quantize, X, GROUPS)
    assert all("custom_call" in line for line in text.splitlines() if "300x144x" in line and " = stablehlo" in line)
    (call,) = custom_calls(text)
    assert "@jax_grouped_quantize(" in call
    assert "has_side_effect" not in call
    gathered = the_call(lambda x, sizes: jg.grouped_quantize(x, sizes, MODES[1], row_indices=sizes), X, GROUPS)
    assert re.findall(r"gathered = (\w+)", call + gathered) == ["false", "true"]
    mesh = data_mesh(jax.device_count())
    sharded = jax.shard_map(quantize, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"))
    call = the_call(sharded, struct((16 * jax.device_count(), 144)), GROUPS)
    assert types(call)[0][0] == "16x144xbf16"
    assert not custom_calls(lowered(quantize, struct((0, 144)), GROUPS))
    assert not custom_calls(lowered(quantize, X, struct((0,), jnp.int32)))
    with jg.config.override(backend="xla"):
        assert not custom_calls(lowered(quantize, X, GROUPS))


def test_dequantize_is_one_custom_call_of_gpus_only() -> None:
    for mode in MODES:
        quantized = jax.eval_shape(lambda x, sizes, mode=mode: quantize(x, sizes, mode), X, GROUPS)
        for copy in (quantized.rowwise, quantized.columnwise):
            call = the_call(lambda copy: jg.grouped_dequantize(copy, jnp.bfloat16), copy)
            assert "@jax_grouped_dequantize(" in call
            assert types(call)[1][0] == "300x144xbf16"

    def round_trip(x: jax.Array, sizes: jax.Array, kernel: jax.Array) -> tuple[Any, ...]:
        return *contents(quantize(x, sizes)), jg.quantize_kernel(kernel, BLOCK)

    for platform in ("cpu", "tpu", "rocm"):
        assert not custom_calls(lowered(round_trip, X, GROUPS, KERNEL, platform=platform))


def test_a_kernel_is_quantized_in_one_custom_call_into_the_memory_of_the_previous_result() -> None:
    for recipe in (BLOCK, CURRENT, MX):
        text = lowered(lambda kernel, recipe=recipe: jg.quantize_kernel(kernel, recipe), KERNEL)
        (call,) = custom_calls(text)
        assert "output_operand_alias<" not in call
        # XLA launches a kernel to fill in equal sizes, so there is one that differs.
        assert "dense<[144, 144, 144, 0]> : tensor<4xi32>" in text

    previous = jax.eval_shape(lambda kernel: jg.quantize_kernel(kernel, BLOCK), KERNEL)
    kernels, skips = struct((2, 3, 144, 272)), struct((2,), jnp.bool_)
    previous_batch = jax.eval_shape(jax.vmap(lambda kernel: jg.quantize_kernel(kernel, BLOCK)), kernels)
    plain, batch = (update, KERNEL, previous, SKIP), (jax.vmap(update), kernels, previous_batch, skips)
    for (function, *arguments), rows in ((plain, 432), (batch, 864)):
        call = the_call(function, *arguments)
        aliases = re.findall(r"output_tuple_indices = \[(\d+)\], operand_index = (\d+)", call)
        operands, results = types(call)
        assert operands[0] == f"{rows}x272xbf16"
        assert [int(result) for result, _ in aliases] == [0, 1, 2, 3, 4]
        assert [operands[int(operand)] for _, operand in aliases] == results[:5]
    text = jax.jit(update, donate_argnums=1).trace(*plain[1:]).lower(lowering_platforms=("cuda",)).as_text()
    assert len(re.findall(r"tf.aliasing_output = \d+", text)) == 5


def test_vmap_makes_more_groups_of_one_custom_call() -> None:
    for axis, sizes in ((None, GROUPS), (0, struct((3, 5), jnp.int32))):
        text = lowered(jax.vmap(quantize, (0, axis)), struct((3, 300, 144)), sizes)
        assert "stablehlo.while" not in text
        (call,) = custom_calls(text)
        operands, results = types(call)
        assert operands == ["900x144xbf16", "15xi32", "3xi32"]
        assert (results[0], results[4:6]) == ("900x144xf8E4M3FN", ["15xf32", "15x144xf32"])
    quantized = jax.eval_shape(jax.vmap(quantize), struct((3, 300, 144)), sizes)
    assert types(the_call(jax.vmap(jg.grouped_dequantize), quantized.columnwise))[1][0] == "900x144xf32"
