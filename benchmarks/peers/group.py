"""A process group of one: what distributed systems insist on, without a launcher or a port."""

from __future__ import annotations

import torch.distributed as dist


def join_alone(device: str) -> None:
    backends = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backends, store=dist.HashStore(), rank=0, world_size=1)
