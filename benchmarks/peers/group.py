"""A process group of one: what distributed systems insist on, without a launcher or a port."""

from __future__ import annotations

import torch.distributed as dist


def join_alone() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
