"""The figure and the pages that show it: what they say to each other crosses on its way."""

from __future__ import annotations

from typing import Any

import ipywidgets as widgets
import pytest
from traced_run import TracedRun

from dashboard.columns import Frame, last_steps, make_frame
from dashboard.history import History
from dashboard.live_figure import LiveFigure

PART = (3.0, 5.0)
ZOOM = {"xaxis.range[0]": PART[0], "xaxis.range[1]": PART[1]}


@pytest.fixture
def frames() -> list[Frame]:
    """Each shows a step more than the one before."""
    run = TracedRun()
    histories = [History(run.steps(1).snapshot()) for _ in range(3)]
    return [make_frame(history, last_steps(history, 3)) for history in histories]


@pytest.fixture
def figure(frames: list[Frame]) -> LiveFigure:
    """A figure whose page has drawn the first frame."""
    figure = LiveFigure()
    figure.draw(frames[0], whole=False)
    figure.set_state(answer(figure))
    return figure


def zoom() -> dict[str, Any]:
    return {"_js2py_relayout": {"relayout_data": ZOOM, "source_view_id": "a"}}


def answer(figure: LiveFigure) -> dict[str, Any]:
    """What a page says when it has drawn the newest frame."""
    numbers = {"dtype": "float32", "shape": [2], "value": memoryview(bytes(8))}
    delta = {"uid": figure.data[0].uid, "x": numbers, "text": ["0", "1"]}
    number = figure._last_trace_edit_id
    return {"_js2py_traceDeltas": {"trace_deltas": [delta], "trace_edit_id": number}}


@pytest.fixture
def told(figure: LiveFigure, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The figure's news for its pages."""
    messages: list[dict[str, Any]] = []
    monkeypatch.setattr(widgets.Widget, "_send", lambda _, message, buffers=None: messages.append(message["state"]))
    return messages


def test_a_zoom_is_told_to_the_page_that_it_comes_from_too(figure: LiveFigure, told: list[dict[str, Any]]) -> None:
    """A frame that was on its way has undone it there."""
    figure.set_state(zoom())
    assert figure.layout.xaxis.range == PART
    (message,) = [state["_py2js_relayout"] for state in told if state.get("_py2js_relayout")]
    assert message["relayout_data"] == ZOOM
    assert message["source_view_id"] is None  # a page leaves out what bears its own name


@pytest.mark.parametrize("answer_first", [True, False])
def test_a_zoom_that_comes_together_with_an_answer_is_heard(
    figure: LiveFigure, frames: list[Frame], *, answer_first: bool
) -> None:
    figure.draw(frames[1], whole=False)
    said = [answer(figure), zoom()] if answer_first else [zoom(), answer(figure)]
    figure.set_state(said[0] | said[1])
    assert figure.layout.xaxis.range == PART


def test_an_answer_is_not_sent_back(figure: LiveFigure, told: list[dict[str, Any]]) -> None:
    figure.set_state(answer(figure))
    assert told == []


def test_a_zoom_made_before_the_whole_was_shown_is_over(
    figure: LiveFigure, frames: list[Frame], told: list[dict[str, Any]]
) -> None:
    """It waited in the page while the press of a button passed it."""
    figure.draw(frames[1], whole=True)
    told.clear()
    figure.set_state(zoom())
    assert {"_js2py_relayout": None} in told  # the page may say the same once more
    assert not any(state.get("_py2js_relayout") for state in told)
    figure.set_state(answer(figure) | zoom())
    figure.draw(frames[2], whole=False)
    assert figure.layout.xaxis.range == (0, frames[2].width_ms)


def test_a_zoom_made_after_the_whole_was_shown_counts(figure: LiveFigure, frames: list[Frame]) -> None:
    figure.draw(frames[1], whole=True)
    figure.set_state(answer(figure))
    figure.set_state(zoom())
    figure.draw(frames[2], whole=False)
    assert figure.layout.xaxis.range == PART


def test_any_later_answer_will_do(figure: LiveFigure, frames: list[Frame]) -> None:
    """A page that is busy says only the last of several."""
    figure.draw(frames[1], whole=True)
    figure.draw(frames[2], whole=False)
    figure.set_state(answer(figure))
    figure.set_state(zoom())
    assert figure.layout.xaxis.range == PART
