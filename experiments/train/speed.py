"""The speed of a run relative to the peak of its GPUs, and traces of its steps."""

from pathlib import Path
from types import TracebackType
from typing import Any

import jax

from experiments.models.llama import LlamaConfig

# Dense bf16 FLOP/s with fp32 accumulation, by a part of the device's name (NVIDIA's data sheets, without sparsity).
_PEAK_FLOPS = {
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989.5e12,
    "H200": 989.5e12,
    "GH200": 989.5e12,
    "B200": 2250e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
}
# Steps of this process before a trace: the first ones fill caches.
UNTRACED = 2


def peak(device_kind: str) -> float | None:
    """Returns the bf16 peak of a GPU in FLOP/s, or None if it is not in the table."""
    return next((value for name, value in _PEAK_FLOPS.items() if name in device_kind), None)


def operations(llama: LlamaConfig, params: Any, base: Any, length: int) -> float:
    """Returns the FLOPs of matmuls and causal attention per token, forward and backward, without rematerialization.

    Args:
        llama: the shape.
        params: trained weights, arrays or shapes. Each has three matmuls.
        base: frozen weights, arrays or shapes. Each has two matmuls, because there is no wgrad.
        length: tokens per sequence.
    """

    def matrices(tree: Any) -> int:
        named_leaves = [(jax.tree_util.keystr(path), x) for path, x in jax.tree_util.tree_leaves_with_path(tree)]
        # The embedding has no matmul unless it is tied to the head. Stacked norms and biases have two axes.
        # A token uses only the experts that its router chooses.
        share = llama.experts_per_token / max(llama.experts, 1)
        sizes = [
            int(x.size * share) if "experts" in name else x.size
            for name, x in named_leaves
            if x.ndim >= 2 and "norm" not in name and "bias" not in name and ("embed" not in name or llama.tied)
        ]
        return sum(sizes)

    attention = 6 * llama.layers * llama.heads * llama.head_dim * length
    return float(6 * matrices(params) + 4 * matrices(base) + attention)


def share_of_peak(llama: LlamaConfig, params: Any, base: Any, length: int, devices: int) -> float | None:
    """Returns the share of the devices' bf16 peak per token per second, or None if the peak is unknown."""
    one = peak(jax.devices()[0].device_kind)
    return None if one is None else operations(llama, params, base, length) / (one * devices)


class Trace:
    """A profiler trace of some steps, for TensorBoard (with its profile plugin) or Perfetto. A context manager.

    Args:
        folder: folder of the trace.
        steps: number of traced steps, after the first `UNTRACED`; 0 for none.
    """

    def __init__(self, folder: Path | None = None, steps: int = 0) -> None:
        self._folder, self._steps, self._running = folder, steps, False

    def __enter__(self) -> "Trace":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def before(self, step: int, state: Any) -> None:
        """Must be called before each step of this process, numbered from 0, with the state after the previous step."""
        if self._steps and step == UNTRACED:
            jax.block_until_ready(state)
            jax.profiler.start_trace(str(self._folder), create_perfetto_trace=True)
            self._running = True
        elif self._running and step == UNTRACED + self._steps:
            jax.block_until_ready(state)
            self._stop()

    def _stop(self) -> None:
        if self._running:
            self._running = False
            jax.profiler.stop_trace()
