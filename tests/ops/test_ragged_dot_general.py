"""`ragged_dot_general` against `jax.lax.ragged_dot_general`, and its gradients against dense sums."""

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
from tests.ops.quantize_cases import some
from tests.oracle import assert_trees_close
from tests.programs import custom_calls, lowered, products, struct, types
from tests.refusals import assert_refused


def numbers(
    contracting: tuple[list[int], list[int]],
    ragged: int,
    group: int | None = None,
    batch: tuple[list[int], list[int]] = ([], []),
) -> jax.lax.RaggedDotDimensionNumbers:
    return jax.lax.RaggedDotDimensionNumbers((contracting, batch), [ragged], [] if group is None else [group])


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
        keys = jax.random.split(jax.random.key(seed))
        return tuple(jax.random.normal(*pair, dtype) for pair in zip(keys, (self.lhs, self.rhs), strict=True))

    def run(self, lhs: jax.Array, rhs: jax.Array, **options: Any) -> jax.Array:
        return jg.ragged_dot_general(lhs, rhs, self.sizes, self.dims, **{"precision": "highest"} | options)

    def run_jax(self, lhs: jax.Array, rhs: jax.Array, **options: Any) -> jax.Array:
        # For GPUs, JAX 0.11.2 does not lower its own with batch dimensions.
        lhs, rhs, sizes = jax.device_put((lhs, rhs, jnp.asarray(self.sizes)), jax.local_devices(backend="cpu")[0])
        return jax.lax.ragged_dot_general(lhs, rhs, sizes, self.dims, **{"precision": "highest"} | options)

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

each_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def gradients(function: Callable[..., jax.Array]) -> Callable[..., Any]:
    return jax.grad(lambda lhs, rhs: jnp.sum(jnp.sin(function(lhs, rhs))), argnums=(0, 1))


def second_and_first_gradients(function: Callable[..., jax.Array]) -> Callable[..., Any]:
    def sines(lhs: jax.Array, rhs: jax.Array) -> Any:
        first = gradients(function)(lhs, rhs)
        return sum(jnp.sum(jnp.sin(gradient)) for gradient in first), first

    return jax.jit(jax.grad(sines, argnums=(0, 1), has_aux=True))


@each_case
def test_results_are_those_of_jax(backend: str, case: Case) -> None:
    lhs, rhs = case.operands()
    if "m" in case.einsum:  # A row of no group has no effect, whatever it holds.
        lhs = lhs.at[(*[slice(None)] * case.dims.lhs_ragged_dimensions[0], 10)].set(jnp.nan)
    got, expected = jax.jit(case.run)(lhs, rhs), case.run_jax(lhs, rhs)
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    assert_trees_close(got, expected)


@each_case
def test_gradients_are_those_of_a_dense_sum(backend: str, case: Case) -> None:
    got, expected = (second_and_first_gradients(function)(*case.operands()) for function in (case.run, case.dense))
    assert_trees_close(got, expected, 1e-4)


@pytest.mark.parametrize(
    ("name", "axes"),
    [
        ("fprop", (0, 0, 0)),
        ("fprop", (0, None, 0)),
        ("dgrad", (1, 2, None)),
        ("dgrad", (None, 1, None)),
        ("wgrad", (0, None, 0)),
        ("wgrad", (1, 2, None)),
    ],
)
def test_vmap_gives_the_results_of_each(backend: str, name: str, axes: tuple[int | None, ...]) -> None:
    form = FORMS[name]
    operands = [*zip(*(form.operands(seed) for seed in range(3)), strict=True), (SIZES, [0, 0, 0], [10, 0, 1])]
    mapped = [
        jnp.asarray(arrays[0]) if axis is None else jnp.stack([*map(jnp.asarray, arrays)], axis)
        for arrays, axis in zip(operands, axes, strict=True)
    ]

    got = jax.vmap(lambda *arrays: jg.ragged_dot_general(*arrays, form.dims, precision="highest"), axes)(*mapped)

    for i in range(3):
        lhs, rhs, sizes = (
            arrays[0] if axis is None else arrays[i] for arrays, axis in zip(operands, axes, strict=True)
        )
        assert_trees_close(got[i], dataclasses.replace(form, sizes=sizes).run_jax(lhs, rhs))


