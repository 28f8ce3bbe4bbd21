"""Preferences → pairs of documents: the same prompt, with the answer that was chosen and the one that was rejected."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

from transformers import PreTrainedTokenizerBase

from megatrain.data.collate import Batch, Document, Indices, padded_rows
from megatrain.data.documents import Counts, DocumentStore, TokenizedDataset
from megatrain.data.formats import Row
from megatrain.data.prompted import Prompted, PromptRenderer, pair_in, trained_after
from megatrain.data.reading import check_reading, in_batches, pad_token_id, usable
from megatrain.data.records import OnBadRecord, Records


@dataclass(frozen=True)
class Pairs:
    """Pairs of documents. documents: sequence i of it holds the chosen one and the rejected one of pair i."""

    documents: TokenizedDataset

    def __len__(self) -> int:
        return len(self.documents)

    @property
    def tokens(self) -> int:
        """How many tokens there are in all."""
        return self.documents.tokens

    @property
    def origin(self) -> str:
        """Where it was read from, for people."""
        return self.documents.origin

    @property
    def content(self) -> str:
        """A checksum of all of it."""
        return self.documents.content

    @property
    def counts(self) -> Counts:
        """What became of the records."""
        return self.documents.counts

    def batch(self, items: Indices) -> Batch:
        """Return B pairs: input_ids, labels and attention_mask, each (2 B, T); first all chosen, then all rejected.

        labels are -100 on prompts and padding.
        """
        chosen, rejected = zip(*(self.pair(pair) for pair in items), strict=True)
        return padded_rows([*chosen, *rejected], self.documents.pad_token_id)

    def pair(self, index: int) -> tuple[Document, Document]:
        """Return the chosen and the rejected document of a pair."""
        chosen, rejected = self.documents.sequences[index]
        return self.documents.document(chosen), self.documents.document(rejected)


def tokenize_pairs(
    records: Records,
    tokenizer: PreTrainedTokenizerBase,
    seq_len: int,
    *,
    chat_template: str | None = None,
    on_bad_record: OnBadRecord = "error",
) -> Pairs:
    """Tokenise preferences into pairs of documents of at most `seq_len` tokens; what follows the prompt is trained.

    A pair of which either is longer is rejected and counted: cut off, an answer would be judged for what it never said.
    on_bad_record: a record that cannot be used is refused by number, or skipped and counted.
    """
    check_reading(records, ("preference",), seq_len, on_bad_record)
    render = PromptRenderer(tokenizer, chat_template, records.rows[0], "chosen")
    kept = DocumentStore(Counts(skipped=records.skipped))
    pairs = usable(records, partial(_to_pair, render), on_bad_record, kept.counts)
    for chosen, rejected in in_batches(pairs, partial(_encode, render)):
        kept.add_pair(chosen, rejected, seq_len)
    return Pairs(kept.pairs(seq_len, pad_token_id(tokenizer), records.origin))


def _to_pair(render: PromptRenderer, row: Row) -> tuple[Prompted, Prompted]:
    prompt, chosen, rejected = pair_in(row, render)
    return render.whole(prompt, chosen), render.whole(prompt, rejected)


def _encode(render: PromptRenderer, pairs: Sequence[tuple[Prompted, Prompted]]) -> Iterator[tuple[Document, Document]]:
    encoded = render.encode(list(chain.from_iterable(pairs)))
    for (chosen, chosen_start), (rejected, rejected_start) in zip(encoded, encoded, strict=True):
        start = min(chosen_start, rejected_start)  # both answers begin at the same place
        yield trained_after(chosen, start), trained_after(rejected, start)
