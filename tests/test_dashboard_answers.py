from __future__ import annotations

from dashboard.answers import KEPT, Answers
from megatrain.steering import Position, Wish


def test_what_became_of_a_wish() -> None:
    answers, wish = Answers(), Wish("pause")
    answers.wish(wish)
    assert "… pause: takes effect at the next layer" in answers.html()
    wish.fulfil(Position(3, "backward", 2))
    assert "✓ pause: since step 3, backward of layer 2" in answers.html()


def test_a_wish_that_is_void() -> None:
    answers, wish = Answers(), Wish("run to layer 4")
    answers.wish(wish)
    wish.overtake()
    assert "✗ run to layer 4: overtaken" in answers.html()


def test_what_went_wrong_stands_out_and_is_escaped() -> None:
    answers = Answers()
    answers.say("<b> does not fit", wrong=True)
    answers.say("written: a & b")
    assert '<b class="wrong">&lt;b&gt; does not fit</b>' in answers.html()
    assert "<li>written: a &amp; b</li>" in answers.html()


def test_newest_first_and_only_a_few() -> None:
    answers = Answers()
    for number in range(KEPT + 2):
        answers.say(f"said {number}")
    html = answers.html()
    assert [number for number in range(KEPT + 2) if f"said {number}" in html] == list(range(2, KEPT + 2))
    assert html.index(f"said {KEPT + 1}") < html.index("said 2")


def test_before_anything_was_asked_it_says_what_will_be_here() -> None:
    assert "What you ask for" in Answers().html()
    answers = Answers()
    answers.say("x")
    assert "What you ask for" not in answers.html()


def test_a_screen_reader_is_told_politely() -> None:
    assert 'role="status" aria-live="polite"' in Answers().html()
