"""`ragged_dot_general` and its gradients against dense sums."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import jax_grouped as jg
from tests.operands import normal
from tests.ops.quantize_cases import some
from tests.oracle import assert_trees_close
from tests.programs import custom_calls, lowered, products, struct, types
from tests.refusals import assert_refused


def numbers(contracting: Any, ragged: int, group: int | None = None, batch: Any = ((), ())) -> Any:
    """Returns dimension numbers of lists and tuples, as callers write them."""
    return jax.lax.RaggedDotDimensionNumbers((contracting, batch), [ragged], () if group is None else (group,))


@dataclasses.dataclass(frozen=True)
class Case:
    """A form: shapes, dimension numbers, and the sum in letters, where `m[t, g]` is 1 for a row of the group, else 0.

    No group has row 10, the last one.
    """

    lhs: tuple[int, ...]
    rhs: tuple[int, ...]
    sizes: Any
    dims: jax.lax.RaggedDotDimensionNumbers
    einsum: str

    def operands(self, seed: int = 0, dtype: str = "float32") -> tuple[jax.Array, jax.Array]:
        return normal(seed, self.lhs, dtype), normal(seed + 1, self.rhs, dtype)

    def run(self, lhs: jax.Array, rhs: jax.Array, **options: Any) -> jax.Array:
        return jg.ragged_dot_general(lhs, rhs, self.sizes, self.dims, **{"precision": "highest"} | options)

    def run_jax(self, lhs: jax.Array, rhs: jax.Array, **options: Any) -> jax.Array:
        return jax.lax.ragged_dot_general(lhs, rhs, jnp.asarray(self.sizes), self.dims, **options)

    def dense(self, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        if "m" not in self.einsum:
            return jnp.einsum(self.einsum, lhs, rhs, precision="highest")
        ends = np.cumsum(self.sizes, axis=-1)[..., None, :]
        row = np.arange(11)[:, None]
        mask = (row < ends) & (row >= ends - np.asarray(self.sizes)[..., None, :])
        return jnp.einsum(self.einsum.replace("m", "", 1), mask.astype(np.float32), lhs, rhs, precision="highest")


SIZES, SIZES_OF_EACH = [4, 0, 5], [[4, 0, 5], [1, 7, 2]]
FORMS = {
    "fprop": Case((11, 4), (3, 4, 5), SIZES, numbers(([1], [1]), 0, 0), "mtg,tk,gkn->tn"),
    "dgrad": Case((11, 4), (3, 5, 4), SIZES, numbers(([1], [2]), 0, 0), "mtg,tk,gnk->tn"),
    "wgrad": Case((11, 4), (11, 5), SIZES, numbers(([0], [0]), 0), "mtg,tk,tn->gkn"),
}
CASES = FORMS | {
    "rows last": Case((4, 11), (3, 4, 5), SIZES, numbers(([0], [1]), 1, 0), "mtg,kt,gkn->tn"),
    "groups in the middle": Case((11, 4), (4, 3, 5), SIZES, numbers(([1], [0]), 0, 1), "mtg,tk,kgn->tn"),
    "groups last": Case((11, 4), (5, 4, 3), SIZES, numbers(([1], [1]), 0, 2), "mtg,tk,nkg->tn"),
    "wgrad of rows last": Case((4, 11), (5, 11), SIZES, numbers(([1], [1]), 1), "mtg,kt,nt->gkn"),
    "batch": Case((2, 11, 4), (2, 3, 4, 5), SIZES, numbers(([2], [2]), 1, 1, ([0], [0])), "mtg,btk,bgkn->btn"),
    "batch with sizes of each": Case(
        (11, 2, 4), (3, 2, 5, 4), SIZES_OF_EACH, numbers(([2], [3]), 0, 0, ([1], [1])), "mbtg,tbk,gbnk->btn"
    ),
    "wgrad of a batch with sizes of each": Case(
        (2, 11, 4), (2, 11, 5), SIZES_OF_EACH, numbers(([1], [1]), 1, batch=([0], [0])), "mbtg,btk,btn->gbkn"
    ),
    "wgrad of two batch dimensions": Case(
        (2, 11, 4, 6), (6, 2, 11, 5), SIZES, numbers(([1], [2]), 1, batch=([3, 0], [0, 1])), "mtg,btkc,cbtn->gcbkn"
    ),
    "ragged batch": Case((11, 6, 4), (11, 4, 5), SIZES, numbers(([2], [1]), 0, batch=([0], [0])), "tik,tkn->tin"),
}


def gradients(function: Callable[..., jax.Array]) -> Callable[..., Any]:
    return jax.grad(lambda lhs, rhs: jnp.sum(jnp.sin(function(lhs, rhs))), argnums=(0, 1))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_results_and_derivatives_are_those_of_a_dense_sum(backend: str, case: Case) -> None:
    def derivatives(function: Callable[..., jax.Array]) -> Callable[..., Any]:
        def sines(lhs: jax.Array, rhs: jax.Array) -> Any:
            first = gradients(function)(lhs, rhs)
            return sum(jnp.sum(jnp.sin(gradient)) for gradient in first), (first, function(lhs, rhs))

        # The other cases are made of these forms.
        return jax.jit(jax.grad(sines, argnums=(0, 1), has_aux=True) if case in FORMS.values() else sines)

    lhs, rhs = case.operands()
    expected = derivatives(case.dense)(lhs, rhs)
    if "m" in case.einsum:  # A row of no group has no effect, whatever it holds.
        lhs = lhs.at[(*[slice(None)] * case.dims.lhs_ragged_dimensions[0], 10)].set(jnp.nan)
    assert_trees_close(derivatives(case.run)(lhs, rhs), expected, 1e-4)


def test_types_and_shapes_are_those_of_jax() -> None:
    for given, preferred in (
        (("bfloat16", "bfloat16"), None),
        (("bfloat16", "float16"), None),
        (("float16", "float32"), None),
        (("bfloat16", "bfloat16"), "float32"),
        (("float32", "float32"), "bfloat16"),
    ):
        for name, case in CASES.items():
            operands = [struct(shape, dtype) for shape, dtype in zip((case.lhs, case.rhs), given, strict=True)]
            runs = (functools.partial(run, preferred_element_type=preferred) for run in (case.run, case.run_jax))
            got, expected = (jax.eval_shape(run, *operands) for run in runs)
            assert (got.dtype, got.shape) == (expected.dtype, expected.shape), (name, given, preferred)


def test_group_offset_selects_groups_of_a_longer_list(backend: str) -> None:
    for name in some(backend, ["fprop", "dgrad", "batch with sizes of each", "batch"], 0, count=2):
        case = CASES[name]
        lhs, rhs = case.operands()
        (axis,) = case.dims.rhs_group_dimensions
        held, run = jax.lax.slice_in_dim(rhs, 0, 2, axis=axis), jax.jit(case.run)
        for offset in (0, 1, 2, -2, 5):
            # Zeros are the matrices that are elsewhere.
            index = np.arange(3) - offset
            index = np.where((index == 0) | (index == 1), index, 2)
            expected = case.dense(lhs, jnp.take(held, index, axis, mode="fill", fill_value=0))
            assert_trees_close(run(lhs, held, group_offset=offset), expected, 1e-4)


OPERANDS = {
    "fprop": (struct((32, 16)), struct((3, 16, 24))),
    "dgrad": (struct((32, 16)), struct((3, 24, 16))),
    "wgrad": (struct((32, 16)), struct((32, 24))),
}


def test_each_form_is_one_product_of_operands_as_they_are_and_its_gradients_are_the_others() -> None:
    for name, form in FORMS.items():
        text = lowered(form.run, *OPERANDS[name])
        (call,) = custom_calls(text)
        assert products(call) == [name]
        assert types(call)[0][:2] == ["x".join([*map(str, array.shape), "bf16"]) for array in OPERANDS[name]]
        assert "transpose" not in str(jax.make_jaxpr(form.run)(*OPERANDS[name]))
        text = lowered(gradients(form.run), *OPERANDS[name])
        assert sorted(products(text)) == ["dgrad", "fprop", "wgrad"]
        assert products(text)[0] == name
        assert "stablehlo.transpose" not in text
    # An operand of another order is transposed, and no other.
    text = lowered(CASES["rows last"].run, struct((16, 32)), struct((3, 16, 24)))
    (transpose,) = [line for line in text.splitlines() if "stablehlo.transpose" in line]
    assert "(tensor<16x32xbf16>) -> tensor<32x16xbf16>" in transpose


#: Presets that are as exact as each precision.
PRESETS = {
    "DEFAULT": ("DEFAULT", "BF16_BF16_BF16", "BF16_BF16_F32"),
    "HIGH": ("F16_F16_F16", "F16_F16_F32", "BF16_BF16_F32_X3", "TF32_TF32_F32"),
    "HIGHEST": ("BF16_BF16_F32_X6", "BF16_BF16_F32_X9", "TF32_TF32_F32_X3", "F32_F32_F32"),
}


def basic(lhs: jax.Array, rhs: jax.Array, **options: Any) -> jax.Array:
    return jg.ragged_dot(lhs, rhs, SIZES, **options)


def test_a_preset_counts_as_the_precision_that_is_as_exact() -> None:
    precisions = {preset: precision for precision, presets in PRESETS.items() for preset in presets}
    functions = {"fprop": basic, "dgrad": FORMS["dgrad"].run, "wgrad": FORMS["wgrad"].run}
    for name, function in functions.items():
        in_float32 = [struct(array.shape, jnp.float32) for array in OPERANDS[name]]
        presets = list(jax.lax.DotAlgorithmPreset)
        for preset in presets if function is basic else presets[::5]:
            with_preset = functools.partial(function, precision=preset)
            precision = precisions.get(preset.name)
            if precision is None:
                assert "F8" in preset.name or "F64" in preset.name
                with pytest.raises(ValueError, match=f"of 16-bit or 32-bit operands, got .*{preset.name}"):
                    jax.eval_shape(with_preset, *OPERANDS[name])
                continue
            assert f"precision=Precision.{precision}," in str(jax.make_jaxpr(with_preset)(*in_float32))
    # Products of bfloat16 that multiply float32.
    for precision, count in (("BF16_BF16_F32", 3), ("TF32_TF32_F32", 3), ("F32_F32_F32", 6)):
        with_preset = functools.partial(basic, precision=precision)
        assert (
            len(custom_calls(lowered(with_preset, *(struct(array.shape, "float32") for array in OPERANDS["fprop"]))))
            == count
        )
        assert len(custom_calls(lowered(with_preset, *OPERANDS["fprop"]))) == 1
    case = CASES["ragged batch"]
    program = jax.make_jaxpr(functools.partial(case.run, precision=jax.lax.DotAlgorithmPreset.TF32_TF32_F32))
    assert "precision=(Precision.HIGH, Precision.HIGH)" in str(program(*case.operands()))
    with pytest.raises(ValueError, match=r"of 16-bit or 32-bit operands, got .*F64_F64_F64"):
        case.run(*case.operands(), precision=jax.lax.DotAlgorithmPreset.F64_F64_F64)


def test_a_number_of_rows_can_be_left_open() -> None:
    (rows,) = export.symbolic_shape("rows")
    checks = [export.DisabledSafetyCheck.custom_call(name) for name in jg.CUSTOM_CALL_TARGETS]
    for form in FORMS.values():
        shapes = (tuple(rows if n == 11 else n for n in shape) for shape in (form.lhs, form.rhs))
        arguments = [struct(shape, jnp.float32) for shape in shapes]
        for platform in ("cpu", "cuda"):
            program = export.export(jax.jit(form.run), platforms=[platform], disabled_checks=checks)(*arguments)
            if platform == "cpu":
                operands = jax.device_put(form.operands(), jax.devices("cpu")[0])
                assert_trees_close(program.call(*operands), form.dense(*operands))


def test_what_does_not_fit_is_named() -> None:
    lhs, rhs, dims = jnp.ones((6, 4)), jnp.ones((2, 4, 3)), FORMS["fprop"].dims
    only = "ragged_dot_general supports "
    general = dict(lhs=jnp.ones((6, 4, 3)), ragged_dot_dimension_numbers=numbers(([1, 2], [1, 2]), 0, 0))
    refused: dict[str, dict[str, Any]] = {
        f"{only}one contracting dimension, and one other dimension of each": dict(rhs=jnp.ones((2, 4, 3, 5))),
        f"{only}one contracting dimension, ": dict(rhs=jnp.ones((2, 4, 3, 5)), **general),
        f"{only}group_offset only where rhs has a group dimension": dict(
            rhs=jnp.ones((6, 3)), ragged_dot_dimension_numbers=FORMS["wgrad"].dims, group_offset=1
        ),
        "ragged_dot_dimension_numbers must be a jax.lax.RaggedDotDimensionNumbers, got ((": dict(
            ragged_dot_dimension_numbers=(([1], [1]), ([], []))
        ),
        "lhs's type must be bfloat16, float16 or float32, got int8": dict(lhs=lhs.astype(jnp.int8)),
        "group_sizes must have at least the 2 groups of rhs, got 1": dict(group_sizes=[1], group_offset=0),
        "group_offset must be a scalar or have shape [1], got (2,)": dict(group_offset=[1, 2]),
    }
    given = dict(lhs=lhs, rhs=rhs, group_sizes=[2, 3], ragged_dot_dimension_numbers=dims)
    assert_refused(jg.ragged_dot_general, given, refused)
    # JAX itself refuses these.
    for changed in (
        dict(rhs=rhs[:, :2]),
        dict(group_sizes=[1, 2, 3]),
    ):
        with pytest.raises(TypeError):
            jg.ragged_dot_general(**given | changed)
