"""The parts of `benchmarks.gpu`: what each measures, one after the other, until the time is over."""

from __future__ import annotations

import gc
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch
from tqdm import tqdm

from benchmarks import attention, depth, layer, link, parity, profiled, wide
from benchmarks.bounds import Rates
from benchmarks.budget import Budget
from benchmarks.deep import Deep, made_virtual
from benchmarks.field import Field
from benchmarks.peers import FSDP2, OURS, PEERS, PLAIN, ZERO3
from benchmarks.peers.contender import Task
from benchmarks.peers.ours import Ours
from benchmarks.pipeline import optimizer_alone
from benchmarks.report import Report
from benchmarks.shapes import LLAMA, TINY, Shape
from benchmarks.streaming import Case, Effort, Workload, beside_plain, layers_that_fit_plainly, measure
from benchmarks.turns import warm_up
from benchmarks.virtual import with_layers
from megatrain.machine import detect

SKIPPED, FAILED = "skipped", "failed"
SHARE_OF_HOST = 0.8  # of what is free, for all peers at once
PATIENCE_S = 600  # with one of them, at most
# Of host memory while it trains; plain training takes a float32 copy on its way to the card.
PEERS_BYTES_PER_PARAMETER = {OURS: 14, PLAIN: 4, FSDP2: 16, ZERO3: 20}


@dataclass(frozen=True)
class Sizes:
    """How large each part is; the second set is for seeing that everything runs."""

    sequence: int
    micro_batch_size: int
    tokens: list[int]
    cap_bytes: int
    link_bytes: int
    link_copies: int
    matmul: int
    matmul_s: float
    adamw_params: int
    adamw_rounds: int
    deep: list[int]  # layers, at virtual depth
    wide: list[str]
    lengths: list[int]  # of sequences, for attention
    attention_tokens: int  # of a micro-batch, at least one sequence
    layer_rows: list[int]  # sequences of a micro-batch
    profiled_layers: int


FULL = Sizes(
    sequence=4096,
    micro_batch_size=2,
    tokens=[1 << 14, 1 << 16],
    cap_bytes=24 << 30,
    link_bytes=512 << 20,
    link_copies=24,
    matmul=8192,
    matmul_s=3.0,
    adamw_params=32 << 20,
    adamw_rounds=5,
    deep=[28, 180],
    wide=["dense-120b", "gpt-oss-120b"],
    lengths=[512, 2048, 8192, 32_768],
    attention_tokens=8192,
    layer_rows=[1, 2, 4, 8, 16],
    profiled_layers=8,
)
TOY = Sizes(
    sequence=16,
    micro_batch_size=2,
    tokens=[64, 128],
    cap_bytes=64 << 20,
    link_bytes=1 << 20,
    link_copies=4,
    matmul=64,
    matmul_s=0.01,
    adamw_params=1 << 12,
    adamw_rounds=1,
    deep=[3, 6],
    wide=["tiny-dense", "tiny-gpt-oss"],
    lengths=[16, 48],
    attention_tokens=32,
    layer_rows=[1, 2],
    profiled_layers=3,
)


@dataclass(frozen=True)
class Run:
    """What the parts share."""

    device: Literal["cuda", "cpu"]
    shape: Shape
    sizes: Sizes
    depths: list[int]
    rounds: int
    steps: int
    families: list[str]
    budget: Budget
    report: Report

    @property
    def work(self) -> Workload:
        return Workload(self.device, self.shape, self.sizes.sequence, self.sizes.micro_batch_size)

    @property
    def layer_shape(self) -> Shape:
        """Whose layers are as wide as those of an 8B model, whatever the host holds of it."""
        return TINY if self.shape == TINY else LLAMA["8b"]

    def case(self, config: Any, *, offload: bool | Literal["auto"] = "auto") -> Deep:
        """A configuration's model on as many tokens as the first of the other parts."""
        engine = replace(self.work.config(depth=1, cap_bytes=None), offload_activations=offload)
        return Deep(config, engine, self.work.rows(self.sizes.tokens[0]), self.sizes.sequence)

    def effort(self, reserve_s: float) -> Effort:
        """Until only what later parts need is left."""
        return Effort(self.rounds, self.steps, lambda: self.budget.left_s > reserve_s)

    def rates(self) -> Rates | None:
        """What the parts so far measured, if all of them did."""
        found = self.report.values
        if any(not measured(found.get(part)) for part in ("link", "matmul", "adamw")):
            return None
        both = found["link"]["registered"]
        best = max(row["params_per_s"] for row in found["adamw"] if row["name"] == "AdamW split")
        return Rates(found["matmul"]["flops_per_s"], both["h2d of both"], both["d2h of both"], best)


