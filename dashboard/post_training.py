"""Panels of what a run tells besides its loss: metrics of its recipe, held-out data, and what the model answers.

All text is escaped here: answers are the work of a model, and prompts of whoever wrote them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from html import escape

from dashboard.recipe_metrics import MetricRow
from megatrain.trace import EvaluationRecord, SampleRecord

ANSWERS = "What the model answers"
MOST_SAMPLES = 16
MOST_CHARACTERS = 2000  # of a prompt, and of an answer
WIDE, HIGH = 120, 20  # px of a curve in a table
HEADS = ("metric", "newest", "mean of the last 20 steps", "held out", "by step")

STYLE = (
    "<style>"
    ".mt.samples ul{max-height:420px;overflow:auto}.mt.samples li p{white-space:pre-wrap;overflow-wrap:anywhere}"
    ".mt .asked{opacity:.75}.mt p.answered{margin:0 0 10px 16px}"
    ".mt polyline{fill:none;stroke:currentColor;stroke-width:1.2}.mt summary{cursor:pointer;font-weight:600}"
    ".mt-fold:has(details:not([open]))+.mt-folded{display:none}"
    "</style>"
)


def perplexity(evaluation: EvaluationRecord) -> float:
    """Return e^loss; NaN where a recipe has metrics and a loss of its own, which is none of tokens."""
    if evaluation.metrics or not evaluation.loss < 700:  # e to 710 is no float
        return math.nan
    return math.exp(evaluation.loss)


def held_out_words(loss: float, perplexity: float) -> str:
    """A loss and, where there is one, its perplexity."""
    return f"{loss:.4f}" + ("" if math.isnan(perplexity) else f", perplexity {perplexity:,.4g}")


def steps(done: int) -> str:
    return f"{done:,} step{'' if done == 1 else 's'}"


# ---- metrics ----


@lru_cache(4)  # it changes once a step
def metric_table(rows: tuple[MetricRow, ...]) -> str:
    """Return a table of what the recipe tells; empty where it tells nothing."""
    if not rows:
        return ""
    head = "".join(f'<th scope="col">{name}</th>' for name in HEADS)
    body = "".join(map(_metric_row, rows))
    caption = "<caption>What the recipe measures</caption>"
    table = f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f'<section class="mt" aria-label="Metrics of the recipe">{table}</section>'


def _metric_row(row: MetricRow) -> str:
    cells = "".join(f"<td>{_number(value)}</td>" for value in (row.newest, row.recent, row.held_out))
    return f'<tr><th scope="row">{escape(row.name)}</th>{cells}<td>{_curve(row.curve)}</td></tr>'


def _number(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:,.4g}"


def _curve(values: Sequence[float]) -> str:
    """A small curve from its least to its most; empty for fewer than two values."""
    known = [(place, value) for place, value in enumerate(values) if math.isfinite(value)]
    if len(known) < 2:
        return ""
    least, most = min(value for _, value in known), max(value for _, value in known)
    across, up = (WIDE - 2) / (len(values) - 1), (HIGH - 2) / ((most - least) or 1)
    points = " ".join(f"{1 + place * across:.0f},{HIGH - 1 - (value - least) * up:.1f}" for place, value in known)
    words = f"from {_number(known[0][1])} to {_number(known[-1][1])}; least {_number(least)}, most {_number(most)}"
    return (
        f'<svg width="{WIDE}" height="{HIGH}" role="img" aria-label="{words}"><title>{words}</title>'
        f'<polyline points="{points}"/></svg>'
    )


# ---- answers ----


def sample_list(samples: Sequence[SampleRecord]) -> str:
    """Return prompts and answers of one look at them; empty where there are none."""
    return _sample_list(tuple(samples))


@lru_cache(4)  # it changes with every look
def _sample_list(samples: tuple[SampleRecord, ...]) -> str:
    if not samples:
        return ""
    shown = samples[:MOST_SAMPLES]
    items = "".join(map(_sample, shown))
    more = f"<p><small>and {len(samples) - len(shown):,} more</small></p>" if len(samples) > len(shown) else ""
    title = f"After {steps(samples[0].step)}"
    body = f'<p>{title}</p><ul tabindex="0" aria-label="prompts and answers">{items}</ul>{more}'
    return f'<section class="mt samples" aria-label="{ANSWERS}">{body}</section>'


def _sample(sample: SampleRecord) -> str:
    asked, answered = _said(sample.prompt), _said(sample.text)
    return f'<li><p class="asked" dir="auto">{asked}</p><p class="answered" dir="auto">{answered}</p></li>'


def _said(text: str) -> str:
    rest = len(text) - MOST_CHARACTERS
    more = f" <small>… and {rest:,} more characters</small>" if rest > 0 else ""
    return (escape(text[:MOST_CHARACTERS]) or "<small>(nothing)</small>") + more


def folded(html: str) -> str:
    """Return answers that a reader can fold away, on a page that does not change."""
    return f'<details class="mt" open><summary>{ANSWERS}</summary>{html}</details>' if html else ""
