"""A small MoE model, and its training on one device or several, for tests that compare the two.

The name of a mesh axis says what it splits: `feature` the features inside the experts, `expert` the experts and the
tokens, `data` the tokens, `fsdp` the tokens and the storage of the experts, which the layer gathers, and
`stored_features` the tokens and the storage of the experts' features, which XLA gathers.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_grouped as jg

K, F, E, TOP_K = 16, 32, 8, 2
STEPS, MICROBATCHES, TOKENS = 5, 2, 64

BLOCK = jg.Float8BlockScaling()
DELAYED = jg.DelayedScaling(amax_history_len=2)

#: Tolerances, relative for losses and absolute for parameters, which are about 1. In FP8, a sum that is rounded
#: differently is sometimes quantized to a neighbour, and the tensor cores of GPUs keep few bits of FP8 sums. On one
#: device, parameters that differ by 1e-5 change the third loss by up to 0.5 %, because a token chooses another expert.
FLOAT32_TOLERANCE, FP8_TOLERANCE = 1e-5, {"xla": 1e-4, "cuda": 2e-2}

#: SGD, not Adam: Adam takes the same steps if all gradients are wrong by the same factor. With larger steps, two layers
#: in FP8 diverge.
OPTIMIZER = jg.overwrite_with_gradient(optax.sgd(0.03, momentum=0.9))

#: Names of the experts' layers, in their order.
LAYERS = "experts", "more_experts"


class LinenModel(nn.Module):
    options: Mapping[str, Any]
    parallel: jg.moe.Parallel
    methods: tuple[str, ...]
    remat: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, jg.moe.MoEMetrics]:
        x = nn.Dense(K, name="embed")(x)
        layer = nn.remat(jg.linen.MoEMlp) if self.remat else jg.linen.MoEMlp
        for name, method in zip(LAYERS, self.methods, strict=False):
            parallel = dataclasses.replace(self.parallel, exchange=method)
            y, metrics = layer(**self.options, parallel=parallel, name=name)(x)
            x = x + y
        return x, metrics


class NnxModel(nnx.Module):
    def __init__(
        self, options: Mapping[str, Any], parallel: jg.moe.Parallel, methods: tuple[str, ...], *, remat: bool = False
    ):
        rngs = nnx.Rngs(0)
        self.embed = nnx.Linear(K, K, rngs=rngs)
        for name, method in zip(LAYERS, methods, strict=False):
            by_method = dataclasses.replace(parallel, exchange=method)
            setattr(self, name, jg.nnx.MoEMlp(K, **options, parallel=by_method, rngs=rngs))
        self.remat = remat

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jg.moe.MoEMetrics]:
        x = self.embed(x)
        for name in filter(self.__dict__.__contains__, LAYERS):
            x, metrics = (nnx.remat(apply_layer) if self.remat else apply_layer)(getattr(self, name), x)
        return x, metrics


def apply_layer(layer: nnx.Module, x: jax.Array) -> Any:
    """Calls the layer, which adds the tokens to the sum. For `nnx.remat`, whose functions have no keyword arguments."""
    return layer(x, shared=x)


class Model(NamedTuple):
    """Variables with gradients, as whole NumPy arrays, and `apply`: `(variables, x)` to `[T, K]` and metrics."""

    variables: Any
    apply: Callable[[Any, jax.Array], tuple[jax.Array, jg.moe.MoEMetrics]]


def model(
    api: str,
    axes: Mapping[str, int],
    *,
    methods: tuple[str, ...] = ("gather", "padded"),
    remat: bool = False,
    **options: Any,
) -> Model:
    """Returns a model with a layer for each method of the exchange; all APIs and axes have the same parameters."""
    parallel = jg.moe.Parallel(
        experts="expert" if "expert" in axes else None,
        features="feature" if "feature" in axes else None,
        fsdp="fsdp" if "fsdp" in axes else None,
        batch=token_axes(axes),
    )
    sizes = dict(num_experts=E, router=jg.moe.Router(TOP_K), hidden_features=F, use_bias=True)
    options = sizes | options
    if api == "linen":
        module = LinenModel(options, parallel, methods, remat=remat)
        return Model(filled(jax.eval_shape(module.init, jax.random.key(0), jnp.zeros((1, K)))), module.apply)
    abstract = nnx.eval_shape(lambda: NnxModel(options, parallel, methods, remat=remat))
    graph, variables = nnx.split(abstract, jg.nnx.TRAINED)
    return Model(filled(variables), lambda variables, x: nnx.merge(graph, variables, copy=True)(x))


def filled(shapes: Any) -> Any:
    """Returns parameters with nonzero biases, so that they hide nothing, and the initial states of delayed scaling."""
    rng = np.random.default_rng(0)

    def fill(path: Any, leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        name = find_name(path)
        if name.endswith(("scale", "history", "mark")):
            return np.full(leaf.shape, name.endswith("scale"), np.float32)
        if name == "embed/kernel":
            # At first, the experts' tokens have the same bits on any number of devices.
            return np.eye(K, dtype=np.float32)
        return rng.standard_normal(leaf.shape, np.float32) / np.float32(4)

    return jax.tree.map_with_path(fill, shapes)


def find_name(path: Any) -> str:
    """Returns a name such as `experts/down/kernel` or `experts/down/input_scale`, whatever holds the variables."""
    parts = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
    first = min(parts.index(part) for part in ("embed", *LAYERS, parts[-1]) if part in parts)
    return "/".join(part for part in parts[first:] if part not in ("fp8_state", "value"))


def by_name(variables: Any) -> dict[str, np.ndarray]:
    return {find_name(path): np.asarray(leaf) for path, leaf in jax.tree.leaves_with_path(variables)}


def batches(steps: int = STEPS) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns tokens and their targets for each step, `[MICROBATCHES, TOKENS, K]` each."""
    rng = np.random.default_rng(1)
    xs = rng.standard_normal((steps, MICROBATCHES, TOKENS, K), np.float32)
    return [(x, np.sin(x[..., ::-1])) for x in xs]


