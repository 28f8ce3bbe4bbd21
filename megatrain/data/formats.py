"""What a record is: raw text, an instruction (alpaca) or a chat (messages, sharegpt)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

Format = Literal["text", "alpaca", "messages", "sharegpt"]
Row = Mapping[str, Any]
Message = dict[str, Any]

COLUMNS: dict[Format, tuple[str, ...]] = {
    "text": ("text",),
    "alpaca": ("instruction", "output"),
    "messages": ("messages",),
    "sharegpt": ("conversations",),
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
    """Return the one format whose columns are all there; raise ValueError where none or several are."""
    found = sorted(columns)
    matches = [name for name, needed in COLUMNS.items() if set(needed) <= set(found)]
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise ValueError(f"ambiguous records: the columns {found} fit the formats {matches}; choose one with format=…")
    raise ValueError(f"unknown records: the columns are {found}; accepted are {_accepted()}")


def to_text(row: Row) -> str:
    """Return the text of a raw-text record."""
    return _string(row, "text")


def to_messages(row: Row, format: Format) -> list[Message]:
    """Return an instruction or chat record as messages with `role` and `content`."""
    if format == "alpaca":
        return _alpaca_messages(row)
    (column,) = COLUMNS[format]
    turns = row.get(column)
    if not isinstance(turns, list) or not turns:
        raise RecordError(f"{column!r} must be a list of at least one message; got {_short(turns)}")
    return [_message(turn) for turn in turns]


def _alpaca_messages(row: Row) -> list[Message]:
    question = _string(row, "instruction")
    if row.get("input"):
        question += "\n\n" + _string(row, "input")
    return [{"role": "user", "content": question}, {"role": "assistant", "content": _string(row, "output")}]


def _message(turn: Any) -> Message:
    """Return one turn with standard names; what else it carries (tool calls, reasoning) goes to the template."""
    if not isinstance(turn, Mapping):
        raise RecordError(f"a message must be an object; got {_short(turn)}")
    # A column of many records has the keys of all of them, with None where a record had no such key.
    given = {key: value for key, value in turn.items() if value is not None}
    role_key, content_key = ("from", "value") if "from" in given else ("role", "content")
    role = given.pop(role_key, None)
    if not isinstance(role, str) or role not in ROLES:
        raise RecordError(f"{role_key!r} of a message must be one of {tuple(ROLES)}; got {_short(role)}")
    # An assistant that only calls a tool says nothing.
    content = given.pop(content_key, "" if given.get("tool_calls") else None)
    if not isinstance(content, str):
        raise RecordError(f"{content_key!r} of a message must be a string; got {_short(content)}")
    return {"role": ROLES[role], "content": content, **given}


def _string(row: Row, column: str) -> str:
    value = row.get(column)
    if not isinstance(value, str):
        raise RecordError(f"{column!r} must be a string; got {_short(value)}")
    return value


def _short(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else shown[:79] + "…"
