"""What a Trainer offers and the engine does not do, refused by name before anything runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch

from megatrain.anatomy import decayed_parameters
from megatrain.config import EngineConfig

OPTIMIZERS = ("adamw_torch", "adamw_torch_fused")

# Whose `compute_loss` is the model's own loss over predicted tokens, and nothing the engine would have to know of.
_SFT = ("trl.trainer.sft_trainer", "SFTTrainer")
_KNOWN = {("transformers.trainer", "Trainer"), _SFT}
_DECIDES_THE_STEP = ("compute_loss", "training_step", "prediction_step", "create_optimizer")
_OF_PREFERENCES = ("DPO", "GRPO", "KTO", "ORPO", "CPO", "RLOO", "Reward")

# What `StreamedTrainer` overrides: were one of them renamed, a run would silently do something else.
_OVERRIDDEN = [
    "create_accelerator_and_postprocess",
    "create_optimizer",
    "evaluate",
    "floating_point_ops",
    "predict",
    "prediction_step",
    "train",
    "training_step",
    "_load_best_model",
    "_load_from_checkpoint",
    "_load_optimizer_and_scheduler",
    "_move_model_to_device",
    "_save",
    "_save_optimizer_and_scheduler",
]


def refuse_class(trainer_class: type) -> None:
    """Raise ValueError for a Trainer that computes what the engine cannot, ImportError where a package is missing."""
    if find_spec("accelerate") is None:
        raise ImportError("Hugging Face's Trainer needs accelerate: pip install megatrain[trainer]")
    missing = [name for name in _OVERRIDDEN if not hasattr(trainer_class, name)]
    if missing:
        raise ValueError(
            f"{trainer_class.__name__} has no {', '.join(missing)}: it is no transformers.Trainer, or of a version "
            "that this one was not written for; transformers 5.17 and 5.23 were tried"
        )
    for base in trainer_class.__mro__:
        for name in _DECIDES_THE_STEP:
            if name in vars(base) and (base.__module__, base.__name__) not in _KNOWN:
                raise ValueError(f"{base.__name__} has a {name} of its own, and {_instead(base.__name__)}")


def is_sft(trainer_class: type) -> bool:
    """Whether it is TRL's SFTTrainer or made from it (without importing TRL)."""
    return any((base.__module__, base.__name__) == _SFT for base in trainer_class.__mro__)


def _instead(name: str) -> str:
    if name.startswith(_OF_PREFERENCES):
        return "its loss needs more than one pass of the engine: use megatrain.recipes for training on preferences"
    return (
        "the engine would not call it: it computes the model's own loss and AdamW, layer by layer. Put what it adds "
        "into the model, the data collator or a callback, or train without stream"
    )


@dataclass(frozen=True)
class Refusal:
    """An option, when it is asked for, and the way out."""

    option: str
    asked: Callable[[Any], Any]  # of the trainer
    instead: str


