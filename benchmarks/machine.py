"""The machine a figure comes from, in words that name hardware and versions but no host or person."""

from __future__ import annotations

import platform
import re
from importlib.metadata import version

import torch

from megatrain.machine import Machine, detect


def describe() -> dict[str, object]:
    """This machine and what runs on it, for a results file."""
    machine = detect()
    return {
        "cpu": machine.name,
        "cores": machine.cores,
        "ram_bytes": machine.host_bytes,
        "card": machine.gpu,
        "card_bytes": machine.device_bytes or None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "transformers": version("transformers"),
    }


def in_words() -> str:
    """One line for a terminal."""
    machine = detect()
    about = describe()
    versions = ", ".join(f"{name} {about[name]}" for name in ("torch", "transformers", "python"))
    return f"{in_short(machine)}, {machine.host_bytes / 2**30:.0f} GiB; {versions}"


def in_short(machine: Machine) -> str:
    return machine.gpu or f"{machine.name}, {machine.cores} cores"


def slug() -> str:
    """For file names: "amd-epyc-2-cores", or the card's name."""
    return re.sub(r"[^a-z0-9]+", "-", in_short(detect()).lower()).strip("-")
