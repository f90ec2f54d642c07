"""Output heads and routers of Flax NNX models: by shapes before they run, by what reads their results in a program.

That program tells norms written by hand, too.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from fp8jax.modules import reading
from fp8jax.modules.attention import layers
from fp8jax.modules.blocks_nnx import with_call
from fp8jax.modules.reading import Reading

# A layer may give what several others read side by side: gate and up, or q, k and v.
_SIDE_BY_SIDE = (1, 2, 3, 4)


def by_shape(modules: dict[str, Any]) -> dict[str, str]:
    """The layers of a model that are output heads or routers by their shapes, with the reason.

    A head is an `nnx.Linear` that the outermost module holds itself, or in a list or dict of its own, and whose outputs
    no module takes, one, two, three or four times their number; unless the model has no other layer. A router is one
    of fewer outputs than inputs, that has as many as there are experts in its module: modules in a list, or the first
    axis of matrices that take its inputs; or that is called gate and stands beside no layer of its shape.

    Args:
        modules: all modules of the model, by path, the outermost under "".
    """
    paths = {id(module): path for path, module in modules.items()}
    reasons: dict[str, str] = {}
    for module in modules.values():
        held = {n: layer for n, layer in layers(module).items() if type(layer) is nnx.Linear} if _plain(module) else {}
        for name, layer in held.items():
            alike = [x for x in held.values() if x.kernel.shape == layer.kernel.shape]
            if 1 < layer.out_features == _experts(module, layer):
                reasons[paths[id(layer)]] = (
                    f"a router: it has as many outputs as there are experts, {layer.out_features}"
                )
            elif name == "gate" and layer.out_features < layer.in_features and len(alike) == 1:
                reasons[paths[id(layer)]] = (
                    "a router: a gate of fewer outputs than inputs, with no layer like it beside"
                )
    taken = {size * n for module in modules.values() for size in _takes(module) for n in _SIDE_BY_SIDE}
    heads = {
        paths[id(layer)]: f"an output head: nothing in the model takes its {layer.out_features} outputs"
        for layer in layers(modules[""]).values()
        if type(layer) is nnx.Linear and layer.out_features not in taken
    }
    known = {
        path for path, module in modules.items() if isinstance(module, (nnx.Linear, nnx.LinearGeneral, nnx.Einsum))
    }
    return heads | reasons if known - heads.keys() - reasons.keys() else reasons


def _plain(module: Any) -> bool:
    return isinstance(module, nnx.Module) and not isinstance(module, (nnx.List, nnx.Dict))


def _takes(module: Any) -> list[int]:
    """The widths that a module may take: of its inputs, or any of its matrices' axes where it is of another class."""
    features = [getattr(module, name, None) for name in ("in_features", "num_features", "features")]
    known = [math.prod(n) if isinstance(n, (tuple, list)) else n for n in features if isinstance(n, (int, tuple, list))]
    if known or not _plain(module):
        return known
    return [n for v in vars(module).values() if isinstance(v, nnx.Param) and v.ndim > 1 for n in v.shape]


def _experts(module: Any, router: Any) -> int:
    """How many experts stand beside a layer: the outputs that it would have if it chose among them; else 0."""
    stacked, outputs = router.kernel.ndim - 2, router.out_features
    if outputs >= router.in_features:
        return 0
    for value in vars(module).values():
        if isinstance(value, nnx.List) and len(value) == outputs and all(isinstance(m, nnx.Module) for m in value):
            return outputs
        if isinstance(value, nnx.Param):
            weights = [value]
        elif isinstance(value, nnx.Module) and value is not router:
            weights = [m.kernel for _, m in nnx.iter_modules(value) if type(m) is nnx.Linear]
        else:
            continue
        # Each (experts, inputs, outputs), with the router's inputs among them.
        alike = all(w.ndim == stacked + 3 and w.shape[stacked] == outputs for w in weights)
        if alike and any(router.in_features in w.shape[stacked + 1 :] for w in weights):
            return outputs
    return 0


@dataclasses.dataclass(frozen=True)
class _Tagged:
    """A product of a layer whose result is marked."""

    path: str
    product: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # The subscripts of an einsum stand before what it reads.
        place = 1 if isinstance(args[0], str) else 0
        args = (*args[:place], reading.tag_input(self.path, args[place]), *args[place + 1 :])
        return reading.tag(self.path, self.product(*args, **kwargs))


def _tagged(cls: Any, path: str) -> type:
    """The class of a module that is no layer, with a mark on what it returns."""

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        return reading.tag_part(path, cls.__call__(self, *args, **kwargs))

    return with_call(cls, __call__)


def by_reading(model: Any, wanted: dict[str, Any], call: Callable, arrays: Any) -> tuple[dict[str, str], Reading]:
    """The layers of a model whose results a call returns, or chooses by, with the reason; empty where it fails.

    Args:
        model: as written; it is not changed.
        wanted: its layers that would be quantized, by path.
        call: `call(model, arrays)`.
        arrays: abstract arguments.
    """
    copy: Any = nnx.clone(model)
    for path, layer in (("/".join(map(str, p)), m) for p, m in nnx.iter_modules(copy)):
        if path in wanted and isinstance(layer, nnx.Einsum):
            layer.einsum_op = _Tagged(path, layer.einsum_op)
        elif path in wanted and isinstance(layer, (nnx.Linear, nnx.LinearGeneral)):
            layer.dot_general = _Tagged(path, layer.dot_general or jax.lax.dot_general)
        elif path not in wanted and callable(layer) and _plain(layer):
            object.__setattr__(layer, "__class__", _tagged(type(layer), path))
    graph, params, rest = nnx.split(copy, nnx.Param, ...)  # type: ignore[misc]
    flat = nnx.to_flat_state(params)

    def run(params: Any, rest: Any, arrays: Any) -> Any:
        outputs = call(nnx.merge(graph, params, rest, copy=True), arrays)
        return [y for y in jax.tree.leaves(outputs) if isinstance(y, jax.Array)]

    kinds = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (params, rest, arrays))
    closed = jax.make_jaxpr(run)(*kinds)
    names: list[str | None] = ["/".join(map(str, path)) for path, _ in flat]
    others: list[str | None] = [""] * len(jax.tree.leaves(rest))
    return reading.heads(closed, [*names, *others, *[None] * len(jax.tree.leaves(arrays))], wanted)
