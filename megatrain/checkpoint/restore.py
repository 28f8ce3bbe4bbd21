"""Puts a checkpoint's state back into an engine."""

from __future__ import annotations

from megatrain.checkpoint.parts import LAYER, file_of, put
from megatrain.checkpoint.shards import read_shard
from megatrain.checkpoint.store import CheckpointError, Checkpoints, Manifest
from megatrain.checkpoint.writer import RANDOM_FILE
from megatrain.engine import StreamingEngine


def restore(engine: StreamingEngine, checkpoints: Checkpoints, step: int | None = None) -> Manifest:
    """Load a checkpoint, the newest one if `step` is None, after reading it through once to see that it is whole.

    Returns what it says of itself. CheckpointError if there is none, if it is damaged (then the engine is untouched),
    or of another model.
    """
    steps = checkpoints.steps()
    if not steps:
        raise CheckpointError(
            f"there is no checkpoint in {checkpoints.folder}: a run leaves some where run.checkpoint_every is set, "
            "and one when it is stopped"
        )
    if step is not None and step not in steps:
        there = ", ".join(map(str, steps))
        raise CheckpointError(f"no checkpoint of step {step} in {checkpoints.folder}; there are: {there}")
    manifest = checkpoints.verify(steps[-1] if step is None else step)
    folder = checkpoints.path(manifest.step)
    parts = engine.parts()
    held = {name for name in manifest.files if name.startswith(LAYER)}
    if held != {file_of(layer) for layer, _ in parts[1:]}:
        raise CheckpointError(f"{folder} is of another model: it has {len(held)} layers, this one {len(parts) - 1}")
    engine.flush()
    for layer, host in parts:
        path = folder / file_of(layer)
        try:
            put(host, *read_shard(path), where=str(path))
        except ValueError as error:
            raise CheckpointError(str(error)) from None
    engine.resume_at(manifest.state["engine_step"], read_shard(folder / RANDOM_FILE)[0])
    return manifest
