"""That an engine which was steered wildly holds no more of the device than one that was left alone."""

from __future__ import annotations

from megatrain import StreamingEngine
from megatrain.memory import device_bytes, optimizer_buffer_bytes


def require_no_leak(engine: StreamingEngine) -> None:
    """Between two steps the device holds what the knobs ask for, and nothing else."""
    executor, knobs = engine._executor, engine.control.knobs
    assert len(executor.weights) == min(knobs.weight_slots, len(engine._layouts))
    each = optimizer_buffer_bytes(engine._layouts, engine.config)
    counts = (1, knobs.grad_buffers) if each else (knobs.grad_buffers, 0)
    assert (len(executor.gradients), len(executor.optimizer)) == counts
    size = engine._room.size
    needs = device_bytes(engine._layouts, engine._shell_layout, knobs, size, offload=True, optimizer_bytes=each)
    assert engine.arena_bytes == needs.total - needs.saved_inputs
    assert not executor.saved._held
    assert not executor._dones
