"""The step of a fused optimizer over a tree of parameters, by a kernel or the reference for each.

Parameters of one kind share one program, so that many are traced and compiled in the time of a few.
"""

import dataclasses
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from fp8jax.core import noise
from fp8jax.core.masters import MasterWeight
from fp8jax.core.qtensor import QTensor
from fp8jax.ops.autodiff.observations import LayerScope, compare, compare_update, current_layer_scope, observe
from fp8jax.ops.dispatch import choice
from fp8jax.ops.dispatch.choice import (
    Choice,
    cast_varying_like,
    check_impl,
    choose_impl,
    missing_triton,
    record_choice,
    reshard_like,
)
from fp8jax.ops.optimizers.leaf import (
    WHOLE_TREE,
    Adam,
    Leaf,
    StepResult,
    TreeSlice,
    exact_update,
    is_quantized,
    load,
    make_weight_seed,
)
from fp8jax.ops.optimizers.next_moment import next_moment


def map_leaves(body: Callable[..., Any], static: Hashable, scalars: Any, rows: Sequence[Any]) -> list[Any]:
    """The results of `body(static, scalars, row)`, in the order of the rows.

    Rows of one kind share a trace, and on one CPU device the compiled function.

    Args:
        body: a function of a module, not a closure: it is traced once for each kind of row.
        scalars: tree of arrays that all rows share.
        rows: trees of arrays; a kind has one structure, and the same types of leaves.
    """
    call = _call_body_compiled_once if choice.compiles_calls_once() else _call_body_inlined
    return [call(body, static, scalars, row) for row in rows]


def _call_body(body: Callable[..., Any], static: Hashable, scalars: Any, row: Any) -> Any:
    return body(static, scalars, row)


_call_body_inlined = jax.jit(_call_body, static_argnums=(0, 1))
_call_body_compiled_once = jax.jit(_call_body, static_argnums=(0, 1), inline=choice.XLA_LATE)

LeavesStep = Callable[[Adam, Sequence[Leaf]], list[StepResult]]


class FusedOptimizer(NamedTuple):
    """The step of an optimizer, which `step_tree` runs.

    Attributes:
        reference: the step in plain JAX, of one leaf with quantized arrays, or of all leaves that have none.
        kernel: the step by a kernel, of leaves with quantized arrays.
        kernel_module: name of the kernel's module in pallas_kernels.
        unsupported_reason: the reason why the kernel does not support a leaf, or None.
    """

    name: str
    reference: LeavesStep
    kernel: LeavesStep
    kernel_module: str
    unsupported_reason: Callable[[Adam, Leaf], str | None]


