"""Supervised fine-tuning: the model learns to say what the trained tokens of the data say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from megatrain.data import TokenBatch
from megatrain.engine import Evaluation, StepResult, StreamingEngine
from megatrain.recipes.common import Reads


@dataclass(frozen=True, kw_only=True)
class SFT:
    """Mean negative log-likelihood per trained token; `data.loss_on` says which tokens those are."""

    name: Literal["sft"] = "sft"
    reads: ClassVar[Reads] = "documents"
    outputs: ClassVar[int | None] = None
    needs_reference: ClassVar[bool] = False
    disable_dropout: ClassVar[bool] = False

    def step(self, engine: StreamingEngine, batch: TokenBatch) -> StepResult:
        """One optimizer step, on the model's own loss."""
        return engine.step(batch)

    def evaluate(self, engine: StreamingEngine, batch: TokenBatch) -> Evaluation:
        """The same on data that is not trained on."""
        return engine.evaluate(batch)
