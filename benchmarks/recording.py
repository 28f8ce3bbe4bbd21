"""What the record of a run costs: steps that are recorded, and read four times a second, ÷ steps that are not.

    python -m benchmarks.recording                about 6 minutes on two cores
    python -m benchmarks.recording --times 1 --pairs 200 --layers 28 --hidden 128

Recorded: the engine's recorder as always, and a thread in the same process that takes what is new every 250 ms, through
the feed that dashboards use; it draws nothing. Not recorded: the recorder drops everything, and nobody reads. Each pair
is a block of either, of the same engine, in turn, every second pair the other way round. Wall: the ratio of the blocks'
times. CPU: that of the processor time of the process, all threads, which neighbours on the machine disturb less. Both
are medians of all pairs, less one, with an interval that holds the true median 19 times in 20.

One record is too little to be seen in the noise of a step. So each is made, kept and read `--times` times over, by as
many recorders, and what that costs is divided by their number.

Alone: what making a span and keeping it takes, and what a reader takes for each, with nothing beside.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from tqdm import tqdm

from benchmarks.cpu import RESULTS
from benchmarks.deep import Deep
from benchmarks.interval import interval
from benchmarks.machine import describe, in_words, slug
from benchmarks.report import Report
from benchmarks.shapes import Shape
from benchmarks.table import table
from dashboard.feed import LiveFeed
from megatrain import EngineConfig, StreamingEngine
from megatrain.trace import Recorder, Records, Span

TARGET = 0.01
EVERY_S = 0.25  # a dashboard's rate
ALONE_SPANS, ALONE_ROUNDS = 20_000, 15
TIMES, KEPT = 40, 20_000  # recorders at once; records that each of those keeps that are there only to be counted


@dataclass(frozen=True)
class Block:
    """Seconds of some steps, and the processor time of the process; records: how many its reader got."""

    wall_s: float
    cpu_s: float
    records: int = 0


@dataclass(frozen=True)
class Pair:
    """Neighbours in time."""

    dropped: Block
    recorded: Block

    @property
    def wall(self) -> float:
        return self.recorded.wall_s / self.dropped.wall_s - 1

    @property
    def cpu(self) -> float:
        return self.recorded.cpu_s / self.dropped.cpu_s - 1


class Trainer:
    """One engine, trained for blocks of steps with its record, kept in so many recorders, or without."""

    def __init__(self, engine: StreamingEngine, case: Deep, times: int = 1) -> None:
        self._engine, self._data = engine, case.data()
        self._others = [Recorder(KEPT) for _ in range(times - 1)]
        # One for all blocks: each reads only what is new.
        self._feeds = [LiveFeed(recorder) for recorder in (engine.recorder, *self._others)]

    def block(self, steps: int, *, recorded: bool) -> Block:
        with self._recording() if recorded else dropping(self._engine.recorder) as records:
            self._engine.step(
                next(self._data)
            )  # so that each timed step contains exactly one update, its predecessor's
            began_s, cpu_s = time.perf_counter(), time.process_time()
            for _ in range(steps):
                self._engine.step(next(self._data))
            block = time.perf_counter() - began_s, time.process_time() - cpu_s
            self._engine.flush()
        return Block(*block, len(records))

    @contextmanager
    def _recording(self) -> Iterator[list[Span]]:
        with spreading(self._engine.recorder, self._others), reading(*self._feeds) as spans:
            yield spans


@contextmanager
def spreading(recorder: Recorder, others: Sequence[Recorder]) -> Iterator[None]:
    """Within, what is recorded is made anew for each of the others."""
    keep = recorder.add

    def add(record: Any) -> None:
        keep(record)
        for other in others:
            other.add(replace(record))

    vars(recorder)["add"] = add
    try:
        yield
    finally:
        del vars(recorder)["add"]


@contextmanager
def dropping(recorder: Recorder) -> Iterator[list[Records]]:
    """Within, nothing is kept."""
    vars(recorder)["add"] = lambda record: None
    try:
        yield []
    finally:
        del vars(recorder)["add"]


@contextmanager
def reading(feed: LiveFeed, *others: LiveFeed) -> Iterator[list[Span]]:
    """Within, a thread takes what is new, four times a second; yields the spans it got from the first feed."""
    stop, spans = threading.Event(), list[Span]()

    def look() -> None:
        spans.extend(feed.poll().spans)
        for other in others:
            other.poll()

    def follow() -> None:
        while not stop.wait(EVERY_S):
            look()

    thread = threading.Thread(target=follow, name="reader", daemon=True)
    thread.start()
    try:
        yield spans
    finally:
        stop.set()
        thread.join()
        look()


def measure(trainer: Trainer, pairs: int, steps: int, on_pair: Callable[[], object]) -> Iterator[Pair]:
    """Pair after pair, after one that does not count."""
    for number in range(-1, pairs):
        order = (False, True) if number % 2 else (True, False)
        blocks = {recorded: trainer.block(steps, recorded=recorded) for recorded in order}
        if number >= 0:
            on_pair()
            yield Pair(blocks[False], blocks[True])


def figures(pairs: list[Pair], steps: int, times: int = 1) -> dict[str, Any]:
    """What the JSON file keeps; shares are of one recorder."""
    walls, cpus = [pair.wall / times for pair in pairs], [pair.cpu / times for pair in pairs]
    return {
        "times": times,
        "wall": median(walls),
        "wall_interval": interval(walls),
        "cpu": median(cpus),
        "cpu_interval": interval(cpus),
        "step_s": median(pair.dropped.wall_s for pair in pairs) / steps,
        "spans_per_step": median(pair.recorded.records for pair in pairs) / (steps + 1),
        "pairs": [asdict(pair) for pair in pairs],
    }


def alone() -> dict[str, float]:
    """Microseconds for each span: to make and keep it, to make it only, to read it; medians of several rounds."""
    made, kept, read = [], [], []
    for _ in range(ALONE_ROUNDS):
        recorder = Recorder(ALONE_SPANS)
        made.append(_timed(lambda: [_span(number) for number in range(ALONE_SPANS)]))
        kept.append(_timed(partial(_keep, recorder)))
        feed = LiveFeed(recorder)
        read.append(_timed(feed.poll))
    found = {"made_and_kept_us": kept, "made_us": made, "read_us": read}
    return {name: 1e6 * median(seconds) / ALONE_SPANS for name, seconds in found.items()}


def _keep(recorder: Recorder) -> None:
    for number in range(ALONE_SPANS):
        recorder.add(_span(number))


def _timed(work: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    work()
    return time.perf_counter() - start_s


def _span(number: int) -> Span:
    return Span("compute", "forward", number, 1, 0, 0, float(number), number + 1.0, 1 << 20)


def summary(found: dict[str, Any]) -> str:
    """The short table, and what a span costs."""
    rows = []
    for name in ("wall", "cpu"):
        low, high = found[f"{name}_interval"]
        rows.append([name, f"{found[name]:+.3%}", f"{low:+.3%} to {high:+.3%}", f"< {TARGET:.0%}"])
    head = f"recorded and read {found['times']} times ÷ {found['times']}"
    lines = [table([head, "", "19 of 20", "target"], rows)]
    lines.append(f"{len(found['pairs'])} pairs; {found['spans_per_step']:.0f} spans a step of {found['step_s']:.3g} s")
    kept, made, read = (found["alone"][f"{name}_us"] for name in ("made_and_kept", "made", "read"))
    lines.append(f"a span alone: {kept:.2f} µs to make and keep ({made:.2f} to make), {read:.2f} to read")
    return "\n".join(lines)


# ---- the command line ----


def case_of(args: argparse.Namespace) -> Deep:
    shape = Shape(args.hidden, args.layers, args.hidden // 32, args.hidden // 64, 3 * args.hidden, 512)
    return Deep(shape.config(), EngineConfig(device="cpu", dtype="float32"), args.rows, args.sequence)


def run(args: argparse.Namespace, out: Path | None) -> dict[str, Any]:
    case = case_of(args)
    report = Report(out, {"machine": describe(), "steps": args.steps, "tokens": case.tokens, "alone": alone()})
    pairs: list[Pair] = []
    with case.open() as engine, tqdm(total=args.pairs, unit="pair", file=sys.stderr) as bar:
        for pair in measure(Trainer(engine, case, args.times), args.pairs, args.steps, bar.update):
            pairs.append(pair)
            report.values |= figures(pairs, args.steps, args.times)
            report.write()
    return report.values


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("pairs", 100), ("steps", 8), ("layers", 8), ("hidden", 256), ("rows", 2), ("sequence", 64)):
        parser.add_argument(f"--{name}", type=int, default=value, help=f"default {value}")
    parser.add_argument("--times", type=int, default=TIMES, help=f"recorders at once (default {TIMES})")
    parser.add_argument("--threads", type=int, default=1, help="of arithmetic (default 1)")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/<machine>-recording.json")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    args = parse(arguments)
    torch.set_num_threads(args.threads)
    out = args.out or RESULTS / f"{slug()}-recording.json"
    print(in_words())
    print(summary(run(args, out)), f"written to {out}", sep="\n\n")


if __name__ == "__main__":
    main()
