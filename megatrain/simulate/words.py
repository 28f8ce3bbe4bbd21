"""A simulation in words: how long a step takes, what binds, and what each knob would change."""

from __future__ import annotations

from collections.abc import Sequence

from dashboard.words import LANE_WORDS, milliseconds, percent
from megatrain.simulate.binds import WORTH_MENTIONING, Bounds, bounds
from megatrain.simulate.knobs import Setting, knob_table
from megatrain.simulate.run import Simulated

COLUMN = 24


def report(simulated: Simulated) -> str:
    """Return everything for a terminal; takes a dozen further simulations."""
    settings = knob_table(simulated)
    return "\n".join([*summary(simulated), sentence(bounds(simulated), settings), "", *table(settings)])


def summary(simulated: Simulated) -> list[str]:
    """Return the last step's figures, and where the rates come from."""
    metrics, machine = simulated.metrics, simulated.plan.machine
    mfu = "" if metrics.mfu is None else f", MFU {percent(metrics.mfu)}"
    busy = (f"{LANE_WORDS[lane]} {percent(seconds / metrics.duration_s)}" for lane, seconds in metrics.busy_s.items())
    waits = (f"{cause} {percent(s / metrics.duration_s)}" for cause, s in metrics.waits_s.items() if s)
    source = "a fixed share of data-sheet rates" if machine is not None and machine.data_sheets else "measured rates"
    return [
        f"simulated step: {milliseconds(metrics.duration_s)}, {metrics.tokens_per_s:,.0f} tokens/s, "
        f"{metrics.model_flops_per_s / 1e12:,.3g} model TFLOP/s{mfu} ({source}; no run has confirmed it)",
        "busy: " + ", ".join(busy),
        "compute waited for: " + (", ".join(waits) or "nothing"),
    ]


def sentence(found: Bounds, settings: Sequence[Setting]) -> str:
    """Return what binds and what to turn."""
    return f"{binding(found)} {_turn(found, settings)}"


def binding(found: Bounds) -> str:
    """Return what binds, with the time of a step where each resource is twice as fast."""
    resource = found.resource
    if resource is None:
        return "Nothing binds alone: no resource twice as fast shortens a step."
    others = [f"{name} {milliseconds(s)}" for name, s in found.faster_s.items() if name != resource]
    return (
        f"{resource.capitalize()} binds: twice as fast, a step would take {milliseconds(found.faster_s[resource])} "
        f"instead of {milliseconds(found.step_s)} ({', '.join(others)})."
    )


def _turn(found: Bounds, settings: Sequence[Setting]) -> str:
    fitting = [setting for setting in settings if setting.fits] or settings  # where nothing fits, what would be
    best = min(fitting, key=lambda setting: setting.step_s)
    if best.step_s < (1 - WORTH_MENTIONING) * found.step_s:
        return f"Turn: {best.words} makes it {milliseconds(best.step_s)}."
    if found.twice_tokens_per_s > (1 + WORTH_MENTIONING) * found.tokens_per_s:
        return (
            f"No knob shortens it; twice the sequences in a step give {found.twice_tokens_per_s:,.0f} tokens/s "
            f"instead of {found.tokens_per_s:,.0f}."
        )
    return "No knob shortens it, nor do more sequences in a step help."


def table(settings: Sequence[Setting]) -> list[str]:
    """Return a line for each setting; * marks what was planned."""
    planned_s = next(setting.step_s for setting in settings if setting.chosen)
    head = f"{'one knob turned':<{COLUMN}}{'step':>10}{'change':>8}{'tokens/s':>11}{'device':>11}"
    return [head, *(_line(setting, planned_s) for setting in settings)]


def _line(setting: Setting, planned_s: float) -> str:
    name = ("* " if setting.chosen else "  ") + setting.words
    change = f"{setting.step_s / planned_s - 1:+.0%}" if abs(setting.step_s / planned_s - 1) >= 0.005 else "="
    device = f"{setting.device_bytes / 1e9:,.1f} GB"
    fits = "" if setting.fits else "  does not fit"
    return (
        f"{name:<{COLUMN}}{milliseconds(setting.step_s):>10}{change:>8}{setting.tokens_per_s:>11,.0f}{device:>11}{fits}"
    )
