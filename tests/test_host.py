"""Host memory: every byte counted beforehand, nothing shared by two tensors, pinned in slabs."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatrain import host
from megatrain.host import Arena, HostShape, HostStore, role_bytes, slabs
from megatrain.layout import ALIGN_BYTES, Layout, TensorSpec

PAGE = mmap.PAGESIZE


def layout(*, trained: int, frozen: int = 0, dtype: torch.dtype = torch.bfloat16) -> Layout:
    return Layout.of([TensorSpec("w", (trained,), dtype, trained=trained > 0), TensorSpec("f", (frozen,), dtype)])


LAYERS = [layout(trained=300, frozen=10), layout(trained=0, frozen=500), layout(trained=1000)]
SHELL = layout(trained=77, frozen=5)

shapes = st.builds(
    HostShape,
    split=st.booleans(),
    moment_bytes=st.sampled_from([2, 4]),
    keep_gradients=st.booleans(),
    slabs=st.integers(1, 4),
)


def test_an_arena_hands_out_aligned_zeroed_pieces_that_do_not_overlap() -> None:
    arena = Arena("weights", 1024 + 256, pin=False)
    first, second, empty = arena.take(1000), arena.take(200), arena.take(0)
    assert (first.shape, second.shape, empty.shape) == ((1000,), (200,), (0,))
    assert first.data_ptr() % ALIGN_BYTES == second.data_ptr() % ALIGN_BYTES == 0
    assert first.eq(0).all()
    first.fill_(7)
    assert second.eq(0).all()
    with pytest.raises(AssertionError, match="weights arena: 1536 > 1280 bytes"):
        arena.take(1)


def test_an_empty_arena() -> None:
    arena = Arena("gradients", 0, pin=False)
    assert arena.take(0).numel() == 0
    arena.close()


def test_memory_lives_as_long_as_a_tensor_looks_into_it() -> None:
    arena = Arena("weights", PAGE, pin=False)
    piece = arena.take(PAGE)
    arena.close()
    del arena
    piece.fill_(5)
    assert int(piece.sum(dtype=torch.int64)) == 5 * PAGE


def test_a_system_without_huge_pages_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoHugePages(mmap.mmap):
        def madvise(self, *_: Any) -> None:
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr(mmap, "mmap", NoHugePages)
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 14, raising=False)
    assert Arena("weights", PAGE, pin=False).take(PAGE).eq(0).all()


@given(shapes)
def test_the_store_takes_exactly_the_bytes_that_were_counted(shape: HostShape) -> None:
    store = HostStore(LAYERS, SHELL, shape, pin=False)
    counted = role_bytes(LAYERS, SHELL, shape)
    assert {role: arena.nbytes for role, arena in store.arenas.items()} == counted
    for arena in store.arenas.values():
        with pytest.raises(AssertionError, match="arena"):
            arena.take(1)  # nothing is left over


@given(shapes)
def test_the_store_gives_every_layer_arrays_of_its_own(shape: HostShape) -> None:
    store = HostStore(LAYERS, SHELL, shape, pin=False)
    arrays = [*store.slabs]
    for kept, places in zip([store.shell, *store.layers], [SHELL, *LAYERS], strict=True):
        assert kept.layout is places
        count = places.trained_elements
        assert kept.weights.shape == (places.nbytes,)
        moment = torch.float32 if shape.moment_bytes == 4 else torch.bfloat16
        for moments in (kept.exp_avg, kept.exp_avg_sq):
            assert (moments.shape, moments.dtype) == ((count,), moment)
        assert (kept.low is not None) == shape.split
        if kept.low is not None:
            assert (kept.low.shape, kept.low.dtype) == ((count,), torch.int16)
        assert (kept.gradient is not None) == (shape.keep_gradients or kept is store.shell)
        given_out = (kept.weights, kept.low, kept.exp_avg, kept.exp_avg_sq, kept.gradient)
        arrays += [array for array in given_out if array is not None]
    assert_apart(arrays)


def assert_apart(arrays: Sequence[torch.Tensor]) -> None:
    places = sorted((array.data_ptr(), array.data_ptr() + array.nbytes) for array in arrays if array.numel())
    assert all(left[1] <= right[0] for left, right in pairwise(places))
    assert all(start % ALIGN_BYTES == 0 for start, _ in places)


def test_slabs_hold_the_largest_gradient() -> None:
    shape = HostShape(split=True, moment_bytes=4, keep_gradients=False, slabs=3)
    store = HostStore(LAYERS, SHELL, shape, pin=False)
    assert [slab.shape for slab in store.slabs] == [(LAYERS[2].trained_nbytes,)] * 3
    assert store.shell.gradient is not None
    kept = HostStore(LAYERS, SHELL, HostShape(True, 4, True, 3), pin=False)
    assert kept.slabs == []


def test_bytes_per_trained_parameter() -> None:
    """2 streamed, 2 low halves, 4 + 4 moments and 2 for a kept gradient; a frozen one takes 2."""
    million = 1 << 20
    layers, shell = [layout(trained=million), layout(trained=0, frozen=million)], layout(trained=0)
    counted = role_bytes(layers, shell, HostShape(split=True, moment_bytes=4, keep_gradients=True, slabs=3))
    assert counted == {
        "weights": 2 * million + 2 * million,
        "master low halves": 2 * million,
        "first moments": 4 * million,
        "second moments": 4 * million,
        "gradients": 2 * million,
    }
    slabs = role_bytes(layers, shell, HostShape(split=False, moment_bytes=2, keep_gradients=False, slabs=3))
    assert (slabs["master low halves"], slabs["first moments"], slabs["gradients"]) == (0, 2 * million, 6 * million)


def test_a_model_without_layers_needs_no_slab() -> None:
    shape = HostShape(split=True, moment_bytes=4, keep_gradients=False, slabs=3)
    assert role_bytes([], SHELL, shape)["gradients"] == SHELL.trained_nbytes


# ---- pinning ----


class FakeRuntime:
    """What `torch.cuda.cudart()` offers, with an error for the registration numbered `fails_at`."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.registered: list[tuple[int, int]] = []
        self.calls: list[tuple[str, int]] = []
        self._fails_at = fails_at

    def cudaHostRegister(self, pointer: int, nbytes: int, flags: int) -> int:  # noqa: N802
        assert flags == 0
        self.calls.append(("register", nbytes))
        if len(self.calls) - 1 == self._fails_at:
            return 2
        self.registered.append((pointer, nbytes))
        return 0

    def cudaHostUnregister(self, pointer: int) -> int:  # noqa: N802
        [found] = [entry for entry in self.registered if entry[0] == pointer]
        self.registered.remove(found)
        return 0


