"""The training program's configuration: frozen dataclasses that `tyro` turns into the command line.

The section that a field stands in says what changing it means. `Data`, `Model` and `Optim` (and the recipe and the
seed) change the mathematics: a checkpoint made with other values is refused. `Run` only says where, how often and how
long the program reports: it may change between a start and its resumption.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

import fp8jax
from experiments import mesh
from experiments.models import sizes
from experiments.models.llama import LlamaConfig


class UserError(Exception):
    """Something the user can put right. The message is one line that names the value and the fix."""

    exit_code = 2


class DiskError(UserError):
    """A file could not be written."""

    exit_code = 3


class BusyError(UserError):
    """Another process is at work on the run."""

    exit_code = 4


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
    seq_len: int = 256
    """Tokens of one sequence."""
    batch: int = 8
    """Sequences of one step."""
    valid_fraction: float = 0.05
    """Share of the text that is kept back for validation."""
    eval_batches: int = 16
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
    """Width of the MLP's hidden layer."""
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
            llama.validate()
        except ValueError as error:
            raise UserError(str(error)) from None
        return llama


@dataclasses.dataclass(frozen=True)
class Optim:
    """AdamW with a linear warm-up and a schedule. The recipe says how its state is stored."""

    steps: int = 200
    """Updates of each recipe."""
    lr: float = 1e-3
    """Peak learning rate."""
    final_lr: float = 0.1
    """Learning rate that the schedule ends at, after the last step, as a share of the peak; not of constant."""
    warmup: int = 20
    """Steps of the warm-up."""
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """After the warm-up; wsd (warm-up, stable, decay) is constant, and falls linearly at the end."""
    decay: float = 0.2
    """Share of the steps, the last ones, in which wsd falls."""
    b1: float = 0.9
    """Decay of the first moment."""
    b2: float = 0.95
    """Decay of the second moment."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.1
    """Applied to matrices, not to norms."""
    clip: float = 1.0
    """Largest global norm of the gradient."""
    microbatches: int = 1
    """Parts that a batch is computed in, one after the other, to save memory; their gradients are averaged."""

    @property
    def decay_start(self) -> int:
        """The step from which wsd falls."""
        return self.steps - round(self.decay * self.steps)


@dataclasses.dataclass(frozen=True)
class Lora:
    """Low-rank adapters on weights that are not trained. Without a rank all weights are trained."""

    lora_rank: int = 0
    """Rank of the adapters of linear layers, which alone are trained and saved; 0 for none."""
    lora_alpha: float = 16.0
    """What adapters add is multiplied by alpha / rank."""
    lora_dropout: float = 0.0
    """Share of the inputs of adapters that are dropped in training."""
    lora_targets: str = ".*"
    """Regular expression of whole paths of layers with an adapter, such as "layers/attention/(q|v)"."""
    base: str = "e4m3"
    """What weights of linear layers are held in: bf16, or codes of a byte each, under scales of tensors, outputs,
    blocks or groups along the contraction: e4m3, e4m3:token, e4m3:block128, e4m3:group128, int8, int8:block128."""

    def validate(self) -> None:
        """Raises UserError that names the first impossible value and the fix."""
        if self.lora_rank < 0:
            raise UserError(f"--lora-rank must be at least 0, got {self.lora_rank}")
        if not self.lora_rank and self != Lora():
            changed = [k for k, v in dataclasses.asdict(self).items() if v != getattr(Lora, k)]
            raise UserError(f"{flag(changed[0])} is for adapters: give --lora-rank, too, such as 16")
        if not 0 < self.lora_alpha < float("inf"):
            raise UserError(f"--lora-alpha must be positive and finite, got {self.lora_alpha}")
        if not 0 <= self.lora_dropout < 1:
            raise UserError(f"--lora-dropout must be at least 0 and below 1, got {self.lora_dropout}")
        try:
            re.compile(self.lora_targets)
        except re.error as error:
            raise UserError(f"--lora-targets {self.lora_targets!r} is no regular expression: {error}") from None
        if self.base == "bf16":
            return
        try:
            spec = fp8jax.QuantSpec.parse(self.base)
        except ValueError as error:
            raise UserError(f"--base: {error}") from None
        if fp8jax.formats.get(spec.format).bits != 8 or spec.rounding != "nearest":
            raise UserError(f"--base has 8-bit codes rounded to nearest, or is bf16, not {self.base}")


@dataclasses.dataclass(frozen=True)
class Run:
    """Where the run lives and how it reports."""

    run: str = "train"
    """Name of the run: its files are OUT/RUN."""
    out: Path = Path("runs")
    """Folder of all runs."""
    resume: Literal["auto", "never"] = "auto"
    """auto: go on from the newest checkpoint, if any. never: move an old run of this name aside and start afresh."""
    log_every: int = 10
    """Steps between lines of progress."""
    checkpoint_every: int = 50
    """Steps between checkpoints; there is one after the last step, too."""
    keep: int = 2
    """Newest checkpoints that stay on disk."""
    eval_every: int = 50
    """Steps between validations; there is one after the last step, too."""
    sample_tokens: int = 160
    """Length of the text that the trained model writes at the end, its prompt included; 0 for none."""
    mesh: str = ""
    """Devices by axis, as data=2,fsdp=4: both split the batch, fsdp parameters and moments, too. Empty: data parallel
    over all of them, or over as many as divide a microbatch. Several processes use all of theirs."""
    remat: Literal["auto", "none", "products", "blocks"] = "auto"
    """What the backward pass computes again: nothing, all of a block but its products and attention, or whole blocks.
    auto: products on a GPU where neither the recipe's contexts save operations nor kernels write what layers read, else
    none."""
    unroll: int | None = None
    """Layers in one turn of the loop over them: more run faster on a GPU and take longer to compile.
    None: all on a GPU, else one."""
    profile: int = 0
    """Steps to trace, after the first two, to OUT/RUN/RECIPE/profile, for TensorBoard or Perfetto; 0 for none."""
    wandb: str = ""
    """Project of Weights & Biases to log to as well, where its package is installed."""
    coordinator: str = ""
    """HOST:PORT of process 0, where several processes train together, on one host or several; each is given the same
    command line but for --process-id, and sees the same --out. auto: what jax.distributed finds (Slurm, Open MPI)."""
    process_id: int | None = None
    """Number of this process, from 0."""
    process_count: int | None = None
    """How many processes there are."""
    patience: int = 120
    """Seconds that processes wait for each other at the start, and until one that is silent counts as gone."""


@dataclasses.dataclass(frozen=True)
class Config:
    """Train a Llama on text, once per recipe, on the same batches in the same order, and compare."""

    recipe: Annotated[
        tuple[str, ...],
        tyro.conf.arg(
            help="Trained one after the other; the first is the baseline of the comparison. "
            f"Recipes: {', '.join(fp8jax.recipes.NAMES)}. auto is one of them, by the device."
        ),
    ] = ("bf16", "coat_optimizer")
    seed: int = 0
    """Of the initial parameters, of the order of the batches and of the sampled text."""
    data: Data = dataclasses.field(default_factory=Data)
    model: Model = dataclasses.field(default_factory=Model)
    optim: Optim = dataclasses.field(default_factory=Optim)
    lora: Lora = dataclasses.field(default_factory=Lora)
    run: Run = dataclasses.field(default_factory=Run)

    @property
    def folder(self) -> Path:
        """Where everything of this run is written."""
        return self.run.out / self.run.run

    def validate(self) -> None:
        """Raises UserError that names the first impossible value and the fix."""
        sections: tuple[tuple[Any, tuple[str, ...], int], ...] = (
            (self.data, ("seq_len", "batch", "eval_batches"), 1),
            (self.optim, ("steps", "microbatches"), 1),
            (self.run, ("log_every", "checkpoint_every", "keep", "eval_every"), 1),
            (self.optim, ("warmup",), 0),
            (self.run, ("sample_tokens", "profile"), 0),
            (self, ("seed",), 0),
        )
        for section, names, least in sections:
            for name in names:
                if getattr(section, name) < least:
                    raise UserError(f"{flag(name)} must be at least {least}, got {getattr(section, name)}")
        if self.run.unroll is not None and self.run.unroll < 1:
            raise UserError(f"--unroll must be at least 1, got {self.run.unroll}")
        for name in ("lr", "eps", "clip"):
            if not 0 < getattr(self.optim, name) < float("inf"):
                raise UserError(f"{flag(name)} must be positive and finite, got {getattr(self.optim, name)}")
        for name in ("b1", "b2"):
            if not 0 <= getattr(self.optim, name) < 1:
                raise UserError(f"{flag(name)} must be at least 0 and below 1, got {getattr(self.optim, name)}")
        if not 0 <= self.optim.final_lr <= 1:
            raise UserError(f"--final-lr is a share of --lr, from 0 to 1, got {self.optim.final_lr}")
        if not 0 <= self.optim.weight_decay < float("inf"):
            raise UserError(f"--weight-decay must be finite and not negative, got {self.optim.weight_decay}")
        if self.optim.warmup >= self.optim.steps:
            raise UserError(f"--warmup {self.optim.warmup} must be below --steps {self.optim.steps}")
        if not 0 < self.optim.decay <= 1:
            raise UserError(f"--decay is a share of --steps, above 0 and at most 1, got {self.optim.decay}")
        if self.optim.schedule == "wsd" and not self.optim.warmup <= self.optim.decay_start < self.optim.steps:
            raise UserError(
                f"--decay {self.optim.decay}: wsd falls from step {self.optim.decay_start} on, which must lie between "
                f"--warmup {self.optim.warmup} and --steps {self.optim.steps}"
            )
        if self.data.batch % self.optim.microbatches:
            raise UserError(f"--microbatches {self.optim.microbatches} must divide --batch {self.data.batch}")
        if not 0 < self.data.valid_fraction < 1:
            raise UserError(f"--valid-fraction must be between 0 and 1, got {self.data.valid_fraction}")
        if self.data.tokenizer == "bpe" and self.data.vocab < 257:
            raise UserError(f"--vocab must be at least 257 (256 bytes and a separator), got {self.data.vocab}")
        if not self.recipe:
            raise UserError("--recipe needs at least one name")
        if len(set(self.recipe)) < len(self.recipe):
            raise UserError(f"--recipe names a recipe twice: {' '.join(self.recipe)}")
        name = self.run.run
        if not name or name.startswith(".") or Path(name).name != name:
            raise UserError(
                f"--run is a name without a leading dot, not a path, got {name!r}; --out is the runs' folder"
            )
        self.model.shape(vocab=256)
        if self.model.init:
            given = [k for k, v in dataclasses.asdict(self.model).items() if k != "init" and v != getattr(Model, k)]
            given += [k for k in ("tokenizer", "vocab") if getattr(self.data, k) != getattr(Data, k)]
            if given:
                raise UserError(f"{flag(given[0])} is the checkpoint's own: leave it out with --init")
        self.lora.validate()
        self._validate_processes()
        if self.run.mesh:
            try:
                mesh.parse(self.run.mesh)
            except ValueError as error:
                raise UserError(f"--mesh {error}") from None

    def _validate_processes(self) -> None:
        where, number, count = self.run.coordinator, self.run.process_id, self.run.process_count
        if self.run.patience < 1:
            raise UserError(f"--patience must be at least 1, got {self.run.patience}")
        if where in ("", "auto"):
            if number is not None or count is not None:
                raise UserError(
                    f"--process-id {number} and --process-count {count} are for --coordinator HOST:PORT; "
                    f"{'auto finds them itself' if where else 'give that address, or leave them out'}"
                )
            return
        host, _, port = where.rpartition(":")
        if not host or not port.isdecimal():
            raise UserError(f"--coordinator is HOST:PORT, as in node0:12345, or auto, got {where!r}")
        if number is None or count is None:
            raise UserError(f"--coordinator {where} needs --process-id and --process-count, too")
        if count < 1 or not 0 <= number < count:
            raise UserError(f"--process-id {number} must be from 0 to --process-count {count} - 1")

    def mathematics(self) -> dict[str, Any]:
        """Every field that changes the numbers, by its name on the command line; the text itself is not among them."""
        fields = {"seed": self.seed} | dataclasses.asdict(self.data) | dataclasses.asdict(self.model)
        fields |= dataclasses.asdict(self.optim)
        # Where the text lies does not matter: its fingerprint is compared instead.
        del fields["data"]
        if self.data.tokenizer == "bytes":
            del fields["vocab"]
        return fields | dataclasses.asdict(self.lora)


def flatten_fields(prefix: str, value: Any) -> dict[str, Any]:
    """Nested dataclasses as one dict: `recipe.optimizer.mu` and so on."""
    if not dataclasses.is_dataclass(value):
        return {prefix: value}
    flat: dict[str, Any] = {}
    for field in dataclasses.fields(value):
        flat |= flatten_fields(f"{prefix}.{field.name}", getattr(value, field.name))
    return flat


def flag(field: str) -> str:
    """The command line's spelling of a field."""
    return "--" + field.replace("_", "-")


