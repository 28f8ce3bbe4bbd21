"""Lanes on a CPU: order, real concurrency, spans, and errors that reach whoever waits."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from itertools import count

import pytest
import torch

from megatrain.config import Throttle
from megatrain.lanes import LANES, CpuStream, Done, Label, Lane, LaneError, Lanes, Stream
from megatrain.trace import Recorder, Span

pytestmark = pytest.mark.timeout(60)

BOUND_S = 20.0  # far more than anything here takes; a hang ends as a failure
LOAD = Label("load", step=7, layer=3)
FORWARD = Label("forward", step=7, layer=3, micro_batch=1)


class BoomError(Exception):
    """What work here fails with."""


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def lanes(recorder: Recorder) -> Iterator[Lanes]:
    made = Lanes.on(torch.device("cpu"), recorder)
    yield made
    made.close()


def nothing(_: Stream) -> int:
    return 0


def fail(_: Stream) -> int:
    raise BoomError("no such layer")


def note(notes: list[str], text: str) -> Callable[[Stream], int]:
    def work(_: Stream) -> int:
        notes.append(text)
        return 0

    return work


def until(gate: threading.Event) -> Callable[[Stream], int]:
    def work(_: Stream) -> int:
        assert gate.wait(BOUND_S)
        return 0

    return work


# ---- order ----


def test_a_lane_works_in_order(lanes: Lanes) -> None:
    notes: list[str] = []
    dones = [lanes["compute"].submit(note(notes, str(i)), [], FORWARD) for i in range(100)]
    dones[-1].wait()
    assert notes == [str(i) for i in range(100)]
    assert all(done.complete for done in dones)


def test_work_waits_before_it_begins(lanes: Lanes) -> None:
    notes: list[str] = []

    class Noted(Done):
        def wait(self) -> None:
            notes.append("waited")
            super().wait()

    waited = Noted()
    done = lanes["compute"].submit(note(notes, "worked"), [waited], FORWARD)
    waited.succeed()
    done.wait()
    assert notes == ["waited", "worked"]


def test_a_chain_across_lanes_keeps_its_order(lanes: Lanes) -> None:
    notes: list[str] = []
    waits: list[Done] = []
    for i in range(400):
        waits = [lanes[LANES[i % len(LANES)]].submit(note(notes, str(i)), waits, FORWARD)]
    waits[0].wait()
    assert notes == [str(i) for i in range(400)]


def test_a_result_is_visible_to_whoever_waits(lanes: Lanes) -> None:
    source, target = torch.randn(1000), torch.zeros(1000)
    total: list[torch.Tensor] = []

    def load(stream: Stream) -> int:
        stream.copy(target, source)
        return source.nbytes

    def add_up(_: Stream) -> int:
        total.append(target.sum())
        return 0

    loaded = lanes["h2d"].submit(load, [], LOAD)
    lanes["compute"].submit(add_up, [loaded], FORWARD).wait()
    assert torch.equal(total[0], source.sum())


def test_all_lanes_run_at_once(lanes: Lanes) -> None:
    """Each lane's work ends only when the work of all four has begun."""
    meeting = threading.Barrier(len(LANES), timeout=BOUND_S)
    dones = [lanes[name].submit(lambda _: meeting.wait() * 0, [], FORWARD) for name in LANES]
    for done in dones:
        done.wait()


def test_submitting_does_not_wait(lanes: Lanes) -> None:
    gate = threading.Event()
    held = lanes["h2d"].submit(until(gate), [], LOAD)
    behind = lanes["compute"].submit(nothing, [held], FORWARD)
    assert not held.complete
    assert not behind.complete
    gate.set()
    behind.wait()
    assert held.complete


