"""Records one after another: what cannot be used is refused or counted, and the rest is tokenised many at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import TypeVar

from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from megatrain.data.documents import Counts
from megatrain.data.formats import Format, RecordError, Row
from megatrain.data.records import OnBadRecord, Records, check_on_bad_record

RECORDS_PER_CALL = 512
"""The tokenizer works on the records of one call in parallel."""

T = TypeVar("T")
D = TypeVar("D")


def check_reading(records: Records, formats: Sequence[Format], seq_len: int, on_bad_record: str) -> None:
    """Raise ValueError for records that are for something else, or options that are none."""
    check_on_bad_record(on_bad_record)
    if records.format not in formats:
        raise ValueError(
            f"the format of the records must be {' or '.join(map(repr, formats))} here; it is {records.format!r}. Text "
            "and chats are for the recipes sft and pretrain (tokenize), preferences for dpo and reward "
            "(tokenize_pairs), prompts for grpo (tokenize_prompts)"
        )
    if seq_len < 2:
        raise ValueError(f"seq_len must be ≥ 2, for a token is predicted from the one before it; got {seq_len!r}")


def usable(records: Records, prepare: Callable[[Row], T], on_bad_record: OnBadRecord, counts: Counts) -> Iterator[T]:
    """Yield what `prepare` makes of each record; refuse or skip those it raises RecordError for."""
    rows = tqdm(records.rows, desc="tokenising", unit=" records", disable=None)
    for number, row in enumerate(rows, start=1):
        try:
            yield prepare(row)
        except RecordError as error:
            if on_bad_record == "error":
                raise RecordError(f'record {number}: {error}; on_bad_record="skip" passes over it') from error
            counts.skipped += 1


def in_batches(items: Iterable[T], encode: Callable[[Sequence[T]], Iterable[D]]) -> Iterator[D]:
    """Yield what `encode` makes of the items, many at a time."""
    remaining = iter(items)
    while batch := list(islice(remaining, RECORDS_PER_CALL)):
        yield from encode(batch)


def pad_token_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the id that fills a sequence; which one is of no matter, for it is masked and never trained."""
    ids = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
    return next(int(token_id) for token_id in ids if token_id is not None)
