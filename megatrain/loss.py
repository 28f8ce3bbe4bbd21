"""The head over chunks of tokens: scores, loss and gradients without ever holding all logits.

Each chunk's graph is freed before the next begins, so the peak is one chunk's logits whatever the batch.

Note: a loss of the user's own
    Any function of the scores of a whole batch can be a loss. `scores` gives them without a graph, micro-batch by
    micro-batch; the function's gradient with respect to them is then sent back through the head chunk by chunk
    (`head` with a `score_gradient`). That costs the head's forward twice, and is exact by the chain rule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from megatrain.anatomy import Anatomy, Chunk, Tape, chunks, send_back_collected


@dataclass(frozen=True)
class Head:
    """What the head of one micro-batch works on.

    hidden: the last layer's output (B, T, D). targets: shifted labels (B, T). temperature: that logits are divided by
    before they become scores.
    """

    anatomy: Anatomy
    tape: Tape
    hidden: torch.Tensor
    targets: torch.Tensor
    chunk_tokens: int
    temperature: float = 1.0

    @property
    def chunks(self) -> list[Chunk]:
        rows, length = self.targets.shape
        whole_rows = self.anatomy.classifies
        return chunks(rows, length, max(length, self.chunk_tokens) if whole_rows else self.chunk_tokens)

    def scores_of(self, chunk: Chunk, hidden: torch.Tensor) -> torch.Tensor:
        return self.anatomy.scores(self.tape, hidden, chunk, chunk.of(self.targets), self.temperature)


def scores(head: Head) -> torch.Tensor:
    """Scores of a micro-batch, float32, without a graph: (B, T) for a language model, (B, labels) for a classifier."""
    with torch.no_grad():
        found = [(chunk, head.scores_of(chunk, chunk.of(head.hidden))) for chunk in head.chunks]
    if head.anatomy.classifies:
        return torch.cat([part for _, part in found])
    whole = torch.empty(head.targets.shape, dtype=torch.float32, device=head.hidden.device)
    for chunk, part in found:
        whole[chunk.rows, chunk.columns] = part
    return whole


def backward(
    head: Head,
    *,
    tokens: int,
    share: float,
    score_gradient: torch.Tensor | None,
    shell: Mapping[str, torch.Tensor],
    on_gradient: Callable[[str, torch.Tensor], None],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Loss of one micro-batch, the gradient of `hidden` (B, T, D), and the balancing part of the loss.

    tokens: predicted tokens of the whole global batch, the denominator of the model's own loss.
    share: this micro-batch's part of them; a router balancing loss counts by it, so that it does not grow with
    the number of micro-batches. score_gradient: of a loss of the user's own, instead of the model's, whose value is
    then known already and counts as 0 here. shell: trained shell parameters; `on_gradient` gets their gradients, in
    parts.
    """
    gradient = torch.empty_like(head.hidden)
    losses: list[torch.Tensor] = []
    for chunk in head.chunks:
        leaf = chunk.of(head.hidden).detach().requires_grad_()
        with torch.enable_grad():
            output, sent = _output(head, chunk, leaf, tokens, score_gradient)
        found = torch.autograd.grad(output, [leaf, *shell.values()], sent, allow_unused=True)
        gradient[chunk.rows, chunk.columns] = found[0]
        losses.append(output.detach() if sent is None else output.new_zeros(()))
        for name, part in zip(shell, found[1:], strict=True):
            if part is not None:
                on_gradient(name, part)
    balancing = head.anatomy.balancing_loss(head.tape)
    if balancing is None:
        return _sum(losses), gradient, None
    routed = send_back_collected(head.tape, balancing[0] * share, balancing[1])
    return _sum(losses) + routed, gradient, routed


def _output(
    head: Head, chunk: Chunk, leaf: torch.Tensor, tokens: int, score_gradient: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What a chunk's backward pass starts from, and the gradient that is sent into it (None = 1)."""
    if score_gradient is None:
        return head.anatomy.loss(head.tape, leaf, chunk, chunk.of(head.targets), tokens), None
    part = score_gradient[chunk.rows] if head.anatomy.classifies else chunk.of(score_gradient)
    return head.scores_of(chunk, leaf), part


def _sum(losses: list[torch.Tensor]) -> torch.Tensor:
    """The one loss itself, or the sum of several in float64: parts of a mean lose nothing in being added."""
    return losses[0] if len(losses) == 1 else torch.stack(losses).double().sum()
