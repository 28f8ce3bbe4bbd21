"""Memory of a card and pinned memory of its host: what is held, and what happens where there is too little."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from card import ADAMW, config_for, needs_card, on_device, require_near
from families import build
from reference import make_batch
from tiny_models import tiny
from transformers import PreTrainedModel

from megatrain import StreamingEngine
from megatrain.engine import DeviceMemoryError

pytestmark = needs_card

SLACK_BYTES = 128 << 20  # cuBLAS takes up to 32 MiB for each of its handles on each stream


def wide() -> PreTrainedModel:
    """Large enough that its weights, and not CUDA's own memory, decide what fits."""
    return build("llama", layers=4, hidden_size=1024, intermediate_size=4096, head_dim=64, num_attention_heads=16)


@contextmanager
def at_most(nbytes: int) -> Iterator[None]:
    """Within, torch takes no more of the card than this."""
    torch.cuda.set_per_process_memory_fraction(nbytes / torch.cuda.get_device_properties(0).total_memory)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def reserved_anew() -> int:
    """Bytes of the card that torch holds once it has given back what it can."""
    gc.collect()  # engines and what they call back refer to each other
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()  # one for each handle and stream, which every engine has anew
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_reserved()


def test_host_memory_is_pinned_while_the_engine_lives() -> None:
    with StreamingEngine(build("llama"), config_for(offload_activations=True), ADAMW) as engine:
        before = engine.pinned_bytes
        engine.step(make_batch(build("llama")))
        assert engine.pinned_bytes > before > 0


def test_memory_can_be_pinned_again_after_an_engine_was_closed() -> None:
    for _ in range(3):
        with StreamingEngine(wide(), config_for(), ADAMW) as engine:
            assert engine.pinned_bytes > 0


def test_the_device_holds_what_memory_arithmetic_says() -> None:
    """The ledger's bytes are torch's, up to rounding of each allocation and kernels' workspace."""
    reserved_anew()
    held = torch.cuda.memory_allocated()
    with StreamingEngine(build("llama"), config_for(), ADAMW) as engine:
        engine.step(make_batch(build("llama")))
        engine.flush()
        assert engine.arena_bytes <= torch.cuda.memory_allocated() - held
        assert engine.device_peak_bytes >= engine.arena_bytes
        assert engine.device_index is not None


@pytest.mark.parametrize(
    "setting",
    [{}, {"prefetch_depth": 0}, {"offload_activations": True}, {"micro_batch_size": 2}, {"kept_graphs": 2}],
    ids=str,
)
def test_training_under_memory_pressure_changes_nothing(setting: dict[str, Any]) -> None:
    """The allocator has little more than such a run needs: it has to give blocks back and find others."""
    batches = [make_batch(tiny(), 8, 128, seed=seed) for seed in range(3)]
    before = reserved_anew()
    expected = on_device(wide(), batches, **setting)
    needs = torch.cuda.max_memory_reserved() - before
    with at_most(reserved_anew() + needs + SLACK_BYTES):
        require_near(on_device(wide(), batches, **setting), expected)


def test_a_step_that_auto_settings_can_save_is_tried_again() -> None:
    """Torch is capped below what the engine chose by the whole card's free memory."""
    batches = [make_batch(tiny(), 16, 256, seed=seed) for seed in range(2)]
    frugal: dict[str, Any] = {"micro_batch_size": 2, "offload_activations": True}
    before = reserved_anew()
    expected = on_device(wide(), batches, **frugal)
    needs = torch.cuda.max_memory_reserved() - before
    generous: dict[str, Any] = {"micro_batch_size": 2, "kept_graphs": "auto", "resident_layers": "auto"}
    with at_most(reserved_anew() + needs + SLACK_BYTES):
        require_near(on_device(wide(), batches, **generous), expected)


def test_running_out_of_memory_is_said_and_survived() -> None:
    """A real one: torch's allocator is capped just above what the engine holds after a small step."""
    small, large = make_batch(tiny(), 4, 32), make_batch(tiny(), 64, 512)
    with StreamingEngine(wide(), config_for(offload_activations=False), ADAMW) as engine:
        engine.step(small)
        engine.flush()
        with at_most(reserved_anew() + (8 << 20)), pytest.raises(DeviceMemoryError, match="what can be lowered"):
            engine.step(large)
        assert engine.step(small).loss > 0
