"""The build's hooks, called as a front end calls them, on a machine of empty files and stubs."""

import json
import platform
import subprocess
import sys
from pathlib import Path

import packaging
import pathspec
import pytest
import scikit_build_core

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
CUDA = f"{'cp312-abi3' if sys.version_info >= (3, 12) else 'cp311-cp311'}-linux_{platform.machine()}"
FFI = {"jaxlib==0.10.0; python_version < '3.15'", "jaxlib==0.11.1; python_version >= '3.15'", "nanobind>=2.5"}
FFI_CUBLAS = FFI | {"nvidia-cublas>=13.8,<14"}
NVIDIA = ("cuda-nvcc", "cuda-crt", "nvvm", "cuda-runtime", "cuda-cccl")
EVERYTHING = FFI_CUBLAS | {f"nvidia-{part}>=13,<14" for part in NVIDIA}
CUBLAS_API = "#define CUBLAS_VER_MAJOR {}\n#define CUBLAS_VER_MINOR {}\n"
CMAKE = '#!/bin/sh\n[ $1 = -E ] && echo \'{"version": {"string": "4.0"}}\' || exit $CMAKE_STATUS'
TOOLKIT = ["bin/nvcc", "nvvm/bin/cicc", "include/crt/host_config.h", "include/cccl/cub/cub.cuh"]
TOOLKIT += ["lib64/libcudart_static.a", "include/cuda_runtime_api.h"]
FILES = {"bin/c++": "", "bin/cmake": CMAKE, "bin/ninja": "#!/bin/sh\necho 2"}
FILES |= {f"cuda/{file}": "#define CUDART_VERSION  13000" for file in TOOLKIT}
FILES |= {"cuda/include/cublas_api.h": CUBLAS_API.format(13, 8)}


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    for file, text in FILES.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
        (tmp_path / file).chmod(0o755)
    (tmp_path / "packages/nvidia").mkdir(parents=True)
    for package in (packaging, pathspec, scikit_build_core):  # and none that has parts of CUDA
        (tmp_path / "packages" / package.__name__).symlink_to(Path(str(package.__file__)).parent)
    return tmp_path


def call(machine: Path, hook: str, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    code = f"import build_backend, json; print(json.dumps(build_backend.{hook}(*{arguments})))"
    env = {"PATH": f"{machine}/bin", "CUDA_HOME": f"{machine}/cuda", "PYTHONPATH": f"{ROOT}:{machine}/packages"} | env
    return subprocess.run([sys.executable, "-SBc", code], cwd=ROOT, env=env, capture_output=True, text=True)


def requirements(machine: Path, setting: str, hook: str = "get_requires_for_build_wheel") -> set[str]:
    return set(json.loads(call(machine, hook, JAX_GROUPED_CUDA=setting).stdout.splitlines()[-1]))


@pytest.mark.parametrize(
    ("file", "text", "expected"),
    [
        *((f"cuda/{file}", "", EVERYTHING) for file in TOOLKIT),
        ("cuda/include/cuda_runtime_api.h", "#define CUDART_VERSION  12090", EVERYTHING),
        *(("cuda/include/cublas_api.h", CUBLAS_API.format(*v), FFI_CUBLAS) for v in [(13, 7), (12, 9), (14, 0)]),
        ("cuda/include/cublas_api.h", CUBLAS_API.format(13, 10), FFI),
        ("bin/c++", "", set()),
    ],
)
def test_on_asks_for_missing_parts_and_auto_does_without(machine: Path, file: str, text: str, expected: set[str]):
    (machine / file).write_text(text) if text else (machine / file).unlink()

    assert requirements(machine, "on") == expected
    assert requirements(machine, "auto") == (FFI if expected == FFI else set())


def test_parts_of_packages_are_found(machine: Path):
    (machine / "cuda").rename(machine / "packages/nvidia/cu13")

    assert requirements(machine, "on") == requirements(machine, "", "get_requires_for_build_editable") == FFI
    assert requirements(machine, "off") == requirements(machine, "on", "get_requires_for_build_sdist") == set()


@pytest.mark.parametrize(
    ("setting", "environment", "tag", "message"),
    [
        ("off", {"CMAKE_STATUS": "1"}, "py3-none-any", ""),
        ("auto", {"CMAKE_STATUS": "0"}, CUDA, ""),
        ("auto", {"CMAKE_STATUS": "1"}, "py3-none-any", "pure Python, as the build of the CUDA extension failed"),
        ("auto", {"CUDA_HOME": "none"}, "py3-none-any", "pure Python, for lack of a CUDA 13 toolkit and "),
        ("on", {"CMAKE_STATUS": "0"}, CUDA, ""),
        ("on", {"CMAKE_STATUS": "1"}, "", "CMake configuration failed"),
        ("on", {"CXX": "none"}, "", "needs Linux and a C++17 compiler; install a compiler"),
        ("1", {}, "", "JAX_GROUPED_CUDA must be one of auto, on and off, got '1'."),
    ],
)
def test_wheel_and_message(machine: Path, setting: str, environment: dict[str, str], tag: str, message: str):
    result = call(machine, "build_wheel", str(machine), JAX_GROUPED_CUDA=setting, **environment)

    assert [wheel.name.split("-", 2)[2] for wheel in machine.glob("*.whl")] == ([f"{tag}.whl"] if tag else [])
    assert message in result.stdout + result.stderr
