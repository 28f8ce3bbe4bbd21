"""Everything that only a CUDA card can tell, in one go and within a time limit.

    python -m benchmarks.gpu --seconds 540 --out gpu.json
    python -m benchmarks.gpu --device cpu --tiny          the same code on a CPU in toy sizes, to see that it runs

parity     tiny models of several families: the same losses, norms and weights as plain training on the card
link       the engine's lanes alone: each way and both at once, registered memory beside torch's pinned memory
matmul     a big bfloat16 product: the rate that MFU is counted against
adamw      AdamW and plain copies in host memory, by threads
attention  a layer of an 8B model forward and backward, by each kernel of torch's attention, at several lengths
layer      such a layer by the number of sequences in a micro-batch: from which on the card is busy
profile    steady steps as torch's profiler saw them, beside the engine's record; a trace of both
stream     a Llama shape at depths 0 to 3 and several batch sizes: throughput, overlap, waits, memory, the bound
capped     the same with little device memory
plain      the engine beside plain Hugging Face, with as many layers as fit plainly
peers      the engine beside plain Hugging Face, FSDP2 and ZeRO-3, with as many layers as the host holds of each
depth      layers as wide as those of an 8B model, 28 and 180 of them, in the host storage of a few ("virtual depth")
wide       layers as wide as a dense model's of 120 B and gpt-oss-120b's, likewise, beside their simulation

Each part is on disk as soon as it is known. A part that fails or does not fit into the time says so in its place.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks import cpu, parity
from benchmarks.budget import Budget
from benchmarks.gpu_parts import FAILED, FULL, PARTS, TOY, Run, Sizes, measured, run_parts
from benchmarks.gpu_words import summary
from benchmarks.machine import describe, in_words
from benchmarks.report import Report
from benchmarks.shapes import LLAMA, TINY, Shape
from megatrain.machine import detect

HOST_BYTES_PER_PARAMETER = 14  # with clipping; see `megatrain plan`
HOST_RESERVE_BYTES = 8 << 30  # torch, CUDA's own and the batches


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
    found = values.get("parity", []) if measured(values.get("parity")) else []
    peers = {"bfloat16": values["peers"]} if measured(values.get("peers")) else {}
    alike = all(case.get("passed", True) for case in found) and cpu.went_well(peers)
    return alike and not any(name.endswith(FAILED) for name in values)


if __name__ == "__main__":
    sys.exit(main())
