"""What a user may choose: frozen dataclasses, validated once at the door.

Inner functions take plain values, so nothing below this module repeats a check made here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

Device = Literal["auto", "cuda", "cpu"]
Dtype = Literal["bfloat16", "float32"]
OptimizerOverlap = Literal["forward", "backward", "none"]
OptimizerDevice = Literal["host", "device"]
Auto = Literal["auto"]
Rounding = Literal["torch", "fast"]
Placement = Literal["auto", "none"]
Attention = Literal["torch", "measured", "flash", "cudnn", "efficient", "math"]
Knob = Literal[
    "micro_batch_size",
    "offload_activations",
    "prefetch_depth",
    "grad_buffers",
    "keep_attention",
    "kept_graphs",
    "resident_layers",
]
SinkName = Literal["tensorboard", "wandb"]


def _require(condition: bool, rule: str, value: object) -> None:
    if not condition:
        raise ValueError(f"{rule}; got {value!r}")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def check_prefetch_depth(depth: int) -> None:
    """Raise ValueError unless `depth` is a whole number ≥ 0 (checked here and wherever it can change)."""
    _require(
        _is_int(depth) and depth >= 0,
        "prefetch_depth must be a whole number ≥ 0 (1 = double buffering)",
        depth,
    )


def check_grad_buffers(count: int) -> None:
    """Raise ValueError unless `count` is a whole number ≥ 1."""
    _require(_is_int(count) and count >= 1, "grad_buffers must be a whole number ≥ 1", count)


def check_resident_layers(count: int) -> None:
    """Raise ValueError unless `count` is a whole number ≥ 0."""
    _require(_is_int(count) and count >= 0, "resident_layers must be a whole number ≥ 0", count)


def check_micro_batch_size(rows: int) -> None:
    """Raise ValueError unless `rows` is a whole number ≥ 1."""
    _require(_is_int(rows) and rows >= 1, "micro_batch_size must be a whole number ≥ 1 of sequences", rows)


def _is_rate(value: object) -> bool:
    return value is None or (_is_number(value) and value > 0)  # type: ignore[operator]


@dataclass(frozen=True, kw_only=True)
class Throttle:
    """Slower lanes than the machine has, to see what a slow link or a slow host does. CPU lanes only.

    link_bytes_per_s: of weights in and gradients out, each way. update_bytes_per_s: of AdamW on the host.
    None = as fast as it is.
    """

    link_bytes_per_s: float | None = None
    update_bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        for name, rate in (("link", self.link_bytes_per_s), ("update", self.update_bytes_per_s)):
            _require(_is_rate(rate), f"{name}_bytes_per_s must be a number > 0 of bytes per second, or None", rate)


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How a model streams.

    device: "auto" takes CUDA where there is a card, else the CPU lanes.
    dtype: what is streamed and computed in. "bfloat16" keeps an exact fp32 master beside it.
    micro_batch_size: sequences per layer visit; None = the whole batch at once.
    prefetch_depth: layers loaded ahead of compute; 0 = none, 1 = double buffering.
    grad_buffers: device buffers that hold a layer's gradient until it has left; with optimizer_device="device" those
        that hold its optimizer state, beside one for gradients, which do not leave.
    resident_layers: further layers whose weights stay on the device from forward to backward;
        "auto" fills the device memory that the plan leaves over.
    kept_graphs: layers, from the top, whose autograd graph stays on the device from forward to backward, so that they
        are not computed again; "auto" fills the device memory that is left, before resident layers do.
    keep_attention: of layers that are computed again, what fused attention gave stays on the device from forward to
        backward: as much as a layer's input, for what takes most of the time of long sequences. "auto" = if it fits.
    attention: the kernel of torch's scaled_dot_product_attention that layers run. "torch" = as torch chooses. A name =
        this one wherever it can run, and torch's choice where it cannot. "measured" = in the first step that meets a
        new size, of up to eight, a layer is timed forward and backward by each that runs, and the fastest is kept.
        Each rounds in its own way: results have the bits of plain Hugging Face with the same kernel, and where it is
        measured, another run may choose another. "math" keeps whole scores.
    offload_activations: saved layer inputs go to the host; "auto" = only if they would not fit.
    loss_chunk_tokens: tokens whose logits exist at one time.
    tile_tokens: tokens whose activations within an MLP exist at one time, forward and backward; None = a micro-batch's.
        For long sequences. Matrix products of other row counts and sums over tiles may round in another way.
    compile: run layers through torch.compile, one compiled function for all of equal structure. Their rounding is the
        compiler's. What it cannot compile runs as it is, with a warning.
    optimizer_overlap: "forward" = updates run under the next step's forward; "backward" = as each
        gradient lands (only without clipping); "none" = a step returns when its updates are applied.
    optimizer_device: where AdamW of the layers runs. "device" = right after a layer's backward, on its state (moments
        and low halves of the master), which streams to the device and back beside the weights: for a host whose memory
        is slow beside the link. Only with optimizer_overlap="backward". The shell is updated on the host as ever.
    moments_dtype: "bfloat16" halves the moments for small hosts (stochastically rounded, not bit-equal to AdamW).
    placement: "auto" = on a machine of several NUMA nodes host memory lies on the GPU's node, or on all in turn if it
        does not fit there, and with a GPU and four cores or more the optimizer leaves one to the threads that issue
        work; "none" = the system decides. No result depends on it.
    keep_reference: keep the first weights on the host, too (2 bytes each in bfloat16), for `StreamingEngine.reference`.
    device_memory_bytes: what the engine may hold on the device; None = what is free.
    throttle: CPU lanes as slow as a stated link or host, to learn from; None = as fast as they are.
    """

    device: Device = "auto"
    dtype: Dtype = "bfloat16"
    micro_batch_size: int | None = None
    prefetch_depth: int = 1
    grad_buffers: int = 2
    resident_layers: int | Auto = 0
    kept_graphs: int | Auto = 0
    keep_attention: bool | Auto = False
    attention: Attention = "torch"
    offload_activations: bool | Auto = "auto"
    loss_chunk_tokens: int = 1024
    tile_tokens: int | None = None
    compile: bool = False
    optimizer_overlap: OptimizerOverlap = "forward"
    optimizer_device: OptimizerDevice = "host"
    moments_dtype: Dtype = "float32"
    placement: Placement = "auto"
    keep_reference: bool = False
    device_memory_bytes: int | None = None
    throttle: Throttle | None = None

    def __post_init__(self) -> None:
        _require(self.device in get_args(Device), f"device must be one of {get_args(Device)}", self.device)
        _require(self.dtype in get_args(Dtype), f"dtype must be one of {get_args(Dtype)}", self.dtype)
        _require(
            self.micro_batch_size is None or (_is_int(self.micro_batch_size) and self.micro_batch_size >= 1),
            "micro_batch_size must be a whole number ≥ 1, or None for the whole batch",
            self.micro_batch_size,
        )
        check_prefetch_depth(self.prefetch_depth)
        check_grad_buffers(self.grad_buffers)
        for name in ("resident_layers", "kept_graphs"):
            count = getattr(self, name)
            rule = f'{name} must be a whole number ≥ 0 or "auto"'
            _require(count == "auto" or (_is_int(count) and count >= 0), rule, count)
        for name in ("offload_activations", "keep_attention"):
            value = getattr(self, name)
            _require(value == "auto" or isinstance(value, bool), f'{name} must be True, False or "auto"', value)
        _require(
            not (self.compile and self.keep_attention),
            "keep_attention needs layers that run as they are; leave it out, or compile",
            self.keep_attention,
        )
        _require(
            self.attention in get_args(Attention), f"attention must be one of {get_args(Attention)}", self.attention
        )
        _require(
            not (self.compile and self.attention != "torch"),
            'attention kernels are chosen for layers that run as they are; leave attention at "torch", or compile',
            self.attention,
        )
        _require(
            _is_int(self.loss_chunk_tokens) and self.loss_chunk_tokens >= 1,
            "loss_chunk_tokens must be a whole number ≥ 1",
            self.loss_chunk_tokens,
        )
        _require(
            self.tile_tokens is None or (_is_int(self.tile_tokens) and self.tile_tokens >= 1),
            "tile_tokens must be a whole number ≥ 1, or None for a micro-batch's",
            self.tile_tokens,
        )
        _require(isinstance(self.compile, bool), "compile must be True or False", self.compile)
        _require(
            self.optimizer_overlap in get_args(OptimizerOverlap),
            f"optimizer_overlap must be one of {get_args(OptimizerOverlap)}",
            self.optimizer_overlap,
        )
        _require(
            self.optimizer_device in get_args(OptimizerDevice),
            f"optimizer_device must be one of {get_args(OptimizerDevice)}",
            self.optimizer_device,
        )
        _require(
            self.optimizer_device == "host" or self.optimizer_overlap == "backward",
            'optimizer_device="device" applies each gradient where backward leaves it; set '
            'optimizer_overlap="backward" (and max_grad_norm=None), or optimizer_device="host"',
            self.optimizer_overlap,
        )
        _require(
            self.moments_dtype in get_args(Dtype),
            f"moments_dtype must be one of {get_args(Dtype)}",
            self.moments_dtype,
        )
        _require(
            self.placement in get_args(Placement), f"placement must be one of {get_args(Placement)}", self.placement
        )
        _require(isinstance(self.keep_reference, bool), "keep_reference must be True or False", self.keep_reference)
        _require(
            self.device_memory_bytes is None or (_is_int(self.device_memory_bytes) and self.device_memory_bytes > 0),
            "device_memory_bytes must be a positive number of bytes, or None for what is free",
            self.device_memory_bytes,
        )
        _require(
            self.throttle is None or isinstance(self.throttle, Throttle),
            "throttle must be a Throttle(link_bytes_per_s=…, update_bytes_per_s=…), or None",
            self.throttle,
        )


