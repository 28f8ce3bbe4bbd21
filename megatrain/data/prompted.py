"""Records that begin with a prompt → its text and that of the whole, and where what follows it begins in tokens.

The formats are those of TRL: a prompt is a string or a list of messages, and so is what follows it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import cast

import numpy as np
from transformers import PreTrainedTokenizerBase

from megatrain.data.chat import ChatRenderer
from megatrain.data.collate import Document
from megatrain.data.formats import Message, RecordError, Row, messages_in, short, string_in

Said = str | list[Message]


@dataclass(frozen=True)
class Prompted:
    """The text of a prompt, and the whole text that begins with it."""

    prompt: str
    whole: str


class PromptRenderer:
    """Renders prompts and what follows them: messages by a chat template, strings as they are.

    column: tells by the first row which of both this data has. All rows must be of that kind.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, chat_template: str | None, first_row: Row, column: str
    ) -> None:
        self.chats = isinstance(first_row.get(column), list)
        self._tokenizer = tokenizer
        self._render = ChatRenderer(tokenizer, chat_template) if self.chats else None
        if not self.chats:
            check_eos(tokenizer)

    def said(self, row: Row, column: str) -> Said:
        """Return what a column says."""
        return messages_in(row, column) if self.chats else string_in(row, column)

    def prompt(self, prompt: Said) -> str:
        """Return the text after which the model speaks."""
        if self._render is None:
            return cast(str, prompt)
        return self._render.text(cast("list[Message]", prompt), prompt=True)

    def whole(self, prompt: Said, rest: Said) -> Prompted:
        """Return the text of a prompt and of the whole; RecordError if that prompt is written otherwise."""
        if self._render is None:
            return Prompted(cast(str, prompt), cast(str, prompt) + cast(str, rest))
        asked, said = cast("list[Message]", prompt), cast("list[Message]", rest)
        text = self._render.text([*asked, *said])
        if not text.startswith(self._render.text(asked)):
            raise RecordError(
                "the chat template is not prefix-consistent: what follows changes how the prompt is written, so that "
                "the answer cannot be told from it; pass chat_template=…"
            )
        return Prompted(self.prompt(prompt), text)

    def encode_prompts(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of prompts."""
        # A chat template writes the special tokens itself.
        encoded = self._tokenizer(
            list(texts), add_special_tokens=not self.chats, return_attention_mask=False, verbose=False
        )
        return cast("list[list[int]]", encoded["input_ids"])

    def encode(self, items: Sequence[Prompted]) -> Iterator[tuple[list[int], int]]:
        """Yield the tokens of every whole, and how many of them are the prompt's.

        What follows begins where the tokens of the whole part from those of the prompt alone: a token that reaches
        over the end of a prompt is not the prompt's. Strings end with EOS, chats as their template ends them.
        """
        ids = self.encode_prompts([item.prompt for item in items] + [item.whole for item in items])
        for prompt, whole in zip(ids[: len(items)], ids[len(items) :], strict=True):
            closed = whole if self.chats else closed_by_eos(self._tokenizer, whole)
            yield closed, _shared(prompt, closed)


def pair_in(row: Row, render: PromptRenderer) -> tuple[Said, Said, Said]:
    """Return prompt, chosen and rejected; where two chats come without a prompt, it is what both begin with."""
    chosen, rejected = render.said(row, "chosen"), render.said(row, "rejected")
    if chosen == rejected:
        raise RecordError(f"'chosen' and 'rejected' must differ; both are {short(chosen)}")
    if not render.chats or isinstance(row.get("prompt"), list):
        return render.said(row, "prompt"), chosen, rejected
    shared = _shared(chosen, rejected)
    if not 0 < shared < min(len(chosen), len(rejected)):
        raise RecordError(
            "'chosen' and 'rejected' must begin with the same messages and end with others, or have a 'prompt' of "
            f"messages; they share {shared} of {len(chosen)} and {len(rejected)}"
        )
    return chosen[:shared], chosen[shared:], rejected[shared:]


def trained_after(ids: Sequence[int], start: int) -> Document:
    """Return tokens as a document that is trained from `start` on."""
    return np.array(ids, dtype=np.int32), np.arange(len(ids)) >= start


def closed_by_eos(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> list[int]:
    """Return tokens that end with EOS, as they are or with one more."""
    return ids if ids[-1:] == [tokenizer.eos_token_id] else [*ids, tokenizer.eos_token_id]


def check_eos(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ValueError for a tokenizer that cannot end a text."""
    if tokenizer.eos_token_id is None:
        raise ValueError("raw text needs an end-of-sequence token, and the tokenizer has none; set tokenizer.eos_token")


def _shared(one: Sequence[object], other: Sequence[object]) -> int:
    """Return how many items both begin with."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
