from __future__ import annotations

from typing import Any

import anywidget
import pytest

from dashboard.pulse import Pulse
from dashboard.subshells import hear_while_busy


class Viewer:
    """What pulse.js does, without a browser."""

    def __init__(self, pulse: Pulse, name: str) -> None:
        self.pulse, self.name, self.turn = pulse, name, 0

    def say(self, visible: bool, **more: Any) -> None:
        self.turn += 1
        self.pulse._heard(self.pulse, {"view": self.name, "turn": self.turn, "visible": visible} | more, [])


@pytest.fixture
def pulse() -> Pulse:
    return Pulse()


def test_at_first_nobody_looks(pulse: Pulse) -> None:
    assert (pulse.sent, pulse.seen, pulse.visible, pulse.hello) == (0, 0, False, "")


def test_what_a_view_says_is_observed(pulse: Pulse) -> None:
    changes: list[tuple[str, object]] = []
    pulse.observe(lambda change: changes.append((change.name, change.new)), ["seen", "visible", "hello"])
    viewer = Viewer(pulse, "a")
    viewer.say(False, hello=True)
    viewer.say(True)
    viewer.say(True, seen=3)
    viewer.say(True, hello=True)
    assert changes == [("hello", "a"), ("visible", True), ("seen", 3)]


def test_visible_while_any_view_is(pulse: Pulse) -> None:
    first, second = Viewer(pulse, "a"), Viewer(pulse, "b")
    first.say(True, hello=True)
    second.say(True, hello=True)
    assert pulse.hello == "b"
    first.say(False)
    assert pulse.visible
    second.say(False)
    assert not pulse.visible


def test_seen_never_goes_back(pulse: Pulse) -> None:
    first, second = Viewer(pulse, "a"), Viewer(pulse, "b")
    first.say(True, seen=5)
    second.say(True, seen=4)
    assert pulse.seen == 5


def test_what_a_running_cell_kept_waiting_is_old_news(pulse: Pulse) -> None:
    viewer = Viewer(pulse, "a")
    viewer.turn = 2
    viewer.say(True)
    viewer.turn = 0
    viewer.say(False, hello=True)
    assert pulse.visible
    assert pulse.hello == ""


def test_only_the_number_travels_to_the_browser_and_no_script_is_fetched(pulse: Pulse) -> None:
    assert {"sent"} == set(pulse.get_state()) & {"sent", "seen", "visible", "hello"}
    script = pulse.get_state()["_esm"]
    assert "requestAnimationFrame" in script
    assert "://" not in script


def test_ipykernel_does_not_send_what_the_browser_says_to_the_thread_that_runs_cells(pulse: Pulse) -> None:
    widget = anywidget.AnyWidget()
    hear_while_busy(widget)
    assert widget.comm._reply_subshell_for({"method": "update"}, "subshell") == "subshell"
    assert pulse.comm._reply_subshell_for({"method": "update"}, None) is None
