"""For all tests: how long an example takes says how busy the machine is, and nothing of the code.

Files that take longest come first: none of them is then left for one worker to finish alone.

What a script starts in the background ignores interrupts, and so does all that this starts. Here they are heard.
"""

from __future__ import annotations

import signal

import pytest
from hypothesis import settings

signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")

LONGEST = [
    "test_browser_dashboard",
    "test_families_exact",
    "test_benchmarks",
    "test_run_process",
    "test_benchmarks_peers",
    "test_notebook",
    "test_terminal",
    "test_integrations_transformers",
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Within a file, and among all others, the order stays."""
    turns = {name: turn for turn, name in enumerate(LONGEST)}
    items.sort(key=lambda item: turns.get(item.path.stem, len(turns)))
