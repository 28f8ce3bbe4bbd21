"""A short run on this machine, recorded for people who have none like it: its folder, packed, opens in any dashboard.

    python -m benchmarks.recorded --out card.tar.gz
    python -m benchmarks.recorded --device cpu --tiny --out cpu.tar.gz
    tar xf card.tar.gz && megatrain dashboard card

Layers as wide as Llama-3-8B's. On the way the prefetch depth and the buffers are changed, so that the timeline shows
what they do. What the dashboard reads is packed, and nothing else; where the run lay is left out.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
import tarfile
import tempfile
from itertools import islice
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.gpu_parts import FULL, TOY
from benchmarks.machine import in_words
from benchmarks.shapes import LLAMA, TINY
from benchmarks.streaming import Workload
from megatrain import StreamingEngine, TrainingRun
from megatrain.engine import StepResult
from megatrain.folder import RunFolder
from megatrain.machine import detect, measure
from megatrain.steering import Steering

ENDING = ".tar.gz"
# Step → what is changed then: the same work with nothing loaded ahead, then with more and more room.
CHANGES: dict[int, dict[str, int]] = {
    0: {"prefetch_depth": 0, "grad_buffers": 1},
    4: {"prefetch_depth": 1},
    8: {"grad_buffers": 2},
    12: {"prefetch_depth": 2},
    16: {"resident_layers": 2},
}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help=f"the packed folder, *{ENDING}")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--tokens", type=int, help="per optimizer step (default 16384)")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="toy sizes")
    return parser.parse_args(arguments)


def record(engine: StreamingEngine, batches: Any, steps: int, folder: Path, machine: Any) -> None:
    """Train, and turn the knobs on the way."""
    with tqdm(total=steps, unit="step", file=sys.stderr) as bar:

        def on_step(done: int, _: StepResult) -> None:
            bar.update()
            change(run.control, done)

        run = TrainingRun(engine, batches, steps=steps, run_dir=folder, machine=machine, on_step=on_step)
        change(run.control, 0)
        run.start().wait()


def change(control: Steering, done: int) -> None:
    for name, value in CHANGES.get(done, {}).items():
        getattr(control, f"set_{name}")(value)


def pack(folder: Path, out: Path) -> None:
    """What a dashboard reads of a run that is over, under the name of the file, without where it lay."""
    run, name = RunFolder(folder), out.name.removesuffix(ENDING)
    files = [run.status_file, run.metrics, run.memory, run.markers, *map(run.segment, run.segments())]
    out.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(out, "w:gz") as tar:
        for path in files:
            if path.exists():
                _add(tar, f"{name}/{path.name}", path.read_bytes())
        about = json.loads(run.run.read_text()) | {"folder": None}
        _add(tar, f"{name}/{run.run.name}", json.dumps(about).encode())


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    """With neither the owner nor the time of the file."""
    member = tarfile.TarInfo(name)
    member.size, member.mode = len(data), 0o600
    tar.addfile(member, io.BytesIO(data))


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    if not args.out.name.endswith(ENDING):
        print(f"--out must end in {ENDING}; got {args.out}", file=sys.stderr)
        return 2
    sizes, shape = (TOY, TINY) if args.tiny else (FULL, LLAMA["8b"].with_layers(args.layers))
    tokens = args.tokens or sizes.tokens[0]
    work = Workload(args.device, shape, sizes.sequence, sizes.micro_batch_size)
    print(in_words(), flush=True)
    machine = measure(detect())
    with tempfile.TemporaryDirectory() as folder, work.engine(0, None) as engine:
        record(engine, list(islice(work.data(tokens), args.steps)), args.steps, Path(folder), machine)
        pack(Path(folder), args.out)
    print(f"{args.out}: {args.out.stat().st_size / 1e3:,.0f} kB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
