"""The engine, plain Hugging Face training, FSDP2 and DeepSpeed ZeRO-3 on this CPU, in turn, in one run.

    python -m benchmarks.cpu                      both dtypes
    python -m benchmarks.cpu --dtype float32 --sequence 512 --rounds 6 --skip "DeepSpeed ZeRO-3 offload"

All train the same randomly initialised Llama shape on the same tokens, with clipping at 1 and a float32 master, each in
a process of its own. Loss curves must agree with plain training's (benchmarks.agreement), or the run says whose does
not and fails. RSS is what a process occupies of RAM: how far it rose from before its contender was built to its
highest, while it was built (all) and during warm-up. The time of making batches is included. The ratio of medians
to plain training's step comes with its range over rounds: what other work on the machine does to it. The ratio of
the fastest steps is the one that such work disturbs least. Everything is written to benchmarks/results/<machine>.json
as it goes. A contender that is not installed or fails is named, and the others go on.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, get_args

import torch
from tqdm import tqdm

from benchmarks.adamw import deepspeed_installed
from benchmarks.field import Field
from benchmarks.machine import describe, in_words, slug
from benchmarks.peers import OURS, PEERS, PLAIN, ZERO3
from benchmarks.peers.contender import Task
from benchmarks.pipeline import optimizer_alone
from benchmarks.report import Report
from benchmarks.shapes import TINY, Shape
from benchmarks.table import Cell, table
from megatrain.config import Dtype, OptimizerOverlap

RESULTS = Path(__file__).parent / "results"
BUSY = 1.0  # load of the last minute beyond which a comparison is worth little


@dataclass(frozen=True)
class Settings:
    """What is compared, and for how long. A turn is one untimed step and `steps` timed ones."""

    shape: Shape
    batch: int
    sequence: int
    dtypes: list[Dtype]
    warmup: int = 3
    rounds: int = 4
    steps: int = 3
    depth: int = 1
    overlap: OptimizerOverlap = "forward"
    lr: float = 3e-4
    threads: int = field(default_factory=torch.get_num_threads)
    contenders: list[str] = field(default_factory=lambda: [*PEERS])
    patience_s: float = 900

    @property
    def turns(self) -> int:
        """With the one in which each is built."""
        return len(self.dtypes) * len(self.contenders) * (1 + self.rounds)

    @property
    def deepspeed(self) -> bool:
        """Whether its AdamW is measured, too."""
        return ZERO3 in self.contenders and deepspeed_installed()

    def task(self, dtype: Dtype) -> Task:
        return Task(self.shape, self.batch, self.sequence, dtype, self.lr, self.depth, self.overlap)

    def field(self, dtype: Dtype) -> Field:
        entries = {name: PEERS[name] for name in self.contenders}
        return Field(entries, self.task(dtype), threads=self.threads, patience_s=self.patience_s)


def compare(
    settings: Settings, dtype: Dtype, save: Callable[[dict[str, Any]], None], on_turn: Callable[[str], None]
) -> None:
    """Train with all contenders in one dtype; `save` gets what the JSON file keeps, after every round."""
    with settings.field(dtype) as contenders:
        contenders.build(settings.warmup, on_turn)
        for _ in range(settings.rounds):
            contenders.take_turns(settings.steps, on_turn)
            save(contenders.figures())


def run(settings: Settings, adamw_params: int, out: Path) -> dict[str, Any]:
    """Everything, with a progress bar; the file is written as soon as there is something to keep."""
    about = asdict(settings) | {"parameters": settings.shape.parameters}
    load = os.getloadavg()[0]
    report = Report(out, {"machine": describe(), "load_before": load, "settings": about, "dtypes": {}})
    print(in_words())
    if load > BUSY:
        print(f"Other work is running (load {load:.1f}): these figures will say little; see benchmarks/LOG.md")
    print(f"{settings.shape.parameters / 1e6:.0f} M parameters, {settings.batch} × {settings.sequence} tokens")
    with tqdm(total=settings.turns + bool(adamw_params), unit="turn", desc="benchmark") as bar:
        for dtype in settings.dtypes:
            save = _saver(report, dtype)
            compare(settings, dtype, save, _progress(bar, dtype))
        if adamw_params:
            bar.set_description("AdamW alone")
            report.put("adamw", optimizer_alone(adamw_params, rounds=5, deepspeed=settings.deepspeed))
            bar.update()
    return report.values


def _saver(report: Report, dtype: str) -> Callable[[dict[str, Any]], None]:
    return lambda found: report.put("dtypes", report.values["dtypes"] | {dtype: {"contenders": found}})


def _progress(bar: Any, dtype: str) -> Callable[[str], None]:
    def on_turn(name: str) -> None:
        bar.set_description(f"{dtype}, {name}")
        bar.update()

    return on_turn


# ---- in words ----

HEADER = [
    "",
    "s/step",
    "tok/s",
    "TFLOP/s",
    "÷ plain",
    "of fastest",
    "peak RSS, GB",
    "B/param",
    "arena, GB",
    "losses by",
]


def summary(dtypes: Mapping[str, dict[str, Any]]) -> str:
    """The short table, what each gives up, and which did not do the same work."""
    trained = [(dtype, n, f) for dtype, result in dtypes.items() for n, f in measured(result).items()]
    rows = [[f"{dtype}, {name}", *_cells(found)] for dtype, name, found in trained]
    notes = dict.fromkeys(f"{name} gives up {found['gives_up']}" for _, name, found in trained)
    return "\n\n".join(filter(None, [table(HEADER, rows), "\n".join(notes), "\n".join(troubles(dtypes))]))


def measured(result: dict[str, Any]) -> dict[str, Any]:
    """Those of one dtype that did not fail, by name."""
    return {name: found for name, found in result["contenders"].items() if "failed" not in found}


def _cells(found: dict[str, Any]) -> list[Cell]:
    arena = found.get("device_peak_bytes")
    rounds = found.get("ratio_of_each_round")
    difference = found.get("worst_relative_loss_difference")
    return [
        found["step_s"],
        found["tokens_per_s"],
        found["model_flops_per_s"] / 1e12,
        f"{found['ratio']:.3f} ({min(rounds):.2f}–{max(rounds):.2f})" if rounds else None,
        found.get("ratio_of_fastest_steps"),
        found["peak_rss_growth_bytes"] / 1e9,
        found["host_bytes_per_parameter"],
        None if arena is None else arena / 1e9,
        None if difference is None else f"{difference:.1e}",
    ]


def troubles(dtypes: Mapping[str, dict[str, Any]]) -> list[str]:
    """Which contenders failed, and whose figures mean nothing."""
    lines = []
    for dtype, result in dtypes.items():
        for name, found in result["contenders"].items():
            if "failed" in found:
                lines.append(f"{dtype}, {name} failed: {found['failed']}")
            elif not found.get("same_work", True):
                lines.append(
                    f"{dtype}, {name} did not do the same work: its losses differ from plain training's by "
                    f"{found['worst_relative_loss_difference']:.1e} (allowed {found['allowed_loss_difference']:.0e})"
                )
    return lines


def pipeline_summary(dtypes: Mapping[str, dict[str, Any]]) -> str:
    """Where the engine's steps went: busy seconds, what hid under compute, what compute waited for."""
    lines = []
    for dtype, result in dtypes.items():
        lanes = measured(result).get(OURS, {}).get("lanes")
        if lanes is None:
            continue
        busy = ", ".join(f"{lane} {seconds:.3f}" for lane, seconds in lanes["busy_s"].items())
        waits = ", ".join(f"{cause} {seconds:.3f}" for cause, seconds in lanes["waits_s"].items() if seconds)
        shares = ((name, lanes[f"{name}_hidden"]) for name in ("h2d", "d2h", "update"))
        hidden = ", ".join(f"{name} {share:.0%}" for name, share in shares if share is not None)
        lines.append(f"{dtype}: busy s/step {busy}; hidden {hidden}; waits {waits}")
    return "\n".join(lines)


