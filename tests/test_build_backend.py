import dataclasses
import sys
from pathlib import Path

import pytest

import build_backend
from build_backend import Parts

pytestmark = pytest.mark.slow

COMPLETE = Parts(
    compiler="g++", toolkit=Path("cuda"), cublas=Path("cublas"), ffi=Path("jaxlib/include"), nanobind=Path("nanobind")
)
NO_NVIDIA = dataclasses.replace(COMPLETE, toolkit=None, cublas=None)
OLDEST_JAXLIB = "jaxlib==0.11.1" if sys.version_info >= (3, 15) else "jaxlib==0.10.0"
FRESH_ENVIRONMENT = dataclasses.replace(COMPLETE, ffi=None, nanobind=None)


def make_toolkit(root: Path, *, lacking: str = "") -> Path:
    files = ("bin/nvcc", "nvvm/bin/cicc", "include/cuda_runtime.h", "include/crt/host_config.h")
    for file in (*files, "include/cccl/cub/cub.cuh", "lib/libcudart_static.a"):
        if not lacking or lacking not in file:
            (root / file).parent.mkdir(parents=True, exist_ok=True)
            (root / file).touch()
    return root


def make_cublas(directory: Path, version: str) -> Path:
    major, minor = version.split(".")
    directory.mkdir(parents=True)
    (directory / "cublasLt.h").touch()
    (directory / "cublas_api.h").write_text(f"#define CUBLAS_VER_MAJOR {major}\n#define CUBLAS_VER_MINOR {minor}\n")
    return directory


@pytest.mark.parametrize("parts", [COMPLETE, Parts(linux=False)], ids=["complete", "nothing"])
def test_off_is_pure(parts: Parts):
    plan = build_backend.make_plan("off", parts)

    assert not plan.cuda
    assert not plan.requirements


@pytest.mark.parametrize("setting", ["auto", "on"])
def test_a_complete_machine_builds_cuda_and_needs_nothing(setting: str):
    plan = build_backend.make_plan(setting, COMPLETE)

    assert plan.cuda
    assert not plan.requirements


@pytest.mark.parametrize("setting", ["auto", "on"])
def test_a_cuda_build_asks_for_the_oldest_ffi_headers(setting: str):
    plan = build_backend.make_plan(setting, FRESH_ENVIRONMENT)

    assert plan.cuda
    assert plan.requirements == (OLDEST_JAXLIB, build_backend.NANOBIND_REQUIREMENT)


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        (dataclasses.replace(COMPLETE, linux=False), "needs Linux"),
        (dataclasses.replace(COMPLETE, compiler=None), r"no working C\+\+17 compiler.*apt-get install g\+\+"),
    ],
    ids=["system", "compiler"],
)
def test_what_no_package_provides_is_an_error_or_a_pure_build(parts: Parts, reason: str):
    with pytest.raises(ValueError, match=reason):
        build_backend.make_plan("on", parts)

    plan = build_backend.make_plan("auto", parts)

    assert not plan.cuda
    assert not plan.requirements


@pytest.mark.parametrize(
    ("lacking", "names"),
    [
        ({"toolkit": None}, build_backend.TOOLKIT_REQUIREMENTS),
        ({"cublas": None}, (build_backend.CUBLAS_REQUIREMENT,)),
        ({"toolkit": None, "cublas": None}, (*build_backend.TOOLKIT_REQUIREMENTS, build_backend.CUBLAS_REQUIREMENT)),
    ],
    ids=["toolkit", "cublas", "both"],
)
def test_missing_nvidia_parts_are_requested_by_on_alone(lacking: dict[str, None], names: tuple[str, ...]):
    parts = dataclasses.replace(COMPLETE, **lacking)

    assert build_backend.make_plan("on", parts).requirements == names
    assert build_backend.make_plan("auto", parts).requirements == ()
    assert not build_backend.make_plan("auto", parts).cuda


