"""PromptRenderer for a model to answer, with what a reward function needs to judge the answers."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedTokenizerBase

from megatrain.data.collate import Indices, TokenIds, left_padded_rows
from megatrain.data.documents import Counts
from megatrain.data.formats import Row
from megatrain.data.prompted import PromptRenderer, Said
from megatrain.data.reading import check_reading, in_batches, pad_token_id, usable
from megatrain.data.records import OnBadRecord, Records


@dataclass(frozen=True)
class PromptBatch:
    """B prompts. input_ids, attention_mask: (B, T) int64, padded on the left. prompts: as the records have them.

    columns: what else the records hold, by name, a value per prompt. tokenizer: that made and can read tokens of them.
    """

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    prompts: list[Said]
    columns: dict[str, list[Any]]
    tokenizer: PreTrainedTokenizerBase

    @property
    def pad_token_id(self) -> int:
        """The token that fills up rows."""
        return pad_token_id(self.tokenizer)


@dataclass(frozen=True)
class Prompts:
    """Tokenised prompts. token_ids: (N,) int32; prompt p is token_ids[starts[p] : starts[p + 1]].

    rows: the records that they are of, prompt for prompt. origin: where those were read from, for people.
    """

    token_ids: TokenIds
    starts: npt.NDArray[np.int64]
    rows: Sequence[Row]
    tokenizer: PreTrainedTokenizerBase
    counts: Counts
    origin: str = ""

    @cached_property
    def content(self) -> str:
        """A checksum (BLAKE2b) of every token, of where prompts begin, and of what else the records hold."""
        digest = blake2b(digest_size=16)
        for values in (self.token_ids, self.starts):
            digest.update(np.ascontiguousarray(values).data)
        for row in self.rows:
            digest.update(repr(sorted(row.items())).encode("utf-8", "surrogatepass"))
        return digest.hexdigest()

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def tokens(self) -> int:
        """How many tokens there are in all."""
        return len(self.token_ids)

    def prompt(self, index: int) -> TokenIds:
        """Return the tokens of a prompt."""
        return self.token_ids[self.starts[index] : self.starts[index + 1]]

    def batch(self, items: Indices) -> PromptBatch:
        """Return the named prompts as one batch."""
        padded = left_padded_rows([self.prompt(item) for item in items], pad_token_id(self.tokenizer))
        rows = [self.rows[int(item)] for item in items]
        names = [name for name in self.rows[0] if name != "prompt"]
        columns = {name: [row.get(name) for row in rows] for name in names}
        prompts = [row["prompt"] for row in rows]
        return PromptBatch(padded["input_ids"], padded["attention_mask"], prompts, columns, self.tokenizer)


def tokenize_prompts(
    records: Records,
    tokenizer: PreTrainedTokenizerBase,
    seq_len: int,
    *,
    chat_template: str | None = None,
    on_bad_record: OnBadRecord = "error",
) -> Prompts:
    """Tokenise prompts of at most `seq_len` tokens; longer ones are rejected and counted.

    Chats end where the template lets an answer begin. on_bad_record: a record that cannot be used is refused by number,
    or skipped and counted.
    """
    check_reading(records, ("prompt",), seq_len, on_bad_record)
    counts = Counts(skipped=records.skipped)
    render = PromptRenderer(tokenizer, chat_template, records.rows[0], "prompt")
    texts = usable(records, partial(_to_text, render), on_bad_record, counts)
    token_ids, starts, rows = array("i"), array("q", [0]), list[Row]()
    for row, ids in in_batches(texts, partial(_encode, render)):
        counts.records += 1
        if len(ids) > seq_len:
            counts.rejected += 1
            continue
        token_ids.extend(ids)
        starts.append(len(token_ids))
        rows.append(row)
    counts.documents, counts.tokens = len(rows), len(token_ids)
    if not rows:
        raise ValueError(f"no prompt is left to answer: {counts}")
    flat, begins = np.frombuffer(token_ids, dtype=np.int32), np.frombuffer(starts, dtype=np.int64)
    return Prompts(flat, begins, rows, tokenizer, counts, records.origin)


def _to_text(render: PromptRenderer, row: Row) -> tuple[Row, str]:
    return row, render.prompt(render.said(row, "prompt"))


def _encode(render: PromptRenderer, items: Sequence[tuple[Row, str]]) -> list[tuple[Row, list[int]]]:
    return list(zip([row for row, _ in items], render.encode_prompts([text for _, text in items]), strict=True))
