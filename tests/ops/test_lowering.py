"""Programs for a GPU, lowered on whatever machine runs the tests."""

import functools
import re
from collections.abc import Callable
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

BLOCK = jg.Float8BlockScaling()
X, KERNEL, BIAS, SIZES = struct((64, 32)), struct((4, 32, 48)), struct((4, 48)), struct((4,), jnp.int32)
MASTER = struct(KERNEL.shape, jnp.float32)
CACHE = jax.eval_shape(lambda kernel: jg.quantize_kernel(kernel, BLOCK), MASTER)
BOTH = "rowwise+columnwise"


def dense(x: Any, kernel: Any, bias: Any, sizes: Any, cache: Any = None) -> jax.Array:
    return jg.grouped_dense(x, kernel, sizes, bias, recipe=BLOCK, kernel_cache=cache)


def bf16_dense(x: Any, kernel: Any, bias: Any, sizes: Any) -> jax.Array:
    return jg.grouped_dense(x, kernel, sizes, bias)


def gradient(function: Callable[..., jax.Array], argnums: Any = (0, 1, 2), linear: bool = False) -> Callable[..., Any]:
    """Returns the gradient of a sum, which without `linear` depends on the result."""

    def loss(*arguments: Any) -> jax.Array:
        y = function(*arguments).astype(jnp.float32)
        return jnp.sum(y if linear else jnp.sin(y))

    return jax.grad(loss, argnums)


def summary(function: Callable[..., Any], *arguments: Any) -> list[str]:
    """Returns a word for every custom call of the lowered program, with its results."""
    words = []
    for call in custom_calls(lowered(function, *arguments)):
        if "@jax_grouped_quantize(" in call:
            makes = [name for name in ("rowwise", "columnwise", "dbias") if f" {name} = true" in call]
            stack = "stack_rows = 0 " not in call
            words.append(f"{'kernel' if stack else 'tokens'} {'+'.join(makes)}")
        else:
            words.append("".join(products(call)) or "bias_grad")
    return sorted(words)


def test_nothing_is_computed_that_nobody_asks_for() -> None:
    def with_own_cache(x: Any, kernel: Any, bias: Any, sizes: Any) -> jax.Array:
        return dense(x, kernel, bias, sizes, jg.quantize_kernel(kernel, BLOCK))

    quantized = [f"tokens {BOTH}", f"tokens {BOTH}+dbias"]
    for_kernel = ["fprop", "kernel columnwise", "tokens columnwise", f"tokens {BOTH}", "wgrad"]
    for function, cache, expected in (
        (bf16_dense, (), ["fprop"]),
        (gradient(bf16_dense), (), ["bias_grad", "dgrad", "fprop", "wgrad"]),
        (gradient(bf16_dense, linear=True), (), ["bias_grad", "dgrad", "wgrad"]),
        (gradient(bf16_dense, 0, linear=True), (), ["dgrad"]),
        (gradient(bf16_dense, 1, linear=True), (), ["wgrad"]),
        (dense, (), ["fprop", "kernel columnwise", "tokens rowwise"]),
        (dense, (CACHE,), ["fprop", "tokens rowwise"]),
        (gradient(dense), (), ["dgrad", "fprop", f"kernel {BOTH}", *quantized, "wgrad"]),
        (gradient(dense), (CACHE,), ["dgrad", "fprop", *quantized, "wgrad"]),
        (gradient(dense, 0), (), ["dgrad", "fprop", f"kernel {BOTH}", "tokens rowwise", "tokens rowwise"]),
        (gradient(dense, 1), (), for_kernel),
        (gradient(with_own_cache, 1), (), for_kernel),
        (gradient(dense, 2), (), ["fprop", "kernel columnwise", "tokens rowwise", "tokens rowwise+dbias"]),
    ):
        assert summary(function, X, MASTER, BIAS, SIZES, *cache) == expected


def test_a_result_that_nobody_differentiates_is_left_alone() -> None:
    @jax.custom_vjp
    def total(y: jax.Array) -> jax.Array:
        return jnp.sum(y)

    total.defvjp(lambda y: (total(y), None), lambda *_: (None,))
    derivative = jax.grad(lambda *arguments: total(dense(*arguments)), (0, 1, 2))
    assert not {"dgrad", "wgrad"} & set(summary(derivative, X, MASTER, BIAS, SIZES))


