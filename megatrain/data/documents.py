"""Documents in flat arrays, in whole or in pieces, with a count of what became of every record."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, fields
from functools import cached_property
from hashlib import blake2b
from typing import Literal

import numpy as np
import numpy.typing as npt

from megatrain.data.collate import Batch, Document, Indices, Mask, TokenIds, packed_rows, padded_rows
from megatrain.data.packing import SequencePlan, first_fit, one_per_sequence, two_per_sequence

TooLong = Literal["split", "reject"]


@dataclass
class Counts:
    """What became of the records.

    records: read and usable. skipped: broken, passed over. rejected: longer than a sequence. split: cut into pieces.
    untrained: documents, pieces or pairs dropped because no token of theirs would be predicted.
    documents, tokens, trained_tokens: what is left; a pair is two documents, a prompt is one that trains nothing. The
    first token of a document is never predicted.
    """

    records: int = 0
    skipped: int = 0
    rejected: int = 0
    split: int = 0
    untrained: int = 0
    documents: int = 0
    tokens: int = 0
    trained_tokens: int = 0

    def __str__(self) -> str:
        return ", ".join(f"{getattr(self, f.name):,} {f.name.replace('_', ' ')}" for f in fields(self))


@dataclass(frozen=True)
class TokenizedDataset:
    """Documents in flat arrays, and which of them make up a sequence.

    token_ids: (N,) int32. trained: (N,) bool, False for the first token of every document.
    document_starts: (D + 1,) int64; document d is token_ids[document_starts[d] : document_starts[d + 1]].
    origin: where it was read from, for people.
    """

    token_ids: TokenIds
    trained: Mask
    document_starts: npt.NDArray[np.int64]
    sequences: SequencePlan
    seq_len: int
    packed: bool
    pad_token_id: int
    counts: Counts
    origin: str = ""

    @cached_property
    def content(self) -> str:
        """A checksum (BLAKE2b) of every token, of what is trained, and of where documents begin."""
        digest = blake2b(digest_size=16)
        for values in (self.token_ids, self.trained, self.document_starts):
            digest.update(np.ascontiguousarray(values).data)
        return digest.hexdigest()

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def tokens(self) -> int:
        """How many tokens there are in all."""
        return len(self.token_ids)

    def batch(self, items: Indices) -> Batch:
        """Return the named sequences as int64 CPU tensors (B, T): input_ids, labels, and where the documents are.

        That is position_ids for packed data (T = seq_len), which restart at 0 with every document, or else an
        attention_mask (T = the longest of them). transformers keeps packed documents apart only if the model is called
        with use_cache=False and no attention_mask.
        """
        rows = [[self.document(d) for d in self.sequences[sequence]] for sequence in items]
        if self.packed:
            return packed_rows(rows, self.seq_len, self.pad_token_id)
        return padded_rows([document for row in rows for document in row], self.pad_token_id)

    def document(self, index: int) -> Document:
        """Return the tokens of a document and which of them are trained."""
        tokens = slice(self.document_starts[index], self.document_starts[index + 1])
        return self.token_ids[tokens], self.trained[tokens]


class DocumentStore:
    """Grows the flat arrays: 5 bytes per token, with no Python object for any of them."""

    def __init__(self, counts: Counts) -> None:
        self.counts = counts
        self._token_ids = array("i")
        self._trained = bytearray()
        self._starts = array("q", [0])

    def add(self, document: Document, seq_len: int, too_long: TooLong) -> None:
        """Keep a document, whole or in pieces, or count why not."""
        length = len(document[0])
        self.counts.records += 1
        if length > seq_len and too_long == "reject":
            self.counts.rejected += 1
            return
        self.counts.split += length > seq_len
        token_ids, trained = document
        for start in range(0, length, seq_len):
            piece = slice(start, start + seq_len)
            self._add_piece(token_ids[piece], trained[piece])

    def add_pair(self, chosen: Document, rejected: Document, seq_len: int) -> None:
        """Keep both documents, or count why neither."""
        self.counts.records += 1
        if max(len(chosen[0]), len(rejected[0])) > seq_len:
            self.counts.rejected += 1
        elif not (chosen[1][1:].any() and rejected[1][1:].any()):
            self.counts.untrained += 1
        else:
            self._add_piece(*chosen)
            self._add_piece(*rejected)

    def _add_piece(self, token_ids: TokenIds, trained: Mask) -> None:
        trained = trained.copy()
        trained[:1] = False  # or the document before it in the sequence would predict it
        if not trained.any():
            self.counts.untrained += 1
            return
        self._token_ids.frombytes(token_ids.tobytes())
        self._trained += trained.tobytes()
        self._starts.append(len(self._token_ids))
        self.counts.documents += 1
        self.counts.tokens += len(token_ids)
        self.counts.trained_tokens += int(trained.sum())

    def dataset(self, seq_len: int, pack: bool, pad_token_id: int, origin: str = "") -> TokenizedDataset:
        """Return what was kept; raise ValueError if that is nothing."""
        self._require_some()
        starts = np.frombuffer(self._starts, dtype=np.int64)
        plan = first_fit(starts[1:] - starts[:-1], seq_len) if pack else one_per_sequence(len(starts) - 1)
        return self._dataset(plan, seq_len, pack, pad_token_id, origin)

    def pairs(self, seq_len: int, pad_token_id: int, origin: str) -> TokenizedDataset:
        """Return what was kept by `add_pair`; raise ValueError if that is nothing."""
        self._require_some()
        return self._dataset(two_per_sequence(self.counts.documents), seq_len, False, pad_token_id, origin)

    def _require_some(self) -> None:
        if not self.counts.documents:
            raise ValueError(f"nothing is left to train on: {self.counts}")

    def _dataset(
        self, plan: SequencePlan, seq_len: int, packed: bool, pad_token_id: int, origin: str
    ) -> TokenizedDataset:
        return TokenizedDataset(
            token_ids=np.frombuffer(self._token_ids, dtype=np.int32),
            trained=np.frombuffer(self._trained, dtype=np.bool_),
            document_starts=np.frombuffer(self._starts, dtype=np.int64),
            sequences=plan,
            seq_len=seq_len,
            packed=packed,
            pad_token_id=pad_token_id,
            counts=self.counts,
            origin=origin,
        )
