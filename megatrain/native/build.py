"""Compiles adamw.cpp on first use and keeps the result in the user's cache folder."""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("adamw.cpp")

# No contraction: the source says itself where torch multiplies and adds in one rounding. errno and trapping change no
# value, but would keep sqrt and the selects out of vector registers. -fopenmp-simd links no OpenMP runtime.
OPTIMIZE = ["-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
FLAGS = ["-std=c++17", *OPTIMIZE, "-fopenmp-simd", "-pthread", "-shared", "-fPIC"]


class BuildError(Exception):
    """There is no compiled kernel, and the message says why."""


def find_compiler() -> list[str]:
    """The C++ compiler as the start of a command line: $CXX if set, else the first of the usual names."""
    chosen = shlex.split(os.environ.get("CXX", ""))
    if chosen:
        return chosen
    for name in ("c++", "g++", "clang++"):
        if shutil.which(name):
            return [name]
    raise BuildError("no C++ compiler was found (looked for $CXX, c++, g++ and clang++)")


def cpu_identity() -> str:
    """What -march=native depends on: a home folder shared by unlike machines holds a build for each."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    telling = ("model name", "flags", "Features", "CPU part")
    return "\n".join([platform.machine(), *(line for line in lines if line.startswith(telling))])


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megatrain"


def library_path() -> Path:
    """Path of the compiled kernel, built now if there is none for this source, command and CPU."""
    command = [*find_compiler(), *FLAGS]
    key = hashlib.sha256("\0".join([SOURCE.read_text(), *command, cpu_identity()]).encode()).hexdigest()
    try:
        target = cache_folder() / f"adamw-{key[:16]}.so"
        if not target.exists():
            _build(command, target)
    except (OSError, RuntimeError) as error:  # an unknown home folder is a RuntimeError
        raise BuildError(f"{error} (XDG_CACHE_HOME can name a writable cache folder)") from error
    return target


def _build(command: list[str], target: Path) -> None:
    """Several processes may build at once: each in a folder of its own, and the last rename wins."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        built = Path(scratch) / target.name
        result = subprocess.run([*command, str(SOURCE), "-o", str(built)], capture_output=True, text=True)
        if result.returncode != 0:
            raise BuildError(f"{shlex.join(command)} failed: {result.stderr.strip()[-500:]}")
        os.replace(built, target)