def test_master_weights_get_their_gradient_straight_from_the_matmul() -> None:
    for function in (bf16_dense, dense):
        text = lowered(gradient(function, 1), X, MASTER, BIAS, SIZES)
        (call,) = [call for call in custom_calls(text) if products(call) == ["wgrad"]]
        assert "-> (tensor<4x32x48xf32>" in call
        assert f"return {call.split(':')[0].strip()}#0" in text, "no cast or other operation may follow the matmul"


def test_microbatches_quantize_the_kernel_once() -> None:
    def step(xs: jax.Array, kernel: jax.Array, bias: jax.Array, sizes: jax.Array) -> jax.Array:
        cache = jg.quantize_kernel(kernel, BLOCK)

        def microbatch(total: jax.Array, x: jax.Array) -> tuple[jax.Array, None]:
            return total + gradient(dense, 1)(x, kernel, bias, sizes, cache), None

        return jax.lax.scan(microbatch, jnp.zeros(kernel.shape, kernel.dtype), xs)[0]

    before, loop = lowered(step, struct((3, *X.shape)), MASTER, BIAS, SIZES).split("stablehlo.while")
    (call,) = [call for call in custom_calls(before) if "stack_rows = 32 " in call]
    assert " rowwise = false" in call, "the one orientation that is read"
    assert "stack_rows = 32 " not in loop


def test_policies_choose_what_is_quantized_again_in_the_other_orientation() -> None:
    delayed = jg.DelayedScaling(amax_history_len=4)
    with_its_state = MASTER, jg.Fp8State.initial(delayed, KERNEL.shape[0])

    def delayed_dense(x: Any, kernel: Any, bias: Any, sizes: Any) -> jax.Array:
        return jg.grouped_dense(x, kernel[0], sizes, bias, recipe=delayed, fp8_state=kernel[1])

    both = [f"kernel {BOTH}"], [f"tokens {BOTH}"]
    again = ["kernel columnwise", "kernel rowwise"], ["tokens columnwise", "tokens rowwise"]
    for function, names, kernels, tokens in (
        (dense, jg.CHECKPOINT_NAMES, both[0], both[1]),
        (delayed_dense, jg.CHECKPOINT_NAMES, both[0], both[1]),
        (dense, ("jax_grouped_x",), again[0], both[1]),
        (dense, ("jax_grouped_kernel",), both[0], again[1]),
        (dense, (), again[0], again[1]),
    ):
        policy = jax.checkpoint_policies.save_only_these_names(*names)
        kernel = with_its_state if function is delayed_dense else MASTER
        words = summary(gradient(jax.checkpoint(function, policy=policy)), X, kernel, BIAS, SIZES)
        expected = ["dgrad", "fprop", *kernels, *tokens, f"tokens {BOTH}+dbias", "wgrad"]
        assert words == sorted(expected), names


def test_only_fp8_waits_for_the_backward_pass() -> None:
    def residuals(x: Any, kernel: Any, bias: Any, sizes: Any) -> Any:
        return jax.vjp(lambda *arguments: dense(*arguments, sizes), x, kernel, bias)[1]

    def pending(x: Any, kernel: Any, bias: Any, sizes: Any) -> Any:
        y, kept = jg.grouped_dense_fwd(x, kernel, sizes, bias, recipe=BLOCK)
        return jg.grouped_dense_dgrad(kept, y)[1]

    for function in (residuals, pending):
        kept = jax.tree.leaves(jax.eval_shape(function, X, MASTER, BIAS, SIZES))
        assert [leaf.dtype for leaf in kept if leaf.size > 2000] == [jnp.float8_e4m3fn] * 2


@pytest.mark.parametrize(
    ("precision", "default", "count"),
    [
        (None, None, 3),
        ("high", None, 3),
        (("default", "highest"), None, 6),
        (jax.lax.Precision.HIGHEST, None, 6),
        (None, "float32", 6),
        (None, "BF16_BF16_F32", 3),
    ],
)
def test_float32_is_a_sum_of_bfloat16_products(precision: Any, default: str | None, count: int) -> None:
    with jax.default_matmul_precision(default):
        text = lowered(functools.partial(jg.ragged_dot, precision=precision), struct(X.shape, "float32"), MASTER, SIZES)
    calls = custom_calls(text)
    assert len(calls) == count
    assert all("tensor<64x32xbf16>" in call and "tensor<64x48xf32>" in call for call in calls)
    assert sum("output_operand_alias" in call for call in calls) == count - 1
    # XLA may remove a plain conversion to bfloat16 and back, and the low parts with it.
    assert "stablehlo.reduce_precision" in text


