"""Which packages have to travel to a machine that reaches no package index, so that everything here runs there.

    pip list --format freeze > there.txt                  on that machine, or its packages' names, one a line
    python -m benchmarks.carry there.txt                  here: what is missing there, as requirements
    python -m benchmarks.carry there.txt | xargs pip download --no-deps --dest wheels --only-binary :all: \\
        --python-version 3.12 --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64

Versions are those installed here. What a package needs in turn is followed, but not through packages that are there:
those have what they need. On the other machine: pip install --no-index --no-deps --target site wheels/*.whl
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

# What the engine, its tests on a card and the benchmarks import; notebooks and dashboards stay at home.
NEEDED = (
    *("torch", "transformers", "tokenizers", "safetensors", "numpy", "psutil", "nvidia-ml-py", "datasets"),
    *("pyyaml", "pydantic", "pyzmq", "cloudpickle", "xxhash", "tqdm", "typer", "jinja2"),
    *("pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "peft"),
)


def missing(needed: Iterable[str], there: set[str]) -> dict[str, str]:
    """Canonical name → version installed here, of all that is needed and not there; ValueError if it is not here."""
    found: dict[str, str] = {}
    waiting = [canonicalize_name(name) for name in needed]
    while waiting:
        name = waiting.pop()
        if name in there or name in found:
            continue
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            raise ValueError(f"{name} is needed there and is not installed here; install it, or leave it out") from None
        found[name] = distribution.version
        waiting += _requirements(distribution)
    return dict(sorted(found.items()))


def _requirements(distribution: metadata.Distribution) -> Iterator[str]:
    """What it needs on this kind of system, without its extras."""
    for line in distribution.requires or ():
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield canonicalize_name(requirement.name)


def names_in(text: str) -> set[str]:
    """Canonical names of a list of packages, one a line: alone, or with a version as pip prints it."""
    lines = (line.split("#")[0].strip() for line in text.splitlines())
    return {canonicalize_name(line.replace("==", " ").replace("@", " ").split()[0]) for line in lines if line}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("there", type=Path, help="file with the names of the packages that are there")
    parser.add_argument("--add", nargs="+", default=[], metavar="PACKAGE", help="needed besides")
    args = parser.parse_args(arguments)
    try:
        found = missing([*NEEDED, *args.add], names_in(args.there.read_text()))
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    print(*(f"{name}=={version}" for name, version in found.items()), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