def test_many_threads_wait_for_one(lanes: Lanes) -> None:
    gate = threading.Event()
    done = lanes["host"].submit(until(gate), [], LOAD)
    through: list[int] = []

    def wait(number: int) -> None:
        done.wait()
        through.append(number)

    threads = [threading.Thread(target=wait, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    gate.set()
    for thread in threads:
        thread.join(BOUND_S)
    assert sorted(through) == list(range(16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.int64])
def test_a_copy_moves_every_bit(dtype: torch.dtype) -> None:
    source = torch.randint(0, 256, (4096,), dtype=torch.uint8).view(dtype)
    target = torch.zeros(len(source) + 1, dtype=dtype)
    CpuStream(lambda: 0.0).copy(target[:-1], source)
    assert torch.equal(target[:-1].view(torch.uint8), source.view(torch.uint8))
    assert target[-1] == 0


def test_work_that_is_done_holds_nothing(lanes: Lanes) -> None:
    """Work closes over gradients and layer inputs: they go when it is done, not when the next work comes."""
    held = torch.zeros(3)
    gone = threading.Event()
    weakref.finalize(held, gone.set)

    def work(_: Stream, held: torch.Tensor = held) -> int:
        return held.nbytes

    lanes["compute"].submit(work, [], FORWARD).wait()
    del work, held
    assert gone.wait(BOUND_S)


# ---- spans ----


def test_each_piece_of_work_leaves_a_span(recorder: Recorder) -> None:
    ticks = count(10)
    lane = Lane("d2h", CpuStream(lambda: float(next(ticks))), recorder)
    told: list[Span] = []
    label = Label("unload", step=2, layer=5, micro_batch=1, slot=0, on_span=told.append)
    lane.submit(lambda _: 4096, [], label)
    lane.submit(nothing, [], Label("unload", step=2))
    lane.close()
    first = Span("d2h", "unload", 2, 5, 1, 0, start_s=10, end_s=11, nbytes=4096)
    assert recorder.spans() == [first, Span("d2h", "unload", 2, None, None, None, start_s=12, end_s=13, nbytes=0)]
    assert told == [first]


def test_time_spent_waiting_is_not_in_the_span(recorder: Recorder) -> None:
    """A lane that waits is idle, and that is what a viewer must see."""
    clock = [0.0]

    class Slow(Done):
        def wait(self) -> None:
            clock[0] = 100.0

    lane = Lane("compute", CpuStream(lambda: clock[0]), recorder)
    lane.submit(nothing, [Slow()], FORWARD)
    lane.close()
    [span] = recorder.spans()
    assert (span.start_s, span.end_s) == (100.0, 100.0)


def test_spans_of_a_lane_do_not_overlap(lanes: Lanes, recorder: Recorder) -> None:
    for i in range(200):
        lanes[LANES[i % 2]].submit(nothing, [], FORWARD)
    lanes.close()
    for name in LANES[:2]:
        spans = [span for span in recorder.spans() if span.lane == name]
        assert len(spans) == 100
        ends = [0.0] + [span.end_s for span in spans]
        assert all(end <= span.start_s <= span.end_s for end, span in zip(ends, spans, strict=False))


def test_failed_work_leaves_no_span(lanes: Lanes, recorder: Recorder) -> None:
    lanes["compute"].submit(fail, [], FORWARD)
    lanes.close()
    assert recorder.spans() == []


# ---- errors ----


def test_an_error_names_lane_operation_layer_and_step(lanes: Lanes) -> None:
    done = lanes["compute"].submit(fail, [], FORWARD)
    message = r"^the compute lane failed in forward of layer 3, micro-batch 1 in step 7: BoomError: no such layer$"
    with pytest.raises(LaneError, match=message) as error:
        done.wait()
    assert isinstance(error.value.__cause__, BoomError)
    assert not done.complete


def test_an_error_in_the_shell_says_so(lanes: Lanes) -> None:
    done = lanes["host"].submit(fail, [], Label("update", step=1))
    with pytest.raises(LaneError, match="the host lane failed in update of the shell in step 1: BoomError"):
        done.wait()


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit(), MemoryError("full")])
def test_no_error_is_swallowed_by_the_thread(lanes: Lanes, error: BaseException) -> None:
    def leave(_: Stream) -> int:
        raise error

    done = lanes["d2h"].submit(leave, [], LOAD)
    with pytest.raises(LaneError, match=f"the d2h lane failed in load of layer 3 in step 7: {type(error).__name__}"):
        done.wait()
    with pytest.raises(LaneError):
        lanes["d2h"].submit(nothing, [], LOAD).wait()


