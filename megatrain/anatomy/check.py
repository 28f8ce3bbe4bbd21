"""The construction check: one tiny batch through the whole model and through its parts, compared.

Refusing by name is better than being wrong, and no list of model classes can be complete. So every model is
run once as it is and once as the engine will run it (shell recorded, layers replayed one by one with their
tensors passed in, loss in chunks, gradients sent back layer by layer). Loss and gradients must agree.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from megatrain.anatomy import calls
from megatrain.anatomy.model import Anatomy, chunks
from megatrain.anatomy.rng import RandomState
from megatrain.anatomy.structure import UnsupportedModelError
from megatrain.anatomy.stub import form_of
from megatrain.anatomy.tiles import tiled, token_wise
from megatrain.batch import IGNORED, shifted

PROBE_ROWS, PROBE_TOKENS, PROBE_CHUNK, PROBE_TILE = 2, 16, 11, 7
EVERY_GRADIENT_BELOW = 200_000_000  # trained parameters; in larger models only the shell's gradients are compared
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-4, torch.bfloat16: 4e-2, torch.float16: 1e-2}
NOISE = 1e-3  # of the global norm: below it, tolerance is absolute, since rounding elsewhere is all there is

Gradients = dict[str, torch.Tensor]
Add = Callable[[str, torch.Tensor | None], None]
Changed = Callable[[], AbstractContextManager[None]]


def check(anatomy: Anatomy) -> None:
    """Raise UnsupportedModelError if the model's parts do not add up to the model."""
    _require_same(anatomy, nullcontext, "be streamed exactly")


def require_token_wise(anatomy: Anatomy) -> None:
    """Raise UnsupportedModelError if there is nothing in the layers that could run over tiles."""
    if not any(map(token_wise, anatomy.layers)):
        children = ", ".join(child for child, _ in anatomy.layers[0].named_children())
        raise UnsupportedModelError(
            f"{type(anatomy.model).__name__} has no token-wise part by a known name: {anatomy.stack.name_of(0)} "
            f"consists of {children}. Leave tile_tokens out"
        )


def check_tiles(anatomy: Anatomy) -> None:
    """Raise UnsupportedModelError if layers whose MLPs run over tiles do not add up to the model; after `check`."""
    name = type(anatomy.model).__name__
    require_token_wise(anatomy)
    with torch.enable_grad(), RandomState(torch.device("cpu")).kept(), anatomy.hollow():
        keys = anatomy.record(_probe(anatomy.model)[0]).keys
    if keys:
        raise UnsupportedModelError(
            f"{name} collects {', '.join(keys)} in its layers, which must be of all tokens at once; leave tile_tokens "
            "out, or the loss on them (output_router_logits=False)"
        )
    _require_same(anatomy, partial(tiled, anatomy.layers, PROBE_TILE), "run over tiles of tokens (tile_tokens)")


def _require_same(anatomy: Anatomy, changed: Changed, what: str) -> None:
    """Raise UnsupportedModelError, which says that the model cannot `what`, if it and its parts `changed` differ."""
    inputs, labels = _probe(anatomy.model)
    random = RandomState(torch.device("cpu"))
    with torch.enable_grad(), random.kept(), _only_what_is_compared(anatomy) as names:
        start = random.get()
        expected_loss, expected = _whole(anatomy, inputs, labels, names)
        for loss_from_logits in (False, True):
            anatomy.loss_from_logits = loss_from_logits
            random.set(start)
            with anatomy.hollow(), changed():
                difference = _difference(anatomy, inputs, labels, names, expected_loss, expected)
            if difference is None:
                return
    raise UnsupportedModelError(f"{type(anatomy.model).__name__} cannot {what}: {difference}")


