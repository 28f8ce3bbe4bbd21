"""One model trained twice, by the engine and by plain PyTorch, and what differs afterwards."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from reference import Batch, make_batch, plain_adamw, plain_step
from torch import Tensor
from transformers import PreTrainedModel

from megatrain import AdamWConfig, EngineConfig, StreamingEngine
from megatrain.engine import StepResult

LR = 1e-3
ROWS, MICRO_ROWS = 6, 2  # three micro-batches

Tensors = Mapping[str, Tensor]


def engine_config(**changes: Any) -> EngineConfig:
    """A float32 engine on the CPU; `changes` are fields of EngineConfig."""
    return EngineConfig(**{"device": "cpu", "dtype": "float32", **changes})


@dataclass
class Outcome:
    """What a run of some steps came to."""

    losses: list[float]
    norms: list[float]
    state: dict[str, Tensor]


@dataclass
class Pair:
    """A model in the engine and its copy under torch.optim.AdamW."""

    engine: StreamingEngine
    plain: PreTrainedModel
    optimizer: torch.optim.AdamW
    max_grad_norm: float | None

    @classmethod
    def of(cls, model: PreTrainedModel, adamw: AdamWConfig | None = None, **config: Any) -> Pair:
        """`model` goes to the engine, a copy of it is trained plainly (on the engine's device)."""
        adamw = adamw or AdamWConfig(lr=LR)
        plain = copy.deepcopy(model)
        settings = engine_config(**config)
        engine = StreamingEngine(model, settings, adamw)
        device = torch.device("cpu" if settings.device == "cpu" else "cuda")
        move_all(plain, device)
        optimizer = plain_adamw(plain, adamw.lr, adamw.weight_decay, adamw.betas, adamw.eps)
        return cls(engine, plain, optimizer, adamw.max_grad_norm)

    def step(self, batch: Batch) -> tuple[StepResult, tuple[float, float]]:
        """One step of both; returns what the engine says, and plain loss and norm before clipping."""
        rows = len(batch["input_ids"])
        micro_batches = -(-rows // (self.engine.config.micro_batch_size or rows))
        moved = {name: tensor.to(self.plain.device) for name, tensor in batch.items()}
        expected = plain_step(
            self.plain, self.optimizer, moved, micro_batches=micro_batches, max_grad_norm=self.max_grad_norm
        )
        return self.engine.step(batch), expected

    def set_lr(self, lr: float) -> None:
        self.engine.lr = lr
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def require_equal_bits(self, batches: Iterable[Batch]) -> None:
        """Train on `batches`: loss, norm and every weight must be the same bit by bit after each."""
        for number, batch in enumerate(batches):
            result, expected = self.step(batch)
            assert (result.loss, result.grad_norm) == expected, f"step {number}"
            assert differing(self.engine.state_dict(), self.plain.state_dict()) == [], f"step {number}"

    def require_close(self, batches: Iterable[Batch], tolerance: float = 1e-6) -> None:
        """Train on `batches`: loss, norm and weights must agree within `tolerance`, relative."""
        for number, batch in enumerate(batches):
            result, (loss, norm) = self.step(batch)
            assert abs(result.loss - loss) <= tolerance * abs(loss), f"step {number}"
            assert abs(result.grad_norm - norm) <= tolerance * norm, f"step {number}"
            self.require_close_weights(tolerance, f"step {number}")

    def require_close_weights(self, tolerance: float, where: str) -> None:
        """Tensor by tensor; a model with tied weights as a whole (see `tied`)."""
        found, expected = self.engine.state_dict(), self.plain.state_dict()
        names = [list(expected)] if tied(self.plain) else [[name] for name in expected]
        for group in names:
            assert gap(found, expected, group) <= tolerance, f"{where}: {group[0]}"


def move_all(model: PreTrainedModel, device: torch.device) -> None:
    """Also the tensors that modules keep as plain attributes, which `to` leaves where they are."""
    model.to(device)  # type: ignore[arg-type]
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, Tensor):
                setattr(module, name, value.to(device))


def tied(model: PreTrainedModel) -> bool:
    """Whether head and embeddings are one tensor.

    With several micro-batches its two gradients are summed in another order than in a plain run (1e-8 relative).
    Where a parameter's true gradient is zero (a key's bias), rounding is all there is, and AdamW blows it up to
    the size of the learning rate: only the whole weight vector says something then.
    """
    head = model.get_output_embeddings()
    return head is not None and head.weight is model.get_input_embeddings().weight


def differing(found: Tensors, expected: Tensors) -> list[str]:
    """Names under which the two do not hold the same bits."""
    assert list(found) == list(expected)
    return [name for name in expected if not torch.equal(found[name].cpu(), expected[name].cpu())]


def gap(found: Tensors, expected: Tensors, names: Iterable[str] | None = None) -> float:
    """‖found − expected‖ ÷ ‖expected‖ over all tensors of these names together."""
    names = list(expected if names is None else names)
    total = sum(float(expected[name].double().square().sum()) for name in names)
    wrong = sum(float((found[name].cpu().double() - expected[name].cpu().double()).square().sum()) for name in names)
    return math.sqrt(wrong / total if total else wrong)


def batches_for(model: PreTrainedModel, steps: int = 3, rows: int = ROWS, **options: Any) -> list[Batch]:
    """One padded batch per step, each with its own seed."""
    return [make_batch(model, rows, seed=step, **options) for step in range(steps)]


def outcome(
    model: PreTrainedModel,
    batches: Iterable[Batch],
    adamw: AdamWConfig | None = None,
    before_step: Callable[[StreamingEngine, int], None] = lambda engine, number: None,
    **config: Any,
) -> Outcome:
    """Train `model` in an engine and say what came of it; `before_step` may turn knobs."""
    with StreamingEngine(model, engine_config(**config), adamw or AdamWConfig(lr=LR)) as engine:
        results = []
        for number, batch in enumerate(batches):
            before_step(engine, number)
            results.append(engine.step(batch))
        return Outcome([r.loss for r in results], [r.grad_norm for r in results], engine.state_dict())


def require_same(found: Outcome, expected: Outcome) -> None:
    """Every loss, norm and weight must be the same bit by bit."""
    assert (found.losses, found.norms) == (expected.losses, expected.norms)
    assert differing(found.state, expected.state) == []
