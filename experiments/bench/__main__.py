"""Benchmarks of kernels, layers and steps on GPUs: `python -m experiments.bench NAME [options]`.

Each prints its rows and the flags of XLA that it runs with, writes results/CARD/NAME.json and a plot, and takes
`--help`.
"""

import importlib
import sys

from experiments import flags

BENCHES = (
    "step",
    "models",
    "release",
    "layer",
    "profile",
    "optimizer",
    "gemm",
    "gemm_int8",
    "quantize",
    "linear",
    "scaling",
    "peers",
    "reduce",
    "cold",
    "lora",
    "rates",
)


def main() -> None:
    """Runs one benchmark; all but "cold", which measures XLA as it is, with the flags of `experiments.flags`."""
    if len(sys.argv) < 2 or sys.argv[1] not in BENCHES:
        sys.exit(f"{(__doc__ or '').strip()}\nNAME is one of {', '.join(BENCHES)}.")
    if sys.argv[1] != "cold":
        flags.recommend()
    importlib.import_module(f"experiments.bench.{sys.argv[1]}").main(sys.argv[2:])


if __name__ == "__main__":
    main()
