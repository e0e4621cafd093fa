"""Steps that are captured in CUDA graphs and replayed with other sizes each time give the bits of the uncaptured steps.

`JAX_GROUPED_REPLAYS` is the number of replays.
"""

import functools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_grouped as jg
from benchmarks import shapes
from jax_grouped.fp8.recipes import Recipe
from tests.examples.programs import prepared
from tests.gpu import replays

pytestmark = pytest.mark.gpu

REPLAYS = int(os.environ.get("JAX_GROUPED_REPLAYS") or 500)
PROFILED_REPLAYS = 10


class Replays:
    """A step `(carry, *inputs) -> (carry, results)`, compiled twice: captured, and uncaptured as the reference."""

    def __init__(self, step: Callable[..., tuple[Any, dict[str, Any]]], inputs: Sequence[Any], carry: Any = None):
        self._inputs, self._carry = inputs, carry
        self._lowered = jax.jit(step, donate_argnums=0).lower(carry, *inputs[0])
        self.captured, self.uncaptured = (self._lowered.compile(one) for one in (replays.CAPTURED, replays.UNCAPTURED))
        results = jax.eval_shape(step, carry, *inputs[0])[1]
        self.names = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(results)]
        size = self.captured.memory_analysis().temp_size_in_bytes
        self._fill = jax.jit(lambda: jnp.full((size,), 0xFF, jnp.uint8))

    def run(self, program: Callable[..., Any]) -> np.ndarray:
        """Returns the digests of all steps. Uncaptured, waits for each step; captured, poisons every second one."""
        carry, digests = jax.tree.map(jnp.copy, self._carry), []
        for index, inputs in enumerate(self._inputs):
            if program is self.captured and index % 2:
                # Freed memory holds bytes that are NaN in every type when the next step gets it.
                self._fill().block_until_ready().delete()
            carry, results = program(carry, *inputs)
            digests.append(replays.digest(jax.tree.leaves(results)))
            if program is self.uncaptured:
                digests[-1].block_until_ready()
        return replays.fetch(digests, self.names)

    def profile(self, program: Callable[..., Any]) -> dict[str, int]:
        def run() -> Any:
            carry = jax.tree.map(jnp.copy, self._carry)
            for inputs in self._inputs[:PROFILED_REPLAYS]:
                carry, results = program(carry, *inputs)
            return carry, results

        return replays.events(run)

    def check(self, got: np.ndarray, expected: np.ndarray) -> None:
        """Checks digests, and that captured steps are graphs that copy nothing to the host."""
        assert not replays.first_difference(got, expected, self.names)
        distinct = len(np.unique(expected, axis=0))
        assert distinct > len(self._inputs) / 2, "the sizes must matter for the comparison to mean anything"
        events = self.profile(self.captured)
        # A profile can miss the first step.
        assert replays.occurrences(events, "GraphLaunch") >= PROFILED_REPLAYS - 1, sorted(events)
        assert not replays.occurrences(events, "MemcpyD2H", "DtoH"), sorted(events)

    def check_uncaptured(self, expected: np.ndarray, is_quantized: bool) -> None:
        """Checks that nothing waits for the device, and that custom calls alone are captured too."""
        events = self.profile(self.uncaptured)
        assert replays.occurrences(events, "GraphLaunch") == 0
        # If the profile recorded nothing, the rest would always pass.
        assert replays.occurrences(events, "jax_grouped::") >= PROFILED_REPLAYS
        assert (replays.occurrences(events, "QuantizeTiles") >= PROFILED_REPLAYS) == is_quantized
        assert not replays.occurrences(events, "MemcpyD2H", "DtoH"), sorted(events)
        # XLA itself may wait for its launches. A wait in a call of the library would add to every step; in a capture
        # it would be an error.
        nothing_of_ours, x = jax.jit(jnp.sin), jnp.ones((SHAPE.tokens, SHAPE.K))
        jax.block_until_ready(nothing_of_ours(x))
        events_of_xla = replays.events(lambda: [nothing_of_ours(x) for _ in range(PROFILED_REPLAYS)])
        waits = (replays.occurrences(counts, "Synchronize") for counts in (events, events_of_xla))
        assert next(waits) - next(waits) < PROFILED_REPLAYS, sorted(events)

        # Nothing else is allowed into a graph, so every launched graph holds custom calls only.
        calls_only = self._lowered.compile(replays.CAPTURED | {"xla_gpu_enable_command_buffer": "CUSTOM_CALL"})
        assert replays.occurrences(self.profile(calls_only), "GraphLaunch") >= PROFILED_REPLAYS - 1
        assert not replays.first_difference(self.run(calls_only), expected, self.names)


