"""StreamingEngine: trains a Hugging Face model whose weights live in host memory, layer by layer.

It equals ordinary PyTorch training of the same model with AdamW and global gradient clipping. See README.md
for the pipeline; `schedule` for the order of operations, `executor` for what each one does.
"""

from __future__ import annotations

import gc
import logging
import math
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError

from megatrain import anatomy as parts
from megatrain.activations import OffloadedInputs
from megatrain.batch import IGNORED, Batch, make_batch, shifted
from megatrain.conductor import Conductor
from megatrain.config import AdamWConfig, EngineConfig
from megatrain.control import Checks, Control
from megatrain.executor import BeforeUpdate, Executor, NonFiniteError, StepState
from megatrain.fitting import Choice, Fitting
from megatrain.host import HostLayer, HostStore, role_bytes
from megatrain.lanes import LaneError
from megatrain.memory import backward_from, gradient_buffer_bytes, optimizer_buffer_bytes, slot_bytes
from megatrain.optim import join, native_available, split
from megatrain.placement import Placement, placement_for
from megatrain.report import Inspection
from megatrain.room import Room
from megatrain.schedule import Kind, Op, Schedule, StepShape
from megatrain.shapes import host_shape, layouts_of, require_agreement, schedule_of
from megatrain.steering import Knobs
from megatrain.trace import LayerStats, Recorder, StepRecord
from megatrain.update import Hyperparameters, weight_norm

log = logging.getLogger("megatrain")

MOST_EXPONENT = 709.0  # e to this is the largest float

Objective = Callable[[torch.Tensor], torch.Tensor]  # scores of a whole batch → the loss, a scalar


class DeviceMemoryError(RuntimeError):
    """The device ran out of memory; the message says where, and what to lower. Nothing was applied."""


