"""Virtual time by hand: in order on a lane, behind what is waited for, slower where lanes slow each other."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf

import pytest
from simulations import rates

from megatrain.config import Throttle
from megatrain.machine import GH200, H200_1_5TB, MACHINES, describe
from megatrain.schedule import Kind, Op
from megatrain.simulate import Rates
from megatrain.simulate.clock import Clock
from megatrain.simulate.work import Work

LOAD, FORWARD, UNLOAD, UPDATE = Kind.LOAD, Kind.FORWARD, Kind.UNLOAD, Kind.UPDATE


def ran(clock: Clock) -> dict[int, tuple[float, float]]:
    return {timed.op.number: (timed.start_s, timed.end_s) for timed in clock.timed}


def test_a_lane_runs_in_order_and_lanes_run_beside_each_other() -> None:
    clock = Clock()
    for number, (kind, takes_s) in enumerate([(LOAD, 2), (LOAD, 1), (FORWARD, 5), (UPDATE, 1)]):
        clock.issue(Op(number, kind, 0), takes_s)
    clock.finish()
    assert ran(clock) == {0: (0, 2), 1: (2, 3), 2: (0, 5), 3: (0, 1)}


def test_an_operation_begins_after_what_it_waits_for() -> None:
    clock = Clock()
    clock.issue(Op(0, LOAD, 0), 2)
    clock.issue(Op(1, FORWARD, 0, waits=(0,)), 3)
    clock.issue(Op(2, FORWARD, 1), 1)  # behind the one before, though it waits for nothing
    clock.finish()
    assert ran(clock) == {0: (0, 2), 1: (2, 5), 2: (5, 6)}


def test_what_is_issued_later_begins_later() -> None:
    clock = Clock()
    clock.issue(Op(0, LOAD, 0), 2)
    clock.issue(Op(1, FORWARD, 0), 9)
    clock.wait(0)
    assert clock.now_s == 2
    clock.issue(Op(2, LOAD, 1), 1)
    clock.finish()
    assert ran(clock)[2] == (2, 3)


def test_operations_without_a_length_take_none() -> None:
    clock = Clock()
    clock.issue(Op(0, LOAD, 0), 0)
    clock.issue(Op(1, FORWARD, 0, waits=(0,)), 0)
    clock.finish()
    assert ran(clock) == {0: (0, 0), 1: (0, 0)}


def test_waiting_for_what_was_never_issued_is_no_endless_wait() -> None:
    with pytest.raises(AssertionError, match="can ever begin"):
        Clock().wait(3)


def test_lanes_that_slow_each_other_do_so_while_both_are_at_work() -> None:
    """Half as fast together: after 2 s the shorter is done, and the longer has 1 s left of its 2."""

    def speeds(lanes: frozenset[str]) -> Mapping[str, float]:
        return {"h2d": 0.5, "host": 0.5} if lanes >= {"h2d", "host"} else {}

    clock = Clock(speeds)
    clock.issue(Op(0, LOAD, 0), 2)
    clock.issue(Op(1, UPDATE, 0), 1)
    clock.issue(Op(2, FORWARD, 0), 1)
    clock.finish()
    assert ran(clock) == {0: (0, 3), 1: (0, 2), 2: (0, 1)}


# ---- rates ----


def test_bytes_and_products_become_seconds() -> None:
    found = rates(link=10, adamw=100, flops=1000, device_memory_bytes_per_s=50, fixed_s={"norm": 0.25})
    assert found.seconds(Op(0, LOAD, 0), Work(20)) == 2
    assert found.seconds(Op(0, UPDATE, 0), Work(20)) == 0.2
    assert found.seconds(Op(0, FORWARD, 0), Work(flops=3000, device_bytes=100)) == 3  # products take longer
    assert found.seconds(Op(0, FORWARD, 0), Work(flops=1000, device_bytes=100)) == 2  # weights take longer to read
    assert found.seconds(Op(0, Kind.NORM), Work(device_bytes=1000)) == 0.25
    assert found.seconds(Op(0, Kind.RECORD), Work(device_bytes=100)) == 2


def test_a_link_that_is_used_both_ways_may_be_slower() -> None:
    found = rates(both_ways=0.75)
    assert found.speeds(frozenset({"h2d", "d2h", "compute"})) == {"h2d": 0.75, "d2h": 0.75}
    assert found.speeds(frozenset({"h2d", "compute"})) == {}


def test_the_links_and_the_optimizer_share_the_hosts_memory() -> None:
    found = rates(link=100, adamw=300, host_memory_bytes_per_s=300)
    assert found.speeds(frozenset({"h2d", "host"})) == {"h2d": 0.75, "host": 0.75}
    assert found.speeds(frozenset({"h2d", "d2h", "host"})) == {"h2d": 0.6, "d2h": 0.6, "host": 0.6}
    assert found.speeds(frozenset({"h2d", "d2h"})) == {"h2d": 1, "d2h": 1}


def test_a_described_machine_sustains_a_share_of_its_data_sheet() -> None:
    found = Rates.of(H200_1_5TB)
    assert found.h2d_bytes_per_s == found.d2h_bytes_per_s == 55e9
    assert found.flops_per_s["forward"] == pytest.approx(594e12, rel=1e-3)
    assert found.adamw_bytes_per_s == found.host_memory_bytes_per_s == pytest.approx(369e9, rel=1e-2)
    assert Rates.of(GH200).h2d_bytes_per_s > 7 * found.h2d_bytes_per_s


def test_every_described_machine_says_that_its_rates_were_not_measured() -> None:
    for machine in MACHINES.values():
        assert machine.data_sheets
        assert "rates by data sheets, not measured" in str(machine)


def test_what_was_measured_is_taken_as_it_is() -> None:
    machine = describe("box", host_bytes=1 << 30)
    known = dict.fromkeys(("h2d_bytes_per_s", "d2h_bytes_per_s", "host_memory_bytes_per_s", "peak_flops_per_s"), 7.0)
    found = Rates.of(type(machine)(**(vars(machine) | known)))
    assert (found.h2d_bytes_per_s, found.adamw_bytes_per_s, found.flops_per_s["head"]) == (7, 7, 7)
    assert found.device_memory_bytes_per_s == inf


def test_unknown_rates_are_refused() -> None:
    with pytest.raises(ValueError, match=r"the rates of box are not known.*measure it"):
        Rates.of(describe("box", host_bytes=1 << 30))


def test_a_throttle_slows_only_what_is_faster() -> None:
    found = rates(link=10, adamw=10).throttled(Throttle(link_bytes_per_s=5, update_bytes_per_s=20))
    assert (found.h2d_bytes_per_s, found.d2h_bytes_per_s, found.adamw_bytes_per_s) == (5, 5, 10)
