"""All contenders of a run, in turn. One that fails is named, and the others go on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType

from benchmarks.apart import Apart, ContenderError
from benchmarks.peers.contender import Task
from benchmarks.turns import Timing, take_turns, warm_up


class Field:
    """Within, the contenders' processes live.

    apart: those that still run. failures: why the others do not.
    """

    def __init__(self, entries: Mapping[str, str], task: Task, *, threads: int, patience_s: float) -> None:
        self.failures: dict[str, ContenderError] = {}
        self.timings: dict[str, Timing] = {}
        self.rss_growth_bytes: dict[str, dict[str, int]] = {}
        self.apart: dict[str, Apart] = {}
        self._entries, self._task = entries, task
        self._threads, self._patience_s = threads, patience_s

    def build(self, warmup: int, on_turn: Callable[[str], None]) -> None:
        """One after another, so that none is disturbed while it is built and its memory is watched."""
        for name, entry in self._entries.items():
            self.apart[name] = Apart(entry, self._task, threads=self._threads, patience_s=self._patience_s)
            with self._named(name):
                self.apart[name].wait_until_built()
                self.timings[name] = warm_up(self.apart[name], warmup)
                self.rss_growth_bytes[name] = self.apart[name].rss_growth_bytes()
            on_turn(name)

    def take_turns(self, steps: int, on_turn: Callable[[str], None]) -> None:
        """One round: each that still runs has a turn of so many timed steps."""
        for name in [*self.apart]:
            with self._named(name):
                take_turns({name: self.apart[name]}, self.timings, rounds=1, steps=steps)
            on_turn(name)

    @contextmanager
    def _named(self, name: str) -> Iterator[None]:
        try:
            yield
        except ContenderError as error:
            self.failures[name] = error
            self.apart.pop(name).close()

    def __enter__(self) -> Field:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for apart in self.apart.values():
            apart.close()
