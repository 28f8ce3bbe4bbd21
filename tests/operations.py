"""Plays a schedule, and draws its operations as text that a test can compare with a literal list."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from textwrap import dedent

from megatrain.schedule import Kind, Op, Schedule, StepShape, Visit
from megatrain.steering import Knobs


def schedule(
    layers: int,
    trained: Iterable[int] | None = None,
    *,
    shell_trained: bool = True,
    update_in_backward: bool = False,
    slabs: int = 3,
    partly_frozen: Iterable[int] = (),
    here: bool = False,
) -> Schedule:
    """A schedule whose layers are all trained, unless told otherwise. here: AdamW runs on the device."""
    which = frozenset(range(layers) if trained is None else trained)
    in_backward = update_in_backward or here
    return Schedule(layers, which, shell_trained, in_backward, slabs, frozenset(partly_frozen), here)


def depth(prefetch_depth: int, *, resident: int = 0, grad_buffers: int = 2) -> Callable[[Visit], Knobs]:
    """Knobs that nobody turns."""
    return lambda _: Knobs(prefetch_depth, grad_buffers, resident)


@dataclass(frozen=True)
class Began:
    """A layer visit: the number of its step, what the knobs were, and how many operations came before it."""

    step: int
    visit: Visit
    knobs: Knobs
    at: int


@dataclass
class Played:
    """Operations of whole steps with their updates, and the layer visits among them."""

    ops: list[Op] = field(default_factory=list)
    visits: list[Began] = field(default_factory=list)

    def of(self, *kinds: Kind) -> list[Op]:
        return [op for op in self.ops if op.kind in kinds]

    def visit_ops(self, index: int) -> list[Op]:
        """From asking for the knobs of one visit to asking for those of the next."""
        stops = [began.at for began in self.visits[1:]] + [len(self.ops)]
        return self.ops[self.visits[index].at : stops[index]]


def play(planned: Schedule, shape: StepShape, knobs_at: Callable[[Visit], Knobs], steps: int = 1) -> Played:
    """Let every step run to its end and be followed by its updates."""
    played = Played()
    for step in range(steps):

        def asked(visit: Visit, step: int = step) -> Knobs:
            knobs = knobs_at(visit)
            played.visits.append(Began(step, visit, knobs, len(played.ops)))
            return knobs

        for op in planned.step(shape, asked):
            played.ops.append(op)
        played.ops += planned.updates()
    return played


def drawn(ops: Iterable[Op]) -> list[str]:
    """Each operation behind its number, to which the waits of later ones refer."""
    return [f"{op.number} {op}" for op in ops]


def lines(text: str) -> list[str]:
    return [line.strip() for line in dedent(text).strip().splitlines()]
