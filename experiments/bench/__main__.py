"""Benchmarks of kernels, layers and steps on GPUs: `python -m experiments.bench NAME [options]`.

NAME is gemm, quantize, linear, layer, step, optimizer or cold. Each prints its rows, writes results/NAME.json and a
plot, and takes `--help`.
"""

import importlib
import os
import sys

BENCHES = ("gemm", "quantize", "linear", "layer", "step", "optimizer", "cold")


def main() -> None:
    """Runs one benchmark; all but "cold" without Triton's products, which XLA's autotuner tries for every shape."""
    if len(sys.argv) < 2 or sys.argv[1] not in BENCHES:
        sys.exit((__doc__ or "").strip())
    if sys.argv[1] != "cold":
        os.environ.setdefault("XLA_FLAGS", "--xla_gpu_enable_triton_gemm=false")
    importlib.import_module(f"experiments.bench.{sys.argv[1]}").main(sys.argv[2:])


if __name__ == "__main__":
    main()
