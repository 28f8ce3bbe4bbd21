"""Each lever of the engine alone, and all together, against none of them: in turn, in one run, on the same batches.

    python -m benchmarks.levers
    python -m benchmarks.levers --sequence 4096 --batch 1 --dtype bfloat16 --only tile_tokens

A lever is what an EngineConfig field may switch on. Time is the median step, with its ratio to the engine without
levers: of medians, with the range over rounds, and of fastest steps. Losses must be the same within the dtype's
rounding, or the run fails. Memory: the most that the engine's own buffers held (arena), and how far the process's RSS
rose above where it was between two steps (live), which is what kernels and autograd allocate. The first step counts by
itself: that is where layers are compiled. Everything is written to benchmarks/results/<machine>-levers.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

import torch
from tqdm import tqdm

from benchmarks.agreement import OURS_ALLOWED
from benchmarks.cpu import RESULTS
from benchmarks.machine import describe, in_words, slug
from benchmarks.models import make_model
from benchmarks.peers.ours import Ours, make_ours
from benchmarks.resident import PeakRss, settled_rss_bytes
from benchmarks.shapes import TINY, Shape, batches
from benchmarks.table import Cell, table
from benchmarks.turns import Timing, ratios, take_turns, warm_up, worst_difference
from megatrain import EngineConfig
from megatrain.config import Dtype

NONE, TOGETHER = "none", "together"
KERNELS = ("flash", "math")  # of attention, on a CPU
# What is not joined with the others: not beside compiled layers, or the price of leaving out what is on by default.
ALONE = {
    **{name: {"attention": name} for name in KERNELS},
    "keep_attention": {"keep_attention": True},
    "inputs offloaded": {"offload_activations": True},
    "nothing loaded ahead": {"prefetch_depth": 0},
    "optimizer not overlapped": {"optimizer_overlap": "none"},
}


@dataclass(frozen=True)
class Settings:
    """What is compared, and for how long. A turn is one untimed step and `steps` timed ones."""

    shape: Shape
    batch: int
    sequence: int
    dtype: Dtype
    tile_tokens: int
    only: tuple[str, ...] = ()
    warmup: int = 2
    rounds: int = 4
    steps: int = 3
    lr: float = 3e-4

    @property
    def contenders(self) -> dict[str, dict[str, Any]]:
        """The fields of EngineConfig that each contender has other than the default."""
        levers: dict[str, dict[str, Any]] = {
            "tile_tokens": {"tile_tokens": self.tile_tokens},
            "compile": {"compile": True},
            "kept_graphs": {"kept_graphs": self.shape.layers},
            "resident_layers": {"resident_layers": self.shape.layers},
            **ALONE,
        }
        chosen = {name: fields for name, fields in levers.items() if not self.only or name in self.only}
        joined = [fields for name, fields in chosen.items() if name not in ALONE]
        together = {name: value for fields in joined for name, value in fields.items()}
        return {NONE: {}, **chosen, **({TOGETHER: together} if len(joined) > 1 else {})}


def build(settings: Settings, fields: dict[str, Any]) -> Ours:
    """An engine with these fields, on a model and batches of its own that are the same for all."""
    config = EngineConfig(**{"device": "cpu", "dtype": settings.dtype, "offload_activations": False} | fields)
    data = batches(settings.shape.vocab, settings.batch, settings.sequence)
    return make_ours(make_model(settings.shape, torch.float32), data, config, settings.lr)


def compare(settings: Settings, on_turn: Callable[[str], None]) -> dict[str, dict[str, Any]]:
    """Train all contenders in turn; returns each one's figures. RuntimeError where loss curves part."""
    contenders: dict[str, Ours] = {}
    timings: dict[str, Timing] = {}
    firsts: dict[str, float] = {}
    lives: dict[str, int] = {}
    for name, fields in settings.contenders.items():
        on_turn(f"{name}, warm-up")
        contenders[name] = build(settings, fields)
        start_s = time.perf_counter()
        timings[name] = warm_up(contenders[name], 1)
        firsts[name] = time.perf_counter() - start_s
        lives[name] = live_bytes(contenders[name], timings[name], settings.warmup)
    take_turns(contenders, timings, rounds=settings.rounds, steps=settings.steps, on_turn=on_turn)
    found = {}
    for name, timing in timings.items():
        found[name] = figures(timing, timings[NONE], settings.dtype, name)
        engine = contenders[name].engine
        found[name] |= {"first_step_s": firsts[name], "live_peak_bytes": lives[name]}
        found[name] |= {"arena_peak_bytes": engine.device_peak_bytes}
        engine.close()
    return found


