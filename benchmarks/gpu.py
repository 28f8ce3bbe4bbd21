"""Everything that only a CUDA card can tell, in one go and within a time limit.

    python -m benchmarks.gpu --seconds 540 --out gpu.json
    python -m benchmarks.gpu --device cpu --tiny          the same code on a CPU in toy sizes, to see that it runs

parity   tiny models of several families: the same losses, norms and weights as plain training on the card
link     the engine's lanes alone: each way and both at once, registered memory beside torch's pinned memory
matmul   a big bfloat16 product: the rate that MFU is counted against
adamw    AdamW and plain copies in host memory, by threads
stream   a Llama shape at depths 0 to 3 and several batch sizes: throughput, overlap, waits, memory, the bound
capped   the same with little device memory
plain    the engine beside plain Hugging Face, with as many layers as fit plainly

Each part is on disk as soon as it is known. A part that fails or does not fit into the time says so in its place.
"""

from __future__ import annotations

import argparse
import gc
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from tqdm import tqdm

from benchmarks import link, parity
from benchmarks.bounds import Rates
from benchmarks.budget import Budget
from benchmarks.machine import describe, in_words
from benchmarks.pipeline import optimizer_alone
from benchmarks.report import Report
from benchmarks.shapes import LLAMA, TINY, Shape
from benchmarks.streaming import Case, Effort, Workload, beside_plain, layers_that_fit_plainly, measure
from benchmarks.table import Cell, table
from megatrain.machine import detect

HOST_BYTES_PER_PARAMETER = 14  # with clipping; see `megatrain plan`
HOST_RESERVE_BYTES = 8 << 30  # torch, CUDA's own and the batches
SKIPPED, FAILED = "skipped", "failed"


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


FULL = Sizes(4096, 2, [1 << 14, 1 << 16], 24 << 30, 512 << 20, 24, 8192, 3.0, 32 << 20, 5)
TOY = Sizes(16, 2, [64, 128], 64 << 20, 1 << 20, 4, 64, 0.01, 1 << 12, 1)


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

    def effort(self, reserve_s: float) -> Effort:
        """Until only what later parts need is left."""
        return Effort(self.rounds, self.steps, lambda: self.budget.left_s > reserve_s)

    def rates(self) -> Rates | None:
        """What the parts so far measured, if all of them did."""
        found = self.report.values
        if any(not _measured(found.get(part)) for part in ("link", "matmul", "adamw")):
            return None
        both = found["link"]["registered"]
        best = max(row["params_per_s"] for row in found["adamw"] if row["name"] == "AdamW split")
        return Rates(found["matmul"]["flops_per_s"], both["h2d of both"], both["d2h of both"], best)


def _measured(value: Any) -> bool:
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


def run_stream(run: Run) -> None:
    _stream(run, "stream", run.depths, cap_bytes=None, reserve_s=150)


def run_capped(run: Run) -> None:
    _stream(run, "capped", [1], cap_bytes=run.sizes.cap_bytes, reserve_s=60)


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


