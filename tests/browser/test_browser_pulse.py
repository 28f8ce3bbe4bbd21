"""The pulse in a real JupyterLab and Notebook 7: what the browser answers, and that a running cell does not delay."""

from __future__ import annotations

import pytest
from pages import NotebookPage
from servers import LabServer

SHOW = "from dashboard.pulse import Pulse\npulse = Pulse()\npulse"

BEATS = """
import threading, time
answered = []
def until(true):
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)
def beat():
    until(lambda: pulse.visible)
    for _ in range(10):
        pulse.sent += 1
        until(lambda: pulse.seen == pulse.sent)
        answered.append(pulse.seen)
"""

IN_A_THREAD = "thread = threading.Thread(target=beat)\nthread.start()"
BLOCK = "thread.join()\nprint(len(answered), 'answered while the cell ran')"


@pytest.mark.parametrize("client", ["notebook 7", "lab"])
def test_answers_come_while_a_cell_runs_also_when_all_cells_are_run_at_once(
    client: str, notebook: NotebookPage, server: LabServer
) -> None:
    name = server.write_notebook(f"{client}.ipynb", BEATS, SHOW, IN_A_THREAD + "\n" + BLOCK)
    notebook.open_notebook(server.lab_url(name) if client == "lab" else server.notebook_url(name))
    notebook.run_all()
    assert notebook.cell_output(2) == "10 answered while the cell ran\n"


def test_a_notebook_that_was_closed_and_opened_again_is_heard(notebook: NotebookPage, server: LabServer) -> None:
    name = server.write_notebook("reopened.ipynb", BEATS, SHOW, IN_A_THREAD + "\n" + BLOCK)
    notebook.open_notebook(server.lab_url(name))
    notebook.run_all()
    before = notebook.kernel_value("pulse.hello")
    notebook.save()
    notebook.page.evaluate("window.jupyterapp.shell.currentWidget.close()")
    notebook.open_notebook(server.lab_url(name))
    notebook.wait_for(lambda: notebook.kernel_value("pulse.hello") != before, "the new view says hello")
    notebook.run_cell(2)
    assert notebook.cell_output(2) == "20 answered while the cell ran\n"


def test_a_reload_says_hello_anew(notebook: NotebookPage, server: LabServer) -> None:
    notebook.open_notebook(server.lab_url(server.write_notebook("reload.ipynb", SHOW)))
    notebook.run_all()
    notebook.wait_for(lambda: notebook.kernel_value("pulse.visible") == "True", "the pulse is seen")
    before = notebook.kernel_value("pulse.hello")
    notebook.reload()
    notebook.wait_for(lambda: notebook.kernel_value("pulse.hello") != before, "the new view says hello")
    notebook.wait_for(lambda: notebook.kernel_value("pulse.visible") == "True", "the new view is seen")


def test_a_hidden_page_is_told_and_acknowledges_when_it_is_shown_again(
    notebook: NotebookPage, server: LabServer
) -> None:
    notebook.open_notebook(server.lab_url(server.write_notebook("hidden.ipynb", SHOW)))
    notebook.run_all()
    notebook.wait_for(lambda: notebook.kernel_value("pulse.visible") == "True", "the pulse is seen")
    notebook.hide(True)
    notebook.wait_for(lambda: notebook.kernel_value("pulse.visible") == "False", "the page is hidden")
    notebook.run_code("pulse.sent = 7")
    assert notebook.kernel_value("pulse.seen") == "0"
    notebook.hide(False)
    notebook.wait_for(lambda: notebook.kernel_value("pulse.seen") == "7", "the newest frame is acknowledged")
    assert notebook.kernel_value("pulse.visible") == "True"


def test_a_view_behind_another_tab_or_removed_is_not_seen(notebook: NotebookPage, server: LabServer) -> None:
    name = server.write_notebook("covered.ipynb", SHOW)
    notebook.open_notebook(server.lab_url(name))
    notebook.run_all()
    notebook.wait_for(lambda: notebook.kernel_value("pulse.visible") == "True", "the pulse is seen")
    kernel = notebook.hold_kernel()
    notebook.command("launcher:create")
    notebook.wait_for(lambda: kernel("pulse.visible") == "False", "another tab is in front")
    notebook.command("docmanager:open", path="covered.ipynb")
    notebook.wait_for(lambda: kernel("pulse.visible") == "True", "the notebook is in front again")
    notebook.page.evaluate("window.jupyterapp.shell.currentWidget.content.widgets[0].model.outputs.clear()")
    notebook.wait_for(lambda: kernel("pulse.visible") == "False", "the output is gone")


def test_a_restarted_kernel_gets_a_pulse_of_its_own(notebook: NotebookPage, server: LabServer) -> None:
    notebook.open_notebook(server.lab_url(server.write_notebook("restart.ipynb", SHOW)))
    notebook.run_all()
    notebook.restart_kernel()
    notebook.run_all()
    notebook.wait_for(lambda: notebook.kernel_value("pulse.visible") == "True", "the new pulse is seen")


def test_it_is_seen_while_any_part_of_the_dashboard_around_it_is(notebook: NotebookPage, server: LabServer) -> None:
    box = "import ipywidgets\nipywidgets.VBox([pulse, ipywidgets.HTML('<p style=\"height: 2000px\">figures')])"
    below = "from IPython.display import HTML\nHTML('<p style=\"height: 3000px\">text')"
    name = server.write_notebook("scrolled.ipynb", SHOW.removesuffix("\npulse"), box, below)
    notebook.open_notebook(server.lab_url(name))
    notebook.run_all()
    notebook.wait_for(lambda: notebook.kernel_value("pulse.visible") == "True", "the dot is seen")
    notebook.scroll(4000)
    notebook.wait_for(lambda: notebook.kernel_value("pulse.visible") == "False", "only the text below is seen")
    notebook.scroll(1500)
    notebook.wait_for(lambda: notebook.kernel_value("pulse.visible") == "True", "the figures are seen, the dot is not")
