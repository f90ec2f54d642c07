"""The optimizer of a recipe."""

from collections.abc import Callable
from typing import Any

import numpy as np
import optax
from jax import Array

from fp8jax import recipes
from fp8jax.core.recipe import SCALED_MASTER, Recipe
from fp8jax.optim import checks
from fp8jax.optim.clipping import with_clipping
from fp8jax.optim.compressed_adamw import GROUP_SIZE, MIN_SIZE, ScalarOrSchedule, compressed_adamw
from fp8jax.optim.fp8lm_adamw import NO_LAYER_AXES, fp8lm_adamw
from fp8jax.optim.fused import FusedTransformation
from fp8jax.optim.weight_bounds import max_adam_step, with_weight_bounds

# A parameter with quantized moments has four more arrays (scales and exponents): about 20 us of host time per step. At
# this size codes save a GPU 7 us and 13 MB. Steps of small models wait for the host.
_MIN_PROFITABLE_SIZE = 2**21


def optimizer(
    recipe: Recipe | str,
    learning_rate: ScalarOrSchedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    eps_root: float = 0.0,
    weight_decay: float = 1e-4,
    mask: Any | Callable[[optax.Params], Any] | None = None,
    *,
    clip: float | Array | None = None,
    min_size: int | np.integer | None = None,
    impl: str = "auto",
    layer_axes: Any = NO_LAYER_AXES,
    track_weight_bounds: bool = True,
) -> FusedTransformation:
    """AdamW with the moment storage of `recipe.optimizer`: `compressed_adamw` with these settings.

    With fp32 moments, as in `bf16`, results are bitwise equal to `optax.adamw`. With one scale per tensor, as in
    `fp8_lm`, the optimizer is `fp8lm_adamw`. Automatic weight scaling, as in `moss`, adds `fp8jax.with_weight_bounds`,
    which tracks upper bounds of the weights.

    Args:
        recipe: a recipe, or the name of one of `fp8jax.recipes`.
        learning_rate, b1, b2, eps, eps_root, weight_decay, mask, impl: as for `compressed_adamw`. `impl` has no effect
            on moments that are not quantized.
        min_size: as for `compressed_adamw`. None is its default, 4,096 elements. For recipes that select layers by gain
            ("auto", `fp8jax.recipes.for_shapes`) None is 2^21, below which codes cost time.
        clip: largest global norm of the gradients, as for `fp8jax.with_clipping`; None does not clip.
        layer_axes: as for `fp8lm_adamw`, for recipes with one scale per tensor; ignored by others.
        track_weight_bounds: track the weights of a recipe with automatic scaling. False is for a chain that ends with
            `fp8jax.track_weight_amax`, for `fp8jax.fused_backward`, and for `fp8jax.with_weight_bounds(...,
            axis_name=)` with parameters sharded by `jax.shard_map`.

    Returns:
        As `compressed_adamw`, or with `clip` as `fp8jax.with_clipping`.

    Raises:
        ValueError: no recipe has this name, `clip` is not positive, or as for `compressed_adamw`; or a recipe has
            automatic weight scaling with moments, masters or decays for which updates cannot be bounded.
        TypeError: `recipe` is neither.

    Examples:
        >>> import fp8jax
        >>> tx = fp8jax.optimizer("coat", 3e-4, weight_decay=0.1, clip=1.0)
    """
    if clip is not None:
        checks.check_positive("clip", clip)
    if isinstance(recipe, str):
        recipe = recipes.get(recipe)
    if not isinstance(recipe, Recipe):
        hint = (
            f"call it: {getattr(recipe, '__name__', 'recipe')}()"
            if callable(recipe)
            else "use for example recipes.coat()"
        )
        raise TypeError(f"optimizer expects a recipe or the name of a preset, got {recipe!r}; {hint}")
    if min_size is None:
        is_cost_selected = recipe.linear.skip_unprofitable and not recipe.has_per_tensor_moments
        min_size = _MIN_PROFITABLE_SIZE if is_cost_selected else MIN_SIZE
    storage = recipe.optimizer
    master = recipe.weights.master if recipe.weights.master not in ("fp32", "bf16", SCALED_MASTER) else None
    adamw_args = learning_rate, b1, b2, eps, eps_root, weight_decay, mask
    if recipe.has_per_tensor_moments:
        tx = fp8lm_adamw(*adamw_args, mu=storage.mu, master=master, layer_axes=layer_axes, min_size=min_size, impl=impl)
    else:
        tx = compressed_adamw(
            *adamw_args,
            mu=storage.mu,
            nu=storage.nu,
            group_size=GROUP_SIZE if storage.group_size is None else storage.group_size,
            expand=storage.expand,
            nu_rounding=storage.nu_rounding,
            master=master,
            min_size=min_size,
            impl=impl,
        )
    if track_weight_bounds and recipe.linear.needs_weight_bounds:
        tx = _with_weight_bounds(recipe, tx, learning_rate, b1, b2, weight_decay)
    return tx if clip is None else with_clipping(clip, tx)


def _with_weight_bounds(
    recipe: Recipe, tx: FusedTransformation, learning_rate: ScalarOrSchedule, b1: float, b2: float, decay: float
) -> FusedTransformation:
    """The optimizer `tx` of a recipe with automatic weight scaling, with tracking of weight bounds."""
    advice = (
        "set track_weight_bounds=False, and chain fp8jax.track_weight_amax() last with optax.chain; it measures updates"
    )
    for feature, is_present in (
        ("moments with one scale a tensor", recipe.has_per_tensor_moments),
        ("weights rounded stochastically", recipe.weights.master == "bf16+stochastic"),
    ):
        if is_present:
            raise ValueError(
                f"{recipe.name} has automatic weight scaling and {feature}, which no optimizer step can track; {advice}"
            )
    try:
        limit = max_adam_step(learning_rate, b1, b2, decay)
    except ValueError as error:
        raise ValueError(f"{error}; with fp8jax.optimizer, {advice}") from None
    return with_weight_bounds(tx, limit, recipe.linear.weight_amax_interval)
