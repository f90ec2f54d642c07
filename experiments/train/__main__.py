import sys

from experiments.flags import recommend
from experiments.train import cli

if __name__ == "__main__":
    recommend()
    sys.exit(cli.main())
