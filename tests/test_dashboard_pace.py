from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from dashboard.pace import (
    GONE_AFTER_S,
    PERIOD_S,
    PROBE_PERIOD_S,
    SHORT_STEP_PERIOD_S,
    STARVING_PERIOD_S,
    Due,
    Pace,
)

TICK_S = 1 / 32  # exact in binary, so that sums of ticks are too


class World:
    """A pace with a clock that a test moves; every tick asks, and sends what is due."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.pace = Pace(lambda: self.now_s)
        self.sent: list[tuple[float, Due, int]] = []

    def tick(self, step_s: float | None = None) -> Due:
        due = self.pace.due(step_s)
        if due is not Due.NOTHING:
            self.sent.append((self.now_s, due, self.pace.sent()))
        self.now_s += TICK_S
        return due

    def run(self, seconds: float, *, step_s: float | None = None, answers: bool = False) -> list[Due]:
        """What was sent in so many seconds, to a browser that answers at once or never."""
        before = len(self.sent)
        for _ in range(round(seconds / TICK_S)):
            self.tick(step_s)
            if answers and self.sent:
                self.pace.heard(self.sent[-1][2])
        return [due for _, due, _ in self.sent[before:]]


def shown() -> World:
    world = World()
    world.pace.look(True)
    assert world.tick() is Due.FRAME
    return world


def test_the_first_frame_goes_when_a_view_is_seen_and_at_once() -> None:
    world = World()
    world.pace.appear()
    assert world.tick() is Due.NOTHING
    world.pace.look(True)
    assert world.tick() is Due.FRAME
    assert world.tick() is Due.NOTHING


def test_four_frames_a_second_and_two_of_short_steps() -> None:
    world = shown()
    world.pace.heard(1)
    assert world.run(10, answers=True) == [Due.FRAME] * round(10 / PERIOD_S)
    assert world.run(10, step_s=0.05, answers=True) == [Due.FRAME] * round(10 / PERIOD_S)
    assert world.run(10, step_s=0.04, answers=True) == [Due.FRAME] * round(10 / SHORT_STEP_PERIOD_S)


def test_one_frame_in_flight() -> None:
    world = shown()
    assert world.run(STARVING_PERIOD_S - TICK_S) == []
    world.pace.heard(1)
    assert world.tick() is Due.FRAME


def test_a_busy_browser_gets_few_frames_and_one_that_is_gone_none() -> None:
    world = shown()
    assert world.run(GONE_AFTER_S - TICK_S) == [Due.FRAME] * (round(GONE_AFTER_S / STARVING_PERIOD_S) - 1)
    assert set(world.run(60)) == {Due.PROBE}
    world.pace.heard(world.sent[-1][2])
    assert world.tick() is Due.FRAME


def test_an_answer_to_an_older_frame_is_not_one_to_the_newest() -> None:
    world = shown()
    world.run(STARVING_PERIOD_S)
    world.pace.heard(1)
    assert world.run(PERIOD_S) == []
    world.pace.heard(2)
    world.pace.heard(1)
    assert world.tick() is Due.FRAME


def test_a_hidden_view_gets_no_frames_and_a_probe_now_and_then() -> None:
    world = shown()
    world.pace.heard(1)
    world.pace.look(False)
    assert world.run(60) == [Due.PROBE] * round(60 / PROBE_PERIOD_S)
    world.pace.look(True)
    assert world.tick() is Due.FRAME


def test_nobody_has_opened_the_page_yet() -> None:
    assert set(World().run(100)) == {Due.PROBE}


def test_a_view_that_appears_gets_a_frame_whatever_is_in_flight() -> None:
    world = shown()
    world.pace.appear()
    assert world.tick() is Due.FRAME
    world.run(2 * GONE_AFTER_S)
    world.pace.appear()
    assert world.tick() is Due.FRAME
    assert world.run(STARVING_PERIOD_S) == [Due.FRAME]


def test_who_comes_back_after_long_is_not_taken_for_gone() -> None:
    world = shown()
    world.pace.look(False)
    world.run(2 * GONE_AFTER_S)
    world.pace.look(True)
    assert world.run(STARVING_PERIOD_S + TICK_S) == [Due.FRAME, Due.FRAME]


EVENTS = st.lists(
    st.tuples(st.sampled_from(["look", "leave", "appear", "answer", "wait"]), st.integers(0, 200)), max_size=40
)


@given(EVENTS, st.sampled_from([None, 0.01, 1.0]))
def test_never_a_frame_to_nobody_and_never_faster_than_the_rates(
    events: list[tuple[str, int]], step_s: float | None
) -> None:
    world = World()
    visible, called_s = False, []
    for event, ticks in events:
        if event in ("look", "leave"):
            called_s += [world.now_s] if event == "look" and not visible else []
            visible = event == "look"
            world.pace.look(visible)
        elif event == "appear":
            called_s.append(world.now_s)
            world.pace.appear()
        elif event == "answer" and world.sent:
            world.pace.heard(world.sent[-1][2])
        for _ in range(ticks):
            assert world.tick(step_s) is not Due.FRAME or visible
    frames_s = [now_s for now_s, due, _ in world.sent if due is Due.FRAME]
    lowest_s = SHORT_STEP_PERIOD_S if step_s == 0.01 else PERIOD_S
    hurried = sum(later - earlier < lowest_s for earlier, later in pairwise(frames_s))
    assert hurried <= len(called_s)
    assert [number for _, _, number in world.sent] == list(range(1, len(world.sent) + 1))


@given(EVENTS)
def test_whatever_has_happened_a_browser_that_answers_gets_its_frames(events: list[tuple[str, int]]) -> None:
    world = World()
    for event, ticks in events:
        if event in ("look", "leave"):
            world.pace.look(event == "look")
        elif event == "appear":
            world.pace.appear()
        world.run(ticks * TICK_S)
    world.pace.look(True)
    world.run(PROBE_PERIOD_S, answers=True)
    assert world.run(10, answers=True) == [Due.FRAME] * round(10 / PERIOD_S)
