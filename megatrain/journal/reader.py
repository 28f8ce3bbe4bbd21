"""Following a run's records from any process, through the files in its folder."""

from __future__ import annotations

from pathlib import Path

from megatrain.folder import RunFolder
from megatrain.journal.tail import EventTail, LineTail
from megatrain.trace import EvaluationRecord, Marker, MemorySample, Records, SampleRecord, StepRecord


class JournalReader:
    """What is new in a run's folder since the last look. One reader per thread; readers do not disturb each other.

    generation: how often another run began in the folder; what was read before it grew belongs to the run before.
    """

    def __init__(self, folder: str | Path) -> None:
        self.generation = 0
        self._folder = RunFolder(folder)
        self._identity = self._folder.identity()
        self._tails = _Tails(self._folder)

    def poll(self) -> Records:
        """Return what was written since the last call, the first time all that is kept.

        `lost` counts what was never written, or deleted before it was read. ValueError naming the file where one is
        damaged, or of a newer version.
        """
        while True:
            self._start_over_if_replaced()
            records = self._tails.read()
            if self._folder.identity() == self._identity:
                return records  # else some of it may be of the next run

    def close(self) -> None:
        self._tails.close()

    def _start_over_if_replaced(self) -> None:
        identity = self._folder.identity()
        if identity != self._identity:
            self._identity = identity
            self.generation += 1
            self._tails.close()
            self._tails = _Tails(self._folder)


class _Tails:
    """One run's files, each read as far as it was written."""

    def __init__(self, folder: RunFolder) -> None:
        self._events = EventTail(folder)
        self._steps = LineTail(folder.metrics, StepRecord)
        self._memory = LineTail(folder.memory, MemorySample)
        self._markers = LineTail(folder.markers, Marker)
        self._evaluations = LineTail(folder.evaluations, EvaluationRecord)
        self._samples = LineTail(folder.samples, SampleRecord)
        self._tails = (self._events, self._steps, self._memory, self._markers, self._evaluations, self._samples)

    def read(self) -> Records:
        steps, memory = self._steps.read(), self._memory.read()
        markers, evaluations, samples = self._markers.read(), self._evaluations.read(), self._samples.read()
        events = self._events.read()
        return Records(
            *(events.spans, events.slots, memory, steps, events.layers, markers, evaluations, samples), events.lost
        )

    def close(self) -> None:
        for tail in self._tails:
            tail.close()