class ObjectiveError(ValueError):
    """A loss of the user's own failed, or gave no loss; nothing was applied."""


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did.

    loss: the model's loss, mean over the predicted tokens of the global batch (with a router balancing loss where
    the model's configuration asks for one, as Hugging Face's `.loss`; that part alone is `balancing_loss`).
    grad_norm: global 2-norm before clipping. tokens: predicted tokens. skipped: why nothing was applied, or None.
    metrics: what the caller gave, or its objective left, beside it.
    """

    loss: float
    grad_norm: float
    tokens: int
    balancing_loss: float = 0.0
    skipped: str | None = None
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Evaluation:
    """How well a model predicts a batch it is not trained on.

    loss: mean negative log-likelihood per predicted token, without a router balancing loss. tokens: predicted tokens.
    metrics: what else a recipe has to tell; its own loss may be of something else than tokens.
    """

    loss: float
    tokens: int
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def perplexity(self) -> float:
        """e^loss: among how many equally likely tokens the model would have to choose."""
        return math.exp(self.loss) if self.loss < MOST_EXPONENT else math.inf


@dataclass(frozen=True)
class Sizes:
    """Bytes of an engine: of one weights slot, one gradient buffer, the shell, each host arena, and its budget."""

    layers: int
    layer_bytes: int
    gradient_bytes: int
    shell_bytes: int
    host_arenas: dict[str, int]
    device_limit_bytes: int


class StreamingEngine:
    """Streams a causal language model through a device, exactly.

    model: a Hugging Face decoder-only causal LM on the CPU. The engine takes its tensors over: until `close` the
    model must not be called; after it, it is the trained model again.
    Raises UnsupportedModelError (a ValueError) for a model it could not train exactly.
    """

    def __init__(self, model: Any, config: EngineConfig | None = None, optimizer: AdamWConfig | None = None) -> None:
        self.config = config or EngineConfig()
        self.optimizer = optimizer or AdamWConfig()
        self._lr = self.optimizer.lr
        self._device = _device(self.config.device)
        self._update_in_backward = self.config.optimizer_overlap == "backward"
        require_agreement(self.config, self.optimizer)
        self.recorder = Recorder()
        self.model = model
        self._busy = threading.Lock()
        self._failure: BaseException | None = None
        self._closed = False
        self._step = 0
        self._reference = False  # passes read the frozen weights
        self._placement = Placement()
        self._rows = self.config.micro_batch_size  # sequences per layer visit in the last step
        self._offloaded: OffloadedInputs | None = None
        resident = 0 if self.config.resident_layers == "auto" else self.config.resident_layers
        knobs = Knobs(self.config.prefetch_depth, self.config.grad_buffers, resident)
        self._checkpointed = [m for m in model.modules() if getattr(m, "gradient_checkpointing", False)]
        self._set_checkpointing(False)  # the engine recomputes each layer itself
        try:
            self._examine(model)
            cpu = self._device.type == "cpu"
            fitting = Fitting(self._layouts, self._shell_layout, self._widths, self.config, cpu)
            self._room = Room(fitting, self._device, self._anatomy.token_elements)
            self._room.require(knobs)
        except BaseException:
            self._set_checkpointing(True)
            raise
        self._take_over()
        self._room.look()
        self._executor = Executor(
            self._anatomy,
            self._layouts,
            self._shell_layout,
            self._host,
            self._device,
            self.recorder,
            self.config.loss_chunk_tokens,
            self.config.throttle,
            parts.CompiledLayers(self._anatomy.layers) if self.config.compile else None,
            self._placement.host_cpus,
            self.config.attention,
            optimizer_buffer_bytes(self._layouts, self.config),
        )
        reached = range(backward_from(self._layouts, self._shell_layout), len(self._layouts))
        visits = [("forward", layer) for layer in range(len(self._layouts))] + [("backward", at) for at in reached]
        self.control = Control(
            knobs,
            Checks(self._room.require, lambda rows: self._room.require_rows(self.control.knobs, rows), visits),
            micro_batch_size=self.config.micro_batch_size,
        )
        self._conductor = Conductor(self._new_schedule(), self._executor, self.control, self.recorder, knobs)

    # ---- construction ----

    def _examine(self, model: Any) -> None:
        """Refuse what cannot be trained exactly, and learn what the model consists of; its tensors stay as they are."""
        model.to("cpu")
        native_available()  # compile now rather than in the middle of the first step
        self._anatomy = parts.Anatomy(model)
        parts.check(self._anatomy)
        if self.config.tile_tokens is not None:
            parts.check_tiles(self._anatomy)
        parts.require_choice(model, self.config.attention)
        self._arithmetic = parts.arithmetic(model, self._anatomy.stack)
        self._widths = parts.widths(model, self._anatomy.units)
        self._layouts, self._shell_layout = layouts_of(self._anatomy, getattr(torch, self.config.dtype))
        if not any(layout.trained for layout in [self._shell_layout, *self._layouts]):
            raise ValueError("no parameter requires a gradient; set requires_grad on what is to be trained")
        self._names = list(model.state_dict())

    def _set_checkpointing(self, on: bool) -> None:
        for module in self._checkpointed:
            module.gradient_checkpointing = on

    def _take_over(self) -> None:
        """Move the model's tensors into host arenas."""
        shape, cuda = host_shape(self.config), self._device.type == "cuda"
        if self.config.placement == "auto":
            nbytes = sum(role_bytes(self._layouts, self._shell_layout, shape).values())
            self._placement = placement_for(nbytes, self._device)
        self._host = HostStore(self._layouts, self._shell_layout, shape, pin=cuda, touch=self._placement.touch)
        for unit, host in self._units():
            _take_over(unit, host)
            if host.reference is not None:
                host.reference.copy_(host.weights)
            host.weight_norm = weight_norm(host)
        if self.config.tile_tokens is not None:
            parts.tile(self._anatomy.layers, self.config.tile_tokens)

    def _units(self) -> Iterator[tuple[parts.Unit, HostLayer]]:
        yield self._anatomy.shell, self._host.shell
        yield from zip(self._anatomy.units, self._host.layers, strict=True)

    def _new_schedule(self) -> Schedule:
        return schedule_of(self._layouts, self._shell_layout, self.config)

    # ---- one step ----

    def step(
        self,
        batch: dict[str, torch.Tensor],
        objective: Objective | None = None,
        *,
        temperature: float = 1.0,
        metrics: dict[str, float] | None = None,
    ) -> StepResult:
        """Train on one global batch: forward, backward and an optimizer step.

        batch: input_ids and labels (B, T) int64 (-100 = ignored; Hugging Face's shift is applied here), and
            optionally attention_mask or position_ids (B, T). A classifier needs no labels.
        objective: a loss of your own instead of the model's: a function of the `scores` of the whole global batch,
            on the CPU, whatever the micro-batches. Its gradient is exact; the head runs forward once more for it.
        temperature: that logits are divided by before they become scores.
        metrics: further figures for the step's record; the objective may still add to them.

        Raises ValueError for a batch that cannot be trained on, NonFiniteError if the loss or the gradient norm is,
        ObjectiveError if the objective fails, DeviceMemoryError if the device has too little memory, also with all that
        "auto" can do without (in all four nothing is applied, and the engine goes on), LaneError if a lane failed.
        """
        with self._alone():
            self._require_own_weights()
            if objective is None and self._anatomy.classifies:
                raise ValueError("a classifier has no loss of its own here; give step(batch, objective) one")
            rows = self.control.begin_step()
            try:
                cut = self._cut(batch, rows)
                start_s = self.recorder.now()
                if not cut.tokens:
                    return self._skip(cut, start_s)
                result = self._train(cut, rows, objective, temperature)
                result = replace(result, metrics=metrics or {})
                self._record_step(cut, start_s, result)
                return result
            finally:
                self.control.end_step()

    def _require_own_weights(self) -> None:
        if self._reference:
            raise RuntimeError("within reference() the weights are frozen ones; train outside of it")

    def _cut(self, batch: dict[str, torch.Tensor], rows: int | None) -> Batch:
        tensors = dict(batch)
        if self._anatomy.classifies and "labels" not in tensors and "input_ids" in tensors:
            mask = tensors.get("attention_mask")  # all that is read counts as work done
            ids = tensors["input_ids"]
            tensors["labels"] = ids if mask is None else ids.masked_fill(mask == 0, IGNORED)
        return make_batch(tensors, rows, self._vocabulary())

    def _train(self, cut: Batch, rows: int | None, objective: Objective | None, temperature: float) -> StepResult:
        """A step, tried again where the device has too little memory for what "auto" chose."""
        before = self.random_states()
        while True:
            choice = self._settle(cut, rows)
            try:
                return self._try(cut, objective, temperature, choice)
            except DeviceMemoryError as error:
                lowered = self._room.tighten(choice)
                if lowered is None:
                    raise
                log.warning("step %d is tried again, %s: %s", self._step, lowered, str(error))
                self._executor.set_random_states(before)
            gc.collect()  # an error and the frames it came through refer to each other, and they to the device's memory

    def _settle(self, cut: Batch, rows: int | None) -> Choice:
        """Make room for a batch."""
        asked = self.control.knobs  # once: a wish may change them at any moment
        choice = self._room.settle(self._room.size_of(cut.shape, rows), asked)
        if choice.knobs != asked:
            self.control.choose_resident_layers(choice.knobs.resident_layers)
        self._conductor.tell("micro_batch_size", self._rows, rows, self._step, None)
        self._rows = rows
        return choice

    def _try(self, cut: Batch, objective: Objective | None, temperature: float, choice: Choice) -> StepResult:
        head = (Kind.HEAD,) if objective is None else (Kind.SCORE, Kind.HEAD)
        with self._in_flight(self._begin(cut, head, choice)) as state:
            state.temperature = temperature
            return self._run(state, objective)

    @contextmanager
    def _in_flight(self, state: StepState) -> Iterator[StepState]:
        """Within, a pass runs. After a failure it is neither done nor undone, and the engine unusable.

        Not so where the device had too little memory: nothing was applied, unless updates follow each gradient at once.
        """
        try:
            yield state
        except (NonFiniteError, ObjectiveError):
            raise
        except BaseException as error:  # a lane failed, or the user interrupted
            self._failure = error
            if _ran_out_of_memory(error) and not (self._update_in_backward and state.shape.trains):
                raise self._out_of_memory(error, state) from error
            raise
        finally:
            if self._failure is None:
                self._executor.end(state)

    def _out_of_memory(self, error: BaseException, state: StepState) -> DeviceMemoryError:
        """Clear the device, so that the engine can go on, and say what to lower."""
        self._executor.restart(state.number)
        self._conductor.schedule = self._new_schedule()
        self._failure = None
        rows = self._rows
        size = self._room.size_of(state.batch.shape, rows) if state.batch.tokens else self._room.size
        choice = Choice(self._conductor.knobs, state.shape.offload, state.shape.kept_graphs, state.keep_attention)
        advice = self._room.advice(choice, size, rows)
        said = str(error).splitlines()[0]
        return DeviceMemoryError(f"the device ran out of memory ({said}); nothing was applied. {advice}")

    def _vocabulary(self) -> int:
        return int(self.model.get_input_embeddings().weight.shape[0])

    def _skip(self, batch: Batch, start_s: float) -> StepResult:
        reason = "every label is -100: there is no token to predict, so nothing was applied"
        log.warning("step %d skipped: %s", self._step, reason)
        result = StepResult(loss=float("nan"), grad_norm=0.0, tokens=0, skipped=reason)
        self._record_step(batch, start_s, result)
        return result

    def _begin(self, batch: Batch, head: tuple[Kind, ...], choice: Choice | None = None) -> StepState:
        """Prepare a pass; only one with a HEAD goes backward, and needs a choice of how it uses the device."""
        offload = choice is not None and choice.offload
        reached = backward_from(self._layouts, self._shell_layout) if Kind.HEAD in head else len(self._layouts)
        shape = StepShape(
            micro_batches=len(batch.parts),
            offload=offload,
            backward_from=reached,
            kept_graphs=0 if choice is None else choice.kept_graphs,
            shell_backward=bool(self._shell_layout.trained),
            head=head,
        )
        state = self._executor.begin(self._step, batch, shape, self._offload_arena(batch) if offload else None)
        state.keep_attention = choice is not None and choice.keep_attention
        state.reference = self._reference and self._host.shell.reference is not None
        return state

    def _offload_arena(self, batch: Batch) -> OffloadedInputs:
        part_bytes = self._room.size.micro_batch_bytes
        if self._offloaded is None or not self._offloaded.fits(len(batch.parts), part_bytes):
            if self._offloaded is not None:
                self._offloaded.close()
            pin, touch = self._device.type == "cuda", self._placement.touch
            self._offloaded = OffloadedInputs(len(self._layouts), len(batch.parts), part_bytes, pin=pin, touch=touch)
        return self._offloaded

    def _run(self, state: StepState, objective: Objective | None) -> StepResult:
        def weigh_before_head(op: Op) -> None:
            if op.kind is Kind.HEAD and objective is not None and state.score_gradients is None:
                self._weigh(state, objective)

        in_backward = Hyperparameters(self.optimizer, self.lr, grad_scale=1.0)
        self._conductor.run(state, in_backward, before=weigh_before_head)
        return self._apply(state)

    def _weigh(self, state: StepState, objective: Objective) -> None:
        """Let the user's loss say what it makes of all scores, and how it changes with each of them."""
        scores = self._scores_of(state).requires_grad_()
        try:
            with torch.enable_grad():
                loss = objective(scores)
                if not isinstance(loss, torch.Tensor) or loss.ndim or not loss.requires_grad:
                    raise TypeError(f"it returned {_short(loss)}")
                (gradient,) = torch.autograd.grad(loss, [scores])
        except Exception as error:  # whatever the user's own code raises
            raise ObjectiveError(
                f"the objective failed in step {self._step} on scores of shape {tuple(scores.shape)}: "
                f"{type(error).__name__}: {error}. It must return a scalar that depends on them; nothing was applied"
            ) from error
        state.losses.append(loss.detach().double().to(self._device))
        rows = [len(targets) for targets in state.batch.targets]
        state.score_gradients = list(torch.split(self._by_target(gradient), rows))

    def _scores_of(self, state: StepState) -> torch.Tensor:
        """The scores of all micro-batches on the CPU, each in the place of the label it is about."""
        assert self._conductor.computed is not None
        self._executor.wait(self._conductor.computed)
        found = torch.cat(state.scores).cpu()
        return found if self._anatomy.classifies else found.roll(1, dims=1)  # the last column is 0: it predicts nothing

    def _by_target(self, gradient: torch.Tensor) -> torch.Tensor:
        """Gradients of scores as the head gave them."""
        if self._anatomy.classifies:
            return gradient
        gradient = gradient.clone()
        gradient[:, 0] = 0  # nothing predicts the first token
        return gradient.roll(-1, dims=1)

    def _apply(self, state: StepState) -> StepResult:
        """Read loss and norm, refuse what is not finite, and let the optimizer loose."""
        assert self._conductor.computed is not None
        self._executor.wait(self._conductor.computed)  # the norm
        assert state.result is not None
        loss, balancing, grad_norm, *scales = state.result.tolist()
        self._require_finite(loss, grad_norm)
        self._record_layers(scales)
        numbers = Hyperparameters(self.optimizer, self.lr, self._clip_factor(grad_norm))
        for op in self._conductor.schedule.updates():
            self._executor.issue(state, op, numbers)
        self._step += 1
        if self.config.optimizer_overlap == "none":
            self._executor.wait_all()
        return StepResult(loss, grad_norm, state.batch.tokens, balancing)

    def _clip_factor(self, grad_norm: float) -> float:
        """As torch.nn.utils.clip_grad_norm_, in float32."""
        if self.optimizer.max_grad_norm is None:
            return 1.0
        factor = self.optimizer.max_grad_norm / (torch.tensor(grad_norm, dtype=torch.float32) + 1e-6)
        return float(factor.clamp(max=1.0))

    def _require_finite(self, loss: float, grad_norm: float) -> None:
        for name, value in (("loss", loss), ("gradient norm", grad_norm)):
            if not torch.isfinite(torch.tensor(value)):
                raise NonFiniteError(
                    f"the {name} of step {self._step} is {value}; "
                    + (
                        "some updates may already have been applied (optimizer_overlap='backward'); go back to a "
                        "saved model"
                        if self._update_in_backward
                        else "nothing was applied. Look at the batch, or lower the learning rate"
                    )
                )

    def _record_step(self, batch: Batch, start_s: float, result: StepResult) -> None:
        self.recorder.add(
            StepRecord(
                step=self._step - (result.skipped is None),
                start_s=start_s,
                end_s=self.recorder.now(),
                loss=result.loss,
                grad_norm=result.grad_norm,
                lr=self.lr,
                tokens=result.tokens,
                sequence_tokens=batch.sequence_tokens,
                flops=self._arithmetic.flops(batch.sequence_lengths),
                prefetch_depth=self._conductor.knobs.prefetch_depth,
                micro_batches=len(batch.parts),
                skipped=result.skipped,
                metrics=result.metrics,
            )
        )

    def _record_layers(self, scales: list[float]) -> None:
        now, count = self.recorder.now(), len(self._layouts)
        for layer, host in enumerate(self._host.layers):
            found = (scales[layer], host.weight_norm, scales[count + layer])
            self.recorder.add(LayerStats(now, self._step, layer, *found))

    # ---- without training ----

    def scores(self, batch: dict[str, torch.Tensor], *, temperature: float = 1.0) -> torch.Tensor:
        """Stream a batch through the model in evaluation mode; no gradients. Pending updates come first.

        Returns float32 on the CPU. A language model: (B, T), the log-probability of labels[b, t] given the tokens
        before it, 0 where labels are -100 and at t = 0. A classifier: its logits (B, labels).
        """
        with self._alone(), self._evaluating():
            rows = self.control.micro_batch_size
            cut = self._cut(batch, rows)
            self._room.require_forward(self.control.knobs, self._room.size_of(cut.shape, rows))
            with self._in_flight(self._begin(cut, (Kind.SCORE,))) as state:
                state.temperature = temperature
                self._conductor.run(state)
                return self._scores_of(state)

    def evaluate(self, batch: dict[str, torch.Tensor]) -> Evaluation:
        """The loss on a batch that is not trained on; training goes on as if it had not been asked for."""
        if self._anatomy.classifies:
            raise ValueError("a classifier has no loss of its own here; use scores(batch)")
        scores = self.scores(batch)
        tokens = int((shifted(batch["labels"]) != IGNORED).sum())
        if not tokens:
            raise ValueError("every label is -100: there is no token to predict, so there is no loss")
        return Evaluation(-float(scores.double().sum()) / tokens, tokens)

    @contextmanager
    def inference(self) -> Iterator[Any]:
        """Within, the model can be called and generates as Hugging Face's own, without gradients: its layers stream.

        Yields the model, on `model.device`, in evaluation mode; pending updates come first. One call streams every
        layer once, so many sequences per call cost little more than one. Keys, values and logits are the call's own,
        and not in the plan. Generation draws from the device's generator, as training with dropout does.
        """
        with self._alone(), self._evaluating():
            state = self._begin(Batch([{}], [], (0, 0), 0, 0, []), ())
            self._conductor.begin()
            self._conductor.load_shell(state)
            streams = partial(self._call_layer, state)
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)  # what the caller will pass may still be in the making elsewhere
            try:
                with self._anatomy.stubbed.answering(streams), self._executor.on_compute_stream(), torch.no_grad():
                    yield self.model
            finally:
                if self._failure is None:
                    if self._device.type == "cuda":
                        torch.cuda.synchronize(self._device)  # results may be used on any stream now
                    self._executor.end(state)

    def _call_layer(self, state: StepState, layer: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            return self._conductor.call(state, layer, args, kwargs)
        except BaseException as error:  # what the caller does with the model beside this leaves the engine whole
            self._failure = error
            if _ran_out_of_memory(error):
                raise self._out_of_memory(error, state) from error
            raise

    @contextmanager
    def reference(self) -> Iterator[None]:
        """Within, `scores`, `evaluate` and `inference` are those of the weights that training began with.

        Full training reads them from a second copy in host memory (`EngineConfig.keep_reference`), a model with
        adapters (peft) from its own base with the adapters switched off.
        """
        if self._reference:
            raise RuntimeError("reference() is in effect already")
        if parts.has_adapters(self.model):
            switched: AbstractContextManager[None] = parts.without_adapters(self._anatomy)
        elif self._host.shell.reference is not None:
            switched = self._other_weights()
        else:
            raise ValueError("the first weights are not kept; set EngineConfig(keep_reference=True)")
        with self._alone():
            switched.__enter__()
            self._reference = True
        try:
            yield
        finally:
            with self._alone():
                switched.__exit__(None, None, None)
                self._reference = False

    @contextmanager
    def _other_weights(self) -> Iterator[None]:
        """What lies on the device is of no use within, nor is what lies there then of any use after it."""
        self._conductor.schedule.forget_weights()
        yield
        self._conductor.schedule.forget_weights()

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Within, the model is in evaluation mode, and the user's wishes are met between layers as in a step."""
        modes = [(module, module.training) for module in self._modules()]
        self.control.begin_pass()
        try:
            for module, _ in modes:
                module.training = False
            yield
        finally:
            for module, was_training in modes:
                module.training = was_training
            self.control.end_pass()

    def _modules(self) -> Iterator[torch.nn.Module]:
        """All modules of the model, also of layers that are not in their place."""
        yield from self.model.modules()
        for layer in self._anatomy.layers:
            yield from layer.modules()

    # ---- knobs ----

    @property
    def held(self) -> Inspection | None:
        """While held: what a viewer may want to know."""
        return self._conductor.held

    @property
    def lr(self) -> float:
        """The learning rate of the next step; ValueError where AdamWConfig would not take it."""
        return self._lr

    @lr.setter
    def lr(self, lr: float) -> None:
        self._lr = replace(self.optimizer, lr=lr).lr

    def set_prefetch_depth(self, depth: int) -> None:
        """Load `depth` layers ahead, from the next layer on. From any thread; ValueError if it does not fit."""
        self.control.set_prefetch_depth(depth)

    @property
    def device_peak_bytes(self) -> int:
        """Most bytes held on the device so far: by torch's allocator on CUDA, by the arena on a CPU."""
        if self._device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self._device))
        return self._executor.ledger.peak_bytes

    @property
    def device_index(self) -> int | None:
        """The CUDA device, or None on a CPU."""
        return torch.cuda.current_device() if self._device.type == "cuda" else None

    @property
    def arena_bytes(self) -> int:
        """Bytes that the engine itself holds on the device now."""
        return self._executor.ledger.held_bytes

    @property
    def model_name(self) -> str:
        """What kind of model this is, and how large."""
        units = [(unit, host.layout.entries) for unit, host in self._units()]
        parameters = sum(e.spec.numel for unit, entries in units for e in entries if e.name in unit.parameters)
        return f"{self.model.config.model_type}, {parameters / 1e6:,.4g} M parameters"

    @property
    def device_name(self) -> str:
        return torch.cuda.get_device_name(self._device) if self._device.type == "cuda" else "CPU lanes (no GPU)"

    @property
    def loss_from_logits(self) -> bool:
        """Whether the loss is computed from logits, since the model's forward cannot be told what to divide it by."""
        return self._anatomy.loss_from_logits

    @property
    def sizes(self) -> Sizes:
        """Bytes that do not change while the engine lives."""
        return Sizes(
            layers=len(self._layouts),
            layer_bytes=slot_bytes(self._layouts),
            gradient_bytes=gradient_buffer_bytes(self._layouts),
            shell_bytes=self._shell_layout.nbytes,
            host_arenas={role: arena.nbytes for role, arena in self._host.arenas.items()},
            device_limit_bytes=self._room.budget_bytes,
        )

    @property
    def planned_bytes(self) -> int:
        """Most bytes that the device arena may hold with the knobs as they are and a batch as the last one."""
        offload = self._offloaded is not None or self.config.offload_activations is True
        return self._room.needs_bytes(self.control.knobs, offload=offload)

    def at_work(self) -> dict[str, list[str]]:
        """Per lane, what it is at and what waits behind, in words."""
        return self._executor.at_work()

    @property
    def pinned_bytes(self) -> int:
        """Host bytes registered with CUDA."""
        return self._host.pinned_bytes + (self._offloaded.pinned_bytes if self._offloaded else 0)

    # ---- the state between two steps ----

    @property
    def steps_applied(self) -> int:
        """Optimizer steps that were applied; the number of the next one in the record."""
        return self._step

    def parts(self) -> list[tuple[int | None, HostLayer]]:
        """The shell (None) and every layer with what the host keeps of it, in the order of their updates."""
        return [(None, self._host.shell), *enumerate(self._host.layers)]

    def random_states(self) -> dict[str, torch.Tensor]:
        """States of the generators that a model may draw from, by device."""
        return self._executor.random_states()

    @contextmanager
    def random_states_kept(self) -> Iterator[None]:
        """Within, the model and whoever else may draw freely; after it, training draws what it would have drawn."""
        before = self.random_states()
        try:
            yield
        finally:
            self._executor.set_random_states(before)

    def resume_at(self, step: int, random_states: dict[str, torch.Tensor]) -> None:
        """Go on as an engine that has applied `step` steps, after its parts were filled."""
        with self._alone():
            self._step = step
            self._conductor.schedule.forget_weights()
            self._executor.set_random_states(random_states)
            for _, host in self._units():
                host.weight_norm = weight_norm(host)

    def updates_in_flight(self) -> dict[int | None, Callable[[], None]]:
        """By layer (None: the shell), what waits for its last update so far; LaneError if that failed."""
        numbers = self._conductor.schedule.last_updates
        return {layer: self._executor.waiting_for(number) for layer, number in numbers.items()}

    @property
    def before_update(self) -> BeforeUpdate:
        """Called in a lane before the host's arrays of a layer (None: the shell) change in a step; it may wait."""
        return self._executor.before_update

    @before_update.setter
    def before_update(self, hook: BeforeUpdate) -> None:
        self._executor.before_update = hook

    # ---- reading the model ----

    def flush(self) -> None:
        """Wait until all pending updates are applied."""
        with self._alone():
            self._wait_for_updates()

    def _wait_for_updates(self) -> None:
        try:
            self._executor.wait_all()
        except LaneError as error:
            self._failure = error
            raise

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Copies of all tensors under their Hugging Face names: the fp32 master where there is one."""
        with self._alone():
            self._wait_for_updates()
            return self._copies()

    def _copies(self) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        for unit, host in self._units():
            tensors = {e.name: _master(host, e.name) for e in host.layout.entries}
            for name, tensor in unit.with_aliases(tensors).items():
                found[unit.prefix + name] = tensor
        with self._whole_model():
            rest = {name: t for name, t in self.model.state_dict().items() if name not in found}
        return {name: found[name] if name in found else rest[name].cpu().clone() for name in self._names}

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Save in Hugging Face's format (of a PeftModel the adapters, in peft's), in the streamed dtype.

        Files appear in `folder` only when all are written.
        """
        with self._alone():
            self._wait_for_updates()
            with self._whole_model():
                save_model(self.model, Path(folder))

    @contextmanager
    def _whole_model(self) -> Iterator[None]:
        """Within, the model has its layers again and all its parameters are the host's."""
        self._anatomy.stubbed.restore()
        self._anatomy.shell.bind(self._shell_layout.views(self._host.shell.weights))
        try:
            yield
        finally:
            self._executor.prepare_model()

    # ---- life cycle ----

    def _require_usable(self) -> None:
        if self._closed:
            raise RuntimeError("the engine is closed")
        if self._failure is not None:
            raise RuntimeError(
                "the engine failed earlier and its state is not known to be whole; make a new one from a saved model"
            ) from self._failure

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Within, no other thread steps or reads weights: both borrow the model and wait for the same work."""
        self._require_usable()
        if not self._busy.acquire(blocking=False):
            raise RuntimeError("another thread is in the middle of a step or reads the weights; wait for it first")
        try:
            yield
        finally:
            self._busy.release()

    def close(self) -> None:
        """Apply what is pending, end the lanes, and give the model its layers and weights back.

        A step that another thread is in the middle of fails: it is neither done nor undone.
        """
        if self._closed:
            return
        self._closed = True
        alone = self._busy.acquire(blocking=False)
        try:
            if alone and self._failure is None:
                self._executor.wait_all()
        finally:
            self._executor.close()
            parts.untile(self._anatomy.layers)
            self._anatomy.stubbed.restore()
            self._anatomy.shell.bind(self._shell_layout.views(self._host.shell.weights))
            self.model.to("cpu")
            self._set_checkpointing(True)
            self._host.close()
            if self._offloaded is not None:
                self._offloaded.close()

    def __enter__(self) -> StreamingEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _ran_out_of_memory(error: BaseException | None) -> bool:
    return error is not None and (isinstance(error, torch.OutOfMemoryError) or _ran_out_of_memory(error.__cause__))


def _short(value: object) -> str:
    if not isinstance(value, torch.Tensor):
        return repr(value)
    return f"a tensor of shape {tuple(value.shape)}" + ("" if value.requires_grad else " that depends on nothing")


def _device(name: str) -> torch.device:
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise ValueError('device="cuda", but torch finds no CUDA device; use "auto" or "cpu"')
    return torch.device("cuda" if available and name != "cpu" else "cpu")


def save_model(model: Any, target: Path) -> None:
    """Let a model save itself; its files appear in `target` only when all are written."""
    target.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=".saving-", dir=target))
    try:
        _save_into(part, model)
        for file in sorted(path for path in part.rglob("*") if path.is_file()):  # peft makes a folder for each name
            place = target / file.relative_to(part)
            place.parent.mkdir(exist_ok=True)
            os.replace(file, place)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _save_into(folder: Path, model: Any) -> None:
    try:
        model.save_pretrained(folder)
    except SafetensorError as error:  # what it makes of a full disk
        raise OSError(f"the model cannot be written into {folder.parent}: {error}") from error


def _take_over(unit: parts.Unit, host: HostLayer) -> None:
    """Copy a unit's tensors into the host's flat arrays, and let the unit look at them there."""
    sources = unit.parameters | unit.buffers
    for entry in host.layout.entries:
        source = sources[entry.name].detach()
        target = entry.view(host.weights)
        if host.low is not None and entry.spec.trained and entry.spec.dtype == torch.bfloat16:
            low = host.low[entry.element : entry.element + entry.spec.numel]
            split(source.float().contiguous().view(-1), target.view(-1), low)
        else:
            target.copy_(source)
    unit.bind(host.layout.views(host.weights))


def _master(host: HostLayer, name: str) -> torch.Tensor:
    entry = next(entry for entry in host.layout.entries if entry.name == name)
    weights = entry.view(host.weights)
    if host.low is None or not entry.spec.trained or entry.spec.dtype != torch.bfloat16:
        return weights.clone()
    low = host.low[entry.element : entry.element + entry.spec.numel]
    return join(weights.reshape(-1), low).view(entry.spec.shape)