# What runs had before there were these settings.
_ADDED = dataclasses.asdict(Lora()) | {
    "field": Data.field,
    "init": Model.init,
    "schedule": Optim.schedule,
    "decay": Optim.decay,
}


def check_same(saved: Mapping[str, Any], now: Mapping[str, Any], where: Path) -> None:
    """Compares a stored configuration with today's.

    Raises:
        UserError: a field differs; names each with its old and new value, and the ways out.
    """
    before = _ADDED | dict(saved)
    changed = [f"{k} was {before.get(k)!r}, now {v!r}" for k, v in now.items() if before.get(k) != v]
    if changed:
        raise UserError(
            f"{where} was made with another configuration: {'; '.join(changed)}. "
            "Give the old values to resume, a new --run to train beside it, or --resume never to start this run afresh"
        )


def parse(argv: Sequence[str] | None = None, description: str | None = None) -> Config:
    """Command line to configuration.

    Args:
        argv: the command line; None takes the process's own.
        description: what `--help` says first.

    Raises:
        SystemExit: the command line does not parse (2), or help was asked for (0).
        UserError: a value is impossible.
    """
    config = tyro.cli(
        Config,
        args=argv,
        prog="python -m experiments.train",
        description=description,
        config=(tyro.conf.OmitArgPrefixes,),
    )
    config.validate()
    return config
