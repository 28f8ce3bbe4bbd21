"""Simulated runs: small ones by hand, random ones by rule, and the operations of a real run."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from simulations import ROWS, TOKENS, Seconds, rates, seconds, tiny_config, tiny_plan
from stages import Stage
from transformers import LlamaForCausalLM

from dashboard.page import write_page
from dashboard.sources import LiveSource, source_of
from megatrain.anatomy.adapters import add_lora
from megatrain.anatomy.meta import meta_model
from megatrain.anatomy.presets import gpt_oss_20b
from megatrain.config import AdamWConfig, EngineConfig
from megatrain.engine import StreamingEngine
from megatrain.hazards import check
from megatrain.machine import H200_1_5TB
from megatrain.plan import Plan, plan
from megatrain.remote import RunUnreachableError
from megatrain.report import RunState
from megatrain.schedule import Kind, Op
from megatrain.simulate import learned, measure, simulate
from megatrain.simulate.play import Played, play
from megatrain.simulate.work import Work, Works, step_flops

BY_HAND = seconds(
    load_shell=1, load=2, record=1, forward=3, head=2, backward_shell=1, backward=6, norm=1, unload_shell=1, unload=2,
    update=1,
)  # fmt: skip


def drawn(played: Played) -> list[str]:
    ops = sorted(played.timed, key=lambda timed: (timed.start_s, timed.op.number))
    return [f"{each.op.kind.value} {each.op.layer}: {each.start_s:g}–{each.end_s:g}" for each in ops]


# ---- by hand ----


def test_two_layers_by_hand() -> None:
    """Double buffering: layer 1 loads under layer 0, nothing is loaded again, gradients leave under the next layer."""
    played = play(tiny_plan(2), BY_HAND, 1)
    assert drawn(played) == [
        "load None: 0–1",
        "record None: 1–2",
        "load 0: 1–3",
        "forward 0: 3–6",
        "load 1: 3–5",
        "forward 1: 6–9",
        "head None: 9–11",
        "backward 1: 11–17",
        "unload 1: 17–19",
        "backward 0: 17–23",
        "unload 0: 23–25",
        "backward None: 23–24",
        "norm None: 24–25",
        "unload None: 25–26",
        "update None: 26–27",
        "update 0: 27–28",
        "update 1: 28–29",
    ]
    assert played.ends_s == [25]


def test_in_the_next_step_loads_wait_for_updates() -> None:
    played = play(tiny_plan(2), BY_HAND, 2)
    assert played.ends_s == [25, 52]
    assert [line for line in drawn(played)[14:] if line.split()[0] in ("update", "load", "forward")] == [
        "update None: 26–27",
        "update 0: 27–28",
        "load None: 27–28",
        "update 1: 28–29",
        "load 0: 28–30",
        "forward 0: 30–33",
        "load 1: 30–32",
        "forward 1: 33–36",
        "update None: 53–54",
        "update 0: 54–55",
        "update 1: 55–56",
    ]


def test_an_optimizer_on_the_device_by_hand() -> None:
    """State of layer 0 comes beside the backward of layer 1; nothing is loaded for the second step but the shell."""
    here = {"optimizer_overlap": "backward", "optimizer_device": "device"}
    table = BY_HAND.table | {"load state": 4, "adamw": 1, "store": 5}
    names = {name.replace(" ", "_"): value for name, value in table.items()}
    played = play(tiny_plan(2, **here), seconds(**names), 2)
    assert drawn(played)[6:] == [
        "load state 1: 6–10",
        "head None: 9–11",
        "backward 1: 11–17",
        "load state 0: 11–15",
        "adamw 1: 17–18",
        "store 1: 18–23",
        "backward 0: 18–24",
        "adamw 0: 24–25",
        "store 0: 25–30",
        "backward None: 25–26",
        "norm None: 26–27",
        "unload None: 30–31",
        "update None: 31–32",
        "load None: 32–33",
        "record None: 33–34",
        "forward 0: 34–37",
        *("forward 1: 37–40", "load state 1: 37–41", "head None: 40–42"),
        *("backward 1: 42–48", "load state 0: 42–46", "adamw 1: 48–49"),
        *("store 1: 49–54", "backward 0: 49–55", "adamw 0: 55–56"),
        *("store 0: 56–61", "backward None: 56–57", "norm None: 57–58", "unload None: 61–62", "update None: 62–63"),
    ]


def test_where_the_optimizer_does_not_overlap_a_step_ends_with_its_updates() -> None:
    assert play(tiny_plan(2, optimizer_overlap="none"), BY_HAND, 2).ends_s == [29, 29 + 29]


def test_no_more_visits_are_issued_than_the_conductor_allows() -> None:
    """All layers fit, yet layer 3 is loaded only when layer 0 is done: else a pause could not take effect soon."""
    loads = [line for line in drawn(play(tiny_plan(5, resident_layers=5), BY_HAND, 1)) if line.startswith("load")]
    assert loads == ["load None: 0–1", "load 0: 1–3", "load 1: 3–5", "load 2: 5–7", "load 3: 7–9", "load 4: 9–11"]
    quick = seconds(**{name.replace(" ", "_"): value for name, value in BY_HAND.table.items()} | {"load": 0.5})
    loads = [line for line in drawn(play(tiny_plan(5, resident_layers=5), quick, 1)) if line.startswith("load")]
    assert loads[1:] == ["load 0: 1–1.5", "load 1: 1.5–2", "load 2: 2–2.5", "load 3: 5–5.5", "load 4: 8–8.5"]


# ---- by rule ----


def any_plan(layers: int, *, updates: str, **choices: Any) -> Plan:
    here = {"optimizer_overlap": "backward", "optimizer_device": "device"}
    return tiny_plan(layers, **(here if updates == "device" else {"optimizer_overlap": updates}), **choices)


plans = st.builds(
    any_plan,
    st.integers(1, 5),
    prefetch_depth=st.integers(0, 3),
    grad_buffers=st.integers(1, 3),
    resident_layers=st.integers(0, 2),
    micro_batch_size=st.integers(1, ROWS),
    offload_activations=st.booleans(),
    updates=st.sampled_from(["forward", "backward", "none", "device"]),
)


@st.composite
def some_seconds(draw: st.DrawFn) -> Seconds:
    """Different for every operation and layer; some take no time."""
    source = random.Random(draw(st.integers(0, 1 << 32)))
    names = [kind.value for kind in Kind] + [f"{kind.value} {layer}" for kind in Kind for layer in (*range(5), "shell")]
    return seconds(**{name.replace(" ", "_"): source.choice([0, 0.5, 1, 2, 7]) for name in names})


@given(plans, some_seconds())
@settings(max_examples=60, deadline=None)
def test_lanes_never_overlap_themselves_and_nothing_begins_too_early(planned: Plan, table: Seconds) -> None:
    played = play(planned, table, 2)
    spans = {timed.op.number: timed for timed in played.timed}
    lanes: dict[str, list[tuple[int, float, float]]] = defaultdict(list)
    for number, timed in sorted(spans.items()):
        lanes[timed.op.lane].append((number, timed.start_s, timed.end_s))
        assert all(spans[wait].end_s <= timed.start_s for wait in timed.op.waits if wait in spans)
    for spans_of_lane in lanes.values():
        assert all(before[2] <= after[1] for before, after in pairwise(spans_of_lane))
        assert max(end for _, _, end in spans_of_lane) >= sum(end - start for _, start, end in spans_of_lane) - 1e-9
    assert check(issued.op for issued in played.issued) == len(played.issued)


@given(plans, st.floats(1e5, 1e12), st.floats(1, 100), st.floats(1e6, 1e10))
@settings(max_examples=40, deadline=None)
def test_a_faster_link_never_makes_a_run_longer(planned: Plan, link: float, times: float, flops: float) -> None:
    slow, fast = (play(planned, rates(link=each, flops=flops), 2) for each in (link, link * times))
    assert fast.ends_s[-1] <= slow.ends_s[-1] * (1 + 1e-9)


@given(st.integers(1, 5), st.integers(1, ROWS), some_seconds())
@settings(max_examples=40, deadline=None)
def test_with_nothing_loaded_ahead_loads_and_compute_take_turns(layers: int, rows: int, table: Seconds) -> None:
    """With recording, unloading and updating for nothing, a step is the sum of all it loads and computes."""
    free = {name: 0.0 for name in table.table if name.split()[0] in ("unload", "update", "record")}
    played = play(
        tiny_plan(layers, prefetch_depth=0, micro_batch_size=rows),
        seconds(**{name.replace(" ", "_"): value for name, value in (table.table | free).items()}),
        1,
    )
    worked = sum(timed.end_s - timed.start_s for timed in played.timed if timed.op.lane in ("h2d", "compute"))
    assert played.step_s == pytest.approx(worked)


def test_from_the_second_step_on_all_are_alike() -> None:
    first, *later = [step.end_s - step.start_s for step in simulate(tiny_plan(4), rates(), steps=5).recorder.steps()]
    assert later == pytest.approx([later[0]] * 4)
    assert first < later[0]  # no update ran under it


# ---- the operations of a real run ----


def spans_of(spans: Any) -> dict[str, list[tuple[Any, ...]]]:
    lanes: dict[str, list[tuple[Any, ...]]] = defaultdict(list)
    for span in spans:
        moved = span.nbytes
        lanes[span.lane].append((span.op, span.step, span.layer, span.micro_batch, span.slot, moved))
    return lanes


@pytest.mark.parametrize(
    "choices",
    [
        {},
        {"micro_batch_size": 2, "offload_activations": True, "prefetch_depth": 2},
        {"dtype": "bfloat16", "micro_batch_size": 1, "resident_layers": 1, "grad_buffers": 1},
        {"optimizer_overlap": "backward", "prefetch_depth": 0, "moments_dtype": "bfloat16"},
        {"optimizer_overlap": "backward", "optimizer_device": "device"},
        {
            "optimizer_overlap": "backward",
            "optimizer_device": "device",
            "dtype": "bfloat16",
            "micro_batch_size": 2,
            "grad_buffers": 3,
            "resident_layers": 1,
        },
    ],
)
def test_a_simulated_run_is_a_real_one_but_for_the_clock(choices: dict[str, Any]) -> None:
    planned = tiny_plan(4, device="cpu", **choices)
    dtype = getattr(torch, planned.config.dtype)
    clip = None if planned.config.optimizer_overlap == "backward" else 1.0
    ids = torch.randint(3, 100, (ROWS, TOKENS))
    with StreamingEngine(
        LlamaForCausalLM(tiny_config(4)).to(dtype).train(), planned.config, AdamWConfig(max_grad_norm=clip)
    ) as engine:
        for _ in range(2):
            engine.step({"input_ids": ids, "labels": ids})
        engine.flush()
        real, steps = engine.recorder.snapshot(), engine.recorder.steps()
    simulated = simulate(planned, rates(), steps=2)
    assert spans_of(simulated.recorder.spans()) == spans_of(real.spans)
    assert [(s.tokens, s.flops, s.micro_batches) for s in simulated.recorder.steps()] == [
        (s.tokens, s.flops, s.micro_batches) for s in steps
    ]
    states = {(change.kind, change.slot, change.state, change.layer, change.step) for change in real.slots}
    found = {(c.kind, c.slot, c.state, c.layer, c.step) for c in simulated.recorder.slots()}
    assert found == states


def test_on_a_card_adamw_reads_and_writes_more_than_it_has_to() -> None:
    """As torch operations, one after another; on CPU lanes it is one pass, at the rate of the host's."""
    here: dict[str, Any] = {"optimizer_overlap": "backward", "optimizer_device": "device", "dtype": "bfloat16"}
    op = Op(0, Kind.ADAMW, 0, slot=0, buffer=0, state=0)
    for device, each in (("cuda", 192), ("cpu", 26)):
        planned = tiny_plan(2, device=device, **here)
        work = Works(planned).of(op)
        elements = planned.subject.layouts[0].trained_elements
        assert (work.nbytes, work.device_bytes) == (26 * elements, each * elements)
        assert rates(device_memory_bytes_per_s=1e9).seconds(op, work) == each * elements / 1e9
        assert rates(adamw=2e9).seconds(op, work) == each * elements / 2e9


