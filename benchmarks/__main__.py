"""`python -m benchmarks` is `python -m benchmarks.cpu`."""

import sys

from benchmarks.cpu import main

if __name__ == "__main__":
    sys.exit(main())
