"""Which kernel computes attention: the one that torch chooses, one by name, or the fastest of those that run.

torch's scaled_dot_product_attention has several. Which is fastest depends on the card, the width of a head, the length
and whether there is a mask.

Note: one choice for the whole process
    torch keeps it in flags that all threads share, and reads them when attention runs forward; backward runs what
    forward chose. So layers of two engines that choose take turns, under a lock. What else the process computes in that
    moment, an engine that leaves the choice to torch included, follows the same flags.

Note: before a kernel is used it is rehearsed
    Where training meets a new kind of call, a layer first runs forward and backward under the kernel, and nobody
    notices: random numbers are put back, gradients dropped. A kernel that fails (cuDNN may find no plan) is left out
    with a warning, so that it does not fail in the middle of a step. "measured" times those that did run. torch's
    unfused kernel is among them only where whole scores are no larger than what they are computed from: more is in no
    plan of memory.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.backends import cuda as flags
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from megatrain.anatomy.calls import LayerCall
from megatrain.anatomy.compiled import structure_keys
from megatrain.anatomy.rng import RandomState

log = logging.getLogger("megatrain")

TORCH, MEASURED, MATH = "torch", "measured", "math"
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    MATH: SDPBackend.MATH,
}
FUSED_ON = {"cuda": ("flash", "cudnn", "efficient"), "cpu": ("flash",)}
FUSED_CALLS = {
    getattr(torch.ops.aten, f"_scaled_dot_product_{operation}").default: name
    for operation, name in {
        "flash_attention": "flash",
        "flash_attention_for_cpu": "flash",
        "efficient_attention": "efficient",
        "cudnn_attention": "cudnn",
    }.items()
}
# Whether the user lets torch choose a kernel, and what makes it so.
_SWITCHES: list[tuple[Callable[[], bool], Callable[[bool], None]]] = [
    (flags.flash_sdp_enabled, flags.enable_flash_sdp),
    (flags.cudnn_sdp_enabled, flags.enable_cudnn_sdp),
    (flags.mem_efficient_sdp_enabled, flags.enable_mem_efficient_sdp),
    (flags.math_sdp_enabled, flags.enable_math_sdp),
]
MOST_KINDS = 8  # of calls that are rehearsed, for layers of one structure
ROUNDS = 3  # in which kernels are timed in turn; the fastest run of each counts
TIE = 0.02  # within it the first is taken, so that noise does not choose

_TURN = threading.RLock()

Kind = tuple[Hashable, ...]


def require_choice(model: Any, asked: str) -> None:
    """Raise ValueError where a kernel is asked for, and the model does not compute attention by any of them."""
    used = getattr(model.config.get_text_config(), "_attn_implementation", None)
    if asked != TORCH and used != "sdpa":
        raise ValueError(
            f"attention={asked!r} chooses among the kernels of torch's scaled_dot_product_attention, and this model "
            f'has attn_implementation={used!r}; load it with attn_implementation="sdpa" if it can, or leave attention '
            f"at {TORCH!r}"
        )


@contextmanager
def attention_by(name: str) -> Iterator[None]:
    """Within, attention runs forward by this kernel wherever it can, else by torch's choice ("torch": always)."""
    if name == TORCH:
        yield
        return
    with _TURN, _all_enabled() as others, sdpa_kernel([BACKENDS[name]], set_priority=True):
        if name != MATH:  # which runs everything, and on a CPU only where nothing else is enabled
            for enable in others:  # behind the one that was asked for, in torch's order
                enable(True)
        yield


@contextmanager
def _all_enabled() -> Iterator[list[Callable[[bool], None]]]:
    """Within, no kernel is switched off, or torch would put its order back another way. Yields those that were on."""
    before = [(enable, enabled()) for enabled, enable in _SWITCHES]
    try:
        for enable, _ in before:
            enable(True)
        yield [enable for enable, on in before if on]
    finally:
        for enable, on in before:
            enable(on)