def step_work(planned: Plan) -> tuple[float, float]:
    """FLOP of a step, and of those the recomputing."""
    works, recomputed, total = Works(planned), 0.0, 0.0
    for issued in play(planned, rates(), 1).issued:
        work = works.of(issued.op)
        total += work.flops
        recomputed += work.flops if issued.op.kind is Kind.FORWARD else 0.0  # backward does the same again
    return total, recomputed


@pytest.mark.parametrize("micro_batch", [1, 3, None])
@pytest.mark.parametrize("what", ["dense", "experts", "adapters"])
def test_products_add_up_to_the_models(what: str, micro_batch: int | None) -> None:
    """What the operations compute is the model's FLOPs and the recomputing."""
    made: dict[str, Any] = {
        "dense": lambda: tiny_config(3),
        "experts": gpt_oss_20b,
        "adapters": lambda: add_lora(meta_model(tiny_config(3)), {"r": 4}),
    }
    config = EngineConfig(micro_batch_size=micro_batch)
    planned = plan(made[what](), config, AdamWConfig(), batch=4, sequence=512)
    total, recomputed = step_work(planned)
    assert total - recomputed == pytest.approx(step_flops(planned), rel=1e-6)


def test_frozen_weights_that_stay_are_not_loaded_again() -> None:
    model = add_lora(meta_model(tiny_config(3)), {"r": 4})
    planned = plan(model, EngineConfig(resident_layers=3), AdamWConfig(), batch=2, sequence=8)
    loads = [span.nbytes for span in simulate(planned, rates(), steps=2).recorder.spans() if span.op == "load"]
    layout = planned.subject.layouts[0]
    assert loads[1:] == [layout.nbytes] * 3 + [layout.trained_nbytes] * 3


