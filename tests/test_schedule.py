"""The order of operations is data: small steps are compared with literal lists, large ones counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import cycle

import pytest
from hypothesis import given
from hypothesis import strategies as st
from operations import Played, depth, drawn, lines, play, schedule

from megatrain.hazards import check
from megatrain.schedule import LANE_OF, Kind, Op, Schedule, StepShape, Visit
from megatrain.steering import Knobs

ONE = StepShape(micro_batches=1)
ON_DEVICE = (Kind.FORWARD, Kind.BACKWARD)


def test_nothing_loaded_ahead() -> None:
    """Depth 0: one slot, and every load waits for the layer that has just used it."""
    assert drawn(play(schedule(3), ONE, depth(0)).ops) == lines("""
        0 load shell
        1 record shell mb0 after 0
        2 add shell slot0
        3 add shell grad0
        4 add shell grad1
        5 load 0 slot0
        6 forward 0 mb0 slot0 after 5
        7 load 1 slot0 after 5,6
        8 forward 1 mb0 slot0 after 7
        9 load 2 slot0 after 7,8
        10 forward 2 mb0 slot0 after 9
        11 head shell mb0
        12 backward 2 mb0 slot0 grad0 after 9
        13 unload 2 grad0 after 12
        14 load 1 slot0 after 9,12
        15 backward 1 mb0 slot0 grad1 after 14
        16 unload 1 grad1 after 15
        17 load 0 slot0 after 14,15
        18 backward 0 mb0 slot0 grad0 after 13,17
        19 unload 0 grad0 after 18
        20 backward shell mb0
        21 norm shell
        22 unload shell after 21
        23 update shell after 22
        24 update 0 after 19
        25 update 1 after 16
        26 update 2 after 13
    """)


def test_double_buffering_over_two_steps() -> None:
    """Depth 1: layer i + 1 loads while layer i computes; in the next step each load waits for its update."""
    assert drawn(play(schedule(3), ONE, depth(1), steps=2).ops) == lines("""
        0 load shell
        1 record shell mb0 after 0
        2 add shell slot0
        3 add shell slot1
        4 add shell grad0
        5 add shell grad1
        6 load 0 slot0
        7 forward 0 mb0 slot0 after 6
        8 load 1 slot1
        9 forward 1 mb0 slot1 after 8
        10 load 2 slot0 after 6,7
        11 forward 2 mb0 slot0 after 10
        12 head shell mb0
        13 backward 2 mb0 slot0 grad0 after 10
        14 unload 2 grad0 after 13
        15 backward 1 mb0 slot1 grad1 after 8
        16 unload 1 grad1 after 15
        17 load 0 slot0 after 10,13
        18 backward 0 mb0 slot0 grad0 after 14,17
        19 unload 0 grad0 after 18
        20 backward shell mb0
        21 norm shell
        22 unload shell after 21
        23 update shell after 22
        24 update 0 after 19
        25 update 1 after 16
        26 update 2 after 14
        27 load shell after 22,23
        28 record shell mb0 after 27
        29 load 0 slot1 after 8,15,24
        30 forward 0 mb0 slot1 after 29
        31 load 1 slot0 after 17,18,25
        32 forward 1 mb0 slot0 after 31
        33 load 2 slot1 after 26,29,30
        34 forward 2 mb0 slot1 after 33
        35 head shell mb0
        36 backward 2 mb0 slot1 grad1 after 16,33
        37 unload 2 grad1 after 26,36
        38 backward 1 mb0 slot0 grad0 after 19,31
        39 unload 1 grad0 after 25,38
        40 load 0 slot1 after 24,33,36
        41 backward 0 mb0 slot1 grad1 after 37,40
        42 unload 0 grad1 after 24,41
        43 backward shell mb0
        44 norm shell
        45 unload shell after 23,44
        46 update shell after 45
        47 update 0 after 42
        48 update 1 after 39
        49 update 2 after 37
    """)


@pytest.mark.parametrize("resident", [0, 2])
@pytest.mark.parametrize("ahead", [1, 2, 5])
def test_a_load_ahead_never_waits_for_the_layer_that_runs(ahead: int, resident: int) -> None:
    """Else it could not overlap it: it takes the slot that was used longest ago, not the one just marked as spent."""
    played = play(schedule(9), StepShape(micro_batches=2), depth(ahead, resident=resident), steps=2)
    for index, began in enumerate(played.visits):
        before = {op.number for op in played.ops[: began.at]}
        own = began.visit.layer
        ahead_loads = [op for op in played.visit_ops(index) if op.kind is Kind.LOAD and op.layer not in (own, None)]
        assert all(set(op.waits) <= before for op in ahead_loads)


@pytest.mark.parametrize("knobs", [depth(2), depth(5), depth(1, resident=1), depth(0, resident=9)])
def test_where_all_layers_fit_each_is_loaded_once(knobs: Callable[[Visit], Knobs]) -> None:
    played = play(schedule(3), ONE, knobs)
    assert [str(op) for op in played.of(Kind.ADD) if op.slot is not None] == [f"add shell slot{i}" for i in range(3)]
    assert [op.layer for op in played.of(Kind.LOAD)] == [None, 0, 1, 2]


def test_two_layers_ahead() -> None:
    """Depth 2 over 4 layers: two loads are issued behind the first forward, and layer 0 alone comes back."""
    moves = [op for op in play(schedule(4), ONE, depth(2)).ops if op.kind in (Kind.LOAD, *ON_DEVICE)]
    assert drawn(moves) == lines("""
        0 load shell
        7 load 0 slot0
        8 forward 0 mb0 slot0 after 7
        9 load 1 slot1
        10 load 2 slot2
        11 forward 1 mb0 slot1 after 9
        12 load 3 slot0 after 7,8
        13 forward 2 mb0 slot2 after 10
        14 forward 3 mb0 slot0 after 12
        16 backward 3 mb0 slot0 grad0 after 12
        18 backward 2 mb0 slot2 grad1 after 10
        20 load 0 slot0 after 12,16
        21 backward 1 mb0 slot1 grad0 after 9,17
        23 backward 0 mb0 slot0 grad1 after 19,20
        25 backward shell mb0
    """)


def test_a_resident_layer_is_kept_but_not_loaded_ahead() -> None:
    moves = [op for op in play(schedule(4), ONE, depth(0, resident=2)).ops if op.kind in (Kind.LOAD, *ON_DEVICE)]
    assert drawn(moves) == lines("""
        0 load shell
        7 load 0 slot0
        8 forward 0 mb0 slot0 after 7
        9 load 1 slot1
        10 forward 1 mb0 slot1 after 9
        11 load 2 slot2
        12 forward 2 mb0 slot2 after 11
        13 load 3 slot0 after 7,8
        14 forward 3 mb0 slot0 after 13
        16 backward 3 mb0 slot0 grad0 after 13
        18 backward 2 mb0 slot2 grad1 after 11
        20 backward 1 mb0 slot1 grad0 after 9,17
        22 load 0 slot0 after 13,16
        23 backward 0 mb0 slot0 grad1 after 19,22
        25 backward shell mb0
    """)


def test_all_micro_batches_go_through_a_layer_before_the_next_is_touched() -> None:
    """One load per visit whatever the accumulation, and one unload."""
    ops = play(schedule(2), StepShape(micro_batches=2), depth(0)).ops
    assert drawn(ops) == lines("""
        0 load shell
        1 record shell mb0 after 0
        2 record shell mb1
        3 add shell slot0
        4 add shell grad0
        5 add shell grad1
        6 load 0 slot0
        7 forward 0 mb0 slot0 after 6
        8 forward 0 mb1 slot0
        9 load 1 slot0 after 6,8
        10 forward 1 mb0 slot0 after 9
        11 forward 1 mb1 slot0
        12 head shell mb0
        13 head shell mb1
        14 backward 1 mb0 slot0 grad0 after 9
        15 backward 1 mb1 slot0 grad0
        16 unload 1 grad0 after 15
        17 load 0 slot0 after 9,15
        18 backward 0 mb0 slot0 grad1 after 17
        19 backward 0 mb1 slot0 grad1
        20 unload 0 grad1 after 19
        21 backward shell mb0
        22 backward shell mb1
        23 norm shell
        24 unload shell after 23
        25 update shell after 24
        26 update 0 after 20
        27 update 1 after 16
    """)


def test_offloaded_inputs() -> None:
    """The last layer's input stays; the others leave beside their forward and come back one layer ahead."""
    ops = play(schedule(4), StepShape(micro_batches=1, offload=True), depth(1)).ops
    assert drawn(ops[6:33]) == lines("""
        6 load 0 slot0
        7 offload 0 mb0 after 1
        8 forward 0 mb0 slot0 after 6
        9 load 1 slot1
        10 offload 1 mb0 after 8
        11 forward 1 mb0 slot1 after 7,9
        12 load 2 slot0 after 6,8
        13 offload 2 mb0 after 11
        14 forward 2 mb0 slot0 after 10,12
        15 load 3 slot1 after 9,11
        16 forward 3 mb0 slot1 after 13,15
        17 head shell mb0
        18 backward 3 mb0 slot1 grad0 after 15
        19 unload 3 grad0 after 18
        20 fetch 2 mb0 after 13,14
        21 backward 2 mb0 slot0 grad1 after 12,20
        22 unload 2 grad1 after 21
        23 load 1 slot1 after 15,18
        24 fetch 1 mb0 after 10,18
        25 backward 1 mb0 slot1 grad0 after 19,23,24
        26 unload 1 grad0 after 25
        27 load 0 slot0 after 12,21
        28 fetch 0 mb0 after 7,21
        29 backward 0 mb0 slot0 grad1 after 22,27,28
        30 unload 0 grad1 after 29
        31 backward shell mb0
        32 norm shell
    """)


