"""Layers of a user's own classes: the products of data with their parameters, found in what they compute.

A call of such a layer is traced, and its program is run again with another product in place of each `dot_general` that
takes a parameter of it, up to casts and layouts, and data. So it matters not how the product is spelled: `@`,
`jnp.dot`, `jnp.einsum` and `jax.lax.dot_general` are one operation there. All else runs as it was written.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
from jax import Array
from jax.extend import core

from fp8jax.core.recipe import Linear
from fp8jax.modules.dots import DotGeneral
from fp8jax.modules.program import split
from fp8jax.modules.provenance import JITS
from fp8jax.modules.reading import LAYOUTS
from fp8jax.modules.scaled import observed_operands, state_name
from fp8jax.modules.scaled_linen import LinenScaling


class _Rerun:
    """A program while it runs again; counts the products it takes the place of.

    Args:
        product: of data with a weight, by the weight's name, called as `jax.lax.dot_general`.
    """

    def __init__(self, product: Callable[[str], Callable[..., Array]]) -> None:
        self.product, self.count = product, 0

    def run(self, jaxpr: Any, consts: Sequence[Any], values: Sequence[Any], weights: Sequence[str | None]) -> Any:
        """The results of a program, and the names of those that are weights, given the names of such inputs."""
        known = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *values], strict=True))
        weight = dict(zip(jaxpr.invars, weights, strict=True))

        def look(atom: Any) -> tuple[Any, str | None]:
            return (atom.val, None) if isinstance(atom, core.Literal) else (known[atom], weight.get(atom))

        for eqn in jaxpr.eqns:
            operands, are = zip(*map(look, eqn.invars), strict=True) if eqn.invars else ((), ())
            name, of_weight = eqn.primitive.name, [None] * len(eqn.outvars)
            names = [of for of in are if of is not None]
            if name in JITS:
                inner = eqn.params.get("jaxpr") or eqn.params["call_jaxpr"]
                results, of_weight = self.run(inner.jaxpr, inner.consts, operands, are)
            elif name == "dot_general" and len(names) == 1:
                results = [self._product(names[0], *operands, weight_first=are[0] is not None, **eqn.params)]
            else:
                results = _as_written(eqn, operands, jaxpr.debug_info)
                of_weight = [names[0] if name in LAYOUTS and names else None] * len(results)
            known |= dict(zip(eqn.outvars, results, strict=True))
            weight |= dict(zip(eqn.outvars, of_weight, strict=True))
        results = [look(v) for v in jaxpr.outvars]
        return [value for value, _ in results], [of for _, of in results]

    def _product(
        self, weight: str, lhs: Array, rhs: Array, *, weight_first: bool, dimension_numbers: Any, **params: Any
    ) -> Array:
        self.count += 1
        product = self.product(weight)
        (contract, batch), free = dimension_numbers, [x.ndim for x in (lhs, rhs)]
        settings = {name: params.get(name) for name in ("precision", "preferred_element_type", "out_sharding")}
        if not weight_first:
            return product(lhs, rhs, dimension_numbers, **settings)
        y = product(rhs, lhs, (contract[::-1], batch[::-1]), **settings)
        n = len(batch[0])
        rows, columns = (d - len(c) - n for d, c in zip(free, contract, strict=True))
        return y.transpose(*range(n), *range(n + columns, n + columns + rows), *range(n, n + columns))


def _as_written(eqn: Any, operands: Sequence[Any], info: Any) -> Any:
    """The results of one operation of a program with this `debug_info`."""
    inputs = {v: x for v, x in zip(eqn.invars, operands, strict=True) if not isinstance(v, core.Literal)}
    info = info._replace(arg_names=("",) * len(inputs), result_paths=("",) * len(eqn.outvars))
    jaxpr = core.Jaxpr((), list(inputs), eqn.outvars, [eqn], eqn.effects, info)
    return core.jaxpr_as_fun(core.ClosedJaxpr(jaxpr, ()))(*inputs.values())


def _call(fn: Callable, params: Any, args: Any, product: Callable[[str], Callable[..., Array]], name: str) -> Any:
    """`fn(params, args, kwargs)` with other products where it multiplies arrays by those of `params`.

    Args:
        product: as of `_Rerun`; the name is that of an entry of `params`.
        name: of the layer, for messages.
    """
    weights, rebuild_weights = split(params)
    arrays, rebuild = split(args)

    def flat(weights: list[Any], arrays: list[Any]) -> Any:
        return fn(rebuild_weights(weights), *rebuild(arrays))

    closed, shapes = jax.make_jaxpr(flat, return_shape=True)(weights, arrays)
    rerun = _Rerun(product)
    names = [jax.tree_util.keystr(path[:1], simple=True) for path, _ in jax.tree.leaves_with_path(params)]
    are = [*names, *[None] * len(arrays)]
    results, _ = rerun.run(closed.jaxpr, closed.consts, [*weights, *arrays], are)
    if not rerun.count:
        raise ValueError(
            f"{name} is in layers=, but its call holds no product of data with one of its own parameters; "
            "leave its class out"
        )
    return jax.tree.unflatten(jax.tree.structure(shapes), results)


def call_linen(module: nn.Module, linear: Linear, args: Any, kwargs: Any) -> Any:
    """What a bound Linen layer of a user's own class returns, with the products of a recipe."""
    assert module.scope is not None
    variables, name = nn.meta.unbox(module.variables), "/".join(module.path) or "the layer"
    if any(isinstance(own, Mapping) for own in variables.get("params", {}).values()):
        raise ValueError(
            f"{name} holds other modules with parameters: layers= takes classes of Linen with matrices alone; call "
            "fp8jax.einsum or fp8jax.linear in it"
        )
    copy, rest = module.clone(parent=None), {k: v for k, v in variables.items() if k != "params"}

    def run(params: Any, args: Any, kwargs: Any) -> Any:
        return nn.Module.apply(copy, {"params": params, **rest}, *args, **kwargs)

    def product(weight: str) -> Callable[..., Array]:
        if not observed_operands(linear):
            return DotGeneral(linear)
        assert module.scope is not None
        return LinenScaling(linear, module.scope.push(state_name(weight), reuse=True)).dot_general

    return _call(run, variables.get("params", {}), (args, kwargs), product, name)
