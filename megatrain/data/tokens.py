"""Records → `TokenizedDataset`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import TypeVar, get_args

import numpy as np
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from megatrain.data.chat import ChatRenderer, RenderedChat, trained_tokens
from megatrain.data.documents import Counts, Document, DocumentStore, TokenizedDataset, TooLong
from megatrain.data.formats import RecordError, Row, to_messages, to_text
from megatrain.data.records import OnBadRecord, Records, check_on_bad_record

RECORDS_PER_CALL = 512
"""The tokenizer works on the records of one call in parallel."""

T = TypeVar("T")


def tokenize(
    records: Records,
    tokenizer: PreTrainedTokenizerBase,
    seq_len: int,
    *,
    too_long: TooLong | None = None,
    pack: bool = True,
    chat_template: str | None = None,
    on_bad_record: OnBadRecord = "error",
) -> TokenizedDataset:
    """Tokenise records into documents of at most `seq_len` tokens.

    Raw text: the tokenizer's own special tokens, EOS at the end, all trained. Chats: the tokenizer's chat template,
    or `chat_template`; every assistant turn is trained, its end-of-turn token included, and nothing else.

    too_long: "split" cuts a longer record into consecutive pieces, "reject" drops it whole and counts it.
        None = split raw text, reject chats.
    pack: several documents per sequence, told apart by position_ids; else one, with an attention_mask.
    on_bad_record: a record that cannot be rendered is refused by number, or skipped and counted.
    """
    _check_options(seq_len, too_long, on_bad_record)
    too_long = too_long or ("split" if records.format == "text" else "reject")
    kept = DocumentStore(Counts(skipped=records.skipped))
    for document in _documents(records, tokenizer, chat_template, on_bad_record, kept.counts):
        kept.add(document, seq_len, too_long)
    return kept.dataset(seq_len, pack, _pad_token_id(tokenizer), records.origin)


def _check_options(seq_len: int, too_long: str | None, on_bad_record: str) -> None:
    check_on_bad_record(on_bad_record)
    if seq_len < 2:
        raise ValueError(f"seq_len must be ≥ 2, for a token is predicted from the one before it; got {seq_len!r}")
    if too_long is not None and too_long not in get_args(TooLong):
        raise ValueError(f"too_long must be one of {get_args(TooLong)}, or None; got {too_long!r}")


def _documents(
    records: Records,
    tokenizer: PreTrainedTokenizerBase,
    chat_template: str | None,
    on_bad_record: OnBadRecord,
    counts: Counts,
) -> Iterator[Document]:
    """Yield every usable record as a document."""
    if records.format == "text":
        _check_eos(tokenizer)
        texts = _usable(records, to_text, on_bad_record, counts)
        return _encode(texts, partial(_encode_texts, tokenizer))
    render, format = ChatRenderer(tokenizer, chat_template), records.format
    chats = _usable(records, lambda row: render(to_messages(row, format)), on_bad_record, counts)
    return _encode(chats, partial(_encode_chats, tokenizer))


def _usable(records: Records, prepare: Callable[[Row], T], on_bad_record: OnBadRecord, counts: Counts) -> Iterator[T]:
    """Yield what `prepare` makes of each record; refuse or skip those it raises RecordError for."""
    rows = tqdm(records.rows, desc="tokenising", unit=" records", disable=None)
    for number, row in enumerate(rows, start=1):
        try:
            yield prepare(row)
        except RecordError as error:
            if on_bad_record == "error":
                raise RecordError(f'record {number}: {error}; on_bad_record="skip" passes over it') from error
            counts.skipped += 1


def _encode(items: Iterable[T], encode: Callable[[Sequence[T]], Iterator[Document]]) -> Iterator[Document]:
    remaining = iter(items)
    while batch := list(islice(remaining, RECORDS_PER_CALL)):
        yield from encode(batch)


def _encode_texts(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> Iterator[Document]:
    for ids in tokenizer(list(texts), return_attention_mask=False, verbose=False)["input_ids"]:
        closed = ids if ids[-1:] == [tokenizer.eos_token_id] else [*ids, tokenizer.eos_token_id]
        yield np.array(closed, dtype=np.int32), np.ones(len(closed), dtype=np.bool_)


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


def _check_eos(tokenizer: PreTrainedTokenizerBase) -> None:
    if tokenizer.eos_token_id is None:
        raise ValueError("raw text needs an end-of-sequence token, and the tokenizer has none; set tokenizer.eos_token")


def _pad_token_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the id that fills a sequence; which one is of no matter, for it is masked and never trained."""
    ids = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
    return next(int(token_id) for token_id in ids if token_id is not None)
