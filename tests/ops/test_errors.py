"""Bad arguments raise at trace time, in a sentence that names the argument, what it is and the rule."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_grouped as jg
from jax_grouped.kernels import extension
from tests.programs import custom_calls
from tests.refusals import assert_refused

X = jnp.ones((6, 4))
KERNEL = jnp.ones((2, 4, 3))
SIZES = jnp.array([2, 3])


def test_ragged_dot_refuses() -> None:
    sizes = "group_sizes must be of an integer type, got "
    entries = "group_sizes must have one entry per group of rhs, which holds 2, got "
    refused: dict[str, dict[str, Any]] = {
        "lhs's type must be bfloat16, float16 or float32, got int8.": dict(lhs=X.astype(jnp.int8)),
        "rhs's type must be bfloat16, float16, float32, or one of int4, uint4, int8, uint8, float8_e4m3fn, "
        "float8_e5m2, got int32.": dict(rhs=KERNEL.astype(jnp.int32)),
        "lhs must have shape [T, K], got (4,).": dict(lhs=X[0]),
        "rhs must have shape [G, K, N], got (4, 3).": dict(rhs=KERNEL[0]),
        "rhs.shape[1] must equal lhs.shape[1] (K), got rhs (2, 2, 3) and lhs (6, 4).": dict(rhs=KERNEL[:, :2]),
        f"{sizes}float32.": dict(group_sizes=SIZES * 1.0),
        f"{sizes}None.": dict(group_sizes=None),
        f"{sizes}'2, 3'.": dict(group_sizes="2, 3"),
        f"{sizes}[[2], [1, 1]].": dict(group_sizes=[[2], [1, 1]]),
        "group_sizes must have shape [E], got (1, 2).": dict(group_sizes=SIZES[None]),
        "group_sizes must fit into 64 bits, got [1180591620717411303424, 1].": dict(group_sizes=[2**70, 1]),
        f"{entries}0 (a longer one needs group_offset).": dict(group_sizes=[]),
        f"{entries}3 (a longer one needs group_offset).": dict(group_sizes=jnp.array([1, 2, 3])),
        "group_sizes must have at least the 2 groups of rhs, got 1.": dict(group_sizes=SIZES[:1], group_offset=0),
        "lhs must be an array, got None.": dict(lhs=None),
        "rhs must be an array, got 'kernel'.": dict(rhs="kernel"),
        "rhs must be an array, got an object of type dict.": dict(rhs={"kernel": KERNEL}),
        "group_offset must be of an integer type, got float32.": dict(group_offset=1.0),
        "group_offset must be a scalar or have shape [1], got (2,).": dict(group_offset=SIZES),
        "preferred_element_type must be bfloat16, float16 or float32, got int32.": dict(
            preferred_element_type=jnp.int32
        ),
        "preferred_element_type must be bfloat16, float16 or float32, got 'fp8'.": dict(preferred_element_type="fp8"),
        "precision must not be a recipe: jax_grouped.grouped_dense takes recipes, as recipe=.": dict(
            precision=jg.Float8BlockScaling()
        ),
        "precision must be DEFAULT, HIGH or HIGHEST (or a pair of these), or a DotAlgorithmPreset of 16-bit or 32-bit "
        "operands, got 'F64_F64_F64'.": dict(precision="F64_F64_F64"),
    }
    assert_refused(jg.ragged_dot, dict(lhs=X, rhs=KERNEL, group_sizes=SIZES), refused)


def test_sequences_of_integers_are_group_sizes() -> None:
    for sizes in ([2, 3], (2, 3), range(2, 4)):
        assert (jg.ragged_dot(X, KERNEL, sizes) == jg.ragged_dot(X, KERNEL, SIZES)).all()


def test_a_list_of_scalars_of_the_device_is_read_there() -> None:
    y = jax.jit(lambda first, second: jg.ragged_dot(X, KERNEL, [first, second]))(2, 3)
    assert (y == jg.ragged_dot(X, KERNEL, SIZES)).all()


def test_a_setting_of_jax_that_float32_products_cannot_have_is_named() -> None:
    with (
        jax.default_matmul_precision("ANY_F8_ANY_F8_F32"),
        pytest.raises(ValueError, match=r"^precision must be .* got 'ANY_F8_ANY_F8_F32' from jax_default_matmul_prec"),
    ):
        jg.ragged_dot(X, KERNEL, SIZES)


def test_unknown_backend_is_refused_and_the_earlier_one_stays() -> None:
    before = jg.config.backend
    with pytest.raises(ValueError, match=re.escape("backend (JAX_GROUPED_BACKEND) must be one of ('auto', 'xla')")):
        jg.config.backend = "gpu"
    assert jg.config.backend == before


@pytest.mark.parametrize("sizes", [[-1, 3], [4, 3]], ids=["negative", "past the rows"])
def test_checked_group_sizes_raise(sizes: list[int]) -> None:
    message = "group_sizes must not be negative and must add up to at most 6 rows"
    with jg.config.override(check=True):
        with pytest.raises(ValueError, match=message):
            jg.ragged_dot(X, KERNEL, jnp.array(sizes))
        with pytest.raises(jax.errors.JaxRuntimeError, match=message):
            jax.block_until_ready(jax.jit(jg.ragged_dot)(X, KERNEL, jnp.array(sizes)))
            jax.effects_barrier()


def test_checked_group_sizes_pass() -> None:
    with jg.config.override(check=True):
        y = jax.jit(jg.ragged_dot)(X, KERNEL, SIZES)
        jax.effects_barrier()
    assert float(y.sum()) == 5 * 3 * 4


class _Device:
    device_kind = "NVIDIA Example"

    def __init__(self, compute_capability: str):
        self.compute_capability = compute_capability


class _Extension:
    def __init__(self, version: int):
        self._version = version

    def cublaslt_version(self) -> int:
        return self._version


@pytest.mark.parametrize(
    ("module", "capability", "message"),
    [
        (None, "9.0", "jax_grouped was installed without its CUDA extension. From a checkout of jax_grouped, run: "),
        (_Extension(131000), "8.0", "NVIDIA Example has compute capability 8.0; the cuda backend needs 9.0 (Hopper)"),
        (_Extension(131000), "12.0", "NVIDIA Example has compute capability 12.0; the cuda backend needs 9.0 (Hopper)"),
        (_Extension(130101), "9.0", "cuBLAS 13.1.1 is loaded; the cuda backend needs 13.8 or newer. Run: python3 -m "),
        (_Extension(0), "9.0", "no cuBLASLt (libcublasLt.so.13) is found; the cuda backend needs 13.8"),
    ],
    ids=["no extension", "old GPU", "new GPU", "old cuBLAS", "no cuBLAS"],
)
def test_lowering_for_a_gpu_that_cannot_run_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, module: _Extension | None, capability: str, message: str
) -> None:
    monkeypatch.setattr(extension, "load", lambda: module)
    monkeypatch.setattr(extension, "cuda_devices", lambda: [_Device(capability)])
    extension.problem_once.cache_clear()
    try:
        with pytest.raises(RuntimeError, match=f"^{re.escape(message)}"):
            extension.require_usable()
    finally:
        extension.problem_once.cache_clear()


def test_a_gpu_that_can_run_raises_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extension, "load", lambda: _Extension(131000))
    monkeypatch.setattr(extension, "cuda_devices", lambda: [_Device("9.0")])
    assert extension.find_problem() is None


def lowered_for_cuda(recipe: object) -> str:
    """Lowers `grouped_dense` with the recipe, as for the GPUs that seem to be there."""
    x, kernel = jax.ShapeDtypeStruct((6, 16), jnp.float32), jax.ShapeDtypeStruct((2, 16, 16), jnp.float32)
    step = jax.jit(lambda x, kernel: jg.grouped_dense(x, kernel, SIZES, recipe=recipe))
    return step.trace(x, kernel).lower(lowering_platforms=("cuda",)).as_text()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Simulates a GPU of this compute capability."""
    monkeypatch.setattr(extension, "cuda_devices", lambda: [_Device(request.param)])
    monkeypatch.setattr(extension, "problem_once", lambda: None)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("gpu", ["10.0"], indirect=True)
