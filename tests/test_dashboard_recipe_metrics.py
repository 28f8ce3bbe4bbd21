import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from looking_run import step_record

from dashboard import recipe_metrics
from dashboard.history import History
from dashboard.recipe_metrics import MetricRow
from megatrain.trace import EvaluationRecord, Records


def rows(history: History) -> dict[str, MetricRow]:
    return {row.name: row for row in history.metric_rows()}


def test_a_run_without_metrics_has_no_rows() -> None:
    assert History(Records(steps=[step_record(0, 0)])).metric_rows() == ()


def test_newest_and_mean_of_the_last_steps_and_the_whole_curve() -> None:
    steps = [step_record(number, 6 * number, margin=number) for number in range(30)]
    row = rows(History(Records(steps=steps)))["margin"]
    assert (row.newest, row.recent) == (29, sum(range(10, 30)) / 20)
    assert row.curve == tuple(range(30))
    assert math.isnan(row.held_out)


def test_held_out_is_of_the_newest_evaluation() -> None:
    looks = [EvaluationRecord(at, at, 0.5, 4, {"margin": at, "only here": 1.0}) for at in (1, 2)]
    history = History(Records(steps=[step_record(0, 0, margin=5.0)], evaluations=looks))
    assert rows(history)["margin"].held_out == 2
    assert rows(history)["only here"] == MetricRow("only here", pytest.approx(math.nan, nan_ok=True), *rest())
    history.add(Records(evaluations=[EvaluationRecord(3, 3, 0.5, 4, {"margin": 7.0})]))
    assert rows(history)["margin"].held_out == 7


def rest() -> tuple[object, ...]:
    return pytest.approx(math.nan, nan_ok=True), 1.0, ()


def test_one_that_is_no_number_is_left_out_of_the_mean() -> None:
    steps = [step_record(0, 0, kl=math.nan), step_record(1, 6, kl=4.0), step_record(2, 12)]
    row = rows(History(Records(steps=steps)))["kl"]
    assert (row.newest, row.recent) == (4, 4)


@given(st.lists(st.integers(1, 7), max_size=30))
def test_portions_do_not_matter_and_memory_is_bounded(sizes: list[int]) -> None:
    steps = [step_record(number, 6 * number, margin=number % 5) for number in range(sum(sizes))]
    whole, parts, at = History(Records(steps=steps)), History(), 0
    for size in sizes:
        parts.add(Records(steps=steps[at : at + size]))
        parts.metric_rows()
        at += size
    assert parts.metric_rows() == whole.metric_rows()
    assert all(len(row.curve) <= recipe_metrics.POINTS + 3 for row in whole.metric_rows())  # some are not settled


def test_there_are_no_more_than_so_many() -> None:
    steps = [step_record(0, 0, **{f"metric {n}": 1.0 for n in range(99)}), step_record(1, 6, late=1.0)]
    assert len(History(Records(steps=steps)).metric_rows()) == recipe_metrics.MOST
