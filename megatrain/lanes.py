"""Lanes: each runs its work in order, on a thread of its own, beside the others.

A lane is a thread and a stream. On a CPU the stream does nothing and copies are memmoves between host and
arena buffers; with CUDA it is a torch stream, the thread only issues, and order across lanes is kept by
events on the device. Nothing else in the project knows the difference.

Note: two kinds of waiting
    Between CUDA lanes a wait is an event that the stream meets: no thread blocks for the device. Where the
    host itself must know (a slot to reuse, a gradient to read), `Done.wait` blocks that one thread.

Note: errors travel
    Work that raises marks its `Done` as failed; whatever waits for it fails with the same error, and the lane
    refuses further work. So an error reaches the caller of the engine, and no thread waits for a dead one.
"""

from __future__ import annotations

import ctypes
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from megatrain.config import Throttle
from megatrain.host import slabs
from megatrain.trace import Recorder, Span

Starts = Mapping[str, Callable[[], None]]

LANES = ("h2d", "compute", "d2h", "host")


class LaneError(RuntimeError):
    """Work of a lane failed; the message names lane, operation, layer and step, the cause is chained."""


class Done:
    """What a lane hands over with a result: whoever reads the result waits for this first."""

    def __init__(self) -> None:
        self._issued = threading.Event()
        self._event: Any = None  # a device event, where the work goes on after its function returned
        self._error: BaseException | None = None

    def succeed(self, event: Any = None) -> None:
        self._event = event
        self._issued.set()

    def fail(self, error: BaseException) -> None:
        self._error = error
        self._issued.set()

    @property
    def complete(self) -> bool:
        """True once a wait would return at once, without error."""
        return self._issued.is_set() and self._error is None and (self._event is None or self._event.query())

    def wait_issued(self) -> Any:
        """Block until the work was handed to its stream; return its device event, if it has one."""
        self._issued.wait()
        if self._error is not None:
            raise self._error
        return self._event

    def wait(self) -> None:
        """Block this thread until the work is complete; raise LaneError if it failed."""
        event = self.wait_issued()
        if event is not None:
            event.synchronize()


class Stream(Protocol):
    """The seam between a CPU and a CUDA device."""

    def wait_for(self, done: Done) -> None:
        """Order all later work of this stream after `done`."""

    def active(self) -> AbstractContextManager[Any]:
        """Inside, torch issues to this stream."""

    def mark(self) -> Any:
        """A point in time on this stream."""

    def hand_over(self, mark: Any) -> Any:
        """The event that makes what was issued before `mark` safe to use elsewhere, or None."""

    def read(self, mark: Any) -> float | None:
        """Seconds since the run began at which `mark` was passed; None if it has not been yet."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy between two contiguous tensors of one shape and dtype, across host and device."""

    def keep(self, tensor: torch.Tensor) -> None:
        """Hold the memory of `tensor`, made on another stream, until this stream has passed this point."""

    def pace(self, start: Any, nbytes: int) -> None:
        """Let no more than the stream's rate pass: called after work that began at `start` and moved `nbytes`."""


class CpuStream:
    """Work is complete when its function returns; where a rate is given, not before its bytes would have passed."""

    def __init__(self, clock: Callable[[], float], bytes_per_s: float | None = None) -> None:
        self._clock = clock
        self._bytes_per_s = bytes_per_s

    def wait_for(self, done: Done) -> None:
        done.wait()

    def active(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def mark(self) -> float:
        return self._clock()

    def hand_over(self, mark: float) -> None:
        return None

    def read(self, mark: float) -> float:
        return mark

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """One thread, without the GIL: the compute lane keeps the cores."""
        ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)

    def keep(self, tensor: torch.Tensor) -> None:
        """Nothing to do: the caller's reference holds it."""

    def pace(self, start: float, nbytes: int) -> None:
        if self._bytes_per_s is not None:
            time.sleep(max(0.0, start + nbytes / self._bytes_per_s - self._clock()))


