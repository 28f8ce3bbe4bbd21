"""What was played on the clock as the records of a run, so that whatever reads a run's records reads these."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, cast

from megatrain.plan import Plan
from megatrain.schedule import Kind
from megatrain.simulate.clock import Timed
from megatrain.simulate.play import Issued, Played
from megatrain.simulate.work import step_flops
from megatrain.slots import BufferState, States, buffer_states, is_spent
from megatrain.trace import Recorder, SlotChange, SlotKind, Span, StepRecord

Record = Span | SlotChange


def recorded(plan: Plan, played: Played) -> Recorder:
    """Spans, buffers and steps; losses and norms are NaN, as nothing is computed."""
    recorder, here = Recorder(), plan.config.optimizer_device == "device"
    for issued in played.issued:
        if issued.op.lane == "engine":
            recorder.add(_resized(issued))
    for timed in sorted(played.timed, key=lambda timed: timed.start_s):
        for record in _records(timed, played.issued[timed.op.number], updated_here=here):
            recorder.add(record)
    for number, (start_s, end_s) in enumerate(zip([0.0, *played.ends_s], played.ends_s, strict=False)):
        recorder.add(_step(plan, number, start_s, end_s))
    return recorder


def _resized(issued: Issued) -> SlotChange:
    state = BufferState.FREE if issued.op.kind is Kind.ADD else BufferState.REMOVED
    kind, buffer = issued.op.resized
    return _change(issued.at_s, kind, buffer, state, None, issued.step.number)


def _records(timed: Timed, issued: Issued, *, updated_here: bool) -> Iterator[Record]:
    """The span of an operation, and what became of the buffers it used."""
    op = timed.op
    span = Span(
        lane=cast(Any, op.lane),
        op=cast(Any, op.kind.value),
        step=issued.step.number,
        layer=op.layer,
        micro_batch=op.micro_batch,
        slot=op.place,
        start_s=timed.start_s,
        end_s=timed.end_s,
        nbytes=issued.work.nbytes,
    )
    yield span
    spent = is_spent(op, issued.step.shape.micro_batches, updated_here=updated_here)
    for kind, number, states in buffer_states(op, spent=spent):
        yield from _changes(span, kind, number, states)


def _changes(span: Span, kind: SlotKind, buffer: int, states: States) -> Iterator[SlotChange]:
    for time_s, state in zip((span.start_s, span.end_s), states, strict=True):
        layer = None if state is BufferState.FREE else span.layer
        yield _change(time_s, kind, buffer, state, layer, span.step)


def _change(time_s: float, kind: SlotKind, buffer: int, state: BufferState, layer: int | None, step: int) -> SlotChange:
    return SlotChange(time_s, kind, buffer, cast(Any, state.value), layer, step)


def _step(plan: Plan, number: int, start_s: float, end_s: float) -> StepRecord:
    subject, size = plan.subject, plan.needs.size
    return StepRecord(
        step=number,
        start_s=start_s,
        end_s=end_s,
        loss=math.nan,
        grad_norm=math.nan,
        lr=math.nan,
        tokens=size.tokens - subject.batch,  # the first of each sequence is not predicted
        sequence_tokens=size.tokens,
        flops=step_flops(plan),
        prefetch_depth=plan.needs.knobs.prefetch_depth,
        micro_batches=size.micro_batches,
        skipped=None,
    )
