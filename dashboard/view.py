"""What a viewer looks at: which steps, which layer, in which order. Set by controls, read by whoever draws."""

from __future__ import annotations

from dataclasses import astuple, dataclass, field


@dataclass
class View:
    """last_step: the last one shown; None = live. steps: how many. follow: a layer to follow through all lanes.

    sort_by, descending: of the table of layers. looks: how often a stretch of time was chosen, be it the same again.
    """

    last_step: int | None = None
    steps: int = 2
    follow: int | None = None
    sort_by: str = "layer"
    descending: bool = False
    looks: int = field(default=0, compare=False)

    @property
    def state(self) -> tuple[object, ...]:
        """Differs when something else is to be seen."""
        return astuple(self)

    @property
    def live(self) -> bool:
        return self.last_step is None

    def now(self) -> None:
        """Show what happens now."""
        self.last_step = None
        self.looks += 1

    def show(self, steps: int) -> None:
        """Show so many steps."""
        self.looks += steps != self.steps
        self.steps = steps

    def earlier(self, newest: int) -> None:
        """Go back by as many steps as are shown; from live, to the steps before those."""
        self.looks += 1
        at = newest if self.last_step is None else self.last_step
        self.last_step = max(self.steps - 1, at - self.steps)

    def later(self, newest: int) -> None:
        """Go forward by as many; at the newest step the view is live again."""
        if self.last_step is not None:
            self.looks += 1
            at = self.last_step + self.steps
            self.last_step = None if at >= newest else at
