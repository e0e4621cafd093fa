"""Whatever is sharded over whatever axis, named to the layer or not, results and gradients are one device's.

Hypothesis draws the function, its sizes and recipe, a mesh, and how each argument is sharded. A few examples run by
default, the same in every run. `JAX_GROUPED_EXAMPLES=250 pytest tests/parallel/test_any_mesh.py --hypothesis-seed=1`
runs others: with another seed, yet others. Each example runs its two programs with several sets of numbers.
"""

import functools
import itertools
import math
import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_grouped as jg
from tests.meshes import TYPES, need_devices, typed_mesh

#: Recipes, and the largest error of results and gradients relative to their norm. Sums of another order move numbers
#: to a neighbour in FP8. Current scaling has scales of each device's part: its results on several devices are as far
#: from those on one as these are from float32's, up to 0.25 for the router's gradient.
RECIPES = {
    None: (None, 1e-5),
    "block": (jg.Float8BlockScaling(), 0.03),
    "current": (jg.Float8CurrentScaling(), 0.35),
    "delayed": (jg.DelayedScaling(amax_history_len=2), 0.03),
    "mxfp8": (jg.MXFP8BlockScaling(), 0.03),
}
MESHES = (2,), (4,), (2, 2), (2, 4), (8,), (2, 2, 2)
TOP_K = 2
SETS_OF_NUMBERS = 4
EXAMPLES = os.environ.get("JAX_GROUPED_EXAMPLES")
OPERATIONS, LAYERS = ("ragged_dot", "grouped_dense", "grouped_mlp"), ("moe_mlp", "linen", "nnx")
ROLES = "experts", "features", "fsdp", "batch"


class Example(NamedTuple):
    """A function of sharded arrays.

    Attributes:
        function: its name among `FUNCTIONS`.
        kind: the type of the mesh's axes.
        mesh: their sizes; their names are letters.
        recipe: a name among `RECIPES`.
        sizes: `T`, `E`, `K` and `F`.
        roles: the axes that `Parallel` names.
        methods: the exchanges of two layers, one after the other.
        cached: whether the function is given kernels that are quantized or converted already.
        specs: the axes over which each dimension of each array is split.
    """

    function: str
    kind: str
    mesh: tuple[int, ...]
    recipe: str | None
    sizes: tuple[int, int, int, int]
    roles: Mapping[str, Any]
    methods: tuple[str, str]
    cached: bool
    specs: Mapping[str, P]


def shapes_of(function: str, sizes: tuple[int, int, int, int]) -> dict[str, tuple[int, ...]]:
    T, E, K, F = sizes
    match function:
        case "ragged_dot":
            return dict(x=(T, K), kernel=(E, K, F))
        case "grouped_dense":
            return dict(x=(T, K), kernel=(E, K, F), bias=(E, F))
        case "grouped_mlp":
            return dict(x=(T, K), gate_up=(E, K, 2 * F), down=(E, F, K))
        case "moe_mlp":
            return dict(x=(T, K), logits=(T, E), gate_up=(E, K, 2, F), down=(E, F, K))
    return dict(x=(T, K), router=(K, E), gate_up=(E, K, 2, F), down=(E, F, K))


