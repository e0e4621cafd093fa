"""Bad arguments raise at trace time, in a sentence that names the argument, what it is and the rule."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import export
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_grouped as jg
from jax_grouped.kernels import primitive
from tests.programs import custom_calls, lowered, struct
from tests.refusals import assert_refused

X = jnp.ones((6, 4))
KERNEL = jnp.ones((2, 4, 3))
SIZES = jnp.array([2, 3])
BLOCK, CURRENT = jg.Float8BlockScaling(), jg.Float8CurrentScaling()


def test_ragged_dot_refuses() -> None:
    sizes = "group_sizes must be of an integer type, got "
    entries = "group_sizes must have one entry per group of rhs, which holds 2, got "
    refused: dict[str, dict[str, Any]] = {
        "lhs's type must be bfloat16, float16 or float32, got int8.": dict(lhs=X.astype(jnp.int8)),
        "rhs's type must be bfloat16, float16, float32, int4, uint4, int8, uint8, float8_e4m3fn or float8_e5m2, got "
        "int32.": dict(rhs=KERNEL.astype(jnp.int32)),
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
        "group_offset must be of an integer type, got float64.": dict(group_offset=1.0),
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


def test_sequences_of_integers_and_scalars_of_the_device_are_group_sizes() -> None:
    expected = jg.ragged_dot(X, KERNEL, SIZES)
    for sizes in ([2, 3], (2, 3), range(2, 4)):
        assert (jg.ragged_dot(X, KERNEL, sizes) == expected).all()
    assert (jax.jit(lambda first, second: jg.ragged_dot(X, KERNEL, [first, second]))(2, 3) == expected).all()


def test_settings_that_do_not_fit_are_named() -> None:
    message = r"^precision must be .* got 'ANY_F8_ANY_F8_F32' from jax_default_matmul_prec"
    with jax.default_matmul_precision("ANY_F8_ANY_F8_F32"), pytest.raises(ValueError, match=message):
        # Only products of float32 need to know it.
        jg.ragged_dot(X.astype(jnp.bfloat16), KERNEL.astype(jnp.bfloat16), SIZES)
        jax.eval_shape(functools.partial(jg.grouped_dense, recipe=BLOCK), *DENSE.values())
        jg.ragged_dot(X, KERNEL, SIZES)
    before = jg.config.backend
    with pytest.raises(ValueError, match=re.escape("backend (JAX_GROUPED_BACKEND) must be one of ('auto', 'xla')")):
        jg.config.backend = "gpu"
    assert jg.config.backend == before


def test_group_sizes_are_checked_on_demand() -> None:
    message = "group_sizes must not be negative and must add up to at most 6 rows"
    with jg.config.override(check=True):
        product = jax.jit(jg.ragged_dot)
        for sizes in ([-1, 3], [4, 3]):
            with pytest.raises(ValueError, match=message):
                jg.ragged_dot(X, KERNEL, jnp.array(sizes))
            with pytest.raises(jax.errors.JaxRuntimeError, match=message):
                jax.block_until_ready(product(X, KERNEL, jnp.array(sizes)))
                jax.effects_barrier()
        y = product(X, KERNEL, SIZES)
        jax.effects_barrier()
    assert float(y.sum()) == 5 * 3 * 4


DENSE = dict(x=jnp.ones((6, 32)), kernel=jnp.ones((2, 32, 48)), group_sizes=SIZES)


def test_grouped_dense_refuses() -> None:
    no_recipe = "recipe must be a recipe such as Float8BlockScaling(), or None, got "
    same = "kernel_cache must be of the same shape and recipe as kernel: "
    delayed = jg.DelayedScaling(amax_history_len=4)
    state = jg.Fp8State.initial(delayed, 2)
    block_cache = jax.eval_shape(lambda: jg.quantize_kernel(jnp.ones((4, 144, 272)), BLOCK))
    delayed_cache = jax.eval_shape(lambda: jg.quantize_kernel(DENSE["kernel"], delayed, scale=jnp.ones(2)))
    refused: dict[str, dict[str, Any]] = {
        f"{no_recipe}'fp8'.": dict(recipe="fp8"),
        f"{no_recipe}the class DelayedScaling: pass DelayedScaling().": dict(recipe=jg.DelayedScaling),
        "bias must have shape [G, N] = (2, 48), got (3,).": dict(bias=jnp.ones(3)),
        "bias must be an array [G, N] or None, got a recipe: recipe is keyword-only.": dict(bias=BLOCK, recipe=None),
        "kernel must be an array, got None.": dict(kernel=None),
        "DelayedScaling needs fp8_state: start with jax_grouped.Fp8State.initial(recipe, num_groups=2).": dict(
            recipe=delayed
        ),
        "fp8_state is for DelayedScaling, got recipe Float8CurrentScaling(": dict(recipe=CURRENT, fp8_state=state),
        "fp8_state must be a jax_grouped.Fp8State, got dict.": dict(recipe=delayed, fp8_state={}),
        "fp8_state.input_amax_history must have shape (2, 1024) for 2 groups and amax_history_len 1024, got": dict(
            recipe=jg.DelayedScaling(), fp8_state=state
        ),
        "fp8_state.input_amax_history must be float32, got bfloat16.": dict(
            recipe=delayed, fp8_state=jax.tree.map(lambda x: x.astype(jnp.bfloat16), state)
        ),
        "dkernel_accumulator must have the kernel's shape (2, 32, 48), got (2, 48, 32).": dict(
            dkernel_accumulator=jnp.ones((2, 48, 32))
        ),
        "dkernel_accumulator must be float32 for this kernel, got bfloat16.": dict(
            dkernel_accumulator=jnp.ones((2, 32, 48), jnp.bfloat16)
        ),
        "recipe.fwd_dtype must be float8_e4m3fn, got float8_e5m2 with grad_dtype float8_e5m2: of the two operands of a "
        "product only one may be float8_e5m2, and x and kernel both have fwd_dtype.": dict(
            recipe=jg.Float8CurrentScaling(fwd_dtype="float8_e5m2")
        ),
        "N must be a multiple of 16, got 24 from kernel (2, 32, 24); pad": dict(kernel=jnp.ones((2, 32, 24))),
        "K must be a multiple of 16, got 24 from kernel (2, 24, 48); pad": dict(
            x=jnp.ones((6, 24)), kernel=jnp.ones((2, 24, 48))
        ),
        "precision is for recipe=None; FP8 products have only one. Got 'highest'.": dict(precision="highest"),
        "kernel_cache needs a recipe, the one that it was made with.": dict(recipe=None, kernel_cache=block_cache),
        "Without a recipe kernel_cache must be kernel in the type of x, ((2, 32, 48), 'float32'), got ": dict(
            recipe=None, kernel_cache=jnp.ones((2, 32, 48), jnp.bfloat16)
        ),
        "kernel_cache must be a KernelCache, got int.": dict(kernel_cache=3),
        same: dict(kernel_cache=block_cache),
        f"{same}recipe must be Float8CurrentScaling, got DelayedScaling.": dict(
            recipe=CURRENT, kernel_cache=delayed_cache
        ),
    }
    assert_refused(jg.grouped_dense, DENSE | dict(recipe=BLOCK), refused)


def test_the_halves_refuse() -> None:
    _, residuals = jg.grouped_dense_fwd(**DENSE)
    _, pending = jg.grouped_dense_dgrad(residuals, jnp.ones((6, 48)))
    refused: dict[str, dict[str, Any]] = {
        "residuals must be those of grouped_dense_fwd": dict(residuals=(1, 2)),
        "dy must have the result's shape (6, 48), got (6, 32).": dict(dy=jnp.ones((6, 32))),
        "dy's type must be bfloat16, float16 or float32, got int32.": dict(dy=jnp.ones((6, 48), jnp.int32)),
    }
    assert_refused(jg.grouped_dense_dgrad, dict(residuals=residuals, dy=jnp.ones((6, 48))), refused)
    shape = "dkernel_accumulator must have the kernel's shape (2, 32, 48), got (3,)."
    refused = {
        "pending must be that of grouped_dense_dgrad, got NoneType": dict(pending=None),
        shape: dict(dkernel_accumulator=jnp.ones(3)),
    }
    assert_refused(jg.grouped_dense_wgrad, dict(pending=pending), refused)


def test_a_recipe_needs_to_know_the_number_of_tokens() -> None:
    (tokens,) = export.symbolic_shape("t")
    message = "With a recipe the number of tokens must be known when the program is traced, got x (t, 32)."
    with pytest.raises(ValueError, match=re.escape(message)):
        export.export(jax.jit(functools.partial(jg.grouped_dense, recipe=BLOCK)))(
            struct((tokens, 32), jnp.float32), struct((2, 32, 48), jnp.float32), SIZES
        )


def test_second_derivatives_that_do_not_exist_say_so() -> None:
    for options in (dict(recipe=BLOCK), dict(dkernel_accumulator=DENSE["kernel"])):

        def loss(kernel: jax.Array, options: Any = options) -> jax.Array:
            return jnp.sum(jg.grouped_dense(DENSE["x"], kernel, SIZES, **options) ** 2)

        with pytest.raises(NotImplementedError, match="of first order with a recipe or a dkernel_accumulator"):
            jax.grad(lambda kernel, loss=loss: jnp.sum(jax.grad(loss)(kernel)))(DENSE["kernel"])


class _Device:
    device_kind = "NVIDIA Example"

    def __init__(self, compute_capability: str):
        self.compute_capability = compute_capability


class _Extension:
    def __init__(self, version: int):
        self._version = version

    def cublaslt_version(self) -> int:
        return self._version


def test_lowering_for_a_gpu_that_cannot_run_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise ImportError("undefined symbol")

    hopper = "the cuda backend needs 9.0 (Hopper)"
    newer = "the cuda backend needs 13.8"
    for load, capability, message in (
        (lambda: None, "9.0", "jax_grouped was installed without its CUDA extension. From a checkout of jax_grouped, "),
        (broken, "9.0", "The CUDA extension of jax_grouped does not load: undefined symbol. From a checkout"),
        (lambda: _Extension(131000), "8.0", f"NVIDIA Example has compute capability 8.0; {hopper}"),
        (lambda: _Extension(131000), "12.0", f"NVIDIA Example has compute capability 12.0; {hopper}"),
        (lambda: _Extension(130101), "9.0", f"cuBLAS 13.1.1 is loaded; {newer} or newer. Run: python3 -m "),
        (lambda: _Extension(0), "9.0", f"no cuBLASLt (libcublasLt.so.13) is found; {newer}"),
        (lambda: _Extension(131000), "9.0", None),
    ):
        monkeypatch.setattr(primitive, "load_extension", load)
        monkeypatch.setattr(primitive, "cuda_devices", lambda capability=capability: [_Device(capability)])
        primitive.find_problem.cache_clear()
        jax.clear_caches()  # One of them has lowered programs.
        program = jax.jit(jg.ragged_dot).trace(jnp.ones((4, 8)), jnp.ones((1, 8, 8)), jnp.array([4]))
        try:
            if message is None:
                program.lower(lowering_platforms=("cuda",))
            else:
                with pytest.raises(RuntimeError, match=f"^{re.escape(message)}"):
                    program.lower(lowering_platforms=("cuda",))
        finally:
            primitive.find_problem.cache_clear()


def test_recipes_fit_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def lowered_for_cuda(capability: str, recipe: jg.Recipe) -> str:
        monkeypatch.setattr(primitive, "cuda_devices", lambda: [_Device(capability)])
        monkeypatch.setattr(primitive, "find_problem", lambda: None)
        dense = functools.partial(jg.grouped_dense, recipe=recipe)
        return lowered(dense, struct((6, 16), jnp.float32), struct((2, 16, 16), jnp.float32), SIZES)

    # MX products are of bfloat16 on Hopper only.
    for capability, scaled in (("9.0", "false"), ("10.0", "true")):
        (call,) = custom_calls(lowered_for_cuda(capability, jg.MXFP8BlockScaling()), "jax_grouped_gemm")
        assert f"scaled = {scaled}" in call
    message = "Float8BlockScaling needs Hopper (compute capability 9.0), NVIDIA Example has 10.0: use MXFP8BlockScaling"
    with pytest.raises(RuntimeError, match=re.escape(message)):
        lowered_for_cuda("10.0", BLOCK)


def test_arrays_on_explicit_mesh_axes_are_refused() -> None:
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Explicit,), devices=jax.devices("cpu")[:2])
    x = jax.device_put(X, NamedSharding(mesh, P("data")))
    with pytest.raises(ValueError, match=re.escape("call it inside jax.shard_map")):
        jg.moe.top_k_routing(x, jg.moe.Router(2))
