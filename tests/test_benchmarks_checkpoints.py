"""What a checkpoint costs is counted as it is said."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from tqdm import tqdm

from benchmarks import checkpoint_cost
from benchmarks.checkpoint_cost import Pair, figures


def test_the_share_is_of_the_steps_beside_which_it_was_written() -> None:
    """Steps of 1 s; 0.2 s more; written within the first two of four steps."""
    pair = Pair(steps=4, plain_s=4.0, with_s=4.2, written_s=1.5, cpu_s=0.1 * (os.cpu_count() or 1))
    assert pair.extra_s == pytest.approx(0.2)
    assert pair.share == pytest.approx(0.1)
    assert pair.cpu_share == pytest.approx(0.05)
    assert Pair(4, 4.0, 4.2, 9.0, 0.0).share == pytest.approx(0.05)  # still being written when the block ends
    found = figures([pair, Pair(4, 4.0, 4.0, 1.5, 0.0), Pair(4, 4.0, 4.4, 1.5, 0.0)], 10**6)
    assert (found["share"], found["extra_s"]) == pytest.approx((0.1, 0.2))


def test_pairs_alternate_and_the_first_does_not_count() -> None:
    asked: list[tuple[int, bool]] = []

    class Pipe:
        def send(self, block: tuple[int, bool]) -> None:
            asked.append(block)

        def recv(self) -> tuple[float, float, float]:
            return 1.0, 0.5, 1.5

    pipe: Any = Pipe()
    with tqdm(disable=True) as bar:
        assert len(checkpoint_cost.measure(pipe, 2, 3, bar)) == 2
    assert [checkpoint for _, checkpoint in asked] == [False, True, True, False, False, True]


def test_a_tiny_run_writes_what_it_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "checkpoints.json"
    checkpoint_cost.main(["--tiny", "--pairs", "2", "--steps", "1", "--threads", "1", "--out", str(out)])
    found = json.loads(out.read_text())["threads"]["1"]
    assert found["state_bytes"] > 10**6
    assert all(pair["written_s"] > 0 for pair in found["pairs"])
    assert "< 3%" in capsys.readouterr().out
