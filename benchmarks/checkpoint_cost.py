"""What it costs to write a checkpoint while training goes on: steps with one being written ÷ steps without, on a CPU.

    python -m benchmarks.checkpoint_cost           about 10 minutes on two cores
    python -m benchmarks.checkpoint_cost --pairs 200 --threads 1

Each pair is a block of steps without and one of as many steps before whose first a checkpoint is begun, of the same
engine, in turn, and every second pair the other way round. Extra: what the block with one took longer, all of it: the
wait for pending updates before, the copies and checksums beside, the updates that wait for their layer's file. Share:
extra ÷ the time of the steps (as they are without) that a checkpoint is being written beside; the median of all pairs,
with an interval that holds the true median 19 times in 20. By CPU: the processor time that the block with one took
longer, all threads, ÷ what the cores could have given in those steps; neighbours on the machine disturb it less.

threads   that training's arithmetic uses; with fewer than there are cores, the writer has one to itself
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from math import ceil
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from benchmarks.cpu import RESULTS
from benchmarks.interval import interval
from benchmarks.machine import describe, in_words, slug
from benchmarks.report import Report
from benchmarks.table import table
from benchmarks.watched import Work
from megatrain.checkpoint import Checkpoints, CheckpointWriter, Keep
from megatrain.engine import StreamingEngine

TARGET = 0.03  # of the share


@dataclass
class Pair:
    """Seconds of a block of steps without a checkpoint and with one, and from its beginning to its end on the disk.

    cpu_s: processor time of the process in that block, beyond what it took without one.
    """

    steps: int
    plain_s: float
    with_s: float
    written_s: float
    cpu_s: float

    @property
    def extra_s(self) -> float:
        return self.with_s - self.plain_s

    @property
    def share(self) -> float:
        return self.extra_s / self._beside_s

    @property
    def cpu_share(self) -> float:
        return self.cpu_s / (self._beside_s * (os.cpu_count() or 1))

    @property
    def _beside_s(self) -> float:
        """The time of the steps that it was written beside, which are counted whole."""
        step_s = self.plain_s / self.steps
        return min(self.steps, ceil(self.written_s / step_s)) * step_s


class Trainer:
    """An engine, and a writer that can be watched."""

    def __init__(self, work: Work, folder: Path) -> None:
        torch.set_num_threads(work.threads)
        self._engine: StreamingEngine = work.engine()
        self._batch = work.batch()
        self._kept = Checkpoints(folder, Keep(last=2))
        self._writer = CheckpointWriter(self._engine, self._kept)
        self._number = 0
        arenas = self._engine.sizes.host_arenas
        self.state_bytes = sum(nbytes for role, nbytes in arenas.items() if role != "gradients")

    def block(self, steps: int, *, checkpoint: bool) -> tuple[float, float, float]:
        """Seconds of `steps` steps, until the checkpoint begun before them was on the disk, and of the processor."""
        self._engine.step(self._batch)  # so that each timed step contains exactly one update, its predecessor's
        written_s, began, cpu_s = 0.0, time.perf_counter(), time.process_time()
        if checkpoint:
            self._number += 1
            self._writer.write(self._number, {})
        for _ in range(steps):
            self._engine.step(self._batch)
        took_s = time.perf_counter() - began
        if checkpoint:
            written_s = self._finished_s() - began
        self._engine.flush()
        return took_s, written_s, time.process_time() - cpu_s

    def _finished_s(self) -> float:
        """When the manifest was put in its place, by the file's own clock."""
        self._writer.wait()
        if self._writer.error is not None:
            raise self._writer.error
        newest = self._kept.path(self._number)
        age_s = time.time() - max(file.stat().st_mtime for file in newest.iterdir())
        return time.perf_counter() - age_s


def serve(pipe: Any, work: Work, folder: Path) -> None:
    """The trainer's process: blocks, as they are asked for."""
    trainer = Trainer(work, folder)
    pipe.send(trainer.state_bytes)
    while (asked := pipe.recv()) is not None:
        steps, checkpoint = asked
        pipe.send(trainer.block(steps, checkpoint=checkpoint))


