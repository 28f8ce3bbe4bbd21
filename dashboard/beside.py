"""What the engine computes between two optimizer steps: it scores held-out data, or answers prompts.

Note: how it is told from training. Every span has the number of the step to come, whatever it is for. But between the
end of a step and the start of the next nothing is trained, so what is computed there is something else. After the
newest step that has ended, a pass that begins with "record" may be the step that runs: it is, once it comes to the loss
or goes backward. Until then it is taken for it if nothing else was computed since. Layers that run without a "record"
before them are those of a model that generates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dashboard.pieces import OPS, Pieces

RECORD, FORWARD, SCORE = (OPS.index(op) for op in ("record", "forward", "score"))
TRAINING = [OPS.index(op) for op in ("head", "backward", "norm")]


@dataclass(frozen=True, slots=True)
class Beside:
    """What was computed between two steps: from when to when, before which step, and what for, in a word or two."""

    start_s: float
    end_s: float
    step: int
    what: str

    def covers(self, start_s: float, end_s: float) -> bool:
        return self.start_s <= start_s and end_s <= self.end_s


class Since(NamedTuple):
    """What was computed since the newest step has ended: beside training, and when the step that runs began."""

    beside: Pieces
    running_s: float | None


def between(compute: Pieces, step: int, *, evaluated: bool) -> Beside | None:
    """Return what was computed between two steps, if anything was. evaluated: a held-out loss came of it."""
    what = _what(compute["kind"], evaluated=evaluated)
    if not len(compute) or not what:
        return None
    return Beside(float(compute["start_s"][0]), float(compute["end_s"].max()), step, what)


def since(compute: Pieces) -> Since:
    """Tell the step that runs from what was computed before it. compute: all since the newest step has ended."""
    kinds = compute["kind"]
    begins = np.flatnonzero((kinds == RECORD) & (_before(kinds) != RECORD))
    if not len(begins):
        return Since(compute, None)
    last = int(begins[-1])
    alone = last == 0 and not (kinds == SCORE).any()
    if alone or np.isin(kinds[last:], TRAINING).any():
        return Since(compute[:last], float(compute["start_s"][last]))
    return Since(compute, None)


def around(beside: Sequence[Beside], start_s: float, end_s: float) -> Beside | None:
    """Return the one that something belongs to, if any."""
    return next((each for each in beside if each.covers(start_s, end_s)), None)


def _what(kinds: npt.NDArray[np.int64], *, evaluated: bool) -> str:
    words = ["evaluation" if evaluated else "scoring"] if (kinds == SCORE).any() else []
    return ", ".join(words + ["generation"] * _generates(kinds))


def _generates(kinds: npt.NDArray[np.int64]) -> bool:
    """Whether a layer ran that no "record" had prepared."""
    forward = kinds == FORWARD
    prepared = np.append(-1, kinds[~forward])[np.cumsum(~forward)]  # what ran last that was no layer
    return bool((prepared[forward] != RECORD).any())


def _before(kinds: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return np.append(-1, kinds[:-1])[: len(kinds)]