def token_axes(axes: Mapping[str, int]) -> tuple[str, ...]:
    return tuple(name for name in axes if name != "feature")


def specs(axes: Mapping[str, int], tree: Any) -> Any:
    """Returns the partition specs of a model's variables, or an optimizer's state, on a mesh of these axes."""
    expert, feature, stored_features = (
        name if name in axes else None for name in ("expert", "feature", "stored_features")
    )
    stored = tuple(name for name in ("expert", "fsdp") if name in axes) or None

    def spec(path: Any, leaf: Any) -> P:
        name = find_name(path)
        if "experts/gate_up" in name:
            whole = {"kernel": P(stored, None, None, feature or stored_features), "bias": P(stored, None, feature)}
        elif "experts/down" in name:
            whole = {"kernel": P(stored, feature, stored_features), "bias": P(stored)}
        else:
            return P()
        return whole.get(name.rsplit("/", 1)[-1], P(expert))

    return jax.tree.map_with_path(spec, tree)


def local_step(model: Model, axes: Mapping[str, int], variables: Any, state: Any, batch: Any) -> Any:
    """Returns the next variables, the next state and the loss of the whole batch, on one device."""
    tokens = token_axes(axes)
    # FP8 sees the same gradients on any number of devices if each one's loss counts with its part of the batch.
    parts = MICROBATCHES * int(np.prod([axes[name] for name in tokens]))

    def objective(variables: Any, microbatch: Any) -> tuple[jax.Array, jax.Array]:
        x, targets = microbatch
        y, metrics = model.apply(variables, x)
        loss = jnp.mean((y - targets) ** 2)
        return (loss + 0.01 * metrics.balance_loss) / parts, loss / parts

    def add(total: Any, microbatch: Any) -> tuple[Any, jax.Array]:
        gradients, loss = jax.grad(objective, has_aux=True)(variables, microbatch)
        return jg.accumulate_gradients(total, gradients), loss

    # On GPUs, the default would round to TF32 and to bfloat16.
    with jax.default_matmul_precision("highest"):
        gradients, losses = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, variables), batch)
    updates, state = OPTIMIZER.update(gradients, state, variables)
    return jg.apply_updates(variables, updates), state, jax.lax.psum(jnp.sum(losses), tokens)


