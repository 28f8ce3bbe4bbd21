"""That an engine which was steered wildly holds no more of the device than one that was left alone."""

from __future__ import annotations

from megatrain import StreamingEngine
from megatrain.memory import device_bytes


def require_no_leak(engine: StreamingEngine) -> None:
    """Between two steps the device holds what the knobs ask for, and nothing else."""
    executor, knobs = engine._executor, engine.control.knobs
    assert len(executor.weights) == min(knobs.weight_slots, len(engine._layouts))
    assert len(executor.gradients) == knobs.grad_buffers
    needs = device_bytes(engine._layouts, engine._shell_layout, knobs, engine._room.size, offload=True)
    assert engine.arena_bytes == needs.total - needs.saved_inputs
    assert not executor.saved._held
    assert not executor._dones
