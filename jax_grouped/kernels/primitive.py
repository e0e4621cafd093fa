"""JAX primitives for the operations that have a CUDA kernel, and the compiled extension with the kernels.

A primitive has one lowering for CUDA, through custom calls, and one for every other platform, in plain JAX. JAX chooses
when it lowers a program, by the platform alone. So a program for a GPU can be lowered, exported and inspected on a
machine without a GPU. Modules that bind a primitive define its derivatives.

Under `jax.vmap` a primitive stays one call, and the batch becomes more groups. Operands and results keep their rank and
concatenate the batch elements along their first axis. `batches` gives the number of batch elements in each operand.
Every operand holds all of them, except that kernels may be fewer: each then serves a run of consecutive batch elements.
The custom calls take the batch size from the size of `group_offset`. They have no `vmap_method`.
"""

import functools
import importlib
import importlib.metadata
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir, partial_eval
from jax.sharding import NamedSharding, PartitionSpec

from jax_grouped.core.config import config
from jax_grouped.core.groups import round_up
from jax_grouped.core.values import vary_alike

#: Names of the custom calls in a lowered program. `jax.export` needs them:
#: `jax.export.export(f, disabled_checks=[DisabledSafetyCheck.custom_call(t) for t in CUSTOM_CALL_TARGETS])`.
CUSTOM_CALL_TARGETS = (
    "jax_grouped_gemm",
    "jax_grouped_bias_grad",
    "jax_grouped_activation_grad",
    "jax_grouped_permute_rows",
    "jax_grouped_sum_rows",
    "jax_grouped_route",
    "jax_grouped_group_pairs",
    "jax_grouped_quantize",
    "jax_grouped_quantize_permuted",
    "jax_grouped_dequantize",
    "jax_grouped_push_rows",
    "jax_grouped_push_sums",
)

#: The first cuBLASLt whose grouped matmul is correct in every use that this library makes of it.
CUBLAS_NEEDED = (13, 8)
#: Compute capabilities of the GPUs that the extension is compiled for.
COMPUTE_CAPABILITIES = {(9, 0): "Hopper", (10, 0): "Blackwell B200"}

_INSTALL = "JAX_GROUPED_CUDA=on python3 -m pip install --no-deps -e ."
_UPGRADE_CUBLAS = 'python3 -m pip install --upgrade "nvidia-cublas>=13.8,<14"'
_USE_XLA = "set JAX_GROUPED_BACKEND=xla to run the slow pure-JAX backend"

#: Rows and groups are counted in `int32`.
_COUNT_LIMIT = 2**31
#: The batch is an axis of the CUDA kernels' grids, which has at most this number of blocks.
MAX_BATCH = 65535


@functools.cache
def load_extension() -> ModuleType | None:
    """Loads the extension and registers its custom calls. Returns None if this installation was built without it."""
    try:
        module = importlib.import_module("jax_grouped._cuda")
    except ModuleNotFoundError:
        return None
    # The cuBLASLt of the `nvidia-cublas` package, which JAX's CUDA plugin loads.
    try:
        files = importlib.metadata.files("nvidia-cublas") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    paths = [str(file.locate()) for file in files if file.name == "libcublasLt.so.13"]
    module.set_cublaslt_path(paths[0] if paths else "")
    jax.ffi.register_ffi_type("jax_grouped_loaded_devices", module.state_type(), platform="CUDA")
    for name, handler in module.handlers().items():
        jax.ffi.register_ffi_target(name, handler, platform="CUDA")
    return module


def cuda_devices() -> list[jax.Device]:
    """Returns the NVIDIA GPUs that JAX sees; none on a machine without a GPU or with a CPU-only JAX."""
    try:
        return [device for device in jax.devices("cuda") if device.platform == "gpu"]
    except RuntimeError:
        return []


class Problem(NamedTuple):
    """Reason why the `cuda` backend cannot run, and its one remedy."""

    found: str
    remedy: str


def _version(number: tuple[int, ...]) -> str:
    return ".".join(str(part) for part in number)


def _capability(device: jax.Device) -> tuple[int, ...]:
    """Returns the compute capability of a GPU, for example `(9, 0)`."""
    return tuple(int(part) for part in device.compute_capability.split("."))


