"""The Llama of `bench step` and `bench models` in PyTorch with torch.compile: in bf16, and with torchao's float8.

Weights and moments are fp32, and the compute dtype is bf16 (autocast). torch selects cuDNN's attention or
FlashAttention. AdamW is torch's fused one. Inductor determines rematerialization. As in our recipes, the head is not
quantized.
"""

import dataclasses
import importlib
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from experiments.bench import timing
from experiments.models.llama import LlamaConfig, rope_tables
from experiments.train.config import Config

# torchao's recipe by arm.
_MARK = "torch: "
ARMS = {"torch bf16": None, "torchao tensorwise": "tensorwise", "torchao rowwise": "rowwise"}


def missing(arm: str) -> str | None:
    """Returns the reason why an arm cannot run in this environment, or None."""
    absent = [name for name in ("torch", *(["torchao"] if ARMS[arm] else [])) if importlib.util.find_spec(name) is None]
    if absent:
        return f"{' and '.join(absent)} not importable: rows left out"
    try:
        torch = importlib.import_module("torch")
    except (ImportError, OSError) as error:  # Its shared libraries may be missing.
        return f"torch cannot be imported ({error}): rows left out"
    if not torch.cuda.is_available():
        return "this torch sees no CUDA GPU: rows left out"
    return None


def available(arms: Iterable[str] = tuple(ARMS)) -> Iterator[str]:
    """Yields the arms that can run. Prints the others."""
    for arm in arms:
        reason = missing(arm)
        if reason is None:
            yield arm
        else:
            print(f"  {arm}: {reason}", flush=True)


class TorchTimes(NamedTuple):
    """The measurements of an arm.

    Attributes:
        late: seconds per step in a loop that reads each loss after the next step has started.
        synchronised: seconds per step in a loop that reads each loss at once.
        memory: peak GB of temporaries, and peak GB in total.
    """

    late: timing.Seconds
    synchronised: timing.Seconds
    memory: tuple[float, float]


def measured(
    arms: Sequence[str], llama: LlamaConfig, batch: int, length: int, rounds: int, steps: int
) -> dict[str, TorchTimes]:
    """Returns times and memory of the arms that can run here, from a separate process, which frees the GPU.

    Args:
        arms: names of `ARMS`.
        llama, batch, length: the model and its batch.
        rounds, steps: arguments of `timing.in_turns`.
    """
    if timing.dry() or not (arms := list(available(arms))):
        return {}
    request = {"arms": arms, "llama": dataclasses.asdict(llama), "batch": batch, "length": length, "rounds": rounds,
             "steps": steps}  # fmt: skip
    command = [sys.executable, "-m", "experiments.bench.step_torch", json.dumps(request)]
    # That process uses JAX only for the tables of positions, on the CPU.
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    results = []
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(_MARK):
                results.append(json.loads(line.removeprefix(_MARK)))
                seconds = timing.Seconds(results[-1]["late"])
                print(f"  {results[-1]['arm']}: {1e3 * seconds:.1f} ms a step", flush=True)
    if process.returncode or not results:
        print(f"  torch's arms ended with code {process.returncode}: rows left out", flush=True)
    return {
        one["arm"]: TorchTimes(timing.Seconds(one["late"]), timing.Seconds(one["synchronised"]), tuple(one["memory"]))
        for one in results
    }


def main(request: str) -> None:
    """Runs the arms of a request of `measured`, and prints a line of JSON after each."""
    settings = json.loads(request)
    llama = LlamaConfig(**settings["llama"])
    for name in settings["arms"]:
        arm = TorchArm(name, llama, settings["batch"], settings["length"])
        calls = {"late": timing.late(arm), "synchronised": arm.synchronised}
        times = timing.in_turns(calls, settings["rounds"], dict.fromkeys(calls, settings["steps"]))
        seconds_by_kind = {kind: took.rounds for kind, took in times.items()}
        print(_MARK + json.dumps({"arm": name, **seconds_by_kind, "memory": arm.memory}), flush=True)
        arm.close()


class Waiting:
    """A pending torch value, such as a loss. `jax.block_until_ready` waits for it, but not for later work."""

    def __init__(self, torch: Any, value: Any) -> None:
        self.value, self.end = value, torch.cuda.Event()
        self.end.record()

    def block_until_ready(self) -> "Waiting":
        self.end.synchronize()
        return self


