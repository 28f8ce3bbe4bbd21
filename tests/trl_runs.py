"""Trains with TRL what a folder asks for, and leaves what came of it; in a process of its own, for TRL warns a lot.

python trl_runs.py FOLDER: FOLDER/cases.json is a list of `Case` as objects. For each, NAME.json gets the losses of
all steps, NAME.gradients.safetensors the clipped gradients of the first, NAME.weights.safetensors the last weights.
"""

from __future__ import annotations

import json
import random
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

STEPS = 10
ANSWER = 12  # tokens of an answer, at most
TRAINING = {
    "learning_rate": 1e-3,
    "weight_decay": 0.1,
    "max_grad_norm": 0.5,  # norms here are above it
    "max_steps": STEPS,
    "lr_scheduler_type": "constant",
    "optim": "adamw_torch",
    "train_sampling_strategy": "sequential",
    "bf16": False,
    "use_cpu": True,
    "gradient_checkpointing": False,
    "report_to": "none",
    "save_strategy": "no",
    "logging_strategy": "no",
    "disable_tqdm": True,
}


@dataclass(frozen=True)
class Case:
    """trainer: "SFT", ...; model, records: a folder and a file of JSON lines; options: of TRL's configuration."""

    name: str
    trainer: str
    model: str
    records: str
    options: dict[str, Any] = field(default_factory=dict)

    def paths(self, folder: Path) -> tuple[Path, Path, Path]:
        return tuple(folder / f"{self.name}.{end}" for end in ("json", "gradients.safetensors", "weights.safetensors"))  # type: ignore[return-value]


def write_cases(folder: Path, cases: list[Case]) -> None:
    (folder / "cases.json").write_text(json.dumps([asdict(case) for case in cases]))


def main(folder: Path) -> None:
    for case in json.loads((folder / "cases.json").read_text()):
        run(folder, Case(**case))


def run(folder: Path, case: Case) -> None:
    import trl
    from safetensors.torch import save_file

    losses, gradients, weights = case.paths(folder)
    config = getattr(trl, f"{case.trainer}Config")(str(folder / "trl"), **{**TRAINING, **case.options})
    trainer = recording(getattr(trl, f"{case.trainer}Trainer"))(args=config, **inputs(case))
    trainer.train()
    losses.write_text(json.dumps(trainer.losses))
    save_file(trainer.first_gradients, gradients)
    save_file(copies(trainer.model.state_dict()), weights)


def inputs(case: Case) -> dict[str, Any]:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

    rows = [json.loads(line) for line in Path(case.records).read_text().splitlines()]
    kind = AutoModelForSequenceClassification if case.trainer == "Reward" else AutoModelForCausalLM
    return {
        "model": kind.from_pretrained(case.model),
        "processing_class": AutoTokenizer.from_pretrained(case.model),
        "train_dataset": Dataset.from_list(rows),
        **({"reward_funcs": [short_and_low, column_of], "rollout_func": roll_out} if case.trainer == "GRPO" else {}),
    }


def answers(step: int, prompts: int, per_prompt: int, ends: int) -> list[list[int]]:
    """Answers that nobody drew: the same for both sides. Every third has no end."""
    draw = random.Random(step)
    found = [[draw.randrange(20, 300) for _ in range(draw.randrange(1, ANSWER))] for _ in range(prompts * per_prompt)]
    return [ids if number % 3 == 0 else [*ids, ends] for number, ids in enumerate(found)]


def roll_out(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """TRL's rollout_func: `prompts` has each prompt once per answer already."""
    tokenizer, per_prompt = trainer.processing_class, trainer.num_generations
    drawn = answers(trainer.state.global_step, len(prompts) // per_prompt, per_prompt, tokenizer.eos_token_id)
    return {"prompt_ids": [tokenizer(text)["input_ids"] for text in prompts], "completion_ids": drawn, "logprobs": None}


def short_and_low(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """A reward function: low token ids are good, length is bad."""
    return [sum(token < 150 for token in ids) / len(ids) - len(ids) / ANSWER for ids in completion_ids]


def column_of(completions: list[str], target: list[int], **_: Any) -> list[float | None]:
    """A reward function with a column of the data, which has nothing to say of some answers."""
    return [None if goal == 0 else -abs(len(said) - goal) / 10 for said, goal in zip(completions, target, strict=True)]


def recording(trainer: Any) -> Any:
    """A trainer class that also notes each step's loss and the first step's gradients."""

    class Recording(trainer):  # type: ignore[misc]
        def __init__(self, **arguments: Any) -> None:
            super().__init__(**arguments)
            self.losses: list[float] = []
            self.first_gradients: dict[str, Any] = {}

        def training_step(self, *arguments: Any, **options: Any) -> Any:
            loss = super().training_step(*arguments, **options)
            self.losses.append(float(loss))
            return loss

        def create_optimizer(self, *arguments: Any) -> Any:
            optimizer = super().create_optimizer(*arguments)
            optimizer.register_step_pre_hook(lambda *_: self.note_gradients())
            return optimizer

        def note_gradients(self) -> None:
            if not self.first_gradients:
                named = self.model.named_parameters()
                self.first_gradients = copies({name: p.grad for name, p in named if p.grad is not None})

    return Recording


def copies(tensors: dict[str, Any]) -> dict[str, Any]:
    return {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
