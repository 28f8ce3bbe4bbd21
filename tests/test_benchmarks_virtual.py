"""A virtually deep model does the work of a really deep one, in the host memory of a few layers."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from operations import depth as knobs_of
from operations import play, schedule

from benchmarks import deep, depth, wide
from benchmarks.deep import Deep, lacking, made_virtual, plan_of
from benchmarks.shapes import TINY
from benchmarks.virtual import VirtualEngine, _require_repetition, label, virtual_model, with_layers
from megatrain import AdamWConfig, EngineConfig, StreamingEngine, hazards
from megatrain.anatomy.load import from_config
from megatrain.hazards import Access, HazardError, accesses, check
from megatrain.layout import Layout, TensorSpec
from megatrain.machine import Machine
from megatrain.schedule import Op, StepShape
from megatrain.trace import Span, StepRecord

LAYERS, STORED = 7, 3
GB = 10**9


def case(
    name: str = "tiny-dense", *, dtype: Any = "float32", stored: int | None = STORED, layers: int = LAYERS
) -> Deep:
    engine = EngineConfig(device="cpu", dtype=dtype, micro_batch_size=1, offload_activations=True)
    return Deep(with_layers(wide.CONFIGS[name](), layers), engine, rows=2, sequence=16, stored=stored)


def having(free_bytes: int) -> Machine:
    return Machine(name="a machine", cores=1, host_bytes=free_bytes, host_available_bytes=free_bytes)


def steps(engine: StreamingEngine, of: Deep, count: int = 3) -> list[StepRecord]:
    data = of.data()
    for _ in range(count):
        engine.step(next(data))
    engine.flush()
    return engine.recorder.steps()


def work(engine: StreamingEngine) -> dict[str, list[tuple[Any, ...]]]:
    """By lane, in order: all that a span says but when it was."""
    found: dict[str, list[tuple[Any, ...]]] = {}
    for span in engine.recorder.spans():
        about = (span.op, span.step, span.layer, span.micro_batch, span.slot, span.nbytes)
        found.setdefault(span.lane, []).append(about)
    return found


# ---- the same work ----


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["tiny-dense", "tiny-gpt-oss"])
def test_its_work_is_that_of_a_real_model_of_that_depth(name: str, dtype: Any) -> None:
    """Transfers, kernels and updates, with their bytes; and while no weight changes, even the losses and norms."""
    virtual = case(name, dtype=dtype)
    model = virtual_model(virtual.config, STORED, getattr(torch, dtype))
    real = from_config(virtual.config, dtype=getattr(torch, dtype))
    real.load_state_dict(model.state_dict())
    optimizer = AdamWConfig(lr=0.0, max_grad_norm=1.0)
    with (
        VirtualEngine(model, virtual.engine, STORED) as ours,
        StreamingEngine(real, virtual.engine, optimizer) as theirs,
    ):
        found, expected = steps(ours, virtual), steps(theirs, virtual)
        assert [(r.loss, r.grad_norm, r.flops) for r in found] == [(r.loss, r.grad_norm, r.flops) for r in expected]
        assert work(ours) == work(theirs)
        updates = Counter(span.layer for span in ours.recorder.spans() if span.op == "update")
        assert updates == dict.fromkeys([None, *range(LAYERS)], 3)
        assert ours.device_peak_bytes == theirs.device_peak_bytes


def test_its_host_memory_is_that_of_the_stored_layers() -> None:
    small = case(stored=None, layers=STORED)
    with case().open() as virtual, small.open() as real:
        assert virtual.sizes.host_arenas == real.sizes.host_arenas
        assert virtual.sizes.layers == LAYERS
        hosts = dict(virtual.parts())
        for index in range(STORED, LAYERS):
            for role in ("weights", "exp_avg", "exp_avg_sq", "gradient"):
                mine, stored = getattr(hosts[index], role), getattr(hosts[index % STORED], role)
                assert mine.data_ptr() == stored.data_ptr()
                assert mine.shape == stored.shape


def test_steps_change_no_weight_but_every_moment() -> None:
    with case(dtype="bfloat16").open() as engine:
        before = engine.state_dict()
        steps(engine, case())
        after = engine.state_dict()
        assert all(torch.equal(before[name], after[name]) for name in before)
        assert all(host.exp_avg.any() and host.exp_avg_sq.any() for _, host in engine.parts())


def test_layers_keep_the_attributes_of_their_own_index() -> None:
    model = virtual_model(case("tiny-gpt-oss").config, 2, torch.float32)
    assert [layer.self_attn.layer_idx for layer in model.model.layers] == list(range(LAYERS))
    windows = [layer.self_attn.sliding_window is not None for layer in model.model.layers]
    assert windows == [True, False, True, False, True, False, True]
    assert not any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])


def test_tied_embeddings_stay_tied() -> None:
    model = virtual_model(replace(TINY, tied=True).config(), 2, torch.float32)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_it_says_what_it_is_wherever_it_is_named() -> None:
    with case().open() as engine:
        for said in (repr(engine), engine.model_name, str(case())):
            assert "virtual depth (7 layers in the storage of 3)" in said
    assert str(case(stored=None)) == "7 layers"


# ---- what is refused ----


@pytest.mark.parametrize("stored", [0, LAYERS, LAYERS + 1])
def test_a_number_of_stored_layers_that_makes_no_virtual_depth_is_refused(stored: int) -> None:
    model = from_config(case().config, dtype=torch.float32)
    with pytest.raises(ValueError, match=rf"must be 1 to 6; got {stored}. Where every layer has storage of its own"):
        VirtualEngine(model, case().engine, stored)


def test_layers_that_differ_from_those_whose_storage_they_would_share_are_refused() -> None:
    narrow, broad = (Layout.of([TensorSpec("weight", (size,), torch.float32)]) for size in (4, 8))
    _require_repetition([narrow, broad, narrow, broad], 2)
    with pytest.raises(ValueError, match="layer 1 has other tensors than layer 0, whose storage it would share"):
        _require_repetition([narrow, broad, narrow, broad], 1)


def test_layers_that_share_a_parameter_are_still_refused() -> None:
    model = from_config(case().config, dtype=torch.float32)
    model.model.layers[4].mlp.up_proj.weight = model.model.layers[1].mlp.up_proj.weight
    with pytest.raises(ValueError, match=r"is shared between model\.layers\.1 and model\.layers\.4"):
        VirtualEngine(model, case().engine, STORED)


# ---- storage that is shared is used in order ----


def sharing(stored: int, *, weights: bool) -> Any:
    """The accesses of operations whose layers share host gradients, and, if asked, host weights."""
    kinds = ("host gradient", "host weights") if weights else ("host gradient",)

    def shared(op: Op) -> Iterator[Access]:
        for access in accesses(op):
            kind, layer = access.resource[0], access.resource[-1]
            if kind in kinds and isinstance(layer, int):
                content = "a gradient" if kind == "host gradient" else access.content
                access = replace(access, resource=(kind, layer % stored), content=content)
            yield access

    return shared


def played(layers: int, ahead: int, resident: int) -> list[Op]:
    return play(schedule(layers), StepShape(2, offload=True), knobs_of(ahead, resident=resident), steps=3).ops


@pytest.mark.parametrize("layers", [2, 3, 7])
def test_gradients_in_shared_storage_meet_no_hazard(layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for stored, ahead, resident in product(range(1, layers), range(4), range(3)):
        monkeypatch.setattr(hazards, "accesses", sharing(stored, weights=False))
        ops = played(layers, ahead, resident)
        assert check(ops) == len(ops)


def test_weights_in_shared_storage_do_and_so_they_must_not_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hazards, "accesses", sharing(3, weights=True))
    with pytest.raises(HazardError, match="host weights"):
        check(played(7, 1, 0))


# ---- what fits ----


def test_the_plan_counts_the_memory_of_the_stored_layers() -> None:
    virtual = case()
    machine = having(GB)
    planned = plan_of(virtual.subject(), virtual.engine, STORED, machine)
    with virtual.open() as engine:
        steps(engine, virtual, 1)
        assert planned.plan.held_bytes == engine.device_peak_bytes
        arenas = sum(engine.sizes.host_arenas.values())
        offloaded = planned.plan.host["offloaded layer inputs"]
        assert planned.host_bytes == arenas + offloaded + planned.built_bytes
    small = plan_of(case(stored=None, layers=STORED).subject(), virtual.engine, None, machine)
    assert planned.built_bytes == small.built_bytes
    assert small.saved_bytes == 0


def test_as_many_layers_are_stored_as_fit_for_all_depths_together() -> None:
    cases = [case(stored=None, layers=layers) for layers in (5, 9)]
    alone = [plan_of(each.subject(), each.engine, 4, having(GB)) for each in cases]
    need = sum(plan.host_bytes for plan in alone) + alone[0].plan.held_bytes + alone[1].plan.device_bytes
    chosen = {free: made_virtual(cases, having(free)) for free in (need, need - 1)}
    assert [[each.stored for each in found] for found in chosen.values()] == [[4, 4], [2, 2]]
    with pytest.raises(ValueError, match=r"virtual depth \(5 layers in the storage of 1\): RAM: .* needed"):
        made_virtual(cases, having(1000))


def test_one_layer_has_no_virtual_depth() -> None:
    with pytest.raises(ValueError, match="a model of one layer has no virtual depth"):
        made_virtual([case(layers=1)], having(GB))


def test_what_is_lacking_names_the_depth() -> None:
    small = case(stored=None, layers=2)
    need = plan_of(small.subject(), small.engine, None, having(GB))
    machine = having(need.host_bytes + need.plan.device_bytes)
    assert lacking([(small, small.subject())], machine) == []
    (problem,) = lacking([(small, small.subject())] * 2, machine)
    assert problem.startswith("2 layers: RAM: ")


def test_batches_hold_no_padding() -> None:
    config = case().config
    assert config.pad_token_id == 0
    assert next(case().data())["input_ids"].min() > 0


# ---- depths compared ----


def span(op: Any, layer: int | None, start_s: float, end_s: float, step: int = 0) -> Span:
    return Span("compute", op, step, layer, 0, None, start_s, end_s, 0)


def test_the_layers_time_is_that_of_both_phases_with_their_waits() -> None:
    spans = [
        span("record", None, 0.0, 1.0),
        span("forward", 0, 1.0, 2.0),
        span("forward", 1, 3.0, 4.0),
        span("head", None, 4.0, 6.0),
        span("backward", 1, 6.0, 8.0),
        span("backward", 0, 8.0, 9.0),
        span("backward", None, 9.0, 12.0),
        span("forward", 0, 20.0, 21.0, step=1),
    ]
    assert depth.layers_s(spans) == {0: 3.0 + 3.0, 1: 1.0}


def test_depths_are_compared_round_by_round() -> None:
    times = {"step_s": 12.0, "fastest_step_s": 11.0, "cpu_s": 5.0}
    layers = {"layer_turns_s": [1.0, 2.0, 4.0], "fastest_layer_s": 1.0}
    flat: dict[str, Any] = {"layers": 10, "peak_bytes": 100, **times, **layers}
    far = flat | {"layers": 20, "step_s": 23.0, "fastest_step_s": 20.0, "cpu_s": 10.0, "peak_bytes": 101}
    found = depth.compared([flat, far | {"layer_turns_s": [1.1, 2.0, 3.6], "fastest_layer_s": 1.05}])
    assert found["layer_ratio"] == pytest.approx(1.0)
    assert found["layer_ratio_interval"] == pytest.approx((0.9, 1.1))
    assert found["fastest_layer_ratio"] == 1.05
    assert found["peak_ratio"] == 1.01
    assert (found["step_s_slopes"], found["fastest_step_s_slopes"], found["cpu_s_slopes"]) == ([1.1], [0.9], [0.5])
    assert depth.compared([flat]) == {}


def test_on_a_card_what_other_engines_keep_there_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The card's peak is of all engines in the process; on a CPU each has an arena of its own."""
    resets: list[int] = []
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: resets.append(1))
    on_card: Any = {
        "28": SimpleNamespace(device_peak_bytes=100, arena_bytes=30, device_index=0),
        "180": SimpleNamespace(device_peak_bytes=110, arena_bytes=40, device_index=0),
    }
    peaks = depth.Peaks(on_card)
    for name in ("28", "180", "28"):
        peaks.note(name)
    assert peaks.bytes_of == {"28": 60, "180": 80}
    assert len(resets) == 3
    on_cpu: Any = {"28": SimpleNamespace(device_peak_bytes=100, arena_bytes=30, device_index=None)}
    peaks = depth.Peaks(on_cpu | {"180": on_card["180"]})
    peaks.note("28")
    assert peaks.bytes_of == {"28": 100}


