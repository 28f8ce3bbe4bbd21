"""Host memory: one arena per role, and what each layer keeps in them.

An arena is one anonymous mapping. With CUDA it is registered in large slabs, so that copies are asynchronous
and every byte is used: torch's own pinned memory rounds each tensor up to a power of two.

Note: where slabs end
    CUDA refuses a copy that reaches from one registration into the next. So slabs end at multiples of SLAB_BYTES among
    addresses, whatever the arena, and copies are cut there (`slabs`).
"""

from __future__ import annotations

import math
import mmap
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any

import torch

from megatrain.layout import Layout, align

SLAB_BYTES = 64 << 30  # registered at a time; some drivers refuse half a terabyte at once


Touch = Callable[[torch.Tensor], None]


def slabs(address: int, nbytes: int) -> list[slice]:
    """The bytes from `address` on, cut where slabs end; offsets from `address`."""
    to_next = SLAB_BYTES - address % SLAB_BYTES
    cuts = [0, *range(to_next, nbytes, SLAB_BYTES), nbytes]
    return [slice(start, stop) for start, stop in pairwise(cuts) if start < stop]


class Arena:
    """Zeroed host memory of a known size, handed out in aligned pieces.

    pin: register it with CUDA for asynchronous copies. touch: what first writes to it, before it is registered.
    """

    def __init__(self, role: str, nbytes: int, *, pin: bool, touch: Touch | None = None) -> None:
        self.role = role
        self.nbytes = nbytes
        self._taken = 0
        self._registered: list[int] = []
        # Also of an engine that nobody closed: CUDA would take what is later mapped there for these pages.
        weakref.finalize(self, _unregister, self._registered).atexit = False
        self._bytes = torch.empty(0, dtype=torch.uint8)
        if nbytes:
            # Private: Linux gives huge pages to shared mappings only where an administrator allowed it.
            mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                with suppress(OSError):  # a kernel built without them says EINVAL
                    mapping.madvise(mmap.MADV_HUGEPAGE)  # fewer TLB misses in AdamW and copies
            self._bytes = torch.frombuffer(mapping, dtype=torch.uint8)  # keeps the mapping alive
        if touch is not None:
            touch(self._bytes)
        if pin:
            self._register()

    @property
    def pinned_bytes(self) -> int:
        return self.nbytes if self._registered else 0

    def take(self, nbytes: int) -> torch.Tensor:
        """The next `nbytes` bytes as a 1-D uint8 tensor, aligned as a layout expects."""
        start = self._taken
        self._taken = start + align(nbytes)
        assert self._taken <= self.nbytes, f"{self.role} arena: {self._taken} > {self.nbytes} bytes"
        return self._bytes[start : start + nbytes]

    def _register(self) -> None:
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        for slab in slabs(self._bytes.data_ptr(), self.nbytes):
            pointer = self._bytes.data_ptr() + slab.start
            error = int(runtime.cudaHostRegister(pointer, slab.stop - slab.start, 0))
            if error:
                self.close()
                _forget_the_error()
                raise RuntimeError(
                    f"CUDA could not pin {self.nbytes / 1e9:.1f} GB of host memory for {self.role} (error {error}); "
                    "raise the limit of locked memory (ulimit -l) or choose a smaller model"
                )
            self._registered.append(pointer)

    def close(self) -> None:
        """Unregister from CUDA. The memory itself lives as long as a tensor looks into it."""
        _unregister(self._registered)


