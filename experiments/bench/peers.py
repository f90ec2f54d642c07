"""8-bit AdamW and other 8-bit optimizers: the error of an update from the same gradients.

All optimizers get the same gradients and have default settings, except for the learning rate, the betas and no weight
decay. The figure is the error of an update relative to AdamW in float64: norm of the difference over norm of the exact
update. It is the worst of steps 50, 100, 110, 200, 210, 300 and 400. Parameters are 0, so only the moments differ.
`fp8lm_adamw` has fp16 master weights. Optimizers that are not installed, or need a GPU, are left out with a message.

"sigma 1", "sigma 3": log-normal scales, 100 times larger or smaller from step 200 on. "1 dead", "16 dead": columns
without gradients from step 50 on. "outlier": one gradient of 1e4 at step 100. "tiny": gradients of 1e-8. "rare rows":
2 % of the rows of an embedding have a gradient in a step. "training": gradients of a small Llama. If a second moment
decodes to 0, its update is m / eps. Errors above 1 are of this kind. On a CPU, bitsandbytes runs a different
implementation, which never rounds a second moment to 0.
"""

import concurrent.futures
import functools
import importlib
import importlib.metadata
import multiprocessing
import os
from collections.abc import Callable, Collection, Mapping
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # leaves memory to torch's optimizers
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # torchao's arithmetic as it is written, for any number of leaves.

import jax
import jax.numpy as jnp
import numpy as np
import optax

import fp8jax
from experiments.bench import driver, timing
from experiments.models.llama import LlamaConfig
from experiments.text import data
from experiments.text.tokenizer import Bytes
from experiments.train.task import exact_task

RATE, B1, EPS, STEPS = 1e-3, 0.9, 1e-8, 400
B2S = (0.95, 0.999)
CHECKS = (50, 100, 110, 200, 210, 300, 400)
SHAPES = {"w": (128, 256), "rows": (2, 4096), "bias": (512,)}
SMALLEST = 4096  # elements of the smallest leaf that all optimizers compress
ERROR = "error of the update"
OURS = "fp8jax.compressed_adamw"

Tree = Mapping[str, np.ndarray]
"""Gradients of a stream: the first axis of a leaf is steps."""


@functools.cache
def ours(b2: float) -> dict[str, optax.GradientTransformationExtraArgs]:
    """Returns JAX optimizers: fp8jax's default, its variants, and optax's."""
    settings: dict[str, Any] = {"b2": b2, "weight_decay": 0.0}
    return {
        "optax.adamw, fp32": optax.with_extra_args_support(optax.adamw(RATE, **settings)),
        OURS: fp8jax.compressed_adamw(RATE, **settings),
        f"{OURS}, no expansion": fp8jax.compressed_adamw(RATE, expand=False, **settings),
        f"{OURS}, de8 and ude8": fp8jax.compressed_adamw(RATE, mu="de8", nu="ude8", expand=False, **settings),
        "fp8jax.fp8lm_adamw": fp8jax.fp8lm_adamw(RATE, **settings),
    }


# Peers by name: package, location of the class, and options that fp32 parameters need.
PEERS: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "torch.optim.AdamW, fp32": ("torch", "torch.optim", "AdamW", {}),
    "torchao AdamW8bit": ("torchao", "torchao.optim", "AdamW8bit", {}),
    "torchao AdamWFp8": ("torchao", "torchao.optim", "AdamWFp8", {}),
    "torchao AdamW4bit": ("torchao", "torchao.optim", "AdamW4bit", {}),
    "bitsandbytes AdamW8bit": ("bitsandbytes", "bitsandbytes.optim", "AdamW8bit", {}),
    "FlashOptim FlashAdamW": ("flashoptim", "flashoptim", "FlashAdamW", {"master_weight_bits": None}),
}


def normal(rng: np.random.Generator, scales: Tree) -> dict[str, np.ndarray]:
    """Returns one step of noise with these scales."""
    return {k: (rng.standard_normal(s.shape) * s).astype(np.float32) for k, s in scales.items()}


