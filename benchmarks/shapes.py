"""Llama shapes, and batches to train models of such shapes on: a process that only names one need not load models."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import LlamaConfig

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Shape:
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocab: int
    tied: bool = False

    def with_layers(self, layers: int) -> Shape:
        return replace(self, layers=layers)

    @property
    def layer_parameters(self) -> int:
        head_dim = self.hidden // self.heads
        attention = 2 * self.hidden * self.hidden + 2 * self.hidden * self.kv_heads * head_dim
        return attention + 3 * self.hidden * self.intermediate + 2 * self.hidden

    @property
    def shell_parameters(self) -> int:
        return self.vocab * self.hidden * (1 if self.tied else 2) + self.hidden

    @property
    def parameters(self) -> int:
        return self.layers * self.layer_parameters + self.shell_parameters

    def config(self) -> LlamaConfig:
        from transformers import LlamaConfig

        return LlamaConfig(
            hidden_size=self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            intermediate_size=self.intermediate,
            vocab_size=self.vocab,
            tie_word_embeddings=self.tied,
            max_position_embeddings=1 << 17,
            use_cache=False,
            attn_implementation="sdpa",
        )


LLAMA = {
    "1b": Shape(2048, 16, 32, 8, 8192, 128_256, tied=True),
    "4b": Shape(3072, 36, 24, 8, 8192, 128_256, tied=True),
    "8b": Shape(4096, 32, 32, 8, 14_336, 128_256),
}
TINY = Shape(64, 4, 4, 2, 128, 256)


def batches(vocab: int, rows: int, tokens: int, seed: int = 0) -> Iterator[Batch]:
    """Endless batches (rows, tokens) whose ids follow Zipf's law, so that there is something to learn."""
    generator = torch.Generator().manual_seed(seed)
    frequencies = 1 / torch.arange(1, vocab + 1, dtype=torch.float64)
    while True:
        ids = torch.multinomial(frequencies, rows * tokens, replacement=True, generator=generator).view(rows, tokens)
        yield {"input_ids": ids, "labels": ids.clone()}
