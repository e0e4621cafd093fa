"""Experts on several devices: both ways in which tokens reach them, against one device."""

import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jax_grouped as jg
from jax_grouped.moe.expert_parallel import ExchangeMethod, check_method, gathers
from tests.meshes import data_mesh

T, K, F, E, TOP_K = 32, 32, 16, 4, 2
DEVICES = 2
SPLIT = (P("data"),) * 4
LAYER = dict(top_k=TOP_K, precision="highest", activation="gelu_mul")


def arrays(dtype: Any = jnp.float32) -> list[jax.Array]:
    """Returns tokens, logits, and the kernels of all experts."""
    rng = np.random.default_rng(0)
    shapes = (T, K), (T, E), (E, K, 2 * F), (E, F, K)
    x, logits, gate_up, down = (jnp.asarray(rng.standard_normal(shape, np.float32)) for shape in shapes)
    return [x.astype(dtype), logits, gate_up.astype(dtype), down.astype(dtype)]


def on_devices(function: Any) -> Any:
    return jax.jit(jax.shard_map(function, mesh=data_mesh(DEVICES), in_specs=SPLIT, out_specs=P("data")))


@pytest.mark.parametrize("method", ["gather", "padded"])
def test_results_and_gradients_are_those_of_one_device(method: str) -> None:
    weights = jnp.cos(jnp.arange(K, dtype=jnp.float32))

    def loss(x: jax.Array, logits: jax.Array, *kernels: jax.Array, **options: Any) -> tuple[jax.Array, Any]:
        y, metrics = jg.moe.moe_mlp(x, logits, *kernels, shared=x, **LAYER, **options)
        return jnp.sum(y * weights), (y, metrics.expert_load)

    def gradients(*arrays: jax.Array, **options: Any) -> Any:
        return jax.grad(functools.partial(loss, **options), argnums=(0, 1, 2, 3), has_aux=True)(*arrays)

    split = on_devices(functools.partial(gradients, expert_axis="data", exchange_method=method))

    got, (y, load) = split(*arrays())

    expected, (expected_y, expected_load) = gradients(*arrays())
    for a, b in zip((y, *got), (expected_y, *expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-4)
    assert load.reshape(DEVICES, E).sum(axis=0).tolist() == expected_load.tolist()


@pytest.mark.parametrize("layer", ["grouped_dense", "grouped_mlp", "moe_mlp"])
def test_shard_map_outside_of_jit_gives_what_it_gives_inside(layer: str) -> None:
    def result(x: jax.Array, logits: jax.Array, gate_up: jax.Array, down: jax.Array) -> jax.Array:
        sizes, recipe = jnp.array([10, 6]), jg.Float8CurrentScaling()
        if layer == "grouped_dense":
            return jg.grouped_dense(x, gate_up, sizes, recipe=recipe)
        if layer == "grouped_mlp":
            return jg.moe.grouped_mlp(x, gate_up, down, sizes, recipe=recipe)
        return jg.moe.moe_mlp(x, logits, gate_up, down, top_k=TOP_K, expert_axis="data", recipe=recipe)[0]

    split = jax.shard_map(result, mesh=data_mesh(DEVICES), in_specs=SPLIT, out_specs=P("data"))

    np.testing.assert_allclose(split(*arrays()), jax.jit(split)(*arrays()), rtol=1e-6, atol=1e-6)


def test_debug_nans_finds_none_in_rows_of_no_expert() -> None:
    def residuals(x: jax.Array, *rest: jax.Array) -> Any:
        y, pull_back = jax.vjp(lambda x: jg.moe.moe_mlp(x, *rest, expert_axis="data", **LAYER)[0], x)
        return y, jax.tree.leaves(pull_back)

    def whole() -> Any:
        options = dict(mesh=data_mesh(DEVICES), in_specs=SPLIT, out_specs=P("data"), check_vma=False)
        return jax.jit(jax.shard_map(residuals, **options))(*arrays())

    if jax.default_backend() == "cpu":  # Elsewhere these rows may hold anything.
        assert any(jnp.isnan(x).any() for x in jax.tree.leaves(whole()) if x.dtype == jnp.float32)
    with jax.debug_nans(True):
        jax.block_until_ready(whole())


def test_parts_of_sums_are_added_in_float32() -> None:
    def result(*arrays: jax.Array, **options: Any) -> jax.Array:
        return jg.moe.moe_mlp(*arrays, **LAYER, **options)[0]

    exact = result(*arrays()).astype(jnp.bfloat16)
    got = on_devices(functools.partial(result, expert_axis="data", exchange_method="gather"))(*arrays(jnp.bfloat16))
    on_one = result(*arrays(jnp.bfloat16))

    def error(y: jax.Array) -> float:
        return float(jnp.linalg.norm((y - exact).astype(jnp.float32)))

    # A sum of two parts in bfloat16 would round a third time.
    assert error(got) < 1.3 * error(on_one)


def test_longest_groups_of_gathered_tokens_are_cut() -> None:
    x, logits, gate_up, down = arrays()
    logits = jnp.tile(jnp.array([2.0, 1.0, 0.0, -1.0]), (T, 1))  # all to the experts of the first device

    def result(*arrays: jax.Array, **options: Any) -> Any:
        y, metrics = jg.moe.moe_mlp(*arrays, **LAYER, **options)
        return y, metrics.dropped[None]

    split = functools.partial(result, expert_axis="data", capacity_factor=0.75, exchange_method="gather")

    y, dropped = on_devices(split)(x, logits, gate_up, down)

    # A device has capacity for 0.75 * T / 2 * 2 = 24 rows, 12 of each expert: those of the first device's tokens.
    assert dropped.tolist() == [2 * (T // 2 - 12), T]
    expected, _ = result(x, logits, gate_up, down)
    np.testing.assert_allclose(y[:12], expected[:12], rtol=1e-5, atol=1e-5)
    assert not y[12:].any()


def test_tokens_are_gathered_where_that_moves_fewer_rows() -> None:
    assert gathers("auto", devices=8, top_k=8)
    assert not gathers("auto", devices=16, top_k=8)
    assert gathers("gather", devices=16, top_k=8)
    assert not gathers("padded", devices=2, top_k=8)
    with pytest.raises(ValueError, match=r"exchange_method must be one of .*, got 'ring'"):
        check_method("ring")  # type: ignore[arg-type]


@pytest.mark.parametrize("method", ["gather", "padded"])
def test_products_expect_an_even_share_of_rows_whatever_their_capacity(method: str) -> None:
    def result(*arrays: jax.Array) -> jax.Array:
        return jg.moe.moe_mlp(*arrays, **LAYER, expert_axis="data", exchange_method=method)[0]

    program = str(jax.make_jaxpr(on_devices(result))(*arrays()))

    share = TOP_K * T // DEVICES
    assert program.count(f"expected_tokens={share}") == 2


def test_a_gather_sends_each_token_once_to_each_device() -> None:
    def gradient(*arrays: jax.Array) -> jax.Array:
        def loss(x: jax.Array) -> jax.Array:
            options = dict(expert_axis="data", exchange_method="gather", **LAYER)
            return jnp.sum(jg.moe.moe_mlp(x, *arrays[1:], **options)[0].astype(jnp.float32))

        return jax.grad(loss)(arrays[0])

    text = on_devices(gradient).lower(*arrays(jnp.bfloat16)).as_text()

    gathers = [line for line in text.splitlines() if "stablehlo.all_gather" in line]
    wide = [line for line in gathers if f"tensor<{T // DEVICES}x{K}xbf16>" in line]
    assert len(wide) == 2  # tokens and the gradient of the result
    assert "ragged_all_to_all" not in text


@pytest.mark.parametrize("method", ["gather", "padded", "ragged"])
def test_quantized_exchange_loses_nothing_that_fp8_keeps(method: ExchangeMethod) -> None:
    (y, dx, *dkernels), narrow_bytes = exchanged(method, quantized_exchange=True)
    (wide_y, wide_dx, *wide_dkernels), wide_bytes = exchanged(method, quantized_exchange=False)

    # Products of tokens quantize the same blocks again.
    np.testing.assert_array_equal(y, wide_y)
    np.testing.assert_array_equal(dx, wide_dx)
    for narrow, wide in zip(dkernels, wide_dkernels, strict=True):
        assert relative_error(narrow, wide) < 0.05
    # Sums return in bfloat16.
    assert narrow_bytes - wide_bytes / 2 < 0.53 * wide_bytes / 2


@pytest.mark.parametrize("method", ["gather", "padded", "ragged"])
def test_quantized_combine_rounds_what_returns(method: ExchangeMethod) -> None:
    (y, dx, *dkernels), narrow_bytes = exchanged(method, quantized_combine=True)
    wide_y, wide_dx, *wide_dkernels = exchanged(method)[0]
    _, wide_bytes = exchanged(method, quantized_exchange=False)

    # A float8_e4m3fn has three bits after the first: its largest error is 1/16, its root mean square about 1/40.
    for narrow, wide in ((y, wide_y), (dx, wide_dx)):
        assert 0.005 < relative_error(narrow, wide) < 0.04
    for narrow, wide in zip(dkernels, wide_dkernels, strict=True):
        np.testing.assert_array_equal(narrow, wide)
    assert narrow_bytes < 0.53 * wide_bytes


def exchanged(method: ExchangeMethod, **options: bool) -> tuple[list[jax.Array], int]:
    """Returns the result and gradients of a layer with block scaling, and the bytes that its devices send."""
    if method == "ragged" and jax.default_backend() == "cpu":
        # XLA implements ragged_all_to_all for GPUs alone, where this case runs.
        pytest.skip("XLA has no ragged exchange for CPUs")
    features = 256  # Two blocks.
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.standard_normal((T, features), np.float32) * 10.0 ** rng.uniform(-3, 3, (T, 1))).astype(
        "bfloat16"
    )
    gate_up, down = (
        jnp.asarray(rng.standard_normal(shape, np.float32)) for shape in ((E, features, 2 * F), (E, F, features))
    )
    inputs = x, arrays()[1], gate_up.astype(x.dtype), down.astype(x.dtype)

    def results(x: jax.Array, logits: jax.Array, *kernels: jax.Array) -> Any:
        def layer(x: jax.Array, *kernels: jax.Array) -> jax.Array:
            of_axis = dict(expert_axis="data", exchange_method=method)
            recipe = jg.Float8BlockScaling()
            return jg.moe.moe_mlp(x, logits, *kernels, top_k=TOP_K, recipe=recipe, **of_axis, **options)[0]

        y, pull = jax.vjp(layer, x, *kernels)
        # A gradient of the result that does not depend on how the result was rounded.
        return y, *pull(jnp.cos(x))

    step = on_devices(results)
    return [*step(*inputs)], sent_bytes(step.lower(*inputs).as_text())


def relative_error(got: jax.Array, expected: jax.Array) -> float:
    got, expected = (of.astype(jnp.float32) for of in (got, expected))
    return float(jnp.linalg.norm(got - expected) / jnp.linalg.norm(expected))


def sent_bytes(text: str) -> int:
    """Returns the bytes of tokens, sums and their gradients that a program's devices send."""
    found = re.findall(r"(?:all_gather|all_to_all)[\"(].*-> tensor<((?:\d+x)+)(ui8|i32|f32|bf16)>", text)
    size = {"ui8": 1, "bf16": 2, "f32": 4, "i32": 4}
    arrays = [([*map(int, shape.split("x")[:-1])], size[dtype]) for shape, dtype in found]
    # Arrays of the routing have few columns.
    return sum(math.prod(shape) * width for shape, width in arrays if shape[-1] > E)
