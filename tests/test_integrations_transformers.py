"""A Trainer that streams arrives where the plain one does, and whatever it could not follow is refused by name."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from families import VOCAB, build
from hypothesis import given
from hypothesis import strategies as st
from pairs import differing, gap
from tiny_models import VOCAB as TINY_VOCAB
from tiny_models import DroppingForCausalLM, tiny
from transformers import AutoModelForCausalLM, PreTrainedModel, Trainer, TrainerCallback, TrainingArguments

from megatrain import AdamWConfig, EngineConfig, StreamingEngine
from megatrain.batch import IGNORED
from megatrain.checkpoint import CheckpointError
from megatrain.integrations.transformers import StreamedTrainer, refusals, stream
from megatrain.integrations.transformers.micro_batches import MicroBatch, denominator, join

FLOAT32 = EngineConfig(device="cpu", dtype="float32")
Examples = list[dict[str, list[int]]]


# ---- what is trained on ----


def examples(count: int, vocabulary: int = VOCAB - 1, seed: int = 0) -> Examples:
    """Of 4 to 20 tokens each."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(4, 21, (count,), generator=generator).tolist()
    return [{"input_ids": torch.randint(3, vocabulary, (n,), generator=generator).tolist()} for n in lengths]


def collate(rows: Examples) -> dict[str, torch.Tensor]:
    """Padded to the longest of these rows, as a language-modelling collator does."""
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(row["input_ids"]) for row in rows], batch_first=True)
    mask = (ids != 0).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, IGNORED)}


def model_of(family: str) -> PreTrainedModel:
    return build(family, layers=2)


SETTINGS: dict[str, Any] = {
    "per_device_train_batch_size": 2,
    "per_device_eval_batch_size": 2,
    "learning_rate": 1e-3,
    "logging_steps": 1,
    "optim": "adamw_torch",  # the fused one, which is the default, rounds in another order
    "save_strategy": "no",
    "report_to": [],
    "use_cpu": True,
    "dataloader_pin_memory": False,
    "disable_tqdm": True,
}


def arguments(folder: Path, **changes: Any) -> TrainingArguments:
    return TrainingArguments(str(folder), **{"num_train_epochs": 1, **SETTINGS, **changes})


def trainer_of(
    folder: Path,
    model: PreTrainedModel | None = None,
    config: EngineConfig | None = FLOAT32,
    rows: Examples | None = None,
    trainer_class: type[Any] = Trainer,
    further: dict[str, Any] | None = None,
    **changes: Any,
) -> Any:
    """A Trainer on 11 ragged examples: through the engine, or plain where config is None."""
    chosen: type[Any] = trainer_class if config is None else stream(trainer_class, config)
    return chosen(
        model=model or model_of("llama"),
        args=arguments(folder, **changes),
        train_dataset=rows or examples(11),
        **{"data_collator": collate, **(further or {})},
    )


def comparable(history: list[dict[str, float]]) -> list[dict[str, float]]:
    """A log without what depends on the clock."""
    return [{key: x for key, x in entry.items() if "runtime" not in key and "second" not in key} for entry in history]


def require_equal_logs(found: list[dict[str, float]], expected: list[dict[str, float]], tolerance: float) -> None:
    for ours, theirs in zip(comparable(found), comparable(expected), strict=True):
        assert ours == pytest.approx(theirs, rel=tolerance, abs=1e-9)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "out"


# ---- the same numbers ----


CLIPPED = {"max_grad_norm": 0.5, "weight_decay": 0.1, "warmup_steps": 2, "lr_scheduler_type": "linear"}
UNCLIPPED = {"max_grad_norm": 0.0, "adam_beta2": 0.95, "adam_epsilon": 1e-6, "lr_scheduler_type": "cosine"}


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize(
    ("accumulation", "settings"),
    [(1, CLIPPED), (3, CLIPPED), (3, UNCLIPPED)],
    ids=["one micro-batch", "three", "three, without clipping"],
)
def test_losses_norms_and_weights_are_the_plain_trainers(
    folder: Path, family: str, accumulation: int, settings: dict[str, Any]
) -> None:
    """11 examples, two at a time: the last micro-batch and (of three) the last step are partial, in two epochs."""
    model = model_of(family)
    plain = trainer_of(
        folder, copy.deepcopy(model), None, gradient_accumulation_steps=accumulation, num_train_epochs=2, **settings
    )
    streamed = trainer_of(folder, model, gradient_accumulation_steps=accumulation, num_train_epochs=2, **settings)
    expected, found = plain.train(), streamed.train()
    assert found.global_step == expected.global_step == 2 * math.ceil(6 / accumulation)
    assert found.training_loss == pytest.approx(expected.training_loss, rel=1e-6)
    require_equal_logs(streamed.state.log_history, plain.state.log_history, 1e-6)
    assert gap(model.state_dict(), plain.model.state_dict()) <= 1e-6


