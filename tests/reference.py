"""Ordinary PyTorch training of a Hugging Face model: what the engine's results are compared with."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.trainer_pt_utils import get_parameter_names

IGNORED = -100
PADDED_FRACTION = 3  # one row in three is padded, each by another length

Batch = dict[str, Tensor]
Padding = bool | Literal["right", "left"]

# The Hugging Face Trainer's: biases and norms do not decay.
_NO_DECAY = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]


def make_batch(model: PreTrainedModel, batch: int = 6, seq: int = 24, seed: int = 0, padding: Padding = True) -> Batch:
    """Random input_ids, attention_mask and labels, each (batch, seq) int64.

    The last third of the rows (at least one) is padded: on the right (also True) or on the left; False pads none.
    Labels are ignored (-100) on padding and on about a tenth of the other positions. No id is a special token.
    Reformer trains on 24 tokens only (its position table is 4 × 6).
    """
    generator = torch.Generator().manual_seed(seed)
    ids = _ordinary_ids(model)
    input_ids = ids[torch.randint(len(ids), (batch, seq), generator=generator)]
    mask = _attention_mask(batch, seq, "right" if padding is True else padding)
    input_ids = input_ids.masked_fill(mask == 0, int(model.config.get_text_config().pad_token_id))
    ignored = (mask == 0) | (torch.rand(batch, seq, generator=generator) < 0.1)
    ignored[:, -1] &= mask[:, -1] == 0  # every row predicts something
    return {"input_ids": input_ids, "attention_mask": mask, "labels": input_ids.masked_fill(ignored, IGNORED)}


def plain_adamw(
    model: nn.Module,
    lr: float,
    weight_decay: float = 0.0,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
) -> torch.optim.AdamW:
    """torch.optim.AdamW over the trained parameters, decaying those that the Hugging Face Trainer decays."""
    decaying = set(get_parameter_names(model, [nn.LayerNorm], _NO_DECAY))
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    groups = [
        {"params": [p for name, p in trained.items() if name in decaying], "weight_decay": weight_decay},
        {"params": [p for name, p in trained.items() if name not in decaying], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps)


def plain_step(
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    *,
    micro_batches: int,
    max_grad_norm: float | None,
) -> tuple[float, float]:
    """One optimizer step; returns the loss per predicted token of the whole batch and the norm before clipping.

    One micro-batch is exactly `model(**batch).loss.backward()`. Several give the same loss up to rounding, save
    for a router's load-balancing loss, which is then the average over micro-batches weighted by predicted tokens.
    """
    optimizer.zero_grad(set_to_none=True)
    loss = 0.0
    for part in _micro_batch_losses(model, batch, micro_batches):
        part.backward()  # type: ignore[no-untyped-call]
        loss += part.item()
    trained = [p for p in model.parameters() if p.requires_grad]
    limit = float("inf") if max_grad_norm is None else max_grad_norm
    grad_norm = float(nn.utils.clip_grad_norm_(trained, limit))
    optimizer.step()
    return loss, grad_norm


def predicted_tokens(batch: Batch) -> int:
    """How many labels the causal loss counts: nothing in the batch predicts the first of a row."""
    return int((batch["labels"][:, 1:] != IGNORED).sum())


def takes_num_items(model: PreTrainedModel, batch: Batch) -> bool:
    """Whether the model's loss divides by num_items_in_batch; a forward that takes any keyword may ignore this one."""
    parameters = inspect.signature(model.forward).parameters
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    if not takes_any and "num_items_in_batch" not in parameters:
        return False
    return _loss(model, batch, num_items_in_batch=1) != _loss(model, batch, num_items_in_batch=2)


def shifts_labels(model: PreTrainedModel, batch: Batch) -> bool:
    """Whether position t predicts label t + 1. In families made for encoder-decoder training it predicts label t."""
    labels = batch["labels"].clone()
    labels[:, 0] = batch["input_ids"][:, 0]
    without_first = labels.clone()
    without_first[:, 0] = IGNORED
    return _loss(model, {**batch, "labels": labels}) == _loss(model, {**batch, "labels": without_first})


def _loss(model: PreTrainedModel, batch: Batch, **extra: int) -> float:
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(0)  # two calls draw the same dropout
        return float(model(**batch, use_cache=False, **extra).loss)


def _micro_batch_losses(model: PreTrainedModel, batch: Batch, micro_batches: int) -> Iterator[Tensor]:
    if micro_batches == 1:
        yield model(**batch).loss
        return
    rows = len(batch["input_ids"])
    assert rows % micro_batches == 0, f"{micro_batches} micro-batches do not divide {rows} rows"
    parts = [_rows(batch, first, first + rows // micro_batches) for first in range(0, rows, rows // micro_batches)]
    accepts = takes_num_items(model, parts[0])
    counted = predicted_tokens if shifts_labels(model, parts[0]) else _labelled_tokens
    for part in parts:
        yield _share_of_loss(model, part, counted(part), counted(batch), accepts)


def _labelled_tokens(batch: Batch) -> int:
    return int((batch["labels"] != IGNORED).sum())


def _rows(batch: Batch, first: int, last: int) -> Batch:
    return {name: tensor[first:last] for name, tensor in batch.items()}


def _share_of_loss(model: PreTrainedModel, part: Batch, tokens: int, total: int, accepts_num_items: bool) -> Tensor:
    if not accepts_num_items:
        mean: Tensor = model(**part, use_cache=False).loss
        return mean * (tokens / total)
    out = model(**part, use_cache=False, num_items_in_batch=torch.tensor(total))
    loss: Tensor = out.loss
    return loss - (1 - tokens / total) * _router_loss(model, out)


def _router_loss(model: PreTrainedModel, out: Any) -> Tensor | float:
    """What the load-balancing loss adds to out.loss, which transformers does not divide between micro-batches."""
    aux_loss: Tensor | None = getattr(out, "aux_loss", None)
    if aux_loss is None:
        return 0.0
    coefficient = getattr(model, "router_aux_loss_coef", None)
    return aux_loss * float(model.aux_loss_coef if coefficient is None else coefficient)


def _ordinary_ids(model: PreTrainedModel) -> Tensor:
    config = model.config.get_text_config(decoder=True)
    named = (value for name, value in vars(config).items() if re.search(r"_(token_id|token_index|index)$", name))
    special = {i for value in named for i in (value if isinstance(value, list) else [value])}
    return torch.tensor([i for i in range(config.vocab_size) if i not in special])


def _attention_mask(batch: int, seq: int, side: Literal["right", "left"] | bool) -> Tensor:
    mask = torch.ones(batch, seq, dtype=torch.int64)
    if side:
        for n, row in enumerate(range(batch - max(1, batch // PADDED_FRACTION), batch)):
            pads = slice(seq - 3 - n % (seq // 3), seq) if side == "right" else slice(0, 3 + n % (seq // 3))
            mask[row, pads] = 0
    return mask
