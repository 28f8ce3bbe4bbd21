"""Real servers for the browser: started on a free port in a folder of their own, ended with everything they started."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import nbformat

TOKEN = "abc"
START_S = 120
END_S = 30


@dataclass(frozen=True)
class LabServer:
    """A running JupyterLab, which serves Notebook 7 as well."""

    root: Path
    address: str

    def lab_url(self, notebook: str) -> str:
        """Without the tabs that were open before (reset)."""
        return f"{self.address}/lab/tree/{notebook}?token={TOKEN}&reset"

    def notebook_url(self, notebook: str) -> str:
        return f"{self.address}/notebooks/{notebook}?token={TOKEN}"

    def write_notebook(self, name: str, *cells: str) -> str:
        """Put a notebook of these code cells into the server's folder; returns its name for the URLs."""
        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
        notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
        nbformat.write(notebook, self.root / name)
        return name


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def private_environment(home: Path) -> dict[str, str]:
    """Jupyter with no file of the user's, and nothing that reaches for a network."""
    folders = ("JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_DATA_DIR", "IPYTHONDIR")
    own = {
        name: str(home / name.lower()) for name in (*folders, "JUPYTERLAB_WORKSPACES_DIR", "JUPYTERLAB_SETTINGS_DIR")
    }
    root = str(Path(__file__).parents[2])
    return os.environ | own | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": root, "PYTHONWARNINGS": "default"}


def status(url: str) -> int | None:
    """The HTTP status of a page, None while nothing answers."""
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            code: int = answer.status
            return code
    except urllib.error.HTTPError as error:
        error.close()
        return error.code
    except OSError:
        return None


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = START_S) -> None:
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s, f"{what}: not within {timeout_s:.0f} s"
        time.sleep(0.05)


@contextmanager
def running(command: list[str], environment: dict[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server in a session of its own, and end it with what it has started."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, *command], env=environment, stdout=output, stderr=output, start_new_session=True
        )
    try:
        yield process
    finally:
        end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)  # Jupyter asks for a confirmation of SIGINT
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise


@contextmanager
def lab_server(folder: Path) -> Iterator[LabServer]:
    root, home, log = folder / "notebooks", folder / "home", folder / "server.log"
    root.mkdir()
    _no_questions(home)
    port = free_port()
    command = [
        "-m",
        "jupyterlab",
        "--allow-root",
        "--no-browser",
        f"--ServerApp.port={port}",
        "--ServerApp.port_retries=0",
        "--ServerApp.ip=127.0.0.1",
        f"--ServerApp.root_dir={root}",
        f"--IdentityProvider.token={TOKEN}",
        "--LabApp.expose_app_in_browser=True",
        "--JupyterNotebookApp.expose_app_in_browser=True",
    ]
    with running(command, private_environment(home), log) as process:
        server = LabServer(root, f"http://127.0.0.1:{port}")
        url = f"{server.address}/api/status?token={TOKEN}"
        wait_until(lambda: status(url) == 200 or process.poll() is not None, "JupyterLab starts")
        assert process.poll() is None, log.read_text()
        yield server


def _no_questions(home: Path) -> None:
    """Lab asks on its first start whether it may fetch news; here nobody answers, and nothing is fetched."""
    settings = home / "jupyterlab_settings_dir" / "@jupyterlab" / "apputils-extension"
    settings.mkdir(parents=True)
    (settings / "notification.jupyterlab-settings").write_text('{"fetchNews": "false", "checkForUpdates": false}')
