"""Exchanges of rows between GPUs that write into each other's memory, over NVLink: custom calls of `_exchange`.

Each call is made by all devices of a mesh axis. XLA gives their results memory that all of them can write, and each
device writes its part into that of the others, between two meetings on the devices.
"""

import functools
import importlib
import math
from collections.abc import Hashable, Mapping
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.compute_on import compute_on
from jax.experimental.xla_metadata import set_xla_metadata

from jax_grouped.core.config import config
from jax_grouped.core.values import axis_names, vary_alike
from jax_grouped.kernels import primitive

#: `kMostPeers` in csrc.
_MOST_DEVICES = 32
#: The first NCCL with which the windows of JAX 0.12 work, as its `ncclGetVersion` counts.
_NCCL_NEEDED = 23000


class Windows(NamedTuple):
    """The devices of an exchange: those of each group by their numbers in the program, one group after another."""

    devices: tuple[int, ...]
    group_size: int


@functools.cache
def _load_extension() -> ModuleType | None:
    """Loads the extension and registers its custom calls. Returns None if it is not there, or cannot be loaded."""
    try:
        module = importlib.import_module("jax_grouped._exchange")
    except ImportError:
        return None
    jax.ffi.register_ffi_type("jax_grouped_loaded_for_exchange", module.state_type(), platform="CUDA")
    for name, handler in module.handlers().items():
        jax.ffi.register_ffi_target(name, handler, platform="CUDA")
    return module


@functools.cache
def find_obstacle() -> str | None:
    """Returns why this process's GPUs cannot write into each other's memory, or None."""
    gpus = primitive.cuda_devices()
    if len(gpus) < 2:
        return "JAX sees fewer than two GPUs"
    if jax.__version_info__ < (0, 12):
        return f"it needs JAX 0.12 or newer, this is {jax.__version__}"
    if primitive.find_problem():
        return "the cuda backend cannot run"
    if jax.process_count() > 1:
        return "it needs one process for all GPUs"
    if (module := _load_extension()) is None:
        return "jax_grouped was installed without it, for want of the headers of jaxlib 0.12"
    version = module.nccl_version()
    if version < _NCCL_NEEDED:
        found = f"{version // 10000}.{version // 100 % 100}.{version % 100}" if version else "no NCCL"
        return f"it needs NCCL 2.30 or newer (nvidia-nccl-cu13), JAX has loaded {found}"
    return None


def find_windows(axis_name: Hashable) -> Windows | None:
    """Returns the devices of a mesh axis, inside `jax.shard_map`, if they can write into each other's memory."""
    if config.backend == "xla" or find_obstacle() is not None:
        return None
    mesh = jax.sharding.get_abstract_mesh()
    device = mesh.abstract_device
    if not {*axis_names(axis_name)} <= {*mesh.axis_names} or device is None or device.platform != "gpu":
        return None
    return windows_of(mesh.shape, axis_name)


def windows_of(shape: Mapping[Hashable, int], axis_name: Hashable) -> Windows | None:
    """Returns the devices along axes of a mesh of this shape, if there are not too many, in the order of the mesh."""
    names, sizes = axis_names(axis_name), (*shape.values(),)
    axes = [[*shape].index(name) for name in names]
    group_size = math.prod(shape[name] for name in names)
    if axes != sorted(axes) or group_size > _MOST_DEVICES:
        return None
    numbers = np.moveaxis(np.arange(math.prod(sizes)).reshape(sizes), axes, range(-len(axes), 0))
    return Windows(tuple(numbers.reshape(-1).tolist()), group_size)


def push_rows(windows: Windows, wanted: jax.Array, x: jax.Array) -> jax.Array:
    """Sends rows `[R, C]` to the devices that want them. Bit `i` of `wanted`, `uint32[R]`, is that of device `i`.

    Returns:
        `[D, R, C]`, the rows from each device; anything for rows that this device has not wanted.
    """
    result = jax.ShapeDtypeStruct((windows.group_size, *x.shape), x.dtype)
    return _call("jax_grouped_push_rows", result, windows, wanted, x)


def push_sums(
    windows: Windows, wanted: jax.Array, rows: jax.Array, inverse: jax.Array, weights: jax.Array | None = None
) -> jax.Array:
    """Sums the rows of each token, as `sum_rows`, for the tokens of all devices, and sends the sums to the device.

    Only sums of tokens whose `wanted`, `uint32[D T]`, has the bit of this device are sent.

    Returns:
        `[D, T, C]`: the sums from each device for this one's tokens; anything for tokens that want none from it.
    """
    tokens = inverse.shape[0] // windows.group_size
    result = jax.ShapeDtypeStruct((windows.group_size, tokens, rows.shape[1]), rows.dtype)
    more = () if weights is None else (weights,)
    return _call("jax_grouped_push_sums", result, windows, wanted, rows, inverse, *more)


def can_push(x: jax.Array, *, sums: bool = False) -> bool:
    """Tells whether the kernels take rows: there are any, of whole vectors, and for sums of 16-bit numbers."""
    return x.size > 0 and x.shape[1] * x.dtype.itemsize % 16 == 0 and (not sums or x.dtype.itemsize == 2)


def devices_of(experts: jax.Array, own_experts: int, devices: int) -> jax.Array:
    """Returns the bits of the devices that have a token's experts, `uint32[T]` from `[T, k]`."""
    numbers = jnp.arange(devices, dtype=jnp.uint32)
    has_expert = jnp.any(experts[..., None] // own_experts == numbers.astype(jnp.int32), axis=1)
    return jnp.sum(jnp.where(has_expert, jnp.uint32(1) << numbers, 0), axis=1, dtype=jnp.uint32)


def _call(name: str, result: jax.ShapeDtypeStruct, windows: Windows, *operands: jax.Array) -> jax.Array:
    """Calls it on a stream beside the others, so that kernels that do not read its result run meanwhile.

    A call of several results would not run beside others: XLA waits for it to take its results apart.
    """
    operands = vary_alike(*operands)

    def run(*operands: jax.Array) -> jax.Array:
        # Memory space 1 is that of collectives, which all devices can write.
        with set_xla_metadata(results_memory_spaces="{0:1}"):
            return jax.ffi.ffi_call(name, result, vmap_method="sequential")(
                *operands, devices=np.array(windows.devices, np.int64), group_size=np.int64(windows.group_size)
            )

    run_beside: Any = compute_on  # Its arguments are others before JAX 0.12.
    made = run_beside(run, compute_type="gpu_stream:1", out_memory_spaces=jax.memory.Space.Device)(*operands)
    return vary_alike(made, operands[0])[0]
