"""The benchmarks' arithmetic, and that all of their code runs: a typo must not cost an hour on a card."""

from __future__ import annotations

import json
import mmap
import platform
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import (
    auto,
    cpu,
    dashboard_overhead,
    gpu,
    gpu_parts,
    levers,
    machine,
    pages,
    parity,
    simulated,
    streaming,
    trl_parity,
)
from benchmarks.bounds import Rates, predict
from benchmarks.budget import Budget
from benchmarks.dashboard_overhead import Pair
from benchmarks.models import make_model
from benchmarks.peers import OURS, PEERS, PLAIN
from benchmarks.peers.contender import Contender
from benchmarks.peers.plain import Plain
from benchmarks.report import Report
from benchmarks.shapes import LLAMA, TINY, batches
from benchmarks.table import table
from benchmarks.turns import Timing, ratios, take_turns, warm_up, worst_difference
from benchmarks.watched import Block, Drawing
from megatrain.machine import Machine


def test_a_table_aligns_names_left_and_figures_right() -> None:
    assert table(["", "tok/s"], [["ours", 1234.5], ["plain", None], ["x", 0.12345]]) == (
        "       tok/s\nours   1,234\nplain      –\nx      0.123"
    )


def test_a_table_needs_a_cell_for_each_column() -> None:
    with pytest.raises(AssertionError, match="one cell for each column"):
        table(["a", "b"], [["only one"]])


def test_the_machine_is_described_without_its_name() -> None:
    about = machine.describe()
    assert {"cpu", "cores", "ram_bytes", "card", "torch", "transformers"} <= about.keys()
    assert platform.node() not in json.dumps(about)
    assert set(machine.slug()) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")


# ---- shapes ----


def test_parameters_are_counted_as_the_model_has_them() -> None:
    for shape in (TINY, TINY.with_layers(2)):
        assert sum(p.numel() for p in make_model(shape, torch.float32).parameters()) == shape.parameters


@pytest.mark.parametrize(("name", "billions"), [("1b", 1.236), ("4b", 4.018), ("8b", 8.030)])
def test_the_large_shapes_have_the_size_they_are_named_for(name: str, billions: float) -> None:
    assert LLAMA[name].parameters / 1e9 == pytest.approx(billions, abs=1e-3)


def test_both_sides_get_the_same_batches() -> None:
    ours, plain = batches(50, 2, 8), batches(50, 2, 8)
    first, second = next(ours), next(ours)
    assert torch.equal(first["input_ids"], next(plain)["input_ids"])
    assert not torch.equal(first["input_ids"], second["input_ids"])
    assert first["input_ids"].shape == (2, 8)


# ---- turns ----


class Scripted(Contender):
    """A contender that only says when it was called."""

    def __init__(self, name: str, calls: list[str]) -> None:
        self.name, self.calls, self._losses = name, calls, count(1)

    def step(self) -> tuple[float, float]:
        self.calls.append(self.name)
        return float(next(self._losses)), 0.0

    def settle(self) -> None:
        self.calls.append(self.name + ".")


def test_turns_alternate_and_begin_with_a_step_that_is_not_timed() -> None:
    calls: list[str] = []
    contenders = {name: Scripted(name, calls) for name in "ab"}
    timings: dict[str, Timing] = {}
    take_turns(contenders, timings, rounds=2, steps=2)
    assert calls == ["a", "a", "a", "a.", "b", "b", "b", "b."] * 2
    assert timings["a"].timed == [1, 2, 4, 5]
    assert [len(turn) for turn in timings["a"].turns] == [2, 2]
    assert timings["a"].losses == [1, 2, 3, 4, 5, 6]


def test_indices_of_timed_steps_count_from_the_first_warm_up_step() -> None:
    contender = Scripted("a", [])
    timings = {"a": warm_up(contender, 3)}
    take_turns({"a": contender}, timings, rounds=1, steps=1)
    assert timings["a"].timed == [4]


