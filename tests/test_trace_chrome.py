import gzip
import json
import math
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from traced_run import TracedRun, memory_sample

from megatrain.trace import Marker, Recorder, Records, Span, StepRecord, write_atomically, write_chrome_trace
from megatrain.trace.chrome import TICKS_PER_US, _lane_ticks
from megatrain.trace.flows import flow_chains

Event = dict[str, Any]


def written(path: Path, source: Recorder | Records, *window: float) -> list[Event]:
    write_chrome_trace(path, source, *window)
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    events: list[Event] = json.loads(data, parse_constant=pytest.fail)["traceEvents"]
    return events


def of(events: list[Event], phase: str) -> list[Event]:
    return [event for event in events if event["ph"] == phase]


def span(op: str, layer: int | None, start_s: float, end_s: float, lane: str = "compute") -> Span:
    return Span(lane, op, 0, layer, None, None, start_s, end_s, 0)  # type: ignore[arg-type]


def crossings(slices: list[tuple[int, int]]) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    return [(a, b) for a in slices for b in slices if a[0] < b[0] < a[1] < b[1]]


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_every_span_is_one_slice_on_the_track_of_its_lane(tmp_path: Path, name: str) -> None:
    run = TracedRun().steps(2)
    events = written(tmp_path / name, run)
    tracks = {e["tid"]: e["args"]["name"] for e in of(events, "M") if e["name"] == "thread_name"}
    drawn = Counter((tracks[e["tid"]], e["cat"], e["ts"]) for e in of(events, "X") if e["cat"] != "step")
    assert drawn == Counter((s.lane, s.op, round(s.start_s * 8e6) / 8) for s in run.spans())
    assert [e["name"] for e in of(events, "X") if e["cat"] == "step"] == ["step 0", "step 1"]
    assert [tracks[tid] for tid in sorted(tracks)] == ["steps", "h2d", "compute", "d2h", "host"]


def test_a_slice_says_what_moved_and_how_fast(tmp_path: Path) -> None:
    load = Span("h2d", "load", 4, 2, None, 1, 0.5, 0.75, 5_000_000_000)
    head = Span("compute", "head", 4, None, 0, None, 1.0, 1.0, 0)
    first, second = of(written(tmp_path / "trace.json", Records(spans=[load, head])), "X")
    assert (first["name"], first["ts"], first["dur"]) == ("load 2", 500_000, 250_000)
    assert first["args"] == {"step": 4, "layer": 2, "slot": 1, "bytes": 5_000_000_000, "GB/s": 20}
    assert second["args"] == {"step": 4, "layer": "shell", "micro_batch": 0, "bytes": 0}


def test_an_empty_run_is_a_valid_trace(tmp_path: Path) -> None:
    assert {event["ph"] for event in written(tmp_path / "trace.json", Recorder())} == {"M"}


def test_arrows_begin_and_end_once_inside_the_slices_they_bind_to(tmp_path: Path) -> None:
    events = written(tmp_path / "trace.json", TracedRun().steps(2))
    arrows: dict[int, list[Event]] = defaultdict(list)
    for event in events:
        if event["ph"] in "stf":
            arrows[event["id"]].append(event)
    assert len(arrows) == 2 * 10  # per step: 6 loads for the forward, 4 for the backward (2 layers stay)
    for arrow in arrows.values():
        assert "".join(event["ph"] for event in arrow) == "s" + "t" * (len(arrow) - 2) + "f"
        assert [event["ts"] for event in arrow] == sorted(event["ts"] for event in arrow)
    for event in (event for arrow in arrows.values() for event in arrow):
        track = [slice_ for slice_ in of(events, "X") if slice_["tid"] == event["tid"]]
        assert any(s["ts"] < event["ts"] < s["ts"] + s["dur"] for s in track)
        assert event["bp"] == "e"


def test_chains_follow_a_layer_from_load_to_update() -> None:
    chains = flow_chains(TracedRun(layers=4).steps(1).spans())
    ways = {tuple((span.op, span.layer) for span in chain) for chain in chains}
    assert ways == {
        (("load", 0), ("forward", 0)),
        (("load", 1), ("forward", 1)),
        (("load", 2), ("forward", 2), ("backward", 2), ("unload", 2), ("update", 2)),
        (("load", 3), ("forward", 3), ("backward", 3), ("unload", 3), ("update", 3)),
        (("load", 1), ("backward", 1), ("backward", 1), ("unload", 1), ("update", 1)),
        (("load", 0), ("backward", 0), ("backward", 0), ("unload", 0), ("update", 0)),
    }  # the first micro-batch is the first that uses the weights, the last completes the gradient


