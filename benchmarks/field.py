"""All contenders of a run, in turn. One that fails is named, and the others go on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from benchmarks.agreement import agreement
from benchmarks.apart import Apart, ContenderError
from benchmarks.models import step_flops
from benchmarks.peers import PLAIN
from benchmarks.peers.contender import Task
from benchmarks.turns import Timing, ratios, take_turns, warm_up


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

    def figures(self) -> dict[str, Any]:
        """What a results file keeps of each; of those that failed, why."""
        found: dict[str, Any] = {}
        for name in self._entries:
            error = self.failures.get(name)
            failed = None if error is None else {"failed": error.reason, "traceback": str(error)}
            found[name] = failed or self._own_figures(name) | self._beside_plain(name)
        return found

    def _own_figures(self, name: str) -> dict[str, Any]:
        task, timing, apart, rss = self._task, self.timings[name], self.apart[name], self.rss_growth_bytes[name]
        return {
            "gives_up": apart.gives_up,
            "step_s": timing.median_s,
            "tokens_per_s": task.rows * task.tokens / timing.median_s,
            "model_flops_per_s": step_flops(task.shape, task.rows, task.tokens) / timing.median_s,
            "peak_rss_growth_bytes": max(rss.values()),
            "training_rss_growth_bytes": rss["training"],
            "host_bytes_per_parameter": rss["training"] / task.shape.parameters,
            "turns_s": timing.turns,
            "losses": timing.losses,
            **apart.figures(timing.timed),
        }

    def _beside_plain(self, name: str) -> dict[str, Any]:
        """Beside plain training, which the ratios are to; nothing where that failed."""
        if PLAIN not in self.apart:
            return {}
        timing, plain = self.timings[name], self.timings[PLAIN]
        found = agreement(name, timing, plain, self._task.dtype)
        return {
            "ratio": timing.median_s / plain.median_s,
            "ratio_of_fastest_steps": min(timing.steps_s) / min(plain.steps_s),
            "ratio_of_each_round": ratios(timing, plain),
            "worst_relative_loss_difference": found.worst,
            "allowed_loss_difference": found.allowed,
            "same_work": found.same_work,
        }

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
