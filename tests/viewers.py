"""The viewer of a run as another process, as `megatrain dashboard` starts it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from megatrain.folder import RunFolder
from megatrain.report import RunInfo

END_S = 60

# The command, with another notebook in place of the dashboard where one is named.
PROGRAM = """
import sys
from pathlib import Path
import dashboard.viewer
from megatrain.cli import main
run, notebook = sys.argv[1:]
if notebook:
    dashboard.viewer.NOTEBOOK = Path(notebook)
sys.argv = ["megatrain", "dashboard", run, "--no-browser"]
main()
"""


def a_run(path: Path) -> Path:
    """The folder of a run whose process is this one."""
    info = RunInfo(
        model="llama",
        layers=2,
        steps=3,
        process_id=os.getpid(),
        began_unix_s=0.0,
        device="cpu",
        layer_bytes=1,
        gradient_bytes=1,
        shell_bytes=1,
        host_arenas={},
        host_total_bytes=1,
        device_limit_bytes=1,
    )
    RunFolder(path).create(info)
    return path


@dataclass
class RunningViewer:
    """A viewer that serves at `url`, whose query is the token."""

    process: subprocess.Popen[str]
    url: str
    log: Path

    @property
    def address(self) -> str:
        return self.url.split("?")[0]

    def kernels(self) -> list[psutil.Process]:
        return list(filter(_is_kernel, psutil.Process(self.process.pid).children()))

    def interrupt(self) -> int:
        """Ctrl-C; returns the exit code."""
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(END_S)


def _is_kernel(process: psutil.Process) -> bool:
    try:
        return "ipykernel" in str(process.cmdline())
    except psutil.Error:  # it has just ended
        return False


@contextmanager
def viewing(run: Path, folder: Path, notebook: Path | None = None) -> Iterator[RunningViewer]:
    """Serve a run; `folder` takes the log and whatever Jupyter writes."""
    own = {name: str(folder / name) for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "IPYTHONDIR")}
    root = str(Path(__file__).parents[1])
    log = folder / "viewer.log"
    with log.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(run), str(notebook or "")],
            env=os.environ | own | {"PYTHONPATH": root, "HF_HUB_OFFLINE": "1"},
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    assert process.stdout
    try:
        said = process.stdout.readline()
        found = re.fullmatch(r"The dashboard is at (http://127\.0\.0\.1:\d+/\?token=\S+)\n", said)
        assert found, said + log.read_text()
        yield RunningViewer(process, found[1], log)
    finally:
        process.terminate()
        process.wait(END_S)
        process.stdout.close()
