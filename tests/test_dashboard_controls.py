"""Controls without a browser: what each asks for, what a refusal shows, and what is turned elsewhere."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from dashboard.answers import Answers
from dashboard.controls import Controls
from dashboard.layers import LayerRow
from dashboard.view import View
from megatrain.remote import RunUnreachableError
from megatrain.report import RunState, Status
from megatrain.steering import Knobs, Wish


class Steering:
    """Notes every wish; refuses with `refusal`, and answers only while `free`."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.refusal: Exception | None = None
        self.free = threading.Event()
        self.free.set()

    def __getattr__(self, name: str) -> Any:
        def ask(*arguments: Any, **options: Any) -> Wish:
            assert self.free.wait(10)
            if self.refusal is not None:
                raise self.refusal
            self.asked.append((name, arguments, options))
            return Wish(name)

        return ask


class Desk:
    """Controls, and what they act on."""

    def __init__(self) -> None:
        self.steering, self.view, self.answers = Steering(), View(), Answers()
        self.errands: list[str] = []
        self.newest = 9
        self.controls = Controls(
            lambda: self.steering,
            self.view,
            self.answers,
            newest=lambda: self.newest,
            export=lambda: self.errands.append("export"),
            save_page=lambda: self.errands.append("page"),
        )

    def asked(self) -> list[tuple[str, tuple[Any, ...], dict[str, Any]]]:
        """All wishes so far, once they have been carried."""
        self.controls._carrier.submit(lambda: None).result(10)
        return self.steering.asked

    def click(self, name: str) -> None:
        button = self.controls.buttons[name]
        button._handle_button_msg(button, {"event": "click"}, [])  # as the browser's message does

    def status(self, depth: int = 1, grad_buffers: int = 2, resident: int = 0, rows: int | None = 2) -> Status:
        return Status(RunState.RUNNING, knobs=Knobs(depth, grad_buffers, resident), micro_batch_size=rows)


@pytest.fixture
def desk() -> Iterator[Desk]:
    desk = Desk()
    yield desk
    desk.steering.free.set()
    desk.controls.close()


@pytest.mark.parametrize(
    ("button", "wish"),
    [
        ("pause", ("pause", (), {})),
        ("resume", ("resume", (), {})),
        ("layer", ("step_layer", (), {})),
        ("step", ("finish_step", (), {})),
        ("to", ("run_to_layer", (0, None), {})),
        ("stop", ("stop", (), {})),
        ("checkpoint", ("checkpoint", (), {})),
        ("save", ("stop", (), {"save": True})),
        ("rows", ("set_micro_batch_size", (1,), {})),
    ],
)
def test_a_button_asks_for_its_wish(desk: Desk, button: str, wish: object) -> None:
    desk.click(button)
    assert desk.asked() == [wish]
    assert "…" in desk.answers.html()


@pytest.mark.parametrize(
    ("widget", "value", "wish"),
    [
        ("prefetch_depth", 3, "set_prefetch_depth"),
        ("grad_buffers", 4, "set_grad_buffers"),
        ("resident_layers", 5, "set_resident_layers"),
    ],
)
def test_a_knob_that_is_turned_asks_once(desk: Desk, widget: str, value: int, wish: str) -> None:
    getattr(desk.controls, widget).set_state({"value": value})
    assert desk.asked() == [(wish, (value,), {})]


def test_where_to_run_to(desk: Desk) -> None:
    desk.controls.layer.set_state({"value": 7})
    desk.controls.phase.set_state({"index": 2})
    desk.click("to")
    assert desk.asked() == [("run_to_layer", (7, "backward"), {})]


def test_every_button_is_tried_here(desk: Desk) -> None:
    looks = {"earlier", "later", "live", "export", "page"}
    assert set(desk.controls.buttons) == looks | {
        "pause",
        "resume",
        "layer",
        "step",
        "to",
        "checkpoint",
        "stop",
        "save",
        "rows",
    }


@pytest.mark.parametrize("error", [ValueError("depth 7: <does not fit>"), RunUnreachableError("nobody answers")])
def test_a_refusal_is_shown_and_the_knob_goes_back(desk: Desk, error: Exception) -> None:
    desk.controls.sync(desk.status(depth=2))
    desk.steering.refusal = error
    desk.controls.prefetch_depth.set_state({"value": 7})
    desk.asked()
    assert 'class="wrong"' in desk.answers.html()
    assert "&lt;does not fit&gt;" in desk.answers.html() or "nobody answers" in desk.answers.html()
    desk.controls.sync(desk.status(depth=2))
    assert desk.controls.prefetch_depth.value == 2
    assert desk.asked() == []


