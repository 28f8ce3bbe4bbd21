"""A background thread that samples memory and never stands in the way of training."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import psutil
import pynvml

from megatrain.trace.recorder import Recorder
from megatrain.trace.records import MemorySample

STOP_TIMEOUT_S = 5.0


class DeviceReading(NamedTuple):
    """Bytes on the CUDA device, in the order of MemorySample; None where nobody can tell."""

    allocated: int | None = None
    reserved: int | None = None
    process: int | None = None
    used: int | None = None
    total: int | None = None


class DeviceMemory:
    """Reads one CUDA device, once torch has initialised CUDA: looking must not be what initialises it."""

    def __init__(self, index: int) -> None:
        import torch  # only here: a viewer reads records without loading torch

        self._cuda: Any = torch.cuda
        self._index = index
        self._nvml_handle: Any = None
        self._nvml_tried = False

    def read(self) -> DeviceReading:
        if not self._cuda.is_initialized():
            return DeviceReading()
        allocated, reserved = self._cuda.memory_allocated(self._index), self._cuda.memory_reserved(self._index)
        if not self._nvml_tried:
            self._nvml_tried, self._nvml_handle = True, self._find_nvml_handle()
        return DeviceReading(allocated, reserved, self._process_bytes(), *self._card_bytes())

    def _find_nvml_handle(self) -> Any:
        """Return NVML's handle of the device, by its UUID: CUDA_VISIBLE_DEVICES renumbers only torch's devices."""
        uuid = self._cuda.get_device_properties(self._index).uuid
        try:
            pynvml.nvmlInit()
            return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        except pynvml.NVMLError:
            return None

    def _process_bytes(self) -> int | None:
        """Return what the driver counts for this process; a container that numbers processes itself hides it."""
        if self._nvml_handle is None:
            return None
        try:
            processes = pynvml.nvmlDeviceGetComputeRunningProcesses(self._nvml_handle)
        except pynvml.NVMLError:
            return None
        return next((process.usedGpuMemory for process in processes if process.pid == os.getpid()), None)

    def _card_bytes(self) -> tuple[int | None, int | None]:
        if self._nvml_handle is None:
            return None, None
        try:
            card = pynvml.nvmlDeviceGetMemoryInfo(self._nvml_handle)
        except pynvml.NVMLError:  # devices that share the host's memory do not say
            return None, None
        return int(card.used), int(card.total)


class MemorySampler:
    """Adds a MemorySample to the recorder at once and then every `period_s`, from a daemon thread.

    arena_bytes, pinned_bytes: called in that thread; bytes in the engine's device arena and pinned on the host.
    device_index: the CUDA device, or None. error: the first exception a sample raised; sampling goes on after it.
    """

    def __init__(
        self,
        recorder: Recorder,
        *,
        arena_bytes: Callable[[], int],
        pinned_bytes: Callable[[], int],
        device_index: int | None = None,
        period_s: float = 0.5,
    ) -> None:
        if not period_s > 0:
            raise ValueError(f"period_s must be a number of seconds > 0; got {period_s!r}")
        self.error: Exception | None = None
        self._recorder = recorder
        self._arena_bytes = arena_bytes
        self._pinned_bytes = pinned_bytes
        self._period_s = period_s
        self._process = psutil.Process()
        self._device = DeviceMemory(device_index) if device_index is not None else None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="megatrain-memory", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End sampling; waits for a sample in progress, but not for one that hangs."""
        self._stopped.set()
        self._thread.join(STOP_TIMEOUT_S)

    def _loop(self) -> None:
        while True:
            try:
                self._recorder.add(self._sample())
            except Exception as error:  # a broken gauge must not end a run
                self.error = self.error or error
            if self._stopped.wait(self._period_s):
                return

    def _sample(self) -> MemorySample:
        device = self._device.read() if self._device else DeviceReading()
        return MemorySample(
            self._recorder.now(),
            *device,
            arena_bytes=self._arena_bytes(),
            host_rss_bytes=self._process.memory_info().rss,
            host_pinned_bytes=self._pinned_bytes(),
            host_available_bytes=psutil.virtual_memory().available,
        )
