"""The lesson's own machinery: rates from a pace, pictures of any run, and cells that outlive the run they steer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from megatrain import lesson
from megatrain.config import Throttle
from megatrain.lesson import Pace
from megatrain.report import RunState
from megatrain.run import TrainingRun

PACE = Pace(forward_s=0.01, load_bytes=1_000_000, update_bytes=7_000_000)
FAST = Throttle()


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lesson, "SEQUENCE", 8)
    monkeypatch.setattr(lesson, "HIDDEN", 32)


@pytest.fixture
def run() -> Iterator[TrainingRun]:
    """A run that goes on until it is stopped."""
    run = lesson.training_run(FAST, steps=100_000)
    run.start()
    yield run
    run.stop()
    run.wait(60)
    run.engine.close()


def test_a_throttle_is_a_multiple_of_what_a_forward_takes() -> None:
    assert PACE.throttle(load=2.0) == Throttle(link_bytes_per_s=50_000_000.0)
    assert PACE.throttle(update=0.5) == Throttle(update_bytes_per_s=1_400_000_000.0)
    assert PACE.throttle() == Throttle()


def test_a_pipeline_knows_the_step_that_is_typical_of_those_trained_last() -> None:
    pipeline = lesson.Pipeline().train(3)
    assert pipeline.typical_step in (1, 2)
    assert pipeline.train(3, rows=2).typical_step in (4, 5)
    tokens = {step.step: step.sequence_tokens for step in pipeline.history.steps}
    pipeline.engine.close()
    assert (tokens[1], tokens[4]) == (lesson.ROWS * 8, 2 * 8)


def test_a_picture_has_the_two_upper_plots_and_all_that_is_written_above_them() -> None:
    pipeline = lesson.Pipeline().train(2)
    figure = lesson.picture(pipeline.history, last_step=1)
    pipeline.engine.close()
    assert {trace.yaxis for trace in figure.data} == {"y", "y2"}
    assert figure.layout.yaxis.domain[1] == 1
    assert figure.layout.yaxis2.domain[0] == pytest.approx(0)
    titles = [note.text for note in figure.layout.annotations if "layers)" in note.text]
    assert [title.split(" (")[0] for title in titles] == ["What each lane does", "Who holds the device buffers"]


def test_steps_pass_and_a_layer_is_stepped_while_the_run_goes_on(run: TrainingRun) -> None:
    lesson.let_pass(run, steps=2)
    assert run.steps_done >= 2
    run.pause().wait(60)
    first, second = lesson.step_layer(run), lesson.step_layer(run)
    assert (first.phase, first.layer) != (second.phase, second.layer)
    lesson.let_pass(run, steps=1)  # returns at once: the run is held


def test_what_is_wrong_with_a_wish_is_raised_while_the_run_goes_on(
    run: TrainingRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lesson, "ENDING_S", 0.2)
    with pytest.raises(ValueError, match="prefetch_depth must be a whole number"), lesson.while_it_trains(run):
        run.control.set_prefetch_depth(-1)


def test_a_cell_goes_on_when_the_run_is_over(capsys: pytest.CaptureFixture[str]) -> None:
    run = lesson.training_run(FAST, steps=1)
    run.start().wait(60)
    with lesson.while_it_trains(run):
        lesson.step_layer(run)
    run.engine.close()
    assert run.state is RunState.FINISHED
    assert "The run is finished already" in capsys.readouterr().out


def test_nothing_known_is_said_to_be_so() -> None:
    run = lesson.training_run(FAST, steps=1)
    assert lesson.advice_on(lesson.history_of(run)) == "No step has ended yet."
    run.engine.close()
