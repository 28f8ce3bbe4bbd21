"""Where the dashboard gets its records: what is new since it last asked."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from megatrain.journal import JournalReader
from megatrain.trace import LayerStats, Marker, MemorySample, Recorder, Records, SlotChange, Span, StepRecord

R = TypeVar("R", Span, SlotChange, MemorySample, StepRecord, LayerStats, Marker)


class LiveFeed:
    """Follows the recorder of a run in this process. One reader each; it never holds up the run."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._next: dict[type, int] = {}

    def poll(self) -> Records:
        """Return what was recorded since the last call, the first time all that is kept.

        `lost` counts what was dropped before it could be read, because this was called too seldom.
        """
        spans, lost_spans = self._read(Span)
        slots, lost_slots = self._read(SlotChange)
        memory, lost_memory = self._read(MemorySample)
        steps, lost_steps = self._read(StepRecord)
        layers, lost_layers = self._read(LayerStats)
        markers, lost_markers = self._read(Marker)
        lost = lost_spans + lost_slots + lost_memory + lost_steps + lost_layers + lost_markers
        return Records(spans, slots, memory, steps, layers, markers, lost)

    def _read(self, kind: type[R]) -> tuple[list[R], int]:
        index = self._next.get(kind, 0)
        records, self._next[kind] = self._recorder.since(kind, index)
        return records, self._next[kind] - index - len(records)


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
