"""Peak resident memory (RSS): what this process occupies of the machine's RAM, sampled while something runs."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import threading
from types import TracebackType

import psutil

EVERY_S = 0.005


class PeakRss:
    """Within, samples RSS; `peak_bytes` is the most there was. Not used while steps are timed."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self.peak_bytes = rss_bytes()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        while not self._stop.wait(EVERY_S):
            self.peak_bytes = max(self.peak_bytes, int(self._process.memory_info().rss))

    def __enter__(self) -> PeakRss:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()


def rss_bytes() -> int:
    return int(psutil.Process().memory_info().rss)


def settled_rss_bytes() -> int:
    """RSS after freed memory went back to the system, so that what comes next cannot hide in it."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # only the C library of GNU keeps it, and has this call
        ctypes.CDLL(None).malloc_trim(0)
    return rss_bytes()