_REFUSALS = (
    Refusal(
        "fp16=True",
        lambda t: t.args.fp16 or t.args.fp16_full_eval,
        "the engine computes in bfloat16, with an exact float32 master, or in float32: EngineConfig(dtype=…)",
    ),
    Refusal(
        "bf16_full_eval=True",
        lambda t: t.args.bf16_full_eval,
        "the engine evaluates in the dtype it trains in: leave it out",
    ),
    Refusal(
        "bf16=True with EngineConfig(dtype='float32')",
        lambda t: t.args.bf16 and t.engine_config.dtype == "float32",
        "they contradict each other: set bf16=False (SFTConfig sets it by itself) or dtype='bfloat16'",
    ),
    Refusal("fsdp", lambda t: t.is_fsdp_enabled or t.args.fsdp, "the engine shards nothing: one process, one GPU"),
    Refusal(
        "deepspeed",
        lambda t: t.is_deepspeed_enabled or t.args.deepspeed,
        "the engine offloads to host memory itself: leave it out",
    ),
    Refusal(
        "more than one process",
        lambda t: t.args.world_size > 1 or t.args.parallelism_config,
        "the engine drives one GPU from one process: start the script with python, not torchrun or accelerate launch",
    ),
    Refusal(
        "more than one GPU",
        lambda t: t.args.n_gpu > 1 or t.is_model_parallel,
        "the engine drives one: set CUDA_VISIBLE_DEVICES=0",
    ),
    Refusal(
        "a model that a device_map spread over devices",
        lambda t: set(map(str, (getattr(t.model, "hf_device_map", None) or {}).values())) - {"cpu"},
        "load it with from_pretrained(…) on the CPU and pass the model, not its name",
    ),
    Refusal(
        "another device than the engine's",
        lambda t: t.args.device.type != _device_type(t.engine_config),
        "set use_cpu=True with EngineConfig(device='cpu'), and neither on a GPU",
    ),
    Refusal(
        "optim",
        lambda t: str(getattr(t.args.optim, "value", t.args.optim)) not in OPTIMIZERS or t.args.optim_args,
        f"the engine has AdamW alone: optim={OPTIMIZERS[0]!r} without optim_args",
    ),
    Refusal(
        "optimizers or optimizer_cls_and_kwargs",
        lambda t: t.optimizer is not None or t.lr_scheduler is not None or t.optimizer_cls_and_kwargs is not None,
        "the engine has AdamW alone, from the training arguments; choose a schedule with lr_scheduler_type, or "
        "override create_scheduler",
    ),
    Refusal("torch_compile=True", lambda t: t.args.torch_compile, "layers run with streamed weights: leave it out"),
    Refusal(
        "neftune_noise_alpha",
        lambda t: t.args.neftune_noise_alpha is not None,
        "its hook on the embeddings is not streamed: leave it out",
    ),
    Refusal(
        "label_smoothing_factor",
        lambda t: t.args.label_smoothing_factor,
        "it needs all logits at once, which the engine never has: set it to 0",
    ),
    Refusal(
        "compute_loss_func",
        lambda t: t.compute_loss_func is not None,
        "it needs all logits at once, which the engine never has: the loss is the model's own",
    ),
    Refusal(
        "loss_type other than 'nll'",
        lambda t: getattr(t.args, "loss_type", "nll") != "nll",
        "the loss is the model's own: loss_type='nll'",
    ),
    Refusal(
        "use_liger_kernel=True",
        lambda t: t.args.use_liger_kernel,
        "it replaces the model's forward; the engine computes the loss in chunks anyway: leave it out",
    ),
    Refusal(
        "auto_find_batch_size=True",
        lambda t: t.args.auto_find_batch_size,
        "`megatrain plan` says beforehand what fits: set per_device_train_batch_size",
    ),
    Refusal(
        "activation_offloading=True",
        lambda t: getattr(t.args, "activation_offloading", False),
        "the engine does so itself: EngineConfig(offload_activations=True)",
    ),
    Refusal(
        "model_init",
        lambda t: t.model_init is not None,
        "pass the model itself; a search over hyperparameters makes a trainer for each trial",
    ),
    Refusal(
        "debug",
        lambda t: t.args.debug,
        "its hooks do not see streamed layers; the engine refuses what is not finite by itself: leave it out",
    ),
    Refusal(
        "save_only_model with load_best_model_at_end",
        lambda t: t.args.save_only_model and t.args.load_best_model_at_end,
        "the best model is read back from the engine's state: keep it, with save_only_model=False",
    ),
    Refusal(
        "gradient_accumulation_steps > 1 with a model whose loss takes no num_items_in_batch",
        lambda t: t.args.gradient_accumulation_steps > 1 and not t.model_accepts_loss_kwargs,
        "the Trainer would take the mean of the micro-batches' means, the engine the mean over all tokens: "
        "set gradient_accumulation_steps=1 and a larger batch, which the engine cuts by EngineConfig.micro_batch_size",
    ),
    Refusal(
        "a get_decay_parameter_names of its own",
        lambda t: t.args.weight_decay and set(t.get_decay_parameter_names(t.model)) != decayed_parameters(t.model),
        "the engine decays what the Trainer decays, all but biases and norms: set weight_decay=0 or leave it out",
    ),
    Refusal(
        "padding_free or packing with a recurrent model",
        lambda t: getattr(t, "padding_free", False) and getattr(t.model, "_is_stateful", False),
        "its state would run on from one sequence into the next: set packing=False and padding_free=False",
    ),
)


def _device_type(config: EngineConfig) -> str:
    return "cuda" if config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available()) else "cpu"


def refuse_options(trainer: Any, config: EngineConfig) -> None:
    """Raise ValueError for what was asked of a Trainer and the engine does not do, all of it at once."""
    asked = [refusal for refusal in _REFUSALS if refusal.asked(trainer)]
    if asked:
        words = "; ".join(f"{refusal.option}: {refusal.instead}" for refusal in asked)
        raise ValueError(f"what the streaming engine ({config.dtype}) does not do: {words}")
