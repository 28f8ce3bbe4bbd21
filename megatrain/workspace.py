"""What a step takes on the device on top of what the engine holds: an estimate, read off shapes.

Kernels, autograd and the model's own code allocate it; nobody can add it up exactly for every model. The
factors below were measured with a counter of live bytes on CPU (torch 2.13, transformers 5.23; llama, qwen3,
gemma3, gpt_oss, mixtral, qwen3_moe): the estimate lies between 0.9 and 1.5 times what was counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatrain.anatomy import Widths
from megatrain.layout import Layout
from megatrain.memory import StepSize

RECOMPUTE_FACTOR = 1.75  # norms, activations and rotary tables on top of matrix products: counted 1.3 to 2.0
SCORE_COPIES = 3  # of whole attention scores: themselves, their softmax and its gradient
LOGIT_BYTES = 12  # float32 log-probabilities, their gradient and the logits' gradient, whatever the compute dtype


@dataclass(frozen=True)
class Workspace:
    """Estimated bytes. A layer's and the head's are not needed at the same time."""

    masks: int  # of the whole batch, as the recorded calls keep them
    first_input: int  # layer 0's input, which the shell's graph keeps also when saved inputs are offloaded
    recompute: int  # what autograd saves of one layer for one micro-batch
    scores: int  # of attention that is not fused
    layer_gradient: int  # the largest one, on its way from autograd to the gradient buffer
    loss_chunk: int
    head_gradient: int  # with the logits' gradient, from which it is computed

    @property
    def layer(self) -> int:
        """One layer's backward: its scores are whole in its attention, and a third is gone before and after."""
        kept_scores = self.scores * (SCORE_COPIES - 1) // SCORE_COPIES
        return self.recompute + max(self.scores, kept_scores + self.layer_gradient)

    @property
    def head(self) -> int:
        return max(self.loss_chunk, self.head_gradient)

    @property
    def total(self) -> int:
        return self.masks + self.first_input + max(self.layer, self.head)


def workspace(
    widths: Widths,
    layouts: Sequence[Layout],
    shell: Layout,
    size: StepSize,
    *,
    itemsize: int,
    chunk_tokens: int,
    offload: bool,
) -> Workspace:
    """Estimate a step of this size.

    itemsize: bytes of the compute dtype. chunk_tokens: tokens of a loss chunk.
    """
    logits = min(chunk_tokens, size.micro_batch_tokens) * widths.vocabulary
    scores = 0 if widths.fused else widths.heads * size.micro_batch_tokens * size.sequence
    return Workspace(
        masks=widths.mask_kinds * size.tokens * size.sequence * (1 if widths.fused else itemsize),
        first_input=size.boundary_bytes if offload else 0,
        recompute=int(RECOMPUTE_FACTOR * widths.products) * size.micro_batch_tokens * itemsize,
        scores=SCORE_COPIES * scores * itemsize,
        layer_gradient=_largest_gradient(layouts),
        loss_chunk=logits * LOGIT_BYTES,
        head_gradient=logits * itemsize + _largest_gradient([shell]),
    )


def _largest_gradient(layouts: Sequence[Layout]) -> int:
    return max((entry.spec.nbytes for layout in layouts for entry in layout.trained), default=0)
