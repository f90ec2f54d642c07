# %% [markdown]
# # LoRA on an 8-bit base
#
# A model that is trained already is adapted to another task. Its weights are held as 8-bit codes, one byte a parameter,
# and are not trained; beside each matrix two thin factors are. This notebook compares that with adapters on an fp32 base, and
# what each holds. It runs in under a minute on a CPU.

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
import optax

import fp8jax

# %% [markdown]
# A network with two hidden layers, and two tasks: the second is the first with its outputs mixed anew.

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
# First the base is trained on the first task, in fp32.

# %%
plain = lambda params, x: network(x, lambda name, x: x @ params[name]["kernel"])
base, _ = fit(lambda params, x: jnp.mean((plain(params, x) - task(x, False)) ** 2), init(jax.random.key(0)), 400, 2e-3)

# %% [markdown]
# Then adapters learn the second: beside the base as it is, and beside its codes. `fp8jax.lora.linear` multiplies both.

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
print(f"base {nbytes(base):,} bytes, as codes {nbytes(codes):,}; adapters {nbytes(adapters):,}")

# %%
figure, axes = plt.subplots(figsize=(7, 3))
for (name, (_, losses)), style in zip(runs.items(), ("-", "--")):
    axes.semilogy(losses, style, label=name)
axes.set(xlabel="step", ylabel="loss")
axes.legend()
figure.tight_layout()
plt.show()

# %% [markdown]
# In the end adapters are merged into the weights, and the model is one as before.

# %%
merged = fp8jax.lora.merge(codes, runs["8-bit base"][0])
x = jax.random.normal(jax.random.key(5), (BATCH, WIDTH))
print(f"loss of the merged model: {jnp.mean((plain(merged, x) - task(x, True)) ** 2):.4f}")