def test_a_resident_layer_starts_at_its_backward() -> None:
    spans = [span("forward", 0, 0, 1), span("backward", 0, 1, 2), span("unload", 0, 2, 3, "d2h")]
    assert flow_chains(spans) == [spans[1:]]


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), max_size=15))
def test_slices_of_a_lane_never_cross_and_none_is_lost(pairs: list[tuple[int, int]]) -> None:
    tick_s = 1e-6 / TICKS_PER_US
    spans = [span("forward", 0, start * tick_s, (start + length) * tick_s) for start, length in pairs]
    placed = _lane_ticks(spans)
    assert Counter(map(id, spans)) == Counter(id(span) for span, _ in placed)
    assert all(start <= end for _, (start, end) in placed)
    assert crossings([ticks for _, ticks in placed]) == []


def test_slices_that_touch_or_nest_stay_as_they_are() -> None:
    spans = [span("forward", 0, 0, 4e-6), span("forward", 1, 1e-6, 3e-6), span("forward", 2, 4e-6, 5e-6)]
    assert [ticks for _, ticks in _lane_ticks(spans)] == [(0, 32), (8, 24), (32, 40)]


def test_counters_follow_slots_and_memory(tmp_path: Path) -> None:
    counters = of(written(tmp_path / "trace.json", TracedRun().steps(1)), "C")
    by_name: dict[str, list[int]] = defaultdict(list)
    for event in counters:
        by_name[event["name"]] += event["args"].values()
    assert max(by_name["weights slots in use"]) == max(by_name["gradients slots in use"]) == 2
    assert by_name["weights slots in use"][-1] == 0
    assert set(by_name["device arena"]) == {memory_sample(0).arena_bytes}
    assert "host RSS" in by_name
    assert "device used" not in by_name


def test_markers_are_instants_and_nan_is_written_as_text(tmp_path: Path) -> None:
    skipped = StepRecord(0, 0.0, 1.0, math.nan, math.inf, 1e-4, 1, 1, 0, 1, 1, "loss is not finite")
    records = Records(markers=[Marker(2.0, "prefetch_depth", 1, 3, 5, 7)], steps=[skipped])
    events = written(tmp_path / "trace.json", records)
    (instant,) = of(events, "i")
    assert instant["ts"] == 2_000_000
    assert instant["args"] == {"old": 1, "new": 3, "step": 5, "layer": 7}
    (step,) = of(events, "X")
    assert (step["args"]["loss"], step["args"]["grad_norm"]) == ("nan", "inf")


def test_a_window_keeps_what_touches_it(tmp_path: Path) -> None:
    spans = [span("forward", number, number, number + 1) for number in range(5)]
    samples = [memory_sample(float(number)) for number in range(5)]
    events = written(tmp_path / "trace.json", Records(spans=spans, memory=samples), 1.5, 3.5)
    assert [event["name"] for event in of(events, "X")] == ["forward 1", "forward 2", "forward 3"]
    assert {event["ts"] for event in of(events, "C")} == {2_000_000, 3_000_000}


@pytest.mark.parametrize("name", ["trace", "trace.txt", "trace.gz", "trace.json.zip"])
def test_a_name_by_which_no_viewer_knows_a_trace_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=rf"must end in \.json or \.json\.gz \(packed\); got .*{name}"):
        write_chrome_trace(tmp_path / name, Recorder())
    assert not list(tmp_path.iterdir())


def test_the_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    written(path, TracedRun().steps(1))
    before = path.read_bytes()
    with pytest.raises(TypeError):
        write_chrome_trace(path, Records(spans=[span("forward", {}, 0, 1)]))  # type: ignore[arg-type]
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_write_leaves_nothing_behind(tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.mkdir()
    with pytest.raises(OSError, match="taken"):
        write_atomically(taken, b"data")
    assert list(tmp_path.iterdir()) == [taken]
