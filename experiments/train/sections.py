"""The sections of the training program's configuration: frozen dataclasses, a command line's options each.

The section that a field stands in says what changing it means. `Data`, `Model`, `Optim` and `Lora` (and the recipe and
the seed) change the mathematics: a checkpoint made with other values is refused. `Run` only says where, how often and
how long the program reports: it may change between a start and its resumption.
"""

import dataclasses
import re
from collections.abc import Callable
from math import inf
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import tyro

import fp8jax
from experiments.errors import UserError
from experiments.models import sizes
from experiments.models.shape import LlamaConfig


@dataclasses.dataclass(frozen=True)
class Range:
    """The values that an option may have.

    Attributes:
        text: after "must be".
        holds: whether a value is one of them.
    """

    text: str
    holds: Callable[[Any], bool]


Count = Annotated[int, Range("at least 1", lambda n: n >= 1)]
CountOrZero = Annotated[int, Range("at least 0", lambda n: n >= 0)]
Positive = Annotated[float, Range("positive and finite", lambda x: 0 < x < inf)]
NotNegative = Annotated[float, Range("finite and not negative", lambda x: 0 <= x < inf)]
BelowOne = Annotated[float, Range("at least 0 and below 1", lambda x: 0 <= x < 1)]


def check_ranges(section: Any) -> None:
    """Raises UserError for the first option of a section that is out of its `Range`. An optional one may be None."""
    for name, hint in get_type_hints(type(section), include_extras=True).items():
        value = getattr(section, name)
        if value is None and type(None) in get_args(get_args(hint)[0] if get_origin(hint) is Annotated else hint):
            continue
        for part in getattr(hint, "__metadata__", ()):
            if isinstance(part, Range) and (value is None or not part.holds(value)):
                raise UserError(f"{flag(name)} must be {part.text}, got {value}")


@dataclasses.dataclass(frozen=True)
class Data:
    """Text and how it is cut."""

    data: tuple[str, ...] = ()
    """Files, folders and globs of UTF-8 text, or of .jsonl or .parquet, with a text or a conversation ("messages") in a
    line or row; these are packed, and do not see each other. None: the sources and docs of Python's own standard
    library."""
    field: str = "text"
    """Field of a line or row that holds its text."""
    tokenizer: Literal["bytes", "bpe"] = "bytes"
    """Bytes, or byte-pair encoding trained on the training split and saved with the run."""
    vocab: int = 4096
    """Vocabulary of the byte-pair encoding; bytes always have 256."""
    seq_len: Count = 256
    """Tokens of one sequence."""
    batch: Count = 8
    """Sequences of one step."""
    valid_fraction: Annotated[float, Range("between 0 and 1", lambda x: 0 < x < 1)] = 0.05
    """Share of the text that is kept back for validation."""
    eval_batches: Count = 16
    """Most validation batches of one evaluation; the same for all recipes of a run."""


@dataclasses.dataclass(frozen=True)
class Model:
    """Which Llama. Numbers given here replace the size's own."""

    init: str = ""
    """Folder of a Hugging Face checkpoint to start from, or its name in the local cache: with its shape, tokenizer and
    template of conversations, of which answers are learned."""
    model: Annotated[str, tyro.conf.arg(help=f"A size: {', '.join(sizes.NAMES)}.")] = "5m"
    layers: int | None = None
    """Blocks, one after the other."""
    dim: int | None = None
    """Width of the residual stream."""
    heads: int | None = None
    """Attention heads; they share the width."""
    kv_heads: int | None = None
    """Heads of keys and values; they divide --heads."""
    mlp_dim: int | None = None
    """Width of the MLP's hidden layer, of each expert."""
    experts: int | None = None
    """Experts of a layer."""
    experts_per_token: int | None = None
    """How many of them compute a token."""
    tied: bool = False
    """Use the embedding table as output head too."""

    def shape(self, vocab: int) -> LlamaConfig:
        """The Llama that this section asks for.

        Raises:
            UserError: unknown size, or an impossible shape.
        """
        settings = {
            k: v for k, v in dataclasses.asdict(self).items() if v is not None and k not in ("init", "model", "tied")
        }
        try:
            llama = dataclasses.replace(sizes.get(self.model, vocab, tied=self.tied), **settings)
        except ValueError as error:
            raise UserError(f"--model: {error}") from None
        try:
            llama.validate()
        except ValueError as error:
            # The message has names of fields, which are options of the command line.
            options = re.sub(r"\b(dim|layers|heads|kv_heads|mlp_dim)\b", lambda name: flag(name[0]), str(error))
            raise UserError(options) from None
        return llama


