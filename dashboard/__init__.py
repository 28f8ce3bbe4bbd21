"""The notebook dashboard of MegaTrain: `Dashboard(run)`, or `Dashboard.attach(folder)`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dashboard.app import Dashboard

__all__ = ["Dashboard"]


def __getattr__(name: str) -> Any:
    """Import on first use, so that whoever draws a page need not load widgets."""
    if name != "Dashboard":
        raise AttributeError(f"module 'dashboard' has no attribute {name!r}")
    from dashboard.app import Dashboard

    return Dashboard
