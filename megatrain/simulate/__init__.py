"""The same schedule on a clock: what a step would take on a machine that is described, or not busy yet."""

from megatrain.simulate.binds import Bounds, bounds
from megatrain.simulate.knobs import Setting, knob_table
from megatrain.simulate.learn import learned, measure
from megatrain.simulate.rates import Rates
from megatrain.simulate.run import Simulated, simulate
from megatrain.simulate.words import report

__all__ = [
    "Bounds",
    "Rates",
    "Setting",
    "Simulated",
    "bounds",
    "knob_table",
    "learned",
    "measure",
    "report",
    "simulate",
]
