"""What the tests of this folder share: the device, and how near to plain training it has to come.

Kernels of a GPU sum in no fixed order, so results agree up to rounding here. AdamW's eps is larger than by
default: where a gradient is nothing but rounding, AdamW would otherwise make it as large as the learning rate.

MEGATRAIN_TEST_DEVICE=cpu runs all that does not need a card on a CPU: the tests themselves are tried there.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import pytest
import torch
from pairs import LR, Outcome, engine_config, gap, outcome
from reference import Batch
from transformers import PreTrainedModel

from megatrain import AdamWConfig, EngineConfig

DEVICE: Literal["cuda", "cpu"] = "cpu" if os.environ.get("MEGATRAIN_TEST_DEVICE") == "cpu" else "cuda"
FAMILIES = ["llama", "qwen3_moe", "gpt_oss", "gemma3_text", "gpt2", "mixtral", "phi3"]
ADAMW = AdamWConfig(lr=LR, eps=1e-4, weight_decay=0.1, max_grad_norm=0.5)
TOLERANCE = 2e-5

needs_card = pytest.mark.skipif(DEVICE == "cpu", reason="tells something only of a card")


def config_for(**changes: Any) -> EngineConfig:
    return engine_config(**{"device": DEVICE, **changes})


def on_device(model: PreTrainedModel, batches: list[Batch], adamw: AdamWConfig = ADAMW, **config: Any) -> Outcome:
    return outcome(model, batches, adamw, **{"device": DEVICE, **config})


def require_near(found: Outcome, expected: Outcome, tolerance: float = TOLERANCE) -> None:
    assert found.losses == pytest.approx(expected.losses, rel=tolerance)
    assert found.norms == pytest.approx(expected.norms, rel=tolerance)
    assert gap(found.state, expected.state) <= tolerance


@contextmanager
def every_bit_repeats() -> Iterator[None]:
    """Within, torch sums in a fixed order, and fresh memory holds NaN.

    cuBLAS needs CUBLAS_WORKSPACE_CONFIG besides, which conftest sets before CUDA starts. Where an operation has no
    such order torch warns and goes on: the tests compare bits, so that it shows.
    """
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*does not have a deterministic implementation")
            warnings.filterwarnings("ignore", message=".*non-deterministic algorithm")
            yield
    finally:
        torch.use_deterministic_algorithms(False)