@pytest.fixture
def small_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "SLAB_BYTES", 2 * PAGE)


def use(runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)


@pytest.mark.usefixtures("small_slabs")
def test_pins_in_slabs_without_gaps_and_unpins_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its address, a slab ends at a multiple of the size: whoever copies knows where."""
    runtime = FakeRuntime()
    use(runtime, monkeypatch)
    arena = Arena("weights", 5 * PAGE, pin=True)
    start = arena.take(1).data_ptr()
    ends = [pointer + nbytes for pointer, nbytes in runtime.registered]
    assert [pointer for pointer, _ in runtime.registered] == [start, *ends[:-1]]
    assert ends[-1] == start + 5 * PAGE
    assert ends[:-1] == [at for at in range(start + 1, start + 5 * PAGE) if at % (2 * PAGE) == 0]
    assert arena.pinned_bytes == 5 * PAGE
    arena.close()
    arena.close()
    assert runtime.registered == []
    assert arena.pinned_bytes == 0


@given(address=st.integers(0, 10**6), nbytes=st.integers(0, 10**6), size=st.integers(10**5, 10**6))
def test_slabs_cover_every_byte_once_and_cross_no_multiple(address: int, nbytes: int, size: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "SLAB_BYTES", size)
        found = slabs(address, nbytes)
    assert [0, *(slab.stop for slab in found)] == [*(slab.start for slab in found), nbytes]
    assert all((address + slab.start) // size == (address + slab.stop - 1) // size for slab in found)


def test_an_arena_that_nobody_closed_is_unpinned_when_it_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = FakeRuntime()
    use(runtime, monkeypatch)
    arena = Arena("weights", PAGE, pin=True)
    assert len(runtime.registered) == 1
    del arena
    assert runtime.registered == []


@pytest.mark.usefixtures("small_slabs")
def test_a_refused_slab_unpins_the_others_and_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = FakeRuntime(fails_at=2)
    use(runtime, monkeypatch)
    with pytest.raises(RuntimeError, match=r"could not pin 0\.0 GB of host memory for weights \(error 2\).*ulimit -l"):
        Arena("weights", 6 * PAGE, pin=True)
    assert runtime.registered == []


def test_only_what_is_streamed_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = FakeRuntime()
    use(runtime, monkeypatch)
    shape = HostShape(split=True, moment_bytes=4, keep_gradients=True, slabs=3)
    store = HostStore(LAYERS, SHELL, shape, pin=True)
    counted = role_bytes(LAYERS, SHELL, shape)
    assert store.pinned_bytes == counted["weights"] + counted["gradients"]
    assert store.arenas["first moments"].pinned_bytes == 0
    store.close()
    assert runtime.registered == []