def test_turns_end_when_the_time_is_up() -> None:
    calls: list[str] = []
    left = iter([True, False])
    contenders = {name: Scripted(name, calls) for name in "ab"}
    take_turns(contenders, {}, rounds=3, steps=1, may_go_on=lambda: next(left))
    assert calls == ["a", "a", "a."]


def test_a_ratio_per_round_and_the_worst_loss() -> None:
    ours = Timing(turns=[[1.0, 3.0, 2.0], [4.0]], losses=[2.0, 1.0])
    plain = Timing(turns=[[1.0], [2.0]], losses=[2.0, 1.25])
    assert ratios(ours, plain) == [2.0, 2.0]
    assert worst_difference(ours, plain) == 0.2


# ---- budget and report ----


def test_a_part_is_begun_only_if_its_time_is_left() -> None:
    seconds = iter([0.0, 10.0, 95.0, 95.0])
    budget = Budget(100, clock=lambda: next(seconds))
    assert budget.refusal(needs_s=90) is None
    refusal = budget.refusal(needs_s=6)
    assert refusal == "skipped: 5 s of the time limit are left, it takes about 6 s"


def test_no_time_limit_refuses_nothing() -> None:
    assert Budget(None).refusal(needs_s=1e9) is None


def test_a_time_limit_must_be_positive() -> None:
    with pytest.raises(ValueError, match="--seconds must be positive"):
        Budget(0)


def test_what_was_put_is_on_disk_at_once(tmp_path: Path) -> None:
    path = tmp_path / "new" / "report.json"
    report = Report(path, {"machine": "m"})
    report.put("link", {"h2d": 1.5})
    assert json.loads(path.read_text()) == {"machine": "m", "link": {"h2d": 1.5}}


# ---- bounds ----

CARD = Rates(flops_per_s=600e12, h2d_bytes_per_s=55e9, d2h_bytes_per_s=55e9, adamw_parameters_per_s=200e9 / 26)


def _bound(tokens: int) -> str:
    return predict(8_000_000_000, 6 * 8e9 * tokens, CARD).bound


def test_the_bound_changes_where_the_arithmetic_says() -> None:
    # forward hides its loads from F/B = 10.9 K tokens on, backward from F/3B = 3.6 K, the optimizer from bF/2M = 39 K
    assert _bound(3_000) == "optimizer in forward, weights in in backward"
    assert _bound(30_000) == "optimizer in forward, compute in backward"
    assert _bound(40_000) == "compute"


def test_a_step_takes_as_long_as_the_slowest_of_each_pass() -> None:
    predicted = predict(8_000_000_000, 6 * 8e9 * 65_536, CARD)
    assert 65_536 / predicted.step_s == pytest.approx(600e12 / (8 * 8e9))  # full recompute costs 8 FLOP, not 6
    assert predicted.forward["optimizer"] == pytest.approx(1.04)


def test_layers_that_fit_plainly() -> None:
    eight = LLAMA["8b"]
    assert streaming.layers_that_fit_plainly(eight, 10**12) == eight.layers
    assert streaming.layers_that_fit_plainly(eight, 78 << 30) == 4
    assert streaming.layers_that_fit_plainly(eight, 24 << 30) == 0


# ---- parity ----


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_parity_finds_the_engine_equal(dtype: Any) -> None:
    found = parity.compare("llama", dtype, "cpu")
    assert found.passed, found


def test_parity_finds_a_model_that_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    def other_data() -> Iterator[dict[str, torch.Tensor]]:
        return batches(parity.VOCAB, parity.ROWS, parity.TOKENS, seed=next(seeds))

    seeds = count()
    monkeypatch.setattr(parity, "_data", other_data)
    found = parity.compare("llama", "float32", "cpu")
    assert not found.passed
    assert found.error is None


def test_parity_reports_a_family_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(parity.FAMILIES, "none", ("NoSuchFamily", {}))
    found = parity.compare("none", "float32", "cpu")
    assert not found.passed
    assert found.error is not None
    assert "NoSuchFamily" in found.error


