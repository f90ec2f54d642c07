# %% [markdown]
# # Range expansion, seen
#
# Adam keeps two averages for each parameter. In 8 bits a group of 128 shares a scale, and e4m3 has about four and a half
# decades of full precision: moments of a real model span fewer, or more. Range expansion (COAT, section 4.2) raises a
# group to a power k before it is stored, so that it fills the format. This notebook trains a small model, looks at its own
# moments, and trains it again with and without. Half a minute on a CPU.

# %%
# On Colab only: installs fp8jax, once, with a JAX that is new enough for it and for Colab's driver (CUDA 12).
import importlib.util, os, pathlib, shutil, subprocess, sys

# Where fp8jax comes from: the https address of its git repository, a folder that holds it, its wheel, or a name on a package index.
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

import fp8jax

# %% [markdown]
# A small network whose inputs are of different sizes and often zero, so that gradients differ widely within a row of the
# first matrix (groups run along the last axis). The function to learn is another network of the same shape.

# %%
INPUTS, WIDTH, OUTPUTS, BATCH = 256, 256, 64, 128
sizes = 10.0 ** jax.random.uniform(jax.random.key(0), (INPUTS,), minval=-2.5, maxval=0.5)


def init(key):
    first, second = jax.random.split(key)
    return {
        "up": jax.random.normal(first, (WIDTH, INPUTS)) / INPUTS**0.5,
        "down": jax.random.normal(second, (OUTPUTS, WIDTH)) / WIDTH**0.5,
    }


def network(params, x):
    return jax.nn.gelu(x @ params["up"].T) @ params["down"].T


teacher = init(jax.random.key(1))


def batch(key):
    values, seen = jax.random.split(key)
    x = jax.random.normal(values, (BATCH, INPUTS)) * sizes
    return x * (jax.random.uniform(seen, x.shape) < 0.3)


def loss(params, x):
    return jnp.mean((network(params, x) - network(teacher, x)) ** 2)


def train(tx, steps=300):
    @jax.jit
    def step(params, state, key):
        value, grads = jax.value_and_grad(loss)(params, batch(key))
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    params = init(jax.random.key(2))
    state, losses = tx.init(params), []
    for i in range(steps):
        params, state, value = step(params, state, jax.random.key(i))
        losses.append(value)
    return params, state, np.array(losses)


params, (adam, *_), exact = train(optax.adamw(2e-3, b2=0.95))
moments = {name: [np.asarray(x[name]).reshape(-1, 128) for x in (adam.mu, adam.nu)] for name in ("up", "down")}

# %% [markdown]
# How many decades a group of 128 spans, from its smallest to its largest second moment. Below the largest e4m3 has 4.5
# decades of normal numbers, up to the dashed line; what is further down is rounded coarsely, or to zero. The groups of
# `down` need one decade and waste the rest; those of `up` have inputs of all sizes in them and do not fit.

# %%
figure, axes = plt.subplots(figsize=(8, 3))
for name, (_, nu) in moments.items():
    kept = np.where(nu > 0, nu, np.nan)
    axes.hist(np.log10(np.nanmax(kept, 1) / np.nanmin(kept, 1)), np.arange(0, 12, 0.25), alpha=0.7, label=name)
axes.axvline(np.log10(448 * 2**6), color="C3", linestyle="--", label="e4m3's normal numbers")
axes.set(xlabel="decades between the smallest and the largest second moment of a group", ylabel="groups")
axes.legend()
figure.tight_layout()
plt.show()

# %% [markdown]
# Which of e4m3's codes second moments use. As they are, narrow groups crowd below the largest code and wide ones lose their
# small members to 0; expanded, both fill the format. k, the power of each group, is stored with its scale: above 1 it
# stretches a group, below 1 it squeezes it.

# %%
figure, axes = plt.subplots(2, 3, figsize=(10, 5))
for row, (name, (_, nu)) in zip(axes, moments.items()):
    for axis, spec in zip(row, ("e4m3:group128", "e4m3:group128+expand")):
        q = fp8jax.quantize(jnp.asarray(nu), spec)
        codes = np.abs(np.asarray(q.codes.astype(jnp.float32)))
        axis.hist(np.log2(codes[codes > 0]), np.arange(-9.5, 9.5))
        zeros = np.mean((codes == 0) & (nu != 0))
        axis.set(title=f"{name}, {'expanded' if q.expansion is not None else 'as it is'}", xlabel="log2 of a code")
        axis.text(0.03, 0.9, f"{zeros:.1%} become 0", transform=axis.transAxes)
    row[2].hist(np.asarray(q.expansion, np.float32).ravel(), 30)
    row[2].set(title=f"{name}, k of the groups", xlabel="k")
figure.tight_layout()
plt.show()

# %% [markdown]
# An update is m / sqrt(v): what a second moment's error does is not seen in the moment but there. Each point is a
# parameter's update from moments in 8 bits, against the exact one. As they are, a second moment that became 0 lets its
# update explode (points at the edges).

# %%
figure, axes = plt.subplots(1, 2, figsize=(8, 3.6), sharex=True, sharey=True)
mu, nu = moments["up"]
for axis, spec in zip(axes, ("e4m3:group128", "e4m3:group128+expand")):
    m, v = (np.asarray(fp8jax.quantize(jnp.asarray(x), spec).dequantize()) for x in (mu, nu))
    seen = np.clip(m / (np.sqrt(np.maximum(v, 0)) + 1e-8), -4, 4)
    axis.plot((mu / (np.sqrt(nu) + 1e-8)).ravel()[::5], seen.ravel()[::5], ".", ms=1.5)
    axis.set(title=spec, xlabel="exact update", ylim=(-4.2, 4.2))
axes[0].set_ylabel("in 8 bits, cut at 4")
figure.tight_layout()
plt.show()

# %% [markdown]
# The same training with both moments in 8 bits, and how far from the exact optimizer's weights it ends. Without expansion
# fp8jax does not let a second moment decode to zero that is not, so that nothing explodes as above; but it is further away.

# %%
figure, axes = plt.subplots(figsize=(8, 3.2))
axes.semilogy(exact, label="optax, moments in fp32")
for expand, style in ((False, "--"), (True, ":")):
    tx = fp8jax.compressed_adamw(2e-3, b2=0.95, weight_decay=1e-4, nu="e4m3", expand=expand)
    found, state, losses = train(tx)
    away = optax.global_norm(jax.tree.map(jnp.subtract, found, params)) / optax.global_norm(params)
    size = sum(fp8jax.state_bytes(state)[part] for part in ("mu", "nu")) / sum(x.size for x in jax.tree.leaves(params))
    label = f"8 bits{', expanded' if expand else ''}: {size:.2f} bytes a parameter, {away:.2%} away"
    axes.semilogy(losses, style, label=label)
axes.set(xlabel="step", ylabel="loss")
axes.legend()
figure.tight_layout()
plt.show()

# %% [markdown]
# `expand="coat"` takes the paper's own k, from the exact ratio of a group at each step. The errors of both on the moments of
# a trained model are in the documentation's results.