# name → what does it, and the seconds without which it is not begun
PARTS: dict[str, tuple[Callable[[Run], None], float]] = {
    "parity": (run_parity, 30),
    "link": (run_link, 15),
    "matmul": (run_matmul, 10),
    "adamw": (run_adamw, 30),
    "stream": (run_stream, 150),
    "capped": (run_capped, 120),
    "plain": (run_plain, 60),
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


# ---- in words ----


def summary(values: dict[str, Any]) -> str:
    """The short tables, of whatever was measured."""
    blocks = [_parity_lines, _rate_lines, _stream_table, _plain_table, _trouble_lines]
    return "\n\n".join(text for block in blocks if (text := block(values)))


def _parity_lines(values: dict[str, Any]) -> str:
    rows: list[list[Cell]] = []
    for found in values.get("parity", []) if _measured(values.get("parity")) else []:
        verdict = found.get(SKIPPED) or found.get("error") or ("equal" if found["passed"] else "DIFFERS")
        figures = [found.get(name) for name in ("loss", "norm", "weights")]
        rows.append([found["family"], found["dtype"], *figures, verdict])
    return table(["parity", "dtype", "loss", "norm", "weights", ""], rows) if rows else ""


def _rate_lines(values: dict[str, Any]) -> str:
    lines = []
    if _measured(values.get("link")):
        for kind, rates in values["link"].items():
            ways = ", ".join(f"{name} {rate / 1e9:.1f}" for name, rate in rates.items())
            lines.append(f"link, {kind} memory, GB/s: {ways}")
    if _measured(values.get("matmul")):
        lines.append(f"bfloat16 product: {values['matmul']['flops_per_s'] / 1e12:.1f} TFLOP/s")
    if _measured(values.get("adamw")):
        for name in dict.fromkeys(row["name"] for row in values["adamw"]):
            best = max((r for r in values["adamw"] if r["name"] == name), key=lambda r: float(r["params_per_s"]))
            rate = f"{best['params_per_s'] / 1e9:.2f} G/s, {best['gb_per_s']:.0f} GB/s"
            lines.append(f"{name}: {rate} with {best['threads']} threads")
    return "\n".join(lines)


STREAM_HEADER = ["", "s/step", "predicted", "tok/s", "TFLOP/s", "MFU", "h2d", "d2h", "AdamW", "waits", "GB", "planned"]


def _stream_table(values: dict[str, Any]) -> str:
    rows, bounds = [], []
    for part in ("stream", "capped"):
        for name, found in values.get(part, {}).items() if _measured(values.get(part)) else ():
            label = f"{name}, capped" if part == "capped" else name
            if "refused" in found:
                bounds.append(f"{label}: {found['refused']}")
                continue
            rows.append([label, *_stream_cells(found)])
            bounds.append(f"{label}: bound by {found.get('bound', 'what was not measured')}")
    notes = "h2d, d2h, AdamW: share hidden under compute; waits: share of the step without compute"
    return "\n".join([table(STREAM_HEADER, rows), notes, *bounds]) if rows or bounds else ""


def _stream_cells(found: dict[str, Any]) -> list[Cell]:
    return [
        found["step_s"],
        found.get("predicted_s"),
        found["tokens_per_s"],
        found["flops_per_s"] / 1e12,
        found.get("mfu"),
        found["h2d_hidden"],
        found["d2h_hidden"],
        found["update_hidden"],
        sum(found["waits_s"].values()) / found["step_s"],
        found["peak_bytes"] / 1e9,
        found["planned_bytes"]["with workspace"] / 1e9,
    ]


def _plain_table(values: dict[str, Any]) -> str:
    found = values.get("plain")
    if not _measured(found) or found is None:
        return ""
    names = [name for name, value in found.items() if isinstance(value, dict)]
    rows = [[n, found[n]["step_s"], found[n]["tokens_per_s"], found[n]["flops_per_s"] / 1e12] for n in names]
    title = f"{found['layers']} layers, {found['tokens']:,} tokens"
    lines = [table([title, "s/step", "tok/s", "TFLOP/s"], rows)]
    if "ratio" in found:
        difference = found["worst_relative_loss_difference"]
        lines.append(f"ours ÷ plain: {found['ratio']:.3f}; losses differ by at most {difference:.1e}")
    return "\n".join(lines)


def _trouble_lines(values: dict[str, Any]) -> str:
    lines = [f"{name}: {value['error']}" for name, value in values.items() if name.endswith(FAILED)]
    return "\n".join(lines + [f"{n}: {v[SKIPPED]}" for n, v in values.items() if isinstance(v, dict) and SKIPPED in v])


# ---- the command line ----


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON, written as the run goes")
    parser.add_argument("--seconds", type=float, help="time limit; parts that do not fit are skipped")
    parser.add_argument("--params", choices=LLAMA, help="Llama shape (default: the largest that host memory holds)")
    parser.add_argument("--layers", type=int, help="of that shape (default: all of them)")
    parser.add_argument("--only", nargs="+", choices=PARTS, metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--skip", nargs="+", choices=PARTS, default=[], metavar="PART")
    parser.add_argument("--families", nargs="+", choices=parity.FAMILIES, default=[*parity.FAMILIES], metavar="FAMILY")
    parser.add_argument("--tokens", nargs="+", type=int, help="per optimizer step (default 16384 65536)")
    parser.add_argument("--micro-batch", type=int, help="sequences of 4096 tokens (default 2)")
    parser.add_argument("--depths", nargs="+", type=int, default=[0, 1, 2, 3])
    parser.add_argument("--cap-gib", type=float, help="device memory of the capped part (default 24)")
    parser.add_argument("--rounds", type=int, default=2, help="turns of every contender (default 2)")
    parser.add_argument("--steps", type=int, default=2, help="timed steps of a turn (default 2)")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="toy sizes")
    return parser.parse_args(arguments)


def largest_shape(host_bytes: int) -> str:
    """The largest Llama whose weights, master, moments and gradients the host can hold."""
    fitting = [n for n, shape in LLAMA.items() if host_bytes_of(shape) <= host_bytes]
    if not fitting:
        least = min(host_bytes_of(shape) for shape in LLAMA.values())
        raise ValueError(
            f"the smallest shape needs {least / 1e9:.0f} GB of host memory, and {host_bytes / 1e9:.0f} GB are free; "
            "give --params and --layers for a part of one"
        )
    return max(fitting, key=lambda name: LLAMA[name].parameters)


def host_bytes_of(shape: Shape) -> int:
    return HOST_BYTES_PER_PARAMETER * shape.parameters + HOST_RESERVE_BYTES


def sizes_of(args: argparse.Namespace) -> Sizes:
    sizes = asdict(TOY if args.tiny else FULL)
    cap = None if args.cap_gib is None else int(args.cap_gib * 2**30)
    chosen = {"tokens": args.tokens, "micro_batch_size": args.micro_batch, "cap_bytes": cap}
    return Sizes(**sizes | {name: value for name, value in chosen.items() if value is not None})


def shape_of(args: argparse.Namespace) -> Shape:
    if args.tiny:
        return TINY
    shape = LLAMA[args.params or largest_shape(detect().host_available_bytes)]
    return shape.with_layers(args.layers) if args.layers else shape


def parts_of(args: argparse.Namespace) -> list[str]:
    """In the order of `PARTS`: later ones use what earlier ones measured."""
    return [name for name in PARTS if name in (args.only or PARTS) and name not in args.skip]


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code: 2 without a CUDA device, 1 if a part failed or a model differed."""
    args = parse(arguments)
    if args.device == "cuda" and not torch.cuda.is_available():
        print("torch finds no CUDA device here; `--device cpu --tiny` runs the same code on a CPU", file=sys.stderr)
        return 2
    shape = shape_of(args)
    report = Report(args.out, {"machine": describe(), "shape": asdict(shape) | {"parameters": shape.parameters}})
    budget = Budget(args.seconds)
    sizes = sizes_of(args)
    report.put("sizes", asdict(sizes))
    print(f"{in_words()}\n{shape.parameters / 1e9:.2f} B parameters in {shape.layers} layers", flush=True)
    run = Run(args.device, shape, sizes, args.depths, args.rounds, args.steps, args.families, budget, report)
    run_parts(run, parts_of(args))
    print(summary(report.values))
    return 0 if went_well(report.values) else 1


def went_well(values: dict[str, Any]) -> bool:
    found = values.get("parity", []) if _measured(values.get("parity")) else []
    return not any(name.endswith(FAILED) for name in values) and all(case.get("passed", True) for case in found)


if __name__ == "__main__":
    sys.exit(main())
