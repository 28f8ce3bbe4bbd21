"""A notebook in a real browser, driven through JupyterLab's own commands (synthetic keys are unreliable)."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from playwright.sync_api import ConsoleMessage, Page, Request

WAIT_S = 90  # other tests share the processors

# What the programs complain of on their own account, with any notebook, by its exact text.
HARMLESS = frozenset(
    {
        # Notebook 7.6, when it opens one
        "page error: Cannot read properties of undefined (reading 'schema')",
        "page error: Command 'filebrowser:open-path' not registered.",
        # JupyterLab 4.6, when a kernel is restarted or shut down while it is asked something
        "Could not restore the debugger state: Canceled future for debug_request message before replies were done",
        "page error: Error: Canceled future for create_subshell_request message before replies were done",
    }
)

# Notebook 7.6 asks for its icon font now and then before its server takes it for logged in; the next time it gets it.
REFUSED_FONT = "Failed to load resource: the server responded with a status of 403 (Forbidden) [/static/notebook/"

READY = """(path) => {
  const panel = window.jupyterapp?.shell.currentWidget;
  const session = panel?.context?.path === path && panel.context.isReady && panel.sessionContext.isReady
    && panel.sessionContext.session;
  return session?.kernel?.status === "idle";
}"""

RUN = """([command, index]) => {
  const panel = window.jupyterapp.shell.currentWidget;
  panel.content.deselectAll();
  panel.content.activeCellIndex = index;
  window.megatrainRan = false;
  window.jupyterapp.commands.execute(command).then(() => { window.megatrainRan = true; });
}"""

OUTPUTS = """(index) =>
  window.jupyterapp.shell.currentWidget.content.widgets[index].model.outputs.toJSON()"""

# The kernel is found through the notebook in front, or kept from an earlier moment.
HOLD = "() => { window.megatrainKernel = window.jupyterapp.shell.currentWidget.sessionContext.session.kernel; }"
ASK = """async ([code, expression]) => {
  const front = window.jupyterapp.shell.currentWidget;
  const kernel = window.megatrainKernel ?? front.sessionContext.session.kernel;
  const request = { code, silent: true, store_history: false, user_expressions: { value: expression } };
  const reply = (await kernel.requestExecute(request).done).content;
  const value = reply.user_expressions?.value ?? reply;
  return [value.status === "ok", value.data?.["text/plain"] ?? `${value.ename}: ${value.evalue}`];
}"""

# Playwright keeps every page shown, so the page is told what a browser tells one behind another tab.
HIDE = """(hidden) => {
  Object.defineProperty(document, "hidden", { configurable: true, get: () => hidden });
  document.dispatchEvent(new Event("visibilitychange"));
}"""

# Nothing is returned: Playwright would take seconds to copy the widget that a command may resolve to.
COMMAND = "async ([command, options]) => { await window.jupyterapp.commands.execute(command, options); }"

IN_LAB = "(lab) => location.href.startsWith(lab) && Boolean(window.jupyterapp)"

# Everything that was opened goes with its kernel, and nobody is asked what is to be saved.
CLEAR = """async () => {
  const app = window.jupyterapp;
  if (!app) return;
  for (const widget of [...app.shell.widgets("main")]) widget.dispose();
  await app.serviceManager.sessions.shutdownAll();
}"""

SCROLL = """(pixels) => {
  const notebook = window.jupyterapp.shell.currentWidget.content;
  notebook.node.closest(".jp-NotebookPanel").querySelector(".jp-WindowedPanel-outer").scrollTop = pixels;
}"""


class Watch:
    """What went wrong in a page, and every request that left this machine."""

    def __init__(self, page: Page) -> None:
        self.problems: list[str] = []
        self.foreign: list[str] = []
        page.on("console", self._console)
        page.on("pageerror", lambda error: self._problem(f"page error: {error}"))
        page.on("request", self._request)

    def _console(self, message: ConsoleMessage) -> None:
        if message.type == "error":
            place = urlsplit(message.location.get("url", "")).path  # which resource it was that failed to load
            self._problem(f"{message.text} [{place}]" if message.text.startswith("Failed to load") else message.text)

    def _problem(self, text: str) -> None:
        if text not in HARMLESS and not text.startswith(REFUSED_FONT):
            self.problems.append(text)

    def _request(self, request: Request) -> None:
        address = urlsplit(request.url)
        if address.scheme in ("http", "https", "ws", "wss") and address.hostname != "127.0.0.1":
            self.foreign.append(request.url)


class NotebookPage:
    """One notebook, open in one page. Cells are numbered from 0."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.page.set_default_timeout(WAIT_S * 1e3)
        self.watch = Watch(page)

    def open_notebook(self, url: str) -> None:
        """In a tab of its own where the page is this server's Lab already: it takes long to load."""
        in_lab = "/lab/tree/" in url
        start, path = url.split("?")[0].split("/lab/tree/" if in_lab else "/notebooks/")
        self._path = unquote(path)
        if in_lab and self.page.evaluate(IN_LAB, f"{start}/lab"):
            self.command("docmanager:open", path=self._path)
        else:
            self.page.goto(url)
        self._wait_until_ready()

    def run_all(self, *, wait: bool = True) -> None:
        self._run("notebook:run-all-cells", 0, wait=wait)

    def run_cell(self, index: int, *, wait: bool = True) -> None:
        self._run("notebook:run-cell", index, wait=wait)

    def wait_for_run(self) -> None:
        """Wait for what was run last."""
        self.wait_for("window.megatrainRan")

    def cell_output(self, index: int) -> str:
        """The text that a cell has printed or returned so far; an exception of the cell is raised."""
        return "".join(_text(output) for output in self.page.evaluate(OUTPUTS, index))

    def kernel_value(self, expression: str, code: str = "") -> str:
        """Run code in the idle kernel and return the repr of an expression."""
        ok, value = self.page.evaluate(ASK, [code, expression])
        assert ok, value
        return str(value).strip("'")

    def run_code(self, code: str) -> None:
        self.kernel_value("None", code)

    def hold_kernel(self) -> Callable[[str], str]:
        """Keep asking this kernel, whatever is in front."""
        self.page.evaluate(HOLD)
        return self.kernel_value

    def hide(self, hidden: bool) -> None:
        self.page.evaluate(HIDE, hidden)

    def wait_for(self, condition: str | Callable[[], bool], what: str = "", timeout_s: float = WAIT_S) -> None:
        """Wait for JavaScript, or for something callable, to be true."""
        if isinstance(condition, str):
            self.page.wait_for_function(condition, timeout=timeout_s * 1e3)
            return
        end_s = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < end_s, f"{what or condition}: not within {timeout_s:.0f} s"
            self.page.wait_for_timeout(50)

    def command(self, name: str, **options: str) -> None:
        """Run a command of JupyterLab or Notebook to its end."""
        self.page.evaluate(COMMAND, [name, options])

    def darken(self) -> None:
        self.command("apputils:change-theme", theme="JupyterLab Dark")

    def scroll(self, pixels: int) -> None:
        """Scroll the notebook so far down from its top."""
        self.page.evaluate(SCROLL, pixels)

    def restart_kernel(self) -> None:
        self.page.evaluate("window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.restart()")
        self._wait_until_ready()

    def save(self) -> None:
        self.command("docmanager:save")

    def reload(self) -> None:
        """Save and load the page anew: widgets come back only in a saved notebook."""
        self.save()
        self.page.reload()
        self._wait_until_ready()

    def screenshot(self, name: str) -> Path:
        folder = Path(os.environ.get("MEGATRAIN_SCREENSHOTS") or Path(__file__).parents[2] / "runs" / "screenshots")
        self.page.screenshot(path=folder / f"{name}.png")
        return folder / f"{name}.png"

    def clear(self) -> None:
        """Close every notebook and end its kernel."""
        self.page.evaluate(CLEAR)

    def shut_down_kernel(self) -> None:
        self.page.evaluate("window.jupyterapp?.shell.currentWidget?.sessionContext?.shutdown()")

    def _wait_until_ready(self) -> None:
        self.page.wait_for_function(READY, arg=self._path, timeout=WAIT_S * 1e3)

    def _run(self, command: str, index: int, *, wait: bool) -> None:
        self.page.evaluate(RUN, [command, index])
        if wait:
            self.wait_for_run()


def _text(output: dict[str, Any]) -> str:
    assert output["output_type"] != "error", "\n".join(output["traceback"])
    text = output.get("text") or output.get("data", {}).get("text/plain", "")
    return text if isinstance(text, str) else "".join(text)
