"""The losses of recipes: against numbers by hand, and their properties. Whole steps are compared with TRL elsewhere."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain.recipes import DPO, GRPO, Reward
from megatrain.recipes.common import pair_metrics
from megatrain.recipes.dpo import dpo_loss
from megatrain.recipes.grpo import advantages, aggregate, divergence, policy_loss
from megatrain.recipes.reward import reward_loss

RATIOS = torch.tensor([2.0, -1.0, 1.0, 0.0])  # chosen, chosen, rejected, rejected: margins 1 and −1
TOKENS = torch.tensor([2, 1, 4, 1])


def softplus(x: float) -> float:
    return math.log1p(math.exp(x))


def test_dpo_by_hand() -> None:
    assert dpo_loss(RATIOS, TOKENS, 0.5).item() == pytest.approx((softplus(-0.5) + softplus(0.5)) / 2)
    assert dpo_loss(RATIOS, TOKENS, 0.5, "hinge").item() == pytest.approx((0.5 + 1.5) / 2)
    # means over tokens: 1 and −1 against 0.25 and 0; margins 0.75 and −1, each to be 1 / (2 · 0.5) = 1
    assert dpo_loss(RATIOS, TOKENS, 0.5, "ipo").item() == pytest.approx((0.0625 + 4) / 2)
    right, wrong = (softplus(-0.5) + softplus(0.5)) / 2, (softplus(0.5) + softplus(-0.5)) / 2
    expected = (0.9 * right - 0.1 * wrong) / 0.8
    assert dpo_loss(RATIOS, TOKENS, 0.5, "robust", 0.1).item() == pytest.approx(expected)


@settings(deadline=None)
@given(st.lists(st.floats(-20, 20, width=32), min_size=2, max_size=12), st.floats(0.01, 2))
def test_without_wrong_labels_robust_is_plain(values: list[float], beta: float) -> None:
    ratios = torch.tensor(values[: len(values) // 2 * 2])
    tokens = torch.ones(len(ratios))
    torch.testing.assert_close(dpo_loss(ratios, tokens, beta, "robust"), dpo_loss(ratios, tokens, beta))


def test_at_the_reference_dpo_is_the_logarithm_of_two_and_favours_the_chosen() -> None:
    ratios = torch.zeros(4, requires_grad=True)
    loss = dpo_loss(ratios, torch.ones(4), beta=0.1)
    loss.backward()  # type: ignore[no-untyped-call]
    assert loss.item() == pytest.approx(math.log(2))
    assert ratios.grad is not None
    torch.testing.assert_close(ratios.grad, torch.tensor([-0.025, -0.025, 0.025, 0.025]))


def test_reward_by_hand() -> None:
    assert reward_loss(RATIOS).item() == pytest.approx((softplus(-1) + softplus(1)) / 2)
    assert reward_loss(RATIOS, 0.1).item() == pytest.approx((softplus(-1) + softplus(1)) / 2 + 0.1 * (9 + 1) / 2)
    assert pair_metrics(RATIOS) == {
        "rewards/chosen": 0.5,
        "rewards/rejected": 0.5,
        "rewards/accuracies": 0.5,
        "rewards/margins": 0.0,
    }


REWARDS = torch.tensor([[0.0, 1.0], [3.0, 3.0]])


def test_advantages_by_hand() -> None:
    above, spread = 0.5, math.sqrt(0.5)
    torch.testing.assert_close(advantages(REWARDS, "none"), torch.tensor([[-0.5, 0.5], [0.0, 0.0]]))
    scaled = above / (spread + 1e-4)
    torch.testing.assert_close(advantages(REWARDS, "group"), torch.tensor([[-scaled, scaled], [0.0, 0.0]]))
    scaled = above / (1.5 + 1e-4)  # the standard deviation of 0, 1, 3, 3
    torch.testing.assert_close(advantages(REWARDS, "batch"), torch.tensor([[-scaled, scaled], [0.0, 0.0]]))


@pytest.mark.parametrize(
    ("ratio", "worth", "loss"),
    [(1.0, 2.0, -2.0), (1.5, 2.0, -2.6), (1.5, -2.0, 3.0), (0.5, 2.0, -1.0), (0.5, -2.0, 1.6)],
)
def test_ratios_are_clipped_where_that_is_the_worse(ratio: float, worth: float, loss: float) -> None:
    scores = torch.tensor([[math.log(ratio)]])
    found = policy_loss(scores, torch.zeros(1, 1), torch.tensor([[worth]]), 0.2, 0.3)
    assert found.item() == pytest.approx(loss)


def test_divergence_by_hand() -> None:
    assert divergence(torch.tensor(-1.0), torch.tensor(-1.0)).item() == 0
    assert divergence(torch.tensor(-1.0), torch.tensor(-2.0)).item() == pytest.approx(math.exp(-1))
    assert divergence(torch.tensor(-2.0), torch.tensor(-1.0)).item() == pytest.approx(math.e - 2)


def test_aggregates_by_hand() -> None:
    losses = torch.tensor([[1.0, 9.0, 9.0], [1.0, 2.0, 6.0]])
    mask = torch.tensor([[1.0, 0.0, 0.0], [1.0, 1.0, 1.0]])
    assert aggregate(losses, mask, "grpo", 5).item() == pytest.approx((1 + 3) / 2)
    assert aggregate(losses, mask, "dapo", 5).item() == pytest.approx(10 / 4)
    assert aggregate(losses, mask, "dr_grpo", 5).item() == pytest.approx(10 / 10)


def test_an_answer_that_trains_nothing_makes_no_nan() -> None:
    for loss_type in ("grpo", "dapo", "dr_grpo"):
        assert aggregate(torch.ones(1, 2), torch.zeros(1, 2), loss_type, 5).item() == 0  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "rule"),
    [
        (lambda: DPO(beta=0), "beta must be above 0; got 0"),
        (lambda: DPO(label_smoothing=0.5), "label_smoothing must be from 0 to below 0.5; got 0.5"),
        (lambda: DPO(label_smoothing=0.1), "label_smoothing is for loss_type \"robust\" only; .* got 'sigmoid'"),
        (lambda: Reward(center_rewards_coefficient=-1), "center_rewards_coefficient must be at least 0; got -1"),
        (lambda: GRPO(num_generations=1), "num_generations must be at least 2, to be compared; got 1"),
        (lambda: GRPO(max_completion_length=0), "max_completion_length must be at least 1; got 0"),
        (lambda: GRPO(temperature=0), "temperature must be above 0; got 0"),
        (lambda: GRPO(epsilon_low=0), "epsilon_low must be above 0 and at most 1; got 0"),
        (lambda: GRPO(beta=-1), "beta must be at least 0; got -1"),
        (lambda: GRPO(rewards=["a:b"], reward_weights=[1, 2]), r"one of reward_weights for each reward; got \[1, 2\]"),
        (lambda: GRPO(server="http://x", temperature=0.5), "temperature must be 1 with a server, .*; got 0.5"),
    ],
)
def test_settings_are_checked(make: object, rule: str) -> None:
    assert callable(make)
    with pytest.raises(ValueError, match=rule):
        make()