def test_inputs_come_back_while_the_layer_above_is_at_work() -> None:
    """Issued in the visit before the one that needs them; with nothing loaded ahead, in that very one."""
    shape = StepShape(micro_batches=2, offload=True)
    for ahead, early in ((0, 0), (1, 1), (3, 1)):
        played = play(schedule(4), shape, depth(ahead))
        fetched = {
            began.visit.layer: [op.layer for op in played.visit_ops(i) if op.kind is Kind.FETCH]
            for i, began in enumerate(played.visits)
            if began.visit.phase == "backward"
        }
        assert fetched == {layer + early: [layer] * 2 for layer in range(3)} | {0 if early else 3: []}


def test_updates_that_follow_each_gradient() -> None:
    """Two host slabs in turn, one gradient buffer: an unload waits for the update that frees its slab."""
    planned = schedule(3, update_in_backward=True, slabs=2)
    assert drawn(play(planned, ONE, depth(1, grad_buffers=1)).ops[11:]) == lines("""
        11 head shell mb0
        12 backward 2 mb0 slot0 grad0 after 9
        13 unload 2 grad0 slab0 after 12
        14 update 2 slab0 after 13
        15 backward 1 mb0 slot1 grad0 after 7,13
        16 unload 1 grad0 slab1 after 15
        17 update 1 slab1 after 16
        18 load 0 slot0 after 9,12
        19 backward 0 mb0 slot0 grad0 after 16,18
        20 unload 0 grad0 slab0 after 14,19
        21 update 0 slab0 after 20
        22 backward shell mb0
        23 norm shell
        24 unload shell after 23
        25 update shell after 24
    """)