@st.composite
def examples(draw: Callable[..., Any]) -> Example:
    function = draw(st.sampled_from([*OPERATIONS, *LAYERS]))
    recipe = None if function == "ragged_dot" else draw(st.sampled_from([None, *RECIPES]))
    mesh = draw(st.sampled_from([mesh for mesh in MESHES if math.prod(mesh) <= max(jax.device_count(), 2)]))
    kind = draw(st.sampled_from(list(TYPES)))
    sizes = draw(st.tuples(*map(st.sampled_from, ((64, 45, 8), (8, 6, 16), (32, 256), (64, 256)))))
    axes = dict(zip("abc", mesh, strict=False))
    roles: dict[str, Any] = {}
    if function in LAYERS:
        for axis, size in axes.items():
            role = draw(st.sampled_from([None, *ROLES]))
            stored = size * math.prod(axes[roles[name]] for name in ("experts", "fsdp") if name in roles)
            divides = sizes[3] % (16 * size) == 0 if role == "features" else sizes[1] % stored == 0
            if role == "batch":
                roles[role] = (*roles.get(role, ()), axis)
            elif divides:
                roles.setdefault(role, axis)
        roles.pop(None, None)
    # Routing of arrays whose types are sharded needs names: without, it is refused.
    splits = kind == "auto" or bool(roles) or function in OPERATIONS
    specs = {}
    for name, shape in shapes_of(function, sizes).items():
        free = [*axes]
        entries: list[tuple[str, ...]] = []
        for size in shape:
            if kind == "explicit" and function in ("linen", "nnx") and (name == "router" or (name == "x" and entries)):
                free = []  # Flax's own product of both would be ambiguous.
            entry: tuple[str, ...] = ()
            for axis in [*free]:
                parts = math.prod(axes[name] for name in (*entry, axis))
                if splits and size % parts == 0 and draw(st.booleans()):
                    entry = (*entry, axis)
                    free.remove(axis)
            entries.append(entry)
        specs[name] = P(*(entry or None for entry in entries))
    methods = draw(st.sampled_from([*itertools.permutations(("gather", "padded"))]))
    takes_cache = function in ("grouped_dense", "grouped_mlp", "moe_mlp")
    if recipe is not None:
        takes_cache &= recipe != "delayed" and "features" not in roles and (function, kind) != ("moe_mlp", "explicit")
    cached = takes_cache and draw(st.booleans())
    return Example(function, kind, mesh, recipe, sizes, roles, methods, cached, specs)


def fan_in(name: str, shape: tuple[int, ...]) -> int:
    return shape[0] if name == "router" else shape[1]


def numbers(example: Example, seed: int) -> dict[str, np.ndarray]:
    """Returns arrays of these shapes, and the sizes of groups with a tail of NaN behind them."""
    rng = np.random.default_rng(seed)
    T, E, *_ = example.sizes
    arrays = {
        name: rng.standard_normal(shape, np.float32)
        * np.float32(1 if name in ("x", "logits") else fan_in(name, shape) ** -0.5)
        for name, shape in shapes_of(example.function, example.sizes).items()
    }
    cuts = np.sort(rng.integers(0, T + 1, E))  # Some groups are empty.
    arrays["group_sizes"] = np.diff(cuts, prepend=0).astype(np.int32)
    arrays["dy"] = rng.standard_normal((T, arrays[[*arrays][-2]].shape[-1]), np.float32)
    if "logits" in arrays:
        arrays["logits"] += (seed % 3) * rng.standard_normal(E, np.float32)
    elif "router" not in arrays:
        arrays["x"][cuts[-1] :] = np.nan
    return arrays


def states(example: Example) -> Any:
    recipe, _ = RECIPES[example.recipe]
    return jg.Fp8State.initial(recipe, example.sizes[1]) if isinstance(recipe, jg.DelayedScaling) else None


