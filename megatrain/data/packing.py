"""Documents → sequences of a fixed length: first fit, in stream order."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

OPEN_SEQUENCES = 256
"""Sequences that may still take a document. More would pack a little tighter and cost time per document."""

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class SequencePlan:
    """Which documents make up which sequence.

    documents: (D,) every document once, grouped by sequence.
    starts: (S + 1,) sequence s holds documents[starts[s] : starts[s + 1]].
    """

    documents: Ints
    starts: Ints

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, sequence: int) -> Ints:
        return self.documents[self.starts[sequence] : self.starts[sequence + 1]]


def one_per_sequence(documents: int) -> SequencePlan:
    """Return the plan of unpacked data: each document is a sequence."""
    return SequencePlan(np.arange(documents), np.arange(documents + 1))


def two_per_sequence(documents: int) -> SequencePlan:
    """Return the plan of pairs: documents 2 i and 2 i + 1 are sequence i."""
    return SequencePlan(np.arange(documents), np.arange(0, documents + 1, 2))


def first_fit(lengths: Ints, seq_len: int) -> SequencePlan:
    """Put each document into the first open sequence with room for it, else into a new one.

    lengths: (D,) tokens per document, each at most `seq_len`.
    """
    sequence_of = np.empty(len(lengths), dtype=np.int64)
    open_sequences = np.zeros(0, dtype=np.int64)
    room_tokens = np.zeros(0, dtype=np.int64)
    count = 0
    for document, length in enumerate(lengths.tolist()):
        fits = room_tokens >= length
        slot = int(fits.argmax()) if len(fits) else 0
        if not len(fits) or not fits[slot]:
            open_sequences, room_tokens = _close_fullest(open_sequences, room_tokens)
            open_sequences = np.append(open_sequences, count)
            room_tokens = np.append(room_tokens, seq_len)
            slot, count = len(open_sequences) - 1, count + 1
        sequence_of[document] = open_sequences[slot]
        room_tokens[slot] -= length
    documents = np.argsort(sequence_of, kind="stable")
    return SequencePlan(documents, np.searchsorted(sequence_of[documents], np.arange(count + 1)))


def _close_fullest(open_sequences: Ints, room_tokens: Ints) -> tuple[Ints, Ints]:
    """Drop full sequences, and the fullest one where too many are open."""
    keep = room_tokens > 0
    if keep.sum() >= OPEN_SEQUENCES:
        keep[np.where(keep, room_tokens, np.iinfo(np.int64).max).argmin()] = False
    return open_sequences[keep], room_tokens[keep]
