"""Records to documents, documents to sequences: nothing lost silently, nothing trained by mistake."""

from itertools import chain
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain.data import (
    PLAIN_CHAT_TEMPLATE,
    Counts,
    RecordError,
    Records,
    TokenizedDataset,
    packing,
    records_from_rows,
    tokenize,
    train_tokenizer,
)
from megatrain.data.packing import first_fit

TOKENIZER = train_tokenizer(["some words to learn, again and again\n"] * 4, vocab_size=300)
EOS = TOKENIZER.eos_token_id


def texts(*items: Any) -> Records:
    return records_from_rows([{"text": item} for item in items])


def chats(*answers: str, question: str = "Say it.") -> Records:
    return records_from_rows(
        [
            {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
            for answer in answers
        ]
    )


def documents(dataset: TokenizedDataset) -> list[list[int]]:
    return [dataset.document(index)[0].tolist() for index in range(dataset.counts.documents)]


def test_raw_text_ends_with_eos_and_is_all_trained() -> None:
    dataset = tokenize(texts("some words", "again"), TOKENIZER, 64)
    assert documents(dataset) == [[*TOKENIZER(text)["input_ids"], EOS] for text in ("some words", "again")]
    for index in range(2):
        assert dataset.document(index)[1].tolist() == [False] + [True] * (len(dataset.document(index)[0]) - 1)


def test_an_eos_that_is_there_is_not_doubled() -> None:
    assert documents(tokenize(texts("words<|end|>"), TOKENIZER, 64))[0].count(EOS) == 1


def test_raw_text_without_eos_token_is_refused() -> None:
    tokenizer = train_tokenizer(["text"], vocab_size=300)
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="raw text needs an end-of-sequence token"):
        tokenize(texts("words"), tokenizer, 64)


def test_long_raw_text_is_split_into_consecutive_pieces() -> None:
    text = "some words to learn, again and again " * 5
    dataset = tokenize(texts(text, "words"), TOKENIZER, 16)
    pieces = documents(dataset)
    assert [len(piece) for piece in pieces[:-2]] == [16] * (len(pieces) - 2)
    assert list(chain.from_iterable(pieces[:-1])) == [*TOKENIZER(text)["input_ids"], EOS]
    assert (dataset.counts.records, dataset.counts.split, dataset.counts.rejected) == (2, 1, 0)


def test_long_chats_are_rejected_whole_and_counted() -> None:
    dataset = tokenize(chats("short", "long " * 40), TOKENIZER, 48)
    assert (dataset.counts.records, dataset.counts.rejected, dataset.counts.documents) == (2, 1, 1)


def test_long_chats_split_on_demand_and_drop_untrained_pieces() -> None:
    seq_len, question, answer = 16, "some words to learn, " * 12, "again and again " * 6
    whole = tokenize(chats(answer, question=question), TOKENIZER, 1000)
    dataset = tokenize(chats(answer, question=question), TOKENIZER, seq_len, too_long="split")
    ids, trained = whole.document(0)
    starts = range(0, len(ids), seq_len)
    kept = [start for start in starts if trained[start + 1 : start + seq_len].any()]
    assert 0 < len(kept) < len(starts)
    assert documents(dataset) == [ids[start : start + seq_len].tolist() for start in kept]
    assert (dataset.counts.split, dataset.counts.untrained) == (1, len(starts) - len(kept))


def test_a_chat_without_an_answer_is_counted_as_untrained() -> None:
    records = records_from_rows([{"messages": [{"role": "user", "content": "Hello?"}]}, *chats("yes").rows])
    dataset = tokenize(records, TOKENIZER, 64)
    assert (dataset.counts.records, dataset.counts.untrained, dataset.counts.documents) == (2, 1, 1)


def test_a_bad_record_is_refused_by_number_or_skipped() -> None:
    records = texts("words", None, "again")
    with pytest.raises(RecordError, match=r"record 2: 'text' must be a string; got None; on_bad_record=\"skip\""):
        tokenize(records, TOKENIZER, 64)
    dataset = tokenize(Records(records.rows, "text", skipped=3), TOKENIZER, 64, on_bad_record="skip")
    assert (dataset.counts.records, dataset.counts.skipped) == (2, 4)


def test_counts_add_up_and_read_well() -> None:
    dataset = tokenize(chats("yes", "no, never"), TOKENIZER, 64)
    counts = dataset.counts
    assert counts.tokens == len(dataset.token_ids) == sum(map(len, documents(dataset)))
    assert counts.trained_tokens == dataset.trained.sum()
    assert counts.trained_tokens == sum(len(TOKENIZER.tokenize(said)) + 1 for said in ("yes", "no, never"))
    assert str(Counts(records=12345, rejected=1)).startswith("12,345 records, 0 skipped, 1 rejected, 0 split")


def test_more_records_than_one_call_keep_their_order() -> None:
    dataset = tokenize(texts(*map(str, range(1200))), TOKENIZER, 32)
    assert [TOKENIZER.decode(ids, skip_special_tokens=True) for ids in documents(dataset)] == [
        str(number) for number in range(1200)
    ]


def test_another_chat_template_can_be_given() -> None:
    dataset = tokenize(chats("yes"), TOKENIZER, 64, chat_template=PLAIN_CHAT_TEMPLATE)
    assert TOKENIZER.decode(documents(dataset)[0]) == "User: Say it.\n\nAssistant: yes<|end|>\n\n"


def test_nothing_left_is_refused_with_the_counts() -> None:
    with pytest.raises(ValueError, match="nothing is left to train on: 1 records, 0 skipped, 1 rejected"):
        tokenize(chats("long " * 40), TOKENIZER, 16)


def test_options_are_checked() -> None:
    with pytest.raises(ValueError, match=r"seq_len must be ≥ 2.*got 1"):
        tokenize(texts("a"), TOKENIZER, 1)
    with pytest.raises(ValueError, match=r"too_long must be one of \('split', 'reject'\), or None; got 'cut'"):
        tokenize(texts("a"), TOKENIZER, 8, too_long="cut")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r'on_bad_record must be "error" or "skip"; got \'drop\''):
        tokenize(texts("a"), TOKENIZER, 8, on_bad_record="drop")  # type: ignore[arg-type]


def test_first_fit_by_hand() -> None:
    plan = first_fit(np.array([5, 4, 3, 8, 1, 2]), 8)
    assert [plan[sequence].tolist() for sequence in range(len(plan))] == [[0, 2], [1, 4, 5], [3]]


@settings(deadline=None)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=200), st.sampled_from([1, 3, 256]))
def test_packing_keeps_every_document_once_and_within_length(lengths: list[int], open_sequences: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "OPEN_SEQUENCES", open_sequences)
        plan = first_fit(np.array(lengths), 20)
    assert sorted(plan.documents.tolist()) == list(range(len(lengths)))
    for sequence in range(len(plan)):
        assert 0 < sum(lengths[document] for document in plan[sequence]) <= 20
        assert plan[sequence].tolist() == sorted(plan[sequence].tolist())
