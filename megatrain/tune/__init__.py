"""Settings chosen by a short calibration, and why: what the engine can hold, timed on its own schedule's clock."""

from megatrain.tune.calibration import Calibration, calibrate
from megatrain.tune.candidates import KNOBS
from megatrain.tune.choice import NothingFitsError
from megatrain.tune.tuning import Tuned, tune
from megatrain.tune.words import table

__all__ = ["KNOBS", "Calibration", "NothingFitsError", "Tuned", "calibrate", "table", "tune"]
