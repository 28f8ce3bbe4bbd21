"""The figure in a notebook, written by one thread while browser messages arrive on another.

Note: whose range is shown
    Frames and zooms cross on their way, so page and kernel would each end with the other's range. The kernel's word is
    therefore the last: it tells a zoom to every page, also to the one that it comes from. And since a zoom may wait in
    the page while the press of a button passes it, none counts before a page has answered the frame that was to show
    everything: it was made on what that frame replaced.
"""

from __future__ import annotations

import threading
from typing import Any

import plotly.graph_objects as go

from dashboard.columns import Frame
from dashboard.figures import build_figure, update_figure
from dashboard.subshells import hear_while_busy

ZOOM = "_js2py_relayout"
ANSWER = "_js2py_traceDeltas"  # a page has drawn a frame; says what plotly.js made of each trace


class LiveFigure(go.FigureWidget):  # type: ignore[misc]
    """Widgets are not thread-safe: an update that meets a browser message may be lost. Hence one lock for both."""

    def __init__(self) -> None:
        self._writing = threading.RLock()
        self._answered = self._awaited = 0  # numbers of frames, as plotly counts them
        super().__init__(build_figure())
        self._config = {"doubleClick": "autosize"}  # plotly's own way back leads to where the axes were at first
        hear_while_busy(self)

    def draw(self, frame: Frame, *, whole: bool) -> None:
        """Show a frame; whole: all of its time, whatever somebody has zoomed in to."""
        with self._writing:
            update_figure(self, frame, whole=whole)
            if whole:
                self._awaited = self._last_trace_edit_id

    def set_state(self, sync_data: dict[str, Any]) -> None:
        heard = dict(sync_data)
        answer = heard.pop(ANSWER, None)  # plotly fails at it where data are arrays, and what came with it was lost
        with self._writing:
            if heard.get(ZOOM) and self._answered < self._awaited:
                heard[ZOOM] = heard[ZOOM] | {"relayout_data": {}}  # still answered, else the page never says it again
            if answer:
                self._answered = answer["trace_edit_id"]
            super().set_state(heard)

    def _send_relayout_msg(self, layout_data: dict[str, Any], source_view_id: str | None = None) -> None:
        super()._send_relayout_msg(layout_data)  # with its source, that page would leave it out

    @property
    def writing(self) -> threading.RLock:
        """Held by whoever changes the figure."""
        return self._writing
