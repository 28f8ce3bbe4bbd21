"""The page without JupyterLab: who is let in, and what is left when it ends. What it shows: tests/browser."""

from __future__ import annotations

import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import nbformat
import psutil
import pytest
from viewers import RunningViewer, a_run, viewing

from dashboard import viewer

FOREIGN_CONFIGURATION = '{"Voila": {"ip": "0.0.0.0", "token": ""}}'


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return a_run(tmp_path_factory.mktemp("runs") / "run")


@pytest.fixture(scope="module")
def served(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningViewer]:
    folder = tmp_path_factory.mktemp("viewer")
    (folder / "voila.json").write_text(FOREIGN_CONFIGURATION)  # it would be read from here
    with viewing(run, folder) as running:
        yield running


def ask(url: str, method: str = "GET") -> tuple[int, str]:
    """Status and final address of a request without cookies."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method=method), timeout=60) as answer:
            return answer.status, answer.url
    except urllib.error.HTTPError as error:
        error.close()
        return error.code, url


@pytest.mark.parametrize("query", ["", "?token=wrong", "?token="])
def test_a_page_without_the_token_is_a_login_form(served: RunningViewer, query: str) -> None:
    status, url = ask(served.address + query)
    assert status == 200
    assert url.startswith(f"{served.address}login?next=")
    assert served.kernels() == []


@pytest.mark.parametrize(
    ("path", "method"),
    [
        ("api/kernels/00000000-0000-0000-0000-000000000000", "GET"),
        ("api/kernels/00000000-0000-0000-0000-000000000000", "DELETE"),
        ("api/kernels/00000000-0000-0000-0000-000000000000/channels", "GET"),
        ("voila/api/shutdown/00000000-0000-0000-0000-000000000000", "POST"),
        ("voila/files/viewer.ipynb", "GET"),
        ("voila/files/viewer.py", "GET"),
    ],
)
def test_everything_else_is_refused_without_the_token(served: RunningViewer, path: str, method: str) -> None:
    assert ask(served.address + path, method)[0] == 403


def test_only_this_machine_can_reach_it(served: RunningViewer) -> None:
    listening = [c for c in psutil.Process(served.process.pid).net_connections() if c.status == psutil.CONN_LISTEN]
    assert {connection.laddr.ip for connection in listening} == {"127.0.0.1"}


def test_the_browser_is_forbidden_every_other_host(served: RunningViewer) -> None:
    with urllib.request.urlopen(served.address, timeout=60) as answer:
        assert "default-src 'self'" in answer.headers["Content-Security-Policy"]


def test_two_viewers_have_different_ports_and_tokens(served: RunningViewer, run: Path, tmp_path: Path) -> None:
    with viewing(run, tmp_path) as other:
        assert other.url.split("?")[0] != served.url.split("?")[0]
        assert other.url.split("?")[1] != served.url.split("?")[1]


def test_an_interrupt_ends_it_cleanly_with_its_kernels_and_leaves_the_run_alone(run: Path, tmp_path: Path) -> None:
    stand_in = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("import os; os.environ['MEGATRAIN_RUN']")])
    nbformat.write(stand_in, tmp_path / "stand_in.ipynb")
    before = {path: path.read_bytes() for path in run.iterdir()}
    with viewing(run, tmp_path, tmp_path / "stand_in.ipynb") as running:
        with urllib.request.urlopen(running.url, timeout=60) as answer:
            assert str(run) in answer.read().decode()
        kernels = running.kernels()
        assert len(kernels) == 1
        assert running.interrupt() == 0
        assert running.process.stdout
        assert running.process.stdout.read() == "Ctrl-C ends it; the run goes on.\n"
    assert not any(kernel.is_running() for kernel in kernels)
    assert "Traceback" not in running.log.read_text()
    assert before == {path: path.read_bytes() for path in run.iterdir()}


def test_a_folder_that_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no run\.json: give the run_dir of a run"):
        viewer.serve(tmp_path)
    with pytest.raises(ValueError, match="is no folder: give the run_dir of a run"):
        viewer.serve(tmp_path / "missing")


def test_a_port_in_use(run: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ValueError, match=r"port must be free to use; .* is not .*leave it out to take any"):
            viewer.serve(run, taken.getsockname()[1])


def test_the_notebook_has_one_cell_and_no_outputs() -> None:
    (cell,) = nbformat.read(viewer.NOTEBOOK, as_version=4).cells
    assert "Dashboard.attach(os.environ[" in cell.source
    assert cell.outputs == []
