"""Broken, changing and disappearing files: each is refused by name or counted, and never changes what is trained."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import datasets
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrain.data import Batches, Records, load_records, tokenize, train_tokenizer
from megatrain.data.files import FileRows, parse_text

GOOD = b'{"text": "hello"}\n'
TOKENIZER = train_tokenizer(["hello world"], vocab_size=300)


def written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def texts(records: Records) -> list[Any]:
    return [row.get("text") for row in records.rows]


def short(value: object) -> str:
    """Names of tests are the same in every process that collects them, and fit a line."""
    return ascii(value)[:30]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b'{"text": "a\x00b"}', r"not JSON \(Invalid control character"),
        (b"\x00\x00", r"not JSON \(Expecting value"),
        (b'{"text": "\xff"}', r"not UTF-8 \(byte 0xff at 10\)"),
        (b'{"text": "\\ud800"}', r"not JSON \(half of a surrogate pair\)"),
        (b'{"text": ' + b"[" * 100_000, r"not JSON \(nested too deeply\)"),
        (b'{"n": ' + b"9" * 5000 + b"}", r"not JSON \(Exceeds the limit"),
        (b'\xef\xbb\xbf{"text": "x"}', r"not JSON \(Unexpected UTF-8 BOM"),
        (b'{"text": "a"} {"text": "b"}', r"not JSON \(Extra data"),
        (gzip.compress(GOOD * 100, mtime=0)[:40], "compressed with gzip; unpack it first"),
    ],
    ids=short,
)
def test_a_bad_line_is_refused_by_place_or_counted(line: bytes, said: str, tmp_path: Path) -> None:
    path = written(tmp_path / "data.jsonl", GOOD + line.replace(b"\n", b"") + b"\n" + GOOD)
    with pytest.raises(ValueError, match=r"data\.jsonl, line 2: " + said + r'.*; on_bad_record="skip"'):
        load_records(path)
    records = load_records(path, on_bad_record="skip")
    assert (texts(records), records.skipped) == (["hello", "hello"], 1)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"text \xff\xfe", r"not UTF-8 \(byte 0xff at 5\)"),
        ("text".encode("utf-16"), r"not UTF-8 \(byte 0xff at 0\)"),
        (gzip.compress(b"text" * 1000, mtime=0)[:30], "compressed with gzip; unpack it first"),
    ],
    ids=short,
)
def test_a_bad_text_file_is_refused_by_name_or_counted(data: bytes, said: str, tmp_path: Path) -> None:
    paths = [written(tmp_path / "a.txt", b"good"), written(tmp_path / "b.txt", data)]
    with pytest.raises(ValueError, match=r"b\.txt: " + said):
        load_records(paths)
    records = load_records(paths, on_bad_record="skip")
    assert (texts(records), records.skipped) == (["good"], 1)


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    bom = b"\xef\xbb\xbf"
    assert texts(load_records(written(tmp_path / "a.jsonl", bom + GOOD + GOOD))) == ["hello", "hello"]
    assert texts(load_records(written(tmp_path / "a.json", bom + b'[{"text": "a"}]'))) == ["a"]
    assert texts(load_records(written(tmp_path / "a.txt", bom + b"one\r\ntwo\rthree\n"))) == ["one\ntwo\nthree\n"]


def test_nothing_is_taken_for_what_it_looks_like(tmp_path: Path) -> None:
    """A reader that infers types makes dates of these, and strings of the numbers."""
    dates = ["2020-01-01", "2020-01-01T00:00:00Z", "null", "1"]
    path = written(tmp_path / "a.jsonl", b"".join(json.dumps({"text": date}).encode() + b"\n" for date in dates))
    assert texts(load_records(path)) == dates
    mixed = written(tmp_path / "b.jsonl", GOOD + b'{"text": 3}\n{"other": 1}\n')
    assert texts(load_records(mixed)) == ["hello", 3, None]
    counts = tokenize(load_records(mixed), TOKENIZER, 16, on_bad_record="skip").counts
    assert (counts.records, counts.skipped) == (1, 2)


def test_a_line_of_100_mb(tmp_path: Path) -> None:
    long = b'{"text": "x", "rest": "' + b"y" * 100_000_000 + b'"}\n'
    records = load_records(written(tmp_path / "a.jsonl", GOOD + long + GOOD))
    assert texts(records) == ["hello", "x", "hello"]
    cut = load_records(written(tmp_path / "b.jsonl", GOOD + long[:-3] + b"\n"), on_bad_record="skip")
    assert (texts(cut), cut.skipped) == (["hello"], 1)


def test_files_without_a_record_say_so(tmp_path: Path) -> None:
    for data in (b"", b"\n \n", b"[]"):
        with pytest.raises(ValueError, match=r"there is no record in .*a\.json; 0 were skipped"):
            load_records(written(tmp_path / "a.json", data))
    with pytest.raises(ValueError, match=r"there is no record in .*a\.json; 2 were skipped as broken"):
        load_records(written(tmp_path / "a.json", b"oops\n3\n"), on_bad_record="skip")


def test_broken_items_of_an_array_are_counted(tmp_path: Path) -> None:
    path = written(tmp_path / "a.json", b'[{"text": "a"}, 3, {"text": "b"}]')
    lines = written(tmp_path / "b.json", GOOD)
    records = load_records([path, lines], on_bad_record="skip")
    assert (texts(records), records.skipped) == (["a", "b", "hello"], 1)


@pytest.mark.parametrize("cut", [10, 500, -4])
def test_a_truncated_parquet_file_is_refused_by_name(cut: int, tmp_path: Path) -> None:
    path = tmp_path / "whole.parquet"
    datasets.Dataset.from_list([{"text": str(number)} for number in range(100)]).to_parquet(path)
    half = written(tmp_path / "half.parquet", path.read_bytes()[:cut])
    with pytest.raises(ValueError, match=r"could not read .*half\.parquet") as error:
        load_records(half, cache_dir=tmp_path / "cache")
    assert "\n" not in str(error.value)


def test_a_slice_that_is_none(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", GOOD * 10)
    assert len(load_records(path, split="train[-30%:]")) == 3
    for split in ("test", "train[a:b]", "train+train", ""):
        with pytest.raises(ValueError, match=r'split must be "train" or a slice of it'):
            load_records(path, split=split)


# ---- while it is read ----


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", GOOD * 3)
    changed = r"a\.jsonl was changed while it was read; load it again when it is complete"
    rows = iter(load_records(path).rows)
    next(rows)
    written(path, GOOD * 4)
    with pytest.raises(ValueError, match=changed):
        next(rows)
    found = load_records(path).rows
    os.replace(written(tmp_path / "new", GOOD * 4), path)
    with pytest.raises(ValueError, match=changed):
        list(found)


def test_a_file_that_disappears_while_it_is_read(tmp_path: Path) -> None:
    paths = [written(tmp_path / f"{name}.jsonl", GOOD * 2) for name in "ab"]
    rows = iter(load_records(paths).rows)
    next(rows)
    for path in paths:
        path.unlink()
    assert next(rows) == {"text": "hello"}  # it is open, and still what it was
    with pytest.raises(ValueError, match=r"b\.jsonl cannot be read: No such file or directory"):
        next(rows)


# ---- on resume ----


def batches(path: Path, **options: Any) -> Batches:
    return Batches(tokenize(load_records(path), TOKENIZER, 16, **options), 2)


def test_the_same_amount_of_other_data_is_refused_on_resume(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", b'{"text": "xyz"}\n{"text": "world"}\n' * 4)
    state = json.loads(json.dumps(batches(path).state_dict()))
    batches(path).load_state_dict(state)
    path.write_bytes(path.read_bytes().replace(b"xyz", b"zyx"))
    with pytest.raises(
        ValueError, match=r"content was '\w+' and is '\w+' in .*a\.jsonl; load the same data .*or begin a new"
    ):
        batches(path).load_state_dict(state)


def test_a_state_from_before_there_was_a_checksum_still_loads(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", GOOD)
    state = batches(path).state_dict()
    del state["content"]
    batches(path).load_state_dict(state)


# ---- rows ----


@given(st.lists(st.one_of(st.none(), st.text(max_size=20)), min_size=1, max_size=20), st.data())
def test_rows_are_those_of_the_file(
    tmp_path_factory: pytest.TempPathFactory, rows: list[str | None], data: Any
) -> None:
    """None stands for a blank line; every way to ask for rows gives the same ones."""
    folder = tmp_path_factory.mktemp("rows")
    expected = [{"text": row} for row in rows if row is not None]
    lines = ["" if row is None else json.dumps({"text": row}, ensure_ascii=data.draw(st.booleans())) for row in rows]
    ends = data.draw(st.sampled_from(["\n", "\r\n"]))
    path = written(folder / "a.jsonl", ends.join(lines).encode())
    if not expected:
        with pytest.raises(ValueError, match="there is no record"):
            load_records(path)
        return
    found = load_records(path).rows
    assert isinstance(found, FileRows)
    assert list(found) == expected
    assert [found[index] for index in range(-len(expected), len(expected))] == expected * 2
    part = data.draw(st.slices(len(expected)))
    assert list(found[part]) == expected[part]
    with pytest.raises(IndexError):
        found[len(expected)]


@given(st.text())
def test_text_is_read_as_python_reads_it(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = written(tmp_path_factory.mktemp("text") / "a.txt", text.encode())
    assert parse_text(path.read_bytes()) == {"text": path.read_text(encoding="utf-8-sig")}
