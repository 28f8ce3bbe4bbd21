"""The checker accepts every schedule, and finds each of the faults planted here."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from operations import depth, play, schedule

from megatrain.hazards import HazardError, check
from megatrain.schedule import Kind, Op, StepShape

LAYERS = 4
UPDATES = ["after", "in backward", "on the device"]


def played(
    layers: int,
    ahead: int,
    *,
    trained: Iterable[int] | None = None,
    micro_batches: int = 2,
    offload: bool = True,
    updates: str = "after",
    resident: int = 0,
    partly_frozen: Iterable[int] = (),
    kept: int = 0,
) -> list[Op]:
    """Three steps with their updates."""
    shape = StepShape(micro_batches, offload=offload, kept_graphs=kept)
    in_backward, here = updates == "in backward", updates == "on the device"
    planned = schedule(layers, trained, update_in_backward=in_backward, partly_frozen=partly_frozen, here=here)
    return play(planned, shape, depth(ahead, resident=resident), steps=3).ops


@pytest.mark.parametrize("updates", UPDATES)
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("layers", [1, 2, 3, 6])
def test_every_small_schedule_is_safe(layers: int, offload: bool, updates: str) -> None:
    some_frozen = [None, [], [0], [layers - 1], range(0, layers, 2)]
    for ahead, mbs, resident, trained in product(range(7), (1, 2, 3), (0, 1, 2), some_frozen):
        ops = played(
            layers,
            ahead,
            trained=trained,
            micro_batches=mbs,
            offload=offload,
            updates=updates,
            resident=resident,
        )
        assert check(ops) == len(ops)


@pytest.mark.parametrize("updates", UPDATES)
@pytest.mark.parametrize("layers", [1, 2, 3, 6])
def test_layers_that_are_frozen_but_for_adapters_are_safe(layers: int, updates: str) -> None:
    which = [range(layers), [0], [layers - 1], range(0, layers, 2)]
    for ahead, resident, partly, trained in product(range(5), (0, 1, 2, 6), which, [None, [0, layers - 1]]):
        of_those = set(partly) & set(range(layers) if trained is None else trained)
        ops = played(layers, ahead, trained=trained, resident=resident, updates=updates, partly_frozen=of_those)
        assert check(ops) == len(ops)


@pytest.mark.parametrize("updates", UPDATES)
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("layers", [1, 2, 3, 6])
def test_layers_that_keep_their_graph_are_safe(layers: int, offload: bool, updates: str) -> None:
    for ahead, mbs, kept, trained in product(range(5), (1, 3), range(1, layers + 2), [None, [0], range(0, layers, 2)]):
        options: dict[str, Any] = {"micro_batches": mbs, "offload": offload, "updates": updates}
        ops = played(layers, ahead, trained=trained, kept=kept, **options)
        assert check(ops) == len(ops)
        assert sum(op.graph for op in ops) == 3 * 2 * mbs * min(kept, layers)


@pytest.mark.parametrize("updates", UPDATES)
@pytest.mark.parametrize("ahead", [0, 1, 2, 6])
@pytest.mark.parametrize("layers", [17, 64])
def test_large_schedules_are_safe(layers: int, ahead: int, updates: str) -> None:
    for resident, trained in product((0, 2), (None, range(0, layers, 3))):
        check(played(layers, ahead, trained=trained, updates=updates, resident=resident))


@pytest.mark.parametrize(("trained", "lowest"), [([3], 3), ([1, 2], 1), ([0], 0)])
def test_a_backward_that_ends_early_is_safe(trained: list[int], lowest: int) -> None:
    """A frozen shell and frozen first layers: nothing below the lowest trained layer runs backwards."""
    shape = StepShape(2, offload=True, backward_from=lowest, shell_backward=False)
    for ahead in range(5):
        planned = schedule(LAYERS, trained, shell_trained=False)
        check(play(planned, shape, depth(ahead), steps=3).ops)


@pytest.mark.parametrize("grad_buffers", [1, 2, 3, 5])
@pytest.mark.parametrize("ahead", [0, 1, 2, 6])
def test_any_number_of_optimizer_buffers_is_safe(grad_buffers: int, ahead: int) -> None:
    for layers, mbs, resident in product((1, 2, 3, 7), (1, 2), (0, 2)):
        planned = schedule(layers, here=True)
        check(play(planned, StepShape(mbs), depth(ahead, grad_buffers=grad_buffers, resident=resident), steps=3).ops)


@pytest.mark.parametrize("slabs", [1, 2, 3])
@pytest.mark.parametrize("grad_buffers", [1, 2, 5])
def test_any_number_of_gradient_buffers_and_slabs_is_safe(grad_buffers: int, slabs: int) -> None:
    planned = schedule(LAYERS, update_in_backward=True, slabs=slabs)
    check(play(planned, StepShape(2), depth(1, grad_buffers=grad_buffers), steps=3).ops)


def test_steps_of_different_sizes_follow_each_other_safely() -> None:
    planned, ops = schedule(LAYERS), []
    for mbs, offload in [(1, False), (3, True), (2, False), (2, True)]:
        ops += play(planned, StepShape(mbs, offload=offload), depth(1)).ops
    assert check(ops) == len(ops)


def test_a_step_that_was_refused_leaves_a_safe_next_one() -> None:
    """A gradient that is not finite is not applied: the next step follows without the updates."""
    planned = schedule(LAYERS)
    refused = list(planned.step(StepShape(2, offload=True), depth(1)))
    check(refused + play(planned, StepShape(2, offload=True), depth(1)).ops)


# ---- planted faults ----

Fault = Callable[[list[Op]], list[Op]]


def find(ops: list[Op], kind: Kind, layer: int | None, *, nth: int = 0, mb: int | None = None) -> Op:
    """The `nth` operation of this kind on this layer (of this micro-batch)."""
    found = [op for op in ops if op.kind is kind and op.layer == layer and (mb is None or op.micro_batch == mb)]
    return found[nth]


def put(ops: list[Op], changed: Op) -> list[Op]:
    return [changed if op.number == changed.number else op for op in ops]


def without_wait(ops: list[Op], op: Op, *waited: Op) -> list[Op]:
    """The fault itself is asserted: `op` did wait for each."""
    numbers = {other.number for other in waited}
    assert numbers <= set(op.waits)
    return put(ops, replace(op, waits=tuple(wait for wait in op.waits if wait not in numbers)))


def without(ops: list[Op], op: Op) -> list[Op]:
    """Whoever waited for what is gone waits for nothing instead."""
    rest = [other for other in ops if other is not op]
    return [replace(other, waits=tuple(wait for wait in other.waits if wait != op.number)) for other in rest]


def swapped(ops: list[Op], early: Op, late: Op) -> list[Op]:
    """`late` is issued before `early`, and neither waits for the other."""
    late = replace(late, waits=tuple(wait for wait in late.waits if wait < early.number))
    rest = [op for op in ops if op.number != late.number]
    at = rest.index(early)
    return [*rest[:at], late, *rest[at:]]


def waited(ops: list[Op], op: Op, kind: Kind) -> Op:
    """What `op` waits for, of this kind."""
    return next(other for other in ops if other.number in op.waits and other.kind is kind)


def forward_before_its_load(ops: list[Op]) -> list[Op]:
    return without_wait(ops, find(ops, Kind.FORWARD, 1), find(ops, Kind.LOAD, 1))


def backward_before_its_load(ops: list[Op]) -> list[Op]:
    """And before the fetch behind that load, on the same lane."""
    op = find(ops, Kind.BACKWARD, 0)
    return without_wait(ops, op, waited(ops, op, Kind.LOAD), waited(ops, op, Kind.FETCH))


def load_into_a_slot_in_use(ops: list[Op]) -> list[Op]:
    op = find(ops, Kind.LOAD, 2)
    return without_wait(ops, op, waited(ops, op, Kind.FORWARD))


def load_before_the_update(ops: list[Op]) -> list[Op]:
    op = find(ops, Kind.LOAD, 1, nth=2)
    return without_wait(ops, op, waited(ops, op, Kind.UPDATE))


def shell_load_before_its_update(ops: list[Op]) -> list[Op]:
    op = find(ops, Kind.LOAD, None, nth=1)
    return without_wait(ops, op, waited(ops, op, Kind.UPDATE))


def shell_load_under_the_head(ops: list[Op]) -> list[Op]:
    return put(ops, replace(find(ops, Kind.LOAD, None, nth=1), waits=()))


def record_before_the_shell_is_there(ops: list[Op]) -> list[Op]:
    return without_wait(ops, find(ops, Kind.RECORD, None), find(ops, Kind.LOAD, None))


def backward_into_a_draining_buffer(ops: list[Op]) -> list[Op]:
    op = find(ops, Kind.BACKWARD, 1)
    return without_wait(ops, op, find(ops, Kind.UNLOAD, 3))


def unload_before_backward(ops: list[Op]) -> list[Op]:
    op = find(ops, Kind.UNLOAD, 3)
    return without_wait(ops, op, find(ops, Kind.BACKWARD, 3, mb=1))


def unload_after_the_first_micro_batch_only(ops: list[Op]) -> list[Op]:
    return put(ops, replace(find(ops, Kind.UNLOAD, 3), waits=(find(ops, Kind.BACKWARD, 3, mb=0).number,)))


def unload_issued_before_backward(ops: list[Op]) -> list[Op]:
    return swapped(ops, find(ops, Kind.BACKWARD, 3, mb=0), find(ops, Kind.UNLOAD, 3))


def shell_unload_before_the_norm(ops: list[Op]) -> list[Op]:
    op = find(ops, Kind.UNLOAD, None)
    return without_wait(ops, op, find(ops, Kind.NORM, None))


def update_before_unload(ops: list[Op]) -> list[Op]:
    """The shell's, which comes first: behind it the host lane has waited for every unload."""
    return without_wait(ops, find(ops, Kind.UPDATE, None), find(ops, Kind.UNLOAD, None))


