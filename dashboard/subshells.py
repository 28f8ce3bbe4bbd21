"""Widgets that are heard while a cell runs.

JupyterLab sends what widgets say to a thread of the kernel beside the one that runs cells, a subshell. ipykernel
(since 7.3) sends it on to whoever wrote to the widget last instead. That is the cell that made the widget, or a
thread that a cell started: both count as the cells' thread. While a cell runs, such a widget is deaf. Worse, a
widget that has answered on a subshell stays with it when the notebook is closed and opened again, though the
subshell is gone, and is deaf for ever.
"""

from __future__ import annotations

from typing import Any


def hear_while_busy(widget: Any) -> None:
    """Let what the browser says to the widget go where the browser sends it. Call it once the widget is made.

    The attribute is private to ipykernel: where it has another name, or does not exist, nothing changes.
    """
    widget.comm._reply_subshell_for = lambda _data, sent_to: sent_to
