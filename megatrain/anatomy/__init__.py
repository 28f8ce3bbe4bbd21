"""A Hugging Face model as layers and a shell, without knowing its class."""

from megatrain.anatomy.adapters import base_of, float32_adapters, has_adapters, without_adapters
from megatrain.anatomy.arithmetic import Arithmetic, Products, arithmetic
from megatrain.anatomy.calls import Graph, Tape, call, forward, send_back_collected, shell_gradients
from megatrain.anatomy.check import check
from megatrain.anatomy.model import Anatomy, Chunk, chunks
from megatrain.anatomy.rng import RandomState
from megatrain.anatomy.saved import Saved
from megatrain.anatomy.structure import Dtypes, Unit, UnsupportedModelError, decayed_parameters, kept_in_float32
from megatrain.anatomy.tail import DifferentError, Tail
from megatrain.anatomy.widths import Widths, widths

__all__ = [
    "Anatomy",
    "Arithmetic",
    "Chunk",
    "DifferentError",
    "Dtypes",
    "Graph",
    "Products",
    "RandomState",
    "Saved",
    "Tail",
    "Tape",
    "Unit",
    "UnsupportedModelError",
    "Widths",
    "arithmetic",
    "base_of",
    "call",
    "check",
    "chunks",
    "decayed_parameters",
    "float32_adapters",
    "forward",
    "has_adapters",
    "kept_in_float32",
    "send_back_collected",
    "shell_gradients",
    "widths",
    "without_adapters",
]