def step_tree(
    optimizer: FusedOptimizer,
    adam: Adam,
    grads: Any,
    weights: Any,
    mu: Any,
    nu: Any,
    *,
    master: Any = None,
    amax: Any = None,
    decays: Any = True,
    in_place: bool = True,
    impl: str = "auto",
    key: Array | None = None,
    stochastic_weights: bool = False,
    stochastic_nu: bool = False,
    tree_slice: TreeSlice = WHOLE_TREE,
) -> StepResult:
    """The new parameters, or their changes, and the new state.

    Args:
        adam: the scalars of the step, without its `seed`.
        grads: tree of gradients, arrays or `QTensor`s.
        weights: tree of the parameters, of which some may be `MasterWeight`s.
        mu, nu, master, amax: trees of what the state has for each parameter, as of `Leaf`; None if it has none.
        decays: booleans in a tree that is a prefix of the parameters: which of them decay.
        in_place: whether new parameters are returned, or else changes, in the dtypes of the parameters. Changes of
            leaves that are exact are in fp32 (`leaf.exact_update`).
        impl: "xla" is the reference. "auto" is the kernel for leaves with quantized arrays on CUDA GPUs, if it takes
            them. "triton" is the same, but raises where "auto" would fall back.
        key: PRNG key: bf16 parameters are rounded stochastically. None rounds to nearest.
        stochastic_weights: whether `master`, or else bf16 parameters, are rounded stochastically, with noise from
            `adam.count`, the parameter's path in the tree, and each element's position.
        stochastic_nu: the same for second moments in codes or bf16.
        tree_slice: which part of the parameters these are.

    Returns:
        Trees with the structure of the parameters. If a parameter is a `MasterWeight`, so is its result.

    Raises:
        ValueError: `impl` is "triton", and the kernel cannot take a leaf with quantized arrays; a key is given, and no
            parameter is bf16; or as of `TreeSlice.preceding_blocks`.
    """
    if stochastic_nu or stochastic_weights:
        adam = dataclasses.replace(adam, seed=noise.step_seed(adam.count))
    treedef: Any
    paths_and_mus, treedef = jax.tree_util.tree_flatten_with_path(mu, is_leaf=is_quantized)
    n = len(paths_and_mus)
    random = None if key is None else jax.random.bits(key, (n, 2), jnp.uint32)

    def flatten(tree: Any) -> list[Any]:
        return [None] * n if tree is None else treedef.flatten_up_to(tree)

    def add_noise(i: int, leaf: Leaf) -> Leaf:
        """A leaf with noise from its path, a name that is the same in a dict, a dataclass and an NNX state."""
        name, weight, nu = tree_slice.path(paths_and_mus[i][0]), leaf.weight, leaf.nu
        if leaf.master is not None or (weight.dtype == jnp.bfloat16 and not isinstance(weight, MasterWeight)):
            if random is not None:
                leaf = dataclasses.replace(leaf, weight_seed=random[i])
            elif stochastic_weights:
                seed = make_weight_seed(adam.seed, name, weight.shape, tree_slice)
                leaf = dataclasses.replace(leaf, weight_seed=seed)
        if stochastic_nu and (is_quantized(nu) or nu.dtype == jnp.bfloat16):
            *rows, last = nu.shape or (1,)
            size = math.prod(rows) * (leaf.padded_row or last)
            blocks = tree_slice.preceding_blocks(size, nu.shape, "second moments", "nu_rounding='nearest'")
            leaf = dataclasses.replace(leaf, preceding_blocks=blocks, salt=noise.param_seed(name))
        return leaf

    columns = [*map(flatten, (grads, weights, mu, nu, master, amax))]
    decay_flags = flatten(jax.tree.broadcast(decays, treedef.unflatten([0] * n)))
    leaves = [
        add_noise(i, Leaf(g, w, m, v, master, amax, decays=flag, in_place=in_place))
        for i, (g, w, m, v, master, amax, flag) in enumerate(zip(*columns, decay_flags, strict=True))
    ]
    if key is not None and all(leaf.weight_seed is None for leaf in leaves):
        raise ValueError("key applies only to stochastic rounding of bf16 parameters, and there are none; omit it")
    layer_scope = current_layer_scope("")
    before: list[dict[str, Array]] = []
    if layer_scope is not None:
        # A kernel overwrites parameters and moments: what the statistics need of them is computed when the gradient is
        # there, and before the kernel runs. Otherwise XLA would copy all of them when the step starts.
        leaves = [lax.optimization_barrier(leaf) for leaf in leaves]
        pairs = [lax.optimization_barrier((leaf.grad, _arrays_before_step(adam, leaf))) for leaf in leaves]
        leaves = [dataclasses.replace(leaf, grad=grad) for leaf, (grad, _) in zip(leaves, pairs, strict=True)]
        before = [arrays for _, arrays in pairs]
    results = step_leaves(optimizer, adam, leaves, impl)
    if layer_scope is not None:
        layer_axes = () if tree_slice.layer is None else (0,)
        scopes = [layer_scope._replace(layer=tree_slice.path(path), layer_axes=layer_axes) for path, _ in paths_and_mus]
        results = [_observe_step(*each) for each in zip(scopes, leaves, before, results, strict=True)]
    return StepResult(*(treedef.unflatten([result[i] for result in results]) for i in range(len(StepResult._fields))))


def _arrays_before_step(adam: Adam, leaf: Leaf) -> dict[str, Array]:
    """By role, the exact new values of the moments in codes, fp32, and the parameter before the step, negated."""
    # Negated, it is a new array. XLA would take the parameter's own one, which the kernel overwrites.
    arrays: dict[str, Any] = {"update": -_parameter(leaf.weight)}
    gradient = load(leaf.grad) if isinstance(leaf.grad, QTensor) else leaf.grad
    for role, moment in (("m", leaf.mu), ("v", leaf.nu)):
        if isinstance(moment, QTensor):
            arrays[role] = next_moment(adam, gradient, moment, is_squared=role == "v")
    return arrays


