"""Numbers and records in plain words, for hover texts, tables and the sentence of advice."""

from __future__ import annotations

from megatrain.trace import Lane, Marker, Span, StepMetrics, StepRecord, Wait, WaitCause

STATE_WORDS: dict[str, str] = {
    "free": "free",
    "loading": "loading",
    "ready": "loaded, not in use",
    "in_use": "in use",
    "draining": "leaving for the host",
    "removed": "removed",
}
KNOB_WORDS: dict[str, str] = {
    "prefetch_depth": "depth",
    "grad_buffers": "grad buffers",
    "resident_layers": "resident",
    "micro_batch_size": "micro-batch",
}
OP_WORDS: dict[str, str] = {  # of what does not go without saying
    "score": "log-probabilities of the labels, no gradient",
    "load state": "moments, and low halves of the master",
    "adamw": "on the device",
    "store": "trained weights, moments, and low halves of the master",
}
LANE_WORDS: dict[str, str] = {
    "h2d": "weights in",
    "compute": "compute",
    "d2h": "gradients out",
    "host": "optimizer",
}
WORTH_MENTIONING = 0.02  # of a step

BOUND: dict[WaitCause, str] = {
    "weights": "Transfers bind: compute waited {share} of step {step} for weights.",
    "gradient buffer": "Gradients bind: compute waited {share} of step {step} for a free gradient buffer.",
    "saved inputs": "Saved inputs bind: compute waited {share} of step {step} for them to come back from the host.",
    "optimizer state": "Optimizer state binds: compute waited {share} of step {step} for it on its way.",
    "optimizer": "The optimizer binds: compute waited {share} of step {step} for AdamW.",
    "other": "Launching binds: for {share} of step {step} nothing was computed, and nothing was waited for.",
}
LANE_OF: dict[WaitCause, Lane] = {"weights": "h2d", "gradient buffer": "d2h", "optimizer": "host"}


# The share of compute's seconds under which a lane's seconds have to hide. A layer costs one part forward, one for its
# recompute and two backward: half of the loads meet the forward's quarter, unloads all but that, updates that alone.
COVER: dict[WaitCause, float] = {"weights": 0.5, "gradient buffer": 0.75, "optimizer": 0.25}


def layer_name(layer: int | None) -> str:
    return "shell (embeddings, norm, head)" if layer is None else f"layer {layer}"


def state_word(state: str) -> str:
    return STATE_WORDS[state]