def apply(
    example: Example, options: Mapping[str, Any], roles: Mapping[str, Any], arrays: Mapping[str, jax.Array], state: Any
) -> Any:
    """Returns the function's result, and what else it returns."""
    router = jg.moe.Router(TOP_K)
    parallels = [jg.moe.Parallel(**roles, exchange=method, dispatch="input") for method in example.methods]
    recipe, _ = RECIPES[example.recipe]
    x, sizes, *_ = arrays["x"], arrays["group_sizes"]
    precision = "highest" if recipe is None else None
    if example.function == "ragged_dot":
        return jg.ragged_dot(x, arrays["kernel"], sizes, precision=precision, **options), ()

    def cache(name: str) -> Any:
        kernel = arrays[name]
        if not example.cached:
            return None
        return kernel if recipe is None else jg.quantize_kernel(kernel.reshape(*kernel.shape[:2], -1), recipe)

    if example.function == "grouped_dense":
        more = dict(bias=arrays["bias"], fp8_state=state, recipe=recipe, precision=precision)
        more |= dict(kernel_cache=cache("kernel"))
        return jg.grouped_dense(x, arrays["kernel"], sizes, **more, **options), ()
    if example.function in ("grouped_mlp", "moe_mlp"):
        up, down = (
            jg.moe.Weights(arrays[name], fp8_state=state, kernel_cache=cache(name)) for name in ("gate_up", "down")
        )
    if example.function == "grouped_mlp":
        return jg.moe.grouped_mlp(x, up, down, sizes, recipe=recipe, precision=precision, **options), ()
    if example.function == "moe_mlp":
        loads = []
        for parallel in parallels:
            y, metrics = jg.moe.moe_mlp(
                x,
                arrays["logits"],
                up,
                down,
                router=router,
                parallel=parallel,
                recipe=recipe,
                precision=precision,
            )
            x = x + 0.5 * y
            loads.append((metrics.expert_load, metrics.balance_loss, metrics.z_loss))
        return x, loads
    layer_options = dict(
        num_experts=example.sizes[1],
        hidden_features=example.sizes[3],
        router=router,
        parallel=parallels[0],
        recipe=recipe,
        precision=precision,
    )
    parameters = {name: {"kernel": arrays[name]} for name in ("router", "gate_up", "down")}
    if example.function == "linen":
        variables = {"params": parameters}
        if state is not None:
            variables |= {"_overwrite_with_gradient": dict.fromkeys(("gate_up", "down"), vars(state))}
        y, metrics = jg.linen.MoEMlp(**layer_options).apply(variables, x)
    else:
        layer = nnx.eval_shape(lambda: jg.nnx.MoEMlp(x.shape[1], **layer_options, rngs=nnx.Rngs(0)))
        layer.router.kernel = nnx.Param(arrays["router"])
        for name in ("gate_up", "down"):
            kernel = getattr(layer, name)
            kernel.kernel = nnx.Param(arrays[name])
            if state is not None:
                kernel.fp8_state = type(kernel.fp8_state)(state)
        y, metrics = layer(x)
    return y, (metrics.expert_load, metrics.balance_loss, metrics.z_loss)


def step(
    example: Example, options: Mapping[str, Any], roles: Mapping[str, Any], arrays: dict[str, jax.Array], state: Any
) -> Any:
    """Returns the result, the gradients of all arrays, the next states, and the metrics."""
    fixed = {name: arrays[name] for name in ("group_sizes", "dy")}

    def loss(arrays: dict[str, jax.Array], state: Any) -> tuple[jax.Array, Any]:
        y, more = apply(example, options, roles, arrays | fixed, state)
        return jnp.sum(jnp.where(jnp.isnan(y), 0, y) * fixed["dy"]), (y, more)

    differentiated = {name: array for name, array in arrays.items() if name not in fixed}
    gradients, (y, more) = jax.grad(loss, (0, 1), has_aux=True)(differentiated, state)
    return y, gradients, more


def placed(mesh: Mesh, example: Example, arrays: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
    return {
        name: jax.device_put(array, NamedSharding(mesh, example.specs.get(name, P()))) for name, array in arrays.items()
    }


@pytest.mark.slow
@settings(
    max_examples=int(EXAMPLES or 12),
    derandomize=EXAMPLES is None,
    deadline=None,
    database=None,
    phases=[Phase.generate],  # Without shrinking: each of its steps would compile two programs.
    print_blob=False,
    suppress_health_check=list(HealthCheck),
)
@given(example=examples())
def test_sharded_arrays_give_what_one_device_gives(backend: str, example: Example) -> None:
    need_devices(2)
    mesh = typed_mesh(example.kind, dict(zip("abc", example.mesh, strict=False)))
    options: dict[str, Any] = {}
    if example.kind == "explicit" and example.function in OPERATIONS:
        options["out_sharding"] = P()
    bound = RECIPES[example.recipe][1] + 1e-4 * (backend == "cuda")
    on_mesh = jax.jit(functools.partial(step, example, options, example.roles))
    on_one = jax.jit(functools.partial(step, example, {}, {}))
    state = states(example)
    for seed in range(SETS_OF_NUMBERS):
        arrays = numbers(example, seed)
        got = on_mesh(placed(mesh, example, arrays), jax.device_put(state, NamedSharding(mesh, P())))
        expected = on_one({name: jnp.asarray(array) for name, array in arrays.items()}, state)
        for (path, a), b in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(expected), strict=True):
            error, size = np.linalg.norm(np.asarray(a, np.float64) - b), np.linalg.norm(np.asarray(b, np.float64))
            assert error <= bound * size + 1e-6, f"{jax.tree_util.keystr(path)}: {error} of {size}, numbers {seed}"
