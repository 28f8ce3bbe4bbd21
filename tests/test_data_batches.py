"""Sequences to batches: shapes, packing that a model cannot tell from separate documents, exact continuation."""

import json
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from megatrain.data import Batches, TokenizedDataset, records_from_rows, tokenize, train_tokenizer

TOKENIZER = train_tokenizer(["a b c d e f g h"], vocab_size=300)
SEQ_LEN = 24


def build_dataset(*, pack: bool = True, records: int = 30, seq_len: int = SEQ_LEN) -> TokenizedDataset:
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"question {number}"[: 3 + number % 9]},
                {"role": "assistant", "content": f"{number}"},
            ]
        }
        for number in range(records)
    ]
    return tokenize(records_from_rows(rows), TOKENIZER, seq_len, pack=pack)


PACKED, PADDED = build_dataset(), build_dataset(pack=False)


def documents_of(batch: dict[str, torch.Tensor]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return (tokens, labels) of every document in a packed batch, found by position_ids alone."""
    found = []
    for ids, labels, positions in zip(*(batch[k] for k in ("input_ids", "labels", "position_ids")), strict=True):
        starts = [*(positions == 0).nonzero().flatten().tolist(), len(ids)]
        for start, end in pairwise(starts):
            if (labels[start:end] != -100).any():
                found.append((tuple(ids[start:end].tolist()), tuple(labels[start:end].tolist())))
    return found


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_packed_batch() -> None:
    batch = next(Batches(PACKED, 4))
    assert set(batch) == {"input_ids", "labels", "position_ids"}
    assert all(values.dtype == torch.int64 and values.shape == (4, SEQ_LEN) for values in batch.values())
    assert all(values.device.type == "cpu" for values in batch.values())
    assert (batch["labels"][batch["position_ids"] == 0] == -100).all()


def test_a_padded_batch_is_as_long_as_its_longest_document() -> None:
    batch = next(Batches(PADDED, 4, shuffle=False))
    lengths = [len(PADDED.document(index)[0]) for index in range(4)]
    assert set(batch) == {"input_ids", "labels", "attention_mask"}
    assert all(values.dtype == torch.int64 and values.shape == (4, max(lengths)) for values in batch.values())
    assert batch["attention_mask"].sum(1).tolist() == lengths
    padding = batch["attention_mask"] == 0
    assert (batch["labels"][padding] == -100).all()
    assert (batch["input_ids"][padding] == TOKENIZER.pad_token_id).all()


def test_labels_are_the_ids_where_trained() -> None:
    for batch in Batches(PACKED, 4):
        trained = batch["labels"] != -100
        assert torch.equal(batch["labels"][trained], batch["input_ids"][trained])


def test_an_epoch_has_every_document_once() -> None:
    expected: Counter[tuple[tuple[int, ...], tuple[int, ...]]] = Counter()
    for index in range(PACKED.counts.documents):
        ids, trained = PACKED.document(index)
        expected[tuple(ids), tuple(int(i) if t else -100 for i, t in zip(ids, trained, strict=True))] += 1
    found = Counter(document for batch in Batches(PACKED, 4) for document in documents_of(batch))
    assert found == expected


def test_the_rest_of_a_sequence_is_a_document_of_its_own() -> None:
    dataset = build_dataset(records=1)
    batch = next(Batches(dataset, 1))
    used = dataset.counts.tokens
    assert used < SEQ_LEN
    assert batch["position_ids"][0].tolist() == [*range(used), *range(SEQ_LEN - used)]
    assert (batch["labels"][0, used:] == -100).all()
    assert (batch["input_ids"][0, used:] == TOKENIZER.pad_token_id).all()


def test_a_model_sees_packed_documents_as_if_alone() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(TOKENIZER),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config).eval()
    packed = next(Batches(PACKED, 2, shuffle=False))
    with torch.no_grad():
        together = model(input_ids=packed["input_ids"], position_ids=packed["position_ids"], use_cache=False).logits
        for row in range(2):
            start = 0
            for document in PACKED.sequences[row]:
                ids = torch.from_numpy(PACKED.document(int(document))[0]).long()
                alone = model(input_ids=ids[None]).logits[0]
                torch.testing.assert_close(together[row, start : start + len(ids)], alone, rtol=0, atol=1e-6)
                start += len(ids)


@pytest.mark.parametrize("drop_last", [False, True])
def test_the_last_batch_is_smaller_or_dropped(drop_last: bool) -> None:
    batches = Batches(PADDED, 4, drop_last=drop_last)
    sizes = [len(batch["input_ids"]) for batch in batches]
    assert sizes == [4] * 7 + [2] * (not drop_last)
    assert len(batches) == len(sizes)


def test_every_epoch_has_its_own_order_and_the_seed_fixes_it() -> None:
    one, other = Batches(PADDED, 30, seed=7), Batches(PADDED, 30, seed=7)
    epochs = [next(iter(list(one))) for _ in range(3)]
    assert one.epoch == 3
    assert all(same(batch, next(iter(list(other)))) for batch in epochs)
    assert not same(epochs[0], epochs[1])
    assert not same(epochs[0], next(Batches(PADDED, 30, seed=8)))
    assert sorted(map(tuple, epochs[0]["labels"].tolist())) == sorted(map(tuple, epochs[1]["labels"].tolist()))


def test_without_shuffling_the_order_is_that_of_the_records() -> None:
    batches = Batches(PADDED, 1, shuffle=False)
    for _ in range(2):
        assert [batch["input_ids"][0].tolist() for batch in batches] == [
            PADDED.document(index)[0].tolist() for index in range(len(PADDED))
        ]


def take(batches: Batches, count: int) -> list[dict[str, torch.Tensor] | None]:
    """Return `count` events: batches, and None where an epoch ended."""
    return [next(batches, None) for _ in range(count)]


@settings(max_examples=40, deadline=None)
@given(before=st.integers(0, 25), shuffle=st.booleans(), pack=st.booleans(), drop_last=st.booleans())
def test_a_saved_state_continues_exactly(before: int, shuffle: bool, pack: bool, drop_last: bool) -> None:
    def fresh() -> Batches:
        return Batches(PACKED if pack else PADDED, 4, seed=3, shuffle=shuffle, drop_last=drop_last)

    first = fresh()
    take(first, before)
    state = json.loads(json.dumps(first.state_dict()))
    second = fresh()
    take(second, 2)  # what it did before does not matter
    second.load_state_dict(state)
    for expected, got in zip(take(first, 12), take(second, 12), strict=True):
        assert (expected is None and got is None) or (expected and got and same(expected, got))


@pytest.mark.parametrize(
    ("dataset", "settings_", "name"),
    [
        (PADDED, {"seed": 1}, "seed was 0 and is 1"),
        (PADDED, {"shuffle": False}, "shuffle was True and is False"),
        (PADDED, {"batch_size": 5}, "batch_size was 4 and is 5"),
        (PACKED, {}, "sequences was 30 and is"),
    ],
)
def test_a_state_of_other_batches_is_refused(dataset: TokenizedDataset, settings_: dict[str, Any], name: str) -> None:
    state = Batches(PADDED, 4).state_dict()
    with pytest.raises(ValueError, match=f"cannot continue exactly: {name}"):
        Batches(dataset, **{"batch_size": 4, **settings_}).load_state_dict(state)


def test_impossible_batches_are_refused() -> None:
    with pytest.raises(ValueError, match="batch_size must be ≥ 1; got 0"):
        Batches(PADDED, 0)
    with pytest.raises(ValueError, match="drop_last leaves no batch: 30 sequences are fewer than batch_size 31"):
        Batches(PADDED, 31, drop_last=True)