def stream(name: str, steps: int = STEPS) -> dict[str, np.ndarray]:
    """Returns the gradients of a stream, by leaf, (steps, ...)."""
    rng = np.random.default_rng(sum(map(ord, name)))
    if name == "training":
        return recorded(steps)
    if name == "rare rows":
        rows = (rng.standard_normal((steps, 1000, 64)) * 1e-3).astype(np.float32)
        rows[np.arange(1000) % 50 != np.arange(steps)[:, None] % 50] = 0
        return {"embedding": rows}
    if name.startswith("sigma"):
        sigma = float(name.split()[1].rstrip(","))
        scales = {k: 1e-3 * np.exp(sigma * rng.standard_normal(s)) for k, s in SHAPES.items()}
    else:
        scales = {k: np.full(s, 1e-8 if name == "tiny" else 1e-3) for k, s in SHAPES.items()}
    listed = []
    for t in range(steps):
        factor = {"larger": 100.0, "smaller": 0.01}.get(name.rpartition(" ")[2], 1.0) if t >= 200 else 1.0
        g = normal(rng, {k: factor * s for k, s in scales.items()})
        if "dead" in name and t >= 50:
            for k in ("w", "rows"):
                g[k][:, 40 : 40 + int(name.split()[0])] = 0
        if name == "outlier" and t == 100:
            g["w"][3, 100] = g["rows"][1, 1000] = 1e4
        listed.append(g)
    return {k: np.stack([g[k] for g in listed]) for k in SHAPES}


LLAMA = LlamaConfig(vocab=256, dim=64, layers=2, heads=4, kv_heads=2, mlp_dim=192)
STREAMS = ("training", "sigma 1", "sigma 3", "sigma 1, larger", "sigma 1, smaller", "rare rows", "outlier", "tiny",
           "1 dead", "16 dead")  # fmt: skip


@functools.cache
def recorded(steps: int) -> dict[str, np.ndarray]:
    """Returns the gradients, by leaf, of a small Llama that AdamW trains in fp32 on the standard library's sources."""
    corpus = data.read_corpus([], 0.05)
    batches = data.train_batches(data.encode(corpus, Bytes(), 64).train, 64, 8, seed=0)
    tokens_SxBxT = np.stack([next(batches) for _ in range(steps)])
    task = exact_task(LLAMA, 0)
    tx = optax.adamw(RATE, B1, 0.999)

    @jax.jit
    def step(params: Any, state: Any, tokens: jax.Array) -> Any:
        _, grads, _ = task.gradients(params, {}, tokens)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, grads

    params = jax.jit(task.init)().params
    state, listed = tx.init(params), list[Any]()
    for tokens in tokens_SxBxT:
        params, state, grads = step(params, state, tokens)
        listed.append({jax.tree_util.keystr(k): np.asarray(g) for k, g in jax.tree_util.tree_leaves_with_path(grads)})
    names = [name for name in listed[0] if listed[0][name].size >= SMALLEST]
    return {name: np.stack([g[name] for g in listed]) for name in names}


def exact(gradients: Tree, b2: float) -> dict[str, np.ndarray]:
    """Returns AdamW's updates divided by the learning rate, in float64, without weight decay."""
    updates = {}
    for name, g in gradients.items():
        m, v, listed = np.zeros(g.shape[1:]), np.zeros(g.shape[1:]), []
        for t, x in enumerate(g.astype(np.float64), 1):
            m, v = B1 * m + (1 - B1) * x, b2 * v + (1 - b2) * x * x
            listed.append(-(m / (1 - B1**t)) / (np.sqrt(v / (1 - b2**t)) + EPS))
        updates[name] = np.stack(listed)
    return updates


