"""What was played on the clock as the records of a run, so that whatever reads a run's records reads these."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, cast

from megatrain.plan import Plan
from megatrain.schedule import Kind, Op
from megatrain.simulate.clock import Timed
from megatrain.simulate.play import Issued, Played
from megatrain.simulate.work import step_flops
from megatrain.slots import BufferState, gradient_states, weight_states
from megatrain.trace import Recorder, SlotChange, Span, StepRecord

Record = Span | SlotChange


def recorded(plan: Plan, played: Played) -> Recorder:
    """Spans, buffers and steps; losses and norms are NaN, as nothing is computed."""
    recorder = Recorder()
    for issued in played.issued:
        if issued.op.lane == "engine":
            recorder.add(_resized(issued))
    for timed in sorted(played.timed, key=lambda timed: timed.start_s):
        for record in _records(timed, played.issued[timed.op.number]):
            recorder.add(record)
    for number, (start_s, end_s) in enumerate(zip([0.0, *played.ends_s], played.ends_s, strict=False)):
        recorder.add(_step(plan, number, start_s, end_s))
    return recorder


def _resized(issued: Issued) -> SlotChange:
    state = BufferState.FREE if issued.op.kind is Kind.ADD else BufferState.REMOVED
    kind, buffer = ("weights", issued.op.slot) if issued.op.slot is not None else ("gradients", issued.op.buffer)
    return _change(issued.at_s, kind, cast(int, buffer), state, None, issued.step.number)


def _records(timed: Timed, issued: Issued) -> Iterator[Record]:
    """The span of an operation, and what became of the buffers it used."""
    op = timed.op
    span = Span(
        lane=cast(Any, op.lane),
        op=cast(Any, op.kind.value),
        step=issued.step.number,
        layer=op.layer,
        micro_batch=op.micro_batch,
        slot=op.slot if op.slot is not None else op.buffer,
        start_s=timed.start_s,
        end_s=timed.end_s,
        nbytes=issued.work.nbytes,
    )
    yield span
    if op.slot is not None:
        yield from _changes(span, "weights", op.slot, weight_states(op, spent=_spent(op, issued)))
    if op.buffer is not None:
        yield from _changes(span, "gradients", op.buffer, gradient_states(op))


def _spent(op: Op, issued: Issued) -> bool:
    """After its last backward a trained layer's weights on the device are out of date."""
    last = op.micro_batch == issued.step.shape.micro_batches - 1
    return op.kind is Kind.BACKWARD and op.buffer is not None and last


def _changes(span: Span, kind: str, buffer: int, states: tuple[BufferState, BufferState]) -> Iterator[SlotChange]:
    for time_s, state in zip((span.start_s, span.end_s), states, strict=True):
        layer = None if state is BufferState.FREE else span.layer
        yield _change(time_s, kind, buffer, state, layer, span.step)


def _change(time_s: float, kind: str, buffer: int, state: BufferState, layer: int | None, step: int) -> SlotChange:
    return SlotChange(time_s, cast(Any, kind), buffer, cast(Any, state.value), layer, step)


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
