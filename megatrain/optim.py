"""AdamW over flat arrays in host RAM, in place: one compiled pass, or the same arithmetic in torch operations.

Both give the bits of torch.optim.AdamW on the CPU (foreach=False, fused=False) for a gradient first multiplied
by `grad_scale`. A float32 master may be stored split in two, so that the bfloat16 half is what is streamed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from megatrain import native

_CHUNK = 1 << 18  # elements: a temporary of the torch operations takes 1 MiB
DEVICE_CHUNK = 1 << 20  # on a card, where a call costs more; its temporaries still fit into a second-level cache
DEVICE_CHUNK_BYTES = 72 * DEVICE_CHUNK  # most that temporaries take there at one time
# What the torch operations read and write for an element, each by itself, by (a split master?, bytes of a moment).
DEVICE_TRAFFIC_BYTES = {(False, 4): 96, (False, 2): 516, (True, 4): 192, (True, 2): 612}


@dataclass(frozen=True)
class AdamWStep:
    """The plain numbers of one update.

    step counts from 1. grad_scale is the clip factor, multiplied into the gradient first. as_torch: every rounding is
    torch's; otherwise the compiled kernel takes the processor's root and one division less, and an update differs by a
    few units in its last place.
    """

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int
    grad_scale: float = 1.0
    as_torch: bool = True

    def __post_init__(self) -> None:
        if self.step < 1:
            raise ValueError(f"step counts updates from 1 (bias correction divides by zero at 0); got {self.step}")


def native_available() -> bool:
    """Whether updates run in the compiled kernel. The first call builds it, which takes seconds."""
    return native.kernel() is not None


def update(
    weight: Tensor,
    low: Tensor | None,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: AdamWStep,
    *,
    threads: int | None = None,
) -> float:
    """Apply one AdamW step to `weight`, `low`, `exp_avg` and `exp_avg_sq` in place; `grad` is only read.

    Returns the sum of the squares of the updated float32 weights, which costs nothing in the same pass.

    All are 1-D contiguous CPU tensors of one length. `weight` is the float32 master, or with `low` (int16)
    the bfloat16 half of a split one. `grad` is float32 or bfloat16. The moments are both float32, or both
    bfloat16 and then rounded stochastically, by bits that depend on the step and the element's index alone.
    threads: of the compiled kernel, None = one per core; the result does not depend on it.
    Raises ValueError for tensors that are not as said.
    """
    _check_in_host(weight, low, grad, exp_avg, exp_avg_sq)
    _check_arrays(weight, low, grad, exp_avg, exp_avg_sq)
    if threads is not None and threads < 1:
        raise ValueError(f"threads must be at least 1, or None for one per core; got {threads}")
    kernel = native.kernel()
    if kernel is None:
        return float(_update_torch(weight, low, grad, exp_avg, exp_avg_sq, _factors(step), _CHUNK))
    addresses = (0 if a is None else a.data_ptr() for a in (weight, low, grad, exp_avg, exp_avg_sq))
    bf16_grad, bf16_moments = (a.dtype == torch.bfloat16 for a in (grad, exp_avg))
    count = _core_count() if threads is None else threads
    return kernel(
        native.Arrays(*addresses), _factors(step), weight.numel(), bf16_grad, bf16_moments, step.as_torch, count
    )


def update_on_device(
    weight: Tensor, low: Tensor | None, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, step: AdamWStep
) -> Tensor:
    """The same where all lie on one device, in torch operations; the sum stays there, so that nobody waits for it.

    The device of CPU lanes is host memory: there it is `update`, with its bits.
    """
    if weight.device.type == "cpu":
        return torch.tensor(update(weight, low, grad, exp_avg, exp_avg_sq, step), dtype=torch.float64)
    _check_arrays(weight, low, grad, exp_avg, exp_avg_sq)
    return _update_torch(weight, low, grad, exp_avg, exp_avg_sq, _factors(step), DEVICE_CHUNK)


def split(master: Tensor, hi_out: Tensor, lo_out: Tensor) -> None:
    """Store float32 `master` as bfloat16 `hi_out` (rounded to nearest, ties away from zero) and int16 `lo_out`.

    hi = (bits + 0x8000) >> 16 and lo = bits - (hi << 16), so join() gives back every bit of every number and
    infinity. A number beyond bfloat16's largest has an infinite `hi`, as with a cast, and still joins exactly.
    A NaN stays a NaN in `hi` and after join(), but not the same one.
    """
    _check("master", master, master.numel(), torch.float32)
    _check("hi_out", hi_out, master.numel(), torch.bfloat16)
    _check("lo_out", lo_out, master.numel(), torch.int16)
    master, hi = master.detach(), hi_out.detach()
    for part in _chunks(master.numel()):
        _split(master[part], hi[part], lo_out[part])


def _split(master: Tensor, hi: Tensor, lo: Tensor) -> None:
    hi.view(torch.int16)[:] = _high_half(master, 0x8000)
    lo[:] = master.view(torch.int32)  # keeps the lower 16 bits


def join(hi: Tensor, lo: Tensor) -> Tensor:
    """The float32 master (a new tensor) whose halves split() stored in `hi` and `lo`."""
    _check("hi", hi, hi.numel(), torch.bfloat16)
    _check("lo", lo, hi.numel(), torch.int16)
    bits = hi.detach().view(torch.int16).to(torch.int32)
    return bits.bitwise_left_shift_(16).add_(lo).view(torch.float32)


def _factors(step: AdamWStep) -> native.Factors:
    """The scalars of torch's _single_tensor_adam: computed in double precision, rounded to float32 once."""
    return native.Factors(
        decay=1 - step.lr * step.weight_decay,
        lerp_weight=1 - step.beta1,
        beta2=step.beta2,
        one_minus_beta2=1 - step.beta2,
        bias2_sqrt=(1 - step.beta2**step.step) ** 0.5,
        eps=step.eps,
        negative_step_size=-(step.lr / (1 - step.beta1**step.step)),
        grad_scale=step.grad_scale,
        rounding_key=_scramble(step.step),
    )


