"""Lists the tables: `python -m experiments.papers`."""

import sys
from pathlib import Path

from experiments import papers, startup


def main() -> int:
    """Prints the commands. Returns 0 if help was requested, else 2: each table has its own command."""
    wants_help = not startup.HELP.isdisjoint(sys.argv[1:])
    out = sys.stdout if wants_help else sys.stderr
    print((papers.__doc__ or "").strip(), file=out)
    for path in sorted(Path(__file__).parent.glob("[a-z]*.py")):
        if "\nif __name__ ==" in path.read_text() and path.stem != "__main__":
            name = f"experiments.papers.{path.stem}"
            print(f"  {name:38}{startup.purpose(name).splitlines()[0].partition(': `python')[0]}", file=out)
    return 0 if wants_help else 2


if __name__ == "__main__":
    sys.exit(main())