def _parameter(weight: Any) -> Array:
    """A parameter, without the remainder of its master weight."""
    return weight.high if isinstance(weight, MasterWeight) else weight  # type: ignore[no-any-return]


def _observe_step(layer_scope: LayerScope, leaf: Leaf, before: dict[str, Array], result: StepResult) -> StepResult:
    """The result of a step, with observations of the moments in codes and of the parameter's change."""
    mu = result.mu
    tie, untie = (mu.codes, mu.with_codes) if isinstance(mu, QTensor) else (mu, lambda x: x)
    for role, new in (("m", mu), ("v", result.nu)):
        if role in before:
            tie = observe(tie, layer_scope, role, compare(before[role], new))
    # Negated as the parameter before the step; the sign of a change does not matter.
    found = compare_update(before["update"], -_parameter(result.weight), is_change=not leaf.in_place)
    tie = observe(tie, layer_scope, "update", found)
    return result._replace(mu=untie(tie))


def step_leaves(optimizer: FusedOptimizer, adam: Adam, leaves: Sequence[Leaf], impl: str = "auto") -> list[StepResult]:
    """The results of a step for some leaves; `impl` and errors as of `step_tree`."""
    impls = [record_choice(optimizer.name, _choose(optimizer, adam, leaf, impl)).impl for leaf in leaves]
    if impl == "auto" and any(leaf.quantized_arrays for leaf in leaves):
        choice.warn_if_kernels_missing()
    kernel_leaves, other_leaves = (
        [leaf for leaf, name in zip(leaves, impls, strict=True) if (name == "triton") == is_kernel]
        for is_kernel in (True, False)
    )
    kernel_results = iter(_step_by_platform(optimizer, adam, kernel_leaves, impl) if kernel_leaves else ())
    other_results = iter(_step_by_reference(optimizer.reference, adam, other_leaves))
    return [next(kernel_results if name == "triton" else other_results) for name in impls]


def _choose(optimizer: FusedOptimizer, adam: Adam, leaf: Leaf, impl: str) -> Choice:
    """The functions that compute the step of a leaf."""
    check_impl(impl)
    if not leaf.quantized_arrays:
        return Choice("xla", "no moment is quantized")
    return choose_impl(
        impl,
        lambda: missing_triton(optimizer.kernel_module) or optimizer.unsupported_reason(adam, leaf),
        "the fused kernel",
    )


def _step_by_platform(optimizer: FusedOptimizer, adam: Adam, leaves: Sequence[Leaf], impl: str) -> list[StepResult]:
    """The step by the kernel on CUDA GPUs, and by the reference elsewhere, unless `impl` is "triton"."""

    def reference(leaves: Sequence[Leaf]) -> list[StepResult]:
        results = _step_by_reference(optimizer.reference, adam, leaves)
        return [_cast_varying(adam, leaf, result) for leaf, result in zip(leaves, results, strict=True)]

    def kernel(leaves: Sequence[Leaf]) -> list[StepResult]:
        results = optimizer.kernel(adam, [leaf.in_place_if_exact() for leaf in leaves])
        # A kernel's parts have whole groups. Arrays on Explicit axes get their own sharding back.
        results = [jax.tree.map(reshard_array_like, r, leaf.unchanged) for r, leaf in zip(results, leaves, strict=True)]
        return [_cast_varying(adam, leaf, _as_update(leaf, r)) for leaf, r in zip(leaves, results, strict=True)]

    default = None if impl == "triton" else reshard_like(kernel, reference, (leaves,))
    return jax.lax.platform_dependent(leaves, cuda=kernel, default=default)


