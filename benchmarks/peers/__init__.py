"""Those who train the same model on the same batches, each in a file of its own that says what it gives up.

contender   what each of them can do, and what it is given to train
ours        the engine
plain       Hugging Face and torch's fused AdamW, with and without gradient checkpointing
fsdp2       torch's fully_shard with parameters, gradients and optimizer in host memory
zero3       DeepSpeed's stage 3 with parameters and optimizer in host memory (pip install 'megatrain[peers]')

All clip at a global norm of 1, keep a float32 master of every weight, and, where nothing else is said, recompute each
layer in backward. Each takes the next batch itself, so that data time counts.
"""

from __future__ import annotations

OURS, PLAIN, FSDP2, ZERO3 = "MegaTrain", "plain Hugging Face", "FSDP2, CPU offload", "DeepSpeed ZeRO-3 offload"
OURS_KEPT = "MegaTrain, kept graphs"

# Where each is built, "module:function"; nothing of it is imported before that, as some may not be installed.
PEERS = {
    OURS: "benchmarks.peers.ours:build",
    OURS_KEPT: "benchmarks.peers.ours:build_with_graphs",
    PLAIN: "benchmarks.peers.plain:build",
    "plain, no checkpointing": "benchmarks.peers.plain:build_without_checkpointing",
    FSDP2: "benchmarks.peers.fsdp2:build",
    ZERO3: "benchmarks.peers.zero3:build",
}