class CudaClock:
    """Turns device events into seconds since the run began.

    Note: `elapsed_time` is a float32 of milliseconds, exact to a microsecond only for some seconds. So the
    anchor moves on: an event that was just read becomes the one from which later ones are measured.
    """

    MAX_FROM_ANCHOR_S = 4.0

    def __init__(self, clock: Callable[[], float], cuda: Any) -> None:
        self._lock = threading.Lock()
        self._anchor = cuda.Event(enable_timing=True)
        self._anchor.record()
        self._anchor.synchronize()
        self._anchor_s = clock()

    def read(self, event: Any) -> float:
        with self._lock:
            at_s: float = self._anchor_s + self._anchor.elapsed_time(event) / 1e3
            if at_s - self._anchor_s > self.MAX_FROM_ANCHOR_S:
                self._anchor, self._anchor_s = event, at_s
            return at_s


class CudaStream:
    """A torch CUDA stream. `cuda` is `torch.cuda`, or in tests what records its calls."""

    def __init__(self, clock: CudaClock, cuda: Any = torch.cuda) -> None:
        self._clock = clock
        self._cuda = cuda
        self._stream = cuda.Stream()

    def wait_for(self, done: Done) -> None:
        event = done.wait_issued()
        if event is not None:
            self._stream.wait_event(event)

    def active(self) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = self._cuda.stream(self._stream)
        return context

    def mark(self) -> Any:
        event = self._cuda.Event(enable_timing=True, blocking=True)  # blocking: a waiting thread sleeps
        event.record(self._stream)
        return event

    def hand_over(self, mark: Any) -> Any:
        return mark

    def read(self, mark: Any) -> float | None:
        return self._clock.read(mark) if mark.query() else None

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """In one piece, unless its host side lies in two slabs."""
        host = source if source.device.type == "cpu" else target
        parts = slabs(host.data_ptr(), host.nbytes)
        if len(parts) == 1:
            target.copy_(source, non_blocking=True)
            return
        target_bytes, source_bytes = (tensor.view(-1).view(torch.uint8) for tensor in (target, source))
        for part in parts:
            target_bytes[part].copy_(source_bytes[part], non_blocking=True)

    def keep(self, tensor: torch.Tensor) -> None:
        tensor.record_stream(self._stream)

    def pace(self, start: Any, nbytes: int) -> None:
        """A card goes as fast as it can."""


@dataclass(frozen=True)
class Label:
    """What the span of a piece of work will say; `on_span` is called once its times are known."""

    op: str
    step: int
    layer: int | None = None
    micro_batch: int | None = None
    slot: int | None = None
    on_span: Callable[[Span], None] | None = None

    def __str__(self) -> str:
        where = "the shell" if self.layer is None else f"layer {self.layer}"
        part = "" if self.micro_batch is None else f", micro-batch {self.micro_batch}"
        return f"{self.op} of {where}{part} in step {self.step}"


Work = Callable[[Stream], int]  # issues or does the work on a stream; returns the bytes it moves


@dataclass
class _Item:
    work: Work
    waits: Sequence[Done]
    label: Label
    done: Done = field(default_factory=Done)


