"""Documents → rows of tensors: packed, padded on the right for training, or on the left for generation."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from megatrain.batch import IGNORED

TokenIds = npt.NDArray[np.int32]
Mask = npt.NDArray[np.bool_]
Document = tuple[TokenIds, Mask]  # tokens, and which of them are trained
Indices = Sequence[int] | npt.NDArray[np.int64]
Batch = dict[str, torch.Tensor]


def padded_rows(documents: Sequence[Document], pad_token_id: int) -> Batch:
    """Return a document per row: input_ids, labels, attention_mask, each (B, T) int64, T = the longest one."""
    shape = (len(documents), max(len(ids) for ids, _ in documents))
    input_ids, labels = _filled(shape, pad_token_id), _filled(shape, IGNORED)
    attention_mask = _filled(shape, 0)
    for row, (ids, trained) in enumerate(documents):
        input_ids[row, : len(ids)] = ids
        labels[row, : len(ids)] = np.where(trained, ids, IGNORED)
        attention_mask[row, : len(ids)] = 1
    return _tensors(input_ids=input_ids, labels=labels, attention_mask=attention_mask)


def packed_rows(rows: Sequence[Sequence[Document]], seq_len: int, pad_token_id: int) -> Batch:
    """Return several documents per row: input_ids, labels, position_ids, each (B, seq_len) int64."""
    shape = (len(rows), seq_len)
    input_ids, labels = _filled(shape, pad_token_id), _filled(shape, IGNORED)
    position_ids = _filled(shape, 0)
    for row, documents in enumerate(rows):
        start = 0
        for ids, trained in documents:
            here = np.s_[row, start : start + len(ids)]
            input_ids[here] = ids
            labels[here] = np.where(trained, ids, IGNORED)
            position_ids[here] = np.arange(len(ids))
            start += len(ids)
        # Padding is a document of its own, so that attention keeps it apart.
        position_ids[row, start:] = np.arange(seq_len - start)
    return _tensors(input_ids=input_ids, labels=labels, position_ids=position_ids)


def left_padded_rows(documents: Sequence[TokenIds], pad_token_id: int) -> Batch:
    """Return a prompt per row, each ending in the last column: input_ids and attention_mask, each (B, T) int64."""
    shape = (len(documents), max(map(len, documents)))
    input_ids, attention_mask = _filled(shape, pad_token_id), _filled(shape, 0)
    for row, ids in enumerate(documents):
        input_ids[row, shape[1] - len(ids) :] = ids
        attention_mask[row, shape[1] - len(ids) :] = 1
    return _tensors(input_ids=input_ids, attention_mask=attention_mask)


def _filled(shape: tuple[int, int], value: int) -> npt.NDArray[np.int64]:
    return np.full(shape, value, dtype=np.int64)


def _tensors(**arrays: npt.NDArray[np.int64]) -> Batch:
    return {name: torch.from_numpy(values) for name, values in arrays.items()}