def update_issued_before_unload(ops: list[Op]) -> list[Op]:
    return swapped(ops, find(ops, Kind.UNLOAD, 0), find(ops, Kind.UPDATE, 0))


def the_wrong_slot_forward(ops: list[Op]) -> list[Op]:
    op = find(ops, Kind.FORWARD, 2, mb=1)
    return put(ops, replace(op, slot=1 - (op.slot or 0)))


def the_wrong_slot_loaded(ops: list[Op]) -> list[Op]:
    op = find(ops, Kind.LOAD, 3)
    return put(ops, replace(op, slot=1 - (op.slot or 0)))


def the_wrong_gradient_buffer(ops: list[Op]) -> list[Op]:
    op = find(ops, Kind.UNLOAD, 2)
    return put(ops, replace(op, buffer=1 - (op.buffer or 0)))


def a_dropped_load(ops: list[Op]) -> list[Op]:
    return without(ops, find(ops, Kind.LOAD, 2))


def a_dropped_shell_load(ops: list[Op]) -> list[Op]:
    return without(ops, find(ops, Kind.LOAD, None))


def a_shell_that_is_not_loaded_again(ops: list[Op]) -> list[Op]:
    return without(ops, find(ops, Kind.LOAD, None, nth=1))


def a_dropped_forward(ops: list[Op]) -> list[Op]:
    return without(ops, find(ops, Kind.FORWARD, 2, nth=1, mb=1))


