"""What a workstation has, detected or described: cores, memory per tier, and how fast bytes move."""

from __future__ import annotations

import ctypes
import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pynvml
import torch

CGROUPS = Path("/sys/fs/cgroup")
CUDA_CONTEXT_BYTES = 600_000_000  # what CUDA itself takes on a card before the first tensor
MEASURED_BYTES = 128 << 20  # of each copy: source and target together are larger than caches
MEASURED_COPIES = 3


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Bytes and rates of one workstation with at most one GPU.

    name: the processor, or what a described machine is called. host_available_bytes: RAM that can still be taken.
    gpu: a card that torch can use, or None. device_free_bytes: of its device_bytes, what tensors can take.
    unusable_gpu: a card that the driver names but torch cannot use. The rates are None until measured;
    host_memory_bytes_per_s counts bytes read and bytes written. Without a GPU the link is a copy in RAM.
    peak_flops_per_s: of large matrix products, in bfloat16 on a GPU and float32 on a CPU.
    device_memory_bytes_per_s: of the card's own memory; only data sheets say it here.
    data_sheets: the rates are what the vendors print, which no run reaches; else they were measured.
    one_memory: the GPU works in the host's memory, so that both tiers are the same bytes.
    """

    name: str
    cores: int
    host_bytes: int
    host_available_bytes: int
    gpu: str | None = None
    device_bytes: int = 0
    device_free_bytes: int = 0
    unusable_gpu: str | None = None
    h2d_bytes_per_s: float | None = None
    d2h_bytes_per_s: float | None = None
    host_memory_bytes_per_s: float | None = None
    peak_flops_per_s: float | None = None
    device_memory_bytes_per_s: float | None = None
    data_sheets: bool = False
    one_memory: bool = False

    @property
    def rates(self) -> dict[str, float | None]:
        """What a run is compared with."""
        names = ("h2d_bytes_per_s", "d2h_bytes_per_s", "peak_flops_per_s")
        return {name: getattr(self, name) for name in names}

    def __str__(self) -> str:
        lines = [f"{self.name}, {self.cores} cores, {_gb(self.host_bytes)} RAM ({_gb(self.host_available_bytes)} free)"]
        if self.gpu is not None:
            lines.append(f"{self.gpu}, {_gb(self.device_bytes)} ({_gb(self.device_free_bytes)} free)")
        elif self.unusable_gpu is not None:
            lines.append(f"no GPU that torch can use (the driver names {self.unusable_gpu}: install torch with CUDA)")
        else:
            lines.append("no GPU")
        rates = {
            "host memory": self.host_memory_bytes_per_s,
            "host → device": self.h2d_bytes_per_s,
            "device → host": self.d2h_bytes_per_s,
        }
        measured = [f"{name} {rate / 1e9:.1f} GB/s" for name, rate in rates.items() if rate is not None]
        if self.peak_flops_per_s is not None:
            measured.append(f"matrix products {self.peak_flops_per_s / 1e12:.3g} TFLOP/s")
        if self.data_sheets:
            measured.append("rates by data sheets, not measured")
        return "; ".join([*lines, *measured])


def describe(name: str, *, host_bytes: int, gpu: str | None = None, device_bytes: int = 0, cores: int = 16) -> Machine:
    """A machine that is not this one, with nothing else running on it."""
    machine = Machine(name=name, cores=cores, host_bytes=host_bytes, host_available_bytes=host_bytes, gpu=gpu)
    return resized(machine, device_bytes=device_bytes) if gpu is not None else machine


def resized(machine: Machine, *, host_bytes: int | None = None, device_bytes: int | None = None) -> Machine:
    """`machine` as it would be with other memory, free but for CUDA's own; None = as it is."""
    if host_bytes is not None:
        machine = replace(machine, host_bytes=host_bytes, host_available_bytes=host_bytes)
    if device_bytes is not None:
        free = max(0, device_bytes - CUDA_CONTEXT_BYTES)
        gpu = machine.gpu or "a GPU"
        machine = replace(machine, gpu=gpu, device_bytes=device_bytes, device_free_bytes=free, unusable_gpu=None)
    return machine


def _gib(number: float) -> int:
    return int(number * 2**30)


