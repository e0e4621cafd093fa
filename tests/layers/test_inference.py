"""Layers whose kernels are there in FP8 alone."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx

import jax_grouped as jg
from tests.operands import normal

TOKENS, K, F, E = 48, 128, 64, 4
SIZES = jnp.array([20, 0, 17, 11], jnp.int32)
BLOCK, DELAYED = jg.Float8BlockScaling(), jg.DelayedScaling()
MOE = dict(num_experts=E, router=jg.moe.Router(2), hidden_features=F, use_bias=True)


def tokens() -> jax.Array:
    return normal(0, (TOKENS, K), jnp.bfloat16)


def kernel() -> jax.Array:
    return normal(1, (E, K, F), jnp.bfloat16)


@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        ("dense", BLOCK),
        ("moe", DELAYED),
        ("nnx dense", jg.Float8CurrentScaling()),
        ("nnx moe", jg.MXFP8BlockScaling()),
    ],
)
def test_layers_give_the_same_numbers(backend: str, name: str, recipe: jg.Recipe) -> None:
    options = dict(recipe=recipe, cache_kernel=True)
    arguments = (tokens(), SIZES) if "dense" in name else (tokens(),)
    if "nnx" in name:
        layer: Any = jg.nnx.GroupedDense(K, F, E, **options, rngs=nnx.Rngs(0))
        if name == "nnx moe":
            layer = jg.nnx.MoEMlp(K, **MOE, **options, shared_features=F, rngs=nnx.Rngs(0))
        run = nnx.jit(lambda layer, *arguments: layer(*arguments))
        expected = run(layer, *arguments)

        jg.nnx.quantize_for_inference(layer)
        jg.nnx.quantize_for_inference(layer)

        got = run(layer, *arguments)
        left = [path for path, _ in nnx.to_flat_state(nnx.state(layer, nnx.Param))]
        assert not any(path[-1] == "kernel" and path[0] != "router" for path in left)
    else:
        layer = jg.linen.GroupedDense(F, E, **options) if name == "dense" else jg.linen.MoEMlp(**MOE, **options)
        variables = jax.jit(layer.init)(jax.random.key(2), *arguments)

        in_fp8 = jg.linen.quantize_for_inference(variables, recipe)

        got, expected = (jax.jit(layer.apply)(given, *arguments) for given in (in_fp8, variables))
        with pytest.raises(ValueError, match="which quantize_for_inference has removed"):
            layer.apply(in_fp8, *arguments, is_first_microbatch=True)
    jax.tree.map(np.testing.assert_array_equal, got, expected)


def test_kernels_take_half_the_memory_of_bfloat16_and_come_back_from_a_checkpoint(tmp_path: Any) -> None:
    layer = jg.linen.GroupedDense(512, E, recipe=BLOCK, cache_kernel=True)
    x = normal(0, (TOKENS, 512))
    in_fp8 = jg.linen.quantize_for_inference(jax.jit(layer.init)(jax.random.key(2), x, SIZES), BLOCK)

    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "layer", in_fp8)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "layer", in_fp8)

    assert sum(leaf.nbytes for leaf in jax.tree.leaves(in_fp8[jg.linen.KERNEL_CACHE])) < 0.51 * 2 * E * 512 * 512
    np.testing.assert_array_equal(layer.apply(restored, x, SIZES), layer.apply(in_fp8, x, SIZES))


def test_products_need_no_kernel_but_its_cache(backend: str) -> None:
    recipe, x, options = DELAYED, tokens(), dict(scale=jnp.full((E,), 100.0))
    state, both = jg.Fp8State.initial(recipe, E), jg.quantize_kernel(kernel(), recipe, **options)

    one = jg.quantize_kernel(kernel(), recipe, **options, for_gradients=False)
    later = jax.jit(
        lambda previous, skip: jg.quantize_kernel(
            0 * kernel(), recipe, **options, for_gradients=False, previous=previous, skip=skip
        )
    )(one, jnp.array(True))

    assert one.rowwise is None
    jax.tree.map(np.testing.assert_array_equal, (one.columnwise, one.amax), (both.columnwise, both.amax))
    jax.tree.map(np.testing.assert_array_equal, later, one)
    got = jg.grouped_dense(x, None, SIZES, recipe=recipe, kernel_cache=one, fp8_state=state)
    expected = jg.grouped_dense(x, kernel(), SIZES, recipe=recipe, kernel_cache=both, fp8_state=state)
    np.testing.assert_array_equal(got, expected)


def test_gradients_of_tokens_need_both_orientations_with_scales_of_each() -> None:
    recipe, x = jg.MXFP8BlockScaling(), tokens()
    both, one = (jg.quantize_kernel(kernel(), recipe, for_gradients=kept) for kept in (True, False))

    def gradient(cache: jg.KernelCache) -> jax.Array:
        def loss(x: jax.Array) -> jax.Array:
            return jnp.sum(jg.grouped_dense(x, None, SIZES, recipe=recipe, kernel_cache=cache).astype(jnp.float32))

        return jax.grad(loss)(x)

    def loss(x: jax.Array) -> jax.Array:
        return jnp.sum(jg.grouped_dense(x, kernel(), SIZES, recipe=recipe).astype(jnp.float32))

    np.testing.assert_array_equal(gradient(both), jax.grad(loss)(x))
    with pytest.raises(ValueError, match=r"^kernel_cache has no orientation for gradients: make it with for_gradients"):
        gradient(one)
    with pytest.raises(ValueError, match=r"^previous must have been made with the same for_gradients\.$"):
        jg.quantize_kernel(kernel(), recipe, previous=one, skip=jnp.array(True))
    with pytest.raises(TypeError, match="kernel must be an array, got None"):
        jg.grouped_dense(x, None, SIZES, recipe=recipe)


def test_layers_without_a_recipe_stay_as_they_are() -> None:
    class Two(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array, first: bool | None = None) -> jax.Array:
            options = dict(use_bias=False, dtype=jnp.bfloat16, cache_kernel=True)
            x = jg.linen.GroupedDense(K, E, **options, recipe=recipe, name="quantized")(x, SIZES)
            return jg.linen.GroupedDense(F, E, **options, name="plain")(x, SIZES, is_first_microbatch=first)

    recipe, model = DELAYED, Two()
    variables = jax.jit(model.init)(jax.random.key(0), tokens())

    in_fp8 = jg.linen.quantize_for_inference(variables, recipe)

    assert [*in_fp8["params"]] == ["plain"]
    for first in (None, False):
        np.testing.assert_array_equal(model.apply(in_fp8, tokens(), first), model.apply(variables, tokens(), first))


def test_what_cannot_be_quantized_is_named() -> None:
    class Step(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array, _: None) -> Any:
            return jg.linen.GroupedDense(K, E, recipe=BLOCK, cache_kernel=True)(x, SIZES), None

    @nnx.split_rngs(splits=2)
    @nnx.vmap
    def nnx_stack(rngs: nnx.Rngs) -> jg.nnx.GroupedDense:
        return jg.nnx.GroupedDense(K, F, E, recipe=BLOCK, rngs=rngs)

    axes = {"params": 0, jg.linen.KERNEL_CACHE: 0}
    stack = nn.scan(Step, variable_axes=axes, split_rngs={"params": True}, length=2)()
    without_cache = jg.linen.GroupedDense(F, E, recipe=BLOCK)
    without_recipe = jg.linen.GroupedDense(F, E, dtype=jnp.bfloat16, cache_kernel=True)
    for layer, more, message in (
        (stack, None, r"kernel is stacked, as by nn\.scan: quantize layers one by one\."),
        (without_cache, SIZES, "variables must have the collection kernel_cache, which init makes"),
        (without_recipe, SIZES, "variables must have the collection kernel_cache, which init makes"),
    ):
        variables = jax.eval_shape(layer.init, jax.random.key(0), tokens().astype(jnp.float32), more)
        with pytest.raises(ValueError, match=message):
            jg.linen.quantize_for_inference(variables, BLOCK)
    delayed = jg.linen.GroupedDense(F, E, recipe=jg.DelayedScaling(), cache_kernel=True)
    variables = delayed.init(jax.random.key(0), tokens().astype(jnp.float32), SIZES)
    for missing, message in (
        ("params", "must have the parameter kernel"),
        ("_overwrite", "needs the collection _over"),
    ):
        some = {name: value for name, value in variables.items() if not name.startswith(missing)}
        with pytest.raises(ValueError, match=message):
            jg.linen.quantize_for_inference(some, jg.DelayedScaling())
    with pytest.raises(TypeError, match="recipe must be"):
        jg.linen.quantize_for_inference(variables, None)
    with pytest.raises(ValueError, match=r"kernel \(2, 4, 128, 64\) is stacked, as by nnx\.vmap"):
        jg.nnx.quantize_for_inference(nnx_stack(nnx.Rngs(0)))
    with pytest.raises(ValueError, match=r"quantize_for_inference needs a layer with a recipe\."):
        jg.nnx.quantize_for_inference(jg.nnx.GroupedDense(K, F, E, rngs=nnx.Rngs(0)))
    with pytest.raises(TypeError, match=r"^Without a kernel, kernel_cache must be a KernelCache, got ArrayImpl\.$"):
        jg.grouped_dense(tokens(), None, SIZES, kernel_cache=kernel())
