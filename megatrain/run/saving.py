"""When a run is checkpointed, and how it goes on from one: with the model, the data and the record where they were."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from megatrain.checkpoint import Checkpoints, CheckpointWriter, Keep, restore
from megatrain.engine import StreamingEngine
from megatrain.folder import RunFolder
from megatrain.plain import from_plain, to_plain
from megatrain.steering import Wish
from megatrain.trace import StepRecord

STEPS_FILE = "steps.jsonl"  # in a checkpoint: the record of all steps before it


@dataclass(frozen=True)
class Saving:
    """every: steps between checkpoints; None = none. keep: which of them stay on the disk.

    resume: go on from the newest checkpoint in the run's folder, if there is one. at_stop: a run that is stopped before
    its last step leaves one, whatever `every` is. settings: what the run was asked to do, as plain values, kept in
    each; None keeps those of the engine and the optimizer.
    """

    every: int | None = None
    keep: Keep = field(default_factory=Keep)
    resume: bool = False
    at_stop: bool = False
    settings: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        every = self.every
        if every is not None and (isinstance(every, bool) or not isinstance(every, int) or every < 1):
            raise ValueError(f"checkpoint_every must be a whole number ≥ 1 of steps, or None; got {every!r}")


class Saver:
    """Checkpoints of one run. steps_done: of the one it went on from; 0 for a new run."""

    def __init__(self, engine: StreamingEngine, batches: Iterable[Any], folder: RunFolder, saving: Saving) -> None:
        self.steps_done = 0
        self._past: list[StepRecord] = []  # with wall-clock times
        self._engine, self._batches, self._saving = engine, batches, saving
        self._checkpoints = Checkpoints(folder.checkpoints, saving.keep)
        self._writer = CheckpointWriter(engine, self._checkpoints)
        self._positioned = hasattr(batches, "state_dict") and hasattr(batches, "load_state_dict")
        if saving.resume and self._checkpoints.steps():
            self._resume()

    def _resume(self) -> None:
        manifest = restore(self._engine, self._checkpoints)
        state = manifest.state
        self.steps_done = state["steps_done"]
        lines = (self._checkpoints.path(manifest.step) / STEPS_FILE).read_text().splitlines()
        began_s = state["began_unix_s"]
        self._past = [_shifted(from_plain(StepRecord, json.loads(line)), began_s) for line in lines]
        if self._positioned:
            self._batches.load_state_dict(state["data"])  # type: ignore[attr-defined]

    def remaining(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Skip what was trained on before, where the batches do not know their position."""
        return batches if self._positioned else islice(batches, self.steps_done, None)

    def past(self, began_unix_s: float) -> list[StepRecord]:
        """The steps before the checkpoint, on the clock of a run that began then."""
        return [_shifted(record, -began_unix_s) for record in self._past]

    def after_step(self, done: int, wishes: Sequence[Wish] = ()) -> None:
        """Called between two steps; returns as soon as writing has begun. wishes: met, or not, once it has ended."""
        if wishes or (self._saving.every is not None and done % self._saving.every == 0):
            self._write(done, wishes)

    def at_end(self, done: int, *, stopped: bool) -> None:
        """Called when no further step comes: what is not on the disk yet is written, and waited for."""
        wanted = self._saving.every is not None or (stopped and self._saving.at_stop)
        if wanted and done > self.steps_done and done not in self._writer.begun:
            self._write(done)
        self._writer.wait()

    def _write(self, done: int, wishes: Sequence[Wish] = ()) -> None:
        def tell(error: Exception | None) -> None:
            for wish in wishes:
                if error is None:
                    wish.fulfil(None)
                else:
                    wish.fail(str(error))

        data = self._batches.state_dict() if self._positioned else None  # type: ignore[attr-defined]
        recorder = self._engine.recorder
        began_unix_s = time.time() - recorder.now()
        state = {"steps_done": done, "began_unix_s": began_unix_s, "data": data, "settings": self._settings()}
        lines = "".join(json.dumps(to_plain(record)) + "\n" for record in recorder.steps())
        self._writer.write(done, state, {STEPS_FILE: lines.encode()}, tell)

    def _settings(self) -> dict[str, Any]:
        if self._saving.settings is not None:
            return dict(self._saving.settings)
        return {"engine": to_plain(self._engine.config), "optimizer": to_plain(self._engine.optimizer)}


def _shifted(record: StepRecord, by_s: float) -> StepRecord:
    return replace(record, start_s=record.start_s + by_s, end_s=record.end_s + by_s)
