"""The notebook runs from top to bottom without a GPU, a hub or a data set, and leaves what it promises."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[1] / "notebooks" / "finetune_120b.ipynb"
STEPS = 4


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


def outputs(notebook: nbformat.NotebookNode) -> str:
    """Everything that the cells printed."""
    found = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    return "".join(output.get("text", "") for output in found)


def test_the_notebook_holds_no_stored_outputs() -> None:
    cells = nbformat.read(NOTEBOOK, as_version=4).cells
    assert all(not cell.outputs for cell in cells if cell.cell_type == "code")


def test_it_plans_the_real_model_here_and_on_a_larger_machine(executed: nbformat.NotebookNode) -> None:
    said = outputs(executed)
    assert "116.83 B parameters" in said
    assert "NVIDIA H200" in said
    assert "it does not fit" in said
    assert "it fits" in said


def test_the_timeline_is_shown_as_a_figure(executed: nbformat.NotebookNode) -> None:
    shown = [output for cell in executed.cells if cell.cell_type == "code" for output in cell.outputs]
    assert any("application/vnd.plotly.v1+json" in output.get("data", {}) for output in shown)


def test_training_leaves_a_model_a_page_and_a_trace(executed: nbformat.NotebookNode, run_dir: Path) -> None:
    assert len((run_dir / "metrics.jsonl").read_text().splitlines()) == STEPS
    assert (run_dir / "model" / "config.json").exists()
    assert (run_dir / "timeline.html").stat().st_size > 1_000_000  # with plotly.js inside, for offline use
    assert (run_dir / "trace.json.gz").exists()


def test_the_saved_model_answers(executed: nbformat.NotebookNode) -> None:
    last = next(cell for cell in reversed(executed.cells) if cell.cell_type == "code")
    assert "def join(a, *p):" in last.outputs[-1]["text"]
