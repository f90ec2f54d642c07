# %% [markdown]
# # LoRA on an 8-bit base
#
# LoRA adapts a trained model to another task. The base weights are frozen and stored as 8-bit codes, one byte per
# parameter. Only two low-rank factors per matrix are trained. This notebook compares the loss and the memory with adapters
# on an fp32 base. It runs in under a minute on a CPU.

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
# A network with two hidden layers, and two tasks. The second task is the first one with a linear map on its outputs.

# %%
WIDTH, BATCH = 256, 128


def init(key):
    names = ("first", "second", "third")
    return {n: {"kernel": jax.random.normal(k, (WIDTH, WIDTH)) / 16} for n, k in zip(names, jax.random.split(key, 3))}


teacher = init(jax.random.key(1))
thin = jax.random.normal(jax.random.key(2), (2, WIDTH, 8))
mixing = jnp.eye(WIDTH) + thin[0] @ thin[1].T / 32


def network(x, multiply):
    return multiply("third", jnp.tanh(multiply("second", jnp.tanh(multiply("first", x)))))


def task(x, mixed):
    y = network(x, lambda name, x: x @ teacher[name]["kernel"])
    return y @ mixing if mixed else y


def fit(loss, start, steps, rate):
    tx = optax.adam(rate)

    def step(carry, key):
        params, state = carry
        value, grads = jax.value_and_grad(loss)(params, jax.random.normal(key, (BATCH, WIDTH)))
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), value

    run = jax.jit(lambda start: jax.lax.scan(step, (start, tx.init(start)), jax.random.split(jax.random.key(3), steps)))
    (params, _), losses = run(start)
    return params, losses


# %% [markdown]
# The base is trained on the first task, in fp32.

# %%
plain = lambda params, x: network(x, lambda name, x: x @ params[name]["kernel"])
base, _ = fit(lambda params, x: jnp.mean((plain(params, x) - task(x, False)) ** 2), init(jax.random.key(0)), 400, 2e-3)

# %% [markdown]
# Adapters then learn the second task, once on the fp32 base and once on its codes. `fp8jax.lora.linear` multiplies by the
# base and by the adapters.

# %%
def adapt(base, recipe, steps=300):
    adapters = fp8jax.lora.init(jax.random.key(4), base, rank=16, alpha=16.0, targets=".*kernel")

    def loss(adapters, x):
        multiply = lambda name, x: fp8jax.lora.linear(
            x, base[name]["kernel"], adapters[f"{name}/kernel"], recipe=recipe
        )
        return jnp.mean((network(x, multiply) - task(x, True)) ** 2)

    return fit(loss, adapters, steps, 3e-3)


codes = fp8jax.lora.freeze(base, "e4m3:token")
runs = {"fp32 base": adapt(base, "bf16"), "8-bit base": adapt(codes, "te_current")}
nbytes = lambda tree: sum(x.nbytes for x in jax.tree.leaves(tree))
for name, (adapters, losses) in runs.items():
    print(f"{name}: loss {losses[0]:.4f} to {losses[-10:].mean():.4f}")
print(f"base: {nbytes(base):,} bytes in fp32, {nbytes(codes):,} as codes; adapters: {nbytes(adapters):,}")

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3))
(_, exact), (_, quantized) = runs.values()
left.semilogy(exact, linewidth=3, alpha=0.4, label="fp32 base")
left.semilogy(quantized, "--", linewidth=1, label="8-bit base")
left.set(xlabel="step", ylabel="loss")
left.legend()
right.plot(quantized - exact, linewidth=1)
right.set(xlabel="step", ylabel="loss, 8-bit base minus fp32 base")
figure.tight_layout()
plt.show()

# %% [markdown]
# `merge` adds the adapters to the decoded weights. The result is a plain model.

# %%
merged = fp8jax.lora.merge(codes, runs["8-bit base"][0])
x = jax.random.normal(jax.random.key(5), (BATCH, WIDTH))
print(f"loss of the merged model: {jnp.mean((plain(merged, x) - task(x, True)) ** 2):.4f}")
