"""CUDA lanes without a card: the exact calls that they make, on a stand-in for `torch.cuda` that writes them down.

The stand-in's device never runs by itself: it gets as far as a host thread synchronizes with it, or as a test
lets it. So a lane that blocked a host thread for the device would show in the calls.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch

from megatrain import host
from megatrain.lanes import CpuStream, CudaClock, CudaStream, Done, Label, LaneError, Lanes, Stream
from megatrain.trace import Recorder

pytestmark = pytest.mark.timeout(60)

TICK_MS = 1.0  # the device's clock moves on by this much from one recorded event to the next


class Device:
    """What `torch.cuda` is to a lane: streams, events and the calls made on them, by thread."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []  # thread name, call
        self.reached_ms = -1.0  # events recorded up to here have been passed
        self._lock = threading.Lock()
        self._streams = iter(("h2d", "compute", "d2h"))
        self._ticks = count(0)

    def Stream(self) -> FakeStream:  # noqa: N802
        return FakeStream(self, next(self._streams))

    def Event(self, *, enable_timing: bool, blocking: bool = False) -> FakeEvent:  # noqa: N802
        assert enable_timing
        return FakeEvent(self, blocking)

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        self.say(f"enter {stream.name}")
        yield
        self.say(f"leave {stream.name}")

    def say(self, call: str) -> None:
        with self._lock:
            self.calls.append((threading.current_thread().name.removeprefix("megatrain-"), call))

    def tick_ms(self) -> float:
        with self._lock:
            return next(self._ticks) * TICK_MS

    def run(self, to_ms: float = float("inf")) -> None:
        self.reached_ms = max(self.reached_ms, to_ms)

    def on(self, thread: str) -> list[str]:
        return [call for name, call in self.calls if name == thread]


class FakeStream:
    def __init__(self, device: Device, name: str) -> None:
        self.device = device
        self.name = name
        self.events = count()

    def wait_event(self, event: FakeEvent) -> None:
        self.device.say(f"{self.name} waits for {event.name}")


class FakeEvent:
    def __init__(self, device: Device, blocking: bool) -> None:
        self.device = device
        self.blocking = blocking
        self.name = "never recorded"
        self.at_ms = float("nan")

    def record(self, stream: FakeStream | None = None) -> None:
        self.name = "anchor" if stream is None else f"{stream.name}.{next(stream.events)}"
        assert stream is None or self.blocking  # a waiting thread sleeps, and leaves the core to AdamW
        self.at_ms = self.device.tick_ms()
        self.device.say(f"record {self.name}")

    def query(self) -> bool:
        self.device.say(f"query {self.name}")
        return self.at_ms <= self.device.reached_ms

    def synchronize(self) -> None:
        self.device.run(self.at_ms)
        self.device.say(f"synchronize {self.name}")

    def elapsed_time(self, later: FakeEvent) -> float:
        assert later.at_ms <= self.device.reached_ms, "elapsed_time of an event not yet passed is an error"
        return float(np.float32(later.at_ms - self.at_ms))


class Tensor:
    """Says what is asked of a tensor of 64 bytes in host memory or on a device."""

    device = torch.device("cpu")
    nbytes = 64

    def __init__(self, card: Device, name: str, address: int = 0) -> None:
        self.card = card
        self.name = name
        self.address = address

    def data_ptr(self) -> int:
        return self.address

    def view(self, _: object) -> Tensor:
        return self

    def __getitem__(self, part: slice) -> Tensor:
        return Tensor(self.card, f"{self.name}[{part.start}:{part.stop}]")

    def copy_(self, source: Tensor, *, non_blocking: bool) -> None:
        assert non_blocking
        self.card.say(f"copy {source.name} to {self.name}")

    def record_stream(self, stream: FakeStream) -> None:
        self.card.say(f"{self.name} kept for {stream.name}")


class OnCard(Tensor):
    device = torch.device("meta")


@pytest.fixture
def device() -> Device:
    return Device()


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def lanes(device: Device, recorder: Recorder) -> Iterator[Lanes]:
    clock = CudaClock(lambda: 100.0, device)
    streams: dict[str, Stream] = {name: CudaStream(clock, device) for name in ("h2d", "compute", "d2h")}
    made = Lanes(streams | {"host": CpuStream(recorder.now)}, recorder)
    yield made
    device.run()
    made.close()


def issue(device: Device, what: str, nbytes: int = 0) -> Any:
    def work(_: Stream) -> int:
        device.say(what)
        return nbytes

    return work


def copy(device: Device, target: str, source: str) -> Any:
    def work(stream: Stream) -> int:
        stream.copy(Tensor(device, target), Tensor(device, source))  # type: ignore[arg-type]
        return 64

    return work


