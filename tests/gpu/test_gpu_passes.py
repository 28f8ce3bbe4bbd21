"""Scores, generation, a frozen reference and losses of one's own on a CUDA device."""

from __future__ import annotations

import pytest
import torch
from card import ADAMW, DEVICE, FAMILIES, TOLERANCE, config_for
from families import build
from pairs import MICRO_ROWS, Pair
from reference import Batch, make_batch
from transformers import PreTrainedModel

from megatrain import StreamingEngine


def plain_scores(model: PreTrainedModel, batch: Batch) -> torch.Tensor:
    inputs = {name: tensor.to(DEVICE) for name, tensor in batch.items()}
    logits = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], use_cache=False).logits
    log_probs, labels = logits.float().log_softmax(-1)[:, :-1], inputs["labels"][:, 1:]
    found = log_probs.gather(-1, labels.clamp(min=0)[..., None])[..., 0] * (labels != -100)
    return torch.cat([torch.zeros(len(labels), 1, device=DEVICE), found], dim=1)


def preference(scores: torch.Tensor) -> torch.Tensor:
    chosen, rejected = scores.sum(1).chunk(2)
    return -torch.nn.functional.logsigmoid(0.3 * (chosen - rejected)).mean()


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_are_the_models_own(family: str) -> None:
    pair = Pair.of(build(family), ADAMW, device=DEVICE, micro_batch_size=MICRO_ROWS)
    batch = make_batch(pair.plain)
    with pair.engine, torch.no_grad():
        found, expected = pair.engine.scores(batch), plain_scores(pair.plain.eval(), batch).cpu()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_an_objective_trains_as_in_plain_pytorch(batches: list[Batch]) -> None:
    pair = Pair.of(build("llama"), ADAMW, device=DEVICE, micro_batch_size=MICRO_ROWS, prefetch_depth=2)
    with pair.engine:
        for batch in batches:
            pair.optimizer.zero_grad()
            loss = preference(plain_scores(pair.plain, batch))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(pair.plain.parameters(), ADAMW.max_grad_norm or 0.0)
            pair.optimizer.step()
            assert pair.engine.step(batch, preference).loss == pytest.approx(loss.item(), rel=TOLERANCE)
        pair.require_close_weights(TOLERANCE, "after steps with an objective")


@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_it_generates_what_the_whole_model_does(family: str, depth: int) -> None:
    """Greedy, in float32: a token would differ only where two are equally likely to seven digits."""
    pair = Pair.of(build(family), ADAMW, device=DEVICE, prefetch_depth=depth)
    batch = make_batch(pair.plain, batch=3, seq=9, padding="left")
    inputs = {name: batch[name].to(DEVICE) for name in ("input_ids", "attention_mask")}
    options = {"max_new_tokens": 7, "do_sample": False, "pad_token_id": 0}
    with pair.engine:
        pair.engine.step(batch)
        with pair.engine.inference() as streamed:
            found = streamed.generate(**inputs, **options)
        pair.plain.load_state_dict(pair.engine.state_dict())
    assert torch.equal(found, pair.plain.eval().generate(**inputs, **options))


def test_the_reference_stays_what_it_was(batches: list[Batch]) -> None:
    with StreamingEngine(build("llama"), config_for(keep_reference=True), ADAMW) as engine:
        first = engine.scores(batches[0])
        for batch in batches:
            engine.step(batch)
            with engine.reference():
                assert torch.equal(engine.scores(batches[0]), first)
        assert not torch.equal(engine.scores(batches[0]), first)
