"""The compiled extension: checks that it is installed and that this machine can run it, and names the remedy if not."""

import dataclasses
import functools
import importlib
import importlib.metadata
from pathlib import Path
from types import ModuleType

import jax

#: The first cuBLASLt whose grouped matmul is correct in every use that this library makes of it.
CUBLAS_NEEDED = (13, 8)

#: Compute capabilities of the GPUs that the extension is compiled for.
COMPUTE_CAPABILITIES = {(9, 0): "Hopper", (10, 0): "Blackwell B200"}

_INSTALL = "JAX_GROUPED_CUDA=on python3 -m pip install --no-deps -e ."
_UPGRADE_CUBLAS = 'python3 -m pip install --upgrade "nvidia-cublas>=13.8,<14"'
_USE_XLA = "set JAX_GROUPED_BACKEND=xla to run the slow pure-JAX backend"


@functools.cache
def load() -> ModuleType | None:
    """Loads the extension and registers its custom calls. Returns None if this installation was built without it."""
    try:
        module = importlib.import_module("jax_grouped._cuda")
    except ModuleNotFoundError:
        return None
    module.set_cublaslt_path(str(_packaged_cublaslt() or ""))
    jax.ffi.register_ffi_type("jax_grouped_loaded_devices", module.state_type(), platform="CUDA")
    for name, handler in module.handlers().items():
        jax.ffi.register_ffi_target(name, handler, platform="CUDA")
    return module


def _packaged_cublaslt() -> Path | None:
    """Returns the path of the cuBLASLt of the `nvidia-cublas` package, which JAX's CUDA plugin loads."""
    try:
        files = importlib.metadata.files("nvidia-cublas") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    for file in files:
        if file.name == "libcublasLt.so.13":
            return Path(str(file.locate()))
    return None


def cuda_devices() -> list[jax.Device]:
    """Returns the NVIDIA GPUs that JAX sees; none on a machine without a GPU or with a CPU-only JAX."""
    try:
        return [device for device in jax.devices("cuda") if device.platform == "gpu"]
    except RuntimeError:
        return []


@dataclasses.dataclass(frozen=True)
class Problem:
    """Reason why the `cuda` backend cannot run, and its one remedy."""

    found: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.found} {self.remedy}"


def _version(number: tuple[int, ...]) -> str:
    return ".".join(str(part) for part in number)


def compute_capability(device: jax.Device) -> tuple[int, ...]:
    """Returns the compute capability of a GPU, for example `(9, 0)`."""
    return tuple(int(part) for part in device.compute_capability.split("."))


def cublas_version() -> tuple[int, ...] | None:
    """Returns the version of the cuBLASLt that the custom calls use; None without the extension or without cuBLASLt."""
    module = load()
    number = module.cublaslt_version() if module else 0
    # cuBLASLt encodes 13.10.0 as 131000.
    return (number // 10000, number // 100 % 100, number % 100) if number else None


def find_problem() -> Problem | None:
    """Returns the problem that keeps the `cuda` backend from running on this process's GPUs, or None."""
    rebuild = f"From a checkout of jax_grouped, run: {_INSTALL} (or {_USE_XLA})."
    try:
        if load() is None:
            return Problem("jax_grouped was installed without its CUDA extension.", rebuild)
    except ImportError as error:
        return Problem(f"The CUDA extension of jax_grouped does not load: {error}.", rebuild)
    for device in cuda_devices():
        if compute_capability(device) not in COMPUTE_CAPABILITIES:
            needed = " or ".join(f"{_version(number)} ({name})" for number, name in COMPUTE_CAPABILITIES.items())
            found = f"{device.device_kind} has compute capability {device.compute_capability}"
            return Problem(f"{found}; the cuda backend needs {needed}.", f"Use another GPU, or {_USE_XLA}.")
    version = cublas_version()
    if version is None or version < CUBLAS_NEEDED:
        found = f"cuBLAS {_version(version)} is loaded" if version else "no cuBLASLt (libcublasLt.so.13) is found"
        needed = f"the cuda backend needs {_version(CUBLAS_NEEDED)} or newer."
        return Problem(f"{found}; {needed}", f"Run: {_UPGRADE_CUBLAS}")
    return None


@functools.cache
def problem_once() -> Problem | None:
    """Calls `find_problem` once per process: neither the GPUs nor the libraries change while a process runs."""
    return find_problem()


def has_mx_products() -> bool:
    """Tells whether all GPUs can multiply MX operands; without a GPU, True: such programs are for Blackwell."""
    return all(compute_capability(device) >= (10, 0) for device in cuda_devices())


def has_gathering_products() -> bool:
    """Tells whether all GPUs have products that gather their rows; without a GPU, False: a copy runs everywhere."""
    devices = cuda_devices()
    return bool(devices) and all(compute_capability(device)[0] == 9 for device in devices)


def require_block_scaling() -> None:
    """Raises RuntimeError if this process has a GPU without matmuls of operands scaled in blocks of 128."""
    for device in cuda_devices():
        if compute_capability(device) >= (10, 0):
            raise RuntimeError(
                f"Float8BlockScaling needs Hopper (compute capability 9.0), {device.device_kind} has "
                f"{device.compute_capability}: use MXFP8BlockScaling."
            )


def require_usable() -> None:
    """Raises if this process has an NVIDIA GPU that the custom calls cannot run on; without a GPU, never."""
    if cuda_devices() and (problem := problem_once()):
        raise RuntimeError(str(problem))
