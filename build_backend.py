"""PEP 517 build backend: scikit-build-core, with the CUDA extension or as pure Python.

`JAX_GROUPED_CUDA` chooses: `auto` (the default) builds the extension if everything it needs is on this machine, `on`
builds it or fails, and has NVIDIA's missing parts installed into the build environment, `off` never builds it. Only a
CUDA build asks for jaxlib, nanobind or an NVIDIA package.

Run as a program, this file prints the arguments of a plain CMake build.
"""

import dataclasses
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

CUDA_MAJOR = 13
CUBLAS_NEEDED = (13, 8)

#: A handler built against newer FFI headers is refused by an older runtime, so these are the oldest supported, and for
#: Python 3.15 the oldest that can be installed there.
FFI_REQUIREMENT = f"jaxlib=={'0.10.0' if sys.version_info < (3, 15) else '0.11.1'}"
NANOBIND_REQUIREMENT = "nanobind>=2.5"
TOOLKIT_REQUIREMENTS = tuple(
    f"nvidia-{part}>={CUDA_MAJOR},<{CUDA_MAJOR + 1}"
    for part in ("cuda-nvcc", "cuda-crt", "nvvm", "cuda-runtime", "cuda-cccl")
)
CUBLAS_REQUIREMENT = f"nvidia-cublas>={CUBLAS_NEEDED[0]}.{CUBLAS_NEEDED[1]},<{CUBLAS_NEEDED[0] + 1}"

#: The first Python whose stable ABI nanobind builds for.
STABLE_ABI_FROM = "cp312"

#: One file of each part of a toolkit that the build uses, below its root, its include or its library directory.
_TOOLKIT_FILES = ("nvcc", "cicc", "cuda_runtime.h", "crt/host_config.h", "cub/cub.cuh", "libcudart_static.a")

_SETTINGS = ("auto", "on", "off")
_INSTALL_COMPILER = "install one, for example with `apt-get install g++` or `dnf install gcc-c++`, or name it in CXX"

ConfigSettings = dict[str, list[str] | str]


@dataclasses.dataclass(frozen=True)
class Parts:
    """What a CUDA build needs and this machine has; None for what it lacks.

    Attributes:
        linux: whether this is Linux, the only system that JAX's CUDA runs on.
        compiler: a C++17 compiler.
        toolkit: root of a complete CUDA 13 toolkit.
        cublas: directory of the headers of cuBLAS 13.8 or newer.
        ffi: directory of XLA's FFI headers.
        nanobind: nanobind's package directory.
    """

    linux: bool = True
    compiler: str | None = None
    toolkit: Path | None = None
    cublas: Path | None = None
    ffi: Path | None = None
    nanobind: Path | None = None

    def missing_toolchain(self) -> list[str]:
        """NVIDIA's parts that are missing, in words."""
        missing = []
        if self.toolkit is None:
            missing.append(f"a CUDA {CUDA_MAJOR} toolkit")
        if self.cublas is None:
            missing.append(f"the headers of cuBLAS {CUBLAS_NEEDED[0]}.{CUBLAS_NEEDED[1]} or newer")
        return missing

    def missing_requirements(self) -> list[str]:
        """The packages that hold what is missing."""
        requirements = [] if self.toolkit else [*TOOLKIT_REQUIREMENTS]
        requirements += [] if self.cublas else [CUBLAS_REQUIREMENT]
        requirements += [] if self.ffi else [FFI_REQUIREMENT]
        requirements += [] if self.nanobind else [NANOBIND_REQUIREMENT]
        return requirements


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to build.

    Attributes:
        cuda: whether the wheel has the CUDA extension.
        reason: why, in words.
        requirements: packages that must be installed before a CUDA build can begin.
    """

    cuda: bool
    reason: str
    requirements: tuple[str, ...] = ()


def make_plan(setting: str, parts: Parts) -> Plan:
    """Decides what to build.

    Args:
        setting: the value of `JAX_GROUPED_CUDA`.
        parts: what this machine has.

    Raises:
        ValueError: `setting` is none of the three, or is `on` where no package can help.
    """
    if setting not in _SETTINGS:
        raise ValueError(f"JAX_GROUPED_CUDA must be one of auto, on and off, got {setting!r}.")
    if setting == "off":
        return Plan(False, "JAX_GROUPED_CUDA is off")
    problem = None
    if not parts.linux:
        problem = "the CUDA extension needs Linux"
    elif parts.compiler is None:
        problem = f"no working C++17 compiler was found; {_INSTALL_COMPILER}"
    if problem:
        if setting == "on":
            raise ValueError(f"JAX_GROUPED_CUDA is on, but {problem}.")
        return Plan(False, problem)
    if setting == "auto" and (missing := parts.missing_toolchain()):
        return Plan(False, f"{' and '.join(missing)} were not found; JAX_GROUPED_CUDA=on installs them for the build")
    return Plan(True, f"JAX_GROUPED_CUDA is {setting}", tuple(parts.missing_requirements()))


def make_final_plan(setting: str, parts: Parts) -> Plan:
    """Decides what to build once nothing more can be installed: with every requirement met, or not at all.

    Raises:
        ValueError: as `make_plan`, and if `setting` is `on` and a requirement is missing.
    """
    plan = make_plan(setting, parts)
    if not plan.requirements:
        return plan
    problem = f"the build environment lacks parts; run: python3 -m pip install {shlex.join(plan.requirements)}"
    if setting == "on":
        raise ValueError(f"JAX_GROUPED_CUDA is on, but {problem}")
    return Plan(False, problem)


def find_parts() -> Parts:
    """Looks for what a CUDA build needs: on the system, then among the packages of this environment."""
    toolkit = find_toolkit(_toolkit_candidates())
    return Parts(
        linux=sys.platform == "linux",
        compiler=_find_compiler(),
        toolkit=toolkit,
        cublas=find_cublas(
            [*_includes(toolkit), *(directory for root in _packaged() for directory in _includes(root))]
        ),
        ffi=_find_in_package("jaxlib", "include", "xla/ffi/api/ffi.h"),
        nanobind=_find_in_package("nanobind", ".", "cmake/nanobind-config.cmake"),
    )


def _find_in_package(package: str, directory: str, file: str) -> Path | None:
    """A directory of an installed package, which is not imported, if it holds `file`."""
    spec = importlib.util.find_spec(package)
    for location in (spec.submodule_search_locations if spec else None) or ():
        if (Path(location, directory) / file).is_file():
            return Path(location, directory).resolve()
    return None


def _find_compiler() -> str | None:
    """The command of a C++ compiler that knows C++17 and has its standard library."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    for name in names:
        command = [*shlex.split(name), "-std=c++17", "-fsyntax-only", "-x", "c++", "-"]
        try:
            run = subprocess.run(command, input=b"#include <optional>\n", capture_output=True, check=False)
        except OSError:
            continue
        if run.returncode == 0:
            return name
    return None


