"""Text tables: the first column to the left, figures to the right."""

from __future__ import annotations

from collections.abc import Sequence

Cell = str | float | int | None


def text(cell: Cell) -> str:
    """A cell as it is printed: floats with three figures, "–" for what was not measured."""
    if cell is None:
        return "–"
    if isinstance(cell, str):
        return cell
    if isinstance(cell, int) or abs(cell) >= 1000:
        return f"{cell:,.0f}"
    return f"{cell:.3g}" if abs(cell) < 100 else f"{cell:.0f}"


def table(header: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    """The rows under their header, columns as wide as their widest cell."""
    cells = [list(header), *([text(cell) for cell in row] for row in rows)]
    assert all(len(row) == len(header) for row in cells), "every row needs one cell for each column"
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    return "\n".join(_line(row, widths) for row in cells)


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    first, *rest = (
        cell.ljust(width) if not i else cell.rjust(width)
        for i, (cell, width) in enumerate(zip(row, widths, strict=True))
    )
    return "  ".join([first, *rest]).rstrip()
