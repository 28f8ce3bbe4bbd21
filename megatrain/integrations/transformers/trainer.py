"""A Trainer whose optimizer steps are a StreamingEngine's; everything else is the Trainer's own.

Note: when the engine lives. From the first step (or evaluated batch) inside `train`, `evaluate` or `predict` until
that call ends, be it with an error. In between the model is a plain one on the CPU, with the trained weights: it can be
called, saved and passed on. Inside, its layers are streamed, and `trainer.engine` is what a callback may use.

Note: when a step is done. The engine goes through the layers once for all micro-batches of a step. So micro-batches
are collected, and the last one's `training_step` does everything: forward, backward, clipping, AdamW.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback

from megatrain.checkpoint import CheckpointError, Checkpoints, CheckpointWriter, restore
from megatrain.config import AdamWConfig, EngineConfig
from megatrain.engine import StepResult, StreamingEngine
from megatrain.integrations.transformers.micro_batches import MicroBatch, denominator, join
from megatrain.integrations.transformers.optimizer import StreamedAdamW
from megatrain.integrations.transformers.refusals import is_sft, refuse_class, refuse_options

log = logging.getLogger("megatrain")

STATE_FOLDER = "megatrain"  # in a Trainer's checkpoint: the engine's own


def stream(trainer_class: type = Trainer, config: EngineConfig | None = None) -> type[StreamedTrainer]:
    """Return a subclass of a Trainer that trains through a StreamingEngine; use it as you would the class.

    trainer_class: transformers.Trainer, trl.SFTTrainer, or a subclass that leaves the loss and the optimizer to them.
    config: how to stream; None = EngineConfig(). Without a micro_batch_size of its own, a Trainer's micro-batch is one
    of the engine's. Its dtype decides what is computed in, and what the trained model is left in, whatever the model
    was loaded as.
    Raises ValueError for a class, and the new class for options, that the engine could not follow exactly.
    """
    refuse_class(trainer_class)
    bases, body = (StreamedTrainer, trainer_class), {"engine_config": config or EngineConfig()}
    return type(f"Streamed{trainer_class.__name__}", bases, body)


class StreamedTrainer(Trainer):  # type: ignore[misc]
    """What `stream` puts before a Trainer. engine: None outside of train, evaluate and predict."""

    engine_config: EngineConfig
    args: Any
    optimizer: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.engine: StreamingEngine | None = None
        self._waiting: list[MicroBatch] = []  # of the step to come
        self._last = StepResult(loss=0.0, grad_norm=0.0, tokens=0)
        self._resume_from: Path | None = None
        self._inside = False
        self._parameters = 0
        super().__init__(*args, **kwargs)
        refuse_options(self, self.engine_config)
        self.args = _without_checkpointing(self.args)
        if self._routed() and self.args.gradient_accumulation_steps > 1:
            log.warning(
                "the router's balancing loss of a step is the mean over its micro-batches, weighted by their tokens; "
                "the Trainer adds it up instead, and TRL takes the plain mean: that part of the loss will differ"
            )
        self.callback_handler.callbacks.insert(0, _EngineCallback(self))

    # ---- where things are ----

    def create_accelerator_and_postprocess(self) -> None:
        """Model and batches stay on the host, and are computed on without autocast; the engine moves what it needs."""
        super().create_accelerator_and_postprocess()
        self.accelerator.device_placement = False
        self.accelerator.native_amp = False
        self.accelerator.clip_grad_norm_ = self._norm_of_the_step

    def _move_model_to_device(self, model: Any, device: Any) -> None:
        """Not moved: it may be larger than the device."""

    def _norm_of_the_step(self, parameters: Any, max_norm: float, norm_type: float = 2) -> torch.Tensor:
        """The engine has clipped already."""
        return self._scalar(self._last.grad_norm)

    def _scalar(self, value: float) -> torch.Tensor:
        return torch.tensor(value, dtype=torch.float32, device=self.args.device)

    # ---- the engine's life ----

    @contextmanager
    def _session(self) -> Iterator[None]:
        """Within, there may be an engine; nested ones share it."""
        outermost, self._inside = not self._inside, True
        try:
            yield
        finally:
            if outermost:
                self._inside = False
                self.give_model_back()

    def give_model_back(self) -> None:
        """Close the engine, if there is one: the model is whole again, with the weights as they now are."""
        engine, self.engine = self.engine, None
        self._resume_from = None
        self._waiting = []
        if engine is not None:
            engine.close()

    def _running(self) -> StreamingEngine:
        """The engine, made when it is first needed, so that callbacks meet a whole model when training begins."""
        if self.engine is None:
            training = self.model.training
            self.model.train()  # layers keep the mode in which the engine takes them over
            self._parameters = self.model.num_parameters(exclude_embeddings=True)
            rows = self.engine_config.micro_batch_size or self.args.per_device_train_batch_size
            self.engine = StreamingEngine(
                self.model, replace(self.engine_config, micro_batch_size=rows), _adamw(self.args)
            )
            self.model.train(training)
            if self._resume_from is not None:
                with torch.random.fork_rng():  # the Trainer puts random states back itself, at the right moment
                    restore(self.engine, Checkpoints(self._resume_from))
        return self.engine

    # ---- training ----

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As Trainer.train. Each call begins with new moments, unless it resumes from a checkpoint."""
        self.optimizer = None
        with self._session():
            return super().train(*args, **kwargs)

    def create_optimizer(self, model: Any = None) -> Any:
        if self.optimizer is None:
            self.optimizer = StreamedAdamW(_adamw(self.args))
        return self.optimizer

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Collect a micro-batch; with the last one of a step, train on all of them and return the loss of the step."""
        model.train()
        self._waiting.append(MicroBatch.of(inputs, num_items_in_batch))
        self._count_tokens(inputs)
        if not self.accelerator.sync_gradients:
            return self._scalar(0.0)
        waiting, self._waiting = self._waiting, []
        engine = self._running()
        self._agree_on_rows(engine, waiting)
        engine.lr = _unwrapped(self.optimizer).take_lr()
        batch = join(waiting)
        told = denominator(waiting, batch, obeyed=not engine.loss_from_logits)
        self._last = engine.step(batch) if told is None else engine.step(batch, partial(_summed_loss, told))
        return self._scalar(self._last.loss)

    def _count_tokens(self, inputs: Any) -> None:
        """TRL logs how many tokens it has seen, and counts them where it computes the loss."""
        if is_sft(type(self)):
            mask = inputs.get("attention_mask")
            self._total_train_tokens += inputs["input_ids"].numel() if mask is None else int(mask.sum())
            self._metrics["train"]["num_tokens"] = [self._total_train_tokens]

    def _agree_on_rows(self, engine: StreamingEngine, waiting: list[MicroBatch]) -> None:
        """Let the engine's micro-batches be the collator's, which may put several examples into a row."""
        rows = max(part.rows for part in waiting)
        free = self.engine_config.micro_batch_size is None and len(waiting) > 1
        if free and rows != engine.control.micro_batch_size:
            engine.control.set_micro_batch_size(rows)

    def floating_point_ops(self, inputs: Any) -> int:
        """As Trainer's, of the whole model; it would count what is left of it while layers are streamed."""
        if self.engine is None:
            return super().floating_point_ops(inputs)  # type: ignore[no-any-return]
        return int(6 * inputs["input_ids"].numel() * self._parameters)

    # ---- evaluation ----

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        with self._unrounded(), self._session():
            return super().evaluate(*args, **kwargs)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        with self._unrounded(), self._session():
            return super().predict(*args, **kwargs)

    @contextmanager
    def _unrounded(self) -> Iterator[None]:
        """Weights that only pass through the engine's dtype come out as they went in."""
        dtype = getattr(torch, self.engine_config.dtype)
        weights = [] if self._inside else [p for p in self.model.parameters() if p.dtype != dtype]
        kept = [parameter.data for parameter in weights]
        try:
            yield
        finally:
            for parameter, data in zip(weights, kept, strict=True):
                parameter.data = data

    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> Any:
        """The loss alone comes without whole logits; what needs more gets the model, its layers streamed."""
        engine = self._running()
        if prediction_loss_only and "labels" in inputs and not self._needs_outputs():
            return self._scalar(self._evaluated(engine, inputs)), None, None
        with engine.inference() as streamed:
            return super().prediction_step(streamed, inputs, prediction_loss_only, ignore_keys)

    def _needs_outputs(self) -> bool:
        """TRL makes its metrics from them (in chunks of its own); a router's balancing loss is computed from them."""
        return self._routed() or is_sft(type(self))

    def _routed(self) -> bool:
        """Whether a router's balancing loss is part of the loss."""
        return bool(getattr(self.model.config.get_text_config(), "output_router_logits", False))

    def _evaluated(self, engine: StreamingEngine, inputs: Any) -> float:
        part = MicroBatch.of(inputs, self.get_batch_samples(iter([inputs]), 1, self.args.device)[1])
        batch = join([part])
        found = engine.evaluate(batch)
        told = denominator([part], batch, obeyed=not engine.loss_from_logits)
        return found.loss if told is None else found.loss * found.tokens / told

    # ---- saving and resuming ----

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        if self.engine is None:
            super()._save(output_dir, state_dict)
            return
        folder = Path(output_dir or self.args.output_dir)
        self.engine.save_pretrained(folder)
        if self.processing_class is not None:
            self.processing_class.save_pretrained(folder)
        torch.save(self.args, folder / "training_args.bin")  # where Hugging Face's tools look for it

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Beside the Trainer's files, which hold the schedule: weights, master and moments of every layer."""
        super()._save_optimizer_and_scheduler(output_dir)
        writer = CheckpointWriter(self._running(), Checkpoints(Path(output_dir) / STATE_FOLDER))
        writer.write(self.state.global_step, {})
        writer.wait()
        if writer.error is not None:
            raise writer.error

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Nothing yet: weights come back with their master and moments, when the engine begins."""
        _state_in(resume_from_checkpoint)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            self._resume_from = _state_in(checkpoint)

    def _load_best_model(self) -> None:
        log.info("loading the best model from %s", self.state.best_model_checkpoint)
        with torch.random.fork_rng():
            restore(self._running(), Checkpoints(_state_in(self.state.best_model_checkpoint)))


class _EngineCallback(TrainerCallback):  # type: ignore[misc]
    """Comes before all other callbacks."""

    def __init__(self, trainer: StreamedTrainer) -> None:
        self._trainer = trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Whoever stops the engine, from whatever thread, stops training."""
        if self._trainer.engine is not None and self._trainer.engine.control.stopping:
            control.should_training_stop = True

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        """Callbacks that save or log the trained model get it whole."""
        self._trainer.give_model_back()


