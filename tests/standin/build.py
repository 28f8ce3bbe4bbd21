"""Compiles the stand-in for CUDA's libraries into the user's cache folder, once for these sources and that torch."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import shlex
import subprocess
import tempfile
from pathlib import Path

import torch

from megatrain.native.build import BuildError, cache_folder, find_compiler

HERE = Path(__file__).parent
RUNTIME_SOURCES = [HERE / name for name in ("memory.cpp", "streams.cpp", "device.cpp", "cublas.cpp")]
DRIVER_SOURCE = HERE / "driver.c"
RUNTIME, DRIVER = "libstandin.so", "libcuda.so.1"  # the driver is found by its name
FLAGS = ["-std=c++20", "-O1", "-g", "-shared", "-fPIC", "-fvisibility=hidden", "-pthread"]
DRIVER_FLAGS = ["-x", "c", "-shared", "-fPIC", f"-Wl,-soname,{DRIVER}"]


def built() -> Path:
    """Folder that holds both libraries, made now if they were not made yet."""
    commands = [[*find_compiler(), *FLAGS, *headers(), *map(str, RUNTIME_SOURCES), "-o", RUNTIME]]
    commands.append([*find_compiler(), *DRIVER_FLAGS, str(DRIVER_SOURCE), "-o", DRIVER])
    sources = [path.read_text() for path in (HERE / "standin.h", *RUNTIME_SOURCES, DRIVER_SOURCE)]
    key = hashlib.sha256("\0".join([*sources, *map(shlex.join, commands)]).encode()).hexdigest()
    target = cache_folder() / f"standin-{key[:16]}"
    if not target.exists():
        _build(commands, target)
    return target


def headers() -> list[str]:
    """Options that lead to NVIDIA's headers, which come with a torch for CUDA (some of them within triton)."""
    if torch.version.cuda is None:
        raise BuildError(
            f"torch {torch.__version__} of this Python is built for CPUs, and the stand-in runs a torch that is built "
            "for CUDA 13: install one in an environment of its own (https://pytorch.org/get-started/previous-versions)"
        )
    found = [folder_of("cuda_runtime_api.h", "nvidia-cuda-runtime"), folder_of("crt/host_defines.h", "triton")]
    return [part for folder in found for part in ("-isystem", str(folder))]


def folder_of(header: str, package: str) -> Path:
    """What to give the compiler so that it finds `header`, which an installed package brings."""
    try:
        files = importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.as_posix().endswith(f"include/{header}"):
            return Path(str(file.locate())).parents[header.count("/")]
    raise BuildError(f"{header} is not there; it comes with {package}: pip install {package}")


def _build(commands: list[list[str]], target: Path) -> None:
    """Several processes may build at once: each in a folder of its own, and the first rename wins."""
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=target.parent, prefix="standin-being-built-"))
    for command in commands:
        result = subprocess.run(command, cwd=scratch, capture_output=True, text=True)
        if result.returncode != 0:
            raise BuildError(f"{shlex.join(command)} failed: {result.stderr.strip()[-2000:]}")
    try:
        os.rename(scratch, target)
    except OSError:
        if not target.exists():
            raise
