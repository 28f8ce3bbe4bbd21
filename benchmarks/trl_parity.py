"""How far training here and with TRL's trainers part in ten steps: python -m benchmarks.trl_parity.

Runs the tests that compare the two (tests/test_recipes_*.py: tiny models, float32, CPU, the same records and AdamW),
and prints and keeps what they found: the largest difference of a step's loss, and the 2-norms of the differences of the
first gradients and the last weights, each divided by the 2-norm of TRL's.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.machine import describe, in_words, slug
from benchmarks.report import Report
from benchmarks.table import Cell, table

TESTS = [f"tests/test_recipes_{name}.py" for name in ("sft", "preferences", "grpo")]
VARIABLE = "MEGATRAIN_TRL_DIFFERENCES"  # tests/beside_trl.py writes into the file that it names
RESULTS = Path(__file__).parent / "results"


def main() -> None:
    machine = {**describe(), "trl": version("trl")}
    print(f"{in_words()}, trl {machine['trl']}\n")
    found, failed = run_tests()
    Report(RESULTS / f"{slug()}-trl.json", {"machine": machine, "steps": 10, "cases": found})
    print(as_table(found))
    if failed:
        sys.exit("the tests failed: what they allow is in tests/beside_trl.py")


def run_tests() -> tuple[list[dict[str, Any]], bool]:
    """Return what the tests found of every case, and whether one of them failed."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "differences.jsonl"
        command = [sys.executable, "-m", "pytest", "--quiet", "-k", "the_same_as_trl", *TESTS]
        done = subprocess.run(command, env={**os.environ, VARIABLE: str(path)}, stdout=sys.stderr, check=False)
        return [json.loads(line) for line in path.read_text().splitlines()], done.returncode != 0


def as_table(found: list[dict[str, Any]]) -> str:
    header = ["", "TRL's loss, first", "last", "largest difference", "gradients, relative", "weights, relative"]
    rows: list[list[Cell]] = [
        [case["case"], *(f"{case[name]:.4f}" for name in ("loss_from", "loss_to")), *map(scientific, figures(case))]
        for case in found
    ]
    return table(header, rows)


def figures(case: dict[str, Any]) -> list[float]:
    return [case["loss"], case["gradients"], case["weights"]]


def scientific(value: float) -> str:
    return f"{value:.1e}"


if __name__ == "__main__":
    main()
