"""What the notebooks teach with: a four-layer pipeline with lanes as slow as one likes, and pictures of any run.

Rates are multiples of what this machine computes, so that a lesson looks alike on a fast one and on a slow one.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import repeat
from statistics import median, median_low
from typing import Any

import plotly.graph_objects as go
import torch
from IPython.display import Markdown, display

from dashboard.columns import make_frame
from dashboard.figures import build_figure, update_figure
from dashboard.history import History
from dashboard.places import BOTTOM, BUFFERS, HEIGHT, PLACES, TIMELINE, TOP
from dashboard.sources import source_of
from dashboard.words import advice, milliseconds, size
from megatrain.anatomy.load import from_config
from megatrain.anatomy.presets import llama_8b
from megatrain.config import AdamWConfig, EngineConfig, Throttle
from megatrain.engine import StreamingEngine
from megatrain.remote import RunUnreachableError
from megatrain.report import Inspection, RunState
from megatrain.run import TrainingRun
from megatrain.trace import Span

LAYERS, HIDDEN, VOCABULARY = 4, 256, 512
ROWS, SEQUENCE = 8, 128  # of a batch
STEPS = 4  # trained at a time
POLL_S = 0.1
ENDING_S = 15.0  # within which a run that hears no more wishes has saved its model and is over


# ---- a pipeline to learn from ----


@dataclass(frozen=True)
class Pace:
    """What one layer takes here with nothing slowed down, and the bytes that move for it.

    forward_s: of one layer and a whole batch. update_bytes: what AdamW reads and writes.
    """

    forward_s: float
    load_bytes: int
    update_bytes: int

    def throttle(self, *, load: float | None = None, update: float | None = None) -> Throttle:
        """Return lanes on which moving a layer, or updating it, takes so many times as long as its forward."""
        return Throttle(
            link_bytes_per_s=None if load is None else self.load_bytes / (load * self.forward_s),
            update_bytes_per_s=None if update is None else self.update_bytes / (update * self.forward_s),
        )

    def __str__(self) -> str:
        took = f"forward of {ROWS} × {SEQUENCE} tokens {milliseconds(self.forward_s)}"
        return f"one layer: {size(self.load_bytes)} of weights, {took}"


class Pipeline:
    """Four Llama layers, trained step by step in this thread; every step is recorded, as in any run.

    choices: of `EngineConfig`, such as prefetch_depth=0.
    """

    def __init__(self, throttle: Throttle | None = None, **choices: Any) -> None:
        self.engine = engine(throttle, **choices)
        self._trained = range(0)  # the steps of the last call of `train`

    def train(self, steps: int = STEPS, *, rows: int = ROWS) -> Pipeline:
        """Train some more steps, on batches of so many sequences."""
        begun = self._trained.stop
        for _ in range(steps):
            self.engine.step(batch(rows))
        self._trained = range(begun, begun + steps)
        return self

    @property
    def history(self) -> History:
        return History(self.engine.recorder.snapshot())

    @property
    def typical_step(self) -> int:
        """The step of median length among those trained last, less the first, which finishes what was before.

        A single step may have met a busy machine.
        """
        settled = self._trained[1:] or self._trained
        lengths = {
            record.end_s - record.start_s: record.step for record in self.history.steps if record.step in settled
        }
        return lengths[median_low(lengths)]

    @property
    def tokens_per_s(self) -> float:
        """Of a typical step."""
        metrics = self.history.metrics_of(self.typical_step)
        assert metrics is not None
        return metrics.tokens_per_s

    def show(self, *, last_step: int | None = None, steps: int = 1) -> None:
        """Display the advice and the timeline of a typical step, or of the steps up to `last_step`."""
        shown = self.typical_step if last_step is None else last_step
        show(self.history, last_step=shown, steps=steps)


def measure() -> Pace:
    """Train for a moment with lanes as fast as they are. From here on torch computes with one thread.

    The other cores are for the copying, for AdamW, and for the page that shows them.
    """
    torch.set_num_threads(1)
    pipeline = Pipeline().train()
    spans = [span for span in pipeline.engine.recorder.spans() if span.layer is not None]
    pipeline.engine.close()
    return Pace(
        forward_s=median(span.end_s - span.start_s for span in _of(spans, "forward")),
        load_bytes=_of(spans, "load")[0].nbytes,
        update_bytes=_of(spans, "update")[0].nbytes,
    )


def engine(throttle: Throttle | None = None, **choices: Any) -> StreamingEngine:
    """Return an engine around the lesson's model, on the lanes of a CPU."""
    config = EngineConfig(device="cpu", dtype="float32", throttle=throttle, **choices)
    return StreamingEngine(_model(), config, AdamWConfig(lr=1e-3))


def training_run(throttle: Throttle, *, steps: int, **choices: Any) -> TrainingRun:
    """Return the same as a run in the background, ready to start."""
    return TrainingRun(engine(throttle, **choices), _Repeated(batch(ROWS)), steps=steps)


def batch(rows: int) -> dict[str, torch.Tensor]:
    """Return random tokens: what is learned is of no interest here."""
    ids = torch.randint(VOCABULARY, (rows, SEQUENCE), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids}