def test_updates_on_the_device() -> None:
    """Two optimizer buffers in turn, one gradient buffer; what was changed in a slot is the newest, and stays.

    Only layer 2 has to be loaded in the second step, and layer 0, whose slot it took.
    """
    assert drawn(play(schedule(3, here=True), ONE, depth(1), steps=2).ops[13:]) == lines("""
        13 head shell mb0
        14 load state 2 state0
        15 backward 2 mb0 slot0 grad0 after 11
        16 adamw 2 slot0 grad0 state0 after 14
        17 store 2 slot0 state0 after 16
        18 load state 1 state1
        19 backward 1 mb0 slot1 grad0 after 9
        20 adamw 1 slot1 grad0 state1 after 18
        21 store 1 slot1 state1 after 20
        22 load 0 slot0 after 11,16,17
        23 load state 0 state0 after 17
        24 backward 0 mb0 slot0 grad0 after 22
        25 adamw 0 slot0 grad0 state0 after 23
        26 store 0 slot0 state0 after 25
        27 backward shell mb0
        28 norm shell
        29 unload shell after 28
        30 update shell after 29
        31 load shell after 29,30
        32 record shell mb0 after 31
        33 forward 0 mb0 slot0 after 22
        34 forward 1 mb0 slot1 after 9
        35 load 2 slot0 after 17,22,26,33
        36 forward 2 mb0 slot0 after 35
        37 head shell mb0
        38 load state 2 state1 after 17,21
        39 backward 2 mb0 slot0 grad0 after 35
        40 adamw 2 slot0 grad0 state1 after 38
        41 store 2 slot0 state1 after 40
        42 load state 1 state0 after 21,26
        43 backward 1 mb0 slot1 grad0 after 9
        44 adamw 1 slot1 grad0 state0 after 42
        45 store 1 slot1 state0 after 44
        46 load 0 slot0 after 26,35,40,41
        47 load state 0 state1 after 26,41
        48 backward 0 mb0 slot0 grad0 after 46
        49 adamw 0 slot0 grad0 state1 after 47
        50 store 0 slot0 state1 after 49
        51 backward shell mb0
        52 norm shell
        53 unload shell after 30,52
        54 update shell after 53
    """)


