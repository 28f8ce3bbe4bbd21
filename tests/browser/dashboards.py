"""A dashboard in a page, as its viewer finds things: by their words and by what the figure shows."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

from playwright.sync_api import Page

WAIT_S = 90  # other tests share the processors
ASK_EVERY_MS = 250
FIGURE = ".js-plotly-plot"
WORK, NAMES, FLAGS = 0, 5, 6  # traces of the figure

TRACE = f"([trace, name]) => Array.from(document.querySelector('{FIGURE}')?.data?.[trace]?.[name] ?? [])"
RANGE = f"() => document.querySelector('{FIGURE}').layout.xaxis.range"
OPACITY = f"() => Array.from(document.querySelector('{FIGURE}').data[{WORK}].marker.opacity ?? [])"
ROWS = f"() => document.querySelector('{FIGURE}').layout.yaxis2.ticktext.map((name) => name.trim())"
OVER = f"""() => {{
  const whole = document.querySelector('{FIGURE}').closest('.jp-OutputArea-output').getBoundingClientRect();
  const parts = document.querySelectorAll('.mt-controls button, .mt-controls input');
  return Math.max(...[...parts].map((part) => part.getBoundingClientRect().right - whole.right));
}}"""


NAMELESS = re.compile(r'- (button|slider|spinbutton|combobox|checkbox|textbox)(?! ")')


class DashboardPage:
    """What can be read and pressed."""

    def __init__(self, page: Page) -> None:
        self.page = page

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait, and ask seldom: the page has to draw on the same processors."""
        end_s = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < end_s, f"{what}: not within {WAIT_S} s; it says {self.answers()}"
            self.page.wait_for_timeout(ASK_EVERY_MS)

    # ---- the figure ----

    def bars(self) -> int:
        return len(self._trace(WORK, "x"))

    def flags(self) -> str:
        """What the flags above the timeline say; those close together share one."""
        return " ".join(self._trace(FLAGS, "hovertext"))

    def names(self) -> list[str]:
        """What begins in the picture: steps, and what is none."""
        return [name.strip() for name in self._trace(NAMES, "text")]

    def steps(self) -> list[int]:
        """Numbers of the steps that begin in the picture."""
        return [int(name.split()[1]) for name in self.names() if name.startswith("step ")]

    def rows(self, kind: str) -> int:
        """Device buffers of a kind in the picture."""
        return sum(name.startswith(kind) for name in self.page.evaluate(ROWS))

    def opacities(self) -> set[float]:
        """Of the bars, where some are faded."""
        return {round(value, 2) for value in self.page.evaluate(OPACITY)}

    def click_bar(self, layer: int) -> None:
        """Click a bar of this layer in the timeline; not the first, which may begin before what is shown."""
        bars = self.page.locator(f"{FIGURE} .cartesianlayer .xy .bars .point", has_text=str(layer))
        bars.nth(bars.count() // 2).click(force=True)

    def time_shown(self) -> list[float]:
        """Milliseconds of the timeline, from and to."""
        shown: list[float] = self.page.evaluate(RANGE)
        return shown

    def zoom(self) -> None:
        """Drag over a part of the timeline."""
        plot = self.page.locator(f"{FIGURE} .nsewdrag[data-subplot=xy]")
        plot.scroll_into_view_if_needed()
        box = plot.bounding_box()
        assert box
        at = [(box["x"] + share * box["width"], box["y"] + box["height"] / 2) for share in (0.3, 0.45, 0.6)]
        self.page.mouse.move(*at[0])
        self.page.mouse.down()
        for point in at[1:]:
            self.page.mouse.move(*point)
        self.page.mouse.up()

    def _trace(self, trace: int, name: str) -> list[Any]:
        values: list[Any] = self.page.evaluate(TRACE, [trace, name])
        return values

    # ---- panels ----

    def fact(self, name: str) -> str:
        """A figure of the headline."""
        facts = self.page.get_by_label("The run now").locator("li")
        return facts.filter(has=self.page.get_by_text(name, exact=True)).locator("b").inner_text()

    def steps_done(self) -> int:
        return int(self.fact("steps done").split()[0].replace(",", ""))

    def answers(self) -> list[str]:
        """Newest first."""
        return self.page.locator(".mt.answers li").all_inner_texts()

    def held(self) -> str:
        """What is shown of the place where the run is held."""
        panel = self.page.locator("section[aria-label^='Held before']")
        return panel.inner_text() if panel.count() else ""

    def said(self) -> str:
        """Prompts and answers, as far as they are to be seen."""
        panel = self.page.locator(".mt.samples")
        return panel.inner_text() if panel.count() and panel.is_visible() else ""

    def fold(self, title: str) -> None:
        """Fold a panel away or back, by keyboard."""
        self.page.locator("summary", has_text=title).focus()
        self.page.keyboard.press("Enter")

    def beyond_edge(self) -> float:
        """By how many pixels the control furthest to the right stands over the edge of the output."""
        return float(self.page.evaluate(OVER))

    # ---- controls ----

    def press(self, name: str) -> None:
        self.page.get_by_role("button", name=name, exact=True).click()

    def slider(self, name: str) -> Any:
        """The handle, which takes keys."""
        return self.page.get_by_role("slider", name=name, exact=True)

    def nameless(self) -> list[str]:
        """Controls that a screen reader has no name for."""
        rows = self.page.locator(".mt-controls").all()
        lines = [line.strip() for row in rows for line in row.aria_snapshot().splitlines()]
        return [line for line in lines if NAMELESS.match(line)]

    def turn(self, name: str, key: str = "ArrowRight") -> None:
        """As somebody without a mouse does."""
        self.slider(name).focus()
        self.page.keyboard.press(key)

    def enter(self, name: str, number: int) -> None:
        """Type a number into a field and leave it."""
        self.page.get_by_label(name, exact=True).fill(str(number))
        self.page.keyboard.press("Tab")
