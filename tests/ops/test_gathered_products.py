"""Products of rows of tokens, which they gather themselves where a kernel can, against NumPy in float64."""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_grouped.core.groups import Groups
from jax_grouped.kernels import extension, product
from jax_grouped.kernels.product import Gathered, GemmSpec, Product, multiply
from jax_grouped.kernels.rows import permute_rows
from tests import oracle
from tests.ops.quantize_cases import some
from tests.programs import custom_calls, lowered, products, struct, types

#: Relative Frobenius error per group. Tensor cores truncate partial sums, which shows in float32 results.
TOLERANCE = {"bfloat16": 4e-3, "float16": 5e-4, "float32": 5e-5}
CHOICES = 3


@dataclasses.dataclass(frozen=True)
class Case:
    sizes: tuple[int, ...]
    in_features: int
    out_features: int
    tail: int = 50

    @property
    def rows(self) -> int:
        return sum(self.sizes) + self.tail


CASES = {
    "one group": Case((300,), 64, 256),
    "no tail": Case((128, 256, 64), 128, 512, tail=0),
    "small groups": Case((37, 0, 190, 1, 0), 72, 264),
    "features of one chunk": Case((5, 70, 130), 8, 8),
    "odd tiles along both axes": Case((513, 129, 385), 328, 776),
    "37 groups": Case(tuple(int(size) for size in np.random.default_rng(0).integers(0, 90, 37)), 136, 40),
    "128 groups": Case(tuple(int(size) for size in np.random.default_rng(1).integers(0, 40, 128)), 192, 520),
    "several tiles per block": Case((3000, 0, 5000, 1111), 256, 1544),
    "more tiles than run at once": Case(
        tuple(int(size) for size in np.random.default_rng(2).integers(0, 200, 40)), 1024, 520
    ),
    "all empty": Case((0, 0), 64, 72),
}

FORMS: list[tuple[Product, str]] = [("fprop", "a"), ("dgrad", "a"), ("wgrad", "a"), ("wgrad", "b")]