def in_through_and_out(lanes: Lanes, device: Device) -> list[Done]:
    """A layer's weights in, its forward, its gradient out."""
    load = lanes["h2d"].submit(copy(device, "slot", "weights"), [], Label("load", 1, 0, slot=0))
    forward = lanes["compute"].submit(issue(device, "kernels"), [load], Label("forward", 1, 0, 0, slot=0))
    unload = lanes["d2h"].submit(copy(device, "host gradient", "buffer"), [forward], Label("unload", 1, 0, slot=0))
    return [load, forward, unload]


def updated(lanes: Lanes, device: Device) -> Done:
    """... and the update that reads that gradient on the host."""
    *_, unload = in_through_and_out(lanes, device)
    return lanes["host"].submit(issue(device, "adamw", 52), [unload], Label("update", 1, 0))


def test_the_clock_begins_at_an_event_that_has_passed(device: Device) -> None:
    CudaClock(lambda: 100.0, device)
    assert device.on("MainThread") == ["record anchor", "synchronize anchor"]


def test_one_layer_in_through_out_and_updated(lanes: Lanes, device: Device) -> None:
    """Streams meet each other's events on the device; only the host lane blocks, for the gradient it reads."""
    updated(lanes, device).wait()
    lanes.close()
    assert device.on("h2d") == [
        "enter h2d",
        "record h2d.0",
        "copy weights to slot",
        "record h2d.1",
        "leave h2d",
        "query h2d.0",
        "query h2d.1",
    ]
    assert device.on("compute") == [
        "compute waits for h2d.1",
        "enter compute",
        "record compute.0",
        "kernels",
        "record compute.1",
        "leave compute",
        "query compute.0",
        "query compute.1",
    ]
    assert device.on("d2h") == [
        "d2h waits for compute.1",
        "enter d2h",
        "record d2h.0",
        "copy buffer to host gradient",
        "record d2h.1",
        "leave d2h",
        "query d2h.0",
        "query d2h.1",
    ]
    assert device.on("host") == ["synchronize d2h.1", "adamw"]


def test_an_event_is_recorded_before_another_stream_waits_for_it(lanes: Lanes, device: Device) -> None:
    """A wait for an event that was not recorded yet would be no wait at all."""
    updated(lanes, device).wait()
    calls = [call for _, call in device.calls]
    for waits, recorded in (
        ("compute waits for h2d.1", "record h2d.1"),
        ("d2h waits for compute.1", "record compute.1"),
        ("synchronize d2h.1", "record d2h.1"),
    ):
        assert calls.index(recorded) < calls.index(waits)


def test_issuing_many_layers_never_waits_for_the_device(lanes: Lanes, device: Device) -> None:
    """Two slots, ten layers: everything is issued while the device has done nothing."""
    used: list[Done] = []
    for layer in range(10):
        load = lanes["h2d"].submit(issue(device, "copy"), used[-2:-1], Label("load", 1, layer))
        used.append(lanes["compute"].submit(issue(device, "kernels"), [load], Label("forward", 1, layer)))
    used[-1].wait_issued()
    assert [call for _, call in device.calls if call.startswith("synchronize")] == ["synchronize anchor"]
    assert device.on("h2d").count("copy") == 10
    waits = [call for call in device.on("h2d") if "waits" in call]
    assert waits == [f"h2d waits for compute.{2 * layer + 1}" for layer in range(8)]


def test_loading_behind_an_update_needs_no_event(lanes: Lanes, device: Device) -> None:
    """The host's work is complete when it returns: the thread that issues the load waits for it, no stream does."""
    update = lanes["host"].submit(issue(device, "adamw"), [], Label("update", 1, 0))
    lanes["h2d"].submit(copy(device, "slot", "weights"), [update], Label("load", 2, 0)).wait_issued()
    assert device.on("h2d")[0] == "enter h2d"
    calls = [call for _, call in device.calls]
    assert calls.index("adamw") < calls.index("copy weights to slot")


def test_waiting_for_an_operation_synchronizes_on_its_event_alone(lanes: Lanes, device: Device) -> None:
    load, forward, unload = in_through_and_out(lanes, device)
    unload.wait_issued()
    assert not load.complete
    forward.wait()
    assert forward.complete
    assert not unload.complete
    assert [call for call in device.on("MainThread") if call.startswith("sync")][1:] == ["synchronize compute.1"]


def test_spans_come_when_the_device_has_passed_their_events(lanes: Lanes, device: Device, recorder: Recorder) -> None:
    in_through_and_out(lanes, device)[-1].wait_issued()
    lanes.record_spans()
    assert recorder.spans() == []
    device.run()
    lanes.record_spans()
    lanes.record_spans()
    spans = recorder.spans()
    assert [(span.lane, span.op, span.nbytes) for span in spans] == [
        ("h2d", "load", 64),
        ("compute", "forward", 0),
        ("d2h", "unload", 64),
    ]
    seconds = [second for span in spans for second in (span.start_s, span.end_s)]
    assert seconds == pytest.approx([100.0 + TICK_MS * tick / 1e3 for tick in range(1, 7)])  # 0 was the anchor


