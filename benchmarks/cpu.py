"""The engine against plain Hugging Face training on this CPU, in turn, in one run.

    python -m benchmarks.cpu                      about four minutes on two cores
    python -m benchmarks.cpu --dtype float32 --sequence 512 --rounds 6

Both sides train the same randomly initialised Llama shape on the same tokens, with clipping, gradient checkpointing
and a float32 master. In float32 their loss curves must agree to 1e-5, or the run fails. RSS is what the process
occupies of RAM: for each side, how far it rose from before the side was built to its highest during warm-up.
The time of making batches is included. The ratio of medians comes with its range over rounds: what other work on the
machine does to it. The ratio of the fastest steps is the one that such work disturbs least. Everything is written to
benchmarks/results/<machine>.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

import torch
from tqdm import tqdm

from benchmarks.contenders import Contender, Ours, Plain, make_ours
from benchmarks.machine import describe, in_words, slug
from benchmarks.pipeline import optimizer_alone, pipeline
from benchmarks.resident import PeakRss, settled_rss_bytes
from benchmarks.shapes import TINY, Shape, batches, make_model
from benchmarks.table import Cell, table
from benchmarks.turns import Timing, ratios, take_turns, warm_up, worst_difference
from megatrain import EngineConfig
from megatrain.config import Dtype, OptimizerOverlap

RESULTS = Path(__file__).parent / "results"
OURS, PLAIN = "MegaTrain", "plain Hugging Face"
TOLERANCE = {"float32": 1e-5, "bfloat16": 5e-3}  # bfloat16: two roundings of one gradient part by one unit in 256


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

    @property
    def turns(self) -> int:
        return len(self.dtypes) * 2 * self.rounds

    def engine(self, dtype: Dtype) -> EngineConfig:
        return EngineConfig(device="cpu", dtype=dtype, prefetch_depth=self.depth, optimizer_overlap=self.overlap)


def compare(settings: Settings, dtype: Dtype, on_turn: Callable[[str], None]) -> dict[str, Any]:
    """Train both sides in one dtype; returns what the JSON file keeps of it. Raises where the loss curves part."""
    built: dict[str, Callable[[Settings, Dtype], Contender]] = {OURS: _ours, PLAIN: _plain}
    contenders: dict[str, Contender] = {}
    warm: dict[str, Timing] = {}
    memory: dict[str, int] = {}
    for name, build in built.items():
        before = settled_rss_bytes()
        with PeakRss() as peak:
            contenders[name] = build(settings, dtype)
            warm[name] = warm_up(contenders[name], settings.warmup)
        memory[name] = peak.peak_bytes - before
    timings = {name: Timing(losses=timing.losses, norms=timing.norms) for name, timing in warm.items()}
    ours = contenders[OURS]
    assert isinstance(ours, Ours)
    take_turns(contenders, timings, rounds=settings.rounds, steps=settings.steps, on_turn=on_turn)
    difference = require_agreement(timings[OURS], timings[PLAIN], dtype)
    result = {name: _figures(settings, timings[name], memory[name]) for name in timings}
    result[OURS] |= {"device_arena_peak_bytes": ours.engine.device_peak_bytes, **pipeline(ours, timings[OURS])}
    ours.engine.close()
    return {
        "contenders": result,
        "ratio": statistics.median(timings[OURS].steps_s) / statistics.median(timings[PLAIN].steps_s),
        "ratio_of_fastest_steps": min(timings[OURS].steps_s) / min(timings[PLAIN].steps_s),
        "ratio_of_each_round": ratios(timings[OURS], timings[PLAIN]),
        "worst_relative_loss_difference": difference,
    }


def _ours(settings: Settings, dtype: Dtype) -> Ours:
    data = batches(settings.shape.vocab, settings.batch, settings.sequence)
    return make_ours(make_model(settings.shape, torch.float32), data, settings.engine(dtype), settings.lr)


def _plain(settings: Settings, dtype: Dtype) -> Plain:
    data = batches(settings.shape.vocab, settings.batch, settings.sequence)
    return Plain(make_model(settings.shape, torch.float32), data, getattr(torch, dtype), settings.lr)


def require_agreement(ours: Timing, plain: Timing, dtype: Dtype) -> float:
    """The worst relative difference of the loss curves; RuntimeError if it is too large: then times mean nothing."""
    difference = worst_difference(ours, plain)
    if not difference <= TOLERANCE[dtype]:
        raise RuntimeError(
            f"the {dtype} loss curves differ by {difference:.1e} (allowed {TOLERANCE[dtype]:.0e}), so the two sides "
            f"did not do the same work. {OURS}: {ours.losses}; {PLAIN}: {plain.losses}"
        )
    return difference


def _figures(settings: Settings, timing: Timing, rss: int) -> dict[str, Any]:
    return {
        "step_s": timing.median_s,
        "tokens_per_s": settings.batch * settings.sequence / timing.median_s,
        "peak_rss_growth_bytes": rss,
        "turns_s": timing.turns,
        "losses": timing.losses,
    }


def summary(dtypes: dict[str, dict[str, Any]]) -> str:
    """The short table."""
    header = ["", "s/step", "tok/s", "ours ÷ plain", "of fastest", "RSS, GB", "device arena, GB"]
    rows: list[list[Cell]] = []
    for dtype, result in dtypes.items():
        spread = result["ratio_of_each_round"]
        ratio = f"{result['ratio']:.3f} ({min(spread):.2f}–{max(spread):.2f})"
        fastest = result["ratio_of_fastest_steps"]
        for name, figures in result["contenders"].items():
            arena = figures.get("device_arena_peak_bytes")
            ours = name == OURS
            times = [figures["step_s"], figures["tokens_per_s"], ratio if ours else "", fastest if ours else ""]
            memory = [figures["peak_rss_growth_bytes"] / 1e9, None if arena is None else arena / 1e9]
            rows.append([f"{dtype}, {name}", *times, *memory])
    return table(header, rows)


def pipeline_summary(dtypes: dict[str, dict[str, Any]]) -> str:
    """Where the engine's steps went: busy seconds, what hid under compute, what compute waited for."""
    lines = []
    for dtype, result in dtypes.items():
        ours = result["contenders"][OURS]
        busy = ", ".join(f"{lane} {seconds:.3f}" for lane, seconds in ours["busy_s"].items())
        waits = ", ".join(f"{cause} {seconds:.3f}" for cause, seconds in ours["waits_s"].items() if seconds)
        shares = ((name, ours[f"{name}_hidden"]) for name in ("h2d", "d2h", "update"))
        hidden = ", ".join(f"{name} {share:.0%}" for name, share in shares if share is not None)
        lines.append(f"{dtype}: busy s/step {busy}; hidden {hidden}; waits {waits}")
    return "\n".join(lines)


