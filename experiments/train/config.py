"""The configuration of the training program, its command line (by `tyro`), and the comparison with a stored one."""

import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple

import tyro

import fp8jax
from experiments import mesh
from experiments.errors import UserError
from experiments.train import help
from experiments.train.sections import Data as Data
from experiments.train.sections import Lora as Lora
from experiments.train.sections import Model as Model
from experiments.train.sections import Optim as Optim
from experiments.train.sections import Range, check_ranges
from experiments.train.sections import Run as Run
from experiments.train.sections import flag as flag


@dataclasses.dataclass(frozen=True)
class Config:
    """Train a Llama on text, once per recipe, on the same batches in the same order, and compare."""

    recipe: Annotated[
        tuple[str, ...],
        tyro.conf.arg(
            help="Recipes to train, one after the other. The first is the baseline. "
            f"Recipes: {', '.join(fp8jax.recipes.NAMES)}. auto picks one for the device."
        ),
    ] = ("bf16", "coat_optimizer")
    seed: Annotated[int, Range("at least 0 and below 2**63", lambda n: 0 <= n < 2**63)] = 0
    """Seed of the initial parameters, the order of the batches and the sampled text."""
    data: Data = dataclasses.field(default_factory=Data)
    model: Model = dataclasses.field(default_factory=Model)
    optim: Optim = dataclasses.field(default_factory=Optim)
    lora: Lora = dataclasses.field(default_factory=Lora)
    run: Run = dataclasses.field(default_factory=Run)

    @property
    def folder(self) -> Path:
        """The folder of this run."""
        return self.run.out / self.run.run

    def validate(self) -> None:
        """Checks all values. Raises UserError with the first invalid value and its fix."""
        for section in (self, self.data, self.model, self.optim, self.run):
            check_ranges(section)
        if self.optim.warmup >= self.optim.steps:
            raise UserError(
                f"--warmup {self.optim.warmup} must be below --steps {self.optim.steps}: "
                "pass a smaller --warmup or more --steps"
            )
        if self.optim.schedule == "wsd" and not self.optim.warmup <= self.optim.decay_start < self.optim.steps:
            raise UserError(
                f"--decay {self.optim.decay} starts at step {self.optim.decay_start} with wsd, which must be between "
                f"--warmup {self.optim.warmup} and --steps {self.optim.steps}"
            )
        if self.data.batch % self.optim.microbatches:
            raise UserError(f"--microbatches {self.optim.microbatches} must divide --batch {self.data.batch}")
        if self.optim.release and self.optim.microbatches > 1:
            raise UserError(
                f"--release {self.optim.release} updates layers as their gradients are computed, so gradients cannot "
                f"be accumulated. Omit --microbatches {self.optim.microbatches}, and use a smaller --batch"
            )
        if self.optim.release and self.run.on_bad_step == "skip":
            raise UserError(
                f"--release {self.optim.release} updates layers before all gradients are known, so steps cannot be "
                "skipped. Use --on-bad-step rewind or stop"
            )
        if self.optim.release and self.lora.lora_rank:
            raise UserError(f"--release {self.optim.release} trains all weights; omit --lora-rank or --release")
        if self.data.tokenizer == "bpe" and self.data.vocab < 257:
            raise UserError(f"--vocab must be at least 257 (256 bytes and a separator), got {self.data.vocab}")
        if not self.recipe:
            raise UserError("--recipe needs at least one name")
        if len(set(self.recipe)) < len(self.recipe):
            raise UserError(f"--recipe contains a recipe twice: {' '.join(self.recipe)}")
        name = self.run.run
        if not name or name.startswith(".") or Path(name).name != name:
            raise UserError(
                f"--run must be a name without a leading dot, not a path, got {name!r}; set the folder with --out"
            )
        self.model.shape(vocab=256)
        if self.model.init:
            changed = [k for k, v in dataclasses.asdict(self.model).items() if k != "init" and v != getattr(Model, k)]
            changed += [k for k in ("tokenizer", "vocab") if getattr(self.data, k) != getattr(Data, k)]
            if changed:
                raise UserError(f"{flag(changed[0])} is set by the checkpoint; omit it with --init")
        if self.optim.release and self.run.partition:
            raise UserError(f"--partition {self.run.partition} is not supported with --release; omit one of them")
        if self.optim.head and self.run.logits == "whole":
            raise UserError(
                f"--head {self.optim.head} computes logits in chunks of tokens; omit --logits whole or --head"
            )
        self.lora.validate()
        self._validate_processes()
        if self.run.mesh:
            try:
                sizes = mesh.parse(self.run.mesh)
            except ValueError as error:
                raise UserError(f"--mesh {error}") from None
            if sizes["tensor"] > 1:
                self._validate_shared(sizes["tensor"])

    def _validate_shared(self, devices: int) -> None:
        """Raises UserError for settings that tensor parallelism does not support."""
        if self.optim.release:
            raise UserError(
                f"--mesh {self.run.mesh}: with tensor={devices} gradients are summed over devices after the backward "
                f"pass, but --release {self.optim.release} updates layers during it. Use fsdp={devices} instead of "
                f"tensor={devices}, or omit --release"
            )

    def _validate_processes(self) -> None:
        where, number, count = self.run.coordinator, self.run.process_id, self.run.process_count
        if where in ("", "auto"):
            if number is not None or count is not None:
                raise UserError(
                    f"--process-id {number} and --process-count {count} require --coordinator HOST:PORT; "
                    f"{'omit them: auto detects them' if where else 'set it, or omit them'}"
                )
            return
        host, _, port = where.rpartition(":")
        if not host or not port.isdecimal():
            raise UserError(f"--coordinator must be HOST:PORT, such as node0:12345, or auto, got {where!r}")
        if number is None or count is None:
            raise UserError(f"--coordinator {where} also needs --process-id and --process-count")
        if count < 1 or not 0 <= number < count:
            raise UserError(f"--process-id {number} must be from 0 to --process-count {count} - 1")

    def mathematics(self) -> dict[str, Any]:
        """Returns all fields that change the numbers, by name on the command line, without the text."""
        fields = {"seed": self.seed} | dataclasses.asdict(self.data) | dataclasses.asdict(self.model)
        fields |= dataclasses.asdict(self.optim)
        # The location of the text does not matter: its fingerprint is compared.
        del fields["data"]
        if self.data.tokenizer == "bytes":
            del fields["vocab"]
        return fields | dataclasses.asdict(self.lora)


