"""Something to do in a fresh process that imports next to nothing."""

from __future__ import annotations

import os


def openmp_threads(limit: int) -> int:
    found = int(os.environ["OMP_NUM_THREADS"])
    if found > limit:
        raise ValueError(f"{found} threads are too many")
    return found