class Kernels:
    """Says by which kernel each layer runs. asked: `EngineConfig.attention`."""

    def __init__(self, asked: str, layers: Sequence[nn.Module], device: torch.device) -> None:
        self._asked = asked
        self._layers = layers
        self._device = device
        self._rehearses = asked not in (TORCH, MATH)
        keys = structure_keys(layers) if self._rehearses else []
        self._structures = [keys.index(key) for key in keys]
        self.chosen: dict[tuple[int, Kind], str] = {}  # by the first layer of a structure, and the kind of call
        if asked != TORCH and device.type == "cuda":
            _let_torch_settle_its_order(device)

    def within(self, layer: int, call: LayerCall, hidden: torch.Tensor) -> AbstractContextManager[None]:
        """What a layer's forward runs in, whatever for."""
        if self._asked == TORCH:
            return nullcontext()
        known = self.chosen.get(self._key(layer, call, hidden)) if self._rehearses else None
        return attention_by(known or self._unknown)

    def within_inference(self) -> AbstractContextManager[None]:
        """Likewise where the model itself calls a layer, by whatever lengths it likes."""
        return attention_by(self._unknown)

    @property
    def _unknown(self) -> str:
        return TORCH if self._asked == MEASURED else self._asked

    def _key(self, layer: int, call: LayerCall, hidden: torch.Tensor) -> tuple[int, Kind]:
        shapes = (leaf.shape if isinstance(leaf, torch.Tensor) else None for leaf in call.leaves)
        return self._structures[layer], (hidden.shape, *shapes)

    def is_new(self, layer: int, call: LayerCall, hidden: torch.Tensor) -> bool:
        """Whether to rehearse before this call."""
        if not self._rehearses:
            return False
        structure, kind = self._key(layer, call, hidden)
        known = [of for of, _ in self.chosen if of == structure]
        return (structure, kind) not in self.chosen and len(known) < MOST_KINDS

    def rehearse(self, layer: int, call: LayerCall, hidden: torch.Tensor, run: Callable[[], None]) -> None:
        """Choose for calls of this kind. run: the layer's forward and backward, from which nothing must remain."""
        what = f"{type(self._layers[layer]).__name__} on {tuple(hidden.shape)}"
        with RandomState(self._device).kept():
            choose = self._fastest if self._asked == MEASURED else self._asked_if_it_works
            self.chosen[self._key(layer, call, hidden)] = choose(run, what)

    def _asked_if_it_works(self, run: Callable[[], None], what: str) -> str:
        seen = rehearsed(self._asked, run, what)
        if seen is not None and self._asked not in seen.kernels:
            log.info("attention: %s did not run in %s; torch chooses there", self._asked, what)
        return TORCH if seen is None else self._asked

    def _fastest(self, run: Callable[[], None], what: str) -> str:
        seen = {name: rehearsed(name, run, what) for name in FUSED_ON[self._device.type]}
        run_by = [name for name, found in seen.items() if found is not None and name in found.kernels]
        if any(found is not None and found.small for found in seen.values()):
            run_by.append(MATH)
        if not run_by:
            log.info("attention: no fused kernel ran in %s; torch chooses there", what)
            return TORCH
        best_s = self._timed(run_by, run)
        fastest = next(name for name in run_by if best_s[name] <= (1 + TIE) * min(best_s.values()))
        told = ", ".join(f"{name} {1e3 * seconds:.3g} ms" for name, seconds in best_s.items())
        log.info("attention: %s forward and backward: %s; %s is taken", what, told, fastest)
        return fastest

    def _timed(self, names: Sequence[str], run: Callable[[], None]) -> dict[str, float]:
        best_s = dict.fromkeys(names, math.inf)
        for _ in range(ROUNDS):
            for name in names:
                best_s[name] = min(best_s[name], self._seconds(name, run))
        return best_s

    def _seconds(self, name: str, run: Callable[[], None]) -> float:
        self._catch_up()
        start_s = time.perf_counter()
        with attention_by(name):
            run()
        self._catch_up()
        return time.perf_counter() - start_s

    def _catch_up(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()


class Seeing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes which fused kernels run forward, and whether the scores that they avoid would be small."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kernels: set[str] = set()
        self._ratios: list[float] = []  # of elements: scores ÷ query, key and value

    @property
    def small(self) -> bool:
        return max(self._ratios, default=math.inf) <= 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in FUSED_CALLS:
            query, key, value = args[:3]  # (B, H, T, D)
            scores = query[..., 0].numel() * key.shape[-2]
            self.kernels.add(FUSED_CALLS[func])
            self._ratios.append(scores / (query.numel() + key.numel() + value.numel()))
        return func(*args, **(kwargs or {}))


def rehearsed(name: str, run: Callable[[], None], what: str) -> Seeing | None:
    """What ran with this kernel first in order; None if something failed other than for lack of memory."""
    seeing = Seeing()
    try:
        with attention_by(name), seeing:
            run()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # whatever a kernel complains of
        log.warning("attention: %s is left out for %s: %s", name, what, (str(error).splitlines() or ["no reason"])[0])
        return None
    return seeing


def _let_torch_settle_its_order(device: torch.device) -> None:
    """At the first call in a process torch decides whether it prefers cuDNN, whatever order was asked for by then."""
    one = torch.zeros(1, 1, 64, 64, dtype=torch.bfloat16, device=device)
    scaled_dot_product_attention(one, one, one)
