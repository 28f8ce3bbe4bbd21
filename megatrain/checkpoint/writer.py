"""Writes checkpoints in the background, while the next step already trains.

Note: why nothing is copied first, and nothing is waited for. Between two steps the host's arrays are the state, once
the updates of the last step are applied, which goes on under the next step's forward. So each layer is written after
its own update, in the order of the updates; and its next one, at the end of the next step, waits until it is on the
disk, should it come so soon (`Gate`).
"""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from megatrain.checkpoint.parts import file_of, metadata_of, tensors_of
from megatrain.checkpoint.shards import FileNote, write_file, write_shard
from megatrain.checkpoint.store import Checkpoints, Manifest
from megatrain.engine import StreamingEngine
from megatrain.host import HostLayer

log = logging.getLogger("megatrain")

RANDOM_FILE = "random.safetensors"
Part = tuple[int | None, HostLayer]
OnEnd = Callable[[Exception | None], None]


class Gate:
    """Holds back updates of layers that are still to be written. step: the first whose updates come too early."""

    def __init__(self, parts: Sequence[Part], step: int) -> None:
        self._step = step
        self._written = {layer: threading.Event() for layer, _ in parts}

    def __call__(self, layer: int | None, step: int) -> None:
        """Called before a layer is updated."""
        if step >= self._step:
            self._written[layer].wait()

    def open(self, layer: int | None) -> None:
        self._written[layer].set()

    def open_all(self) -> None:
        for event in self._written.values():
            event.set()


class CheckpointWriter:
    """Writes an engine's checkpoints, one at a time. A failure is logged and kept in `error`; training goes on."""

    def __init__(self, engine: StreamingEngine, checkpoints: Checkpoints) -> None:
        self.error: Exception | None = None
        self.begun: list[int] = []  # steps
        self.written: list[int] = []
        self._engine = engine
        self._checkpoints = checkpoints
        self._thread: threading.Thread | None = None

    def write(
        self,
        step: int,
        state: dict[str, Any],
        files: Mapping[str, bytes] | None = None,
        on_end: OnEnd = lambda error: None,
    ) -> None:
        """Begin to write the state between two steps; waits for the one before to be written.

        step: steps done. state: plain values to keep with it (data position, settings). files: further ones, by name.
        on_end: called from the writing thread when all is on the disk, or with what prevented it.
        """
        self.wait()
        self.begun.append(step)
        parts, updates = self._engine.parts(), self._engine.updates_in_flight()
        random = self._engine.random_states()
        state = {**state, "engine_step": self._engine.steps_applied}
        gate = Gate(parts, self._engine.steps_applied)
        self._engine.before_update = gate
        arguments = (step, parts, updates, random, state, files or {}, gate, on_end)
        self._thread = threading.Thread(target=self._write, args=arguments, name="megatrain-checkpoint", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Block until what is being written is on the disk, or has failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _write(
        self,
        step: int,
        parts: Sequence[Part],
        updates: Mapping[int | None, Callable[[], None]],
        random: dict[str, torch.Tensor],
        state: dict[str, Any],
        further: Mapping[str, bytes],
        gate: Gate,
        on_end: OnEnd,
    ) -> None:
        unfinished: Path | None = None
        failure: Exception | None = None
        try:
            unfinished = self._checkpoints.begin(step, _nbytes(parts))
            files = {RANDOM_FILE: write_shard(unfinished / RANDOM_FILE, random, {})}
            files |= {name: write_file(unfinished / name, [memoryview(data)]) for name, data in further.items()}
            for layer, host in parts:
                if layer in updates:
                    updates[layer]()
                files[file_of(layer)] = _write_part(unfinished, layer, host)
                gate.open(layer)
            self._checkpoints.commit(unfinished, Manifest(step, files, state))
            self.written.append(step)
        except Exception as error:  # a full disk must not end days of training
            self.error = failure = error
            log.error("no checkpoint of step %d was written, and training goes on: %s", step, error)
            if unfinished is not None:
                shutil.rmtree(unfinished, ignore_errors=True)
        finally:
            gate.open_all()
            on_end(failure)


def _write_part(folder: Path, layer: int | None, host: HostLayer) -> FileNote:
    return write_shard(folder / file_of(layer), tensors_of(host), metadata_of(host))


def _nbytes(parts: Sequence[Part]) -> int:
    return sum(tensor.nbytes for _, host in parts for tensor in tensors_of(host).values())
