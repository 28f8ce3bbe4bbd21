"""A Hugging Face model as layers and a shell, without knowing its class."""

from megatrain.anatomy.adapters import base_of, float32_adapters, has_adapters, without_adapters
from megatrain.anatomy.arithmetic import Arithmetic, Products, arithmetic
from megatrain.anatomy.attention import KeptAttention
from megatrain.anatomy.calls import Graph, Tape, call, forward, send_back_collected, shell_gradients
from megatrain.anatomy.check import check, check_tiles, require_token_wise
from megatrain.anatomy.compiled import CompiledLayers
from megatrain.anatomy.kernels import Kernels, require_choice
from megatrain.anatomy.model import Anatomy, Chunk, chunks
from megatrain.anatomy.rng import RandomState
from megatrain.anatomy.saved import Saved
from megatrain.anatomy.structure import Dtypes, Unit, UnsupportedModelError, decayed_parameters, kept_in_float32
from megatrain.anatomy.tail import DifferentError, Tail
from megatrain.anatomy.tiles import is_tileable, tile, untile
from megatrain.anatomy.widths import Widths, widths

__all__ = [
    "Anatomy",
    "Arithmetic",
    "Chunk",
    "CompiledLayers",
    "DifferentError",
    "Dtypes",
    "Graph",
    "KeptAttention",
    "Kernels",
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
    "check_tiles",
    "chunks",
    "decayed_parameters",
    "float32_adapters",
    "forward",
    "has_adapters",
    "is_tileable",
    "kept_in_float32",
    "require_choice",
    "require_token_wise",
    "send_back_collected",
    "shell_gradients",
    "tile",
    "untile",
    "widths",
    "without_adapters",
]
