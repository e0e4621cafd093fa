"""Pushes: custom calls of `_exchange` with which GPUs write rows into each other's memory, over NVLink.

All devices of a mesh axis make a call together. XLA allocates its result where all of them can write. Each writes its
part between two barriers, which run on the devices.
"""

import dataclasses
import functools
import importlib
import math
from collections.abc import Hashable, Mapping
from types import ModuleType
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.compute_on import compute_on
from jax.experimental.xla_metadata import set_xla_metadata

from jax_grouped.core.config import config
from jax_grouped.core.values import axis_names, axis_size, vary_alike
from jax_grouped.kernels import primitive

#: `kMostPeers` in csrc.
_MOST_DEVICES = 32
#: The first NCCL with which the windows of JAX 0.12 work, as its `ncclGetVersion` counts.
_NCCL_NEEDED = 23000


class Peers(NamedTuple):
    """Devices that write into each other's memory: those of each group by their numbers in the program, in one row."""

    devices: tuple[int, ...]
    group_size: int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Push:
    """Devices that push tokens and sums to each other, and which of the tokens each of them needs.

    Attributes:
        peers: the devices; static.
        destinations: `uint32[T]`; bit `i` says that the device of rank `i` needs this device's token.
        needed: `uint32[D T]`; the bit of this device's rank says that it needs the token, of all devices' tokens.
    """

    peers: Peers = dataclasses.field(metadata=dict(static=True))
    destinations: jax.Array
    needed: jax.Array | None = None


@functools.cache
def load_extension() -> ModuleType | str:
    """Loads the extension and registers its custom calls. Returns it, or why it is not there."""
    if jax.__version_info__ < (0, 12):
        return f"they need JAX 0.12 or newer, this is {jax.__version__}"
    try:
        module = importlib.import_module("jax_grouped._exchange")
        jax.ffi.register_ffi_type("jax_grouped_loaded_for_exchange", module.state_type(), platform="CUDA")
        for name, handler in module.handlers().items():
            jax.ffi.register_ffi_target(name, handler, platform="CUDA")
    except ModuleNotFoundError:
        return "jax_grouped was built without them, as jaxlib 0.12 was not found"
    except Exception as error:  # Any type: a later JAX may refuse what this one takes.
        return f"their extension does not load: {error}"
    return module


@functools.cache
def find_obstacle() -> str | None:
    """Returns why this process's GPUs do not write into each other's memory, or None."""
    if len(primitive.cuda_devices()) < 2:
        return "JAX sees fewer than two GPUs"
    if primitive.find_problem():
        return "the cuda backend cannot run"
    if jax.process_count() > 1:
        return "they need one process for all GPUs"
    module = load_extension()
    if isinstance(module, str):
        return module
    version = module.nccl_version()
    if version < _NCCL_NEEDED:
        found = f"{version // 10000}.{version // 100 % 100}.{version % 100}" if version else "none"
        return f'they need NCCL 2.30 or newer (pip install "nvidia-nccl-cu13>=2.30"), loaded is {found}'
    return None


def find_peers(axis_name: Hashable) -> Peers | None:
    """Returns the devices of a mesh axis, inside `jax.shard_map`, if they can write into each other's memory."""
    if config.backend == "xla" or jax.debug_nans.value or jax.debug_infs.value or find_obstacle() is not None:
        return None  # Rows that nobody has pushed may be NaN.
    mesh = jax.sharding.get_abstract_mesh()
    device = mesh.abstract_device
    # The axis may be one of jax.vmap, by the name of another one of the mesh.
    if not {*axis_names(axis_name)} <= {*mesh.manual_axes} or device is None or device.platform != "gpu":
        return None
    peers = list_peers(mesh.shape, axis_name)
    return peers if peers is not None and peers.group_size == axis_size(axis_name) else None


