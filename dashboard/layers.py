"""What each layer did and looked like in a step: the rows of the table and of the heat map."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from functools import lru_cache

import numpy as np

from dashboard.curves import Floats
from megatrain.trace import LayerStats, Records, Span


@dataclass(frozen=True, slots=True)
class LayerRow:
    """One layer in one step; NaN for what is not known.

    forward_ms, backward_ms: over all micro-batches. weight_mb: as loaded. The others: see `LayerStats`.
    """

    layer: int
    forward_ms: float
    backward_ms: float
    weight_mb: float
    grad_norm: float
    weight_norm: float
    output_rms: float


QUANTITIES = {  # field of a LayerRow → what it is called
    "forward_ms": "forward ms",
    "backward_ms": "backward ms",
    "weight_mb": "weight MB",
    "grad_norm": "gradient norm",
    "weight_norm": "weight norm",
    "output_rms": "output RMS",
}
assert list(QUANTITIES) == [field.name for field in fields(LayerRow)][1:]


def layer_rows(records: Records) -> tuple[LayerRow, ...]:
    """Return a row for each layer, of the newest step that is complete; empty before that."""
    if not records.steps:
        return ()
    step = max(record.step for record in records.steps)
    loads = {span.layer: span.nbytes for span in records.spans if span.op == "load" and span.layer is not None}
    stats = [layer for layer in records.layers if layer.step == step]
    return rows_of_step([span for span in records.spans if span.step == step], stats, loads)


def rows_of_step(
    spans: Iterable[Span], stats: Iterable[LayerStats], weight_bytes: Mapping[int, int]
) -> tuple[LayerRow, ...]:
    """Return a row for each layer that a step's spans or statistics name, from 0 up."""
    seconds: dict[tuple[str, int], float] = defaultdict(float)
    for span in spans:
        if span.op in ("forward", "backward") and span.layer is not None:
            seconds[span.op, span.layer] += span.end_s - span.start_s
    by_layer = {layer.layer: layer for layer in stats}
    return tuple(
        LayerRow(
            layer,
            1e3 * seconds.get(("forward", layer), math.nan),
            1e3 * seconds.get(("backward", layer), math.nan),
            weight_bytes.get(layer, math.nan) / 1e6,
            *_scales(by_layer.get(layer)),
        )
        for layer in sorted({layer for _, layer in seconds} | by_layer.keys())
    )


def _scales(stats: LayerStats | None) -> tuple[float, float, float]:
    return (stats.grad_norm, stats.weight_norm, stats.output_rms) if stats else (math.nan,) * 3


@dataclass(frozen=True, slots=True)
class HeatMap:
    """One row for each quantity, one column for each layer.

    shade: whole numbers, 0 the least and 100 the most of its row; None where there is no value. value: the true ones.
    ranges: least and most of each row, in words.
    """

    layers: list[int]
    shade: list[list[int | None]]
    value: list[list[float | None]]
    ranges: list[str]


@lru_cache(4)  # rows change once a step, the figure many times
def heat_map(rows: tuple[LayerRow, ...]) -> HeatMap:
    values = [np.array([getattr(row, name) for row in rows], np.float64) for name in QUANTITIES]
    return HeatMap(
        layers=[row.layer for row in rows],
        shade=[_shades(row) for row in values],
        value=[[float(f"{x:.4g}") if math.isfinite(x) else None for x in row.tolist()] for row in values],
        ranges=[_range(row[np.isfinite(row)]) for row in values],
    )


def _shades(values: Floats) -> list[int | None]:
    """Where all are the same in the words of the range, half shade: then none stands out."""
    known = values[np.isfinite(values)]
    if not len(known) or _least_and_most(known)[0] == _least_and_most(known)[1]:
        return [50 if math.isfinite(x) else None for x in values.tolist()]
    scale = 100 / (known.max() - known.min())
    return [round((x - known.min()) * scale) if math.isfinite(x) else None for x in values.tolist()]


def _range(known: Floats) -> str:
    if not len(known):
        return ""
    least, most = _least_and_most(known)
    return least if least == most else f"{least} – {most}"


def _least_and_most(known: Floats) -> tuple[str, str]:
    return f"{known.min():.3g}", f"{known.max():.3g}"
