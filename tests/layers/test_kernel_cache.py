"""`GroupedDense` of linen and NNX with `cache_kernel`: microbatches that share one quantization of the kernel."""

import functools
import re
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jax_grouped as jg
from jax_grouped.ops.gradients import OVERWRITE_WITH_GRADIENT
from tests.exports import exported
from tests.layers.pure import APIS, CACHE, SIZES, E, K, N, T, cached, filled, layer, tokens
from tests.ops.quantize_cases import assert_same_trees

DELAYED = jg.DelayedScaling(amax_history_len=2)
CURRENT = jg.Float8CurrentScaling()
RECIPES = {"block": jg.Float8BlockScaling(), "current": CURRENT, "delayed": DELAYED, "mx": jg.MXFP8BlockScaling()}
MICROBATCHES = 3

each_api = pytest.mark.parametrize("api", APIS)
quantize_kernel = jax.jit(jg.quantize_kernel, static_argnames="recipe")

#: Maps `(trained, cache, xs, firsts)` to the cache afterwards, and each microbatch's loss and gradients.
Step = Callable[[Any, Any, jax.Array, jax.Array], tuple[Any, Any]]


@functools.cache
def steps(api: str, backend: str) -> Step:
    """Microbatches with `DELAYED` in one program: compiled ahead of time for linen, exported and read back for NNX."""
    del backend
    at = layer(api, DELAYED, cache_kernel=True)

    def function(trained: Any, cache: Any, xs: jax.Array, firsts: jax.Array) -> tuple[Any, Any]:
        def microbatch(cache: Any, batch: tuple[jax.Array, jax.Array]) -> tuple[Any, Any]:
            (loss, cache), gradients = jax.value_and_grad(at.loss, has_aux=True)(trained, cache, *batch)
            return cache, (loss, gradients)

        return jax.lax.scan(microbatch, cache, (xs, firsts))

    arguments = at.trained, at.cache, jnp.asarray(tokens(shape=(MICROBATCHES,))), jnp.zeros(MICROBATCHES, jnp.bool_)
    if api == "linen":
        return jax.jit(function, donate_argnums=1).lower(*arguments).compile()
    # An exported program takes arrays, but no NNX state.
    given, structure = jax.tree.flatten(arguments)
    results = jax.tree.structure(jax.eval_shape(function, *arguments))
    program = jax.jit(exported(lambda *given: jax.tree.leaves(function(*jax.tree.unflatten(structure, given))), *given))
    return lambda *arguments: jax.tree.unflatten(results, program(*jax.tree.leaves(arguments)))


def copied(tree: Any) -> Any:
    return jax.tree.map(jnp.copy, tree)


def of_microbatch(tree: Any, index: int) -> Any:
    return jax.tree.map(lambda leaf: leaf[index], tree)


@each_api
def test_one_program_quantizes_the_kernel_or_reads_the_cache(backend: str, api: str) -> None:
    at, run = layer(api, DELAYED, cache_kernel=True), steps(api, backend)
    kernel, _, state = at.parts(at.trained)
    xs = jnp.broadcast_to(tokens(), (MICROBATCHES, T, K))
    given = copied(at.cache)

    cache, (losses, gradients) = run(at.trained, given, xs, jnp.array([True, False, False]))
    stored = copied(cache)
    unreadable = at.with_kernel(at.trained, jnp.full_like(kernel, jnp.nan))
    cache, kept = run(unreadable, cache, xs, jnp.array([False, False, False]))
    doubled = at.with_kernel(at.trained, 2 * kernel)
    cache_of_doubled, _ = run(doubled, cache, xs, jnp.array([False, True, False]))

    assert_same_trees(cached(stored), quantize_kernel(kernel, DELAYED, scale=state.scales(DELAYED).kernel))
    for index in range(MICROBATCHES):
        assert_same_trees(of_microbatch((losses, gradients), index), of_microbatch((losses, gradients), 0))
    assert_same_trees(kept, (losses, gradients))
    assert np.all(np.any(at.parts(gradients)[0], axis=(2, 3)) == (SIZES > 0))
    np.testing.assert_array_equal(cached(cache_of_doubled).amax, 2 * cached(stored).amax)
    if api == "linen":
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(given)), "what was donated was not used"


