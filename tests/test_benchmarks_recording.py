"""What recording costs is counted as it is said."""

from __future__ import annotations

import json
from math import comb
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import recording
from benchmarks.interval import interval
from benchmarks.recording import Block, Pair, Trainer, dropping, figures, reading, spreading
from dashboard.feed import LiveFeed
from megatrain.trace import Recorder, Span

# ---- the interval of a median ----


@pytest.mark.parametrize("count", [6, 7, 10, 41, 100, 300])
def test_the_interval_holds_the_median_19_times_in_20(count: int) -> None:
    """That is: at least so many of the values lie below the median as were skipped, and at least so many above."""
    low, high = interval(range(count))
    skipped = int(low)
    assert high == count - 1 - skipped
    assert sum(comb(count, below) for below in range(skipped + 1, count - skipped)) / 2**count >= 0.95


@given(st.lists(st.floats(-1e9, 1e9), min_size=1))
def test_the_interval_is_of_the_values_and_around_their_median(values: list[float]) -> None:
    low, high = interval(values)
    ordered = sorted(values)
    assert {low, high} <= set(values)
    assert low <= ordered[(len(values) - 1) // 2] <= ordered[len(values) // 2] <= high


# ---- pairs ----


def test_shares_are_medians_of_pairs() -> None:
    dropped = Block(wall_s=2.0, cpu_s=4.0)
    pairs = [Pair(dropped, Block(wall_s, cpu_s, records=30)) for wall_s, cpu_s in ((2.2, 4.0), (2.0, 4.4), (1.8, 5.0))]
    found = figures(pairs, steps=2)
    assert (found["wall"], found["cpu"]) == pytest.approx((0.0, 0.1))
    assert found["wall_interval"] == pytest.approx((-0.1, 0.1))
    assert found["cpu_interval"] == pytest.approx((0.0, 0.25))
    assert (found["step_s"], found["spans_per_step"]) == (1.0, 10)


def test_pairs_alternate_and_the_first_does_not_count() -> None:
    asked: list[bool] = []

    class Scripted:
        def block(self, steps: int, *, recorded: bool) -> Block:
            asked.append(recorded)
            return Block(1.0, 1.0)

    trainer: Any = Scripted()
    pairs = list(recording.measure(trainer, 2, 3, lambda: None))
    assert asked == [False, True, True, False, False, True]
    assert len(pairs) == 2


# ---- both sides ----


def span(number: int) -> Span:
    return Span("compute", "forward", number, 0, 0, 0, 0.0, 1.0, 0)


def test_what_is_dropped_is_not_kept_and_what_follows_is() -> None:
    recorder = Recorder()
    with dropping(recorder):
        recorder.add(span(0))
    recorder.add(span(1))
    assert recorder.spans() == [span(1)]


def test_what_is_spread_is_in_each_and_what_follows_in_one() -> None:
    first, *others = (Recorder() for _ in range(3))
    with spreading(first, others):
        first.add(span(0))
    first.add(span(1))
    assert [other.spans() for other in others] == [[span(0)]] * 2
    assert all(other.spans()[0] is not first.spans()[0] for other in others)  # each made its own
    assert first.spans() == [span(0), span(1)]


def test_shares_are_of_one_recorder() -> None:
    found = figures([Pair(Block(1.0, 2.0), Block(1.4, 2.2))], steps=1, times=4)
    assert (found["wall"], found["cpu"]) == pytest.approx((0.1, 0.025))


def test_the_reader_gets_every_record_once() -> None:
    recorder = Recorder()
    feed = LiveFeed(recorder)
    recorder.add(span(0))
    feed.poll()
    for first in (1, 4):
        with reading(feed) as records:
            for number in range(first, first + 3):
                recorder.add(span(number))
        assert records == [span(number) for number in range(first, first + 3)]


def test_an_engine_is_recorded_in_one_kind_of_block_only() -> None:
    case = recording.case_of(recording.parse(TINY))
    with case.open() as engine:
        trainer = Trainer(engine, case)
        dropped, kept = (trainer.block(2, recorded=recorded) for recorded in (False, True))
    assert dropped.records == 0
    assert kept.records == len(engine.recorder.spans()) > 0
    assert {s.step for s in engine.recorder.spans()} == {3, 4, 5}


# ---- the command line ----

TINY = ["--layers", "2", "--hidden", "64", "--rows", "1", "--sequence", "8", "--pairs", "2", "--steps", "1"]


def test_a_tiny_run_writes_what_it_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "ALONE_SPANS", 100)
    out = tmp_path / "recording.json"
    recording.main([*TINY, "--out", str(out)])
    found = json.loads(out.read_text())
    assert len(found["pairs"]) == 2
    assert all(found["alone"][f"{name}_us"] > 0 for name in ("made_and_kept", "made", "read"))
    assert found["spans_per_step"] > 10
    printed = capsys.readouterr().out
    assert "< 1%" in printed
    assert "a span alone: " in printed
