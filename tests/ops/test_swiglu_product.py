"""fprop with SwiGLU in one kernel, against a product and what follows it."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_grouped as jg
from jax_grouped import ScalingMode
from jax_grouped.core.groups import Groups
from jax_grouped.kernels import primitive
from jax_grouped.kernels.primitive import bind
from jax_grouped.kernels.product import SWIGLU_GEMM, GemmSpec, SwiGluSpec, multiply, multiply_with_swiglu
from jax_grouped.kernels.quantization import QuantizeSpec, quantize
from jax_grouped.kernels.rows import activate
from tests.operands import normal
from tests.ops.gathered_rows import Case, Operands
from tests.programs import custom_calls, lowered

ROWS, K, F = 1600, 256, 256
#: Groups of several tiles, of none, of a row, of whole tiles and of parts of them; then rows of no group.
SIZES = jnp.array([300, 0, 1, 512, 131, 600])
GROUPS = Groups(SIZES, jnp.zeros(1, jnp.int32))


@functools.cache
def operands() -> tuple[jg.GroupedQuantized, jg.KernelCache]:
    x = normal(0, (ROWS, K)).at[5, 7].set(jnp.nan).at[400, 3].set(3e4)
    kernel = normal(1, (SIZES.size, K, 2 * F))
    return (
        jg.grouped_quantize(x.astype(jnp.bfloat16), SIZES, ScalingMode.BLOCK_1D),
        jg.quantize_kernel(kernel.astype(jnp.bfloat16), jg.Float8BlockScaling()),
    )


def make_spec(dtype: Any, **options: Any) -> SwiGluSpec:
    x, kernel = operands()
    gemm = GemmSpec("fprop", SIZES.size, jnp.dtype(dtype), a=x.rowwise.layout, b=kernel.columnwise.layout)
    quantization = QuantizeSpec(ScalingMode.BLOCK_1D, jnp.float8_e4m3fn, SIZES.size, activation="swiglu", **options)
    return SwiGluSpec(gemm, quantization)


def arrays() -> list[jax.Array]:
    x, kernel = operands()
    return [x.rowwise.data, kernel.columnwise.data, *GROUPS, x.rowwise.scale_inv, kernel.columnwise.scale_inv]


def in_groups(product: jax.Array, data: jax.Array, scale: jax.Array) -> list[np.ndarray]:
    """Returns the bits of what belongs to groups."""
    rows, scales = int(SIZES.sum()), int((-(-SIZES // 4) * 4).sum()) * F // 128
    return [np.asarray(part).view(np.uint8) for part in (product[:rows], data[:rows], scale[:scales])]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("options", [dict(pow2_scales=True), dict(amax_epsilon=0.5)], ids=["pow2", "epsilon"])
def test_bits_are_those_of_two_passes(backend: str, dtype: str, options: dict[str, Any]) -> None:
    spec = make_spec(dtype, **options)
    got = jax.jit(lambda *given: bind(SWIGLU_GEMM, *given, spec=spec))(*arrays())

    def apart() -> Any:
        x, kernel = operands()
        product = multiply(x.rowwise, kernel.columnwise, GROUPS, spec.gemm)
        _, made = quantize(product, GROUPS, spec.quantization)
        return product, made["row_data"], made["row_scale"]

    expected = jax.jit(apart)()
    for one, other in zip(in_groups(*got), in_groups(*expected), strict=True):
        np.testing.assert_array_equal(one, other)
    assert not np.any(np.asarray(got[0][int(SIZES.sum()) :], np.float32))


def test_what_nobody_reads_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(primitive, "has_gathering_products", lambda: True)
    spec = make_spec(jnp.bfloat16)

    def program(*read: int) -> str:
        def results(*given: jax.Array) -> list[jax.Array]:
            made = bind(SWIGLU_GEMM, *given, spec=spec)
            return [made[index] for index in read]

        return lowered(results, *arrays())

    (whole,) = custom_calls(program(0, 1, 2))
    assert re.search("keeps_product = true.* swiglu = true", whole)
    (without,) = custom_calls(program(1, 2))
    assert re.search("keeps_product = false.* swiglu = true", without)
    (product,) = custom_calls(program(0))
    assert "swiglu = false" in product


#: Tiles that lie beside each other in a cluster of one row of them, with and without a neighbour; then groups of parts.
GATHERED = {
    "odd tiles": Case((513, 129, 385), 328, 768),
    "small groups": Case((37, 0, 190, 1, 0), 72, 256),
    "no tail": Case((128, 256, 64), 128, 512, tail=0),
}


@pytest.mark.parametrize("name", GATHERED)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_gathered_tokens(backend: str, name: str, dtype: str) -> None:
    case = GATHERED[name]
    given = Operands(case, "fprop", "a", dtype)
    gemm = GemmSpec("fprop", len(case.sizes), jnp.dtype(dtype))

    def run(keeps_product: bool) -> Any:
        spec = SwiGluSpec(gemm, keeps_product=keeps_product)
        return jax.jit(lambda a, b, groups: multiply_with_swiglu(a, b, groups, spec))(*given.arrays, given.groups)

    product, (activated,) = run(True)

    rows = sum(case.sizes)
    expected = jax.jit(lambda a, b, groups: multiply(a, b, groups, gemm))(*given.arrays, given.groups)
    np.testing.assert_array_equal(product[:rows], expected[:rows])
    # Another exponential may round to the neighbour.
    close = dict(rtol=float(jnp.finfo(dtype).eps), atol=1e-6)
    wide = [np.asarray(array[:rows], np.float32) for array in (activated, activate(product, "swiglu"))]
    np.testing.assert_allclose(*wide, **close)
    _, (alone,) = run(False)
    np.testing.assert_array_equal(alone[:rows], activated[:rows])


def test_gathered_tokens_under_vmap(backend: str) -> None:
    case = GATHERED["small groups"]
    elements = [Operands(case, "fprop", "a", "bfloat16", seed) for seed in range(3)]
    spec = SwiGluSpec(GemmSpec("fprop", len(case.sizes), jnp.dtype("bfloat16")))
    stacked = jax.tree.map(lambda *arrays: jnp.stack(arrays), *((*one.arrays, one.groups) for one in elements))

    run = jax.jit(functools.partial(multiply_with_swiglu, spec=spec))
    got = jax.vmap(run)(*stacked)

    rows = sum(case.sizes)
    for index, element in enumerate(elements):
        for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(run(*element.arrays, element.groups)), strict=True):
            np.testing.assert_array_equal(one[index][:rows], other[:rows])


def test_gathered_tokens_make_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(primitive, "has_gathering_products", lambda: True)
    case = GATHERED["small groups"]
    given = Operands(case, "fprop", "a", "bfloat16")
    for keeps_product in (True, False):
        spec = SwiGluSpec(GemmSpec("fprop", len(case.sizes), jnp.dtype("bfloat16")), keeps_product=keeps_product)
        run = functools.partial(multiply_with_swiglu, spec=spec)
        (call,) = custom_calls(lowered(run, *given.arrays, given.groups))
        assert "swiglu = true" in call


def test_second_derivatives() -> None:
    case = Case((20, 12), 16, 256, tail=0)
    (gathered, kernel), groups = (operands := Operands(case, "fprop", "a", "bfloat16")).arrays, operands.groups
    gemm = GemmSpec("fprop", 2, jnp.dtype("bfloat16"))

    def curvature(fused: bool) -> jax.Array:
        def loss(x: jax.Array) -> jax.Array:
            a = gathered._replace(x=x)
            if fused:
                product, (activated,) = multiply_with_swiglu(a, kernel, groups, SwiGluSpec(gemm))
            else:
                activated = activate(product := multiply(a, kernel, groups, gemm), "swiglu")
            return jnp.sum(activated.astype(jnp.float32) ** 2) + jnp.sum(product.astype(jnp.float32))

        return jax.grad(lambda x: jnp.sum(jax.grad(loss)(x).astype(jnp.float32) ** 2))(gathered.x[:-1])

    gathered = gathered._replace(x=gathered.x[:-1], inverse=gathered.inverse[:-1])
    got, expected = (np.asarray(curvature(fused), np.float64) for fused in (True, False))
    assert np.linalg.norm(got - expected) < 1e-2 * np.linalg.norm(expected)
