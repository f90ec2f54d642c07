"""Output heads and routers of Flax Linen models, and norms written by hand, found in each call by its program."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
from flax.traverse_util import flatten_dict, unflatten_dict
from jax import Array

from fp8jax.modules import blocks, reading
from fp8jax.modules.blocks import BlockForms, positional
from fp8jax.modules.blocks_linen import Watch
from fp8jax.modules.layers_linen import LAYERS
from fp8jax.modules.program import split
from fp8jax.modules.reading import Reading
from fp8jax.modules.recording import Recording
from fp8jax.ops.choice import listening, saving


def find(
    method: Callable,
    module: nn.Module,
    args: Any,
    kwargs: Any,
    path_of: Callable[[nn.Module], str],
    chosen: Callable,
    memory: dict[Any, BlockForms] | None,
) -> tuple[dict[str, str], Reading]:
    """The layers of a bound model whose results a call of a method returns, or chooses by, with the reason.

    A copy of the model is traced for its program, which tells what stands between its layers, too. Of a model that
    fails, nothing is known; its error comes again in the call itself.

    Args:
        method: as written.
        module: the model; nothing of it is changed.
        args: of the call.
        kwargs: likewise.
        path_of: the path of a module.
        chosen: whether a module with a path is a layer which would be quantized.
        memory: takes what is known of activations between layers, as of `blocks.recognise`; None where nobody asks.
    """
    scope, copy = module.scope, module.clone(parent=None)
    assert scope is not None
    flat = flatten_dict({} if module.is_initializing() else dict(nn.meta.unbox(module.variables)))
    arrays, rebuild = split((args, kwargs))
    wanted: set[str] = set()

    recording = Recording()
    watch = Watch(recording)

    def intercept(call: Callable, args: Any, kwargs: Any, context: Any) -> Any:
        if memory is None:
            return mark(call, args, kwargs, context)

        def marked(*args: Any, **kwargs: Any) -> Any:
            return mark(call, args, kwargs, context)

        return watch.call(marked, args, kwargs, context)

    def mark(call: Callable, args: Any, kwargs: Any, context: Any) -> Any:
        if context.method_name != "__call__":
            return call(*args, **kwargs)
        path = path_of(context.module)
        if (is_chosen := chosen(context.module, path)) or isinstance(context.module, LAYERS):
            args, kwargs = positional(args, kwargs)
            if args and isinstance(args[-1], Array):  # an einsum's subscripts may stand before it
                args = (*args[:-1], reading.tag_input(path, args[-1]))
        y = call(*args, **kwargs)
        if not is_chosen:
            return reading.tag_part(path, y)
        if not isinstance(y, Array):
            return y
        wanted.add(path)
        return reading.tag(path, y)

    def run(variables: list[Array], arrays: list[Array]) -> Any:
        rngs = {name: jax.random.key(0) for name in scope.rngs}
        args, kwargs = rebuild(arrays)
        with nn.intercept_methods(intercept):
            if module.is_initializing():
                return nn.Module.init_with_output(copy, rngs, *args, method=method, **kwargs)[0]
            collections = unflatten_dict(dict(zip(flat, variables, strict=True)))
            how: Any = {"method": method, "rngs": rngs, "mutable": scope.mutable}
            y = nn.Module.apply(copy, collections, *args, **how, **kwargs)
            return y if scope.mutable is False else y[0]

    try:
        with listening(), saving():  # what is traced aside is no part of the program
            closed = jax.make_jaxpr(run)(list(flat.values()), arrays)
        told = {} if memory is None else blocks.forms(recording, closed)
    except Exception as error:
        # A model of which nothing is known may fail in any way.
        blocks.tell_failure(error)
        return {}, Reading()
    if memory is not None:
        memory |= told
    names = ["/".join(map(str, path[1:])) if path[0] == "params" else "" for path in flat]
    return reading.heads(closed, [*names, *[None] * len(arrays)], wanted)