def measured(value: Any) -> bool:
    return bool(value) and not (isinstance(value, dict) and (SKIPPED in value or FAILED in value))


# ---- the parts ----


def run_parity(run: Run) -> None:
    found: list[dict[str, Any]] = []
    for family, dtype, compare in parity.all_cases():
        if family not in run.families:
            continue
        refusal = run.budget.refusal(needs_s=10)
        if refusal:
            found.append({"family": family, "dtype": dtype, SKIPPED: refusal})
            continue
        difference = compare(run.device)
        found.append(asdict(difference) | {"passed": difference.passed})
        run.report.put("parity", found)


def run_link(run: Run) -> None:
    run.report.put("link", link.measure(run.device, run.sizes.link_bytes, run.sizes.link_copies))


def run_matmul(run: Run) -> None:
    rate = link.matmul_flops_per_s(run.device, run.sizes.matmul, run.sizes.matmul_s)
    run.report.put("matmul", {"size": run.sizes.matmul, "flops_per_s": rate})


def run_adamw(run: Run) -> None:
    run.report.put("adamw", optimizer_alone(run.sizes.adamw_params, run.sizes.adamw_rounds))


def run_attention(run: Run) -> None:
    rounds, sizes = 10 * run.rounds, run.sizes  # of milliseconds each

    def save(found: dict[str, Any]) -> None:
        run.report.put("attention", found)

    attention.measure(run.device, run.layer_shape, sizes.lengths, sizes.attention_tokens, rounds, save)


def run_layer(run: Run) -> None:
    rounds, sizes = 10 * run.rounds, run.sizes

    def save(found: dict[str, Any]) -> None:
        run.report.put("layer", found)

    layer.measure(run.device, run.layer_shape, sizes.layer_rows, sizes.sequence, rounds, save)


def run_profile(run: Run) -> None:
    """A few layers: a trace of all of them would be too large to open."""
    shape = run.layer_shape.with_layers(run.sizes.profiled_layers)
    work = Workload(run.device, shape, run.sizes.sequence, run.sizes.micro_batch_size)
    trace = None if run.report.path is None else run.report.path.with_suffix(".trace.json.gz")
    with work.engine(2, None) as engine:
        ours = Ours(engine, work.data(run.sizes.tokens[0]))
        warm_up(ours, 4)
        run.report.put("profile", profiled.measure(run.device, engine, ours, run.steps, trace))


def run_stream(run: Run) -> None:
    _stream(run, "stream", run.depths, cap_bytes=None, reserve_s=150)


def run_capped(run: Run) -> None:
    _stream(run, "capped", run.depths, cap_bytes=run.sizes.cap_bytes, reserve_s=60)


def _stream(run: Run, part: str, depths: list[int], *, cap_bytes: int | None, reserve_s: float) -> None:
    measure(
        run.work,
        [Case(depth, tokens) for tokens in run.sizes.tokens for depth in depths],
        run.effort(reserve_s),
        run.rates(),
        lambda figures: run.report.put(part, figures),
        cap_bytes=cap_bytes,
    )


def run_plain(run: Run) -> None:
    free = detect().device_free_bytes if run.device == "cuda" else detect().host_available_bytes
    layers = layers_that_fit_plainly(run.shape, free)
    if layers == 0:
        run.report.put("plain", {SKIPPED: f"not one layer fits plainly into {free / 1e9:.0f} GB of device memory"})
        return
    work = Workload(run.work.device, run.shape.with_layers(layers), run.sizes.sequence, run.sizes.micro_batch_size)
    beside_plain(work, run.sizes.tokens[0], run.effort(5), lambda figures: run.report.put("plain", figures))


