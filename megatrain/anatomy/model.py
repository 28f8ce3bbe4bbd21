"""A Hugging Face model taken apart: its layers one by one, and the shell that calls them.

Note: record and replay
    `record` calls the model with every layer replaced by a stub and keeps what each would have been called
    with; the call ends at the last layer. The engine then runs the layers itself, in its own order. `loss`
    calls the model again, its last stub returning a chunk of the streamed hidden state, so that norm, head,
    soft-capping, scaling and loss are the model's own. `balancing_loss` does the same for router logits.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from megatrain.anatomy.adapters import base_of
from megatrain.anatomy.calls import Tape, active_collector
from megatrain.anatomy.rng import RandomState
from megatrain.anatomy.structure import (
    UnsupportedModelError,
    find_layers,
    layer_unit,
    refuse_what_is_not_exact,
    shell_unit,
)
from megatrain.anatomy.stub import Elsewhere, StubbedModel, like_output
from megatrain.batch import IGNORED

_NOT_FOR_LOSS = {"hidden_states", "attentions", "cross_attentions"}
_CLASSIFIER = "ForSequenceClassification"  # transformers' own way to name them


class _RecordingComplete(Exception):  # noqa: N818 - not an error
    """Ends a recording: what follows the layers is not needed yet."""


@dataclass(frozen=True)
class Chunk:
    """Part of a micro-batch's tokens: whole rows, or a piece of one row."""

    rows: slice
    columns: slice

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor[self.rows, self.columns]


