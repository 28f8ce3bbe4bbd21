"""What the README says of the comparison is what the results file says."""

from __future__ import annotations

import copy
import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from benchmarks import agreement, cpu, picture, publish, readme
from benchmarks.cpu import RESULTS
from benchmarks.peers import OURS, PEERS, PLAIN
from benchmarks.turns import Timing

FIGURES = {
    "gives_up": "time",
    "step_s": 0.5,
    "tokens_per_s": 1024.0,
    "model_flops_per_s": 0.2e12,
    "peak_rss_growth_bytes": 2 * 10**9,
    "training_rss_growth_bytes": 18 * 10**8,
    "host_bytes_per_parameter": 18.0,
    "turns_s": [[0.4, 0.5], [0.5, 0.8]],
    "losses": [4.0, 3.0, 2.0],
    "ratio": 1.25,
    "ratio_of_fastest_steps": 1.1,
    "ratio_of_each_round": [1.2, 1.3],
    "worst_relative_loss_difference": 1e-7,
    "allowed_loss_difference": 1e-5,
    "same_work": True,
}
LANES = {"busy_s": {"compute": 0.4}, "waits_s": {}, "h2d_hidden": 0.9, "d2h_hidden": 0.8, "update_hidden": 0.75}
FOUND: dict[str, Any] = {
    "machine": {"cpu": "a CPU", "cores": 2},
    "settings": {"parameters": 10**8, "batch": 4, "sequence": 128, "threads": 2},
    "dtypes": {
        "float32": {
            "contenders": {
                OURS: FIGURES | {"device_peak_bytes": 10**8, "lanes": LANES},
                PLAIN: FIGURES | {"gives_up": "size", "ratio": 1.0, "ratio_of_each_round": [1.0, 1.0]},
                "FSDP2": {"failed": "ImportError: no torch", "traceback": "…"},
            }
        }
    },
}


def test_the_readme_holds_what_the_results_file_says() -> None:
    between = readme.README.read_text().split(readme.BEGIN)[1].split(readme.END)[0].strip()
    source = re.search(r"`benchmarks/results/(.+?)`", between)
    assert source is not None
    found = readme.load(RESULTS / source[1])
    assert between == readme.block(found, source[1]), "python -m benchmarks.publish writes it anew"


def test_a_block_has_a_row_for_each_a_note_for_each_and_names_what_failed() -> None:
    assert readme.block(FOUND, "m.json").splitlines() == [
        "100 M parameters, 4 × 128 tokens a step, a CPU, 2 cores, 2 threads, medians (`benchmarks/results/m.json`):",
        "",
        "| | tok/s | TFLOP/s | step ÷ plain (rounds) | peak RSS, GB | host B/param | losses differ by |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        "| float32, MegaTrain | 1,024 | 0.2 | 1.25 (1.20–1.30) | 2 | 18 | 1.0e-07 |",
        "| float32, plain Hugging Face | 1,024 | 0.2 | – | 2 | 18 | – |",
        "",
        "![Tokens per second, and loss curves, of each](docs/benchmarks.svg)",
        "",
        "Hidden under compute by MegaTrain: float32 90% of weights in, 80% of gradients out, 75% of AdamW.",
        "",
        "- MegaTrain gives up time",
        "- plain Hugging Face gives up size",
        "- float32, FSDP2 failed: ImportError: no torch",
    ]


def test_only_what_is_between_the_markers_is_replaced() -> None:
    page = f"before\n{readme.BEGIN}\nold\n{readme.END}\nafter\n"
    assert readme.put_into(page, "new") == page.replace("old", "new")
    with pytest.raises(ValueError, match=r"README\.md needs one line <!-- benchmarks: begin -->"):
        readme.put_into("no markers", "new")


def test_without_a_browser_the_table_is_written_and_the_picture_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(picture.shutil, "which", lambda _: None)
    results, page = tmp_path / "m.json", tmp_path / "README.md"
    results.write_text(json.dumps(FOUND))
    page.write_text(f"{readme.BEGIN}{readme.END}")
    command = [str(results), "--readme", str(page), "--picture", str(tmp_path / "p.svg")]
    assert publish.main(command) == 1
    assert readme.block(FOUND, "m.json") in page.read_text()
    assert "p.svg was not drawn: it needs Chromium" in capsys.readouterr().err


def test_the_picture_has_a_bar_with_its_range_and_a_curve_for_each_that_was_measured() -> None:
    bars, curves = ([t for t in picture.figure(FOUND).data if t.type == kind] for kind in ("bar", "scatter"))
    assert [bar.name for bar in bars] == [curve.name for curve in curves] == [OURS, PLAIN]
    assert bars[0].y[0] == pytest.approx(512 / 0.5)
    assert bars[0].y[0] + bars[0].error_y.array[0] == pytest.approx(512 / 0.4)
    assert bars[0].y[0] - bars[0].error_y.arrayminus[0] == pytest.approx(512 / 0.8)
    assert [*curves[0].y] == FIGURES["losses"]
    assert curves[0].line.width > curves[1].line.width  # the one below is seen on both sides of the one above


def test_there_is_a_colour_for_each() -> None:
    assert len(set(picture.COLOURS)) >= len(PEERS)


@pytest.mark.skipif(picture.chromium() is None, reason="plotly draws in Chromium, which is not installed")
def test_the_picture_is_an_svg(tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as elsewhere:  # a thread holds one Playwright, and other tests may have it here
        elsewhere.submit(picture.draw, FOUND, tmp_path / "new" / "p.svg").result()
    drawn = (tmp_path / "new" / "p.svg").read_text()
    assert drawn.startswith("<svg")
    assert "plain Hugging Face" in drawn


# ---- who did the same work ----


def test_curves_that_part_are_other_work() -> None:
    plain = Timing(losses=[1.0, 1.0])
    part = Timing(losses=[1.0, 1.0 + 1e-4])
    assert not agreement.agreement(OURS, part, plain, "float32").same_work
    assert agreement.agreement("FSDP2", part, plain, "float32").same_work
    assert not agreement.agreement("FSDP2", Timing(losses=[1.0, float("nan")]), plain, "bfloat16").same_work


def test_other_work_is_named_and_fails_the_run() -> None:
    dtypes = copy.deepcopy(FOUND["dtypes"])
    assert cpu.went_well(dtypes)  # a peer may fail
    dtypes["float32"]["contenders"][OURS] |= {"worst_relative_loss_difference": 0.1, "same_work": False}
    assert not cpu.went_well(dtypes)
    trouble = "float32, MegaTrain did not do the same work: its losses differ from plain training's by 1.0e-01"
    assert cpu.troubles(dtypes)[0] == f"{trouble} (allowed 1e-05)"
    del dtypes["float32"]["contenders"][OURS]["same_work"]  # there was no plain training to be beside
    assert not cpu.went_well(dtypes)
