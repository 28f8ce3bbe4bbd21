"""The figure in a notebook, written by one thread while browser messages arrive on another."""

from __future__ import annotations

import threading
from typing import Any

import plotly.graph_objects as go

from dashboard.figures import build_figure
from dashboard.subshells import hear_while_busy


class LiveFigure(go.FigureWidget):  # type: ignore[misc]
    """Widgets are not thread-safe: an update that meets a browser message may be lost. Hence one lock for both."""

    def __init__(self) -> None:
        self._writing = threading.RLock()
        super().__init__(build_figure())
        self._config = {"doubleClick": "autosize"}  # plotly's own way back leads to where the axes were at first
        hear_while_busy(self)

    def set_state(self, sync_data: dict[str, Any]) -> None:
        with self._writing:
            super().set_state(sync_data)

    @property
    def writing(self) -> threading.RLock:
        """Held by whoever changes the figure."""
        return self._writing
