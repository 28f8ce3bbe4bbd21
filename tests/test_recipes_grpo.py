"""GRPO beside TRL's trainer, on the same answers: the same losses, gradients and weights."""

from __future__ import annotations

from itertools import count, cycle
from pathlib import Path
from typing import Any

import pytest
from beside_trl import Outcome, require_same, run_engine, run_trl, save_models, sentence, write_rows
from trl_runs import ANSWER, Case, answers, column_of, short_and_low

from megatrain import StreamingEngine
from megatrain.anatomy.load import load_tokenizer
from megatrain.data import Batches, load_records, tokenize_prompts
from megatrain.engine import StepResult
from megatrain.recipes import GRPO
from megatrain.recipes.functions import total_rewards
from megatrain.recipes.rollouts import Answer, rollouts_of

PROMPTS, BATCH, MICRO_BATCH, EACH = 40, 4, 5, 3

CASES: dict[str, tuple[str, dict[str, Any]]] = {  # model, options that both sides have
    "dapo": ("llama", {}),
    "grpo, with a reference": ("qwen3", {"loss_type": "grpo", "beta": 2.0, "scale_rewards": "batch"}),
    "grpo, KL as in its paper": ("llama", {"loss_type": "grpo", "beta": 2.0, "use_bias_correction_kl": False}),
    "dr_grpo, not scaled": ("llama", {"loss_type": "dr_grpo", "scale_rewards": "none", "temperature": 0.7}),
    "dapo, only what ended": ("qwen3", {"beta": 1.0, "mask_truncated_completions": True, "temperature": 1.3}),
    "two rewards, weighted": ("llama", {"reward_weights": [1.0, 0.25]}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("grpo")
    save_models(folder)
    rows = [{"prompt": sentence(n, 1 + n % 6), "target": n % 4 * 10} for n in range(PROMPTS)]
    write_rows(folder / "prompts.jsonl", rows)
    return folder


@pytest.fixture(scope="module")
def trl(folder: Path) -> dict[str, Outcome]:
    options = {
        "per_device_train_batch_size": BATCH * EACH,
        "num_generations": EACH,
        "max_completion_length": ANSWER,
        "shuffle_dataset": False,
    }
    records = str(folder / "prompts.jsonl")
    return run_trl(
        folder,
        [Case(name, "GRPO", str(folder / model), records, options | shared) for name, (model, shared) in CASES.items()],
    )


@pytest.mark.parametrize("name", CASES)
def test_the_same_as_trl(name: str, folder: Path, trl: dict[str, Outcome]) -> None:
    model, options = CASES[name]
    recipe = GRPO(num_generations=EACH, max_completion_length=ANSWER, rewards=["a:a", "b:b"], **options)
    data = load_records(folder / "prompts.jsonl", cache_dir=folder)
    batches = cycle(Batches(tokenize_prompts(data, load_tokenizer(folder / model), 64), BATCH, shuffle=False))
    steps = count()

    def step(engine: StreamingEngine) -> StepResult:
        batch = next(batches)
        end = int(batch.tokenizer.eos_token_id)
        drawn = [Answer(ids, ended=ids[-1] == end) for ids in answers(next(steps), BATCH, EACH, end)]
        rollouts = rollouts_of(batch, drawn, EACH)
        rewards = total_rewards([short_and_low, column_of], recipe.reward_weights, batch, rollouts)
        return recipe.learn(engine, rollouts, rewards)

    ours = run_engine(folder / model, step, micro_batch_size=MICRO_BATCH, keep_reference=recipe.beta > 0)
    require_same(f"GRPO, {model}: {name}", ours, trl[name])
