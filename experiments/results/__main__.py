import sys

from experiments.results import runner

if __name__ == "__main__":
    sys.exit(runner.main())
