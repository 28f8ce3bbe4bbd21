"""Prompts with what follows them: completions, preferences and prompts alone; what follows is trained, no more."""

import json
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain.data import (
    Batches,
    Pairs,
    RecordError,
    Records,
    records_from_rows,
    tokenize,
    tokenize_pairs,
    tokenize_prompts,
    train_tokenizer,
)

TOKENIZER = train_tokenizer(["some words to learn, again and again\n"] * 4, vocab_size=300)
EOS = TOKENIZER.eos_token
IGNORED = -100

# As Qwen3: the last answer gets an empty thinking block, which a prompt does not have.
INCONSISTENT = (
    "{% for m in messages %}<{{ m.role }}{{ '!' if loop.last }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def preference(number: int = 0) -> dict[str, Any]:
    return {"prompt": f"words {number}", "chosen": " again" * (1 + number % 3), "rejected": f" {number}"}


def text_of(ids: Any) -> str:
    return str(TOKENIZER.decode(ids))


def trained_text(ids: Any, trained: Any) -> str:
    return text_of([token for token, on in zip(ids, trained, strict=True) if on])


def completions(*rows: dict[str, Any], **options: Any) -> list[tuple[str, str]]:
    """The whole and the trained text of every document."""
    dataset = tokenize(records_from_rows(rows), TOKENIZER, 64, pack=False, **options)
    documents = [dataset.document(index) for index in range(len(dataset))]
    return [(text_of(ids), trained_text(ids, trained)) for ids, trained in documents]


# ---- completions ----


def test_only_the_completion_of_a_text_is_trained_and_it_ends() -> None:
    row = {"prompt": "some words", "completion": " again"}
    assert completions(row) == [("<|bos|>some words again<|end|>", " again<|end|>")]
    assert completions(row, loss_on="all") == [("<|bos|>some words again<|end|>", "some words again<|end|>")]


def test_only_the_completion_of_a_chat_is_trained() -> None:
    row = {"prompt": [user("a"), assistant("b"), user("c")], "completion": [assistant("d")]}
    whole = "<|bos|><|user|>a<|end|><|assistant|>b<|end|><|user|>c<|end|><|assistant|>d<|end|>"
    assert completions(row) == [(whole, "d<|end|>")]
    assert completions(row, loss_on="assistant") == [(whole, "b<|end|>d<|end|>")]
    assert completions(row, loss_on="all") == [(whole, whole.removeprefix("<|bos|>"))]


def test_all_of_a_chat_can_be_trained() -> None:
    row = {"messages": [user("a"), assistant("b")]}
    whole = "<|bos|><|user|>a<|end|><|assistant|>b<|end|>"
    assert completions(row) == [(whole, "b<|end|>")]
    assert completions(row, loss_on="all") == [(whole, whole.removeprefix("<|bos|>"))]


def test_a_token_that_reaches_over_the_end_of_a_prompt_is_trained() -> None:
    two, one = TOKENIZER(" a")["input_ids"][1:], TOKENIZER(" and")["input_ids"][1:]
    assert (len(one), two != one) == (1, True)
    assert completions({"prompt": "some a", "completion": "nd"})[0][1] == " and<|end|>"


@pytest.mark.parametrize(
    ("row", "loss_on", "rule"),
    [
        ({"text": "a"}, "assistant", r"loss_on must be one of \('all',\) for records of format 'text'; got 'assist"),
        ({"messages": []}, "completion", r"loss_on must be one of \('assistant', 'all'\) for .*; got 'completion'"),
        ({"prompt": "a", "completion": "b"}, "assistant", r"record 1: 'prompt' must be a list of .* message; got 'a'"),
        (
            {"prompt": "a", "chosen": "b", "rejected": "c"},
            None,
            r"it is 'preference'. Text and chats are for the recipes sft and pretrain",
        ),
        ({"prompt": "a"}, None, r"it is 'prompt'\. "),
    ],
)
def test_what_cannot_be_trained_is_refused(row: dict[str, Any], loss_on: Any, rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        tokenize(records_from_rows([row]), TOKENIZER, 64, loss_on=loss_on)


def test_a_template_that_rewrites_the_prompt_is_refused() -> None:
    rows = [{"prompt": [user("a")], "completion": [assistant("b")]}]
    with pytest.raises(RecordError, match="record 1: the chat template is not prefix-consistent: what follows changes"):
        tokenize(records_from_rows(rows), TOKENIZER, 64, chat_template=INCONSISTENT)


# ---- pairs ----


def pairs_of(*rows: dict[str, Any], **options: Any) -> Pairs:
    return tokenize_pairs(records_from_rows(rows), TOKENIZER, 32, **options)


def said(pairs: Pairs, index: int = 0) -> list[tuple[str, str]]:
    return [(text_of(ids), trained_text(ids, trained)) for ids, trained in pairs.pair(index)]


def test_a_pair_of_texts() -> None:
    assert said(pairs_of({"prompt": "some", "chosen": " words", "rejected": " to"})) == [
        ("<|bos|>some words<|end|>", " words<|end|>"),
        ("<|bos|>some to<|end|>", " to<|end|>"),
    ]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [user("a")], "chosen": [assistant("b")], "rejected": [assistant("c")]},
        {"chosen": [user("a"), assistant("b")], "rejected": [user("a"), assistant("c")]},
        {"prompt": "a", "chosen": [user("a"), assistant("b")], "rejected": [user("a"), assistant("c")]},
    ],
    ids=["explicit", "implicit", "implicit beside a string"],
)
def test_a_pair_of_chats(row: dict[str, Any]) -> None:
    asked = "<|bos|><|user|>a<|end|><|assistant|>"
    assert said(pairs_of(row)) == [(f"{asked}b<|end|>", "b<|end|>"), (f"{asked}c<|end|>", "c<|end|>")]


