"""DeepSpeed, set up for one process on a CPU. Importing this where it is not installed says how to install it."""

from __future__ import annotations

import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # both are read while it is imported or set up
os.environ.setdefault("LOCAL_RANK", "0")
try:
    import deepspeed
    from deepspeed.ops.adam import DeepSpeedCPUAdam
except ImportError as error:
    raise ImportError("DeepSpeed is not installed: DS_BUILD_OPS=0 pip install 'megatrain[peers]'") from error

__all__ = ["DeepSpeedCPUAdam", "deepspeed"]