@functools.cache
def _program(tx: optax.GradientTransformationExtraArgs) -> Any:
    """Returns a function from parameters and gradients of all steps to updates and the last state, compiled once."""

    @jax.jit
    def run(params: Any, arrays: Any) -> tuple[Any, Any]:
        def step(carry: Any, g: Any) -> Any:
            params, state = carry
            updates, state = tx.update(g, state, params)
            # The state may have master weights, which the parameters must match.
            return (optax.apply_updates(params, updates), state), updates

        (_, state), updates = jax.lax.scan(step, (params, tx.init(params)), arrays)
        return updates, state

    return run


def by_jax(tx: optax.GradientTransformationExtraArgs, gradients: Tree) -> tuple[dict[str, np.ndarray], float]:
    """Returns updates of each step divided by the learning rate, and bytes of state per parameter."""
    arrays = {k: jnp.asarray(g) for k, g in gradients.items()}
    params = {k: jnp.zeros(g.shape[1:]) for k, g in arrays.items()}
    updates, state = _program(tx)(params, arrays)
    size = sum(x.nbytes for x in jax.tree.leaves(state)) / sum(p.size for p in params.values())
    return {k: np.asarray(u, np.float64) / RATE for k, u in updates.items()}, size


def by_torch(make: Callable[..., Any], gradients: Tree, b2: float, device: str) -> tuple[dict[str, np.ndarray], float]:
    """Returns the same for a torch optimizer class."""
    torch = importlib.import_module("torch")
    timing.keep_triton_cache()  # JAX may have run since the class was looked up.
    params = {k: torch.nn.Parameter(torch.zeros(g.shape[1:], device=device)) for k, g in gradients.items()}
    optimizer = make(list(params.values()), lr=RATE, betas=(B1, b2), eps=EPS, weight_decay=0.0)
    arrays = {k: torch.from_numpy(np.ascontiguousarray(g)).to(device) for k, g in gradients.items()}
    listed = []
    for t in range(len(next(iter(gradients.values())))):
        for k, p in params.items():
            with torch.no_grad():
                p.zero_()
            p.grad = arrays[k][t]
        optimizer.step()
        listed.append({k: p.detach().clone() for k, p in params.items()})
    updates = {k: np.stack([u[k].double().cpu().numpy() for u in listed]) / RATE for k in params}
    state_bytes = sum(
        _bytes(torch, x) for p in params.values() for name, x in optimizer.state[p].items() if "qmap" not in name
    )
    return updates, state_bytes / sum(p.numel() for p in params.values())


def _bytes(torch: Any, x: Any) -> int:
    """Returns bytes of a state: a tensor or a container of tensors, without shared tables of codes."""
    if not isinstance(x, torch.Tensor):
        # FlashOptim's states are objects with tensors. Numbers and None have no bytes.
        return sum(_bytes(torch, part) for part in vars(x).values()) if hasattr(x, "__dict__") else 0
    if hasattr(x, "__tensor_flatten__") and type(x) is not torch.Tensor:
        return sum(_bytes(torch, getattr(x, name)) for name in x.__tensor_flatten__()[0] if name != "qmap")
    return int(x.numel() * x.element_size())


def errors(updates: Tree, truth: Tree) -> tuple[float, int]:
    """Returns the largest error of the checked steps, and the number of steps with non-finite updates.

    The error is infinite if an update is not finite.
    """
    names = [k for k, u in truth.items() if u[0].size >= SMALLEST]
    count = len(truth[names[0]])
    broken = sum(not all(np.isfinite(updates[k][t]).all() for k in names) for t in range(count))
    worst = 0.0
    for step in [step for step in CHECKS if step <= count] or [count]:
        squared_error = sum(float(np.sum((updates[k][step - 1] - truth[k][step - 1]) ** 2)) for k in names)
        size = sum(float(np.sum(truth[k][step - 1] ** 2)) for k in names)
        worst = max(worst, np.sqrt(squared_error / size) if np.isfinite(squared_error) else np.inf)
    return worst, broken


