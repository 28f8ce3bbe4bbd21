"""A contender in a process of its own, idle while others have their turn: its memory and threads are its own, too.

Note: how a failure is heard
    What goes wrong in the process comes back with its traceback and ends it. A process that dies without a word is
    noticed by its end of the pipe closing, one that hangs by not answering in time; then the end of what it had
    printed says what it was at. The process in turn ends when its pipe does, so none outlives the benchmark.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from benchmarks.fresh import openmp_threads
from benchmarks.peers.contender import Contender, Task
from benchmarks.resident import PeakRss, settled_rss_bytes

LAST_WORDS = 2000  # characters
CLOSING_S = 5


class ContenderError(RuntimeError):
    """A contender failed; `reason` is the last line of the text, which holds all that its process said."""

    @property
    def reason(self) -> str:
        return str(self).strip().splitlines()[-1]


class Hosted:
    """Within the process: the contender, and what it takes of the machine's RAM.

    Growth is counted from before it is built, with what it imports already there.
    """

    def __init__(self, entry: str, task: Task) -> None:
        module, function = entry.split(":")
        build = getattr(importlib.import_module(module), function)
        self._before = settled_rss_bytes()
        with PeakRss() as building:
            self._contender: Contender = build(task)
        self._building_bytes = building.peak_bytes - self._before
        settled_rss_bytes()
        self._training = PeakRss()
        self._training.__enter__()

    def gives_up(self) -> str:
        return self._contender.gives_up

    def step(self) -> tuple[float, float]:
        return self._contender.step()

    def settle(self) -> None:
        self._contender.settle()

    def figures(self, timed: list[int]) -> dict[str, Any]:
        return self._contender.figures(timed) | _peak_on_card()

    def rss_growth_bytes(self) -> dict[str, int]:
        """While it was built, and from then to now, which ends the watching: steps are timed undisturbed."""
        self._training.__exit__(None, None, None)
        return {"building": self._building_bytes, "training": self._training.peak_bytes - self._before}

    def close(self) -> None:
        self._contender.close()


def _peak_on_card() -> dict[str, int]:
    """The most that torch has held on the card, if this process uses one."""
    return {"device_peak_bytes": torch.cuda.max_memory_allocated()} if torch.cuda.is_initialized() else {}


def serve(pipe: Any, entry: str, task: Task, threads: int, log: Path) -> None:
    """The process: builds the contender and does what it is asked, until nobody asks any more."""
    _print_into(log)
    torch.set_num_threads(threads)
    try:
        hosted = Hosted(entry, task)
        pipe.send((True, hosted.gives_up()))
        for name, arguments in _orders(pipe):
            pipe.send((True, getattr(hosted, name)(*arguments)))
    except Exception:
        pipe.send((False, traceback.format_exc()))


def _orders(pipe: Any) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Until whoever asks is gone."""
    with suppress(EOFError):
        while True:
            yield pipe.recv()


def _print_into(log: Path) -> None:
    """All that it and what it starts print, also from C++."""
    with log.open("wb") as file:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)


class Apart(Contender):
    """This end of the pipe. Every call waits `patience_s` at most for its answer; ContenderError if none comes."""

    def __init__(self, entry: str, task: Task, *, threads: int, patience_s: float) -> None:
        self.patience_s = patience_s
        self._folder = tempfile.TemporaryDirectory()
        self._log = Path(self._folder.name) / "printed"
        context = multiprocessing.get_context("spawn")
        self._pipe, there = context.Pipe()
        self._process = context.Process(target=serve, args=(there, entry, task, threads, self._log), daemon=True)
        with openmp_threads(threads):
            self._process.start()
        there.close()

    def wait_until_built(self) -> None:
        self.gives_up = self._answer()

    def step(self) -> tuple[float, float]:
        loss, norm = self._ask("step")
        return loss, norm

    def settle(self) -> None:
        self._ask("settle")

    def figures(self, timed: list[int]) -> dict[str, Any]:
        return dict(self._ask("figures", timed))

    def rss_growth_bytes(self) -> dict[str, int]:
        """See `Hosted.rss_growth_bytes`; can be asked once."""
        return dict(self._ask("rss_growth_bytes"))

    def close(self) -> None:
        """Ask the contender to close, and end its process whatever comes of that. May be called again."""
        self.patience_s = CLOSING_S
        with suppress(ContenderError):
            self._ask("close")
        self._end()

    def _ask(self, name: str, *arguments: Any) -> Any:
        try:
            self._pipe.send((name, arguments))
        except OSError as error:
            raise self._died() from error
        return self._answer()

    def _answer(self) -> Any:
        try:
            if not self._pipe.poll(self.patience_s):
                raise self._silent()
            went_well, value = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise self._died() from error
        if not went_well:
            raise ContenderError(value)
        return value

    def _silent(self) -> ContenderError:
        said = self._last_words()
        self._end()
        return ContenderError(f"{said}\nno answer within {self.patience_s:g} s, so its process was ended (--patience)")

    def _died(self) -> ContenderError:
        self._process.join(5)
        return ContenderError(f"{self._last_words()}\nits process ended with exit code {self._process.exitcode}")

    def _last_words(self) -> str:
        return self._log.read_text(errors="replace")[-LAST_WORDS:] if self._log.exists() else ""

    def _end(self) -> None:
        self._process.kill()
        self._process.join()
        self._pipe.close()
        self._folder.cleanup()
