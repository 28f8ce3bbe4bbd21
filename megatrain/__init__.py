"""MegaTrain: train language models larger than your GPU, exactly."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatrain.config import AdamWConfig, EngineConfig
    from megatrain.engine import StreamingEngine
    from megatrain.run import TrainingRun

_HOMES = {
    "AdamWConfig": "megatrain.config",
    "EngineConfig": "megatrain.config",
    "StreamingEngine": "megatrain.engine",
    "TrainingRun": "megatrain.run",
}
__all__ = ["AdamWConfig", "EngineConfig", "StreamingEngine", "TrainingRun"]


def __getattr__(name: str) -> Any:
    """Import on first use, so that `megatrain --help` need not load torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'megatrain' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
