"""What a step of training is, by kind of training: each a file to be read from top to bottom, and changed.

sft         supervised fine-tuning
pretrain    continued pre-training
dpo         preferences, directly
reward      a reward model from preferences
grpo        the model's own answers, judged by functions
rollouts    those answers, drawn from the streamed model
server      or from an OpenAI-compatible server
functions   what answers are worth
common      what several of them need

A recipe is a frozen dataclass of its settings, with `step(engine, batch) -> StepResult`. reads: of which data.
outputs: None for a language model, or what a classifier gives. needs_reference: asks the first weights, too.
"""

from megatrain.recipes.dpo import DPO
from megatrain.recipes.grpo import GRPO
from megatrain.recipes.pretrain import Pretrain
from megatrain.recipes.reward import Reward
from megatrain.recipes.sft import SFT

Recipe = SFT | Pretrain | DPO | Reward | GRPO

__all__ = ["DPO", "GRPO", "SFT", "Pretrain", "Recipe", "Reward"]