@dataclasses.dataclass(frozen=True)
class Optim:
    """AdamW with a linear warm-up and a schedule. The recipe says how its state is stored."""

    steps: Count = 200
    """Updates of each recipe."""
    lr: Positive = 1e-3
    """Peak learning rate."""
    final_lr: Annotated[float, Range("a share of --lr, from 0 to 1", lambda x: 0 <= x <= 1)] = 0.1
    """Learning rate that the schedule ends at, after the last step, as a share of the peak; not of constant."""
    warmup: CountOrZero = 20
    """Steps of the warm-up."""
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """After the warm-up; wsd (warm-up, stable, decay) is constant, and falls linearly at the end."""
    decay: Annotated[float, Range("a share of --steps, above 0 and at most 1", lambda x: 0 < x <= 1)] = 0.2
    """Share of the steps, the last ones, in which wsd falls."""
    b1: BelowOne = 0.9
    """Decay of the first moment."""
    b2: BelowOne = 0.95
    """Decay of the second moment."""
    eps: Positive = 1e-8
    """Added to the root of the second moment."""
    weight_decay: NotNegative = 0.1
    """Applied to matrices, not to norms."""
    clip: Positive = 1.0
    """Largest global norm of the gradient."""
    balance_coefficient: NotNegative = 0.001
    """Of the load-balancing loss of routers, which is added to the loss (Switch Transformer, eq. 4)."""
    z_coefficient: NotNegative = 0.001
    """Of the z-loss of routers, which is added to the loss (ST-MoE, eq. 5)."""
    microbatches: Count = 1
    """Parts that a batch is computed in, one after the other, to save memory; their gradients are averaged."""
    master: str = ""
    """Master weights in place of the recipes' own: fp32, bf16+stochastic, or in parts, bf16+int8 (24 bits) or
    bf16+int16 (32), of which the model computes with the first."""
    head: Literal["", "fp8"] = ""
    """Products of the output head in FP8, of all recipes: with `coat` and 128,256 entries a step of 1b takes 0.9 of its
    time on an H100 (results/pages/step_vocab.md), and codes move each logit a little. Losses of training and validation
    have it, `evaluate` and `generate` a head in 16 bits. Empty: as the recipes have it, in 16 bits."""
    release: Literal["", "previous", "twice"] = ""
    """Update each layer inside the backward pass, so that gradients of one are held and not of all; steps are taken
    whatever the loss. Clipped by each layer's share of the previous step's norm; or twice: by the norm of a backward
    pass before it."""

    @property
    def decay_start(self) -> int:
        """The step from which wsd falls."""
        return self.steps - round(self.decay * self.steps)


@dataclasses.dataclass(frozen=True)
class Lora:
    """Low-rank adapters on weights that are not trained. Without a rank all weights are trained."""

    lora_rank: CountOrZero = 0
    """Rank of the adapters of linear layers, which alone are trained and saved; 0 for none."""
    lora_alpha: Positive = 16.0
    """What adapters add is multiplied by alpha / rank."""
    lora_dropout: BelowOne = 0.0
    """Share of the inputs of adapters that are dropped in training."""
    lora_targets: str = ".*"
    """Regular expression of whole paths of layers with an adapter, such as "layers/attention/(q|v)"."""
    base: str = "e4m3"
    """What weights of linear layers are held in: bf16, or codes of a byte each, under scales of tensors, outputs,
    blocks or groups along the contraction: e4m3, e4m3:token, e4m3:block128, e4m3:group128, int8, int8:block128."""

    def validate(self) -> None:
        """Raises UserError that names the first impossible value and the fix."""
        check_ranges(self)
        if not self.lora_rank and self != Lora():
            changed = [k for k, v in dataclasses.asdict(self).items() if v != getattr(Lora, k)]
            raise UserError(f"{flag(changed[0])} requires adapters; also set --lora-rank, such as 16")
        try:
            re.compile(self.lora_targets)
        except re.error as error:
            raise UserError(f"--lora-targets {self.lora_targets!r} is not a regular expression: {error}") from None
        if self.base == "bf16":
            return
        try:
            spec = fp8jax.QuantSpec.parse(self.base)
        except ValueError as error:
            raise UserError(f"--base: {error}") from None
        if fp8jax.formats.get(spec.format).bits != 8 or spec.rounding != "nearest":
            raise UserError(f"--base must be bf16, or an 8-bit spec that rounds to nearest, got {self.base}")


