"""Every peer does the same work as plain training: its losses and norms on a tiny model, step by step."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest

from benchmarks import adamw
from benchmarks.apart import Apart
from benchmarks.models import step_flops
from benchmarks.peers import PEERS, ZERO3, fsdp2, ours, plain
from benchmarks.peers.contender import Contender, Task
from benchmarks.shapes import TINY

DTYPES = ("float32", "bfloat16")
STEPS = 4
NO_DEEPSPEED = "DeepSpeed's ZeRO-3 and CPU Adam are not compared here: DS_BUILD_OPS=0 pip install 'megatrain[peers]'"
needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason=NO_DEEPSPEED)


def task(dtype: Any, micro_batch_size: int | None = None) -> Task:
    return Task(TINY, rows=2, tokens=16, dtype=dtype, lr=1e-3, micro_batch_size=micro_batch_size)


def trained(contender: Contender) -> list[tuple[float, float]]:
    try:
        found = [contender.step() for _ in range(STEPS)]
        contender.settle()
        return found
    finally:
        contender.close()


def assert_close(found: list[tuple[float, float]], expected: list[tuple[float, float]], rel: float) -> None:
    losses, norms = zip(*found, strict=True)
    plain_losses, plain_norms = zip(*expected, strict=True)
    assert losses == pytest.approx(plain_losses, rel=rel)
    assert norms == pytest.approx(plain_norms, rel=10 * rel)


@pytest.mark.parametrize("dtype", DTYPES)
def test_plain_training_is_the_same_without_checkpointing(dtype: Any) -> None:
    assert trained(plain.build_without_checkpointing(task(dtype))) == trained(plain.build(task(dtype)))


@pytest.mark.parametrize("build", [ours.build, ours.build_with_graphs, fsdp2.build])
@pytest.mark.parametrize("rows", [None, 1])
@pytest.mark.parametrize(("dtype", "rel"), [("float32", 1e-6), ("bfloat16", 5e-3)])
def test_a_peer_is_plain_training(build: Callable[[Task], Contender], rows: int | None, dtype: Any, rel: float) -> None:
    assert_close(trained(build(task(dtype, rows))), trained(plain.build(task(dtype))), rel)


@needs_deepspeed
@pytest.mark.timeout(1800)  # the first run on a machine compiles its Adam
@pytest.mark.parametrize(("dtype", "rel", "rows"), [("float32", 1e-5, 1), ("bfloat16", 5e-3, None)])
def test_zero3_is_plain_training(dtype: Any, rel: float, rows: int | None) -> None:
    zero3 = Apart(PEERS[ZERO3], task(dtype, rows), threads=1, patience_s=900)
    zero3.wait_until_built()
    assert_close(trained(zero3), trained(plain.build(task(dtype))), rel)


def test_a_missing_deepspeed_names_the_way_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DS_ACCELERATOR", "LOCAL_RANK"):  # which the module sets for good
        monkeypatch.setenv(name, "0")
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(ImportError, match=r"DS_BUILD_OPS=0 pip install 'megatrain\[peers\]'"):
        importlib.import_module("benchmarks.peers.with_deepspeed")


def test_model_flops_are_counted_as_the_engine_counts_them() -> None:
    contender = ours.build(task("float32"))
    trained(contender)
    assert contender.records[0].flops == step_flops(TINY, 2, 16)


# ---- AdamW alone ----


def test_each_of_ours_is_compared_with_its_rival_where_that_was_measured() -> None:
    rates = {"AdamW fp32": 3e9, "DeepSpeed CPU Adam, fp32": 2e9, "AdamW split": 1e9}
    rows = [adamw.Row(name, 2, rate, 0.0) for name, rate in rates.items()]
    assert adamw.ratio_lines(rows) == ["AdamW fp32 ÷ DeepSpeed CPU Adam, fp32, 2 threads: 1.50 (target 1.5)"]


@needs_deepspeed
@pytest.mark.timeout(1800)
def test_deepspeeds_adam_is_measured_with_every_number_of_threads() -> None:
    rows = adamw.measure_all(4096, 1, deepspeed=True)
    measured = {(row.name, row.threads) for row in rows if row.params_per_s > 0}
    assert {(rival, threads) for rival in adamw.RIVALS.values() for threads in adamw.thread_counts()} <= measured
