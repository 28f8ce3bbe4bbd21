"""Device buffers with named states: the weights ring, the gradient buffers, and those for optimizer state.

A buffer belongs to one lane at a time; the guarded transitions are where that is checked. What a viewer sees
(`SlotChange` records) is derived from the spans of the same operations, so it carries the device's times.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum

import torch

from megatrain.schedule import Kind, Op
from megatrain.trace import Recorder, SlotChange, SlotKind, Span


class BufferState(Enum):
    """What a device buffer holds and who may touch it."""

    FREE = "free"  # nothing of value; may be filled
    LOADING = "loading"  # the h2d lane writes it
    READY = "ready"  # whole weights, nobody uses them now
    IN_USE = "in_use"  # the compute lane reads or changes weights or optimizer state, or writes gradients into it
    DRAINING = "draining"  # the d2h lane reads it
    REMOVED = "removed"  # given back to the device


_ALLOWED = {
    BufferState.FREE: {BufferState.LOADING, BufferState.IN_USE, BufferState.REMOVED},
    BufferState.LOADING: {BufferState.READY},
    BufferState.READY: {BufferState.IN_USE, BufferState.LOADING, BufferState.REMOVED},
    BufferState.IN_USE: {BufferState.IN_USE, BufferState.READY, BufferState.FREE, BufferState.DRAINING},
    BufferState.DRAINING: {BufferState.FREE},
    BufferState.REMOVED: set(),
}


class DeviceBuffer:
    """Flat bytes on the device and their state."""

    def __init__(self, kind: str, number: int, data: torch.Tensor) -> None:
        self.kind = kind
        self.number = number
        self.data = data
        self.state = BufferState.FREE

    def to(self, state: BufferState) -> None:
        """Enter `state`; an order of operations that breaks the rules is a bug, and stops here."""
        assert state in _ALLOWED[self.state], f"{self.kind} buffer {self.number}: {self.state} → {state}"
        self.state = state

    @contextmanager
    def during(self, states: tuple[BufferState, BufferState]) -> Iterator[torch.Tensor]:
        """Within, the buffer is in the first of `states`; after it, in the second."""
        self.to(states[0])
        yield self.data
        self.to(states[1])


class Ledger:
    """Counts the bytes held on the device, and the most there ever were."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.held_bytes = 0
        self.peak_bytes = 0

    def hold(self, nbytes: int) -> None:
        with self._lock:
            self.held_bytes += nbytes
            self.peak_bytes = max(self.peak_bytes, self.held_bytes)

    def release(self, nbytes: int) -> None:
        with self._lock:
            self.held_bytes -= nbytes


class BufferPool:
    """The device buffers of one kind ("weights", "gradients" or "optimizer"), all of one size."""

    def __init__(self, kind: str, nbytes: int, device: torch.device, ledger: Ledger, recorder: Recorder) -> None:
        self.kind = kind
        self.nbytes = nbytes
        self._device = device
        self._ledger = ledger
        self._recorder = recorder
        self._buffers: dict[int, DeviceBuffer] = {}

    def __getitem__(self, number: int) -> DeviceBuffer:
        return self._buffers[number]

    def __len__(self) -> int:
        return len(self._buffers)

    def add(self, number: int, step: int) -> None:
        """Allocate one more buffer."""
        data = torch.empty(self.nbytes, dtype=torch.uint8, device=self._device)
        self._buffers[number] = DeviceBuffer(self.kind, number, data)
        self._ledger.hold(self.nbytes)
        self._tell(number, BufferState.FREE, None, step)

    def remove(self, number: int, step: int) -> None:
        """Give a buffer back; nothing may be reading or writing it."""
        self._buffers.pop(number).to(BufferState.REMOVED)
        self._ledger.release(self.nbytes)
        self._tell(number, BufferState.REMOVED, None, step)

    def clear(self, step: int) -> None:
        """Give all buffers back, whatever they hold; no lane is at work."""
        for number in list(self._buffers):
            del self._buffers[number]
            self._ledger.release(self.nbytes)
            self._tell(number, BufferState.REMOVED, None, step)

    def _tell(self, number: int, state: BufferState, layer: int | None, step: int) -> None:
        change = SlotChange(self._recorder.now(), self.kind, number, state.value, layer, step)  # type: ignore[arg-type]
        self._recorder.add(change)

    def tell(self, number: int, states: tuple[BufferState, BufferState], span: Span) -> None:
        """Record the states that an operation brought about, at the times its span has."""
        for time_s, state in zip((span.start_s, span.end_s), states, strict=True):
            layer = None if state is BufferState.FREE else span.layer
            self._recorder.add(SlotChange(time_s, self.kind, number, state.value, layer, span.step))  # type: ignore[arg-type]


States = tuple[BufferState, BufferState]


def buffer_states(op: Op, *, spent: bool) -> Iterator[tuple[SlotKind, int, States]]:
    """Kind, number and states of every buffer whose state `op` changes: while it runs and after it.

    A store only reads its weights slot; the next forward may do so at the same time.
    """
    if op.slot is not None and op.kind is not Kind.STORE:
        yield "weights", op.slot, weight_states(op, spent=spent)
    if op.buffer is not None:
        yield "gradients", op.buffer, gradient_states(op)
    if op.state is not None:
        yield "optimizer", op.state, optimizer_states(op)


def is_spent(op: Op, micro_batches: int, *, updated_here: bool) -> bool:
    """After its last backward a trained layer's weights on the device are out of date, unless updated there."""
    last = op.micro_batch == micro_batches - 1
    return op.kind is Kind.BACKWARD and op.buffer is not None and last and not updated_here


def weight_states(op: Op, *, spent: bool) -> States:
    """What `op` makes of its weights slot while it runs and after it; `spent`: its weights are of no more use."""
    if op.kind is Kind.LOAD:
        return BufferState.LOADING, BufferState.READY
    return BufferState.IN_USE, BufferState.FREE if spent else BufferState.READY


def gradient_states(op: Op) -> States:
    """What `op` makes of its gradient buffer while it runs and after it."""
    if op.kind is Kind.UNLOAD:
        return BufferState.DRAINING, BufferState.FREE
    return BufferState.IN_USE, BufferState.FREE if op.kind is Kind.ADAMW else BufferState.IN_USE


def optimizer_states(op: Op) -> States:
    """What `op` makes of its optimizer buffer while it runs and after it."""
    if op.kind is Kind.LOAD_STATE:
        return BufferState.LOADING, BufferState.READY
    if op.kind is Kind.STORE:
        return BufferState.DRAINING, BufferState.FREE
    return BufferState.IN_USE, BufferState.IN_USE
