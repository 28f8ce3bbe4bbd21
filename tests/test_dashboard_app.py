"""The dashboard without a browser: a made-up run is drawn for made-up views, tick by tick, on a clock of the test."""

from __future__ import annotations

import gc
import gzip
import json
import sys
import threading
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ipywidgets as widgets
import pytest
from looking_run import looking_run
from stages import HELD, MadeUpRun, Stage
from traced_run import TracedRun, memory_sample

from dashboard import Dashboard
from dashboard.axis import Window
from dashboard.columns import make_frame
from dashboard.figures import update_figure
from dashboard.history import History
from dashboard.live_figure import LiveFigure
from megatrain.report import RunState
from megatrain.steering import Knobs


@pytest.fixture
def run(tmp_path: Path) -> MadeUpRun:
    return MadeUpRun(TracedRun().steps(3), tmp_path)


@pytest.fixture
def stage(run: MadeUpRun) -> Iterator[Stage]:
    stage = Stage(run)
    stage.browser_says(hello=True)
    yield stage
    stage.shown.close()


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, str]]:
    """Every message of every widget: whose, and from which thread."""
    messages: list[tuple[Any, str]] = []
    send = widgets.Widget._send

    def note(self: Any, message: Any, buffers: Any = None) -> None:
        messages.append((self, threading.current_thread().name))
        send(self, message, buffers)

    monkeypatch.setattr(widgets.Widget, "_send", note)
    return messages


