"""Where lanes leave their records and readers find them: bounded, thread-safe, tailed by a growing index."""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Generic, TypeVar, cast

from megatrain.trace.records import (
    EvaluationRecord,
    LayerStats,
    Marker,
    MemorySample,
    SampleRecord,
    SlotChange,
    Span,
    StepRecord,
)

Record = Span | SlotChange | MemorySample | StepRecord | LayerStats | Marker | EvaluationRecord | SampleRecord
R = TypeVar("R", Span, SlotChange, MemorySample, StepRecord, LayerStats, Marker, EvaluationRecord, SampleRecord)

RECORD_TYPES = (Span, SlotChange, MemorySample, StepRecord, LayerStats, Marker, EvaluationRecord, SampleRecord)


@dataclass(frozen=True, slots=True)
class Records:
    """Lists of records, and how many were dropped before they could be read."""

    spans: list[Span] = field(default_factory=list)
    slots: list[SlotChange] = field(default_factory=list)
    memory: list[MemorySample] = field(default_factory=list)
    steps: list[StepRecord] = field(default_factory=list)
    layers: list[LayerStats] = field(default_factory=list)
    markers: list[Marker] = field(default_factory=list)
    evaluations: list[EvaluationRecord] = field(default_factory=list)
    samples: list[SampleRecord] = field(default_factory=list)
    lost: int = 0


class _Log(Generic[R]):
    """The newest `capacity` records of one type; `added` counts all there ever were."""

    def __init__(self, capacity: int) -> None:
        self.added = 0
        self._records: deque[R] = deque(maxlen=capacity)
        self._lock = threading.Lock()

    def add(self, record: R) -> None:
        with self._lock:
            self._records.append(record)
            self.added += 1

    def since(self, index: int) -> tuple[list[R], int]:
        with self._lock:
            count = min(max(self.added - index, 0), len(self._records))
            newest_first = list(islice(reversed(self._records), count))
            added = self.added
        return newest_first[::-1], added


class Recorder:
    """Records of one run, on one clock.

    capacity: records kept per type; the oldest are dropped, so memory is bounded however long the run.
    origin_s: `time.perf_counter()` at the moment that is second 0 of every record.
    """

    def __init__(self, capacity: int = 200_000) -> None:
        if capacity < 1:
            raise ValueError(f"capacity must be a whole number ≥ 1 of records kept per type; got {capacity!r}")
        self.capacity = capacity
        self.origin_s = time.perf_counter()
        self._logs: dict[type, _Log[Any]] = {kind: _Log(capacity) for kind in RECORD_TYPES}

    def now(self) -> float:
        """Seconds since the run began."""
        return time.perf_counter() - self.origin_s

    def add(self, record: Record) -> None:
        """Keep a record. Called by lane threads, so it does nothing but append."""
        self._log(type(record)).add(record)

    def since(self, kind: type[R], index: int) -> tuple[list[R], int]:
        """Return the records of a type from `index` on, oldest first, and the index to ask for next time.

        Where the bound dropped some before they were read, `next_index - index - len(records)` were lost.
        """
        return cast("_Log[R]", self._log(kind)).since(index)

    def spans(self) -> list[Span]:
        return self.since(Span, 0)[0]

    def slots(self) -> list[SlotChange]:
        return self.since(SlotChange, 0)[0]

    def memory(self) -> list[MemorySample]:
        return self.since(MemorySample, 0)[0]

    def steps(self) -> list[StepRecord]:
        return self.since(StepRecord, 0)[0]

    def layers(self) -> list[LayerStats]:
        return self.since(LayerStats, 0)[0]

    def markers(self) -> list[Marker]:
        return self.since(Marker, 0)[0]

    def evaluations(self) -> list[EvaluationRecord]:
        return self.since(EvaluationRecord, 0)[0]

    def samples(self) -> list[SampleRecord]:
        return self.since(SampleRecord, 0)[0]

    def snapshot(self) -> Records:
        """Return all that is kept; `lost` counts what the bound has dropped since the run began."""
        return Records(
            *(self.spans(), self.slots(), self.memory(), self.steps()),
            *(self.layers(), self.markers(), self.evaluations(), self.samples()),
            lost=sum(max(log.added - self.capacity, 0) for log in self._logs.values()),
        )

    def _log(self, kind: type) -> _Log[Any]:
        try:
            return self._logs[kind]
        except KeyError:
            names = ", ".join(known.__name__ for known in RECORD_TYPES)
            raise ValueError(f"a record must be one of {names}; got {kind.__name__}") from None
