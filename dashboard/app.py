"""Dashboard: one object that shows a run, live, and lets its viewer steer it.

Note: threads. Training draws nothing: one `dash` thread asks the source for news, draws them, and alone writes what
is displayed. Browser messages arrive on a thread of Jupyter's; their handlers pass wishes on, set the view, and
leave errands (files to write) to the `dash` thread, which alone knows the history. What goes wrong there is shown in
the page and kept in `error`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import ipywidgets as widgets
from IPython.display import display

from dashboard.answers import Answers
from dashboard.controls import Controls
from dashboard.drawing import Drawing
from dashboard.history import History
from dashboard.names import Names
from dashboard.pace import Due, Pace
from dashboard.page import write_page
from dashboard.pulse import Pulse
from dashboard.sources import FolderSource, source_of
from dashboard.view import View
from megatrain.folder import RunFolder
from megatrain.report import RunInfo, RunState, Status
from megatrain.trace import write_chrome_trace

NARROWEST = "860px"  # in which the figure can be read
LOOK_S = 0.2  # least time between two looks at a run: one that stands still is not asked at every tick
TICK_S = 0.05  # between looks at whether it is time to draw
HIDDEN_POLL_S = 5.0  # so that no record is missed while nobody watches
JOIN_S = 5.0
UNFORESEEN = (RunState.NEW, RunState.FAILED, RunState.LOST)  # when the run's own words are shown

_shown: dict[object, Dashboard] = {}  # by run: showing one anew ends the one before


class Dashboard:
    """Shows a run: `Dashboard(run)` as the last line of a cell, or `Dashboard.attach(folder)` for one elsewhere.

    run: a `megatrain.TrainingRun`, in a thread or a process of its own. steps: how many the timeline shows at first.
    A kernel shows a run once: a further Dashboard of it takes over from the one before (in any number of browsers).
    """

    def __init__(self, run: Any, *, steps: int = 2, clock: Callable[[], float] = time.monotonic) -> None:
        self._key, self._source = _key(run), source_of(run)
        self.error: Exception | None = None
        self._history = History()
        self._view = View(steps=steps)
        self._answers = Answers()
        self._info: RunInfo | None = None
        self._status = Status(RunState.NEW)
        self._generation = self._source.generation
        self._drawn: object = None  # what the page shows now
        self._anew = threading.Event()  # some page shows nothing yet
        self._errands: SimpleQueue[Callable[[], str]] = SimpleQueue()
        self._clock = clock
        self._polled_s = 0.0
        self._pace, self._pulse = Pace(clock), Pulse()
        self.controls = Controls(
            self._source.control,
            self._view,
            self._answers,
            newest=lambda: self._history.newest_step or 0,
            export=lambda: self._errands.put(self._export),
            save_page=lambda: self._errands.put(self._save_page),
        )
        self._drawing = Drawing(self._view, self.controls.follow_layer, clock)
        self.widget = self._compose()
        self._listen()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._main, name="megatrain-dash", daemon=True)

    @classmethod
    def attach(cls, run_dir: str | Path, *, steps: int = 2) -> Dashboard:
        """Follow the run in a folder, alive or over, whichever process trains it; ValueError if there is none."""
        RunFolder(run_dir).status()  # a folder that is no run is refused here
        return cls(FolderSource(run_dir), steps=steps)

    # ---- the page ----

    def _compose(self) -> Any:
        controls, drawing = self.controls, self._drawing
        steering = widgets.VBox([controls.run, controls.knobs, drawing.answers])
        return widgets.VBox(
            [
                drawing.style,
                widgets.HBox([self._pulse, drawing.headline]),
                drawing.log,
                drawing.advice,
                steering,
                drawing.held,
                controls.sight,
                _scrolling(drawing.figure),
                drawing.buffers,
                drawing.summary,
                drawing.metrics,
                drawing.samples,
                controls.table,
                drawing.layers,
                Names(),
            ]
        )

    def _listen(self) -> None:
        self._pulse.observe(lambda change: self._pace.look(change["new"]), "visible")
        self._pulse.observe(self._painted, "seen")
        self._pulse.observe(self._appeared, "hello")

    def _painted(self, change: Any) -> None:
        self._pace.heard(change["new"])
        self.controls.sync(self._status)

    def _appeared(self, _: Any) -> None:
        """A page that was reloaded, or a second one, knows the widgets as they were when they were made."""
        self._anew.set()
        self._pace.appear()

    def _ipython_display_(self) -> None:
        display(self.widget)  # type: ignore[no-untyped-call]
        self.start()

    def start(self) -> None:
        """Begin to draw; displaying does it."""
        if not self._thread.is_alive():
            before = _shown.pop(self._key, None)
            if before is not None and before is not self:
                before.close()
            _shown[self._key] = self
            self._thread.start()

    def close(self) -> None:
        """Stop drawing and let go of the widgets. The run goes on."""
        self._closing.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(JOIN_S)
        self.controls.close()
        if _shown.get(self._key) is self:
            del _shown[self._key]
        self._source.close()
        _close(self.widget)

    # ---- drawing ----

    def _main(self) -> None:
        while not self._closing.wait(TICK_S):
            self._step()

    def _step(self) -> None:
        try:
            self._tick()
        except Exception as error:  # shown, kept; the next frame tries again
            self._complain(error)

    def _complain(self, error: Exception) -> None:
        if repr(error) != repr(self.error):
            self._answers.say(f"the dashboard could not draw: {type(error).__name__}: {error}", wrong=True)
            self._drawing.say(self._answers)
        self.error = error
        self._pulse.sent = self._pace.sent()

    def _tick(self) -> None:
        self._run_errands()
        due = self._pace.due(self._history.step_s)
        if due is Due.FRAME:
            if self._clock() - self._polled_s >= LOOK_S:
                self._look()
            if self._draw():
                self._pulse.sent = self._pace.sent()
        elif due is Due.PROBE:
            self._pulse.sent = self._pace.sent()
        elif self._clock() - self._polled_s >= HIDDEN_POLL_S:
            self._look()

    def _look(self) -> None:
        """Ask the source for news."""
        self._polled_s = self._clock()
        self._info = self._info or self._source.info()
        self._status = self._source.status()
        records = self._source.poll()
        if self._source.generation != self._generation:  # another run began in this folder
            self._generation, self._info = self._source.generation, self._source.info()
            self._history.clear()
        self._history.add(records)
        self._history.peak_flops_per_s = self._info.peak_flops_per_s if self._info else None

    def _draw(self) -> bool:
        """Show what is known; False if the page shows exactly that already."""
        if self._anew.is_set():
            self._anew.clear()
            self._drawn = None
            self._drawing.forget()
        log = self._source.log() if self._status.state in UNFORESEEN else ""
        state = (self._history.version, self._status, self._view.state, self._answers.html(), self._info, log)
        if state == self._drawn and not self._drawing.overdue:
            return False
        self._drawing.draw(self._history, self._status, self._info, self._answers, log)
        self._drawn = state
        return True

    # ---- files ----

    def _run_errands(self) -> None:
        try:
            while True:
                self._answers.say(self._errands.get_nowait()())
        except Empty:
            pass
        except (OSError, ValueError) as error:
            self._answers.say(str(error), wrong=True)

    def _export(self) -> str:
        window = self._history.window(self._view.last_step, self._view.steps)
        path = self._folder() / f"trace-{window.start_s:.0f}s-{window.end_s:.0f}s.json.gz"
        write_chrome_trace(path, self._history.records(window))
        return f"written, for ui.perfetto.dev: {path}"

    def _save_page(self) -> str:
        path = self._folder() / "dashboard.html"
        write_page(path, self._history, "MegaTrain", info=self._info, status=self._status)
        return f"written, opens in any browser: {path}"

    def _folder(self) -> Path:
        return self._source.folder or Path.cwd()


def _scrolling(figure: Any) -> Any:
    """Where a page is narrower than titles and legends need, the figure scrolls sideways."""
    wide = widgets.VBox([figure], layout=widgets.Layout(min_width=NARROWEST))
    return widgets.VBox([wide], layout=widgets.Layout(overflow="auto hidden"))


def _key(run: Any) -> object:
    folder = getattr(run, "folder", None)
    return id(run) if folder is None else Path(folder).absolute()


def _close(widget: Any) -> None:
    """Close a widget and all that it holds; layouts and styles are widgets, too."""
    parts = [*getattr(widget, "children", ()), getattr(widget, "layout", None), getattr(widget, "style", None)]
    for part in parts:
        if isinstance(part, widgets.Widget):
            _close(part)
    widget.close()
