"""From settings to a run: the model, the data and the engine that a configuration file asks for."""

from __future__ import annotations

import logging
import platform
import random
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from megatrain.anatomy.adapters import add_lora, merged
from megatrain.anatomy.load import from_config, load_model, load_tokenizer, without_dropout
from megatrain.anatomy.meta import meta_model
from megatrain.anatomy.presets import named_config
from megatrain.changes import changes_since_checkpoint
from megatrain.checkpoint import Keep, restore
from megatrain.checkpoint.store import Checkpoints
from megatrain.config import EngineConfig
from megatrain.data import (
    PLAIN_CHAT_TEMPLATE,
    Batches,
    Dataset,
    PromptBatch,
    RecordError,
    Records,
    is_of_hub,
    load_records,
    records_from_rows,
    tokenize,
    tokenize_pairs,
    tokenize_prompts,
)
from megatrain.data.reading import pad_token_id
from megatrain.engine import StepResult, StreamingEngine, save_model
from megatrain.folder import FILE_MODE, RunFolder, owner_only
from megatrain.plain import to_plain
from megatrain.recipes import GRPO
from megatrain.run import Evaluating, LearningRate, TrainingRun, cosine_schedule
from megatrain.settings import Settings, dump_settings, settings_of
from megatrain.shapes import require_agreement
from megatrain.sinks import require_sinks
from megatrain.trace import write_atomically
from megatrain.tune import KNOBS, Tuned, tune

log = logging.getLogger("megatrain")

PACKAGES = ("megatrain", "torch", "transformers", "tokenizers", "datasets", "safetensors", "numpy")


def make_engine(settings: Settings) -> StreamingEngine:
    """Load or make the model, and put it into an engine."""
    random.seed(settings.run.seed)
    torch.manual_seed(settings.run.seed)
    model = _make_model(settings)
    if settings.lora is not None:
        model = add_lora(model, settings.lora.options, seed=settings.run.seed)
    if settings.recipe.disable_dropout:
        without_dropout(model)
    return StreamingEngine(model, _engine_config(settings), settings.optimizer)


def _engine_config(settings: Settings) -> EngineConfig:
    second = settings.recipe.needs_reference and settings.lora is None  # adapters can be switched off instead
    return replace(settings.engine, keep_reference=True) if second else settings.engine


def _make_model(settings: Settings) -> Any:
    asked, dtype, outputs = settings.model, getattr(torch, settings.engine.dtype), settings.recipe.outputs
    if asked.from_scratch:
        model = from_config(named_config(asked.name), dtype=dtype, seed=settings.run.seed, outputs=outputs)
    else:
        model = load_model(asked.name, dtype=dtype, trust_remote_code=asked.trust_remote_code, outputs=outputs)
    if outputs is not None and model.config.pad_token_id is None:  # by which it knows the last token of a row
        model.config.pad_token_id = pad_token_id(make_tokenizer(settings))
    return model


def make_batches(settings: Settings) -> Batches[Any]:
    """Read, tokenize and shuffle the data."""
    data = settings.data
    records = _records(settings, data.source, data.split, data.config)
    return Batches(_dataset(settings, records), data.batch, seed=settings.run.seed, shuffle=data.shuffle)


def make_held_out(settings: Settings) -> Batches[Any]:
    """The same for data that is not trained on, in its own order."""
    asked = settings.evaluation
    assert asked is not None
    assert asked.source is not None
    split = asked.split or ("validation" if is_of_hub(asked.source) else "train")
    records = _records(settings, asked.source, split, asked.config)
    return Batches(_dataset(settings, records), settings.data.batch, shuffle=False)


def make_prompts(settings: Settings) -> PromptBatch:
    """The prompts that the model answers now and then."""
    asked = settings.evaluation
    assert asked is not None
    records = records_from_rows([{"prompt": prompt} for prompt in asked.prompts], format="prompt")
    try:
        prompts = tokenize_prompts(records, make_tokenizer(settings), settings.data.sequence)
    except RecordError as error:
        raise ValueError(f"evaluation.prompts: {error.__cause__ or error}") from error
    if prompts.counts.rejected:
        raise ValueError(f"evaluation.prompts: {prompts.counts.rejected} are longer than data.sequence; shorten them")
    return prompts.batch(range(len(prompts)))


def make_evaluating(settings: Settings) -> Evaluating | None:
    """What a run looks at besides."""
    asked = settings.evaluation
    if asked is None:
        return None
    return Evaluating(
        every=asked.every,
        batches=() if asked.source is None else partial(make_held_out, settings),
        evaluate=settings.recipe.evaluate,
        prompts=partial(make_prompts, settings) if asked.prompts else None,
        max_new_tokens=asked.max_new_tokens,
        temperature=asked.temperature,
        seed=settings.run.seed,
    )


def _records(settings: Settings, source: str | list[str], split: str, config: str | None) -> Records:
    data = settings.data
    return load_records(source, split=split, config=config, format=data.format, on_bad_record=data.on_bad_record)


def _dataset(settings: Settings, records: Records) -> Dataset[Any]:
    """What the recipe reads, made of records."""
    data, tokenizer, reads = settings.data, make_tokenizer(settings), settings.recipe.reads
    if reads == "pairs":
        return tokenize_pairs(records, tokenizer, data.sequence, on_bad_record=data.on_bad_record)
    if reads == "prompts":
        return tokenize_prompts(records, tokenizer, data.sequence, on_bad_record=data.on_bad_record)
    return tokenize(
        records,
        tokenizer,
        data.sequence,
        too_long=data.too_long,
        loss_on="all" if reads == "whole documents" else data.loss_on,
        pack=data.pack,
        on_bad_record=data.on_bad_record,
    )