# ---- rates of this machine ----


def test_rates_are_learned_back_from_a_runs_record() -> None:
    planned = tiny_plan(3, micro_batch_size=1)
    true = rates(link=3e6, adamw=5e6, flops=7e6, fixed_s={"record": 0.5, "norm": 0.25, "backward": 0.125})
    found = learned(planned, simulate(planned, true).recorder.spans())
    assert (found.h2d_bytes_per_s, found.d2h_bytes_per_s, found.adamw_bytes_per_s) == pytest.approx((3e6, 3e6, 5e6))
    assert found.flops_per_s == pytest.approx(true.flops_per_s)
    assert found.fixed_s == pytest.approx(true.fixed_s)


def test_two_layers_are_enough_to_measure_a_model() -> None:
    found = measure(tiny_config(9), EngineConfig(device="cpu", dtype="float32"), batch=ROWS, sequence=TOKENS)
    assert all(rate > 0 for rate in (found.h2d_bytes_per_s, found.d2h_bytes_per_s, found.adamw_bytes_per_s))
    assert set(found.flops_per_s) == {"forward", "backward", "head"}
    assert set(found.fixed_s) == {"record", "backward", "norm"}
    assert simulate(tiny_plan(9), found).step_s > 0


# ---- as a run ----


def test_a_dashboard_shows_it_as_a_run_that_is_over() -> None:
    stage = Stage(simulated := simulate(tiny_plan(4, machine=H200_1_5TB)))
    stage.browser_says(hello=True)
    stage.tick(3)
    assert isinstance(source_of(simulated), LiveSource)
    assert stage.shown.error is None
    assert stage.bars > 20
    assert "3 of 3" in stage.shown._drawing.headline.value
    stage.shown.close()