def test_a_schedule_that_callbacks_set_is_followed(folder: Path) -> None:
    class Halve(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, args: Any, state: Any, control: Any, optimizer: Any, **_: Any) -> None:
            for group in optimizer.param_groups:
                group["lr"] = 1e-3 * 0.5**state.global_step

    model = model_of("llama")
    settings = {"lr_scheduler_type": "constant", "further": {"callbacks": [Halve()]}}
    plain = trainer_of(folder, copy.deepcopy(model), None, **settings)
    streamed = trainer_of(folder, model, **settings)
    plain.train()
    streamed.train()
    assert gap(model.state_dict(), plain.model.state_dict()) <= 1e-6


def test_bfloat16_has_the_bits_of_the_engine_alone(folder: Path) -> None:
    model, seen = model_of("llama"), []

    def remembering(rows: Examples) -> dict[str, torch.Tensor]:
        seen.append(collate(rows))
        return seen[-1]

    alone = copy.deepcopy(model)
    config = EngineConfig(device="cpu", dtype="bfloat16")
    further = {"data_collator": remembering}
    trainer = trainer_of(folder, model, config, further=further, gradient_accumulation_steps=2, bf16=True)
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    adamw = AdamWConfig(lr=1e-3, max_grad_norm=1.0)
    with StreamingEngine(alone, replace(config, micro_batch_size=2), adamw) as engine:
        for entry, parts in zip(logs, zip(seen[::2], seen[1::2], strict=True), strict=True):
            engine.lr = entry["learning_rate"]
            assert engine.step(join([MicroBatch(part, None) for part in parts])).loss == pytest.approx(entry["loss"])
    assert differing(model.state_dict(), alone.state_dict()) == []
    assert model.dtype == torch.bfloat16


@pytest.mark.parametrize("accumulation", [1, 2])
def test_where_a_balancing_loss_is_weighted_in_another_way_it_is_said(
    folder: Path, accumulation: int, caplog: pytest.LogCaptureFixture
) -> None:
    model = model_of("mixtral")
    model.config.output_router_logits = True
    trainer_of(folder, model, gradient_accumulation_steps=accumulation)
    assert ("balancing loss of a step is the mean" in caplog.text) == (accumulation > 1)


# ---- the Trainer's own loop ----


class Diary(TrainerCallback):  # type: ignore[misc]
    """Every event with the state it met."""

    def __init__(self) -> None:
        self.entries: list[tuple[Any, ...]] = []

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("on_"):
            return super().__getattribute__(name)

        def write(args: Any, state: Any, control: Any, **things: Any) -> None:
            rate = things["lr_scheduler"].get_last_lr() if things.get("lr_scheduler") else None
            self.entries.append((name, state.global_step, state.epoch, state.max_steps, control.should_log, rate))

        return write


def test_callbacks_come_in_the_same_order_with_the_same_state(folder: Path) -> None:
    diaries = []
    for config in (None, FLOAT32):
        diaries.append(Diary())
        settings = {"gradient_accumulation_steps": 2, "save_strategy": "steps", "save_steps": 2, "warmup_steps": 1}
        trainer_of(folder, None, config, further={"callbacks": [diaries[-1]]}, **settings).train()
    plain, streamed = diaries
    assert streamed.entries == plain.entries
    assert {"on_substep_end", "on_pre_optimizer_step", "on_optimizer_step", "on_save"} <= {e[0] for e in plain.entries}


class At(TrainerCallback):  # type: ignore[misc]
    """Does something at an event."""

    def __init__(self, event: str, action: Callable[..., None]) -> None:
        setattr(self, event, action)


