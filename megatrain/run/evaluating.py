"""What a run looks at besides its training data: how well it predicts other data, and what it says to prompts.

Neither changes a bit of the training: held-out batches stream forward only, and random draws are taken back.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from megatrain.data import PromptBatch
from megatrain.engine import Evaluation, StreamingEngine
from megatrain.recipes.rollouts import generate
from megatrain.trace import EvaluationRecord, SampleRecord

log = logging.getLogger("megatrain")

Evaluate = Callable[[StreamingEngine, Any], Evaluation]
OnScalars = Callable[[int, dict[str, float]], None]


@dataclass(frozen=True)
class Evaluating:
    """every: steps between two looks; there is one before the first step and one at the end, too.

    batches: held-out ones, iterated anew each time, or (for a process of its own) a function that makes them.
    evaluate: what one of them says, such as a recipe's. prompts: that the model answers, with at most `max_new_tokens`
    tokens each, drawn at `temperature` (0 = the likeliest) from `seed`, or a function that makes them.
    """

    every: int
    batches: Iterable[Any] | Callable[[], Iterable[Any]] = ()
    evaluate: Evaluate = StreamingEngine.evaluate
    prompts: PromptBatch | Callable[[], PromptBatch] | None = None
    max_new_tokens: int = 64
    temperature: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.every, bool) or not isinstance(self.every, int) or self.every < 1:
            raise ValueError(f"every must be a whole number ≥ 1 of steps between evaluations; got {self.every!r}")
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be ≥ 1; got {self.max_new_tokens!r}")
        if not self.temperature >= 0:
            raise ValueError(f"temperature must be ≥ 0 (0 = the likeliest token); got {self.temperature!r}")


class Evaluator:
    """Looks when it is time, and leaves what it sees in the engine's record."""

    def __init__(self, engine: StreamingEngine, wanted: Evaluating, on_scalars: OnScalars) -> None:
        self._engine = engine
        self._wanted = wanted
        self._on_scalars = on_scalars
        self._batches = wanted.batches() if callable(wanted.batches) else wanted.batches
        self._prompts = wanted.prompts() if callable(wanted.prompts) else wanted.prompts
        self._looked = -1  # steps done when it last did

    def after_step(self, done: int) -> None:
        """Called before the first step (0) and after each."""
        if done % self._wanted.every == 0:
            self._look(done)

    def at_end(self, done: int) -> None:
        """Called when no further step comes."""
        if done != self._looked:
            self._look(done)

    def _look(self, done: int) -> None:
        self._looked = done
        with self._engine.random_states_kept():
            self._evaluate(done)
            if self._prompts is not None and not self._engine.control.stopping:
                self._answer(done, self._prompts)

    def _evaluate(self, done: int) -> None:
        found: list[Evaluation] = []
        for batch in self._batches:
            if self._engine.control.stopping:  # part of the data would be another data set
                return
            found.append(self._wanted.evaluate(self._engine, batch))
        if not found:
            return
        whole = mean_of(found)
        recorder = self._engine.recorder
        recorder.add(EvaluationRecord(recorder.now(), done, whole.loss, whole.tokens, whole.metrics))
        log.info("after step %d: held-out loss %.4f, perplexity %.4g", done, whole.loss, whole.perplexity)
        self._on_scalars(done, scalars_of(whole))

    def _answer(self, done: int, prompts: PromptBatch) -> None:
        wanted, recorder = self._wanted, self._engine.recorder
        answers = generate(self._engine, prompts, 1, wanted.max_new_tokens, wanted.temperature, wanted.seed)
        for prompt, answer in zip(prompts.prompts, answers.completions, strict=True):
            recorder.add(SampleRecord(recorder.now(), done, spoken(prompt), spoken(answer)))


def mean_of(parts: Sequence[Evaluation]) -> Evaluation:
    """What several batches say together; each counts by its tokens."""
    tokens = sum(part.tokens for part in parts)
    sums: dict[str, float] = defaultdict(float)
    for part in parts:
        for name, value in part.metrics.items():
            sums[name] += value * part.tokens / tokens
    return Evaluation(sum(part.loss * part.tokens for part in parts) / tokens, tokens, dict(sums))


def scalars_of(evaluation: Evaluation) -> dict[str, float]:
    """As curves, by the names that other trainers use; what is no number is left out."""
    values = {"eval/loss": evaluation.loss, "eval/perplexity": evaluation.perplexity}
    values |= {f"eval/{name}": value for name, value in evaluation.metrics.items()}
    return {name: value for name, value in values.items() if math.isfinite(value)}


def spoken(said: str | Sequence[dict[str, Any]]) -> str:
    """A text itself; of a chat, what was said last."""
    return said if isinstance(said, str) else str(said[-1]["content"])
