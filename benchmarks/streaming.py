"""One model streamed with several depths and batch sizes, timed in turn, beside its arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from benchmarks.bounds import Rates, predict
from benchmarks.models import make_model
from benchmarks.peers import OURS, PLAIN
from benchmarks.peers.contender import MAX_GRAD_NORM, Contender
from benchmarks.peers.ours import Ours
from benchmarks.peers.plain import Plain
from benchmarks.shapes import Shape, batches
from benchmarks.turns import Timing, take_turns, warm_up, worst_difference
from megatrain import AdamWConfig, EngineConfig, StreamingEngine
from megatrain.config import Device, Dtype
from megatrain.machine import detect
from megatrain.plan import Plan, plan

LR = 1e-4
PLAIN_BYTES_PER_PARAMETER = 20  # weight and gradient in bfloat16, gradient, master and two moments in float32


@dataclass(frozen=True)
class Workload:
    """What is trained, and where. micro_batch_size: sequences of `sequence` tokens."""

    device: Device
    shape: Shape
    sequence: int
    micro_batch_size: int
    dtype: Dtype = "bfloat16"

    def config(self, depth: int, cap_bytes: int | None) -> EngineConfig:
        return EngineConfig(
            device=self.device,
            dtype=self.dtype,
            micro_batch_size=self.micro_batch_size,
            prefetch_depth=depth,
            device_memory_bytes=cap_bytes,
        )

    def rows(self, tokens: int) -> int:
        return max(1, tokens // self.sequence)

    def data(self, tokens: int) -> Iterator[dict[str, torch.Tensor]]:
        return batches(self.shape.vocab, self.rows(tokens), self.sequence)

    def plan(self, depth: int, tokens: int, cap_bytes: int | None) -> Plan:
        """megatrain's own arithmetic for this machine as it is now."""
        return plan(
            self.shape.config(),
            self.config(depth, cap_bytes),
            AdamWConfig(max_grad_norm=MAX_GRAD_NORM),
            batch=self.rows(tokens),
            sequence=self.sequence,
            machine=detect(),
        )

    def engine(self, depth: int, cap_bytes: int | None) -> StreamingEngine:
        model = make_model(self.shape, getattr(torch, self.dtype), self.device)
        optimizer = AdamWConfig(lr=LR, max_grad_norm=MAX_GRAD_NORM)
        return StreamingEngine(model, self.config(depth, cap_bytes), optimizer)


@dataclass
class Peaks:
    """Most device memory in use during each contender's turns, from now on: models are made on a card, too."""

    device: str
    engine: StreamingEngine | None = None
    bytes_of: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()

    def note(self, name: str) -> None:
        if self.device == "cuda":
            peak = torch.cuda.max_memory_allocated()
            torch.cuda.reset_peak_memory_stats()
        else:
            peak = self.engine.device_peak_bytes if self.engine is not None else 0
        self.bytes_of[name] = max(peak, self.bytes_of.get(name, 0))


@dataclass(frozen=True)
class Effort:
    """How long to measure: rounds of turns with so many timed steps; may_go_on is asked before every turn."""

    rounds: int
    steps: int
    may_go_on: Callable[[], bool]

    def spend(
        self, contenders: Mapping[str, Contender], timings: dict[str, Timing], on_turn: Callable[[str], None]
    ) -> None:
        take_turns(contenders, timings, rounds=self.rounds, steps=self.steps, on_turn=on_turn, may_go_on=self.may_go_on)


@dataclass(frozen=True)
class Case:
    """One depth with one number of tokens per optimizer step."""

    depth: int
    tokens: int

    def __str__(self) -> str:
        return f"{self.tokens / 1024:g}K tokens, depth {self.depth}"