def test_gradients_with_a_cache_are_those_of_grouped_dense(backend: str) -> None:
    at, run = layer("linen", DELAYED, cache_kernel=True), steps("linen", backend)
    xs = jnp.asarray(tokens(shape=(MICROBATCHES,)))
    _, (losses, gradients) = run(at.trained, copied(at.cache), xs, jnp.array([True, False, False]))
    # A later state, and the cache made with the scales of the earlier one.
    kernel, bias, before = at.parts(at.trained)
    after = of_microbatch(at.parts(gradients)[2], 0)
    cache = quantize_kernel(kernel, DELAYED, scale=before.scales(DELAYED).kernel)

    @jax.jit
    def functional(kernel: jax.Array, bias: jax.Array, state: jg.Fp8State, x: jax.Array) -> Any:
        def loss(kernel: jax.Array, bias: jax.Array, state: jg.Fp8State) -> jax.Array:
            y = jg.grouped_dense(x, kernel, SIZES, bias, recipe=DELAYED, fp8_state=state, kernel_cache=cache)
            return jnp.mean((y - 1) ** 2)

        return jax.value_and_grad(loss, argnums=(0, 1, 2))(kernel, bias, state)

    assert not np.array_equal(before.scales(DELAYED).kernel, after.scales(DELAYED).kernel)
    later = dict(zip(before.__dict__, jax.tree.leaves(after), strict=True))
    later = at.trained | {OVERWRITE_WITH_GRADIENT: later}
    _, with_later = run(later, {CACHE: {"kernel": copied(cache)}}, xs, jnp.zeros(MICROBATCHES, jnp.bool_))
    for state, (got_losses, got) in ((before, (losses, gradients)), (after, with_later)):
        for index in range(MICROBATCHES):
            loss, (dkernel, dbias, following) = functional(kernel, bias, state, xs[index])
            got_kernel, got_bias, got_state = at.parts(of_microbatch(got, index))
            np.testing.assert_allclose(got_losses[index], loss, rtol=1e-5)
            np.testing.assert_allclose(got_kernel, dkernel, rtol=1e-5, atol=1e-7)
            np.testing.assert_allclose(got_bias, dbias, rtol=1e-5, atol=1e-7)
            assert_same_trees(got_state, following)


@pytest.mark.parametrize("name", RECIPES)
@each_api
def test_a_python_bool_decides_when_the_program_is_traced(api: str, name: str) -> None:
    at = layer(api, RECIPES[name], cache_kernel=True)

    def quantizations(first: Any, *flag: jax.Array) -> list[bool]:
        """Lists the quantizations of kernels in the program, and if each may keep a cache's contents."""

        def function(trained: Any, *flag: jax.Array) -> tuple[jax.Array, Any]:
            return at.apply(trained, at.cache, tokens(), *(flag or [first]))

        program = str(jax.make_jaxpr(function)(at.trained, *flag))
        return ["'skip'" in given for given in re.findall(rf"stack_rows={K}, given=\(([^)]*)\)", program)]

    assert quantizations(None, jnp.array(True)) == [True]
    for first in (True, np.True_, None):
        assert quantizations(first) == [False]
    for first in (False, np.False_):
        assert quantizations(first) == []


@each_api
@pytest.mark.parametrize("is_static", [True, False])
def test_without_a_recipe_the_cache_is_the_kernel_in_the_layers_type(backend: str, api: str, is_static: bool) -> None:
    at, plain = (layer(api, None, cache_kernel=cached, dtype=jnp.bfloat16) for cached in (True, False))
    kernel, *_ = at.parts(at.trained)
    loss_and_gradients = jax.value_and_grad(at.loss, has_aux=True)
    step = jax.jit(loss_and_gradients, static_argnums=[3] * is_static)
    first, later = (True, False) if is_static else (jnp.array(True), jnp.array(False))

    (loss, cache), gradients = step(at.trained, at.cache, tokens(), first)
    unreadable = at.with_kernel(at.trained, jnp.full_like(kernel, jnp.nan))
    (loss_later, kept), gradients_later = step(unreadable, cache, tokens(), later)
    (expected, _), plain_gradients = jax.jit(jax.value_and_grad(plain.loss, has_aux=True))(plain.trained, {}, tokens())

    (stored,) = jax.tree.leaves(cache)
    assert stored.dtype == jnp.bfloat16
    np.testing.assert_array_equal(stored, kernel.astype(jnp.bfloat16))
    assert_same_trees(kept, cache)
    assert loss == loss_later == expected
    for got in (gradients, gradients_later):
        for a, b in zip(at.parts(got)[:2], plain.parts(plain_gradients)[:2], strict=True):
            np.testing.assert_array_equal(a, b)
    if is_static:
        program = str(jax.make_jaxpr(functools.partial(loss_and_gradients, first=False))(at.trained, cache, tokens()))
        assert f"bf16[{E},{K},{N}] = convert_element_type" not in program


