"""A reward model: a classifier with one output, which gives chosen answers more than rejected ones.

Bradley and Terry, 1952, as in Ouyang et al., 2022, arXiv:2203.02155, eq. 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch.nn.functional import logsigmoid

from megatrain.data import TokenBatch
from megatrain.engine import StepResult, StreamingEngine
from megatrain.recipes.common import Reads, pair_metrics, require


@dataclass(frozen=True, kw_only=True)
class Reward:
    """center_rewards_coefficient: how much rewards are held around 0 (arXiv:2312.09244, eq. 2); 0 = not at all."""

    name: Literal["reward"] = "reward"
    center_rewards_coefficient: float = 0.0
    reads: ClassVar[Reads] = "pairs"
    outputs: ClassVar[int | None] = 1
    needs_reference: ClassVar[bool] = False

    def __post_init__(self) -> None:
        coefficient = self.center_rewards_coefficient
        require(coefficient >= 0, "center_rewards_coefficient must be at least 0", coefficient)

    def step(self, engine: StreamingEngine, batch: TokenBatch) -> StepResult:
        """One optimizer step on pairs, all chosen answers first (`data.Pairs.batch`)."""
        metrics: dict[str, float] = {}

        def objective(rewards: torch.Tensor) -> torch.Tensor:
            if rewards.shape[1] != 1:
                raise ValueError(f"a reward model has one output (num_labels=1); this one has {rewards.shape[1]}")
            metrics.update(pair_metrics(rewards[:, 0].detach()))
            return reward_loss(rewards[:, 0], self.center_rewards_coefficient)

        whole = {name: batch[name] for name in ("input_ids", "attention_mask")}  # judged as a whole: no labels
        return engine.step(whole, objective, metrics=metrics)


def reward_loss(rewards: torch.Tensor, center: float = 0.0) -> torch.Tensor:
    """Return the mean loss of B pairs. rewards: (2 B,), all chosen first."""
    chosen, rejected = rewards.chunk(2)
    loss = -logsigmoid(chosen - rejected).mean()
    return loss + center * (chosen + rejected).square().mean()
