"""What a record is: raw text, an instruction (alpaca), a chat (messages, sharegpt), or a prompt and what follows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

Format = Literal["text", "alpaca", "messages", "sharegpt", "completion", "preference", "prompt"]
Row = Mapping[str, Any]
Message = dict[str, Any]

COLUMNS: dict[Format, tuple[str, ...]] = {
    "text": ("text",),
    "alpaca": ("instruction", "output"),
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "completion": ("prompt", "completion"),
    "preference": ("chosen", "rejected"),
    "prompt": ("prompt",),
}

ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
}


class RecordError(ValueError):
    """One record cannot be used; `on_bad_record="skip"` passes over it."""


def _accepted() -> str:
    return "; ".join(f"{name}: {', '.join(columns)}" for name, columns in COLUMNS.items())


def check_format(columns: Iterable[str], format: Format) -> None:
    """Raise ValueError unless `format` is known and its columns are there."""
    found = sorted(columns)
    if format not in COLUMNS:
        raise ValueError(f"format must be one of {tuple(COLUMNS)}; got {format!r}")
    missing = [name for name in COLUMNS[format] if name not in found]
    if missing:
        raise ValueError(f"format {format!r} needs the columns {list(COLUMNS[format])}; {missing} missing from {found}")


def detect_format(columns: Iterable[str]) -> Format:
    """Return the one format whose columns are all there; raise ValueError where none or several are.

    A prompt beside the columns of another format belongs to that one.
    """
    found = sorted(columns)
    matches = [name for name, needed in COLUMNS.items() if set(needed) <= set(found)]
    if len(matches) > 1 and "prompt" in matches:
        matches.remove("prompt")
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise ValueError(f"ambiguous records: the columns {found} fit the formats {matches}; choose one with format=…")
    raise ValueError(f"unknown records: the columns are {found}; accepted are {_accepted()}")


def to_text(row: Row) -> str:
    """Return the text of a raw-text record."""
    return string_in(row, "text")


def to_messages(row: Row, format: Format) -> list[Message]:
    """Return an instruction or chat record as messages with `role` and `content`."""
    if format == "alpaca":
        return _alpaca_messages(row)
    (column,) = COLUMNS[format]
    return messages_in(row, column)


def messages_in(row: Row, column: str) -> list[Message]:
    """Return the messages of a column, with standard names."""
    turns = row.get(column)
    if not isinstance(turns, list) or not turns:
        raise RecordError(f"{column!r} must be a list of at least one message; got {short(turns)}")
    return [_message(turn) for turn in turns]


def _alpaca_messages(row: Row) -> list[Message]:
    question = string_in(row, "instruction")
    if row.get("input"):
        question += "\n\n" + string_in(row, "input")
    return [{"role": "user", "content": question}, {"role": "assistant", "content": string_in(row, "output")}]


def _message(turn: Any) -> Message:
    """Return one turn with standard names; what else it carries (tool calls, reasoning) goes to the template."""
    if not isinstance(turn, Mapping):
        raise RecordError(f"a message must be an object; got {short(turn)}")
    # A column of many records has the keys of all of them, with None where a record had no such key.
    given = {key: value for key, value in turn.items() if value is not None}
    role_key, content_key = ("from", "value") if "from" in given else ("role", "content")
    role = given.pop(role_key, None)
    if not isinstance(role, str) or role not in ROLES:
        raise RecordError(f"{role_key!r} of a message must be one of {tuple(ROLES)}; got {short(role)}")
    # An assistant that only calls a tool says nothing.
    content = given.pop(content_key, "" if given.get("tool_calls") else None)
    if not isinstance(content, str):
        raise RecordError(f"{content_key!r} of a message must be a string; got {short(content)}")
    return {"role": ROLES[role], "content": content, **given}


def string_in(row: Row, column: str) -> str:
    """Return the string of a column."""
    value = row.get(column)
    if not isinstance(value, str):
        raise RecordError(f"{column!r} must be a string; got {short(value)}")
    return value


def short(value: object) -> str:
    """Return a value as an error shows it."""
    shown = repr(value)
    return shown if len(shown) <= 80 else shown[:79] + "…"
