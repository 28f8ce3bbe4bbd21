"""A choice in words and numbers: what was measured, what binds, what everything else would have cost."""

from __future__ import annotations

from collections.abc import Sequence

from dashboard.words import gigabytes_per_s, milliseconds, percent
from megatrain.plan.fit import gb
from megatrain.simulate import Rates, bounds, simulate
from megatrain.simulate.words import binding
from megatrain.tune.alternatives import Alternative
from megatrain.tune.calibration import Calibration
from megatrain.tune.candidates import Candidate

COLUMN = 28
EXACT = (
    "None of these settings changes what is computed; micro_batch_size alone changes the order in which gradients are "
    "summed, so results with another one are equal to rounding."
)
GREW = {
    "compute": "compute takes {time} longer",
    "weights": "compute waits {time} longer for weights",
    "gradient buffer": "compute waits {time} longer for a free gradient buffer",
    "saved inputs": "compute waits {time} longer for saved inputs from the host",
    "optimizer": "compute waits {time} longer for AdamW",
    "optimizer state": "compute waits {time} longer for optimizer state",
    "other": "for {time} more nothing is computed",
    "paused": "it is paused for {time} more",
}


def summary(chosen: Candidate, step_s: float, rates: Rates, measured: Calibration | None) -> list[str]:
    """Return what was measured, what was chosen, what binds, and what stays the same."""
    settings = ", ".join(f"{knob}={value}" for knob, value in chosen.settled.items())
    throttled = ", lanes throttled" if chosen.config.throttle is not None else ""
    return [
        _rates(rates, measured) + throttled,
        f"chosen: {settings}; predicted: {milliseconds(step_s)} a step, "
        f"{chosen.plan.needs.size.tokens / step_s:,.0f} tokens/s, with {gb(chosen.plan.device_bytes)} on the "
        f"device and {gb(chosen.plan.host_bytes)} of RAM",
        binding(bounds(simulate(chosen.plan, rates))),
        EXACT,
    ]


def _rates(rates: Rates, measured: Calibration | None) -> str:
    source = "by the rates given"
    if measured is not None:
        rows = " and ".join(map(str, measured.rows))
        source = f"measured in {measured.seconds:.1f} s on two layers, in micro-batches of {rows}"
    flops = ", ".join(f"{kind} {rate / 1e12:.3g} TFLOP/s" for kind, rate in rates.flops_per_s.items())
    return (
        f"{source}: weights in {gigabytes_per_s(rates.h2d_bytes_per_s)} GB/s, "
        f"gradients out {gigabytes_per_s(rates.d2h_bytes_per_s)} GB/s{_kept(rates)}, "
        f"AdamW {gigabytes_per_s(rates.adamw_bytes_per_s)} GB/s{_shared(rates)}; {flops}; {_launch(rates)}"
    )


def _kept(rates: Rates) -> str:
    return f" (each keeps {percent(rates.both_ways)} beside the other)" if rates.both_ways < 1 else ""


def _shared(rates: Rates) -> str:
    shared = rates.host_memory_bytes_per_s
    return f" (all three together {gigabytes_per_s(shared)})" if shared is not None else ""


def _launch(rates: Rates) -> str:
    if not rates.launch_s:
        return "what a micro-batch costs whatever its size is not known, and larger ones may be faster than told here"
    fixed = (f"{kind} {1e3 * seconds:.2g} ms" for kind, seconds in rates.launch_s.items())
    return f"besides, whatever the micro-batch: {', '.join(fixed)}"


def verdict(other: Alternative, chosen: Alternative) -> str:
    """What an alternative would have cost: "12 % slower: compute waits 0.2 s longer for weights"."""
    if other.problem is not None:
        return f"does not fit ({other.problem})"
    change = f"{_change(other, chosen)}, {_memory(other.nbytes - chosen.nbytes)}"
    why = [GREW[cause].format(time=milliseconds(seconds)) for cause, seconds in list(other.causes.items())[:1]]
    return ": ".join([change, *why])


def _change(other: Alternative, chosen: Alternative) -> str:
    change = other.step_s / chosen.step_s - 1
    if abs(change) < 0.0005:
        return "as fast"
    return f"{abs(change):.1%} {'slower' if change > 0 else 'faster'}"


def _memory(more_bytes: int) -> str:
    if not more_bytes:
        return "as much memory"
    return f"{gb(abs(more_bytes))} {'more' if more_bytes > 0 else 'less'}"


def table(others: Sequence[Alternative], tokens: int) -> list[str]:
    """Return a line for the choice and each alternative."""
    head = f"{'one knob turned':<{COLUMN}}{'step':>10}{'tokens/s':>11}{'memory':>11}  "
    return [head.rstrip(), *(_line(other, others[0], tokens) for other in others)]


def _line(other: Alternative, chosen: Alternative, tokens: int) -> str:
    said = "" if other is chosen else verdict(other, chosen)
    figures = f"{milliseconds(other.step_s):>10}{tokens / other.step_s:>11,.0f}{gb(other.nbytes):>11}"
    return f"{other.name:<{COLUMN}}{figures}  {said}".rstrip()