def _summed_loss(told: int, scores: torch.Tensor) -> torch.Tensor:
    return -scores.double().sum() / told


def _adamw(args: Any) -> AdamWConfig:
    return AdamWConfig(
        lr=args.learning_rate,
        betas=(args.adam_beta1, args.adam_beta2),
        eps=args.adam_epsilon,
        weight_decay=args.weight_decay,
        max_grad_norm=args.max_grad_norm or None,
    )


def _without_checkpointing(args: Any) -> Any:
    """The engine recomputes every layer as it is; a layer that did so itself would do it twice."""
    changed = copy.copy(args)
    for name in ("gradient_checkpointing", "activation_checkpointing"):
        if getattr(args, name, False):
            log.info("%s is ignored: the engine always recomputes layers in backward", name)
            setattr(changed, name, False)
    return changed


def _unwrapped(optimizer: Any) -> StreamedAdamW:
    """The optimizer itself, out of what accelerate wraps it in."""
    inner = getattr(optimizer, "optimizer", optimizer)
    assert isinstance(inner, StreamedAdamW)
    return inner


def _state_in(checkpoint: str) -> Path:
    folder = Path(checkpoint) / STATE_FOLDER
    if not Checkpoints(folder).steps():
        raise CheckpointError(
            f"{checkpoint} holds no whole state of the engine ({STATE_FOLDER}/step-…): a Trainer without stream wrote "
            "it, or save_only_model, or it was interrupted. Resume from an earlier one, or load its model with "
            "from_pretrained and train anew"
        )
    return folder
