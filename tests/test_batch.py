"""The door of the engine: what is no batch is refused by name, what is one is cut without losing a token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.loss.loss_utils import ForCausalLMLoss

from megatrain.batch import IGNORED, make_batch

VOCABULARY = 11


def tensors(rows: int = 5, length: int = 6, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCABULARY, (rows, length), generator=generator)
    labels = torch.where(torch.rand(rows, length, generator=generator) < 0.3, IGNORED, ids)
    return {"input_ids": ids, "labels": labels}


def with_value(name: str, value: int, *, row: int = 1, column: int = 2) -> dict[str, torch.Tensor]:
    changed = tensors()
    changed[name][row, column] = value
    return changed


IDS = torch.zeros(2, 3, dtype=torch.int64)
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("no labels", {"input_ids": IDS}, r"a batch needs 'labels', an int64 tensor .*; got \['input_ids'\]"),
    ("no ids", {"labels": IDS}, r"a batch needs 'input_ids', .*; got \['labels'\]"),
    ("a list", {"input_ids": [[1, 2]], "labels": IDS}, r"a batch needs 'input_ids'"),
    ("1-D", {"input_ids": IDS[0], "labels": IDS[0]}, r"shape \(batch ≥ 1, tokens ≥ 1\); got \(3,\)"),
    ("3-D", {"input_ids": IDS[None], "labels": IDS[None]}, r"got \(1, 2, 3\)"),
    ("no rows", {"input_ids": IDS[:0], "labels": IDS[:0]}, r"input_ids must have shape .*; got \(0, 3\)"),
    ("no tokens", {"input_ids": IDS[:, :0], "labels": IDS[:, :0]}, r"got \(2, 0\)"),
    ("short labels", {"input_ids": IDS, "labels": IDS[:, :2]}, r"labels must be a tensor of the shape of input_ids, "),
    ("a 4-D mask", {"input_ids": IDS, "labels": IDS, "attention_mask": IDS[None, None]}, r"\(2, 3\); got \(1, 1, 2, 3"),
    ("no tensor", {"input_ids": IDS, "labels": IDS, "attention_mask": [1]}, r"attention_mask must .*; got list"),
    ("int32 ids", {"input_ids": IDS.int(), "labels": IDS}, r"input_ids must be int64 token ids; got torch.int32"),
    ("float labels", {"input_ids": IDS, "labels": IDS.float()}, r"labels must be int64 .*convert with \.long\(\)"),
    (
        "a high id",
        with_value("input_ids", VOCABULARY),
        r"input_ids\[1, 2\] is 11, outside .* vocabulary of 11 ids",
    ),
    ("a low id", with_value("input_ids", -1), r"input_ids\[1, 2\] is -1, outside"),
    ("-100 as id", with_value("input_ids", IGNORED), r"input_ids\[1, 2\] is -100, outside"),
    ("a high label", with_value("labels", 99), r"labels\[1, 2\] is 99, outside .*-100 for labels to ignore"),
    ("a low label", with_value("labels", -1), r"labels\[1, 2\] is -1, outside .* use the model's own tokenizer"),
]


@pytest.mark.parametrize(("given_tensors", "message"), [pytest.param(*rest, id=name) for name, *rest in REFUSED])
def test_refuses(given_tensors: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_batch(given_tensors, 2, VOCABULARY)


def test_cuts_rows_and_keeps_the_smaller_last_part() -> None:
    whole = tensors(rows=5) | {"attention_mask": torch.ones(5, 6, dtype=torch.int64)}
    batch = make_batch(whole, 2, VOCABULARY)
    assert [len(part["input_ids"]) for part in batch.parts] == [2, 2, 1]
    assert all(set(part) == {"input_ids", "attention_mask"} for part in batch.parts)
    for name in ("input_ids", "attention_mask"):
        assert torch.equal(torch.cat([part[name] for part in batch.parts]), whole[name])
    assert batch.shape == (5, 6)


@pytest.mark.parametrize("micro_batch_size", [None, 5, 64])
def test_one_part_takes_all(micro_batch_size: int | None) -> None:
    batch = make_batch(tensors(rows=5), micro_batch_size, VOCABULARY)
    assert [len(part["input_ids"]) for part in batch.parts] == [5]


@given(rows=st.integers(1, 9), size=st.integers(1, 10), length=st.integers(1, 8), seed=st.integers(0, 999))
def test_no_predicted_token_is_lost_or_counted_twice(rows: int, size: int, length: int, seed: int) -> None:
    whole = tensors(rows, length, seed)
    batch = make_batch(whole, size, VOCABULARY)
    assert sum(batch.part_tokens) == batch.tokens == int((whole["labels"][:, 1:] != IGNORED).sum())
    assert [len(targets) for targets in batch.targets] == [len(part["input_ids"]) for part in batch.parts]
    targets = torch.cat(batch.targets)
    assert torch.equal(targets[:, :-1], whole["labels"][:, 1:])
    assert (targets[:, -1] == IGNORED).all()


def test_the_shift_is_that_of_hugging_face() -> None:
    whole = tensors(rows=4, length=7)
    batch = make_batch(whole, 3, VOCABULARY)
    logits = torch.randn(4, 7, VOCABULARY, generator=torch.Generator().manual_seed(1))
    theirs = ForCausalLMLoss(logits, whole["labels"], VOCABULARY)
    targets = torch.cat(batch.targets).flatten()
    summed = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets, ignore_index=IGNORED, reduction="sum")
    torch.testing.assert_close(summed / batch.tokens, theirs)


def test_nothing_to_predict_is_a_batch_of_no_tokens() -> None:
    whole = tensors()
    whole["labels"].fill_(IGNORED)
    assert make_batch(whole, 2, VOCABULARY).tokens == 0
    whole["labels"][:, 0] = 3  # nothing predicts the first token
    assert make_batch(whole, 2, VOCABULARY).tokens == 0


def test_the_batch_that_was_given_is_not_changed() -> None:
    whole = tensors()
    before = {name: tensor.clone() for name, tensor in whole.items()}
    make_batch(whole, 2, VOCABULARY)
    assert set(whole) == set(before)
    assert all(torch.equal(whole[name], before[name]) for name in before)


def test_lengths_of_rows_are_whole_without_a_mask() -> None:
    batch = make_batch(tensors(rows=3, length=4), 2, VOCABULARY)
    assert batch.sequence_lengths == [4, 4, 4]
    assert batch.sequence_tokens == 12


def test_lengths_of_padded_rows_leave_padding_out() -> None:
    mask = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1], [1, 0, 0, 0]])
    batch = make_batch(tensors(3, 4) | {"attention_mask": mask}, 2, VOCABULARY)
    assert batch.sequence_lengths == [4, 2, 1]
    assert batch.sequence_tokens == 7


def test_lengths_of_packed_sequences_are_found_in_their_positions() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5], [3, 4, 0, 1, 2, 3]])
    labels = torch.tensor([[-100, 1, 2, -100, 1, -100], [-100, 1, 2, 3, 4, 5], [3, 4, -100, 1, 2, 3]])
    batch = make_batch(tensors(3, 6) | {"position_ids": positions, "labels": labels}, 2, VOCABULARY)
    assert batch.sequence_lengths == [3, 2, 6, 2, 4]  # the last sequence of row 0 trains nothing: padding
    assert batch.sequence_tokens == 17
    assert torch.equal(batch.parts[1]["position_ids"], positions[2:])
