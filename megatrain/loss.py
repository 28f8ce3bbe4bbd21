"""The head over chunks of tokens: loss and its gradients without ever holding all logits.

Each chunk's graph is freed before the next begins, so the peak is one chunk's logits whatever the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from megatrain.anatomy import Anatomy, Tape, chunks, send_back_collected


def head(
    anatomy: Anatomy,
    tape: Tape,
    hidden: torch.Tensor,
    targets: torch.Tensor,
    *,
    tokens: int,
    share: float,
    chunk_tokens: int,
    shell: Mapping[str, torch.Tensor],
    on_gradient: Callable[[str, torch.Tensor], None],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Loss of one micro-batch, the gradient of `hidden` (B, T, D), and the balancing part of the loss.

    targets: shifted labels (B, T). tokens: predicted tokens of the whole global batch, the loss denominator.
    share: this micro-batch's part of them; a router balancing loss counts by it, so that it does not grow with
    the number of micro-batches. shell: trained shell parameters; `on_gradient` gets their gradients, in parts.
    """
    gradient = torch.empty_like(hidden)
    losses: list[torch.Tensor] = []
    for chunk in chunks(targets.shape[0], targets.shape[1], chunk_tokens):
        leaf = chunk.of(hidden).detach().requires_grad_()
        loss = anatomy.loss(tape, leaf, chunk, chunk.of(targets), tokens)
        found = torch.autograd.grad(loss, [leaf, *shell.values()], allow_unused=True)
        gradient[chunk.rows, chunk.columns] = found[0]
        losses.append(loss.detach())
        for name, part in zip(shell, found[1:], strict=True):
            if part is not None:
                on_gradient(name, part)
    balancing = anatomy.balancing_loss(tape)
    if balancing is None:
        return _sum(losses), gradient, None
    routed = send_back_collected(tape, balancing[0] * share, balancing[1])
    return _sum(losses) + routed, gradient, routed


def _sum(losses: list[torch.Tensor]) -> torch.Tensor:
    """The one loss itself, or the sum of several in float64: parts of a mean lose nothing in being added."""
    return losses[0] if len(losses) == 1 else torch.stack(losses).double().sum()
