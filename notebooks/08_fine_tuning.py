# %% [markdown]
# # Fine-tuning a Hugging Face checkpoint
#
# The training program reads checkpoints of Hugging Face (Llama, Mistral, Qwen, OLMo, GPT-2), trains them on conversations
# with any recipe, and writes them back. This notebook first makes a tiny checkpoint, so that nothing is downloaded. To
# use another checkpoint, change only `FOLDER`. It runs in two minutes on a CPU.

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

# %% [markdown]
# The training program is in the repository, not in the package. On Colab, this cell clones it and installs its
# dependencies.

# %%
if "google.colab" in sys.modules and not pathlib.Path("fp8jax/experiments").is_dir():
    if "://" not in SOURCE:
        raise SystemExit("Write the address of fp8jax's repository into SOURCE above: the training program is there.")
    address, _, revision = SOURCE.removeprefix("git+").partition(".git@")
    branch = ["--branch", revision] if revision else []
    subprocess.run(["git", "clone", "--quiet", "--depth=1", *branch, address, "fp8jax"], check=True)
    needed = ["filelock", "grain", "huggingface_hub", "jinja2", "orbax-checkpoint", "rich", "safetensors", "tensorboardX"]
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", *needed, "tokenizers", "tyro"], check=True)
CLONES = [p.resolve() for p in (pathlib.Path("fp8jax"), pathlib.Path(".."), pathlib.Path()) if (p / "experiments").is_dir()]
if not CLONES:
    raise SystemExit(f"The training program is in the repository: run this in a clone of it, not in {pathlib.Path().resolve()}.")
ROOT = CLONES[0]

# %%
import json
import random
import tempfile

import matplotlib.pyplot as plt

WORK = pathlib.Path(tempfile.mkdtemp())
FOLDER = WORK / "checkpoint"


def program(name, *options):
    """Runs a program of the clone and prints the end of its output."""
    command = [sys.executable, "-m", f"experiments.{name}", *map(str, options)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"NO_COLOR": "1", "TERM": "dumb"})
    output = done.stdout if done.returncode == 0 else done.stdout + done.stderr
    print("\n".join(output.replace(str(WORK), "WORK").rstrip().splitlines()[-10:]))
    done.check_returncode()

# %% [markdown]
# The base model is trained for a few steps on Python source files and exported. Everything below also works with a
# folder from `hf download`.

# %%
shape = ("--layers", 2, "--dim", 64, "--heads", 4, "--kv-heads", 2, "--mlp-dim", 128)
length = ("--seq-len", 64, "--batch", 16, "--out", WORK / "runs")


def train(run, *options, steps=200, lr=4e-3):
    program("train", "--run", run, *length, "--steps", steps, "--warmup", max(1, steps // 10), "--lr", lr, *options)


train("base", "--recipe", "bf16", *shape, "--sample-tokens", 0)
program("hub", "--run", WORK / "runs" / "base", "--recipe", "bf16", "--out", FOLDER)
print(sorted(path.name for path in FOLDER.iterdir()))

# %% [markdown]
# The data has one conversation per line. `chat_template.jinja` formats a conversation as text; checkpoints of chat models
# contain one. Only the words of the assistant count in the loss.

# %%
random.seed(0)
people, things = "Ada Bo Cy Di Ed Flo Gus Hal".split(), "stone river lamp book apple train".split()
lines = []
for _ in range(600):
    (giver, taker), thing = random.sample(people, 2), random.choice(things)
    question = {"role": "user", "content": f"{giver} gives {taker} the {thing}. Who has it?"}
    lines.append(json.dumps({"messages": [question, {"role": "assistant", "content": f"{taker} has the {thing}."}]}))
(WORK / "chat.jsonl").write_text("\n".join(lines))
template = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
(FOLDER / "chat_template.jinja").write_text(template)
print(lines[0])

# %% [markdown]
# The same fine-tuning in bf16, in FP8 with FP8 optimizer states (`coat`), and with LoRA adapters on an 8-bit base
# (`--lora-rank`).

# %%
start = ("--init", FOLDER, "--data", WORK / "chat.jsonl")
train("tuned", *start, "--recipe", "bf16", "coat", lr=1e-3)
train("adapted", *start, "--recipe", "te_current", "--lora-rank", 8, "--base", "e4m3:block128", lr=2e-2)

# %%
figure, axes = plt.subplots(figsize=(8, 3.2))
for run, recipe, style, width in (("tuned", "bf16", "-", 3), ("tuned", "coat", "--", 1), ("adapted", "te_current", ":", 2)):
    rows = [json.loads(line) for line in (WORK / "runs" / run / recipe / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if "loss" in row]
    axes.semilogy(losses, style, linewidth=width, label=recipe if run == "tuned" else "LoRA of rank 8 on an 8-bit base")
axes.set(xlabel="step", ylabel="loss of the assistant")
axes.legend()
figure.tight_layout()
plt.show()

# %% [markdown]
# The last cell exports the model in 8 bits, in the layout of compressed-tensors, which vLLM reads. A model of this
# size learns the form of an answer, but often names the wrong person.

# %%
program("hub", "--run", WORK / "runs" / "tuned", "--recipe", "coat", "--out", WORK / "eight", "--eight", "channel")
for folder in (FOLDER, WORK / "eight"):
    print(f"{folder.name}: {sum(p.stat().st_size for p in folder.glob('*.safetensors')) / 1024:.0f} KiB of weights")
program("generate", "--model", WORK / "eight", "--prompt", "user: Ada gives Bo the lamp. Who has it?\nassistant:")
