"""What a step takes on the device on top of what the engine holds: an estimate, read off shapes.

Kernels, autograd and the model's own code allocate it; nobody can add it up exactly for every model. The
factors below were found by counting live bytes on a CPU (torch 2.13, transformers 5.23): for llama, qwen3,
gemma3, gpt_oss and qwen3_moe in both dtypes the estimate is 0.9 to 1.2 times the count. Attention that is not
fused and computes its softmax in float32 takes up to twice the scores' estimate in bfloat16; torch's own unfused
kernel (attention="math") was counted for llama and gemma3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatrain.anatomy import Widths, is_tileable
from megatrain.layout import Layout
from megatrain.memory import StepSize

PRODUCT_COPIES = 1.2  # of the inputs and outputs of matrix products; the rest is activation functions
NORM_BYTES = 8  # norms keep their input in float32, and more than that on the way back
SCORE_COPIES = 3  # of whole attention scores: themselves, their softmax and its gradient
MATH_COPIES = 2  # of torch's unfused kernel, whose scores are float32 whatever the compute dtype
LOGIT_BYTES = 12  # float32 log-probabilities, their gradient and the logits' gradient, whatever the compute dtype


@dataclass(frozen=True)
class Workspace:
    """Estimated bytes. A layer's, the head's and AdamW's are not needed at the same time."""

    masks: int  # of the whole batch, as the recorded calls keep them
    first_input: int  # layer 0's input, which the shell's graph keeps also when saved inputs are offloaded
    recompute: int  # what autograd saves of one layer for one micro-batch
    scores: int  # of attention that is not fused
    kept_scores: int  # of them, what autograd saves
    layer_gradient: int  # what is on its way from autograd to the gradient buffer at one time: the largest one
    loss_chunk: int
    head_gradient: int  # with the logits' gradient, from which it is computed
    update: int = 0  # AdamW on the device, a piece at a time

    @property
    def kept_of_a_layer(self) -> int:
        """What autograd saves of one layer between its forward and its backward."""
        return self.recompute + self.kept_scores

    @property
    def layer(self) -> int:
        """One layer's backward: its scores are whole in its attention, and one copy is gone before and after."""
        return self.recompute + max(self.scores, self.kept_scores + self.layer_gradient)

    @property
    def head(self) -> int:
        return max(self.loss_chunk, self.head_gradient)

    @property
    def total(self) -> int:
        return self.masks + self.first_input + max(self.layer, self.head, self.update)


def workspace(
    widths: Widths,
    layouts: Sequence[Layout],
    shell: Layout,
    size: StepSize,
    *,
    itemsize: int,
    chunk_tokens: int,
    offload: bool,
    tile_tokens: int | None = None,
    compiled: bool = False,
    math: bool = False,
    update_bytes: int = 0,
) -> Workspace:
    """Estimate a step of this size.

    itemsize: bytes of the compute dtype. chunk_tokens: tokens of a loss chunk. tile_tokens: of a tile of a layer's MLP,
    None = all at once. compiled: layers are; their gradients come all at once. math: of the kernels that a fused model
    might run, it is to run torch's unfused one. update_bytes: of AdamW on the device.
    """
    logits = min(chunk_tokens, size.micro_batch_tokens) * widths.vocabulary
    copies, score_bytes = _scores(widths, size, itemsize, math=math)
    return Workspace(
        masks=widths.mask_kinds * size.tokens * size.sequence * (1 if widths.fused else itemsize),
        first_input=size.boundary_bytes if offload else 0,
        recompute=_recompute(widths, size.micro_batch_tokens, tile_tokens, itemsize),
        scores=copies * score_bytes,
        kept_scores=(copies - 1) * score_bytes,
        layer_gradient=_gradients_at_once(layouts, tiles=tile_tokens is not None, compiled=compiled),
        loss_chunk=logits * LOGIT_BYTES,
        head_gradient=logits * itemsize + _largest_gradient([shell]),
        update=update_bytes,
    )


def _scores(widths: Widths, size: StepSize, itemsize: int, *, math: bool) -> tuple[int, int]:
    """How often whole scores are in memory at most, one of which autograd does not save, and bytes of each time."""
    scores = widths.heads * size.micro_batch_tokens * size.sequence
    if not widths.fused:
        return SCORE_COPIES, scores * itemsize
    return (MATH_COPIES, 4 * scores) if math else (1, 0)


def _recompute(widths: Widths, tokens: int, tile_tokens: int | None, itemsize: int) -> int:
    """What autograd saves for these tokens; in tiles, of the MLP's products only one tile's at a time."""
    norms = NORM_BYTES * widths.norms * tokens
    if tile_tokens is None or tile_tokens >= tokens:
        return int(PRODUCT_COPIES * widths.products * itemsize) * tokens + norms
    products = widths.untiled * tokens + widths.tiled * tile_tokens
    return int(PRODUCT_COPIES * products * itemsize) + norms


def _gradients_at_once(layouts: Sequence[Layout], *, tiles: bool, compiled: bool) -> int:
    """Tiles sum the MLP's in float32 until the last one is done; a compiled layer gives all of its own together."""
    if compiled:
        return max((layout.trained_nbytes for layout in layouts), default=0)
    if not tiles:
        return _largest_gradient(layouts)
    sums = max((sum(4 * e.spec.numel for e in layout.trained if is_tileable(e.name)) for layout in layouts), default=0)
    return _largest_gradient(layouts) + sums


def _largest_gradient(layouts: Sequence[Layout]) -> int:
    return max((layout.largest_trained_nbytes for layout in layouts), default=0)
