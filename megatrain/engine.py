"""StreamingEngine: trains a Hugging Face model whose weights live in host memory, layer by layer.

It equals ordinary PyTorch training of the same model with AdamW and global gradient clipping. See README.md
for the pipeline; `schedule` for the order of operations, `executor` for what each one does.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from megatrain import anatomy as parts
from megatrain.activations import OffloadedInputs
from megatrain.batch import Batch, make_batch
from megatrain.config import AdamWConfig, EngineConfig
from megatrain.control import Checks, Control
from megatrain.executor import Executor, NonFiniteError, StepState
from megatrain.host import HostLayer, HostStore
from megatrain.lanes import LaneError
from megatrain.memory import backward_from, gradient_buffer_bytes, slot_bytes
from megatrain.optim import join, native_available, split
from megatrain.report import Inspection
from megatrain.room import Room
from megatrain.schedule import Kind, Op, Schedule, StepShape, Visit
from megatrain.shapes import HOST_SLABS, host_shape, layouts_of, require_agreement
from megatrain.steering import Knobs, Position
from megatrain.trace import HELD, LayerStats, Marker, Recorder, StepRecord
from megatrain.update import Hyperparameters, weight_norm

log = logging.getLogger("megatrain")

VISITS_IN_FLIGHT = 2  # layer visits issued ahead of the one that runs; bounds how late a pause can take effect


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did.

    loss: the model's loss, mean over the predicted tokens of the global batch (with a router balancing loss where
    the model's configuration asks for one, as Hugging Face's `.loss`; that part alone is `balancing_loss`).
    grad_norm: global 2-norm before clipping. tokens: predicted tokens. skipped: why nothing was applied, or None.
    """

    loss: float
    grad_norm: float
    tokens: int
    balancing_loss: float = 0.0
    skipped: str | None = None


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
        self._paused = False  # as the record has it
        self._held_from_s: float | None = None
        self._rows = self.config.micro_batch_size  # sequences per layer visit in the last step
        self._offloaded: OffloadedInputs | None = None
        self._names = list(model.state_dict())
        resident = 0 if self.config.resident_layers == "auto" else self.config.resident_layers
        self._knobs = Knobs(self.config.prefetch_depth, self.config.grad_buffers, resident)
        self._checkpointed = [m for m in model.modules() if getattr(m, "gradient_checkpointing", False)]
        self._set_checkpointing(False)  # the engine recomputes each layer itself
        try:
            self._examine(model)
            self._room = Room(
                self._layouts,
                self._shell_layout,
                self.config,
                self._device,
                self._widths,
                self._anatomy.token_elements,
            )
            self._room.require(self._knobs)
        except BaseException:
            self._set_checkpointing(True)
            raise
        self._take_over()
        self._room.look()
        self._schedule = Schedule(
            layers=len(self._layouts),
            trained=frozenset(i for i, layout in enumerate(self._layouts) if layout.trained),
            shell_trained=bool(self._shell_layout.trained),
            update_in_backward=self._update_in_backward,
            slabs=HOST_SLABS,
        )
        self._executor = Executor(
            self._anatomy,
            self._layouts,
            self._shell_layout,
            self._host,
            self._device,
            self.recorder,
            self.config.loss_chunk_tokens,
            self.config.throttle,
        )
        self.held: Inspection | None = None  # while held: what a viewer may want to know
        reached = range(backward_from(self._layouts, self._shell_layout), len(self._layouts))
        visits = [("forward", layer) for layer in range(len(self._layouts))] + [("backward", at) for at in reached]
        self.control = Control(
            self._knobs,
            Checks(self._room.require, lambda rows: self._room.require_rows(self.control.knobs, rows), visits),
            micro_batch_size=self.config.micro_batch_size,
        )

    # ---- construction ----

    def _examine(self, model: Any) -> None:
        """Refuse what cannot be trained exactly, and learn what the model consists of; its tensors stay as they are."""
        model.to("cpu")
        native_available()  # compile now rather than in the middle of the first step
        self._anatomy = parts.Anatomy(model)
        parts.check(self._anatomy)
        self._arithmetic = parts.arithmetic(model, self._anatomy.stack)
        self._widths = parts.widths(model, self._anatomy.units)
        self._layouts, self._shell_layout = layouts_of(self._anatomy, getattr(torch, self.config.dtype))
        if not any(layout.trained for layout in [self._shell_layout, *self._layouts]):
            raise ValueError("no parameter requires a gradient; set requires_grad on what is to be trained")

    def _set_checkpointing(self, on: bool) -> None:
        for module in self._checkpointed:
            module.gradient_checkpointing = on

    def _take_over(self) -> None:
        """Move the model's tensors into host arenas."""
        self._host = HostStore(
            self._layouts, self._shell_layout, host_shape(self.config), pin=self._device.type == "cuda"
        )
        for unit, host in self._units():
            _take_over(unit, host)
            host.weight_norm = weight_norm(host)

    def _units(self) -> Iterator[tuple[parts.Unit, HostLayer]]:
        yield self._anatomy.shell, self._host.shell
        yield from zip(self._anatomy.units, self._host.layers, strict=True)

    # ---- one step ----

    def step(self, batch: dict[str, torch.Tensor]) -> StepResult:
        """Train on one global batch: forward, backward and an optimizer step.

        batch: input_ids and labels (B, T) int64 (-100 = ignored; Hugging Face's shift is applied here), and
        optionally attention_mask or position_ids (B, T). Raises ValueError for a batch that cannot be trained on,
        NonFiniteError if the loss or the gradient norm is (nothing is applied), LaneError if a lane failed.
        """
        with self._alone():
            rows = self.control.begin_step()
            try:
                cut = make_batch(dict(batch), rows, self._vocabulary())
                start_s = self.recorder.now()
                return self._train(cut, start_s, rows) if cut.tokens else self._skip(cut, start_s)
            finally:
                self.control.end_step()

    def _train(self, cut: Batch, start_s: float, rows: int | None) -> StepResult:
        asked = self.control.knobs  # once: a wish may change them at any moment
        offload, knobs = self._room.settle(self._room.size_of(cut.shape, rows), asked)
        if knobs != asked:
            self.control.choose_resident_layers(knobs.resident_layers)
        self._tell("micro_batch_size", self._rows, rows, None)
        self._rows = rows
        state: StepState | None = None
        try:
            state = self._begin(cut, offload=offload)
            result = self._run(state)
            self._record_step(cut, start_s, result)
            return result
        except NonFiniteError:
            raise
        except BaseException as error:  # a lane failed, or the user interrupted: the step is neither done nor undone
            self._failure = error
            raise
        finally:
            if state is not None and self._failure is None:
                self._executor.end(state)

    def _vocabulary(self) -> int:
        return int(self.model.get_input_embeddings().weight.shape[0])

    def _skip(self, batch: Batch, start_s: float) -> StepResult:
        reason = "every label is -100: there is no token to predict, so nothing was applied"
        log.warning("step %d skipped: %s", self._step, reason)
        result = StepResult(loss=float("nan"), grad_norm=0.0, tokens=0, skipped=reason)
        self._record_step(batch, start_s, result)
        return result

    def _begin(self, batch: Batch, *, offload: bool) -> StepState:
        shape = StepShape(
            micro_batches=len(batch.parts),
            offload=offload,
            backward_from=backward_from(self._layouts, self._shell_layout),
            shell_backward=bool(self._shell_layout.trained),
        )
        return self._executor.begin(self._step, batch, shape, self._offload_arena(batch) if offload else None)

    def _offload_arena(self, batch: Batch) -> OffloadedInputs:
        part_bytes = self._room.size.micro_batch_bytes
        if self._offloaded is None or not self._offloaded.fits(len(batch.parts), part_bytes):
            if self._offloaded is not None:
                self._offloaded.close()
            pin = self._device.type == "cuda"
            self._offloaded = OffloadedInputs(len(self._layouts), len(batch.parts), part_bytes, pin=pin)
        return self._offloaded

    def _run(self, state: StepState) -> StepResult:
        norm: Op | None = None
        visited: list[int] = []  # the last compute operation of each layer visit so far

        def knobs_at(visit: Visit) -> Knobs:
            """Between two layers: let the device catch up, then let the user have a say."""
            if latest is not None:
                visited.append(latest)
            if len(visited) >= VISITS_IN_FLIGHT:
                self._executor.wait(visited[-VISITS_IN_FLIGHT])
            return self._gate(state, visit, visited[-1:])

        latest: int | None = None
        in_backward = Hyperparameters(self.optimizer, self.lr, grad_scale=1.0)
        for op in self._schedule.step(state.shape, knobs_at):
            self._executor.issue(state, op, in_backward)
            if op.lane == "compute":
                latest = op.number
            if op.kind is Kind.NORM:
                norm = op
        assert norm is not None
        return self._apply(state, norm)

    def _gate(self, state: StepState, visit: Visit, running: list[int]) -> Knobs:
        """Meet the user's wishes before a visit; `running`: what has to be over before a held engine is at rest."""

        def on_hold(knobs: Knobs) -> None:
            for number in running:
                self._executor.wait(number)
            self._tell("paused", self._paused, True, visit.layer)
            self._paused = self._executor.inspecting = True
            self._held_from_s = self._held_from_s or self.recorder.now()
            coming = self._schedule.preview(state.shape, visit, knobs)
            self.held = replace(self._executor.inspected, next=[op.words for op in coming])

        knobs = self.control.at_layer(Position(state.number, visit.phase, visit.layer), on_hold)
        self.held = None
        if self._held_from_s is not None:
            now_s, since_s = self.recorder.now(), self._held_from_s
            self._held_from_s = None
            self.recorder.add(Marker(now_s, HELD, since_s, now_s, state.number, visit.layer))
        if self._paused and not self.control.stepping:
            self._tell("paused", True, False, visit.layer)
            self._paused = self._executor.inspecting = False
        for name in ("prefetch_depth", "grad_buffers", "resident_layers"):
            self._tell(name, getattr(self._knobs, name), getattr(knobs, name), visit.layer)
        self._knobs = knobs
        return knobs

    def _tell(self, name: str, old: object, new: object, layer: int | None) -> None:
        """Mark in the record where a change took effect."""
        if old != new:
            self.recorder.add(Marker(self.recorder.now(), name, old, new, self._step, layer))

    def _apply(self, state: StepState, norm: Op) -> StepResult:
        """Read loss and norm, refuse what is not finite, and let the optimizer loose."""
        self._executor.wait(norm.number)
        assert state.result is not None
        loss, balancing, grad_norm, *scales = state.result.tolist()
        self._require_finite(loss, grad_norm)
        self._record_layers(scales)
        numbers = Hyperparameters(self.optimizer, self.lr, self._clip_factor(grad_norm))
        for op in self._schedule.updates():
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
                prefetch_depth=self._knobs.prefetch_depth,
                micro_batches=len(batch.parts),
                skipped=result.skipped,
            )
        )

    def _record_layers(self, scales: list[float]) -> None:
        now, count = self.recorder.now(), len(self._layouts)
        for layer, host in enumerate(self._host.layers):
            found = (scales[layer], host.weight_norm, scales[count + layer])
            self.recorder.add(LayerStats(now, self._step, layer, *found))

    # ---- knobs ----

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
        return self._room.needs(self.control.knobs, self._room.size, offload=offload).total

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

    def resume_at(self, step: int, random_states: dict[str, torch.Tensor]) -> None:
        """Go on as an engine that has applied `step` steps, after its parts were filled."""
        with self._alone():
            self._step = step
            self._executor.set_random_states(random_states)
            for _, host in self._units():
                host.weight_norm = weight_norm(host)

    @property
    def before_update(self) -> Callable[[int | None], None]:
        """Called in the host lane before a layer (None: the shell) is updated; it may wait."""
        return self._executor.before_update

    @before_update.setter
    def before_update(self, hook: Callable[[int | None], None]) -> None:
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
        """Save in Hugging Face's format, in the streamed dtype. Files appear in `folder` only when all are written."""
        with self._alone():
            self._wait_for_updates()
            self._save(Path(folder))

    def _save(self, target: Path) -> None:
        target.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix=".saving-", dir=target))
        try:
            with self._whole_model():
                self.model.save_pretrained(part)
            for file in sorted(part.iterdir()):
                os.replace(file, target / file.name)
        finally:
            shutil.rmtree(part, ignore_errors=True)

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


def _device(name: str) -> torch.device:
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise ValueError('device="cuda", but torch finds no CUDA device; use "auto" or "cpu"')
    return torch.device("cuda" if available and name != "cpu" else "cpu")


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
