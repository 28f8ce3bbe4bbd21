"""Files, hub data sets or rows → `Records`: rows of one known format."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from huggingface_hub import is_offline_mode

from megatrain.data.files import (
    BOM,
    UnreadableError,
    json_lines,
    opened,
    parse_json,
    parse_object,
    parse_text,
    rows_of,
    whole_files,
)
from megatrain.data.formats import Format, Row, check_format, detect_format

OnBadRecord = Literal["error", "skip"]
Source = str | Path | Sequence[str | Path]

BUILDERS = {
    ".jsonl": "json",
    ".ndjson": "json",
    ".json": "json",
    ".parquet": "parquet",
    ".txt": "text",
    ".md": "text",
}


@dataclass(frozen=True)
class Records:
    """Rows of one format, in a fixed order.

    rows: a `datasets.Dataset` (memory-mapped), `FileRows` (read when asked for) or a list of mappings.
    skipped: broken lines and files passed over while reading. origin: where they came from, for people.
    """

    rows: Sequence[Row]
    format: Format
    skipped: int = 0
    origin: str = ""

    def __len__(self) -> int:
        return len(self.rows)


def records_from_rows(rows: Sequence[Row], *, format: Format | None = None) -> Records:
    """Return rows that are already in memory as `Records`; the format is detected from the first row's keys."""
    if not rows:
        raise ValueError("there must be at least one row; got none")
    return _with_format(rows, list(rows[0]), format)


def load_records(
    source: Source,
    *,
    split: str = "train",
    config: str | None = None,
    format: Format | None = None,
    on_bad_record: OnBadRecord = "error",
    cache_dir: Path | None = None,
) -> Records:
    """Read JSONL, JSON, Parquet or text files, a folder of one of these, or a data set of the Hugging Face hub.

    source: a path, several paths, or a hub name. What exists on disk or has the suffix of a data file is
        read from disk, without any network; a text file is one record.
    split: as `datasets` spells it, slices such as "train[:10%]" included. Files are all "train".
    config: the configuration of a hub data set that has several.
    format: needed only where the columns fit more than one.
    on_bad_record: a JSON line that is not an object, and a file that is not UTF-8, is refused by name, or skipped and
        counted.
    cache_dir: where `datasets` keeps its Arrow copy of Parquet and hub data; None = its own choice.
    """
    check_on_bad_record(on_bad_record)
    files = _local_files(source)
    if files is None:
        rows = _read(str(source), name=config, split=split, cache_dir=cache_dir)
        columns, skipped = rows.column_names, 0
    else:
        rows, columns, skipped = _read_files(files, split, on_bad_record, cache_dir)
    return _with_format(rows, columns, format, skipped, _words(source))


def is_of_hub(source: Source) -> bool:
    """Whether `load_records` takes it for a data set of the hub; ValueError for a file that is not there."""
    return _local_files(source) is None


def check_on_bad_record(value: str) -> None:
    """Raise ValueError unless `value` says what to do with a bad record."""
    if value not in ("error", "skip"):
        raise ValueError(f'on_bad_record must be "error" or "skip"; got {value!r}')


def _words(source: Source) -> str:
    return str(source) if isinstance(source, str | Path) else ", ".join(map(str, source))


def _with_format(rows: Any, columns: list[str], format: Format | None, skipped: int = 0, origin: str = "") -> Records:
    if format is None:
        format = detect_format(columns)
    else:
        check_format(columns, format)
    return Records(rows, format, skipped, origin)


def _local_files(source: Source) -> list[Path] | None:
    """Return the files that `source` means, or None if it is a hub name."""
    if not isinstance(source, str | Path):
        return [file for one in source for file in _files_at(Path(one))]
    path = Path(source)
    looks_local = isinstance(source, Path) or path.is_absolute() or path.suffix.lower() in BUILDERS
    return _files_at(path) if looks_local or path.exists() else None


def _files_at(path: Path) -> list[Path]:
    path = path.expanduser()
    if path.is_dir():
        return sorted(file for file in path.rglob("*") if file.suffix.lower() in BUILDERS)
    if not path.is_file():
        raise ValueError(f"no such file or folder: {path}")
    return [path]


def _builder(files: Sequence[Path]) -> str:
    """Return the `datasets` builder that reads all of `files`."""
    suffixes = sorted({file.suffix.lower() for file in files})
    builders = {BUILDERS.get(suffix) for suffix in suffixes}
    if len(builders) != 1 or None in builders:
        raise ValueError(
            f"the files of one source must be of one kind with a suffix of {tuple(BUILDERS)}; got {suffixes}"
        )
    return str(builders.pop())


