"""The state of one optimizer as that of another, to change optimizers in the middle of a run."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax

from fp8jax.core import formats
from fp8jax.core.qtensor import QTensor, quantize_with_scale
from fp8jax.ops import adamw, fp8lm
from fp8jax.optim import fp8lm_adamw, moments, variables
from fp8jax.optim.compress_state import CountedState

_ADAM = ("count", "mu", "nu")
_REMAINDER = "remainder"


def convert_state(state: optax.OptState, tx: optax.GradientTransformation, params: optax.Params) -> optax.OptState:
    """The state of an optimizer as the state of another one, which goes on from it.

    Between `optax.adamw`, `compressed_adamw`, `fp8lm_adamw`, and the same with other settings, each way: moments are
    decoded and stored as `tx` stores them, to nearest, and the count of steps goes on, that of a schedule with it.
    Wrappers around them (`optax.chain`, `inject_hyperparams`, `masked`, `MultiSteps`) may differ; what both have is
    taken over. Between any transformation and the same one in `compress_state`, too.

    `fp8lm_adamw` makes master weights in fp16 of the parameters, and from it `working_copy(state, jnp.float32)` gives
    parameters without the rounding of a copy in 16 bits. To masters by parts, `fp8jax.split_masters` gives the high
    parts that are `params`, and the remainders, which `optax.tree.set(state, remainder=remainder)` puts in the place of
    zeros; from them, `fp8jax.master_weights(state, params)` gives the parameters in fp32.

    Args:
        state: of the optimizer so far.
        tx: the transformation that is to go on, such as `fp8jax.compressed_adamw(3e-4)`.
        params: the parameters that it is to go on with.

    Returns:
        A state of `tx`, placed as `tx.init(params)`.

    Raises:
        TypeError: `tx` is no optimizer.
        ValueError: the states have not as many Adams, or moments of other parameters; or arrays of the old state, such
            as the gradients that `optax.MultiSteps` has summed, have no place in the new one.

    Examples:
        >>> import fp8jax, jax.numpy as jnp, optax
        >>> params = {"w": jnp.ones((64, 128))}
        >>> state = optax.adamw(3e-4).init(params)
        >>> tx = fp8jax.compressed_adamw(3e-4)
        >>> fp8jax.convert_state(state, tx, params).mu["w"].codes.dtype
        dtype(float8_e4m3fn)
    """
    if not hasattr(tx, "init"):
        raise TypeError(f"convert_state takes (state, tx, params), where tx is an optimizer, not a {type(tx).__name__}")
    template = tx.init(params)
    (old, _), (new, counted) = (_uncounted(variables.bare(x)) for x in (state, template))
    olds, news = (jax.tree_util.tree_leaves_with_path(x, is_leaf=moments.is_quantized) for x in (old, new))
    scaled = any(map(fp8lm_adamw.is_state, _records(new)))
    if not scaled and [path for path, _ in olds] == [path for path, _ in news]:
        converted = jax.tree.map(_store, new, old, is_leaf=moments.is_quantized)
    else:
        converted = _between_adams(old, new)
    leaves = iter(jax.tree.leaves(jax.tree.map(_placed, converted, new)))
    began = jax.tree.leaves(template)
    rows = [x if own else next(leaves) for x, own in zip(began, counted, strict=True)]
    return jax.tree.unflatten(jax.tree.structure(template), rows)


def _uncounted(state: Any) -> tuple[Any, list[bool]]:
    """A state without the counts of `compress_state` itself, and which arrays of the state these are."""

    def is_counted(node: Any) -> bool:
        return isinstance(node, CountedState)

    def marked(node: Any) -> Any:
        return CountedState(True, jax.tree.map(lambda _: False, node.inner)) if is_counted(node) else False  # type: ignore[arg-type]

    plain = jax.tree.map(lambda node: node.inner if is_counted(node) else node, state, is_leaf=is_counted)
    return plain, jax.tree.leaves(jax.tree.map(marked, state, is_leaf=is_counted))


def _between_adams(old: Any, new: Any) -> Any:
    """The new state with the moments and the count of the old one, and whatever else both have."""
    records = list(_records(old))
    adams, others = ([x for x in records if _is_adam(x) == which] for which in (True, False))
    wanted = sum(map(_is_adam, _records(new)))
    if len(adams) != wanted or not adams:
        raise ValueError(
            f"the old state has {len(adams)} parts with {', '.join(_ADAM)}, as optax.adamw and those of fp8jax have "
            f"one, and the new state has {wanted}: only between as many, or to compress_state of the same, is one made "
            "of the other"
        )
    count, left = adams[0].count, iter(adams)

    def convert(node: Any) -> Any:
        if not moments.is_record(node):
            return node
        if _is_adam(node):
            return _adam(next(left), node)
        at = next((i for i, x in enumerate(others) if type(x) is type(node)), None)
        same = None if at is None else others.pop(at)

        def field(name: str, value: Any) -> Any:
            known = getattr(same, name, None)
            if any(map(_is_adam, _records(value))):
                return jax.tree.map(convert, value, is_leaf=moments.is_record)
            if isinstance(value, dict) and isinstance(known, dict):  # hyperparameters
                known = value | {key: x for key, x in known.items() if key in value}
            if same is not None and _structure(known) == _structure(value):
                return jax.tree.map(_store, value, known, is_leaf=moments.is_quantized)
            return jnp.asarray(count, value.dtype) if name == "count" else value

        return node._replace(**{name: field(name, value) for name, value in node._asdict().items()})

    converted = jax.tree.map(convert, new, is_leaf=moments.is_record)
    for node in others:
        own = [x for x in node if not any(map(_is_adam, _records(x)))]
        if any(jnp.ndim(x) for x in jax.tree.leaves(own)):
            raise ValueError(f"the new optimizer has no place for the {type(node).__name__} of the old one")
    return converted


def _records(tree: Any) -> Iterator[Any]:
    """The named tuples that a state is made of, outer ones first; of what is within the moments of Adam none."""
    for node in jax.tree.leaves(tree, is_leaf=moments.is_record):
        if moments.is_record(node):
            yield node
            if not _is_adam(node):
                for field in node:
                    yield from _records(field)


def _is_adam(node: Any) -> bool:
    return fp8lm_adamw.is_state(node) or (
        moments.is_record(node) and sorted(set(node._fields) - {_REMAINDER}) == sorted(_ADAM)
    )


def _adam(old: Any, new: Any) -> Any:
    """The state of an Adam with the moments of another."""
    stored, scaled = {"count": jnp.asarray(old.count, new.count.dtype)}, fp8lm_adamw.is_state(new)
    for name in ("mu", "nu", "master"):
        if hasattr(new, name) and hasattr(old, name):
            tree, values = getattr(new, name), getattr(old, name)
            before, now = _structure(values), _structure(tree)
            if before != now:
                raise ValueError(f"{name} is of other parameters: {before} before, and {now} now")
            store = _store_scaled if scaled else _store
            stored[name] = jax.tree.map(store, tree, values, is_leaf=moments.is_quantized)
    rests = [getattr(x, _REMAINDER, None) for x in (old, new)]
    if None not in rests and _structure(rests[0]) == _structure(rests[1]):
        stored[_REMAINDER] = jax.tree.map(_store, rests[1], rests[0])
    new = new._replace(**stored)
    if not scaled:
        return new
    names = [name for name in ("master", "mu", "nu") if hasattr(new, name)]
    kept = [jax.tree.leaves(getattr(new, name), is_leaf=moments.is_quantized) for name in names]
    rows = [jnp.stack([*map(fp8lm.largest, row)]) for row in zip(*kept, strict=True) if isinstance(row[0], QTensor)]
    return new._replace(largest=jax.tree.unflatten(jax.tree.structure(new.largest), rows))


def _structure(tree: Any) -> Any:
    return jax.tree.structure(tree, is_leaf=moments.is_quantized)


def _store(like: Any, old: Any) -> Any:
    """Values, stored in one way, as they are stored in another; what is of no floating dtype as it is."""
    if not isinstance(old, QTensor) and not (hasattr(old, "dtype") and jnp.issubdtype(old.dtype, jnp.floating)):
        return _remainder(like, old)
    if old.shape != like.shape:
        raise ValueError(f"the old state has an array of shape {old.shape} where the new one has {like.shape}")
    if isinstance(like, QTensor) and isinstance(old, QTensor) and like.storage_key == old.storage_key:
        return old if old.spec == like.spec else dataclasses.replace(old, spec=like.spec)
    values = adamw.load(old)
    return adamw.store(values, like)


def _remainder(like: Any, old: Any) -> Any:
    """The remainder of a master with as many bits as another's; whatever else is of an integer dtype as it is."""
    kinds = [getattr(x, "dtype", None) for x in (old, like)]
    if kinds == [jnp.int8, jnp.int16]:
        return old.astype(jnp.int16) * 256
    if kinds == [jnp.int16, jnp.int8]:
        return jnp.clip((old.astype(jnp.int32) + 128) // 256, -128, 127).astype(jnp.int8)
    return old


def _store_scaled(like: Any, old: Any) -> Any:
    """`_store` for `fp8lm_adamw`, whose scales are powers of two."""
    new = _store(like, old)
    if new is old or not isinstance(new, QTensor):
        return new
    values, block, fmt = adamw.load(old), new.spec.block_shape(new.shape), formats.get(new.spec.format)
    return quantize_with_scale(values, new.spec, fp8lm.scale_above(fp8lm.largest_of(values, block), fmt))


def _placed(x: Any, like: Any) -> Any:
    """An array where another lies, as far as that is fixed to a place."""
    fixed = isinstance(like, jax.Array) and not isinstance(like, jax.core.Tracer) and like.committed
    return jax.device_put(x, like.sharding) if fixed else x
