"""Sequences → shuffled batches of tensors, resumable at any batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from megatrain.batch import IGNORED
from megatrain.data.documents import TokenizedDataset

Batch = dict[str, torch.Tensor]


class Batches:
    """An iterator over batches; each `for` loop over it is one epoch, or what is left of one.

    A batch has int64 CPU tensors of shape (B, T): input_ids and labels, and position_ids where the data is packed
    (restarting at 0 with every document; T = seq_len) or attention_mask where it is not (T = the longest document
    of the batch). transformers keeps packed documents apart only if the model is called with use_cache=False and no
    attention_mask. Every epoch has its own order, which depends on `seed` and the epoch's number only. The last
    batch of an epoch may be smaller; `drop_last` leaves it out.
    """

    def __init__(
        self,
        dataset: TokenizedDataset,
        batch_size: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size must be ≥ 1; got {batch_size!r}")
        if drop_last and len(dataset) < batch_size:
            raise ValueError(
                f"drop_last leaves no batch: {len(dataset)} sequences are fewer than batch_size {batch_size}"
            )
        self.dataset = dataset
        self.batch_size = batch_size
        self.seed = seed
        self.shuffle = shuffle
        self.drop_last = drop_last
        self._epoch = 0
        self._position = 0  # batches of this epoch already given out
        self._order = self._epoch_order()

    def __len__(self) -> int:
        """Return the batches of a whole epoch."""
        whole, rest = divmod(len(self.dataset), self.batch_size)
        return whole + (rest > 0 and not self.drop_last)

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> Batch:
        if self._position == len(self):
            self._start_epoch(self._epoch + 1)
            raise StopIteration
        start = self._position * self.batch_size
        self._position += 1
        return collate(self.dataset, self._order[start : start + self.batch_size])

    @property
    def epoch(self) -> int:
        """The epoch, from 0, of the next batch."""
        return self._epoch

    def state_dict(self) -> dict[str, Any]:
        """Return where the iterator stands, as plain numbers, with what the order depends on."""
        return {"epoch": self._epoch, "position": self._position, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken; raise ValueError if the batches would not be the same ones."""
        for name, value in self._identity().items():
            if state.get(name, value) != value:  # `content` is not in older states
                raise ValueError(
                    f"cannot continue exactly: {name} was {state[name]!r} and is {value!r}"
                    f"{self.dataset.origin and ' in ' + self.dataset.origin}; load the same data with the same "
                    "settings, or begin a new run in another folder from the exported model"
                )
        self._start_epoch(state["epoch"])
        self._position = state["position"]

    def about(self) -> dict[str, Any]:
        """What is trained on, as plain values, for the run's folder."""
        data = self.dataset
        return {"origin": data.origin, "counts": asdict(data.counts), "content": data.content, "batches": len(self)}

    def _identity(self) -> dict[str, Any]:
        return {
            "seed": self.seed,
            "shuffle": self.shuffle,
            "batch_size": self.batch_size,
            "drop_last": self.drop_last,
            "sequences": len(self.dataset),
            "tokens": len(self.dataset.token_ids),
            "content": self.dataset.content,
        }

    def _start_epoch(self, epoch: int) -> None:
        self._epoch, self._position = epoch, 0
        self._order = self._epoch_order()

    def _epoch_order(self) -> npt.NDArray[np.int64]:
        if not self.shuffle:
            return np.arange(len(self.dataset))
        return np.random.default_rng([self.seed, self._epoch]).permutation(len(self.dataset))


def collate(dataset: TokenizedDataset, sequences: Sequence[int] | npt.NDArray[np.int64]) -> Batch:
    """Return the named sequences as a batch of int64 tensors (B, T)."""
    documents = [[dataset.document(d) for d in dataset.sequences[sequence]] for sequence in sequences]
    longest = max(sum(len(ids) for ids, _ in row) for row in documents)
    shape = (len(documents), dataset.seq_len if dataset.packed else longest)
    input_ids = np.full(shape, dataset.pad_token_id, dtype=np.int64)
    labels = np.full(shape, IGNORED, dtype=np.int64)
    position_ids = np.zeros(shape, dtype=np.int64)
    attention_mask = np.zeros(shape, dtype=np.int64)
    for row, parts in enumerate(documents):
        start = 0
        for ids, trained in parts:
            here = np.s_[row, start : start + len(ids)]
            input_ids[here] = ids
            labels[here] = np.where(trained, ids, IGNORED)
            position_ids[here] = np.arange(len(ids))
            start += len(ids)
        attention_mask[row, :start] = 1
        # Padding is a document of its own, so that attention keeps it apart.
        position_ids[row, start:] = np.arange(shape[1] - start)
    where = {"position_ids": position_ids} if dataset.packed else {"attention_mask": attention_mask}
    return {
        name: torch.from_numpy(values) for name, values in ({"input_ids": input_ids, "labels": labels} | where).items()
    }