def test_handlers_do_not_wait_for_the_run_and_wishes_keep_their_order(desk: Desk) -> None:
    desk.steering.free.clear()
    desk.click("pause")
    desk.controls.prefetch_depth.set_state({"value": 2})
    desk.click("resume")
    assert desk.steering.asked == []
    desk.steering.free.set()
    assert [name for name, *_ in desk.asked()] == ["pause", "set_prefetch_depth", "resume"]


def test_sync_shows_what_was_turned_elsewhere_and_asks_for_nothing(desk: Desk) -> None:
    desk.controls.sync(desk.status(3, 4, 5, rows=6))
    controls = desk.controls
    shown = (controls.prefetch_depth, controls.grad_buffers, controls.resident_layers, controls.micro_batch)
    assert [widget.value for widget in shown] == [3, 4, 5, 6]
    assert desk.asked() == []


def test_sync_leaves_alone_what_the_user_turns_meanwhile(desk: Desk) -> None:
    desk.controls.sync(desk.status(1))
    desk.controls.prefetch_depth.set_state({"value": 3})
    desk.controls.micro_batch.set_state({"value": 4})  # typed, not yet set
    desk.controls.sync(desk.status(1))  # the run has not answered yet
    assert (desk.controls.prefetch_depth.value, desk.controls.micro_batch.value) == (3, 4)


def test_a_value_beyond_a_slider_is_shown_as_its_end(desk: Desk) -> None:
    desk.controls.sync(desk.status(depth=30))
    assert desk.controls.prefetch_depth.value == desk.controls.prefetch_depth.max
    assert desk.asked() == []


def test_a_turn_in_another_browser_is_not_swallowed_by_a_sync(desk: Desk) -> None:
    """Two browsers are heard on two threads: what one turns while the other's message syncs is a wish."""
    slow, inside = threading.Event(), threading.Event()

    def hold_up(_: object) -> None:
        inside.set()
        assert slow.wait(10)

    desk.controls.grad_buffers.observe(hold_up, "value")
    syncing = threading.Thread(target=desk.controls.sync, args=(desk.status(grad_buffers=5),))
    syncing.start()
    assert inside.wait(10)
    turning = threading.Thread(target=desk.controls.resident_layers.set_state, args=({"value": 9},))
    turning.start()
    turning.join(0.2)  # it waits for the sync; without a lock it would be over, and taken for an echo
    slow.set()
    syncing.join()
    turning.join()
    assert desk.asked() == [("set_resident_layers", (9,), {})]


def test_the_view_follows_its_controls(desk: Desk) -> None:
    controls = desk.controls
    controls.follow.set_state({"value": 4})
    controls.steps.set_state({"value": 3})
    controls.sort_by.set_state({"index": 2})
    controls.descending.set_state({"value": True})
    assert desk.view == View(None, 3, 4, "backward_ms", True)
    controls.follow.set_state({"value": -1})
    assert desk.view.follow is None


def test_layers_can_be_sorted_by_all_that_the_table_shows(desk: Desk) -> None:
    fields = []
    for index in range(len(desk.controls.sort_by.options)):
        desk.controls.sort_by.set_state({"index": index})
        fields.append(desk.view.sort_by)
    assert set(fields) == {field.name for field in dataclasses.fields(LayerRow)}


def test_a_clicked_layer_is_followed_until_it_is_clicked_again(desk: Desk) -> None:
    for layer, follow in ((3, 3), (5, 5), (5, None), (2, 2), (None, None)):
        desk.controls.follow_layer(layer)
        assert desk.view.follow == follow
    desk.controls.follow_layer(4)
    desk.controls.steps.set_state({"value": 1})
    assert desk.view.follow == 4  # not lost when something else is turned


def test_earlier_later_and_live(desk: Desk) -> None:
    desk.click("earlier")
    assert desk.view.last_step == 7
    desk.click("later")
    assert desk.view.live
    desk.click("earlier")
    desk.click("live")
    assert desk.view.live


def test_files_are_left_to_whoever_knows_the_records(desk: Desk) -> None:
    desk.click("export")
    desk.click("page")
    assert desk.errands == ["export", "page"]


def test_the_browser_decides_which_thread_hears_an_input(desk: Desk) -> None:
    """Not ipykernel, which would take the one that runs cells."""
    inputs = desk.controls.inputs
    assert len(inputs) == 24
    for widget in inputs:
        assert widget.comm._reply_subshell_for({"method": "update"}, "subshell") == "subshell"
