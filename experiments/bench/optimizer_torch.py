"""PyTorch's optimizers in the benchmark of the optimizer's step: its fused AdamW, those of bitsandbytes and torchao.

Each is measured where it is installed, alone, after all arms of JAX.
"""

import gc
import importlib
import os
import statistics
import time
from typing import Any

from experiments.bench import optimizer_arms, timing

_SETTINGS: dict[str, Any] = {
    "lr": optimizer_arms.RATE,
    "betas": (optimizer_arms.B1, optimizer_arms.B2),
    "weight_decay": optimizer_arms.DECAY,
}


def measure(bench: optimizer_arms.Bench, case: str, against: str) -> None:
    """Adds rows of each to a case, relative to an implementation of it."""
    if not os.environ.get("TRITON_CACHE_DIR"):
        os.environ.pop("TRITON_CACHE_DIR", None)  # jax-triton empties it, and torch.compile cannot do with that.
    for name, make in (
        ("torch fused", _fused),
        ("bitsandbytes AdamW8bit", _bitsandbytes),
        ("torchao AdamW8bit", _torchao),
    ):
        if timing.dry():
            break
        try:
            torch = importlib.import_module("torch")
            p = [
                torch.nn.Parameter(torch.randn(bench.shape, device="cuda") * 0.02) for _ in range(optimizer_arms.LEAVES)
            ]
            adamw = make(p)
            time_ = _seconds(torch, p, adamw)
        except (ImportError, RuntimeError) as error:
            print(f"{name}: not measured ({type(error).__name__}: {error})", flush=True)
            continue
        traffic = 28.0 if name == "torch fused" else 16.0
        bench.record(case, name, time_, traffic, against)
        del p, adamw
        gc.collect()
        torch.cuda.empty_cache()


def _seconds(torch: Any, parameters: list, adamw: Any) -> float:
    """Median time of a step of one of PyTorch's optimizers; the first steps compile and are not counted."""
    for x in parameters:
        x.grad = torch.randn_like(x) * 0.01
    times = []
    for _ in range(6):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(3):
            adamw.step()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) / 3)
    return statistics.median(times[1:])


def _fused(parameters: list) -> Any:
    torch = importlib.import_module("torch")
    return torch.optim.AdamW(parameters, **_SETTINGS, fused=True)


def _bitsandbytes(parameters: list) -> Any:
    return importlib.import_module("bitsandbytes").optim.AdamW8bit(parameters, **_SETTINGS)


def _torchao(parameters: list) -> Any:
    return importlib.import_module("torchao.optim").AdamW8bit(parameters, **_SETTINGS)
