"""What a Trainer, its schedulers and its callbacks see of the engine's AdamW."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatrain.config import AdamWConfig


class StreamedAdamW(torch.optim.Optimizer):
    """Two groups (with weight decay and without) that carry the learning rate, and no parameters.

    The engine updates the weights itself, layer by layer; `step` comes after it and only sees to it that nobody
    changed in between what the engine was given.
    """

    def __init__(self, config: AdamWConfig) -> None:
        rest = {"lr": config.lr, "betas": config.betas, "eps": config.eps}
        groups = [{"params": [], "weight_decay": config.weight_decay}, {"params": [], "weight_decay": 0.0}]
        super().__init__(groups, rest)
        self._fixed = self._settings()
        self._taken: float | None = None

    def take_lr(self) -> float:
        """The learning rate for the step that the engine is about to do; ValueError where groups disagree."""
        rates = [float(group["lr"]) for group in self.param_groups]
        if len(set(rates)) != 1:
            raise ValueError(f"the engine has one learning rate for all parameters; the groups have {rates}")
        if self._settings() != self._fixed:
            raise ValueError(
                "betas, eps and weight_decay cannot change while the engine trains; they were "
                f"{self._fixed} and are now {self._settings()}. The learning rate can"
            )
        self._taken = rates[0]
        return rates[0]

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        if self._taken is not None and self._taken != self.take_lr():
            raise ValueError(
                "the learning rate was changed between the gradients and the optimizer step, by an "
                "on_pre_optimizer_step callback? The engine has done both already: change it in on_step_begin"
            )

    def _settings(self) -> list[dict[str, Any]]:
        names = ("betas", "eps", "weight_decay")
        return [{name: group[name] for name in names} for group in self.param_groups]
