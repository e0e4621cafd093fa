"""`GroupedDense` of linen and NNX with `cache_kernel`: microbatches that share one quantization of the kernel."""

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jax_grouped as jg
from jax_grouped.ops.gradients import OVERWRITE_WITH_GRADIENT
from tests.exports import exported
from tests.layers.pure import APIS, CACHE, SIZES, E, K, N, T, cached, layer, tokens
from tests.ops.quantize_cases import assert_same_trees

DELAYED, CURRENT = jg.DelayedScaling(amax_history_len=2), jg.Float8CurrentScaling()
MICROBATCHES = 3

each_api = pytest.mark.parametrize("api", APIS)
quantize_kernel = jax.jit(jg.quantize_kernel, static_argnames="recipe")


@functools.cache
def steps(api: str, backend: str) -> Callable[..., tuple[Any, Any]]:
    """Maps `(trained, cache, xs, firsts)` to the next cache, losses and gradients: for NNX exported and read back."""
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


def with_kernel_times(factor: float, trained: Any) -> Any:
    return jax.tree.map(lambda leaf: factor * leaf if leaf.ndim == 3 else leaf, trained)


def at_index(tree: Any, index: int) -> Any:
    return jax.tree.map(lambda leaf: leaf[index], tree)


@each_api
def test_one_program_quantizes_the_kernel_or_reads_the_cache(backend: str, api: str) -> None:
    at, run = layer(api, DELAYED, cache_kernel=True), steps(api, backend)
    kernel, _, state = at.parts(at.trained)
    xs = jnp.broadcast_to(tokens(), (MICROBATCHES, T, K))
    given = copied(at.cache)

    cache, (losses, gradients) = run(at.trained, given, xs, jnp.array([True, False, False]))
    stored = copied(cache)
    unreadable = with_kernel_times(jnp.nan, at.trained)
    cache, kept = run(unreadable, cache, xs, jnp.array([False, False, False]))
    doubled = with_kernel_times(2, at.trained)
    cache_of_doubled, _ = run(doubled, cache, xs, jnp.array([False, True, False]))

    assert_same_trees(cached(stored), quantize_kernel(kernel, DELAYED, scale=state.scales(DELAYED).kernel))
    for index in range(MICROBATCHES):
        assert_same_trees(at_index((losses, gradients), index), at_index((losses, gradients), 0))
    assert_same_trees(kept, (losses, gradients))
    assert np.all(np.any(at.parts(gradients)[0], axis=(2, 3)) == (SIZES > 0))
    np.testing.assert_array_equal(cached(cache_of_doubled).amax, 2 * cached(stored).amax)
    if api == "linen":
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(given)), "what was donated was not used"


def test_a_cache_serves_a_later_state(backend: str) -> None:
    at, run = layer("linen", DELAYED, cache_kernel=True), steps("linen", backend)
    xs, (kernel, bias, before) = jnp.asarray(tokens(shape=(MICROBATCHES,))), at.parts(at.trained)
    stored, (_, gradients) = run(at.trained, copied(at.cache), xs, jnp.array([True, False, False]))
    later = at.trained | {OVERWRITE_WITH_GRADIENT: at_index(gradients[OVERWRITE_WITH_GRADIENT], 0)}
    state, cache = at.parts(later)[2], copied(cached(stored))

    _, (losses, got) = run(later, stored, xs, jnp.zeros(MICROBATCHES, jnp.bool_))

    @jax.jit
    def expected(kernel: jax.Array, bias: jax.Array, state: jg.Fp8State) -> Any:
        def loss(kernel: jax.Array, bias: jax.Array, state: jg.Fp8State) -> jax.Array:
            y = jg.grouped_dense(xs[1], kernel, SIZES, bias, recipe=DELAYED, fp8_state=state, kernel_cache=cache)
            return jnp.mean((y - 1) ** 2)

        return jax.value_and_grad(loss, argnums=(0, 1, 2))(kernel, bias, state)

    assert not np.array_equal(before.scales(DELAYED).kernel, state.scales(DELAYED).kernel)
    loss, (*parameters, following) = expected(kernel, bias, state)
    *got_parameters, got_state = at.parts(at_index(got, 1))
    np.testing.assert_allclose(losses[1], loss, rtol=1e-5)
    for one, other in zip(got_parameters, parameters, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)
    assert_same_trees(got_state, following)


@each_api
def test_a_python_bool_decides_when_the_program_is_traced(api: str) -> None:
    at, found = layer(api, DELAYED, cache_kernel=True), []

    def quantizations(first: Any, *flag: jax.Array) -> list[bool]:
        """Lists the quantizations of kernels in the program, and if each may keep a cache's contents."""

        def function(trained: Any, *flag: jax.Array) -> tuple[jax.Array, Any]:
            y, cache = at.apply(trained, at.cache, tokens(), *(flag or [first]))
            found.append(cache)
            return y, cache

        program = str(jax.make_jaxpr(function)(at.trained, *flag))
        return ["'skip'" in given for given in re.findall(rf"stack_rows={K}, given=\(([^)]*)\)", program)]

    assert quantizations(None, jnp.array(True)) == [True]
    for first in (True, np.True_, None):
        assert quantizations(first) == [False]
    # Without a flag, the cache stays.
    for leaf, before in zip(jax.tree.leaves(found[-1]), jax.tree.leaves(at.cache), strict=True):
        assert leaf is before
    for first in (False, np.False_):
        assert quantizations(first) == []


@pytest.mark.parametrize(("api", "is_static"), [("linen", True), ("nnx", False)])
def test_without_a_recipe_the_cache_is_the_kernel_in_the_layers_type(backend: str, api: str, is_static: bool) -> None:
    at, plain = (layer(api, None, cache_kernel=cached, dtype=jnp.bfloat16) for cached in (True, False))
    kernel, *_ = at.parts(at.trained)
    loss_and_gradients = jax.value_and_grad(at.loss, has_aux=True)
    step = jax.jit(loss_and_gradients, static_argnums=[3] * is_static)
    first, later = (True, False) if is_static else (jnp.array(True), jnp.array(False))

    (loss, cache), gradients = step(at.trained, at.cache, tokens(), first)
    unreadable = with_kernel_times(jnp.nan, at.trained)
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


def test_a_flag_needs_a_cache_and_that_a_recipe_or_a_type() -> None:
    for options, first in (
        ({"recipe": CURRENT}, True),
        ({"dtype": jnp.bfloat16}, False),
        ({}, True),
        ({"cache_kernel": True}, None),
    ):
        caches = "cache_kernel" in options
        message = "cache_kernel=True needs a recipe, or a" if caches else "is_first_microbatch needs a layer with cache"
        with pytest.raises(ValueError, match=message):
            jg.linen.GroupedDense(N, E, **options).init(jax.random.key(0), tokens(), SIZES, is_first_microbatch=first)
        with pytest.raises(ValueError, match=message):
            jg.nnx.GroupedDense(K, N, E, **options, rngs=nnx.Rngs(0))(tokens(), SIZES, is_first_microbatch=first)
    for api in APIS:
        at = layer(api, CURRENT, cache_kernel=True)
        with pytest.raises(TypeError, match="is_first_microbatch must be boolean, got int32"):
            at.apply(at.trained, at.cache, tokens(), jnp.array(1))


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


def test_a_flag_can_be_a_variable_of_nnx() -> None:
    kernel = jnp.ones((E, K, N))
    cache = jg.quantize_kernel(kernel, CURRENT)
    kept = jg.quantize_kernel(2 * kernel, CURRENT, previous=cache, skip=nnx.Variable(jnp.array(True)))
    assert_same_trees(kept, cache)
