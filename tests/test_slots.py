"""Device buffers: which state may follow which, what is counted, and what a viewer is told."""

from __future__ import annotations

import threading
from itertools import product

import pytest
import torch

from megatrain.schedule import Kind, Op
from megatrain.slots import BufferPool, BufferState, DeviceBuffer, Ledger, gradient_states, weight_states
from megatrain.trace import Recorder, SlotChange, Span

FREE, LOADING, READY, IN_USE, DRAINING, REMOVED = BufferState

ALLOWED = {
    (FREE, LOADING),
    (FREE, IN_USE),
    (FREE, REMOVED),
    (LOADING, READY),
    (READY, IN_USE),
    (READY, LOADING),
    (READY, REMOVED),
    (IN_USE, IN_USE),
    (IN_USE, READY),
    (IN_USE, FREE),
    (IN_USE, DRAINING),
    (DRAINING, FREE),
}


def buffer(state: BufferState) -> DeviceBuffer:
    made = DeviceBuffer("weights", 3, torch.empty(0, dtype=torch.uint8))
    made.state = state
    return made


@pytest.mark.parametrize(("before", "after"), [*product(BufferState, BufferState)])
def test_a_state_may_follow_another_or_not(before: BufferState, after: BufferState) -> None:
    changing = buffer(before)
    if (before, after) in ALLOWED:
        changing.to(after)
        assert changing.state is after
    else:
        with pytest.raises(AssertionError, match=rf"weights buffer 3: {before} → {after}"):
            changing.to(after)
        assert changing.state is before


def test_during_an_operation() -> None:
    loaded = buffer(FREE)
    with loaded.during((LOADING, READY)) as data:
        assert loaded.state is LOADING
        assert data is loaded.data
        with pytest.raises(AssertionError, match=r"LOADING → BufferState\.IN_USE"):
            loaded.to(IN_USE)
    states = [loaded.state]
    assert states == [READY]


def run_through(made: DeviceBuffer, steps: list[tuple[BufferState, BufferState]]) -> BufferState:
    for states in steps:
        with made.during(states):
            pass
    return made.state


def test_the_life_of_a_weights_slot() -> None:
    """Loaded, used forwards and backwards by two micro-batches each, then of no more use: loaded again."""
    load, forward = Op(0, Kind.LOAD, 1), Op(1, Kind.FORWARD, 1)
    backward = Op(2, Kind.BACKWARD, 1)
    states = [weight_states(op, spent=False) for op in (load, forward, forward, backward)]
    made = buffer(FREE)
    assert run_through(made, states) is READY
    assert run_through(made, [weight_states(backward, spent=True)]) is FREE
    assert run_through(made, [weight_states(load, spent=False)] * 2) is READY  # a slot can be filled anew unread


def test_the_life_of_a_gradient_buffer() -> None:
    backward, unload = Op(0, Kind.BACKWARD, 1, buffer=0), Op(1, Kind.UNLOAD, 1, buffer=0)
    made = buffer(FREE)
    assert run_through(made, [gradient_states(backward)] * 2) is IN_USE
    assert run_through(made, [gradient_states(unload)]) is FREE
    with pytest.raises(AssertionError, match=r"FREE → BufferState\.DRAINING"):
        run_through(made, [gradient_states(unload)])


def pool(recorder: Recorder, ledger: Ledger) -> BufferPool:
    return BufferPool("weights", 1000, torch.device("cpu"), ledger, recorder)


def test_a_pool_counts_and_records_what_it_makes_and_gives_back() -> None:
    recorder, ledger = Recorder(), Ledger()
    slots = pool(recorder, ledger)
    slots.add(0, step=0)
    slots.add(1, step=0)
    assert len(slots) == 2
    assert slots[1].data.shape == (1000,)
    assert slots[1].data.dtype == torch.uint8
    assert ledger.held_bytes == 2000
    slots.remove(0, step=4)
    assert len(slots) == 1
    assert (ledger.held_bytes, ledger.peak_bytes) == (1000, 2000)
    told = [(change.kind, change.slot, change.state, change.layer, change.step) for change in recorder.slots()]
    assert told == [
        ("weights", 0, "free", None, 0),
        ("weights", 1, "free", None, 0),
        ("weights", 0, "removed", None, 4),
    ]


@pytest.mark.parametrize("state", [LOADING, IN_USE, DRAINING])
def test_a_buffer_at_work_is_not_given_back(state: BufferState) -> None:
    slots = pool(Recorder(), Ledger())
    slots.add(0, step=0)
    slots[0].state = state
    with pytest.raises(AssertionError, match="REMOVED"):
        slots.remove(0, step=0)


def test_the_viewer_gets_the_times_of_the_span() -> None:
    recorder = Recorder()
    slots = pool(recorder, Ledger())
    span = Span("compute", "backward", 2, 7, 0, 5, 1.25, 1.5, 0)
    slots.tell(5, (IN_USE, READY), span)
    slots.tell(5, (IN_USE, FREE), span)
    assert recorder.slots() == [
        SlotChange(1.25, "weights", 5, "in_use", 7, 2),
        SlotChange(1.5, "weights", 5, "ready", 7, 2),
        SlotChange(1.25, "weights", 5, "in_use", 7, 2),
        SlotChange(1.5, "weights", 5, "free", None, 2),
    ]


def test_the_peak_stays_when_bytes_are_given_back() -> None:
    ledger = Ledger()
    ledger.hold(10)
    ledger.release(8)
    ledger.hold(3)
    assert (ledger.held_bytes, ledger.peak_bytes) == (5, 10)


def test_the_ledger_counts_across_threads() -> None:
    ledger = Ledger()

    def hold_and_release() -> None:
        for _ in range(500):
            ledger.hold(3)
            ledger.release(3)

    ledger.hold(10)
    threads = [threading.Thread(target=hold_and_release) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert ledger.held_bytes == 10
    assert 13 <= ledger.peak_bytes <= 10 + 8 * 3
