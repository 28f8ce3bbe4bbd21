"""Dataclasses as plain values that JSON can carry, and back: for records, reports and messages. No torch.

What JSON has no word for: NaN and infinities become null, and null where a number is due becomes NaN. Fields that a
newer version added are passed over; a field that is missing takes its default.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")
Reader = Callable[[Any], Any]


def to_plain(value: object) -> Any:
    """Return dicts, lists, strings, numbers, booleans and None; what is none of these and no dataclass as its str."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Enum):
        return to_plain(value.value)
    if value is None or isinstance(value, int | str):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(part) for part in value]
    return str(value)


def from_plain(kind: type[T], value: object) -> T:
    """Return the `kind` that `to_plain` made `value` of; ValueError naming the field that does not fit.

    kind: a dataclass, whose fields may be dataclasses, lists, dicts by string, enums, literals and `… | None`.
    """
    described: Any = kind
    result: T = _reader(described)(value)
    return result


@cache
def _reader(kind: Any) -> Reader:
    origin, parts = get_origin(kind), get_args(kind)
    if kind in (Any, object):
        return lambda value: value
    if origin in (Union, UnionType):
        return _optional(parts)
    if origin is Literal:
        return lambda value: value if value in parts else _misfit(f"one of {parts}", value)
    if origin is list:
        return _list_of(_reader(parts[0]))
    if origin is dict:
        return _dict_of(_reader(parts[1]))
    if is_dataclass(kind):
        return _dataclass(kind)
    return _enum(kind) if issubclass(kind, Enum) else _scalar(kind)


def _scalar(kind: type) -> Reader:
    def read(value: Any) -> Any:
        if kind is float:
            if value is None:
                return math.nan
            return float(value) if type(value) in (int, float) else _misfit("a number", value)
        return value if type(value) is kind else _misfit(f"of type {kind.__name__}", value)

    return read


def _enum(kind: type[Enum]) -> Reader:
    choices = {member.value: member for member in kind}
    words = ", ".join(map(str, choices))
    return lambda value: choices[value] if value in choices else _misfit(f"one of {words}", value)


def _optional(parts: tuple[Any, ...]) -> Reader:
    (part,) = (part for part in parts if part is not NoneType)
    read = _reader(part)
    return lambda value: None if value is None else read(value)


def _list_of(read: Reader) -> Reader:
    return lambda value: [read(part) for part in value] if isinstance(value, list) else _misfit("a list", value)


def _dict_of(read: Reader) -> Reader:
    def read_all(value: Any) -> Any:
        if not isinstance(value, dict):
            return _misfit("an object", value)
        return {key: read(part) for key, part in value.items()}

    return read_all


def _dataclass(kind: Any) -> Reader:
    hints = get_type_hints(kind)
    readers = {field.name: _reader(hints[field.name]) for field in fields(kind)}
    required = {field.name for field in fields(kind) if _is_required(field)}

    def read(value: Any) -> Any:
        if not isinstance(value, dict):
            return _misfit(f"a {kind.__name__}", value)
        if missing := required - value.keys():
            raise ValueError(f"{kind.__name__} lacks {', '.join(sorted(missing))}; got {value!r}")
        return kind(**{name: _field(kind, name, readers[name], value[name]) for name in readers if name in value})

    return read


def _is_required(field: Field[Any]) -> bool:
    return field.default is MISSING and field.default_factory is MISSING


def _field(kind: type, name: str, read: Reader, value: object) -> Any:
    try:
        return read(value)
    except (ValueError, TypeError) as error:  # TypeError: an unhashable value where a word is due
        raise ValueError(f"{kind.__name__}.{name}: {error}") from None


def _misfit(wanted: str, value: object) -> Any:
    raise ValueError(f"must be {wanted}; got {value!r}")
