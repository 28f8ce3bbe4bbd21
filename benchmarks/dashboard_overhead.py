"""What it costs a run to be recorded, followed and shown: step time with ÷ step time without, on a CPU.

    python -m benchmarks.dashboard_overhead              about 15 minutes on two cores (Linux)
    python -m benchmarks.dashboard_overhead --cases process --pairs 40

process   a run with journal, control server and memory sampler, and a dashboard of another process that follows it
thread    the same run with the dashboard in its own process, as in a notebook that trains
hidden    the same, but nobody sees the dashboard
journal   records and journal alone, beside an engine that does not even record

Dashboards draw for a browser that acknowledges every frame at once, so at the full rate of four a second; their
messages are made and signed as in a kernel, and dropped. The browser's own work is left out: it belongs to the
machine of whoever looks. Each pair is a block without and a block with, of the same engine in the same process, in
turn, and every second pair the other way round; the ratio is of the blocks' medians.

pinned    training has one core, with all its threads, and the dashboard the other
unpinned  both share two cores, and training's arithmetic uses two threads
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.cpu import RESULTS
from benchmarks.machine import describe, in_words, slug
from benchmarks.report import Report
from benchmarks.table import Cell, table
from benchmarks.watched import Block, Drawing, Work, on_cores, serve, watching
from megatrain.folder import RunFolder


@dataclass(frozen=True)
class Case:
    """With what, beside without what; `follows`: this process shows the run. target: of the ratio, less one."""

    watched: str
    plain: str = "alone"
    follows: bool = False
    target: float | None = None


CASES = {
    "process": Case("run", follows=True, target=0.01),
    "thread": Case("shown", target=0.03),
    "hidden": Case("hidden"),
    "journal": Case("journal", plain="unrecorded"),
}
PLACEMENTS = ("pinned", "unpinned")
TINY = Work(size=0, rows=4, tokens=16)


@dataclass
class Pair:
    """Neighbours in time."""

    plain: Block
    watched: Block

    @property
    def ratio(self) -> float:
        return statistics.median(self.watched.steps_s) / statistics.median(self.plain.steps_s)

    @property
    def cpu_ratio(self) -> float:
        return self.watched.cpu_s / self.plain.cpu_s


class Trainer:
    """The trainer's process, as this one sees it."""

    def __init__(self, pipe: Any, folders: Path, viewer_cores: tuple[int, ...]) -> None:
        self._pipe = pipe
        self._folders = folders
        self._viewer_cores = viewer_cores
        self._blocks = 0

    def block(self, kind: str, steps: int, *, follow: bool = False) -> Block:
        self._blocks += 1
        folder = self._folders / str(self._blocks)
        if not follow:
            return self._train(kind, steps, folder)
        RunFolder(folder).prepare()
        with watching(folder, visible=True, cores=self._viewer_cores) as watch:
            return replace(self._train(kind, steps, folder), drawing=watch.result())

    def _train(self, kind: str, steps: int, folder: Path) -> Block:
        self._pipe.send((kind, steps, folder))
        block: Block = self._pipe.recv()
        return block


@contextmanager
def trainer(work: Work, viewer_cores: tuple[int, ...]) -> Iterator[Trainer]:
    """A process that trains; OpenMP's number of threads is settled when it starts."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    with ExitStack() as stack:
        folders = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        process = context.Process(target=serve, args=(there, work, viewer_cores), daemon=True)
        with _environment("OMP_NUM_THREADS", str(work.threads)):
            process.start()
        there.close()  # so that its death is heard
        stack.callback(process.join)
        stack.callback(here.send, None)
        yield Trainer(here, folders, viewer_cores)


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def placed(work: Work, placement: str) -> tuple[Work, tuple[int, ...]]:
    """The work and the viewer's cores, on the first two that this process may use."""
    cores = tuple(sorted(os.sched_getaffinity(0))[:2])
    if placement == "pinned":
        return replace(work, threads=1, cores=cores[:1]), cores[-1:]
    return replace(work, threads=len(cores), cores=cores), cores


def measure(trained: Trainer, case: Case, pairs: int, steps: int, on_pair: Callable[[], object]) -> Iterator[Pair]:
    """Pair after pair, after one that does not count."""
    for number in range(-1, pairs):
        order = (False, True) if number % 2 else (True, False)
        blocks = {watched: _block(trained, case, steps, watched=watched) for watched in order}
        if number >= 0:
            on_pair()
            yield Pair(blocks[False], blocks[True])