def a_dropped_backward(ops: list[Op]) -> list[Op]:
    for mb in (1, 0):
        ops = without(ops, find(ops, Kind.BACKWARD, 2, mb=mb))
    return ops


def a_dropped_unload(ops: list[Op]) -> list[Op]:
    return without(ops, find(ops, Kind.UNLOAD, 1, nth=1))


def a_buffer_that_was_never_made(ops: list[Op]) -> list[Op]:
    return without(ops, find(ops, Kind.ADD, None))


def a_load_into_a_slot_given_back(ops: list[Op]) -> list[Op]:
    op = find(ops, Kind.LOAD, 3)
    at = ops.index(op)
    given_back = Op(len(ops), Kind.REMOVE, slot=op.slot, waits=op.waits)
    return [*ops[:at], given_back, *ops[at:]]


def fetch_before_offload(ops: list[Op]) -> list[Op]:
    """The next forward waits for the offload too, so that no more inputs lie on the device than were counted."""
    offload = find(ops, Kind.OFFLOAD, 2, mb=1)
    ops = without_wait(ops, find(ops, Kind.FORWARD, 3, mb=1), offload)
    return without_wait(ops, find(ops, Kind.FETCH, 2, mb=1), offload)


def a_dropped_offload(ops: list[Op]) -> list[Op]:
    """In the second step: the host still has the input of the first."""
    return without(ops, find(ops, Kind.OFFLOAD, 1, nth=1, mb=0))