def run(settings: Settings, adamw_params: int, out: Path) -> dict[str, Any]:
    """Everything, with a progress bar; the file is written as soon as there is something to keep."""
    result: dict[str, Any] = {
        "machine": describe(),
        "threads": torch.get_num_threads(),
        "settings": asdict(settings) | {"parameters": settings.shape.parameters},
        "dtypes": {},
    }
    print(in_words())
    print(f"{settings.shape.parameters / 1e6:.0f} M parameters, {settings.batch} × {settings.sequence} tokens")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tqdm(total=settings.turns + bool(adamw_params), unit="turn", desc="benchmark") as bar:
        for dtype in settings.dtypes:
            bar.set_description(f"{dtype}, warm-up")
            on_turn = _progress(bar, dtype)
            result["dtypes"][dtype] = compare(settings, dtype, on_turn)
            _write(out, result)
        if adamw_params:
            bar.set_description("AdamW alone")
            result["adamw"] = optimizer_alone(adamw_params, rounds=5)
            bar.update()
    _write(out, result)
    return result


def _progress(bar: Any, dtype: str) -> Callable[[str], None]:
    def on_turn(name: str) -> None:
        bar.set_description(f"{dtype}, {name}")
        bar.update()

    return on_turn


def _write(path: Path, result: dict[str, Any]) -> None:
    path.write_text(json.dumps(result, indent=1) + "\n")


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
    parser.add_argument("--threads", type=int, help="torch's threads, for both sides (default: torch's own choice)")
    parser.add_argument("--adamw-params", type=int, default=16 << 20, help="array length of AdamW alone; 0 = leave out")
    parser.add_argument("--tiny", action="store_true", help="a model of toy size, to see that everything runs")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/<machine>.json")
    return parser.parse_args(arguments)


def settings_of(args: argparse.Namespace) -> Settings:
    heads = max(1, args.hidden // 64)
    intermediate = round(args.hidden * 8 / 3 / 64) * 64  # three matrices as large as two of four times the width
    shape = Shape(args.hidden, args.layers, heads, heads, intermediate, args.vocab)
    dtypes: list[Dtype] = ["float32", "bfloat16"] if args.dtype == "both" else [args.dtype]
    counts = {name: getattr(args, name) for name in ("warmup", "rounds", "steps", "depth", "overlap")}
    if args.tiny:
        return Settings(TINY, 2, 32, dtypes, **counts)
    return Settings(shape, args.batch, args.sequence, dtypes, **counts)


def main(arguments: list[str] | None = None) -> None:
    args = parse(arguments)
    if args.threads:
        torch.set_num_threads(args.threads)
    out = args.out or RESULTS / f"{slug()}.json"
    result = run(settings_of(args), args.adamw_params, out)
    print(summary(result["dtypes"]), pipeline_summary(result["dtypes"]), f"written to {out}", sep="\n\n")


if __name__ == "__main__":
    main()