def eventually(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end_s, "waited in vain"
        time.sleep(0.01)


# ---- what is drawn ----


def test_a_frame_shows_the_run(stage: Stage) -> None:
    stage.tick()
    assert stage.bars > 20
    assert "running" in stage.shown._drawing.headline.value
    assert "Layers in the last step" in stage.shown._drawing.layers.value
    assert stage.shown.error is None


def test_answers_and_held_out_loss_come_with_their_records(stage: Stage, run: MadeUpRun) -> None:
    stage.tick()
    assert stage.shown._drawing.samples.layout.display == "none"
    records = looking_run()
    for record in [*records.evaluations, *records.samples]:
        run.recorder.add(record)
    stage.tick()
    assert stage.shown._drawing.samples.layout.display is None
    assert "&lt;script&gt;" in stage.shown._drawing.samples.html
    assert "2.2500, perplexity 9.488 (after 2 steps)" in stage.shown._drawing.headline.value
    assert stage.shown._drawing.metrics.value == ""


def test_nothing_is_sent_while_nothing_changes(stage: Stage, sent: list[tuple[Any, str]]) -> None:
    stage.tick(3)
    sent.clear()
    stage.tick(20)
    assert sent == []


def test_nothing_is_drawn_while_nobody_looks_and_all_of_it_when_somebody_does(
    stage: Stage, run: MadeUpRun, sent: list[tuple[Any, str]]
) -> None:
    stage.tick(3)
    stage.browser_says(visible=False)
    sent.clear()
    for _ in range(100):  # 30 s
        stage.now_s += 0.3
        run.recorder.add(memory_sample(stage.now_s))
        stage.shown._step()
    assert {id(widget) for widget, _ in sent} == {id(stage.shown._pulse)}  # a probe every few seconds
    assert len(sent) <= 7
    assert len(stage.shown._history.memory_lines().x) > 3  # what was recorded meanwhile was read
    sent.clear()
    stage.browser_says(visible=True)
    stage.tick()
    assert stage.shown._drawing.figure in [widget for widget, _ in sent]


def test_a_page_that_was_reloaded_gets_the_whole_picture_also_of_a_run_that_is_over(
    stage: Stage, run: MadeUpRun, sent: list[tuple[Any, str]]
) -> None:
    run.state = RunState.FINISHED
    stage.tick(5)
    sent.clear()
    stage.browser_says(view="b", hello=True)
    stage.tick(2)
    assert stage.bars > 20
    messages = [widget for widget, _ in sent if widget is stage.shown._drawing.figure]
    assert len(messages) >= 2  # emptied, then filled


def test_the_place_where_a_run_is_held_stays_for_a_moment_while_one_layer_runs(stage: Stage, run: MadeUpRun) -> None:
    run.state, run.held = RunState.PAUSED, HELD
    stage.tick()
    held = stage.shown._drawing.held
    assert "Held before step 3, forward of layer 3" in held.value
    run.state, run.held = RunState.RUNNING, None
    stage.tick(2)
    assert "Held before" in held.value
    stage.tick(6)
    assert held.value == ""


def test_of_a_run_that_is_over_nothing_is_held(stage: Stage, run: MadeUpRun) -> None:
    run.state, run.held = RunState.PAUSED, HELD
    stage.tick()
    run.state, run.held = RunState.STOPPED, None
    stage.tick()
    assert stage.shown._drawing.held.value == ""


@pytest.mark.parametrize("state", [RunState.FAILED, RunState.FINISHED, RunState.STOPPED, RunState.LOST])
def test_how_a_run_ended_is_shown(stage: Stage, run: MadeUpRun, state: RunState) -> None:
    run.state, run.error = state, "layer 3: <out of memory>" if state is RunState.FAILED else None
    stage.tick()
    assert state.value in stage.shown._drawing.headline.value
    assert ("&lt;out of memory&gt;" in stage.shown._drawing.headline.value) == (state is RunState.FAILED)


def test_a_click_on_a_bar_fades_other_layers(stage: Stage) -> None:
    stage.tick()
    figure, bars = stage.shown._drawing.figure, stage.shown._drawing._frame
    assert bars is not None
    index = int((bars.work.layer == 2).argmax())
    point = {"trace_indexes": [0], "point_indexes": [index], "xs": [0], "ys": [0]}
    state = {"alt": False, "ctrl": False, "meta": False, "shift": False, "button": 0, "buttons": 1}
    message = {"event_type": "plotly_click", "points": point, "device_state": state, "selector": None}
    figure.set_state({"_js2py_pointsCallback": message})
    assert stage.shown.controls.follow.value == 2
    stage.tick()
    assert {round(float(value), 2) for value in figure.data[0].marker.opacity} == {0.13, 1.0}


def test_live_pressed_while_a_frame_is_drawn_is_heard_at_the_next(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.tick()
    figure, live = stage.shown._drawing.figure, stage.shown.controls.buttons["live"]
    figure.plotly_relayout({"xaxis.range": [3.0, 5.0]})
    with monkeypatch.context() as patched:
        patched.setattr(figure, "draw", lambda frame, *, whole: live.click())
        stage.shown._drawn = None
        stage.tick()
    stage.tick()
    assert figure.layout.xaxis.range[0] == 0


# ---- what goes wrong ----


def test_what_cannot_be_drawn_is_shown_and_kept_and_the_next_frame_goes_on(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as broken:
        broken.setattr("dashboard.drawing.make_frame", lambda *_, **__: 1 / 0)
        stage.tick(5)
        assert isinstance(stage.shown.error, ZeroDivisionError)
        assert stage.said().count("the dashboard could not draw: ZeroDivisionError") == 1
        assert stage.bars == 0
    stage.tick()
    assert stage.bars > 20


def test_a_source_that_fails_is_shown_too(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MadeUpRun, "status", lambda _: [][0])
    stage.tick(2)
    assert "IndexError" in stage.said()


def test_an_error_does_not_make_it_draw_more_often(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[float] = []
    monkeypatch.setattr("dashboard.drawing.make_frame", lambda *_, **__: tried.append(stage.now_s) or 1 / 0)
    stage.tick(40, every_s=0.05)
    assert 2 <= len(tried) <= 10


# ---- files ----


def test_files_are_written_between_frames_and_it_says_where(stage: Stage, tmp_path: Path) -> None:
    stage.tick()
    for name in ("export", "page"):
        stage.shown.controls.buttons[name].click()
    assert not list(tmp_path.iterdir())
    stage.tick()
    trace = next(tmp_path.glob("trace-*.json.gz"))
    with gzip.open(trace) as file:
        assert json.load(file)["traceEvents"]
    assert (tmp_path / "dashboard.html").stat().st_size > 1e6
    assert str(trace) in stage.said()
    assert "dashboard.html" in stage.said()


def test_a_file_that_cannot_be_written_is_said(stage: Stage, run: MadeUpRun, tmp_path: Path) -> None:
    stage.shown._source.folder = tmp_path / "gone"  # type: ignore[misc]
    stage.shown.controls.buttons["export"].click()
    stage.tick()
    assert 'class="wrong"' in stage.said()
    assert stage.shown.error is None


# ---- threads ----


def test_the_drawing_thread_writes_no_input_and_nobody_else_writes_what_is_drawn(
    run: MadeUpRun, sent: list[tuple[Any, str]]
) -> None:
    """See the note in `dashboard.controls`: an input written by a thread is deaf while a cell runs."""
    shown = Dashboard(run)
    shown.start()
    pulse = shown._pulse
    pulse._heard(pulse, {"view": "a", "turn": 1, "visible": True, "hello": True}, [])
    for turn in range(2, 12):
        run.knobs = Knobs(turn % 5, 2, turn)
        run.state = RunState.PAUSED if turn % 2 else RunState.RUNNING
        run.held = HELD if turn % 2 else None
        shown.controls.buttons["pause"].click()
        shown.controls.steps.set_state({"value": 1 + turn % 3})
        before = pulse.sent
        eventually(lambda before=before: pulse.sent > before)
        pulse._heard(pulse, {"view": "a", "turn": turn, "visible": True, "seen": pulse.sent}, [])
    shown.close()
    inputs = set(map(id, shown.controls.inputs))
    writers = {name for widget, name in sent if id(widget) in inputs}
    assert writers == {threading.current_thread().name}
    assert shown.controls.resident_layers.value == 11  # it was synchronised, so this could fail
    drawing = shown._drawing
    drawn = {id(drawing.headline), id(drawing.held), id(drawing.answers), id(drawing.layers)}
    ticks = [name for widget, name in sent if id(widget) in drawn]
    assert "megatrain-dash" in ticks


def test_no_update_of_the_figure_is_lost_to_a_message_from_the_browser(sent: list[tuple[Any, str]]) -> None:
    figure, over = LiveFigure(), threading.Event()
    history = History(TracedRun().steps(3).snapshot())
    frames = [make_frame(history, history.window(None, count)) for count in (1, 2)]
    updates = 150

    def messages() -> None:
        number = 0
        while not over.is_set():
            number += 1
            figure.set_state({"_last_layout_edit_id": number, "_last_trace_edit_id": number})

    browser = threading.Thread(target=messages)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        browser.start()
        for number in range(updates):
            with figure.writing:
                update_figure(figure, frames[number % 2])
    finally:
        over.set()
        browser.join()
        sys.setswitchinterval(interval)
    updated = [widget for widget, name in sent if widget is figure and name == threading.current_thread().name]
    assert len(updated) >= updates


def test_an_update_waits_for_the_message_that_is_being_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a widget reads a message it keeps what it would send: an update that came between would be merged away."""
    figure = LiveFigure()
    frame = make_frame(History(TracedRun().steps(2).snapshot()), Window(0.0, 1.0))
    reading, read_on = threading.Event(), threading.Event()

    def read_slowly(value: Any, _: Any) -> Any:
        reading.set()
        assert read_on.wait(10)
        return value

    def update() -> None:
        with figure.writing:
            update_figure(figure, frame)

    monkeypatch.setattr(figure, "_trait_from_json", read_slowly)
    browser = threading.Thread(target=figure.set_state, args=({"_last_layout_edit_id": 1},))
    drawing = threading.Thread(target=update)
    browser.start()
    assert reading.wait(10)
    drawing.start()
    drawing.join(0.3)
    assert drawing.is_alive()
    assert figure.data[0].x is None
    read_on.set()
    browser.join()
    drawing.join()
    assert len(figure.data[0].x) > 20


# ---- life ----


def test_closing_ends_the_thread_and_closes_every_widget(run: MadeUpRun) -> None:
    Dashboard(run).close()  # what is made once for all of them
    before = set(widgets.widget._instances)
    shown = Dashboard(run)
    shown.start()
    assert len(widgets.widget._instances) > len(before) + 50
    shown.close()
    assert not shown._thread.is_alive()
    assert set(widgets.widget._instances) == before
    shown.close()  # once more does no harm


def test_showing_a_run_anew_ends_the_dashboard_before(run: MadeUpRun) -> None:
    first, second = Dashboard(run), Dashboard(run)
    first.start()
    second.start()
    assert not first._thread.is_alive()
    assert second._thread.is_alive()
    second.close()


def test_a_dashboard_may_be_shown_twice(run: MadeUpRun) -> None:
    shown = Dashboard(run)
    shown.start()
    shown.start()
    assert shown._thread.is_alive()
    shown.close()


def test_what_cannot_be_shown_is_refused() -> None:
    with pytest.raises(TypeError, match=r"a dashboard shows a megatrain\.TrainingRun"):
        Dashboard("runs/demo")


def _held_bytes() -> int:
    """What Python holds, but for a table of all classes: plotly lets it grow by making one for each path it parses."""
    table = tracemalloc.Filter(False, "*/_plotly_utils/utils.py")
    return sum(trace.size for trace in tracemalloc.take_snapshot().filter_traces([table]).traces)


def test_hundreds_of_frames_leave_nothing_behind(stage: Stage, run: MadeUpRun) -> None:
    """The history fills its bounds elsewhere (test_dashboard_history): here the same run is drawn again and again."""

    def draw(frames: int) -> None:
        for number in range(frames):
            run.knobs = Knobs(number % 4, 2, number % 7)
            run.held = HELD if number % 3 else None
            stage.shown._view.steps = 1 + number % 3
            stage.tick()
            if number % 50 == 0:
                stage.browser_says(view=f"b{number % 100}", hello=True)

    draw(100)
    gc.collect()
    before = Counter(type(widget) for widget in widgets.widget._instances.values())
    tracemalloc.start()
    draw(100)
    gc.collect()
    first = _held_bytes()
    draw(400)
    gc.collect()
    second = _held_bytes()
    tracemalloc.stop()
    assert Counter(type(widget) for widget in widgets.widget._instances.values()) == before
    assert second - first < 57_000, "more than 143 bytes a frame"
