"""Panels beside the figure: values to HTML that needs only a browser, light or dark, seen or read aloud.

Show STYLE once on the page. All text is escaped here. Colours of text and lines come from the page (currentColor);
boxes carry a word, so that colour is never all there is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from html import escape
from statistics import median

from dashboard.colours import GRADIENT_COLOURS, STATE_COLOURS
from dashboard.history import RECENT_STEPS, History
from dashboard.layers import QUANTITIES, LayerRow
from dashboard.post_training import held_out_words, perplexity
from dashboard.post_training import steps as done
from dashboard.words import (
    LANE_WORDS,
    WORTH_MENTIONING,
    duration,
    gigabytes_per_s,
    milliseconds,
    percent,
    size,
    state_word,
)
from megatrain.report import Inspection, RunInfo, RunState, Status, TensorStats
from megatrain.trace import EvaluationRecord, MemorySample, SlotChange, StepMetrics, StepRecord

STYLE = (
    "<style>"
    ".mt{font:13px/1.45 system-ui,sans-serif;color:inherit;margin:0 0 10px}"
    "section.mt{overflow-x:auto}"  # a wide table scrolls in itself
    ".mt h3{font-size:13px;font-weight:600;margin:0 0 4px}.mt ul,.mt ol{margin:0;padding:0;list-style:none}"
    ".mt p{margin:0 0 4px}.mt .side{display:flex;flex-wrap:wrap;gap:8px 32px}"
    ".mt .wrong{border-left:4px solid #D55E00;padding-left:6px}"
    ".mt .boxes{display:flex;flex-wrap:wrap;gap:4px;margin-bottom:8px}"
    ".mt .box{border:1px solid rgba(128,128,128,.5);border-left:6px solid var(--c);border-radius:3px;padding:2px 8px;"
    "min-width:84px}.mt .box b{display:block;font-size:15px}.mt small{opacity:.75}"
    ".mt .cells{display:flex;flex-wrap:wrap;gap:2px}.mt .cells li{width:22px;height:18px;font-size:10px;"
    "line-height:18px;text-align:center;border-radius:2px;background:var(--c);color:var(--i,inherit)}"
    ".mt .key i{display:inline-block;width:10px;height:10px;border-radius:2px;background:var(--c);margin:0 4px 0 10px}"
    ".mt .facts{display:flex;flex-wrap:wrap;gap:4px 22px}.mt .facts span,.mt .facts b{display:block}"
    ".mt .facts span{opacity:.75;font-size:12px;white-space:nowrap}"
    ".mt .facts b{font-size:15px;font-weight:400;font-variant-numeric:tabular-nums}"
    ".mt table{border-collapse:collapse;font-variant-numeric:tabular-nums}"
    ".mt th,.mt td{padding:2px 10px;text-align:right;border-bottom:1px solid rgba(128,128,128,.3);white-space:nowrap}"
    ".mt caption{text-align:left;font-weight:600;padding-bottom:4px}.mt .error,.mt pre{white-space:pre-wrap}"
    ".mt pre{font:12px/1.4 monospace;margin:0;color:inherit;background:none;max-height:240px;overflow:auto}"
    ".mt.answers{height:60px;overflow-y:auto;margin:0}"  # a new answer moves nothing below it
    ".mt .next{height:226px;overflow-y:auto}"  # however many operations, it is as high
    ".mt-controls .widget-readout{min-width:3ch;width:3ch;flex:0 0 auto}"  # what is left is for the slider itself
    # Plotly paints text in one colour for light and dark: let it be the page's.
    ".js-plotly-plot .infolayer text,.js-plotly-plot [class$=tick] text,.js-plotly-plot .textpoint text"
    "{fill:currentColor!important}"
    ".mt-pulse{margin-right:4px}"
    "</style>"
)
PREPARED = "Its model is made or loaded, and checked; until the first step begins nobody hears a wish."
ON_COLOUR = {"arriving": "#000", "waiting for AdamW": "#000", "being applied": "#fff"}  # readable on each box


def sentence(text: str) -> str:
    """Return a sentence as a paragraph."""
    return f'<p class="mt" role="status">{escape(text)}</p>'


# ---- headline ----


def headline(
    status: Status,
    info: RunInfo | None,
    steps: Sequence[StepRecord],
    memory: MemorySample | None = None,
    evaluation: EvaluationRecord | None = None,
    *,
    beside: str = "",
    between_s: float = 0.0,
) -> str:
    """Return the run in one line: state, step, position, loss, tokens per second, time left, memory.

    evaluation: the newest. beside: what the engine is at where that is no step. between_s: see `time_left`.
    """
    facts = {"state": status.state.value, "steps done": _steps_done(status, info)}
    if status.position is not None:
        place = f"{status.position.phase} of layer {status.position.layer}"
        facts["at"] = f"{beside}, {place}" if beside else place
    if steps:
        newest = steps[-1]
        facts["loss"] = f"{newest.loss:.4f}" + (f" (not applied: {newest.skipped})" if newest.skipped else "")
    if evaluation is not None and not math.isnan(evaluation.loss):
        found = held_out_words(evaluation.loss, perplexity(evaluation))
        facts["held-out loss"] = f"{found} (after {done(evaluation.step)})"
    if steps:
        facts["tokens per second"] = _tokens_per_s(steps[-1])
        facts["time left"] = time_left(status, info, steps, between_s)
    if memory is not None:
        facts |= _memory_facts(memory)
    error = f'<p class="error" role="alert">{escape(status.error)}</p>' if status.error else ""
    return _panel("The run now", _facts(facts) + error)


def _steps_done(status: Status, info: RunInfo | None) -> str:
    """How many, as the numbers of steps count from 0 wherever else they are shown."""
    return f"{status.steps_done:,}" + (f" of {info.steps:,}" if info is not None else "")


def _tokens_per_s(step: StepRecord) -> str:
    seconds = step.end_s - step.start_s
    return f"{step.sequence_tokens / seconds:,.0f}" if seconds > 0 else "–"


def time_left(status: Status, info: RunInfo | None, steps: Sequence[StepRecord], between_s: float = 0.0) -> str:
    """Return how long the remaining steps will take, if they are like the last ones; "–" where nobody can say.

    between_s: what lies between two steps, on average.
    """
    if info is None or status.state.over or not steps:
        return "–"
    seconds = median(step.end_s - step.start_s for step in steps[-RECENT_STEPS:])
    left = duration((seconds + between_s) * max(0, info.steps - status.steps_done))
    return f"{left}, once it runs on" if status.state is RunState.PAUSED else left


def _memory_facts(memory: MemorySample) -> dict[str, str]:
    facts = {"device arena": size(memory.arena_bytes), "host process": size(memory.host_rss_bytes)}
    if memory.device_used_bytes is not None and memory.device_total_bytes is not None:
        facts["device"] = f"{size(memory.device_used_bytes)} of {size(memory.device_total_bytes)}"
    return facts


def last_words(status: Status, log: str) -> str:
    """Return what a run printed, while nothing else is to be seen of it, and when it ended unforeseen."""
    if status.state is RunState.NEW:
        return _panel("The run is being prepared", f"<p>{PREPARED}</p>{_printed(log)}", title=True)
    if status.state in (RunState.FAILED, RunState.LOST) and log:
        return _panel("What the run printed last", _printed(log), title=True)
    return ""


def _printed(log: str) -> str:
    return f"<pre>{escape(log)}</pre>" if log else ""


# ---- buffers and host gradients ----


def buffer_strip(history: History, info: RunInfo | None) -> str:
    """Return the present state of every device buffer and of every layer's gradient on the host, and host arenas."""
    buffers = history.buffers()
    layers = info.layers if info is not None else len(history.layer_rows())
    device = _boxes(buffers) if buffers else "<p>No device buffers yet.</p>"
    host = _gradients(history.host_gradients(layers)) if layers else ""
    return _panel("Buffers now", f"<h3>On the device</h3>{device}{host}{_arenas(info)}")


