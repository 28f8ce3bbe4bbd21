"""A made-up but plausible run, written straight into a recorder: double buffering, two micro-batches, overlap."""

from __future__ import annotations

from megatrain.trace import Marker, MemorySample, Recorder, SlotChange, Span, StepRecord

LAYER_BYTES = 436_000_000
LOAD_S, UNLOAD_S, UPDATE_S = 0.009, 0.010, 0.014
FORWARD_S, BACKWARD_S, HEAD_S, EMBED_S = 0.006, 0.016, 0.012, 0.003
SLOTS = GRADIENT_BUFFERS = 2


class TracedRun:
    def __init__(self, layers: int = 6, micro_batches: int = 2) -> None:
        self.recorder = Recorder()
        self.layers, self.micro_batches = layers, micro_batches
        self.free_s = dict.fromkeys(("h2d", "compute", "d2h", "host"), 0.0)
        self.slot_free_s = [0.0] * SLOTS
        self.gradient_free_s = [0.0] * GRADIENT_BUFFERS
        self.updated_s = [0.0] * layers
        self.loads = self.unloads = 0

    def steps(self, count: int) -> Recorder:
        for step in range(count):
            self._step(step)
        for tick in range(int(max(self.free_s.values()) / 0.05) + 1):
            self.recorder.add(memory_sample(tick * 0.05))
        self.recorder.add(Marker(self.free_s["compute"] * 0.7, "prefetch_depth", 0, 1, count - 1, 3))
        return self.recorder

    def _step(self, step: int) -> None:
        start_s = self.free_s["compute"]
        self._run("compute", "record", step, None, 0, None, start_s, EMBED_S, 0)
        held: dict[int, tuple[int, float]] = {}
        for layer in range(self.layers):
            held[layer] = self._load(step, layer)
            self._compute("forward", step, layer, held[layer], FORWARD_S, release=layer < self.layers - SLOTS)
        self._run("compute", "head", step, None, 0, None, 0.0, HEAD_S, 0)
        unloaded_s = {}
        for layer in reversed(range(self.layers)):
            buffer = self.unloads % GRADIENT_BUFFERS
            ready = held[layer] if layer >= self.layers - SLOTS else self._load(step, layer)
            start = max(ready[1], self.gradient_free_s[buffer])
            end_s = self._compute("backward", step, layer, (ready[0], start), BACKWARD_S, release=True)
            self._gradient(start, "in_use", buffer, layer, step)
            self._gradient(end_s, "draining", buffer, layer, step)
            unloaded_s[layer] = self._run("d2h", "unload", step, layer, None, buffer, end_s, UNLOAD_S, LAYER_BYTES)
            self.gradient_free_s[buffer] = unloaded_s[layer]
            self._gradient(unloaded_s[layer], "free", buffer, None, step)
            self.unloads += 1
        end_s = self.free_s["compute"]
        for layer in range(self.layers):
            ready_s = max(unloaded_s.values())
            self.updated_s[layer] = self._run("host", "update", step, layer, None, None, ready_s, UPDATE_S, 0)
        loss = 10.8 - 1.3 * step**0.5
        record = (step, start_s, end_s, loss, 1.4, 1e-4, 8000, 8192, 9_000_000_000_000, 1)
        self.recorder.add(StepRecord(*record, self.micro_batches, None))

    def _load(self, step: int, layer: int) -> tuple[int, float]:
        slot = self.loads % SLOTS
        self.loads += 1
        ready_s = max(self.slot_free_s[slot], self.updated_s[layer])
        end_s = self._run("h2d", "load", step, layer, None, slot, ready_s, LOAD_S, LAYER_BYTES)
        self.recorder.add(SlotChange(end_s - LOAD_S, "weights", slot, "loading", layer, step))
        self.recorder.add(SlotChange(end_s, "weights", slot, "ready", layer, step))
        return slot, end_s

    def _compute(
        self, op: str, step: int, layer: int, held: tuple[int, float], length_s: float, release: bool
    ) -> float:
        slot, ready_s = held
        start_s = max(ready_s, self.free_s["compute"])
        self.recorder.add(SlotChange(start_s, "weights", slot, "in_use", layer, step))
        for micro_batch in range(self.micro_batches):
            end_s = self._run("compute", op, step, layer, micro_batch, slot, ready_s, length_s, 0)
        self.recorder.add(
            SlotChange(end_s, "weights", slot, "free" if release else "ready", None if release else layer, step)
        )
        if release:
            self.slot_free_s[slot] = end_s
        return end_s

    def _gradient(self, time_s: float, state: str, buffer: int, layer: int | None, step: int) -> None:
        self.recorder.add(SlotChange(time_s, "gradients", buffer, state, layer, step))

    def _run(
        self,
        lane: str,
        op: str,
        step: int,
        layer: int | None,
        micro_batch: int | None,
        slot: int | None,
        ready_s: float,
        length_s: float,
        nbytes: int,
    ) -> float:
        start_s = max(ready_s, self.free_s[lane])
        self.free_s[lane] = start_s + length_s
        self.recorder.add(Span(lane, op, step, layer, micro_batch, slot, start_s, self.free_s[lane], nbytes))
        return self.free_s[lane]


def memory_sample(time_s: float, arena_bytes: int = 3_600_000_000) -> MemorySample:
    return MemorySample(
        time_s, None, None, None, None, None, arena_bytes, 30_000_000_000, 21_000_000_000, 90_000_000_000
    )
