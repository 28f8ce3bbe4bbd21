"""How fast each lane works, and how much lanes slow each other: of a described machine, or learned from a real run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf
from typing import Any

from megatrain.config import Throttle
from megatrain.machine import Machine
from megatrain.schedule import SHELL, Kind, Op
from megatrain.simulate.work import Work

# Note: what is reached of a data sheet
#   No run reaches the printed rates. Assumed, not measured here: six tenths of the products (H100-class cards settle
#   near 600 of 989 TFLOP/s in long bfloat16 work, by their power), 55 of a PCIe link's 64 GB/s, four fifths of memory.
SUSTAINED_FLOPS, SUSTAINED_LINK, SUSTAINED_MEMORY = 0.6, 55 / 64, 0.8

RESOURCES = ("compute", "the link", "the optimizer")


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Per second of each lane when it works alone.

    flops_per_s: of compute, by operation ("forward", "backward", "head"). launch_s: seconds that each of these takes
    besides, whatever its size; below zero where a small one computes at a higher rate than a large one.
    device_memory_bytes_per_s: what compute reads and writes on the device takes at least so long. fixed_s: seconds of
    an operation on the shell ("record", "backward", "norm") whatever its size; shell_bytes_per_s: what is on top.
    both_ways: share of its rate that a link keeps each way while both are in use.
    host_memory_bytes_per_s: what both ways of the link and AdamW share; None = they do not meet.
    """

    h2d_bytes_per_s: float
    d2h_bytes_per_s: float
    adamw_bytes_per_s: float
    flops_per_s: Mapping[str, float]
    device_memory_bytes_per_s: float = inf
    launch_s: Mapping[str, float] = field(default_factory=dict)
    fixed_s: Mapping[str, float] = field(default_factory=dict)
    shell_bytes_per_s: Mapping[str, float] = field(default_factory=dict)
    both_ways: float = 1.0
    host_memory_bytes_per_s: float | None = None

    @classmethod
    def of(cls, machine: Machine) -> Rates:
        """What a machine can sustain by its measured or printed rates; ValueError where they are not known."""
        link_in, link_out, flops = machine.h2d_bytes_per_s, machine.d2h_bytes_per_s, machine.peak_flops_per_s
        memory, device = machine.host_memory_bytes_per_s, machine.device_memory_bytes_per_s or inf
        if link_in is None or link_out is None or flops is None or memory is None:
            raise ValueError(
                f"the rates of {machine.name} are not known, so its time cannot be simulated; measure it "
                "(megatrain.machine.measure), or name a described machine"
            )
        printed = machine.data_sheets
        link, host = SUSTAINED_LINK if printed else 1.0, memory * (SUSTAINED_MEMORY if printed else 1.0)
        flops *= SUSTAINED_FLOPS if printed else 1.0
        return cls(
            h2d_bytes_per_s=link_in * link,
            d2h_bytes_per_s=link_out * link,
            adamw_bytes_per_s=host,
            flops_per_s=dict.fromkeys(("forward", "backward", "head"), flops),
            device_memory_bytes_per_s=device * SUSTAINED_MEMORY,
            both_ways=0.5 if machine.one_memory else 1.0,
            host_memory_bytes_per_s=host,
        )

    def throttled(self, throttle: Throttle) -> Rates:
        """With lanes slowed down as `EngineConfig.throttle` does."""
        link, update = throttle.link_bytes_per_s or inf, throttle.update_bytes_per_s or inf
        return replace(
            self,
            h2d_bytes_per_s=min(self.h2d_bytes_per_s, link),
            d2h_bytes_per_s=min(self.d2h_bytes_per_s, link),
            adamw_bytes_per_s=min(self.adamw_bytes_per_s, update),
        )

    def faster(self, resource: str, times: float) -> Rates:
        """With one of RESOURCES so many times as fast."""
        changes: dict[str, dict[str, Any]] = {
            "the link": {name: getattr(self, name) * times for name in ("h2d_bytes_per_s", "d2h_bytes_per_s")},
            "the optimizer": {
                "adamw_bytes_per_s": self.adamw_bytes_per_s * times,
                "host_memory_bytes_per_s": self.host_memory_bytes_per_s and self.host_memory_bytes_per_s * times,
            },
            "compute": {
                "flops_per_s": {kind: rate * times for kind, rate in self.flops_per_s.items()},
                "device_memory_bytes_per_s": self.device_memory_bytes_per_s * times,
                "launch_s": {kind: seconds / times for kind, seconds in self.launch_s.items()},
                "fixed_s": {kind: seconds / times for kind, seconds in self.fixed_s.items()},
                "shell_bytes_per_s": {kind: rate * times for kind, rate in self.shell_bytes_per_s.items()},
            },
        }
        return replace(self, **changes[resource])

    def seconds(self, op: Op, work: Work) -> float:
        """What an operation takes alone."""
        if op.lane != "compute":
            return work.nbytes / self.lanes_bytes_per_s[op.lane]
        kind = op.kind.value
        if op.layer is SHELL and kind in self.fixed_s:
            return max(0.0, self.fixed_s[kind] + work.device_bytes / self.shell_bytes_per_s.get(kind, inf))
        if op.kind is Kind.ADAMW and self.device_memory_bytes_per_s == inf:
            return work.device_bytes / self.adamw_bytes_per_s  # nobody knows the device's memory; a CPU's is RAM
        products_s = work.flops / self.flops_per_s[kind] + self._launched_s(op) if work.flops else 0.0
        return max(products_s, work.device_bytes / self.device_memory_bytes_per_s)

    def _launched_s(self, op: Op) -> float:
        """With a graph that was kept, backward does without its recompute, which is launched as a forward is."""
        recompute_s = self.launch_s.get("forward", 0.0) if op.graph else 0.0
        return self.launch_s.get(op.kind.value, 0.0) - (recompute_s if op.kind is Kind.BACKWARD else 0.0)

    @cached_property
    def lanes_bytes_per_s(self) -> dict[str, float]:
        return {"h2d": self.h2d_bytes_per_s, "d2h": self.d2h_bytes_per_s, "host": self.adamw_bytes_per_s}

    def speeds(self, lanes: frozenset[str]) -> Mapping[str, float]:
        """Of lanes that are at work together, the share of its rate that each keeps."""
        return self._speeds.get(lanes - {"compute"}, {})

    @cached_property
    def _speeds(self) -> dict[frozenset[str], Mapping[str, float]]:
        together = ({"h2d", "d2h"}, {"h2d", "host"}, {"d2h", "host"}, {"h2d", "d2h", "host"})
        return {frozenset(lanes): self._shared(lanes) for lanes in together}

    def _shared(self, lanes: set[str]) -> dict[str, float]:
        link = self.both_ways if {"h2d", "d2h"} <= lanes else 1.0
        kept = {lane: 1.0 if lane == "host" else link for lane in lanes}
        wanted = sum(share * self.lanes_bytes_per_s[lane] for lane, share in kept.items())
        squeeze = min(1.0, (self.host_memory_bytes_per_s or inf) / wanted)
        return {lane: share * squeeze for lane, share in kept.items()}