@pytest.mark.parametrize("family", parity.FAMILIES)
def test_every_family_of_the_parity_part_can_be_made(family: str) -> None:
    first, second = (dict(parity.make(family).named_parameters()) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_plain_training_in_micro_batches_is_the_same_training() -> None:
    whole, parts = (
        Plain(make_model(TINY, torch.float32), batches(TINY.vocab, 4, 16), torch.float32, 1e-3, micro_batch_size=size)
        for size in (None, 1)
    )
    for _ in range(3):
        assert whole.step() == pytest.approx(parts.step(), rel=1e-5)


def test_plain_bfloat16_keeps_a_master_that_moves_by_less_than_bfloat16_can() -> None:
    model = make_model(TINY, torch.float32)
    plain = Plain(model, batches(TINY.vocab, 2, 16), torch.bfloat16, lr=1e-6)
    before = [master.detach().clone() for master in plain.masters]
    plain.step()
    assert all(p.dtype == torch.bfloat16 for p in model.parameters())
    assert all(m.dtype == torch.float32 and not torch.equal(m, b) for m, b in zip(plain.masters, before, strict=True))


# ---- the command lines ----


def test_gpu_without_a_card_says_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main([]) == 2
    assert "torch finds no CUDA device here" in capsys.readouterr().err


def test_gpu_parts_keep_their_order_and_can_be_left_out() -> None:
    assert gpu.parts_of(gpu.parse([])) == [*gpu_parts.PARTS]
    assert gpu.parts_of(gpu.parse(["--only", "stream", "link"])) == ["link", "stream"]
    assert "plain" not in gpu.parts_of(gpu.parse(["--skip", "plain", "capped"]))


def test_gpu_sizes_can_be_chosen() -> None:
    sizes = gpu.sizes_of(gpu.parse(["--tokens", "8192", "--cap-gib", "12", "--micro-batch", "1"]))
    assert (sizes.tokens, sizes.cap_bytes, sizes.micro_batch_size) == ([8192], 12 << 30, 1)
    assert gpu.sizes_of(gpu.parse([])).tokens == [1 << 14, 1 << 16]


@pytest.mark.parametrize(("gib", "name"), [(128, "8b"), (96, "4b"), (32, "1b")])
def test_the_shape_is_the_largest_that_host_memory_holds(gib: int, name: str) -> None:
    assert gpu.largest_shape(gib << 30) == name


def test_too_little_host_memory_for_any_shape_names_the_way_out() -> None:
    with pytest.raises(ValueError, match="needs 26 GB of host memory, and 16 GB are free; give --params and --layers"):
        gpu.largest_shape(16 * 10**9)


def test_every_part_of_the_gpu_script_runs_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "gpu.json"
    command = ["--device", "cpu", "--tiny", "--out", str(out), "--rounds", "1", "--steps", "1", "--depths", "0", "1"]
    assert gpu.main([*command, "--families", "llama", "--skip", "peers"]) == 0
    found = json.loads(out.read_text())
    assert found.keys() >= gpu_parts.PARTS.keys() - {"peers"}
    assert not any(name.endswith(gpu_parts.FAILED) for name in found)
    assert found["attention"]["16"]["seconds"].keys() == {"torch", "flash", "math"}
    assert found["attention"]["48"]["without"] == {"cudnn": "did not run", "efficient": "did not run"}
    stream = found["stream"]["0.125K tokens, depth 1"]
    assert stream["bound"]
    assert stream["peak_bytes"] > 0
    assert sum(stream["waits_s"].values()) + stream["busy_s"]["compute"] == pytest.approx(stream["step_s"], rel=0.5)
    assert found["plain"]["worst_relative_loss_difference"] < 1e-2
    virtual = "virtual depth (6 layers in the storage of 2)"
    assert found["depth"]["depths"][virtual]["flops_per_s"] > 0
    assert {name: figures["depth"] for name, figures in found["wide"].items()} == dict.fromkeys(
        ["tiny-dense", "tiny-gpt-oss"], "virtual depth (4 layers in the storage of 2)"
    )
    assert all(figures["predicted_s"] > 0 < figures["by_own_rates_s"] for figures in found["wide"].values())
    assert "loss" not in json.dumps([found["depth"], found["wide"]])
    printed = capsys.readouterr().out
    assert "0.0625K tokens, depth 1, capped" in printed
    assert "1 × 48" in printed
    assert "ours ÷ plain" in printed
    assert virtual in printed
    assert "tiny-gpt-oss, virtual depth (4 layers in the storage of 2)" in printed


def test_peers_train_as_many_layers_as_the_host_holds_of_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_parts, "PEERS_BYTES_PER_PARAMETER", {OURS: 14, PLAIN: 4})  # others have tests of their own
    out = tmp_path / "gpu.json"
    command = ["--device", "cpu", "--tiny", "--out", str(out), "--rounds", "1", "--steps", "1", "--only", "peers"]
    assert gpu.main(command) == 0
    found = json.loads(out.read_text())["peers"]
    assert (found["layers"], found["tokens"]) == (TINY.layers, 64)
    ours, plain = (found["contenders"][name] for name in (OURS, PLAIN))
    assert ours["same_work"]
    assert plain["tokens_per_s"] > 0
    assert f"peers: {TINY.layers} layers, 64 tokens" in capsys.readouterr().out


