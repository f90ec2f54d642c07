# %% [markdown]
# # Speed and memory on a GPU
#
# This notebook trains one Llama in bf16 and in 8 bits. It measures the time and memory of a step, the bytes of the
# optimizer state, and the loss. The 8-bit recipe is the one for this device (notebook 3).
#
# It needs a GPU with FP8 (L4, RTX PRO 6000, H100, H200) to show a gain in speed. On Colab, choose one under
# Runtime > Change runtime type. It also runs on a CPU, with a tiny model. There only the optimizer state becomes smaller:
# XLA widens 8-bit values on a CPU, which costs time and memory. The saved outputs are those of an H200.

# %%
# On Colab only: installs fp8jax, once, with a JAX that is new enough for it and for Colab's driver (CUDA 12).
import importlib.util, os, pathlib, shutil, subprocess, sys

# The source of fp8jax: the https address of its git repository, a folder, a wheel, or its name on a package index.
SOURCE = os.environ.get("FP8JAX_SOURCE", "")

gpu = shutil.which("nvidia-smi")
needed = ("fp8jax", "jax_triton") if gpu else ("fp8jax",)  # the fused kernels need jax-triton
if "google.colab" in sys.modules and None in map(importlib.util.find_spec, needed):
    if not SOURCE:
        raise SystemExit("Write the address of fp8jax's repository, or its folder, into SOURCE above.")
    package = "fp8jax[flax,cuda12]" if gpu else "fp8jax[flax]"
    if "://" in SOURCE:
        package += f" @ git+{SOURCE.removeprefix('git+')}"
    elif os.path.isdir(SOURCE) or SOURCE.endswith(".whl"):
        package += f" @ {pathlib.Path(SOURCE).resolve().as_uri()}"
    elif SOURCE != "fp8jax":
        raise SystemExit(f"SOURCE is {SOURCE!r}, which is no address with ://, no folder, no wheel, and not 'fp8jax'.")
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--upgrade", package], check=True)
    # Colab has loaded its own, older JAX.
    raise SystemExit("Installed. Now restart: Runtime > Restart session, then Runtime > Run all.")

# %%
import os

# Without this flag, XLA may compile FP8 products to slower kernels. It must be set before JAX starts.
os.environ.setdefault("XLA_FLAGS", "--xla_gpu_enable_triton_gemm=false")

import time

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import optax
from flax import nnx

import fp8jax

GPU = jax.devices()[0].platform == "gpu"
RECIPE = fp8jax.recipes.device().recipe if GPU else "coat"
print(f"{jax.devices()[0].device_kind}: the recipe is {RECIPE}")

# %% [markdown]
# A plain Llama in Flax NNX, with rotary positions:

# %%
DIM, LAYERS, HEADS, MLP, VOCAB, BATCH, LENGTH = (
    (2048, 8, 16, 5632, 16384, 4, 2048) if GPU else (64, 2, 2, 192, 256, 4, 64)
)
HEAD_DIM = DIM // HEADS
ATTENTION = "cudnn" if GPU and float(jax.devices()[0].compute_capability) >= 8 else "xla"


