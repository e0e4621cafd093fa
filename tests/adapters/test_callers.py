"""Layers that call `jax.lax.ragged_dot` as public models do give the same with `jg.ragged_dot` in its place.

The calls are those of gemma (`gm.nn.gemma4`), of jax-llm-examples (qwen3, gpt-oss) and of haliax (`MoELinear`); no
release of these packages on PyPI has them.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_grouped as jg
from tests.meshes import need_devices

E, T, D, F, CHOICES = 4, 24, 32, 16, 2

Product = Callable[..., jax.Array]


def drawn(seed: int, *shape: int, dtype: Any = jnp.float32) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def close(got: Any, expected: Any, tolerance: float) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(
            np.asarray(a, np.float32), np.asarray(b, np.float32), atol=tolerance * float(np.max(np.abs(b)))
        )


def sorted_by_expert(x: jax.Array, experts: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    order = jnp.argsort(experts.ravel())
    return x[order // CHOICES], jnp.argsort(order), jnp.bincount(experts.ravel(), length=E)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_weights_that_are_transposed_and_split_in_two(dtype: Any, backend: str) -> None:
    def loss(weights: Any, x: jax.Array, experts: jax.Array, product: Product) -> jax.Array:
        gating, linear = weights
        rows, inverse, sizes = sorted_by_expert(x, experts)
        hidden = product(rows, gating.transpose(0, 3, 1, 2).reshape(E, D, 2 * F), group_sizes=sizes)
        gate, up = jnp.unstack(hidden.reshape(-1, 2, F), axis=1)
        out = product(jax.nn.gelu(gate) * up, linear, group_sizes=sizes)
        return jnp.mean(out[inverse].reshape(T, CHOICES, D).astype(jnp.float32) ** 2)

    weights = drawn(0, E, 2, F, D, dtype=dtype), drawn(1, E, F, D, dtype=dtype)
    arguments = weights, drawn(2, T, D, dtype=dtype), jax.random.randint(jax.random.key(3), (T, CHOICES), 0, E)
    step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)), static_argnums=3)

    with jax.default_matmul_precision("highest"):  # A GPU would round float32.
        got, expected = step(*arguments, jg.ragged_dot), step(*arguments, jax.lax.ragged_dot)
    close(got, expected, 0.03 if dtype == jnp.bfloat16 else 1e-4)


@pytest.mark.parametrize("quantized", [None, jnp.int8, jnp.float8_e4m3fn])
def test_inference_over_a_mesh_with_weights_of_few_bits(quantized: Any, backend: str) -> None:
    need_devices(2)
    mesh = jax.make_mesh((2,), ("expert",), axis_types=(AxisType.Explicit,))
    numbers, scales = 10 * drawn(4, E, D, F), jnp.linspace(0.05, 0.2, E * F).reshape(E, F)
    kernel = (numbers * scales[:, None]).astype(jnp.bfloat16) if quantized is None else numbers.astype(quantized)

    def layer(x: jax.Array, experts: jax.Array, kernel: jax.Array, scales: jax.Array, product: Product) -> jax.Array:
        # Rows of other devices' experts come last, and belong to no group.
        first = jax.lax.axis_index("expert") * len(kernel)
        own = jnp.where((experts >= first) & (experts < first + len(kernel)), experts - first, 2**30).ravel()
        order = jnp.argsort(own)
        sizes = jax.lax.dynamic_slice_in_dim(jnp.bincount(experts.ravel(), length=E), first, len(kernel))
        y = product(x[order // CHOICES], kernel, sizes.astype(jnp.int32))
        chosen = own[order]
        if quantized is not None:
            y = y * jnp.take_along_axis(scales, jnp.where(chosen < E, chosen, 0)[:, None], axis=0)
        y = jnp.where(chosen[:, None] < E, y, 0).astype(jnp.bfloat16)
        return jax.lax.psum(y[jnp.argsort(order)].reshape(T, CHOICES, F).sum(1), "expert")

    specs = P(), P(), P("expert"), P("expert")
    arrays = (
        drawn(5, T, D, dtype=jnp.bfloat16),
        jax.random.randint(jax.random.key(6), (T, CHOICES), 0, E),
        kernel,
        scales,
    )
    with jax.set_mesh(mesh):
        placed = [jax.device_put(of, NamedSharding(mesh, spec)) for of, spec in zip(arrays, specs, strict=True)]

        def result(product: Product) -> jax.Array:
            def of_device(*local: jax.Array) -> jax.Array:
                return layer(*local, product)

            return jax.jit(jax.shard_map(of_device, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False))(*placed)

        close(result(jg.ragged_dot), result(jax.lax.ragged_dot), 0.02)


@pytest.mark.parametrize("out_first", [False, True])
def test_dimension_numbers_that_are_tuples(out_first: bool, backend: str) -> None:
    contracting = 2 if out_first else 1
    numbers = jax.lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((1,), (contracting,)), ((), ())), lhs_ragged_dimensions=(0,), rhs_group_dimensions=(0,)
    )
    kernel = drawn(7, *((E, F, D) if out_first else (E, D, F)))
    sizes = jnp.array([5, 0, 9, 4])

    def gradients(product: Product) -> Any:
        def loss(x: jax.Array, kernel: jax.Array) -> jax.Array:
            y = product(lhs=x, rhs=kernel, group_sizes=sizes, ragged_dot_dimension_numbers=numbers)
            return jnp.sum(jnp.sin(y))

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(drawn(8, T, D), kernel)

    with jax.default_matmul_precision("highest"):
        close(gradients(jg.ragged_dot_general), gradients(jax.lax.ragged_dot_general), 1e-4)
