"""What a layer costs in a shallow and in a deep model: step time and device memory at several depths, in turn.

    python -m benchmarks.depth                                    28 to 180 tiny Llama layers, each with its own storage
    python -m benchmarks.depth --shape 1b --virtual 2 --rows 1 --sequence 32   layers of a 1B model in the memory of two
    python -m benchmarks.depth --list                             which shapes fit this machine, at the greatest depth
    python -m benchmarks.depth --tiny                             toy sizes, to see that it runs

Every depth has an engine of its own; they take turns. Layer: the time from the first layer's start to the last
one's end, forward and backward, ÷ layers; what such a phase waits for is in it. Shell: the rest of the step. Slope: the
difference of two steps ÷ that of their depths, which needs no record. By CPU: processor time of the process, which
neighbours on the machine disturb less. Saved layer inputs go to the host; "if kept": what the device would hold if not.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from tqdm import tqdm

from benchmarks.cpu import RESULTS
from benchmarks.deep import Deep, fitting_table, lacking
from benchmarks.interval import interval
from benchmarks.machine import describe, in_words, slug
from benchmarks.peers.ours import Ours
from benchmarks.report import Report
from benchmarks.shapes import LLAMA, TINY, Shape
from benchmarks.streaming import Effort
from benchmarks.table import Cell, table
from benchmarks.turns import Timing, warm_up
from benchmarks.virtual import with_layers
from megatrain import EngineConfig, StreamingEngine
from megatrain.anatomy.presets import PRESETS
from megatrain.machine import detect
from megatrain.plan import planned
from megatrain.trace import Span

DEPTHS = [28, 56, 112, 180]
VOCABULARY = 512  # of every shape: layers are what is measured


def _of_layers(config: Any) -> Any:
    config.vocab_size, config.pad_token_id = VOCABULARY, None
    return config


SHAPES: dict[str, Callable[[], Any]] = {
    "tiny": Shape(128, 28, 4, 2, 384, VOCABULARY).config,
    **{name: shape.config for name, shape in LLAMA.items()},
    **{name: PRESETS[name] for name in ("dense-120b", "gpt-oss-120b")},
}
TARGETS = {"layer": 0.03, "peak": 0.01}


class Counted(Ours):
    """The engine, and the processor time of each of its steps."""

    def __init__(self, case: Deep, engine: StreamingEngine) -> None:
        super().__init__(engine, case.data())
        self.case = case
        self.cpu_s: list[float] = []

    def step(self) -> tuple[float, float]:
        before_s = time.process_time()
        found = super().step()
        self.cpu_s.append(time.process_time() - before_s)
        return found


@dataclass
class Peaks:
    """Most device memory of each engine alone; the others keep their buffers meanwhile."""

    engines: Mapping[str, StreamingEngine]
    bytes_of: dict[str, int] = field(default_factory=dict)

    def note(self, name: str) -> None:
        peak = self.engines[name].device_peak_bytes
        if self.engines[name].device_index is not None:
            peak -= sum(engine.arena_bytes for other, engine in self.engines.items() if other != name)
            torch.cuda.reset_peak_memory_stats()
        self.bytes_of[name] = max(peak, self.bytes_of.get(name, 0))


def measure(cases: list[Deep], effort: Effort, save: Callable[[dict[str, Any]], None]) -> None:
    """Every depth in turn, shallow ones first; `save` gets all figures so far after each turn."""
    plans = {str(case): planned_bytes(case) for case in cases}
    with ExitStack() as stack:
        contenders = {str(case): Counted(case, stack.enter_context(case.open())) for case in cases}
        peaks = Peaks({name: contender.engine for name, contender in contenders.items()})
        timings: dict[str, Timing] = {}
        for name, contender in contenders.items():
            timings[name] = warm_up(contender, 2)
            peaks.note(name)
        peaks.bytes_of.clear()  # models were made there, and other engines had not all their buffers

        def on_turn(name: str) -> None:
            peaks.note(name)
            measured = {n: c for n, c in contenders.items() if timings[n].timed}
            depths = {n: _figures(c, timings[n], peaks.bytes_of[n]) | plans[n] for n, c in measured.items()}
            save({"depths": depths} | compared(list(depths.values())))

        effort.spend(contenders, timings, on_turn)


def _figures(contender: Counted, timing: Timing, peak_bytes: int) -> dict[str, Any]:
    case, record = contender.case, contender.records[timing.timed[0]]
    layers = layers_s(contender.engine.recorder.spans())
    in_layers = [layers[contender.records[index].step] for index in timing.timed]
    return {
        "layers": case.layers,
        "stored_layers": case.stored,
        "step_s": timing.median_s,
        "fastest_step_s": min(timing.steps_s),
        "cpu_s": median(contender.cpu_s[index] for index in timing.timed),
        "turns_s": timing.turns,
        "layer_s": median(in_layers) / case.layers,
        "fastest_layer_s": min(in_layers) / case.layers,
        "layer_turns_s": [median(turn) / case.layers for turn in _in_turns(in_layers, timing)],
        "shell_s": median(step - inside for step, inside in zip(timing.steps_s, in_layers, strict=True)),
        "flops_per_s": record.flops / timing.median_s,
        "peak_bytes": peak_bytes,
    }


def _in_turns(values: list[float], timing: Timing) -> list[list[float]]:
    left = iter(values)
    return [[next(left) for _ in turn] for turn in timing.turns]


def planned_bytes(case: Deep) -> dict[str, int]:
    """What the engine holds on the device at most: as it is, and if saved layer inputs stayed there."""
    subject, kept = case.subject(), replace(case.engine, offload_activations=False)
    engines = {"planned_bytes": case.engine, "planned_bytes_if_kept": kept}
    return {name: planned(subject, engine, None).held_bytes for name, engine in engines.items()}


def layers_s(spans: Iterable[Span]) -> dict[int, float]:
    """By step: seconds from the first layer's start to the last one's end, forward and backward each."""
    ends: dict[tuple[int, str], tuple[float, float]] = defaultdict(lambda: (float("inf"), 0.0))
    for span in spans:
        if span.op in ("forward", "backward") and span.layer is not None:
            first, last = ends[span.step, span.op]
            ends[span.step, span.op] = min(first, span.start_s), max(last, span.end_s)
    found: dict[int, float] = defaultdict(float)
    for (step, _), (first, last) in ends.items():
        found[step] += last - first
    return found


def compared(depths: list[dict[str, Any]]) -> dict[str, Any]:
    """Of the deepest beside the shallowest, and slopes between neighbours; nothing of one depth alone."""
    if len(depths) < 2:
        return {}
    first, last = depths[0], depths[-1]
    ratios = [deep / flat for deep, flat in zip(last["layer_turns_s"], first["layer_turns_s"], strict=False)]
    return {
        "layer_ratio": median(ratios),
        "layer_ratio_interval": interval(ratios),
        "fastest_layer_ratio": last["fastest_layer_s"] / first["fastest_layer_s"],
        "peak_ratio": last["peak_bytes"] / first["peak_bytes"],
        **{
            f"{name}_slopes": [_slope(name, *pair) for pair in pairwise(depths)]
            for name in ("step_s", "fastest_step_s", "cpu_s")
        },
    }


def _slope(name: str, flat: dict[str, Any], deep: dict[str, Any]) -> float:
    return float((deep[name] - flat[name]) / (deep["layers"] - flat["layers"]))


# ---- in words ----

HEADER = ["", "s/step", "ms/layer", "fastest", "shell, ms", "slope, ms", "fastest", "by CPU", "peak MB", "if kept"]


def summary(found: Mapping[str, Any]) -> str:
    """The table, and what is to be compared with the targets."""
    depths = found.get("depths", {})
    rows = [_row(found, name, index) for index, name in enumerate(depths)]
    lines = [table(HEADER, rows)] if rows else []
    if "layer_ratio" in found:
        low, high = found["layer_ratio_interval"]
        lines.append(
            f"a layer of the deepest ÷ of the shallowest: {found['layer_ratio']:.3f} (19 of 20: {low:.3f}–{high:.3f}; "
            f"fastest: {found['fastest_layer_ratio']:.3f}; target 1 ± {TARGETS['layer']:.2f}); "
            f"device peak: {found['peak_ratio']:.3f} (target 1 ± {TARGETS['peak']:.2f})"
        )
    return "\n".join(lines)


def _row(found: Mapping[str, Any], name: str, index: int) -> list[Cell]:
    depth, of = found["depths"][name], ("step_s", "fastest_step_s", "cpu_s")
    slopes = [1e3 * found[f"{each}_slopes"][index - 1] if index else None for each in of]
    times = [depth["step_s"], *(1e3 * depth[each] for each in ("layer_s", "fastest_layer_s", "shell_s"))]
    return [name, *times, *slopes, depth["peak_bytes"] / 1e6, depth["planned_bytes_if_kept"] / 1e6]


# ---- the command line ----


def cases_of(args: argparse.Namespace) -> list[Deep]:
    if args.tiny:
        config, depths, rows, sequence = TINY.config(), [2, 3], 2, 16
    else:
        config, depths, rows, sequence = _of_layers(SHAPES[args.shape]()), args.depths, args.rows, args.sequence
    engine = EngineConfig(device="cpu", dtype=args.dtype, offload_activations=True)
    return [Deep(with_layers(config, depth), engine, rows, sequence, args.virtual) for depth in sorted(set(depths))]


def require_fit(cases: list[Deep]) -> None:
    """ValueError where this machine has too little for all depths at one time."""
    if problems := lacking([(case, case.subject()) for case in cases], detect()):
        raise ValueError("; ".join(problems) + ". `--list` shows what fits this machine")


def run(args: argparse.Namespace, out: Path) -> dict[str, Any]:
    cases = cases_of(args)
    require_fit(cases)
    report = Report(out, {"machine": describe(), "shape": args.shape, "dtype": args.dtype, "tokens": cases[0].tokens})
    with tqdm(total=args.rounds * len(cases), unit="turn", file=sys.stderr) as bar:

        def save(found: dict[str, Any]) -> None:
            report.values |= found
            report.write()
            bar.update()

        measure(cases, Effort(args.rounds, args.steps, lambda: True), save)
    return report.values


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="tiny", help="of a layer (default tiny)")
    parser.add_argument("--virtual", type=int, metavar="K", help="all layers in the host storage of K")
    parser.add_argument("--depths", type=int, nargs="+", default=DEPTHS, help="layers (default 28 56 112 180)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    for name, value in (("rows", 2), ("sequence", 64), ("rounds", 6), ("steps", 2)):
        parser.add_argument(f"--{name}", type=int, default=value, help=f"default {value}")
    parser.add_argument("--list", action="store_true", help="only say what fits")
    parser.add_argument("--tiny", action="store_true", help="toy sizes")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/<machine>-depth.json")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    args = parse(arguments)
    torch.set_num_threads(1)  # the other cores are for the copying
    print(in_words())
    if args.list:
        deepest = cases_of(args)[-1]
        shapes = {n: replace(deepest, config=with_layers(_of_layers(c()), deepest.layers)) for n, c in SHAPES.items()}
        print(fitting_table(shapes, detect()))
        return
    out = args.out or RESULTS / f"{slug()}-depth.json"
    print(summary(run(args, out)), f"written to {out}", sep="\n\n")


if __name__ == "__main__":
    main()