def test_odd_features_are_padded_for_16_byte_rows() -> None:
    (call,) = custom_calls(lowered(jg.ragged_dot, struct((32, 13)), struct((4, 13, 3)), SIZES))
    assert "tensor<32x16xbf16>" in call
    assert "tensor<4x16x8xbf16>" in call


def test_vmap_copies_no_kernel_for_the_gradients_either() -> None:
    def loss(x: jax.Array, kernel: jax.Array, bias: jax.Array, sizes: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(jax.vmap(jg.grouped_dense, (0, None, 0, None))(x, kernel, sizes, bias)))

    text = lowered(jax.value_and_grad(loss, (0, 1, 2)), struct((3, 64, 32)), KERNEL, BIAS, struct((3, 4), jnp.int32))
    assert "stablehlo.while" not in text
    calls = custom_calls(text)
    batches = [(*products(call), *re.findall(r"weight_batch = (\d+) : i64", call)) for call in calls]
    assert sorted(batches) == [(), ("dgrad", "1"), ("fprop", "1"), ("wgrad", "3")]
    (bias_grad,) = [call for call in calls if "@jax_grouped_bias_grad" in call]
    assert "(tensor<192x48xbf16>, tensor<12xi32>, tensor<3xi32>) -> (tensor<12x48xf32>" in bias_grad


def test_nested_vmaps_share_kernels_within_the_outer_batch() -> None:
    for outer, inner, weight_batch in ((None, None, 1), (0, None, 2), (None, 0, 6), (0, 0, 6)):
        dots = jax.vmap(jax.vmap(jg.ragged_dot, (0, inner, None)), (0, outer, None))
        batch = [size for size, axis in ((2, outer), (3, inner)) if axis is not None]
        (call,) = custom_calls(lowered(dots, struct((2, 3, 64, 32)), struct((*batch, *KERNEL.shape)), SIZES))
        assert f"weight_batch = {weight_batch} : i64" in call
        kernels = f"tensor<{4 * weight_batch}x32x48xbf16>"
        assert f"(tensor<384x32xbf16>, {kernels}, tensor<24xi32>, tensor<6xi32>)" in call


def test_vmap_inside_shard_map_with_its_checks_on() -> None:
    def losses(x: jax.Array, kernel: jax.Array, bias: jax.Array, sizes: jax.Array) -> jax.Array:
        return jax.vmap(lambda x: bf16_dense(x, kernel, bias, sizes).astype(jnp.float32).sum())(x).sum()

    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    sharded = jax.shard_map(
        jax.grad(losses, argnums=(1, 2)), mesh=mesh, in_specs=(P(None, "data"), P(), P(), P()), out_specs=P()
    )
    for dtype, count in ((jnp.bfloat16, 1), (jnp.float32, 3)):
        x = struct((3, 16 * jax.device_count(), 32), dtype)
        text = lowered(sharded, x, struct(KERNEL.shape, dtype), struct(BIAS.shape, dtype), SIZES)
        matmuls, (bias_grad,) = (custom_calls(text, f"jax_grouped_{name}") for name in ("gemm", "bias_grad"))
        assert len(matmuls) == count
        assert all("(tensor<48x32xbf16>, tensor<48x48xbf16>, tensor<12xi32>, tensor<3xi32>" in call for call in matmuls)
        assert re.search(r"\(tensor<48x48x\w+>, tensor<12xi32>, tensor<3xi32>\)", bias_grad)


