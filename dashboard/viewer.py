"""The dashboard of a run as a page of its own, without JupyterLab: Voilà runs one cell and serves what it shows.

Every page gets a kernel of its own, which follows the run as any other viewer does.

Note: what Voilà (0.5) does not do by itself.
Token: it asks for none unless it is told to. With one, a page without it is sent to a login form, and everything
else (kernels, their channels) is refused with 403. It runs in this process, so no list of processes shows the token.
Offline: its page loads icons from a CDN that it does not need. Ours (`viewer_page`) loads none, and a header forbids
the browser every other host. Of JupyterLab's extensions only those that draw widgets are loaded; others break it.
Colours: it knows one theme. Ours asks the browser for light or dark.
Configuration: it runs `voila.py` of the folder that it is started in. Ours reads no files.
End of a page: the kernel is shut down when its page says goodbye, which is refused where there is a token, unless
the check for forged requests is off. A page that could not say goodbye (a crash, a lost connection) leaves a kernel
that is culled when nobody has been connected for some minutes. No message counts as activity for that: a dashboard
talks as long as it lives.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
import webbrowser
from pathlib import Path

from tornado.ioloop import IOLoop
from traitlets.config import Config
from voila.app import Voila

from megatrain.folder import RunFolder

NOTEBOOK = Path(__file__).with_name("viewer.ipynb")
PAGE = Path(__file__).with_name("viewer_page")
HOST = "127.0.0.1"
RUN_VARIABLE = "MEGATRAIN_RUN"  # how the notebook's cell learns which run is meant
CULL_AFTER_S = 300
CULL_INTERVAL_S = 30

ONLY_THIS_SERVER = "default-src 'self' 'unsafe-inline' 'unsafe-eval' data: blob:; frame-ancestors 'none'"
TALK = ["comm_open", "comm_msg", "comm_close", "display_data", "execute_request", "execute_result", "status", "stream"]


class Viewer(Voila):  # type: ignore[misc]
    """Voilà with a page of our own."""

    def setup_template_dirs(self) -> None:
        super().setup_template_dirs()
        self.template_paths.insert(0, str(PAGE))


def serve(run_dir: str | Path, port: int = 0, *, open_browser: bool = True) -> None:
    """Serve the dashboard of a run on this machine only, until Ctrl-C or SIGTERM. The run is left as it is.

    run_dir: folder of a run that goes on, or has ended. port: 0 takes a free one. The address, with the token
    without which nobody is let in, is printed. Raises ValueError for a folder that is no run and for a port in use.
    """
    run = RunFolder(run_dir)
    run.status()
    port, token = _usable(port), secrets.token_urlsafe(24)
    os.environ[RUN_VARIABLE] = str(run.path)
    viewer = Viewer(config=_configuration(port, token), config_file_paths=[])
    viewer.initialize([str(NOTEBOOK)])
    IOLoop.current().add_callback(_announce, f"http://{HOST}:{port}/?token={token}", open_browser)
    viewer.start()


def _announce(url: str, open_browser: bool) -> None:
    print(f"The dashboard is at {url}\nCtrl-C ends it; the run goes on.", flush=True)
    if open_browser:
        threading.Thread(target=webbrowser.open, args=(url,), daemon=True).start()  # some browsers are waited for


def _usable(port: int) -> int:
    """The port, or a free one for 0. Voilà would take another one without saying so."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except (OSError, OverflowError) as error:
            raise ValueError(f"port must be free to use; {port} is not ({error}): leave it out to take any") from None
        found: int = probe.getsockname()[1]
    return found


def _configuration(port: int, token: str) -> Config:
    return Config(
        Voila={
            "ip": HOST,
            "port": port,
            "port_retries": 0,
            "token": token,
            "open_browser": False,  # Voilà would open the address without the token
            "log_level": "ERROR",
            "tornado_settings": {
                "headers": {"Content-Security-Policy": ONLY_THIS_SERVER},
                # Safe, because whatever can be changed here names a kernel by its random id.
                "disable_check_xsrf": True,
            },
        },
        VoilaConfiguration={
            "theme": "JupyterLab Light",
            "allow_theme_override": "NO",
            "allow_template_override": "NO",
            "extension_allowlist": [
                "@jupyter-widgets/jupyterlab-manager",
                "@voila-dashboards/widgets-manager8",
                "anywidget",
            ],
            "show_tracebacks": True,  # whoever has the token may run code here anyway
            "file_allowlist": [],
        },
        MappingKernelManager={
            "cull_idle_timeout": CULL_AFTER_S,
            "cull_interval": CULL_INTERVAL_S,
            "untracked_message_types": TALK,
        },
    )
