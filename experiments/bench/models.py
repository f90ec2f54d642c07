"""Whole training steps of models as users write them, in bf16 and quantized: what a user gains.

The models are those of `experiments.models.plain`, whose code knows nothing of 8 bits; `fp8jax.nnx.quantize` quantizes
them. Gradients are clipped by their global norm; AdamW is optax's in a chain and Flax's `nnx.Optimizer` for bf16, and
`fp8jax.optimizer(..., clip=)` in `fp8jax.nnx.Optimizer`, as README shows, for the others. "step" is the time of a step
of many that follow each other without waiting; of "step, synchronised" the host reads the loss after each; of "step,
read late" it reads the loss of the step before when it has started the next. Python's garbage collector leaves alone
what tracing has left, as a training loop has it by `gc.freeze()` (docs/faq.md). Nothing is recomputed: bf16 keeps what
Flax's modules keep, and the baseline is as fast as it gets here. "temporaries" are what the compiled program needs
beside its arguments. "auto" is the recipe of the device where layers gain, "auto:coat" that one where they gain
(`fp8jax.recipes.for_shapes`). "held:coat" holds the weights quantized for the step and takes their gradients in bf16,
as the bf16 arm has them (`fp8jax.nnx.quantize_weights(model, gradients="bfloat16")`).
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.94")

import jax
import optax
from flax import nnx

import fp8jax
from experiments.bench import timing
from experiments.bench.arms import HEAD
from experiments.models import plain

BASE, RATE, CLIP, DECAY = "bf16", 3e-4, 1.0, 0.1
HELD = "held:"
KINDS = ("", ", synchronised", ", read late")


@dataclasses.dataclass(frozen=True)
class UserModel:
    """A model and its batch.

    Attributes:
        text: what it is, in a row's case.
        make: the module from its outputs (vocabulary, classes), the length of its input and `nnx.Rngs`.
        small: the same, tiny.
        kind: of the batch, see `plain.batch`.
        batch: sequences or images.
        length: tokens of a sequence, pixels of a side.
        outputs: vocabulary or classes.
    """

    text: str
    make: Callable[..., nnx.Module]
    small: Callable[..., nnx.Module]
    kind: str
    batch: int
    length: int
    outputs: int


def _llama(*shape: int) -> Callable[..., nnx.Module]:
    """Of this shape, from its outputs, the length of its input, which may be any, and `nnx.Rngs`."""
    kind: Any = plain.PlainLlama
    return lambda outputs, length, rngs: kind(outputs, *shape, rngs)


def _sized(kind: Any, *shape: int) -> Callable[..., nnx.Module]:
    """The same of a model with a position for each place of its input."""
    return lambda outputs, length, rngs: kind(outputs, *shape, length, rngs)


MODELS = {
    "llama1b": UserModel("Llama 1.1B, 8 x 2,048 tokens", _llama(2048, 22, 32, 4, 5632),
                         _llama(64, 2, 4, 2, 128), "text", 8, 2048, 32_000),
    "vitl": UserModel("ViT-L/16, 256 images", _sized(plain.PlainViT, 1024, 24, 16), _sized(plain.PlainViT, 64, 2, 4),
                      "images", 256, 224, 1000),
    "gpt350m": UserModel("GPT-2 350M, 16 x 1,024 tokens", _sized(plain.PlainGPT, 1024, 24, 16),
                         _sized(plain.PlainGPT, 64, 2, 4), "text", 16, 1024, 50_304),
    "gpt124m": UserModel("GPT-2 124M, 32 x 1,024 tokens", _sized(plain.PlainGPT, 768, 12, 12),
                         _sized(plain.PlainGPT, 64, 2, 4), "text", 32, 1024, 50_304),
}  # fmt: skip
ARMS = {
    "llama1b": ("bf16", "coat", "coat_fast"),
    "vitl": ("bf16", "coat_fast"),
    "gpt350m": ("bf16", "coat_fast"),
    "gpt124m": ("bf16", "coat_fast", "auto:coat_fast"),
}


def recipe_of(arm: str) -> fp8jax.Recipe:
    """The recipe of an arm: a preset's name, or "auto:" and one, which is taken where layers gain; "held:" before it.
    "coat, 8-bit head" has the products of the output head in FP8, too.

    Raises:
        ValueError: no preset has this name.
    """
    arm = arm.removeprefix(HELD)
    if arm.endswith(f", {HEAD}"):
        return dataclasses.replace(recipe_of(arm.removesuffix(f", {HEAD}")), head=fp8jax.recipes.HEAD)
    start, _, name = arm.rpartition(f"{fp8jax.recipes.AUTO}:")
    return fp8jax.recipes.get(arm) if start or name == arm else fp8jax.recipes.for_shapes(name)


def loss(model: Any, inputs: jax.Array, labels: jax.Array) -> jax.Array:
    """Mean cross-entropy of a batch."""
    logits = model(inputs).astype("float32")
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


class UserArm:
    """A model's training step by a recipe, and the state that it updates."""

    def __init__(self, user: UserModel, recipe: str) -> None:
        make, size, length, outputs = user.make, user.batch, user.length, user.outputs
        if timing.dry():
            make, size, length, outputs = user.small, 1, 32, 64

        def begun(rngs: nnx.Rngs) -> tuple[nnx.Module, nnx.Optimizer]:
            model = make(outputs, length, rngs)
            if recipe == BASE:
                chain = optax.chain(optax.clip_by_global_norm(CLIP), optax.adamw(RATE, weight_decay=DECAY))
                return model, nnx.Optimizer(model, chain, wrt=nnx.Param)
            model = fp8jax.nnx.quantize(model, recipe_of(recipe))
            tx = fp8jax.optimizer(recipe_of(recipe), RATE, weight_decay=DECAY, clip=CLIP)
            return model, fp8jax.nnx.Optimizer(model, tx, wrt=nnx.Param)

        # A generator that compiles fast.
        start = lambda: begun(nnx.Rngs(jax.random.key(0, impl="rbg")))  # noqa: E731
        graph, shapes = nnx.split(nnx.eval_shape(start))
        self.begin: Any = jax.jit(lambda: nnx.state(start()))
        self.data = plain.batch(user.kind, size, length, outputs)

        def step(state: Any, inputs: jax.Array, labels: jax.Array) -> tuple[Any, jax.Array]:
            model, optimizer = nnx.merge(graph, state)
            read = model
            if recipe.startswith(HELD):
                read = fp8jax.nnx.quantize_weights(model, gradients="bfloat16")
            value, grads = nnx.value_and_grad(loss)(read, inputs, labels)
            optimizer.update(model, grads)
            return nnx.state((model, optimizer)), value

        self.build = timing.lowered(step, shapes, *self.data, donate_argnums=0)
        self.state: Any = None
        self.last: jax.Array | None = None

    @functools.cached_property
    def program(self) -> Any:
        """The compiled step."""
        return self.build()

    def prepare(self) -> None:
        """Compiles the step, and what makes its state."""
        self.program  # noqa: B018
        if not timing.dry():
            self.begin = self.begin.lower().compile()

    def __call__(self) -> jax.Array:
        """One step; its loss."""
        if self.state is None:
            self.state = self.begin()
        self.state, value = self.program(self.state, *self.data)
        return value

    def synchronised(self) -> jax.Array:
        """One step, and the host reads its loss."""
        return jax.block_until_ready(self())

    def late(self) -> jax.Array:
        """One step, and the host reads the loss of the one before."""
        before, self.last = self.last, self()
        return jax.block_until_ready(self.last if before is None else before)

    def stop(self) -> None:
        """Frees the state."""
        jax.tree.map(lambda x: x.delete(), self.state)
        self.state = self.last = None


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="models", description=__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--arm", nargs="+", help="recipes, bf16 first (default: each model's own)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5, help="of a round, untimed and then as many timed")
    parser.add_argument("--limit", type=float, default=600, help="seconds after which no further model is started")
    parser.add_argument("--name", default="models", help="of the results file")
    parser.add_argument("--out", type=Path, default=Path("results"))
    options = parser.parse_args(argv)
    for arm in options.arm or ():
        recipe_of(arm)
    timing.need_gpu()
    notes = [" ".join(part.split()) for part in (__doc__ or "").split("\n\n")[1:]]
    notes.append("Arms run in turns, in another order in each round, each from a state made anew; medians.")
    save = functools.partial(timing.write, options.name, "Training steps of models as users write them", notes=notes,
                             versions={}, out=options.out)  # fmt: skip
    start, table = time.perf_counter(), list[timing.Row]()
    for name in options.models:
        if time.perf_counter() - start > options.limit:
            print(f"{name}: not measured, the time limit is reached")
            continue
        table += measure(MODELS[name], options.arm or ARMS[name], options)
        save(table, complete=False)
    save(table)


def measure(user: UserModel, recipes: Sequence[str], options: argparse.Namespace) -> list[timing.Row]:
    """Rows of one model."""
    start = time.perf_counter()

    def prepared(recipe: str, arm: UserArm, traced: float) -> None:
        begin = time.perf_counter()
        arm.prepare()
        print(f"  {recipe}: traced in {traced:.0f} s, compiled in {time.perf_counter() - begin:.0f} s", flush=True)

    with concurrent.futures.ThreadPoolExecutor(1) as pool:  # One is compiled while the next one is traced.
        arms, waiting = {}, list[Any]()
        for recipe in recipes:
            begin = time.perf_counter()
            arms[recipe] = UserArm(user, recipe)
            waiting.append(pool.submit(prepared, recipe, arms[recipe], time.perf_counter() - begin))
        for done in waiting:
            done.result()
    print(f"  ready after {time.perf_counter() - start:.0f} s", flush=True)
    calls: dict[str, Callable[[], Any]] = {}
    for recipe, arm in arms.items():
        print(f"  {recipe}: loss {float(arm()):.4f}", flush=True)
        arm.stop()
        kinds: tuple[Callable[[], Any], ...] = (arm, arm.synchronised, arm.late)
        calls |= {f"{recipe}{end}": call for end, call in zip(KINDS, kinds, strict=True)}
    stop = lambda name: next(arm for each, arm in arms.items() if name in {each + end for end in KINDS}).stop()  # noqa: E731
    times = timing.in_turns(calls, options.rounds, dict.fromkeys(calls, options.steps), stop)
    needs = {recipe: arm.program.memory_analysis().temp_size_in_bytes / 1e9 for recipe, arm in arms.items()}
    return rows(user.text, times, needs)


def rows(case: str, times: dict[str, timing.Seconds], needs: dict[str, float]) -> list[timing.Row]:
    """Milliseconds of a step and GB of temporaries, against bf16 of the same kind."""
    table = []
    for recipe, size in needs.items():
        for end in KINDS:
            time_, base = times[f"{recipe}{end}"], times[f"{BASE}{end}"]
            spread = time_.quartiles(lambda t: 1e3 * t)
            table.append(timing.row(case, recipe, f"step{end}", 1e3 * time_, "ms", BASE, base / time_, spread))
        table.append(timing.row(case, recipe, "temporaries", size, "GB", BASE, needs[BASE] / size))
    return table
