"""The records a run leaves behind: plain frozen values, all on one clock (seconds since the run began)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal

Lane = Literal["h2d", "compute", "d2h", "host"]
Op = Literal[
    "load",
    "record",
    "forward",
    "head",
    "backward",
    "norm",
    "unload",
    "update",
    "offload",
    "fetch",
    "score",
    "load state",
    "adamw",
    "store",
]
SlotKind = Literal["weights", "gradients", "optimizer"]
SlotState = Literal["free", "loading", "ready", "in_use", "draining", "removed"]


@dataclass(frozen=True, slots=True)
class Span:
    """One piece of work that one lane did.

    op: "load" weights in; "record" the call with stubbed layers; "forward", "head", "backward" compute;
        "score" the head alone: log-probabilities of the labels, without a gradient;
        "norm" the global gradient norm, read by the host; "unload" gradients out; "update" AdamW;
        "offload" and "fetch" saved layer inputs to the host and back;
        "load state", "adamw" and "store" AdamW on the device: its state in, itself, state and weights out.
    layer: None = the shell (embeddings, final norm, head). slot: the device buffer, where there is one.
    """

    lane: Lane
    op: Op
    step: int
    layer: int | None
    micro_batch: int | None
    slot: int | None
    start_s: float
    end_s: float
    nbytes: int


@dataclass(frozen=True, slots=True)
class SlotChange:
    """A device buffer entered a state, for a layer (None when it is free or removed)."""

    time_s: float
    kind: SlotKind
    slot: int
    state: SlotState
    layer: int | None
    step: int


@dataclass(frozen=True, slots=True)
class MemorySample:
    """Bytes held at one moment. The first five are None without a CUDA device, or where NVML cannot tell.

    device_allocated, device_reserved: torch's allocator. process_device: this process, as the driver counts it.
    device_used, device_total: the whole card, all processes. arena: the engine's device arena.
    """

    time_s: float
    device_allocated_bytes: int | None
    device_reserved_bytes: int | None
    process_device_bytes: int | None
    device_used_bytes: int | None
    device_total_bytes: int | None
    arena_bytes: int
    host_rss_bytes: int
    host_pinned_bytes: int
    host_available_bytes: int


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One optimizer step.

    tokens: predicted (not ignored) tokens. sequence_tokens: tokens processed, padding not counted.
    flops: model FLOPs of the step (see `model_flops`). skipped: why the update was not applied, or None.
    metrics: further figures that the training recipe has to tell, such as rewards.
    """

    step: int
    start_s: float
    end_s: float
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    sequence_tokens: int
    flops: int
    prefetch_depth: int
    micro_batches: int
    skipped: str | None
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EvaluationRecord:
    """How well the model predicted data that it is not trained on, after a step.

    step: optimizer steps done before. loss: mean negative log-likelihood per predicted token, or what the recipe takes
    for it. tokens: predicted tokens, or pairs, or answers. metrics: what else the recipe has to tell.
    """

    time_s: float
    step: int
    loss: float
    tokens: int
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SampleRecord:
    """What the model said to a prompt, after `step` optimizer steps."""

    time_s: float
    step: int
    prompt: str
    text: str


@dataclass(frozen=True, slots=True)
class LayerStats:
    """Scales of one layer in one step, recorded at the step's end; NaN where there is nothing to measure.

    grad_norm: 2-norm of the layer's gradient before clipping. weight_norm: 2-norm of its weights before this step's
    update. output_rms: root mean square of its output over all tokens and features of the step.
    """

    time_s: float
    step: int
    layer: int
    grad_norm: float
    weight_norm: float
    output_rms: float


HELD: Final = "held"


@dataclass(frozen=True, slots=True)
class Marker:
    """A wish took effect, at this step and layer: a knob has a new value, or the run was paused, resumed, stopped.

    The one named HELD says when a run went on after it was held: `old` to `new` is the time (seconds) it was held.
    """

    time_s: float
    name: str
    old: object
    new: object
    step: int
    layer: int | None
