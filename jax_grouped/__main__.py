"""`python3 -m jax_grouped`: versions, devices, and which backend runs and why."""

import collections
import importlib.metadata
import platform

import jax

from jax_grouped._config import config
from jax_grouped.backends import extension

_PACKAGES = ("jax_grouped", "jax", "jaxlib", "flax")


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _describe(device: jax.Device) -> str:
    capability = getattr(device, "compute_capability", None)
    return f"{device.device_kind} (compute capability {capability})" if capability else device.device_kind


def _devices() -> list[str]:
    counts = collections.Counter(_describe(device) for device in jax.devices())
    return [f"{count} x {description}" for description, count in counts.items()]


def _extension() -> str:
    try:
        return "built" if extension.load() else "not built"
    except ImportError as error:
        return f"does not load: {error}"


def _cublas() -> str:
    needed = ".".join(str(part) for part in extension.CUBLAS_NEEDED)
    try:
        version = extension.cublas_version()
    except ImportError:
        version = None
    found = ".".join(str(part) for part in version) if version else "not loaded"
    return f"{found} ({needed} or newer needed)"


def choose_backend() -> list[str]:
    """The backend that operations on the default devices run on, then, if that is not `cuda`, why and what to do."""
    if config.backend == "xla":
        return ["xla", "JAX_GROUPED_BACKEND is xla.", "To use the custom calls on a GPU, unset it."]
    if not extension.cuda_devices():
        advice = 'python3 -m pip install "jax[cuda13]" "nvidia-cublas>=13.8,<14"'
        return ["xla", "JAX sees no NVIDIA GPU.", f"If this machine has one, run: {advice}"]
    if problem := extension.find_problem():
        return ["none: operations on the GPU raise an error", problem.found, problem.remedy]
    return ["cuda"]


def report() -> str:
    """The whole text, one aligned line per fact."""
    rows = [(package, [_version(package)]) for package in _PACKAGES]
    rows.append(("python", [platform.python_version()]))
    rows.append(("devices", _devices()))
    rows.append(("extension", [_extension()]))
    rows.append(("cuBLASLt", [_cublas()]))
    rows.append(("backend", choose_backend()))
    width = max(len(name) for name, _ in rows) + 2
    lines = []
    for name, values in rows:
        lines += [f"{label:<{width}}{value}" for label, value in zip([name, *[""] * len(values)], values, strict=False)]
    return "\n".join(lines)


if __name__ == "__main__":
    print(report())