def _boxes(buffers: Iterable[SlotChange]) -> str:
    return f'<ul class="boxes" aria-label="device buffers">{"".join(map(_box, buffers))}</ul>'


def _box(change: SlotChange) -> str:
    holder = "–" if change.layer is None else f"layer {change.layer}"
    what = f"{change.kind} {change.slot}"
    return (
        f'<li class="box" style="--c:{STATE_COLOURS[change.state]}"><small>{what}</small>'
        f"<b>{holder}</b><small>{state_word(change.state)}</small></li>"
    )


def _gradients(states: Sequence[str]) -> str:
    cells = "".join(_cell(layer, state) for layer, state in enumerate(states))
    key = "".join(f'<i style="--c:{colour}"></i>{state}' for state, colour in GRADIENT_COLOURS.items())
    return (
        f'<h3>Gradients on the host, by layer</h3><ul class="cells" aria-label="gradients on the host">{cells}</ul>'
        f'<p class="key" aria-hidden="true"><small>{key}</small></p>'
    )


def _cell(layer: int, state: str) -> str:
    ink = f";--i:{ON_COLOUR[state]}" if state in ON_COLOUR else ""
    words = f"layer {layer}: {state}"
    return f'<li style="--c:{GRADIENT_COLOURS[state]}{ink}" title="{words}" aria-label="{words}">{layer}</li>'