@pytest.mark.parametrize("stored", [None, 1])
def test_every_depth_is_measured(stored: int | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "depth.json"
    virtual = [] if stored is None else ["--virtual", str(stored)]
    depth.main(["--tiny", "--rounds", "1", "--steps", "1", "--out", str(out), *virtual])
    found = json.loads(out.read_text())
    names = [f"{layers} layers" if stored is None else label(layers, stored) for layers in (2, 3)]
    assert [*found["depths"]] == names
    printed = capsys.readouterr().out
    assert all(name in printed for name in names)
    for figures in found["depths"].values():
        assert figures["peak_bytes"] == figures["planned_bytes"]
        assert figures["step_s"] == pytest.approx(figures["layer_s"] * figures["layers"] + figures["shell_s"])
        assert figures["cpu_s"] > 0
        assert "loss" not in json.dumps(figures)
    flat, far = found["depths"].values()
    assert flat["peak_bytes"] == far["peak_bytes"]
    boundary = 2 * 16 * TINY.hidden * 4
    assert far["planned_bytes_if_kept"] - flat["planned_bytes_if_kept"] == boundary


def test_depths_that_do_not_fit_say_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(depth, "detect", lambda: having(1000))
    with pytest.raises(ValueError, match=r"2 layers: RAM: .* `--list` shows what fits this machine"):
        depth.main(["--tiny", "--out", str(tmp_path / "depth.json")])


def test_what_fits_is_listed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(depth, "SHAPES", {"tiny": TINY.config})
    need = deep.plan_of(case().subject(), case().engine, 8, having(GB))
    monkeypatch.setattr(depth, "detect", lambda: having(4 * need.host_bytes))
    depth.main(["--list", "--depths", "180"])
    lines = capsys.readouterr().out.splitlines()
    assert sum("does not fit" in line for line in lines) == 1
    assert sum("virtual depth (180 layers in the storage of" in line for line in lines) == 4
