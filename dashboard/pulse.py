"""Frames are acknowledged: a dot in the page answers what it has painted, and whether anyone can see it.

The kernel draws and then sets `sent`. The browser handles messages in order, so its answer, after the next
animation frame, says that everything before it is on the screen. Whoever draws waits for that answer
(`dashboard.pace`): a busy browser is not buried in frames, and one that nobody looks at costs nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anywidget
from traitlets import Bool, Int, Unicode

from dashboard.subshells import hear_while_busy


class Pulse(anywidget.AnyWidget):  # type: ignore[misc]
    """A small live dot. Set `sent` after drawing; observe the other three, which the browser changes.

    sent: number of the newest frame. seen: of the newest that some view has painted.
    visible: whether some view is in or near the window of a shown page.
    hello: which view was rendered last. It changes with a reload or a second viewer, who have seen no frame yet.
    """

    _esm = Path(__file__).with_name("pulse.js")

    sent = Int(0).tag(sync=True)
    seen = Int(0)
    visible = Bool(False)
    hello = Unicode("")

    def __init__(self) -> None:
        super().__init__()
        self.add_class("mt-pulse")
        self._turns: dict[str, int] = {}
        self._watching: set[str] = set()
        self.on_msg(self._heard)
        hear_while_busy(self)

    def _heard(self, _widget: object, said: dict[str, Any], _buffers: object) -> None:
        """Views answer by messages and not by traits: of two viewers each may be visible or not."""
        view, turn = said["view"], said["turn"]
        if turn < self._turns.get(view, 0):
            return  # sent before the browser had its subshell, and kept waiting by a running cell
        self._turns[view] = turn
        self._see(view, said["visible"])
        self.seen = max(self.seen, said.get("seen", 0))
        if said.get("hello"):
            self.hello = view

    def _see(self, view: str, visible: bool) -> None:
        if visible:
            self._watching.add(view)
        else:
            self._watching.discard(view)
        self.visible = bool(self._watching)