class Training(NamedTuple):
    """A step `(variables, state, batch)` to the next two and the loss, where it starts, and how it places a batch."""

    step: Any
    start: tuple[Any, Any]
    place: Callable[[Any], Any]

    def run(self, steps: int = STEPS) -> tuple[np.ndarray, list[Any]]:
        """Returns the loss of every step, and the variables after it."""
        (variables, state), losses, history = self.start, [], []
        for batch in batches(steps):
            variables, state, loss = self.step(variables, state, self.place(batch))
            losses.append(float(loss))
            history.append(variables)
        return np.array(losses), history


def sharded(model: Model, mesh: Mesh) -> Training:
    """Returns training under `jax.jit` and `jax.shard_map` with its checks on."""
    axes = dict(mesh.shape)
    start = _start(model)
    parts, split = specs(axes, start), P(None, token_axes(axes))
    step = jax.shard_map(
        functools.partial(local_step, model, axes),
        mesh=mesh,
        in_specs=(*parts, split),
        out_specs=(*parts, P()),
    )

    place = functools.partial(jax.tree.map, functools.partial(placed, mesh))
    return Training(jax.jit(step), place(start, parts), lambda batch: place(batch, (split, split)))


def placed(mesh: Mesh, array: np.ndarray, spec: P) -> jax.Array:
    """Returns the array on the mesh, of which every process creates the parts of its own devices."""
    return jax.make_array_from_callback(array.shape, NamedSharding(mesh, spec), lambda index: array[index])


def under_jit(model: Model, mesh: Mesh) -> Training:
    """Returns training under `jax.jit` alone, with variables and batches on the mesh."""
    axes = dict(mesh.shape)
    start, split = _start(model), P(None, token_axes(axes))
    place = functools.partial(jax.tree.map, functools.partial(placed, mesh))
    parts = place(start, specs(axes, start))
    step = functools.partial(local_step, model, {})
    shardings = *jax.tree.map(lambda leaf: leaf.sharding, parts), NamedSharding(mesh, P())
    return Training(jax.jit(step, out_shardings=shardings), parts, lambda batch: place(batch, (split, split)))


@functools.cache
def on_one_device(device: jax.Device, backend: str, *, steps: int, **options: Any) -> Any:
    """Runs `Training.run` for linen's model with these options; `backend` is the current one."""
    del backend
    return sharded(model("linen", {"data": 1}, **options), Mesh(np.array([device]), ("data",))).run(steps)


def assert_close(got: Any, expected: Any, tolerance: float) -> None:
    """Compares the losses of all steps, and parameters after the last."""
    (losses, history), (expected_losses, expected_history) = got, expected
    np.testing.assert_allclose(losses, expected_losses, rtol=tolerance)
    assert losses[-1] < 0.9 * losses[0]
    variables, expected_variables = by_name(history[-1]), by_name(expected_history[-1])
    assert variables.keys() == expected_variables.keys()
    for name, value in expected_variables.items():
        if not name.endswith(("scale", "history", "mark")):
            np.testing.assert_allclose(variables[name], value, rtol=0, atol=tolerance, err_msg=name)


def _start(model: Model) -> tuple[Any, Any]:
    # An optimizer's own program of zeros would have to be compiled.
    state = jax.eval_shape(OPTIMIZER.init, model.variables)
    return model.variables, jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), state)