def _arenas(info: RunInfo | None) -> str:
    if info is None or not info.host_arenas:
        return ""
    return f"<h3>Host memory by role</h3>{_facts({role: size(n) for role, n in info.host_arenas.items() if n})}"


# ---- the last step ----


def step_summary(metrics: StepMetrics, info: RunInfo | None) -> str:
    """Return what hid under compute in a step, what compute waited for, and how fast the links were."""
    limits = (info.h2d_bytes_per_s, info.d2h_bytes_per_s) if info is not None else (None, None)
    facts = {
        "compute busy": percent(metrics.compute_share),
        "weights in, hidden": percent(metrics.h2d_hidden),
        "gradients out, hidden": percent(metrics.d2h_hidden),
        "optimizer, hidden": percent(metrics.update_hidden),
        "GB/s in": _against(metrics.h2d_bytes_per_s, limits[0]),
        "GB/s out": _against(metrics.d2h_bytes_per_s, limits[1]),
        "compute waited": waits_in_words(metrics),
    }
    if metrics.mfu is not None:
        facts["MFU"] = percent(metrics.mfu)
    return _panel(f"Step {metrics.step} took {milliseconds(metrics.duration_s)}", _facts(facts), title=True)


def waits_in_words(metrics: StepMetrics, least: float = WORTH_MENTIONING / 2) -> str:
    """Return what compute waited for, longest first, leaving out what took less than a share `least` of the step."""
    waits = sorted(metrics.waits_s.items(), key=lambda item: -item[1])
    named = [f"{cause} {milliseconds(s)}" for cause, s in waits if s >= least * metrics.duration_s]
    return ", ".join(named) or "nothing"


def _against(bytes_per_s: float | None, limit: float | None) -> str:
    if bytes_per_s is None or limit is None:
        return gigabytes_per_s(bytes_per_s)
    return f"{gigabytes_per_s(bytes_per_s)} of {gigabytes_per_s(limit)} ({percent(bytes_per_s / limit)})"


# ---- held at a layer ----


