"""Quantization in a program for a GPU, lowered on whatever machine runs the tests."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_grouped as jg
from jax_grouped import ScalingMode
from tests.programs import custom_calls, lowered, struct, types

X, SIZES, KERNEL = struct((300, 144)), struct((5,), jnp.int32), struct((3, 144, 272))


def quantize(x: jax.Array, sizes: jax.Array) -> jg.GroupedQuantized:
    return jg.grouped_quantize(x, sizes, ScalingMode.BLOCK_1D, columnwise=True, dbias=True)


def call_of(function: Any, *arguments: Any) -> str:
    """Returns the one custom call of the program."""
    (call,) = custom_calls(lowered(function, *arguments))
    return call


def test_both_orientations_and_dbias_come_from_one_custom_call() -> None:
    call = call_of(quantize, X, SIZES)
    assert "@jax_grouped_quantize(" in call
    assert "has_side_effect" not in call


def test_nothing_but_the_custom_call_touches_the_tokens() -> None:
    text = lowered(quantize, X, SIZES)
    assert all("custom_call" in line for line in text.splitlines() if "300x144x" in line and " = stablehlo" in line)


def test_a_kernel_is_quantized_in_one_custom_call() -> None:
    for recipe in (jg.Float8BlockScaling(), jg.Float8CurrentScaling(), jg.MXFP8BlockScaling()):
        call = call_of(lambda kernel, recipe=recipe: jg.quantize_kernel(kernel, recipe), KERNEL)
        assert "output_operand_alias<" not in call


def test_the_sizes_of_a_kernels_groups_are_a_constant_of_unequal_numbers() -> None:
    # XLA launches a kernel to fill in equal ones.
    text = lowered(lambda kernel: jg.quantize_kernel(kernel, jg.Float8BlockScaling()), KERNEL)
    assert "dense<[144, 144, 144, 0]> : tensor<4xi32>" in text


def test_a_kernel_with_a_previous_result_shares_the_memory_of_all_five_arrays() -> None:
    recipe = jg.Float8BlockScaling()

    def step(kernel: jax.Array, previous: jg.KernelCache, skip: jax.Array) -> jg.KernelCache:
        return jg.quantize_kernel(kernel, recipe, previous=previous, skip=skip)

    previous = jax.eval_shape(lambda kernel: jg.quantize_kernel(kernel, recipe), KERNEL)
    call = call_of(step, KERNEL, previous, struct((), jnp.bool_))
    aliases = re.findall(r"output_tuple_indices = \[(\d+)\], operand_index = (\d+)", call)
    operands, results = types(call)
    assert [int(result) for result, _ in aliases] == [0, 1, 2, 3, 4]
    assert [operands[int(operand)] for _, operand in aliases] == results[:5]


def test_donated_caches_are_updated_in_place() -> None:
    recipe = jg.Float8CurrentScaling()
    previous = jax.eval_shape(lambda kernel: jg.quantize_kernel(kernel, recipe), KERNEL)
    step = jax.jit(
        lambda kernel, previous, skip: jg.quantize_kernel(kernel, recipe, previous=previous, skip=skip),
        donate_argnums=1,
    )
    traced = step.trace(KERNEL, previous, struct((), jnp.bool_))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert len(re.findall(r"tf.aliasing_output = \d+", text)) == 5


@pytest.mark.parametrize("mode", list(ScalingMode), ids=lambda mode: mode.value)
def test_dequantize_is_one_custom_call(mode: ScalingMode) -> None:
    quantized = jax.eval_shape(lambda x, sizes: jg.grouped_quantize(x, sizes, mode, columnwise=True), X, SIZES)
    for copy in (quantized.rowwise, quantized.columnwise):
        call = call_of(lambda copy: jg.grouped_dequantize(copy, jnp.bfloat16), copy)
        assert "@jax_grouped_dequantize(" in call
        assert types(call)[1][0] == "300x144xbf16"


def test_other_platforms_get_plain_xla() -> None:
    def round_trip(x: jax.Array, sizes: jax.Array, kernel: jax.Array) -> tuple[jax.Array, jg.KernelCache]:
        return jg.grouped_dequantize(quantize(x, sizes).columnwise), jg.quantize_kernel(kernel, jg.Float8BlockScaling())

    for platform in ("cpu", "tpu", "rocm"):
        assert not custom_calls(lowered(round_trip, X, SIZES, KERNEL, platform=platform))


def test_the_xla_backend_can_be_chosen_for_a_gpu() -> None:
    for _ in range(2):
        assert len(custom_calls(lowered(quantize, X, SIZES))) == 1
        with jg.config.override(backend="xla"):
            assert not custom_calls(lowered(quantize, X, SIZES))


def test_arrays_without_elements_need_no_custom_call() -> None:
    assert not custom_calls(lowered(quantize, struct((0, 144)), SIZES))
    assert not custom_calls(lowered(quantize, X, struct((0,), jnp.int32)))


def test_shard_map_with_its_checks_on_reaches_the_custom_calls() -> None:
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    sharded = jax.shard_map(quantize, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"))
    call = call_of(sharded, struct((16 * jax.device_count(), 144)), SIZES)
    assert types(call)[0][0] == "16x144xbf16"


@pytest.mark.parametrize("sizes_axis", [None, 0], ids=["one list of sizes", "sizes of each"])
def test_vmap_makes_more_groups_of_one_custom_call(sizes_axis: int | None) -> None:
    sizes = SIZES if sizes_axis is None else struct((3, 5), jnp.int32)
    text = lowered(jax.vmap(quantize, (0, sizes_axis)), struct((3, 300, 144)), sizes)
    assert "stablehlo.while" not in text
    (call,) = custom_calls(text)
    operands, results = types(call)
    assert operands == ["900x144xbf16", "15xi32", "3xi32"]
    assert (results[0], results[4:6]) == ("900x144xf8E4M3FN", ["15xf32", "15x144xf32"])


def test_vmap_of_kernels_keeps_what_is_shared_with_previous_results() -> None:
    recipe = jg.Float8BlockScaling()

    def step(kernel: jax.Array, previous: jg.KernelCache, skip: jax.Array) -> jg.KernelCache:
        return jg.quantize_kernel(kernel, recipe, previous=previous, skip=skip)

    kernels = struct((2, 3, 144, 272))
    previous = jax.eval_shape(jax.vmap(lambda kernel: jg.quantize_kernel(kernel, recipe)), kernels)
    call = call_of(jax.vmap(step), kernels, previous, struct((2,), jnp.bool_))
    operands, results = types(call)
    assert operands[0] == "864x272xbf16"
    assert [operands[int(operand)] for operand in re.findall(r"operand_index = (\d+)", call)] == results[:5]


def test_vmap_of_dequantize_is_one_custom_call() -> None:
    quantized = jax.eval_shape(jax.vmap(quantize), struct((3, 300, 144)), struct((3, 5), jnp.int32))
    _, results = types(call_of(jax.vmap(jg.grouped_dequantize), quantized.columnwise))
    assert results[0] == "900x144xf32"
