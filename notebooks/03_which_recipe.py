# %% [markdown]
# # Which recipe
#
# A recipe chooses the format of the products, the residuals of the backward pass, and the format of the optimizer state.
# This notebook trains one small model (RMSNorm, SwiGLU) with four recipes:
#
# - `bf16`;
# - `fast`: the microscaled products of MOSS with the activations and the optimizer of COAT;
# - `int8_fallback`: INT8 products, with 16 bits for blocks that have outliers;
# - `fp8_lm`: its optimizer stores 5 bytes per parameter, master weights included.
#
# It runs in a minute on a CPU. XLA widens 8-bit products on a CPU, so this notebook shows loss and memory, not speed.

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
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import optax
from flax import nnx

import fp8jax

# %% [markdown]
# The best recipe depends on the formats that the GPU multiplies. `fp8jax.recipes.for_device()` returns one for this
# device. The training program has `--recipe auto`.

# %%
for name, capability in {"T4": 75, "A100": 80, "L4": 89, "H100": 90, "RTX PRO 6000": 120}.items():
    device = fp8jax.recipes.device(capability)
    print(f"{name}: {device.recipe}; {device.description}")
here = fp8jax.recipes.device()
print(f"here, {jax.devices()[0].device_kind}: {here.recipe}; {here.description}")

# %% [markdown]
# A plain Flax model:

# %%
VOCAB, LENGTH, WIDTH, INNER = 16, 32, 64, 192


class SwiGLU(nnx.Module):
    def __init__(self, rngs):
        kinds = {"use_bias": False, "dtype": jnp.bfloat16, "rngs": rngs}
        self.gate, self.up = nnx.Linear(WIDTH, INNER, **kinds), nnx.Linear(WIDTH, INNER, **kinds)
        self.down = nnx.Linear(INNER, WIDTH, **kinds)

    def __call__(self, x):
        return self.down(nnx.silu(self.gate(x)) * self.up(x))


class Block(nnx.Module):
    def __init__(self, rngs):
        kinds = {"dtype": jnp.bfloat16, "rngs": rngs}
        self.norm1, self.norm2 = nnx.RMSNorm(WIDTH, **kinds), nnx.RMSNorm(WIDTH, **kinds)
        self.attention = nnx.MultiHeadAttention(num_heads=2, in_features=WIDTH, decode=False, **kinds)
        self.mlp = SwiGLU(rngs)

    def __call__(self, x):
        x = x + self.attention(self.norm1(x), mask=nnx.make_causal_mask(x[..., 0]))
        return x + self.mlp(self.norm2(x))


class Transformer(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.position = nnx.Embed(LENGTH, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])
        self.head = nnx.Linear(WIDTH, VOCAB, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens) + self.position(jnp.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


# %% [markdown]
# In the training text, the last two tokens determine the next one with probability 0.9. One training step works for
# every recipe. Some recipes have scaling state, like the thresholds of `int8_fallback`. `fp8jax.nnx.value_and_grad`
# collects its statistics, and `fp8jax.nnx.Optimizer` updates it.

# %%
table = jax.random.randint(jax.random.key(1), (VOCAB, VOCAB), 0, VOCAB)


def text(key, batch=16):
    start, noise, coin = jax.random.split(key, 3)
    first = jax.random.randint(start, (batch, 2), 0, VOCAB)
    noise = jax.random.randint(noise, (LENGTH - 1, batch), 0, VOCAB)
    follow = jax.random.uniform(coin, (LENGTH - 1, batch)) < 0.9

    def extend(last, drawn):
        token = jnp.where(drawn[1], table[last[:, 0], last[:, 1]], drawn[0])
        return jnp.stack([last[:, 1], token], 1), token

    return jnp.concatenate([first, jax.lax.scan(extend, first, (noise, follow))[1].T], 1)


# %%
@nnx.jit
def step(model, optimizer, key):
    tokens = text(key)

    def loss(model):
        logits = model(tokens[:, :-1]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    value, grads = fp8jax.nnx.value_and_grad(loss)(model)
    optimizer.update(model, grads)
    return value


def train(name, steps=80):
    recipe, model = fp8jax.recipes.get(name), Transformer(nnx.Rngs(0))
    if name != "bf16":
        model = fp8jax.nnx.quantize(model, recipe)
    tx = fp8jax.optimizer(recipe, 3e-3, weight_decay=0.1, min_size=0)
    optimizer = fp8jax.nnx.Optimizer(model, tx, wrt=nnx.Param)
    losses = jnp.stack([step(model, optimizer, jax.random.key(i)) for i in range(steps)])
    return losses, fp8jax.state_bytes(optimizer.opt_state)


results = {name: train(name) for name in ("bf16", "fast", "int8_fallback", "fp8_lm")}
for name, (losses, sizes) in results.items():
    parts = ", ".join(f"{part} {size / 1024:.0f} KiB" for part, size in sizes.items())
    print(f"{name}: loss {losses[-10:].mean():.4f}; optimizer state: {parts}")

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3))
baseline, _ = results["bf16"]
left.plot(baseline)
left.set(xlabel="step", ylabel="loss in bf16")
for (name, (losses, _)), style in zip(results.items(), ("-", "--", ":", "-.")):
    right.plot(losses - baseline, style, label=name)
right.set(xlabel="step", ylabel="loss minus loss in bf16")
right.legend(fontsize="small")
figure.tight_layout()
plt.show()

# %% [markdown]
# `other` of `fp8_lm` is the master weights in 16 bits, so the parameters may be bf16. Notebook 9 measures speed and memory
# on a GPU.
