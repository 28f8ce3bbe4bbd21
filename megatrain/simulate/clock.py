"""Lanes on a virtual clock: each runs its operations in order, and no second passes while nobody waits.

An operation begins when its lane is free, it was issued and what it waits for is over. How long it takes is known when
it is issued; while others slow it down, its own clock runs slower.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from megatrain.schedule import Op

Speeds = Callable[[frozenset[str]], Mapping[str, float]]


def undisturbed(lanes: frozenset[str]) -> Mapping[str, float]:
    """No lane slows another."""
    return {}


@dataclass(frozen=True)
class Timed:
    """An operation, and when it ran."""

    op: Op
    start_s: float
    end_s: float


@dataclass
class _Running:
    """What a lane is at. remaining_s: at `since_s`, at full speed."""

    op: Op
    start_s: float
    remaining_s: float
    since_s: float
    speed: float = 1.0

    @property
    def end_s(self) -> float:
        return self.since_s + self.remaining_s / self.speed

    def change(self, speed: float, now_s: float) -> None:
        if speed != self.speed:
            self.remaining_s -= (now_s - self.since_s) * self.speed
            self.since_s, self.speed = now_s, speed


class Clock:
    """Lanes and their time. speeds: how fast each of the lanes at work runs beside the others; 1 where unsaid."""

    def __init__(self, speeds: Speeds = undisturbed) -> None:
        self.now_s = 0.0
        self.timed: list[Timed] = []  # in the order in which they ended
        self._speeds = speeds
        self._queues: dict[str, deque[tuple[Op, float]]] = {}
        self._running: dict[str, _Running] = {}
        self._over: set[int] = set()

    def issue(self, op: Op, seconds: float) -> None:
        """Queue an operation that takes `seconds` alone behind all earlier ones of its lane."""
        self._queues.setdefault(op.lane, deque()).append((op, seconds))

    def wait(self, number: int) -> None:
        """Let time pass until this operation is over."""
        while number not in self._over:
            self._advance()

    def finish(self) -> None:
        """Let time pass until nothing is left to do."""
        while self._running or any(self._queues.values()):
            self._advance()

    def _advance(self) -> None:
        """To the next moment at which an operation ends."""
        self._begin()
        assert self._running, "nothing that was issued can ever begin"
        lane = min(self._running, key=lambda lane: self._running[lane].end_s)
        ended = self._running.pop(lane)
        self.now_s = ended.end_s
        self.timed.append(Timed(ended.op, ended.start_s, ended.end_s))
        self._over.add(ended.op.number)

    def _begin(self) -> None:
        for lane, queue in self._queues.items():
            if queue and lane not in self._running and self._over.issuperset(queue[0][0].waits):
                op, seconds = queue.popleft()
                self._running[lane] = _Running(op, self.now_s, seconds, self.now_s)
        speeds = self._speeds(frozenset(self._running))
        for lane, running in self._running.items():
            running.change(speeds.get(lane, 1.0), self.now_s)
