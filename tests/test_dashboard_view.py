from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dashboard.view import View

STEPS = st.integers(1, 3)
NEWEST = st.integers(0, 50)


def test_live_at_first() -> None:
    assert View().live
    assert not View(last_step=3).live


def test_the_state_differs_when_something_else_is_to_be_seen() -> None:
    views = [View(), View(last_step=0), View(steps=3), View(follow=0), View(sort_by="bytes"), View(descending=True)]
    assert len({view.state for view in views}) == len(views)
    assert View().state == View().state


def test_every_choice_of_a_stretch_of_time_counts() -> None:
    view = View()
    for choose in (view.now, lambda: view.earlier(9), lambda: view.later(9), lambda: view.show(3)):
        before = view.state
        choose()
        assert view.state != before
    before = view.state
    view.show(3)  # as before: nothing was chosen
    assert view.state == before


@given(steps=STEPS, newest=NEWEST, moves=st.lists(st.booleans(), max_size=30))
def test_wherever_one_goes_there_are_steps_to_see(steps: int, newest: int, moves: list[bool]) -> None:
    view = View(steps=steps)
    for back in moves:
        (view.earlier if back else view.later)(newest)
        assert view.last_step is None or steps - 1 <= view.last_step


@given(steps=STEPS, newest=st.integers(10, 50))
def test_later_undoes_earlier(steps: int, newest: int) -> None:
    view = View(steps=steps)
    view.earlier(newest)
    assert view.last_step == newest - steps
    view.earlier(newest)
    view.later(newest)
    assert view.last_step == newest - steps
    view.later(newest)
    assert view.live


def test_live_stays_live() -> None:
    view = View()
    view.later(9)
    assert view.live
