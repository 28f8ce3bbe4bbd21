"""The lesson runs from top to bottom, and each of its pipelines shows what its question is about."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[1] / "notebooks" / "read_a_timeline.ipynb"
PLOTLY = "application/vnd.plotly.v1+json"


@pytest.fixture(scope="module")
def executed() -> nbformat.NotebookNode:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("MEGATRAIN_STEPS", "2")
        environment.setenv("HF_HUB_OFFLINE", "1")
        client = NotebookClient(notebook, timeout=240, store_widget_state=False, kernel_name="python3")
        client.execute(cwd=str(NOTEBOOK.parent))
    return notebook


def outputs(notebook: nbformat.NotebookNode, source: str) -> list[dict[str, Any]]:
    """What the first cell with this piece of source has displayed."""
    cell = next(cell for cell in notebook.cells if cell.cell_type == "code" and source in cell.source)
    return [output.get("data", {"text/plain": output.get("text")}) for output in cell.outputs]


def advice(notebook: nbformat.NotebookNode, source: str) -> str:
    return next(str(data["text/markdown"]) for data in outputs(notebook, source) if "text/markdown" in data)


def figure(notebook: nbformat.NotebookNode, source: str) -> str:
    return str(next(data[PLOTLY] for data in outputs(notebook, source) if PLOTLY in data))


def tokens_per_s(said: str) -> float:
    found = re.search(r"([\d,]+) tokens per second", said)
    assert found, said
    return float(found[1].replace(",", ""))


def test_the_notebook_holds_no_stored_outputs() -> None:
    cells = nbformat.read(NOTEBOOK, as_version=4).cells
    assert all(not cell.outputs for cell in cells if cell.cell_type == "code")


def test_a_single_buffer_makes_compute_wait_and_the_flag_says_since_when(executed: nbformat.NotebookNode) -> None:
    turned = "pipeline.engine.set_prefetch_depth(0)"
    assert "Transfers bind" in advice(executed, turned)
    assert "Prefetch depth is 0: raise it" in advice(executed, turned)
    assert "depth 1→0" in figure(executed, turned)
    assert "depth 1→0" not in figure(executed, "pipeline = ")


def test_transfers_bind_whatever_the_depth_until_there_are_more_tokens(executed: nbformat.NotebookNode) -> None:
    assert "Transfers bind" in advice(executed, "slow_link = ")
    assert "Transfers bind" in advice(executed, "slow_link.engine.set_prefetch_depth(2)")
    faster = advice(executed, "slow_link.train(STEPS - 1")
    assert tokens_per_s(faster) > 1.3 * tokens_per_s(advice(executed, "slow_link = "))


def test_the_optimizer_binds_until_there_are_more_tokens(executed: nbformat.NotebookNode) -> None:
    assert "The optimizer binds" in advice(executed, "slow_host = ")
    faster = advice(executed, "slow_host.train(STEPS - 1")
    assert tokens_per_s(faster) > tokens_per_s(advice(executed, "slow_host = "))


def test_the_last_pipeline_is_live_and_gets_mended(executed: nbformat.NotebookNode) -> None:
    shown = outputs(executed, "Dashboard(run")
    assert any("application/vnd.jupyter.widget-view+json" in data for data in shown)
    said = "".join(str(data.get("text/plain")) for data in outputs(executed, "lesson.let_pass"))
    assert "before: Transfers bind" in said or "before: Gradients bind" in said
    assert "Prefetch depth is 0" not in advice(executed, "lesson.let_pass")


def test_only_the_timeline_and_the_buffers_are_drawn(executed: nbformat.NotebookNode) -> None:
    drawn = next(data[PLOTLY] for data in outputs(executed, "slow_link = ") if PLOTLY in data)
    axes = {name for name in drawn["layout"] if name.startswith(("xaxis", "yaxis"))}
    assert axes == {"xaxis", "yaxis", "xaxis2", "yaxis2"}
    assert all(0 <= edge <= 1 for name in ("yaxis", "yaxis2") for edge in drawn["layout"][name]["domain"])