def test_peers_that_the_host_has_no_room_for_are_skipped(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_parts, "SHARE_OF_HOST", 0.0)
    assert gpu.main(["--device", "cpu", "--tiny", "--only", "peers"]) == 0
    assert "peers: the host has no room for one layer of each of 4" in capsys.readouterr().out


def test_widths_that_do_not_fit_say_so_and_the_others_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    small = Machine(name="a laptop", cores=2, host_bytes=16 << 30, host_available_bytes=8 << 30)
    monkeypatch.setattr(gpu_parts, "detect", lambda: small)
    monkeypatch.setitem(gpu_parts.wide.CONFIGS, "tiny-dense", gpu_parts.wide.CONFIGS["dense-120b"])
    assert gpu.main(["--device", "cpu", "--tiny", "--only", "wide", "--rounds", "1", "--steps", "1"]) == 0
    printed = capsys.readouterr().out
    assert "tiny-dense: virtual depth (88 layers in the storage of 1): RAM: " in printed
    assert "tiny-gpt-oss, virtual depth" in printed


def test_a_part_that_fails_does_not_take_the_others_along(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: gpu_parts.Run) -> None:
        raise RuntimeError("the link is down")

    monkeypatch.setitem(gpu_parts.PARTS, "link", (fails, 0))
    out = tmp_path / "gpu.json"
    assert gpu.main(["--device", "cpu", "--tiny", "--out", str(out), "--only", "link", "matmul"]) == 1
    found = json.loads(out.read_text())
    assert found["link failed"]["error"] == "the link is down"
    assert found["matmul"]["flops_per_s"] > 0
    assert "link failed: the link is down" in capsys.readouterr().out


def test_parts_that_do_not_fit_into_the_time_are_skipped_and_said_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["--device", "cpu", "--tiny", "--seconds", "1"]) == 0
    assert "plain: skipped: " in capsys.readouterr().out


def test_depths_that_do_not_fit_are_refused_and_the_others_run() -> None:
    work = streaming.Workload("cpu", TINY, sequence=16, micro_batch_size=2)
    need = work.plan(0, 64, cap_bytes=None).held_bytes
    saved: list[dict[str, Any]] = []
    cases = [streaming.Case(depth, 64) for depth in (0, 3)]
    effort = streaming.Effort(rounds=1, steps=1, may_go_on=lambda: True)
    streaming.measure(work, cases, effort, None, lambda found: saved.append(dict(found)), cap_bytes=need + 1000)
    assert saved[-1]["0.0625K tokens, depth 0"]["step_s"] > 0
    assert saved[-1]["0.0625K tokens, depth 3"]["refused"]


