"""Training steps of user-written models, in bf16 and quantized: time and memory.

The models are plain Flax or Equinox code (`experiments.models.plain`). `fp8jax.nnx.quantize`, `fp8jax.linen.quantize`
or `fp8jax.filter_transform` quantizes them. Gradients are clipped by their global norm. bf16 uses optax's AdamW with
Flax's optimizer class; the other arms use `fp8jax.optimizer(..., clip=)` with that of fp8jax.

"step": the host reads a loss after it has started the next step. "step, synchronised": it reads each loss at once.
`gc.freeze()` is called after tracing (docs/howto/speed.md). Nothing is rematerialized, unless the row names a policy.
"temporary memory" is the memory of the compiled program without its arguments. "arrays" is the number of arrays in the
state, each of which JAX checks before a step.

"auto" is the device's recipe for layers that become faster. "auto:coat" is `coat` for such layers. "prequantized:coat"
quantizes weights once per step and computes their gradients in bf16. "observed:coat" collects `fp8jax.telemetry` in
every step. Arms of torch are the same Llama with torch.compile, in bf16 or with torchao's float8, in a separate
process. Their memory is the peak of torch's allocator.

The arms run in turns, in another order in each round, each from a new state. Figures are medians.
"""

import argparse
import dataclasses
import functools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.94")

import jax

import fp8jax
from experiments.bench import driver, step_torch, timing, writings
from experiments.bench.writings import BASE, Training
from experiments.models import plain
from experiments.models.llama import LlamaConfig

KINDS = ("", ", synchronised")
GPUS_HELP = "number of GPUs; each has a full batch and all weights (data parallel)"
TorchArms = Mapping[str, step_torch.TorchTimes]


@dataclasses.dataclass(frozen=True)
class UserModel:
    """A model and its batch.

    Attributes:
        text: description, the case of its rows.
        training: maps an arm, input length, number of outputs and whether the model is tiny to training steps.
        arms: default arms.
        kind: kind of batch, see `plain.batch`.
        batch: number of sequences or images.
        length: tokens per sequence, or pixels per side.
        outputs: entries of the vocabulary, or classes.
        llama: the shape that `--torch` builds; None if it cannot build the model.
    """

    text: str
    training: Callable[[str, int, int, bool], Training]
    arms: tuple[str, ...] = ("bf16", "coat", "coat_fast")
    kind: str = "text"
    batch: int = 8
    length: int = 2048
    outputs: int = 32_000
    llama: LlamaConfig | None = None


LLAMA, SMALL = (2048, 22, 32, 4, 5632), (64, 2, 4, 2, 128)


def _llama(policy: Any, arm: str, length: int, outputs: int, small: bool) -> Training:
    """Returns steps in Flax NNX. A policy checkpoints blocks; fp8jax's policies also save 8-bit codes of matmuls."""
    saved = policy if policy is None or arm == BASE else fp8jax.checkpoint_policies.with_products(policy)
    shape = SMALL if small else LLAMA
    return writings.nnx_training(lambda rngs: plain.PlainLlama(outputs, *shape, rngs, saved), arm)


def _shaped(writing: Any, arm: str, length: int, outputs: int, small: bool) -> Training:
    """Returns steps of the same model in another library, by its shape."""
    return writing((outputs, *(SMALL if small else LLAMA)), arm)  # type: ignore[no-any-return]


def _sized(kind: Any, shape: tuple[int, ...], arm: str, length: int, outputs: int, small: bool) -> Training:
    """Returns steps of a model with learned positions."""
    shape = (64, 2, 4) if small else shape
    return writings.nnx_training(lambda rngs: kind(outputs, *shape, length, rngs), arm)