def size(nbytes: float) -> str:
    """Return a number of bytes as people say it, in powers of 1,000."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if abs(nbytes) < 1000:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:,.3g} TB"


def count(number: float) -> str:
    """Return a number as people say it: 850, 2.1 K, 11 K, 3.4 M."""
    for unit in ("", " K", " M"):
        if abs(number) < 999.5:
            return f"{number:.2g}{unit}" if unit and abs(number) < 10 else f"{number:.0f}{unit}"
        number /= 1000
    return f"{number:,.2g} G" if number < 10 else f"{number:,.0f} G"


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.3g} ms" if seconds < 1 else f"{seconds:,.2f} s"


def duration(seconds: float) -> str:
    """Return a long time in its two largest units."""
    days, hours, minutes = int(seconds // 86400), int(seconds // 3600 % 24), int(seconds // 60 % 60)
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {int(seconds % 60)} s" if minutes else f"{seconds:.0f} s"


def percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.0%}"


def gigabytes_per_s(bytes_per_s: float | None) -> str:
    return "–" if bytes_per_s is None else f"{bytes_per_s / 1e9:,.3g}"


def span_words(span: Span, where: str) -> str:
    """Return hover text: what, which layer, micro-batch and buffer, how much, how fast, how long. where: in the run."""
    seconds = span.end_s - span.start_s
    lines = [f"<b>{span.op}</b>, {layer_name(span.layer)}, {where}"]
    lines += [OP_WORDS[span.op]] if span.op in OP_WORDS else []
    places = [f"micro-batch {span.micro_batch}"] if span.micro_batch is not None else []
    places += [f"buffer {span.slot}"] if span.slot is not None else []
    lines += [", ".join(places)] if places else []
    if span.nbytes and seconds > 0:
        lines.append(f"{size(span.nbytes)} at {span.nbytes / seconds / 1e9:.3g} GB/s")
    return "<br>".join([*lines, milliseconds(seconds)])


def wait_words(wait: Wait) -> str:
    before = f"<br>before {layer_name(wait.layer)}" if wait.layer is not None else ""
    return f"<b>compute waited: {wait.cause}</b>{before}<br>{milliseconds(wait.end_s - wait.start_s)}"


def marker_label(marker: Marker) -> str:
    """Return what a flag says: "depth 1→3", or "paused"."""
    if isinstance(marker.new, bool):  # "paused" from True to False is what people call resumed
        return "resumed" if marker.name == "paused" and not marker.new else marker.name
    if marker.name in ("paused", "resumed", "stopped"):
        return marker.name
    return f"{KNOB_WORDS.get(marker.name, marker.name)} {marker.old}→{marker.new}"


def marker_words(marker: Marker) -> str:
    """Return hover text: what changed, and where it took effect."""
    where = f"step {marker.step}" + ("" if marker.layer is None else f", {layer_name(marker.layer)}")
    return f"<b>{marker_label(marker)}</b> ({marker.name.replace('_', ' ')})<br>since {where}"


def advice(metrics: StepMetrics, record: StepRecord) -> str:
    """Return what binds in a step and what to turn, with numbers; what the user held is no wait."""
    cause = max(BOUND, key=lambda cause: metrics.waits_s[cause])
    share = metrics.waits_s[cause] / metrics.active_s
    if share < WORTH_MENTIONING:
        return f"Nothing binds: compute was busy for {percent(metrics.compute_share)} of step {metrics.step}."
    bound = BOUND[cause].format(share=percent(share), step=metrics.step)
    return f"{bound} {_way_out(cause, metrics, record)}"


def _way_out(cause: WaitCause, metrics: StepMetrics, record: StepRecord) -> str:
    if cause == "other":
        return f"Larger micro-batches launch less often; now {record.micro_batches} per step."
    if cause == "saved inputs":
        return "Keep them on the device if they fit (offload_activations=False), or take smaller micro-batches."
    if cause == "optimizer state":
        return 'It may stay where it is: optimizer_device="host". Or more tokens per step, or one more gradient buffer.'
    if cause == "weights" and record.prefetch_depth == 0:
        return "Prefetch depth is 0: raise it."
    return _more_tokens(cause, metrics, record)


def _more_tokens(cause: WaitCause, metrics: StepMetrics, record: StepRecord) -> str:
    """Compute grows with the tokens of a step; weights, gradients and updates do not."""
    busy_s, compute_s = metrics.busy_s[LANE_OF[cause]], metrics.busy_s["compute"]
    cover_s = COVER[cause] * compute_s
    if busy_s <= cover_s:
        return _more_buffers(cause, busy_s / compute_s, record)
    tokens = record.sequence_tokens * busy_s / cover_s if compute_s else float("inf")
    if tokens == float("inf"):
        return "More tokens per step would hide them."
    return f"About {count(tokens)} tokens per step would hide {_them(cause)}; now {count(record.sequence_tokens)}."


def _them(cause: WaitCause) -> str:
    return "it" if cause == "optimizer" else "them"


def _more_buffers(cause: WaitCause, ratio: float, record: StepRecord) -> str:
    """The lane has time enough, only not at the right moment."""
    if cause == "weights":
        depth = record.prefetch_depth
        return f"Loading takes only {percent(ratio)} of compute's time: raise the prefetch depth above {depth}."
    if cause == "gradient buffer":
        return f"Unloading takes only {percent(ratio)} of compute's time: one more gradient buffer would hide it."
    return (
        f"AdamW takes {percent(ratio)} of compute's time, but the first layers wait for it: more tokens per step help."
    )