def test_a_callback_stops_training_and_the_model_is_whole(folder: Path) -> None:
    def stop(args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = state.global_step == 2

    model = model_of("llama")
    trainer = trainer_of(folder, model, further={"callbacks": [At("on_step_end", stop)]})
    assert trainer.train().global_step == 2
    require_whole(trainer, model)


def require_whole(trainer: StreamedTrainer, model: PreTrainedModel) -> None:
    assert trainer.engine is None
    batch = collate(examples(2))
    with torch.no_grad():
        assert math.isfinite(float(model(**batch).loss))


def test_callbacks_meet_a_whole_model_before_and_after_training_and_the_engine_during_it(folder: Path) -> None:
    seen: dict[str, Any] = {}

    def look(name: str) -> Callable[..., None]:
        def action(*_: Any, model: Any, **__: Any) -> None:
            seen[name] = (model.num_parameters(), trainer.engine is not None)

        return action

    model = model_of("llama")
    names = ("on_train_begin", "on_step_end", "on_train_end")
    whole = model.num_parameters()
    trainer = trainer_of(folder, model, further={"callbacks": [At(name, look(name)) for name in names]})
    trainer.train()
    assert seen["on_train_begin"] == seen["on_train_end"] == (whole, False)
    assert seen["on_step_end"][1]


def test_stopping_the_engine_stops_training_after_the_step(folder: Path) -> None:
    def stop(args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 2:
            trainer.engine.control.stop()

    model = model_of("llama")
    trainer = trainer_of(folder, model, further={"callbacks": [At("on_pre_optimizer_step", stop)]})
    assert trainer.train().global_step == 3
    require_whole(trainer, model)


def test_a_callback_cannot_save_what_is_left_of_a_streamed_model(folder: Path) -> None:
    def save(*_: Any, model: Any, **__: Any) -> None:
        model.save_pretrained(folder / "mine")

    trainer = trainer_of(folder, further={"callbacks": [At("on_step_end", save)]})
    with pytest.raises(RuntimeError, match=r"streamed by an engine.*engine\.save_pretrained"):
        trainer.train()


def test_gradient_checkpointing_is_ignored(folder: Path) -> None:
    model = model_of("llama")
    plain = trainer_of(folder, copy.deepcopy(model), None)
    names = [field.name for field in fields(TrainingArguments)]  # the older name warns where there is a newer one
    name = "activation_checkpointing" if "activation_checkpointing" in names else "gradient_checkpointing"
    streamed = trainer_of(folder, model, **{name: True})
    plain.train()
    streamed.train()
    require_equal_logs(streamed.state.log_history, plain.state.log_history, 1e-6)
    assert not any(getattr(module, "gradient_checkpointing", False) for module in model.modules())


def test_a_second_call_of_train_goes_on_from_the_weights(folder: Path) -> None:
    trainer = trainer_of(folder, rows=examples(4), lr_scheduler_type="constant")
    first = trainer.train().training_loss
    assert trainer.train().training_loss < first


# ---- errors ----


def test_an_error_in_a_step_reaches_the_user_and_leaves_the_model_usable(folder: Path) -> None:
    rows = examples(11)
    rows[7]["input_ids"][2] = 5000
    model = model_of("llama")
    trainer = trainer_of(folder, model, rows=rows, num_train_epochs=3)
    with pytest.raises(ValueError, match=r"input_ids.* is 5000, outside the model's vocabulary"):
        trainer.train()
    require_whole(trainer, model)
    del rows[7]
    assert trainer.train().global_step == 15


def test_micro_batches_left_over_from_another_step_are_refused(folder: Path) -> None:
    """The plain Trainer lets their gradients leak into the next epoch's first step."""

    substeps = []

    def stop(args: Any, state: Any, control: Any, **_: Any) -> None:
        substeps.append(state.global_step)
        control.should_epoch_stop = len(substeps) == 3

    trainer = trainer_of(
        folder, gradient_accumulation_steps=3, num_train_epochs=2, further={"callbacks": [At("on_substep_end", stop)]}
    )
    with pytest.raises(ValueError, match="micro-batches came together that belong to different steps"):
        trainer.train()


def test_a_learning_rate_that_comes_too_late_is_refused(folder: Path) -> None:
    def late(args: Any, state: Any, control: Any, optimizer: Any, **_: Any) -> None:
        optimizer.param_groups[0]["lr"] = optimizer.param_groups[1]["lr"] = 0.5

    trainer = trainer_of(folder, further={"callbacks": [At("on_pre_optimizer_step", late)]})
    with pytest.raises(ValueError, match=r"changed between the gradients and the optimizer step.*on_step_begin"):
        trainer.train()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"lr": 0.5}, "one learning rate for all parameters; the groups have"),
        ({"weight_decay": 0.5}, "betas, eps and weight_decay cannot change"),
    ],
)
def test_what_the_optimizer_cannot_change_is_refused(folder: Path, change: dict[str, float], words: str) -> None:
    def alter(args: Any, state: Any, control: Any, optimizer: Any, **_: Any) -> None:
        optimizer.param_groups[0].update(change)

    trainer = trainer_of(folder, further={"callbacks": [At("on_step_begin", alter)]})
    with pytest.raises(ValueError, match=words):
        trainer.train()


