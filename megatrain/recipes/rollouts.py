"""Answers to prompts, drawn from the model in training, and what a step of training needs of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from megatrain.data import PromptBatch, TokenBatch
from megatrain.data.collate import padded_rows
from megatrain.engine import StreamingEngine


@dataclass(frozen=True)
class Answer:
    """ids: its tokens, the one that ends it included. ended: whether there is one.

    scores: the log-probability of each when it was drawn, where the weights are not known to be the same; else None.
    """

    ids: list[int]
    ended: bool
    scores: list[float] | None = None


@dataclass(frozen=True)
class Rollouts:
    """prompts: the tokens of each, once per answer. completions: what the answers say, as reward functions get it."""

    prompts: list[list[int]]
    answers: list[Answer]
    completions: list[Any]
    per_prompt: int
    pad_token_id: int

    def batch(self, *, with_truncated: bool = True) -> TokenBatch:
        """Return prompt and answer per row: input_ids, labels, attention_mask; only answers are trained.

        with_truncated: also those that did not end.
        """
        documents = []
        for prompt, answer in zip(self.prompts, self.answers, strict=True):
            ids = np.array([*prompt, *answer.ids], dtype=np.int32)
            documents.append((ids, (np.arange(len(ids)) >= len(prompt)) & (with_truncated or answer.ended)))
        return padded_rows(documents, self.pad_token_id)

    def old_scores(self, scores: torch.Tensor) -> torch.Tensor:
        """Return scores (B, T) of the batch, with those from when an answer was drawn in their places."""
        old = scores.clone()
        for row, (prompt, answer) in enumerate(zip(self.prompts, self.answers, strict=True)):
            if answer.scores is not None:
                old[row, len(prompt) : len(prompt) + len(answer.ids)] = torch.tensor(answer.scores)
        return old

    def metrics(self) -> dict[str, float]:
        """Return how long the answers are, and how many did not end."""
        lengths = [len(answer.ids) for answer in self.answers]
        truncated = sum(not answer.ended for answer in self.answers)
        return {
            "completions/mean_length": sum(lengths) / len(lengths),
            "completions/truncated": truncated / len(lengths),
        }


def generate(
    engine: StreamingEngine, batch: PromptBatch, per_prompt: int, max_tokens: int, temperature: float, seed: int
) -> Rollouts:
    """Draw `per_prompt` answers to each prompt from the model as it is, by Hugging Face's own `generate`.

    temperature: 0 takes the likeliest token each time.
    """
    with engine.inference() as model, _seeded(model.device, seed):
        ends = end_tokens(model, batch)
        drawn = model.generate(
            input_ids=batch.input_ids.to(model.device),
            attention_mask=batch.attention_mask.to(model.device),
            **_drawing(temperature),
            max_new_tokens=max_tokens,
            num_return_sequences=per_prompt,
            eos_token_id=ends,
            pad_token_id=batch.pad_token_id,
        )
    new = drawn[:, batch.input_ids.shape[1] :].tolist()
    return rollouts_of(batch, [_answer(ids, ends) for ids in new], per_prompt)


def rollouts_of(batch: PromptBatch, answers: list[Answer], per_prompt: int) -> Rollouts:
    """Return answers, those to one prompt side by side, with their prompts."""
    kept = zip(batch.input_ids, batch.attention_mask, strict=True)
    prompts = [ids[mask == 1].tolist() for ids, mask in kept for _ in range(per_prompt)]
    said = batch.tokenizer.batch_decode([answer.ids for answer in answers], skip_special_tokens=True)
    chat = isinstance(batch.prompts[0], list)
    completions = [[{"role": "assistant", "content": text}] for text in said] if chat else said
    return Rollouts(prompts, answers, completions, per_prompt, batch.pad_token_id)


def end_tokens(model: Any, batch: PromptBatch) -> list[int]:
    """Return the tokens that end an answer, by the model's and by the tokenizer's account."""
    own = model.generation_config.eos_token_id
    found = {batch.tokenizer.eos_token_id, *(own if isinstance(own, list) else [own])}
    return sorted(token for token in found if token is not None)


def _answer(ids: Sequence[int], ends: Sequence[int]) -> Answer:
    """Return a row of what was drawn, without what pads it after its end."""
    for position, token in enumerate(ids):
        if token in ends:
            return Answer(list(ids[: position + 1]), ended=True)
    return Answer(list(ids), ended=False)


def _drawing(temperature: float) -> dict[str, Any]:
    if temperature == 0:
        return {"do_sample": False, "temperature": None, "top_k": None, "top_p": None}
    # From the whole distribution, or the scores would be those of another one.
    whole = {"top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0}
    return {"do_sample": True, "temperature": temperature, **whole}


@contextmanager
def _seeded(device: torch.device, seed: int) -> Iterator[None]:
    """Within, torch draws from a seed of its own; afterwards as if nothing had been drawn."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield
