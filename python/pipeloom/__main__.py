"""`python -m pipeloom`: the command line."""

from pipeloom.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
