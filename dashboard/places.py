"""Where the plots of the figure stand, in pixels from its top, and what is written above them.

Heights are fixed, widths are shares: the page decides how wide the figure is. Legends are text above the plots, one
line each and short enough for a page of 1,000 pixels; plotly's own would wrap there and grow over the titles.
"""

from __future__ import annotations

from dataclasses import dataclass

from dashboard.colours import (
    BLUE,
    GREEN,
    GREY,
    OP_COLOURS,
    ORANGE,
    PURPLE,
    SKY,
    STATE_COLOURS,
    VERMILLION,
    WAIT_COLOURS,
    YELLOW,
)
from dashboard.words import state_word

TIMELINE, BUFFERS, LAYERS, HIDDEN, WAITED, LINK, DEVICE, HOST, NORM, LOSS, TOKENS, FLOPS = range(1, 13)  # axis numbers

HEIGHT, TOP, BOTTOM, LEFT, RIGHT = 1306, 84, 34, 104, 96  # the figure and its margins
LEFTS, WIDTH = (0.0, 0.355, 0.71), 0.29  # of narrow plots, as shares

Legend = tuple[tuple[str, str], ...]  # words and their colours


@dataclass(frozen=True)
class Place:
    """One plot: its title, the lines of its legend, its edges (px from the top of the plots; shares of the width)."""

    title: str
    top: int
    height: int
    left: float = 0.0
    width: float = 1.0
    legend: tuple[Legend, ...] = ()
    glyph: str = "■"

    @property
    def x(self) -> list[float]:
        return [self.left, self.left + self.width]

    @property
    def y(self) -> list[float]:
        inner = HEIGHT - TOP - BOTTOM
        return [1 - (self.top + self.height) / inner, 1 - self.top / inner]


def _narrow(row: int, column: int, title: str, *legend: tuple[str, str]) -> Place:
    return Place(title, 694 + row * 186, 122, LEFTS[column], WIDTH, (legend,) if legend else (), "●")


WAITING = tuple((f"wait: {cause}", colour) for cause, colour in WAIT_COLOURS.items())
STATES = tuple((state_word(state), colour) for state, colour in STATE_COLOURS.items())

PLACES = {
    TIMELINE: Place(
        "What each lane does (ms; numbers are layers)", 0, 230, legend=(tuple(OP_COLOURS.items()), WAITING)
    ),
    BUFFERS: Place("Who holds the device buffers (ms; numbers are layers)", 294, 170, legend=(STATES,)),
    LAYERS: Place("Layers in the last step shown (faint is the least of a row, strong the most)", 514, 112),
    HIDDEN: _narrow(
        0, 0, "Hidden under compute (%)", ("weights in", SKY), ("gradients out", PURPLE), ("optimizer", GREEN)
    ),
    WAITED: _narrow(
        *(0, 1, "Compute waited (% of step)", ("weights", SKY), ("grads", PURPLE), ("inputs", VERMILLION)),
        *(("AdamW", GREEN), ("rest", GREY)),
    ),
    LINK: _narrow(0, 2, "Link (GB/s; dashed: measured limit)", ("weights in", SKY), ("gradients out", PURPLE)),
    DEVICE: _narrow(
        *(1, 0, "Device memory (GB; dashed: limits)", ("arena", BLUE), ("process", ORANGE), ("others", GREY)),
        ("reserved", YELLOW),
    ),
    HOST: _narrow(1, 1, "Host memory (GB; dashed: all of it)", ("process", BLUE), ("pinned", GREEN), ("free", GREY)),
    NORM: _narrow(1, 2, "Gradient norm, learning rate", ("norm", BLUE), ("learning rate, right", ORANGE)),
    LOSS: _narrow(2, 0, "Loss", ("loss", BLUE), ("held-out loss", ORANGE)),
    TOKENS: _narrow(2, 1, "Tokens per second"),
    FLOPS: _narrow(2, 2, "Model TFLOP/s and MFU", ("TFLOP/s", BLUE), ("MFU %, right", ORANGE)),
}
WIDE = (TIMELINE, BUFFERS, LAYERS)
NO_GPU_TITLE = "Device arena (GB; dashed: plan)"
NO_MFU_TITLE = "Model TFLOP/s"


def legend_text(entries: Legend, glyph: str) -> str:
    """glyph: stands before each word, in its colour; what waits is hatched."""
    return "  ".join(
        f"<span style='color:{colour}'>{'▨' if word.startswith('wait: ') else glyph}</span> {word}"
        for word, colour in entries
    )