def test_a_batch_of_pairs_is_all_chosen_then_all_rejected() -> None:
    pairs = pairs_of(*map(preference, range(6)))
    batch = pairs.batch([4, 1])
    documents = [pairs.pair(4)[0], pairs.pair(1)[0], pairs.pair(4)[1], pairs.pair(1)[1]]
    assert {name: values.dtype for name, values in batch.items()} == dict.fromkeys(
        ("input_ids", "labels", "attention_mask"), torch.int64
    )
    for row, (ids, trained) in enumerate(documents):
        length = len(ids)
        assert batch["input_ids"][row, :length].tolist() == ids.tolist()
        assert batch["labels"][row, :length].tolist() == np.where(trained, ids, IGNORED).tolist()
        assert batch["attention_mask"][row].tolist() == [1] * length + [0] * (len(batch["labels"][row]) - length)
        assert (batch["labels"][row, length:] == IGNORED).all()
    assert batch["input_ids"].shape == (4, max(len(ids) for ids, _ in documents))


def test_a_pair_too_long_on_either_side_is_rejected_whole_and_counted() -> None:
    long = {"prompt": "a", "chosen": "b", "rejected": " again" * 40}
    pairs = pairs_of(preference(), long, {**long, "chosen": long["rejected"], "rejected": "b"}, preference(1))
    assert (len(pairs), pairs.counts.records, pairs.counts.rejected, pairs.counts.documents) == (2, 4, 2, 4)
    with pytest.raises(ValueError, match="nothing is left to train on: 1 records, 0 skipped, 1 rejected"):
        pairs_of(long)


@pytest.mark.parametrize(
    ("row", "rule"),
    [
        ({"prompt": "a", "chosen": "b", "rejected": None}, "'rejected' must be a string; got None"),
        ({"prompt": None, "chosen": "b", "rejected": "c"}, "'prompt' must be a string; got None"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "'chosen' and 'rejected' must differ; both are 'b'"),
        ({"prompt": "a", "chosen": [assistant("b")], "rejected": "c"}, "'chosen' must be a string"),
    ],
)
def test_a_broken_preference_is_refused_by_number_or_skipped(row: dict[str, Any], rule: str) -> None:
    with pytest.raises(RecordError, match=f"record 2: {rule}"):
        pairs_of(preference(), row)
    pairs = pairs_of(preference(), row, on_bad_record="skip")
    assert (len(pairs), pairs.counts.skipped) == (1, 1)


@pytest.mark.parametrize(
    ("chosen", "rejected", "shared"),
    [
        ([assistant("b")], [assistant("c")], "0 of 1 and 1"),
        ([user("a"), assistant("b")], [user("a")], "1 of 2 and 1"),
    ],
)
def test_chats_without_a_common_beginning_are_refused(chosen: Any, rejected: Any, shared: str) -> None:
    with pytest.raises(RecordError, match=f"must begin with the same messages .*; they share {shared}"):
        pairs_of({"chosen": chosen, "rejected": rejected})


def test_other_records_are_no_pairs() -> None:
    with pytest.raises(ValueError, match=r"must be 'preference' here; it is 'text'"):
        tokenize_pairs(records_from_rows([{"text": "a"}]), TOKENIZER, 32)


