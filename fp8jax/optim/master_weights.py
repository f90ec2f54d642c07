"""Master weights in two parts: parameters in 16 bits, and remainders in the optimizer's state."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from fp8jax.core import formats, masters, noise
from fp8jax.core.masters import Master, MasterWeight
from fp8jax.ops.optimizers.leaf import exact_update, load, master_seed
from fp8jax.optim import flax_variables, moments

_HIGH_DTYPES = tuple(formats.get(name).dtype for name in masters.HIGH_FORMATS)


class MasterState(NamedTuple):
    """State of a transformation with a `master` in `compress_state`.

    Attributes:
        count: steps taken, int32 scalar, from which noise is made.
        inner: state of the transformation.
        remainder: as of `MasterAdamState`.
    """

    count: Array  # type: ignore[assignment]  # tuple.count is shadowed
    inner: optax.OptState
    remainder: Any


class MasterRoundingMargin(NamedTuple):
    """How far a weight may be from its master, for a bound on both.

    Attributes:
        weight_error: largest relative error of rounding a master to the weight.
        master_error: the same of rounding a master to its own bits, once per step.
        subnormal_error: largest error of rounding a subnormal master to the weight; 0 if fp32 has no smaller ones.
    """

    weight_error: float
    master_error: float
    subnormal_error: float

    @classmethod
    def from_dtypes(cls, high: Any, remainder: Any) -> "MasterRoundingMargin":
        kind, finer = jnp.finfo(high), 2.0 ** -(8 * jnp.dtype(remainder).itemsize)
        subnormal_error = float(kind.smallest_subnormal) / 2 if kind.tiny > jnp.finfo(jnp.float32).tiny else 0.0
        half = float(kind.eps) / 2
        return cls(half, half * finer, subnormal_error)

    def add_margin(self, bound: Array) -> Array:
        """A bound on master and weight, from the amax of the weight: the master may be larger, and round up."""
        return bound * np.float32((1 + self.weight_error) ** 2) + np.float32(3 * self.subnormal_error)

    def grow(self, bound: Array, max_change: Array) -> Array:
        """The bound after a change of each master by at most `max_change`, rounded to its own bits."""
        total = (bound + max_change * np.float32(1 + self.weight_error)) * np.float32(1 + self.master_error)
        return total * np.float32(1 + 2.0**-22) + np.float32(
            2 * self.subnormal_error * self.master_error / self.weight_error
        )


def parse_master(name: str | None) -> Master | None:
    """The master of an optimizer's argument; None if the parameters are the masters.

    Raises:
        ValueError: the name is unknown, or parameters of this dtype are their own masters.
    """
    if name is None:
        return None
    master = Master(name)
    if master.remainder is None and not master.is_stochastic:
        raise ValueError(f"master {name!r} has no effect: parameters of this dtype are their own masters; omit it")
    return master


def init_remainders(params: Any, master: Master | None) -> Any:
    """Remainders of zeros for parameters in the dtype of the high parts, and None for those in fp32.

    Raises:
        TypeError: a parameter has another dtype.
        ValueError: all parameters are in fp32.
    """
    if master is None:
        return None
    remainder_dtype, high = master.remainder, master.param_format.dtype

    def zero_remainder(path: Any, param: Any) -> Any:
        if param.dtype == jnp.float32:
            return None
        if param.dtype != high:
            where = jax.tree_util.keystr(path) or "the parameter"
            raise TypeError(f"{where} has dtype {param.dtype}, but master {master.name!r} supports {high} and fp32")
        return None if remainder_dtype is None else jnp.zeros_like(param, dtype=remainder_dtype)

    remainder_tree = jax.tree_util.tree_map_with_path(zero_remainder, params)
    _check_any_high(params, master)
    return None if remainder_dtype is None else remainder_tree


def _check_any_high(params: Any, master: Master) -> None:
    """Raises ValueError for parameters that are all in fp32."""
    leaves = jax.tree.leaves(params)
    if leaves and all(x.dtype == jnp.float32 for x in leaves):
        fix = (
            "use the first result of fp8jax.split_master_weights(params, master)"
            if master.remainder
            else "cast them with astype"
        )
        raise ValueError(
            f"master {master.name!r} keeps parameters in {master.param_format.dtype}, but all are in float32; {fix}"
        )


def join_remainders(params: Any, remainder: Any, master: Master | None) -> Any:
    """The parameters joined with the remainders of an optimizer's state.

    Raises:
        ValueError: the state has remainders of another master; or a parameter has another dtype than at `init`.
    """
    remainder_dtype = master.remainder if master else None
    found_dtypes = sorted({str(x.dtype) for x in jax.tree.leaves(remainder)})
    expected = [] if remainder_dtype is None else [str(remainder_dtype)]
    if found_dtypes != expected or (remainder is None) != (remainder_dtype is None):
        has = f"remainders in {' and '.join(found_dtypes)}" if found_dtypes else "no remainders"
        raise ValueError(
            f"the state has {has}, but this optimizer's master is {master.name if master else 'the parameters'!r}. "
            "Convert it with fp8jax.convert_state(state, tx, params)"
        )
    if master is not None and master.is_stochastic:
        _check_any_high(params, master)
    if master is None or remainder is None:
        return params

    def join_param(path: Any, high: Any, remainder_leaf: Any) -> Any:
        expected = jnp.float32 if remainder_leaf is None else master.param_format.dtype
        if high.dtype != expected:
            where, had = jax.tree_util.keystr(path) or "the parameter", "no" if remainder_leaf is None else "the"
            raise ValueError(
                f"{where} has dtype {high.dtype}, but the optimizer's state has {had} remainder of a parameter in "
                f"{jnp.dtype(expected)} (master {master.name!r}). Pass the parameters that `init` or the last step "
                "returned, or split others with high, remainder = fp8jax.split_master_weights(params, "
                f"{master.name!r})"
            )
        return high if remainder_leaf is None else MasterWeight(high, remainder_leaf)

    structure: Any
    pairs, structure = jax.tree_util.tree_flatten_with_path(params)
    remainder_leaves = structure.flatten_up_to(remainder)
    return structure.unflatten(
        [
            join_param(path, high, remainder_leaf)
            for (path, high), remainder_leaf in zip(pairs, remainder_leaves, strict=True)
        ]
    )


def split_tree(tree: Any) -> tuple[Any, Any]:
    """High parts and remainders of a tree from `join_remainders`, or of the changes in its place."""
    high = jax.tree.map(lambda x: x.high if _is_master(x) else x, tree, is_leaf=_is_master)
    return high, jax.tree.map(lambda x: x.remainder if _is_master(x) else None, tree, is_leaf=_is_master)


def with_master_weights(init: Callable, update: Callable, master: Master) -> tuple[Callable, Callable]:
    """`init` and `update` of a transformation that updates fp32 masters. Their high parts are the parameters."""

    def init_masters(params: optax.Params) -> MasterState:
        return MasterState(jnp.zeros([], jnp.int32), init(params), init_remainders(params, master))

    def update_masters(
        updates: optax.Updates, state: MasterState, params: optax.Params | None = None, **extra_args: Any
    ) -> tuple[optax.Updates, MasterState]:
        if params is None:
            raise ValueError("an optimizer with master weights needs the parameters: call update(grads, state, params)")
        master_tree = join_remainders(params, state.remainder, master)
        wide_params = jax.tree.map(lambda x: x.astype(jnp.float32), master_tree, is_leaf=_is_master)
        changes, inner = update(updates, state.inner, wide_params, **extra_args)
        count = optax.safe_increment(state.count)
        seed = noise.step_seed(count)

        def round_update(path: Any, change: Array, value: Array, old: Any) -> Any:
            new = value + change
            if isinstance(old, MasterWeight):
                return exact_update(masters.split(new, old.high.dtype, old.remainder.dtype), old)
            if not master.is_stochastic or old.dtype != jnp.bfloat16:
                return change.astype(old.dtype)
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            return exact_update(noise.round_stochastic(new, master_seed(seed, name)), old)

        rounded_updates = jax.tree_util.tree_map_with_path(round_update, changes, wide_params, master_tree)
        rounded_updates, new_remainder = (
            (rounded_updates, None) if state.remainder is None else split_tree(rounded_updates)
        )
        return rounded_updates, MasterState(count, inner, new_remainder)

    return init_masters, update_masters


def split_master_weights(params: Any, master: str) -> tuple[Any, Any]:
    """Parameters in fp32 as high parts, for the model, and remainders, for the optimizer.

    The optimizer's `init(high)` starts with zero remainders. Set these with `optax.tree.set(tx.init(high),
    remainder=remainder)`.

    Args:
        params: tree of arrays of floating dtypes.
        master: "bf16+int8", "bf16+int16", "fp16+int8" or "fp16+int16"; `fp8jax.core.masters` has their precision.

    Returns:
        Two trees of that structure; each high part is the 16-bit float nearest to the master.

    Raises:
        ValueError: `master` is not one of these.

    Examples:
        >>> import fp8jax, jax.numpy as jnp
        >>> high, remainder = fp8jax.split_master_weights({"w": jnp.full((2, 2), 0.1)}, "bf16+int16")
        >>> high["w"].dtype, remainder["w"].dtype
        (dtype(bfloat16), dtype('int16'))
    """
    master_format = Master(master)
    if master_format.remainder is None:
        raise ValueError(f"master {master!r} has no remainder; use bf16 or fp16 with +int8 or +int16")
    high, remainder_dtype = master_format.param_format.dtype, master_format.remainder
    return split_tree(jax.tree.map(lambda x: masters.split(x.astype(jnp.float32), high, remainder_dtype), params))


def master_weights(state: optax.OptState, params: optax.Params) -> optax.Params:
    """The master weights of a training state in fp32, for export or evaluation.

    Args:
        state: of `compressed_adamw`, `fp8lm_adamw`, `compress_state`, `fp8jax.optimizer`, also within a chain.
        params: the parameters that belong to it.

    Returns:
        The tree of the parameters. Masters in two parts are joined and scaled ones are decoded. Parameters that are
        their own masters are returned unchanged.

    Raises:
        ValueError: the state has masters of other parameters, as inside of `optax.flatten`; or a parameter with a
            remainder has another dtype than at `init`.

    Examples:
        >>> import fp8jax, jax.numpy as jnp
        >>> tx = fp8jax.compressed_adamw(3e-4, master="bf16+int8")
        >>> params = {"w": jnp.ones((64, 128), jnp.bfloat16)}
        >>> params, state = tx.step(params, tx.init(params), params)
        >>> fp8jax.master_weights(state, params)["w"].dtype
        dtype('float32')
    """
    paths, _ = jax.tree_util.tree_flatten_with_path(flax_variables.unbox(params))
    values = dict(paths)
    for node in moments.iter_namedtuples(flax_variables.unbox(state)):
        remainder = getattr(node, "remainder", None)
        stored = getattr(node, "master", None) if remainder is None else remainder
        # A wrapper such as optax.partition holds several states, each for a part of the parameters.
        for path, part in jax.tree_util.tree_leaves_with_path(stored, is_leaf=moments.is_quantized):
            if path not in values:
                where = jax.tree_util.keystr(path)
                raise ValueError(
                    f"the state has master weights for other parameters: {where or 'one'} is not in the parameters "
                    "passed"
                )
            if remainder is not None and values[path].dtype not in _HIGH_DTYPES:
                raise ValueError(
                    f"{jax.tree_util.keystr(path) or 'the parameter'} has dtype {values[path].dtype}, but the state "
                    "has the remainder of a bfloat16 or float16 parameter. Pass the parameters that the last step "
                    "returned, in the dtype of the high parts of fp8jax.split_master_weights"
                )
            values[path] = _to_float32(part if remainder is None else MasterWeight(values[path], part))
    return flax_variables.rebox([values[path] for path, _ in paths], params)


def _to_float32(weight: Any) -> Array:
    """A quantized or two-part master in fp32; other weights stay."""
    if moments.is_quantized(weight):
        return load(weight)
    return weight.astype(jnp.float32) if _is_master(weight) else weight


def _is_master(node: Any) -> bool:
    return isinstance(node, MasterWeight)