def live_bytes(contender: Ours, timing: Timing, steps: int) -> int:
    """How far RSS rises during steps; their losses join `timing`."""
    before = settled_rss_bytes()
    with PeakRss() as peak:
        more = warm_up(contender, steps)
    timing.losses += more.losses
    timing.norms += more.norms
    return peak.peak_bytes - before


def figures(timing: Timing, plain: Timing, dtype: Dtype, name: str) -> dict[str, Any]:
    difference = worst_difference(timing, plain)
    if not difference <= OURS_ALLOWED[dtype]:
        raise RuntimeError(
            f"{name}: losses differ from those without it by {difference:.1e} (allowed {OURS_ALLOWED[dtype]:.0e}), so "
            f"the two did not do the same work: {timing.losses} and {plain.losses}"
        )
    return {
        "step_s": timing.median_s,
        "ratio": statistics.median(timing.steps_s) / statistics.median(plain.steps_s),
        "ratio_of_fastest_steps": min(timing.steps_s) / min(plain.steps_s),
        "ratio_of_each_round": ratios(timing, plain),
        "worst_relative_loss_difference": difference,
        "turns_s": timing.turns,
        "losses": timing.losses,
    }


def summary(found: dict[str, dict[str, Any]]) -> str:
    """The short table."""
    header = ["", "s/step", "÷ none", "of fastest", "loss differs by", "arena, MB", "live, MB", "first step, s"]
    rows: list[list[Cell]] = []
    for name, its in found.items():
        spread = its["ratio_of_each_round"]
        ratio = f"{its['ratio']:.3f} ({min(spread):.2f}–{max(spread):.2f})"
        memory = [its["arena_peak_bytes"] / 1e6, its["live_peak_bytes"] / 1e6]
        difference = f"{its['worst_relative_loss_difference']:.1e}"
        rows.append(
            [name, its["step_s"], ratio, its["ratio_of_fastest_steps"], difference, *memory, its["first_step_s"]]
        )
    return table(header, rows)


def run(settings: Settings, out: Path) -> dict[str, Any]:
    """Everything, with a progress bar; then the file."""
    print(in_words())
    print(f"{settings.shape.parameters / 1e6:.0f} M parameters, {settings.batch} × {settings.sequence} tokens")
    result: dict[str, Any] = {"machine": describe(), "threads": torch.get_num_threads(), "settings": asdict(settings)}
    with tqdm(total=len(settings.contenders) * (settings.rounds + 1), unit="turn") as bar:

        def on_turn(name: str) -> None:
            bar.set_description(name)
            bar.update()

        result["contenders"] = compare(settings, on_turn)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")
    return result


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = (("hidden", 512), ("layers", 6), ("vocab", 4096), ("batch", 2), ("sequence", 512), ("tile-tokens", 256))
    for name, value in (*sizes, ("warmup", 2), ("rounds", 4), ("steps", 3)):
        parser.add_argument(f"--{name}", type=int, default=value, help=f"default {value}")
    parser.add_argument("--dtype", choices=get_args(Dtype), default="float32")
    parser.add_argument("--only", nargs="+", default=[], metavar="LEVER", help="of the levers only these")
    parser.add_argument("--threads", type=int, help="torch's threads (default: torch's own choice)")
    parser.add_argument("--tiny", action="store_true", help="a model of toy size, to see that everything runs")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/<machine>-levers.json")
    return parser.parse_args(arguments)


def settings_of(args: argparse.Namespace) -> Settings:
    heads = max(1, args.hidden // 64)
    intermediate = round(args.hidden * 8 / 3 / 64) * 64
    shape = Shape(args.hidden, args.layers, heads, max(1, heads // 2), intermediate, args.vocab)
    if args.tiny:
        return Settings(TINY, 2, 32, args.dtype, 16, tuple(args.only), warmup=1, rounds=1, steps=1)
    return Settings(
        shape,
        args.batch,
        args.sequence,
        args.dtype,
        args.tile_tokens,
        tuple(args.only),
        args.warmup,
        args.rounds,
        args.steps,
    )


def main(arguments: list[str] | None = None) -> None:
    args = parse(arguments)
    if args.threads:
        torch.set_num_threads(args.threads)
    settings = settings_of(args)
    unknown = set(args.only) - set(settings.contenders)
    if unknown:
        raise SystemExit(f"--only knows no lever named {', '.join(sorted(unknown))}")
    result = run(settings, args.out or RESULTS / f"{slug()}-levers.json")
    print(summary(result["contenders"]))


if __name__ == "__main__":
    main()