def cublas_version() -> tuple[int, ...] | None:
    """Returns the version of the cuBLASLt that the custom calls use; None without the extension or without cuBLASLt."""
    module = load_extension()
    number = module.cublaslt_version() if module else 0
    # cuBLASLt encodes 13.10.0 as 131000.
    return (number // 10000, number // 100 % 100, number % 100) if number else None


@functools.cache
def find_problem() -> Problem | None:
    """Returns what keeps the `cuda` backend from running on this process's GPUs, which do not change, or None."""
    rebuild = f"From a checkout of jax_grouped, run: {_INSTALL} (or {_USE_XLA})."
    try:
        if load_extension() is None:
            return Problem("jax_grouped was installed without its CUDA extension.", rebuild)
    except ImportError as error:
        return Problem(f"The CUDA extension of jax_grouped does not load: {error}.", rebuild)
    for device in cuda_devices():
        if _capability(device) not in COMPUTE_CAPABILITIES:
            needed = " or ".join(f"{_version(number)} ({name})" for number, name in COMPUTE_CAPABILITIES.items())
            found = f"{device.device_kind} has compute capability {device.compute_capability}"
            return Problem(f"{found}; the cuda backend needs {needed}.", f"Use another GPU, or {_USE_XLA}.")
    version = cublas_version()
    if version is None or version < CUBLAS_NEEDED:
        found = f"cuBLAS {_version(version)} is loaded" if version else "no cuBLASLt (libcublasLt.so.13) is found"
        needed = f"the cuda backend needs {_version(CUBLAS_NEEDED)} or newer."
        return Problem(f"{found}; {needed}", f"Run: {_UPGRADE_CUBLAS}")
    return None


def has_mx_products() -> bool:
    """Tells whether all GPUs can multiply MX operands; without a GPU, True: such programs are for Blackwell."""
    return all(_capability(device) >= (10, 0) for device in cuda_devices())


def has_gathering_products() -> bool:
    """Tells whether all GPUs have products that gather their rows; without a GPU, False: a copy runs everywhere."""
    devices = cuda_devices()
    return bool(devices) and all(_capability(device)[0] == 9 for device in devices)


def require_block_scaling() -> None:
    """Raises RuntimeError if this process has a GPU without matmuls of operands scaled in blocks of 128."""
    for device in cuda_devices():
        if _capability(device) >= (10, 0):
            raise RuntimeError(
                f"Float8BlockScaling needs Hopper (compute capability 9.0), {device.device_kind} has "
                f"{device.compute_capability}: use MXFP8BlockScaling."
            )


def define(
    name: str,
    result_types: Callable[..., jax.ShapeDtypeStruct | Sequence[jax.ShapeDtypeStruct]],
    xla: Callable[..., jax.Array | tuple[jax.Array, ...]],
    cuda: Callable[..., jax.Array | tuple[jax.Array, ...]],
    *,
    shares_weights: bool = False,
    dce_rule: Callable[..., Any] | None = None,
) -> Primitive:
    """Returns a primitive with a list of results, for `bind`.

    `result_types` gives their shapes and types from the operands of one batch element, `xla` computes one batch element
    in plain JAX, `cuda` all `batch` of them. With `shares_weights`, the static `spec` names operands that are kernels,
    which several batch elements can share. `dce_rule` reduces an equation to the results that are read.
    """
    primitive = Primitive(f"jax_grouped_{name}")
    primitive.multiple_results = True

    def abstract_eval(*operands: Any, backend: str, batches: tuple[int, ...], **static: Any) -> Any:
        del backend
        for aval in operands:
            if {*aval.sharding.spec} - {None}:
                raise ValueError(
                    f"jax_grouped takes no array whose type is sharded over explicit mesh axes, got {aval}: "
                    "call it inside jax.shard_map, where every device sees its own rows."
                )
        slices = [
            jax.ShapeDtypeStruct((x.shape[0] // count, *x.shape[1:]), x.dtype)
            for x, count in zip(operands, batches, strict=True)
        ]
        structs = result_types(*slices, **static)
        structs = [structs] if isinstance(structs, jax.ShapeDtypeStruct) else structs
        structs = [batched(struct, batches[0]) for struct in structs]
        for aval in (*operands, *structs) if batches[0] != 1 else ():
            # Other one-dimensional arrays hold elements, not rows or groups. A dimension may be symbolic in an export.
            counts = len(aval.shape) > 1 or jnp.issubdtype(aval.dtype, jnp.integer)
            if counts and isinstance(aval.shape[0], int) and aval.shape[0] >= _COUNT_LIMIT:
                raise ValueError(
                    f"jax.vmap over {batches[0]} calls of jax_grouped makes one with {aval.shape[0]} rows or groups, "
                    "which must be fewer than 2^31: use jax.vmap over fewer, or jax.lax.map."
                )
        first, mesh = operands[0], operands[0].sharding.mesh
        shardings = [NamedSharding(mesh, PartitionSpec(*(None,) * len(struct.shape))) for struct in structs]
        return [
            first.update(shape=struct.shape, dtype=struct.dtype, weak_type=False, sharding=sharding)
            for struct, sharding in zip(structs, shardings, strict=True)
        ]

    primitive.def_abstract_eval(abstract_eval)

    @functools.cache
    def jitted(**params: Any) -> Callable[..., list[jax.Array]]:
        return jax.jit(functools.partial(primitive.bind, **params))

    def impl(*args: jax.Array, **params: Any) -> list[jax.Array]:
        # Keep jit on under `jax.disable_jit`: a primitive has no steps that could be run one by one.
        with jax.disable_jit(False):
            return jitted(**params)(*args)

    primitive.def_impl(impl)

    refuse_derivatives(primitive)

    @functools.cache
    def on_xla_once(**static: Any) -> Callable[..., tuple[jax.Array, ...]]:
        # `jit` lets JAX trace the implementation once for all programs with operands of these shapes.
        def run(*args: jax.Array) -> tuple[jax.Array, ...]:
            results = xla(*args, **static)
            return results if isinstance(results, tuple) else (results,)

        run.__name__ = name  # As programs and profiles show it.
        return jax.jit(run)

    def on_xla(*args: jax.Array, batches: tuple[int, ...], **static: Any) -> tuple[jax.Array, ...]:
        batch = batches[0]
        if batch == 1:
            return on_xla_once(**static)(*args)

        def one(element: jax.Array) -> tuple[jax.Array, ...]:
            slices = (
                jax.lax.dynamic_index_in_dim(unfold(x, count), element // (batch // count), keepdims=False)
                for x, count in zip(args, batches, strict=True)
            )
            return on_xla_once(**static)(*slices)

        return tuple(fold(result) for result in jax.lax.map(one, jnp.arange(batch, dtype=jnp.int32)))

    def lower(
        ctx: mlir.LoweringRuleContext,
        *args: Any,
        backend: str,
        batches: tuple[int, ...],
        for_cuda: bool = False,
        **static: Any,
    ) -> Any:
        for_cuda &= backend != "xla"
        function: Any = functools.partial(on_xla, batches=batches, **static)
        if for_cuda:
            on_cuda = functools.partial(cuda, batch=batches[0], **static)

            def function(*operands: jax.Array) -> Any:
                made = on_cuda(*operands)
                return [made] if isinstance(made, jax.Array) else made

            if cuda_devices() and (problem := find_problem()):
                raise RuntimeError(" ".join(problem))
            if isinstance(batches[0], int) and batches[0] > MAX_BATCH:  # In an export, the batch may be symbolic.
                raise ValueError(
                    f"jax.vmap over {batches[0]} calls of jax_grouped makes one custom call, which takes a batch of at "
                    f"most {MAX_BATCH}: use jax.vmap over fewer, or jax.lax.map."
                )
        # Inside `jax.shard_map`, avals also carry the mesh axes over which values vary. JAX has checked them, and there
        # is no access to the mesh here, so the implementation could not create arrays that vary over them: drop them.
        known: tuple[list[Any], list[Any]] = list(ctx.avals_in), list(ctx.avals_out)
        avals_in, avals_out = [[jax.core.ShapedArray(aval.shape, aval.dtype) for aval in avals] for avals in known]
        rule = mlir.lower_fun(function, multiple_results=True)
        return rule(ctx.replace(avals_in=avals_in, avals_out=avals_out), *args)

    mlir.register_lowering(primitive, lower)
    mlir.register_lowering(primitive, functools.partial(lower, for_cuda=True), platform="cuda")

    def batching_rule(
        args: Sequence[jax.Array], axes: Sequence[int | None], *, batches: tuple[int, ...], **params: Any
    ) -> tuple[list[jax.Array], list[int]]:
        size = next(x.shape[axis] for x, axis in zip(args, axes, strict=True) if axis is not None)
        if size == 0:
            slices = [
                jax.ShapeDtypeStruct(x.shape if axis is None else x.shape[:axis] + x.shape[axis + 1 :], x.dtype)
                for x, axis in zip(args, axes, strict=True)
            ]
            structs = jax.eval_shape(functools.partial(primitive.bind, batches=batches, **params), *slices)
            empty = [jnp.zeros((0, *struct.shape), struct.dtype) for struct in structs]
            return [vary_alike(result, args[0])[0] for result in empty], [0] * len(empty)
        weights = params["spec"].weight_operands if shares_weights else ()
        # Data and scales of weights must have one batch size: share both or neither.
        shared = all(axes[i] is None and batches[i] == 1 for i in weights)
        operands, counts = [], []
        for i, (x, axis, count) in enumerate(zip(args, axes, batches, strict=True)):
            if shared and i in weights:
                operands.append(x)
                counts.append(1)
            else:
                elements = jnp.broadcast_to(x, (size, *x.shape)) if axis is None else jnp.moveaxis(x, axis, 0)
                operands.append(fold(elements))
                counts.append(size * count)
        results = primitive.bind(*operands, batches=tuple(counts), **params)
        return [unfold(result, size) for result in results], [0] * len(results)

    batching.primitive_batchers[primitive] = batching_rule
    if dce_rule is not None:
        partial_eval.dce_rules[primitive] = dce_rule

    return primitive


def refuse_derivatives(primitive: Primitive) -> None:
    """Makes the primitive raise when it is differentiated."""

    def jvp(*_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(
            f"{primitive.name} has no derivative of its own: ragged_dot and grouped_dense have gradients, in reverse "
            "mode, which are of first order with a recipe or a dkernel_accumulator; quantization has none."
        )

    ad.primitive_jvps[primitive] = jvp


def bind(primitive: Primitive, *operands: jax.Array, **static: Any) -> list[jax.Array]:
    """Returns the results of a primitive for operands without a batch."""
    return primitive.bind(*operands, backend=config.backend, batches=(1,) * len(operands), **static)


def batched(result: jax.ShapeDtypeStruct, batch: int) -> jax.ShapeDtypeStruct:
    """Returns the shape of `batch` such arrays concatenated along their first axis: `[L, ...] -> [B * L, ...]`."""
    return jax.ShapeDtypeStruct((batch * result.shape[0], *result.shape[1:]), result.dtype)


def in_whole_batch(row_indices: jax.Array, x_rows: int, batch: int) -> jax.Array:
    """Counts indices into the rows of each batch element from the first element's, `[B * R]`; -1 for no row."""
    element_indices = row_indices.reshape(batch, -1)
    exist = (element_indices >= 0) & (element_indices < x_rows)
    first_rows = x_rows * jnp.arange(batch, dtype=jnp.int32)[:, None]
    return jnp.where(exist, element_indices + first_rows, -1).reshape(row_indices.shape)


def group_table_size(num_groups: int) -> int:
    """Returns the number of `int32` in the device's table of groups and their regions (`GroupTable` in C++)."""
    # First rows, and `kNumRowBlocks` kinds of row blocks.
    return 6 * round_up(num_groups + 1, 4)


def fold(x: jax.Array) -> jax.Array:
    """Reshapes `[B, L, ...] -> [B * L, ...]`."""
    return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])


def unfold(x: jax.Array, batch: int) -> jax.Array:
    """Reshapes `[B * L, ...] -> [B, L, ...]`."""
    return x.reshape(batch, x.shape[0] // batch, *x.shape[1:])
