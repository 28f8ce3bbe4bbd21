"""A trainer that is watched or left alone, block after block, and a dashboard that believes in its browser.

The trainer is a process of its own with one engine, so that both sides of a comparison have the same memory, model
and threads. A block is one step that is not timed (see `turns`) and some that are.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import comm
import torch
from comm.base_comm import BaseComm
from jupyter_client.session import Session

from dashboard import Dashboard
from megatrain import AdamWConfig, EngineConfig, StreamingEngine, TrainingRun
from megatrain.anatomy.load import from_config
from megatrain.demo import BATCH, MICRO_BATCH, SEQUENCE, SIZES, VOCABULARY
from megatrain.folder import RunFolder
from megatrain.journal import Journal

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Work:
    """What is trained: a rung of the demo's ladder on random tokens."""

    size: int = 1
    rows: int = BATCH
    tokens: int = SEQUENCE
    threads: int = 1
    cores: tuple[int, ...] = ()  # empty: wherever the system likes

    def engine(self) -> StreamingEngine:
        model = from_config(SIZES[self.size].config(), dtype=torch.float32)
        config = EngineConfig(device="cpu", dtype="float32", micro_batch_size=MICRO_BATCH)
        return StreamingEngine(model, config, AdamWConfig(lr=1e-4))

    def batch(self) -> Batch:
        """No special token: the embedding of padding is zero, which a random model cannot stand."""
        ids = torch.randint(3, VOCABULARY, (self.rows, self.tokens), generator=torch.Generator().manual_seed(0))
        return {"input_ids": ids, "labels": ids.clone()}


@dataclass
class Block:
    """What came of a block's timed steps. cpu_s: of the trainer's process, all threads, during those steps."""

    steps_s: list[float]
    cpu_s: float
    drawing: Drawing | None = None


@dataclass
class Drawing:
    """What a dashboard did in `wall_s`. cpu_s: of the thread that draws."""

    wall_s: float
    cpu_s: float
    frames: int


# ---- a dashboard without a browser ----


class _Channel(BaseComm):
    """Makes and signs every message as a kernel does, and drops it."""

    _session = Session(key=os.urandom(32))

    def publish_msg(
        self, msg_type: str, data: Any = None, metadata: Any = None, buffers: Any = None, **keys: Any
    ) -> None:
        content = {"data": data or {}, "comm_id": self.comm_id, **keys}
        self._session.serialize(self._session.msg(msg_type, content, metadata=metadata))


class Watch:
    """Counts what a dashboard does, from `begin` on: at first it has to catch up with all that was recorded before."""

    def __init__(self, thread: threading.Thread) -> None:
        assert thread.ident is not None
        self._clock = time.pthread_getcpuclockid(thread.ident)
        self._began: tuple[float, float] | None = None
        self._frames = 0

    def begin(self) -> None:
        """Called with the first frame or after the first step; later calls change nothing."""
        self._began = self._began or self._now()

    def frame(self) -> None:
        self._frames += self._began is not None
        self.begin()

    def result(self) -> Drawing | None:
        """While the thread lives."""
        if self._began is None:
            return None
        (wall_s, cpu_s), (from_s, from_cpu_s) = self._now(), self._began
        return Drawing(wall_s - from_s, cpu_s - from_cpu_s, self._frames)

    def _now(self) -> tuple[float, float]:
        return time.perf_counter(), time.clock_gettime(self._clock)


@contextmanager
def watching(run: TrainingRun | Path, *, visible: bool, cores: tuple[int, ...] = ()) -> Iterator[Watch]:
    """Show a run, or the run in a folder, to a browser that paints every frame at once; `cores`: those that draw."""
    before, comm.create_comm = comm.create_comm, _channel
    try:
        dashboard = Dashboard.attach(run) if isinstance(run, Path) else Dashboard(run)
        with on_cores(cores):  # a thread inherits them
            dashboard.start()
        watch = Watch(dashboard._thread)
        _acknowledge(dashboard, watch, visible=visible)
        yield watch
        dashboard.close()
    finally:
        comm.create_comm = before
    if dashboard.error is not None:
        raise dashboard.error