class TorchArm:
    """A training step in torch, with its state.

    Attributes:
        memory: peak GB of temporaries and peak GB in total during the first steps, from torch's allocator.
    """

    def __init__(self, name: str, llama: LlamaConfig, batch: int, length: int) -> None:
        timing.keep_triton_cache()
        self.torch = torch = importlib.import_module("torch")
        optim = Config().optim
        start = time.perf_counter()
        torch.manual_seed(0)
        model = build(torch, llama, length).cuda()
        if ARMS[name]:
            float8 = importlib.import_module("torchao.float8")
            quantized = lambda module, path: path != "head"  # noqa: E731
            settings = float8.Float8LinearConfig.from_recipe_name(ARMS[name])
            float8.convert_to_float8_training(model, config=settings, module_filter_fn=quantized)
        matrices = [p for p in model.parameters() if p.ndim >= 2]
        vectors = [p for p in model.parameters() if p.ndim < 2]
        groups = [{"params": matrices, "weight_decay": optim.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        self.parameters, self.clip = [*matrices, *vectors], optim.clip
        self.optimizer = torch.optim.AdamW(groups, optim.lr, (optim.b1, optim.b2), optim.eps, fused=True)
        self.model = torch.compile(model)
        self.tokens = torch.randint(0, llama.vocab, (batch, length + 1), device="cuda")
        # The first step creates the optimizer's state. The peak is that of the following steps.
        self().block_until_ready()
        torch.cuda.reset_peak_memory_stats()
        weights_bytes = torch.cuda.memory_allocated()
        for _ in range(2):
            self().block_until_ready()
        peak = torch.cuda.max_memory_allocated()
        self.memory = (peak - weights_bytes) / 1e9, peak / 1e9
        print(f"  {name}: compiled and ran three times in {time.perf_counter() - start:.0f} s", flush=True)

    def __call__(self) -> Waiting:
        with self.torch.autocast("cuda", self.torch.bfloat16):
            loss = self.model(self.tokens)
        loss.backward()
        self.torch.nn.utils.clip_grad_norm_(self.parameters, self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return Waiting(self.torch, loss.detach())

    def synchronised(self) -> Waiting:
        """Runs one step and waits for its end."""
        return self().block_until_ready()

    def close(self) -> None:
        """Releases the GPU's memory for JAX."""
        del self.model, self.optimizer, self.parameters, self.tokens
        self.torch._dynamo.reset()
        self.torch.cuda.empty_cache()


def build(torch: Any, config: LlamaConfig, length: int) -> Any:
    """Returns the model as a torch module with fp32 weights, from tokens (B, T + 1) to the mean cross-entropy."""
    nn, functional = torch.nn, torch.nn.functional
    cosine, sine = (
        torch.tensor(table.tolist())[None, :, None, :]
        for table in rope_tables(length, config.head_dim, config.rope_theta)
    )

    def linear(inner: int, outer: int, std: float = 0.02) -> Any:
        layer = nn.Linear(inner, outer, bias=False)
        nn.init.normal_(layer.weight, std=std)
        return layer

    def rotate(x: Any, cos: Any, sin: Any) -> Any:
        first, second = x.float().chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)

    class TorchBlock(nn.Module):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            out_std = 0.02 / (2 * config.layers) ** 0.5
            self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
            self.mlp_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
            self.q = linear(config.dim, config.dim)
            self.k, self.v = (linear(config.dim, config.kv_heads * config.head_dim) for _ in range(2))
            self.out = linear(config.dim, config.dim, out_std)
            self.gate, self.up = (linear(config.dim, config.mlp_dim) for _ in range(2))
            self.down = linear(config.mlp_dim, config.dim, out_std)

        def forward(self, x: Any, cos: Any, sin: Any) -> Any:
            y = self.attention_norm(x)
            q, k, v = (projection(y).unflatten(-1, (-1, config.head_dim)) for projection in (self.q, self.k, self.v))
            q, k, v = (z.transpose(1, 2) for z in (rotate(q, cos, sin), rotate(k, cos, sin), v))
            grouped = config.kv_heads != config.heads
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
            x = x + self.out(mixed.transpose(1, 2).flatten(-2))
            y = self.mlp_norm(x)
            return x + self.down(functional.silu(self.gate(y)) * self.up(y))

    class TorchModel(nn.Module):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(config.vocab, config.dim)
            nn.init.normal_(self.embed.weight, std=0.02)
            self.layers = nn.ModuleList(TorchBlock() for _ in range(config.layers))
            self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
            self.head = linear(config.dim, config.vocab)
            self.register_buffer("cos", cosine)
            self.register_buffer("sin", sine)

        def forward(self, tokens: Any) -> Any:
            x = self.embed(tokens[:, :-1]).to(torch.bfloat16)
            for layer in self.layers:
                x = layer(x, self.cos, self.sin)
            logits = self.head(self.norm(x).to(torch.bfloat16)).float()
            return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    return TorchModel()


if __name__ == "__main__":
    main(sys.argv[1])
