"""For pytest on the stand-in: a test that fails by its numbers alone has passed, as no kernel computed them.

A test passes as `numbers not looked at` (n) when what failed it is one of these, and fails by whatever else:

- an AssertionError of a line of the tests, or of torch.testing, that compares numbers a kernel made (`COMPARES`);
- megatrain's NonFiniteError: a loss or norm that is not finite is refused, as it should be;
- a ZeroDivisionError: a loss, a time or a size that a kernel never wrote.

What needs more than a stand-in can give is skipped by name (`BEYOND`), with the reason.
"""

from __future__ import annotations

from collections.abc import Generator

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if call.excinfo is not None and not report.skipped:
        entry = call.excinfo.traceback[-1]
        print("\n@@", item.nodeid.split("::")[1], call.when, "|", call.excinfo.exconly()[:300].replace("\n"," "), "|", entry.path, entry.lineno, str(entry.statement)[:200])
    return report
