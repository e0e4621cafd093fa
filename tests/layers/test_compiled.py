"""A training step as XLA compiles it for a GPU: the custom calls, and everything else that it launches."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_grouped as jg
from benchmarks import memory
from benchmarks.__main__ import main as benchmark
from benchmarks.memory import compile_for_h200, h200s, missing
from benchmarks.shapes import SHAPES
from jax_grouped.fp8.recipes import Recipe
from jax_grouped.kernels import rows
from jax_grouped.kernels.routing import RouteSpec
from jax_grouped.moe import experts
from jax_grouped.ops.routing import route_and_group
from tests.programs import struct

if what := missing():
    # CI installs all of it, and runs these tests with it.
    pytest.skip(f"needs {what}, but no GPU", allow_module_level=True)

T, K, N, E = 1024, 512, 256, 4
X, KERNEL, SIZES, DY = struct((T, K)), struct((E, K, N)), struct((E,), jnp.int32), struct((T, N))
BLOCK = jg.Float8BlockScaling()


def launches(function: Callable[..., Any], *arguments: Any, loop: bool = False) -> list[str]:
    """Lists the launches of the compiled program, or of its one loop, in no order: custom calls, and those XLA adds."""
    # A command buffer would hide what it launches.
    compiled = compile_for_h200(function, *arguments, options={"xla_gpu_enable_command_buffer": ""})
    return sorted(launches_of(compiled, loop=loop))


def launches_of(compiled: Any, *, loop: bool = False) -> list[str]:
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


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("recipe", [BLOCK, jg.Float8CurrentScaling()], ids=["block", "current"])
def test_a_step_in_fp8_launches_nothing_but_custom_calls(recipe: Recipe, dtype: str) -> None:
    got = launches(step(recipe), X, struct((E, K, N), dtype), SIZES, DY)
    assert got == 3 * ["gemm"] + 3 * ["quantize"]


def test_delayed_scaling_adds_a_maximum_the_scales_the_histories_and_the_marks() -> None:
    recipe = jg.DelayedScaling()
    state = jax.eval_shape(lambda: jg.Fp8State.initial(recipe, E))
    got = launches(step(recipe), X, KERNEL, SIZES, DY, state)
    assert got == 4 * ["fusion"] + 3 * ["gemm"] + 3 * ["quantize"]


def test_a_narrow_kernel_is_converted_in_a_loop_over_parts_of_it() -> None:
    groups, features = 64, 2048
    arguments = struct((512, features)), struct((groups, features, features), jnp.int8), struct((groups,), jnp.int32)

    def gradient(x: jax.Array, *rest: jax.Array) -> jax.Array:
        return jax.grad(lambda x: jg.ragged_dot(x, *rest).astype(jnp.float32).sum())(x)

    for function in (jg.ragged_dot, gradient):
        compiled = compile_for_h200(function, *arguments)
        assert launches_of(compiled, loop=True).count("gemm") == 1
        # A part, and the workspace of a product; the kernel would take 512 MiB.
        assert compiled.memory_analysis().temp_size_in_bytes < 2**27


@pytest.mark.parametrize(("dtype", "conversions"), [("bfloat16", []), ("float32", ["fusion"])])
def test_a_step_without_a_recipe_converts_a_wider_kernel_once(dtype: str, conversions: list[str]) -> None:
    got = launches(step(None), X, struct((E, K, N), dtype), SIZES, DY)
    assert got == conversions + 3 * ["gemm"]


@pytest.mark.parametrize(("recipe", "quantizations"), [(None, 0), (BLOCK, 5)], ids=["bf16", "block"])
def test_sums_over_devices_run_beside_products(recipe: Recipe | None, quantizations: int) -> None:
    mesh = jax.sharding.Mesh(np.reshape(h200s(4), (2, 2)), ("data", "model"))
    specs = P("data", "model"), P(None, "model"), P(), P("data")
    arguments = [
        jax.ShapeDtypeStruct(of.shape, of.dtype, sharding=NamedSharding(mesh, spec))
        for of, spec in zip((X, KERNEL, SIZES, DY), specs, strict=True)
    ]

    made = jax.jit(step(recipe)).lower(*arguments).compile({"xla_gpu_enable_command_buffer": ""})

    # One fusion makes the sizes of a device's groups, and one rounds the sum of the kernel's gradients.
    program = launches_of(made)
    sums = ["all-reduce-start", "all-reduce-done"] * 2
    others = ["fusion", "fusion", "partition-id"]
    assert sorted(program) == sorted([*["gemm"] * 3, *["quantize"] * quantizations, *sums, *others])
    begun = [i for i, of in enumerate(program) if of == "all-reduce-start"]
    assert any(program[i + 1] in {"gemm", "quantize"} for i in begun)


def test_a_shared_expert_runs_during_the_gather_of_tokens() -> None:
    mesh = jax.sharding.Mesh(np.asarray(h200s(2)), "expert")

    def results(x: Any, logits: Any, gate_up: Any, down: Any, shared: Any) -> Any:
        options = dict(router=jg.moe.Router(2), parallel=jg.moe.Parallel(experts="expert"))
        return jg.moe.moe_mlp(x, logits, gate_up, down, shared=x @ shared, **options)[0]

    shapes = (2 * T, K), (2 * T, 2 * E), (2 * E, K, 2 * N), (2 * E, N, K), (K, K)
    arguments = [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, P("expert" if i < 4 else None)))
        for i, shape in enumerate(shapes)
    ]

    made = jax.jit(results).lower(*arguments).compile({"xla_gpu_enable_command_buffer": ""})

    names = re.findall(r"^ +%?([\w.-]+) = ", made.as_text().split("ENTRY", 1)[1], re.MULTILINE)
    (product,) = (i for i, name in enumerate(names) if name.startswith("gemm_fusion_dot"))
    begun, done = (
        next(i for i, name in enumerate(names) if name.startswith(f"all-gather-{of}")) for of in ("start", "done")
    )
    assert begun < product < done


@pytest.mark.parametrize("recipe", [None, BLOCK], ids=["bf16", "block"])
def test_work_runs_during_the_transfers_of_a_layer(recipe: Recipe | None) -> None:
    # So many features that wgrad copies the rows of tokens first.
    program = launches_of_a_layer("expert", 1024, recipe, jg.moe.Parallel(experts="expert"))

    def during(kind: str) -> list[set[str]]:
        begun = [i for i, name in enumerate(program) if name == f"{kind}-start"]
        return [set(program[i + 1 : program.index(f"{kind}-done", i)]) for i in begun]

    # Some versions of XLA also start the second half of the sums, with nothing to run meanwhile.
    first_sums, *_, of_weights, of_tokens = during("all-to-all")
    assert "sum_rows" in first_sums  # The second half is summed.
    assert "gemm" in of_weights
    assert "gemm" in of_tokens
    gathered = during("all-gather")
    if recipe is None:
        assert any("permute_rows" in names for names in gathered)
    else:
        assert sum("quantize" in names for names in gathered) >= 2


@pytest.mark.parametrize("recipe", [None, BLOCK], ids=["bf16", "block"])
def test_products_run_while_weights_are_gathered(recipe: Recipe | None) -> None:
    program = launches_of_a_layer("fsdp", N, recipe, jg.moe.Parallel(fsdp="fsdp"))

    products = [i for i, name in enumerate(program) if name == "gemm"]
    gathered = [i for i, name in enumerate(program) if name in {"all-gather", "all-gather-start"}]
    assert any(i > products[1] for i in gathered)  # in the backward pass
    begun = [i for i, name in enumerate(program) if name == "all-gather-start"]
    assert sum("gemm" in program[i : program.index("all-gather-done", i)] for i in begun) >= 2


def launches_of_a_layer(axis: str, features: int, recipe: Recipe | None, parallel: jg.moe.Parallel) -> list[str]:
    """Returns what two GPUs along a mesh axis launch for both passes of a layer, whose arrays are split over it."""
    mesh = jax.sharding.Mesh(np.asarray(h200s(2)), axis)
    shapes = (2 * T, K), (2 * T, 2 * E), (2 * E, K, 2 * features), (2 * E, features, K), (2 * T, K)

    def results(x: Any, logits: Any, gate_up: Any, down: Any, dy: Any) -> Any:
        def layer(*arrays: Any) -> jax.Array:
            return jg.moe.moe_mlp(*arrays, router=jg.moe.Router(2), parallel=parallel, recipe=recipe)[0]

        y, pull_back = jax.vjp(layer, x, logits, gate_up, down)
        return y, pull_back(jax.lax.optimization_barrier((y, dy))[1])

    arguments = [jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, P(axis))) for shape in shapes]
    return launches_of(jax.jit(results).lower(*arguments).compile({"xla_gpu_enable_command_buffer": ""}))


def test_swiglu_is_part_of_the_quantization() -> None:
    def results(x: Any, gate_up: Any, down: Any, sizes: Any, dy: Any) -> Any:
        def mlp(x: Any, gate_up: Any, down: Any) -> jax.Array:
            return jg.moe.grouped_mlp(x, gate_up, down, sizes, recipe=BLOCK)

        y, pullback = jax.vjp(mlp, x, gate_up, down)
        return y, pullback(dy)

    got = launches(results, X, struct((E, K, 2 * N)), struct((E, N, K)), SIZES, X)
    assert got == 6 * ["gemm"] + 6 * ["quantize"]


@pytest.mark.parametrize("bias", [True, False], ids=["with bias", "without bias"])
def test_routing_is_the_choice_of_experts_and_the_order_of_the_rows(bias: bool) -> None:
    def results(logits: Any, bias: Any = None) -> Any:
        return route_and_group(logits, bias, RouteSpec(2, "sigmoid", True, expert_groups=2), rows=T)

    arguments = [struct((T, E)), *[struct((E,), jnp.float32)][: int(bias)]]
    assert launches(results, *arguments) == ["group_pairs", "route"]


def test_pairs_are_grouped_by_one_call() -> None:
    got = launches(lambda experts: jg.moe.group_by_expert(experts, E, capacity=T), struct((T, 2), jnp.int32))
    assert got == ["group_pairs"]


def test_weights_in_fp8_alone_are_not_widened() -> None:
    layer = jg.linen.MoEMlp(16, 2048, jg.moe.Router(2), recipe=BLOCK, cache_kernel=True)
    x = struct((64, 2048))

    def in_fp8(key: Any) -> Any:
        return jg.linen.quantize_for_inference(layer.init(key, jnp.zeros(x.shape, x.dtype)), BLOCK)

    made = memory.compile_for_h200(layer.apply, jax.eval_shape(in_fp8, jax.random.key(0)), x)

    assert launches_of(made).count("quantize") == 1  # of the activation's result; another call quantizes the tokens
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
    got = launches(results, struct((3, T, K)), KERNEL, SIZES, struct((3, T, N)), gradient, loop=True)
    # Four slices of the scanned arrays are read or written; XLA makes that part of a call, or a copy beside the calls.
    # One more fusion counts the loop.
    assert got.count("fusion") + got.count("fusion-start") == 5
    assert "copy" not in got


@pytest.mark.parametrize("recipe", [None, BLOCK], ids=["bf16", "block"])
def test_no_product_of_a_scan_is_computed_twice(recipe: Recipe | None) -> None:
    def gradients(x: Any, kernels: Any, sizes: Any) -> Any:
        def loss(x: Any, kernels: Any) -> jax.Array:
            y, _ = jax.lax.scan(lambda x, of: (jg.moe.grouped_mlp(x, *of, sizes, recipe=recipe), None), x, kernels)
            return y.astype(jnp.float32).sum()

        return jax.grad(loss, (0, 1))(x, kernels)

    kernels = struct((3, E, K, 2 * N)), struct((3, E, N, K))
    compiled = compile_for_h200(gradients, X, kernels, SIZES).as_text()
    # XLA may make a product and its slicing one fusion. The gradient keeps the input of the activation.
    assert compiled.count('custom_call_target="jax_grouped_gemm"') == 6


def test_memory_beside_arguments_and_results() -> None:
    shape = SHAPES["dsv3 up"]
    gradients, sgd, pairs = (
        {variant: memory.planned_bytes(shape, operation, variant) for variant in memory.VARIANTS}
        for operation in ("gradients, bfloat16 kernel", "SGD, float32 kernel", "SGD of four pairs")
    )

    x, kernel, workspace = shape.tokens * shape.K, shape.num_groups * shape.K * shape.N, 2**25  # in FP8
    tokens, nothing = "block, only tokens are kept", "bf16, nothing is kept"
    assert gradients["bf16"] < 1.05 * workspace
    # The other orientations of kernel and tokens use memory that later holds results.
    assert gradients["block"] < 1.05 * (x + kernel + workspace)
    # Only one orientation of the kernel is in memory at a time.
    assert gradients[tokens] < 0.8 * kernel
    # Kernels are converted to bf16, and change in place.
    assert sgd[tokens] < sgd[nothing]
    assert pairs[tokens] < pairs[nothing] < pairs["bf16"]
    assert pairs["block"] < pairs["bf16"]


def test_an_mlp_without_a_recipe_keeps_less_than_with_the_derivative_of_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = SHAPES["dsv3 up"]
    ours = memory.planned_bytes(shape, "four MLPs", "bf16")
    monkeypatch.setattr(experts, "activate", rows.activate.__wrapped__)
    of_jax = memory.planned_bytes(shape, "four MLPs", "bf16")

    # JAX's derivative keeps 22 bytes of each number between the products, ours 6.
    assert of_jax - ours > 15 * 4 * shape.tokens * shape.N / 2


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

    per_layer = (planned(10) - planned(4)) / 6
    rows = tokens * top_k
    # Logits in the type of x, probabilities, experts and weights, and the order of the rows with its inverse.
    routing = tokens * experts * (2 + 4) + 4 * rows * (2 + 2)
    kernels = 0 if recipe is None else experts * 3 * features * hidden * 1.1  # Quantized rowwise, and scales.
    expected = 2 * tokens * features + 2 * rows * 2 * hidden + routing + kernels
    assert per_layer < 1.03 * expected


def test_the_xla_backend_quantizes_numbers_that_were_rounded_to_their_type() -> None:
    def quantize(x: jax.Array) -> jax.Array:
        sizes = jnp.array([20, 30])
        return jg.grouped_quantize(x.astype(jnp.bfloat16), sizes, jg.ScalingMode.BLOCK_1D).rowwise.data

    with jg.config.override(backend="xla"):
        text = compile_for_h200(quantize, struct((64, 32), jnp.float32)).as_text()

    assert re.search(r"bf16\[64,32\]\S* convert\(", text)


def test_memory_is_tabled_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert benchmark(["run", "memory", "--shapes", "aligned", "--json", str(tmp_path / "memory.json")]) == 0

    rows = json.loads((tmp_path / "memory.json").read_text())["rows"]
    assert {row["case"]["operation"] for row in rows} == {*memory.OPERATIONS}
    assert {row["case"]["variant"] for row in rows} == {*memory.VARIANTS}
    for line, row in zip(capsys.readouterr().out.splitlines(), rows, strict=False):
        assert line.endswith(f", {row['case']['variant']}: {row['count'] / 2**30:.2f} GiB")
