# %% [markdown]
# # Any Flax model in FP8
#
# `fp8jax.nnx.quantize(model, recipe)` returns a copy of a model with linear layers that multiply 8-bit codes, forward
# and backward. They save only the codes of their inputs for the backward pass. The model's source does not change. This
# notebook quantizes a small Transformer and compares its training with that of the original. It runs in under a minute
# on a CPU. XLA widens FP8 products on a CPU, which saves no time.
#
# On Colab, an L4, H100 or G4 multiplies FP8. An A100 decodes the codes and multiplies in bf16, a T4 in fp16. On these two,
# use 8-bit optimizer states alone (notebook 1), or the recipe of `fp8jax.recipes.for_device()` (notebook 3).

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
# A plain Flax model:

# %%
VOCAB, LENGTH, WIDTH = 16, 32, 64


class Block(nnx.Module):
    def __init__(self, rngs):
        kinds = {"dtype": jnp.bfloat16, "rngs": rngs}
        self.norm1, self.norm2 = nnx.LayerNorm(WIDTH, **kinds), nnx.LayerNorm(WIDTH, **kinds)
        self.attention = nnx.MultiHeadAttention(num_heads=2, in_features=WIDTH, decode=False, **kinds)
        self.up, self.down = nnx.Linear(WIDTH, 128, **kinds), nnx.Linear(128, WIDTH, **kinds)

    def __call__(self, x):
        x = x + self.attention(self.norm1(x), mask=nnx.make_causal_mask(x[..., 0]))
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


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
# One line makes the FP8 model. `explain` lists each layer, whether it is quantized and why not, and the products of the
# compiled program.

# %%
model = Transformer(nnx.Rngs(0))
recipe = fp8jax.recipes.te_current()
quantized = fp8jax.nnx.quantize(model, recipe)

print(fp8jax.explain(model, recipe, jnp.zeros((2, LENGTH), jnp.int32)))

# %% [markdown]
# In the training text, the last two tokens determine the next one with probability 0.9. The training loop is the same
# as for any Flax model.

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


@nnx.jit
def step(model, optimizer, key):
    tokens = text(key)

    def loss(model):
        logits = model(tokens[:, :-1]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    value, grads = nnx.value_and_grad(loss)(model)
    optimizer.update(model, grads)
    return value


def train(model, steps=80):
    optimizer = nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)
    return jnp.stack([step(model, optimizer, jax.random.key(i)) for i in range(steps)])


# %%
rules = [fp8jax.Rule("blocks/0/attention/.*", None), fp8jax.Rule("blocks/.*", fp8jax.recipes.deepseek())]
losses = {
    "bf16": train(Transformer(nnx.Rngs(0))),
    "FP8, per-tensor scales": train(quantized),
    "FP8, block scales, first attention in bf16": train(fp8jax.nnx.quantize(Transformer(nnx.Rngs(0)), rules)),
}
for name, values in losses.items():
    print(f"{name}: {values[-10:].mean():.4f}")

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3))
left.plot(losses["bf16"])
left.set(xlabel="step", ylabel="loss in bf16")
for (name, values), style in zip(losses.items(), ("-", "--", ":")):
    right.plot(values - losses["bf16"], style, label=name)
right.set(xlabel="step", ylabel="loss minus loss in bf16")
right.legend(fontsize="small")
figure.tight_layout()
plt.show()

# %% [markdown]
# Parameters keep their names, shapes and values, so a checkpoint of one model loads into the other. Here the plain model
# gets the weights of the FP8 model.

# %%
plain = Transformer(nnx.Rngs(1))
nnx.update(plain, nnx.state(quantized, nnx.Param))
tokens = text(jax.random.key(1000))[:, :-1]
predict = nnx.jit(lambda model, tokens: model(tokens).argmax(-1))
agree = (predict(plain, tokens) == predict(quantized, tokens)).mean()
print(f"both predict the same next token in {agree:.1%} of the cases")
