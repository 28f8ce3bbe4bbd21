"""The README's table of the comparison on a CPU, from the JSON file that holds its figures."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.cpu import measured, troubles
from benchmarks.peers import OURS, PLAIN
from benchmarks.table import Cell, text

ROOT = Path(__file__).parents[1]
README, PICTURE = ROOT / "README.md", ROOT / "docs" / "benchmarks.svg"
BEGIN, END = "<!-- benchmarks: begin -->", "<!-- benchmarks: end -->"
HEADER = ["", "tok/s", "TFLOP/s", "step ÷ plain (rounds)", "peak RSS, GB", "host B/param", "losses differ by"]


def put_into(readme: str, block: str) -> str:
    """The README with what lies between its markers replaced; ValueError where it has not exactly one pair."""
    parts = re.split(f"{BEGIN}|{END}", readme)
    if len(parts) != 3:
        raise ValueError(f"README.md needs one line {BEGIN} and one {END} after it, and the table goes between them")
    return f"{parts[0]}{BEGIN}\n{block}\n{END}{parts[2]}"


def block(found: Mapping[str, Any], results: str) -> str:
    """What stands between the markers. results: the name of the JSON file, in benchmarks/results/."""
    dtypes = found["dtypes"]
    picture = f"![Tokens per second, and loss curves, of each](docs/{PICTURE.name})"
    notes = [*_gives_up(dtypes), *troubles(dtypes)]
    listed = "\n".join(f"- {note}" for note in notes)
    return "\n\n".join(filter(None, [_about(found, results), _table(dtypes), picture, _lanes(dtypes), listed]))


def _about(found: Mapping[str, Any], results: str) -> str:
    settings = found["settings"]
    tokens = f"{settings['batch']} × {settings['sequence']} tokens"
    size = f"{settings['parameters'] / 1e6:.0f} M parameters"
    machine = f"{found['machine']['cpu']}, {found['machine']['cores']} cores"
    return (
        f"{size}, {tokens} a step, {machine}, {settings['threads']} threads, medians (`benchmarks/results/{results}`):"
    )


def _table(dtypes: Mapping[str, Any]) -> str:
    rows: list[list[Cell]] = [
        [f"{dtype}, {name}", *_cells(name, figures)]
        for dtype, result in dtypes.items()
        for name, figures in measured(result).items()
    ]
    return "\n".join(map(_line, [HEADER, ["---"] * len(HEADER), *rows]))


def _line(cells: Sequence[Cell]) -> str:
    return f"| {' | '.join(map(text, cells))} |".replace("|  |", "| |")


def _cells(name: str, figures: Mapping[str, Any]) -> list[Cell]:
    beside = {} if name == PLAIN else figures  # it is what the others are beside
    rounds, difference = beside.get("ratio_of_each_round"), beside.get("worst_relative_loss_difference")
    return [
        figures["tokens_per_s"],
        figures["model_flops_per_s"] / 1e12,
        f"{figures['ratio']:.2f} ({min(rounds):.2f}–{max(rounds):.2f})" if rounds else None,
        figures["peak_rss_growth_bytes"] / 1e9,
        figures["host_bytes_per_parameter"],
        None if difference is None else f"{difference:.1e}",
    ]


def _lanes(dtypes: Mapping[str, Any]) -> str:
    """What of the engine's transfers and updates hid under compute."""
    lines = []
    for dtype, result in dtypes.items():
        lanes = measured(result).get(OURS, {}).get("lanes")
        if lanes:
            shares = {"weights in": "h2d", "gradients out": "d2h", "AdamW": "update"}
            hidden = [f"{lanes[f'{key}_hidden']:.0%} of {what}" for what, key in shares.items()]
            lines.append(f"{dtype} {', '.join(hidden)}")
    return f"Hidden under compute by {OURS}: {'; '.join(lines)}." if lines else ""


def _gives_up(dtypes: Mapping[str, Any]) -> list[str]:
    found = (item for result in dtypes.values() for item in measured(result).items())
    return [*dict.fromkeys(f"{name} gives up {figures['gives_up']}" for name, figures in found)]


def load(results: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(results.read_text())
    return found
