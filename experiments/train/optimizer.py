"""The optimizer of a configuration and a recipe."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import optax

import fp8jax
from experiments.errors import UserError
from experiments.train import parallel
from experiments.train.adapters import base_recipe
from experiments.train.config import Config
from experiments.train.released import ReleasedOptimizer
from experiments.train.sections import Optim


def make_optimizer(config: Config, recipe: fp8jax.Recipe) -> Any:
    """Clipping by global norm, the recipe's AdamW with decay for matrices only, and tracking of weight bounds.

    Returns:
        An optax transformation; for `--release` a `ReleasedOptimizer`.

    Raises:
        UserError: `--release` does not support the recipe.
    """
    optim = config.optim
    make = functools.partial(
        fp8jax.optimizer,
        recipe,
        schedule(optim),
        b1=optim.b1,
        b2=optim.b2,
        eps=optim.eps,
        weight_decay=optim.weight_decay,
        mask=decay_mask,
    )
    if optim.release:
        if recipe.linear.stateful_strategies or recipe.comm.gradients is not None:
            feature = "scalings with a state" if recipe.linear.stateful_strategies else "8-bit gradient reductions"
            raise UserError(
                f"--release {optim.release}: recipe {recipe.name} has {feature}, which are not supported; use coat, "
                "fast or te_current"
            )
        adamw = make(layer_axes=parallel.stacked)
        return ReleasedOptimizer(make(layer_axes=np.int32(1)), adamw, optim.clip, optim.release == "twice")
    # The bounds of other optimizers cannot be tracked in their step.
    has_tracked_step = (
        optim.b1**2 < optim.b2 and not recipe.has_per_tensor_moments and recipe.weights.master != "bf16+stochastic"
    )
    if not recipe.linear.needs_weight_bounds or has_tracked_step:
        return make(layer_axes=parallel.stacked, clip=optim.clip)
    limit = None
    if optim.b1**2 < optim.b2:
        limit = fp8jax.max_adam_step(schedule(optim), optim.b1, optim.b2, optim.weight_decay)
    tracker = fp8jax.track_weight_amax(recipe.linear.weight_amax_interval, limit)
    return optax.chain(
        optax.clip_by_global_norm(optim.clip), make(layer_axes=parallel.stacked, track_weight_bounds=False), tracker
    )


def configure(recipe: fp8jax.Recipe, config: Config) -> fp8jax.Recipe:
    """Returns the recipe with the master weights and the head of a configuration; with adapters, its `base_recipe`.

    Raises:
        UserError: see `with_master` and `base_recipe`.
    """
    recipe = with_master(recipe, config.optim.master)
    if config.optim.head:
        recipe = dataclasses.replace(recipe, head=fp8jax.recipes.HEAD)
    return base_recipe(recipe, config.lora) if config.lora.lora_rank else recipe


def with_master(recipe: fp8jax.Recipe, master: str) -> fp8jax.Recipe:
    """Returns the recipe with the master weights of `--master`; unchanged if that is empty.

    Raises:
        UserError: there are no such master weights, or the recipe requires other ones.
    """
    if not master:
        return recipe
    try:
        return dataclasses.replace(recipe, weights=dataclasses.replace(recipe.weights, master=master))
    except ValueError as error:
        raise UserError(f"--master {master}: {error}") from None


def schedule(optim: Optim) -> optax.Schedule:
    """Returns a linear warmup, then `optim.schedule`. Except for "constant", it ends at `final_lr` times the peak."""
    final_lr = optim.lr * optim.final_lr
    if optim.schedule == "cosine":
        return optax.warmup_cosine_decay_schedule(0.0, optim.lr, optim.warmup, optim.steps, final_lr)
    warm = optax.linear_schedule(0.0, optim.lr, max(optim.warmup, 1))
    hold = optax.constant_schedule(optim.lr)
    if optim.schedule == "constant":
        return optax.join_schedules([warm, hold], [optim.warmup])
    falls = optim.warmup if optim.schedule == "linear" else optim.decay_start
    fall = optax.linear_schedule(optim.lr, final_lr, optim.steps - falls)
    return optax.join_schedules([warm, hold, fall], [optim.warmup, falls])


def decay_mask(params: Any) -> Any:
    """Returns True for leaves with weight decay: two or more axes, and not a (stacked) norm or bias."""

    def decays(path: Any, x: Any) -> bool:
        name = jax.tree_util.keystr(path)
        return x.ndim >= 2 and "norm" not in name and "bias" not in name

    return jax.tree_util.tree_map_with_path(decays, params)
