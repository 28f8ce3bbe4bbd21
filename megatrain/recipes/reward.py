"""A reward model: a classifier with one output, which gives chosen answers more than rejected ones.

Bradley and Terry, 1952, as in Ouyang et al., 2022, arXiv:2203.02155, eq. 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch.nn.functional import logsigmoid

from megatrain.data import TokenBatch
from megatrain.engine import Evaluation, StepResult, StreamingEngine
from megatrain.recipes.common import Reads, pair_metrics, require


@dataclass(frozen=True, kw_only=True)
class Reward:
    """center_rewards_coefficient: how much rewards are held around 0 (arXiv:2312.09244, eq. 2); 0 = not at all.

    disable_dropout: none, so that two answers are judged by the same weights.
    """

    name: Literal["reward"] = "reward"
    center_rewards_coefficient: float = 0.0
    disable_dropout: bool = True
    reads: ClassVar[Reads] = "pairs"
    outputs: ClassVar[int | None] = 1
    needs_reference: ClassVar[bool] = False

    def __post_init__(self) -> None:
        coefficient = self.center_rewards_coefficient
        require(coefficient >= 0, "center_rewards_coefficient must be at least 0", coefficient)

    def step(self, engine: StreamingEngine, batch: TokenBatch) -> StepResult:
        """One optimizer step on pairs, all chosen answers first (`data.Pairs.batch`)."""
        metrics: dict[str, float] = {}

        def objective(scores: torch.Tensor) -> torch.Tensor:
            rewards = only_column(scores)
            metrics.update(pair_metrics(rewards.detach()))
            return reward_loss(rewards, self.center_rewards_coefficient)

        return engine.step(without_labels(batch), objective, metrics=metrics)

    def evaluate(self, engine: StreamingEngine, batch: TokenBatch) -> Evaluation:
        """The same on pairs that are not trained on."""
        rewards = only_column(engine.scores(without_labels(batch)))
        loss = reward_loss(rewards, self.center_rewards_coefficient)
        return Evaluation(float(loss), len(rewards) // 2, pair_metrics(rewards))


def without_labels(batch: TokenBatch) -> TokenBatch:
    """Pairs are judged as a whole."""
    return {name: batch[name] for name in ("input_ids", "attention_mask")}


def only_column(scores: torch.Tensor) -> torch.Tensor:
    """Return rewards, (2 B,), of scores (2 B, 1); ValueError for a model with more outputs."""
    if scores.shape[1] != 1:
        raise ValueError(f"a reward model has one output (num_labels=1); this one has {scores.shape[1]}")
    return scores[:, 0]


def reward_loss(rewards: torch.Tensor, center: float = 0.0) -> torch.Tensor:
    """Return the mean loss of B pairs. rewards: (2 B,), all chosen first."""
    chosen, rejected = rewards.chunk(2)
    loss = -logsigmoid(chosen - rejected).mean()
    return loss + center * (chosen + rejected).square().mean()
