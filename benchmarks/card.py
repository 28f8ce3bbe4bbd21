"""Everything that a CUDA card has to show, by one command: tests, the sanitizer, figures, and a run for the dashboard.

    python -m benchmarks.card --out results --seconds 1700          all of it
    python -m benchmarks.card --out results --seconds 560 --stages tests sanitizer
    python -m benchmarks.card --out results --seconds 560 --stages figures --parts link matmul adamw layer stream
    python -m benchmarks.card --out results --device cpu --tiny     the same code on a CPU in toy sizes

tests      tests/gpu: parity with plain training, late streams, no hidden wait, memory pressure, runs; eight at once
sanitizer  CUDA's memcheck over a few steps, where compute-sanitizer is installed
figures    benchmarks.gpu, into gpu.json and a trace; some parts into a file of their names
recorded   benchmarks.recorded, into card.tar.gz

Each stage is a process of its own, whose output goes to a file beside the results, and is ended when the time is over.
Nothing is fetched; for a machine without a package index see benchmarks.carry.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.budget import Budget
from benchmarks.machine import in_words
from benchmarks.table import Cell, table

ROOT = Path(__file__).resolve().parent.parent
SANITIZER = "compute-sanitizer"
SANITIZED = "tests/gpu/test_gpu_training.py::test_training_equals_plain_training"
AT_ONCE = 8  # test processes on one card
LEAST_S = 20  # without which a stage is not begun
GRACE_S = 10  # to write down what is known
SHOWN_LINES = 80  # of the last stage that printed tables

PASSED, FAILED, LATE = "passed", "FAILED", "ran out of time"


@dataclass(frozen=True)
class Options:
    """What the command was asked for. tests: an expression that selects some of them."""

    out: Path
    device: str
    tiny: bool
    tests: str | None = None
    parts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Command:
    """A process and what its environment has besides."""

    words: list[str]
    environment: dict[str, str]


@dataclass(frozen=True)
class Outcome:
    stage: str
    verdict: str
    seconds: float


# ---- the stages ----


def tests(options: Options, seconds: float) -> Command | str:
    words = [sys.executable, "-m", "pytest", "tests/gpu", "-q", "-p", "no:cacheprovider", "--maxfail=100"]
    words += ["--numprocesses", str(min(AT_ONCE, os.cpu_count() or 1)), "--dist", "worksteal"]
    words += [f"--junitxml={options.out / 'tests.xml'}"] + (["-k", options.tests] if options.tests else [])
    return Command(words, {"MEGATRAIN_TEST_DEVICE": options.device})


def sanitizer(options: Options, seconds: float) -> Command | str:
    """Without torch's cache every tensor has bounds that the sanitizer knows."""
    if options.device != "cuda" or shutil.which(SANITIZER) is None:
        return f"{SANITIZER} is not installed here" if options.device == "cuda" else "a CPU has no such tool"
    words = [SANITIZER, "--tool", "memcheck", "--error-exitcode", "9", "--target-processes", "all", sys.executable]
    words += ["-m", "pytest", "-q", "-p", "no:cacheprovider", SANITIZED, "-k", "llama and right"]
    return Command(words, {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"})


def figures(options: Options, seconds: float) -> Command | str:
    words = [sys.executable, "-m", "benchmarks.gpu", "--seconds", f"{seconds - GRACE_S:.0f}"]
    words += ["--out", str(options.out / f"{'-'.join(['gpu', *options.parts])}.json"), *_where(options)]
    return Command(words + (["--only", *options.parts] if options.parts else []), {})


def recorded(options: Options, seconds: float) -> Command | str:
    words = [sys.executable, "-m", "benchmarks.recorded", "--out", str(options.out / "card.tar.gz")]
    return Command([*words, *_where(options)], {})


def _where(options: Options) -> list[str]:
    return ["--device", options.device] + (["--tiny"] if options.tiny else [])


STAGES: dict[str, Callable[[Options, float], Command | str]] = {
    "tests": tests,
    "sanitizer": sanitizer,
    "figures": figures,
    "recorded": recorded,
}


# ---- one after the other ----


def run_stage(name: str, options: Options, budget: Budget) -> Outcome:
    """What a stage came to; what it printed is in a file of its name."""
    refusal = budget.refusal(LEAST_S)
    command = refusal or STAGES[name](options, budget.left_s)
    if isinstance(command, str):
        return Outcome(name, command, 0.0)
    began_s = budget.spent_s
    code = _run(command, options.out / f"{name}.log", budget.left_s)
    verdict = LATE if code is None else PASSED if code == 0 else f"{FAILED} with exit code {code}"
    return Outcome(name, verdict, budget.spent_s - began_s)


def _run(command: Command, log: Path, seconds: float) -> int | None:
    """Exit code, or None if the time was over: then the process and all that it started are ended."""
    environment = os.environ | {"PYTHONUNBUFFERED": "1"} | command.environment
    with log.open("wb") as output:
        process = subprocess.Popen(
            command.words, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            return process.wait(None if seconds == float("inf") else seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):  # it and its children are gone
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for results")
    parser.add_argument("--seconds", type=float, help="time limit for all stages together")
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=[*STAGES], metavar="STAGE")
    parser.add_argument("--tests", metavar="EXPRESSION", help="only these tests, as pytest -k")
    parser.add_argument("--parts", nargs="+", default=[], metavar="PART", help="of figures: see benchmarks.gpu --help")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="toy sizes")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code: 2 without a CUDA device, 1 if a stage failed."""
    args = parse(arguments)
    if args.device == "cuda" and not torch.cuda.is_available():
        print("torch finds no CUDA device here; `--device cpu --tiny` tries the same code on a CPU", file=sys.stderr)
        return 2
    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    options = Options(out, args.device, args.tiny, args.tests, tuple(args.parts))
    budget = Budget(args.seconds)
    print(in_words(), flush=True)
    outcomes = []
    for name in args.stages:
        outcomes.append(run_stage(name, options, budget))
        print(f"{name}: {outcomes[-1].verdict}", flush=True)
        print(last_lines(out / f"{name}.log"), flush=True)
    rows: list[list[Cell]] = [[each.stage, each.seconds, each.verdict] for each in outcomes]
    print(table(["stage", "s", ""], rows))
    return 1 if any(each.verdict == LATE or each.verdict.startswith(FAILED) for each in outcomes) else 0


def last_lines(log: Path) -> str:
    """The end of what a stage printed: there it says what it found."""
    if not log.exists():
        return ""
    return "\n".join(log.read_text(errors="replace").splitlines()[-SHOWN_LINES:])


if __name__ == "__main__":
    sys.exit(main())