#: The first shape has 80 tokens per group on average and more than two tiles per multiprocessor, so cuBLASLt computes
#: fprop and dgrad. For the second, Hopper has kernels of the library for quantized operands.
SHAPES = (
    shapes.Shape("first", num_groups=112, tokens=8960, K=256, N=512),
    shapes.Shape("second", num_groups=24, tokens=3072, K=384, N=256),
)


@pytest.mark.parametrize("executables", [1, 2], ids=["one-executable", "two-executables"])
def test_products_read_nothing_that_others_left_in_their_workspace(executables: int) -> None:
    # cuBLASLt keeps descriptors of the groups in its workspace, which products share one after another.
    block = jg.Float8BlockScaling()
    layers = [(None, "bfloat16"), (block, "bfloat16"), (jg.Float8CurrentScaling(), "bfloat16"), (block, "float32")]

    def step(_: Any, x: jax.Array, dy: jax.Array, kernels: list[jax.Array], sizes: jax.Array) -> tuple[None, Any]:
        results = {}
        for (recipe, dtype), kernel in zip(layers, kernels, strict=True):
            y, pull_back = jax.vjp(functools.partial(jg.grouped_dense, group_sizes=sizes, recipe=recipe), x, kernel)
            results[f"{recipe} {dtype}"] = y, *pull_back(dy)
        return None, results

    def replayed(shape: shapes.Shape) -> Replays:
        keys = jax.random.split(jax.random.key(0), 2 + len(layers))
        x = jax.random.normal(keys[0], (shape.tokens, shape.K), jnp.bfloat16)
        dy = jax.random.normal(keys[1], (shape.tokens, shape.N), jnp.bfloat16)
        kernels = [
            jax.random.normal(key, (shape.num_groups, shape.K, shape.N), dtype)
            for key, (_, dtype) in zip(keys[2:], layers, strict=True)
        ]
        sizes = [jnp.asarray(replays.changing_sizes(shape, index)) for index in range(REPLAYS)]
        return Replays(step, [(x, dy, kernels, one) for one in sizes])

    stressed = [replayed(shape) for shape in SHAPES[:executables]]
    expected = [one.run(one.uncaptured) for one in stressed]
    with ThreadPoolExecutor(executables) as threads:
        got = list(threads.map(lambda one: one.run(one.captured), stressed))
    for one, digests, wanted in zip(stressed, got, expected, strict=True):
        one.check(digests, wanted)


TOKENS, FEATURES, HIDDEN, EXPERTS, TOP_K = 1000, 256, 512, 16, 3
#: Recipe of each layer, and whether it is given quantized kernels.
LAYERS: dict[str, tuple[Recipe | None, bool]] = {
    "bf16": (None, False),
    "block": (jg.Float8BlockScaling(), False),
    "block cached": (jg.Float8BlockScaling(), True),
    "delayed": (jg.DelayedScaling(amax_history_len=4), False),
}