def test_cpu_benchmark_compares_contenders_in_processes_of_their_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "cpu.json"
    toy = ["--tiny", "--warmup", "1", "--rounds", "1", "--steps", "1", "--adamw-params", "4096", "--out", str(out)]
    others = PEERS.keys() - {OURS, PLAIN}  # which have tests of their own
    assert cpu.main([*toy, "--dtype", "bfloat16", "--skip", *others]) == 0
    found = json.loads(out.read_text())
    ours, plain = (found["dtypes"]["bfloat16"]["contenders"][name] for name in (OURS, PLAIN))
    assert ours["worst_relative_loss_difference"] <= 5e-3
    assert ours["device_peak_bytes"] > 0
    assert ours["lanes"]["busy_s"]["compute"] > 0
    assert plain["host_bytes_per_parameter"] > 0
    assert plain["peak_rss_growth_bytes"] >= plain["training_rss_growth_bytes"]
    assert {row["name"] for row in found["adamw"]} >= {"AdamW fp32", "copy, memcpy"}
    printed = capsys.readouterr().out
    assert "bfloat16, plain Hugging Face" in printed
    assert "busy s/step" in printed


def test_cpu_benchmark_compares_all_in_both_dtypes() -> None:
    settings = cpu.settings_of(cpu.parse(["--threads", "2", "--rounds", "3"]))
    assert settings.dtypes == ["float32", "bfloat16"]
    assert settings.contenders == [*PEERS]
    assert (settings.threads, settings.turns) == (2, 2 * len(PEERS) * 4)


# ---- the dashboard's cost ----


def block(*steps_s: float, cpu_s: float = 1.0, frames: int | None = None) -> Block:
    return Block([*steps_s], cpu_s, None if frames is None else Drawing(wall_s=2.0, cpu_s=0.1, frames=frames))


def test_overhead_is_the_median_ratio_of_pairs() -> None:
    pairs = [
        Pair(block(1.0, 3.0), block(2.2, 2.2, cpu_s=1.5, frames=8)),
        Pair(block(1.0, 1.0), block(1.0, 5.0, cpu_s=1.0, frames=4)),
        Pair(block(2.0, 2.0), block(2.0, 2.0, cpu_s=1.2, frames=6)),
    ]
    found = dashboard_overhead.figures(pairs)
    assert [pair.ratio for pair in pairs] == pytest.approx([1.1, 3.0, 1.0])
    assert (found["ratio"], found["ratio_of_cpu_time"]) == pytest.approx((1.1, 1.2))
    assert found["ratio_quartiles"] == pytest.approx([1.05, 2.05])
    assert found["ratio_of_fastest_steps"] == 1.0
    assert found["frames_per_s"] == 3.0
    assert found["drawing_share"] == pytest.approx(0.05)


def test_pairs_alternate_which_side_comes_first_and_the_first_pair_does_not_count() -> None:
    asked: list[str] = []

    class Recorded:
        def block(self, kind: str, steps: int, *, follow: bool = False) -> Block:
            asked.append(f"{kind}, followed" if follow else kind)
            return block(1.0 * steps)

    trained: Any = Recorded()
    pairs = list(dashboard_overhead.measure(trained, dashboard_overhead.CASES["process"], 2, 3, lambda: None))
    plain, watched = "alone", "run, followed"
    assert asked == [plain, watched, watched, plain, plain, watched]
    assert len(pairs) == 2


