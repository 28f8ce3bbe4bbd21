"""What of a layer (or the shell) has to be kept: of its trained weights all there is, of its frozen ones a sum.

What is frozen comes with the model that an engine is made from; under adapters it is nearly everything. The sum
tells another model's weights from these.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import torch

from megatrain.host import HostLayer

SHELL_FILE, LAYER = "shell.safetensors", "layer-"
STEPS, FROZEN = "update_counts", "sum_of_frozen"  # in a shard's metadata


def file_of(layer: int | None) -> str:
    return SHELL_FILE if layer is None else f"{LAYER}{layer:05d}.safetensors"


def tensors_of(host: HostLayer) -> dict[str, torch.Tensor]:
    """Views into the arenas, by role and name; nothing is copied."""
    found = {f"weight/{entry.name}": entry.view(host.weights) for entry in host.layout.trained}
    for entry in host.layout.trained:
        numel, shape = entry.spec.numel, entry.spec.shape
        for role, flat in (("low", host.low), ("exp_avg", host.exp_avg), ("exp_avg_sq", host.exp_avg_sq)):
            if flat is not None:
                found[f"{role}/{entry.name}"] = flat[entry.element : entry.element + numel].view(shape)
    return found


def metadata_of(host: HostLayer) -> dict[str, str]:
    return {STEPS: json.dumps(host.steps), FROZEN: str(_sum_of_frozen(host))}


def _sum_of_frozen(host: HostLayer) -> int:
    """The frozen weights and buffers as 64-bit numbers, added up; they never change, so this is done once."""
    if host.frozen_sum is None:
        host.frozen_sum = int(host.weights[host.layout.trained_nbytes :].view(torch.int64).sum())
    return host.frozen_sum


def put(host: HostLayer, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str], where: str) -> None:
    """Write tensors of the same names, shapes and dtypes into the arenas; ValueError if they are others."""
    targets = tensors_of(host)
    if targets.keys() != tensors.keys():
        missing, foreign = sorted(targets.keys() - tensors.keys()), sorted(tensors.keys() - targets.keys())
        raise ValueError(f"{where} is not of this model: it lacks {missing[:3]} and holds {foreign[:3]} besides")
    for name, target in targets.items():
        if (target.shape, target.dtype) != (tensors[name].shape, tensors[name].dtype):
            raise ValueError(
                f"{where} is not of this model: {name} is {tuple(tensors[name].shape)} in {tensors[name].dtype}, "
                f"and must be {tuple(target.shape)} in {target.dtype}"
            )
    if metadata[FROZEN] != str(_sum_of_frozen(host)):
        raise ValueError(
            f"{where} was trained on other frozen weights than those that the model has here; begin with the same model"
        )
    for name, target in targets.items():
        target.copy_(tensors[name])
    host.steps.clear()
    host.steps.update(json.loads(metadata[STEPS]))
