"""Direct Preference Optimization: answers that were chosen become more likely than those that were rejected.

Rafailov et al., 2023, arXiv:2305.18290. The reference is the model that training began with.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch.nn.functional import logsigmoid

from megatrain.data import TokenBatch
from megatrain.engine import Evaluation, StepResult, StreamingEngine
from megatrain.recipes.common import Reads, pair_metrics, require

IGNORED = -100

LossType = Literal["sigmoid", "hinge", "ipo", "robust"]


@dataclass(frozen=True, kw_only=True)
class DPO:
    """beta: how dear it is to leave the reference. loss_type: see `dpo_loss`.

    label_smoothing: the share of preferences that are thought to be wrong; for "robust" only. disable_dropout: none, so
    that policy and reference differ by their weights alone.
    """

    name: Literal["dpo"] = "dpo"
    beta: float = 0.1
    loss_type: LossType = "sigmoid"
    label_smoothing: float = 0.0
    disable_dropout: bool = True
    reads: ClassVar[Reads] = "pairs"
    outputs: ClassVar[int | None] = None
    needs_reference: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require(self.beta > 0, "beta must be above 0", self.beta)
        require(0 <= self.label_smoothing < 0.5, "label_smoothing must be from 0 to below 0.5", self.label_smoothing)
        smooth = self.label_smoothing == 0 or self.loss_type == "robust"
        require(smooth, 'label_smoothing is for loss_type "robust" only; set one of the two', self.loss_type)

    def step(self, engine: StreamingEngine, batch: TokenBatch) -> StepResult:
        """One optimizer step on pairs, all chosen answers first (`data.Pairs.batch`)."""
        tokens, reference = answer_tokens(batch), self._reference(engine, batch)
        metrics: dict[str, float] = {}

        def objective(scores: torch.Tensor) -> torch.Tensor:
            ratios = scores.sum(1) - reference
            metrics.update(pair_metrics(self.beta * ratios.detach()))
            return dpo_loss(ratios, tokens, self.beta, self.loss_type, self.label_smoothing)

        return engine.step(batch, objective, metrics=metrics)

    def evaluate(self, engine: StreamingEngine, batch: TokenBatch) -> Evaluation:
        """The same on pairs that are not trained on."""
        ratios = engine.scores(batch).sum(1) - self._reference(engine, batch)
        loss = dpo_loss(ratios, answer_tokens(batch), self.beta, self.loss_type, self.label_smoothing)
        return Evaluation(float(loss), len(ratios) // 2, pair_metrics(self.beta * ratios))

    def _reference(self, engine: StreamingEngine, batch: TokenBatch) -> torch.Tensor:
        """How likely the answers were before training, (2 B,)."""
        with engine.reference():
            return engine.scores(batch).sum(1)


def answer_tokens(batch: TokenBatch) -> torch.Tensor:
    """How many tokens of each row are predicted, (2 B,)."""
    return (batch["labels"][:, 1:] != IGNORED).sum(1)


def dpo_loss(
    ratios: torch.Tensor, tokens: torch.Tensor, beta: float, loss_type: LossType = "sigmoid", smoothing: float = 0.0
) -> torch.Tensor:
    """Return the mean loss of B pairs.

    ratios: (2 B,) log-probability of each answer, less that of the reference; all chosen first. tokens: (2 B,) of each.
    "sigmoid": DPO, eq. 7. "hinge": SLiC, arXiv:2305.10425. "ipo": arXiv:2310.12036, eq. 17, on means over tokens.
    "robust": arXiv:2403.00409, eq. 14, for labels of which a share `smoothing` is wrong.
    """
    chosen, rejected = (ratios / tokens if loss_type == "ipo" else ratios).chunk(2)
    margins = chosen - rejected  # (B,)
    if loss_type == "hinge":
        return torch.relu(1 - beta * margins).mean()
    if loss_type == "ipo":
        return (margins - 1 / (2 * beta)).square().mean()
    if loss_type == "robust":
        right, wrong = -logsigmoid(beta * margins), -logsigmoid(-beta * margins)
        return (((1 - smoothing) * right - smoothing * wrong) / (1 - 2 * smoothing)).mean()
    return -logsigmoid(beta * margins).mean()