class Lane:
    """Runs work in order on one stream and records a span for each piece."""

    def __init__(
        self, name: str, stream: Stream, recorder: Recorder, on_start: Callable[[], None] | None = None
    ) -> None:
        self.name = name
        self._on_start = on_start
        self.stream = stream
        self._recorder = recorder
        self._items: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        self._pending: deque[tuple[Label, int, Any, Any]] = deque()  # spans whose times are not known yet
        self._queued: deque[Label] = deque()  # what was submitted and is not complete, for whoever looks
        self._error: BaseException | None = None
        self._accepting = threading.Lock()
        self._reading = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=f"megatrain-{name}", daemon=True)
        self._thread.start()

    def submit(self, work: Work, waits: Sequence[Done], label: Label) -> Done:
        """Queue `work` behind all earlier work of this lane and behind `waits`; return its `Done`."""
        item = _Item(work, waits, label)
        with self._accepting:
            if self._error is None:
                self._queued.append(label)
                self._items.put(item)
            else:
                item.done.fail(self._error)
        return item.done

    def at_work(self) -> list[str]:
        """What the lane is at and what is queued behind it, in words; for people, from any thread."""
        return [str(label) for label in self._queued.copy()]

    def close(self) -> None:
        """Finish what is queued, then end the thread."""
        with self._accepting:
            if self._error is None:
                self._error = LaneError(f"the {self.name} lane is closed: the engine was closed")
                self._items.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join()
        self.record_spans()

    def record_spans(self) -> None:
        """Hand the spans whose times are known to the recorder, in order. Never blocks for the device."""
        with self._reading:
            while self._pending:
                label, nbytes, start, end = self._pending[0]
                start_s, end_s = self.stream.read(start), self.stream.read(end)
                if start_s is None or end_s is None:
                    return
                self._pending.popleft()
                self._queued.popleft()
                self._record(label, nbytes, start_s, end_s)

    def _record(self, label: Label, nbytes: int, start_s: float, end_s: float) -> None:
        span = Span(
            lane=self.name,  # type: ignore[arg-type]
            op=label.op,  # type: ignore[arg-type]
            step=label.step,
            layer=label.layer,
            micro_batch=label.micro_batch,
            slot=label.slot,
            start_s=start_s,
            end_s=end_s,
            nbytes=nbytes,
        )
        self._recorder.add(span)
        if label.on_span is not None:
            label.on_span(span)

    def _run(self) -> None:
        try:
            if self._on_start is not None:
                self._on_start()
            while (item := self._items.get()) is not None:
                if not self._execute(item):
                    return
                del item  # it holds what the work holds
        finally:
            self._fail_what_is_queued()

    def _execute(self, item: _Item) -> bool:
        try:
            for done in item.waits:
                self.stream.wait_for(done)
            with self.stream.active():
                start = self.stream.mark()
                nbytes = item.work(self.stream)
                self.stream.pace(start, nbytes)
                end = self.stream.mark()
        except BaseException as error:  # also SystemExit and KeyboardInterrupt: the caller must hear of it
            item.done.fail(self._failed(item.label, error))
            return False
        self._pending.append((item.label, nbytes, start, end))
        item.done.succeed(self.stream.hand_over(end))
        self.record_spans()
        return True

    def _failed(self, label: Label, error: BaseException) -> BaseException:
        if not isinstance(error, LaneError):
            named = LaneError(f"the {self.name} lane failed in {label}: {type(error).__name__}: {error}")
            named.__cause__ = error
            error = named
        with self._accepting:
            self._error = error
        return error

    def _fail_what_is_queued(self) -> None:
        with self._accepting:
            if self._error is None:
                self._error = LaneError(f"the thread of the {self.name} lane ended")
            error = self._error
        while not self._items.empty():
            item = self._items.get()
            if item is not None:
                item.done.fail(error)


class Lanes:
    """The four lanes of an engine: weights in, compute, gradients out, and the optimizer on the host."""

    def __init__(self, streams: dict[str, Stream], recorder: Recorder, starts: Starts | None = None) -> None:
        starts = starts or {}
        self._lanes = {name: Lane(name, streams[name], recorder, starts.get(name)) for name in LANES}

    @classmethod
    def on(
        cls,
        device: torch.device,
        recorder: Recorder,
        throttle: Throttle | None = None,
        starts: Starts | None = None,
    ) -> Lanes:
        """Lanes for a torch device: CUDA streams for "cuda", else threads that copy and compute.

        throttle: of CPU lanes; ValueError with a CUDA device. starts: what a lane's thread does first, by lane.
        """
        cpu = CpuStream(recorder.now)
        if device.type != "cuda":
            return cls(_cpu_streams(recorder.now, throttle or Throttle()), recorder, starts)
        if throttle is not None:
            raise ValueError('throttle slows the lanes of a CPU only; set device="cpu", or leave it out')
        clock = CudaClock(recorder.now, torch.cuda)
        # Three streams, so that weights arrive (h2d) and gradients leave (d2h) while a layer computes.
        streams: dict[str, Stream] = {name: CudaStream(clock) for name in ("h2d", "compute", "d2h")}
        return cls(streams | {"host": cpu}, recorder, starts)

    def __getitem__(self, name: str) -> Lane:
        return self._lanes[name]

    def record_spans(self) -> None:
        for lane in self._lanes.values():
            lane.record_spans()

    def at_work(self) -> dict[str, list[str]]:
        """Per lane, what it is at and what waits behind, in words."""
        return {name: lane.at_work() for name, lane in self._lanes.items()}

    def close(self) -> None:
        for lane in self._lanes.values():
            lane.close()


def _cpu_streams(clock: Callable[[], float], throttle: Throttle) -> dict[str, Stream]:
    link, host = throttle.link_bytes_per_s, throttle.update_bytes_per_s
    rates = {"h2d": link, "compute": None, "d2h": link, "host": host}
    return {name: CpuStream(clock, rates[name]) for name in LANES}