class Operands:
    """The operands of one product, of which one is gathered. The last token and the rows of no group are NaN."""

    def __init__(self, case: Case, product: Product, gathered: str, dtype: str, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        local, tokens = sum(case.sizes), max(case.rows // 2, 2)
        features = dict(
            fprop=[case.in_features], dgrad=[case.out_features], wgrad=[case.in_features, case.out_features]
        )

        def random(*shape: int) -> np.ndarray:
            return rng.standard_normal(shape, np.float32).astype(jnp.dtype(dtype))

        pairs = rng.permutation((tokens - 1) * CHOICES)
        order = np.full(case.rows, (tokens - 1) * CHOICES, np.int32)  # pairs of the last token
        order[: min(local, pairs.size)] = pairs[:local]
        order[rng.random(case.rows) < 0.05] = tokens * CHOICES  # no pair
        inverse = np.full(tokens * CHOICES, case.rows, np.int32)
        placed = order < tokens * CHOICES
        inverse[order[placed]] = np.flatnonzero(placed)

        self.groups = Groups(jnp.asarray(case.sizes, jnp.int32), jnp.zeros(1, jnp.int32))
        self.arrays, self.rows = [], []
        for name, columns in zip("ab", features[product], strict=False):
            if name == gathered:
                x = random(tokens, columns)
                x[-1] = np.nan
                self.arrays.append(Gathered(*map(jnp.asarray, (x, order, inverse.reshape(tokens, -1)))))
                self.rows.append(np.where(placed[:, None], x[np.where(placed, order, 0) // CHOICES], 0))
            else:
                x = random(case.rows, columns)
                x[local:] = np.nan
                self.arrays.append(jnp.asarray(x))
                self.rows.append(x)
        if product != "wgrad":
            weight = random(len(case.sizes), case.in_features, case.out_features)
            self.arrays.append(jnp.asarray(weight))
            self.rows.append(weight)


def check(case: Case, product: Product, gathered: str, dtype: str, out_dtype: str) -> None:
    operands = Operands(case, product, gathered, dtype)
    sizes, num_groups = np.asarray(case.sizes), len(case.sizes)

    spec = GemmSpec(product, num_groups, out_dtype)
    got = jax.jit(lambda a, b, groups: multiply(a, b, groups, spec))(*operands.arrays, operands.groups)

    assert got.dtype == out_dtype
    a, b = operands.rows
    if product == "wgrad":
        oracle.assert_kernels_close(got, oracle.wgrad(a, b, sizes, num_groups), TOLERANCE[out_dtype])
    else:
        expected = (oracle.fprop if product == "fprop" else oracle.dgrad)(a, b, sizes)
        oracle.assert_groups_close(got, expected, sizes, num_groups, TOLERANCE[out_dtype])


@pytest.mark.parametrize("name", CASES)
def test_products_of_gathered_rows(backend: str, name: str) -> None:
    types = ("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("float16", "float16")
    for form, pair in some(backend, itertools.product(FORMS, types), [*CASES].index(name), count=2):
        check(CASES[name], *form, *pair)


@pytest.mark.parametrize(("product", "gathered"), FORMS)
def test_rows_of_no_group_may_hold_anything(backend: str, product: Product, gathered: str) -> None:
    case = Case((37, 0, 190), 64, 128)
    operands = Operands(case, product, gathered, "bfloat16")
    copied = [permute_rows(*one) if isinstance(one, Gathered) else one for one in operands.arrays]
    spec = GemmSpec(product, 3, "bfloat16")

    for arrays in (operands.arrays, copied):
        got, expected = (
            multiply(*arrays, operands.groups, dataclasses.replace(spec, zero_other_rows=zero))
            for zero in (False, True)
        )

        rows = slice(None) if product == "wgrad" else slice(sum(case.sizes))
        np.testing.assert_array_equal(got[rows].astype(jnp.float32), expected[rows].astype(jnp.float32))


@pytest.mark.parametrize(("product", "gathered"), FORMS)
def test_rows_that_no_kernel_can_gather_are_copied(backend: str, product: Product, gathered: str) -> None:
    for change in some(backend, [dict(in_features=70), dict(out_features=263)], FORMS.index((product, gathered))):
        case = dataclasses.replace(CASES["small groups"], **change)
        check(case, product, gathered, "bfloat16", "bfloat16")


@pytest.mark.parametrize(("product", "gathered"), FORMS)
def test_gathered_products_under_vmap(backend: str, product: Product, gathered: str) -> None:
    case = CASES["small groups"]
    elements = [Operands(case, product, gathered, "bfloat16", seed) for seed in range(3)]
    spec = GemmSpec(product, len(case.sizes), "float32")
    stacked = jax.tree.map(lambda *arrays: jnp.stack(arrays), *((*one.arrays, one.groups) for one in elements))

    got = jax.vmap(lambda a, b, groups: multiply(a, b, groups, spec))(*stacked)

    for one, element in zip(got, elements, strict=True):
        expected = multiply(*element.arrays, element.groups, spec)
        np.testing.assert_array_equal(one, expected)


@pytest.mark.parametrize(("product", "gathered"), FORMS)
def test_second_derivatives_are_those_of_the_product_of_copied_rows(
    backend: str, product: Product, gathered: str
) -> None:
    case = Case((5, 0, 9), 8, 16, tail=0)
    operands = Operands(case, product, gathered, "float32")
    a, b = (jax.tree.map(lambda x: jnp.nan_to_num(x) if x.dtype == "float32" else x, one) for one in operands.arrays)
    spec = GemmSpec(product, 3, "float32", jax.lax.Precision.HIGHEST)

    def with_values(operand: Any, values: jax.Array, copies: bool) -> Any:
        if not isinstance(operand, Gathered):
            return values
        replaced = operand._replace(x=values)
        return permute_rows(*replaced) if copies else replaced

    def gradient_of_gradient(copies: bool) -> Any:
        def loss(values: Any) -> jax.Array:
            return jnp.sum(multiply(*map(with_values, (a, b), values, (copies, copies)), operands.groups, spec) ** 3)

        def norm(values: Any) -> jax.Array:
            return sum(jnp.sum(gradient**2) for gradient in jax.grad(loss)(values))

        return jax.grad(norm)([one.x if isinstance(one, Gathered) else one for one in (a, b)])

    for got, expected in zip(gradient_of_gradient(False), gradient_of_gradient(True), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


def test_products_of_no_tokens(backend: str) -> None:
    none = Gathered(jnp.ones((0, 8)), jnp.zeros(4, jnp.int32), jnp.zeros((0, 2), jnp.int32))

    groups = Groups(jnp.array([2, 2]), jnp.zeros(1, jnp.int32))

    got = multiply(none, jnp.ones((2, 8, 16)), groups, GemmSpec("fprop", 2, "float32"))

    np.testing.assert_array_equal(got, jnp.zeros((4, 16)))


class Gpu:
    def __init__(self, compute_capability: str) -> None:
        self.compute_capability = compute_capability


def lowered_fprop(in_features: int = 16, dtype: str = "bfloat16", groups: int = 4) -> str:
    def fprop(x: jax.Array, order: jax.Array, inverse: jax.Array, weight: jax.Array, sizes: jax.Array) -> jax.Array:
        spec = GemmSpec("fprop", groups, "float32")
        return multiply(Gathered(x, order, inverse), weight, Groups(sizes, jnp.zeros(1, jnp.int32)), spec)

    arrays = [struct((10, in_features), dtype), struct((20,), "int32"), struct((10, 2), "int32")]
    return lowered(fprop, *arrays, struct((groups, in_features, 24), dtype), struct((groups,), "int32"))


@pytest.fixture
def _on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extension, "require_usable", lambda: None)
    monkeypatch.setattr(extension, "cuda_devices", lambda: [Gpu("9.0")])


@pytest.mark.usefixtures("_on_hopper")
def test_hopper_gathers_in_the_product() -> None:
    (call,) = custom_calls(lowered_fprop())

    assert "gathered = 1 : i32" in call
    assert types(call)[0] == ["10x16xbf16", "4x16x24xbf16", "4xi32", "1xi32", "20xi32"]
    assert types(call)[1][0] == "20x24xf32"


@pytest.mark.parametrize("devices", [[], [Gpu("10.0")], [Gpu("9.0"), Gpu("10.0")]], ids=["unknown", "B200", "both"])
def test_other_gpus_copy_the_rows_first(monkeypatch: pytest.MonkeyPatch, devices: list[Gpu]) -> None:
    monkeypatch.setattr(extension, "require_usable", lambda: None)
    monkeypatch.setattr(extension, "cuda_devices", lambda: devices)

    copy, product = custom_calls(lowered_fprop())

    assert "@jax_grouped_permute_rows" in copy
    assert "gathered = 0 : i32" in product


@pytest.mark.parametrize(
    "change", [dict(in_features=12), dict(dtype="float32"), dict(groups=product.MAX_GATHERED_GROUPS + 1)], ids=str
)
@pytest.mark.usefixtures("_on_hopper")
def test_products_that_no_kernel_gathers_are_of_copied_rows(change: dict[str, Any]) -> None:
    text = lowered_fprop(**change)

    assert set(products(text)) == {"fprop"}
    assert "gathered = 1" not in text