@dataclasses.dataclass(frozen=True)
class Run:
    """Where the run lives and how it reports."""

    run: str = "train"
    """Name of the run: its files are OUT/RUN."""
    out: Path = Path("runs")
    """Folder of all runs."""
    resume: Literal["auto", "never"] = "auto"
    """auto: go on from the newest checkpoint, if any. never: move an old run of this name aside and start afresh."""
    log_every: Count = 10
    """Steps between lines of progress."""
    checkpoint_every: Count = 50
    """Steps between checkpoints; there is one after the last step, too."""
    keep: Count = 2
    """Newest checkpoints that stay on disk."""
    eval_every: Count = 50
    """Steps between validations; there is one after the last step, too."""
    sample_tokens: CountOrZero = 160
    """Length of the text that the trained model writes at the end, its prompt included; 0 for none."""
    mesh: str = ""
    """Devices by axis, as data=2,fsdp=4: both split the batch, fsdp parameters and moments, too. Those along tensor
    share sequences: each computes some of a layer's heads and channels, and holds their parameters. Those along expert
    split the batch, and each holds some of the experts. Empty: data parallel over all of them, or over as many as
    divide a microbatch. Several processes use all of theirs."""
    expert_capacity: Annotated[float, Range("at least 1, or 0", lambda x: x == 0 or 1 <= x < inf)] = 0.0
    """With --mesh expert=N: rows of tokens that a device has room for, in multiples of those that it sends. No row is
    dropped: where more arrive, the loss is NaN and training stops. 0: room for the rows of all N devices."""
    partition: Literal["", "tensors", "slices"] = ""
    """How devices along data, which have the same parameters, share what the optimizer holds (ZeRO's first stage):
    whole tensors, each layer's on one device, or slices of each. Empty: all have all of it."""
    remat: Literal["auto", "none", "products", "blocks"] = "auto"
    """What the backward pass computes again: nothing, all of a block but its products and attention, or whole blocks.
    auto: products on a GPU where neither the recipe's contexts save operations nor kernels write what layers read, else
    none."""
    logits: Literal["auto", "whole", "chunked"] = "auto"
    """Logits of all tokens of a microbatch at once, or of a chunk of tokens at a time, which takes less memory.
    auto: chunked where a device would have more than 2 GiB of them in fp32, as of 16,384 tokens and 32,768 entries."""
    unroll: Annotated[int | None, Range("at least 1", lambda n: n >= 1)] = None
    """Layers in one turn of the loop over them: more run faster on a GPU and take longer to compile.
    None: all on a GPU, else one."""
    profile: CountOrZero = 0
    """Steps to trace, after the first two, to OUT/RUN/RECIPE/profile, for TensorBoard or Perfetto; 0 for none."""
    telemetry: CountOrZero = 0
    """Steps between those whose tensors are observed, the first one included: SNR, saturation and more by layer and
    operand, as rows of metrics.jsonl and as heat maps, OUT/RUN/RECIPE/telemetry_ROLE.png; 0 for none."""
    on_bad_step: Literal["stop", "skip", "rewind"] = "stop"
    """After a step whose loss, gradients or scales are not finite, or whose loss jumps. skip: leave its batch out.
    rewind: go back to the newest checkpoint, and on with the batch after the bad one."""
    max_bad_steps: Count = 10
    """With skip, most bad steps in a row; with rewind, in the whole run. One more stops it."""
    max_loss_jump: NotNegative = 0.0
    """A loss jumps if it is so many spreads above the median of the last 128 (6 is usual); 0 looks for no jumps."""
    verbose: bool = False
    """Print what OUT/RUN/log.txt has, too: settings, what each array is stored in, memory, kernels."""
    wandb: str = ""
    """Project of Weights & Biases to log to as well, where its package is installed."""
    coordinator: str = ""
    """HOST:PORT of process 0, where several processes train together, on one host or several; each is given the same
    command line but for --process-id, and sees the same --out. auto: what jax.distributed finds (Slurm, Open MPI)."""
    process_id: int | None = None
    """Number of this process, from 0."""
    process_count: int | None = None
    """How many processes there are."""
    patience: Count = 120
    """Seconds that processes wait for each other at the start, and until one that is silent counts as gone."""


def flag(field: str) -> str:
    """The command line's spelling of a field."""
    return "--" + field.replace("_", "-")
