"""Put the comparison on a CPU into the README: a table between its markers, and docs/benchmarks.svg.

    python -m benchmarks.publish                                 of this machine
    python -m benchmarks.publish benchmarks/results/FILE.json

The picture needs Chromium; without it the table is written all the same, and the command says so.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks import picture, readme
from benchmarks.cpu import RESULTS
from benchmarks.machine import slug


def publish(results: Path, page: Path, drawing: Path) -> None:
    """RuntimeError where the picture cannot be drawn; the table is written before."""
    found = readme.load(results)
    page.write_text(readme.put_into(page.read_text(), readme.block(found, results.name)))
    picture.draw(found, drawing)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="?", default=RESULTS / f"{slug()}.json")
    parser.add_argument("--readme", type=Path, default=readme.README)
    parser.add_argument("--picture", type=Path, default=readme.PICTURE)
    args = parser.parse_args(arguments)
    try:
        publish(args.results, args.readme, args.picture)
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