def went_well(dtypes: Mapping[str, dict[str, Any]]) -> bool:
    """All that trained did the same work, and the two that the comparison is about did train. Peers may be missing."""
    found = [(name, each) for result in dtypes.values() for name, each in result["contenders"].items()]
    return all(each.get("same_work", name not in (OURS, PLAIN)) for name, each in found)


# ---- the command line ----


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("hidden", 768), ("layers", 8), ("vocab", 8192), ("batch", 4), ("sequence", 128)):
        parser.add_argument(f"--{name}", type=int, default=value, help=f"default {value}")
    for name, value in (("warmup", 3), ("rounds", 4), ("steps", 3), ("depth", 1)):
        parser.add_argument(f"--{name}", type=int, default=value, help=f"default {value}")
    parser.add_argument("--dtype", choices=[*get_args(Dtype), "both"], default="both")
    parser.add_argument(
        "--overlap", choices=["forward", "none"], default="forward", help="EngineConfig.optimizer_overlap"
    )
    parser.add_argument("--skip", nargs="+", choices=PEERS, default=[], metavar="NAME", help=f"of {', '.join(PEERS)}")
    parser.add_argument(
        "--patience", type=float, default=900, help="seconds for an answer of a contender (default 900)"
    )
    parser.add_argument(
        "--threads", type=int, default=torch.get_num_threads(), help="of each contender (default: torch's own choice)"
    )
    parser.add_argument("--adamw-params", type=int, default=16 << 20, help="array length of AdamW alone; 0 = leave out")
    parser.add_argument("--tiny", action="store_true", help="a model of toy size, to see that everything runs")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/<machine>.json")
    return parser.parse_args(arguments)


def settings_of(args: argparse.Namespace) -> Settings:
    heads = max(1, args.hidden // 64)
    intermediate = round(args.hidden * 8 / 3 / 64) * 64  # three matrices as large as two of four times the width
    shape = Shape(args.hidden, args.layers, heads, heads, intermediate, args.vocab)
    dtypes: list[Dtype] = ["float32", "bfloat16"] if args.dtype == "both" else [args.dtype]
    chosen = {name: getattr(args, name) for name in ("warmup", "rounds", "steps", "depth", "overlap", "threads")}
    chosen |= {"contenders": [name for name in PEERS if name not in args.skip], "patience_s": args.patience}
    if args.tiny:
        return Settings(TINY, 2, 32, dtypes, **chosen)
    return Settings(shape, args.batch, args.sequence, dtypes, **chosen)


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code: 1 if a contender did other work than plain training, or one of the main two failed."""
    args = parse(arguments)
    out = args.out or RESULTS / f"{slug()}.json"
    dtypes = run(settings_of(args), args.adamw_params, out)["dtypes"]
    print(summary(dtypes), pipeline_summary(dtypes), f"written to {out}", sep="\n\n")
    return 0 if went_well(dtypes) else 1


if __name__ == "__main__":
    sys.exit(main())
