"""When to draw: as often as the browser keeps up with and somebody looks, and not more.

Note: four situations.
Hidden: nobody sees a view. No frames; a probe now and then, in case the news of a return was lost.
Following: every frame was acknowledged. The next one may go as soon as the period is over.
Starving: a frame is not acknowledged, because the browser is busy. One more goes every few seconds.
Gone: nothing was acknowledged for long (a sleeping laptop, a broken network). Messages would pile up in the
server, so only probes go, until one is answered.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import Enum

PERIOD_S = 0.25
SHORT_STEP_S = 0.05  # steps this short lose a noticeable share of their time to drawing
SHORT_STEP_PERIOD_S = 0.5
STARVING_PERIOD_S = 2.0
GONE_AFTER_S = 30.0
PROBE_PERIOD_S = 5.0


class Due(Enum):
    """What may be sent now."""

    NOTHING = "nothing"
    FRAME = "frame"  # draw, then put `sent()` on the pulse
    PROBE = "probe"  # only put `sent()` on the pulse


class Pace:
    """Says when a frame may go. One thread asks and sends; any thread may say what the browser answered."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._visible = False
        self._whole = False  # a view has appeared and shows nothing yet
        self._sent = self._seen = 0
        self._sent_s = clock()
        self._hopeful_s = clock()  # since when an answer is due, if one is

    def look(self, visible: bool) -> None:
        """Some view can be seen, or none."""
        if visible and not self._visible:
            self.appear()
        self._visible = visible

    def appear(self) -> None:
        """A view was rendered anew: it gets a frame whatever is still in flight."""
        self._hopeful_s = self._clock()
        self._whole = True

    def heard(self, seen: int) -> None:
        """The browser has painted everything up to this number."""
        self._seen = max(self._seen, seen)

    def sent(self) -> int:
        """Count what is being sent now, frame or probe; the number to put on the pulse."""
        self._sent_s = self._clock()
        if not self._in_flight:
            self._hopeful_s = self._sent_s
        self._sent += 1
        return self._sent

    def due(self, step_s: float | None) -> Due:
        """Return what may be sent now, where a training step takes so many seconds (None: not known)."""
        now_s = self._clock()
        if self._visible and self._whole:
            self._whole = False
            return Due.FRAME
        if not self._visible or self._gone(now_s):
            return Due.PROBE if now_s - self._sent_s >= PROBE_PERIOD_S else Due.NOTHING
        return Due.FRAME if now_s - self._sent_s >= self._period_s(step_s) else Due.NOTHING

    def _period_s(self, step_s: float | None) -> float:
        if self._in_flight:
            return STARVING_PERIOD_S
        return SHORT_STEP_PERIOD_S if step_s is not None and step_s < SHORT_STEP_S else PERIOD_S

    def _gone(self, now_s: float) -> bool:
        return self._in_flight and now_s - self._hopeful_s >= GONE_AFTER_S

    @property
    def _in_flight(self) -> bool:
        return self._seen < self._sent