def _update_torch(
    weight: Tensor,
    low: Tensor | None,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    f: native.Factors,
    chunk: int,
) -> Tensor:
    """The compiled pass as torch operations, chunk by chunk."""
    w, g, m, v = (a.detach() for a in (weight, grad, exp_avg, exp_avg_sq))
    squares = torch.zeros((), dtype=torch.float64, device=w.device)
    for part in _chunks(w.numel(), chunk):
        half = None if low is None else low[part]
        squares += _update_chunk(w[part], half, g[part], m[part], v[part], f, part.start)
    return squares


def _update_chunk(
    weight: Tensor,
    low: Tensor | None,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    f: native.Factors,
    begin: int,
) -> Tensor:
    g = grad.float() if f.grad_scale == 1 else grad.float() * f.grad_scale
    w = weight if low is None else join(weight, low)
    m, v = exp_avg.float(), exp_avg_sq.float()  # the arrays themselves where they are float32
    m.lerp_(g, f.lerp_weight)
    v.mul_(f.beta2).addcmul_(g, g, value=f.one_minus_beta2)
    denominator = (v.sqrt() / f.bias2_sqrt).add_(f.eps)
    w.mul_(f.decay).addcdiv_(m, denominator, value=f.negative_step_size)
    if low is not None:
        _split(w, weight, low)
    if exp_avg.dtype == torch.bfloat16:
        index = torch.arange(begin, begin + grad.numel(), device=grad.device) & 0xFFFFFFFF
        random = _scramble(index ^ f.rounding_key)
        exp_avg.view(torch.int16)[:] = _high_half(m, random & 0xFFFF)
        exp_avg_sq.view(torch.int16)[:] = _high_half(v, random >> 16)
    return w.square().sum(dtype=torch.float64)


def _chunks(numel: int, chunk: int = _CHUNK) -> Iterator[slice]:
    return (slice(begin, begin + chunk) for begin in range(0, numel, chunk))


def _high_half(x: Tensor, rounding: Tensor | int) -> Tensor:
    """The upper 16 bits of float32 `x` after adding `rounding` (< 2**16) to its bits; a NaN stays one."""
    bits = x.view(torch.int32)
    rounded = (bits + torch.as_tensor(rounding, dtype=torch.int32)) >> 16
    return torch.where(x.isnan(), (bits >> 16) | 0x40, rounded).to(torch.int16)


_Counter = TypeVar("_Counter", int, Tensor)


def _scramble(x: _Counter) -> _Counter:
    """Random-looking 32 bits for a 32-bit counter: `scramble` of adamw.cpp, on an int or an int64 tensor."""
    x = ((x ^ x >> 16) * 0x7FEB352D) & 0xFFFFFFFF
    x = ((x ^ x >> 15) * 0x846CA68B) & 0xFFFFFFFF
    return x ^ x >> 16


def _core_count() -> int:
    # Where the system can tell: a container or a job may own fewer cores than the machine has.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _check_in_host(*arrays: Tensor | None) -> None:
    for name, array in zip(("weight", "low", "grad", "exp_avg", "exp_avg_sq"), arrays, strict=True):
        if array is not None and array.device.type != "cpu":
            raise ValueError(f"{name} must be in host memory (device cpu); got {array.device}")


def _check_arrays(weight: Tensor, low: Tensor | None, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor) -> None:
    numel = weight.numel()
    _check("weight", weight, numel, torch.float32 if low is None else torch.bfloat16)
    if low is not None:
        _check("low", low, numel, torch.int16)
    _check("grad", grad, numel, torch.float32, torch.bfloat16)
    _check("exp_avg", exp_avg, numel, torch.float32, torch.bfloat16)
    _check("exp_avg_sq", exp_avg_sq, numel, exp_avg.dtype)


def _check(name: str, tensor: Tensor, numel: int, *dtypes: torch.dtype) -> None:
    if tensor.dtype not in dtypes:
        raise ValueError(f"{name} must be {' or '.join(map(str, dtypes))} here; got {tensor.dtype}")
    if tensor.dim() != 1 or not tensor.is_contiguous():
        raise ValueError(
            f"{name} must be 1-D and contiguous (pass its flat buffer); "
            f"got shape {tuple(tensor.shape)}, strides {tensor.stride()}"
        )
    if tensor.numel() != numel:
        raise ValueError(f"{name} must have the length of the other arrays, {numel}; got {tensor.numel()}")