@pytest.mark.skipif(sys.platform != "linux", reason="cores are chosen as Linux does it")
def test_every_case_of_the_dashboards_cost_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "dashboard.json"
    command = ["--tiny", "--pairs", "1", "--steps", "1", "--placements", "pinned", "--out", str(out)]
    dashboard_overhead.main(command)
    found = json.loads(out.read_text())["placements"]["pinned"]
    assert found.keys() == dashboard_overhead.CASES.keys()
    assert all(case["ratio"] > 0 for case in found.values())
    assert found["journal"]["drawing_share"] is None
    assert found["hidden"]["frames_per_s"] == 0
    printed = capsys.readouterr().out
    assert "pinned, process" in printed
    assert "< 1.01" in printed


# ---- beside TRL ----


def test_differences_are_tabulated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> None:
    case = {"case": "SFT", "loss_from": 5.5, "loss_to": 5.0, "loss": 1e-7, "gradients": 2e-7, "weights": 3e-7}

    monkeypatch.setattr(trl_parity, "RESULTS", tmp_path)
    monkeypatch.setattr(trl_parity, "run_tests", lambda: ([case], False))
    trl_parity.main()
    assert capsys.readouterr().out.splitlines()[-1].split() == [
        "SFT",
        "5.5000",
        "5.0000",
        "1.0e-07",
        "2.0e-07",
        "3.0e-07",
    ]
    (file,) = tmp_path.iterdir()
    assert json.loads(file.read_text())["cases"] == [case]


# ---- simulated beside measured ----


def test_every_setting_is_predicted_and_trained() -> None:
    rows = simulated.run(layers=2, hidden=32, steps=2)
    assert len(rows) == 11
    assert all(row.predicted_s > 0 and row.measured_s > 0 and row.by_own_rates_s > 0 for row in rows)
    assert simulated.table_of(rows).count("\n") == 11


# ---- levers ----


def test_levers_run_in_turn_and_agree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "levers.json"
    levers.main(["--tiny", "--only", "tile_tokens", "kept_graphs", "math", "--out", str(out)])
    result = json.loads(out.read_text())
    assert list(result["contenders"]) == ["none", "tile_tokens", "kept_graphs", "math", "together"]
    for figures in result["contenders"].values():
        assert figures["worst_relative_loss_difference"] <= levers.OURS_ALLOWED["float32"]
        assert figures["step_s"] > 0
        assert figures["arena_peak_bytes"] > 0
    assert "together" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="knows no lever named magic"):
        levers.main(["--tiny", "--only", "magic"])


def test_no_kernel_of_attention_is_among_all_levers_together() -> None:
    contenders = levers.settings_of(levers.parse([])).contenders
    assert contenders["math"] == {"attention": "math"}
    assert contenders["together"].keys() == {"tile_tokens", "compile", "kept_graphs", "resident_layers"}
    assert "together" not in levers.settings_of(levers.parse(["--only", "flash", "math", "compile"])).contenders


def test_a_lever_that_changes_the_losses_fails_the_run() -> None:
    plain, other = Timing(losses=[2.0, 1.0]), Timing(losses=[2.0, 1.1])
    with pytest.raises(RuntimeError, match="compile: losses differ from those without it by"):
        levers.figures(other, plain, "float32", "compile")


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="the system has no advice on huge pages")
def test_pages_of_both_kinds_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    pages.main(["--megabytes", "1", "--rounds", "1"])
    assert "huge pages" in capsys.readouterr().out


# ---- tuned beside hand settings ----


def test_every_regime_is_tuned_and_swept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    auto.main(["--tiny", "--out", str(tmp_path / "auto.json")])
    found = json.loads((tmp_path / "auto.json").read_text())
    assert list(found) == list(auto.REGIMES)
    for regime in found.values():
        names = [each["name"] for each in regime["settings"]]
        assert auto.TUNED in names
        assert len(names) > auto.FINALISTS
        assert sum(each["final_s"] is not None for each in regime["settings"]) == 2 + auto.FINALISTS
        assert regime["tuned ÷ best by hand"].keys() == {"medians", "fastest", "noise"}
    assert "tuned ÷ best by hand: medians " in capsys.readouterr().out