def test_an_error_fails_all_that_waits_for_it(lanes: Lanes) -> None:
    """Queued behind it, on other lanes behind it, and behind those: all fail with the first error."""
    gate = threading.Event()
    ran: list[str] = []
    lanes["h2d"].submit(until(gate), [], LOAD)
    failed = lanes["h2d"].submit(fail, [], LOAD)
    behind = lanes["h2d"].submit(note(ran, "behind"), [], LOAD)
    across = lanes["compute"].submit(note(ran, "across"), [failed], FORWARD)
    further = lanes["d2h"].submit(note(ran, "further"), [across], Label("unload", step=7, layer=3))
    furthest = lanes["host"].submit(note(ran, "furthest"), [further], Label("update", step=7, layer=3))
    gate.set()
    errors = []
    for done in (failed, behind, across, further, furthest):
        with pytest.raises(LaneError, match="the h2d lane failed in load of layer 3 in step 7: BoomError") as error:
            done.wait()
        errors.append(error.value)
    assert all(error is errors[0] for error in errors)
    assert ran == []


def test_a_lane_that_failed_refuses_at_once(lanes: Lanes) -> None:
    ran: list[str] = []
    failed = lanes["h2d"].submit(fail, [], LOAD)
    across = lanes["compute"].submit(nothing, [failed], FORWARD)
    with pytest.raises(LaneError):
        across.wait()
    for name in ("h2d", "compute"):
        with pytest.raises(LaneError, match="the h2d lane failed"):
            lanes[name].submit(note(ran, name), [Done()], FORWARD).wait()  # a Done that nobody will ever complete
    assert ran == []


def test_lanes_that_did_not_wait_for_it_work_on(lanes: Lanes) -> None:
    with pytest.raises(LaneError):
        lanes["h2d"].submit(fail, [], LOAD).wait()
    done = lanes["host"].submit(nothing, [], Label("update", step=6))
    done.wait()
    assert done.complete


def test_many_threads_hear_of_one_error(lanes: Lanes) -> None:
    gate = threading.Event()

    def held_then_fail(stream: Stream) -> int:
        assert gate.wait(BOUND_S)
        return fail(stream)

    done = lanes["compute"].submit(held_then_fail, [], FORWARD)
    heard: list[LaneError] = []

    def wait() -> None:
        try:
            done.wait()
        except LaneError as error:
            heard.append(error)

    threads = [threading.Thread(target=wait) for _ in range(16)]
    for thread in threads:
        thread.start()
    gate.set()
    for thread in threads:
        thread.join(BOUND_S)
    assert len(heard) == 16
    assert len(set(map(id, heard))) == 1


def test_nothing_submitted_around_an_error_is_left_waiting(lanes: Lanes) -> None:
    """Many threads submit while the lane fails: each piece of theirs has either run or failed, none is forgotten."""
    dones: list[Done] = []
    ran: list[str] = []
    start = threading.Barrier(5, timeout=BOUND_S)

    def submit() -> None:
        start.wait()
        for _ in range(200):
            dones.append(lanes["compute"].submit(note(ran, "ran"), [], FORWARD))

    threads = [threading.Thread(target=submit) for _ in range(4)]
    for thread in threads:
        thread.start()
    start.wait()
    lanes["compute"].submit(fail, [], FORWARD)
    for thread in threads:
        thread.join(BOUND_S)
    refused = 0
    for done in dones:
        try:
            done.wait()
        except LaneError:
            refused += 1
    assert len(ran) + refused == len(dones) == 800


# ---- the end ----


