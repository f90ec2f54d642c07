"""The sections of the training program's configuration: frozen dataclasses with command-line options.

The section of a field determines the effect of a change. `Data`, `Model`, `Optim` and `Lora` (and the recipe and the
seed) change the mathematics: a checkpoint with other values is rejected. `Run` determines only files and reports. Its
values may change when a run is resumed.
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
        text: the range in words, to follow "must be".
        holds: a function that returns whether a value is in the range.
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
    """The text and how it is split into sequences."""

    data: tuple[str, ...] = ()
    """Files, folders and globs of UTF-8 text, or of .jsonl or .parquet with one text or conversation ("messages") per
    line or row. Texts of these are packed into rows and attend only to themselves. None: the sources and docs of
    Python's standard library."""
    field: str = "text"
    """Field of a line or row that contains its text."""
    tokenizer: Literal["bytes", "bpe"] = "bytes"
    """Bytes, or byte-pair encoding, trained on the training split and saved with the run."""
    vocab: int = 4096
    """Vocabulary size of the byte-pair encoding; for bytes it is always 256."""
    seq_len: Count = 256
    """Tokens of one sequence."""
    batch: Count = 8
    """Sequences of one step."""
    valid_fraction: Annotated[float, Range("between 0 and 1", lambda x: 0 < x < 1)] = 0.05
    """Share of the text that is used for validation."""
    eval_batches: Count = 16
    """Largest number of validation batches per evaluation; the same for all recipes of a run."""