# ---- prompts ----


def test_prompts_are_padded_on_the_left_and_keep_their_columns() -> None:
    rows = [{"prompt": "some words", "answer": 3, "tags": ["x"]}, {"prompt": "a", "answer": 5, "tags": []}]
    batch = tokenize_prompts(records_from_rows(rows), TOKENIZER, 32).batch([0, 1])
    longest = len(TOKENIZER("some words")["input_ids"])
    assert text_of(batch.input_ids[1][batch.attention_mask[1] == 1]) == "<|bos|>a"
    assert text_of(batch.input_ids[0]) == "<|bos|>some words"
    assert batch.attention_mask.tolist() == [[1] * longest, [0] * (longest - 2) + [1, 1]]
    assert (batch.prompts, batch.columns) == (["some words", "a"], {"answer": [3, 5], "tags": [["x"], []]})


def test_a_chat_prompt_ends_where_the_answer_begins() -> None:
    row = {"prompt": [user("a")]}
    batch = tokenize_prompts(records_from_rows([row]), TOKENIZER, 32).batch([0])
    assert text_of(batch.input_ids[0]) == "<|bos|><|user|>a<|end|><|assistant|>"
    assert (batch.prompts, batch.columns) == ([[user("a")]], {})


def test_prompts_too_long_or_broken_are_counted() -> None:
    rows = [{"prompt": "a"}, {"prompt": " again" * 40}, {"prompt": None}, {"prompt": "b"}]
    with pytest.raises(RecordError, match="record 3: 'prompt' must be a string; got None"):
        tokenize_prompts(records_from_rows(rows), TOKENIZER, 32)
    prompts = tokenize_prompts(Records(rows, "prompt", skipped=2), TOKENIZER, 32, on_bad_record="skip")
    assert [row["prompt"] for row in prompts.rows] == ["a", "b"]
    counts = prompts.counts
    assert (counts.records, counts.rejected, counts.skipped, counts.documents) == (3, 1, 3, 2)
    with pytest.raises(ValueError, match="no prompt is left to answer: 1 records"):
        tokenize_prompts(records_from_rows(rows[1:2]), TOKENIZER, 32)


# ---- batches of either ----


def test_a_text_needs_an_end() -> None:
    tokenizer = train_tokenizer(["text"], vocab_size=300)
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="raw text needs an end-of-sequence token"):
        tokenize_pairs(records_from_rows([preference()]), tokenizer, 32)


PAIRS = pairs_of(*map(preference, range(11)))
PROMPTS = tokenize_prompts(records_from_rows([{"prompt": f"a {n}", "n": n} for n in range(11)]), TOKENIZER, 32)


@settings(max_examples=20, deadline=None)
@given(before=st.integers(0, 12), shuffle=st.booleans(), seed=st.integers(0, 3))
def test_batches_of_pairs_and_prompts_continue_exactly(before: int, shuffle: bool, seed: int) -> None:
    def took(batches: Batches[Any], count: int) -> list[Any]:
        return [next(batches, None) for _ in range(count)]

    for dataset in (PAIRS, PROMPTS):
        first, second = (Batches[Any](dataset, 3, seed=seed, shuffle=shuffle) for _ in range(2))
        took(first, before)
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        for one, other in zip(took(first, 6), took(second, 6), strict=True):
            assert repr(one) == repr(other)  # small enough that no tensor is abbreviated


def test_an_epoch_has_every_prompt_once() -> None:
    assert sorted(n for batch in Batches(PROMPTS, 3) for n in batch.columns["n"]) == list(range(11))


def test_other_pairs_are_not_continued() -> None:
    state = Batches(PAIRS, 3).state_dict()
    with pytest.raises(ValueError, match="cannot continue exactly: sequences was 11 and is 10"):
        Batches(pairs_of(*map(preference, range(10))), 3).load_state_dict(state)


def test_prompts_with_other_columns_are_not_continued() -> None:
    rows = [{"prompt": f"a {n}", "n": n} for n in range(11)]
    state = Batches(PROMPTS, 3).state_dict()
    Batches(tokenize_prompts(records_from_rows(rows), TOKENIZER, 32), 3).load_state_dict(state)
    rows[4]["n"] = 5
    with pytest.raises(ValueError, match="cannot continue exactly: content was"):
        Batches(tokenize_prompts(records_from_rows(rows), TOKENIZER, 32), 3).load_state_dict(state)