def chunks(batch: int, length: int, tokens: int) -> list[Chunk]:
    """Cut (batch, length) into chunks of at most `tokens` tokens (at least one)."""
    if length > tokens:
        return [
            Chunk(slice(row, row + 1), slice(start, min(start + tokens, length)))
            for row in range(batch)
            for start in range(0, length, tokens)
        ]
    rows = max(1, tokens // length)
    return [Chunk(slice(row, min(row + rows, batch)), slice(0, length)) for row in range(0, batch, rows)]


class Anatomy:
    """Layers and shell of a model, and the calls that replace its forward."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.stack = find_layers(model)
        refuse_what_is_not_exact(model, self.stack)
        self.units = [layer_unit(self.stack, i) for i in range(len(self.stack.container))]
        self.shell = shell_unit(model, self.stack)
        self.stubbed = StubbedModel(model, self.stack)
        self.forms: list[Any] = []  # of what each layer returns; learned by the check
        self.token_elements = 0  # of one token's hidden state between layers; learned by the check
        self.loss_from_logits = False  # the model's forward cannot be told to sum its loss over chunks
        base = base_of(model)  # a PeftModel hands everything on to it
        self.classifies = type(base).__name__.endswith(_CLASSIFIER)  # its head gives values for a whole sequence
        self._parameters = inspect.signature(base.forward).parameters
        self._any_keyword = any(p.kind is p.VAR_KEYWORD for p in self._parameters.values())

    @property
    def layers(self) -> list[nn.Module]:
        return self.stubbed.layers

    def accepts(self, keyword: str) -> bool:
        return self._any_keyword or keyword in self._parameters

    # ---- the shell, up to the layers ----

    def record(self, inputs: dict[str, torch.Tensor]) -> Tape:
        """Call the shell on one micro-batch; its graph stays attached to `Tape.hidden` and the extras."""
        tape: Tape | None = None
        passed: list[torch.Tensor] = []  # what stood for each layer's output; leaves, so that a use of it shows

        def on_call(index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            nonlocal tape
            hidden = _hidden_argument(args, kwargs)
            if tape is None:
                keys = tuple(key for key in active_collector() if key not in _NOT_FOR_LOSS)
                tape = Tape(inputs, hidden, keys=keys)
            self._require_plain_chain(index, hidden, passed, tree_leaves((args, kwargs)))
            tape.calls.append(tape.make_call(args, kwargs, hidden))
            if index == len(self.layers) - 1:
                raise _RecordingComplete
            passed.append(hidden.detach().requires_grad_())
            return like_output(self.forms[index], passed[-1])

        with self.stubbed.answering(on_call), torch.enable_grad():
            try:
                self._call(inputs)
            except _RecordingComplete:
                assert tape is not None
                return tape
        called = 0 if tape is None else len(tape.calls)
        raise UnsupportedModelError(
            f"the model called {called} of the {len(self.layers)} layers in {self.stack.path}, once each and in order "
            "is what can be streamed; is a layer skipped at random or by configuration?"
        )

    def _require_plain_chain(
        self, index: int, hidden: torch.Tensor, passed: list[torch.Tensor], arguments: list[Any]
    ) -> None:
        name = self.stack.name_of(index)
        if index != len(passed):
            raise UnsupportedModelError(
                f"{name} is called as number {len(passed)} in a forward pass: layers that are skipped, repeated or "
                "called out of order cannot be streamed exactly"
            )
        if any(isinstance(leaf, Elsewhere) or _made_from(leaf, hidden, passed) for leaf in arguments):
            raise UnsupportedModelError(
                f"{name} reads what another layer computed, apart from the hidden state it hands on; layers that are "
                "streamed one by one cannot pass that, nor its gradient"
            )
        if passed and hidden is not passed[-1]:
            raise UnsupportedModelError(
                f"the model changes the hidden state between {self.stack.name_of(index - 1)} and {name} "
                "outside any layer; that part would be lost"
            )

    # ---- the shell, after the layers ----

    def loss(self, tape: Tape, hidden: torch.Tensor, chunk: Chunk, targets: torch.Tensor, tokens: int) -> torch.Tensor:
        """Loss of a chunk: sum of the model's token losses ÷ `tokens`, attached to `hidden` and the shell.

        hidden: the last layer's output for this chunk (b, t, D). targets: shifted labels of it (b, t).
        """
        options: dict[str, Any] = {}
        if not self.loss_from_logits:
            options = {"labels": targets, "shift_labels": targets, "num_items_in_batch": tokens}
        output = self._after_layers(tape, hidden, chunk, **options)
        if self.loss_from_logits:
            return self._loss_function(output.logits, targets, tokens)
        loss: torch.Tensor = output.loss
        return loss

    def scores(
        self, tape: Tape, hidden: torch.Tensor, chunk: Chunk, targets: torch.Tensor, temperature: float
    ) -> torch.Tensor:
        """What a chunk's logits say, float32, attached to `hidden` and the shell.

        A language model: the log-probability of each target, of logits ÷ temperature, 0 where it is ignored (b, t).
        A classifier: its logits (b, labels); the chunk must hold whole sequences.
        """
        logits: torch.Tensor = self._after_layers(tape, hidden, chunk).logits.float()
        if self.classifies:
            return logits
        logits = logits if temperature == 1 else logits / temperature
        flat, labels = logits.flatten(0, 1), targets.flatten()
        losses = nn.functional.cross_entropy(flat, labels, ignore_index=IGNORED, reduction="none")
        return (0 - losses).view(targets.shape)  # not −0 where a target is ignored

    def _after_layers(self, tape: Tape, hidden: torch.Tensor, chunk: Chunk, **options: Any) -> Any:
        """The model's output, its layers' being `hidden` (b, t, D)."""
        ids = chunk.of(tape.inputs["input_ids"])
        random = RandomState(ids.device)
        before = random.get()

        def on_call(index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if index < len(self.layers) - 1:
                return like_output(self.forms[index], _hidden_argument(args, kwargs).detach())
            random.set(before)  # what dropout the shell still does comes after the layers' own
            return like_output(self.forms[index], hidden)

        options |= {f"output_{key}": False for key in tape.keys}
        with self.stubbed.answering(on_call):
            return self._call({"input_ids": ids}, **options)

    def _loss_function(self, logits: torch.Tensor, targets: torch.Tensor, tokens: int) -> torch.Tensor:
        loss: torch.Tensor = self.model.loss_function(  # type: ignore[operator]
            logits=logits,
            labels=None,
            vocab_size=logits.shape[-1],
            shift_labels=targets,
            num_items_in_batch=tokens,
        )
        return loss

    def balancing_loss(self, tape: Tape) -> tuple[torch.Tensor, list[list[torch.Tensor]]] | None:
        """The model's loss on what its hooks collected (router logits), and the leaves it is attached to.

        leaves[i]: layer i's collected tensors, in the order in which backward collects them again.
        """
        if not tape.keys or self.classifies:
            return None
        leaves = [self._collected_leaves(tape, index) for index in range(len(self.layers))]

        def on_call(index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            for key, tensors in leaves[index].items():
                active_collector()[key].extend(tensors)
            return like_output(self.forms[index], _hidden_argument(args, kwargs).detach())

        inputs = tape.inputs
        none = torch.full_like(inputs["input_ids"][:, -1:], IGNORED)  # no token is predicted: only balancing is left
        with RandomState(none.device).kept(), self.stubbed.answering(on_call), torch.enable_grad():
            output = self._call(inputs, labels=none, shift_labels=none, num_items_in_batch=1, logits_to_keep=1)
        return output.loss, [[t for key in layer for t in layer[key]] for layer in leaves]

    def _collected_leaves(self, tape: Tape, index: int) -> dict[str, list[torch.Tensor]]:
        return {
            key: [t.detach().requires_grad_(t.is_floating_point()) for t in tensors]
            for key, tensors in tape.collected[index].items()
        }

    # ---- calling the model ----

    def _call(self, inputs: dict[str, torch.Tensor], **options: Any) -> Any:
        if self.accepts("use_cache"):
            options["use_cache"] = False
        if self.accepts("return_dict"):
            options["return_dict"] = True
        return self.model(**inputs, **options)

    def call_whole(self, inputs: dict[str, torch.Tensor], **options: Any) -> Any:
        """The model's ordinary forward, layers and all (before it is hollowed out)."""
        return self._call(inputs, **options)

    def move_constants(self, device: torch.device) -> None:
        """Move tensors that layers keep as plain attributes; only parameters and buffers are streamed."""
        for layer in self.layers:
            for module in layer.modules():
                for name, value in list(vars(module).items()):
                    if isinstance(value, torch.Tensor):
                        setattr(module, name, value.to(device))

    @contextmanager
    def hollow(self) -> Iterator[None]:
        """Within, the model's layers are stubs."""
        self.stubbed.hollow_out()
        try:
            yield
        finally:
            self.stubbed.restore()


def _made_from(argument: Any, hidden: torch.Tensor, passed: list[torch.Tensor]) -> bool:
    """Whether a layer's further argument was computed from an earlier layer's output."""
    if not isinstance(argument, torch.Tensor) or argument is hidden or not argument.requires_grad or not passed:
        return False
    if argument.grad_fn is None:
        return any(argument is output for output in passed)
    found = torch.autograd.grad(argument.sum(), passed, allow_unused=True, retain_graph=True)
    return any(gradient is not None for gradient in found)


def _hidden_argument(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """The hidden state among a layer's arguments: the first positional tensor, or the keyword of that name."""
    candidate = args[0] if args else kwargs.get("hidden_states")
    if not isinstance(candidate, torch.Tensor):
        raise UnsupportedModelError(
            "a layer is called without a hidden state as its first argument or as hidden_states="
        )
    return candidate