# Note: described machines
#   Device bytes are what torch reports of these cards, a little less than what is printed on their boxes. Rates are
#   the vendors' own figures, none of them measured here; matrix products are in bfloat16 without sparsity, summed in
#   float32. A PCIe 5.0 x16 link carries 64 GB/s each way, a 4.0 one 32. Memory of a host is channels × 8 bytes × rate.
PCIE_4_BYTES_PER_S, PCIE_5_BYTES_PER_S = 32e9, 64e9


def _with_rates(machine: Machine, *, flops: float, device_memory: float, link: float, host_memory: float) -> Machine:
    """By data sheets; `link` is that of each way."""
    return replace(
        machine,
        peak_flops_per_s=flops,
        device_memory_bytes_per_s=device_memory,
        h2d_bytes_per_s=link,
        d2h_bytes_per_s=link,
        host_memory_bytes_per_s=host_memory,
        data_sheets=True,
    )


# NVIDIA H200 data sheet: 1,979 TFLOP/s with sparsity, 4.8 TB/s. Host: one AMD EPYC 9004, 12 channels of DDR5-4800.
H200_1_5TB = _with_rates(
    describe("H200", host_bytes=1_500_000_000_000, gpu="NVIDIA H200", device_bytes=_gib(139.8), cores=64),
    flops=989.5e12,
    device_memory=4.8e12,
    link=PCIE_5_BYTES_PER_S,
    host_memory=460.8e9,
)
# NVIDIA GH200 data sheet: NVLink-C2C 900 GB/s both ways together, HBM3 4 TB/s, LPDDR5X up to 512 GB/s.
GH200 = _with_rates(
    describe("GH200", host_bytes=480_000_000_000, gpu="NVIDIA GH200 480GB", device_bytes=_gib(94.5), cores=72),
    flops=989.5e12,
    device_memory=4e12,
    link=450e9,
    host_memory=512e9,
)
# NVIDIA Ada architecture whitepaper, appendix A. Host: a desktop with two channels of DDR5-5600.
RTX_4090 = _with_rates(
    describe("RTX 4090", host_bytes=_gib(128), gpu="NVIDIA GeForce RTX 4090", device_bytes=_gib(23.6)),
    flops=165.2e12,
    device_memory=1008e9,
    link=PCIE_4_BYTES_PER_S,
    host_memory=89.6e9,
)
# NVIDIA Ampere GA102 architecture whitepaper, appendix A. Host: a desktop with two channels of DDR4-3200.
RTX_3090 = _with_rates(
    describe("RTX 3090", host_bytes=_gib(128), gpu="NVIDIA GeForce RTX 3090", device_bytes=_gib(23.6)),
    flops=71e12,
    device_memory=936e9,
    link=PCIE_4_BYTES_PER_S,
    host_memory=51.2e9,
)
# NVIDIA DGX Spark data sheet: 128 GB LPDDR5X for both processors, 273 GB/s; 1,000 TFLOP/s in FP4 with sparsity, where
# an eighth is taken for bfloat16 without it. A copy reads and writes that memory: half its rate each way.
DGX_SPARK = _with_rates(
    replace(
        describe("DGX Spark", host_bytes=128_000_000_000, gpu="NVIDIA GB10", device_bytes=128_000_000_000, cores=20),
        one_memory=True,
    ),
    flops=125e12,
    device_memory=273e9,
    link=273e9 / 2,
    host_memory=273e9,
)
MACHINES = {"h200": H200_1_5TB, "gh200": GH200, "rtx-4090": RTX_4090, "rtx-3090": RTX_3090, "dgx-spark": DGX_SPARK}


# ---- detection ----


def detect() -> Machine:
    """This machine, within the limits of the container it runs in."""
    memory = psutil.virtual_memory()
    limits = [limit for limit in cgroup_limits() if limit.nbytes < memory.total]
    machine = Machine(
        name=_processor(),
        cores=_cores(),
        host_bytes=min([int(memory.total), *(limit.nbytes for limit in limits)]),
        host_available_bytes=min([int(memory.available), *(limit.available_bytes for limit in limits)]),
    )
    if not torch.cuda.is_available():
        return replace(machine, unusable_gpu=_driver_names())
    total = torch.cuda.mem_get_info()[1]
    shared = bool(getattr(torch.cuda.get_device_properties(0), "is_integrated", False))
    name = torch.cuda.get_device_name()
    return replace(machine, gpu=name, device_bytes=total, device_free_bytes=free_device_bytes(), one_memory=shared)