@contextmanager
def trainer(work: Work) -> Iterator[Any]:
    """A process that trains, at the other end of a pipe; its threads are settled when it starts."""
    here, there = multiprocessing.get_context("spawn").Pipe()
    with tempfile.TemporaryDirectory(dir=".") as folder:  # the disk that runs are on, not a RAM disk
        process = multiprocessing.get_context("spawn").Process(target=serve, args=(there, work, Path(folder)))
        process.start()
        there.close()
        try:
            yield here
            here.send(None)
        finally:
            process.join()


def measure(pipe: Any, pairs: int, steps: int, bar: tqdm[Any]) -> list[Pair]:
    """Pair after pair, after one that does not count."""
    found = []
    for number in range(-1, pairs):
        took: dict[bool, tuple[float, float, float]] = {}
        for checkpoint in (False, True) if number % 2 else (True, False):
            pipe.send((steps, checkpoint))
            took[checkpoint] = pipe.recv()
        if number >= 0:
            (plain_s, _, plain_cpu_s), (with_s, written_s, with_cpu_s) = took[False], took[True]
            found.append(Pair(steps, plain_s, with_s, written_s, with_cpu_s - plain_cpu_s))
            bar.update()
    return found


def figures(pairs: list[Pair], state_bytes: int) -> dict[str, Any]:
    """What the JSON file keeps; medians."""
    shares = [pair.share for pair in pairs]
    return {
        "state_bytes": state_bytes,
        "share": statistics.median(shares),
        "share_interval": interval(shares),
        "cpu_share": statistics.median(pair.cpu_share for pair in pairs),
        "cpu_share_interval": interval([pair.cpu_share for pair in pairs]),
        "extra_s": statistics.median(pair.extra_s for pair in pairs),
        "written_s": statistics.median(pair.written_s for pair in pairs),
        "step_s": statistics.median(pair.plain_s / pair.steps for pair in pairs),
        "pairs": [asdict(pair) for pair in pairs],
    }


def summary(found: dict[str, dict[str, Any]]) -> str:
    """The short table."""
    header = ["threads", "share", "19 of 20", "by CPU", "19 of 20", "target", "extra s", "written in s", "s/step", "MB"]
    rows = []
    for threads, each in found.items():
        shown = []
        for share in ("share", "cpu_share"):
            low, high = each[f"{share}_interval"]
            shown += [f"{each[share]:.1%}", f"{low:.1%}–{high:.1%}"]
        shown.append(f"< {TARGET:.0%}")
        rows.append([threads, *shown, each["extra_s"], each["written_s"], each["step_s"], each["state_bytes"] / 1e6])
    return table(header, rows)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=80, help="default 80")
    parser.add_argument("--steps", type=int, default=1, help="timed steps of a block (default 1)")
    parser.add_argument("--size", type=int, default=1, help="rung of the demo's ladder (default 1)")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="default 1 2")
    parser.add_argument("--tiny", action="store_true", help="a toy, to see that everything runs")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/<machine>-checkpoints.json")
    return parser.parse_args(arguments)


def run(args: argparse.Namespace, out: Path) -> dict[str, dict[str, Any]]:
    """Everything, with a progress bar; the file is written after each number of threads."""
    report = Report(out, {"machine": describe(), "steps": args.steps, "size": args.size})
    found: dict[str, dict[str, Any]] = {}
    with tqdm(total=len(args.threads) * args.pairs, unit="pair") as bar:
        for threads in args.threads:
            small = {"size": 0, "rows": 4, "tokens": 16} if args.tiny else {"size": args.size}
            with trainer(Work(**small, threads=threads)) as pipe:
                state_bytes = pipe.recv()
                found[str(threads)] = figures(measure(pipe, args.pairs, args.steps, bar), state_bytes)
            report.put("threads", found)
    return found


def main(arguments: list[str] | None = None) -> None:
    args = parse(arguments)
    out = args.out or RESULTS / f"{slug()}-checkpoints.json"
    print(in_words())
    print(summary(run(args, out)), f"written to {out}", sep="\n\n")


if __name__ == "__main__":
    main()