def test_an_environment_that_lacks_parts_fails_or_builds_pure():
    with pytest.raises(ValueError, match=r"pip install .*nvidia-cuda-nvcc.*nvidia-cublas"):
        build_backend.make_final_plan("on", NO_NVIDIA)

    plan = build_backend.make_final_plan("auto", FRESH_ENVIRONMENT)

    assert not plan.cuda
    assert OLDEST_JAXLIB in plan.reason


@pytest.mark.parametrize("setting", ["ON", "1", ""])
def test_an_unknown_setting_is_an_error(setting: str):
    with pytest.raises(ValueError, match=f"auto, on and off, got '{setting}'"):
        build_backend.make_plan(setting, COMPLETE)


def test_settings_name_the_parts_and_leave_the_last_word_to_the_caller():
    plan = build_backend.make_plan("on", COMPLETE)

    settings = build_backend.merge_settings(plan, COMPLETE, {"cmake.define.JAX_GROUPED_CUDA_ROOT": "mine"})

    assert settings["wheel.cmake"] == "true"
    assert settings["cmake.define.JAX_GROUPED_CUDA_ROOT"] == "mine"
    assert settings["cmake.define.JAX_GROUPED_CUBLAS_INCLUDE"] == "cublas"


def test_a_cuda_build_is_for_python_3_12_and_all_later_versions():
    plan = build_backend.make_plan("on", COMPLETE)

    assert build_backend.merge_settings(plan, COMPLETE, None)["wheel.py-api"] == "cp312"


def test_a_pure_build_runs_no_cmake():
    plan = build_backend.make_plan("off", COMPLETE)

    assert build_backend.merge_settings(plan, COMPLETE, None) == {"wheel.cmake": "false"}


def test_the_first_complete_toolkit_of_the_right_version_is_found(tmp_path: Path):
    roots = [make_toolkit(tmp_path / name) for name in ("cuda-12", "cuda-13", "another-13")]

    def version_of(nvcc: Path) -> str:
        return f"release {'12.9' if 'cuda-12' in str(nvcc) else '13.0'}, V13"

    assert build_backend.find_toolkit(iter(roots), version_of) == tmp_path / "cuda-13"


@pytest.mark.parametrize("part", ["nvcc", "cicc", "cuda_runtime.h", "host_config.h", "cub.cuh", "libcudart_static.a"])
def test_an_incomplete_toolkit_is_not_used(tmp_path: Path, part: str):
    root = make_toolkit(tmp_path, lacking=part)

    assert build_backend.find_toolkit(iter([root]), lambda _: "release 13.0") is None


@pytest.mark.parametrize(
    ("version", "usable"), [("13.7", False), ("13.8", True), ("13.10", True), ("12.9", False), ("14.0", False)]
)
def test_cublas_headers_must_be_new_enough(tmp_path: Path, version: str, usable: bool):
    directory = make_cublas(tmp_path / "include", version)

    assert build_backend.find_cublas([tmp_path, directory]) == (directory if usable else None)


def test_old_cublas_headers_of_a_toolkit_do_not_hide_newer_ones(tmp_path: Path):
    old, new = make_cublas(tmp_path / "old", "13.1"), make_cublas(tmp_path / "new", "13.10")

    assert build_backend.find_cublas([old, new]) == new


def test_a_compiler_that_does_not_run_is_not_found(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CXX", "a-compiler-that-does-not-exist")

    assert build_backend.find_parts().compiler is None


def test_parts_of_packages_are_found_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    root = make_toolkit(tmp_path / "nvidia" / "cu13")
    make_cublas(tmp_path / "unused", "13.1")
    for header in ("cublasLt.h", "cublas_api.h"):
        (root / "include" / header).write_text("#define CUBLAS_VER_MAJOR 13\n#define CUBLAS_VER_MINOR 9\n")
    nvcc = root / "bin" / "nvcc"
    nvcc.write_text("#!/bin/sh\necho release 13.5, V13.5.37\n")
    nvcc.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "nothing"))
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])

    parts = build_backend.find_parts()

    assert parts.toolkit == root
    assert parts.cublas == root / "include"
