"""Llama shapes as randomly initialised models."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaForCausalLM

from benchmarks.peers.contender import Task
from benchmarks.shapes import Shape
from megatrain.anatomy.arithmetic import arithmetic
from megatrain.anatomy.structure import find_layers


def make_model(shape: Shape, dtype: torch.dtype, made_on: str = "cpu") -> Any:
    """A model in host memory, the same at every call. A card, where there is one, fills billions of weights faster."""
    torch.manual_seed(0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(made_on):
            model = LlamaForCausalLM(shape.config()).train()
    finally:
        torch.set_default_dtype(default)
    model.to("cpu")
    torch.cuda.empty_cache()  # the engine is to find the card as free as it is
    return model


def model_of(task: Task) -> Any:
    """What is to be trained, in float32, the same for all."""
    return make_model(task.shape, torch.float32, task.device)


def step_flops(shape: Shape, rows: int, tokens: int) -> int:
    """Model FLOPs of a training step, as the engine counts its own."""
    with torch.device("meta"):
        model = LlamaForCausalLM(shape.config())
    return arithmetic(model, find_layers(model)).flops([tokens] * rows)