def offload_before_there_is_something(ops: list[Op]) -> list[Op]:
    return without_wait(ops, find(ops, Kind.OFFLOAD, 2, mb=0), find(ops, Kind.FORWARD, 1, mb=0))


def fetch_over_an_input_that_is_read(ops: list[Op]) -> list[Op]:
    op = find(ops, Kind.FETCH, 2, mb=0)
    return without_wait(ops, op, find(ops, Kind.FORWARD, 2, mb=0))


def backward_before_its_input_is_back(ops: list[Op]) -> list[Op]:
    op = find(ops, Kind.BACKWARD, 1, mb=1)
    return without_wait(ops, op, find(ops, Kind.FETCH, 1, mb=1))


def a_wait_for_a_later_operation(ops: list[Op]) -> list[Op]:
    op = find(ops, Kind.LOAD, 2)
    return put(ops, replace(op, waits=(*op.waits, find(ops, Kind.FORWARD, 2).number)))


def a_wait_for_itself(ops: list[Op]) -> list[Op]:
    op = find(ops, Kind.UPDATE, 2)
    return put(ops, replace(op, waits=(op.number,)))


FAULTS: dict[Fault, str] = {
    forward_before_its_load: r"forward 1 .*its read of \('slot', 1\) may run before «load 1 slot1",
    backward_before_its_load: r"backward 0 .*its read of \('slot', .\) may run before «load 0",
    load_into_a_slot_in_use: r"load 2 .*its write to \('slot', 0\) may run before «forward 0",
    load_before_the_update: r"load 1 .*its read of \('host weights', 1\) may run before «update 1",
    shell_load_before_its_update: r"load shell.*\('host weights', None\) may run before «update shell",
    shell_load_under_the_head: r"load shell.*may run before",
    record_before_the_shell_is_there: r"record shell.*\('shell',\) may run before «load shell",
    backward_into_a_draining_buffer: r"backward 1 .*write to \('gradient buffer', 0\) may run before «unload 3",
    unload_before_backward: r"unload 3 .*read of \('gradient buffer', 0\) may run before «backward 3 mb1",
    unload_after_the_first_micro_batch_only: r"unload 3 .*may run before «backward 3 mb1",
    unload_issued_before_backward: r"unload 3 .*\('gradient buffer', 0\) holds .*, not 3",
    shell_unload_before_the_norm: r"unload shell.*may run before «norm shell",
    update_before_unload: r"update shell.*read of \('host gradient', None\) may run before «unload shell",
    update_issued_before_unload: r"update 0.*\('host gradient', 0\) holds None, not 0",
    the_wrong_slot_forward: r"forward 2 mb1 .*holds \('weights', .\), not \('weights', 2\)",
    the_wrong_slot_loaded: r"load 3 .*may run before|forward 3 .*not \('weights', 3\)",
    the_wrong_gradient_buffer: r"unload 2 .*\('gradient buffer', 0\) holds .*, not 2",
    a_dropped_load: r"forward 2 .*holds \('weights', 0\), not \('weights', 2\)",
    a_dropped_shell_load: r"record shell.*holds None, not \('weights', None\)",
    a_shell_that_is_not_loaded_again: r"record shell.*holds 'what is spent'",
    a_dropped_forward: r"forward 3 mb1 .*\('input', 3, 1\) holds 'what is spent', not 'device'",
    a_dropped_backward: r"unload 2 .*holds .*, not 2",
    a_dropped_unload: r"update 1.*\('host gradient', 1\) holds 'what is spent', not 1",
    a_buffer_that_was_never_made: r"load 0 .*there is no \('slot', 0\)",
    a_load_into_a_slot_given_back: r"load 3 .*there is no \('slot', 1\)",
    fetch_before_offload: r"fetch 2 mb1 .*\('host input', 2, 1\) may run before «offload 2 mb1",
    a_dropped_offload: r"fetch 1 mb0.*\('host input', 1, 0\) holds 'what is spent', not 'host'",
    offload_before_there_is_something: r"offload 2 mb0.*\('input', 2, 0\) may run before «forward 1 mb0",
    fetch_over_an_input_that_is_read: r"fetch 2 mb0 .*write to \('input', 2, 0\) may run before «forward 2 mb0",
    backward_before_its_input_is_back: r"backward 1 mb1 .*\('input', 1, 1\) may run before «fetch 1 mb1",
    a_wait_for_a_later_operation: r"load 2 .*waits for operation \d+, which was not issued before it: deadlock",
    a_wait_for_itself: r"update 2 .*which was not issued before it: deadlock",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_finds(fault: Fault) -> None:
    ops = played(LAYERS, 1)
    check(ops)
    with pytest.raises(HazardError, match=FAULTS[fault]):
        check(fault(ops))


def in_backward_slab_overwritten(ops: list[Op]) -> list[Op]:
    """With three slabs, the shell aside, the fourth layer's gradient lands where the first one's was."""
    op = find(ops, Kind.UNLOAD, 0)
    return without_wait(ops, op, find(ops, Kind.UPDATE, 3))


def in_backward_wrong_slab(ops: list[Op]) -> list[Op]:
    return put(ops, replace(find(ops, Kind.UPDATE, 2), slab=0))


def in_backward_update_before_unload(ops: list[Op]) -> list[Op]:
    return without_wait(ops, find(ops, Kind.UPDATE, 1), find(ops, Kind.UNLOAD, 1))


IN_BACKWARD_FAULTS: dict[Fault, str] = {
    in_backward_slab_overwritten: r"unload 0 .*write to \('slab', 0\) may run before «update 3 slab0",
    in_backward_wrong_slab: r"update 2 .*\('slab', 0\) holds .*, not 2",
    in_backward_update_before_unload: r"update 1 .*read of \('slab', 2\) may run before «unload 1",
}


@pytest.mark.parametrize("fault", IN_BACKWARD_FAULTS, ids=lambda fault: fault.__name__)
def test_finds_where_updates_follow_each_gradient(fault: Fault) -> None:
    ops = played(LAYERS, 1, updates="in backward")
    check(ops)
    with pytest.raises(HazardError, match=IN_BACKWARD_FAULTS[fault]):
        check(fault(ops))


def here_state_into_a_buffer_that_leaves(ops: list[Op]) -> list[Op]:
    op = find(ops, Kind.LOAD_STATE, 1)
    return without_wait(ops, op, find(ops, Kind.STORE, 3))


def here_adamw_before_its_state(ops: list[Op]) -> list[Op]:
    return without_wait(ops, find(ops, Kind.ADAMW, 2), find(ops, Kind.LOAD_STATE, 2))


def here_adamw_before_backward(ops: list[Op]) -> list[Op]:
    return swapped(ops, find(ops, Kind.BACKWARD, 2, mb=0), find(ops, Kind.ADAMW, 2))


def here_store_before_adamw(ops: list[Op]) -> list[Op]:
    return without_wait(ops, find(ops, Kind.STORE, 2), find(ops, Kind.ADAMW, 2))


def here_load_into_a_slot_that_is_stored(ops: list[Op]) -> list[Op]:
    """Layer 1's weights come into the slot from which layer 3's are leaving."""
    op = find(ops, Kind.LOAD, 1, nth=1)
    return without_wait(ops, op, find(ops, Kind.STORE, 3))


def here_a_dropped_store(ops: list[Op]) -> list[Op]:
    return without(ops, find(ops, Kind.STORE, 3))


def here_a_dropped_adamw(ops: list[Op]) -> list[Op]:
    return without(ops, find(ops, Kind.ADAMW, 1))


def here_another_optimizer_buffer(ops: list[Op]) -> list[Op]:
    op = find(ops, Kind.STORE, 1)
    return put(ops, replace(op, state=1 - (op.state or 0)))


def here_a_buffer_that_was_never_made(ops: list[Op]) -> list[Op]:
    return without(ops, next(op for op in ops if op.kind is Kind.ADD and op.state == 1))


HERE_FAULTS: dict[Fault, str] = {
    here_state_into_a_buffer_that_leaves: r"load state 1 .*write to \('optimizer buffer', .\) may run before «store 3",
    here_adamw_before_its_state: r"adamw 2 .*read of \('optimizer buffer', .\) may run before «load state 2",
    here_adamw_before_backward: r"adamw 2 .*\('gradient buffer', 0\) holds .*, not 2",
    here_store_before_adamw: r"store 2 .*read of \('slot', .\) may run before «adamw 2",
    here_load_into_a_slot_that_is_stored: r"load 1 .*write to \('slot', .\) may run before «store 3",
    here_a_dropped_store: r"\('host (weights|state)', 3\) holds 'what is spent'|optimizer buffer",
    here_a_dropped_adamw: r"store 1 .*may run before «load 1",
    here_another_optimizer_buffer: r"store 1 .*\('optimizer buffer', .\) (holds|may run before)",
    here_a_buffer_that_was_never_made: r"load state 2 .*there is no \('optimizer buffer', 1\)",
}

WHERE_IT_SHOWS = {here_state_into_a_buffer_that_leaves: 6}  # depth: with less, a load waits for the same before


@pytest.mark.parametrize("fault", HERE_FAULTS, ids=lambda fault: fault.__name__)
def test_finds_where_the_device_runs_the_optimizer(fault: Fault) -> None:
    ops = played(LAYERS, WHERE_IT_SHOWS.get(fault, 1), updates="on the device")
    check(ops)
    with pytest.raises(HazardError, match=HERE_FAULTS[fault]):
        check(fault(ops))


@pytest.mark.parametrize(("kind", "what"), [(Kind.LOAD, "host weights"), (Kind.LOAD_STATE, "host state")])
def test_finds_a_load_of_what_is_still_being_stored(kind: Kind, what: str) -> None:
    ops = played(LAYERS, 1, updates="on the device")
    buffer: dict[str, Any] = {"slot": 9} if kind is Kind.LOAD else {"state": 9}
    made, load = Op(len(ops), Kind.ADD, **buffer), Op(len(ops) + 1, kind, 0, **buffer)
    check([*ops, made, replace(load, waits=(find(ops, Kind.STORE, 0, nth=2).number,))])
    with pytest.raises(HazardError, match=rf"{kind.value} 0 .*read of \('{what}', 0\) may run before «store 0"):
        check([*ops, made, load])


def test_finds_weights_that_have_changed_on_the_host() -> None:
    """One layer: its slot would still hold layer 0 in the second step, but the layer 0 of before its update."""
    ops = played(1, 0)
    stale = without(ops, find(ops, Kind.LOAD, 0, nth=1))
    with pytest.raises(HazardError, match=r"forward 0 .*\('slot', 0\) holds 'what is spent'"):
        check(stale)


def test_finds_a_buffer_given_back_while_it_is_read() -> None:
    planned = schedule(LAYERS)
    ops = play(planned, StepShape(1), depth(2)).ops
    ops += play(planned, StepShape(1), depth(0)).ops
    remove = next(op for op in ops if op.kind is Kind.REMOVE)
    check(ops)
    with pytest.raises(HazardError, match=r"remove shell slot. may run before|remove .*its write to .* may run before"):
        check(put(ops, replace(remove, waits=())))


def test_an_empty_list_is_safe() -> None:
    assert check([]) == 0
