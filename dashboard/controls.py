"""The widgets a user turns, bound to the run's control and to the view.

Note: who may write here. A widget that receives input is never written by the drawing thread: Jupyter would then
route its messages to that thread's channel, where a busy cell holds them up. Controls are written by the thread that
makes them and by handlers of browser messages (`sync` is called from one); answers go to a widget of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import ipywidgets as widgets

from dashboard.answers import Answers
from dashboard.view import View
from megatrain.remote import RunUnreachableError
from megatrain.report import Status
from megatrain.steering import Knobs, Steering, Wish

DEEPEST, MOST_BUFFERS, MOST_RESIDENT, LAST_LAYER = 8, 8, 512, 9999
LAYER_COLUMNS = ("layer", "forward", "backward", "bytes", "grad_norm", "weight_norm", "output_rms")
BUTTON = widgets.Layout(width="auto", min_width="40px")
NUMBER = widgets.Layout(width="150px")
ROW = widgets.Layout(flex_flow="row wrap", align_items="center", grid_gap="4px 8px")


class Controls:
    """steering: called for each wish, as a run may come and go. newest: the newest step's number.

    export, save_page: called by their buttons; each returns what to say.
    """

    def __init__(
        self,
        steering: Callable[[], Steering],
        view: View,
        answers: Answers,
        *,
        newest: Callable[[], int],
        export: Callable[[], str],
        save_page: Callable[[], str],
    ) -> None:
        self._steering, self._view, self._answers, self._newest = steering, view, answers, newest
        self._syncing = False
        self._shown: Knobs | None = None
        self.prefetch_depth = _slider("prefetch depth", 0, DEEPEST, 1, "Layers loaded ahead; 1 is double buffering")
        self.grad_buffers = _slider("gradient buffers", 1, MOST_BUFFERS, 2, "Device buffers for a layer's gradient")
        self.resident_layers = _number("resident", 0, MOST_RESIDENT, 0, "Further layers kept on the device")
        self.micro_batch = _number("micro-batch", 1, 4096, 1, "Sequences per layer visit, from the next step on")
        self.layer = _number("layer", 0, LAST_LAYER, 0, "Where to run to")
        self.phase = widgets.Dropdown(
            options=["either way", "forward", "backward"],
            layout=widgets.Layout(width="110px"),
            tooltip="In which pass to hold",
        )
        self.follow = _number("follow layer", -1, LAST_LAYER, -1, "Fade all other layers; −1 follows none")
        self.steps = _slider("steps shown", 1, 3, view.steps, "How many steps the timeline shows")
        self.sort_by = widgets.Dropdown(options=LAYER_COLUMNS, description="sort by", layout=NUMBER)
        self.descending = widgets.Checkbox(description="largest first", indent=False, layout=BUTTON)
        self._bind()
        self.run = self._run_row()
        self.knobs = _row([self.prefetch_depth, self.grad_buffers, self.resident_layers, *self._micro_batch_row()])
        self.sight = self._sight_row(export, save_page)
        self.table = _row([self.sort_by, self.descending])

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
            "stop": _button("Stop", "stop", "End after this step", lambda: ask(Steering.stop)),
            "save": _button("Stop and save", "save", "End after this step and save the model", self._stop_and_save),
        }
        buttons = self.buttons
        first = [buttons[name] for name in ("pause", "resume", "layer", "step")]
        return _row([*first, buttons["to"], self.layer, self.phase, buttons["stop"], buttons["save"]])

    def _micro_batch_row(self) -> list[Any]:
        self.buttons["rows"] = _button("Set", "check", "From the next step on; equal to rounding", self._set_rows)
        return [self.micro_batch, self.buttons["rows"]]

    def _sight_row(self, export: Callable[[], str], save_page: Callable[[], str]) -> Any:
        made = {
            "earlier": _button("Earlier", "chevron-left", "Show the steps before", self._earlier),
            "later": _button("Later", "chevron-right", "Show the steps after", self._later),
            "live": _button("Live", "circle", "Back to what happens now", self._live),
            "export": _button("Export trace", "download", "For ui.perfetto.dev", lambda: self._say(export)),
            "page": _button("Save page", "file", "This dashboard as one HTML file", lambda: self._say(save_page)),
        }
        self.buttons |= made
        steps = [made["earlier"], made["later"], made["live"], self.steps]
        return _row([*steps, self.follow, made["export"], made["page"]])

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
        """Pass a wish on, by the name of its method; what becomes of it, also a refusal, is shown."""
        try:
            self._answers.wish(getattr(self._steering(), wish.__name__)(*arguments, **options))
        except (ValueError, RunUnreachableError) as error:
            self._answers.say(str(error), wrong=True)

    def _turned(self, turn: Callable[..., Wish]) -> Callable[[Any], None]:
        def handle(change: Any) -> None:
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
        if status.knobs is None or status.knobs == self._shown:
            return
        first, self._shown, self._syncing = self._shown is None, status.knobs, True
        try:
            for name in ("prefetch_depth", "grad_buffers", "resident_layers"):
                widget, value = getattr(self, name), getattr(status.knobs, name)
                widget.value = min(value, widget.max)
            if first and status.micro_batch_size is not None:
                self.micro_batch.value = status.micro_batch_size
        finally:
            self._syncing = False

    # ---- the view ----

    def _look(self) -> None:
        follow = self.follow.value
        self._view.follow = follow if follow >= 0 else None
        self._view.steps = self.steps.value
        self._view.sort_by, self._view.descending = self.sort_by.value, self.descending.value

    def _earlier(self) -> None:
        self._view.earlier(self._newest())

    def _later(self) -> None:
        self._view.later(self._newest())

    def _live(self) -> None:
        self._view.last_step = None

    def _say(self, act: Callable[[], str]) -> None:
        try:
            self._answers.say(act())
        except (OSError, ValueError) as error:
            self._answers.say(str(error), wrong=True)


def _button(text: str, icon: str, tooltip: str, act: Callable[[], None]) -> Any:
    button = widgets.Button(description=text, icon=icon, tooltip=tooltip, layout=BUTTON)
    button.on_click(lambda _: act())
    return button


def _slider(text: str, low: int, high: int, value: int, tooltip: str) -> Any:
    return widgets.IntSlider(
        value,
        low,
        high,
        description=text,
        tooltip=tooltip,
        continuous_update=False,
        style={"description_width": "initial"},
        layout=widgets.Layout(width="250px"),
    )


def _number(text: str, low: int, high: int, value: int, tooltip: str) -> Any:
    return widgets.BoundedIntText(
        value,
        low,
        high,
        description=text,
        tooltip=tooltip,
        style={"description_width": "initial"},
        layout=NUMBER,
    )


def _row(children: Sequence[Any]) -> Any:
    return widgets.Box(list(children), layout=ROW)
