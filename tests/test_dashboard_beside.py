"""What runs between two steps is told from training, and is not said to wait."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from looking_run import GENERATED, SCORED, TRAINED, looking_run, spans, step_record

from dashboard.axis import Window
from dashboard.beside import Beside, since
from dashboard.columns import make_frame
from dashboard.history import History
from dashboard.pieces import pieces_of_spans
from megatrain.trace import Records

BATCHED = ("record", "record", "forward", "forward", "score", "score")


@pytest.mark.parametrize(
    ("ops", "beside", "running"),
    [
        ((), 0, False),
        (("record", "forward"), 0, True),  # the step, as far as is known
        (TRAINED, 0, True),
        (SCORED, 3, False),
        ((*SCORED, "record", "forward"), 5, False),  # the next batch, or the step: nobody knows
        (SCORED + TRAINED, 3, True),
        ((*SCORED, "record", "forward", "score", "head"), 3, True),  # with an objective of its own
        (GENERATED, 2, False),
        (GENERATED + TRAINED, 2, True),
        (SCORED + GENERATED, 5, False),
        (BATCHED, 6, False),
    ],
)
def test_the_step_that_runs_is_told_from_what_came_before_it(ops: tuple[str, ...], beside: int, running: bool) -> None:
    found = since(pieces_of_spans(spans(1, 0, ops)))
    assert len(found.beside) == beside
    assert found.running_s == (beside if running else None)


def history(*ops: str, evaluated: bool = False) -> History:
    """A step, something else, a step."""
    between = spans(1, 5, ops)
    records = looking_run()
    return History(
        Records(
            spans=spans(0, 0, TRAINED) + between + spans(1, 20, TRAINED),
            steps=[step_record(0, 0), step_record(1, 20)],
            evaluations=records.evaluations[:1] if evaluated else [],
        )
    )


@pytest.mark.parametrize(
    ("ops", "evaluated", "what"),
    [
        (SCORED, False, "scoring"),
        (SCORED, True, "evaluation"),
        (BATCHED, False, "scoring"),
        (GENERATED, False, "generation"),
        (GENERATED, True, "generation"),
        (GENERATED + SCORED, False, "scoring, generation"),
        (SCORED + GENERATED, True, "evaluation, generation"),
    ],
)
def test_it_is_named(ops: tuple[str, ...], evaluated: bool, what: str) -> None:
    run = history(*ops, evaluated=evaluated)
    (found,) = run.beside(Window(0, 25))
    assert found == Beside(5, pytest.approx(4 + len(ops) + 0.8), 1, what)
    assert run.now_beside == ""


def test_where_nothing_is_computed_between_steps_there_is_nothing() -> None:
    run = history()
    assert run.beside(Window(0, 25)) == []
    assert [(wait.cause, wait.start_s, wait.end_s) for wait in run.waits(Window(4.8, 20))] == []
    assert ("other", 5, 20) in [(wait.cause, wait.start_s, wait.end_s) for wait in run.waits(Window(0, 25))]


def test_before_the_first_step_and_after_the_last() -> None:
    run = History(looking_run())
    window = run.window(None, 9)
    assert [(each.start_s, each.what) for each in run.beside(window)] == [
        (5, "evaluation, generation"),
        (15, "evaluation, generation"),
    ]
    assert run.running_s is None
    assert run.now_beside == "evaluation, generation"
    alone = History(Records(spans=spans(0, 3, SCORED)))
    assert [(each.start_s, each.step, each.what) for each in alone.beside(alone.window(None, 2))] == [(3, 0, "scoring")]


def test_the_timeline_names_it_and_its_spans_belong_to_no_step() -> None:
    run = History(looking_run())
    frame = make_frame(run, run.window(None, 9))
    assert [(flag.time_ms, flag.text) for flag in frame.steps] == [
        (0, "step 0"),
        (5e3, "evaluation, generation"),
        (10e3, "step 1"),
        (15e3, "evaluation, generation"),
    ]
    scored = [hover for hover in frame.work.hover if hover.startswith("<b>score</b>")]
    assert "evaluation, generation before step 1<br>log-probabilities of the labels, no gradient" in scored[0]
    assert ", step 1<" not in "".join(scored)


def test_what_the_engine_does_between_steps_is_no_wait() -> None:
    run = History(looking_run())
    waits = run.waits(run.window(None, 9))
    assert not [wait for wait in waits if 5 <= wait.start_s < 9.8 and wait.cause == "other"]
    assert [wait for wait in waits if 0 <= wait.start_s < 5]  # within a step it is one
    assert [metrics.busy_s["compute"] for metrics in run.metrics] == pytest.approx([4.0, 4.0])
    assert [metrics.duration_s for metrics in run.metrics] == [5, 5]


def test_weights_are_waited_for_there_too() -> None:
    load = spans(1, 5.85, ("record",), 0.1)[0]
    records = looking_run()
    loaded = [*records.spans, type(load)("h2d", "load", 1, 0, None, 0, load.start_s, load.end_s, 1)]
    run = History(Records(spans=loaded, steps=records.steps))
    assert "weights" in [wait.cause for wait in run.waits(Window(0, 20)) if 5 <= wait.start_s < 7]


@given(st.lists(st.sampled_from([TRAINED, SCORED, GENERATED]), max_size=4))
def test_all_that_is_computed_is_beside_or_of_the_step_that_runs(parts: list[tuple[str, ...]]) -> None:
    ops = sum(parts, ())
    found = since(pieces_of_spans(spans(0, 0, ops)))
    if found.running_s is None:
        assert len(found.beside) == len(ops)
    else:
        assert len(found.beside) == found.running_s
        assert ops[len(found.beside)] == "record"
