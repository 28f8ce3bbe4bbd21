"""Huge pages for host memory, with and without: the time to touch an arena, and AdamW within it.

    python -m benchmarks.pages --megabytes 1024

Both kinds take turns. Seconds are of CPU time on one core, so that other work disturbs little. AdamW is the engine's
kernel on a float32 master with float32 moments. Anonymous memory only gets
huge pages where /sys/kernel/mm/transparent_hugepage/enabled says "madvise" or "always".
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import statistics
import time
from pathlib import Path

import torch

from benchmarks.adamw import STEP
from benchmarks.machine import in_words
from benchmarks.table import Cell, table
from megatrain.optim import update

ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")
ARRAYS = 4  # weight, gradient and two moments
KINDS = {"huge pages": "MADV_HUGEPAGE", "small pages": "MADV_NOHUGEPAGE"}


def fresh(nbytes: int, advice: str) -> torch.Tensor:
    """Memory that nobody has touched."""
    mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapping.madvise(getattr(mmap, advice))
    return torch.frombuffer(mapping, dtype=torch.uint8)


def touch_and_update(nbytes: int, advice: str, updates: int) -> tuple[float, float]:
    """Seconds to touch the memory, and the median of seconds of an update within it."""
    memory = fresh(nbytes, advice)
    start_s = time.process_time()
    ctypes.memset(memory.data_ptr(), 0, nbytes)
    touched_s = time.process_time() - start_s
    weight, gradient, exp_avg, exp_avg_sq = memory.view(torch.float32).chunk(ARRAYS)
    gradient.fill_(1e-3)
    seconds = []
    for _ in range(updates):
        start_s = time.process_time()
        update(weight, None, gradient, exp_avg, exp_avg_sq, STEP, threads=1)
        seconds.append(time.process_time() - start_s)
    return touched_s, statistics.median(seconds)


def measure(nbytes: int, rounds: int, updates: int = 5) -> dict[str, list[tuple[float, float]]]:
    found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
    for _ in range(rounds):
        for kind, advice in KINDS.items():
            found[kind].append(touch_and_update(nbytes, advice, updates))
    return found


def summary(found: dict[str, list[tuple[float, float]]], nbytes: int) -> str:
    """Medians over rounds, with the range."""
    rows: list[list[Cell]] = []
    for kind, pairs in found.items():
        touches = [nbytes / 1e9 / touched for touched, _ in pairs]
        updates = [nbytes / (4 * ARRAYS) / 1e9 / updated for _, updated in pairs]
        spreads = [f"{statistics.median(x):.2f} ({min(x):.2f}–{max(x):.2f})" for x in (touches, updates)]
        rows.append([kind, *spreads])
    return table(["", "touched, GB/s", "AdamW, G parameters/s"], rows)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args(arguments)
    print(in_words())
    print(f"{ENABLED}: {ENABLED.read_text().strip() if ENABLED.exists() else 'not there'}")
    nbytes = args.megabytes << 20
    print(summary(measure(nbytes, args.rounds), nbytes))


if __name__ == "__main__":
    main()
