"""A training step as XLA compiles it for a GPU: the custom calls, and everything else that it launches."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_grouped as jg
from benchmarks import memory
from benchmarks.memory import compile_for_h200, h200s, missing
from benchmarks.shapes import SHAPES
from jax_grouped.fp8.recipes import Recipe
from jax_grouped.kernels import rows
from jax_grouped.kernels.routing import RouteSpec, route
from jax_grouped.moe import experts
from tests.programs import struct

if what := missing():
    # CI installs all of it, and runs these tests with it.
    pytest.skip(f"needs {what}, but no GPU", allow_module_level=True)

T, K, N, E = 1024, 512, 256, 4
X, KERNEL, SIZES, DY = struct((T, K)), struct((E, K, N)), struct((E,), jnp.int32), struct((T, N))
BLOCK, CURRENT, DELAYED = jg.Float8BlockScaling(), jg.Float8CurrentScaling(), jg.DelayedScaling()


def compile_and_list(function: Callable[..., Any], *arguments: Any, loop: bool = False) -> list[str]:
    """Lists the launches of the compiled program, or of its one loop, in no order: custom calls, and those XLA adds."""
    # A command buffer would hide what it launches.
    compiled = compile_for_h200(function, *arguments, options={"xla_gpu_enable_command_buffer": ""})
    return sorted(list_launches(compiled, loop=loop))


def list_launches(compiled: Any, *, loop: bool = False) -> list[str]:
    """Lists the launches in the order of the program."""
    text = compiled.as_text()
    begin = re.escape(re.findall(r" while\(.* body=(\S+?),", text)[0]) if loop else "ENTRY"
    (computation,) = re.findall(rf"^{begin} .*?^}}", text, re.DOTALL | re.MULTILINE)
    found = re.findall(r' = (?:\(.*?\)|\S+) ([\w-]+)\((?:.*custom_call_target="jax_grouped_(\w+)")?', computation)
    nothing = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast"}
    return [call or name for name, call in found if name not in nothing]


def step(recipe: Recipe | None) -> Callable[..., Any]:
    def results(x: Any, kernel: Any, sizes: Any, dy: Any, state: Any = None) -> Any:
        def dense(x: Any, kernel: Any, state: Any) -> jax.Array:
            return jg.grouped_dense(x, kernel, sizes, recipe=recipe, fp8_state=state)

        y, pullback = jax.vjp(dense, x, kernel, state)
        return y, pullback(dy)

    return results


@pytest.mark.parametrize(
    ("recipe", "dtype", "more"),
    [
        (BLOCK, "float32", []),
        (CURRENT, "bfloat16", []),
        # A maximum, the scales, the histories and the marks.
        (DELAYED, "bfloat16", 4 * ["fusion"]),
        (None, "bfloat16", []),
        # The kernel is converted once.
        (None, "float32", ["fusion"]),
    ],
    ids=str,
)
def test_a_step_launches_little_but_custom_calls(recipe: Recipe | None, dtype: str, more: list[str]) -> None:
    states = [jax.eval_shape(lambda: jg.Fp8State.initial(DELAYED, E))] if recipe is DELAYED else []
    got = compile_and_list(step(recipe), X, struct((E, K, N), dtype), SIZES, DY, *states)
    assert got == more + 3 * ["gemm"] + (3 * ["quantize"] if recipe else [])


def test_a_narrow_kernel_is_converted_in_a_loop_over_parts_of_it() -> None:
    groups, features = 64, 2048
    arguments = struct((512, features)), struct((groups, features, features), jnp.int8), struct((groups,), jnp.int32)

    def gradient(x: jax.Array, *rest: jax.Array) -> jax.Array:
        return jax.grad(lambda x: jg.ragged_dot(x, *rest).astype(jnp.float32).sum())(x)

    for function in (jg.ragged_dot, gradient):
        compiled = compile_for_h200(function, *arguments)
        assert list_launches(compiled, loop=True).count("gemm") == 1
        # A part, and the workspace of a product; the kernel would take 512 MiB.
        assert compiled.memory_analysis().temp_size_in_bytes < 2**27


def on(mesh: jax.sharding.Mesh, array: Any, spec: P) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=NamedSharding(mesh, spec))


def compile_for_mesh(function: Callable[..., Any], *arguments: Any) -> Any:
    return jax.jit(function).lower(*arguments).compile({"xla_gpu_enable_command_buffer": ""})


def test_sums_over_devices_run_beside_products() -> None:
    mesh = jax.sharding.Mesh(np.reshape(h200s(4), (2, 2)), ("data", "model"))
    specs = P("data", "model"), P(None, "model"), P(), P("data")
    arguments = (on(mesh, *pair) for pair in zip((X, KERNEL, SIZES, DY), specs, strict=True))

    program = list_launches(compile_for_mesh(step(BLOCK), *arguments))

    # One fusion makes the sizes of a device's groups, and one rounds the sum of the kernel's gradients.
    others = ["all-reduce-start", "all-reduce-done"] * 2 + ["fusion", "fusion", "partition-id"]
    assert sorted(program) == sorted([*["gemm"] * 3, *["quantize"] * 5, *others])
    begun = [i for i, name in enumerate(program) if name == "all-reduce-start"]
    assert any(program[i + 1] in {"gemm", "quantize"} for i in begun)


def test_a_shared_expert_runs_during_the_gather_of_tokens() -> None:
    mesh = jax.sharding.Mesh(np.asarray(h200s(2)), "expert")

    def results(x: Any, logits: Any, gate_up: Any, down: Any, shared: Any) -> Any:
        options = dict(router=jg.moe.Router(2), parallel=jg.moe.Parallel(experts="expert"))
        return jg.moe.moe_mlp(x, logits, gate_up, down, shared=x @ shared, **options)[0]

    shapes = (2 * T, K), (2 * T, 2 * E), (2 * E, K, 2 * N), (2 * E, N, K), (K, K)
    arguments = (on(mesh, struct(shape), P("expert" if i < 4 else None)) for i, shape in enumerate(shapes))

    text = compile_for_mesh(results, *arguments).as_text()

    names = re.findall(r"^ +%?([\w.-]+) = ", text.split("ENTRY", 1)[1], re.MULTILINE)
    (product,) = (i for i, name in enumerate(names) if name.startswith("gemm_fusion_dot"))
    begun, done = (
        next(i for i, name in enumerate(names) if name.startswith(f"all-gather-{end}")) for end in ("start", "done")
    )
    assert begun < product < done


@pytest.mark.parametrize("recipe", [None, BLOCK], ids=["bf16", "block"])
def test_work_runs_during_the_transfers_of_a_layer(recipe: Recipe | None) -> None:
    # So many features that wgrad copies the rows of tokens first.
    program = list_layer_launches("expert", 1024, recipe, jg.moe.Parallel(experts="expert"))

    def during(kind: str) -> list[set[str]]:
        begun = [i for i, name in enumerate(program) if name == f"{kind}-start"]
        return [set(program[i + 1 : program.index(f"{kind}-done", i)]) for i in begun]

    # Some versions of XLA also start the second half of the sums, with nothing to run meanwhile.
    first_sums, *_, weights, tokens = during("all-to-all")
    assert "sum_rows" in first_sums  # The second half is summed.
    assert "gemm" in weights
    assert "gemm" in tokens
    gathered = during("all-gather")
    if recipe is None:
        assert any("permute_rows" in names for names in gathered)
    else:
        assert sum("quantize" in names for names in gathered) >= 2


@pytest.mark.parametrize("recipe", [None, BLOCK], ids=["bf16", "block"])
def test_products_run_while_weights_are_gathered(recipe: Recipe | None) -> None:
    program = list_layer_launches("fsdp", N, recipe, jg.moe.Parallel(fsdp="fsdp"))

    products = [i for i, name in enumerate(program) if name == "gemm"]
    gathered = [i for i, name in enumerate(program) if name in {"all-gather", "all-gather-start"}]
    assert any(i > products[1] for i in gathered)  # in the backward pass
    begun = [i for i, name in enumerate(program) if name == "all-gather-start"]
    assert sum("gemm" in program[i : program.index("all-gather-done", i)] for i in begun) >= 2


def list_layer_launches(axis: str, features: int, recipe: Recipe | None, parallel: jg.moe.Parallel) -> list[str]:
    """Returns what two GPUs along a mesh axis launch for both passes of a layer, whose arrays are split over it."""
    mesh = jax.sharding.Mesh(np.asarray(h200s(2)), axis)
    shapes = (2 * T, K), (2 * T, 2 * E), (2 * E, K, 2 * features), (2 * E, features, K), (2 * T, K)

    def results(x: Any, logits: Any, gate_up: Any, down: Any, dy: Any) -> Any:
        def layer(*arrays: Any) -> jax.Array:
            return jg.moe.moe_mlp(*arrays, router=jg.moe.Router(2), parallel=parallel, recipe=recipe)[0]

        y, pull_back = jax.vjp(layer, x, logits, gate_up, down)
        return y, pull_back(jax.lax.optimization_barrier((y, dy))[1])

    return list_launches(compile_for_mesh(results, *(on(mesh, struct(shape), P(axis)) for shape in shapes)))


def test_routing_is_the_choice_of_experts_and_the_order_of_the_rows() -> None:
    def results(logits: Any, bias: Any = None) -> Any:
        return route(logits, bias, RouteSpec(2, "sigmoid", True, expert_groups=2), rows=T)

    for bias in ([], [struct((E,), jnp.float32)]):
        assert compile_and_list(results, struct((T, E)), *bias) == ["group_pairs", "route"]
    got = compile_and_list(lambda experts: jg.moe.group_by_expert(experts, E, capacity=T), struct((T, 2), jnp.int32))
    assert got == ["group_pairs"]


def test_weights_in_fp8_alone_are_not_widened() -> None:
    layer = jg.linen.MoEMlp(16, 2048, jg.moe.Router(2), recipe=BLOCK, cache_kernel=True)
    x = struct((64, 2048))

    def in_fp8(key: Any) -> Any:
        return jg.linen.quantize_for_inference(layer.init(key, jnp.zeros(x.shape, x.dtype)), BLOCK)

    made = memory.compile_for_h200(layer.apply, jax.eval_shape(in_fp8, jax.random.key(0)), x)

    assert list_launches(made).count("quantize") == 1  # of the activation's result; another call quantizes the tokens
    gate_up_in_bfloat16 = 2 * 16 * 2048 * 2 * 2048
    assert made.memory_analysis().temp_size_in_bytes < gate_up_in_bfloat16 / 2


def test_microbatches_add_to_the_gradient_where_it_is() -> None:
    def results(xs: Any, kernel: Any, sizes: Any, dys: Any, gradient: Any) -> Any:
        cache = jg.quantize_kernel(kernel, BLOCK)

        def microbatch(gradient: Any, operands: Any) -> Any:
            x, dy = operands
            y, residuals = jg.grouped_dense_fwd(x, kernel, sizes, recipe=BLOCK, kernel_cache=cache)
            dx, pending = jg.grouped_dense_dgrad(residuals, dy)
            return jg.grouped_dense_wgrad(pending, dkernel_accumulator=gradient)[0], (y, dx)

        return jax.lax.scan(microbatch, gradient, (xs, dys))

    gradient = struct((E, K, N), jnp.float32)
    got = compile_and_list(results, struct((3, T, K)), KERNEL, SIZES, struct((3, T, N)), gradient, loop=True)
    # Four slices of the scanned arrays are read or written; XLA makes that part of a call, or a copy beside the calls.
    # One more fusion counts the loop.
    assert got.count("fusion") + got.count("fusion-start") == 5
    assert "copy" not in got


def test_no_product_of_a_scan_is_computed_twice() -> None:
    def gradients(x: Any, kernels: Any, sizes: Any) -> Any:
        def loss(x: Any, kernels: Any) -> jax.Array:
            y, _ = jax.lax.scan(lambda x, pair: (jg.moe.grouped_mlp(x, *pair, sizes, recipe=BLOCK), None), x, kernels)
            return y.astype(jnp.float32).sum()

        return jax.grad(loss, (0, 1))(x, kernels)

    kernels = struct((3, E, K, 2 * N)), struct((3, E, N, K))
    compiled = compile_for_h200(gradients, X, kernels, SIZES).as_text()
    # XLA may make a product and its slicing one fusion. The gradient keeps the input of the activation.
    assert compiled.count('custom_call_target="jax_grouped_gemm"') == 6


def test_memory_beside_arguments_and_results(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = SHAPES["dsv3 up"]

    def planned(operation: str, *variants: str) -> list[int]:
        return [memory.planned_bytes(shape, operation, variant) for variant in variants]

    x, kernel, workspace = shape.tokens * shape.K, shape.num_groups * shape.K * shape.N, 2**25  # in FP8
    without, nothing = "block, kernels are not kept", "bf16, nothing is kept"
    bf16, block, not_kept = planned("gradients, bfloat16 kernel", "bf16", "block", without)
    assert bf16 < 1.05 * workspace
    # The other orientations of kernel and tokens use memory that later holds results.
    assert block < 1.05 * (x + kernel + workspace)
    # Only one orientation of the kernel is in memory at a time.
    assert not_kept < 0.8 * kernel
    # Kernels are converted to bf16, and change in place.
    not_kept, recomputed = planned("SGD, float32 kernel", without, nothing)
    assert not_kept < recomputed
    not_kept, recomputed, bf16, block = planned("SGD of four pairs", without, nothing, "bf16", "block")
    assert not_kept < recomputed < bf16
    assert block < bf16
    kept, *smaller = planned("four MLPs", "bf16", "bf16, hidden in host memory", "block, cached", without)
    assert max(smaller) < kept

    # JAX's derivative of the activation keeps 22 bytes of each number between the products, ours 6.
    monkeypatch.setattr(experts, "activate", rows.activate.__wrapped__)
    (by_jax,) = planned("four MLPs", "bf16")
    assert by_jax - kept > 15 * 4 * shape.tokens * shape.N / 2


@pytest.mark.parametrize("recipe", [None, BLOCK], ids=["bf16", "block"])
def test_a_layer_of_experts_keeps_its_tokens_the_input_of_swiglu_and_the_routing(recipe: Recipe | None) -> None:
    tokens, experts, top_k, features, hidden = 8192, 16, 8, 1024, 256
    dtype = jnp.bfloat16

    def norm(x: jax.Array) -> jax.Array:
        return jnp.sum(x.astype(jnp.float32) ** 2)

    def planned(layers: int) -> int:
        def loss(x: Any, kernels: Any) -> jax.Array:
            for router, gate_up, down in kernels:
                x = x + jg.moe.moe_mlp(x, x @ router, gate_up, down, router=jg.moe.Router(top_k), recipe=recipe)[0]
            return norm(x)

        def norms(*arguments: Any) -> Any:
            # No gradient is a result, in whose memory XLA would keep what waits.
            return jax.tree.map(norm, jax.grad(loss, (0, 1))(*arguments))

        shapes = [(features, experts), (experts, features, 2 * hidden), (experts, hidden, features)]
        kernels = layers * [[struct(shape, dtype) for shape in shapes]]
        compiled = compile_for_h200(norms, struct((tokens, features), dtype), kernels)
        return compiled.memory_analysis().temp_size_in_bytes

    per_layer = (planned(6) - planned(3)) / 3
    rows = tokens * top_k
    # Logits in the type of x, probabilities, experts and weights, and the order of the rows with its inverse.
    routing = tokens * experts * (2 + 4) + 4 * rows * (2 + 2)
    kernels = 0 if recipe is None else experts * 3 * features * hidden * 1.1  # Quantized rowwise, and scales.
    expected = 2 * tokens * features + 2 * rows * 2 * hidden + routing + kernels
    assert per_layer < 1.03 * expected
