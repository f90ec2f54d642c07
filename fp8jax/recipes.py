"""Presets: each published system is a combination of the parts of a `Recipe`."""

from collections.abc import Callable

from fp8jax.core.recipe import Optimizer as Optimizer
from fp8jax.core.recipe import Recipe as Recipe
from fp8jax.core.recipe import Weights as Weights


def bf16() -> Recipe:
    """bf16 computation with fp32 master weights and moments: the baseline."""
    return Recipe("bf16", optimizer=Optimizer(mu="fp32", nu="fp32", group_size=None, expand=False))


def coat_optimizer() -> Recipe:
    """COAT's optimizer states alone (its Table 13): e4m3 moments, groups of 128, dynamic range expansion."""
    return Recipe("coat_optimizer", optimizer=Optimizer())


_PRESETS: dict[str, Callable[[], Recipe]] = {f.__name__: f for f in (bf16, coat_optimizer)}
NAMES: tuple[str, ...] = tuple(_PRESETS)


def get(name: str) -> Recipe:
    """The preset called `name`.

    Raises:
        ValueError: no preset has this name; the message lists those there are.
    """
    if name not in _PRESETS:
        raise ValueError(f"unknown recipe {name!r}; recipes are {', '.join(NAMES)}")
    return _PRESETS[name]()
