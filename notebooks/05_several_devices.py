# %% [markdown]
# # Several devices
#
# Under `jit`, sharded arrays need no change: codes and scales do not depend on the sharding. To send gradients in 8
# bits, the training step sums them inside `jax.shard_map`. Without several GPUs, this notebook uses eight virtual CPU
# devices, and shows losses and bytes, not speed. It runs in under a minute.

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

# Eight virtual devices on a CPU. JAX reads this flag when it starts.
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt

import fp8jax

mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
print(mesh)

# %% [markdown]
# A network of plain arrays learns a random smooth function. Each device has a shard of the batch.

# %%
WIDTH, INNER = 128, 512


def init(key):
    k1, k2 = jax.random.split(key)
    return {"up": jax.random.normal(k1, (WIDTH, INNER)) / 11, "down": jax.random.normal(k2, (INNER, WIDTH)) / 22}


network = lambda p, x: jax.nn.gelu(x @ p["up"]) @ p["down"]
teacher = init(jax.random.key(1))
loss = lambda p, x: jnp.mean((network(p, x) - network(teacher, x)) ** 2)

# %% [markdown]
# Gradients are sent in fp32, or as 8-bit codes in one of two algorithms. `two_phase` sends codes and sums them in fp32.
# `one_phase` sums the codes. The part `Comm` of a recipe selects the algorithm.

# %%
forms = {
    "fp32": None,
    "e4m3, two phases": fp8jax.recipes.Comm("e4m3"),
    "e4m3, one phase": fp8jax.recipes.Comm("e4m3", "one_phase"),
}


def train(comm, steps=120):
    tx = fp8jax.compressed_adamw(2e-3, min_size=0)

    def step(carry, x):
        params, state = carry
        value, grads = jax.value_and_grad(loss)(params, x)
        if comm is None:
            grads = jax.lax.pmean(grads, "data")
        else:
            grads = fp8jax.dist.all_reduce_gradients(grads, "data", comm, min_size=0)
        params, state = tx.step(grads, state, params)
        return (params, state), jax.lax.pmean(value, "data")

    whole, rows = jax.P(), jax.P(None, "data")
    run = lambda params, state, xs: jax.lax.scan(step, (params, state), xs)[1]
    run = jax.shard_map(run, mesh=mesh, in_specs=(whole, whole, rows), out_specs=whole, check_vma=False)
    params = init(jax.random.key(0))
    xs = jax.random.normal(jax.random.key(2), (steps, 8 * mesh.size, WIDTH))
    return jax.jit(run)(params, tx.init(params), xs)


losses = {name: train(comm) for name, comm in forms.items()}
for name, values in losses.items():
    print(f"{name}: loss {values[-10:].mean():.5f}")

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3))
left.semilogy(losses["fp32"])
left.set(xlabel="step", ylabel="loss, gradients in fp32")
for (name, values), style in zip(losses.items(), ("-", "--", ":")):
    right.plot(values - losses["fp32"], style, label=name)
right.set(xlabel="step", ylabel="loss minus that with fp32")
right.legend()
figure.tight_layout()
plt.show()

# %% [markdown]
# `fp8jax.dist.plan` estimates the memory of a step of a large model without running it.

# %%
params = {"layers": jax.ShapeDtypeStruct((32, 4096, 16384), jnp.float32)}
for name in ("bf16", "coat", "fp8_lm_two_phase"):
    plan = fp8jax.dist.plan(params, name, {"fsdp": 8}, layer_axes=1)
    print(f"{name}: {sum(plan.memory.values()) / 1e9:.1f} GB per device at the peak, which is in the {plan.peak}")