@dataclass(frozen=True, kw_only=True)
class AdamWConfig:
    """AdamW with decoupled weight decay (Loshchilov & Hutter 2019, arXiv 1711.05101), as in torch.optim.AdamW.

    weight_decay applies to the parameters that the Hugging Face Trainer would decay: not to biases or norms.
    max_grad_norm: global 2-norm to which gradients are clipped; None = off.
    rounding: "torch" = the bits of torch.optim.AdamW; "fast" = the processor's own square root and one division less,
        where arithmetic is slower than the host's memory: an update differs by a few units in its last place.
    """

    lr: float = 1e-5
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float | None = 1.0
    rounding: Rounding = "torch"

    def __post_init__(self) -> None:
        _require(_is_number(self.lr) and self.lr >= 0, "lr must be a finite number ≥ 0", self.lr)
        _require(
            len(self.betas) == 2 and all(_is_number(b) and 0 <= b < 1 for b in self.betas),
            "betas must be two numbers in [0, 1)",
            self.betas,
        )
        _require(_is_number(self.eps) and self.eps > 0, "eps must be a finite number > 0", self.eps)
        _require(
            _is_number(self.weight_decay) and self.weight_decay >= 0,
            "weight_decay must be a finite number ≥ 0",
            self.weight_decay,
        )
        _require(self.rounding in get_args(Rounding), f"rounding must be one of {get_args(Rounding)}", self.rounding)
        _require(
            self.max_grad_norm is None or (_is_number(self.max_grad_norm) and self.max_grad_norm > 0),
            "max_grad_norm must be a finite number > 0, or None for no clipping",
            self.max_grad_norm,
        )