def test_types_are_those_of_jax(backend: str) -> None:
    for i, (given, preferred) in enumerate(
        [
            (("bfloat16", "bfloat16"), None),
            (("bfloat16", "float16"), None),
            (("float16", "float32"), None),
            (("bfloat16", "bfloat16"), "float32"),
            (("float32", "float32"), "bfloat16"),
        ]
    ):
        for form in some(backend, FORMS.values(), i):
            operands = [array.astype(dtype) for array, dtype in zip(form.operands(), given, strict=True)]
            got, expected = (run(*operands, preferred_element_type=preferred) for run in (form.run, form.run_jax))
            assert got.dtype == expected.dtype, (given, preferred)
            assert_trees_close(got.astype(jnp.float32), expected.astype(jnp.float32), 2e-2)


@each_form
def test_arrays_without_elements_give_zeros(backend: str, form: Case) -> None:
    for size, length in {"rows": 11, "groups": 3, "contracting": 4, "other": 5}.items():
        lhs, rhs = (tuple(0 if n == length else n for n in shape) for shape in (form.lhs, form.rhs))
        empty = dataclasses.replace(form, lhs=lhs, rhs=rhs, sizes=np.array([] if size == "groups" else SIZES, np.int32))
        arrays = jnp.ones(lhs), jnp.ones(rhs)

        got, pull_back = jax.vjp(empty.run, *arrays)

        assert got.shape == jax.eval_shape(empty.run_jax, *arrays).shape
        assert not np.any(got)
        for gradient, array in zip(pull_back(jnp.ones_like(got)), arrays, strict=True):
            assert gradient.shape == array.shape
            assert not np.any(gradient)


@pytest.mark.parametrize("name", ["fprop", "dgrad", "batch", "batch with sizes of each"])
def test_group_offset_selects_groups_of_a_longer_list(backend: str, name: str) -> None:
    case = CASES[name]
    lhs, rhs = case.operands()
    (axis,) = case.dims.rhs_group_dimensions
    held, run = jax.lax.slice_in_dim(rhs, 0, 2, axis=axis), jax.jit(case.run)
    for offset in (0, 1, 2, -2, 5):
        # JAX has no offset: it gets zeros as the matrices that are elsewhere.
        index = np.arange(3) - offset
        index = np.where((index == 0) | (index == 1), index, 2)
        expected = case.run_jax(lhs, jnp.take(held, index, axis, mode="fill", fill_value=0))
        assert_trees_close(run(lhs, held, group_offset=offset), expected)


OPERANDS = {
    "fprop": (struct((32, 16)), struct((3, 16, 24))),
    "dgrad": (struct((32, 16)), struct((3, 24, 16))),
    "wgrad": (struct((32, 16)), struct((32, 24))),
}


@pytest.mark.parametrize("name", FORMS)
def test_each_form_is_one_product_of_operands_as_they_are(name: str) -> None:
    text = lowered(FORMS[name].run, *OPERANDS[name])
    (call,) = custom_calls(text)
    assert products(call) == [name]
    operands, _ = types(call)
    assert operands[:2] == ["x".join([*map(str, array.shape), "bf16"]) for array in OPERANDS[name]]
    assert "stablehlo.transpose" not in text
    assert "transpose" not in str(jax.make_jaxpr(FORMS[name].run)(*OPERANDS[name]))


@pytest.mark.parametrize("name", FORMS)
def test_gradients_of_each_form_are_the_other_products_of_operands_as_they_are(name: str) -> None:
    text = lowered(gradients(FORMS[name].run), *OPERANDS[name])
    assert sorted(products(text)) == ["dgrad", "fprop", "wgrad"]
    assert products(text)[0] == name
    assert "stablehlo.transpose" not in text


def test_operands_of_another_order_are_transposed_and_no_other() -> None:
    rows_last = CASES["rows last"]
    text = lowered(rows_last.run, struct((16, 32)), struct((3, 16, 24)))
    (transpose,) = [line for line in text.splitlines() if "stablehlo.transpose" in line]
    assert "(tensor<16x32xbf16>) -> tensor<32x16xbf16>" in transpose


#: Precisions as exact as each preset, and the numbers of products of bfloat16 that multiply float32 with them.
PRESETS = {
    "DEFAULT": ("DEFAULT", 3),
    "BF16_BF16_BF16": ("DEFAULT", 3),
    "BF16_BF16_F32": ("DEFAULT", 3),
    "F16_F16_F16": ("HIGH", 3),
    "F16_F16_F32": ("HIGH", 3),
    "BF16_BF16_F32_X3": ("HIGH", 3),
    "TF32_TF32_F32": ("HIGH", 3),
    "BF16_BF16_F32_X6": ("HIGHEST", 6),
    "BF16_BF16_F32_X9": ("HIGHEST", 6),
    "TF32_TF32_F32_X3": ("HIGHEST", 6),
    "F32_F32_F32": ("HIGHEST", 6),
}


