# %% [markdown]
# # Range expansion, seen
#
# Adam stores two moments per parameter. In 8 bits, a group of 128 shares a scale, and e4m3 has full precision over about
# 4.5 decades. The moments of a group span fewer decades, or more. Range expansion (COAT, section 4.2) raises a group to a
# power k before it is stored, so that it fills the range of the format. This notebook trains a small model, plots its
# moments, and trains it again with and without expansion. It runs in half a minute on a CPU.

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

import fp8jax

# %% [markdown]
# The inputs of this small network have different sizes and are often zero, so that gradients differ widely within a row of
# the first matrix. Groups run along the last axis. The function to learn is another network of the same shape.

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
# The histogram shows how many decades a group of 128 spans, from its smallest to its largest second moment. The dashed
# line is the span of the normal numbers of e4m3, 4.5 decades. Smaller values are rounded coarsely or to zero. The groups of
# `down` need one decade and waste the rest. The groups of `up` mix inputs of all sizes and do not fit.

# %%
figure, axes = plt.subplots(figsize=(8, 3))
for name, (_, nu) in moments.items():
    positive = np.where(nu > 0, nu, np.nan)
    axes.hist(np.log10(np.nanmax(positive, 1) / np.nanmin(positive, 1)), np.arange(0, 12, 0.25), alpha=0.7, label=name)
axes.axvline(np.log10(448 * 2**6), color="C3", linestyle="--", label="e4m3's normal numbers")
axes.set(xlabel="decades between the smallest and the largest second moment of a group", ylabel="groups")
axes.legend()
figure.tight_layout()
plt.show()

# %% [markdown]
# The next histograms show the codes of the second moments. Without expansion, narrow groups crowd below the largest code
# and small elements of wide groups become 0. With expansion, both fill the format. The power k of each group is stored
# with its scale. A k above 1 stretches a group, and a k below 1 squeezes it.

# %%
figure, axes = plt.subplots(2, 3, figsize=(10, 5))
for row, (name, (_, nu)) in zip(axes, moments.items()):
    for axis, spec in zip(row, ("e4m3:group128", "e4m3:group128+expand")):
        q = fp8jax.quantize(jnp.asarray(nu), spec)
        codes = np.abs(np.asarray(q.codes.astype(jnp.float32)))
        axis.hist(np.log2(codes[codes > 0]), np.arange(-9.5, 9.5))
        zeros = np.mean((codes == 0) & (nu != 0))
        expanded = "expanded" if q.expansion is not None else "not expanded"
        axis.set(title=f"{name}, {expanded}\n{zeros:.1%} become 0", xlabel="log2 of a code")
    row[2].hist(np.asarray(q.expansion, np.float32).ravel(), 30)
    row[2].set(title=f"{name}, k of the groups", xlabel="k")
figure.tight_layout()
plt.show()

# %% [markdown]
# Adam's update is m / sqrt(v), so the error of a second moment matters in the update. Each point compares the update from
# 8-bit moments with the exact one. Without expansion, a second moment that became 0 makes its update explode (points at
# the edges).

# %%
figure, axes = plt.subplots(1, 2, figsize=(8, 3.6), sharex=True, sharey=True)
mu, nu = moments["up"]
for axis, spec in zip(axes, ("e4m3:group128", "e4m3:group128+expand")):
    m, v = (np.asarray(fp8jax.quantize(jnp.asarray(x), spec).dequantize()) for x in (mu, nu))
    clipped = np.clip(m / (np.sqrt(np.maximum(v, 0)) + 1e-8), -4, 4)
    axis.plot((mu / (np.sqrt(nu) + 1e-8)).ravel()[::5], clipped.ravel()[::5], ".", ms=1.5)
    axis.set(title=spec, xlabel="exact update", ylim=(-4.2, 4.2))
axes[0].set_ylabel("update from 8 bits, clipped at 4")
figure.tight_layout()
plt.show()

# %% [markdown]
# The same training with both moments in 8 bits. The distance is that of the final weights from those of the exact optimizer.
# Without expansion, fp8jax never decodes a nonzero second moment to zero, so no update explodes as above. The
# distance is still larger.

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.2))
left.semilogy(exact)
left.set(xlabel="step", ylabel="loss of optax, moments in fp32")
for expand, style in ((False, "--"), (True, ":")):
    tx = fp8jax.compressed_adamw(2e-3, b2=0.95, weight_decay=1e-4, nu="e4m3", expand=expand)
    trained, state, losses = train(tx)
    distance = optax.global_norm(jax.tree.map(jnp.subtract, trained, params)) / optax.global_norm(params)
    size = sum(fp8jax.state_bytes(state)[part] for part in ("mu", "nu")) / sum(x.size for x in jax.tree.leaves(params))
    name = "expanded" if expand else "not expanded"
    print(f"{name}: {size:.2f} bytes per parameter, distance {distance:.2%}")
    right.plot(losses - exact, style, label=f"8 bits, {name}")
right.set(xlabel="step", ylabel="loss minus that of optax")
right.legend()
figure.tight_layout()
plt.show()

# %% [markdown]
# `expand="coat"` computes k as in the paper, from the exact ratio of a group at each step. RESULTS.md has the errors of both
# on the moments of a trained model.
