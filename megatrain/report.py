"""What a run says of itself to whoever watches, from this process or another: plain values that JSON can carry.

`RunInfo` is fixed when the run starts and lies in its folder; `Status` is asked for as often as a viewer draws.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from megatrain.steering import Knobs, Position


class RunState(StrEnum):
    """Where a run is in its life."""

    NEW = "new"
    RUNNING = "running"
    PAUSED = "paused"  # held at a layer boundary
    STOPPED = "stopped"  # by request, before all steps were done
    FINISHED = "finished"
    FAILED = "failed"  # `error` says why
    LOST = "lost"  # its process is gone and did not say goodbye

    @property
    def over(self) -> bool:
        return self in (RunState.STOPPED, RunState.FINISHED, RunState.FAILED, RunState.LOST)


@dataclass(frozen=True)
class RunInfo:
    """What does not change while a run goes on.

    began_unix_s: wall-clock time of second 0 of every record. steps: how many were asked for.
    host_arenas: bytes by role. The rates and the peak are None where nobody measured them (bytes/s, FLOP/s).
    folder: of the run, or None.
    """

    model: str
    layers: int
    steps: int
    process_id: int
    began_unix_s: float
    device: str
    layer_bytes: int
    gradient_bytes: int
    shell_bytes: int
    host_arenas: dict[str, int]
    host_total_bytes: int
    device_limit_bytes: int
    folder: str | None = None
    h2d_bytes_per_s: float | None = None
    d2h_bytes_per_s: float | None = None
    peak_flops_per_s: float | None = None


@dataclass(frozen=True)
class TensorStats:
    """One tensor in four numbers; not_finite counts NaN and infinities, which the others leave out."""

    mean: float
    rms: float
    largest: float
    not_finite: int


@dataclass(frozen=True)
class Inspection:
    """What a held run can tell of the place where it is held.

    next: the operations to come, in the order in which they will be issued, in words.
    layer, phase: the layer that ran last, and which way. Forward: its input and output; backward: the gradient of
    its output (came) and of its input (goes on down).
    """

    next: list[str] = field(default_factory=list)
    layer: int | None = None
    phase: str = "forward"
    came: TensorStats | None = None
    went: TensorStats | None = None


@dataclass(frozen=True)
class Status:
    """What is so at this moment.

    lanes: per lane, what it is at and what waits behind, in words. planned_bytes: what the device arena may hold at
    most with the knobs and the batch at hand. held: only while the run is held.
    """

    state: RunState
    steps_done: int = 0
    knobs: Knobs | None = None
    micro_batch_size: int | None = None
    position: Position | None = None
    lanes: dict[str, list[str]] = field(default_factory=dict)
    planned_bytes: int = 0
    held: Inspection | None = None
    error: str | None = None
