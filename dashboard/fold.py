"""A panel that its reader can fold away.

Note: its head is a widget of its own, which is never written to: the page keeps whether it is open while what is below
it comes and goes. A rule of the page's style (`post_training.STYLE`) hides what follows a closed head. So it takes no
message, and opens by keyboard, which an ipywidgets Accordion does not.
"""

from __future__ import annotations

from html import escape

import ipywidgets as widgets


class Fold(widgets.VBox):  # type: ignore[misc]
    """Not there at all while it is empty."""

    def __init__(self, title: str) -> None:
        self._body = widgets.HTML()
        head = widgets.HTML(f'<details class="mt" open><summary>{escape(title)}</summary></details>')
        head.add_class("mt-fold")
        self._body.add_class("mt-folded")
        super().__init__([head, self._body], layout=widgets.Layout(display="none"))

    def show(self, html: str) -> None:
        self._body.value = html
        self.layout.display = None if html else "none"

    @property
    def html(self) -> str:
        shown: str = self._body.value
        return shown