def _block(trained: Trainer, case: Case, steps: int, *, watched: bool) -> Block:
    return trained.block(case.watched, steps, follow=case.follows) if watched else trained.block(case.plain, steps)


def figures(pairs: list[Pair]) -> dict[str, Any]:
    """What the JSON file keeps."""
    low, middle, high = _quartiles([pair.ratio for pair in pairs])
    return {
        "ratio": middle,
        "ratio_quartiles": [low, high],
        "ratio_of_fastest_steps": _fastest([p.watched for p in pairs]) / _fastest([p.plain for p in pairs]),
        "ratio_of_cpu_time": _quartiles([pair.cpu_ratio for pair in pairs])[1],
        "step_s": statistics.median(second for pair in pairs for second in pair.plain.steps_s),
        **_drawing([pair.watched.drawing for pair in pairs if pair.watched.drawing is not None]),
        "pairs": [asdict(pair) for pair in pairs],
    }


def _quartiles(values: list[float]) -> list[float]:
    return statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3


def _fastest(blocks: list[Block]) -> float:
    return min(second for block in blocks for second in block.steps_s)


def _drawing(drawings: list[Drawing]) -> dict[str, float | None]:
    """drawing_share: of one core's time, for the thread that draws."""
    wall_s = sum(drawing.wall_s for drawing in drawings)
    if not wall_s:
        return {"frames_per_s": None, "drawing_share": None}
    return {
        "frames_per_s": sum(drawing.frames for drawing in drawings) / wall_s,
        "drawing_share": sum(drawing.cpu_s for drawing in drawings) / wall_s,
    }


HEADER = ["", "with ÷ without", "quartiles", "target", "of fastest", "of CPU time", "s/step", "frames/s", "drawing"]


def summary(placements: dict[str, dict[str, Any]]) -> str:
    """The short table. Drawing: of one core's time."""
    return table(
        HEADER,
        [_row(f"{placement}, {name}", CASES[name].target, found) for placement, name, found in _each(placements)],
    )


def _each(placements: dict[str, dict[str, Any]]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for placement, cases in placements.items():
        for name, found in cases.items():
            yield placement, name, found


def _row(name: str, target: float | None, found: dict[str, Any]) -> list[Cell]:
    ratio, fastest, cpu = (f"{found[f'ratio{of}']:.3f}" for of in ("", "_of_fastest_steps", "_of_cpu_time"))
    quartiles = "–".join(f"{value:.3f}" for value in found["ratio_quartiles"])
    limit = None if target is None else f"< {1 + target:.2f}"
    share = found["drawing_share"]
    drawing = None if share is None else f"{share:.1%}"
    return [name, ratio, quartiles, limit, fastest, cpu, found["step_s"], found["frames_per_s"], drawing]


def run(args: argparse.Namespace, out: Path) -> dict[str, Any]:
    """Everything, with a progress bar; the file is written after every case."""
    work = TINY if args.tiny else Work(size=args.size)
    report = Report(out, {"machine": describe(), "steps": args.steps, "work": asdict(work)})
    placements: dict[str, dict[str, Any]] = {}
    with tqdm(total=len(args.placements) * len(args.cases) * args.pairs, unit="pair") as bar:
        for placement in args.placements:
            found = placements.setdefault(placement, {})
            at, viewer_cores = placed(work, placement)
            with on_cores(viewer_cores), trainer(at, viewer_cores) as trained:
                for name in args.cases:
                    bar.set_description(f"{placement}, {name}")
                    found[name] = figures(list(measure(trained, CASES[name], args.pairs, args.steps, bar.update)))
                    report.put("placements", placements)
    return placements


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=[*CASES], default=[*CASES])
    parser.add_argument("--placements", nargs="+", choices=PLACEMENTS, default=[*PLACEMENTS])
    parser.add_argument("--pairs", type=int, default=20, help="default 20")
    parser.add_argument("--steps", type=int, default=2, help="timed steps of a block (default 2)")
    parser.add_argument("--size", type=int, default=1, help="rung of the demo's ladder (default 1)")
    parser.add_argument("--tiny", action="store_true", help="a toy, to see that everything runs")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/<machine>-dashboard.json")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    args = parse(arguments)
    out = args.out or RESULTS / f"{slug()}-dashboard.json"
    print(in_words())
    print(summary(run(args, out)), f"written to {out}", sep="\n\n")


if __name__ == "__main__":
    main()