def test_a_collators_further_tensors_are_refused(folder: Path) -> None:
    def collator(rows: Examples) -> dict[str, torch.Tensor]:
        return {**collate(rows), "weights": torch.ones(len(rows))}

    trainer = trainer_of(folder, further={"data_collator": collator})
    with pytest.raises(ValueError, match=r"it made .*'weights'.*Leave out what else"):
        trainer.train()


# ---- evaluation ----


def accuracy(prediction: Any) -> dict[str, float]:
    given = prediction.predictions
    logits = next(part for part in given if part.ndim == 3) if isinstance(given, tuple) else given
    guesses, labels = logits.argmax(-1)[:, :-1], prediction.label_ids[:, 1:]
    return {"accuracy": float((guesses == labels)[labels != IGNORED].mean())}


@pytest.mark.parametrize(
    ("family", "metrics"),
    [("llama", None), ("gpt2", None), ("mixtral", None), ("gpt2", accuracy), ("mixtral", accuracy)],
    ids=lambda value: value if isinstance(value, str) else "metrics" if value else "loss",
)
def test_evaluation_while_training_is_the_plain_trainers(folder: Path, family: str, metrics: Any) -> None:
    model = model_of(family)
    model.config.output_router_logits = family == "mixtral"  # its balancing loss is part of the loss
    further = {"eval_dataset": examples(5, seed=1), "compute_metrics": metrics}
    settings = {"eval_strategy": "steps", "eval_steps": 2, "eval_on_start": True, "further": further}
    plain = trainer_of(folder, copy.deepcopy(model), None, **settings)
    streamed = trainer_of(folder, model, **settings)
    plain.train()
    streamed.train()
    require_equal_logs(streamed.state.log_history, plain.state.log_history, 2e-6)
    assert sum("eval_loss" in entry for entry in streamed.state.log_history) == 4
    assert gap(model.state_dict(), plain.model.state_dict()) <= 1e-6


def test_evaluation_does_not_disturb_training(folder: Path) -> None:
    further = {"eval_dataset": examples(5, TINY_VOCAB, seed=1)}
    trained = []
    for strategy in ("no", "steps"):
        rows, settings = examples(11, TINY_VOCAB), {"eval_strategy": strategy, "eval_steps": 2, "further": further}
        trained.append(trainer_of(folder, tiny(), FLOAT32, rows, **settings))
        trained[-1].train()
    assert differing(trained[0].model.state_dict(), trained[1].model.state_dict()) == []


def test_evaluation_and_prediction_without_training(folder: Path) -> None:
    model, rows = model_of("llama"), examples(5, seed=1)
    plain = trainer_of(folder, copy.deepcopy(model), None)
    streamed = trainer_of(folder, model)
    found, expected = streamed.evaluate(rows), plain.evaluate(rows)
    assert found["eval_loss"] == pytest.approx(expected["eval_loss"], rel=1e-6)
    require_whole(streamed, model)
    assert abs(streamed.predict(rows).predictions - plain.predict(rows).predictions).max() <= 1e-5
    require_whole(streamed, model)


def test_evaluation_in_bfloat16_does_not_round_a_float32_model(folder: Path) -> None:
    model = model_of("llama")
    before = copy.deepcopy(model.state_dict())
    trainer = trainer_of(folder, model, EngineConfig(device="cpu", dtype="bfloat16"))
    assert trainer.evaluate(examples(5, seed=1))["eval_loss"] == pytest.approx(4.6, abs=0.3)
    assert differing(model.state_dict(), before) == []
    require_whole(trainer, model)


