"""A dashboard on a stage: a made-up run, a made-up browser, and a clock that a test moves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dashboard import Dashboard
from megatrain.report import Inspection, RunInfo, RunState, Status
from megatrain.steering import Knobs, Position, Wish
from megatrain.trace import Recorder

INFO = RunInfo("m", 6, 100, 1, 0.0, "cpu", 1, 1, 1, {"weights": 2 * 10**9}, 64 * 10**9, 8 * 10**9)
HELD = Inspection(next=["forward layer 3, micro-batch 0, weights slot 1"])


class MadeUpRun:
    """What a dashboard uses of a run in a thread. Its status can be set; a wish is granted at once."""

    def __init__(self, recorder: Recorder, folder: Path | None = None) -> None:
        self.recorder, self.folder, self.info = recorder, folder, INFO
        self.state: RunState = RunState.RUNNING
        self.knobs = Knobs(1, 2, 0)
        self.held: Inspection | None = None
        self.error: str | None = None

    @property
    def control(self) -> MadeUpRun:
        return self

    def status(self) -> Status:
        steps = len(self.recorder.steps())
        position = Position(steps, "forward", 3)
        return Status(self.state, steps, self.knobs, 2, position, {}, 10**9, self.held, self.error)

    def pause(self) -> Wish:
        wish = Wish("pause")
        wish.fulfil(Position(3, "forward", 3))
        return wish


class Stage:
    """A dashboard with its clock, one browser, and a list of who sent what."""

    def __init__(self, run: Any) -> None:
        self.now_s = 100.0
        self.shown = Dashboard(run, clock=lambda: self.now_s)
        self._turn = 0

    def browser_says(self, **said: Any) -> None:
        self._turn += 1
        pulse = self.shown._pulse
        pulse._heard(pulse, {"view": "a", "turn": self._turn, "visible": True} | said, [])

    def tick(self, times: int = 1, *, every_s: float = 0.3) -> None:
        """Let time pass; whatever is drawn is painted at once."""
        for _ in range(times):
            self.now_s += every_s
            self.shown._step()
            self.browser_says(seen=self.shown._pulse.sent)

    @property
    def bars(self) -> int:
        x = self.shown._drawing.figure.data[0].x
        return 0 if x is None else len(x)

    def said(self) -> str:
        text: str = self.shown._drawing.answers.value
        return text
