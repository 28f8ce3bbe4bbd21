"""Adapters of peft: added to a model, kept in their own dtype, switched off for a while, merged.

Nothing else knows peft: an adapter's tensors are trained parameters of their layer like any other, and the base's
are frozen ones. peft is optional, so it is imported where it is used.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from megatrain.anatomy.model import Anatomy

# What peft says of its own doings, whatever it is asked for. It sees for itself that GPT-2 keeps weights transposed,
# and gives the rank of stacked experts by a pattern that it then looks for among modules only.
_NOISE = (
    "fan_in_fan_out is set to False",
    "`is_gradient_checkpointing` is deprecated",
    "The following (rank|alpha)_pattern keys did not match",
)


def has_adapters(model: nn.Module) -> bool:
    """Whether peft put adapters into this model."""
    return hasattr(model, "peft_config")


def base_of(model: Any) -> Any:
    """The Hugging Face model within a PeftModel; any other model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def add_lora(model: Any, options: Mapping[str, Any], *, seed: int = 0) -> Any:
    """The model as a PeftModel with a fresh LoRA adapter, its base frozen. The same for the same seed.

    options: fields of peft.LoraConfig. Raises ValueError where peft is missing or refuses them.
    """
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise ValueError("LoRA needs peft: pip install megatrain[lora]") from None
    task = "SEQ_CLS" if "SequenceClassification" in type(model).__name__ else "CAUSAL_LM"  # of the former, the head
    with torch.random.fork_rng(), warnings.catch_warnings():  # is new, so peft trains it whole
        for said in _NOISE:
            warnings.filterwarnings("ignore", message=said)
        torch.manual_seed(seed)
        try:
            return get_peft_model(model, LoraConfig(task_type=task, **options)).train()
        except (TypeError, ValueError) as error:
            raise ValueError(f"peft refuses this LoRA configuration: {error}") from error


def float32_adapters(model: nn.Module) -> frozenset[str]:
    """Names of adapter parameters in float32: peft computes with them in float32 on a base of any dtype.

    Whole modules that are trained besides (modules_to_save) compute in the base's dtype, and are not among them.
    """
    if not has_adapters(model):
        return frozenset()
    from peft.tuners.tuners_utils import BaseTunerLayer

    tuners = {name for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)}
    adapters = "|".join(re.escape(name) for name in model.peft_config)  # type: ignore[union-attr]
    held = re.compile(rf"(?P<tuner>.*)\.[^.]+\.({adapters})(\..*)?")  # tuner.lora_A.default.weight
    return frozenset(
        name
        for name, parameter in model.named_parameters()
        if parameter.dtype == torch.float32 and (match := held.fullmatch(name)) and match["tuner"] in tuners
    )


@contextmanager
def without_adapters(anatomy: Anatomy) -> Iterator[None]:
    """Within, layers and shell compute as the base alone; enter and leave it while no lane is at work.

    peft looks for adapters among the model's modules, so it gets the layers back for that. What needed a gradient
    before does so after it, which peft would decide anew.
    """
    if not hasattr(anatomy.model, "disable_adapter"):
        raise ValueError(f"{type(anatomy.model).__name__} has no adapters that could be switched off")
    needed = [(parameter, parameter.requires_grad) for parameter in _parameters(anatomy)]
    disabled: Any = anatomy.model.disable_adapter()  # type: ignore[operator]
    with _whole(anatomy):
        disabled.__enter__()
    try:
        yield
    finally:
        with _whole(anatomy):
            disabled.__exit__(None, None, None)
        for parameter, need in needed:
            parameter.requires_grad_(need)


def _parameters(anatomy: Anatomy) -> list[nn.Parameter]:
    return [parameter for unit in (anatomy.shell, *anatomy.units) for parameter in unit.parameters.values()]


@contextmanager
def _whole(anatomy: Anatomy) -> Iterator[None]:
    """Within, the model has its layers, whether or not it was hollow before."""
    hollow = anatomy.stubbed.is_hollow
    anatomy.stubbed.restore()
    try:
        yield
    finally:
        if hollow:
            anatomy.stubbed.hollow_out()


def merged(model: Any) -> Any:
    """The base with its adapters added into the weights. The PeftModel is of no use afterwards."""
    return model.merge_and_unload(safe_merge=True)
