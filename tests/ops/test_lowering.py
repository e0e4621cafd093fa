"""Programs for a GPU, lowered on whatever machine runs the tests."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_grouped as jg
from jax_grouped.kernels import primitive, rows
from tests.programs import custom_calls, lowered, products, struct


def loss(x: jax.Array, kernel: jax.Array, bias: jax.Array, sizes: jax.Array) -> jax.Array:
    return jg.grouped_dense(x, kernel, sizes, bias).astype(jnp.float32).sum()


X, KERNEL, BIAS, SIZES = struct((32, 16)), struct((4, 16, 24)), struct((4, 24)), struct((4,), jnp.int32)

IN_FLOAT32 = struct((32, 16), jnp.float32), struct((4, 16, 24), jnp.float32), SIZES


def test_forward_is_one_custom_call() -> None:
    calls = custom_calls(lowered(jg.ragged_dot, X, KERNEL, SIZES))
    assert len(calls) == 1
    assert products(calls[0]) == ["fprop"]
    assert "has_side_effect" not in calls[0]


def test_backward_is_one_custom_call_per_gradient() -> None:
    text = lowered(jax.grad(loss, argnums=(0, 1, 2)), X, KERNEL, BIAS, SIZES)
    assert sorted(products(text)) == ["dgrad", "wgrad"], "the forward product is needed by no gradient"
    assert text.count("@jax_grouped_bias_grad") == 1


@pytest.mark.parametrize(("argnum", "product"), [(0, "dgrad"), (1, "wgrad")])
def test_gradients_that_nobody_asks_for_are_not_computed(argnum: int, product: str) -> None:
    text = lowered(jax.grad(loss, argnums=argnum), X, KERNEL, BIAS, SIZES)
    assert products(text) == [product]
    assert "@jax_grouped_bias_grad" not in text


def test_master_weights_get_their_gradient_straight_from_the_matmul() -> None:
    text = lowered(jax.grad(loss, argnums=1), X, struct((4, 16, 24), jnp.float32), BIAS, SIZES)
    (call,) = custom_calls(text)
    assert "-> (tensor<4x16x24xf32>" in call
    name = call.split(":")[0].strip()
    assert f"return {name}#0" in text, "no cast or other operation may follow the matmul"


@pytest.mark.parametrize(("precision", "count"), [(None, 3), ("high", 3), ("highest", 6)])
def test_float32_is_a_sum_of_bfloat16_products(precision: str | None, count: int) -> None:
    text = lowered(functools.partial(jg.ragged_dot, precision=precision), *IN_FLOAT32)
    calls = custom_calls(text)
    assert len(calls) == count
    assert all("tensor<32x16xbf16>" in call and "tensor<32x24xf32>" in call for call in calls)
    assert sum("output_operand_alias" in call for call in calls) == count - 1
    # XLA may remove a plain conversion to bfloat16 and back, and the low parts with it.
    assert "stablehlo.reduce_precision" in text


def test_the_default_matmul_precision_of_jax_counts() -> None:
    for precision, count in {"float32": 6, "BF16_BF16_F32": 3, "TF32_TF32_F32_X3": 6}.items():
        with jax.default_matmul_precision(precision):
            assert len(custom_calls(lowered(jg.ragged_dot, *IN_FLOAT32))) == count


def test_no_preset_as_the_default_matters_without_float32() -> None:
    def gradients(recipe: Any, dtype: Any, x: jax.Array, kernel: jax.Array, sizes: jax.Array) -> Any:
        def loss(x: jax.Array, kernel: jax.Array) -> jax.Array:
            return jnp.sum(jg.grouped_dense(x.astype(dtype), kernel, sizes, recipe=recipe))

        return jax.grad(loss, argnums=(0, 1))(x, kernel)

    operands = struct((32, 16)), struct((4, 16, 32)), SIZES
    for recipe, dtype in ((None, jnp.bfloat16), (jg.Float8BlockScaling(), jnp.float32)):
        function = functools.partial(gradients, recipe, dtype)
        expected = lowered(function, *operands)
        for preset in [preset.name for preset in jax.lax.DotAlgorithmPreset][1:]:
            with jax.default_matmul_precision(preset):
                assert lowered(function, *operands) == expected, preset


def test_a_number_of_tokens_can_be_left_open() -> None:
    (tokens,) = export.symbolic_shape("tokens")
    x = jnp.ones((5, 16))
    exported = export.export(jax.jit(jg.ragged_dot), platforms=["cpu"])(
        struct((tokens, 16), jnp.float32), struct((4, 16, 24), jnp.float32), SIZES
    )
    arguments = (x, jnp.ones((4, 16, 24)), jnp.array([1, 0, 2, 1]))
    y = exported.call(*jax.device_put(arguments, jax.devices("cpu")[0]))
    np.testing.assert_array_equal(y[:, 0], [16, 16, 16, 16, 0])


def test_odd_features_are_padded_for_16_byte_rows() -> None:
    (call,) = custom_calls(lowered(jg.ragged_dot, struct((32, 13)), struct((4, 13, 3)), SIZES))
    assert "tensor<32x16xbf16>" in call
    assert "tensor<4x16x8xbf16>" in call


def test_shard_map_with_its_checks_on_reaches_the_custom_calls() -> None:
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    specs = (P("data"), P(), P(), P())
    sharded = jax.shard_map(jax.grad(loss, argnums=(1, 2)), mesh=mesh, in_specs=specs, out_specs=P())
    x = struct((16 * jax.device_count(), 16), jnp.float32)
    text = lowered(sharded, x, struct((4, 16, 24), jnp.float32), BIAS, SIZES)
    assert text.count("@jax_grouped_gemm") == 3
    assert text.count("@jax_grouped_bias_grad") == 1


@pytest.mark.parametrize("kernel_axis", [None, 0], ids=["one kernel", "a kernel each"])
def test_vmap_makes_more_groups_of_one_custom_call(kernel_axis: int | None) -> None:
    kernel = KERNEL if kernel_axis is None else struct((3, 4, 16, 24))
    dots = jax.vmap(jg.ragged_dot, (0, kernel_axis, 0))
    text = lowered(dots, struct((3, 32, 16)), kernel, struct((3, 4), jnp.int32))
    assert "stablehlo.while" not in text
    (call,) = custom_calls(text)
    kernels = 4 if kernel_axis is None else 12
    assert f"(tensor<96x16xbf16>, tensor<{kernels}x16x24xbf16>, tensor<12xi32>, tensor<3xi32>) -> " in call
    assert f"weight_batch = {kernels // 4} : i64" in call


def test_vmap_copies_no_kernel_for_the_gradients_either() -> None:
    def losses(x: jax.Array, kernel: jax.Array, bias: jax.Array, sizes: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(jax.vmap(jg.grouped_dense, (0, None, 0, None))(x, kernel, sizes, bias)))

    gradient = jax.value_and_grad(losses, argnums=(0, 1, 2))
    text = lowered(gradient, struct((3, 32, 16)), KERNEL, BIAS, struct((3, 4), jnp.int32))
    assert "stablehlo.while" not in text
    calls = custom_calls(text)
    batches = [(*products(call), *re.findall(r"weight_batch = (\d+) : i64", call)) for call in calls]
    assert sorted(batches) == [(), ("dgrad", "1"), ("fprop", "1"), ("wgrad", "3")]
    (bias_grad,) = [call for call in calls if "@jax_grouped_bias_grad" in call]
    assert "(tensor<96x24xbf16>, tensor<12xi32>, tensor<3xi32>) -> (tensor<12x24xf32>" in bias_grad


@pytest.mark.parametrize(
    ("outer", "inner", "weight_batch"), [(None, None, 1), (0, None, 2), (None, 0, 6), (0, 0, 6)], ids=str
)
def test_nested_vmaps_share_kernels_within_the_outer_batch(
    outer: int | None, inner: int | None, weight_batch: int
) -> None:
    dots = jax.vmap(jax.vmap(jg.ragged_dot, (0, inner, None)), (0, outer, None))
    batch = [size for size, axis in ((2, outer), (3, inner)) if axis is not None]
    (call,) = custom_calls(lowered(dots, struct((2, 3, 32, 16)), struct((*batch, 4, 16, 24)), SIZES))
    assert f"weight_batch = {weight_batch} : i64" in call
    assert f"(tensor<192x16xbf16>, tensor<{4 * weight_batch}x16x24xbf16>, tensor<24xi32>, tensor<6xi32>)" in call


def test_vmap_inside_shard_map_with_its_checks_on() -> None:
    def losses(x: jax.Array, kernel: jax.Array, bias: jax.Array, sizes: jax.Array) -> jax.Array:
        return jax.vmap(loss, (0, None, None, None))(x, kernel, bias, sizes).sum()

    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    specs = (P(None, "data"), P(), P(), P())
    sharded = jax.shard_map(jax.grad(losses, argnums=(1, 2)), mesh=mesh, in_specs=specs, out_specs=P())
    text = lowered(sharded, struct((3, 16 * jax.device_count(), 16)), KERNEL, BIAS, SIZES)
    matmul, bias_grad = sorted(custom_calls(text), key=lambda call: "bias_grad" in call)
    assert "(tensor<48x16xbf16>, tensor<48x24xbf16>, tensor<12xi32>, tensor<3xi32>)" in matmul
    assert "(tensor<48x24xbf16>, tensor<12xi32>, tensor<3xi32>)" in bias_grad


def test_batches_that_no_call_can_count_are_refused() -> None:
    dots = jax.vmap(jg.ragged_dot, (0, None, None))
    with pytest.raises(ValueError, match=r"makes one with 2147483648 rows .* use jax.vmap over fewer, or jax.lax.map"):
        jax.eval_shape(dots, struct((2**16, 2**15, 16)), KERNEL, SIZES)
    batch = primitive.MAX_BATCH + 1
    lowered(dots, struct((batch, 1, 16)), KERNEL, SIZES, platform="cpu")
    with pytest.raises(ValueError, match=f"over {batch} calls .* at most {batch - 1}: use jax.vmap over fewer"):
        lowered(dots, struct((batch, 1, 16)), KERNEL, SIZES)


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_a_batch_size_can_be_left_open(platform: str) -> None:
    (batch,) = export.symbolic_shape("batch")
    checks = [export.DisabledSafetyCheck.custom_call(name) for name in jg.CUSTOM_CALL_TARGETS]
    dots = jax.jit(jax.vmap(jg.ragged_dot, (0, None, 0)))
    exported = export.export(dots, platforms=[platform], disabled_checks=checks)(
        struct((batch, 5, 16), jnp.float32), struct((4, 16, 24), jnp.float32), struct((batch, 4), jnp.int32)
    )
    if platform == "cpu":
        arguments = jnp.ones((2, 5, 16)), jnp.ones((4, 16, 24)), jnp.array([[1, 0, 2, 1], [0, 0, 0, 5]])
        y = exported.call(*jax.device_put(arguments, jax.devices("cpu")[0]))
        np.testing.assert_array_equal(y[:, :, 0], [[16, 16, 16, 16, 0], [16] * 5])


def test_other_platforms_get_plain_xla() -> None:
    for platform in ("cpu", "tpu", "rocm"):
        text = lowered(jax.grad(loss, argnums=(0, 1, 2)), X, KERNEL, BIAS, SIZES, platform=platform)
        assert not custom_calls(text)


def test_the_xla_backend_can_be_chosen_for_a_gpu() -> None:
    # One function traced under both settings: neither may be served what the other left in a cache.
    for _ in range(2):
        assert len(custom_calls(lowered(jg.ragged_dot, X, KERNEL, SIZES))) == 1
        with jg.config.override(backend="xla"):
            assert not custom_calls(lowered(jg.ragged_dot, X, KERNEL, SIZES))


def test_one_export_serves_several_platforms() -> None:
    checks = [export.DisabledSafetyCheck.custom_call(name) for name in jg.CUSTOM_CALL_TARGETS]
    exported = export.export(jax.jit(loss), platforms=["cpu", "cuda"], disabled_checks=checks)(X, KERNEL, BIAS, SIZES)
    reloaded = export.deserialize(exported.serialize())
    args = (jnp.ones((32, 16), jnp.bfloat16), jnp.ones((4, 16, 24), jnp.bfloat16), jnp.ones((4, 24), jnp.bfloat16))
    sizes = jnp.array([3, 0, 9, 1])
    if jax.default_backend() == "cpu":
        assert float(reloaded.call(*args, sizes)) == 13 * 24 * 17


def test_exported_custom_calls_are_the_published_ones() -> None:
    def round_trip(x: jax.Array, sizes: jax.Array) -> jax.Array:
        return jg.grouped_dequantize(jg.grouped_quantize(x, sizes, jg.ScalingMode.TENSOR).rowwise)

    def fp8(x: jax.Array, sizes: jax.Array) -> jax.Array:
        return jg.grouped_dense(x, jnp.ones((4, 16, 16)), sizes, recipe=jg.Float8CurrentScaling())

    def layer(x: jax.Array, recipe: jg.Float8BlockScaling | None = None) -> jax.Array:
        gate_up, down = jnp.ones((4, 16, 32), x.dtype), jnp.ones((4, 16, 16), x.dtype)
        return jnp.sum(jg.moe.moe_mlp(x, x[:, :4], gate_up, down, router=jg.moe.Router(2), recipe=recipe)[0])

    text = lowered(jax.value_and_grad(loss, argnums=(0, 1, 2)), X, KERNEL, BIAS, SIZES)
    text += lowered(round_trip, X, SIZES) + lowered(fp8, X, SIZES) + lowered(jax.grad(layer), X)
    text += lowered(lambda x: layer(x, jg.Float8BlockScaling()), X)
    text += lowered(rows.sum_rows, X, struct((8, 2), jnp.int32))  # as a layer over several devices calls it
    assert set(re.findall(r"stablehlo.custom_call @(jax_grouped\w+)", text)) == set(jg.CUSTOM_CALL_TARGETS)