def _packaged() -> Iterator[Path]:
    """Where NVIDIA's packages put their parts."""
    for entry in sys.path:
        root = Path(entry or ".", "nvidia", f"cu{CUDA_MAJOR}")
        if root.is_dir():
            yield root.resolve()


def _toolkit_candidates() -> Iterator[Path]:
    """Roots of possible toolkits, best first: the one that the user names or the system has, then the packages."""
    named = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if named:
        yield Path(named)
    else:
        if nvcc := shutil.which("nvcc"):
            yield Path(nvcc).resolve().parent.parent
        yield Path("/usr/local/cuda")
        yield Path(f"/usr/local/cuda-{CUDA_MAJOR}")
    yield from _packaged()


def _includes(root: Path | None) -> list[Path]:
    """Include directories of a toolkit. A cross-compilation layout has them below `targets`."""
    return [root / "include", *sorted(root.glob("targets/*/include"))] if root else []


def find_toolkit(candidates: Iterator[Path], version_of: Callable[[Path], str] | None = None) -> Path | None:
    """The first complete toolkit of the right major version.

    Args:
        candidates: possible roots, best first.
        version_of: what an nvcc prints as its version; runs it if not given.
    """
    read_version = version_of or _nvcc_version
    for root in candidates:
        libraries = [root / "lib64", root / "lib", *sorted(root.glob("targets/*/lib"))]
        includes = _includes(root)
        directories = [root / "bin", root / "nvvm" / "bin", *includes, *(i / "cccl" for i in includes), *libraries]
        if not all(any((d / file).is_file() for d in directories) for file in _TOOLKIT_FILES):
            continue
        release = re.search(r"release (\d+)\.", read_version(root / "bin" / "nvcc"))
        if release and int(release[1]) == CUDA_MAJOR:
            return root
    return None


def _nvcc_version(nvcc: Path) -> str:
    try:
        return subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False).stdout
    except OSError:
        return ""


def find_cublas(directories: Sequence[Path]) -> Path | None:
    """The first directory with the headers of a cuBLAS that is new enough and of the right major version."""
    for directory in directories:
        if not (directory / "cublasLt.h").is_file() or not (directory / "cublas_api.h").is_file():
            continue
        text = (directory / "cublas_api.h").read_text(errors="replace")
        numbers = [re.search(rf"#define CUBLAS_VER_{name} (\d+)", text) for name in ("MAJOR", "MINOR")]
        version = tuple(int(number[1]) for number in numbers if number)
        if CUBLAS_NEEDED <= version < (CUBLAS_NEEDED[0] + 1,):
            return directory
    return None