def make_tokenizer(settings: Settings) -> Any:
    """Load the tokenizer, with the chat template that is asked for."""
    model = settings.model
    tokenizer = load_tokenizer(model.tokenizer or model.name, trust_remote_code=model.trust_remote_code)
    if model.chat_template is not None:
        tokenizer.chat_template = _chat_template(model.chat_template)
    return tokenizer


def _chat_template(name: str) -> str:
    if name == "plain":
        return PLAIN_CHAT_TEMPLATE
    try:
        return Path(name).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(
            f"model.chat_template must be plain or a file; {name} cannot be read: {error.strerror}"
        ) from None


def make_schedule(settings: Settings) -> LearningRate:
    """Step, from 0 → learning rate."""
    run, peak = settings.run, settings.optimizer.lr
    floor = peak if run.schedule == "constant" else peak * run.floor
    return cosine_schedule(peak, run.steps, warmup=run.warmup, floor=floor)


def make_run(
    settings: Settings,
    *,
    resume: bool = False,
    process: bool = False,
    on_step: Callable[[int, StepResult], None] | None = None,
) -> TrainingRun:
    """A run, ready to start; its folder says what it was asked to do."""
    run = settings.run
    require_sinks(run.sinks)  # before a large model is loaded, as what follows
    RunFolder(run.folder).require_free()
    if isinstance(settings.recipe, GRPO):
        settings.recipe.functions()
    if resume:
        changes_since_checkpoint(settings)
    settings, _ = settle(settings)
    batches = partial(make_batches, settings) if process else make_batches(settings)
    return TrainingRun(
        partial(make_engine, settings) if process else make_engine(settings),
        batches,
        steps=run.steps,
        step=settings.recipe.step,
        lr_schedule=make_schedule(settings),
        run_dir=run.folder,
        on_step=on_step,
        save=run.save,
        checkpoint_every=run.checkpoint_every,
        checkpoint_at_stop=True,
        keep=Keep(run.keep_last, run.keep_every),
        resume=resume,
        evaluating=make_evaluating(settings),
        sinks=run.sinks,
        settings=to_plain(settings),
    )


def settle(settings: Settings) -> tuple[Settings, Tuned | None]:
    """The settings with what they leave to be chosen (`tune`), and how it was; None where nothing is."""
    if not settings.tune:
        return settings, None
    require_agreement(settings.engine, settings.optimizer)
    knobs = list(KNOBS) if settings.tune == "all" else settings.tune
    rows, tokens = _step_shape(settings)
    tuned = tune(_without_values(settings), _engine_config(settings), batch=rows, sequence=tokens, knobs=knobs)
    for reason in tuned.reasons:
        log.info("%s", reason)
    chosen: dict[str, Any] = {knob: getattr(tuned.config, knob) for knob in knobs}
    return replace(settings, engine=replace(settings.engine, **chosen), tune=[]), tuned


def _without_values(settings: Settings) -> Any:
    """The model's shapes on the meta device: nothing is loaded to be measured."""
    if settings.model.trust_remote_code:
        raise ValueError(
            "tune measures a copy of the model made of its configuration, which one that brings its own code "
            "(model.trust_remote_code) does not allow; set the knobs in engine: instead"
        )
    model = meta_model(named_config(settings.model.name), settings.recipe.outputs)
    if settings.recipe.outputs is not None and model.config.pad_token_id is None:
        model.config.pad_token_id = 0  # any will do
    if settings.lora is not None:
        model = add_lora(model, settings.lora.options)
    if settings.recipe.disable_dropout:
        without_dropout(model)
    return model


def _step_shape(settings: Settings) -> tuple[int, int]:
    """Sequences of a step, and tokens of the longest."""
    data, recipe = settings.data, settings.recipe
    if isinstance(recipe, GRPO):
        return data.batch * recipe.num_generations, data.sequence + recipe.max_completion_length
    return data.batch * (2 if recipe.reads == "pairs" else 1), data.sequence


def note_settings(settings: Settings, tuned: Tuned | None = None) -> None:
    """Leave in the run's folder what it was asked to do, how settings were chosen, and with which versions."""
    folder = RunFolder(settings.run.folder)
    if tuned is not None:
        folder.write_tuning({"reasons": tuned.reasons, "rates": tuned.rates, "candidates": tuned.candidates})
    names = PACKAGES if settings.lora is None else (*PACKAGES, "peft")
    versions = [f"{name}=={metadata.version(name)}" for name in names]
    about = [f"# Python {sys.version.split()[0]}, {platform.platform()}", *versions]
    write_atomically(folder.settings, dump_settings(settings).encode(), FILE_MODE)
    write_atomically(folder.environment, ("\n".join(about) + "\n").encode(), FILE_MODE)


def complete_model(settings: Settings) -> None:
    """Put the tokenizer beside the model that a run has left, so that whoever loads models from folders finds both."""
    folder = RunFolder(settings.run.folder).model
    if folder.is_dir():
        make_tokenizer(settings).save_pretrained(folder)
        owner_only(folder)


def export(folder: str | Path, out: str | Path, step: int | None = None, *, merge: bool = False) -> int:
    """Write the model of a run's checkpoint, by default the newest, in Hugging Face's format; returns its step.

    Of a LoRA run it is the adapter in peft's format, or with `merge` the model with the adapter in its weights.
    """
    settings = settings_of(folder)
    if merge and settings.lora is None:
        raise ValueError(f"{folder} trained the whole model: there is no adapter to merge; export it without --merge")
    with make_engine(settings) as engine:
        done = restore(engine, Checkpoints(RunFolder(folder).checkpoints), step).step
        if not merge:
            engine.save_pretrained(out)
    if merge:
        save_model(merged(engine.model), Path(out))
    make_tokenizer(settings).save_pretrained(out)
    return done