def measure(
    work: Workload,
    cases: list[Case],
    effort: Effort,
    rates: Rates | None,
    save: Callable[[dict[str, Any]], None],
    *,
    cap_bytes: int | None = None,
) -> None:
    """Every case on one engine, in turn; `save` gets all figures so far after each turn."""
    plans = {case: work.plan(case.depth, case.tokens, cap_bytes) for case in cases}  # while the machine is empty
    found: dict[str, Any] = {str(c): {"refused": "; ".join(p.problems)} for c, p in plans.items() if not p.fits}
    save(found)
    fitting = [case for case in cases if plans[case].fits]
    if not fitting:
        return
    # The model is made on the card before that is capped: it may be larger than the cap.
    with work.engine(fitting[0].depth, cap_bytes) as engine, capped(work.device, cap_bytes):
        contenders = {str(case): Ours(engine, work.data(case.tokens), case.depth) for case in fitting}
        by_name = {str(case): case for case in fitting}
        timings: dict[str, Timing] = {}
        warm_up(contenders[str(fitting[0])], 2)  # kernels are chosen, and moments first touched
        peaks = Peaks(work.device, engine)

        def on_turn(name: str) -> None:
            peaks.note(name)
            figures = _figures(work, contenders[name], timings[name], rates, by_name[name].tokens)
            planned = plans[by_name[name]]
            held = {"held": planned.held_bytes, "with workspace": planned.device_bytes}
            found[name] = figures | {"peak_bytes": peaks.bytes_of[name], "planned_bytes": held}
            save(found)

        effort.spend(contenders, timings, on_turn)


def _figures(work: Workload, ours: Ours, timing: Timing, rates: Rates | None, tokens: int) -> dict[str, Any]:
    record = ours.records[timing.timed[0]]
    result = {
        "step_s": timing.median_s,
        "turns_s": timing.turns,
        "tokens_per_s": work.rows(tokens) * work.sequence / timing.median_s,
        "flops_per_s": record.flops / timing.median_s,
        **ours.lanes(timing.timed),
    }
    if rates is not None:
        predicted = predict(work.shape.parameters, record.flops, rates)
        result |= {"mfu": result["flops_per_s"] / rates.flops_per_s, "predicted_s": predicted.step_s}
        result |= {"bound": predicted.bound, "predicted_seconds": asdict(predicted)}
    return result


@contextmanager
def capped(device: str, nbytes: int | None) -> Iterator[None]:
    """Within, torch takes no more of the card than this."""
    if device != "cuda" or nbytes is None:
        yield
        return
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, nbytes / total))
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def layers_that_fit_plainly(shape: Shape, free_bytes: int) -> int:
    """How many layers plain training can hold in half of the free device memory; the rest is for activations."""
    room = free_bytes // 2 // PLAIN_BYTES_PER_PARAMETER - shape.shell_parameters
    return max(0, min(shape.layers, room // shape.layer_parameters))


def beside_plain(work: Workload, tokens: int, effort: Effort, save: Callable[[dict[str, Any]], None]) -> None:
    """The engine and plain Hugging Face on the same card, same shape and tokens, in turn."""
    with work.engine(1, None) as engine:
        ours = Ours(engine, work.data(tokens))
        plain = Plain(
            make_model(work.shape, getattr(torch, work.dtype), work.device),
            work.data(tokens),
            getattr(torch, work.dtype),
            LR,
            work.device,
            work.micro_batch_size,
        )
        contenders: dict[str, Contender] = {OURS: ours, PLAIN: plain}
        timings = {name: warm_up(contender, 1) for name, contender in contenders.items()}
        peaks = Peaks(work.device, engine)

        def on_turn(name: str) -> None:
            peaks.note(name)
            save(_pair(work, tokens, ours, timings, peaks))

        effort.spend(contenders, timings, on_turn)


def _pair(work: Workload, tokens: int, ours: Ours, timings: Mapping[str, Timing], peaks: Peaks) -> dict[str, Any]:
    flops = ours.records[0].flops
    result: dict[str, Any] = {"layers": work.shape.layers, "tokens": work.rows(tokens) * work.sequence}
    for name, timing in timings.items():
        if timing.timed:
            result[name] = {
                "step_s": timing.median_s,
                "turns_s": timing.turns,
                "tokens_per_s": work.rows(tokens) * work.sequence / timing.median_s,
                "flops_per_s": flops / timing.median_s,
                "peak_bytes_of_both": peaks.bytes_of[name],
                "losses": timing.losses,
            }
    mine, theirs = timings.values()
    if mine.timed and len(mine.losses) == len(theirs.losses):
        result["ratio"] = mine.median_s / theirs.median_s
        result["worst_relative_loss_difference"] = worst_difference(mine, theirs)
    return result