def _channel(**arguments: Any) -> _Channel:
    return _Channel(**arguments)


def _acknowledge(dashboard: Dashboard, watch: Watch, *, visible: bool) -> None:
    pulse, turns = dashboard._pulse, count()

    def answer(seen: int, *, hello: bool = False) -> None:
        said = {"view": "view", "turn": next(turns), "visible": visible, "seen": seen, "hello": hello}
        pulse._handle_custom_msg(said, [])

    def painted(change: Any) -> None:
        if visible:  # else it is a probe
            watch.frame()
        answer(change["new"])

    pulse.observe(painted, "sent")
    answer(0, hello=True)


@contextmanager
def on_cores(cores: tuple[int, ...]) -> Iterator[None]:
    """Bind this thread, and those that it starts, for as long as this lasts."""
    if not cores:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


# ---- the trainer ----


class Trainer:
    """One engine, trained for blocks at a time; what is beside it differs."""

    def __init__(self, work: Work, viewer_cores: tuple[int, ...]) -> None:
        self._engine, self._batch = work.engine(), work.batch()
        self._viewer_cores = viewer_cores

    def alone(self, steps: int, _folder: Path | None) -> Block:
        """Nothing beside it; the engine's own records, as always."""
        return self._bare(steps)

    def unrecorded(self, steps: int, _folder: Path | None) -> Block:
        """Not even records."""
        vars(self._engine.recorder)["add"] = lambda _: None
        try:
            return self._bare(steps)
        finally:
            del vars(self._engine.recorder)["add"]

    def journal(self, steps: int, folder: Path) -> Block:
        """Records, and the thread that writes them."""
        RunFolder(folder).prepare()
        journal = Journal(self._engine.recorder, folder)
        try:
            return self._bare(steps)
        finally:
            journal.close()

    def run(self, steps: int, folder: Path) -> Block:
        """A whole run, with journal, control server and memory sampler; whoever watches is elsewhere."""
        return self._trained(steps, folder, None)

    def shown(self, steps: int, folder: Path) -> Block:
        """The same, with a dashboard in this process."""
        return self._trained(steps, folder, True)

    def hidden(self, steps: int, folder: Path) -> Block:
        """The same, with a dashboard that nobody sees."""
        return self._trained(steps, folder, False)

    def _bare(self, steps: int) -> Block:
        times = Times()
        for _ in range(1 + steps):
            self._engine.step(self._batch)
            times.step_ended()
        self._engine.flush()
        return times.block()

    def _trained(self, steps: int, folder: Path, visible: bool | None) -> Block:
        times = Times()
        watch: Watch | None = None

        def on_step(*_: Any) -> None:
            times.step_ended()
            if watch is not None:
                watch.begin()

        run = TrainingRun(self._engine, [self._batch], steps=1 + steps, run_dir=folder, on_step=on_step)
        with ExitStack() as beside:
            if visible is not None:
                watch = beside.enter_context(watching(run, visible=visible, cores=self._viewer_cores))
            run.start().wait()
            return replace(times.block(), drawing=watch.result() if watch else None)


class Times:
    """When the steps of a block ended."""

    def __init__(self) -> None:
        self._ends: list[tuple[float, float]] = []

    def step_ended(self) -> None:
        self._ends.append((time.perf_counter(), time.process_time()))

    def block(self) -> Block:
        """Without the first step, which began with nothing to update."""
        steps_s = [end - start for (start, _), (end, _) in pairwise(self._ends)]
        return Block(steps_s, self._ends[-1][1] - self._ends[0][1])


def serve(pipe: Any, work: Work, viewer_cores: tuple[int, ...]) -> None:
    """The trainer's process: train as the pipe says, until it says no more."""
    if work.cores:
        os.sched_setaffinity(0, work.cores)
    torch.set_num_threads(work.threads)
    trainer = Trainer(work, viewer_cores)
    while (order := pipe.recv()) is not None:
        kind, steps, folder = order
        pipe.send(getattr(trainer, kind)(steps, folder))
