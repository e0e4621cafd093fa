"""What XLA makes of a training step for a GPU: beside the custom calls, what else is launched.

XLA compiles for a GPU that is not there if JAX's plugin for CUDA is installed; on a machine without a GPU, that takes
`JAX_PLATFORMS=cpu`, or the plugin looks for the GPU's libraries.
"""

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies

import jax_grouped as jg
from jax_grouped.backends import extension
from jax_grouped.recipes import Recipe
from tests.test_lowering import struct

pytest.importorskip("jax_plugins.xla_cuda13", reason="needs jax-cuda13-pjrt, but no GPU")
if extension.load() is None:
    # XLA asks each custom call's handler what it can do. CI builds them, and runs these tests with them.
    pytest.skip("needs the CUDA extension, but no GPU", allow_module_level=True)

T, K, N, E = 1024, 512, 256, 4
X, KERNEL, SIZES, DY = struct((T, K)), struct((E, K, N)), struct((E,), jnp.int32), struct((T, N))
BLOCK = jg.Float8BlockScaling()

#: What an H200 has.
H200 = """
platform_name: "CUDA"
device_description_str: "NVIDIA H200"
gpu_device_info {
  cuda_compute_capability { major: 9 }
  core_count: 132
  fpus_per_core: 128
  clock_rate_ghz: 1.98
  device_memory_size: 151397597184
  memory_bandwidth: 4800000000000
  l2_cache_size: 52428800
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  registers_per_block_limit: 65536
  registers_per_core_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
}
"""


@pytest.fixture(scope="module")
def sharding() -> jax.sharding.Sharding:
    topology = topologies.get_topology_desc("h200", "cuda", target_config=H200, topology="1x1x1")
    return jax.sharding.SingleDeviceSharding(topology.devices[0])


def compiled(function: Callable[..., Any], sharding: Any, *arguments: Any) -> jax.stages.Compiled:
    placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), arguments)
    # A command buffer would hide what it launches.
    options = {"xla_gpu_enable_command_buffer": ""}
    return jax.jit(function, out_shardings=sharding).lower(*placed).compile(options)


def launches(function: Callable[..., Any], sharding: Any, *arguments: Any, loop: bool = False) -> list[str]:
    """What the compiled program, or its one loop, launches, in no order: names of custom calls, and what XLA adds."""
    text = compiled(function, sharding, *arguments).as_text()
    assert text is not None
    begin = re.escape(re.findall(r" while\(.* body=(\S+?),", text)[0]) if loop else "ENTRY"
    (computation,) = re.findall(rf"^{begin} .*?^}}", text, re.DOTALL | re.MULTILINE)
    found = re.findall(r' = (?:\(.*?\)|\S+) ([\w-]+)\((?:.*custom_call_target="jax_grouped_(\w+)")?', computation)
    nothing = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast"}
    return sorted(call or name for name, call in found if name not in nothing)


def step(recipe: Recipe | None, wrap: Callable[..., Any] = lambda dense: dense) -> Callable[..., Any]:
    def results(x: Any, kernel: Any, sizes: Any, dy: Any, state: Any = None) -> Any:
        def dense(x: Any, kernel: Any, state: Any) -> jax.Array:
            return jg.grouped_dense(x, kernel, sizes, recipe=recipe, fp8_state=state)

        y, pullback = jax.vjp(wrap(dense), x, kernel, state)
        return y, pullback(dy)

    return results


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("recipe", [BLOCK, jg.Float8CurrentScaling()], ids=["block", "current"])
def test_a_step_in_fp8_launches_nothing_but_custom_calls(recipe: Recipe, dtype: str, sharding: Any) -> None:
    got = launches(step(recipe), sharding, X, struct((E, K, N), dtype), SIZES, DY)
    assert got == 3 * ["quantize"] + 3 * ["scaled_matmul"]


def test_delayed_scaling_adds_a_maximum_the_scales_and_the_histories(sharding: Any) -> None:
    recipe = jg.DelayedScaling()
    state = jax.eval_shape(lambda: jg.Fp8State.initial(recipe, E))
    got = launches(step(recipe), sharding, X, KERNEL, SIZES, DY, state)
    assert got == 3 * ["fusion"] + 3 * ["quantize"] + 3 * ["scaled_matmul"]


@pytest.mark.parametrize(("dtype", "conversions"), [("bfloat16", []), ("float32", ["fusion"])])
def test_a_step_without_a_recipe_converts_a_wider_kernel_once(
    dtype: str, conversions: list[str], sharding: Any
) -> None:
    got = launches(step(None), sharding, X, struct((E, K, N), dtype), SIZES, DY)
    assert got == conversions + 3 * ["matmul"]


def test_swiglu_is_part_of_the_quantization(sharding: Any) -> None:
    def results(x: Any, gate_up: Any, down: Any, sizes: Any, dy: Any) -> Any:
        def mlp(x: Any, gate_up: Any, down: Any) -> jax.Array:
            return jg.moe.grouped_mlp(x, gate_up, down, sizes, recipe=BLOCK)

        y, pullback = jax.vjp(mlp, x, gate_up, down)
        return y, pullback(dy)

    got = launches(results, sharding, X, struct((E, K, 2 * N)), struct((E, N, K)), SIZES, X)
    assert got == 6 * ["quantize"] + 6 * ["scaled_matmul"]


def test_microbatches_add_to_the_gradient_where_it_is(sharding: Any) -> None:
    def results(xs: Any, kernel: Any, sizes: Any, dys: Any, gradient: Any) -> Any:
        cache = jg.quantize_kernel(kernel, BLOCK)

        def microbatch(gradient: Any, operands: Any) -> Any:
            x, dy = operands
            y, residuals = jg.grouped_dense_fwd(x, kernel, sizes, recipe=BLOCK, kernel_cache=cache)
            dx, pending = jg.grouped_dense_dgrad(residuals, dy)
            return jg.grouped_dense_wgrad(pending, dkernel_accumulator=gradient)[0], (y, dx)

        return jax.lax.scan(microbatch, gradient, (xs, dys))

    gradient = struct((E, K, N), jnp.float32)
    got = launches(results, sharding, struct((3, T, K)), KERNEL, SIZES, struct((3, T, N)), gradient, loop=True)
    # Four calls take or make slices of what is scanned, which is part of them or not, and the loop is counted.
    assert got.count("fusion") == 5
    assert "copy" not in got


def test_memory_beside_arguments_and_results(sharding: Any) -> None:
    tokens, in_features, out_features, groups = 32768, 7168, 4096, 32
    arguments = (
        struct((tokens, in_features)),
        struct((groups, in_features, out_features)),
        struct((groups,), jnp.int32),
        struct((tokens, out_features)),
    )
    x_bytes, kernel_bytes = tokens * in_features, groups * in_features * out_features  # in FP8
    keep_tokens = jax.checkpoint_policies.save_only_these_names("jax_grouped_x")

    def temporaries(recipe: Recipe | None, **options: Any) -> int:
        analysis: Any = compiled(step(recipe, **options), sharding, *arguments).memory_analysis()
        return analysis.temp_size_in_bytes

    workspace = 2**25
    assert temporaries(None) < 1.05 * workspace
    # The kernel's other orientation, and the tokens', lie where results come later.
    assert temporaries(BLOCK) < 1.05 * (x_bytes + kernel_bytes + workspace)
    # Of the kernel, one orientation is there at a time.
    assert temporaries(BLOCK, wrap=functools.partial(jax.checkpoint, policy=keep_tokens)) < 0.8 * kernel_bytes
