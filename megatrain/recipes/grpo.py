"""Group Relative Policy Optimization: the model answers each prompt several times, and learns from the better answers.

Shao et al., 2024, arXiv:2402.03300. Functions say what answers are worth: f(prompts, completions, **columns) → numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch

from megatrain.data import PromptBatch
from megatrain.engine import Evaluation, StepResult, StreamingEngine
from megatrain.recipes.common import Reads, require
from megatrain.recipes.functions import RewardFunction, load_function, total_rewards
from megatrain.recipes.rollouts import Rollouts, generate
from megatrain.recipes.server import ask

LossType = Literal["dapo", "grpo", "dr_grpo"]
Scale = Literal["group", "batch", "none"]


@dataclass(frozen=True, kw_only=True)
class GRPO:
    """rewards: functions, each "module:name" or "file.py:name"; reward_weights: of each in the sum.

    num_generations: answers per prompt, at temperature, of at most max_completion_length tokens. epsilon_low,
    epsilon_high: how far probabilities may move from what they were when the answers were drawn; of effect only with a
    server, for every set of answers is trained on once. beta: how dear it is to leave the reference (0 = free);
    use_bias_correction_kl: by the gradient of the divergence itself, not of its estimate (arXiv:2512.02556).
    scale_rewards: what advantages are divided by. mask_truncated_completions: answers that did not end train nothing.
    disable_dropout: none, also while answers are learnt from. server, server_model: an OpenAI-compatible server that
    answers instead; see `server`. Weights are NOT sent to it.
    """

    name: Literal["grpo"] = "grpo"
    rewards: list[str] = field(default_factory=list)
    reward_weights: list[float] | None = None
    num_generations: int = 8
    max_completion_length: int = 256
    temperature: float = 1.0
    epsilon_low: float = 0.2
    epsilon_high: float = 0.2
    beta: float = 0.0
    use_bias_correction_kl: bool = True
    loss_type: LossType = "dapo"
    scale_rewards: Scale = "group"
    mask_truncated_completions: bool = False
    disable_dropout: bool = False
    seed: int = 0
    server: str | None = None
    server_model: str | None = None
    reads: ClassVar[Reads] = "prompts"
    outputs: ClassVar[int | None] = None

    def __post_init__(self) -> None:
        require(self.num_generations >= 2, "num_generations must be at least 2, to be compared", self.num_generations)
        require(self.max_completion_length >= 1, "max_completion_length must be at least 1", self.max_completion_length)
        require(self.temperature > 0, "temperature must be above 0", self.temperature)
        require(0 < self.epsilon_low <= 1, "epsilon_low must be above 0 and at most 1", self.epsilon_low)
        require(self.epsilon_high > 0, "epsilon_high must be above 0", self.epsilon_high)
        require(self.beta >= 0, "beta must be at least 0", self.beta)
        weights = self.reward_weights
        require(weights is None or len(weights) == len(self.rewards), "one of reward_weights for each reward", weights)
        known = self.server is None or self.temperature == 1
        require(known, "temperature must be 1 with a server, which tells log-probabilities at 1", self.temperature)

    @property
    def needs_reference(self) -> bool:
        """Whether the model that training began with is asked, too."""
        return self.beta > 0

    def step(self, engine: StreamingEngine, batch: PromptBatch) -> StepResult:
        """Let the prompts be answered, judge the answers, and take one optimizer step."""
        rollouts = self.answers(engine, batch)
        return self.learn(engine, rollouts, self.judged(batch, rollouts))

    def evaluate(self, engine: StreamingEngine, batch: PromptBatch) -> Evaluation:
        """What answers to prompts are worth that are not trained on; there is no loss."""
        rollouts = self.answers(engine, batch)
        rewards = self.judged(batch, rollouts)
        return Evaluation(math.nan, len(rewards), rollouts.metrics() | {"reward/mean": float(rewards.mean())})

    def judged(self, batch: PromptBatch, rollouts: Rollouts) -> torch.Tensor:
        """Return what each answer is worth."""
        return total_rewards(self.functions(), self.reward_weights, batch, rollouts)

    def functions(self) -> list[RewardFunction]:
        """Look up the reward functions; ValueError if there are none, or one cannot be loaded."""
        rule = "recipe.rewards must name at least one function: nothing else says what an answer is worth"
        require(bool(self.rewards), rule, self.rewards)
        return [load_function(where) for where in self.rewards]

    def answers(self, engine: StreamingEngine, batch: PromptBatch) -> Rollouts:
        """Return `num_generations` answers to each prompt, side by side."""
        if self.server is not None:
            return ask(self.server, self.server_model, batch, self.num_generations, self.max_completion_length)
        seed = self.seed * 1_000_003 + engine.steps_applied  # the same after a resume
        return generate(engine, batch, self.num_generations, self.max_completion_length, self.temperature, seed)

    def learn(self, engine: StreamingEngine, rollouts: Rollouts, rewards: torch.Tensor) -> StepResult:
        """Take one optimizer step on answers that were judged. rewards: one per answer."""
        batch = rollouts.batch(with_truncated=not self.mask_truncated_completions)
        mask = (batch["labels"] != -100).float()
        worth = advantages(rewards.view(-1, self.num_generations), self.scale_rewards).view(-1, 1)
        reference = self._reference_scores(engine, batch)
        metrics = rollouts.metrics() | {"reward/mean": float(rewards.mean()), "reward/std": float(rewards.std())}

        def objective(scores: torch.Tensor) -> torch.Tensor:
            old = rollouts.old_scores(scores.detach())
            losses = policy_loss(scores, old, worth, self.epsilon_low, self.epsilon_high)
            if reference is not None:
                apart = divergence(scores, reference)
                metrics["kl"] = float((apart.detach() * mask).sum() / mask.sum())
                weight = (scores - old).exp() if self.use_bias_correction_kl else 1.0
                losses = losses + self.beta * apart * weight
            return aggregate(losses, mask, self.loss_type, self.max_completion_length)

        return engine.step(batch, objective, temperature=self.temperature, metrics=metrics)

    def _reference_scores(self, engine: StreamingEngine, batch: dict[str, torch.Tensor]) -> torch.Tensor | None:
        if self.beta == 0:
            return None
        with engine.reference():
            return engine.scores(batch, temperature=self.temperature)


def advantages(rewards: torch.Tensor, scale: Scale = "group") -> torch.Tensor:
    """Return how much better each answer is than the others to its prompt. rewards: (prompts, answers).

    "group": divided by the standard deviation of the prompt's rewards, as in GRPO; "batch": of all rewards; "none": as
    in Dr. GRPO, arXiv:2503.20783, which found that dividing favours prompts that are very easy or very hard.
    """
    above = rewards - rewards.mean(1, keepdim=True)
    if scale == "none":
        return above
    spread = rewards.std(1, keepdim=True) if scale == "group" else rewards.std()
    return above / (spread + 1e-4)


def policy_loss(
    scores: torch.Tensor, old: torch.Tensor, worth: torch.Tensor, epsilon_low: float, epsilon_high: float
) -> torch.Tensor:
    """Return the clipped loss of each token, (B, T): PPO, arXiv:1707.06347, eq. 7, with DAPO's two bounds.

    scores, old: (B, T) log-probabilities of the tokens now, and when they were drawn. worth: (B, 1) advantages.
    """
    ratios = (scores - old).exp()
    return -torch.minimum(ratios * worth, ratios.clamp(1 - epsilon_low, 1 + epsilon_high) * worth)


def divergence(scores: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Return an estimate of the KL divergence from the reference per token, (B, T): GRPO, eq. 4."""
    less = reference - scores
    return less.exp() - less - 1


def aggregate(losses: torch.Tensor, mask: torch.Tensor, loss_type: LossType, max_length: int) -> torch.Tensor:
    """Return one loss from those of tokens, (B, T), of which `mask` counts.

    "grpo": the mean over answers of each one's mean. "dapo": the mean over all tokens, arXiv:2503.14476, eq. 8.
    "dr_grpo": the sum over all tokens, divided by what it would be at most, arXiv:2503.20783.
    """
    if loss_type == "grpo":
        return ((losses * mask).sum(1) / mask.sum(1).clamp(min=1)).mean()
    if loss_type == "dr_grpo":
        return (losses * mask).sum() / (len(losses) * max_length)
    return (losses * mask).sum() / mask.sum().clamp(min=1)
