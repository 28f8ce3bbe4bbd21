import os
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import psutil
import pynvml
import pytest
import torch

from megatrain.trace import MemorySampler, Recorder
from megatrain.trace.memory import DeviceMemory, DeviceReading


class Signal:
    """A gauge that tells when it has been read a number of times."""

    def __init__(self, reads: int) -> None:
        self.reads, self.done = reads, threading.Event()

    def __call__(self) -> int:
        self.reads -= 1
        if self.reads <= 0:
            self.done.set()
        return 7


def test_samples_at_once_and_then_every_period() -> None:
    recorder, arena = Recorder(), Signal(reads=3)
    sampler = MemorySampler(recorder, arena_bytes=arena, pinned_bytes=lambda: 5, period_s=0.001)
    sampler.start()
    assert arena.done.wait(30)
    sampler.stop()
    samples = recorder.memory()
    assert len(samples) >= 3
    assert samples[0].arena_bytes == 7
    assert samples[0].host_pinned_bytes == 5
    assert 0 < samples[0].host_rss_bytes < psutil.virtual_memory().total
    assert samples[0].device_allocated_bytes is None
    assert sampler.error is None


def test_a_run_shorter_than_a_period_has_its_sample() -> None:
    recorder = Recorder()
    sampler = MemorySampler(recorder, arena_bytes=lambda: 0, pinned_bytes=lambda: 0, period_s=1000)
    sampler.start()
    sampler.stop()
    assert len(recorder.memory()) == 1


def test_a_broken_gauge_is_kept_and_sampling_goes_on() -> None:
    recorder, arena = Recorder(), Signal(reads=4)
    answers: Iterator[int] = iter([1])  # the second sample finds it empty

    def pinned_bytes() -> int:
        return next(answers)

    sampler = MemorySampler(recorder, arena_bytes=arena, pinned_bytes=pinned_bytes, period_s=0.001)
    sampler.start()
    assert arena.done.wait(30)
    sampler.stop()
    assert isinstance(sampler.error, StopIteration)
    assert len(recorder.memory()) == 1


def test_refuses_to_sample_without_pause() -> None:
    with pytest.raises(ValueError, match="period_s must be a number of seconds > 0; got 0"):
        MemorySampler(Recorder(), arena_bytes=lambda: 0, pinned_bytes=lambda: 0, period_s=0)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA device as torch tells of it, though there is none."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda index: 10 + index)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda index: 20 + index)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=f"card-{index}"))


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    processes = [SimpleNamespace(pid=-1, usedGpuMemory=99), SimpleNamespace(pid=os.getpid(), usedGpuMemory=30)]
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", lambda uuid: uuid)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetComputeRunningProcesses", lambda handle: processes)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", lambda handle: SimpleNamespace(used=40, total=len(handle)))


def fails(code: int) -> object:
    def call(*_: object) -> None:
        raise pynvml.NVMLError(code)

    return call


@pytest.mark.usefixtures("cuda", "nvml")
def test_reads_the_card_that_torch_uses() -> None:
    assert DeviceMemory(1).read() == DeviceReading(11, 21, 30, 40, len("GPU-card-1"))


@pytest.mark.usefixtures("nvml")
def test_looking_does_not_initialise_cuda() -> None:
    assert DeviceMemory(0).read() == DeviceReading()
    assert not torch.cuda.is_initialized()


@pytest.mark.usefixtures("cuda")
def test_survives_a_missing_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pynvml, "nvmlInit", fails(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND))
    device = DeviceMemory(0)
    assert device.read() == device.read() == DeviceReading(10, 20)


@pytest.mark.usefixtures("cuda", "nvml")
def test_survives_questions_that_nvml_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetMemoryInfo"):
        monkeypatch.setattr(pynvml, name, fails(pynvml.NVML_ERROR_NOT_SUPPORTED))
    assert DeviceMemory(0).read() == DeviceReading(10, 20)


@pytest.mark.usefixtures("cuda", "nvml")
def test_the_sample_names_the_device_figures() -> None:
    recorder = Recorder()
    sampler = MemorySampler(recorder, arena_bytes=lambda: 0, pinned_bytes=lambda: 0, device_index=0, period_s=1000)
    sampler.start()
    sampler.stop()
    (sample,) = recorder.memory()
    assert (sample.device_allocated_bytes, sample.device_reserved_bytes) == (10, 20)
    assert (sample.process_device_bytes, sample.device_used_bytes, sample.device_total_bytes) == (30, 40, 10)