def free_device_bytes() -> int:
    """What tensors can still take of the card: also what torch keeps of tensors that are gone."""
    cached = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    return int(torch.cuda.mem_get_info()[0]) + cached


@dataclass(frozen=True)
class MemoryLimit:
    """A container's limit and what is left of it."""

    nbytes: int
    available_bytes: int


def cgroup_limits(root: Path = CGROUPS, membership: Path = Path("/proc/self/cgroup")) -> list[MemoryLimit]:
    """Memory limits of the control groups (version 2, or 1) that this process is in; those without one left out."""
    try:
        paths = [line.split(":", 2)[2] for line in membership.read_text().splitlines()]
    except (OSError, IndexError):
        paths = []
    folders = {root, root / "memory"}
    for path in paths:
        for base in (root, root / "memory"):
            folder = base / path.lstrip("/")
            folders |= {folder, *(parent for parent in folder.parents if parent.is_relative_to(base))}
    found = (_limit(folder) for folder in sorted(folders))
    return [limit for limit in found if limit is not None]


def _limit(folder: Path) -> MemoryLimit | None:
    """Files of version 2, or of version 1. Cached file pages count as used, but are given up when needed."""
    for limit_name, used_name, cache_name in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            limit, used = (int((folder / name).read_text()) for name in (limit_name, used_name))
        except (OSError, ValueError):  # no such file, or "max"
            continue
        return MemoryLimit(limit, max(0, limit - used + _statistic(folder / "memory.stat", cache_name)))
    return None


def _statistic(file: Path, name: str) -> int:
    try:
        pairs = dict(line.split() for line in file.read_text().splitlines())
    except (OSError, ValueError):
        return 0
    return int(pairs.get(name, 0))


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def _driver_names() -> str | None:
    """The first card that NVIDIA's driver knows, if there is a driver."""
    try:
        pynvml.nvmlInit()
        name = pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(0))
    except pynvml.NVMLError:
        return None
    return str(name)


# ---- measurement ----


def measure(machine: Machine) -> Machine:
    """`machine` (this one) with its rates; takes a second and 0.3 GB of RAM."""
    source = torch.ones(MEASURED_BYTES, dtype=torch.uint8)
    target = torch.zeros(MEASURED_BYTES, dtype=torch.uint8)
    host = 2 * _rate(lambda: target.copy_(source))
    if machine.gpu is not None:
        h2d, d2h = _cuda_link()
    else:
        h2d = d2h = _rate(lambda: ctypes.memmove(target.data_ptr(), source.data_ptr(), MEASURED_BYTES))
    return replace(
        machine,
        host_memory_bytes_per_s=host,
        h2d_bytes_per_s=h2d,
        d2h_bytes_per_s=d2h,
        peak_flops_per_s=_matrix_products("cpu" if machine.gpu is None else "cuda"),
        data_sheets=False,
    )


def _rate(copy: Callable[[], Any]) -> float:
    """Bytes copied per second: the best of a few copies after one to warm up."""
    seconds = []
    for _ in range(1 + MEASURED_COPIES):
        start = time.perf_counter()
        copy()
        seconds.append(time.perf_counter() - start)
    return MEASURED_BYTES / min(seconds[1:])


def _matrix_products(device: str) -> float:
    """FLOP/s of square matrix products, the best of a few: what a model's products can at most reach here."""
    size, dtype = (1024, torch.float32) if device == "cpu" else (8192, torch.bfloat16)
    generator = torch.Generator(device).manual_seed(0)  # zeros or ones would take less power, and run faster
    a = torch.randn(size, size, dtype=dtype, device=device, generator=generator)
    seconds = []
    for _ in range(1 + MEASURED_COPIES):
        start = time.perf_counter()
        a @ a
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return float(2 * size**3 / min(seconds[1:]))


def _cuda_link() -> tuple[float, float]:
    """Bytes per second to the card and back, from and to pinned memory."""
    host = torch.empty(MEASURED_BYTES, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(MEASURED_BYTES, dtype=torch.uint8, device="cuda")

    def copy(target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()

    return _rate(lambda: copy(device, host)), _rate(lambda: copy(host, device))


def _gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:,.1f} GB"
