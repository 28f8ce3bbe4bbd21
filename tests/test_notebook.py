"""The notebook runs from top to bottom without a GPU, a hub or a data set, and leaves what it promises."""

from __future__ import annotations

import json
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[1] / "notebooks" / "finetune_120b.ipynb"
STEPS = 30  # enough for the tour, also on a fast machine


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("notebook") / "run"


@pytest.fixture(scope="module")
def executed(run_dir: Path) -> nbformat.NotebookNode:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("MEGATRAIN_STEPS", str(STEPS))
        environment.setenv("MEGATRAIN_MINUTES", "0.05")
        environment.setenv("MEGATRAIN_RUN_DIR", str(run_dir))
        environment.setenv("HF_HUB_OFFLINE", "1")
        client = NotebookClient(notebook, timeout=240, store_widget_state=False, kernel_name="python3")
        client.execute(cwd=str(NOTEBOOK.parent))
    return notebook


def outputs(notebook: nbformat.NotebookNode, source: str = "") -> str:
    """Everything that the cells with this piece of source printed or displayed as text."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code" and source in cell.source]
    found = [output for cell in cells for output in cell.outputs]
    return "".join(output.get("text", "") + output.get("data", {}).get("text/markdown", "") for output in found)


def mime_types(notebook: nbformat.NotebookNode, source: str) -> set[str]:
    cells = [cell for cell in notebook.cells if cell.cell_type == "code" and source in cell.source]
    return {mime_type for cell in cells for output in cell.outputs for mime_type in output.get("data", {})}


def turns_of_depth(folder: Path) -> list[tuple[object, object]]:
    markers = [json.loads(line) for line in (folder / "markers.jsonl").read_text().splitlines()]
    return [(marker["old"], marker["new"]) for marker in markers if marker["name"] == "prefetch_depth"]


def test_the_notebook_holds_no_stored_outputs() -> None:
    cells = nbformat.read(NOTEBOOK, as_version=4).cells
    assert all(not cell.outputs for cell in cells if cell.cell_type == "code")


def test_it_plans_the_real_model_here_and_on_a_larger_machine(executed: nbformat.NotebookNode) -> None:
    said = outputs(executed)
    assert "116.83 B parameters" in said
    assert "NVIDIA H200" in said
    assert "it does not fit" in said
    assert "it fits" in said


def test_the_real_model_is_simulated_and_shown(executed: nbformat.NotebookNode) -> None:
    assert "optimizer binds: twice as fast, a step would take" in outputs(executed, "simulate(plan)")
    assert "application/vnd.plotly.v1+json" in mime_types(executed, "simulate(plan)")


def test_the_dashboard_is_shown_and_the_timeline_beside_the_tour(executed: nbformat.NotebookNode) -> None:
    assert "application/vnd.jupyter.widget-view+json" in mime_types(executed, "Dashboard(run)")
    assert "application/vnd.plotly.v1+json" in mime_types(executed, "set_prefetch_depth(0)")


def test_the_tour_takes_place_while_the_run_goes_on(executed: nbformat.NotebookNode, run_dir: Path) -> None:
    assert "already" not in outputs(executed, "while_it_trains")
    assert len(re.findall(r"(?:forward|backward) of layer \d+ done", outputs(executed, "step_layer"))) == 3
    assert turns_of_depth(run_dir) == [(1, 0), (0, 2)]
    assert "in process" in outputs(executed, "stranger")


def test_without_a_buffer_ahead_the_advice_says_so(executed: nbformat.NotebookNode) -> None:
    assert "Prefetch depth is 0: raise it" in outputs(executed, "set_prefetch_depth(0)")
    assert "Prefetch depth is 0" not in outputs(executed, "set_prefetch_depth(2)")


def test_training_leaves_a_model_a_page_and_a_trace(executed: nbformat.NotebookNode, run_dir: Path) -> None:
    assert len((run_dir / "metrics.jsonl").read_text().splitlines()) == STEPS
    assert (run_dir / "model" / "config.json").exists()
    assert (run_dir / "model" / "tokenizer.json").exists()
    assert (run_dir / "timeline.html").stat().st_size > 1_000_000  # with plotly.js inside, for offline use
    assert (run_dir / "trace.json.gz").exists()


def test_the_saved_model_answers(executed: nbformat.NotebookNode) -> None:
    last = next(cell for cell in reversed(executed.cells) if cell.cell_type == "code")
    assert "def join(a, *p):" in last.outputs[-1]["text"]