@each_api
def test_without_a_flag_the_cache_stays(api: str) -> None:
    at, found = layer(api, CURRENT, cache_kernel=True), []

    def function(x: jax.Array) -> jax.Array:
        y, cache = at.apply(at.trained, at.cache, x)
        found.append(cache)
        return y

    jax.eval_shape(function, tokens())

    (cache,) = found
    for leaf, before in zip(jax.tree.leaves(cache), jax.tree.leaves(at.cache), strict=True):
        assert leaf is before


def test_the_first_cache_is_of_the_initial_kernel(backend: str) -> None:
    options = dict(recipe=DELAYED, cache_kernel=True, kernel_init=lambda *_: jnp.asarray(kernel))
    kernel = np.random.default_rng(0).standard_normal((E, K, N), np.float32)

    @jax.jit
    def caches() -> tuple[jg.KernelCache, ...]:
        variables = jg.linen.GroupedDense(N, E, **options).init(jax.random.key(0), tokens(), SIZES)
        model = jg.nnx.GroupedDense(K, N, E, **options, rngs=nnx.Rngs(0))
        return variables[CACHE]["kernel"], model.kernel_cache.get_value()

    expected = quantize_kernel(kernel, DELAYED, scale=jnp.ones(E))
    for cache in caches():
        assert_same_trees(cache, expected)


class LinenBlock(nn.Module):
    """A layer that is computed again for the backward pass."""

    @nn.compact
    def __call__(self, x: jax.Array, first: jax.Array | None) -> tuple[jax.Array, None]:
        dense = nn.remat(jg.linen.GroupedDense)(K, E, recipe=CURRENT, cache_kernel=True)
        return x + dense(x, SIZES, is_first_microbatch=first), None


def test_linen_layers_under_scan_and_remat_have_a_cache_each(backend: str) -> None:
    axes = {"params": 0, CACHE: 0}
    stack = nn.scan(LinenBlock, variable_axes=axes, split_rngs={"params": True}, length=2, in_axes=nn.broadcast)()
    variables = filled(jax.eval_shape(stack.init, jax.random.key(0), tokens(), None))
    cache = {CACHE: variables.pop(CACHE)}

    @jax.jit
    def gradient(variables: Any, cache: Any, first: jax.Array) -> Any:
        def loss(variables: Any) -> tuple[jax.Array, Any]:
            (y, _), after = stack.apply(variables | cache, tokens(), first, mutable=[CACHE])
            return jnp.sum(jnp.nan_to_num(y) ** 2), after

        return jax.grad(loss, has_aux=True)(variables)

    gradients, after = gradient(variables, cache, jnp.array(True))
    unreadable = jax.tree.map(lambda leaf: leaf + jnp.nan if leaf.ndim == 4 else leaf, variables)
    kept, _ = gradient(unreadable, after, jnp.array(False))

    (kernel,) = (leaf for leaf in jax.tree.leaves(variables) if leaf.ndim == 4)
    for i in range(2):
        assert_same_trees(of_microbatch(cached(after), i), quantize_kernel(kernel[i], CURRENT))
    assert_same_trees(kept, gradients)


