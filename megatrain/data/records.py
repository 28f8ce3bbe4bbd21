"""Files, hub data sets or rows → `Records`: rows of one known format, read by the `datasets` library."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import datasets

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

    rows: a `datasets.Dataset` (memory-mapped) or a list of mappings.
    skipped: broken lines passed over while reading.
    """

    rows: Sequence[Row]
    format: Format
    skipped: int = 0

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
    on_bad_record: a JSON line that is not an object is refused by file and line, or skipped and counted.
    cache_dir: where `datasets` keeps its Arrow copy; None = its own choice.
    """
    check_on_bad_record(on_bad_record)
    files = _local_files(source)
    if files is None:
        rows, skipped = _read(str(source), name=config, split=split, cache_dir=cache_dir), 0
    else:
        rows, skipped = _read_files(files, split, on_bad_record, cache_dir)
    return _with_format(rows, rows.column_names, format, skipped)


def check_on_bad_record(value: str) -> None:
    """Raise ValueError unless `value` says what to do with a bad record."""
    if value not in ("error", "skip"):
        raise ValueError(f'on_bad_record must be "error" or "skip"; got {value!r}')


def _with_format(rows: Any, columns: list[str], format: Format | None, skipped: int = 0) -> Records:
    if format is None:
        format = detect_format(columns)
    else:
        check_format(columns, format)
    return Records(rows, format, skipped)


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
) -> tuple[Any, int]:
    """Return the rows of local files and how many lines were skipped."""
    builder = _builder(files)
    options = {"sample_by": "document"} if builder == "text" else {}
    bad_lines = {file: _bad_lines(file, on_bad_record) for file in files} if builder == "json" else {}
    skipped = sum(map(len, bad_lines.values()))
    if not skipped:
        rows = _read(builder, data_files=list(map(str, files)), split=split, cache_dir=cache_dir, **options)
        return rows, 0
    with TemporaryDirectory() as folder:
        good = [_without_lines(file, lines, Path(folder)) for file, lines in bad_lines.items()]
        rows = _read(builder, data_files=good, split=split, cache_dir=folder, keep_in_memory=True)
    return rows, skipped


def _read(path: str, **arguments: Any) -> Any:
    """Call `datasets.load_dataset`; whatever it raises becomes a ValueError that says what could not be read."""
    files = arguments.get("data_files")
    cache_dir = arguments.pop("cache_dir")
    try:
        with _quiet_unless_terminal():
            return datasets.load_dataset(path, cache_dir=None if cache_dir is None else str(cache_dir), **arguments)
    except Exception as error:
        raise ValueError(f"could not read {files or path!r}: {error.__cause__ or error}") from error


@contextmanager
def _quiet_unless_terminal() -> Iterator[None]:
    """Keep `datasets` from drawing progress bars into a log file."""
    quiet = not sys.stderr.isatty() and not datasets.are_progress_bars_disabled()
    if quiet:
        datasets.disable_progress_bars()
    try:
        yield
    finally:
        if quiet:
            datasets.enable_progress_bars()


def _bad_lines(file: Path, on_bad_record: OnBadRecord) -> set[int]:
    """Return the numbers, from 1, of the lines that are not JSON objects; raise for the first one if told to.

    `datasets` names neither the file nor the line, so the lines are looked at before it reads them.
    """
    with file.open("rb") as lines:
        if _is_array(lines.readline()):
            _check_array(file)
            return set()
        lines.seek(0)
        bad = set()
        for number, line in enumerate(lines, start=1):
            problem = _problem(line)
            if problem and on_bad_record == "error":
                raise ValueError(f'{file}, line {number}: {problem}; on_bad_record="skip" passes over such lines')
            if problem:
                bad.add(number)
        return bad


def _is_array(first_line: bytes) -> bool:
    return first_line.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"[")


def _check_array(file: Path) -> None:
    try:
        rows = json.loads(file.read_bytes())
    except ValueError as error:
        raise ValueError(f"{file}: not a JSON array: {error}") from error
    for index, row in enumerate(rows):
        if not isinstance(row, dict):
            raise ValueError(f"{file}, item {index + 1} of the array: not a JSON object")


def _problem(line: bytes) -> str | None:
    """Say what is wrong with a line, or None. Blank lines are no records and no problem."""
    if not line.strip():
        return None
    try:
        row = json.loads(line)
    except ValueError as error:
        return f"not JSON ({error})"
    return None if isinstance(row, dict) else "not a JSON object"


def _without_lines(file: Path, bad: set[int], folder: Path) -> str:
    """Copy `file` into `folder` without its bad lines."""
    copy = folder / f"{len(list(folder.glob('*.jsonl')))}.jsonl"
    with file.open("rb") as lines, copy.open("wb") as good:
        good.writelines(line for number, line in enumerate(lines, start=1) if number not in bad)
    return str(copy)
