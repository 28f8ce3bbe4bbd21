import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from looking_run import looking_run
from test_dashboard_panels import text

from dashboard import post_training
from dashboard.history import History
from dashboard.recipe_metrics import MetricRow
from megatrain.trace import EvaluationRecord, Records, SampleRecord


def sample(step: int, prompt: str, answer: str) -> SampleRecord:
    return SampleRecord(float(step), step, prompt, answer)


def test_perplexity_is_of_a_loss_per_token_only() -> None:
    assert post_training.perplexity(EvaluationRecord(0, 0, 2.0, 9)) == pytest.approx(math.exp(2))
    assert math.isnan(post_training.perplexity(EvaluationRecord(0, 0, 2.0, 9, {"rewards/margins": 1.0})))
    assert math.isnan(post_training.perplexity(EvaluationRecord(0, 0, math.nan, 9)))
    assert math.isnan(post_training.perplexity(EvaluationRecord(0, 0, 1e4, 9)))
    assert post_training.held_out_words(2.0, math.nan) == "2.0000"
    assert post_training.held_out_words(2.0, 7.389) == "2.0000, perplexity 7.389"


def test_metrics_are_a_table_with_small_curves() -> None:
    row = MetricRow("rewards/<margins>", 0.5, 0.25, math.nan, (0.0, math.nan, 1.0, 0.5))
    html = post_training.metric_table((row,))
    assert "rewards/<margins> 0.5 0.25 – from 0 to 0.5; least 0, most 1" in text(html).replace("&lt;", "<").replace(
        "&gt;", ">"
    )
    assert re.findall(r'points="([^"]*)"', html) == ["1,19.0 80,1.0 119,10.0"]
    assert "<margins>" not in html


def test_a_curve_of_one_value_or_of_equal_ones() -> None:
    one = MetricRow("a", 1.0, 1.0, math.nan, (1.0,))
    assert "<svg" not in post_training.metric_table((one,))
    level = MetricRow("a", 1.0, 1.0, math.nan, (1.0, 1.0))
    assert 'points="1,19.0 119,19.0"' in post_training.metric_table((level,))


def test_what_there_is_not_is_not_shown() -> None:
    assert post_training.metric_table(()) == post_training.sample_list([]) == post_training.folded("") == ""


def test_only_the_newest_answers_are_kept_and_none_is_markup() -> None:
    history = History(looking_run())
    html = post_training.sample_list(history.samples)
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in html
    assert "<script" not in html
    assert "After 2 steps" in text(html)
    assert "the cat" not in html
    history.add(Records(samples=[sample(1, "late", "of an earlier look")]))
    assert post_training.sample_list(history.samples) == html


@given(st.text(), st.text())
def test_any_text_is_text(prompt: str, answer: str) -> None:
    html = post_training.sample_list([sample(1, prompt, answer)])
    assert re.findall(r"<(?!/?(?:section|p|ul|li|small)\b)", html) == []
    assert html.count("<li>") == html.count("</li>") == 1


def test_long_answers_and_many_prompts_are_bounded() -> None:
    html = post_training.sample_list([sample(1, "p", "x" * 1_000_000) for _ in range(100)])
    assert len(html) < post_training.MOST_SAMPLES * (post_training.MOST_CHARACTERS + 300)
    assert "… and 998,000 more characters" in html
    assert "and 84 more" in html
    assert "(nothing)" in post_training.sample_list([sample(1, "p", "")])


def test_the_style_hides_what_follows_a_closed_head() -> None:
    assert ".mt-fold:has(details:not([open]))+.mt-folded{display:none}" in post_training.STYLE
