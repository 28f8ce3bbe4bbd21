"""The offline data set and the tokenizer trained on it."""

import sys
from pathlib import Path

import pytest

from megatrain.data import docstring_records, tokenize, train_tokenizer
from megatrain.data.docstrings import _paragraphs

SOURCE = '''
import nothing_that_exists
raise RuntimeError("imported")

class Shape(Base):
    """A shape."""

    async def area(self, *, unit: str = "m") -> float:
        """Return the area.

        In the unit asked for.
        """

def silent(): ...

def escape():
    """An \\d old escape."""
'''


def write_sources(folder: Path) -> Path:
    (folder / "pkg" / "tests").mkdir(parents=True)
    (folder / "pkg" / "shapes.py").write_text(SOURCE)
    (folder / "pkg" / "__init__.py").write_text('def first(x, /): "First."')
    (folder / "pkg" / "tests" / "test_it.py").write_text('def unwanted(): "No."')
    (folder / "odd_syntax.py").write_text("def (")
    (folder / "odd_bytes.py").write_bytes(b'def f(): "\xff"')
    (folder / "odd_null.py").write_bytes(b"x = 1\x00")
    (folder / "latin.py").write_bytes('# coding: latin-1\ndef name(): "Größe."'.encode("latin-1"))
    return folder


def test_signatures_ask_and_docstrings_answer(tmp_path: Path) -> None:
    records = docstring_records(folder=write_sources(tmp_path))
    turns = [[message["content"] for message in row["messages"]] for row in records.rows]
    assert turns == [
        ["# latin\ndef name():", "Größe."],
        ["# pkg\ndef first(x, /):", "First."],
        ["# pkg.shapes\nclass Shape(Base):", "A shape."],
        [
            "# pkg.shapes\nasync def Shape.area(self, *, unit: str='m') -> float:",
            "Return the area.\n\nIn the unit asked for.",
        ],
        ["# pkg.shapes\ndef escape():", "An \\d old escape."],
    ]
    assert [message["role"] for message in records.rows[0]["messages"]] == ["user", "assistant"]
    assert records.format == "messages"


def test_the_standard_library_gives_the_same_records_each_time_without_being_imported() -> None:
    before = set(sys.modules)
    records = docstring_records(limit=500)
    assert len(records) == 500
    assert records.rows == docstring_records(limit=500).rows
    assert set(sys.modules) == before


def test_answers_are_bounded_by_whole_paragraphs() -> None:
    assert _paragraphs("one\n\ntwo\n\nthree", 8) == "one\n\ntwo"
    assert _paragraphs("a first paragraph that is too long", 8) == ""
    assert all(len(row["messages"][1]["content"]) <= 60 for row in docstring_records(limit=50, max_chars=60).rows)


def test_a_folder_without_docstrings_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no documented functions or classes in the Python files of"):
        docstring_records(folder=tmp_path)


def test_a_trained_tokenizer_is_lossless_and_has_its_special_tokens() -> None:
    tokenizer = train_tokenizer(["hello world, hello again"] * 3, vocab_size=280)
    assert len(tokenizer) <= 280
    for text in ("hello world", " ünïcode\n\t🙂 ", "\x00"):
        ids = tokenizer(text)["input_ids"]
        assert ids[0] == tokenizer.bos_token_id
        assert tokenizer.decode(ids[1:]) == text
    special = [tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token, "<|user|>", "<|assistant|>"]
    assert all(tokenizer.tokenize(token) == [token] for token in special)


def test_a_trained_tokenizer_survives_saving(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(["hello world"], vocab_size=280)
    tokenizer.save_pretrained(tmp_path)
    again = type(tokenizer).from_pretrained(tmp_path)
    chat = [{"role": "user", "content": "hello"}]
    prompt = again.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert prompt == "<|bos|><|user|>hello<|end|><|assistant|>"
    assert again("hello world")["input_ids"] == tokenizer("hello world")["input_ids"]


def test_a_vocabulary_smaller_than_the_bytes_is_refused() -> None:
    with pytest.raises(ValueError, match=r"vocab_size must be ≥ 263.*got 100"):
        train_tokenizer(["x"], vocab_size=100)


def test_records_to_tokens_end_to_end() -> None:
    records = docstring_records(limit=64)
    tokenizer = train_tokenizer(
        (message["content"] for row in records.rows for message in row["messages"]), vocab_size=512
    )
    dataset = tokenize(records, tokenizer, 256)
    ids, trained = dataset.document(0)
    question, answer = (message["content"] for message in records.rows[0]["messages"])
    assert tokenizer.decode(ids) == f"<|bos|><|user|>{question}<|end|><|assistant|>{answer}<|end|>"
    assert tokenizer.decode(ids[trained]) == f"{answer}<|end|>"