def flatten_fields(prefix: str, value: Any) -> dict[str, Any]:
    """Returns nested dataclasses as a flat dict with keys such as `recipe.optimizer.mu`."""
    if not dataclasses.is_dataclass(value):
        return {prefix: value}
    flat: dict[str, Any] = {}
    for field in dataclasses.fields(value):
        flat |= flatten_fields(f"{prefix}.{field.name}", getattr(value, field.name))
    return flat


class _NewName(NamedTuple):
    """The new name of a renamed field, and new values of renamed values."""

    field: str
    values: Mapping[str, bool | str] = MappingProxyType({})


# Keys: part of the recipe and old name. A head has the fields of linear layers.
_NEW_NAMES = {
    ("linear", "saved"): _NewName("x_residual"),
    ("linear", "history"): _NewName("amax_history_length"),
    ("linear", "fallback_rates"): _NewName("fallback_fraction_range"),
    ("linear", "fallback_factor"): _NewName("threshold_update_factor"),
    ("linear", "interval"): _NewName("weight_amax_interval"),
    ("linear", "select"): _NewName("skip_unprofitable", {"all": False, "gains": True}),
    ("context", "saved"): _NewName("residual"),
    ("context", "mode"): _NewName("recompute_activations", {"faithful": False, "lean": True}),
    ("context", "scales"): _NewName("amax", {"largest": "exact", "bound": "bound"}),
}
# Removed fields of recipes, by both names. They were off in all older runs.
_REMOVED = ("joins", "fuse_parallel_matmuls")


def with_new_names(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Converts stored fields, such as `recipe.linear.interval` or `linear.interval`, to current names and values."""
    renamed = {}
    for key, value in saved.items():
        prefix, _, field = key.rpartition(".")
        if field in _REMOVED and str(value) == "False":
            continue
        section = prefix.rpartition(".")[2]
        if (new := _NEW_NAMES.get(("linear" if section == "head" else section, field))) is not None:
            field, value = new.field, new.values.get(value, value)
        renamed[f"{prefix}.{field}" if prefix else field] = value
    return renamed


# Values of newer settings in older runs, as JSON.
_ADDED = json.loads(
    json.dumps(
        dataclasses.asdict(Lora())
        | {
            "field": Data.field,
            "init": Model.init,
            "schedule": Optim.schedule,
            "decay": Optim.decay,
            "master": Optim.master,
            "release": Optim.release,
            "head": Optim.head,
            "experts": Model.experts,
            "experts_per_token": Model.experts_per_token,
            "balance_coefficient": Optim.balance_coefficient,
            "z_coefficient": Optim.z_coefficient,
        }
        | flatten_fields("recipe.head", fp8jax.recipes.Recipe("").head)
    )
)


def check_same(saved: Mapping[str, Any], now: Mapping[str, Any], where: Path) -> None:
    """Compares a stored configuration with the current one.

    Raises:
        UserError: a field differs. The message has old and new values, and the fixes.
    """
    saved_settings = _ADDED | with_new_names(saved)
    changed = [
        "the text of --data differs" if name == "text" else f"{name} was {saved_settings.get(name)!r}, now {value!r}"
        for name, value in now.items()
        if saved_settings.get(name) != value
    ]
    if changed:
        raise UserError(
            f"{where} was trained with another configuration: {'; '.join(changed)}. Use the old values to resume, a "
            "new --run NAME to train a second run, or --resume never to restart this run"
        )


def parse(argv: Sequence[str] | None = None, description: str | None = None) -> Config:
    """Parses a command line.

    Args:
        argv: the command line; None for that of the process.
        description: the text of the help; `--help` prints parts of it.

    Raises:
        SystemExit: the command line is invalid (2), or help was requested (0).
        UserError: a value is invalid.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if help.HELP_ALL in words:
        words = ["--help"]
    elif {"-h", "--help"} & set(words):
        print(help.short_help(Config(), description or ""))
        raise SystemExit(0)
    config = tyro.cli(
        Config,
        args=words,
        prog="python -m experiments.train",
        description=description,
        config=(tyro.conf.OmitArgPrefixes,),
    )
    config.validate()
    return config
