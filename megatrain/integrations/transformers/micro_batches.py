"""The micro-batches that a Trainer hands over one by one, joined into the one batch that an engine takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatrain.batch import IGNORED, KNOWN

# Where packed sequences begin, as kernels want it; the model derives the same from position_ids.
_IN_POSITION_IDS = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"}


@dataclass(frozen=True)
class MicroBatch:
    """What a data collator made of some examples, and the loss denominator that the Trainer gives with it."""

    inputs: Mapping[str, Any]
    items: int | None

    @classmethod
    def of(cls, inputs: Mapping[str, Any], items: torch.Tensor | int | None) -> MicroBatch:
        return cls(inputs, None if items is None else int(items))

    @property
    def rows(self) -> int:
        return len(self.inputs["input_ids"])


def join(parts: Sequence[MicroBatch]) -> dict[str, torch.Tensor]:
    """Return one batch, (B, T) each, of all rows in order, padded on the right to the longest.

    ValueError for tensors that the engine does not know.
    """
    inputs = [_known(part.inputs) for part in parts]
    width = max(part["input_ids"].shape[1] for part in inputs)
    if any(part["input_ids"].shape[1] < width for part in inputs):
        inputs = [_padded(_with_mask(part), width) for part in inputs]
    names = inputs[0].keys()
    if any(part.keys() != names for part in inputs):
        raise ValueError(
            f"the micro-batches of one step hold different tensors: {[sorted(part) for part in inputs]}; "
            "let the data collator make the same of every batch"
        )
    return {name: torch.cat([part[name] for part in inputs]) for name in names}


def _known(inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    derived = _IN_POSITION_IDS if "position_ids" in inputs else set()
    unknown = sorted(inputs.keys() - set(KNOWN) - derived)
    if unknown or not {"input_ids", "labels"} <= inputs.keys():
        raise ValueError(
            f"the data collator must make input_ids and labels, and may make {', '.join(KNOWN[2:])}; it made "
            f"{sorted(inputs)}. Leave out what else there is, in the collator or with remove_unused_columns=True"
        )
    return {name: inputs[name].cpu() for name in KNOWN if name in inputs}


def _with_mask(part: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Padding needs a mask, unless position_ids make it a sequence of its own."""
    if "attention_mask" in part or "position_ids" in part:
        return part
    return {**part, "attention_mask": torch.ones_like(part["input_ids"])}


def _padded(part: dict[str, torch.Tensor], width: int) -> dict[str, torch.Tensor]:
    missing = width - part["input_ids"].shape[1]
    values = {"labels": IGNORED}
    padded = {
        name: torch.nn.functional.pad(tensor, (0, missing), value=values.get(name, 0)) for name, tensor in part.items()
    }
    if "position_ids" in padded:
        padded["position_ids"][:, width - missing :] = torch.arange(missing)  # a packed sequence that predicts nothing
    return padded


def denominator(parts: Sequence[MicroBatch], batch: Mapping[str, torch.Tensor], *, obeyed: bool) -> int | None:
    """What the Trainer divides the summed loss of a step by; None where that is the predicted tokens, as the engine's.

    obeyed: the model's forward divides by what it is told. Where the loss is not known to shift labels (gpt2's, by its
    name), the Trainer counts the first label of every row as well.
    ValueError where the engine could not arrive at the Trainer's loss.
    """
    items = {part.items for part in parts}
    if len(items) > 1:
        raise ValueError(
            f"{len(parts)} micro-batches came together that belong to different steps: some were left over from an "
            "epoch whose length was not known, or that a callback stopped in the middle of a step. Let every epoch be "
            "whole steps: gradient_accumulation_steps=1 and a larger batch, which EngineConfig.micro_batch_size cuts"
        )
    (told,) = items
    same = told is None or told == int((batch["labels"][:, 1:] != IGNORED).sum())
    if not obeyed and not (same and len(parts) == 1):
        raise ValueError(
            "this model's loss ignores num_items_in_batch, so that the Trainer adds up means of micro-batches, and the "
            "engine means over all tokens: set gradient_accumulation_steps=1 and a larger batch, which the engine cuts "
            "by EngineConfig.micro_batch_size, and let no row begin with a label"
        )
    return None if same else told
