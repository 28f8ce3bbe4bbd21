"""Gradients in parts: what leaves is the whole gradient, rounded once, in the place that the layout gives it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatrain.gradients import GradientSum, Norms
from megatrain.layout import Layout, TensorSpec

NAN_BYTE = 0xFF  # every float made of it is NaN
SHAPES: dict[str, tuple[int, ...]] = {"a": (3, 5), "unused": (4,), "b": (7,), "scale": ()}


def layout_of(dtype: torch.dtype) -> Layout:
    return Layout.of([TensorSpec(name, shape, dtype, trained=True) for name, shape in SHAPES.items()])


def dirty(layout: Layout) -> torch.Tensor:
    """A buffer full of what was there before."""
    return torch.full((layout.trained_nbytes,), NAN_BYTE, dtype=torch.uint8)


def dirty_sums(layout: Layout) -> torch.Tensor:
    return torch.full((layout.trained_elements + 8,), float("nan"))


def random_parts(count: int, dtype: torch.dtype, seed: int = 0) -> list[dict[str, torch.Tensor]]:
    """Gradients of very different sizes, some of which cancel."""
    generator = torch.Generator().manual_seed(seed)
    return [
        {
            name: (torch.randn(shape, generator=generator) * 10.0 ** float(part % 3)).to(dtype)
            for name, shape in SHAPES.items()
            if name != "unused"
        }
        for part in range(count)
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("with_sums", [False, True])
def test_a_single_part_is_copied_bit_by_bit(dtype: torch.dtype, with_sums: bool) -> None:
    layout = layout_of(dtype)
    flat = dirty(layout)
    total = GradientSum(layout, flat, dirty_sums(layout) if with_sums else None)
    [part] = random_parts(1, dtype)
    for name, gradient in part.items():
        total.add(name, gradient)
    total.finish()
    views = layout.gradient_views(flat)
    assert all(torch.equal(views[name], gradient) for name, gradient in part.items())


@given(count=st.integers(2, 9), seed=st.integers(0, 10_000))
def test_many_bfloat16_parts_are_rounded_once(count: int, seed: int) -> None:
    layout = layout_of(torch.bfloat16)
    flat = dirty(layout)
    total = GradientSum(layout, flat, dirty_sums(layout))
    parts = random_parts(count, torch.bfloat16, seed)
    for part in parts:
        for name, gradient in part.items():
            total.add(name, gradient)
    total.finish()
    for name, view in layout.gradient_views(flat).items():
        if name != "unused":
            in_order = [part[name].float() for part in parts]
            assert torch.equal(view, sum(in_order[1:], start=in_order[0]).bfloat16())
            exact = sum(part[name].double() for part in parts)
            assert isinstance(exact, torch.Tensor)
            sizes = sum(part[name].double().abs() for part in parts)
            # Half a unit of bfloat16's last place (8 bits), and float32's own error of the sum.
            assert ((view.double() - exact).abs() <= exact.abs() * 2**-8 + sizes * count * 2**-24).all()


def test_a_sum_kept_in_bfloat16_would_have_lost_the_small_parts() -> None:
    """256 + 1 is 256 in bfloat16: adding ones there would stop; here all arrive."""
    layout = layout_of(torch.bfloat16)
    flat = dirty(layout)
    total = GradientSum(layout, flat, dirty_sums(layout))
    total.add("b", torch.full((7,), 256.0).bfloat16())
    for _ in range(64):
        total.add("b", torch.ones(7).bfloat16())
    total.finish()
    assert layout.gradient_views(flat)["b"].tolist() == [320.0] * 7


def test_float32_gradients_need_no_sums_of_their_own() -> None:
    layout = layout_of(torch.float32)
    flat = dirty(layout)
    total = GradientSum(layout, flat, dirty_sums(layout))
    parts = random_parts(3, torch.float32)
    for part in parts:
        for name, gradient in part.items():
            total.add(name, gradient)
    total.finish()
    views = layout.gradient_views(flat)
    for name in ("a", "b", "scale"):
        assert torch.equal(views[name], parts[0][name] + parts[1][name] + parts[2][name])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_parameter_without_gradient_is_zero_and_shifts_nobody(dtype: torch.dtype) -> None:
    layout = layout_of(dtype)
    flat = dirty(layout)
    total = GradientSum(layout, flat, dirty_sums(layout))
    [part] = random_parts(1, dtype)
    total.add("b", part["b"])
    norms = total.finish()
    views = layout.gradient_views(flat)
    assert torch.equal(views["b"], part["b"])
    for name in ("a", "unused", "scale"):
        assert views[name].eq(0).all()
    assert set(norms) == total.present == {"b"}


def test_norms_are_float32_of_what_leaves() -> None:
    """A norm computed in bfloat16 has 8 bits; this one has 24."""
    layout = layout_of(torch.bfloat16)
    flat = dirty(layout)
    total = GradientSum(layout, flat, dirty_sums(layout))
    for part in random_parts(3, torch.bfloat16):
        for name, gradient in part.items():
            total.add(name, gradient)
    norms = total.finish()
    for name, view in layout.gradient_views(flat).items():
        if name in norms:
            assert norms[name].dtype == torch.float32
            assert norms[name].shape == ()
            torch.testing.assert_close(norms[name].double(), view.double().norm(), rtol=1e-6, atol=0)


def test_mixed_dtypes_sum_each_in_its_own_way() -> None:
    """A layer in bfloat16 with a float32 router, as mixture models have it."""
    layout = Layout.of(
        [
            TensorSpec("proj", (5,), torch.bfloat16, trained=True),
            TensorSpec("router", (3,), torch.float32, trained=True),
            TensorSpec("frozen", (9,), torch.bfloat16),
        ]
    )
    flat = dirty(layout)
    total = GradientSum(layout, flat, dirty_sums(layout))
    for value in (256.0, 1.0, 1.0):
        total.add("proj", torch.full((5,), value).bfloat16())
        total.add("router", torch.full((3,), value))
    assert total.finish().keys() == {"proj", "router"}
    views = layout.gradient_views(flat)
    assert views["proj"].tolist() == [258.0] * 5
    assert views["router"].tolist() == [258.0] * 3


def test_the_next_gradient_in_the_same_buffer_starts_anew() -> None:
    layout = layout_of(torch.bfloat16)
    flat, sums = dirty(layout), dirty_sums(layout)
    for value in (3.0, 5.0):
        total = GradientSum(layout, flat, sums)
        total.add("b", torch.full((7,), value).bfloat16())
        total.finish()
    assert layout.gradient_views(flat)["b"].tolist() == [5.0] * 7


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_norm_is_torchs_own_whatever_was_widened_before(dtype: torch.dtype) -> None:
    norm, generator = Norms(), torch.Generator().manual_seed(0)
    for shape in [(300, 77), (5,), (), (1000, 130), (64, 64)]:
        tensor = torch.randn(shape, generator=generator).to(dtype)
        assert torch.equal(norm(tensor), torch.linalg.vector_norm(tensor, dtype=torch.float32))
