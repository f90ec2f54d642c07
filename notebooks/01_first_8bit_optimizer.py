# %% [markdown]
# # Your first 8-bit optimizer
#
# Adam stores two fp32 moments, 8 bytes per parameter. `fp8jax.compressed_adamw` stores them as 8-bit floats with one
# scale for each group of 128, which needs 2.1 bytes per parameter. This notebook trains the same small network with
# both and compares losses and bytes. It runs in under a minute on a CPU.
#
# Any Colab runtime works. A T4 has no FP8 and computes bf16 as fp32, but 8-bit states save the same memory there. Keep the
# model in fp16 or fp32 on a T4.

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

import fp8jax


# %% [markdown]
# A network with one hidden layer learns a random smooth function of 64 numbers.

# %%
def init(key):
    k1, k2 = jax.random.split(key)
    return {
        "up": jax.random.normal(k1, (64, 1024)) / 8,
        "bias": jnp.zeros(1024),
        "down": jax.random.normal(k2, (1024, 128)) / 32,
    }


def network(params, x):
    return jnp.tanh(x @ params["up"] + params["bias"]) @ params["down"]


teacher = init(jax.random.key(1))


def loss(params, key):
    x = jax.random.normal(key, (256, 64))
    return jnp.mean((network(params, x) - network(teacher, x)) ** 2)


# %% [markdown]
# The only change is `fp8jax.compressed_adamw` instead of `optax.adamw`. It works in any optax chain.

# %%
def train(adamw, steps=300):
    tx = optax.chain(optax.clip_by_global_norm(1.0), adamw(3e-3, weight_decay=0.01))
    params = init(jax.random.key(0))
    state = tx.init(params)

    def step(carry, key):
        params, state = carry
        value, grads = jax.value_and_grad(loss)(params, key)
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), value

    keys = jax.random.split(jax.random.key(2), steps)
    (params, state), losses = jax.jit(lambda carry: jax.lax.scan(step, carry, keys))((params, state))
    return losses, fp8jax.state_bytes(state), state


plain, plain_bytes, _ = train(optax.adamw)
eight, eight_bytes, state = train(fp8jax.compressed_adamw)
for name, size in (("fp32", plain_bytes), ("8-bit", eight_bytes)):
    print(f"{name:>6}: first moments {size['mu']:,} bytes, second {size['nu']:,}")
print(f"final loss: fp32 {plain[-10:].mean():.5f}, 8-bit {eight[-10:].mean():.5f}")

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3), width_ratios=[2, 1])
left.semilogy(plain, linewidth=3, alpha=0.5, label="fp32 moments")
left.semilogy(eight, "--", label="8-bit moments")
left.set(xlabel="step", ylabel="loss")
left.legend()
right.bar(["fp32", "8-bit"], [(b["mu"] + b["nu"]) / 2**20 for b in (plain_bytes, eight_bytes)])
right.set_ylabel("moments, MiB")
figure.tight_layout()
plt.show()

# %% [markdown]
# Each moment is stored as a `QTensor`: codes of the parameter's shape, and a scale and an exponent for each group of 128.
# The exponent expands the range of the group to that of the format (COAT, section 4.2). Small parameters, like the bias,
# stay in fp32.

# %%
adam = optax.tree.get(state, "mu")
for name, moment in adam.items():
    if isinstance(moment, fp8jax.QTensor):
        print(f"{name}: codes {moment.codes.dtype} {moment.codes.shape}, scales {moment.scale.shape}")
    else:
        print(f"{name}: {moment.dtype} {moment.shape}")
