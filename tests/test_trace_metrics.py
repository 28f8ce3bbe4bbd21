from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from traced_run import TracedRun

from megatrain.trace import Span, StepRecord, causal_area, compute_waits, model_flops, step_metrics
from megatrain.trace.intervals import gaps, intersection, length, union

PAIRS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)).map(lambda pair: tuple(sorted(pair))), max_size=12)


def span(lane: str, op: str, layer: int | None, start_s: float, end_s: float, nbytes: int = 0) -> Span:
    return Span(lane, op, 0, layer, None, None, start_s, end_s, nbytes)  # type: ignore[arg-type]


def step(start_s: float, end_s: float, flops: int = 0) -> StepRecord:
    return StepRecord(0, start_s, end_s, 1.0, 1.0, 1e-4, 90, 100, flops, 1, 1, None)


def seconds(pairs: list[tuple[int, int]]) -> set[int]:
    return {second for start, end in pairs for second in range(start, end)}


@given(PAIRS, PAIRS)
def test_intervals_are_sets_of_seconds(left: list[tuple[int, int]], right: list[tuple[int, int]]) -> None:
    a, b = union(left), union(right)
    assert seconds(a) == seconds(left)
    assert length(a) == len(seconds(left))
    assert seconds(intersection(a, b)) == seconds(left) & seconds(right)
    assert seconds(gaps(a, 5, 30)) == set(range(5, 30)) - seconds(left)
    assert all(earlier[1] < later[0] for earlier, later in pairwise(a))


def test_nothing_ran() -> None:
    metrics = step_metrics([], step(0, 2))
    assert metrics.busy_s == {"h2d": 0, "compute": 0, "d2h": 0, "host": 0}
    assert metrics.h2d_hidden is None
    assert metrics.d2h_hidden is None
    assert metrics.update_hidden is None
    assert metrics.h2d_bytes_per_s is None
    assert metrics.waits_s["other"] == 2
    assert metrics.mfu is None


def test_one_compute_span_fills_its_step() -> None:
    metrics = step_metrics([span("compute", "forward", 0, 1, 3)], step(1, 3))
    assert metrics.compute_share == 1
    assert set(metrics.waits_s.values()) == {0}


def test_busy_is_a_union_and_hidden_an_intersection() -> None:
    spans = [
        span("h2d", "load", 1, 0, 4, nbytes=800),
        span("h2d", "fetch", 1, 2, 6, nbytes=400),
        span("compute", "forward", 0, 3, 5),
        span("host", "update", 5, 4, 8),
    ]
    metrics = step_metrics(spans, step(0, 10, flops=50), peak_flops_per_s=20)
    assert metrics.busy_s == {"h2d": 6, "compute": 2, "d2h": 0, "host": 4}
    assert metrics.h2d_hidden == 2 / 6
    assert metrics.update_hidden == 1 / 4
    assert metrics.h2d_bytes_per_s == 200
    assert metrics.tokens_per_s == 10
    assert metrics.model_flops_per_s == 5
    assert metrics.mfu == 0.25


def test_what_the_window_cuts_counts_in_part() -> None:
    metrics = step_metrics([span("h2d", "load", 0, 0, 4, nbytes=400)], step(3, 5))
    assert metrics.busy_s["h2d"] == 1
    assert metrics.h2d_bytes_per_s == 100


def test_other_work_of_the_host_is_no_optimizer() -> None:
    metrics = step_metrics([span("host", "record", None, 0, 1)], step(0, 2))
    assert metrics.update_hidden is None
    assert metrics.busy_s["host"] == 1


def test_a_step_without_time_is_refused() -> None:
    with pytest.raises(ValueError, match="a step must end after it starts; step 0 took 0 s"):
        step_metrics([], step(1, 1))


def causes(spans: list[Span], start_s: float, end_s: float) -> list[tuple[str, float, float]]:
    return [(wait.cause, wait.start_s, wait.end_s) for wait in compute_waits(spans, start_s, end_s)]


FORWARD_0, FORWARD_1 = span("compute", "forward", 0, 0, 2), span("compute", "forward", 1, 8, 9)


def test_waiting_for_a_load_that_began_late() -> None:
    spans = [FORWARD_0, FORWARD_1, span("h2d", "load", 1, 4, 7), span("h2d", "load", 2, 7, 8)]
    assert causes(spans, 0, 9) == [("weights", 2, 7), ("other", 7, 8)]


def test_waiting_for_a_load_that_waited_for_its_update() -> None:
    spans = [FORWARD_0, FORWARD_1, span("host", "update", 1, 3, 5), span("h2d", "load", 1, 5, 8)]
    assert causes(spans, 0, 9) == [("optimizer", 2, 5), ("weights", 5, 8)]


def test_waiting_for_a_load_at_the_pace_of_updates() -> None:
    spans = [FORWARD_0, FORWARD_1, span("host", "update", 1, 1, 5), span("h2d", "load", 1, 5, 8)]
    assert causes(spans, 0, 9) == [("optimizer", 2, 8)]


def test_a_load_that_found_its_lane_busy_waited_for_that() -> None:
    before = [FORWARD_0, FORWARD_1, span("host", "update", 1, 1, 5)]
    busy = [*before, span("h2d", "load", 0, 4, 6), span("h2d", "load", 1, 6, 8)]
    assert causes(busy, 0, 9) == [("optimizer", 2, 5), ("weights", 5, 8)]