def _step_by_reference(reference: LeavesStep, adam: Adam, leaves: Sequence[Leaf]) -> list[StepResult]:
    """The step in plain JAX: one by one for leaves with quantized arrays, all at once for the others."""
    static, scalars = adam.split_static()
    # Leaves of a kind share a trace: their salts are arguments of it.
    quantized_leaves = [leaf for leaf in leaves if leaf.quantized_arrays]
    rows = [
        (_split_groups(dataclasses.replace(leaf, salt=None)), None if leaf.salt is None else np.uint32(leaf.salt))
        for leaf in quantized_leaves
    ]
    quantized = map(_reshape_like, map_leaves(_step_leaf, (reference, static), scalars, rows), quantized_leaves)
    plain_leaves = [leaf for leaf in leaves if not leaf.quantized_arrays]
    results = reference(adam, [leaf.in_place_if_exact() for leaf in plain_leaves]) if plain_leaves else []
    plain = iter([_apply_if(adam, leaf, _as_update(leaf, r)) for leaf, r in zip(plain_leaves, results, strict=True)])
    return [next(quantized if leaf.quantized_arrays else plain) for leaf in leaves]


def _split_groups(leaf: Leaf) -> Leaf:
    """The leaf with a row for each group of its moments, so that leaves of other shapes are of its kind.

    Noise depends on positions in the flat array, which do not change. The leaf is returned as it is on several devices,
    where a reshape could move elements, and if a row has a short group.
    """
    shape, specs = leaf.grad.shape, {q.spec for q in leaf.quantized_arrays}
    if not choice.compiles_calls_once() or leaf.amax is not None or len(shape) < 2:
        return leaf
    if any(spec.granularity != "group" or spec.axis != -1 or spec.is_packed for spec in specs):
        return leaf
    if len({spec.group_size for spec in specs}) > 1 or shape[-1] % leaf.group_size:
        return leaf
    row_lengths = {shape: leaf.group_size, (*shape[:-1], shape[-1] // leaf.group_size): 1}
    return jax.tree.map(lambda x: x.reshape(-1, row_lengths[x.shape]) if x.shape in row_lengths else x, leaf)


def _reshape_like(result: StepResult, leaf: Leaf) -> StepResult:
    """The result with arrays of the shapes that the leaf has."""
    return jax.tree.map(lambda new, old: new.reshape(old.shape), result, leaf.unchanged)


def _step_leaf(static: Any, scalars: Any, row: tuple[Leaf, Any]) -> StepResult:
    """The step of one leaf in plain JAX, from the arguments that `_step_by_reference` passes to `map_leaves`."""
    (reference, constants), (leaf, salt) = static, row
    adam, leaf = Adam(**dict(constants), **scalars), dataclasses.replace(leaf, salt=salt)
    (result,) = reference(adam, [leaf.in_place_if_exact()])
    return _apply_if(adam, leaf, _as_update(leaf, result))


def _as_update(leaf: Leaf, result: StepResult) -> StepResult:
    """The result. An exact leaf that is not updated in place has the parameter's change as its `weight`."""
    if leaf.in_place or not leaf.is_exact:
        return result
    return result._replace(weight=exact_update(result.weight, leaf.weight))


def _apply_if(adam: Adam, leaf: Leaf, result: StepResult) -> StepResult:
    """The result; `leaf.unchanged` if `adam.apply_if` is False."""
    if adam.apply_if is None:
        return result
    return jax.tree.map(lambda new, old: jnp.where(adam.apply_if, new, old), result, leaf.unchanged)


def _cast_varying(adam: Adam, leaf: Leaf, result: StepResult) -> StepResult:
    """Each result varies over the mesh axes of the values that it depends on: a rate may vary over an axis over which
    moments do not."""
    scalars = vars(adam)
    moment_scalars = [x for name, x in scalars.items() if name not in ("rate", "weight_decay", "max_direction")]
    others = cast_varying_like(result._replace(mu=None, nu=None), leaf, list(scalars.values()))
    mu, nu = cast_varying_like((result.mu, result.nu), leaf, moment_scalars)
    return others._replace(mu=mu, nu=nu)


def reshard_array_like(x: Array, like: Array) -> Array:
    """`x`, with the sharding of `like` if that has Explicit axes."""
    sharding = jax.typeof(like).sharding
    is_same = not sharding.mesh.explicit_axes or jax.typeof(x).sharding == sharding
    return x if is_same else jax.sharding.reshard(x, sharding)