def test_the_best_model_is_loaded_at_the_end(folder: Path) -> None:
    """Training at a rate that makes it worse and worse: the first checkpoint is the best."""
    settings = {"eval_strategy": "steps", "save_strategy": "steps", "eval_steps": 2, "save_steps": 2}
    settings |= {"load_best_model_at_end": True, "learning_rate": 0.5, "lr_scheduler_type": "constant"}
    model = model_of("llama")
    trainer = trainer_of(folder, model, further={"eval_dataset": examples(5, seed=1)}, **settings)
    trainer.train()
    best = Path(trainer.state.best_model_checkpoint)
    losses = {e["step"]: e["eval_loss"] for e in trainer.state.log_history if "eval_loss" in e}
    assert best.name == f"checkpoint-{min(losses, key=lambda step: losses[step])}" != "checkpoint-6"
    assert differing(model.state_dict(), AutoModelForCausalLM.from_pretrained(best).state_dict()) == []
    require_whole(trainer, model)


# ---- saving and resuming ----


def test_a_saved_model_loads_with_the_trained_weights(folder: Path) -> None:
    model = model_of("llama")
    trainer = trainer_of(folder, model, save_strategy="steps", save_steps=6)
    trainer.train()
    trainer.save_model(str(folder / "after"))
    for name in ("after", "checkpoint-6"):
        loaded = AutoModelForCausalLM.from_pretrained(folder / name)
        assert differing(loaded.state_dict(), model.state_dict()) == []
        assert (folder / name / "training_args.bin").exists()


