"""The widgets a user turns, bound to the run's control and to the view.

Note: who may write here. A widget that receives input is never written by the drawing thread: Jupyter would then
route its messages to that thread's channel, where a busy cell holds them up. Controls are written by the thread that
makes them and by handlers of browser messages (`sync` is called from one); answers go to a widget of their own.

Note: who may wait. A handler returns at once: another process may take seconds to answer a wish, and the messages
behind it, acknowledgements of frames among them, would wait, too. One thread carries wishes, in their order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ipywidgets as widgets

from dashboard.answers import Answers
from dashboard.layers import QUANTITIES
from dashboard.subshells import hear_while_busy
from dashboard.view import View
from megatrain.report import Status
from megatrain.steering import Knobs, Steering, Wish

DEEPEST, MOST_BUFFERS, MOST_RESIDENT, LAST_LAYER = 8, 8, 512, 9999
LAYER_COLUMNS = [("layer", "layer"), *((words, field) for field, words in QUANTITIES.items())]


class Controls:
    """steering: called for each wish, as a run may come and go. newest: the newest step's number.

    export, save_page: called by their buttons; they return at once, too.
    """

    def __init__(
        self,
        steering: Callable[[], Steering],
        view: View,
        answers: Answers,
        *,
        newest: Callable[[], int],
        export: Callable[[], None],
        save_page: Callable[[], None],
    ) -> None:
        self._steering, self._view, self._answers, self._newest = steering, view, answers, newest
        self._carrier = ThreadPoolExecutor(1, "megatrain-wishes")
        self._turning = threading.RLock()  # two browsers are heard on two threads
        self._syncing = False
        self._shown: Knobs | None = None
        self._shown_rows: int | None = None
        self.prefetch_depth = _slider("prefetch depth", 0, DEEPEST, 1, "Layers loaded ahead; 1 is double buffering")
        self.grad_buffers = _slider("gradient buffers", 1, MOST_BUFFERS, 2, "Device buffers for a layer's gradient")
        self.resident_layers = _number("resident layers", 0, MOST_RESIDENT, 0, "Further layers kept on the device", 165)
        self.micro_batch = _number("micro-batch", 1, 4096, 1, "Sequences per layer visit, from the next step on", 145)
        self.layer = _number("layer", 0, LAST_LAYER, 0, "Where to run to", 100)
        self.phase = widgets.Dropdown(
            options=["either way", "forward", "backward"],
            description="pass",
            tooltip="In which pass to hold",
            style={"description_width": "initial"},
            layout=_wide("140px"),
        )
        self.follow = _number("follow layer", -1, LAST_LAYER, -1, "Fade all other layers; −1 follows none", 145)
        self.steps = _slider("steps shown", 1, 3, view.steps, "How many steps the timeline shows", 190)
        self.sort_by = widgets.Dropdown(
            options=LAYER_COLUMNS,
            description="sort by",
            style={"description_width": "initial"},
            layout=_wide("190px"),
        )
        self.descending = widgets.Checkbox(description="largest first", indent=False, layout=_wide("auto"))
        self._bind()
        self.run = self._run_row()
        self.knobs = _row([self.prefetch_depth, self.grad_buffers, self.resident_layers, *self._micro_batch_row()])
        self.sight = self._sight_row(export, save_page)
        self.table = _row([self.sort_by, self.descending])
        for widget in self.inputs:
            hear_while_busy(widget)

    @property
    def inputs(self) -> list[Any]:
        """Every widget that receives input."""
        return [widget for row in (self.run, self.knobs, self.sight, self.table) for widget in row.children]

    def close(self) -> None:
        """Ask for nothing more; what was asked for is still carried."""
        self._carrier.shutdown(wait=False)

    # ---- rows ----

    def _run_row(self) -> Any:
        ask = self._ask
        self.buttons = {
            "pause": _button("Pause", "pause", "Hold before the next layer", lambda: ask(Steering.pause)),
            "resume": _button("Resume", "play", "Run on", lambda: ask(Steering.resume)),
            "layer": _button(
                "Step one layer", "step-forward", "One layer, then hold", lambda: ask(Steering.step_layer)
            ),
            "step": _button(
                "Finish step", "fast-forward", "To the next step, then hold", lambda: ask(Steering.finish_step)
            ),
            "to": _button("Run to", "crosshairs", "Run until this layer is next", self._run_to),
            "checkpoint": _button(
                "Checkpoint", "archive", "Write one after this step; training goes on", lambda: ask(Steering.checkpoint)
            ),
            "stop": _button("Stop", "stop", "End after this step", lambda: ask(Steering.stop)),
            "save": _button("Stop and save", "save", "End after this step and save the model", self._stop_and_save),
        }
        buttons = self.buttons
        first = [buttons[name] for name in ("pause", "resume", "layer", "step")]
        return _row([*first, buttons["to"], self.layer, self.phase, buttons["stop"], buttons["save"]])

    def _micro_batch_row(self) -> list[Any]:
        self.buttons["rows"] = _button("Set", "check", "From the next step on; equal to rounding", self._set_rows)
        return [self.micro_batch, self.buttons["rows"]]

    def _sight_row(self, export: Callable[[], None], save_page: Callable[[], None]) -> Any:
        made = {
            "earlier": _button("Earlier", "chevron-left", "Show the steps before", self._earlier),
            "later": _button("Later", "chevron-right", "Show the steps after", self._later),
            "live": _button("Live", "circle", "Back to what happens now", self._live),
            "export": _button("Export trace", "download", "For ui.perfetto.dev", export),
            "page": _button("Save page", "file", "This dashboard as one HTML file", save_page),
        }
        self.buttons |= made
        steps = [made["earlier"], made["later"], made["live"], self.steps]
        files = [self.buttons[name] for name in ("export", "page", "checkpoint")]
        return _row([*steps, self.follow, *files])

    def _bind(self) -> None:
        turns = {
            self.prefetch_depth: Steering.set_prefetch_depth,
            self.grad_buffers: Steering.set_grad_buffers,
            self.resident_layers: Steering.set_resident_layers,
        }
        for widget, turn in turns.items():
            widget.observe(self._turned(turn), "value")
        for widget in (self.follow, self.steps, self.sort_by, self.descending):
            widget.observe(lambda _: self._look(), "value")

    # ---- wishes ----

    def _ask(self, wish: Callable[..., Wish], *arguments: Any, **options: Any) -> None:
        """Have a wish passed on, by the name of its method."""
        self._carrier.submit(self._carry, wish.__name__, arguments, options)

    def _carry(self, name: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Pass a wish on; what becomes of it, also a refusal, is shown."""
        try:
            self._answers.wish(getattr(self._steering(), name)(*arguments, **options))
        except Exception as error:  # nobody else would hear of it in this thread
            self._answers.say(str(error), wrong=True)
            self._shown = None  # what was refused is not so: the next `sync` says what is

    def _turned(self, turn: Callable[..., Wish]) -> Callable[[Any], None]:
        def handle(change: Any) -> None:
            with self._turning:
                if not self._syncing:
                    self._ask(turn, change["new"])

        return handle

    def _run_to(self) -> None:
        phase = None if self.phase.value == "either way" else self.phase.value
        self._ask(Steering.run_to_layer, self.layer.value, phase)

    def _stop_and_save(self) -> None:
        self._ask(Steering.stop, save=True)

    def _set_rows(self) -> None:
        self._ask(Steering.set_micro_batch_size, self.micro_batch.value)

    def sync(self, status: Status) -> None:
        """Show knobs that were turned elsewhere. Only from a handler of a browser message: see the note above."""
        with self._turning:
            self._syncing = True
            try:
                self._show_knobs(status.knobs)
                self._show_rows(status.micro_batch_size)
            finally:
                self._syncing = False

    def _show_knobs(self, knobs: Knobs | None) -> None:
        if knobs is None or knobs == self._shown:
            return
        self._shown = knobs
        for name in ("prefetch_depth", "grad_buffers", "resident_layers"):
            widget, value = getattr(self, name), getattr(knobs, name)
            widget.value = min(value, widget.max)

    def _show_rows(self, rows: int | None) -> None:
        """Only when they change: the number may be half typed."""
        if rows is not None and rows != self._shown_rows:
            self._shown_rows = rows
            self.micro_batch.value = min(rows, self.micro_batch.max)

    # ---- the view ----

    def _look(self) -> None:
        follow = self.follow.value
        self._view.follow = follow if follow >= 0 else None
        self._view.show(self.steps.value)
        self._view.sort_by, self._view.descending = self.sort_by.value, self.descending.value

    def follow_layer(self, layer: int | None) -> None:
        """Follow the layer that was clicked, or none; once more on the same one lets it go. From a handler, too."""
        self.follow.value = -1 if layer is None or layer == self._view.follow else layer

    def _earlier(self) -> None:
        self._view.earlier(self._newest())

    def _later(self) -> None:
        self._view.later(self._newest())

    def _live(self) -> None:
        self._view.now()


def _button(text: str, icon: str, tooltip: str, act: Callable[[], None]) -> Any:
    button = widgets.Button(description=text, icon=icon, tooltip=tooltip, layout=_wide("auto"))
    button.on_click(lambda _: act())
    return button


def _slider(text: str, low: int, high: int, value: int, tooltip: str, width_px: int = 250) -> Any:
    return widgets.IntSlider(
        value,
        low,
        high,
        description=text,
        tooltip=tooltip,
        continuous_update=False,
        style={"description_width": "initial"},
        layout=_wide(f"{width_px}px"),
    )


def _number(text: str, low: int, high: int, value: int, tooltip: str, width_px: int) -> Any:
    return widgets.BoundedIntText(
        value,
        low,
        high,
        description=text,
        tooltip=tooltip,
        style={"description_width": "initial"},
        layout=_wide(f"{width_px}px"),
    )


def _row(children: Sequence[Any]) -> Any:
    layout = widgets.Layout(flex_flow="row wrap", align_items="center", grid_gap="4px")
    row = widgets.Box(list(children), layout=layout)
    row.add_class("mt-controls")
    return row


def _wide(width: str) -> Any:
    return widgets.Layout(width=width, flex="0 0 auto")
