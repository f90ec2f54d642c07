"""Benchmarks of kernels, layers and steps on GPUs: `python -m experiments.bench NAME [options]`.

Each prints its rows and its XLA flags, writes results/CARD/NAME.json and a plot, and has `--help`.
"""

import importlib
import sys

from experiments import startup

BENCHES = (
    "step",
    "models",
    "release",
    "layer",
    "moe",
    "profile",
    "optimizer",
    "gemm",
    "gemm_int8",
    "grouped",
    "quantize",
    "linear",
    "peers",
    "reduce",
    "lora",
    "rates",
)


def main() -> int:
    """Runs one benchmark with the flags of `experiments.startup`."""
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name not in BENCHES:
        asked = name in ("-h", "--help")
        print(
            f"{(__doc__ or '').strip()}\nNAME is one of {', '.join(BENCHES)}.", file=sys.stdout if asked else sys.stderr
        )
        return 0 if asked else 2
    startup.recommend_flags()
    importlib.import_module(f"experiments.bench.{name}").main(sys.argv[2:])
    return 0


if __name__ == "__main__":
    sys.exit(main())
