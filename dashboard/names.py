"""Names for whoever listens to a page instead of looking at it."""

from __future__ import annotations

from pathlib import Path

import anywidget
import ipywidgets as widgets


class Names(anywidget.AnyWidget):  # type: ignore[misc]
    """Shows nothing, and names the sliders of the box that it is put into, in every view of it."""

    _esm = Path(__file__).with_name("names.js")

    def __init__(self) -> None:
        super().__init__(layout=widgets.Layout(display="none"))
