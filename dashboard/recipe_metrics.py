"""What the training recipe tells of its steps (rewards, margins, lengths): small curves, bounded however long it is."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dashboard.curves import Curve, mean
from megatrain.trace import StepRecord

POINTS = 60  # of a curve that is as wide as a few words
MOST = 24  # names; a recipe has about eight


@dataclass(frozen=True, slots=True)
class MetricRow:
    """One metric: its newest value, its mean over the last steps, its value on held-out data, its curve.

    NaN for what is not known.
    """

    name: str
    newest: float
    recent: float
    held_out: float
    curve: tuple[float, ...]


class RecipeMetrics:
    """Curves by name; a further name beyond the first `MOST` is passed over."""

    def __init__(self) -> None:
        self._curves: dict[str, Curve] = {}

    def extend(self, steps: Sequence[StepRecord]) -> None:
        """Take further steps, in order, none twice."""
        found: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for step in steps:
            for name, value in step.metrics.items():
                found[name].append((step.step, value))
        for name, rows in found.items():
            if name in self._curves or len(self._curves) < MOST:
                self._curves.setdefault(name, Curve(["value"], mean, POINTS)).extend(rows)

    def rows(
        self, unsettled: Sequence[StepRecord], recent: Sequence[StepRecord], held_out: Mapping[str, float]
    ) -> tuple[MetricRow, ...]:
        """unsettled: steps that are not in the curves yet. recent: those whose mean is told. held_out: by name."""
        names = dict.fromkeys([*self._curves, *(name for step in recent for name in step.metrics), *held_out])
        return tuple(self._row(name, unsettled, recent, held_out) for name in [*names][:MOST])

    def _row(
        self, name: str, unsettled: Sequence[StepRecord], recent: Sequence[StepRecord], held_out: Mapping[str, float]
    ) -> MetricRow:
        curve = self._curves.get(name) or Curve(["value"], mean, POINTS)
        further = [(step.step, step.metrics[name]) for step in unsettled if name in step.metrics]
        values = [step.metrics[name] for step in recent if name in step.metrics]
        finite = [value for value in values if math.isfinite(value)]
        return MetricRow(
            name,
            newest=values[-1] if values else math.nan,
            recent=sum(finite) / len(finite) if finite else math.nan,
            held_out=held_out.get(name, math.nan),
            curve=tuple(curve.lines(further).y["value"].tolist()),
        )