def _read_files(
    files: Sequence[Path], split: str, on_bad_record: OnBadRecord, cache_dir: Path | None
) -> tuple[Any, list[str], int]:
    """Return the rows of local files, their columns, and how many lines or files were skipped."""
    builder = _builder(files)
    if builder == "parquet":
        rows = _read(builder, data_files=list(map(str, files)), split=split, cache_dir=cache_dir)
        return rows, rows.column_names, 0
    bad = _Bad(on_bad_record)
    found, columns = _json_rows(files, bad) if builder == "json" else _text_rows(files, bad)
    if not found:
        raise ValueError(f"there is no record in {', '.join(map(str, files))}; {bad.count:,} were skipped as broken")
    return _part(found, split), sorted(columns), bad.count


class _Bad:
    """What is wrong with lines and files: the first is refused, or all are counted."""

    def __init__(self, on_bad_record: OnBadRecord) -> None:
        self.count = 0
        self._skip = on_bad_record == "skip"

    def __call__(self, problem: str) -> None:
        if not self._skip:
            raise ValueError(f'{problem}; on_bad_record="skip" passes over such records')
        self.count += 1


def _json_rows(files: Sequence[Path], bad: _Bad) -> tuple[Sequence[Row], set[str]]:
    """Objects, one a line; where a file is an array, it and with it all others are held in memory."""
    columns: set[str] = set()
    find = json_lines(bad, columns)
    if not any(map(_is_array, files)):
        return rows_of(files, find, parse_object), columns
    rows: list[Row] = []
    for file in files:
        rows += _array_rows(file, bad) if _is_array(file) else rows_of([file], find, parse_object)
    return rows, columns.union(*rows)


def _text_rows(files: Sequence[Path], bad: _Bad) -> tuple[Sequence[Row], set[str]]:
    return rows_of(files, whole_files(bad), parse_text), {"text"}


def _is_array(file: Path) -> bool:
    with opened(file) as lines:
        return lines.readline().removeprefix(BOM).lstrip().startswith(b"[")


def _array_rows(file: Path, bad: _Bad) -> list[Row]:
    with opened(file) as whole:
        data = whole.read()
    try:
        items = parse_json(data.removeprefix(BOM))
    except UnreadableError as error:
        raise ValueError(f"{file}: not a JSON array: {error}") from None
    if not isinstance(items, list):
        raise ValueError(f"{file}: a JSON array was expected")
    for number, item in enumerate(items, start=1):
        if not isinstance(item, dict):
            bad(f"{file}, item {number} of the array: not a JSON object")
    return [item for item in items if isinstance(item, dict)]


def _part(rows: Sequence[Row], split: str) -> Sequence[Row]:
    """The slice that `split` means, as `datasets` spells it."""
    if split == "train":
        return rows
    import datasets  # with pandas and Arrow, half a second that runs on other data need not spend

    try:
        (part,) = datasets.ReadInstruction.from_spec(split).to_absolute({"train": len(rows)})
    except (ValueError, AssertionError) as error:
        raise ValueError(
            f'split must be "train" or a slice of it, such as "train[:10%]"; got {split!r}: {error}'
        ) from None
    return rows[part.from_ : part.to]


def _read(path: str, **arguments: Any) -> Any:
    """Call `datasets.load_dataset`; whatever it raises becomes a ValueError that says what could not be read."""
    import datasets

    files = arguments.get("data_files")
    cache_dir = arguments.pop("cache_dir")
    try:
        with _quiet_unless_terminal(datasets):
            return datasets.load_dataset(path, cache_dir=None if cache_dir is None else str(cache_dir), **arguments)
    except Exception as error:
        reason = " ".join(str(error.__cause__ or error).split())
        raise ValueError(f"could not read {files or path!r}: {_offline(files)}{reason}") from error


def _offline(files: object) -> str:
    return "HF_HUB_OFFLINE forbids asking the hub: " if files is None and is_offline_mode() else ""


@contextmanager
def _quiet_unless_terminal(datasets: ModuleType) -> Iterator[None]:
    """Keep `datasets` from drawing progress bars into a log file."""
    quiet = not sys.stderr.isatty() and not datasets.are_progress_bars_disabled()
    if quiet:
        datasets.disable_progress_bars()
    try:
        yield
    finally:
        if quiet:
            datasets.enable_progress_bars()
