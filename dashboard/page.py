"""A run as one HTML file that opens anywhere, offline: the figure, and the last steps in plain words."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template

from dashboard.columns import last_steps, make_frame, metrics_by_step
from dashboard.figures import build_figure, update_figure
from dashboard.words import advice, milliseconds, percent
from megatrain.trace import Recorder, Records, StepMetrics, StepRecord, write_atomically

TABLE_STEPS = 10
HEADINGS = (
    "Step",
    "Took",
    "Loss",
    "Tokens per second",
    "Model TFLOP/s",
    "Compute busy",
    "Weights in: hidden",
    "GB/s",
    "Gradients out: hidden",
    "GB/s",
    "Optimizer: hidden",
    "Compute waited for",
)


def write_page(path: str | Path, source: Recorder | Records, title: str, timeline_steps: int = 3) -> None:
    """Write the page; whoever opens it sees the old one or the new one, never half of it.

    timeline_steps: steps at the end of the run whose spans are drawn; curves cover the whole run.
    """
    records = source.snapshot() if isinstance(source, Recorder) else source
    metrics = metrics_by_step(records)
    figure = build_figure()
    update_figure(figure, make_frame(records, metrics, last_steps(records, timeline_steps)))
    config = {"responsive": True, "displaylogo": False}
    page = _template().substitute(
        title=escape(title),
        advice=escape(advice(metrics[-1])) if metrics else "No step has ended yet.",
        figure=figure.to_html(full_html=False, include_plotlyjs=True, config=config),
        table=_table(records.steps, metrics[-TABLE_STEPS:]),
        footer=_footer(records),
    )
    write_atomically(path, page.encode())


def _template() -> Template:
    return Template((files("dashboard") / "page.html").read_text("utf-8"))


def _table(steps: Sequence[StepRecord], metrics: Sequence[StepMetrics]) -> str:
    by_step = {step.step: step for step in steps}
    head = "".join(f"<th>{heading}</th>" for heading in HEADINGS)
    rows = "".join(f"<tr>{_row(by_step[step.step], step)}</tr>\n" for step in metrics)
    body = f"<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}</tbody>"
    return f'<div class="table"><table><caption>The last steps</caption>\n{body}</table></div>'


def _row(record: StepRecord, metrics: StepMetrics) -> str:
    cells = (
        str(record.step),
        milliseconds(metrics.duration_s),
        f"{record.loss:.4f}" + (f" (not applied: {record.skipped})" if record.skipped else ""),
        f"{metrics.tokens_per_s:,.0f}",
        f"{metrics.model_flops_per_s / 1e12:,.3g}",
        percent(metrics.compute_share),
        percent(metrics.h2d_hidden),
        _gigabytes(metrics.h2d_bytes_per_s),
        percent(metrics.d2h_hidden),
        _gigabytes(metrics.d2h_bytes_per_s),
        percent(metrics.update_hidden),
        _waits(metrics),
    )
    return "".join(f"<td>{escape(cell)}</td>" for cell in cells)


def _gigabytes(bytes_per_s: float | None) -> str:
    return "–" if bytes_per_s is None else f"{bytes_per_s / 1e9:,.3g}"


def _waits(metrics: StepMetrics) -> str:
    """Return what compute waited for, longest first, leaving out what took less than a hundredth of the step."""
    waits = sorted(metrics.waits_s.items(), key=lambda item: -item[1])
    named = [f"{cause} {milliseconds(s)}" for cause, s in waits if s >= 0.01 * metrics.duration_s]
    return ", ".join(named) or "nothing"


def _footer(records: Records) -> str:
    dropped = f"; {records.lost:,} older records were dropped" if records.lost else ""
    return f"{len(records.spans):,} spans of {len(records.steps):,} steps{dropped}. Written by MegaTrain."
