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


@pytest.fixture
def notebook(chromium: Browser, server: LabServer) -> Iterator[NotebookPage]:
    """A fresh browser window. What its console complains of, and every request to elsewhere, fails the test.

    One window for all tests would load Lab once; in one run of five a notebook then lost its session in mid-test.
    """
    with chromium.new_context(viewport={"width": 1400, "height": 1000}) as context:
        page = NotebookPage(context.new_page())
        yield page
        problems = list(page.watch.problems)  # pages complain of a kernel that is ended under them: that is no news
        page.clear()
        assert not problems, "\n".join(problems)
        assert not page.watch.foreign, "\n".join(page.watch.foreign)
