"""A batch at the door of the engine: checked once, then cut into micro-batches."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch

IGNORED = -100
KNOWN = ("input_ids", "labels", "attention_mask", "position_ids")


@dataclass(frozen=True)
class Batch:
    """A global batch, cut into micro-batches of rows.

    parts: per micro-batch the model's inputs. targets: per micro-batch the labels of the next token (b, T), -100
    ignored. tokens: predicted ones in all. sequence_tokens: processed ones, padding not counted.
    """

    parts: list[dict[str, torch.Tensor]]
    targets: list[torch.Tensor]
    shape: tuple[int, int]
    tokens: int
    sequence_tokens: int
    sequence_lengths: list[int]

    @cached_property
    def part_tokens(self) -> list[int]:
        """Predicted tokens of each micro-batch."""
        return [int((targets != IGNORED).sum()) for targets in self.targets]


def shifted(labels: torch.Tensor) -> torch.Tensor:
    """Labels of the next token at each position, Hugging Face's shift; (B, T) → (B, T)."""
    return torch.nn.functional.pad(labels, (0, 1), value=IGNORED)[..., 1:].contiguous()


def make_batch(tensors: dict[str, torch.Tensor], micro_batch_size: int | None, vocabulary: int) -> Batch:
    """Check a batch and cut it; raises ValueError before anything was touched.

    tensors: input_ids and labels, both (B, T) int64, and optionally attention_mask (B, T) or position_ids (B, T).
    """
    ids, labels = _require_tensors(tensors)
    _require_range("input_ids", ids, vocabulary, ids)
    _require_range("labels", labels, vocabulary, labels[labels != IGNORED])
    rows = micro_batch_size or ids.shape[0]
    inputs = {name: tensor for name, tensor in tensors.items() if name != "labels"}
    starts = range(0, ids.shape[0], rows)
    targets = shifted(labels)
    lengths = _sequence_lengths(tensors, ids)
    return Batch(
        parts=[{name: tensor[start : start + rows] for name, tensor in inputs.items()} for start in starts],
        targets=[targets[start : start + rows] for start in starts],
        shape=(ids.shape[0], ids.shape[1]),
        tokens=int((targets != IGNORED).sum()),
        sequence_tokens=sum(lengths),
        sequence_lengths=lengths,
    )


def _require_tensors(tensors: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    for name in ("input_ids", "labels"):
        if not isinstance(tensors.get(name), torch.Tensor):
            raise ValueError(f"a batch needs {name!r}, an int64 tensor of shape (batch, tokens); got {sorted(tensors)}")
    unknown = sorted(tensors.keys() - set(KNOWN))
    if unknown:
        raise ValueError(f"a batch holds {', '.join(KNOWN)}; got also {unknown}, which would change nothing or fail")
    ids, labels = tensors["input_ids"], tensors["labels"]
    if ids.ndim != 2 or 0 in ids.shape:
        raise ValueError(f"input_ids must have shape (batch ≥ 1, tokens ≥ 1); got {tuple(ids.shape)}")
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor) or tensor.shape != ids.shape:
            shape = tuple(tensor.shape) if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            raise ValueError(f"{name} must be a tensor of the shape of input_ids, {tuple(ids.shape)}; got {shape}")
    for name, what in (("input_ids", "token ids"), ("labels", "token ids"), ("position_ids", "positions")):
        if name in tensors and tensors[name].dtype != torch.int64:
            raise ValueError(f"{name} must be int64 {what}; got {tensors[name].dtype}: convert with .long()")
    mask = tensors.get("attention_mask")
    if mask is not None and mask.is_floating_point():
        raise ValueError(f"attention_mask must be 1 (a token) and 0 (padding), int64 or bool; got {mask.dtype}")
    return ids, labels


def _require_range(name: str, tensor: torch.Tensor, vocabulary: int, used: torch.Tensor) -> None:
    if used.numel() == 0:
        return
    low, high = int(used.min()), int(used.max())
    if low < 0 or high >= vocabulary:
        wrong = low if low < 0 else high
        row, column = (tensor == wrong).nonzero()[0].tolist()
        raise ValueError(
            f"{name}[{row}, {column}] is {wrong}, outside the model's vocabulary of {vocabulary} ids; "
            "use the model's own tokenizer, and -100 for labels to ignore"
        )


def _sequence_lengths(tensors: dict[str, torch.Tensor], ids: torch.Tensor) -> list[int]:
    """Length of every sequence in the batch; packed ones begin where position_ids go back to 0."""
    mask = tensors.get("attention_mask")
    if mask is not None:
        return [int(n) for n in (mask != 0).sum(dim=1)]
    positions = tensors.get("position_ids")
    if positions is None:
        return [ids.shape[1]] * ids.shape[0]
    lengths: list[int] = []
    for row, row_labels in zip(positions, tensors["labels"], strict=True):
        starts = [0, *(int(i) for i in (row[1:] == 0).nonzero().flatten() + 1), len(row)]
        if not (row_labels[starts[-2] :] != IGNORED).any():
            starts.pop()  # a last sequence that trains nothing is the padding of the row
        lengths += [stop - start for start, stop in pairwise(starts)]
    return lengths
