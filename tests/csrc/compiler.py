"""The C++ compiler that builds the extension, for tests that compile a program."""

import os
import pathlib
import shlex
import shutil
import subprocess

ROOT = pathlib.Path(__file__).parents[2]

#: The command of the compiler; empty without one. `CXX` may hold arguments, too.
COMPILER = shlex.split(os.environ.get("CXX") or shutil.which("c++") or "")


def compiled(out: pathlib.Path, *sources: str, options: tuple[str, ...] = ()) -> pathlib.Path:
    """Compiles sources of the repository to `out`. Warnings are errors."""
    command = [*COMPILER, "-std=c++17", "-Wall", "-Wextra", "-Werror", "-I.", *options, *sources, "-o", out]
    subprocess.run(command, cwd=ROOT, check=True)
    return out
