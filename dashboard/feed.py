"""Where the dashboard gets its records: what is new since it last asked."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from megatrain.journal import JournalReader
from megatrain.trace import (
    EvaluationRecord,
    LayerStats,
    Marker,
    MemorySample,
    Recorder,
    Records,
    SampleRecord,
    SlotChange,
    Span,
    StepRecord,
)

R = TypeVar("R", Span, SlotChange, MemorySample, StepRecord, LayerStats, Marker, EvaluationRecord, SampleRecord)


class LiveFeed:
    """Follows the recorder of a run in this process. One reader each; it never holds up the run."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._next: dict[type, int] = {}
        self._lost = 0

    def poll(self) -> Records:
        """Return what was recorded since the last call, the first time all that is kept.

        `lost` counts what was dropped before it could be read, because this was called too seldom.
        """
        spans, slots, memory = self._read(Span), self._read(SlotChange), self._read(MemorySample)
        steps, layers, markers = self._read(StepRecord), self._read(LayerStats), self._read(Marker)
        evaluations, samples = self._read(EvaluationRecord), self._read(SampleRecord)
        lost, self._lost = self._lost, 0
        return Records(spans, slots, memory, steps, layers, markers, evaluations, samples, lost)

    def _read(self, kind: type[R]) -> list[R]:
        index = self._next.get(kind, 0)
        records, self._next[kind] = self._recorder.since(kind, index)
        self._lost += self._next[kind] - index - len(records)
        return records


class FolderFeed:
    """Follows the run in a folder, whichever process it is of and whether it still goes on. One reader each."""

    def __init__(self, run_dir: str | Path) -> None:
        self._reader = JournalReader(run_dir)

    @property
    def generation(self) -> int:
        """How often another run began in the folder: when this has grown, what was read before is of an earlier run."""
        return self._reader.generation

    def poll(self) -> Records:
        """Return what was written since the last call, the first time all that is kept.

        `lost` counts what was never written, or deleted before it was read.
        """
        return self._reader.poll()

    def close(self) -> None:
        self._reader.close()
