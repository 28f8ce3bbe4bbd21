import math

from traced_run import TracedRun

from dashboard.gradients import GradientWay
from dashboard.layers import LayerRow, heat_map, layer_rows
from megatrain.trace import LayerStats, Records, SlotChange, Span


def row(layer: int, forward_ms: float) -> LayerRow:
    return LayerRow(layer, forward_ms, 2.0, 3.0, math.nan, 5.0, 6.0)


def span(op: str, layer: int | None, end_s: float, step: int = 0) -> Span:
    lane = {"unload": "d2h", "update": "host"}.get(op, "compute")
    return Span(lane, op, step, layer, None, None, end_s - 0.5, end_s, 0)  # type: ignore[arg-type]


def test_a_row_sums_micro_batches_of_the_newest_complete_step() -> None:
    records = TracedRun(layers=3, micro_batches=2).steps(2).snapshot()
    records.layers.append(LayerStats(1.0, 1, 2, 0.5, 40.0, 1.5))
    records.layers.append(LayerStats(0.5, 0, 1, 9.0, 9.0, 9.0))
    rows = layer_rows(records)
    assert [row.layer for row in rows] == [0, 1, 2]
    assert [round(row.forward_ms, 6) for row in rows] == [12] * 3
    assert [round(row.backward_ms, 6) for row in rows] == [32] * 3
    assert [row.weight_mb for row in rows] == [436] * 3
    assert (rows[2].grad_norm, rows[2].weight_norm, rows[2].output_rms) == (0.5, 40.0, 1.5)
    assert math.isnan(rows[1].grad_norm)


def test_no_step_no_rows() -> None:
    assert layer_rows(Records()) == ()


def test_each_row_of_the_heat_map_has_its_own_scale() -> None:
    heat = heat_map((row(0, 1.0), row(1, 2.0), row(2, 5.0)))
    assert heat.layers == [0, 1, 2]
    assert heat.shade[0] == [0, 25, 100]
    assert heat.shade[1] == [50, 50, 50]  # equal: none stands out
    assert heat.shade[3] == heat.value[3] == [None] * 3
    assert heat.value[0] == [1, 2, 5]
    assert heat.ranges == ["1 – 5", "2", "3", "", "5", "6"]


def test_differences_too_small_to_be_told_are_not_drawn() -> None:
    assert heat_map((row(0, 32.0), row(1, 32.0000001))).shade[0] == [50, 50]


def test_a_gradient_arrives_waits_is_applied_and_is_gone() -> None:
    way = GradientWay()
    assert way.states(2, []) == ["empty", "empty"]
    in_use = SlotChange(1.0, "gradients", 0, "in_use", 1, 0)
    way.add([span("backward", 1, 1.0)])
    assert way.states(2, [in_use]) == ["empty", "empty"]  # still being computed
    way.add([span("backward", 0, 2.0)])
    assert way.states(2, [in_use]) == ["empty", "arriving"]
    way.add([span("unload", 1, 2.5), span("unload", 0, 3.0)])
    assert way.states(2, []) == ["waiting for AdamW"] * 2
    way.add([span("norm", None, 3.5)])
    assert way.states(2, []) == ["being applied", "waiting for AdamW"]
    way.add([span("update", 0, 4.0)])
    assert way.states(2, []) == ["empty", "being applied"]
    way.add([span("update", 1, 5.0)])
    assert way.states(2, []) == ["empty", "empty"]


def test_the_shell_is_applied_before_the_layers() -> None:
    way = GradientWay()
    way.add([span("unload", 0, 1.0), span("norm", None, 2.0), span("unload", None, 2.5)])
    assert way.states(1, []) == ["waiting for AdamW"]


def test_where_updates_follow_each_gradient_they_come_in_order_of_arrival() -> None:
    way = GradientWay()
    way.add([span("unload", 2, 1.0), span("update", 2, 1.5), span("unload", 1, 2.0), span("unload", 0, 3.0)])
    assert way.states(3, []) == ["waiting for AdamW", "being applied", "empty"]