def run_peers(run: Run) -> None:
    """Each in a process of its own, all of them alive at once, with as many layers as the host then holds."""
    room = int(detect().host_available_bytes * SHARE_OF_HOST) // sum(PEERS_BYTES_PER_PARAMETER.values())
    layers = min(run.shape.layers, (room - run.shape.shell_parameters) // run.shape.layer_parameters)
    if layers < 1:
        run.report.put(
            "peers", {SKIPPED: f"the host has no room for one layer of each of {len(PEERS_BYTES_PER_PARAMETER)}"}
        )
        return
    shape, work = run.shape.with_layers(layers), run.work
    rows = work.rows(run.sizes.tokens[0])
    task = Task(shape, rows, work.sequence, work.dtype, device=run.device, micro_batch_size=work.micro_batch_size)
    entries = {name: PEERS[name] for name in PEERS_BYTES_PER_PARAMETER}
    effort = run.effort(5)
    with Field(
        entries, task, threads=os.cpu_count() or 1, patience_s=min(PATIENCE_S, max(60, run.budget.left_s))
    ) as field:
        field.build(1, lambda _: None)
        for _ in range(effort.rounds):
            if effort.may_go_on():
                field.take_turns(effort.steps, lambda _: None)
                run.report.put(
                    "peers", {"layers": layers, "tokens": rows * work.sequence, "contenders": field.figures()}
                )


def run_depth(run: Run) -> None:
    """Saved inputs go to the host, or the device would hold more of them with every layer."""
    config = run.layer_shape.config()
    cases = [run.case(with_layers(config, layers), offload=True) for layers in run.sizes.deep]
    depth.measure(made_virtual(cases, detect()), run.effort(60), lambda found: run.report.put("depth", found))


def run_wide(run: Run) -> None:
    found: dict[str, Any] = {}
    for name in run.sizes.wide:

        def save(figures: dict[str, Any], name: str = name) -> None:
            found[name] = figures
            run.report.put("wide", found)

        try:
            (case,) = made_virtual([run.case(wide.CONFIGS[name]())], detect())
        except ValueError as error:
            save({SKIPPED: str(error)})
            continue
        wide.measure(case, run.effort(30), run.rates(), save)
        _give_back_memory(run.device)


# name → what does it, and the seconds without which it is not begun
PARTS: dict[str, tuple[Callable[[Run], None], float]] = {
    "parity": (run_parity, 30),
    "link": (run_link, 15),
    "matmul": (run_matmul, 10),
    "adamw": (run_adamw, 30),
    "attention": (run_attention, 30),
    "layer": (run_layer, 20),
    "profile": (run_profile, 40),
    "stream": (run_stream, 150),
    "capped": (run_capped, 120),
    "plain": (run_plain, 60),
    "peers": (run_peers, 120),
    "depth": (run_depth, 180),
    "wide": (run_wide, 240),
}


def run_parts(run: Run, names: list[str]) -> None:
    """Each part in its turn; what is skipped or fails says so in its place, and the next one begins."""
    with tqdm(names, unit="part", file=sys.stderr) as bar:
        for name in bar:
            bar.set_description(name)
            part, needs_s = PARTS[name]
            refusal = run.budget.refusal(needs_s)
            if refusal:
                run.report.put(name, {SKIPPED: refusal})
                continue
            start_s = run.budget.spent_s
            try:
                part(run)
            except Exception as error:
                run.report.put(f"{name} {FAILED}", {"error": str(error), "traceback": traceback.format_exc()})
            _give_back_memory(run.device)
            run.report.put("seconds", run.report.values.get("seconds", {}) | {name: run.budget.spent_s - start_s})


def _give_back_memory(device: str) -> None:
    gc.collect()  # an engine and what it calls back refer to each other
    if device == "cuda":
        torch.cuda.empty_cache()
