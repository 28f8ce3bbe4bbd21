"""Sources and formats: what is read, what is refused, and that nothing leaves the machine."""

import json
import socket
from pathlib import Path
from typing import Any

import datasets
import pytest

from megatrain.data import RecordError, Records, is_of_hub, load_records, records_from_rows
from megatrain.data.formats import detect_format, to_messages

ALPACA = {"instruction": "Add.", "input": "2 + 2", "output": "4"}
SHAREGPT = {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}
MESSAGES = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def write_jsonl(path: Path, *rows: dict[str, Any] | str) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def load(source: Any, tmp_path: Path, **options: Any) -> Records:
    return load_records(source, cache_dir=tmp_path / "cache", **options)


@pytest.mark.parametrize(
    ("row", "format"),
    [({"text": "a"}, "text"), (ALPACA, "alpaca"), (SHAREGPT, "sharegpt"), (MESSAGES, "messages")],
)
@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
def test_format_is_detected_from_the_columns(row: dict[str, Any], format: str, suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"data{suffix}"
    match suffix:
        case ".jsonl":
            write_jsonl(path, row, row)
        case ".json":
            path.write_text(json.dumps([row, row], indent=1))
        case ".parquet":
            datasets.Dataset.from_list([row, row]).to_parquet(path)
    records = load(path, tmp_path)
    assert (records.format, len(records), records.skipped) == (format, 2, 0)
    assert list(records.rows) == [row, row]


def test_a_text_file_is_one_record(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("second\n\nfile\n")
    (tmp_path / "a.txt").write_text("first\n")
    records = load([tmp_path / "a.txt", tmp_path / "b.txt"], tmp_path)
    assert records.format == "text"
    assert [row["text"].strip() for row in records.rows] == ["first", "second\n\nfile"]


def test_a_folder_is_its_data_files_in_order(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    write_jsonl(folder / "2.jsonl", {"text": "b"})
    write_jsonl(folder / "1.jsonl", {"text": "a"})
    (folder / "notes.rst").write_text("no data")
    assert [row["text"] for row in load(folder, tmp_path).rows] == ["a", "b"]


def test_nothing_is_drawn_where_there_is_no_terminal(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    load(write_jsonl(tmp_path / "data.jsonl", {"text": "a"}), tmp_path)
    assert capfd.readouterr() == ("", "")
    assert not datasets.are_progress_bars_disabled()


def test_split_takes_slices(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "data.jsonl", *({"text": str(i)} for i in range(4)))
    assert [row["text"] for row in load(path, tmp_path, split="train[1:3]").rows] == ["1", "2"]


@pytest.mark.parametrize("broken", ['{"text": "b"', '["text"]', "3", '{"text": "\udcff"}'])
def test_a_broken_line_is_refused_by_file_and_line(broken: str, tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(f'{{"text": "a"}}\n\n{broken}\n'.encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError, match=r"data\.jsonl, line 3: not .*(JSON|UTF-8).*on_bad_record=\"skip\""):
        load(path, tmp_path)


def test_broken_lines_are_skipped_and_counted(tmp_path: Path) -> None:
    first = write_jsonl(tmp_path / "1.jsonl", {"text": "a"}, "oops", {"text": "b"}, "{")
    second = write_jsonl(tmp_path / "2.jsonl", {"text": "c"})
    records = load([first, second], tmp_path, on_bad_record="skip")
    assert [row["text"] for row in records.rows] == ["a", "b", "c"]
    assert records.skipped == 2


def test_a_broken_array_is_refused_by_file(tmp_path: Path) -> None:
    path = tmp_path / "data.json"
    path.write_text('[{"text": "a"},\n {"text": ]')
    with pytest.raises(ValueError, match=r"data\.json: not a JSON array: .*line 2"):
        load(path, tmp_path)
    path.write_text('[{"text": "a"}, 3]')
    with pytest.raises(ValueError, match=r"data\.json, item 2 of the array: not a JSON object"):
        load(path, tmp_path)


def test_unreadable_parquet_is_named(tmp_path: Path) -> None:
    (tmp_path / "data.parquet").write_bytes(b"not parquet")
    with pytest.raises(ValueError, match=r"could not read \['.*data\.parquet'\]"):
        load(tmp_path / "data.parquet", tmp_path)


def test_what_is_not_there_is_not_looked_for_on_the_hub(tmp_path: Path) -> None:
    for source in (tmp_path / "gone", str(tmp_path / "gone"), "gone.jsonl"):
        with pytest.raises(ValueError, match=r"no such file or folder: .*gone"):
            load(source, tmp_path)


def test_a_hub_name_goes_to_datasets(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def load_dataset(path: str, **arguments: Any) -> datasets.Dataset:
        asked.append((path, arguments))
        return datasets.Dataset.from_list([MESSAGES])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert load_records("someone/chats", split="test", config="en").format == "messages"
    assert asked == [("someone/chats", {"name": "en", "split": "test", "cache_dir": None})]


def test_files_of_one_source_are_of_one_kind(tmp_path: Path) -> None:
    paths = [tmp_path / "a.csv", tmp_path / "b.txt"]
    for path in paths:
        path.write_text("x")
    with pytest.raises(ValueError, match=r"one kind with a suffix of .*'\.jsonl'.*got \['\.csv', '\.txt'\]"):
        load(paths, tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"one kind with a suffix of .*; got \[\]"):
        load(tmp_path / "empty", tmp_path)


def test_on_bad_record_is_checked(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r'on_bad_record must be "error" or "skip"; got \'ignore\''):
        load(tmp_path, tmp_path, on_bad_record="ignore")


def test_an_unknown_format_lists_what_was_found_and_what_is_accepted() -> None:
    with pytest.raises(ValueError, match=r"the columns are \['question'\]; accepted are text: text; alpaca: instr"):
        detect_format(["question"])


def test_an_ambiguous_format_is_refused_until_chosen() -> None:
    rows = [{**ALPACA, "text": "Add. 4"}]
    with pytest.raises(ValueError, match=r"\['input', 'instruction', .*fit the formats \['text', 'alpaca'\]"):
        records_from_rows(rows)
    assert records_from_rows(rows, format="alpaca").format == "alpaca"
    with pytest.raises(ValueError, match=r"format 'messages' needs the columns \['messages'\]"):
        records_from_rows(rows, format="messages")


def test_no_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one row"):
        records_from_rows([])


def test_alpaca_becomes_a_question_and_an_answer() -> None:
    assert to_messages(ALPACA, "alpaca") == [
        {"role": "user", "content": "Add.\n\n2 + 2"},
        {"role": "assistant", "content": "4"},
    ]
    for nothing in ("", None):
        assert to_messages({**ALPACA, "input": nothing}, "alpaca")[0]["content"] == "Add."


def test_roles_are_mapped_and_other_fields_kept() -> None:
    calls = [{"function": {"name": "f"}}]
    turns = [
        {"from": "system", "value": "S", "role": None},
        {"from": "human", "value": "Q"},
        {"role": "assistant", "content": None, "tool_calls": calls, "from": None},
        {"from": "tool", "value": "T"},
        {"from": "gpt", "value": "A"},
    ]
    assert to_messages({"conversations": turns}, "sharegpt") == [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "Q"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "content": "T"},
        {"role": "assistant", "content": "A"},
    ]


@pytest.mark.parametrize(
    ("turns", "rule"),
    [
        (None, "'messages' must be a list of at least one message; got None"),
        ([], "at least one message"),
        (["Hi"], "a message must be an object; got 'Hi'"),
        ([{"role": "narrator", "content": "x"}], "'role' of a message must be one of .*'gpt'.*got 'narrator'"),
        ([{"content": "x"}], "'role' of a message must be one of"),
        ([{"role": "user"}], "'content' of a message must be a string; got None"),
        ([{"role": "user", "content": [{"type": "image"}]}], "'content' of a message must be a string"),
    ],
)
def test_a_malformed_chat_is_a_record_error(turns: Any, rule: str) -> None:
    with pytest.raises(RecordError, match=rule):
        to_messages({"messages": turns}, "messages")


def test_alpaca_without_an_answer_is_a_record_error() -> None:
    with pytest.raises(RecordError, match="'output' must be a string; got None"):
        to_messages({**ALPACA, "output": None}, "alpaca")


def test_what_is_on_the_disk_or_named_like_a_file_is_not_of_the_hub(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").touch()
    assert not is_of_hub(tmp_path)
    assert not is_of_hub([tmp_path / "data.jsonl"])
    assert is_of_hub("someone/something")
    with pytest.raises(ValueError, match=r"no such file or folder: data.jsonl"):
        is_of_hub("data.jsonl")