def _model() -> Any:
    config = copy.deepcopy(llama_8b())
    config.hidden_size, config.intermediate_size, config.num_hidden_layers = HIDDEN, 3 * HIDDEN, LAYERS
    config.num_attention_heads = config.num_key_value_heads = 4
    config.head_dim, config.vocab_size = HIDDEN // 4, VOCABULARY
    config.bos_token_id, config.eos_token_id = 0, 1
    return from_config(config, dtype=torch.float32)


def _of(spans: list[Span], op: str) -> list[Span]:
    return [span for span in spans if span.op == op]


class _Repeated:
    """One batch, for ever."""

    def __init__(self, only: dict[str, torch.Tensor]) -> None:
        self._only = only

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return repeat(self._only)


# ---- pictures ----


def history_of(run: Any) -> History:
    """Return all that is known of a run, in a thread or a process, or of `dashboard.sources.FolderSource`."""
    source = source_of(run)
    try:
        return History(source.poll())
    finally:
        source.close()


def show(history: History, *, last_step: int | None = None, steps: int = 1, follow: int | None = None) -> None:
    """Display what binds in the last step shown (None = the newest that ended), how fast it was, and the timeline."""
    metrics = history.metrics_of(last_step)
    speed = "" if metrics is None else f" {metrics.tokens_per_s:,.0f} tokens per second."
    display(Markdown(f"**{advice_on(history, last_step)}**{speed}"))  # type: ignore[no-untyped-call]
    if metrics is not None:
        figure = picture(history, last_step=metrics.step, steps=steps, follow=follow)
        display(figure)  # type: ignore[no-untyped-call]


def advice_on(history: History, step: int | None = None) -> str:
    """Return what binds in a step (None = the newest that ended)."""
    metrics, record = history.metrics_of(step), history.record(step)
    return "No step has ended yet." if metrics is None or record is None else advice(metrics, record)


def picture(history: History, *, last_step: int | None, steps: int = 1, follow: int | None = None) -> go.Figure:
    """Return the upper part of the dashboard's figure: what each lane does, and who holds the device buffers."""
    figure = build_figure()
    update_figure(figure, make_frame(history, history.window(last_step, steps), follow=follow))
    return _upper_part(figure)


def _upper_part(figure: go.Figure) -> go.Figure:
    """Places in the figure are shares of its height, which shrinks; widths stay."""
    lower = PLACES[BUFFERS]
    height = TOP + lower.top + lower.height + BOTTOM
    grows = (HEIGHT - TOP - BOTTOM) / (height - TOP - BOTTOM)
    layout = figure.layout.to_plotly_json()
    kept = {name: value for name, value in layout.items() if "axis" not in name}
    for plot in ("", "2"):
        kept[f"xaxis{plot}"], kept[f"yaxis{plot}"] = layout[f"xaxis{plot}"], layout[f"yaxis{plot}"]
        kept[f"yaxis{plot}"]["domain"] = [1 - (1 - y) * grows for y in layout[f"yaxis{plot}"]["domain"]]
    above = (PLACES[TIMELINE].y[1], lower.y[1])
    words = [annotation for annotation in layout["annotations"] if annotation["y"] in above]
    kept["annotations"] = [word | {"y": 1 - (1 - word["y"]) * grows} for word in words]
    traces = [trace for trace in figure.data if trace.yaxis in ("y", "y2")]
    return go.Figure(traces, kept | {"height": height})


# ---- a run that may be over already ----


@contextmanager
def while_it_trains(run: TrainingRun) -> Iterator[None]:
    """Within, wishes may be asked for; if the run is over, says so and goes on behind."""
    try:
        yield
    except (ValueError, RunUnreachableError):
        with suppress(TimeoutError):
            run.wait(ENDING_S)
        if not run.state.over:
            raise
        print(f"The run is {run.state.value} already: nothing left to steer. With more steps there is.")


def step_layer(run: TrainingRun, timeout_s: float = 60.0) -> Inspection:
    """Let one more layer run and wait until the run is held again; return what can be seen there."""
    give_up_s = time.monotonic() + timeout_s
    run.step_layer().wait(timeout_s)
    while (held := run.status().held) is None:
        if run.state.over:
            raise ValueError(f"the run is {run.state.value}: it is held nowhere any more")
        if time.monotonic() > give_up_s:
            raise TimeoutError(f"the run was not held again within {timeout_s} s; it is {run.state.value}")
        time.sleep(POLL_S)
    return held


def let_pass(run: TrainingRun, steps: int, timeout_s: float = 600.0) -> None:
    """Wait until so many more steps are done, or the run is over or held; TimeoutError if that takes too long."""
    wanted, give_up_s = run.steps_done + steps, time.monotonic() + timeout_s
    while run.steps_done < wanted and run.state is RunState.RUNNING:
        if time.monotonic() > give_up_s:
            raise TimeoutError(f"{steps} more steps were not done within {timeout_s} s; the run is {run.state.value}")
        time.sleep(POLL_S)