@dataclasses.dataclass(frozen=True)
class Model:
    """The model. Numbers given here replace those of the size."""

    init: str = ""
    """Folder of a Hugging Face checkpoint to start from, or its name in the local cache: with its shape, tokenizer and
    chat template. Only answers count in the loss."""
    model: Annotated[str, tyro.conf.arg(help=f"A size: {', '.join(sizes.NAMES)}.")] = "5m"
    layers: int | None = None
    """Number of blocks."""
    dim: int | None = None
    """Width of the residual stream."""
    heads: int | None = None
    """Attention heads; their number divides the width."""
    kv_heads: int | None = None
    """Key and value heads; their number divides --heads."""
    mlp_dim: int | None = None
    """Width of the hidden layer of the MLP, or of each expert."""
    experts: int | None = None
    """Experts of a layer."""
    experts_per_token: int | None = None
    """Number of experts that process a token."""
    tied: bool = False
    """Also use the embedding table as output head."""

    def shape(self, vocab: int) -> LlamaConfig:
        """The model configuration of this section.

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
            # The message has names of fields; users know them as command-line options.
            options = re.sub(r"\b(dim|layers|heads|kv_heads|mlp_dim)\b", lambda name: flag(name[0]), str(error))
            raise UserError(options) from None
        return llama


@dataclasses.dataclass(frozen=True)
class Optim:
    """AdamW with a linear warmup and a schedule. The recipe determines the storage of its state."""

    steps: Count = 200
    """Training steps of each recipe."""
    lr: Positive = 1e-3
    """Peak learning rate."""
    final_lr: Annotated[float, Range("a share of --lr, from 0 to 1", lambda x: 0 <= x <= 1)] = 0.1
    """Learning rate after the last step, as a share of the peak; not used by constant."""
    warmup: CountOrZero = 20
    """Warmup steps."""
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """Schedule after the warmup; wsd (warmup, stable, decay) is constant, with a linear decay at the end."""
    decay: Annotated[float, Range("a share of --steps, above 0 and at most 1", lambda x: 0 < x <= 1)] = 0.2
    """Share of the steps, at the end, in which wsd decays."""
    b1: BelowOne = 0.9
    """Decay of the first moment."""
    b2: BelowOne = 0.95
    """Decay of the second moment."""
    eps: Positive = 1e-8
    """Added to the root of the second moment."""
    weight_decay: NotNegative = 0.1
    """Weight decay, applied to matrices, not to norms."""
    clip: Positive = 1.0
    """Largest global norm of the gradient."""
    balance_coefficient: NotNegative = 0.001
    """Coefficient of the load-balancing loss of routers (Switch Transformer, eq. 4)."""
    z_coefficient: NotNegative = 0.001
    """Coefficient of the z-loss of routers (ST-MoE, eq. 5)."""
    microbatches: Count = 1
    """Number of microbatches per batch, processed one after the other to save memory; their gradients are averaged."""
    master: str = ""
    """Master weights, instead of those of the recipes: fp32, bf16+stochastic, or split ones, bf16+int8 (24 bits) or
    bf16+int16 (32 bits). The model computes with the bf16 part."""
    head: Literal["", "fp8"] = ""
    """Compute the output head in FP8, for all recipes. With `coat` and 128,256 entries, a step of 1b takes 0.9 of its
    time on an H100 (results/pages/step_vocab.md), and each logit changes a little. Training and validation losses use
    this head; `evaluate` and `generate` use 16 bits. Empty: the head of the recipes, in 16 bits."""
    release: Literal["", "previous", "twice"] = ""
    """Update each layer inside the backward pass, so that only the gradients of one layer are in memory. Steps are
    applied for any loss. previous: clip each layer to its share of the previous step's norm. twice: clip by the norm of
    an additional backward pass."""

    @property
    def decay_start(self) -> int:
        """The first step of the decay of wsd."""
        return self.steps - round(self.decay * self.steps)


@dataclasses.dataclass(frozen=True)
class Lora:
    """Low-rank adapters on frozen weights. With rank 0, all weights are trained."""

    lora_rank: CountOrZero = 0
    """Rank of the adapters of linear layers. Only adapters are trained and saved. 0 for none."""
    lora_alpha: Positive = 16.0
    """The adapters' contribution is multiplied by alpha / rank."""
    lora_dropout: BelowOne = 0.0
    """Dropout rate for the inputs of adapters in training."""
    lora_targets: str = ".*"
    """Regular expression for the whole path of layers with an adapter, such as "layers/attention/(q|v)"."""
    base: str = "e4m3"
    """Storage of frozen weights of linear layers: bf16, or one-byte codes with scales per tensor, output, block or
    group along the contraction: e4m3, e4m3:token, e4m3:block128, e4m3:group128, int8, int8:block128."""

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
    """The files of the run and its reports."""

    run: str = "train"
    """Name of the run; its files are in OUT/RUN."""
    out: Path = Path("runs")
    """Folder of all runs."""
    resume: Literal["auto", "never"] = "auto"
    """auto: continue from the newest checkpoint, if any. never: move an old run of this name aside and start a new
    one."""
    log_every: Count = 10
    """Steps between progress lines."""
    checkpoint_every: Count = 50
    """Steps between checkpoints; the last step also writes one."""
    keep: Count = 2
    """Number of newest checkpoints to keep on disk."""
    eval_every: Count = 50
    """Steps between validations; there is also one after the last step."""
    sample_tokens: CountOrZero = 160
    """Length of the sample that the trained model generates at the end, including the prompt; 0 for none."""
    mesh: str = ""
    """Devices by axis, such as data=2,fsdp=4. Both axes split the batch; fsdp also shards parameters and moments.
    Devices along tensor work on the same sequences: each computes a part of the heads and channels of a layer, and
    stores their parameters. Devices along expert split the batch, and each stores a part of the experts. Empty: data
    parallel over all devices, or over as many as divide a microbatch. Several processes use all of their devices."""
    expert_capacity: Annotated[float, Range("at least 1, or 0", lambda x: x == 0 or 1 <= x < inf)] = 0.0
    """With --mesh expert=N: the number of token rows that a device can receive, as a multiple of the rows that it
    sends. No row is dropped: if more arrive, the loss is NaN and training stops. 0: space for the rows of all N
    devices."""
    partition: Literal["", "tensors", "slices"] = ""
    """How the optimizer state is sharded over devices along data, which have the same parameters (ZeRO stage 1): whole
    tensors, with each layer's state on one device, or slices of each tensor. Empty: no sharding."""
    remat: Literal["auto", "none", "products", "blocks"] = "auto"
    """What the backward pass recomputes: nothing, everything in a block except matmuls and attention (products), or
    whole blocks. auto: products on a GPU if neither the recipe's contexts save operations nor kernels write the inputs
    of layers; none otherwise."""
    logits: Literal["auto", "whole", "chunked"] = "auto"
    """Compute the logits of all tokens of a microbatch at once, or in chunks of tokens, which needs less memory. auto:
    chunked if a device would have more than 2 GiB of fp32 logits, such as for 16,384 tokens and 32,768 entries."""
    unroll: Annotated[int | None, Range("at least 1", lambda n: n >= 1)] = None
    """Unrolled layers per iteration of the loop over layers. More are faster on a GPU, but need more time to compile.
    None: all on a GPU, one elsewhere."""
    profile: CountOrZero = 0
    """Number of steps to trace, after the first two, to OUT/RUN/RECIPE/profile, for TensorBoard or Perfetto; 0 for
    none."""
    telemetry: CountOrZero = 0
    """Steps between observations of tensors, starting with the first step: SNR, saturation and more by layer and
    operand, in metrics.jsonl and as heat maps, OUT/RUN/RECIPE/telemetry_ROLE.png; 0 for none."""
    on_bad_step: Literal["stop", "skip", "rewind"] = "stop"
    """Action after a bad step: its loss, gradients or scales are not finite, or its loss jumps. skip: skip its batch.
    rewind: return to the newest checkpoint and continue with the batch after the bad one."""
    max_bad_steps: Count = 10
    """Largest number of bad steps: with skip, in a row; with rewind, in the whole run. One more stops the run."""
    max_loss_jump: NotNegative = 0.0
    """A loss jumps if it is more than this many spreads above the median of the last 128 losses (6 is usual); 0
    disables the check."""
    verbose: bool = False
    """Also print the content of OUT/RUN/log.txt: settings, storage of each array, memory, kernels."""
    wandb: str = ""
    """Weights & Biases project for additional logging; needs the package wandb."""
    coordinator: str = ""
    """HOST:PORT of process 0, if several processes train together, on one or several hosts. All have the same command
    line except for --process-id, and the same --out. auto: detected by jax.distributed (Slurm, Open MPI)."""
    process_id: int | None = None
    """Number of this process, from 0."""
    process_count: int | None = None
    """Number of processes."""
    patience: Count = 120
    """Seconds that processes wait for each other at the start, and after which a silent process counts as dead."""


def flag(field: str) -> str:
    """Returns the command-line option of a field."""
    return "--" + field.replace("_", "-")