def _probe(model: nn.Module) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Two short rows, one padded at its end, with a few labels ignored."""
    config = model.config.get_text_config()  # type: ignore[union-attr,operator]
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, int(config.vocab_size), (PROBE_ROWS, PROBE_TOKENS), generator=generator)
    special = {getattr(model.config, name, None) for name in vars(model.config) if name.endswith("_token_id")}
    for token in special:
        if isinstance(token, int):
            ids[ids == token] = next(i for i in range(int(config.vocab_size)) if i not in special)
    mask = torch.ones_like(ids)
    mask[-1, -3:] = 0
    labels = ids.masked_fill(mask == 0, IGNORED)
    labels[0, 4] = IGNORED
    return {"input_ids": ids, "attention_mask": mask}, labels


@contextmanager
def _only_what_is_compared(anatomy: Anatomy) -> Iterator[frozenset[str]]:
    """Within, only parameters whose gradient is compared need one: all of a small model, the shell of a large."""
    named = list(anatomy.model.named_parameters())
    everything = sum(p.numel() for _, p in named if p.requires_grad) < EVERY_GRADIENT_BELOW
    shell = {id(p) for p in anatomy.shell.parameters.values()}
    before = {name: (p.requires_grad, p.grad) for name, p in named}
    names = frozenset(name for name, p in named if p.requires_grad and (everything or id(p) in shell))
    for name, parameter in named:
        parameter.requires_grad_(name in names)
        parameter.grad = None
    try:
        yield names
    finally:
        for name, parameter in named:
            needed, parameter.grad = before[name]
            parameter.requires_grad_(needed)


def _whole(
    anatomy: Anatomy, inputs: dict[str, torch.Tensor], labels: torch.Tensor, names: frozenset[str]
) -> tuple[torch.Tensor, Gradients]:
    """Loss and gradients of the untouched model; learns what form each layer's output has."""
    outputs: dict[int, Any] = {}
    counts = Counter[int]()

    def remember(index: int) -> Any:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            outputs[index] = form_of(output)
            counts[index] += 1

        return hook

    handles = [layer.register_forward_hook(remember(i)) for i, layer in enumerate(anatomy.layers)]
    buffers = {name: buffer.clone() for name, buffer in _layer_buffers(anatomy)}
    try:
        loss = _whole_loss(anatomy, inputs, labels)
    except Exception as error:  # whatever a model's own code raises
        raise UnsupportedModelError(
            f"{type(anatomy.model).__name__} fails on a batch of {PROBE_ROWS} × {PROBE_TOKENS} tokens, one row padded: "
            f"{type(error).__name__}: {error}"
        ) from error
    finally:
        for handle in handles:
            handle.remove()
    missing = [anatomy.stack.name_of(i) for i in range(len(anatomy.layers)) if i not in outputs]
    if missing:
        raise UnsupportedModelError(f"{missing[0]} is not called in a forward pass; it cannot be streamed")
    repeated = [anatomy.stack.name_of(i) for i in range(len(anatomy.layers)) if counts[i] > 1]
    if repeated:
        raise UnsupportedModelError(f"{repeated[0]} is called more than once in a forward pass; it cannot be streamed")
    changed = {name: buffer for name, buffer in _layer_buffers(anatomy) if not torch.equal(buffers[name], buffer)}
    for name, buffer in changed.items():
        buffer.copy_(buffers[name])
    if changed:
        raise UnsupportedModelError(
            f"{next(iter(changed))} is a buffer that its layer changes while it runs; recomputing the layer would "
            "change it twice"
        )
    anatomy.forms = [outputs[i] for i in range(len(anatomy.layers))]
    parameters = {n: p for n, p in anatomy.model.named_parameters() if n in names}
    found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True) if parameters else ()
    return loss.detach(), {n: g for n, g in zip(parameters, found, strict=True) if g is not None}


def _whole_loss(anatomy: Anatomy, inputs: dict[str, torch.Tensor], labels: torch.Tensor) -> torch.Tensor:
    """The model's own loss; of a classifier, whose loss is the user's, any function of what it gives."""
    if anatomy.classifies:
        return _any_function(anatomy.call_whole(inputs).logits)
    loss: torch.Tensor = anatomy.call_whole(inputs, labels=labels).loss
    return loss


def _any_function(scores: torch.Tensor) -> torch.Tensor:
    return scores.float().square().sum()


def _layer_buffers(anatomy: Anatomy) -> list[tuple[str, torch.Tensor]]:
    return [(unit.prefix + name, buffer) for unit in anatomy.units for name, buffer in unit.buffers.items()]


def _difference(
    anatomy: Anatomy,
    inputs: dict[str, torch.Tensor],
    labels: torch.Tensor,
    names: frozenset[str],
    expected_loss: torch.Tensor,
    expected: Gradients,
) -> str | None:
    """What differs between the whole model and its parts, in words; None if nothing does."""
    try:
        loss, found = _in_parts(anatomy, inputs, labels, names)
    except UnsupportedModelError:
        raise
    except Exception as error:  # whatever a model's own code raises when it is called in parts
        return f"called in parts it fails: {type(error).__name__}: {error}"
    tolerance = max(TOLERANCE[p.dtype] for p in anatomy.model.parameters())
    if not torch.allclose(loss.float(), expected_loss.float(), rtol=tolerance, atol=0):
        return (
            f"its loss is {expected_loss.item():.6g}, that of its parts {loss.item():.6g} (layers that share state, or "
            "a loss other than next-token cross-entropy, have this effect)"
        )
    noise = NOISE * float(torch.stack([g.float().norm() for g in expected.values()]).norm()) if expected else 0.0
    for name in sorted(names):
        gap = _relative_gap(found.get(name), expected.get(name), noise)
        if gap > tolerance:
            return f"the gradient of {name} differs by {gap:.1e} relative to the whole model's"
    return None


