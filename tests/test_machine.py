"""Machines: detected within a container's limits, described, resized and measured."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pynvml
import pytest
import torch

from megatrain import machine as machines
from megatrain.machine import CUDA_CONTEXT_BYTES, H200_1_5TB, MACHINES, Machine, cgroup_limits, describe, resized


@pytest.fixture
def without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(pynvml, "nvmlInit", _no_driver)


def _no_driver() -> None:
    raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)


def _write(folder: Path, files: dict[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)


# ---- detection ----


@pytest.mark.usefixtures("without_cuda")
def test_detects_this_machine() -> None:
    found = machines.detect()
    assert found.name
    assert found.cores >= 1
    assert 0 < found.host_available_bytes <= found.host_bytes <= psutil.virtual_memory().total
    assert (found.gpu, found.unusable_gpu, found.device_bytes, found.device_free_bytes) == (None, None, 0, 0)
    assert found.h2d_bytes_per_s is None


@pytest.mark.usefixtures("without_cuda")
def test_a_containers_limit_is_what_the_machine_has(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = machines.MemoryLimit(1_000_000, 300_000)
    monkeypatch.setattr(machines, "cgroup_limits", lambda: [limit])
    found = machines.detect()
    assert (found.host_bytes, found.host_available_bytes) == (1_000_000, 300_000)


@pytest.mark.parametrize("integrated", [False, True])
def test_detects_a_card_that_torch_can_use(integrated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (14, 24))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 9)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 3)  # 6 of what torch reserved can be taken again
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(is_integrated=integrated))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a card")
    found = machines.detect()
    assert (found.gpu, found.device_bytes, found.device_free_bytes) == ("a card", 24, 20)
    assert found.one_memory == integrated


def test_a_card_that_torch_cannot_use_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lambda index: index)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetName", lambda handle: "a card")
    found = machines.detect()
    assert (found.gpu, found.unusable_gpu) == (None, "a card")
    assert "the driver names a card: install torch with CUDA" in str(found)


VERSION_2 = {"memory.max": "1000\n", "memory.current": "700\n", "memory.stat": "anon 5\ninactive_file 100\n"}
VERSION_1 = {
    "memory.limit_in_bytes": "1000",
    "memory.usage_in_bytes": "700",
    "memory.stat": "cache 5\ntotal_inactive_file 100\n",
}


@pytest.mark.parametrize(
    ("folder", "files", "membership"),
    [
        (".", VERSION_2, "0::/\n"),
        ("a/b", VERSION_2, "0::/a/b\n"),
        ("a", VERSION_2, "0::/a/b\n"),  # the parent's limit holds for its children
        ("memory", VERSION_1, "4:memory:/\n"),
        ("memory/a", VERSION_1, "9:cpu:/\n4:memory:/a\n"),
    ],
)
def test_reads_a_control_groups_limit(tmp_path: Path, folder: str, files: dict[str, str], membership: str) -> None:
    """Of 1000 bytes 700 are used, of which 100 are cached file pages."""
    root = tmp_path / "cgroup"
    _write(root / folder, files)
    _write(tmp_path, {"self": membership})
    assert cgroup_limits(root, tmp_path / "self") == [machines.MemoryLimit(1000, 400)]


@pytest.mark.parametrize("files", [{}, VERSION_2 | {"memory.max": "max\n"}, {"memory.max": "1000"}])
def test_no_limit_is_no_limit(tmp_path: Path, files: dict[str, str]) -> None:
    _write(tmp_path, files)
    assert cgroup_limits(tmp_path, tmp_path / "no such file") == []


@pytest.mark.parametrize("stat", ["anon 5\n", "not pairs at all\n"])
def test_a_limit_without_statistics_counts_cached_pages_as_used(tmp_path: Path, stat: str) -> None:
    _write(tmp_path, VERSION_2 | {"memory.stat": stat})
    assert cgroup_limits(tmp_path, tmp_path / "none") == [machines.MemoryLimit(1000, 300)]


# ---- description ----


def test_a_described_machine_is_free_but_for_cudas_own() -> None:
    found = describe("box", host_bytes=10**12, gpu="a card", device_bytes=24 * 10**9)
    assert (found.host_bytes, found.host_available_bytes) == (10**12, 10**12)
    assert (found.device_bytes, found.device_free_bytes) == (24 * 10**9, 24 * 10**9 - CUDA_CONTEXT_BYTES)


def test_presets_have_the_sizes_in_their_names() -> None:
    assert (H200_1_5TB.host_bytes, round(H200_1_5TB.device_bytes / 1e9)) == (1_500_000_000_000, 150)
    assert {name: round(m.device_bytes / 2**30) for name, m in MACHINES.items()} == {
        "h200": 140,
        "gh200": 94,
        "rtx-4090": 24,
        "rtx-3090": 24,
        "dgx-spark": 119,
    }


def test_resizing_gives_a_gpu_to_a_machine_without_one() -> None:
    bare = Machine(name="box", cores=4, host_bytes=100, host_available_bytes=50, unusable_gpu="a card")
    assert resized(bare) == bare
    assert resized(bare, host_bytes=70).host_available_bytes == 70
    found = resized(bare, device_bytes=10**9)
    assert (found.gpu, found.device_bytes, found.unusable_gpu) == ("a GPU", 10**9, None)
    assert found.host_available_bytes == 50


def test_words() -> None:
    bare = describe("box", host_bytes=64 * 10**9, cores=8)
    assert str(bare) == "box, 8 cores, 64.0 GB RAM (64.0 GB free); no GPU"
    assert "1,500.0 GB RAM (1,500.0 GB free); NVIDIA H200, 150.1 GB (149.5 GB free); " in str(H200_1_5TB)


# ---- measurement ----


def test_measures_copies_in_ram_where_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machines, "MEASURED_BYTES", 1 << 20)
    found = machines.measure(describe("box", host_bytes=1 << 30))
    assert found.name == "box"
    for rate in (found.host_memory_bytes_per_s, *found.rates.values()):
        assert rate is not None
        assert rate > 0
    assert found.h2d_bytes_per_s == found.d2h_bytes_per_s  # one and the same copy
    assert "host memory" in str(found)
    assert "host → device" in str(found)


def test_rate_is_that_of_the_best_copy_after_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first copy faults pages in and does not count, whatever it takes; here it is the shortest."""
    ends = iter([0.0, 0.1, 1.0, 5.0, 5.0, 7.0, 7.0, 10.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(ends))
    assert machines._rate(lambda: None) == machines.MEASURED_BYTES / 2.0


def test_a_card_is_measured_over_its_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machines, "MEASURED_BYTES", 1 << 10)
    monkeypatch.setattr(machines, "_cuda_link", lambda: (25e9, 26e9))
    monkeypatch.setattr(machines, "_matrix_products", lambda device: {"cuda": 7e14}[device])
    found = machines.measure(H200_1_5TB)
    assert found.rates == {"h2d_bytes_per_s": 25e9, "d2h_bytes_per_s": 26e9, "peak_flops_per_s": 7e14}
    assert "matrix products 700 TFLOP/s" in str(found)


def test_link_is_timed_from_and_to_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """With `empty` and `synchronize` replaced: which memory is asked for, and that each copy is waited for."""
    asked: list[dict[str, Any]] = []
    waits: list[None] = []
    real: Callable[..., torch.Tensor] = torch.empty

    def empty(size: int, **options: Any) -> torch.Tensor:
        asked.append({name: value for name, value in options.items() if name != "dtype"})
        return real(size, dtype=torch.uint8)

    monkeypatch.setattr(machines, "MEASURED_BYTES", 1 << 10)
    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waits.append(None))
    assert all(rate > 0 for rate in machines._cuda_link())
    assert asked == [{"pin_memory": True}, {"device": "cuda"}]
    assert len(waits) == 2 * (1 + machines.MEASURED_COPIES)
