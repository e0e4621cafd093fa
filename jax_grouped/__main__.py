"""`python3 -m jax_grouped`: versions, devices, and which backend runs and why."""

import argparse
import collections
import ctypes
import importlib.metadata
import os
import platform
import re
import sys
from pathlib import Path

import jax

import jax_grouped
from jax_grouped.core import config
from jax_grouped.kernels import exchange, primitive

_PACKAGES = ("jax_grouped", "jax", "jaxlib", "jax-cuda13-plugin", "flax")
_INSTALL_PLUGIN = 'python3 -m pip install "jax[cuda13]" "nvidia-cublas>=13.8,<14"'


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _platforms() -> str:
    """Returns the platforms that JAX may use; empty if it chooses."""
    return os.environ.get("JAX_PLATFORMS", "")


def _start_jax() -> str | None:
    """Returns the error, on one line, with which JAX fails to find a device; None if it finds one."""
    try:
        jax.devices()
    except Exception as error:  # Any type: with JAX_PLATFORMS=cuda and no GPU it is an AssertionError without text.
        return " ".join(str(error).split()) or f"it finds no device of JAX_PLATFORMS={_platforms()}"
    return None


def choose_backend() -> list[str]:
    """Returns the backend of operations on the default devices; if it is not `cuda`, also the reason and the remedy."""
    try:
        setting = config.config.backend
    except ValueError as error:
        return ["none: every operation raises an error", str(error)]
    if _start_jax():
        missing = [_find_missing()] if re.search("cuda|gpu", _platforms()) else []
        return ["none: JAX does not start", *missing, "To have JAX choose a platform, unset JAX_PLATFORMS."]
    if setting == "xla":
        return ["xla", "JAX_GROUPED_BACKEND is xla.", "To use the custom calls on a GPU, unset it."]
    gpus = primitive.cuda_devices()
    if not gpus:
        return ["xla", "JAX sees no NVIDIA GPU.", _find_missing()]
    if jax.devices()[0] not in gpus:
        return ["xla", "JAX's default device is not the GPU.", "To use it by default, unset JAX_PLATFORMS."]
    if problem := primitive.find_problem():
        return ["none: operations on the GPU raise an error", problem.found, problem.remedy]
    return ["cuda"]


def _find_missing() -> str:
    """Returns the first thing that JAX lacks to see an NVIDIA GPU, and its remedy."""
    if _platforms() and not re.search("cuda|gpu", _platforms()):
        return f"JAX_PLATFORMS={_platforms()} leaves GPUs out. To use one, unset it."
    if not (_installed("jax-cuda13-plugin") or _installed("jax-cuda12-plugin")):
        return f"JAX's plugin for CUDA is not installed. If this machine has a GPU, run: {_INSTALL_PLUGIN}"
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "NVIDIA's driver (libcuda.so.1) is not found. Install it, or give the container its GPUs (--gpus all)."
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return "CUDA_VISIBLE_DEVICES hides all GPUs. To use them, unset it."
    return "JAX's plugin for CUDA and NVIDIA's driver are installed: see JAX's warnings, and what nvidia-smi says."


def report(backend: list[str]) -> str:
    """Returns the whole report, one aligned line per fact. The last lines are those of `choose_backend`."""
    rows = {package: [_installed(package) or "not installed"] for package in _PACKAGES}
    if not _installed("jax_grouped"):
        rows["jax_grouped"] = [f"not installed, imported from {Path(jax_grouped.__file__).parent}"]
    rows["python"] = [platform.python_version()]
    error = _start_jax()
    if error:
        rows["devices"] = [f"none: JAX does not start: {error}"]
    else:
        capabilities = [(device.device_kind, getattr(device, "compute_capability", None)) for device in jax.devices()]
        rows["devices"] = [
            f"{count} x {kind}" + (f" (compute capability {capability})" if capability else "")
            for (kind, capability), count in collections.Counter(capabilities).items()
        ]
    version = None
    try:
        rows["extension"] = ["built" if primitive.load_extension() else "not built"]
        version = primitive.cublas_version()
    except ImportError as broken:
        rows["extension"] = [f"does not load: {broken}"]
    found = ".".join(map(str, version)) if version else "not loaded"
    needed = ".".join(map(str, primitive.CUBLAS_NEEDED))
    obstacle = "JAX does not start" if error else exchange.find_obstacle()
    rows["pushes"] = [f"none: {obstacle}" if obstacle else "over NVLink"]
    rows["cuBLASLt"] = [f"{found} ({needed} or newer needed)"]
    rows["backend"] = backend
    width = max(map(len, rows)) + 2
    return "\n".join(
        f"{name if i == 0 else '':<{width}}{value}" for name, values in rows.items() for i, value in enumerate(values)
    )


def main(arguments: list[str] | None = None) -> int:
    """Prints the report, and returns 0 if a backend runs and 1 if not."""
    parser = argparse.ArgumentParser(
        prog="python3 -m jax_grouped",
        description="Prints versions, devices, the cuBLAS that is found, and which backend will run and why.",
        epilog="The exit status is 0 if a backend runs, 1 if none does, and 2 for an unknown argument.",
    )
    parser.add_argument("--version", action="version", version=f"jax_grouped {jax_grouped.__version__}")
    parser.parse_args(arguments)
    backend = choose_backend()
    print(report(backend))
    return int(backend[0].startswith("none"))


if __name__ == "__main__":
    sys.exit(main())