def test_nnx_layers_under_scan_and_remat_have_a_cache_each(backend: str) -> None:
    @nnx.split_rngs(splits=2)
    @nnx.vmap
    def stacked(rngs: nnx.Rngs) -> jg.nnx.GroupedDense:
        return jg.nnx.GroupedDense(K, K, E, recipe=CURRENT, cache_kernel=True, rngs=rngs)

    @nnx.scan(in_axes=(0, nnx.Carry, None), out_axes=nnx.Carry)
    @nnx.remat
    def apply(model: jg.nnx.GroupedDense, x: jax.Array, first: jax.Array) -> jax.Array:
        return x + model(x, SIZES, is_first_microbatch=first)

    @nnx.jit
    def gradient(model: jg.nnx.GroupedDense, first: jax.Array) -> Any:
        return nnx.grad(lambda model: jnp.sum(jnp.nan_to_num(apply(model, tokens(), first)) ** 2))(model)

    graph, shapes = nnx.split(nnx.eval_shape(lambda: stacked(nnx.Rngs(0))))
    model = nnx.merge(graph, filled(shapes))
    kernel = model.kernel[...]
    gradients = gradient(model, jnp.array(True))
    model.kernel.set_value(jnp.full_like(kernel, jnp.nan))
    kept = gradient(model, jnp.array(False))

    for i in range(2):
        assert_same_trees(of_microbatch(model.kernel_cache.get_value(), i), quantize_kernel(kernel[i], CURRENT))
    assert_same_trees(kept, gradients)


@pytest.mark.parametrize(
    ("options", "first"),
    [({"recipe": CURRENT}, True), ({"dtype": jnp.bfloat16}, False), ({}, True), ({"cache_kernel": True}, None)],
    ids=["no cache", "no cache to read", "no recipe", "nothing to cache"],
)
def test_a_flag_needs_a_cache_and_that_a_recipe_or_a_type(options: dict[str, Any], first: bool | None) -> None:
    module = jg.linen.GroupedDense(N, E, **options)

    def construct_and_apply() -> jax.Array:
        return jg.nnx.GroupedDense(K, N, E, **options, rngs=nnx.Rngs(0))(tokens(), SIZES, is_first_microbatch=first)

    message = "needs a layer with cache_kernel=True, and that needs a recipe, or a dtype"
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda: module.init(jax.random.key(0), tokens(), SIZES, is_first_microbatch=first))
    with pytest.raises(ValueError, match=message):
        nnx.eval_shape(construct_and_apply)


def test_a_collection_that_is_not_mutable_is_only_read() -> None:
    at = layer("linen", CURRENT, cache_kernel=True)
    module = jg.linen.GroupedDense(N, E, recipe=CURRENT, cache_kernel=True)

    def apply(variables: Any, first: Any) -> Any:
        return jax.eval_shape(lambda x: module.apply(variables, x, SIZES, is_first_microbatch=first), tokens())

    for first in (True, jnp.array(False)):
        with pytest.raises(ValueError, match=r'pass mutable=\["kernel_cache"\] to apply'):
            apply(at.trained | at.cache, first)
    with pytest.raises(
        ValueError, match=rf"^is_first_microbatch=False needs the collection {CACHE}: pass apply the one"
    ):
        apply(at.trained, False)
    assert apply(at.trained | at.cache, False).shape == (T, N)
    # Evaluation of a trained model needs no cache.
    assert apply(at.trained, None).shape == (T, N)


@each_api
def test_a_flag_is_boolean(api: str) -> None:
    at = layer(api, CURRENT, cache_kernel=True)
    with pytest.raises(TypeError, match="is_first_microbatch must be boolean, got int32"):
        at.apply(at.trained, at.cache, tokens(), jnp.array(1))


def test_a_flag_can_be_a_variable_of_nnx() -> None:
    kernel = jnp.ones((E, K, N))
    cache = jg.quantize_kernel(kernel, CURRENT)
    kept = jg.quantize_kernel(2 * kernel, CURRENT, previous=cache, skip=nnx.Variable(jnp.array(True)))
    assert_same_trees(kept, cache)


def test_a_converted_kernel_has_the_derivatives_of_its_conversion() -> None:
    x, kernel = jnp.nan_to_num(tokens()), np.random.default_rng(0).standard_normal((E, K, N), np.float32)

    def second_order(kernel: jax.Array, cache: jax.Array | None) -> jax.Array:
        def loss(x: jax.Array) -> jax.Array:
            return jnp.sum(jnp.sin(jg.grouped_dense(x, kernel, SIZES, kernel_cache=cache)))

        return jnp.sum(jax.grad(loss)(x) ** 2)

    differentiated = jax.jit(jax.grad(second_order))

    got, expected = differentiated(kernel, jnp.asarray(kernel)), differentiated(kernel, None)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)
    assert np.any(expected)
