"""The head over chunks of tokens: its sum is the whole model's, and its memory does not grow with the batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import VOCAB, build
from live_logits import LiveLogits
from reference import IGNORED, Batch, make_batch
from torch import Tensor
from transformers import PreTrainedModel

from megatrain.anatomy import Anatomy, Tape, check, forward
from megatrain.batch import shifted
from megatrain.loss import Head, backward

CHUNK = 16
FLOAT_BYTES = 4
HIDDEN = 64


class Streamed:
    """A model run up to its head, the way the engine runs it."""

    def __init__(self, model: PreTrainedModel, batch: Batch) -> None:
        self.anatomy = Anatomy(model)
        check(self.anatomy)
        self.shell = {name: p for name, p in self.anatomy.shell.parameters.items() if p.requires_grad}
        self.targets = shifted(batch["labels"])
        self.anatomy.stubbed.hollow_out()
        self.tape: Tape = self.anatomy.record({n: t for n, t in batch.items() if n != "labels"})
        self.hidden = self.tape.hidden.detach()
        for index, layer in enumerate(self.anatomy.layers):
            unit = self.anatomy.units[index]
            tensors = unit.with_aliases({n: t.detach() for n, t in (unit.parameters | unit.buffers).items()})
            self.hidden = forward(layer, tensors, self.tape, index, self.hidden)

    def head(
        self, chunk_tokens: int, tokens: int | None = None, share: float = 1.0
    ) -> tuple[Tensor, Tensor, Tensor | None, dict[str, Tensor]]:
        """What `megatrain.loss.backward` returns, and the summed gradients of the shell."""
        sums: dict[str, Tensor] = {}

        def add(name: str, gradient: Tensor) -> None:
            sums[name] = sums[name] + gradient if name in sums else gradient.clone()

        loss, gradient, balancing = backward(
            Head(self.anatomy, self.tape, self.hidden, self.targets, chunk_tokens),
            tokens=tokens or int((self.targets != IGNORED).sum()),
            share=share,
            score_gradient=None,
            shell=self.shell,
            on_gradient=add,
        )
        return loss, gradient, balancing, sums


def whole_head_gradients(model: Any, batch: Batch) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Loss, the gradient of the last layer's output, and of norm and head, in one plain call."""
    outputs: list[Tensor] = []
    handle = model.model.layers[-1].register_forward_hook(lambda module, args, output: outputs.append(output))
    loss = model(**batch).loss
    handle.remove()
    names = [name for name, _ in model.named_parameters() if "layers" not in name and "embed" not in name]
    found = torch.autograd.grad(loss, [outputs[0], *(model.get_parameter(name) for name in names)])
    return loss.detach(), found[0], dict(zip(names, found[1:], strict=True))


@pytest.mark.parametrize("family", ["llama", "gemma2", "granite", "cohere2_moe"])  # soft-capping, scaled logits
@pytest.mark.parametrize("chunk_tokens", [1, 7, 24, 48, 10**6])
def test_chunks_add_up_to_the_whole(family: str, chunk_tokens: int) -> None:
    model = build(family, tie_word_embeddings=False)
    batch = make_batch(model)
    expected_loss, expected, expected_shell = whole_head_gradients(model, batch)
    loss, gradient, balancing, shell = Streamed(model, batch).head(chunk_tokens)
    assert float(loss) == pytest.approx(float(expected_loss), rel=1e-6)
    assert balancing is None
    torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-8)
    assert {name for name, tensor in shell.items() if tensor.any()} == set(expected_shell)
    for name, tensor in expected_shell.items():
        torch.testing.assert_close(shell[name], tensor, rtol=1e-5, atol=1e-7, msg=name)


def test_one_chunk_gives_the_same_bits() -> None:
    model = build("llama")
    batch = make_batch(model)
    expected_loss, expected, expected_shell = whole_head_gradients(model, batch)
    loss, gradient, _, shell = Streamed(model, batch).head(10**6)
    assert torch.equal(loss, expected_loss)
    assert torch.equal(gradient, expected)
    assert all(torch.equal(shell[name], tensor) for name, tensor in expected_shell.items())


def test_the_denominator_is_the_global_batch() -> None:
    """A micro-batch's loss counts by its tokens, not as a mean of its own."""
    model = build("llama")
    streamed = Streamed(model, make_batch(model))
    own = int((streamed.targets != IGNORED).sum())
    mean, gradient, _, _ = streamed.head(CHUNK)
    third, smaller, _, _ = streamed.head(CHUNK, tokens=3 * own)
    assert float(third) == pytest.approx(float(mean) / 3, rel=1e-6)
    torch.testing.assert_close(smaller, gradient / 3, rtol=1e-5, atol=1e-9)


def test_a_chunk_without_a_predicted_token_adds_nothing() -> None:
    model = build("llama")
    batch = make_batch(model, 2, 24)
    batch["labels"][:, :20] = IGNORED
    expected = float(model(**batch).loss.detach())
    loss, gradient, _, _ = Streamed(model, batch).head(4)
    assert float(loss) == pytest.approx(expected, rel=1e-6)
    assert not gradient[:, :16].any()


def test_the_balancing_part_counts_by_its_share() -> None:
    model = build("mixtral", output_router_logits=True, router_aux_loss_coef=0.05)
    batch = make_batch(model)
    with torch.no_grad():
        out = model(**batch)
    streamed = Streamed(model, batch)
    loss, _, balancing, _ = streamed.head(CHUNK)
    assert balancing is not None
    assert float(balancing) == pytest.approx(0.05 * float(out.aux_loss), rel=1e-6)
    assert float(loss) == pytest.approx(float(out.loss), rel=1e-6)
    _, _, half, _ = streamed.head(CHUNK, share=0.5)
    assert half is not None
    assert float(half) == pytest.approx(0.5 * float(balancing), rel=1e-6)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_logits_in_memory_do_not_grow_with_the_batch(family: str) -> None:
    """What is as wide as the vocabulary: logits, their gradients and log-probabilities of one chunk."""
    peaks = []
    for rows, seq in ((1, 16), (2, 64), (8, 128)):
        model = build(family)
        streamed = Streamed(model, make_batch(model, rows, seq))
        with LiveLogits(VOCAB, HIDDEN) as watch:
            streamed.head(CHUNK)
        assert watch.made > 4 * rows * seq // CHUNK, "the watch sees every chunk"
        peaks.append(watch.peak_bytes)
    assert peaks[2] == peaks[1] == peaks[0]
    assert peaks[2] <= 6 * CHUNK * VOCAB * FLOAT_BYTES
    assert peaks[2] < 8 * 128 * VOCAB * FLOAT_BYTES / 4, "far from all logits"
