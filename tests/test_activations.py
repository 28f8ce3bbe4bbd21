"""Saved layer inputs: kept until their last reader, counted, and brought back bit by bit from the host."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from megatrain.activations import OffloadedInputs, SavedInputs
from megatrain.layout import align
from megatrain.slots import Ledger


def test_an_input_stays_until_its_last_reader_is_done() -> None:
    ledger = Ledger()
    saved = SavedInputs(ledger)
    hidden = torch.randn(2, 3)
    saved.put(4, 1, hidden, readers=2)
    assert saved.get(4, 1) is hidden
    assert ledger.held_bytes == hidden.nbytes
    saved.release(4, 1)
    assert saved.get(4, 1) is hidden
    assert ledger.held_bytes == hidden.nbytes
    saved.release(4, 1)
    assert ledger.held_bytes == 0
    assert ledger.peak_bytes == hidden.nbytes
    with pytest.raises(KeyError):
        saved.get(4, 1)


class Watched(dict[Any, Any]):
    """Notes the moment in which a key is not there any more."""

    def __init__(self) -> None:
        self.gone: list[Any] = []

    def pop(self, key: Any, *default: Any) -> Any:
        self.gone.append(key)
        return super().pop(key, *default)

    def __delitem__(self, key: Any) -> None:
        self.gone.append(key)
        super().__delitem__(key)


def test_an_input_is_there_for_other_lanes_also_while_one_releases_it() -> None:
    """Forward lets go of an input just as the d2h lane looks for it, to offload it."""
    saved = SavedInputs(Ledger())
    watched = saved._held = Watched()
    saved.put(4, 1, torch.zeros(2), readers=2)
    saved.release(4, 1)
    assert watched.gone == []
    saved.release(4, 1)
    assert watched.gone == [(4, 1)]


def test_layers_and_micro_batches_are_kept_apart() -> None:
    saved = SavedInputs(Ledger())
    places = [(0, 0), (0, 1), (1, 0)]
    for number, place in enumerate(places):
        saved.put(*place, torch.full((1,), float(number)), readers=1)
    saved.release(0, 1)
    assert saved.get(0, 0).item() == 0
    assert saved.get(1, 0).item() == 2


def test_a_step_that_ended_half_way_leaves_nothing() -> None:
    ledger = Ledger()
    saved = SavedInputs(ledger)
    saved.put(0, 0, torch.zeros(5), readers=1)
    saved.put(1, 0, torch.zeros(7), readers=2)
    saved.release(1, 0)
    saved.clear()
    assert ledger.held_bytes == 0
    with pytest.raises(KeyError):
        saved.get(0, 0)


def test_readers_on_different_lanes_release_once_each() -> None:
    """Offloading and forward let go of one input from two threads; the bytes are given back exactly once."""
    ledger = Ledger()
    saved = SavedInputs(ledger)
    count, readers = 300, 3
    for layer in range(count):
        saved.put(layer, 0, torch.zeros(1), readers=readers)
    start = threading.Barrier(readers, timeout=20)

    def read() -> None:
        start.wait()
        for layer in range(count):
            saved.release(layer, 0)

    threads = [threading.Thread(target=read) for _ in range(readers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert ledger.held_bytes == 0


def test_offloaded_inputs_have_places_of_their_own() -> None:
    inputs = {(layer, mb): torch.randn(2, 3, 5).bfloat16() for layer in range(3) for mb in range(2)}
    like = inputs[(0, 0)]
    offloaded = OffloadedInputs(3, 2, like.nbytes, pin=False)
    for place, hidden in inputs.items():
        offloaded.place(*place, hidden).copy_(hidden)
    assert all(torch.equal(offloaded.place(*place, like), hidden) for place, hidden in inputs.items())
    assert offloaded.pinned_bytes == 0
    offloaded.close()


def test_a_smaller_last_micro_batch_uses_the_front_of_its_place() -> None:
    offloaded = OffloadedInputs(1, 2, 4 * 6 * 4, pin=False)
    small = torch.randn(1, 6)
    place = offloaded.place(0, 1, small)
    assert place.shape == (1, 6)
    assert place.is_contiguous()
    assert place.data_ptr() - offloaded.place(0, 0, small).data_ptr() == align(4 * 6 * 4)


def test_what_fits_what_was_made() -> None:
    offloaded = OffloadedInputs(2, 3, 100, pin=False)
    assert offloaded.fits(3, 100)
    assert offloaded.fits(1, 8)
    assert not offloaded.fits(4, 100)
    assert not offloaded.fits(3, 101)