def held_panel(status: Status, buffers: Iterable[SlotChange] = ()) -> str:
    """Return what can be seen while a run is held: lanes, buffers, what a layer got and gave, what comes next."""
    if status.held is None:
        return ""
    place = f"Held before {status.position}" if status.position is not None else "Held"
    lanes = "".join(f"<li>{LANE_WORDS.get(lane, lane)}: {_words(at)}</li>" for lane, at in status.lanes.items())
    held = list(buffers)
    parts = [f"<h3>Lanes</h3><ul>{lanes}</ul>", _tensors(status.held), _next(status.held.next)]
    beside = "".join(f"<div>{part}</div>" for part in parts if part)
    return _panel(place, (_boxes(held) if held else "") + f'<div class="side">{beside}</div>', title=True)


def _words(at: Sequence[str]) -> str:
    return escape(at[0]) + (f" <small>then {escape(', '.join(at[1:]))}</small>" if at[1:] else "") if at else "idle"


def _tensors(held: Inspection) -> str:
    if held.layer is None:
        return ""
    names = ("its input", "its output") if held.phase == "forward" else ("gradient of its output", "of its input")
    rows = "".join(_tensor_row(name, stats) for name, stats in zip(names, (held.came, held.went), strict=True))
    head = "".join(f'<th scope="col">{name}</th>' for name in ("", "mean", "RMS", "largest", "NaN or infinite"))
    caption = f"<caption>Layer {held.layer}, which ran last ({escape(held.phase)})</caption>"
    return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def _tensor_row(name: str, stats: TensorStats | None) -> str:
    cells = ["–"] * 4 if stats is None else [f"{x:.4g}" for x in (stats.mean, stats.rms, stats.largest)]
    cells += [] if stats is None else [f"{stats.not_finite:,}"]
    return f'<tr><th scope="row">{name}</th>{"".join(f"<td>{cell}</td>" for cell in cells)}</tr>'


def _next(operations: Sequence[str]) -> str:
    items = "".join(f"<li>{escape(operation)}</li>" for operation in operations)
    return f'<h3>What comes next</h3><ol class="next">{items}</ol>' if items else ""


# ---- layers ----


def layer_table(rows: Sequence[LayerRow], sort_by: str = "layer", descending: bool = False) -> str:
    """Return a table of the layers in a step. sort_by: a field of `LayerRow`; what is not known comes last."""
    return _layer_table(tuple(rows), sort_by, descending)


@lru_cache(4)  # it changes once a step
def _layer_table(rows: tuple[LayerRow, ...], sort_by: str, descending: bool) -> str:
    if not rows:
        return _panel("Layers", "<p>No step has ended yet.</p>")
    known = [row for row in rows if not math.isnan(getattr(row, sort_by))]
    unknown = [row for row in rows if math.isnan(getattr(row, sort_by))]
    ordered = sorted(known, key=lambda row: getattr(row, sort_by), reverse=descending) + unknown
    order = "descending" if descending else "ascending"
    sort = {sort_by: f' aria-sort="{order}"'}
    names = {"layer": "layer"} | QUANTITIES
    head = "".join(f'<th scope="col"{sort.get(field, "")}>{name}</th>' for field, name in names.items())
    body = "".join(map(_layer_row, ordered))
    caption = "<caption>Layers in the last step</caption>"
    return _panel("Layers", f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>")


def _layer_row(row: LayerRow) -> str:
    cells = "".join(f"<td>{_number(getattr(row, field))}</td>" for field in QUANTITIES)
    return f'<tr><th scope="row">{row.layer}</th>{cells}</tr>'


def _number(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:,.4g}"


# ---- parts ----


def _panel(label: str, body: str, *, title: bool = False) -> str:
    heading = f"<h3>{escape(label)}</h3>" if title else ""
    return f'<section class="mt" aria-label="{escape(label)}">{heading}{body}</section>'


def _facts(facts: dict[str, str]) -> str:
    items = "".join(f"<li><span>{escape(name)}</span><b>{escape(value)}</b></li>" for name, value in facts.items())
    return f'<ul class="facts">{items}</ul>'