def rotate(x):
    """Rotary positions of queries or keys (batch, length, heads, head_dim)."""
    angle = jnp.arange(x.shape[1])[:, None] * 10000.0 ** -jnp.linspace(0, 1, HEAD_DIM // 2, endpoint=False)
    sin, cos = jnp.sin(angle)[None, :, None], jnp.cos(angle)[None, :, None]
    first, second = jnp.split(x.astype(jnp.float32), 2, -1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1).astype(x.dtype)


class Block(nnx.Module):
    def __init__(self, rngs):
        def linear(inputs, outputs):
            return nnx.Linear(inputs, outputs, use_bias=False, dtype=jnp.bfloat16, rngs=rngs)

        self.norm1, self.norm2 = (nnx.RMSNorm(DIM, dtype=jnp.bfloat16, rngs=rngs) for _ in range(2))
        self.q, self.k, self.v, self.o = (linear(DIM, DIM) for _ in range(4))
        self.gate, self.up, self.down = linear(DIM, MLP), linear(DIM, MLP), linear(MLP, DIM)

    def __call__(self, x):
        y = self.norm1(x)
        q, k, v = (layer(y).reshape(*y.shape[:2], HEADS, HEAD_DIM) for layer in (self.q, self.k, self.v))
        y = jax.nn.dot_product_attention(rotate(q), rotate(k), v, is_causal=True, implementation=ATTENTION)
        x = x + self.o(y.reshape(x.shape))
        y = self.norm2(x)
        return x + self.down(nnx.silu(self.gate(y)) * self.up(y))


class Llama(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCAB, DIM, dtype=jnp.bfloat16, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(LAYERS)])
        self.norm = nnx.RMSNorm(DIM, dtype=jnp.bfloat16, rngs=rngs)
        self.head = nnx.Linear(DIM, VOCAB, use_bias=False, dtype=jnp.bfloat16, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


# %% [markdown]
# One training step works for both. It updates weights and optimizer state in place (`donate_argnums`); otherwise XLA
# needs memory for a second copy. Each token is usually the last one plus one, which a model learns in a few steps.


# %%
def batch(key):
    start, jump = jax.random.split(key)
    first = jax.random.randint(start, (BATCH, 1), 0, VOCAB)
    return (first + jnp.cumsum(1 + jax.random.bernoulli(jump, 0.1, (BATCH, LENGTH + 1)), 1)) % VOCAB


@nnx.jit(donate_argnums=(0, 1))
def step(model, optimizer, tokens):
    def loss(model):
        logits = model(tokens[:, :-1]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    value, grads = fp8jax.nnx.value_and_grad(loss)(model)
    optimizer.update(model, grads)
    return value


def measure(name, steps=30 if GPU else 5, rounds=3):
    """Milliseconds a step, GB of a step beside weights and states, GB of moments, losses."""
    model = fp8jax.nnx.quantize(Llama(nnx.Rngs(0)), name)  # "bf16" returns a copy with plain products
    optimizer = fp8jax.nnx.Optimizer(model, fp8jax.optimizer(name, 3e-4, clip=1.0), wrt=nnx.Param)
    batches = [batch(jax.random.key(i)) for i in range(steps)]
    temporary = step.lower(model, optimizer, batches[0]).compile().memory_analysis().temp_size_in_bytes / 1e9
    losses = jnp.stack([step(model, optimizer, tokens) for tokens in batches])
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        jax.block_until_ready([step(model, optimizer, tokens) for tokens in batches])
        seconds.append((time.perf_counter() - start) / steps)
    sizes = fp8jax.state_bytes(optimizer.opt_state)
    return 1e3 * min(seconds), temporary, (sizes["mu"] + sizes["nu"]) / 1e9, losses


results = {name: measure(name) for name in ("bf16", RECIPE)}
for name, (ms, temporary, moments, losses) in results.items():
    print(
        f"{name}: {ms:.1f} ms a step, {temporary:.3g} GB for a step, {moments:.3g} GB of moments, loss {losses[-1]:.3f}"
    )
(ms, temporary, moments, _), (ms_8, temporary_8, moments_8, _) = results["bf16"], results[RECIPE]
print(f"{RECIPE}: moments take {moments / moments_8:.2f} times less than in fp32")
if GPU:
    print(
        f"a step takes {temporary / temporary_8:.2f} times less memory and is {ms / ms_8:.2f} times as fast as in bf16"
    )

# %%
figure, axes = plt.subplots(1, 4, figsize=(12, 3), width_ratios=(1, 1, 1, 2))
for i, title in enumerate(("ms a step", "GB for a step", "GB of moments")):
    bars = axes[i].bar(list(results), [values[i] for values in results.values()], color=("tab:gray", "tab:blue"))
    axes[i].bar_label(bars, fmt="%.3g")
    axes[i].set_title(title)
for (name, values), style in zip(results.items(), ("-", "--")):
    axes[3].plot(values[3], style, label=name)
axes[3].set(xlabel="step", title="loss")
axes[3].legend()
figure.tight_layout()
plt.show()

# %% [markdown]
# `explain` shows which layers are in 8 bits, and the gain of each operation:

# %%
print(fp8jax.explain(Llama(nnx.Rngs(0)), RECIPE, jnp.zeros((BATCH, LENGTH), jnp.int32)))
