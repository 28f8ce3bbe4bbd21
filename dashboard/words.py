"""Numbers and records in plain words, for hover texts, tables and the sentence of advice."""

from __future__ import annotations

from megatrain.trace import Span, StepMetrics, Wait, WaitCause

STATE_WORDS: dict[str, str] = {
    "free": "free",
    "loading": "loading",
    "ready": "loaded, not yet used",
    "in_use": "in use",
    "draining": "leaving for the host",
    "removed": "removed",
}

ADVICE: dict[WaitCause, str] = {
    "weights": "more tokens per step or a larger prefetch depth would hide more of the loading",
    "gradient buffer": "one more gradient buffer or more tokens per step would help",
    "saved inputs": "keep saved layer inputs on the device if they fit, or fetch fewer at a time",
    "optimizer": "more tokens per step, more CPU cores or faster host memory would help",
    "other": "work is not launched fast enough: larger micro-batches would help",
}


def layer_name(layer: int | None) -> str:
    return "shell (embeddings, norm, head)" if layer is None else f"layer {layer}"


def size(nbytes: float) -> str:
    """Return a number of bytes as people say it, in powers of 1,000."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if abs(nbytes) < 1000:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:,.3g} TB"


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.3g} ms" if seconds < 1 else f"{seconds:,.2f} s"


def percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.0%}"


def span_words(span: Span) -> str:
    """Return hover text: what, which layer, micro-batch and buffer, how much, how fast, how long."""
    seconds = span.end_s - span.start_s
    lines = [f"<b>{span.op}</b>, {layer_name(span.layer)}, step {span.step}"]
    where = [f"micro-batch {span.micro_batch}"] if span.micro_batch is not None else []
    where += [f"buffer {span.slot}"] if span.slot is not None else []
    lines += [", ".join(where)] if where else []
    if span.nbytes and seconds > 0:
        lines.append(f"{size(span.nbytes)} at {span.nbytes / seconds / 1e9:.3g} GB/s")
    return "<br>".join([*lines, milliseconds(seconds)])


def wait_words(wait: Wait) -> str:
    before = f"<br>before {layer_name(wait.layer)}" if wait.layer is not None else ""
    return f"<b>compute waited: {wait.cause}</b>{before}<br>{milliseconds(wait.end_s - wait.start_s)}"


def advice(metrics: StepMetrics) -> str:
    """Return one sentence: how much of a step compute was busy, what it waited for most, what would help."""
    busy = f"Compute was busy for {percent(metrics.compute_share)} of step {metrics.step}"
    cause = max(metrics.waits_s, key=lambda cause: metrics.waits_s[cause])
    share = metrics.waits_s[cause] / metrics.duration_s
    if share < 0.02:
        return f"{busy} and waited for nothing worth mentioning."
    waited = "of it went to other things" if cause == "other" else f"of it compute waited for the {cause}"
    return f"{busy}; {percent(share)} {waited}: {ADVICE[cause]}."
