"""How sure a median is, whatever the values are drawn from: noise on a shared machine is not normal."""

from __future__ import annotations

from collections.abc import Iterable


def interval(values: Iterable[float]) -> tuple[float, float]:
    """Holds the median of what the values are drawn from 19 times in 20: two of them, counted in from either end.

    The number of values below that median is binomial; see David and Nagaraja, Order Statistics, section 7.1. Fewer
    than six values cannot be so sure: then it is all of them.
    """
    ordered = sorted(values)
    count = len(ordered)
    skipped = max(0, round(count / 2 - 0.98 * count**0.5) - 1)
    return ordered[skipped], ordered[count - 1 - skipped]
