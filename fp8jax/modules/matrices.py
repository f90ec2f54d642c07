"""Matrices of a model that no known layer holds: they are named in messages and tables, and counted in warnings."""

import math
import re
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

from flax.nnx import bridge
from flax.traverse_util import flatten_dict

from fp8jax.rewrite.rules import Ordered

# Tables that are looked up or added, and what only scales, are no matrices of products.
_NO_FACTORS = re.compile(r"(.*/)?\w*(embed|pos_|position|token|scale|bias|gamma|beta|mask)\w*")
_SHOWN = 6
# Smaller shares are not worth a warning.
_SHARE = 0.01
BRIDGED = (
    "Quantize what a bridge holds, ToNNX(fp8jax.linen.quantize(module, recipe)), or in Linen what it makes, "
    "to_linen(lambda *args, rngs: fp8jax.nnx.quantize(Module(*args, rngs=rngs), recipe))"
)
_ELSEWHERE = (
    "call fp8jax.linear(x, w, recipe=...), fp8jax.einsum or fp8jax.dot_general where the model multiplies; "
    "fp8jax.compressed_adamw takes parameters of any kind"
)


class Unknown:
    """Modules of classes that are not known, which hold matrices, by path: class and shapes."""

    def __init__(self) -> None:
        self.classes: dict[str, tuple[str, dict[str, tuple[int, ...]]]] = {}
        self.bridges: set[str] = set()

    def add(self, path: str, module: Any, own: Mapping[str, Any]) -> None:
        """Notes a module if it holds a matrix itself, by what its own parameters are; of a bridge also those inside."""
        bridged = is_bridge(module)
        own = {"/".join(map(str, name)): p for name, p in flatten_dict(own).items()} if bridged else own
        shapes = {name: tuple(p.shape) for name, p in own.items() if is_matrix(name, getattr(p, "shape", ()))}
        if shapes and (bridged or not type(module).__module__.startswith("flax.")):
            self.classes[path] = type(module).__name__, shapes
            self.bridges |= {path} if bridged else set()

    def forget(self, paths: Iterable[str]) -> None:
        """Drops modules that turn out to share their place with a layer."""
        self.classes = {path: of for path, of in self.classes.items() if path not in set(paths)}

    def chosen(self, rules: Ordered) -> dict[str, tuple[str, dict[str, tuple[int, ...]]]]:
        """Those that the rules would have quantized."""
        return {path: of for path, of in self.classes.items() if rules.choice(path).linear is not None}

    def message(self) -> str:
        """What to say of them in an error, if there are any."""
        if not self.classes:
            return ""
        classes, bridged = self._split(self.classes)
        given = f". Give the classes whose own products are to be quantized, such as layers=[{classes}]"
        listed = f". Modules of other classes hold matrices: {_listed(self.classes)}"
        return listed + (given if classes else "") + (f". {BRIDGED}" if bridged else "")

    def share(self, rules: Ordered, quantized: int) -> str | None:
        """What is left in 16 bits because it is not known, where the rules would have it quantized; None if little is.

        Args:
            rules: the rules.
            quantized: how many parameters the kernels have that are quantized.
        """
        left = self.chosen(rules)
        size = sum(math.prod(shape) for _, shapes in left.values() for shape in shapes.values())
        if size <= _SHARE * (size + quantized):
            return None
        classes, bridged = self._split(left)
        given = f". Give layers=[{classes}] to quantize their own products, or a rule with None for their paths"
        return (
            f"fp8jax leaves {100 * size / (size + quantized):.0f} % of the matrix parameters as they are, in modules "
            f"of classes it does not know: {_listed(left)}{given if classes else ''}"
            f"{f'. {BRIDGED}, or give a rule with None for its path' if bridged else ''}"
        )

    def _split(self, left: Mapping[str, tuple[str, Any]]) -> tuple[str, bool]:
        """The names of classes that may be layers, and whether there are bridges."""
        classes = {kind for path, (kind, _) in left.items() if path not in self.bridges}
        return ", ".join(sorted(classes)), any(path in self.bridges for path in left)

    def warn(self, rules: Ordered, quantized: int) -> None:
        """Warns of what `share` says, if anything; Python shows the same text once."""
        text = self.share(rules, quantized)
        if text is not None:
            warnings.warn(text, stacklevel=1)


def is_bridge(module: Any) -> bool:
    """Whether a module holds a model of Flax's other interface that is not quantized, as far as one can know."""
    if isinstance(module, bridge.ToNNX):
        held = next((v for name, v in vars(module).items() if name in ("to_nnx__module", "module")), None)
        return not hasattr(type(held), "_fp8jax_rules")
    return isinstance(module, bridge.ToLinen) and isinstance(module.nnx_class, type)


def is_matrix(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a parameter may be a factor of a product, by its name and shape."""
    return sum(n > 1 for n in shape) >= 2 and not _NO_FACTORS.fullmatch(name)


def _listed(classes: Mapping[str, tuple[str, dict[str, tuple[int, ...]]]]) -> str:
    texts = [
        f"{path or 'the model itself'} ({kind}: {', '.join(f'{n} {s}' for n, s in shapes.items())})"
        for path, (kind, shapes) in classes.items()
    ]
    more = len(texts) - _SHOWN
    return ", ".join([*texts[:_SHOWN], *([f"and {more} more"] if more > 0 else [])])


def not_a_model(takes: str, model: Any) -> str:
    """What to say where something else than a model of Flax is given.

    Args:
        takes: what is taken, such as "fp8jax.nnx.quantize takes an NNX module".
        model: the object.
    """
    kind = type(model)
    bases = {base.__module__.partition(".")[0] for base in kind.__mro__}
    if isinstance(model, type):
        why = f"the class {model.__name__}; make an instance of it"
    elif "equinox" in bases or "haiku" in bases:
        why = f"{kind.__name__}, of {'Equinox' if 'equinox' in bases else 'Haiku'}; {_ELSEWHERE}"
    elif isinstance(model, dict):
        why = f"dict; give the model that has these parameters, not the parameters. Without Flax, {_ELSEWHERE}"
    else:
        why = f"{kind.__name__}. Without Flax, {_ELSEWHERE}"
    return f"{takes}, not {why}"
