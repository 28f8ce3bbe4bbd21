"""Which sinks there are, asked before anything heavy is made."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import get_args

from megatrain.config import SinkName


def require_sinks(names: Sequence[str]) -> None:
    """ValueError for a name that is none, that comes twice, or whose library is not installed."""
    known = get_args(SinkName)
    if isinstance(names, str) or not set(names) <= set(known) or len(set(names)) < len(names):
        raise ValueError(f"sinks must be a list of {' and '.join(known)}, each at most once; got {names!r}")
    for name in names:
        if find_spec(name) is None:
            raise ValueError(f"sinks: {name} is not installed; run: pip install 'megatrain[{name}]'")