def test_closing_finishes_what_is_queued(recorder: Recorder) -> None:
    before = set(threading.enumerate())
    lanes = Lanes.on(torch.device("cpu"), recorder)
    assert {thread.name for thread in set(threading.enumerate()) - before} == {f"megatrain-{name}" for name in LANES}
    gate = threading.Event()
    notes: list[str] = []
    last = lanes["h2d"].submit(until(gate), [], LOAD)
    for i in range(20):
        last = lanes[LANES[i % len(LANES)]].submit(note(notes, str(i)), [last], FORWARD)
    closing = threading.Thread(target=lanes.close)
    closing.start()
    gate.set()
    closing.join(BOUND_S)
    assert not closing.is_alive()
    assert notes == [str(i) for i in range(20)]
    assert last.complete
    assert len(recorder.spans()) == 21
    assert set(threading.enumerate()) <= before


def test_closing_twice_or_from_many_threads(recorder: Recorder) -> None:
    before = set(threading.enumerate())
    lanes = Lanes.on(torch.device("cpu"), recorder)
    lanes["compute"].submit(nothing, [], FORWARD)
    threads = [threading.Thread(target=lanes.close) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(BOUND_S)
    lanes.close()
    assert set(threading.enumerate()) <= before
    assert len(recorder.spans()) == 1


def test_closing_after_an_error(recorder: Recorder) -> None:
    before = set(threading.enumerate())
    lanes = Lanes.on(torch.device("cpu"), recorder)
    failed = lanes["h2d"].submit(fail, [], LOAD)
    across = lanes["compute"].submit(nothing, [failed], FORWARD)
    lanes.close()
    assert set(threading.enumerate()) <= before
    with pytest.raises(LaneError, match="the h2d lane failed"):
        across.wait()


def test_a_closed_lane_refuses_work(lanes: Lanes) -> None:
    lanes.close()
    with pytest.raises(LaneError, match="the compute lane is closed: the engine was closed"):
        lanes["compute"].submit(nothing, [], FORWARD).wait()


def test_closing_from_the_lane_itself_does_not_wait_for_itself(recorder: Recorder) -> None:
    lane = Lane("host", CpuStream(recorder.now), recorder)

    def close(_: Stream) -> int:
        lane.close()
        return 0

    lane.submit(close, [], LOAD).wait()
    lane.close()
    assert len(recorder.spans()) == 1


def test_a_throttled_lane_lets_no_more_than_its_rate_pass(recorder: Recorder) -> None:
    rate = 1e6
    lane = Lane("h2d", CpuStream(recorder.now, rate), recorder)
    for _ in range(3):
        lane.submit(lambda _: 20_000, [], LOAD)
    lane.close()
    spans = recorder.spans()
    assert all(span.end_s - span.start_s >= span.nbytes / rate for span in spans)
    assert spans[2].end_s - spans[0].start_s >= 0.06


def test_a_throttle_slows_link_and_host_apart() -> None:
    recorder = Recorder()
    lanes = Lanes.on(torch.device("cpu"), recorder, Throttle(link_bytes_per_s=1e6))
    for name in LANES:
        lanes[name].submit(lambda _: 30_000, [], LOAD)
    lanes.close()
    slow = {span.lane for span in recorder.spans() if span.end_s - span.start_s >= 0.03}
    assert slow == {"h2d", "d2h"}


def test_a_lane_says_what_it_is_at_and_what_waits(lanes: Lanes) -> None:
    gate = threading.Event()
    done = [lanes["compute"].submit(work, [], FORWARD) for work in (until(gate), nothing)]
    assert lanes.at_work()["compute"] == ["forward of layer 3, micro-batch 1 in step 7"] * 2
    gate.set()
    for one in done:
        one.wait()
    lanes.record_spans()
    assert lanes.at_work() == {name: [] for name in LANES}


def test_a_lane_does_first_what_it_is_told_on_its_own_thread(recorder: Recorder) -> None:
    names: list[str] = []
    told = {"host": lambda: names.append(threading.current_thread().name)}
    lanes = Lanes.on(torch.device("cpu"), recorder, starts=told)
    lanes["host"].submit(note(names, "work"), [], Label("update", 0)).wait()
    lanes.close()
    assert names == ["megatrain-host", "work"]
