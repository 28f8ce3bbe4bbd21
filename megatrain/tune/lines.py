"""From rates at two sizes of a micro-batch to seconds that grow with the size along a line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from megatrain.plan import Plan
from megatrain.schedule import SHELL, Kind, Op
from megatrain.simulate import Rates
from megatrain.simulate.work import Work, Works

LAYER = (Kind.FORWARD, Kind.BACKWARD)
SHELLS = (Kind.RECORD, Kind.BACKWARD)  # what grows with the tokens; the norm does not
FLATTEST = 1e-3  # of the larger size's seconds: however noisy, more work never takes less time


def line(small: tuple[float, float], large: tuple[float, float]) -> tuple[float, float]:
    """Seconds at size 0, and size per second, of the line through two (size, seconds)."""
    (few, few_s), (many, many_s) = small, large
    slope = max((many_s - few_s) / (many - few), FLATTEST * many_s / many)
    return many_s - slope * many, 1 / slope


def through(small: Rates, small_plan: Plan, large: Rates, large_plan: Plan) -> Rates:
    """Rates that are right at both sizes, and between and beyond them as near as a line is."""
    layers = [Op(0, kind, 0, 0) for kind in LAYER] + [Op(0, Kind.HEAD, SHELL, 0)]
    shells = [Op(0, kind, SHELL, 0) for kind in SHELLS]

    def lines(ops: list[Op], size: Callable[[Work], float], known: set[str]) -> dict[str, tuple[float, float]]:
        found = {}
        for op in (op for op in ops if op.kind.value in known):
            works = [(rates, Works(plan).of(op)) for rates, plan in ((small, small_plan), (large, large_plan))]
            few, many = ((size(work), rates.seconds(op, work)) for rates, work in works)
            if many[0] > few[0]:  # a classifier's head counts as no arithmetic
                found[op.kind.value] = line(few, many)
        return found

    products = lines(layers, lambda work: work.flops, small.flops_per_s.keys() & large.flops_per_s.keys())
    moved = lines(shells, lambda work: work.device_bytes, small.fixed_s.keys() & large.fixed_s.keys())
    return replace(
        large,
        flops_per_s={**large.flops_per_s, **{kind: rate for kind, (_, rate) in products.items()}},
        launch_s={kind: at_0_s for kind, (at_0_s, _) in products.items()},
        fixed_s={**large.fixed_s, **{kind: at_0_s for kind, (at_0_s, _) in moved.items()}},
        shell_bytes_per_s={kind: rate for kind, (_, rate) in moved.items()},
    )
