"""Benchmarks of kernels, layers and steps on GPUs: `python -m experiments.bench NAME [options]`.

Each prints its rows and XLA's flags, and writes results/CARD/NAME.json and a plot.
"""

import importlib
import sys

from experiments import startup
from fp8jax.core.tables import sentence

BENCHES = {
    "step": "a training step of a Llama by recipe and mesh",
    "models": "a training step of models as users write them",
    "release": "a Llama with the optimizer inside the backward pass",
    "layer": "a Llama layer, forward and backward",
    "moe": "a layer of experts, forward and backward",
    "profile": "where the time of a step goes",
    "optimizer": "an optimizer step of half a billion parameters",
    "gemm": "FP8 matmuls: XLA, torch and our kernels",
    "gemm_int8": "INT8 matmuls, also with fallback",
    "grouped": "grouped matmuls of experts, FP8 and bf16",
    "quantize": "bandwidth of quantization",
    "linear": "forward, dgrad and wgrad of linear layers",
    "peers": "8-bit AdamW of several libraries: updates and errors",
    "reduce": "gradient reductions over the GPUs of a host",
    "lora": "a LoRA step of a Llama 3.1 8B, in bf16 and on an 8-bit base",
    "rates": 'rates of a GPU, which recipe "auto" reads',
}


def main() -> int:
    """Runs one benchmark with the flags of `experiments.startup`."""
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name not in BENCHES:
        wants_help = name in ("-h", "--help")
        if name and not wants_help:
            print(f"error: unknown benchmark {name!r}\n", file=sys.stderr)
        first, paragraphs = (__doc__ or "").strip().split("\n\n")
        width = max(map(len, BENCHES))
        lines = [sentence(f"  {bench:{width}}  {text}", indent=width + 4) for bench, text in BENCHES.items()]
        options = sentence(f"`python -m experiments.bench {next(iter(BENCHES))} --help` lists the options of one.")
        text = "\n".join([sentence(first), "", *lines, "", sentence(paragraphs), options])
        print(text, file=sys.stdout if wants_help else sys.stderr)
        return 0 if wants_help else 2
    startup.recommend_flags()
    importlib.import_module(f"experiments.bench.{name}").main(sys.argv[2:])
    return 0


if __name__ == "__main__":
    sys.exit(main())
