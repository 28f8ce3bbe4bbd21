"""What recipes have in common: what they read, how a setting is refused, and what is told of pairs."""

from __future__ import annotations

from typing import Literal

import torch

Reads = Literal["documents", "whole documents", "pairs", "prompts"]
"""The data that a recipe takes; of whole documents, every token is trained."""


def require(condition: bool, rule: str, value: object) -> None:
    """Raise ValueError with the rule and the value, unless the condition holds."""
    if not condition:
        raise ValueError(f"{rule}; got {value!r}")


def pair_metrics(rewards: torch.Tensor) -> dict[str, float]:
    """Return what chosen and rejected answers get, and how often the chosen one gets more; (2 B,), all chosen first."""
    chosen, rejected = rewards.chunk(2)
    return {
        "rewards/chosen": float(chosen.mean()),
        "rewards/rejected": float(rejected.mean()),
        "rewards/accuracies": float((chosen > rejected).float().mean()),
        "rewards/margins": float((chosen - rejected).mean()),
    }
