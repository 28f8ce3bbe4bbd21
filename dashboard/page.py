"""A run as one HTML file that opens anywhere, offline: the figure, and the last steps in plain words."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template

from dashboard import panels, post_training
from dashboard.columns import last_steps, make_frame
from dashboard.figures import build_figure, update_figure
from dashboard.history import History
from dashboard.words import advice, gigabytes_per_s, milliseconds, percent
from megatrain.report import RunInfo, Status
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


def write_page(
    path: str | Path,
    source: Recorder | Records | History,
    title: str,
    timeline_steps: int = 3,
    info: RunInfo | None = None,
    status: Status | None = None,
) -> None:
    """Write the page; whoever opens it sees the old one or the new one, never half of it.

    timeline_steps: steps at the end of the run whose spans are drawn; curves cover the whole run.
    info, status: of the run, for the limits of memory and links and for the host's arenas.
    """
    history = _history(source, info)
    planned_bytes = status.planned_bytes if status else 0
    window = last_steps(history, timeline_steps)
    frame = make_frame(history, window, info=info, planned_bytes=planned_bytes)
    figure = build_figure()
    update_figure(figure, frame)
    config = {"responsive": True, "displaylogo": False}
    page = _template().substitute(
        title=escape(title),
        advice=escape(_advice(history)),
        figure=figure.to_html(full_html=False, include_plotlyjs=True, config=config),
        table=_table(history.steps, history.metrics[-TABLE_STEPS:]),
        panels=_panels(history, info),
        footer=_footer(history),
    )
    write_atomically(path, page.encode())


def _panels(history: History, info: RunInfo | None) -> str:
    told = post_training.metric_table(history.metric_rows())
    said = post_training.folded(post_training.sample_list(history.samples))
    styles = panels.STYLE + post_training.STYLE
    return styles + told + said + panels.buffer_strip(history, info) + panels.layer_table(history.layer_rows())


def _history(source: Recorder | Records | History, info: RunInfo | None) -> History:
    if isinstance(source, History):
        return source
    records = source.snapshot() if isinstance(source, Recorder) else source
    return History(records, info.peak_flops_per_s if info else None)


def _advice(history: History) -> str:
    if not history.metrics:
        return "No step has ended yet."
    metrics = history.metrics[-1]
    record = history.record(metrics.step)
    assert record is not None
    return advice(metrics, record)


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
        gigabytes_per_s(metrics.h2d_bytes_per_s),
        percent(metrics.d2h_hidden),
        gigabytes_per_s(metrics.d2h_bytes_per_s),
        percent(metrics.update_hidden),
        panels.waits_in_words(metrics),
    )
    return "".join(f"<td>{escape(cell)}</td>" for cell in cells)


def _footer(history: History) -> str:
    dropped = f"; {history.lost:,} older records were dropped" if history.lost else ""
    return f"{history.span_count:,} spans of {len(history.steps):,} steps{dropped}. Written by MegaTrain."
