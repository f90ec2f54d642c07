"""Lists the tables: `python -m experiments.papers`."""

import sys

from experiments import papers


def main() -> int:
    """Prints the commands; 0 where they were asked for, else 2: each table has a command of its own."""
    asked = not {"-h", "--help"}.isdisjoint(sys.argv[1:])
    print((papers.__doc__ or "").strip(), file=sys.stdout if asked else sys.stderr)
    return 0 if asked else 2


if __name__ == "__main__":
    sys.exit(main())
