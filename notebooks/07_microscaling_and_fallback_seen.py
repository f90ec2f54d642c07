# %% [markdown]
# # Microscaling and fallback, seen
#
# The largest of many numbers determines their common scale. Two methods reduce the error. *Microscaling* (MOSS) adds a
# power of two, one byte, for each group of 32, under one fp32 scale. *Fallback* (INT8 training with dynamic block-level
# fallback) stores a block with an outlier twice: its codes, and the codes of the remainder. This notebook shows both on the
# same activations, measures the error of a product, and trains with them. It runs in a minute on a CPU.

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
import numpy as np
import optax
from flax import nnx

import fp8jax

# %% [markdown]
# The activations resemble those of language models: a few channels are much larger than the rest, and so is one token.

# %%
TOKENS, CHANNELS, BLOCK = 256, 512, 32


def activations(outlier):
    x = jax.random.normal(jax.random.key(0), (TOKENS, CHANNELS))
    channels = jax.random.choice(jax.random.key(1), CHANNELS, (4,), replace=False)
    return x.at[:, channels].mul(outlier).at[100].mul(outlier / 4)


def blocks(x):
    """(blocks, blocks, elements)."""
    rows, columns = x.shape[0] // BLOCK, x.shape[1] // BLOCK
    return x.reshape(rows, BLOCK, columns, BLOCK).transpose(0, 2, 1, 3).reshape(rows, columns, -1)


def noise(x, back):
    """Root mean square error of each block of 32 by 32, as a share of the block's own size."""
    return np.asarray(jnp.linalg.norm(blocks(back - x), axis=-1) / jnp.linalg.norm(blocks(x), axis=-1))


x = activations(60.0)
int8 = fp8jax.quantize(x, "int8:block32").dequantize()
int16 = int8 + fp8jax.quantize(x - int8, "int8:block32").dequantize()
largest = jnp.abs(blocks(x)).max(-1)
chosen = largest > jnp.quantile(largest, 0.75)
mixed = jnp.where(jnp.repeat(jnp.repeat(chosen, BLOCK, 0), BLOCK, 1), int16, int8)
decoded = {
    "e4m3, one scale": fp8jax.quantize(x, "e4m3").dequantize(),
    "e4m3, mx32": fp8jax.quantize(x, "e4m3:mx32+token+exact").dequantize(),
    "int8, one scale": fp8jax.quantize(x, "int8").dequantize(),
    "int8, blocks": int8,
    "int8, a quarter falls back": mixed,
}
figure, axes = plt.subplots(2, 3, figsize=(10, 4.2))
axes[0, 0].imshow(np.log10(np.asarray(largest)), aspect="auto")
axes[0, 0].set(title="amax of each block, log10", xticks=[], yticks=[])
for axis, (name, back) in zip(axes.flat[1:], decoded.items()):
    image = axis.imshow(np.log10(noise(x, back) + 1e-5), aspect="auto", vmin=-4, vmax=0, cmap="magma")
    axis.set(title=name, xticks=[], yticks=[])
figure.colorbar(image, ax=axes, label="error of a block, log10")
plt.show()

# %% [markdown]
# With one scale, int8 rounds small values to zero, because its step is uniform. e4m3 has an exponent and keeps them until
# outliers are very large. The powers of two of microscaling follow the channels and the token:

# %%
q = fp8jax.quantize(x, "e4m3:mx32+token+exact")
powers = np.asarray(q.microscale).astype(int) - 127
figure, axes = plt.subplots(1, 2, figsize=(10, 3))
image = axes[0].imshow(powers, aspect="auto")
figure.colorbar(image, ax=axes[0], label="power of two")
axes[0].set(xlabel="group of 32 channels", ylabel="token")
axes[1].hist(powers.ravel(), np.arange(powers.min() - 0.5, powers.max() + 1.5))
axes[1].set(xlabel="power of two of a group", ylabel="groups")
figure.tight_layout()
plt.show()

# %% [markdown]
# The next plot shows the error of the output of a layer. Each line compares the product `x @ w` of a recipe with the exact
# one, as the outliers grow. `fp8jax.linear` is the function that a quantized model calls.

