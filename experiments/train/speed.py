"""The speed of a run relative to the peak of its GPUs, and traces of its steps."""

from pathlib import Path
from types import TracebackType
from typing import Any

import jax

from experiments.models.llama import LlamaConfig

# Dense products in bf16 with fp32 sums, by a part of the device's name: NVIDIA's data sheets, without sparsity.
_PEAKS = {
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
# Of this process, before a trace begins: the first ones fill caches.
UNTRACED = 2


def peak(device_kind: str) -> float | None:
    """Operations a second of a GPU's products in bf16; None where it is not in the table."""
    return next((value for name, value in _PEAKS.items() if name in device_kind), None)


def operations(llama: LlamaConfig, params: Any, base: Any, length: int) -> float:
    """Operations of products and causal attention for a token, forward and backward; none that is computed again.

    Args:
        llama: the shape.
        params: what is trained, arrays or their shapes: three products of a weight.
        base: what is not, likewise: two products, for it has no gradient.
        length: tokens of a sequence.
    """

    def matrices(tree: Any) -> int:
        named_leaves = [(jax.tree_util.keystr(path), x) for path, x in jax.tree_util.tree_leaves_with_path(tree)]
        # The embedding is looked up, and is the head where it is tied; norms and biases of all layers have two axes.
        # Of experts a token meets those that its router chooses.
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
    """The share of the devices' bf16 peak that one token per second uses; None if it is unknown."""
    one = peak(jax.devices()[0].device_kind)
    return None if one is None else operations(llama, params, base, length) / (one * devices)


class Trace:
    """A trace of some steps, which TensorBoard (with its profile plugin) and Perfetto open; a context manager.

    Args:
        folder: of the trace.
        steps: how many are traced, after the first `UNTRACED`; 0 for none.
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
        """Called before each step of this process, numbered from 0, with what the one before it gives."""
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