def preferences(index: int) -> np.ndarray:
    """Adds to logits, in turn: a little; all tokens choose one expert; all choose the same; half of them get none."""
    wanted, unwanted = [(0, 0), (1, 0), (TOP_K, 0), (0, EXPERTS // 2)][index % 4]
    rng = np.random.default_rng(index)
    added = rng.standard_normal(EXPERTS, np.float32)
    added[:wanted] += 100
    added[EXPERTS - unwanted :] -= 100
    return rng.permutation(added)


@pytest.mark.parametrize("name", LAYERS)
def test_layers_of_experts_give_the_uncaptured_result_however_tokens_are_routed(name: str) -> None:
    recipe, cached = LAYERS[name]
    keys = iter(jax.random.split(jax.random.key(0), 23))

    def normal(*shape: int, dtype: Any = jnp.bfloat16) -> jax.Array:
        return jax.random.normal(next(keys), shape, dtype)

    kernels = [0.05 * normal(EXPERTS, FEATURES, 2 * HIDDEN), 0.05 * normal(EXPERTS, HIDDEN, FEATURES)]
    caches = [jg.quantize_kernel(kernel, recipe) if recipe and cached else None for kernel in kernels]
    is_delayed = isinstance(recipe, jg.DelayedScaling)
    states = [jg.Fp8State.initial(recipe, EXPERTS) if is_delayed else None for _ in kernels]
    batches = [
        (normal(TOKENS, FEATURES), normal(TOKENS, EXPERTS, dtype=jnp.float32), normal(TOKENS, FEATURES))
        for _ in range(7)
    ]

    def step(states: Any, x: jax.Array, logits: jax.Array, dy: jax.Array, added: jax.Array, *arrays: Any) -> Any:
        def layer(x: jax.Array, logits: jax.Array, kernels: Any, states: Any) -> Any:
            parts = zip(kernels, arrays[1], states, strict=True)
            weights = [jg.moe.Weights(kernel, None, cache, state) for kernel, cache, state in parts]
            return jg.moe.moe_mlp(x, logits, *weights, router=jg.moe.Router(TOP_K), recipe=recipe)

        y, pull_back, metrics = jax.vjp(layer, x, logits + added, arrays[0], states, has_aux=True)
        dx, dlogits, dkernels, states = pull_back(dy)
        gradients = {"dx": dx, "dlogits": dlogits, "dkernels": dkernels, "states": states}
        return states, {"y": y, **gradients, "load": metrics.expert_load}

    inputs = [(*batches[i % 7], jnp.asarray(preferences(i)), kernels, caches) for i in range(REPLAYS)]
    replayed = Replays(step, inputs, states)
    expected = replayed.run(replayed.uncaptured)
    replayed.check(replayed.run(replayed.captured), expected)


SHAPE = shapes.Shape("captured", num_groups=16, tokens=2048, K=256, N=512)
STEPS = 5000
BLOCK, CURRENT, DELAYED = jg.Float8BlockScaling(), jg.Float8CurrentScaling(), jg.DelayedScaling(amax_history_len=4)
#: Recipe of two dense layers, type of their tokens, and what steps carry beside states of delayed scaling.
VARIANTS: dict[str, tuple[Recipe | None, str, str]] = {
    "none": (None, "bfloat16", ""),
    "block": (BLOCK, "bfloat16", ""),
    "current": (CURRENT, "bfloat16", ""),
    "delayed": (DELAYED, "bfloat16", ""),
    "cached": (BLOCK, "bfloat16", "caches"),
    "cached_current": (CURRENT, "bfloat16", "caches"),
    "accumulating": (None, "bfloat16", "sums"),
    "accumulating_block": (BLOCK, "bfloat16", "sums"),
    "float16": (None, "float16", ""),
    "float16_delayed": (DELAYED, "float16", ""),
    "float32": (None, "float32", ""),
    "float32_block": (BLOCK, "float32", ""),
}
NOTHING = (None, None)


class DenseSteps:
    """Steps of two dense layers with sizes of their own, and with kernels that change if they share caches."""

    def __init__(self, name: str, count: int):
        self.recipe, dtype, self.carried = VARIANTS[name]
        keys = jax.random.split(jax.random.key(0), 5)
        x = jax.random.normal(keys[0], (SHAPE.tokens, SHAPE.K), dtype)
        bias = jax.random.normal(keys[1], (SHAPE.num_groups, SHAPE.N), jnp.bfloat16)
        kernels = [0.05 * jax.random.normal(key, (SHAPE.num_groups, SHAPE.K, SHAPE.N)) for key in keys[2:]]
        draws = np.random.default_rng(0).random((count, 2))
        self.skips = (draws[:, 0] < 0.7) & (np.arange(count) > 0)
        # Kernels change after every quantization, and sometimes in between; then they must not be read.
        turns = (np.cumsum(~self.skips) + (self.skips & (draws[:, 1] < 0.2))) % 3
        self.kernels = [kernels[turn if self.carried == "caches" else 0] for turn in turns]
        flags = {skip: jnp.asarray(skip) for skip in (False, True)}
        sizes = [jnp.asarray(replays.changing_sizes(SHAPE, index)) for index in range(count)]
        given = zip(self.kernels, sizes, self.skips.tolist(), strict=True)
        self.inputs = [(x, kernel, bias, one, flags[skip]) for kernel, one, skip in given]
        zeros = jnp.zeros_like(kernels[0])
        self.carry: Any = NOTHING
        if isinstance(self.recipe, jg.DelayedScaling):
            self.carry = tuple(jg.Fp8State.initial(self.recipe, SHAPE.num_groups) for _ in range(2))
        elif self.carried:
            # Caches of zeros must not be used.
            self.carry = self.quantize(zeros) if self.carried == "caches" else (zeros, zeros.swapaxes(1, 2))

    def quantize(self, kernel: jax.Array, previous: Any = NOTHING, skip: jax.Array | None = None) -> Any:
        """Quantizes the kernels of both layers."""
        quantize = functools.partial(jg.quantize_kernel, recipe=self.recipe, skip=skip)
        return quantize(kernel, previous=previous[0]), quantize(kernel.swapaxes(1, 2), previous=previous[1])

    def step(self, carry: Any, x: jax.Array, kernel: jax.Array, bias: jax.Array, sizes: jax.Array, skip: Any) -> Any:
        """Returns the next carry, and loss and gradients. `skip` is on the device, or None if the host has decided."""
        if self.carried == "caches" and skip is not None:
            carry = self.quantize(kernel, carry, skip)
        caches, sums, states = (carry if self.carried == name else NOTHING for name in ("caches", "sums", ""))

        def loss(x: jax.Array, kernels: Any, bias: jax.Array, states: Any) -> jax.Array:
            def dense(layer: int, x: jax.Array, bias: jax.Array | None) -> jax.Array:
                given = dict(fp8_state=states[layer], kernel_cache=caches[layer], dkernel_accumulator=sums[layer])
                return jg.grouped_dense(x, kernels[layer], sizes, bias, recipe=self.recipe, **given)

            y = dense(1, jax.nn.gelu(dense(0, x, bias)), None)
            return jnp.sum(y.astype(jnp.float32) ** 2)

        arguments = x, (kernel, kernel.swapaxes(1, 2)), bias, states
        value, (dx, dkernels, dbias, states) = jax.value_and_grad(loss, argnums=(0, 1, 2, 3))(*arguments)
        results = {"loss": value, "dx": dx, "dkernels": dkernels, "dbias": dbias, "states": states}
        if self.carried == "sums":
            # Halve the sum: thousands of gradients would add up to one that rounds the next ones away.
            return tuple(dkernel / 2 for dkernel in dkernels), results
        return (carry if self.carried else states), results


@pytest.mark.parametrize("name", VARIANTS)
def test_dense_layers_give_the_uncaptured_result(name: str) -> None:
    dense = DenseSteps(name, STEPS)
    replayed = Replays(dense.step, dense.inputs, dense.carry)
    expected = replayed.run(replayed.uncaptured)
    replayed.check(replayed.run(replayed.captured), expected)
    replayed.check_uncaptured(expected, is_quantized=dense.recipe is not None)


def test_skipped_quantization_gives_what_a_branch_on_the_host_gives() -> None:
    dense = DenseSteps("cached", 500)
    replayed = Replays(dense.step, dense.inputs, dense.carry)
    quantize, step, digests = jax.jit(dense.quantize), jax.jit(dense.step), []
    carry = dense.carry
    for skip, (x, kernel, bias, sizes, _) in zip(dense.skips, dense.inputs, strict=True):
        carry, results = step(carry if skip else quantize(kernel), x, kernel, bias, sizes, None)
        digests.append(replays.digest(jax.tree.leaves(results)))
    replayed.check(replayed.run(replayed.captured), replays.fetch(digests, replayed.names))


@pytest.mark.parametrize(
    ("parallel", "recipe"), [("none", "bf16"), ("none", "delayed"), ("pmap", "block"), ("expert", "current")]
)
def test_steps_of_train_moe_follow_one_another_without_the_host(parallel: str, recipe: str) -> None:
    run = prepared(f"--recipe {recipe} --parallel {parallel} --microbatches 2")
    shape = (run.settings.batch, run.settings.sequence + 1)
    batch = run.programs.split(np.random.default_rng(0).integers(0, 256, shape, np.uint8))
    take_step = run.step.compile()
    state, metrics = take_step(run.programs.initialise(), batch)
    jax.block_until_ready((state, metrics))

    def steps() -> jax.Array:
        nonlocal state, metrics
        for _ in range(PROFILED_REPLAYS):
            state, metrics = take_step(state, batch)
        return metrics.loss

    counts = replays.events(steps)

    # If the profile recorded nothing, the rest would always pass. A profile can miss the first step.
    assert replays.occurrences(counts, "jax_grouped::") >= PROFILED_REPLAYS - 1, sorted(counts)
    assert not replays.occurrences(counts, "MemcpyD2H", "DtoH"), sorted(counts)
    assert not replays.occurrences(counts, "Synchronize"), sorted(counts)