def cmake_definitions(parts: Parts) -> dict[str, str]:
    """The inputs of CMakeLists.txt."""
    return {
        "JAX_GROUPED_CUDA_ROOT": str(parts.toolkit),
        "JAX_GROUPED_CUBLAS_INCLUDE": str(parts.cublas),
        "JAX_GROUPED_FFI_INCLUDE": str(parts.ffi),
        "nanobind_DIR": f"{parts.nanobind}/cmake",
    }


def merge_settings(plan: Plan, parts: Parts, given: Mapping[str, Any] | None) -> ConfigSettings:
    """scikit-build-core's settings for this plan; those that the caller gave win."""
    settings: ConfigSettings = {"wheel.cmake": "true" if plan.cuda else "false"}
    if plan.cuda:
        # Names the wheel as CMakeLists.txt builds it. scikit-build-core ignores it where nanobind ignores STABLE_ABI.
        settings["wheel.py-api"] = STABLE_ABI_FROM
        settings |= {f"cmake.define.{name}": value for name, value in cmake_definitions(parts).items()}
    return settings | dict(given or {})


def _setting() -> str:
    return os.environ.get("JAX_GROUPED_CUDA") or "auto"


def _settings_for_build(given: Mapping[str, Any] | None, *, announce: bool = False) -> ConfigSettings:
    parts = find_parts()
    plan = _or_exit(make_final_plan, parts)
    if announce:
        print(
            f"jax_grouped: building {'the CUDA extension' if plan.cuda else 'pure Python'} ({plan.reason})", flush=True
        )
    return merge_settings(plan, parts, given)


def _or_exit(planner: Callable[[str, Parts], Plan], parts: Parts) -> Plan:
    try:
        return planner(_setting(), parts)
    except ValueError as error:
        # A front end prints a traceback for anything else, and the one sentence would be lost in it.
        raise SystemExit(str(error)) from None


def _requires(hook: Callable[[ConfigSettings], list[str]], given: Mapping[str, Any] | None) -> list[str]:
    parts = find_parts()
    plan = _or_exit(make_plan, parts)
    settings: ConfigSettings = {"wheel.cmake": "true" if plan.cuda else "false"}
    return [*hook(settings | dict(given or {})), *plan.requirements]


# The hooks of PEP 517 and PEP 660. scikit-build-core is imported inside, because the tests and a plain CMake build use
# this file without it.


def get_requires_for_build_sdist(config_settings: ConfigSettings | None = None) -> list[str]:
    """PEP 517 hook."""
    from scikit_build_core import build

    return build.get_requires_for_build_sdist(config_settings)


def get_requires_for_build_wheel(config_settings: ConfigSettings | None = None) -> list[str]:
    """PEP 517 hook."""
    from scikit_build_core import build

    return _requires(build.get_requires_for_build_wheel, config_settings)


def get_requires_for_build_editable(config_settings: ConfigSettings | None = None) -> list[str]:
    """PEP 660 hook."""
    from scikit_build_core import build

    return _requires(build.get_requires_for_build_editable, config_settings)


def prepare_metadata_for_build_wheel(metadata_directory: str, config_settings: ConfigSettings | None = None) -> str:
    """PEP 517 hook."""
    from scikit_build_core import build

    return build.prepare_metadata_for_build_wheel(metadata_directory, _settings_for_build(config_settings))


def prepare_metadata_for_build_editable(metadata_directory: str, config_settings: ConfigSettings | None = None) -> str:
    """PEP 660 hook."""
    from scikit_build_core import build

    return build.prepare_metadata_for_build_editable(metadata_directory, _settings_for_build(config_settings))


def build_sdist(sdist_directory: str, config_settings: ConfigSettings | None = None) -> str:
    """PEP 517 hook."""
    from scikit_build_core import build

    return build.build_sdist(sdist_directory, config_settings)


def build_wheel(
    wheel_directory: str, config_settings: ConfigSettings | None = None, metadata_directory: str | None = None
) -> str:
    """PEP 517 hook."""
    from scikit_build_core import build

    return build.build_wheel(wheel_directory, _settings_for_build(config_settings, announce=True), metadata_directory)


def build_editable(
    wheel_directory: str, config_settings: ConfigSettings | None = None, metadata_directory: str | None = None
) -> str:
    """PEP 660 hook. The extension lands in `jax_grouped/`, so that it is found from the checkout too."""
    from scikit_build_core import build

    return build.build_editable(
        wheel_directory, _settings_for_build(config_settings, announce=True), metadata_directory
    )


def main() -> None:
    """Prints the arguments of a plain CMake build with what is installed here."""
    parts = find_parts()
    try:
        make_final_plan("on", parts)
    except ValueError as error:
        raise SystemExit(str(error)) from None
    definitions = cmake_definitions(parts) | {"Python_EXECUTABLE": sys.executable}
    print(shlex.join(f"-D{name}={value}" for name, value in definitions.items()))


if __name__ == "__main__":
    main()
