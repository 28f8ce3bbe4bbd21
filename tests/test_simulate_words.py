"""What binds, what to turn, and the table of knobs."""

from __future__ import annotations

import re
from typing import Any

import pytest
from simulations import rates, tiny_plan

from benchmarks.bounds import Rates as PassRates
from benchmarks.bounds import predict
from dashboard.words import advice
from megatrain.anatomy.presets import gpt_oss_120b, llama_8b
from megatrain.config import AdamWConfig, EngineConfig
from megatrain.machine import H200_1_5TB
from megatrain.plan import plan
from megatrain.simulate import Rates, Setting, Simulated, bounds, knob_table, report, simulate
from megatrain.simulate.binds import Bounds
from megatrain.simulate.words import sentence, table
from megatrain.simulate.work import step_flops

FAST, SLOW = 1e15, 1e6


def run(**speeds: float) -> Simulated:
    return simulate(tiny_plan(6, micro_batch_size=1), rates(**{"link": FAST, "adamw": FAST, "flops": FAST} | speeds))


@pytest.mark.parametrize(
    ("speeds", "resource"),
    [({"flops": SLOW}, "compute"), ({"link": SLOW}, "the link"), ({"adamw": SLOW}, "the optimizer")],
)
def test_what_is_slow_binds(speeds: dict[str, float], resource: str) -> None:
    simulated = run(**speeds)
    found = bounds(simulated)
    assert found.resource == resource
    assert found.faster_s[resource] == pytest.approx(found.step_s / 2, rel=0.02)
    assert f"{resource.capitalize()} binds: twice as fast, a step would take" in report(simulated)


def test_waits_and_bounds_agree_on_a_slow_optimizer() -> None:
    """gpt-oss-120b: most of the time compute waits for loads that had to wait for updates."""
    config = EngineConfig(micro_batch_size=4, moments_dtype="bfloat16")
    planned = plan(gpt_oss_120b(), config, AdamWConfig(), batch=16, sequence=4096, machine=H200_1_5TB)
    simulated = simulate(planned)
    waits = simulated.metrics.waits_s
    assert max(waits, key=lambda cause: waits[cause]) == "optimizer"
    assert advice(simulated.metrics, simulated.record).startswith("The optimizer binds: compute waited ")
    assert bounds(simulated).resource == "the optimizer"


def test_more_sequences_hide_what_does_not_grow_with_them() -> None:
    bound_by_link, bound_by_compute = bounds(run(link=SLOW)), bounds(run(flops=SLOW))
    assert bound_by_link.twice_tokens_per_s == pytest.approx(2 * bound_by_link.tokens_per_s, rel=0.02)
    assert bound_by_compute.twice_tokens_per_s == pytest.approx(bound_by_compute.tokens_per_s, rel=0.02)


# ---- the table ----


def settings_of(simulated: Simulated, knob: str) -> dict[int, Setting]:
    return {setting.value: setting for setting in knob_table(simulated) if setting.knob == knob}


def balanced() -> Simulated:
    """Loads and forwards take about the same time."""
    return simulate(tiny_plan(6, micro_batch_size=1), rates(link=2e9, adamw=FAST, flops=2e10))


def test_the_table_has_the_plan_once_for_each_knob() -> None:
    simulated = balanced()
    chosen = [setting for setting in knob_table(simulated) if setting.chosen]
    assert [setting.words for setting in chosen] == [
        "prefetch depth 1",
        "gradient buffers 2",
        "resident layers 0",
        "kept attention no",
        "kept graphs 0",
        "micro-batch size 1",
    ]
    assert {setting.step_s for setting in chosen} == {simulated.step_s}


def test_a_setting_is_what_a_plan_with_it_would_be() -> None:
    depths = settings_of(balanced(), "prefetch_depth")
    alone = simulate(tiny_plan(6, micro_batch_size=1, prefetch_depth=0), balanced().rates)
    assert depths[0].step_s == pytest.approx(alone.step_s)
    assert depths[0].device_bytes == alone.plan.device_bytes < depths[1].device_bytes < depths[2].device_bytes
    assert depths[0].step_s > 1.2 * depths[1].step_s
    assert depths[2].step_s <= depths[1].step_s * (1 + 1e-9)


