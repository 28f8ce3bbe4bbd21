import json
import math
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain.plain import from_plain, to_plain
from megatrain.report import Inspection, RunInfo, RunState, Status, TensorStats
from megatrain.steering import Knobs, Phase, Position
from megatrain.trace import Marker, MemorySample, StepRecord

KINDS = [Status, RunInfo, StepRecord, MemorySample, Inspection]


def through_json(value: object) -> Any:
    return json.loads(json.dumps(to_plain(value), allow_nan=False))


@pytest.mark.parametrize("kind", KINDS)
def test_every_report_survives_json(kind: type[Any]) -> None:
    @settings(deadline=None)
    @given(st.from_type(kind))
    def check(report: Any) -> None:
        again = from_plain(kind, through_json(report))
        assert isinstance(again, kind)
        assert to_plain(again) == to_plain(report)  # NaN is not equal to itself

    check()


def test_reads_what_is_nested() -> None:
    stats = TensorStats(0.5, 1.5, 2.5, 1)
    held = Inspection(["load 3"], 2, "backward", came=stats)
    status = Status(RunState.PAUSED, 4, Knobs(1, 2, 0), 2, Position(4, "forward", 1), {"h2d": ["load 3"]}, held=held)
    assert to_plain(status)["state"] == "paused"
    assert from_plain(Status, through_json(status)) == status


def test_what_json_has_no_word_for() -> None:
    record = StepRecord(0, 0.0, 1.0, math.nan, math.inf, 1e-4, 7, 8, 9, 1, 2, None)
    assert through_json(record)["loss"] is None
    again = from_plain(StepRecord, through_json(record))
    assert math.isnan(again.loss)
    assert math.isnan(again.grad_norm)
    assert again.skipped is None


def test_a_marker_carries_any_value() -> None:
    marker = Marker(0.0, "precision", "fp32", {"a": (1, object)}, 0, None)
    again = from_plain(Marker, through_json(marker))
    assert again.old == "fp32"
    assert again.new == {"a": [1, "<class 'object'>"]}


@dataclass(frozen=True)
class Sample:
    step: int
    share: float
    phase: Phase = "forward"
    names: list[str] = field(default_factory=list)


def test_fields_of_another_version() -> None:
    assert from_plain(Sample, {"step": 1, "share": 2, "colour": "red"}) == Sample(1, 2.0)
    with pytest.raises(ValueError, match=r"Sample lacks share, step; got \{\}"):
        from_plain(Sample, {})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"step": 1.5}, r"Sample.step: must be of type int; got 1.5"),
        ({"step": True}, r"Sample.step: must be of type int; got True"),
        ({"step": None}, r"Sample.step: must be of type int; got None"),
        ({"share": "much"}, r"Sample.share: must be a number; got 'much'"),
        ({"phase": "sideways"}, r"Sample.phase: must be one of \('forward', 'backward'\); got 'sideways'"),
        ({"phase": [1]}, r"Sample.phase: must be one of"),
        ({"names": "ab"}, r"Sample.names: must be a list; got 'ab'"),
    ],
)
def test_names_the_field_that_does_not_fit(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        from_plain(Sample, {"step": 1, "share": 0.5, **change})


def test_names_an_unknown_state() -> None:
    for state in ("asleep", ["running"]):
        with pytest.raises(ValueError, match=r"Status.state: "):
            from_plain(Status, {"state": state})
    with pytest.raises(ValueError, match=r"must be a Status; got 3"):
        from_plain(Status, 3)
    with pytest.raises(ValueError, match=r"Status.lanes: must be an object"):
        from_plain(Status, {"state": "new", "lanes": []})
