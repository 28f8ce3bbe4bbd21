"""What is displayed, and how one look at the run becomes it. Written by one thread only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ipywidgets as widgets

from dashboard import panels, post_training
from dashboard.answers import Answers
from dashboard.axis import Window
from dashboard.columns import LIVE_BARS, LIVE_SEGMENTS, Frame, make_frame
from dashboard.figures import forget, layer_at
from dashboard.fold import Fold
from dashboard.history import History
from dashboard.layers import LayerRow
from dashboard.live_figure import LiveFigure
from dashboard.view import View
from dashboard.words import advice
from megatrain.report import RunInfo, Status

LINGER_S = 1.5  # for which a panel stays: while one layer runs, the page does not jump


class Drawing:
    """The figure and the panels around it. on_layer: called with the layer of what was clicked, None for no layer's."""

    def __init__(self, view: View, on_layer: Callable[[int | None], None], clock: Callable[[], float]) -> None:
        self._view, self._on_layer, self._clock = view, on_layer, clock
        self._frame: Frame | None = None
        self._looks = view.looks
        self.figure = LiveFigure()
        self.style, self.headline, self.advice, self.answers = (widgets.HTML() for _ in range(4))
        self.held, self.buffers, self.summary, self.layers = (widgets.HTML() for _ in range(4))
        self.log, self.metrics = widgets.HTML(), widgets.HTML()
        self.samples = Fold(post_training.ANSWERS)
        self.style.value = panels.STYLE + post_training.STYLE
        self.advice.layout.min_height = "34px"
        self._held_s: float | None = None  # when the run was held last, while its panel is there
        for trace in self.figure.data:
            trace.on_click(self._clicked)

    def say(self, answers: Answers) -> None:
        """Show what became of wishes, whatever else can be shown."""
        self.answers.value = answers.html()

    def draw(self, history: History, status: Status, info: RunInfo | None, answers: Answers, log: str) -> None:
        """Show all of it; a panel that says the same as before sends nothing."""
        self.say(answers)
        view = self._view
        window = history.window(view.last_step, view.steps)
        rows = history.layer_rows(view.last_step)
        self._draw_figure(history, window, status, info, rows)
        metrics, record = history.metrics_of(view.last_step), history.record(view.last_step)
        self._draw_headline(status, info, history)
        self.advice.value = panels.sentence(advice(metrics, record)) if metrics and record else ""
        self.log.value = panels.last_words(status, log)
        self._draw_held(status, history)
        self.buffers.value = panels.buffer_strip(history, info)
        self.summary.value = panels.step_summary(metrics, info) if metrics else ""
        self.metrics.value = post_training.metric_table(history.metric_rows())
        self.samples.show(post_training.sample_list(history.samples))
        self.layers.value = panels.layer_table(rows, view.sort_by, view.descending)

    def _draw_headline(self, status: Status, info: RunInfo | None, history: History) -> None:
        self.headline.value = panels.headline(
            status,
            info,
            history.steps,
            history.newest_memory,
            history.evaluations[-1] if history.evaluations else None,
            beside=history.now_beside,
            between_s=history.between_s,
        )

    def _draw_figure(
        self, history: History, window: Window, status: Status, info: RunInfo | None, rows: tuple[LayerRow, ...]
    ) -> None:
        looks = self._view.looks  # once: a button that is pressed meanwhile is for the next frame
        self._frame = make_frame(
            history,
            window,
            info=info,
            planned_bytes=status.planned_bytes,
            follow=self._view.follow,
            most_bars=LIVE_BARS,
            most_segments=LIVE_SEGMENTS,
            rows=rows,
        )
        self.figure.draw(self._frame, whole=looks != self._looks)
        self._looks = looks

    def _draw_held(self, status: Status, history: History) -> None:
        if status.held is not None:
            self._held_s = self._clock()
            self.held.value = panels.held_panel(status, history.buffers())
        elif status.state.over or self.overdue:
            self._held_s = None
            self.held.value = ""

    @property
    def overdue(self) -> bool:
        """Whether a panel has stayed long enough."""
        return self._held_s is not None and self._clock() - self._held_s >= LINGER_S

    def forget(self) -> None:
        """Send everything with the next frame, whatever was sent before."""
        with self.figure.writing:
            forget(self.figure)

    def _clicked(self, trace: Any, points: Any, _state: Any) -> None:
        if self._frame is not None and points.point_inds:
            self._on_layer(layer_at(self._frame, points.trace_index, points.point_inds[0]))