def peer(name: str) -> Callable[..., Any]:
    """Returns a peer's class with its options. Errors of its package propagate."""
    _, module, kind, settings = PEERS[name]
    timing.keep_triton_cache()
    return functools.partial(getattr(importlib.import_module(module), kind), **settings)


def available(device: str) -> dict[str, Callable[..., Any]]:
    """Returns the optimizers that can run here. Prints the others."""
    optimizers = dict[str, Callable[..., Any]]()
    for name, (package, *_) in PEERS.items():
        try:
            optimizer = peer(name)
            torch = importlib.import_module("torch")
            parameter = torch.nn.Parameter(torch.zeros(SMALLEST, device=device))
            parameter.grad = torch.ones_like(parameter)
            optimizer([parameter], lr=RATE).step()
            optimizers[name] = optimizer
        except Exception as error:  # packages without a GPU or a library raise many types of errors
            print(f"  {name}: left out ({package}: {type(error).__name__}: {str(error)[:120]})", flush=True)
    return optimizers


def main(argv: list[str]) -> None:
    parser = driver.parser("peers", __doc__)
    parser.add_argument("--processes", type=int, default=min(8, max(1, (os.cpu_count() or 1) // 2)),
                        help="streams at a time, each in a separate process; nothing here is timed")  # fmt: skip
    options = parser.parse_args(argv)
    device = "cuda" if jax.default_backend() == "gpu" else "cpu"
    peers = available(device)
    versions = {package: importlib.metadata.version(package) for package in {PEERS[name][0] for name in peers}}
    skipped = [name for name in PEERS if name not in peers]
    notes = driver.notes_of(__doc__)
    notes += [f"Left out, because it is not installed or does not run here: {', '.join(skipped)}."] if skipped else []
    file = driver.ResultsFile(
        options, "8-bit AdamW and other 8-bit optimizers: error of an update", notes, versions=versions
    )
    names, peer_names = ["sigma 1"] if timing.dry() else list(STREAMS), tuple(peers)
    with concurrent.futures.ProcessPoolExecutor(options.processes, multiprocessing.get_context("spawn")) as pool:
        # A single stream needs no separate process.
        run = map if min(options.processes, len(names)) == 1 else pool.map
        for rows in run(measure_stream, names, [peer_names] * len(names), [device] * len(names)):
            file.add(rows)
    file.end()


def measure_stream(name: str, peer_names: Collection[str], device: str) -> list[timing.Row]:
    """Returns the rows of a stream: all JAX optimizers, and these peers."""
    gradients, rows = stream(name, 20 if timing.dry() else STEPS), list[timing.Row]()
    for b2 in B2S[:1] if timing.dry() else B2S:
        truth = exact(gradients, b2)
        runs = {label: functools.partial(by_jax, tx, gradients) for label, tx in ours(b2).items()}
        runs |= {label: functools.partial(by_torch, peer(label), gradients, b2, device) for label in peer_names}
        rows += compare(name, b2, truth, runs)
    return rows


def compare(
    name: str, b2: float, truth: Tree, runs: Mapping[str, Callable[[], tuple[Tree, float]]]
) -> list[timing.Row]:
    """Returns the rows of a stream: errors, as a table of optimizers by streams, and bytes of state."""
    rows, setting = [], f"b2 {b2:g}"
    for label, run in runs.items():
        updates, size = run()
        error, broken = errors(updates, truth)
        row = timing.row(f"{name}, {setting}", label, ERROR, error if np.isfinite(error) else None, "1")
        rows.append(row | {"table": f"{ERROR}, {setting}", "pivot": (label, name)})
        if name == STREAMS[0]:
            row = timing.row(f"{name}, {setting}", label, "bytes a parameter", size, "B")
            rows.append(row | {"table": f"bytes of state a parameter, {setting}", "pivot": (label, "bytes")})
        if broken:
            rows.append(timing.row(f"{name}, {setting}", label, "steps that are not finite", broken, "1"))
    return rows
