"""PEP 517 build backend: scikit-build-core, after a look for what a build of the CUDA extension needs.

pyproject.toml says what is built, and with which packages, by two environment variables: JAX_GROUPED_CUDA, which the
user sets, and JAX_GROUPED_LACKS, in which this module lists the parts that it has not found.
"""

import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scikit_build_core import build

# A file of each part of a CUDA 13 toolkit, and of cuBLAS 13.8 or newer; a pattern finds the right version in its file.
_TOOLKIT = {
    "bin/nvcc": "",
    "nvvm/bin/cicc": "",
    "include/crt/host_config.h": "",
    "include/cuda_runtime_api.h": r"CUDART_VERSION +13\d{3}\b",
    "include/cccl/cub/cub.cuh": "",
    "lib*/libcudart_static.a": "",
}
_CUBLAS = {"include/cublas_api.h": r"(?s)CUBLAS_VER_MAJOR 13\b.*CUBLAS_VER_MINOR ([89]|\d\d)\b"}


def _holds(root: Path, files: dict[str, str]) -> bool:
    """Tells whether `root` has all of `files`. A layout for cross-compilation has some of them below `targets`."""
    for file, pattern in files.items():
        found = [*root.glob(file), *root.glob(f"targets/*/{file}")]
        if not any(not pattern or re.search(pattern, path.read_text(errors="replace")) for path in found):
            return False
    return True


def _look_for_parts() -> None:
    """Sets JAX_GROUPED_LACKS, CUDA_HOME to the toolkit, and JAX_GROUPED_CUDA to what `auto` means on this machine."""
    setting = os.environ.get("JAX_GROUPED_CUDA") or "auto"
    if setting not in ("auto", "on", "off"):
        # For any other exception a front end prints a traceback, in which the sentence would be lost.
        raise SystemExit(f"JAX_GROUPED_CUDA must be one of auto, on and off, got {setting!r}.")
    compilers = shlex.split(os.environ.get("CXX", ""))[:1] or ["c++", "g++", "clang++"]
    named = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    nvcc = Path(shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc").resolve()
    system = [Path(named)] if named else [nvcc.parents[1], Path("/usr/local/cuda"), Path("/usr/local/cuda-13")]
    packages = [Path(entry, "nvidia", "cu13") for entry in sys.path]
    toolkits = [root for root in [*system, *packages] if _holds(root, _TOOLKIT)][:1]
    found = {
        "Linux": sys.platform == "linux",  # the only system that JAX's CUDA runs on
        "a C++17 compiler": any(map(shutil.which, compilers)),
        "a CUDA 13 toolkit": bool(toolkits),
        "headers of cuBLAS 13.8 or newer": any(_holds(root, _CUBLAS) for root in [*toolkits, *packages]),
    }
    lacks = " and ".join(part for part, is_found in found.items() if not is_found)
    if lacks and setting == "auto":
        print(f"jax_grouped: pure Python, for lack of {lacks}; JAX_GROUPED_CUDA=on gets NVIDIA's parts from PyPI")
        setting = "off"
    os.environ.update(JAX_GROUPED_CUDA=setting, JAX_GROUPED_LACKS=lacks)
    if toolkits:
        os.environ["CUDA_HOME"] = str(toolkits[0])


def _after_look(hook: Callable[..., Any]) -> Callable[..., Any]:
    def look_and_call(*args: Any, **kwargs: Any) -> Any:
        _look_for_parts()
        return hook(*args, **kwargs)

    return look_and_call


build_sdist = build.build_sdist
build_wheel = _after_look(build.build_wheel)
build_editable = _after_look(build.build_editable)
get_requires_for_build_sdist = build.get_requires_for_build_sdist
get_requires_for_build_wheel = _after_look(build.get_requires_for_build_wheel)
get_requires_for_build_editable = _after_look(build.get_requires_for_build_editable)
