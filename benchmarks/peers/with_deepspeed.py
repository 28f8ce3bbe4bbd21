"""DeepSpeed, set up for one process, on a card where there is one. Importing this without it says how to install it."""

from __future__ import annotations

import os

import torch

os.environ.setdefault(
    "DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu"
)  # both are read while it is imported or set up
os.environ.setdefault("LOCAL_RANK", "0")
try:
    import deepspeed
    from deepspeed.ops.adam import DeepSpeedCPUAdam
except ImportError as error:
    raise ImportError("DeepSpeed is not installed: DS_BUILD_OPS=0 pip install 'megatrain[peers]'") from error

__all__ = ["DeepSpeedCPUAdam", "deepspeed"]
