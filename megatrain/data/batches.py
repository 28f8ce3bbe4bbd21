"""A data set → shuffled batches, resumable at any batch."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from megatrain.data.collate import Indices
from megatrain.data.documents import Counts

B = TypeVar("B")
B_co = TypeVar("B_co", covariant=True)


class Dataset(Protocol[B_co]):
    """What can be batched: `TokenizedDataset`, `Pairs` and `Prompts`."""

    @property
    def tokens(self) -> int:
        """How many tokens it holds; another number is other data."""

    @property
    def origin(self) -> str:
        """Where it was read from, for people."""

    @property
    def content(self) -> str:
        """A checksum of all that training sees of it."""

    @property
    def counts(self) -> Counts:
        """What became of the records that it was made from."""

    def __len__(self) -> int: ...

    def batch(self, items: Indices) -> B_co:
        """Return some of its items as one batch."""


class Batches(Generic[B]):
    """An iterator over batches; each `for` loop over it is one epoch, or what is left of one.

    What a batch is, `dataset.batch` says. Every epoch has its own order, which depends on `seed` and the epoch's number
    only. The last batch of an epoch may be smaller; `drop_last` leaves it out.
    """

    def __init__(
        self,
        dataset: Dataset[B],
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

    def __iter__(self) -> Batches[B]:
        return self

    def __next__(self) -> B:
        if self._position == len(self):
            self._start_epoch(self._epoch + 1)
            raise StopIteration
        start = self._position * self.batch_size
        self._position += 1
        return self.dataset.batch(self._order[start : start + self.batch_size])

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
            "tokens": self.dataset.tokens,
            "content": self.dataset.content,
        }

    def _start_epoch(self, epoch: int) -> None:
        self._epoch, self._position = epoch, 0
        self._order = self._epoch_order()

    def _epoch_order(self) -> npt.NDArray[np.int64]:
        if not self.shuffle:
            return np.arange(len(self.dataset))
        return np.random.default_rng([self.seed, self._epoch]).permutation(len(self.dataset))
