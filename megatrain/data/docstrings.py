"""A data set that every Python installation carries: the standard library's signatures and docstrings."""

from __future__ import annotations

import ast
import sysconfig
import tokenize
import warnings
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from megatrain.data.formats import Row
from megatrain.data.records import Records, records_from_rows

SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def docstring_records(*, limit: int | None = None, max_chars: int = 600, folder: Path | None = None) -> Records:
    """Return chats in which the user gives a signature and the assistant its docstring.

    The sources are parsed, never imported, in the order of their paths; a file that cannot be parsed is left out.

    limit: at most so many records; None = all, several thousand.
    max_chars: whole paragraphs of a docstring are taken up to this length; one whose first is longer is left out.
    folder: where the sources are; None = this Python's standard library.
    """
    root = folder or Path(sysconfig.get_path("stdlib"))
    rows = list(islice(_rows(root, max_chars), limit))
    if not rows:
        raise ValueError(f"no documented functions or classes in the Python files of {root}; pass another folder=…")
    return records_from_rows(rows, format="messages")


def _rows(root: Path, max_chars: int) -> Iterator[Row]:
    for file in _sources(root):
        module = ".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
        for owner, node in _definitions(_parse(file), ""):
            said = _paragraphs(ast.get_docstring(node) or "", max_chars)
            if said:
                asked = f"# {module}\n{_signature(owner, node)}"
                yield {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]}


def _sources(root: Path) -> list[Path]:
    files = (file.relative_to(root) for file in root.rglob("*.py"))
    return [root / file for file in sorted(files) if SKIPPED_FOLDERS.isdisjoint(file.parts)]


def _parse(file: Path) -> ast.AST:
    """Return a file's syntax tree, or an empty one where it is not Python of this version."""
    try:
        with tokenize.open(file) as source, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in old sources
            return ast.parse(source.read())
    except (SyntaxError, ValueError, RecursionError, OSError):
        return ast.Module(body=[], type_ignores=[])


def _definitions(tree: ast.AST, owner: str) -> Iterator[tuple[str, Definition]]:
    """Yield functions, classes and methods in source order, each with the class that it belongs to."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, Definition):
            yield owner, node
        if isinstance(node, ast.ClassDef):
            yield from _definitions(node, f"{owner}{node.name}.")


def _signature(owner: str, node: Definition) -> str:
    if isinstance(node, ast.ClassDef):
        bases = ", ".join(map(ast.unparse, node.bases))
        return f"class {owner}{node.name}({bases}):" if bases else f"class {owner}{node.name}:"
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    word = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    return f"{word} {owner}{node.name}({ast.unparse(node.args)}){returns}:"


def _paragraphs(text: str, max_chars: int) -> str:
    """Return the first whole paragraphs of `text` that fit into `max_chars`."""
    said = ""
    for paragraph in text.split("\n\n"):
        longer = f"{said}\n\n{paragraph}" if said else paragraph
        if len(longer) > max_chars:
            break
        said = longer
    return said.strip()