def test_the_table_says_what_attention_that_is_kept_saves_and_takes() -> None:
    simulated = run(flops=SLOW)
    attention = settings_of(simulated, "keep_attention")
    assert [setting.words for setting in attention.values()] == ["kept attention no", "kept attention yes"]
    assert attention[True].step_s < attention[False].step_s == simulated.step_s
    kept = simulate(tiny_plan(6, micro_batch_size=1, keep_attention=True), simulated.rates).plan
    assert attention[True].device_bytes - attention[False].device_bytes == kept.device["kept attention"] > 0


def test_the_table_offers_no_kept_attention_to_layers_that_are_compiled() -> None:
    simulated = simulate(tiny_plan(6, compile=True), rates())
    assert list(settings_of(simulated, "keep_attention")) == [False]


def test_micro_batches_are_no_larger_than_the_batch() -> None:
    assert set(settings_of(balanced(), "micro_batch_size")) == {1, 2}  # of three sequences; 4 would be too many


def test_a_setting_that_does_not_fit_says_so_and_is_not_advised() -> None:
    settings = [setting("prefetch_depth", 1, 10, chosen=True), setting("prefetch_depth", 2, 5, fits=False)]
    assert table(settings)[1:] == [
        "* prefetch depth 1         10.00 s       =          1     1.0 GB",
        "  prefetch depth 2          5.00 s    -50%          1     1.0 GB  does not fit",
    ]
    assert "Turn" not in sentence(found(), settings)


def setting(knob: str, value: int, step_s: float, *, chosen: bool = False, fits: bool = True) -> Setting:
    return Setting(knob, value, chosen, step_s, 1.0, 10**9, fits)


def found(**changes: Any) -> Bounds:
    seconds = {"compute": 10.0, "the link": 8.0, "the optimizer": 10.0}
    return Bounds(**{"step_s": 10.0, "tokens_per_s": 100.0, "faster_s": seconds, "twice_tokens_per_s": 100.0} | changes)


def test_the_sentence_names_the_best_setting() -> None:
    settings = [setting("prefetch_depth", 1, 10, chosen=True), setting("prefetch_depth", 2, 9)]
    assert sentence(found(), settings) == (
        "The link binds: twice as fast, a step would take 8.00 s instead of 10.00 s (compute 10.00 s, the optimizer "
        "10.00 s). Turn: prefetch depth 2 makes it 9.00 s."
    )


def test_where_no_knob_helps_more_sequences_may() -> None:
    settings = [setting("prefetch_depth", 1, 10, chosen=True)]
    more = sentence(found(twice_tokens_per_s=150.0), settings)
    assert more.endswith("No knob shortens it; twice the sequences in a step give 150 tokens/s instead of 100.")
    assert sentence(found(), settings).endswith("No knob shortens it, nor do more sequences in a step help.")


def test_nothing_binds_alone_where_all_are_needed() -> None:
    even = found(faster_s=dict.fromkeys(("compute", "the link", "the optimizer"), 9.95))
    assert even.resource is None
    assert sentence(even, [setting("prefetch_depth", 1, 10, chosen=True)]).startswith("Nothing binds alone")


def test_the_report_tells_figures_with_their_source() -> None:
    config = EngineConfig(micro_batch_size=4, moments_dtype="bfloat16")
    planned = plan(gpt_oss_120b(), config, AdamWConfig(), batch=16, sequence=4096, machine=H200_1_5TB)
    text = report(simulate(planned, Rates.of(H200_1_5TB)))
    assert re.match(r"simulated step: [\d.]+ s, [\d,]+ tokens/s, [\d.]+ model TFLOP/s, MFU \d+% \(a fixed share", text)
    assert "busy: weights in" in text
    assert "compute waited for: weights" in text


@pytest.mark.parametrize("batch", [1, 4, 16])
@pytest.mark.parametrize(("link", "adamw"), [(55e9, 200e9), (25e9, 60e9)])
def test_the_schedule_comes_near_to_the_bound_of_its_slowest_lanes(batch: int, link: float, adamw: float) -> None:
    """Llama-3-8B beside the arithmetic of `benchmarks.bounds`, in which a pass takes as long as its slowest lane."""
    planned = plan(llama_8b(), EngineConfig(), AdamWConfig(), batch=batch, sequence=4096)
    bound = predict(planned.parameters, step_flops(planned), PassRates(600e12, link, link, adamw / 26))
    simulated = simulate(planned, rates(link=link, adamw=adamw, flops=600e12))
    assert 0.99 < simulated.step_s / bound.step_s < 1.08
