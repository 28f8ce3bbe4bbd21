"""Records → `TokenizedDataset`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Literal, get_args

import numpy as np
from transformers import PreTrainedTokenizerBase

from megatrain.data.chat import ChatRenderer, RenderedChat, trained_tokens
from megatrain.data.collate import Document
from megatrain.data.documents import Counts, DocumentStore, TokenizedDataset, TooLong
from megatrain.data.formats import Format, Message, Row, messages_in, to_messages, to_text
from megatrain.data.prompted import Prompted, PromptRenderer, check_eos, closed_by_eos, trained_after
from megatrain.data.reading import check_reading, in_batches, pad_token_id, usable
from megatrain.data.records import OnBadRecord, Records

LossOn = Literal["assistant", "completion", "all"]

LOSS_ON: dict[Format, tuple[LossOn, ...]] = {
    "text": ("all",),
    "alpaca": ("assistant", "all"),
    "messages": ("assistant", "all"),
    "sharegpt": ("assistant", "all"),
    "completion": ("completion", "assistant", "all"),
}
"""What each format can train; the first is what it does unless told otherwise."""


def tokenize(
    records: Records,
    tokenizer: PreTrainedTokenizerBase,
    seq_len: int,
    *,
    too_long: TooLong | None = None,
    loss_on: LossOn | None = None,
    pack: bool = True,
    chat_template: str | None = None,
    on_bad_record: OnBadRecord = "error",
) -> TokenizedDataset:
    """Tokenise records into documents of at most `seq_len` tokens.

    Raw text: the tokenizer's own special tokens, EOS at the end, all trained. Chats: the tokenizer's chat template,
    or `chat_template`; every assistant turn is trained, its end-of-turn token included, and nothing else. A prompt
    with a completion is one or the other; what follows the prompt is trained.

    loss_on: "assistant": the assistant's turns; "completion": what follows a prompt; "all": every token; None = as
        said above.
    too_long: "split" cuts a longer record into consecutive pieces, "reject" drops it whole and counts it.
        None = split raw text, reject the rest.
    pack: several documents per sequence, told apart by position_ids; else one, with an attention_mask.
    on_bad_record: a record that cannot be rendered is refused by number, or skipped and counted.
    """
    check_reading(records, tuple(LOSS_ON), seq_len, on_bad_record)
    if too_long is not None and too_long not in get_args(TooLong):
        raise ValueError(f"too_long must be one of {get_args(TooLong)}, or None; got {too_long!r}")
    loss_on = _checked_loss_on(records.format, loss_on)
    too_long = too_long or ("split" if records.format == "text" else "reject")
    kept = DocumentStore(Counts(skipped=records.skipped))
    for ids, trained in _documents(records, tokenizer, chat_template, loss_on, on_bad_record, kept.counts):
        kept.add((ids, np.ones_like(trained) if loss_on == "all" else trained), seq_len, too_long)
    return kept.dataset(seq_len, pack, pad_token_id(tokenizer), records.origin)


def _checked_loss_on(format: Format, loss_on: LossOn | None) -> LossOn:
    if loss_on is not None and loss_on not in LOSS_ON[format]:
        raise ValueError(f"loss_on must be one of {LOSS_ON[format]} for records of format {format!r}; got {loss_on!r}")
    return loss_on or LOSS_ON[format][0]


def _documents(
    records: Records,
    tokenizer: PreTrainedTokenizerBase,
    chat_template: str | None,
    loss_on: LossOn,
    on_bad_record: OnBadRecord,
    counts: Counts,
) -> Iterator[Document]:
    """Yield every usable record as a document; where all of it is trained, its mask does not matter."""
    if records.format == "text":
        check_eos(tokenizer)
        texts = usable(records, to_text, on_bad_record, counts)
        return in_batches(texts, partial(_encode_texts, tokenizer))
    if records.format == "completion" and loss_on != "assistant":
        render = PromptRenderer(tokenizer, chat_template, records.rows[0], "prompt")
        wholes = usable(records, partial(_to_prompted, render), on_bad_record, counts)
        return in_batches(wholes, partial(_encode_prompted, render))
    chat = ChatRenderer(tokenizer, chat_template)
    chats = usable(records, lambda row: chat(_to_chat(row, records.format)), on_bad_record, counts)
    return in_batches(chats, partial(_encode_chats, tokenizer))


def _to_chat(row: Row, format: Format) -> list[Message]:
    if format == "completion":
        return messages_in(row, "prompt") + messages_in(row, "completion")
    return to_messages(row, format)


def _to_prompted(render: PromptRenderer, row: Row) -> Prompted:
    return render.whole(render.said(row, "prompt"), render.said(row, "completion"))


def _encode_texts(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> Iterator[Document]:
    for ids in tokenizer(list(texts), return_attention_mask=False, verbose=False)["input_ids"]:
        yield trained_after(closed_by_eos(tokenizer, ids), 0)


def _encode_prompted(render: PromptRenderer, items: Sequence[Prompted]) -> Iterator[Document]:
    for ids, start in render.encode(items):
        yield trained_after(ids, start)


def _encode_chats(tokenizer: PreTrainedTokenizerBase, chats: Sequence[RenderedChat]) -> Iterator[Document]:
    encoded = tokenizer(
        [chat.text for chat in chats],
        add_special_tokens=False,  # the template wrote them
        return_offsets_mapping=True,
        return_attention_mask=False,
        verbose=False,
    )
    for chat, ids, offsets in zip(chats, encoded["input_ids"], encoded["offset_mapping"], strict=True):
        yield np.array(ids, dtype=np.int32), trained_tokens(offsets, chat.spans)