def list_peers(shape: Mapping[Hashable, int], axis_name: Hashable) -> Peers | None:
    """Returns the devices along axes of a mesh of this shape, if there are not too many, in the order of the mesh."""
    names, sizes = axis_names(axis_name), (*shape.values(),)
    axes = [[*shape].index(name) for name in names]
    group_size = math.prod(shape[name] for name in names)
    if axes != sorted(axes) or group_size > _MOST_DEVICES:
        return None
    numbers = np.moveaxis(np.arange(math.prod(sizes)).reshape(sizes), axes, range(-len(axes), 0))
    return Peers(tuple(numbers.reshape(-1).tolist()), group_size)


def find_destinations(experts: jax.Array, own_experts: int, devices: int) -> jax.Array:
    """Returns the bits of the devices that have a token's experts, `uint32[T]` from `[T, k]`."""
    ranks = jnp.arange(devices, dtype=jnp.uint32)
    has_expert = jnp.any(experts[..., None] // own_experts == ranks.astype(jnp.int32), axis=1)
    return jnp.sum(jnp.where(has_expert, jnp.uint32(1) << ranks, 0), axis=1, dtype=jnp.uint32)


def can_push(x: jax.Array, *, sums: bool = False) -> bool:
    """Tells whether the kernels take rows: there are any, of whole vectors, and for sums of 16-bit numbers."""
    return x.size > 0 and x.shape[1] * x.dtype.itemsize % 16 == 0 and (not sums or x.dtype.itemsize == 2)


def push_rows(peers: Peers, destinations: jax.Array, x: jax.Array) -> jax.Array:
    """Sends each row of `[R, C]` to the devices whose bits its `destinations`, `uint32[R]`, have.

    Returns:
        `[D, R, C]`, the rows from each device; rows that were not for this device are undefined.
    """
    result = jax.ShapeDtypeStruct((peers.group_size, *x.shape), x.dtype)
    return _call("jax_grouped_push_rows", result, peers, destinations, x)


def push_sums(
    peers: Peers, needed: jax.Array, rows: jax.Array, inverse: jax.Array, weights: jax.Array | None = None
) -> jax.Array:
    """Sums each token's rows, as `sum_rows` does, for the tokens of all devices, and sends each to its token's device.

    Sums of tokens whose `needed`, `uint32[D T]`, lacks the bit of this device are not sent.

    Returns:
        `[D, T, C]`: the sums from each device for this one's tokens; those that were not sent are undefined.
    """
    tokens = inverse.shape[0] // peers.group_size
    result = jax.ShapeDtypeStruct((peers.group_size, tokens, rows.shape[1]), rows.dtype)
    more = () if weights is None else (weights,)
    return _call("jax_grouped_push_sums", result, peers, needed, rows, inverse, *more)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2))
def _call(name: str, result: jax.ShapeDtypeStruct, peers: Peers, *operands: jax.Array) -> jax.Array:
    """Runs the call on a second stream, beside kernels that do not read its result.

    It has one result: XLA waits for a call with several to unpack the tuple.
    """
    operands = vary_alike(*operands)

    def run(*operands: jax.Array) -> jax.Array:
        # Memory space 1 is that of collectives, which all devices can write.
        with set_xla_metadata(results_memory_spaces="{0:1}"):
            return jax.ffi.ffi_call(name, result, vmap_method="sequential")(
                *operands, devices=np.array(peers.devices, np.int64), group_size=np.int64(peers.group_size)
            )

    run_beside: Any = compute_on  # It has other parameters before JAX 0.12.
    made = run_beside(run, compute_type="gpu_stream:1", out_memory_spaces=jax.memory.Space.Device)(*operands)
    return vary_alike(made, operands[0])[0]


@_call.defjvp
def _call_jvp(name: str, *_: Any) -> NoReturn:
    raise NotImplementedError(
        f'{name} has no derivative: for second derivatives of a layer, use Parallel(exchange="gather").'
    )


# Register the custom calls at import: an exported program may run before any layer is traced.
load_extension()
