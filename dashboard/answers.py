"""What was asked for and what became of it: written by whoever handles a click, read by whoever draws."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from html import escape

from megatrain.steering import Wish

KEPT = 5
NOTHING_YET = "<li><small>What you ask for, and what became of it, is said here.</small></li>"


@dataclass(frozen=True)
class Remark:
    """Something said once; `wrong`: an error or a refusal."""

    text: str
    wrong: bool = False


class Answers:
    """The last few wishes and remarks, newest first. From any thread."""

    def __init__(self) -> None:
        self._entries: deque[Wish | Remark] = deque(maxlen=KEPT)

    def wish(self, wish: Wish) -> None:
        self._entries.appendleft(wish)

    def say(self, text: str, *, wrong: bool = False) -> None:
        self._entries.appendleft(Remark(text, wrong))

    def html(self) -> str:
        """A list for a status region: what is new is read out by screen readers."""
        items = "".join(f"<li>{_entry(entry)}</li>" for entry in self._entries.copy())
        return f'<div class="mt answers"><ul role="status" aria-live="polite">{items or NOTHING_YET}</ul></div>'


def _entry(entry: Wish | Remark) -> str:
    if isinstance(entry, Remark):
        return f'<b class="wrong">{escape(entry.text)}</b>' if entry.wrong else escape(entry.text)
    mark = "…" if entry.pending else "✗" if entry.overtaken or entry.failed else "✓"
    return f"{mark} {escape(str(entry))}"
