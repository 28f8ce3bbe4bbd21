"""What is chosen for made-up rates, and what is told of it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulations import ROWS, TOKENS, rates, subject, tiny_config

from megatrain.config import EngineConfig, Knob, Throttle
from megatrain.machine import Machine, describe
from megatrain.plan import planned
from megatrain.plan.needs import Subject
from megatrain.simulate import Rates
from megatrain.simulate.play import play
from megatrain.tune import KNOBS, NothingFitsError, Tuned, table, tune
from megatrain.tune.alternatives import alternatives
from megatrain.tune.candidates import Candidate, candidates
from megatrain.tune.choice import TIE, Clocked, choose

FAST = 1e15
LAYERS = 4
SLOW_LOADS = replace(rates(link=1e6, adamw=FAST, flops=FAST), d2h_bytes_per_s=FAST)
ROOMY = describe("roomy", host_bytes=10**12, gpu="a card", device_bytes=10**12)


def every(machine: Machine = ROOMY, **choices: Any) -> list[Candidate]:
    return candidates(subject(LAYERS, "float32"), EngineConfig(**({"dtype": "float32"} | choices)), machine)


def chosen(machine: Machine = ROOMY, **speeds: Any) -> dict[str, Any]:
    found = rates(**{"link": FAST, "adamw": FAST, "flops": FAST} | speeds)
    return choose(every(machine), Clocked(found)).settled


def card(nbytes: int) -> Machine:
    """A card on which tensors can take so much."""
    return replace(ROOMY, device_bytes=nbytes, device_free_bytes=nbytes)


# ---- clear cases ----


def test_what_is_measured_and_what_settings_name_are_the_same_knobs() -> None:
    assert set(get_args(Knob)) == set(KNOBS)


def test_where_the_optimizer_binds_no_layer_is_loaded_twice() -> None:
    assert chosen(adamw=1e4) == {
        "micro_batch_size": 1,
        "offload_activations": False,
        "prefetch_depth": 1,
        "grad_buffers": 1,
        "keep_attention": False,
        "kept_graphs": 0,
        "resident_layers": LAYERS,
    }


def test_where_compute_binds_nothing_is_computed_again_that_can_be_kept() -> None:
    found = choose(every(), Clocked(rates(link=FAST, adamw=FAST, flops=1e6)))
    assert found.settled["kept_graphs"] == LAYERS
    assert found.config.kept_graphs == "auto"


# Of one long sequence, where attention is most of what is computed.
LONG = replace(subject(LAYERS, "float32"), batch=1, sequence=1024)


def test_where_graphs_do_not_fit_but_attention_does_it_is_not_computed_again() -> None:
    config = EngineConfig(dtype="float32")
    frugal = replace(config, prefetch_depth=0, grad_buffers=1, offload_activations=False, keep_attention=True)
    room = card(planned(LONG, frugal, ROOMY).device_bytes)
    tried, clocked = candidates(LONG, config, room), Clocked(rates(link=FAST, adamw=FAST, flops=1e6))
    found = choose(tried, clocked)
    assert (found.settled["keep_attention"], found.settled["kept_graphs"]) == (True, 0)
    assert found.config.keep_attention == "auto"
    without = choose([each for each in tried if not each.settled["keep_attention"]], clocked)
    assert clocked.step_s(found) < 0.9 * clocked.step_s(without)
    told = {each.name: each for each in alternatives(found, clocked, KNOBS)}
    assert list(told["keep_attention=False"].causes) == ["compute"]


def test_where_all_graphs_are_kept_there_is_no_attention_to_keep() -> None:
    tried = every(keep_attention=True)
    assert {each.settled["keep_attention"] for each in tried if each.settled["kept_graphs"] == LAYERS} == {False}
    assert {each.settled["keep_attention"] for each in tried if each.settled["kept_graphs"] == 0} == {False, True}


@pytest.mark.parametrize(
    ("seen", "choices"),
    [
        (LONG, {"compile": True}),
        (replace(LONG, widths=replace(LONG.widths, fused=False)), {}),
        (LONG, {"attention": "math"}),
    ],
    ids=["compiled", "not fused", "by torch's unfused kernel"],
)
def test_attention_is_not_kept_where_it_cannot_be(seen: Subject, choices: dict[str, Any]) -> None:
    config = EngineConfig(dtype="float32", **choices)
    tried = candidates(seen, config, ROOMY)
    assert {each.config.keep_attention for each in tried} == {False}
    assert not choose(tried, Clocked(rates(flops=1e6))).settled["keep_attention"]


def test_where_launching_costs_much_the_micro_batch_is_the_whole_batch() -> None:
    launches = dict.fromkeys(("forward", "backward", "head"), 0.1)
    assert chosen(launch_s=launches)["micro_batch_size"] == ROWS


def test_where_small_micro_batches_compute_faster_they_are_small() -> None:
    launches = dict.fromkeys(("forward", "backward", "head"), -1e-5)
    assert chosen(flops=1e9, launch_s=launches)["micro_batch_size"] == 1


def test_where_loads_take_about_as_long_as_a_layer_they_are_hidden() -> None:
    found = chosen(link=5e7, flops=1e9)
    assert found["prefetch_depth"] >= 1
    assert found["grad_buffers"] >= 2


def test_where_weights_come_slowly_and_gradients_leave_fast_layers_stay_on_the_device() -> None:
    found = choose(every(), Clocked(SLOW_LOADS)).settled
    assert found["resident_layers"] + found["prefetch_depth"] >= LAYERS - 1


def test_a_knob_that_is_not_to_be_turned_stays() -> None:
    config = EngineConfig(dtype="float32", prefetch_depth=3)
    found = candidates(subject(LAYERS, "float32"), config, ROOMY, ["grad_buffers"])
    assert [each.settled["grad_buffers"] for each in found] == [1, 2, 3]
    assert {each.config.prefetch_depth for each in found} == {3}


def test_what_gives_way_when_memory_runs_out_is_left_to_the_engine() -> None:
    found = choose(every(), Clocked(SLOW_LOADS))
    assert found.config.offload_activations == "auto"
    assert (found.config.resident_layers == "auto") == (found.settled["resident_layers"] > 0)
    assert (found.config.kept_graphs == "auto") == (found.settled["kept_graphs"] > 0)


# ---- rules ----

SPEEDS = st.floats(5, 11).map(lambda exponent: 10**exponent)
LAUNCHES = st.sampled_from([{}, dict.fromkeys(("forward", "backward", "head"), 1e-4)])
ROOMS = st.integers(200_000, 4_000_000)


@st.composite
def made_up(draw: st.DrawFn) -> Rates:
    link, adamw, flops = (draw(SPEEDS) for _ in range(3))
    return rates(link=link, adamw=adamw, flops=flops, launch_s=draw(LAUNCHES))


@settings(max_examples=15, deadline=None)
@given(made_up(), ROOMS)
def test_what_is_chosen_fits_and_no_candidate_that_fits_is_faster(found: Rates, room: int) -> None:
    tried = every(card(room))
    fitting = [each for each in tried if each.plan.fits]
    if not fitting:
        with pytest.raises(NothingFitsError, match=r"the nearest is micro_batch_size=.*: device memory: "):
            choose(tried, Clocked(found))
        return
    best = choose(tried, Clocked(found))
    assert best.plan.fits
    seconds = {id(each): play(each.plan, found).step_s for each in fitting}
    fastest_s = min(seconds.values())
    assert seconds[id(best)] <= (1 + TIE) * fastest_s * (1 + 1e-9)
    frugal = [each for each in fitting if seconds[id(each)] <= fastest_s * (1 + 1e-9)]
    assert best.cost <= min(each.cost for each in frugal)


@settings(max_examples=15, deadline=None)
@given(made_up(), ROOMS, st.integers(0, 2_000_000))
def test_more_memory_never_makes_a_step_slower(found: Rates, room: int, more: int) -> None:
    clocked = Clocked(found)
    try:
        before_s = clocked.step_s(choose(every(card(room)), clocked))
    except NothingFitsError:
        return
    assert clocked.step_s(choose(every(card(room + more)), clocked)) <= (1 + TIE) * before_s * (1 + 1e-9)


@settings(max_examples=10, deadline=None)
@given(made_up())
def test_a_faster_link_never_makes_a_step_slower(found: Rates) -> None:
    tried = every()
    before, after = Clocked(found), Clocked(found.faster("the link", 2))
    assert after.step_s(choose(tried, after)) <= (1 + TIE) * before.step_s(choose(tried, before)) * (1 + 1e-9)


# ---- errors ----


def test_what_does_not_fit_is_told_with_the_nearest() -> None:
    said = "no setting fits; the nearest is micro_batch_size=1, .*grad_buffers=1, .*: device memory: "
    with pytest.raises(NothingFitsError, match=said):
        tuned(machine=card(1000))


def test_what_is_no_knob_is_refused() -> None:
    with pytest.raises(ValueError, match=r"what can be chosen is any of micro_batch_size, .*; got dtype"):
        tune(tiny_config(2), EngineConfig(), batch=2, sequence=8, knobs=["dtype"], rates=rates())
    with pytest.raises(ValueError, match="got none of them"):
        tune(tiny_config(2), EngineConfig(), batch=2, sequence=8, knobs=[], rates=rates())


def test_a_batch_without_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="batch must be a whole number ≥ 1; got 0"):
        tune(tiny_config(2), EngineConfig(), batch=0, sequence=8, rates=rates())


# ---- in words ----


def tuned(machine: Machine = ROOMY, knobs: Collection[str] = tuple(KNOBS), **speeds: Any) -> Tuned:
    config = EngineConfig(dtype="float32")
    found = rates(**{"link": 5e7, "adamw": FAST, "flops": 1e9} | speeds)
    sizes = {"batch": ROWS, "sequence": TOKENS}
    return tune(tiny_config(LAYERS), config, **sizes, knobs=knobs, machine=machine, rates=found)


def test_reasons_name_what_was_chosen_what_binds_and_what_each_alternative_costs() -> None:
    result = tuned(knobs=[knob for knob in KNOBS if knob != "resident_layers"])
    text = "\n".join(result.reasons)
    assert "by the rates given: weights in 0.05 GB/s" in text
    assert f"chosen: micro_batch_size={result.plan.needs.size.micro_batch_tokens // TOKENS}, " in text
    assert "binds: twice as fast, a step would take" in text
    assert "prefetch_depth=0: " in text
    assert "compute waits" in next(line for line in result.reasons if line.startswith("prefetch_depth=0"))
    assert "None of these settings changes what is computed; micro_batch_size alone" in text


def test_the_table_has_the_choice_first_and_each_alternative_once() -> None:
    result = tuned()
    lines = table(result.candidates, ROWS * TOKENS)
    assert lines[1].startswith("chosen ")
    assert len(lines) == 1 + len(result.candidates)
    assert len({each.name for each in result.candidates}) == len(result.candidates)
    assert "prefetch_depth=0" in "\n".join(lines)


def test_an_alternative_that_does_not_fit_says_what_is_missing() -> None:
    needed = min(each.plan.device_bytes for each in every())
    result = tuned(card(needed + 1000))
    deepest = next(line for line in result.reasons if line.startswith("prefetch_depth=3"))
    assert "does not fit (device memory: " in deepest
    assert result.plan.fits


def test_what_data_sheets_do_not_say_is_told() -> None:
    unknown = "what a micro-batch costs whatever its size is not known"
    assert unknown in tuned().reasons[0]
    assert unknown not in tuned(launch_s={"forward": 1e-6}).reasons[0]


def test_throttled_lanes_count_as_slow_as_they_are_told_to_be() -> None:
    config = EngineConfig(dtype="float32", device="cpu", throttle=Throttle(link_bytes_per_s=1e6))
    options: dict[str, Any] = {"batch": ROWS, "sequence": TOKENS, "machine": describe("m", host_bytes=10**11)}
    slow = tune(tiny_config(LAYERS), config, rates=rates(), **options)
    assert slow.rates.h2d_bytes_per_s == 1e6
    assert slow.step_s > tune(tiny_config(LAYERS), replace(config, throttle=None), rates=rates(), **options).step_s
    assert slow.summary[0].endswith("lanes throttled")
