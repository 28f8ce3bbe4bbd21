"""Combinations of three settings, without all of them: see `each_pair`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")


def each_pair(first: Sequence[A], second: Sequence[B], third: Sequence[C]) -> list[tuple[A, B, C]]:
    """Triples in which every two values of different lists meet; the third list is the shortest.

    What goes wrong does so by one value or by two that meet; all triples would take as many times longer as the third
    list is long.
    """
    assert len(third) <= min(len(first), len(second))
    return [
        (one, other, third[(row + column) % len(third)])
        for row, one in enumerate(first)
        for column, other in enumerate(second)
    ]
