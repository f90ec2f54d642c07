"""What is known of a program from who calls it, and the paths by which rules know its parameters."""

from collections.abc import Callable, Collection
from typing import NamedTuple

# What layers of all frameworks call their matrix or vector, and what wraps it.
_LEAVES = ("kernel", "w", "weight", "weights", "embedding", "scale", "bias", "b", "offset", "gamma", "beta", "value")


class Caller(NamedTuple):
    """What is known of a program from who calls it.

    Attributes:
        results: how many of the outputs, the first ones, are what the function returns; the rest is its state. None
            for all.
        arguments: the inputs that are arguments of the function; None for all that are data.
        modules: whether it is a method of a module, which has parameters for other methods, too, and is itself a layer
            if it has a "kernel".
        names: gives for the path of a parameter that of its layer, and others that rules may match. None for the path
            without what layers call their parameter.
        whole: there is to be a product that a recipe could take.
        checks: each rule is to match something.
    """

    results: int | None = None
    arguments: Collection[int] | None = None
    modules: bool = False
    names: Callable[[str], tuple[str, ...]] | None = None
    whole: bool = True
    checks: bool = True

    def paths(self, path: str) -> tuple[str, ...]:
        """For the path of a parameter that of its layer, and others that rules may match."""
        return (layer_path(path, self.modules),) if self.names is None else self.names(path)


def layer_path(path: str, modules: bool = False) -> str:
    """The path that rules match: of a layer, without what it calls its parameter; of a whole model that is one, ""."""
    steps = path.split("/")
    if steps[-1] == "value" and steps[-2:-1] and steps[-2] in _LEAVES:  # in a box with metadata
        steps.pop()
    if steps[-1] in _LEAVES and (modules or len(steps) > 1):
        steps.pop()
    return "/".join(steps)
