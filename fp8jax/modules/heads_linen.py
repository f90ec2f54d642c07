"""Output heads and routers of Flax Linen models, found in each call by what reads the results of layers."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
from flax.traverse_util import flatten_dict, unflatten_dict
from jax import Array

from fp8jax.modules import reading
from fp8jax.modules.program import split
from fp8jax.modules.reading import Reading


def find(
    method: Callable, module: nn.Module, args: Any, kwargs: Any, layer: Callable[[nn.Module], str | None]
) -> tuple[dict[str, str], Reading]:
    """The layers of a bound model whose results a call of a method returns, or chooses by, with the reason.

    A copy of the model is traced for its program. Of a model that fails, nothing is known.

    Args:
        method: as written.
        module: the model; nothing of it is changed.
        args: of the call.
        kwargs: likewise.
        layer: the path of a module that is a layer which would be quantized, else None.
    """
    scope, copy = module.scope, module.clone(parent=None)
    assert scope is not None
    flat = flatten_dict({} if module.is_initializing() else dict(nn.meta.unbox(module.variables)))
    arrays, rebuild = split((args, kwargs))
    wanted: set[str] = set()

    def intercept(call: Callable, args: Any, kwargs: Any, context: Any) -> Any:
        y = call(*args, **kwargs)
        path = layer(context.module) if context.method_name == "__call__" else None
        if path is None or not isinstance(y, Array):
            return y
        wanted.add(path)
        return reading.tag(path, y)

    def run(variables: list[Array], arrays: list[Array]) -> Any:
        rngs = {name: jax.random.key(0) for name in scope.rngs}
        args, kwargs = rebuild(arrays)
        with nn.intercept_methods(intercept):
            if module.is_initializing():
                return copy.init_with_output(rngs, *args, method=method, **kwargs)[0]
            collections = unflatten_dict(dict(zip(flat, variables, strict=True)))
            y = copy.apply(collections, *args, method=method, rngs=rngs, mutable=scope.mutable, **kwargs)
            return y if scope.mutable is False else y[0]

    try:
        closed = jax.make_jaxpr(run)(list(flat.values()), arrays)
    except Exception:
        # A model of which nothing is known may fail in any way.
        return {}, Reading()
    names = ["/".join(map(str, path[1:])) if path[0] == "params" else "" for path in flat]
    return reading.heads(closed, [*names, *[None] * len(arrays)], wanted)
