"""A model that `experiments.train` trained, restored from the newest checkpoint of a run."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax

import fp8jax
from experiments.errors import UserError
from experiments.files import parse_json, read_text
from experiments.text.tokenizer import Tokenizer
from experiments.train import config as configuration
from experiments.train import start
from experiments.train.checkpoint import Checkpoints, DamagedError
from experiments.train.config import Config, check_same, flatten_fields, with_new_names
from experiments.train.folders import load_tokenizer
from experiments.train.optimizer import configure, make_optimizer
from experiments.train.task import Task


@dataclasses.dataclass(frozen=True)
class Trained:
    """A restored model.

    Attributes:
        config: configuration of the run.
        recipe: recipe of the training.
        task: program of the training.
        params: working weights.
        model_state: further state of the model.
        step: step of the checkpoint.
        tokenizer: tokenizer of the run.
        weights: master weights, which may be more precise than `params`; None if `params` are the master weights.
    """

    config: Config
    recipe: fp8jax.Recipe
    task: Task
    params: Any
    model_state: Any
    step: int
    tokenizer: Tokenizer
    weights: Any = None

    @property
    def masters(self) -> Any:
        """The weights to save or to continue training from."""
        return self.params if self.weights is None else self.weights

    def model(self, params: Any, tokens_BxT: jax.Array) -> jax.Array:
        """Returns the logits of next tokens, (B, T, V), computed as in training."""
        logits: jax.Array = self.task.model(params, self.model_state)(tokens_BxT)
        return logits


def load(folder: Path, name: str) -> Trained:
    """Loads the newest checkpoint of a recipe of a run.

    Raises:
        UserError: run, recipe or checkpoint is missing or damaged, or the recipe has changed.
    """
    try:
        recipe = fp8jax.recipes.get(name)
    except ValueError as error:
        raise UserError(f"--recipe: {error}") from None
    if not (folder / "config.json").is_file():
        raise UserError(f"--run {folder}: there is no run of experiments.train (config.json is missing)")
    trained_recipes = sorted(
        p.parent.name for p in folder.glob("*/checkpoints") if any(x.name.isdigit() for x in p.iterdir())
    )
    if name not in trained_recipes:
        raise UserError(f"--recipe {name}: {folder} has checkpoints of {', '.join(trained_recipes) or 'no recipe'}")
    config = read_config(folder)
    lora = config.lora if config.lora.lora_rank else None
    recipe = configure(recipe, config)
    tokenizer = load_tokenizer(config, folder)
    task = Task(
        start.shape(config, tokenizer.vocab),
        make_optimizer(config, recipe),
        recipe,
        remat=False,
        seed=config.seed,
        lora=lora,
    )
    with Checkpoints(folder / name / "checkpoints", config.run.keep, clean=False) as checkpoints:
        step = checkpoints.latest()
        if step is None:
            raise UserError(f"--run {folder}: {name} has no complete checkpoint")
        now = json.loads(json.dumps(flatten_fields("recipe", recipe), default=str))
        try:
            saved = with_new_names(checkpoints.read_meta(step)["config"])
            check_same(saved, {k: v for k, v in now.items() if k in saved}, checkpoints.folder / str(step))
            state, _ = checkpoints.restore(step, jax.eval_shape(task.init))
        except DamagedError as error:
            raise UserError(f"{error}. Move this folder away to evaluate the previous checkpoint") from None
    if lora is None:
        weights = jax.jit(fp8jax.master_weights)(state.opt_state, state.params)
        return Trained(config, recipe, task, state.params, state.model_state, step, tokenizer, weights)
    # Adapters are merged into the base for evaluation.
    base = jax.jit(task.base)(start.params(config, None))
    merged_task = Task(task.llama, task.tx, recipe, remat=False, seed=config.seed)
    merged = jax.jit(task.merged)(state.params, base)
    return Trained(config, recipe, merged_task, merged, {}, step, tokenizer, merged)


def read_config(folder: Path) -> Config:
    """Returns the configuration of a run. Raises UserError if it cannot be read."""
    try:
        fields = parse_json(read_text(folder / "config.json"))["all"]
        sections = {"data": configuration.Data, "model": configuration.Model, "optim": configuration.Optim}
        sections |= {"lora": configuration.Lora} if "lora" in fields else {}
        parts: dict[str, Any] = {name: section(**fields[name]) for name, section in sections.items()}
        parts["data"] = dataclasses.replace(parts["data"], data=tuple(parts["data"].data))
        settings = fields["run"]
        parts["run"] = configuration.Run(**{**settings, "out": Path(settings["out"])})
        config = Config(recipe=tuple(fields["recipe"]), seed=fields["seed"], **parts)
        config.validate()
        return config
    except (OSError, ValueError, KeyError, TypeError, AttributeError, UserError) as error:
        raise UserError(f"{folder / 'config.json'} cannot be read ({error!r}); train the run again") from None
