"""Runs a command on a stand-in for CUDA: torch's CUDA build runs its own code, and no card is needed.

    python tests/standin -- python -m pytest tests/gpu

The Python that runs this needs a torch that is built for CUDA 13; use the same one in the command. Device memory is
host memory, copies and events are real and asynchronous, kernels and products of matrices do nothing: numbers are
garbage. docs/on-a-card.md says what it shows.

FAKE_CUDA_GB       memory of the card, 8 by default
FAKE_CUDA_LATE_US  each copy begins late by up to so many microseconds, 0 by default
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from build import RUNTIME, built

from megatrain.native.build import BuildError

TESTS = Path(__file__).parents[1]


def main() -> None:
    command = parsed()
    try:
        folder = built()
    except BuildError as error:
        sys.exit(str(error))
    try:
        os.execvpe(command[0], command, surroundings(os.environ, folder))
    except OSError as error:
        sys.exit(f"{command[0]}: {error.strerror}")


def parsed() -> list[str]:
    shape = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python tests/standin", description=__doc__, formatter_class=shape)
    parser.add_argument("command", nargs="+", help="what to run, after --")
    words: list[str] = parser.parse_args().command
    return words


def surroundings(given: Mapping[str, str], folder: Path) -> dict[str, str]:
    """The environment in which a process, and all that it starts, finds the stand-in where it looks for CUDA."""

    def first(path: Path | str, name: str) -> str:
        return os.pathsep.join([str(path), *filter(None, [given.get(name)])])

    return {
        **given,
        "LD_PRELOAD": first(folder / RUNTIME, "LD_PRELOAD"),
        "LD_LIBRARY_PATH": first(folder, "LD_LIBRARY_PATH"),
        "PYTHONPATH": first(TESTS, "PYTHONPATH"),
        "PYTEST_PLUGINS": ",".join(["standin.plugin", *filter(None, [given.get("PYTEST_PLUGINS")])]),
        "OMP_NUM_THREADS": "1",
    }


if __name__ == "__main__":
    main()
