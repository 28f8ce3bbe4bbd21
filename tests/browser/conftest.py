"""JupyterLab and Chromium, as a user has them, for the tests of this folder."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

import pytest
from pages import NotebookPage
from playwright.sync_api import Browser, sync_playwright
from servers import LabServer, lab_server

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
OPTIONS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
]


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    if CHROMIUM is None:
        reason = "needs Chromium: install it, for instance with `apt-get install chromium`"
        (pytest.fail if os.environ.get("MEGATRAIN_REQUIRE_BROWSER") else pytest.skip)(reason)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=OPTIONS)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def server(chromium: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LabServer]:
    with lab_server(tmp_path_factory.mktemp("lab")) as running:
        yield running


@pytest.fixture(scope="session")
def window(chromium: Browser) -> Iterator[NotebookPage]:
    """For all tests: to load JupyterLab takes longer than most of them."""
    with chromium.new_context() as context:
        yield NotebookPage(context.new_page())


@pytest.fixture
def notebook(window: NotebookPage, server: LabServer) -> Iterator[NotebookPage]:
    """A window without tabs. What its console complains of, and every request to elsewhere, fails the test."""
    window.page.set_viewport_size({"width": 1400, "height": 1000})
    window.watch.forget()
    yield window
    problems = list(window.watch.problems)  # pages complain of a kernel that is ended under them: that is no news
    window.clear()
    assert not problems, "\n".join(problems)
    assert not window.watch.foreign, "\n".join(window.watch.foreign)
