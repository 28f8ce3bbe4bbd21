"""A sink in a thread of its own: it may be slow, fail or hang, and training neither waits for it nor ends with it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from queue import Full, Queue

from megatrain.sinks.sink import Sink

logger = logging.getLogger(__name__)

MOST_WAITING = 10_000  # points that a slow sink may lag behind
CLOSE_S = 90.0  # how long the end of a run waits for it

Point = tuple[int, dict[str, float]]


class GuardedSink:
    """Opens a sink in its thread and hands it every point; the first failure is logged, and ends it."""

    def __init__(self, name: str, open_sink: Callable[[], Sink], *, most_waiting: int = MOST_WAITING) -> None:
        self._name = name
        self._open = open_sink
        self._points: Queue[Point | None] = Queue(most_waiting)
        self._off = threading.Event()
        self._thread = threading.Thread(target=self._work, name=f"megatrain-{name}", daemon=True)
        self._thread.start()

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Returns at once."""
        self._put((step, dict(values)))

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Returns when everything is handed over, or after `timeout_s`."""
        self._put(None)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._switch_off(f"it has not finished within {timeout_s:g} s")

    def _put(self, point: Point | None) -> None:
        if self._off.is_set():
            return
        try:
            self._points.put_nowait(point)
        except Full:
            self._switch_off(f"it lags {self._points.maxsize:,} points behind")

    def _work(self) -> None:
        try:
            sink = self._open()
            try:
                while not self._off.is_set() and (point := self._points.get()) is not None:
                    sink.scalars(*point)
            finally:
                sink.close()
        except BaseException as error:  # also SystemExit, which a library may raise
            self._switch_off(f"{type(error).__name__}: {error}")

    def _switch_off(self, why: str) -> None:
        if not self._off.is_set():
            self._off.set()
            logger.warning("the run goes on without %s: %s", self._name, why)