def test_it_cannot_be_steered_and_says_so() -> None:
    simulated = simulate(tiny_plan(2), rates())
    with pytest.raises(RunUnreachableError, match="simulate it again with other settings"):
        _ = simulated.control
    assert simulated.status().state is RunState.FINISHED


def test_it_can_be_written_as_a_page(tmp_path: Path) -> None:
    simulated = simulate(tiny_plan(3), rates())
    write_page(tmp_path / "p.html", simulated.recorder, "t", info=simulated.info, status=simulated.status())
    assert (tmp_path / "p.html").stat().st_size > 1_000_000


def test_a_plan_without_a_machine_needs_rates() -> None:
    with pytest.raises(ValueError, match="a plan without a machine has no rates"):
        simulate(tiny_plan(2))


def test_no_step_is_refused() -> None:
    with pytest.raises(ValueError, match="steps must be a whole number ≥ 1; got 0"):
        simulate(tiny_plan(2), rates(), steps=0)


# ---- what an operation takes whatever its size ----


def test_seconds_grow_from_what_launching_takes() -> None:
    found = rates(flops=100.0, launch_s={"forward": 2.0, "backward": 7.0}, shell_bytes_per_s={"record": 10.0})
    found = replace(found, fixed_s={"record": 1.0, "norm": 3.0})
    assert found.seconds(Op(0, Kind.FORWARD, 0, 0), Work(flops=500.0)) == 7
    assert found.seconds(Op(0, Kind.BACKWARD, 0, 0), Work(flops=500.0)) == 12
    assert found.seconds(Op(0, Kind.BACKWARD, 0, 0, graph=True), Work(flops=500.0)) == 10  # nothing is recomputed
    assert found.seconds(Op(0, Kind.RECORD, None, 0), Work(device_bytes=20)) == 3
    assert found.seconds(Op(0, Kind.NORM), Work(device_bytes=20)) == 3
    twice = found.faster("compute", 2)
    assert twice.seconds(Op(0, Kind.FORWARD, 0, 0), Work(flops=500.0)) == 3.5
    assert twice.seconds(Op(0, Kind.RECORD, None, 0), Work(device_bytes=20)) == 1.5