def test_the_work_of_the_host_is_timed_by_the_host(lanes: Lanes, device: Device, recorder: Recorder) -> None:
    updated(lanes, device).wait()
    lanes.record_spans()
    [span] = [span for span in recorder.spans() if span.lane == "host"]
    assert (span.op, span.nbytes) == ("update", 52)
    assert 0 <= span.start_s <= span.end_s <= recorder.now()


def test_a_span_waits_for_its_end_and_those_behind_for_it(lanes: Lanes, device: Device, recorder: Recorder) -> None:
    for layer in range(2):
        done = lanes["compute"].submit(issue(device, "kernels"), [], Label("forward", 1, layer))
    done.wait_issued()
    for tick, complete in ((0, []), (1, []), (2, [0]), (3, [0]), (4, [0, 1])):
        device.run(tick * TICK_MS)
        lanes.record_spans()
        assert [span.layer for span in recorder.spans()] == complete


def test_a_failed_load_reaches_the_other_streams_before_they_touch_the_device(lanes: Lanes, device: Device) -> None:
    def out_of_memory(_: Stream) -> int:
        raise torch.cuda.OutOfMemoryError("no room")

    load = lanes["h2d"].submit(out_of_memory, [], Label("load", 1, 4))
    forward = lanes["compute"].submit(issue(device, "kernels"), [load], Label("forward", 1, 4))
    update = lanes["host"].submit(issue(device, "adamw"), [forward], Label("update", 1, 4))
    for done in (load, forward, update):
        with pytest.raises(LaneError, match=r"the h2d lane failed in load of layer 4 in step 1: OutOfMemoryError"):
            done.wait()
    assert device.on("compute") == device.on("host") == []


def test_memory_of_another_stream_is_kept(device: Device) -> None:
    clock = CudaClock(lambda: 0.0, device)
    CudaStream(clock, device).keep(Tensor(device, "hidden"))  # type: ignore[arg-type]
    assert device.on("MainThread")[-1] == "hidden kept for h2d"


@pytest.mark.parametrize("out", [False, True])
@pytest.mark.parametrize(("address", "parts"), [(0, [""]), (100, ["[0:28]", "[28:64]"]), (64, [""]), (128, [""])])
def test_a_copy_is_cut_where_a_slab_of_host_memory_ends(
    address: int, parts: list[str], out: bool, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA refuses one that reaches from one registration into the next."""
    monkeypatch.setattr(host, "SLAB_BYTES", 128)
    ends: Any = (OnCard(device, "slot", 100), Tensor(device, "weights", address))
    CudaStream(CudaClock(lambda: 0.0, device), device).copy(*(reversed(ends) if out else ends))
    names = ("slot", "weights") if out else ("weights", "slot")
    copies = [call for call in device.on("MainThread") if call.startswith("copy")]
    assert copies == [f"copy {names[0]}{part} to {names[1]}{part}" for part in parts]


# ---- the clock ----


def passed(device: Device, at_s: float) -> FakeEvent:
    event = FakeEvent(device, blocking=True)
    event.at_ms = at_s * 1e3
    device.run(event.at_ms)
    return event


def test_the_anchor_moves_on(device: Device) -> None:
    clock = CudaClock(lambda: 100.0, device)
    measured_from: list[float] = []

    class Event(FakeEvent):
        def elapsed_time(self, later: FakeEvent) -> float:
            measured_from.append(self.at_ms / 1e3)
            return super().elapsed_time(later)

    def event(at_s: float) -> Event:
        made = Event(device, blocking=True)
        made.at_ms = at_s * 1e3
        return made

    device.run()

    beyond = CudaClock.MAX_FROM_ANCHOR_S + 1.0
    first = event(beyond)
    assert clock.read(first) == pytest.approx(100.0 + beyond)
    assert clock.read(event(beyond + 1.0)) == pytest.approx(101.0 + beyond)
    assert clock.read(event(beyond - 0.5)) == pytest.approx(99.5 + beyond)  # another lane's, read late
    assert clock.read(event(2 * beyond)) == pytest.approx(100.0 + 2 * beyond)
    assert clock.read(event(2 * beyond)) == pytest.approx(100.0 + 2 * beyond)
    assert measured_from == [beyond, beyond, beyond, 2 * beyond]


def test_short_spans_stay_short_after_an_hour(device: Device) -> None:
    """Milliseconds in float32 are a quarter of one apart after an hour; a kernel takes less."""
    clock = CudaClock(lambda: 0.0, device)
    for at_s in range(1, 3601):
        start_s = clock.read(passed(device, float(at_s)))
        end_s = clock.read(passed(device, at_s + 50e-6))
        assert end_s - start_s == pytest.approx(50e-6, abs=2e-6)
    assert start_s == pytest.approx(3600.0, abs=2e-3)