def basic(lhs: jax.Array, rhs: jax.Array, **options: Any) -> jax.Array:
    return jg.ragged_dot(lhs, rhs, SIZES, **options)


FUNCTIONS = {"ragged_dot": (basic, "fprop")} | {name: (form.run, name) for name, form in FORMS.items()}
each_function = pytest.mark.parametrize(("function", "name"), FUNCTIONS.values(), ids=FUNCTIONS)


@each_function
def test_a_preset_counts_as_the_precision_that_is_as_exact(function: Callable[..., jax.Array], name: str) -> None:
    in_float32 = [struct(array.shape, jnp.float32) for array in OPERANDS[name]]
    for preset in jax.lax.DotAlgorithmPreset:
        with_preset = functools.partial(function, precision=preset)
        if preset.name not in PRESETS:
            assert "F8" in preset.name or "F64" in preset.name
            for operands in (in_float32, OPERANDS[name]):
                with pytest.raises(ValueError, match=f"of 16-bit or 32-bit operands, got .*{preset.name}"):
                    jax.eval_shape(with_preset, *operands)
            continue
        precision, count = PRESETS[preset.name]
        assert f"precision=Precision.{precision}," in str(jax.make_jaxpr(with_preset)(*in_float32))
        if function is basic:
            assert len(custom_calls(lowered(with_preset, *in_float32))) == count
            assert len(custom_calls(lowered(with_preset, *OPERANDS[name]))) == 1


def test_a_ragged_batch_takes_the_same_presets() -> None:
    case = CASES["ragged batch"]
    program = jax.make_jaxpr(functools.partial(case.run, precision=jax.lax.DotAlgorithmPreset.TF32_TF32_F32))
    assert "precision=(Precision.HIGH, Precision.HIGH)" in str(program(*case.operands()))
    with pytest.raises(ValueError, match=r"of 16-bit or 32-bit operands, got .*F64_F64_F64"):
        case.run(*case.operands(), precision=jax.lax.DotAlgorithmPreset.F64_F64_F64)


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
@each_form
def test_a_number_of_rows_can_be_left_open(form: Case, platform: str) -> None:
    (rows,) = export.symbolic_shape("rows")
    checks = [export.DisabledSafetyCheck.custom_call(name) for name in jg.CUSTOM_CALL_TARGETS]
    arguments = [struct(tuple(rows if n == 11 else n for n in shape), jnp.float32) for shape in (form.lhs, form.rhs)]
    exported = export.export(jax.jit(form.run), platforms=[platform], disabled_checks=checks)(*arguments)
    if platform == "cpu":
        operands = jax.device_put(form.operands(), jax.devices("cpu")[0])
        assert_trees_close(exported.call(*operands), form.dense(*operands))


def test_a_program_may_replace_the_function_of_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    case = FORMS["dgrad"]
    expected = case.run_jax(*case.operands())
    monkeypatch.setattr(jax.lax, "ragged_dot_general", jg.ragged_dot_general)
    assert_trees_close(case.run_jax(*case.operands()), expected)


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
        "rhs must be an array, got 'matrices'": dict(rhs="matrices"),
        "group_sizes must be of an integer type, got float": dict(group_sizes=[1.0, 2.0]),
        "preferred_element_type must be bfloat16, float16 or float32, got int8.": dict(preferred_element_type="int8"),
        "precision must not be a recipe": dict(precision=jg.Float8BlockScaling()),
        "group_sizes must have at least the 2 groups of rhs, got 1": dict(group_sizes=[1], group_offset=0),
        "group_offset must be a scalar or have shape [1], got (2,)": dict(group_offset=[1, 2]),
    }
    given = dict(lhs=lhs, rhs=rhs, group_sizes=[2, 3], ragged_dot_dimension_numbers=dims)
    assert_refused(jg.ragged_dot_general, given, refused)
    # JAX itself refuses these.
    for changed in (
        dict(rhs=rhs[:, :2]),
        dict(group_sizes=[1, 2, 3]),
        dict(group_sizes=[[1, 2]]),
        dict(ragged_dot_dimension_numbers=numbers(([1], [1]), 2, 0)),
        dict(ragged_dot_dimension_numbers=numbers(([1], [1]), 0)),
    ):
        with pytest.raises(TypeError):
            jg.ragged_dot_general(**given | changed)