VITL, CUDNN_VIT = (1024, 24, 16), functools.partial(plain.PlainViT, attention_fn=plain.fused)
DOTS = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
MODELS = {
    "llama1b": UserModel("Llama 1.1B, 8 x 2,048 tokens", functools.partial(_llama, None),
                         llama=LlamaConfig(32_000, 2048, 22, 32, 4, 5632)),
    "llama1b_dots": UserModel("Llama 1.1B, dots_with_no_batch_dims_saveable, 8 x 2,048 tokens",
                              functools.partial(_llama, DOTS)),
    "llama1b_linen": UserModel("Llama 1.1B in Linen, 8 x 2,048 tokens",
                               functools.partial(_shaped, writings.linen_training), ("bf16", "coat")),
    "llama1b_equinox": UserModel("Llama 1.1B in Equinox, 8 x 2,048 tokens",
                                 functools.partial(_shaped, writings.equinox_training), ("bf16", "coat")),
    "vitl": UserModel("ViT-L/16, 256 images", functools.partial(_sized, plain.PlainViT, VITL),
                      ("bf16", "coat_fast"), "images", 256, 224, 1000),
    "vitl_cudnn": UserModel("ViT-L/16, attention by cuDNN, 256 images", functools.partial(_sized, CUDNN_VIT, VITL),
                            ("bf16", "coat_fast"), "images", 256, 224, 1000),
    "gpt350m": UserModel("GPT-2 350M, 16 x 1,024 tokens", functools.partial(_sized, plain.PlainGPT, (1024, 24, 16)),
                         ("bf16", "coat_fast"), "text", 16, 1024, 50_304),
    "gpt124m": UserModel("GPT-2 124M, 32 x 1,024 tokens", functools.partial(_sized, plain.PlainGPT, (768, 12, 12)),
                         ("bf16", "coat_fast", "auto:coat_fast"), "text", 32, 1024, 50_304),
    **{
        f"gpt8x{width}": UserModel(f"GPT of 8 layers, width {width:,}, 8 x 512 tokens",
                                   functools.partial(_sized, plain.PlainGPT, (width, 8, width // 64)),
                                   ("bf16", "coat_fast", "auto:coat_fast"), "text", 8, 512, 32_000)
        for width in (256, 512, 1024)
    },
}  # fmt: skip


def case_text(user: UserModel, gpus: int) -> str:
    """Returns the case of a model's rows."""
    return user.text + (f", each of {gpus} GPUs" if gpus > 1 else "")


class UserArm(driver.Arm):
    """A model's training step by a recipe, with its state. Each GPU has its own batch."""

    def __init__(self, user: UserModel, arm: str, gpus: int = 1) -> None:
        size, length, outputs = user.batch, user.length, user.outputs
        if timing.dry():
            size, length, outputs = 1, 32, 64
        training = user.training(arm, length, outputs, timing.dry())
        shapes, inputs = jax.eval_shape(training.begin), plain.batch(user.kind, gpus * size, length, outputs)
        self.arrays = len(jax.tree.leaves(shapes))
        options: dict[str, Any] = {}
        if gpus > 1:
            mesh = jax.make_mesh((gpus,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
            rows, replicated = (jax.sharding.NamedSharding(mesh, jax.P(*axes)) for axes in (("data",), ()))
            inputs = jax.device_put(inputs, rows)
            shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated), shapes)
            options["out_shardings"] = replicated
        self.inputs, self.begin = inputs, jax.jit(training.begin, **options)
        self.build = timing.lowered(training.step, shapes, *inputs, donate_argnums=0, **options)


def main(argv: list[str]) -> None:
    parser = driver.parser("models", __doc__, rounds=5, steps=5)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--arm", nargs="+", help="recipes, bf16 first (default: the arms of the model)")
    parser.add_argument("--torch", nargs="*", choices=step_torch.ARMS, default=[], help="arms of torch.compile (Llama)")
    parser.add_argument("--gpus", type=int, default=1, help=GPUS_HELP)
    parser.add_argument("--limit", type=float, default=600, help="seconds after which no further model is started")
    options = parser.parse_args(argv)
    for arm in options.arm or ():
        writings.get_recipe(arm)
    torch = dict[str, TorchArms]()
    for name, user in ((name, MODELS[name]) for name in options.models if options.torch):
        if user.llama is None or options.gpus > 1:
            parser.error(f"--torch builds the Llama of one GPU, not {name} on {options.gpus}; omit it")
        torch[name] = step_torch.measured(options.torch, user.llama, user.batch, user.length, options.rounds,
                                          options.steps)  # fmt: skip
    timing.need_gpu()
    title, start = "Training steps of user-written models", time.perf_counter()
    file = driver.ResultsFile(options, title, driver.notes_of(__doc__), devices=options.gpus)
    for name in options.models:
        if time.perf_counter() - start > options.limit:
            print(f"{name}: not measured, the time limit is reached")
            continue
        file.add(measure(MODELS[name], options.arm or MODELS[name].arms, options, torch.get(name, {})))
    file.end()


def measure(user: UserModel, recipes: Sequence[str], options: argparse.Namespace, torch: TorchArms) -> list[timing.Row]:
    """Returns the rows of one model, and of torch's arms."""
    arms = driver.built(recipes, lambda recipe: UserArm(user, recipe, options.gpus))
    calls: dict[str, Callable[[], Any]] = {}
    for recipe, arm in arms.items():
        step_functions: tuple[Callable[[], Any], ...] = (timing.late(arm), arm.synchronised)
        calls |= {f"{recipe}{end}": call for end, call in zip(KINDS, step_functions, strict=True)}
    stop = lambda name: next(arm for arm_name, arm in arms.items() if name in {arm_name + end for end in KINDS}).stop()  # noqa: E731
    times = timing.in_turns(calls, options.rounds, dict.fromkeys(calls, options.steps), stop)
    needs = {recipe: driver.memory(arm.program)[0] for recipe, arm in arms.items()}
    case = case_text(user, options.gpus)
    for name, torch_times in torch.items():
        times |= dict(zip([name + end for end in KINDS], torch_times[:2], strict=True))
        needs[name] = torch_times.memory[0]
    return rows(case, times, needs, {recipe: arm.arrays for recipe, arm in arms.items()})


def rows(
    case: str, times: dict[str, timing.Seconds], needs: dict[str, float], arrays: dict[str, int]
) -> list[timing.Row]:
    """Return milliseconds of a step, GB of temporaries and arrays of the state; ratios to JAX's bf16 if it ran."""
    table = []
    baseline = BASE if BASE in needs else None
    for recipe, size in needs.items():
        for end in KINDS:
            time_ = times[f"{recipe}{end}"]
            ratio = times[f"{BASE}{end}"] / time_ if baseline else None
            table.append(driver.time_row(case, recipe, f"step{end}", time_, baseline, ratio))
        size_ratio = needs[BASE] / size if baseline else None
        table.append(timing.row(case, recipe, "temporaries", size, "GB", baseline, size_ratio))
        if recipe in arrays:
            table.append(timing.row(case, recipe, "arrays", arrays[recipe], ""))
    return table
