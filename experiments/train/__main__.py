import sys

from experiments.startup import recommend_flags
from experiments.train import cli

if __name__ == "__main__":
    recommend_flags()
    sys.exit(cli.main())
