"""The compiled AdamW pass, called through ctypes, which lets go of the GIL for the length of a call."""

from __future__ import annotations

import ctypes
import functools
import os
import warnings
from collections.abc import Callable
from pathlib import Path

import torch

from megatrain.native.build import BuildError, library_path


class Factors(ctypes.Structure):
    """The scalars of one update, rounded to float32 as torch rounds them."""

    _fields_ = (
        ("decay", ctypes.c_float),
        ("lerp_weight", ctypes.c_float),
        ("beta2", ctypes.c_float),
        ("one_minus_beta2", ctypes.c_float),
        ("bias2_sqrt", ctypes.c_float),
        ("eps", ctypes.c_float),
        ("negative_step_size", ctypes.c_float),
        ("grad_scale", ctypes.c_float),
        ("rounding_key", ctypes.c_uint32),
    )


class Arrays(ctypes.Structure):
    """Addresses of the flat arrays; a null `low` says that `weight` is float32."""

    _fields_ = tuple((name, ctypes.c_void_p) for name in ("weight", "low", "grad", "exp_avg", "exp_avg_sq"))


class Mkl(ctypes.Structure):
    """Addresses of the two functions of MKL that the kernel calls."""

    _fields_ = (("vms_sqrt", ctypes.c_void_p), ("set_num_threads_local", ctypes.c_void_p))


Kernel = Callable[[Arrays, Factors, int, bool, bool, bool, int], float]
"""(arrays, factors, numel, grad_is_bfloat16, moments_are_bfloat16, as_torch, threads) → sum of squared new weights"""


def kernel() -> Kernel | None:
    """The compiled pass, built at the first call; None where that fails or MEGATRAIN_NATIVE=0 forbids it."""
    return None if os.environ.get("MEGATRAIN_NATIVE") == "0" else _load()


@functools.cache
def _load() -> Kernel | None:
    try:
        function = ctypes.CDLL(str(library_path())).megatrain_adamw
    except (BuildError, OSError) as error:
        warnings.warn(
            "AdamW runs as separate torch operations, several times slower, because its C++ kernel "
            f"could not be built: {error}. Install a C++ compiler, or set MEGATRAIN_NATIVE=0 to say this is fine.",
            stacklevel=2,
        )
        return None
    pointers = (ctypes.POINTER(Arrays), ctypes.POINTER(Factors), ctypes.POINTER(Mkl))
    function.argtypes = (*pointers, ctypes.c_int64, *[ctypes.c_int32] * 4)
    function.restype = ctypes.c_double
    mkl = _mkl_of_torch()
    return lambda arrays, factors, *numbers: float(function(arrays, factors, mkl, *numbers))


def _mkl_of_torch() -> Mkl | None:
    """See the note on torch's square root in adamw.cpp; None in a torch built without MKL."""
    try:
        torch_cpu = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        functions = (torch_cpu.vmsSqrt, torch_cpu.MKL_Set_Num_Threads_Local)
    except (OSError, AttributeError):
        return None
    return Mkl(*(ctypes.cast(function, ctypes.c_void_p) for function in functions))