def test_batches_that_no_call_can_count_are_refused() -> None:
    dots = jax.vmap(jg.ragged_dot, (0, None, None))
    with pytest.raises(ValueError, match=r"makes one with 2147483648 rows .* use jax.vmap over fewer, or jax.lax.map"):
        jax.eval_shape(dots, struct((2**16, 2**15, 32)), KERNEL, SIZES)
    batch = primitive.MAX_BATCH + 1
    lowered(dots, struct((batch, 1, 32)), KERNEL, SIZES, platform="cpu")
    with pytest.raises(ValueError, match=f"over {batch} calls .* at most {batch - 1}: use jax.vmap over fewer"):
        lowered(dots, struct((batch, 1, 32)), KERNEL, SIZES)


def test_a_batch_of_tokens_is_routed_and_copied_by_one_call_each_unless_experts_are_too_many() -> None:
    def layer(x: Any, logits: Any) -> jax.Array:
        routing = jg.moe.top_k_routing(logits, jg.moe.Router(2))
        permutation = jg.moe.group_by_expert(routing.experts, logits.shape[1])
        return jg.moe.unpermute(jg.moe.permute(x, permutation), permutation, routing.weights)

    for experts, expected in ((8, ["group_pairs", "permute_rows", "route"]), (513, ["permute_rows"])):
        for function, batch in ((layer, ()), (jax.vmap(layer), (3,))):
            text = lowered(function, struct((*batch, 64, 32)), struct((*batch, 64, experts), jnp.float32))
            calls = re.findall(r"custom_call @jax_grouped_(\w+)", text)
            assert sorted(calls) == expected, (experts, batch)


def test_other_platforms_get_plain_xla_and_a_gpu_does_on_demand() -> None:
    for platform in ("cpu", "tpu", "rocm"):
        assert not custom_calls(lowered(gradient(bf16_dense), X, KERNEL, BIAS, SIZES, platform=platform))
    # One function traced under both settings: neither may be served what the other left in a cache.
    for _ in range(2):
        assert len(custom_calls(lowered(jg.ragged_dot, X, KERNEL, SIZES))) == 1
        with jg.config.override(backend="xla"):
            assert not custom_calls(lowered(jg.ragged_dot, X, KERNEL, SIZES))


def test_one_export_serves_several_platforms_and_any_batch_size() -> None:
    (batch,) = export.symbolic_shape("batch")
    checks = [export.DisabledSafetyCheck.custom_call(name) for name in jg.CUSTOM_CALL_TARGETS]
    dots = jax.jit(jax.vmap(jg.ragged_dot, (0, None, 0)))
    exported = export.export(dots, platforms=["cpu", "cuda"], disabled_checks=checks)(
        struct((batch, 5, 16), jnp.float32), struct((4, 16, 24), jnp.float32), struct((batch, 4), jnp.int32)
    )
    reloaded = export.deserialize(exported.serialize())
    if jax.default_backend() == "cpu":
        sizes = jnp.array([[1, 0, 2, 1], [0, 0, 0, 5]])
        y = reloaded.call(jnp.ones((2, 5, 16)), jnp.ones((4, 16, 24)), sizes)
        np.testing.assert_array_equal(y[:, :, 0], [[16, 16, 16, 16, 0], [16] * 5])


def test_exported_custom_calls_are_the_published_ones() -> None:
    def round_trip(x: jax.Array, sizes: jax.Array) -> jax.Array:
        return jg.grouped_dequantize(jg.grouped_quantize(x, sizes, jg.ScalingMode.TENSOR).rowwise)

    def layer(x: jax.Array, recipe: jg.Float8BlockScaling | None = None) -> jax.Array:
        gate_up, down = jnp.ones((4, 32, 64), x.dtype), jnp.ones((4, 32, 32), x.dtype)
        return jnp.sum(jg.moe.moe_mlp(x, x[:, :4], gate_up, down, router=jg.moe.Router(2), recipe=recipe)[0])

    text = lowered(gradient(bf16_dense), X, KERNEL, BIAS, SIZES) + lowered(round_trip, X, SIZES)
    text += lowered(jax.grad(layer), X) + lowered(lambda x: layer(x, BLOCK), X)
    text += lowered(rows.sum_rows, X, struct((8, 2), jnp.int32))  # as a layer over several devices calls it
    pushes = {"jax_grouped_push_rows", "jax_grouped_push_sums"}  # These need GPUs: tests/gpu/test_exchange.py has them.
    assert set(re.findall(r"stablehlo.custom_call @(jax_grouped\w+)", text)) | pushes == set(jg.CUSTOM_CALL_TARGETS)
