"""AdamW's step for parameters whose moments may be stored in 8 bits: decode, update in fp32, encode.

`adam_direction` is the reference in plain JAX. `step` and `update` run the fused kernel of
`pallas_kernels/optimizers/adamw_triton.py` for quantized moments where it can run, and the reference for everything
else.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from fp8jax.core import noise
from fp8jax.core.masters import MasterWeight
from fp8jax.core.noise import round_stochastic
from fp8jax.core.qtensor import QTensor, quantize_stochastic, quantize_with_scale
from fp8jax.ops.dispatch import missing_kernels
from fp8jax.ops.dispatch.choice import cast_varying_like, record_choice, reshard_like
from fp8jax.ops.optimizers import adamw_kernel, map_leaves
from fp8jax.ops.optimizers.adamw_leaf import Adam as Adam
from fp8jax.ops.optimizers.adamw_leaf import AdamLeaf, Form, apply_change, scale_and_clip
from fp8jax.ops.optimizers.adamw_leaf import Moment as Moment
from fp8jax.ops.optimizers.dead_elements import suppress_dead_elements


class TreeSlice(NamedTuple):
    """Of what the parameters of a step are a part, so that the step has the bits of one of the whole.

    Attributes:
        name: path of their tree in the whole one, steps joined by "/".
        layer: which one of stacked parameters they are, int32; None where nothing is stacked.
    """

    name: str = ""
    layer: Array | None = None

    def path(self, key_path: Any) -> str:
        """The path of a parameter in the whole tree."""
        return "/".join(filter(None, (self.name, jax.tree_util.keystr(key_path, simple=True, separator="/"))))

    def preceding_blocks(self, leaf: AdamLeaf) -> Array | None:
        """How many eights of elements of the stack come before a layer's second moment; raises as `_counter_blocks`."""
        if leaf.nu_noise is None:
            return None
        last = leaf.grad.shape[-1] if leaf.grad.ndim else 1
        size = math.prod(leaf.grad.shape[:-1]) * (leaf.padded_row or last)
        return self._counter_blocks(size, leaf.grad.shape, "second moments", "nu_rounding='nearest'")

    def layer_seed(self, seed: Array, shape: tuple[int, ...]) -> Array:
        """The words of noise of a layer of a stack, from those of the stack; errors as of `_counter_blocks`."""
        counter_blocks = self._counter_blocks(math.prod(shape), shape, "weights", "another master")
        return seed if counter_blocks is None else noise.advance_counter(seed, counter_blocks)

    def _counter_blocks(self, size: int, shape: tuple[int, ...], quantity: str, fix: str) -> Array | None:
        """How many eights of elements come before a layer of this size; None of what is not stacked.

        Raises:
            ValueError: a layer is no whole number of eights, and noise goes by them.
        """
        if self.layer is None:
            return None
        if size % 8:
            raise ValueError(
                f"a stacked parameter with layers of shape {shape} has {quantity} that are rounded stochastically, "
                f"with noise of eight elements each: take layers of a multiple of eight elements, or {fix}"
            )
        return self.layer.astype(jnp.uint32) * np.uint32(size // 8)


WHOLE_TREE = TreeSlice()


def step(
    grads: Any,
    mu: Any,
    nu: Any,
    params: Any,
    adam: Adam,
    *,
    decays: Any = True,
    impl: str = "auto",
    nu_stochastic: bool = False,
    key: Array | None = None,
    stochastic: bool = False,
    form: Form = "step",
    tree_slice: TreeSlice = WHOLE_TREE,
) -> tuple[Any, Any, Any]:
    """The new parameters, or the changes to be added to them.

    Args:
        grads: tree of gradients of any floating dtype.
        mu: the tree with the first moment, as stored, in each leaf's place.
        nu: the tree with the second moments, likewise.
        params: tree of the parameters, of which some may be `MasterWeight`s; None, for changes, if none decays.
        adam: the scalars of the step.
        decays: booleans in a tree that is a prefix of `grads`: which parameters decay.
        impl: "xla" is the reference. "auto" is the kernel for quantized parameters on a CUDA GPU, if its packages are
            there and it takes the shapes and dtypes, on however many devices; each then updates its part, in whole
            groups. "triton" is the same, but raises where "auto" would fall back. Parameters without a quantized moment
            are always XLA's, which fuses them well. `fp8jax.ops.dispatch.choice.record_choices` tells what was chosen.
        nu_stochastic: whether second moments in codes or bf16 are rounded stochastically, with noise from `adam.count`,
            the parameter's path in the tree, and each element's position.
        key: PRNG key: bf16 parameters are rounded stochastically, so that changes under half a step of bf16 are not
            lost. None rounds to nearest.
        stochastic: the same with noise from `adam.count`, path and position, as of `nu_stochastic`.
        form: "step", or "update" for changes, in the dtypes of the parameters, else of the gradients. Of parameters
            with a remainder, and of `stochastic` ones, changes are in fp32 (`adamw_leaf.exact_update`).
        tree_slice: of what these parameters are a part.

    Returns:
        The new parameters, or their changes, and both trees of moments. In a `MasterWeight`'s place there is one, for
        changes with that of the high part in its place.

    Raises:
        ValueError: `impl` is "triton", and the kernel cannot take a quantized parameter: the message says why; a key is
            given, and no parameter is bf16; `adam.apply_if` is, for an update, which nobody adds if it is not taken; or
            as of `TreeSlice.preceding_blocks`.
    """
    if form == "update" and adam.apply_if is not None:
        raise ValueError("adam.apply_if is for `step`; an update that is not taken is one that nobody adds")
    nu_seed = noise.step_seed(adam.count) if nu_stochastic else None
    weight_seed = noise.step_seed(adam.count) if stochastic else None
    leaves, treedef = _make_leaves(grads, mu, nu, params, decays, key, weight_seed, nu_seed, tree_slice)
    if key is not None and all(leaf.noise is None for leaf in leaves):
        raise ValueError("key rounds bf16 parameters stochastically, and there are none")
    impls = [record_choice("adamw", adamw_kernel.choose(leaf, impl, adam.nesterov)).impl for leaf in leaves]
    reference = functools.partial(_reference, form, adam)
    if impl == "auto" and any(leaf.quantized_moments for leaf in leaves):
        missing_kernels.warn_if_missing()
    if "triton" in impls:
        fused = _with_varying_axes(adam, functools.partial(_fused, form, adam, impls))
        default = None if impl == "triton" else reshard_like(fused, _with_varying_axes(adam, reference), (leaves,))
        rows = jax.lax.platform_dependent(leaves, cuda=fused, default=default)
    else:
        rows = reference(leaves)
    result, mus, nus = (treedef.unflatten([row[i] for row in rows]) for i in range(3))
    return result, mus, nus


update = functools.partial(step, form="update")


def adam_direction(grads: Any, mu: Any, nu: Any, adam: Adam) -> tuple[Any, Any, Any]:
    """Adam's bias-corrected direction (Kingma and Ba, Algorithm 1), from moments before they are stored again.

    Computed by optax's own functions over the whole tree, so moments kept in fp32 give the bits of
    `optax.scale_by_adam`: XLA divides by a bias correction differently when leaves do not share it. Finite gradients
    count with at most 2^62 (`adamw_leaf.scale_and_clip`).

    Args:
        grads: tree of gradients of any floating dtype.
        mu: the tree with the first moment, as stored, in each leaf's place.
        nu: the tree with the second moments, likewise.
        adam: the scalars of the step.

    Returns:
        The tree of directions m / (sqrt(v) + eps), to be followed downhill, and both trees of moments; all in fp32.
        With `adam.nesterov`, m in the directions is b1 times the next step's moment and 1 - b1 times the gradient, each
        bias-corrected (Dozat, 2016).
    """
    g = jax.tree.map(lambda x: scale_and_clip(x, adam.grad_scale), grads)
    if adam.nesterov and not any(map(_is_quantized, jax.tree.leaves((mu, nu), is_leaf=_is_quantized))):
        # Of gradients that XLA computes in the same pass it makes other sums than of arguments, which optax has.
        g = jax.lax.optimization_barrier(g)
    m = optax.tree.update_moment(g, jax.tree.map(load, mu, is_leaf=_is_quantized), adam.b1, 1)
    v = optax.tree.update_moment_per_elem_norm(g, jax.tree.map(load, nu, is_leaf=_is_quantized), adam.b2, 2)
    with jax.numpy_dtype_promotion("standard"):  # optax raises a number to an integer's power
        if adam.nesterov:
            next_m_hat = optax.tree.bias_correction(m, adam.b1, optax.safe_increment(adam.count))
            g_hat = optax.tree.bias_correction(g, adam.b1, adam.count)
            m_hat = jax.tree.map(lambda m, g: adam.b1 * m + (1 - adam.b1) * g, next_m_hat, g_hat)
        else:
            m_hat = optax.tree.bias_correction(m, adam.b1, adam.count)
        v_hat = optax.tree.bias_correction(v, adam.b2, adam.count)
    d = jax.tree.map(lambda m, v: m / (jnp.sqrt(v + adam.eps_root) + adam.eps), m_hat, v_hat)
    return d, m, v


def clip_finite(x: Array, limit: Any) -> Array:
    """Finite values beyond a limit's magnitude as that magnitude; NaN and Inf as they are, for all to see."""
    return jnp.where((jnp.abs(x) > limit) & jnp.isfinite(x), jnp.sign(x) * limit, x)


def load(moment: Moment) -> Array:
    """The fp32 values of a stored moment."""
    return moment.dequantize() if isinstance(moment, QTensor) else moment.astype(jnp.float32)


def store(
    values: Array, like: Moment, seed: Array | None = None, dither: Array | None = None, row_length: int | None = None
) -> Moment:
    """Stores fp32 values in the way that `like` is stored.

    Args:
        values: a moment.
        like: as it was stored before.
        seed: two words of noise, by which codes and bf16 are rounded stochastically; None rounds to nearest.
        dither: of a first moment to nearest: it reaches zero where nothing is added to it
            (`fp8jax.core.noise.decay_dither`), before a second moment that goes on falling makes steps of what is left.
        row_length: of bf16 that is rounded stochastically, what its rows count as for the noise; None is their length.
    """
    if not isinstance(like, QTensor):
        if seed is None or like.dtype != jnp.bfloat16:
            return values.astype(like.dtype)
        return round_stochastic(values, seed, row_length)
    if seed is not None:
        return quantize_stochastic(values, like, seed)
    return quantize_with_scale(values, like.spec, None, dither=dither)


def _make_leaves(
    grads: Any,
    mu: Any,
    nu: Any,
    params: Any,
    decays: Any,
    key: Array | None,
    weight_seed: Array | None,
    nu_seed: Array | None,
    tree_slice: TreeSlice,
) -> tuple[list[AdamLeaf], Any]:
    """The leaves of a tree of gradients, each with what belongs to it, and the tree's structure."""
    treedef: Any
    paths, treedef = jax.tree_util.tree_flatten_with_path(grads)
    gs = [g for _, g in paths]
    weights = [None] * len(gs) if params is None else treedef.flatten_up_to(params)
    seeds: Sequence[Array | None] = [None] * len(gs)
    if key is not None:
        random = jax.random.bits(key, (len(gs), 2), jnp.uint32)
        seeds = [random[i] if _supports_stochastic_rounding(w) else None for i, w in enumerate(weights)]
    elif weight_seed is not None:
        param_seeds = [noise.param_seed(f"master/{tree_slice.path(path)}") for path, _ in paths]
        seeds = [
            tree_slice.layer_seed(noise.fold_in_seed(weight_seed, salt), w.shape)
            if _supports_stochastic_rounding(w)
            else None
            for w, salt in zip(weights, param_seeds, strict=True)
        ]
    mus, nus, decay_flags = (treedef.flatten_up_to(tree) for tree in (mu, nu, jax.tree.broadcast(decays, grads)))
    # By names alone: the same in a dict, a dataclass and an NNX state, and whatever else is in the tree.
    param_seeds = [noise.param_seed(tree_slice.path(path)) for path, _ in paths]
    nu_noise = [nu_seed if _is_quantized(moment) or moment.dtype == jnp.bfloat16 else None for moment in nus]
    leaves = [
        AdamLeaf(*row) for row in zip(gs, weights, mus, nus, decay_flags, seeds, nu_noise, param_seeds, strict=True)
    ]
    return [dataclasses.replace(leaf, preceding_blocks=tree_slice.preceding_blocks(leaf)) for leaf in leaves], treedef


def _supports_stochastic_rounding(weight: Any) -> bool:
    """Whether a parameter can be rounded stochastically."""
    return weight.dtype == jnp.bfloat16 and not isinstance(weight, MasterWeight)


def _reference(form: Form, adam: Adam, leaves: Sequence[AdamLeaf]) -> list[tuple[Array, Moment, Moment]]:
    """The step in plain JAX: of parameters with quantized moments one by one, of the others all at once."""
    seed = next((leaf.nu_noise for leaf in leaves if leaf.nu_noise is not None), None)
    numbered = [
        (dataclasses.replace(leaf, nu_noise=None, salt=0), None if leaf.nu_noise is None else np.uint32(leaf.salt))
        for leaf in leaves
    ]
    static, scalars = adam.split_static()
    rows = iter(
        map_leaves.map_leaves(
            _step_leaf, (form, static), (scalars, seed), [row for row in numbered if row[0].quantized_moments]
        )
    )
    plain = [_with_param_seed(seed, *row) for row in numbered if not row[0].quantized_moments]
    plain_rows = iter(_step_leaves(form, adam, plain))
    return [next(rows if leaf.quantized_moments else plain_rows) for leaf in leaves]


def _with_param_seed(seed: Array | None, leaf: AdamLeaf, param_seed: Any) -> AdamLeaf:
    """A leaf with words of noise of its own, of those of the step and its salt."""
    if param_seed is None or seed is None:
        return leaf
    return dataclasses.replace(leaf, nu_noise=noise.fold_in_seed(seed, param_seed))


def _step_leaf(static: Any, common: Any, row: tuple[AdamLeaf, Any]) -> tuple[Array, Moment, Moment]:
    (form, constants), (scalars, seed) = static, common
    return _step_leaves(form, Adam(**dict(constants), **scalars), [_with_param_seed(seed, *row)])[0]


def _step_leaves(form: Form, adam: Adam, leaves: Sequence[AdamLeaf]) -> list[tuple[Array, Moment, Moment]]:
    """The step of some parameters, whose words of noise are their own."""
    grads, mus, nus = ([getattr(leaf, name) for leaf in leaves] for name in ("grad", "mu", "nu"))
    directions, *moments = adam_direction(grads, mus, nus, adam)
    dither = noise.decay_dither(adam.count, adam.b1)
    # Which members matter no longer, moments alone say: with nesterov a gradient may cancel a live one's.
    plain_directions = (
        adam_direction(grads, mus, nus, dataclasses.replace(adam, nesterov=False))[0] if adam.nesterov else directions
    )
    pairs = [
        suppress_dead_elements(g, d, m, v, mu, nu, adam)
        for g, d, m, v, mu, nu in zip(grads, plain_directions, *moments, mus, nus, strict=True)
    ]
    mus = [
        store(m, mu, dither=dither if adamw_kernel.needs_dither(mu, adam.b1) else None)
        for (m, _), mu in zip(pairs, mus, strict=True)
    ]
    nus = [
        store(v, nu, leaf.nu_seed, row_length=leaf.padded_row)
        for leaf, (_, v), nu in zip(leaves, pairs, nus, strict=True)
    ]
    results = []
    for leaf, d in zip(leaves, directions, strict=True):
        if adam.max_direction is not None:
            d = clip_finite(d, adam.max_direction)
        if leaf.decays and leaf.weight is not None:
            d = d + adam.weight_decay * leaf.weight.astype(jnp.float32)
        change = jnp.asarray(-adam.rate, jnp.float32) * d
        results.append(apply_change(form, leaf, change))
    new = list(zip(results, mus, nus, strict=True))
    if adam.apply_if is None:
        return new
    old = [(leaf.weight, leaf.mu, leaf.nu) for leaf in leaves]
    return jax.tree.map(lambda new, old: jnp.where(adam.apply_if, new, old), new, old)


def _fused(
    form: Form, adam: Adam, impls: Sequence[str], leaves: Sequence[AdamLeaf]
) -> list[tuple[Array, Moment, Moment]]:
    """The step with the kernel for those leaves whose entry of `impls` says so, and the reference for the others."""
    reference_leaves = [leaf for leaf, impl in zip(leaves, impls, strict=True) if impl == "xla"]
    rows = iter(_reference(form, adam, reference_leaves))
    scalars = functools.cache(functools.partial(adamw_kernel.make_scalars, adam))
    return [
        adamw_kernel.run(form, leaf, adam, scalars) if impl == "triton" else next(rows)
        for leaf, impl in zip(leaves, impls, strict=True)
    ]


def _with_varying_axes(adam: Adam, step_fn: Any) -> Any:
    """`step_fn`, whose results each vary over the mesh axes of what they depend on: parameters may differ in theirs."""

    def call(leaves: Sequence[AdamLeaf]) -> Any:
        scalars, decays = list(vars(adam).values()), (adam.b1, adam.b2)
        results = zip(leaves, step_fn(leaves), strict=True)
        return [
            (cast_varying_like(row[0], leaf, scalars), *cast_varying_like(row[1:], leaf, decays))
            for leaf, row in results
        ]

    return call


def _is_quantized(node: Any) -> bool:
    return isinstance(node, QTensor)
