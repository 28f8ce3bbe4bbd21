"""Tells the assistant's turns from the rest of a chat whose template does not mark them.

A turn is what a chat gains over its prompt when that turn is added. Many templates dress the last answer otherwise
than the ones before it: an empty thinking block in the prompt or the answer (Qwen3, Qwen3.5), another token at the
end (gpt-oss), an EOS after the chat (Phi-3). So a small chat, with contents that stand out, shows once how
the template writes an answer that is not the last.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Protocol

from megatrain.data.formats import Message

Span = tuple[int, int]  # characters, end excluded

PROBE: list[Message] = [
    {"role": "user", "content": "probequestionone"},
    {"role": "assistant", "content": "probeanswerone"},
    {"role": "user", "content": "probequestiontwo"},
    {"role": "assistant", "content": "probeanswertwo"},
]


class Render(Protocol):
    """Returns the text of messages, with the start of an answer after them if `prompt`."""

    def __call__(self, messages: list[Message], prompt: bool = False) -> str: ...


@dataclass(frozen=True)
class InnerTurn:
    """How a template writes an answer that is not the last: header (not trained), lead, content, end."""

    header: str
    lead: str
    end: str


class TurnFinder:
    """Finds the trained spans of a chat, or raises ValueError; it never guesses."""

    def __init__(self, render: Render, added_tokens: Sequence[str]) -> None:
        self._render = render
        self._added_tokens = tuple(added_tokens)
        self._inner = self._learn()

    def spans(self, text: str, messages: list[Message]) -> Iterator[Span]:
        """Yield the assistant turns of a chat that renders as `text`, without white space after their ends."""
        for index, message in enumerate(messages):
            if message["role"] == "assistant":
                start, end = self._turn(text, messages, index)
                yield start, self._without_space(text, start, end)

    def _learn(self) -> InnerTurn:
        text = self._render(PROBE)
        lost = [message["content"] for message in PROBE if text.count(message["content"]) != 1]
        if lost:
            raise ValueError(f"the chat template must write every message once, as plain text; not so for {lost}")
        before, prompt = self._render(PROBE[:1]), self._render(PROBE[:1], prompt=True)
        shared = _shared_prefix(prompt, text)
        lead, _, after = text[len(shared) :].partition(PROBE[1]["content"])
        header = shared.removeprefix(before) if shared.startswith(before) else ""
        return InnerTurn(header, lead, leading_token(after, self._added_tokens))

    def _turn(self, text: str, messages: list[Message], index: int) -> Span:
        """Return the span of one answer: the whole gain over its prompt, or else an inner turn's usual form."""
        start = self._start(text, messages[:index])
        closed = self._render(messages[: index + 1])
        if start is not None and len(closed) > start and text.startswith(closed):
            return start, len(closed)
        inner = self._inner.lead + messages[index]["content"].strip() + self._inner.end
        if start is None or not self._inner.end or not text.startswith(inner, start):
            raise ValueError(
                f"the chat template is not prefix-consistent: message {index + 1} changes what stands before it, so "
                "what the assistant said cannot be told from the rest; pass chat_template=… with {% generation %}"
            )
        return start, start + len(inner)

    def _start(self, text: str, messages: list[Message]) -> int | None:
        """Return where the answer to `messages` begins in `text`: after the prompt, or after the bare header."""
        prompt = self._render(messages, prompt=True)
        if text.startswith(prompt):
            return len(prompt)
        opening = self._render(messages) + self._inner.header
        return len(opening) if self._inner.header and text.startswith(opening) else None

    def _without_space(self, text: str, start: int, end: int) -> int:
        """Return the end of a turn without what templates put after an end-of-turn token: nobody says that."""
        said = text[start:end].rstrip()
        return start + len(said) if said.endswith(self._added_tokens) else end


def _shared_prefix(one: str, other: str) -> str:
    return one[: sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))]


def leading_token(text: str, added_tokens: Sequence[str]) -> str:
    """Return the added token that `text` begins with, with white space before it, or "" if there is none."""
    space = text[: len(text) - len(text.lstrip())]
    return next((space + token for token in added_tokens if text.startswith(space + token)), "")