# %%
w = jax.random.normal(jax.random.key(2), (CHANNELS, 256)) / CHANNELS**0.5
outliers = 2.0 ** np.arange(0, 13)
lines = {
    "te_current (e4m3, one scale)": fp8jax.recipes.te_current(),
    "moss_mx (e4m3, microscaled)": fp8jax.recipes.moss_mx(),
    "int8_block (128 x 128)": fp8jax.recipes.int8_block(),
}
figure, axes = plt.subplots(figsize=(10, 3.4))
for (name, recipe), style in zip(lines.items(), ("o-", "s-", "^-")):
    product = jax.jit(lambda x, w, recipe=recipe: fp8jax.linear(x, w, recipe=recipe, key=jax.random.key(0)))
    errors = []
    for outlier in outliers:
        x = activations(outlier)
        exact = x @ w
        # The error of each token: the large token must not hide the others.
        errors.append(jnp.median(jnp.linalg.norm(product(x, w) - exact, axis=1) / jnp.linalg.norm(exact, axis=1)))
    axes.loglog(outliers, errors, style, label=name)


def with_fallback(x, block=128):
    """x in int8 blocks of 128 by 128; a quarter of them has its remainder in a second int8."""
    base = fp8jax.quantize(x, f"int8:block{block}").dequantize()
    remainder = fp8jax.quantize(x - base, f"int8:block{block}").dequantize()
    peaks = jnp.abs(x).reshape(TOKENS // block, block, CHANNELS // block, block).max((1, 3))
    falls_back = peaks >= jnp.quantile(peaks, 0.75)
    return base + remainder * jnp.repeat(jnp.repeat(falls_back, block, 0), block, 1)


errors = []
for outlier in outliers:
    x = activations(outlier)
    exact, y = x @ w, with_fallback(x) @ fp8jax.quantize(w, "int8:block128").dequantize()
    errors.append(jnp.median(jnp.linalg.norm(y - exact, axis=1) / jnp.linalg.norm(exact, axis=1)))
axes.loglog(outliers, errors, "v-", label="int8_block, a quarter of the blocks falls back")
axes.set(xlabel="size of the outliers", ylabel="median relative error of a token")
axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
figure.tight_layout()
plt.show()

# %% [markdown]
# In training, the threshold of a layer is state. After each step it moves so that 10 to 30 % of the blocks fall back.
# Here the inputs get outliers halfway through the training, and the thresholds follow.

# %%
LAYERS = 2


class Model(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(CHANNELS, CHANNELS, use_bias=False, rngs=rngs) for _ in range(LAYERS)])

    def __call__(self, x):
        for layer in self.layers:
            x = x + nnx.gelu(layer(x))
        return x


target = Model(nnx.Rngs(5))


@nnx.jit
def step(model, optimizer, x):
    def loss(model):
        return jnp.mean(((model(x) - target(x)) / (1 + jnp.abs(x))) ** 2)

    wrt = nnx.Any(nnx.Param, fp8jax.nnx.GradientStatistic)
    value, grads = nnx.value_and_grad(loss, argnums=nnx.DiffState(0, wrt))(model)
    if jax.tree.leaves(nnx.state(model, fp8jax.nnx.ScalingVariable)):
        grads = fp8jax.nnx.advance_scaling(model, grads)
    optimizer.update(model, grads)
    return value


def train(name, steps=60):
    model = Model(nnx.Rngs(1))
    if name != "fp32":
        model = fp8jax.nnx.quantize(model, name)
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    losses, states = [], []
    for i in range(steps):
        x = activations(1.0 if i < steps // 2 else 60.0) * (1 + 0.1 * jax.random.normal(jax.random.key(i), (TOKENS, 1)))
        losses.append(step(model, optimizer, x))
        states.append(jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model, fp8jax.nnx.ScalingVariable))))
    return np.array(losses), states


results = {name: train(name) for name in ("fp32", "int8_block", "int8_fallback", "moss_mx")}
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.2))
exact, _ = results["fp32"]
for (name, (losses, _)), style in zip(results.items(), ("-", "--", ":", "-.")):
    left.plot(100 * (losses / exact - 1), style, label=name)
left.set(xlabel="step", ylabel="loss above that in fp32, %")
left.legend()
for i, style in enumerate(("-", "--")):
    thresholds = [state["layers"][i]["dot_general"]["threshold_x"] for state in results["int8_fallback"][1]]
    right.semilogy(thresholds, style, label=f"layer {i}")
right.set(xlabel="step", ylabel="threshold", title="a block with a larger amax falls back")
right.legend()
figure.tight_layout()
plt.show()
