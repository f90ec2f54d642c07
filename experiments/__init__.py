"""Programs around the library: `python -m experiments.NAME --help`."""

import sys

# Python has not put the program's path here yet: it is about to run a module of this package.
if sys.argv[:1] == ["-m"]:
    from experiments import startup

    startup.begin()
