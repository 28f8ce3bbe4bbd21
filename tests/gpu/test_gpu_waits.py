"""What a steady step asks of the driver: no wait for the whole device, no memory, no copy that holds its thread up."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import cycle
from typing import Any, Literal

import pytest
import torch
from card import ADAMW, config_for, needs_card
from families import build
from reference import Batch, make_batch
from tiny_models import tiny
from torch.profiler import ProfilerActivity, profile
from transformers import PreTrainedModel

from megatrain import StreamingEngine

pytestmark = needs_card

WARM, STEADY = 4, 3  # steps
WINDOWS = 4  # of steady steps
TRANSFORMERS = "/transformers/"
SETTINGS: list[dict[str, Any]] = [
    {},
    {"micro_batch_size": 2},
    {"prefetch_depth": 0},
    {"prefetch_depth": 3, "grad_buffers": 3},
    {"dtype": "bfloat16", "micro_batch_size": 2, "offload_activations": True},
    {"kept_graphs": 4},
]
FOR_THE_WHOLE_DEVICE = ("cudaDeviceSynchronize", "cuCtxSynchronize")
FOR_A_COPY = ("cudaMemcpy", "cudaMemset")
FOR_MEMORY = ("cudaMalloc", "cudaFree", "cudaHostAlloc", "cudaFreeHost", "cudaMallocHost", "cudaHostRegister")


def model() -> PreTrainedModel:
    return build("llama", layers=8, hidden_size=256, intermediate_size=512)


def batches() -> list[Batch]:
    return [make_batch(tiny(), 6, 64, seed=seed) for seed in range(3)]


@contextmanager
def warm(setting: dict[str, Any]) -> Iterator[Callable[[], None]]:
    """An engine after some steps, as what takes one more. Every step has the same shapes."""
    data = cycle(batches())
    with StreamingEngine(model(), config_for(**setting), ADAMW) as engine:

        def step() -> None:
            engine.step(next(data))

        for _ in range(WARM):
            step()
        engine.flush()
        yield step
        engine.flush()


@contextmanager
def waits_made(mode: Literal["error", "warn"]) -> Iterator[None]:
    """torch warns once that this is a prototype: as an error that would leave the mode on for all tests to come."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
            torch.cuda.set_sync_debug_mode(mode)
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_wait_would_be_an_error() -> None:
    """Without this the next test would say nothing."""
    number = torch.ones((), device="cuda")
    with waits_made("error"), pytest.raises(RuntimeError, match="synchroniz"):
        number.item()


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_no_operation_of_ours_waits_for_the_device(setting: dict[str, Any]) -> None:
    """transformers does, where it looks whether a mask can be left out: in the shell, and in no layer."""
    with warm(setting) as step, warnings.catch_warnings(record=True) as waits:
        warnings.simplefilter("always")
        with waits_made("warn"):
            for _ in range(STEADY):
                step()
    places = Counter(f"{wait.filename}:{wait.lineno}" for wait in waits if "synchroniz" in str(wait.message))
    assert {place: count for place, count in places.items() if TRANSFORMERS not in place} == {}
    assert not any("modeling_" in place for place in places), places


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_steady_steps_come_to_ask_the_driver_for_no_memory(setting: dict[str, Any]) -> None:
    """By torch's own count of what its allocators of device and pinned memory asked for.

    How late a stream is decides which blocks are free again, so that a step may still need one more than those before.
    """
    with warm(setting) as step:
        assert any(asks_for_nothing(step) for _ in range(WINDOWS))


def asks_for_nothing(step: Callable[[], None]) -> bool:
    before = asked_for()
    for _ in range(STEADY):
        step()
    return asked_for() == before


def asked_for() -> dict[str, int]:
    device, host = torch.cuda.memory_stats(), torch.cuda.host_memory_stats()
    found = {name: device[name] for name in ("num_device_alloc", "num_device_free", "num_alloc_retries")}
    return found | {f"host {name}": host[name] for name in ("num_host_alloc", "num_host_free")}


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_calls_of_the_driver_in_a_steady_step(setting: dict[str, Any]) -> None:
    """Of all threads, as CUPTI saw them, but for what the profiler itself does at its ends."""
    with warm(setting) as step:
        assert any(asks_for_nothing(step) for _ in range(WINDOWS))
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            for _ in range(STEADY):
                step()
        launches = [event for event in profiler.events() if event.name.startswith("cudaLaunchKernel")]
        ends_us = max(event.time_range.end for event in launches)
        calls = Counter(event.name for event in profiler.events() if event.time_range.start <= ends_us)
    assert launches
    unwanted = (*FOR_THE_WHOLE_DEVICE, *FOR_A_COPY, *FOR_MEMORY)
    assert {name: count for name, count in calls.items() if name in unwanted} == {}