def _forget_the_error() -> None:
    """CUDA hands it to the next kernel besides, whose work has nothing to do with it: so that is one of no use."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        with suppress(RuntimeError):
            torch.ones(1, device="cuda")


def _unregister(pointers: list[int]) -> None:
    while pointers:
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        runtime.cudaHostUnregister(pointers.pop())


@dataclass
class HostLayer:
    """What the host keeps of one layer (or the shell). All flat; offsets are the layout's.

    weights: uint8, what is streamed. low: int16, the other half of each bfloat16 weight's fp32 master.
    exp_avg, exp_avg_sq: one item per trained element. gradient: uint8, or None where slabs are used.
    reference: uint8, the weights as they were at first, never updated; or None where nobody asked for them.
    steps: how often each trained parameter was updated (AdamW's bias correction counts per parameter).
    weight_norm: 2-norm of the trained weights after the last update; NaN before anybody computed it.
    frozen_sum: of the weights that are not trained, for checkpoints; None before anybody computed it.
    """

    layout: Layout
    weights: torch.Tensor
    low: torch.Tensor | None
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    gradient: torch.Tensor | None
    reference: torch.Tensor | None = None
    steps: dict[str, int] = field(default_factory=dict)
    weight_norm: float = math.nan
    frozen_sum: int | None = None

    @property
    def state(self) -> list[torch.Tensor]:
        """What AdamW needs beside weights and gradient."""
        return [self.exp_avg, self.exp_avg_sq] + ([] if self.low is None else [self.low])

    def state_in(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Views of the same shapes into `flat` (1-D uint8), one after another."""
        starts = accumulate((align(tensor.nbytes) for tensor in self.state), initial=0)
        return [flat[at : at + t.nbytes].view(t.dtype) for at, t in zip(starts, self.state, strict=False)]

    def elsewhere(self, weights: torch.Tensor, state: torch.Tensor) -> HostLayer:
        """The same layer in other memory: `weights` and `state` (1-D uint8) hold copies. It counts its own steps."""
        exp_avg, exp_avg_sq, *low = self.state_in(state)
        return replace(
            self,
            weights=weights,
            low=low[0] if low else None,
            exp_avg=exp_avg,
            exp_avg_sq=exp_avg_sq,
            gradient=None,
            reference=None,
            steps=dict(self.steps),
        )


@dataclass(frozen=True)
class HostShape:
    """What decides how many bytes each role takes.

    split: keep int16 lower halves (bfloat16 weights). moment_bytes: 4 or 2.
    keep_gradients: a gradient per layer, needed while clipping waits for the global norm; else `slabs` of
    the largest layer, plus one for the shell. keep_reference: a second copy of the streamed weights.
    stream_state: moments and lower halves travel, too, so that they have to be pinned.
    """

    split: bool
    moment_bytes: int
    keep_gradients: bool
    slabs: int
    keep_reference: bool = False
    stream_state: bool = False


def role_bytes(layouts: Sequence[Layout], shell: Layout, shape: HostShape) -> dict[str, int]:
    """Bytes of every arena. `plan` prints these numbers, and `HostStore` allocates them."""
    every = [shell, *layouts]
    elements = [layout.trained_elements for layout in every]
    kept = every if shape.keep_gradients else [shell]
    slab = max((layout.trained_nbytes for layout in layouts), default=0)
    slabs = 0 if shape.keep_gradients else shape.slabs * align(slab)
    weights = sum(align(layout.nbytes) for layout in every)
    reference = {"reference weights": weights} if shape.keep_reference else {}
    return {
        "weights": weights,
        "master low halves": sum(align(2 * n) for n in elements) if shape.split else 0,
        "first moments": sum(align(shape.moment_bytes * n) for n in elements),
        "second moments": sum(align(shape.moment_bytes * n) for n in elements),
        "gradients": sum(align(layout.trained_nbytes) for layout in kept) + slabs,
        **reference,
    }


class HostStore:
    """All host state of a model: the shell's and every layer's."""

    def __init__(
        self, layouts: Sequence[Layout], shell: Layout, shape: HostShape, *, pin: bool, touch: Touch | None = None
    ) -> None:
        streamed = ["weights", "reference weights", "gradients"]
        streamed += ["master low halves", "first moments", "second moments"] if shape.stream_state else []
        self.arenas = {
            role: Arena(role, nbytes, pin=pin and role in streamed, touch=touch)
            for role, nbytes in role_bytes(layouts, shell, shape).items()
        }
        self._shape = shape
        self.shell = self._layer(shell, keep_gradient=True)
        self.layers = [self._layer(layout, keep_gradient=shape.keep_gradients) for layout in layouts]
        slab = 0 if shape.keep_gradients else max((layout.trained_nbytes for layout in layouts), default=0)
        self.slabs = [self.arenas["gradients"].take(slab) for _ in range(0 if shape.keep_gradients else shape.slabs)]

    @property
    def pinned_bytes(self) -> int:
        return sum(arena.pinned_bytes for arena in self.arenas.values())

    def _layer(self, layout: Layout, *, keep_gradient: bool) -> HostLayer:
        count, shape = layout.trained_elements, self._shape
        moment = torch.float32 if shape.moment_bytes == 4 else torch.bfloat16
        take = {role: arena.take for role, arena in self.arenas.items()}
        return HostLayer(
            layout=layout,
            weights=take["weights"](layout.nbytes),
            low=take["master low halves"](2 * count).view(torch.int16) if shape.split else None,
            exp_avg=take["first moments"](shape.moment_bytes * count).view(moment),
            exp_avg_sq=take["second moments"](shape.moment_bytes * count).view(moment),
            gradient=take["gradients"](layout.trained_nbytes) if keep_gradient else None,
            reference=take["reference weights"](layout.nbytes) if shape.keep_reference else None,
        )

    def close(self) -> None:
        for arena in self.arenas.values():
            arena.close()
