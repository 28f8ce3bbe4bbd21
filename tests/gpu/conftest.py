"""Every test of this folder needs a CUDA device, and says so where there is none."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from card import DEVICE, on_device
from families import build
from pairs import MICRO_ROWS, Outcome, batches_for
from reference import Batch

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # products that repeat bit by bit; read when CUDA starts


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = os.path.dirname(__file__)
    missing = DEVICE == "cuda" and not torch.cuda.is_available()
    for item in items:
        if str(item.path).startswith(here):
            item.add_marker(pytest.mark.gpu)
            if missing:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device; torch finds none here"))


@pytest.fixture(autouse=True)
def full_precision() -> Iterator[None]:
    """No TF32: float32 products are float32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.fixture(scope="session")
def batches() -> list[Batch]:
    return batches_for(build("llama"))


@pytest.fixture(scope="session")
def default(batches: list[Batch]) -> Outcome:
    """What every setting of the knobs has to come to."""
    return on_device(build("llama"), batches, micro_batch_size=MICRO_ROWS)
