from dataclasses import replace
from typing import get_args

import pytest

from dashboard.words import advice, count, duration, milliseconds, percent, size
from megatrain.trace import Span, StepMetrics, StepRecord, WaitCause, step_metrics

RECORD = StepRecord(12, 0.0, 10.0, 2.0, 1.0, 1e-4, 2000, 2000, 10**12, 1, 4, None)


def span(lane: str, op: str, start_s: float, end_s: float, layer: int = 0) -> Span:
    return Span(lane, op, 12, layer, 0, 0, start_s, end_s, 0)  # type: ignore[arg-type]


def metrics(*spans: Span) -> StepMetrics:
    return step_metrics(spans, RECORD)


def test_nothing_binds() -> None:
    busy = metrics(span("compute", "forward", 0, 9.9))
    assert advice(busy, RECORD) == "Nothing binds: compute was busy for 99% of step 12."


def test_weights_bind_and_more_tokens_would_hide_them() -> None:
    bound = metrics(span("h2d", "load", 0, 9), span("compute", "forward", 9, 10))
    assert advice(bound, RECORD) == (
        "Transfers bind: compute waited 90% of step 12 for weights. "
        "About 36 K tokens per step would hide them; now 2 K."
    )


def test_weights_bind_because_nothing_is_loaded_ahead() -> None:
    bound = metrics(span("h2d", "load", 0, 4), span("compute", "forward", 4, 10))
    assert advice(bound, replace(RECORD, prefetch_depth=0)) == (
        "Transfers bind: compute waited 40% of step 12 for weights. Prefetch depth is 0: raise it."
    )


def test_weights_bind_although_the_link_has_time() -> None:
    bound = metrics(span("h2d", "load", 0, 3), span("compute", "forward", 3, 10))
    assert advice(bound, RECORD).endswith(
        "for weights. Loading takes only 43% of compute's time: raise the prefetch depth above 1."
    )


def test_gradient_buffers_bind() -> None:
    late = span("compute", "backward", 9, 10, 1)
    slow = metrics(span("compute", "backward", 0, 1), span("d2h", "unload", 1, 9), late)
    assert advice(slow, RECORD) == (
        "Gradients bind: compute waited 80% of step 12 for a free gradient buffer. "
        "About 11 K tokens per step would hide them; now 2 K."
    )
    burst = metrics(span("compute", "backward", 0, 7), span("d2h", "unload", 7, 9), late)
    assert advice(burst, RECORD).endswith(
        "Unloading takes only 25% of compute's time: one more gradient buffer would hide it."
    )


def test_the_optimizer_binds() -> None:
    bound = metrics(span("host", "update", 0, 8), span("compute", "forward", 8, 10))
    assert advice(bound, RECORD) == (
        "The optimizer binds: compute waited 80% of step 12 for AdamW. "
        "About 32 K tokens per step would hide it; now 2 K."
    )
    short = metrics(span("host", "update", 0, 1), span("compute", "forward", 1, 10))
    assert advice(short, RECORD).endswith(
        "AdamW takes 11% of compute's time, but the first layers wait for it: more tokens per step help."
    )


def test_optimizer_state_binds() -> None:
    bound = metrics(span("h2d", "load state", 0, 9), span("compute", "adamw", 9, 10))
    assert advice(bound, RECORD) == (
        "Optimizer state binds: compute waited 90% of step 12 for it on its way. It may stay where it is: "
        'optimizer_device="host". Or more tokens per step, or one more gradient buffer.'
    )


def test_saved_inputs_bind() -> None:
    bound = metrics(span("h2d", "fetch", 0, 5), span("compute", "backward", 5, 10))
    words = advice(bound, RECORD)
    assert words.startswith("Saved inputs bind: compute waited 50% of step 12 for them to come back from the host.")
    assert "offload_activations=False" in words


def test_other_things_bind() -> None:
    bound = metrics(span("compute", "forward", 4, 10))
    assert advice(bound, RECORD) == (
        "Launching binds: for 40% of step 12 nothing was computed, and nothing was waited for. "
        "Larger micro-batches launch less often; now 4 per step."
    )


def test_a_step_without_compute_promises_no_number() -> None:
    assert "More tokens per step would hide them." in advice(
        replace(metrics(span("h2d", "load", 0, 9)), waits_s=dict.fromkeys(get_args(WaitCause), 0.0) | {"weights": 9.0}),
        RECORD,
    )


def test_numbers_as_people_say_them() -> None:
    assert [size(n) for n in (12, 4_360, 436_000_000, 2_700_000_000, 1_500_000_000_000)] == [
        "12 bytes",
        "4.36 kB",
        "436 MB",
        "2.7 GB",
        "1.5 TB",
    ]
    assert [milliseconds(s) for s in (0.00871, 0.328, 2.5)] == ["8.71 ms", "328 ms", "2.50 s"]
    assert [percent(share) for share in (None, 0.0, 0.694)] == ["–", "0%", "69%"]


@pytest.mark.parametrize(
    ("number", "words"),
    [(850, "850"), (2048, "2 K"), (2100, "2.1 K"), (11_480, "11 K"), (999_700, "1 M"), (3.4e9, "3.4 G")],
)
def test_counts(number: float, words: str) -> None:
    assert count(number) == words


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.4, "0 s"), (59, "59 s"), (61, "1 min 1 s"), (7260, "2 h 1 min"), (86399, "23 h 59 min"), (176_400, "2 d 1 h")],
)
def test_durations(seconds: float, words: str) -> None:
    assert duration(seconds) == words


def test_what_the_user_held_is_no_wait() -> None:
    spans = [span("compute", "forward", 0, 2), span("compute", "backward", 9, 10)]
    held = step_metrics(spans, RECORD, held=[(2.0, 9.0)])
    assert advice(held, RECORD) == "Nothing binds: compute was busy for 100% of step 12."
    assert held.tokens_per_s == pytest.approx(2000 / 3)
