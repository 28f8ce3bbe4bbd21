"""Offsets: no tensor overlaps another, each begins where kernels like it, and what goes in comes out."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from megatrain.layout import ALIGN_BYTES, Layout, TensorSpec, align

FLOATS = (torch.bfloat16, torch.float32)
ANY_DTYPE = (*FLOATS, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool)

shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)
trained_specs = st.tuples(shapes, st.sampled_from(FLOATS), st.just(True), st.booleans())
other_specs = st.tuples(shapes, st.sampled_from(ANY_DTYPE), st.just(False), st.booleans())


def named(fields: list[tuple[tuple[int, ...], torch.dtype, bool, bool]]) -> list[TensorSpec]:
    return [TensorSpec(f"tensor{i}", *rest) for i, rest in enumerate(fields)]


some_specs = st.lists(trained_specs | other_specs, max_size=12).map(named)


def filled(spec: TensorSpec, seed: int) -> torch.Tensor:
    """Random bits that are a value of the dtype, NaN included."""
    generator = torch.Generator().manual_seed(seed)
    high = 2 if spec.dtype is torch.bool else 256
    raw = torch.randint(0, high, (spec.nbytes,), dtype=torch.uint8, generator=generator)
    return raw.view(spec.dtype).view(spec.shape)


def bits(tensor: torch.Tensor) -> list[int]:
    return list(tensor.contiguous().view(-1).view(torch.uint8).tolist())


@given(some_specs)
def test_tensors_lie_aligned_one_after_the_other(specs: list[TensorSpec]) -> None:
    layout = Layout.of(specs)
    assert sorted(entry.name for entry in layout.entries) == sorted(spec.name for spec in specs)
    stop = 0
    for entry in layout.entries:
        assert entry.offset_bytes % ALIGN_BYTES == 0
        assert stop <= entry.offset_bytes < stop + ALIGN_BYTES
        stop = entry.stop_bytes
    assert layout.nbytes == align(stop)


@given(some_specs, st.integers(0, 1000))
def test_every_bit_that_is_written_is_read_back(specs: list[TensorSpec], seed: int) -> None:
    layout = Layout.of(specs)
    flat = torch.full((layout.nbytes + 64,), 0xAA, dtype=torch.uint8)
    views = layout.views(flat)
    tensors = {spec.name: filled(spec, seed + i) for i, spec in enumerate(specs)}
    for name, view in views.items():
        view.copy_(tensors[name])
    for spec in specs:
        view = views[spec.name]
        assert (view.shape, view.dtype) == (spec.shape, spec.dtype)
        assert view.is_contiguous()
        assert bits(view) == bits(tensors[spec.name])
        assert view.numel() == 0 or view.untyped_storage().data_ptr() == flat.data_ptr()  # a view, not a copy
    written = torch.zeros(len(flat), dtype=torch.bool)
    for entry in layout.entries:
        written[entry.offset_bytes : entry.stop_bytes] = True
    assert (flat[~written] == 0xAA).all()


@given(some_specs)
def test_gradients_share_the_prefix_of_the_trained(specs: list[TensorSpec]) -> None:
    layout = Layout.of(specs)
    flat = torch.zeros(layout.nbytes, dtype=torch.uint8)
    gradients = layout.gradient_views(flat[: layout.trained_nbytes])
    weights = layout.views(flat)
    assert set(gradients) == {spec.name for spec in specs if spec.trained}
    for name, view in gradients.items():
        assert view.storage_offset() == weights[name].storage_offset()
        assert view.shape == weights[name].shape
    assert [entry.spec.trained for entry in layout.entries] == sorted((s.trained for s in specs), reverse=True)
    assert layout.trained_parameters == sum(spec.numel for spec in specs if spec.trained)


@given(some_specs)
def test_elements_count_the_trained_parameters_with_their_gaps(specs: list[TensorSpec]) -> None:
    """Within a run of one dtype, elements and bytes keep pace: one fused pass can take neighbours together."""
    layout = Layout.of(specs)
    stop = 0
    for entry in layout.trained:
        assert entry.element >= stop
        stop = entry.element + entry.spec.numel
    assert stop <= layout.trained_elements
    for left, right in pairwise(layout.trained):
        if left.spec.dtype == right.spec.dtype:
            step_bytes = right.offset_bytes - left.offset_bytes
            assert step_bytes == (right.element - left.element) * left.spec.dtype.itemsize
    assert all(entry.element == -1 for entry in layout.entries if not entry.spec.trained)


@given(some_specs)
def test_trained_parameters_of_one_kind_are_neighbours(specs: list[TensorSpec]) -> None:
    kinds = [(entry.spec.dtype, entry.spec.decay) for entry in Layout.of(specs).trained]
    changes = sum(left != right for left, right in pairwise(kinds))
    assert changes == max(len(set(kinds)) - 1, 0)


def test_a_small_layer_literally() -> None:
    layout = Layout.of(
        [
            TensorSpec("norm", (4,), torch.bfloat16, trained=True),
            TensorSpec("inv_freq", (2,), torch.float32),
            TensorSpec("router", (2, 4), torch.float32, trained=True, decay=True),
            TensorSpec("proj", (4, 64), torch.bfloat16, trained=True, decay=True),
            TensorSpec("frozen", (4,), torch.bfloat16),
        ]
    )
    assert [(entry.name, entry.offset_bytes, entry.element) for entry in layout.entries] == [
        ("proj", 0, 0),
        ("norm", 512, 256),
        ("router", 768, 384),
        ("inv_freq", 1024, -1),
        ("frozen", 1280, -1),
    ]
    assert (layout.nbytes, layout.trained_nbytes, layout.trained_elements) == (1536, 1024, 448)
    assert layout.trained_parameters == 256 + 4 + 8


def test_a_layer_without_tensors_takes_nothing() -> None:
    layout = Layout.of([])
    assert (layout.nbytes, layout.trained_nbytes, layout.trained_elements) == (0, 0, 0)
    assert layout.views(torch.empty(0, dtype=torch.uint8)) == {}


def test_scalars_and_empty_tensors_have_a_place() -> None:
    layout = Layout.of(
        [TensorSpec("scale", (), torch.float32, trained=True), TensorSpec("none", (0, 3), torch.bfloat16, trained=True)]
    )
    views = layout.views(torch.zeros(layout.nbytes, dtype=torch.uint8))
    views["scale"].fill_(3.5)
    assert views["scale"].item() == 3.5
    assert views["none"].shape == (0, 3)


def test_align_rounds_up() -> None:
    assert [align(n) for n in (0, 1, 255, 256, 257)] == [0, 256, 256, 256, 512]


def test_gaps_are_the_bytes_of_the_trained_prefix_that_no_tensor_has() -> None:
    odd = TensorSpec("odd", (3,), torch.float32, trained=True)
    whole = TensorSpec("whole", (64,), torch.float32, trained=True)
    frozen = TensorSpec("frozen", (5,), torch.float32)
    assert Layout.of([odd, whole, frozen]).trained_gaps == (slice(12, 256),)
    assert Layout.of([whole]).trained_gaps == ()