def test_block_scaling_on_blackwell_says_what_to_use() -> None:
    message = (
        "Float8BlockScaling needs Hopper (compute capability 9.0), NVIDIA Example has 10.0: use MXFP8BlockScaling."
    )
    with pytest.raises(RuntimeError, match=re.escape(message)):
        lowered_for_cuda(jg.Float8BlockScaling())


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(("gpu", "scaled"), [("9.0", "false"), ("10.0", "true")], indirect=["gpu"])
def test_mx_products_are_of_bfloat16_on_hopper_only(scaled: str) -> None:
    (call,) = custom_calls(lowered_for_cuda(jg.MXFP8BlockScaling()), "jax_grouped_gemm")
    assert f"scaled = {scaled}" in call


def test_an_extension_that_does_not_load_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def load() -> None:
        raise ImportError("undefined symbol")

    monkeypatch.setattr(extension, "load", load)
    message = "The CUDA extension of jax_grouped does not load: undefined symbol. From a checkout"
    assert str(extension.find_problem()).startswith(message)


def test_arrays_on_explicit_mesh_axes_are_refused() -> None:
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Explicit,), devices=jax.devices("cpu")[:2])
    x = jax.device_put(X, NamedSharding(mesh, P("data")))
    with pytest.raises(ValueError, match=re.escape("call it inside jax.shard_map")):
        jg.moe.top_k_routing(x, jg.moe.Router(2))
