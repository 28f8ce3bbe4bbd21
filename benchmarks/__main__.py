"""`python -m benchmarks` is `python -m benchmarks.cpu`."""

from benchmarks.cpu import main

if __name__ == "__main__":
    main()