def _relative_gap(found: torch.Tensor | None, expected: torch.Tensor | None, noise: float) -> float:
    """‖found − expected‖ ÷ ‖expected‖, where a gradient below `noise` counts as that large; None is zero."""
    if found is None or expected is None:
        present = expected if found is None else found
        return 0.0 if present is None or not present.any() else float("inf")
    return float((found.float() - expected.float()).norm() / max(float(expected.float().norm()), noise, 1e-30))


def _in_parts(
    anatomy: Anatomy, inputs: dict[str, torch.Tensor], labels: torch.Tensor, names: frozenset[str]
) -> tuple[torch.Tensor, Gradients]:
    """Loss and gradients the way the engine computes them, with the model's own tensors as weights."""
    gradients: Gradients = {}

    def add(name: str, gradient: torch.Tensor | None) -> None:
        if gradient is not None:
            gradients[name] = gradients[name] + gradient if name in gradients else gradient.clone()

    shell = {n: p for n, p in anatomy.shell.parameters.items() if n in names}
    tape = anatomy.record(inputs)
    boundaries = [tape.hidden.detach()]
    anatomy.token_elements = tape.hidden.numel() // (PROBE_ROWS * PROBE_TOKENS)
    random, drawn_from = RandomState(torch.device("cpu")), []
    with random.kept():
        other = anatomy.record({name: tensor.flip(0) for name, tensor in inputs.items()})
    other_hidden = other.hidden.detach()
    for index, layer in enumerate(anatomy.layers):
        drawn_from.append(random.get())
        boundaries.append(calls.forward(layer, _tensors(anatomy, index), tape, index, boundaries[index]))
        with random.kept():  # another micro-batch in between must not change what a layer computes
            other_hidden = calls.forward(layer, _tensors(anatomy, index), other, index, other_hidden)
    loss, gradient = _head(anatomy, tape, boundaries[-1], shifted(labels), shell, add)
    for index in reversed(range(len(anatomy.layers))):
        random.set(drawn_from[index])  # the recompute drops what forward dropped
        gradient = _backward(anatomy, tape, index, boundaries[index], gradient, names, add)
    for name, part in zip(shell, calls.shell_gradients(tape, gradient, list(shell.values())), strict=True):
        add(name, part)
    return loss, gradients


def _backward(
    anatomy: Anatomy,
    tape: calls.Tape,
    index: int,
    hidden: torch.Tensor,
    gradient: torch.Tensor,
    names: frozenset[str],
    add: Add,
) -> torch.Tensor:
    unit = anatomy.units[index]
    trained = frozenset(name for name in unit.parameters if unit.prefix + name in names)

    def report(name: str, found: torch.Tensor) -> None:
        add(unit.prefix + name, found)

    layer, tensors = anatomy.layers[index], _tensors(anatomy, index)
    return calls.Graph(layer, tensors, trained, tape, index, hidden).backward(gradient, report)


def _tensors(anatomy: Anatomy, index: int) -> dict[str, torch.Tensor]:
    unit = anatomy.units[index]
    return unit.with_aliases({n: t.detach() for n, t in (unit.parameters | unit.buffers).items()})


def _head(
    anatomy: Anatomy,
    tape: calls.Tape,
    hidden: torch.Tensor,
    targets: torch.Tensor,
    shell: dict[str, nn.Parameter],
    add: Add,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss and its gradient with respect to the last hidden state, chunk by chunk as the engine does it."""
    tokens = int((targets != IGNORED).sum())
    total, gradient = torch.zeros(()), torch.zeros_like(hidden)
    for chunk in chunks(PROBE_ROWS, PROBE_TOKENS, PROBE_TOKENS if anatomy.classifies else PROBE_CHUNK):
        leaf = chunk.of(hidden).detach().requires_grad_()
        if anatomy.classifies:
            loss = _any_function(anatomy.scores(tape, leaf, chunk, chunk.of(targets), 1.0))
        else:
            loss = anatomy.loss(tape, leaf, chunk, chunk.of(targets), tokens)
        found = torch.autograd.grad(loss, [leaf, *shell.values()], allow_unused=True)
        gradient[chunk.rows, chunk.columns] = found[0]
        total = total + loss.detach()
        for name, part in zip(shell, found[1:], strict=True):
            add(name, part)
    balancing = anatomy.balancing_loss(tape)
    if balancing is not None:
        total = total + calls.send_back_collected(tape, *balancing)
    return total, gradient