def test_a_load_that_waited_for_its_slot_waited_for_that() -> None:
    forward_0 = span("compute", "forward", 0, 0, 6)
    spans = [forward_0, FORWARD_1, span("host", "update", 1, 1, 5), span("h2d", "load", 1, 6, 8)]
    assert causes(spans, 0, 9) == [("weights", 6, 8)]


def test_the_update_of_another_layer_is_no_cause() -> None:
    spans = [FORWARD_0, FORWARD_1, span("host", "update", 0, 3, 8), span("h2d", "load", 0, 3, 8)]
    assert causes(spans, 0, 9) == [("other", 2, 8)]


def test_waiting_for_a_gradient_buffer() -> None:
    spans = [
        span("compute", "backward", 5, 0, 2),
        span("d2h", "unload", 5, 1, 6),
        span("compute", "backward", 4, 6, 8),
        span("d2h", "unload", 4, 8, 9),
    ]
    assert causes(spans, 0, 9) == [("gradient buffer", 2, 6), ("gradient buffer", 8, 9)]


def test_an_unload_still_in_progress_freed_nothing() -> None:
    spans = [span("compute", "backward", 5, 0, 2), span("d2h", "unload", 5, 2, 9), span("compute", "backward", 4, 3, 9)]
    assert causes(spans, 0, 9) == [("other", 2, 3)]


def test_a_forward_needs_no_gradient_buffer() -> None:
    assert causes([FORWARD_0, FORWARD_1, span("d2h", "unload", 5, 2, 8)], 0, 9) == [("other", 2, 8)]


def test_waiting_for_a_saved_input() -> None:
    spans = [
        span("compute", "backward", 5, 0, 2),
        span("h2d", "fetch", 4, 1, 5),
        span("compute", "backward", 4, 5, 9),
    ]
    assert causes(spans, 0, 9) == [("saved inputs", 2, 5)]


def test_after_the_last_compute_come_gradients_and_updates() -> None:
    spans = [FORWARD_0, span("d2h", "unload", 0, 2, 4), span("host", "update", 0, 5, 12)]
    assert causes(spans, 0, 9) == [("gradient buffer", 2, 4), ("optimizer", 4, 9)]


def test_the_order_of_arrival_does_not_matter() -> None:
    run = TracedRun().steps(2)
    for record in run.steps():
        assert step_metrics(run.spans()[::-1], record) == step_metrics(run.spans(), record)


WORK = [
    ("h2d", "load"),
    ("h2d", "fetch"),
    ("compute", "forward"),
    ("compute", "backward"),
    ("d2h", "unload"),
    ("host", "update"),
]
SPANS = st.lists(
    st.builds(
        lambda work, layer, start, duration: span(*work, layer, start, start + duration, 8),
        st.sampled_from(WORK),
        st.sampled_from([None, 0, 1, 2]),
        st.floats(0, 10),
        st.floats(0, 3),
    ),
    max_size=25,
)


@settings(deadline=None)
@given(SPANS)
def test_every_second_is_either_computed_or_waited_and_shares_are_shares(spans: list[Span]) -> None:
    metrics = step_metrics(spans, step(2, 9))
    assert metrics.busy_s["compute"] + sum(metrics.waits_s.values()) == pytest.approx(7)
    for share in (metrics.h2d_hidden, metrics.d2h_hidden, metrics.update_hidden):
        assert share is None or 0 <= share <= 1 + 1e-9
    waits = compute_waits(spans, 2, 9)
    assert all(earlier.end_s <= later.start_s for earlier, later in pairwise(waits))


def test_model_flops_of_a_small_model_counted_by_hand() -> None:
    # one layer of one 4×4 projection plus a 4×10 head, 2 heads of 2, one sequence of 6 tokens
    multiply_accumulates = 6 * (16 + 40)
    causal_pairs = 6 * 6 / 2
    forward = 2 * multiply_accumulates + 2 * 2 * 2 * 2 * causal_pairs  # QKᵀ and PV, 2 FLOP each per pair and channel
    flops = model_flops(tokens=6, active_parameters=56, heads=2, head_dim=2, attention_area=causal_area(6))
    assert flops == 3 * forward


def test_model_flops_agree_with_palm_but_for_the_masked_half() -> None:
    layers, length_, heads, head_dim, parameters = 3, 128, 8, 64, 10_000
    tokens = 4 * length_
    area = layers * 4 * causal_area(length_)
    palm = tokens * (6 * parameters + 12 * layers * heads * head_dim * length_)
    ours = model_flops(tokens=tokens, active_parameters=parameters, heads=heads, head_dim=head_dim, attention_area=area)
    assert palm - ours == tokens * 6 * layers * heads * head_dim * length_


@pytest.mark.parametrize("window", [1, 2, 5, 7])
def test_a_window_counts_what_it_shows(window: int) -> None:
    pairs = sum(min(query + 1, window) for query in range(7))
    assert causal_area(7, window) == 2 * pairs - window  # as S² is 2·S(S+1)/2 − S without a window
    assert causal_area(7, 9) == causal_area(7) == 49
