"""The lanes really run at once, and the record of a step is complete."""

from __future__ import annotations

from collections import Counter
from functools import partial
from itertools import pairwise
from typing import Any, get_args

import pytest
from families import build
from pairs import engine_config
from reference import Batch, make_batch
from tiny_models import tiny

from megatrain import AdamWConfig, StreamingEngine
from megatrain.trace import Lane, Recorder, Span, StepMetrics, StepRecord, step_metrics

LAYERS, STEPS = 6, 4


@pytest.fixture(scope="module")
def engine() -> Any:
    """A model whose layers take milliseconds to copy and to compute, after a few steps."""
    model = build("llama", layers=LAYERS, hidden_size=512, intermediate_size=1024, head_dim=64, num_attention_heads=8)
    batches = [make_batch(model, 2, 48, seed=seed) for seed in range(STEPS)]
    with StreamingEngine(model, engine_config(prefetch_depth=2), AdamWConfig(lr=1e-3)) as engine:
        for batch in batches:
            engine.step(batch)
        engine.flush()
        yield engine


def metrics(engine: StreamingEngine) -> list[StepMetrics]:
    return [step_metrics(engine.recorder.spans(), record) for record in engine.recorder.steps()]


def spans_of(engine: StreamingEngine, lane: str) -> list[Span]:
    return [span for span in engine.recorder.spans() if span.lane == lane]


def overlap(one: Span, other: Span) -> bool:
    return one.start_s < other.end_s and other.start_s < one.end_s


def test_most_copying_hides_under_compute(engine: StreamingEngine) -> None:
    """In the best of the steps: another process may take the core in any one of them."""
    assert max(step.h2d_hidden or 0.0 for step in metrics(engine)) > 0.5
    assert max(step.d2h_hidden or 0.0 for step in metrics(engine)) > 0.5


def test_updates_hide_under_the_next_forward(engine: StreamingEngine) -> None:
    assert max(step.update_hidden or 0.0 for step in metrics(engine)[1:]) > 0.2


def test_a_layer_is_loaded_while_another_computes(engine: StreamingEngine) -> None:
    loads = [span for span in spans_of(engine, "h2d") if span.layer is not None]
    computes = [span for span in spans_of(engine, "compute") if span.layer is not None]
    pairs = [(load, work) for load in loads for work in computes if overlap(load, work)]
    assert pairs
    assert all(load.layer != work.layer or load.step != work.step for load, work in pairs)


@pytest.mark.parametrize("lane", get_args(Lane))
def test_spans_of_one_lane_never_overlap(engine: StreamingEngine, lane: str) -> None:
    spans = sorted(spans_of(engine, lane), key=lambda span: span.start_s)
    assert spans
    assert all(span.start_s <= span.end_s for span in spans)
    assert all(before.end_s <= after.start_s for before, after in pairwise(spans))


def test_every_layer_leaves_every_kind_of_span(engine: StreamingEngine) -> None:
    counts = Counter[Any]((span.op, span.layer, span.step) for span in engine.recorder.spans())
    for step in range(STEPS):
        for layer in range(LAYERS):
            for op in ("forward", "backward", "unload", "update"):
                assert counts[op, layer, step] == 1, (op, layer, step)
            assert 1 <= counts["load", layer, step] <= 2
        for op in ("load", "record", "head", "backward", "norm", "unload", "update"):
            assert counts[op, None, step] == 1, (op, step)


def test_the_last_layers_are_loaded_once_and_the_others_twice(engine: StreamingEngine) -> None:
    """Three slots hold the last three layers when forward turns into backward."""
    loads = Counter(span.layer for span in engine.recorder.spans() if span.op == "load" and span.step == 1)
    assert [loads[layer] for layer in range(LAYERS)] == [2, 2, 2, 1, 1, 1]


def test_spans_say_how_many_bytes_moved(engine: StreamingEngine) -> None:
    layout = engine._layouts[0]
    for op, nbytes in (("load", layout.nbytes), ("unload", layout.trained_nbytes)):
        assert {span.nbytes for span in engine.recorder.spans() if span.op == op and span.layer == 0} == {nbytes}


def test_what_must_happen_in_order_does(engine: StreamingEngine) -> None:
    spans = {(s.op, s.layer): s for s in engine.recorder.spans() if s.step == 2 and s.op != "load"}
    for layer in range(LAYERS):
        chain = [spans[op, layer] for op in ("forward", "backward", "unload", "update")]
        assert all(before.end_s <= after.start_s for before, after in pairwise(chain)), layer
    assert spans["norm", None].end_s <= min(spans["update", layer].start_s for layer in range(LAYERS))
    first_loads: dict[int, Span] = {}
    for span in engine.recorder.spans():
        if span.op == "load" and span.step == 3 and span.layer is not None:
            first_loads.setdefault(span.layer, span)
    for layer, load in first_loads.items():
        assert spans["update", layer].end_s <= load.start_s, "stale weights"


def test_step_records_follow_each_other(engine: StreamingEngine) -> None:
    records: list[StepRecord] = engine.recorder.steps()
    assert [record.step for record in records] == list(range(STEPS))
    assert all(before.end_s <= after.start_s for before, after in pairwise(records))
    assert all(record.micro_batches == 1 and record.prefetch_depth == 2 for record in records)
    assert {record.lr for record in records} == {1e-3}


def test_buffer_states_follow_the_life_of_a_slot(engine: StreamingEngine) -> None:
    """free → loading → ready ⇄ in use → free, and for gradients free → in use → draining → free."""
    allowed = {
        "weights": {
            "free": {"loading"},
            "loading": {"ready"},
            "ready": {"in_use", "loading"},
            "in_use": {"ready", "free"},
        },
        "gradients": {"free": {"in_use"}, "in_use": {"in_use", "draining"}, "draining": {"free"}},
    }
    states: dict[tuple[str, int], str] = {}
    for change in sorted(engine.recorder.slots(), key=lambda change: change.time_s):
        key = (change.kind, change.slot)
        if key in states:
            assert change.state in allowed[change.kind][states[key]] | {states[key]}, (key, states[key], change)
        states[key] = change.state


def test_the_record_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    capacity = 40
    monkeypatch.setattr("megatrain.engine.Recorder", partial(Recorder, capacity=capacity))
    batch: Batch = make_batch(tiny(), 4, 12)
    with StreamingEngine(tiny(), engine_config()) as engine:
        for _ in range(8):
            engine.step(batch)
        engine.flush()
        kept = engine.recorder.snapshot()
    assert len(kept.spans) == len(kept.slots) == capacity
    assert kept.lost > 0
    assert len(kept.steps) == 8
    assert not engine._executor._dones