@pytest.mark.parametrize("grad_buffers", [2, 3])
@pytest.mark.parametrize("layers", [4, 9])
def test_state_comes_while_the_layer_above_is_at_work(layers: int, grad_buffers: int) -> None:
    """Nothing that a load of state waits for is later than AdamW of the layer two above and what follows it out."""
    ops = play(schedule(layers, here=True), ONE, depth(1, grad_buffers=grad_buffers), steps=2).ops
    backwards = {op.layer: op.number for op in ops if op.kind is Kind.BACKWARD}  # of the second step
    for op in ops[len(ops) // 2 :]:
        if op.kind is Kind.LOAD_STATE and op.layer is not None and op.layer < layers - grad_buffers:
            assert max(op.waits) < backwards[op.layer + grad_buffers - 1]


def test_frozen_layers_stay_in_slots_across_steps() -> None:
    """Only layer 2 is trained: backward ends there, the frozen shell is loaded once, layer 1 never again."""
    planned = schedule(3, trained=[2], shell_trained=False)
    shape = StepShape(micro_batches=1, backward_from=2, shell_backward=False)
    assert drawn(play(planned, shape, depth(1), steps=2).ops) == lines("""
        0 load shell
        1 record shell mb0 after 0
        2 add shell slot0
        3 add shell slot1
        4 add shell grad0
        5 add shell grad1
        6 load 0 slot0
        7 forward 0 mb0 slot0 after 6
        8 load 1 slot1
        9 forward 1 mb0 slot1 after 8
        10 load 2 slot0 after 6,7
        11 forward 2 mb0 slot0 after 10
        12 head shell mb0
        13 backward 2 mb0 slot0 grad0 after 10
        14 unload 2 grad0 after 13
        15 norm shell
        16 update 2 after 14
        17 record shell mb0
        18 load 0 slot0 after 10,13
        19 forward 0 mb0 slot0 after 18
        20 forward 1 mb0 slot1 after 8
        21 load 2 slot0 after 16,18,19
        22 forward 2 mb0 slot0 after 21
        23 head shell mb0
        24 backward 2 mb0 slot0 grad1 after 21
        25 unload 2 grad1 after 16,24
        26 norm shell
        27 update 2 after 25
    """)


def test_of_frozen_layers_the_first_are_kept() -> None:
    """The next step begins with them, so its forward need not wait for a load."""
    shape = StepShape(micro_batches=1, backward_from=3, shell_backward=False)
    played = play(schedule(4, trained=[3], shell_trained=False), shape, depth(0, resident=1), steps=3)
    assert [op.layer for op in played.of(Kind.LOAD)] == [None, 0, 1, 2, 3, 1, 2, 3, 1, 2, 3]


def test_a_frozen_layer_between_trained_ones_passes_gradients_on() -> None:
    played = play(schedule(3, trained=[0, 2]), ONE, depth(2), steps=2)
    backwards = [str(op) for op in played.of(Kind.BACKWARD) if op.layer == 1]
    assert backwards == ["backward 1 mb0 slot1 after 9", "backward 1 mb0 slot1 after 9"]
    assert [op.layer for op in played.of(Kind.UNLOAD, Kind.UPDATE)] == [2, 0, None, None, 0, 2] * 2
    assert [op.layer for op in played.of(Kind.LOAD)] == [None, 0, 1, 2, None, 0, 2]


@pytest.mark.parametrize(
    ("layers", "ahead", "resident"),
    [(layers, d, r) for layers in (1, 2, 3, 5, 8, 17) for d in (0, 1, 2, 4, 20) for r in (0, 1, 3, 30)],
)
def test_at_the_turn_the_last_layers_stay(layers: int, ahead: int, resident: int) -> None:
    """With depth d and r resident layers, the last d + 1 + r are loaded once per step, all others twice."""
    played = play(schedule(layers), ONE, depth(ahead, resident=resident), steps=3)
    loads = Counter(op.layer for op in played.of(Kind.LOAD) if op.layer is not None)
    kept = min(layers, ahead + 1 + resident)
    assert loads == {layer: 3 * (1 if layer >= layers - kept else 2) for layer in range(layers)}


def slots_at_each_visit(played: Played) -> list[int]:
    """Device weight slots that exist when the layer of each visit runs."""
    counts, held, ops = [], 0, iter(played.ops)
    for op in ops:
        if op.kind in (Kind.ADD, Kind.REMOVE) and op.slot is not None:
            held += 1 if op.kind is Kind.ADD else -1
        if op.kind in ON_DEVICE and op.layer is not None and op.micro_batch == 0:
            counts.append(held)
    return counts


@pytest.mark.parametrize("at", [Visit("forward", 0), Visit("forward", 3), Visit("backward", 7), Visit("backward", 2)])
@pytest.mark.parametrize(("before", "after"), [(0, 3), (3, 0), (1, 2), (2, 1), (0, 20), (20, 0)])
def test_a_changed_depth_takes_effect_at_the_next_layer(at: Visit, before: int, after: int) -> None:
    visits = [Visit("forward", i) for i in range(8)] + [Visit("backward", i) for i in reversed(range(8))]
    turn = visits.index(at)
    asked: list[Visit] = []

    def knobs_at(visit: Visit) -> Knobs:
        asked.append(visit)
        return Knobs(before if len(asked) <= turn else after, 2, 0)

    played = play(schedule(8), ONE, knobs_at)
    assert asked == visits
    depths = [before] * turn + [after] * (len(visits) - turn)
    assert slots_at_each_visit(played) == [min(d + 1, 8) for d in depths]
    assert_window_is_loaded(played, depths)
    check(played.ops)


def assert_window_is_loaded(played: Played, depths: list[int]) -> None:
    """After each visit was issued, the layers of the window that its depth opens lie in slots."""
    held: dict[int, int | None] = {}
    for i, began in enumerate(played.visits):
        for op in played.visit_ops(i):
            follow(held, op)
        window = played.visits[i : i + 1 + depths[i]]
        wanted = {later.visit.layer for later in window} - {began.visit.layer}
        assert wanted <= set(held.values())


def follow(held: dict[int, int | None], op: Op) -> None:
    """What lies in the slots, told by loads alone."""
    if op.slot is None:
        return
    if op.kind is Kind.ADD:
        assert op.slot not in held
        held[op.slot] = None
    elif op.kind is Kind.REMOVE:
        del held[op.slot]
    elif op.kind is Kind.LOAD:
        assert op.slot in held
        held[op.slot] = op.layer
    else:
        assert held[op.slot] == op.layer


def test_a_smaller_depth_gives_back_the_slots_needed_last() -> None:
    """Before layer 4 of 8 the slots hold 3, 4 and 5: layer 3 goes, needed last, then 5, which comes again."""
    ahead = [2]

    def knobs_at(visit: Visit) -> Knobs:
        if visit == Visit("forward", 4):
            ahead[0] = 0
        return Knobs(ahead[0], 2, 0)

    assert drawn(play(schedule(8), ONE, knobs_at).ops[12:22]) == lines("""
        12 load 3 slot0 after 7,8
        13 forward 2 mb0 slot2 after 10
        14 load 4 slot1 after 9,11
        15 forward 3 mb0 slot0 after 12
        16 load 5 slot2 after 10,13
        17 remove shell slot0 after 12,15
        18 remove shell slot2 after 16
        19 forward 4 mb0 slot1 after 14
        20 load 5 slot1 after 14,19
        21 forward 5 mb0 slot1 after 20
    """)


def test_gradient_buffers_grow_and_shrink_at_the_next_layer() -> None:
    counts = {Visit("backward", 4): 3, Visit("backward", 1): 1}
    buffers = [1]

    def knobs_at(visit: Visit) -> Knobs:
        buffers[0] = counts.get(visit, buffers[0])
        return Knobs(0, buffers[0], 0)

    ops = play(schedule(6), ONE, knobs_at).ops
    moves = [op for op in ops if op.buffer is not None and op.kind is not Kind.UNLOAD]
    assert [str(op).partition(" after ")[0] for op in moves] == [
        "add shell grad0",
        "backward 5 mb0 slot0 grad0",
        "add shell grad1",
        "add shell grad2",
        "backward 4 mb0 slot0 grad1",
        "backward 3 mb0 slot0 grad2",
        "backward 2 mb0 slot0 grad0",
        "remove shell grad1",
        "remove shell grad2",
        "backward 1 mb0 slot0 grad0",
        "backward 0 mb0 slot0 grad0",
    ]
    given_back = [op for op in moves if op.kind is Kind.REMOVE]
    unloads = {op.buffer: op.number for op in ops[: given_back[0].number] if op.kind is Kind.UNLOAD}
    assert [op.waits for op in given_back] == [(unloads[1],), (unloads[2],)]


some_knobs = st.builds(
    Knobs,
    prefetch_depth=st.integers(0, 6),
    grad_buffers=st.integers(1, 4),
    resident_layers=st.integers(0, 3),
)


@given(
    layers=st.integers(1, 9),
    frozen=st.sets(st.integers(0, 8)),
    turns=st.lists(some_knobs, min_size=1, max_size=30),
    micro_batches=st.integers(1, 3),
    offload=st.booleans(),
    in_backward=st.booleans(),
    here=st.booleans(),
)
def test_knobs_turned_at_any_layer_keep_the_order_safe(
    layers: int, frozen: set[int], turns: list[Knobs], micro_batches: int, offload: bool, in_backward: bool, here: bool
) -> None:
    knobs = cycle(turns)
    planned = schedule(layers, trained=set(range(layers)) - frozen, update_in_backward=in_backward, here=here)
    played = play(planned, StepShape(micro_batches, offload=offload), lambda _: next(knobs), steps=3)
    held: dict[int, int | None] = {}
    for op in played.ops:
        follow(held, op)
    counts = [min(began.knobs.weight_slots, layers) for began in played.visits]
    assert slots_at_each_visit(played) == counts
    assert_window_is_loaded(played, [0] * len(counts))
    assert check(played.ops) == len(played.ops)


SCORED = StepShape(micro_batches=2, backward_from=3, head=(Kind.SCORE,))


def test_a_pass_without_training() -> None:
    """Up and no further; what lies in the slots and the shell serves the step that follows."""
    planned = schedule(3)
    first = [*planned.step(SCORED, depth(1))]
    assert drawn(first) == lines("""
        0 load shell
        1 record shell mb0 after 0
        2 record shell mb1
        3 add shell slot0
        4 add shell slot1
        5 add shell grad0
        6 add shell grad1
        7 load 0 slot0
        8 forward 0 mb0 slot0 after 7
        9 forward 0 mb1 slot0
        10 load 1 slot1
        11 forward 1 mb0 slot1 after 10
        12 forward 1 mb1 slot1
        13 load 2 slot0 after 7,9
        14 forward 2 mb0 slot0 after 13
        15 forward 2 mb1 slot0
        16 score shell mb0
        17 score shell mb1
    """)
    then = [op for op in planned.step(ONE, depth(1)) if op.lane in ("h2d", "compute")]
    assert drawn(then)[:5] == lines("""
        18 record shell mb0
        19 load 0 slot0 after 13,15
        20 forward 0 mb0 slot0 after 19
        21 forward 1 mb0 slot1 after 10
        22 load 2 slot0 after 19,20
    """)


def test_an_objective_sees_every_score_before_any_head() -> None:
    shape = StepShape(micro_batches=2, head=(Kind.SCORE, Kind.HEAD))
    kinds = [(op.kind, op.micro_batch) for op in schedule(2).step(shape, depth(1)) if op.kind in shape.head]
    assert kinds == [(Kind.SCORE, 0), (Kind.SCORE, 1), (Kind.HEAD, 0), (Kind.HEAD, 1)]


def test_weights_that_are_forgotten_are_loaded_again() -> None:
    planned = schedule(2)
    loads = []
    for _ in range(2):
        loads.append([op.layer for op in planned.step(SCORED_TWO, depth(1)) if op.kind is Kind.LOAD])
    planned.forget_weights()
    loads.append([op.layer for op in planned.step(SCORED_TWO, depth(1)) if op.kind is Kind.LOAD])
    assert loads == [[None, 0, 1], [], [None, 0, 1]]


SCORED_TWO = StepShape(micro_batches=1, backward_from=2, head=(Kind.SCORE,))


def called(planned: Schedule, knobs: Iterator[Knobs]) -> Iterator[Op]:
    """Layers as a model's own forward calls them, twice; what it hands to layer 0 stands for a recording."""
    shape = StepShape(micro_batches=1, backward_from=planned.layers, head=())
    loads = [*planned.load_shell()]
    yield from loads
    for _ in range(2):
        record = planned._op(Kind.RECORD, None, micro_batch=0, waits=tuple(op.number for op in loads))
        yield record
        planned._shell_use = record.number  # the engine waits for what the caller computed before it goes on
        for layer in range(planned.layers):
            yield from planned.visit(planned.visits(shape) * 2, layer, next(knobs), shape)


@given(
    layers=st.integers(1, 6),
    frozen=st.sets(st.integers(0, 5)),
    turns=st.lists(some_knobs, min_size=1, max_size=20),
    passes=st.lists(st.sampled_from(["train", "objective", "score", "call", "forget"]), min_size=1, max_size=6),
    updates=st.sampled_from(["after", "in backward", "on the device"]),
    shell_trained=st.booleans(),
)
def test_training_scoring_and_calls_in_any_order_are_safe(
    layers: int, frozen: set[int], turns: list[Knobs], passes: list[str], updates: str, shell_trained: bool
) -> None:
    knobs = cycle(turns)
    trained = set(range(layers)) - frozen
    in_backward, here = updates == "in backward", updates == "on the device"
    planned = schedule(layers, trained=trained, update_in_backward=in_backward, shell_trained=shell_trained, here=here)
    ops: list[Op] = []
    for kind in passes:
        if kind == "forget":
            planned.forget_weights()
        elif kind == "call":
            ops += called(planned, knobs)
        elif kind == "score":
            shape = StepShape(2, backward_from=layers, head=(Kind.SCORE,))
            ops += planned.step(shape, lambda _: next(knobs))
        else:
            head = (Kind.HEAD,) if kind == "train" else (Kind.SCORE, Kind.HEAD)
            ops += planned.step(StepShape(2, head=head, shell_backward=shell_trained), lambda _: next(knobs))
            ops += planned.updates()
    assert check(ops) == len(ops)


def test_every_operation_has_a_lane_and_a_number_of_its_own() -> None:
    played = play(schedule(4), StepShape(2, offload=True), depth(1), steps=2)
    assert [op.number for op in played.ops] == list(range(len(played.ops)))
    assert set(LANE_OF) == set(Kind)
    assert {op.lane for op in played.ops} == {"h2d", "compute", "d2h", "host", "engine"}
    assert all(wait < op.number for op in played.ops for wait in op.waits)


def test_a_step_asks_for_knobs_only_when_it_comes_to_a_layer() -> None:
    """So a user who holds the engine at a layer sees nothing of it issued."""
    asked: list[Visit] = []

    def knobs_at(visit: Visit) -> Knobs:
        asked.append(visit)
        return Knobs(1, 2, 0)

    ops = iter(schedule(3).step(ONE, knobs_at))
    while next(ops).kind is not Kind.RECORD:
        assert not asked
    assert str(next(ops)) == "add shell slot0"
    assert asked == [Visit("forward", 0)]


def test_updates_cover_what_was_unloaded_and_nothing_else() -> None:
    planned = schedule(4, trained=[1, 3], shell_trained=False)
    shape = StepShape(micro_batches=1, backward_from=1, shell_backward=False)
    played = play(planned, shape, depth(1))
    assert [str(op).split(" after")[0] for op in played.of(Kind.UPDATE)] == ["update 1", "update 3"]
    assert {op.layer for op in played.of(Kind.BACKWARD)} == {1, 2, 3}


# ---- previews ----


@given(
    layers=st.integers(1, 7),
    ahead=st.integers(0, 4),
    resident=st.integers(0, 2),
    buffers=st.integers(1, 3),
    micro_batches=st.integers(1, 3),
    offload=st.booleans(),
    at=st.integers(0, 13),
)
def test_a_preview_is_what_then_happens(
    layers: int, ahead: int, resident: int, buffers: int, micro_batches: int, offload: bool, at: int
) -> None:
    """Asked in the middle of a step, it names the operations that follow and changes nothing."""
    shape, knobs = StepShape(micro_batches, offload), Knobs(ahead, buffers, resident)
    undisturbed, asked = schedule(layers), schedule(layers)
    at %= 2 * layers
    foreseen: list[Op] = []
    seen: list[Visit] = []

    def knobs_at(visit: Visit) -> Knobs:
        if len(seen) == at:
            foreseen.extend(asked.preview(shape, visit, knobs))
            foreseen.append(marker)
        seen.append(visit)
        return knobs

    marker = Op(-1, Kind.NORM)
    before: list[Op] = []
    ops = []
    for op in asked.step(shape, knobs_at):
        if not foreseen:
            before.append(op)
        ops.append(op)
    assert ops == list(undisturbed.step(shape, lambda _: knobs))
    assert foreseen[:-1] == ops[len(before) : len(before) + len(foreseen) - 1]


def test_operations_in_words() -> None:
    op = Op(3, Kind.BACKWARD, 2, micro_batch=1, slot=0, buffer=1)
    assert op.words == "backward layer 2, micro-batch 1, weights slot 0, gradient buffer 1"
    assert Op(4, Kind.LOAD).words == "load the shell"
    assert Op(5, Kind.STORE, 2, slot=0, state=1).words == "store layer 2, weights slot 0, optimizer buffer 1"
    assert Op(6, Kind.ADD, state=1).words == "add optimizer buffer 1"


# ---- layers that are frozen but for adapters ----


def slots_of_loads(layers: int, resident: int, steps: int = 2) -> list[list[tuple[int | None, int | None]]]:
    """Per step, the layer and the slot of each load."""
    planned = schedule(layers, shell_trained=False, partly_frozen=range(layers))
    loads = [play(planned, ONE, depth(1, resident=resident)).of(Kind.LOAD) for _ in range(steps)]
    return [[(op.layer, op.slot) for op in step if op.layer is not None] for step in loads]


def test_with_room_for_all_each_layer_comes_back_to_the_slot_with_its_frozen_weights() -> None:
    first, second = slots_of_loads(5, resident=5)
    assert first == second == [(layer, layer) for layer in range(5)]


@given(st.integers(1, 9), st.integers(0, 9))
def test_as_many_layers_as_there_is_room_for_come_back_to_their_slot(layers: int, resident: int) -> None:
    slots = min(2 + resident, layers)
    first, second = slots_of_loads(layers, resident)
    left = {slot: layer for layer, slot in first}  # what each slot held last
    assert sum(left.get(slot) == layer for layer, slot in second[:slots]) >= slots - 1
