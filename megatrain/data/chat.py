"""A chat → its text by the tokenizer's own template, and the spans of it that are trained.

Spans are found in characters, and tokens are assigned to spans by their offsets. The whole chat is tokenised at
once, so the ids are those of `tokenizer.apply_chat_template`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jinja2
import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from megatrain.data.formats import Message, RecordError
from megatrain.data.turns import PROBE, Span, TurnFinder, leading_token

PLAIN_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'assistant' %}"
    "Assistant: {% generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}{{ '\\n\\n' }}"
    "{% else %}{{ message.role | capitalize }}: {{ message.content }}{{ '\\n\\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}Assistant: {% endif %}"
)
"""For base models, whose tokenizers have no template: plain words and the tokenizer's own EOS, no new tokens."""

_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


@dataclass(frozen=True)
class RenderedChat:
    """What a template makes of a chat. spans: what is trained, in order, disjoint."""

    text: str
    spans: tuple[Span, ...]


class ChatRenderer:
    """Renders chats and marks every assistant turn, its end-of-turn token included, and nothing else.

    A template with {% generation %} marks the turns itself; that is tried on a small chat before it is believed.
    For any other template, `TurnFinder` tells the turns from what is around them.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, chat_template: str | None) -> None:
        self._template = _template_of(tokenizer, chat_template)
        self._special_tokens = dict(tokenizer.special_tokens_map)
        self._added_tokens = sorted(tokenizer.get_added_vocab(), key=len, reverse=True)
        if _GENERATION.search(self._template):
            self._finder = None
            self._unmarked_end = self._checked_unmarked_end()
        else:
            self._finder = TurnFinder(self.text, self._added_tokens)

    def __call__(self, messages: list[Message]) -> RenderedChat:
        """Return the text and trained spans of a chat; raise RecordError where the template refuses it."""
        if self._finder:
            text = self.text(messages)
            return RenderedChat(text, tuple(self._finder.spans(text, messages)))
        text, marked = self._render(messages, marked=True)
        closing = self._unmarked_end
        spans = ((start, end + len(closing) * text.startswith(closing, end)) for start, end in marked)
        return RenderedChat(text, tuple(spans))

    def text(self, messages: list[Message], prompt: bool = False) -> str:
        """Return messages as the template writes them, with the start of an answer after them if `prompt`."""
        return self._render(messages, prompt=prompt)[0]

    def _render(self, messages: list[Message], *, prompt: bool = False, marked: bool = False) -> tuple[str, list[Span]]:
        """Return the text and, if `marked`, the spans within {% generation %}."""
        try:
            texts, spans = render_jinja_template(
                conversations=[messages],
                chat_template=self._template,
                return_assistant_tokens_mask=marked,
                add_generation_prompt=prompt,
                **self._special_tokens,
            )
        except jinja2.TemplateError as error:
            raise RecordError(f"the chat template refuses the messages: {error}") from error
        return texts[0], spans[0] if marked else []

    def _checked_unmarked_end(self) -> str:
        """Return the end-of-turn token that the template leaves unmarked, or ""; check that the rest is marked.

        Many templates put only the content between the {% generation %} tags, though the model must learn to stop.
        """
        text, spans = self._render(PROBE, marked=True)
        marked = "".join(text[start:end] for start, end in spans)
        if [message["content"] in marked for message in PROBE] != [False, True, False, True]:
            raise ValueError(
                "{% generation %} in the chat template must mark every assistant turn and no other; of the turns "
                f"{[message['content'] for message in PROBE]} it marks {marked!r}. Pass a corrected chat_template=…"
            )
        text, spans = self._render(PROBE[:2], marked=True)
        said, rest = text[: spans[-1][1]], text[spans[-1][1] :]
        return "" if said.endswith(tuple(self._added_tokens)) else leading_token(rest, self._added_tokens)


def _template_of(tokenizer: PreTrainedTokenizerBase, chat_template: str | None) -> str:
    if not tokenizer.is_fast:
        raise ValueError(f"chats need a fast tokenizer, which gives offsets; {type(tokenizer).__name__} is not one")
    if chat_template is None and not tokenizer.chat_template:
        raise ValueError(
            "the tokenizer has no chat template; set model.chat_template to a file with one, or for a base model to "
            "plain (in Python pass chat_template=…, such as data.PLAIN_CHAT_TEMPLATE)"
        )
    template: str = tokenizer.get_chat_template(chat_template)
    return template


def trained_tokens(offsets: Sequence[Any], spans: Sequence[Span]) -> npt.NDArray[np.bool_]:
    """Return which tokens have at least one character in `spans`, as transformers counts them.

    So a first word that the tokenizer joins to a space of the template is not lost.

    offsets: (N, 2) first and last + 1 character of each token. Some tokenizers give a token of white space no
        characters (ByteLevel with trim_offsets); it has those from the end of the token before it.
    """
    starts, ends = np.asarray(offsets, dtype=np.int64).reshape(-1, 2).T
    starts = np.where(starts == ends, np.minimum(starts, np.roll(ends, 1)), starts)
    trained = np.zeros(len(starts), dtype=np.bool_)
    for start, end in spans:
        if start < end:
            trained |= (starts < end) & (start < ends)
    return trained
