"""The same schedule on a clock: what a step would take on a machine that is described, or not busy yet."""

from megatrain.simulate.knobs import Setting, knob_table
from megatrain.simulate.rates import Rates
from megatrain.simulate.run import Simulated, simulate

__all__ = ["Rates", "Setting", "Simulated", "knob_table", "simulate"]
