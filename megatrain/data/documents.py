"""Documents in flat arrays, in whole or in pieces, with a count of what became of every record."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, fields
from functools import cached_property
from hashlib import blake2b
from typing import Literal

import numpy as np
import numpy.typing as npt

from megatrain.data.packing import SequencePlan, first_fit, one_per_sequence

TooLong = Literal["split", "reject"]
TokenIds = npt.NDArray[np.int32]
Mask = npt.NDArray[np.bool_]
Document = tuple[TokenIds, Mask]


@dataclass
class Counts:
    """What became of the records.

    records: read and usable. skipped: broken, passed over. rejected: longer than a sequence. split: cut into pieces.
    untrained: documents or pieces dropped because no token of theirs would be predicted.
    documents, tokens, trained_tokens: what is left. The first token of a document is never predicted.
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
        if not self.counts.documents:
            raise ValueError(f"nothing is left to train on: {self.counts}")
        starts = np.frombuffer(self._starts, dtype=np.int64)
        plan = first_fit(np.diff(starts), seq_len) if pack else one_per_sequence(len(starts) - 1)
        return TokenizedDataset(
            token_ids=np.frombuffer(self._token_ids, dtype=np.int32),
            trained=np.frombuffer(self._trained, dtype=np.bool_),
            document_starts=starts,
            sequences=plan,
            seq_len=seq_len,
            packed=pack,
            pad_token_id=pad_token_id,
            counts=self.counts,
            origin=origin,
        )
