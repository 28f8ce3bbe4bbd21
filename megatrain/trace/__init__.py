"""What a run records about itself, and what is read out of it: spans, memory, steps, metrics, Chrome traces."""

from megatrain.trace.chrome import require_trace_name, write_chrome_trace
from megatrain.trace.files import write_atomically
from megatrain.trace.flops import causal_area, model_flops
from megatrain.trace.memory import MemorySampler
from megatrain.trace.metrics import StepMetrics, step_metrics
from megatrain.trace.recorder import Recorder, Records
from megatrain.trace.records import (
    HELD,
    EvaluationRecord,
    Lane,
    LayerStats,
    Marker,
    MemorySample,
    Op,
    SampleRecord,
    SlotChange,
    SlotKind,
    SlotState,
    Span,
    StepRecord,
)
from megatrain.trace.waits import Wait, WaitCause, compute_waits

__all__ = [
    "HELD",
    "EvaluationRecord",
    "Lane",
    "LayerStats",
    "Marker",
    "MemorySample",
    "MemorySampler",
    "Op",
    "Recorder",
    "Records",
    "SampleRecord",
    "SlotChange",
    "SlotKind",
    "SlotState",
    "Span",
    "StepMetrics",
    "StepRecord",
    "Wait",
    "WaitCause",
    "causal_area",
    "compute_waits",
    "model_flops",
    "require_trace_name",
    "step_metrics",
    "write_atomically",
    "write_chrome_trace",
]