@pytest.mark.parametrize(
    ("dtype", "stop_at"),
    [("float32", 3), ("bfloat16", 3), ("float32", 4)],
    ids=["float32, inside an epoch", "bfloat16, inside an epoch", "float32, between two epochs"],
)
def test_a_resumed_run_has_the_bits_of_one_that_was_not_interrupted(folder: Path, dtype: Any, stop_at: int) -> None:
    """Two epochs of four steps of up to three micro-batches, with dropout and shuffling."""
    config = EngineConfig(device="cpu", dtype=dtype)
    settings = {"gradient_accumulation_steps": 3, "num_train_epochs": 2, "save_strategy": "steps", "weight_decay": 0.1}
    rows = examples(24, TINY_VOCAB)

    def trainer(name: str, **further: Any) -> Any:
        changes = {**settings, "save_steps": stop_at, "further": further}
        return trainer_of(folder / name, tiny(DroppingForCausalLM), config, rows, **changes)

    def stop(args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = state.global_step == stop_at

    straight = trainer("straight")
    straight.train()
    interrupted = trainer("interrupted", callbacks=[At("on_step_end", stop)])
    interrupted.train()
    torch.manual_seed(99)  # whatever the new process drew before
    resumed = trainer("interrupted")
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 8
    losses = [[entry["loss"] for entry in t.state.log_history if "loss" in entry] for t in (straight, resumed)]
    assert losses[0] == losses[1]
    assert differing(resumed.model.state_dict(), straight.model.state_dict()) == []


@pytest.mark.parametrize("settings", [{"config": None}, {"save_only_model": True}], ids=["plain", "without state"])
def test_a_checkpoint_without_the_engines_state_is_refused(folder: Path, settings: dict[str, Any]) -> None:
    trainer_of(folder, save_strategy="steps", save_steps=2, **settings).train()
    with pytest.raises(CheckpointError, match=r"checkpoint-6 holds no whole state of the engine.*Resume from an earl"):
        trainer_of(folder).train(resume_from_checkpoint=True)


def test_a_checkpoint_that_cannot_be_written_ends_training(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the plain Trainer; and nothing half-written counts as a state."""
    monkeypatch.setattr("megatrain.checkpoint.store.SPARE_BYTES", 1 << 60)
    model = model_of("llama")
    trainer = trainer_of(folder, model, save_strategy="steps", save_steps=2)
    with pytest.raises(CheckpointError, match="a checkpoint needs"):
        trainer.train()
    require_whole(trainer, model)


# ---- adapters ----


def with_adapters() -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    return get_peft_model(model_of("llama"), LoraConfig(r=4, target_modules="all-linear"))


def test_adapters_are_trained_saved_and_resumed_as_by_the_plain_trainer(folder: Path) -> None:
    from peft import PeftModel

    settings = {"gradient_accumulation_steps": 2, "save_strategy": "steps", "save_steps": 2, "weight_decay": 0.1}
    plain = trainer_of(folder / "plain", with_adapters(), None, **settings)
    streamed = trainer_of(folder / "streamed", with_adapters(), **settings)
    resumed = trainer_of(folder / "streamed", with_adapters(), **settings)
    plain.train()
    streamed.train()
    require_equal_logs(streamed.state.log_history, plain.state.log_history, 1e-6)
    assert gap(streamed.model.state_dict(), plain.model.state_dict()) <= 1e-6
    resumed.train(resume_from_checkpoint=str(folder / "streamed" / "checkpoint-2"))
    assert differing(resumed.model.state_dict(), streamed.model.state_dict()) == []
    loaded = PeftModel.from_pretrained(model_of("llama"), folder / "streamed" / "checkpoint-3")
    assert differing(loaded.state_dict(), streamed.model.state_dict()) == []


# ---- refused ----


def own_decay(model: Any) -> list[str]:
    return ["model.norm.weight"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"bf16_full_eval": True}, "bf16_full_eval=True: the engine evaluates in the dtype"),
        ({"bf16": True}, r"bf16=True with EngineConfig\(dtype='float32'\): they contradict"),
        ({"optim": "adafactor"}, "optim: the engine has AdamW alone: optim='adamw_torch'"),
        ({"optim_args": "a=1"}, "optim: the engine has AdamW alone"),
        ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha: its hook"),
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor: it needs all logits at once"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size=True: `megatrain plan`"),
        ({"torch_compile": True}, "torch_compile=True: layers run with streamed weights"),
        ({"debug": "underflow_overflow"}, "debug: its hooks do not see"),
        ({"further": {"compute_loss_func": print}}, "compute_loss_func: it needs all logits"),
        (
            {"further": {"optimizer_cls_and_kwargs": (torch.optim.SGD, {})}},
            "optimizers or optimizer_cls_and_kwargs: the engine has AdamW alone",
        ),
        (
            {"save_only_model": True, "load_best_model_at_end": True, "metric_for_best_model": "loss"},
            "save_only_model with load_best_model_at_end: the best model is read back",
        ),
    ],
    ids=lambda value: "" if isinstance(value, str) else "-".join(value),
)
def test_an_option_that_the_engine_does_not_follow_is_refused(
    folder: Path, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        trainer_of(folder, **settings)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("args.fp16", True, "fp16=True: the engine computes in bfloat16"),
        ("args.fsdp", "full_shard", "fsdp: the engine shards nothing"),
        ("args.deepspeed", "file.json", "deepspeed: the engine offloads to host memory itself"),
        ("args.parallelism_config", object(), "more than one process: the engine drives one GPU from one process"),
        ("args.n_gpu", 2, "more than one GPU: the engine drives one: set CUDA_VISIBLE_DEVICES=0"),
        ("args.device", torch.device("cuda"), "another device than the engine's: set use_cpu=True"),
        ("args.use_liger_kernel", True, "use_liger_kernel=True: it replaces the model's forward"),
        ("args.activation_offloading", True, r"activation_offloading=True.*offload_activations=True"),
        ("args.loss_type", "dft", "loss_type other than 'nll'"),
        ("model_init", build, "model_init: pass the model itself"),
        ("lr_scheduler", object(), "choose a schedule with lr_scheduler_type"),
        ("model.hf_device_map", {"": 0}, "a device_map spread over devices: load it with from_pretrained"),
        ("model_accepts_loss_kwargs", False, "takes no num_items_in_batch: the Trainer would take the mean"),
        ("get_decay_parameter_names", own_decay, "a get_decay_parameter_names of its own: the engine decays what"),
    ],
    ids=lambda value: value if isinstance(value, str) and " " not in value else "",
)
def test_what_this_machine_cannot_offer_is_refused_as_well(folder: Path, name: str, value: Any, words: str) -> None:
    """Each in turn, as another machine's Trainer would have it."""
    trainer = trainer_of(folder, gradient_accumulation_steps=2, weight_decay=0.1)
    changed = Overlay(trainer, {name: value})
    with pytest.raises(ValueError, match=words):
        refusals.refuse_options(changed, FLOAT32)


def test_a_recurrent_model_without_padding_is_refused(folder: Path) -> None:
    changed = Overlay(trainer_of(folder), {"padding_free": True, "model._is_stateful": True})
    with pytest.raises(ValueError, match=r"recurrent model: its state would run on .* set packing=False"):
        refusals.refuse_options(changed, FLOAT32)


class Overlay:
    """Another object's attributes, some of them changed ("a.b": b of a)."""

    def __init__(self, below: Any, changes: dict[str, Any]) -> None:
        self._below, self._changes = below, changes

    def __getattr__(self, name: str) -> Any:
        if name in self._changes:
            return self._changes[name]
        inner = {key.partition(".")[2]: value for key, value in self._changes.items() if key.startswith(f"{name}.")}
        found = getattr(self._below, name)
        return Overlay(found, inner) if inner else found


def test_all_that_is_wrong_is_said_at_once(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"bf16_full_eval.*label_smoothing_factor.*auto_find_batch_size"):
        trainer_of(folder, bf16_full_eval=True, label_smoothing_factor=0.1, auto_find_batch_size=True)


@pytest.mark.parametrize("method", ["compute_loss", "training_step", "prediction_step", "create_optimizer"])
def test_a_trainer_with_a_step_of_its_own_is_refused(method: str) -> None:
    own = type("Own", (Trainer,), {method: lambda self: None})
    with pytest.raises(ValueError, match=f"Own has a {method} of its own, and the engine would not call it"):
        stream(type("Derived", (own,), {}), FLOAT32)


@pytest.mark.parametrize("name", ["DPOTrainer", "GRPOTrainer"])
def test_training_on_preferences_is_refused_with_a_way_out(name: str) -> None:
    trl = pytest.importorskip("trl")
    with pytest.raises(ValueError, match=rf"{name} has a .* of its own, and .*megatrain\.recipes"):
        stream(getattr(trl, name), FLOAT32)


def test_what_is_no_trainer_is_refused() -> None:
    with pytest.raises(ValueError, match=r"dict has no create_accelerator.*transformers 5\.17 and 5\.23 were tried"):
        stream(dict, FLOAT32)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusals, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install megatrain\[trainer\]"):
        stream(Trainer, FLOAT32)


def test_a_subclass_with_methods_of_other_kinds_is_streamed(folder: Path) -> None:
    class Chatty(Trainer):  # type: ignore[misc]
        def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
            super().log({**logs, "chatty": 1.0}, *args, **kwargs)

    trainer = trainer_of(folder, trainer_class=Chatty)
    trainer.train()
    assert isinstance(trainer, Chatty)
    assert all("chatty" in entry for entry in trainer.state.log_history)


# ---- micro-batches ----

LENGTHS = st.lists(st.integers(1, 9), min_size=1, max_size=4)


def packed(width: int, **more: torch.Tensor) -> MicroBatch:
    ids = torch.arange(1, width + 1)[None]
    return MicroBatch({"input_ids": ids, "labels": ids, **more}, None)


@given(LENGTHS)
def test_joined_rows_are_the_micro_batches_with_padding_that_is_masked(lengths: list[int]) -> None:
    batch = join([packed(width) for width in lengths])
    for row, width in enumerate(lengths):
        assert batch["input_ids"][row, :width].tolist() == list(range(1, width + 1))
        assert (batch["labels"][row, width:] == IGNORED).all()
        if len(set(lengths)) > 1:
            assert batch["attention_mask"][row].tolist() == [1] * width + [0] * (max(lengths) - width)
    assert ("attention_mask" in batch) == (len(set(lengths)) > 1)


@given(LENGTHS)
def test_padding_of_packed_rows_is_a_sequence_of_its_own(lengths: list[int]) -> None:
    batch = join([packed(width, position_ids=torch.arange(width)[None], seq_idx=torch.zeros(1)) for width in lengths])
    assert set(batch) == {"input_ids", "labels", "position_ids"}
    for row, width in enumerate(lengths):
        assert batch["position_ids"][row].tolist() == [*range(width), *range(max(lengths) - width)]


def test_micro_batches_of_different_kinds_are_refused() -> None:
    mask = torch.ones(1, 3, dtype=torch.int64)
    with pytest.raises(ValueError, match="the micro-batches of one step hold different tensors"):
        join([packed(3), packed(3, attention_mask=mask)])


@pytest.mark.parametrize(("told", "parts"), [(8, 2), (5, 1)], ids=["several means", "another count"])
def test_a_loss_that_ignores_its_denominator_is_refused_where_it_matters(told: int, parts: int) -> None:
    ids = torch.arange(5)[None]
    batches = [MicroBatch({"input_ids": ids, "labels": ids}, told)] * parts
    with pytest.raises(ValueError, match="this model's loss ignores num_items_in_batch"):
        denominator(batches, join(batches), obeyed=False)
    assert denominator(batches, join(batches), obeyed=True) == (None if told == 8 else told)


def test_a_loss_that_ignores_its_denominator_is_trained_where_it_does_not_matter() -> None:
    ids = torch.arange(5)[None]
    batch = [MicroBatch({"input_ids": ids, "labels": ids}, 4)]
    assert denominator(batch, join(batch), obeyed=False) is None


# ---- TRL ----

# What SFTConfig says by default, where transformers has a newer name for it.
OLD_NAME = pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning")
ALPHABET = "abcdefghijklmnopqrstuvwxyz"


@pytest.fixture
def tokenizer(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    monkeypatch.setenv("CI", "1")  # no telemetry
    words = {word: number for number, word in enumerate(["<pad>", "<s>", "</s>", "<unk>", *ALPHABET])}
    inner = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=inner, **names)


def texts(count: int = 30) -> list[str]:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(4, 20, (count,), generator=generator).tolist()
    return ["".join(ALPHABET[i] for i in torch.randint(0, 26, (n,), generator=generator).tolist()) for n in lengths]


def sft(folder: Path, model: PreTrainedModel, tokenizer: Any, config: EngineConfig | None, **changes: Any) -> Any:
    import trl
    from datasets import Dataset

    settings = {**SETTINGS, "bf16": False, "gradient_accumulation_steps": 2, **changes}
    chosen: type[Any] = trl.SFTTrainer if config is None else stream(trl.SFTTrainer, config)
    data = Dataset.from_dict({"text": texts()})
    args = trl.SFTConfig(str(folder), max_steps=10, **settings)
    return chosen(model=model, args=args, train_dataset=data, eval_dataset=data, processing_class=tokenizer)


@OLD_NAME
@pytest.mark.parametrize(
    "changes",
    [{}, {"packing": True, "max_length": 24}, {"padding_free": True, "max_length": None}],
    ids=["padded", "packed", "padding-free"],
)
def test_trls_sft_trainer_arrives_where_the_plain_one_does(
    folder: Path, tokenizer: Any, changes: dict[str, Any]
) -> None:
    model = model_of("llama")
    plain = sft(folder, copy.deepcopy(model), tokenizer, None, **changes)
    streamed = sft(folder, model, tokenizer, FLOAT32, **changes)
    plain.train()
    streamed.train()
    for found, expected in zip(streamed.state.log_history, plain.state.log_history, strict=True):
        shared = {"loss", "grad_norm", "learning_rate", "train_loss", "epoch", "num_tokens"} & expected.keys()
        assert {name: found[name] for name in shared} == pytest.approx({n: expected[n] for n in shared}, rel=1e-5)
    assert gap(model.state_dict(), plain.model.state_dict()) <= 1e-5


@OLD_NAME
def test_trls_metrics_of_evaluation_are_kept(folder: Path, tokenizer: Any) -> None:
    model = model_of("llama")
    plain = sft(folder, copy.deepcopy(model), tokenizer, None)
    streamed = sft(folder, model, tokenizer, FLOAT32)
    found, expected = streamed.evaluate(), plain.evaluate()
    for name in ("eval_loss", "eval_entropy", "eval_mean_token_accuracy"):
        assert found[name] == pytest.approx(expected[name], rel=1e-5)


@OLD_NAME
def test_trls_own_wish_for_bfloat16_is_refused_with_float32(folder: Path, tokenizer: Any) -> None:
    with pytest.raises(ValueError, match=r"SFTConfig sets it by itself"):
        sft(folder, model_of("llama"), tokenizer, FLOAT32, bf16=True)
