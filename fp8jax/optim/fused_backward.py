"""The optimizer inside the backward pass: each block's gradients are used and freed as they appear.

A `FusedBlockState` has the parameters of a block and their optimizer state, as arrays that the backward pass returns as
cotangents. `value_and_step` returns the value of a function with such blocks, and their updates.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend.core import Var
from jax.typing import ArrayLike

from fp8jax.core import formats, noise
from fp8jax.ops.optimizers.leaf import TreeSlice
from fp8jax.optim import checks, flax_variables, fp8lm_adamw, moments
from fp8jax.optim.fused import FusedTransformation

# Integers are stored as bits of this dtype, which a conversion to a wider float and back preserves.
_BITS = jnp.float8_e4m3fn


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["params", "encoded_state", "count", "grad_scale", "squares", "uses", "max_norms"],
    meta_fields=["dtypes", "name", "num_layers", "is_norm_only"],
)
@dataclasses.dataclass(frozen=True)
class FusedBlockState:
    """Parameters and their optimizer state, the argument of a block of `fused_backward`.

    All leaves are arrays of floating dtypes, because `value_and_step` returns the new ones as cotangents of the old
    ones.

    Attributes:
        params: tree of parameters. For `FusedBackwardBlock.scan`, layers are stacked along the first axes.
        encoded_state: the optimizer's state without its count. Integers are stored as e4m3 bits; see `state`.
        count: steps taken, fp32 scalar, exact up to 2^24.
        grad_scale: factor of the gradients in the next step, fp32 scalar: see `with_clipping`.
        squares: sum of squares of the last step's gradients before clipping, fp32; of shape (layers,) if stacked.
        uses: how often the last call used these parameters, fp32 scalar: 1, or the result is NaN.
        max_norms: largest norms of gradients in the next step, shaped like `squares`, or None: see `with_clipping`.
        dtypes: dtypes of the state's arrays, in their order.
        name: path of the parameters in the whole tree, on which the noise of stochastic rounding depends.
        num_layers: number of stacked layers; None without a stack.
        is_norm_only: whether the backward pass only sums squares and updates nothing.
    """

    params: Any
    encoded_state: Any
    count: Array
    grad_scale: Array
    squares: Array
    uses: Array
    max_norms: Array | None = None
    dtypes: tuple[str, ...] = ()
    name: str = ""
    num_layers: int | None = None
    is_norm_only: bool = False

    @property
    def state(self) -> Any:
        """The state in the optimizer's own form, for checkpoints and for steps outside of the backward pass."""
        return from_float_leaves(self.encoded_state, self.dtypes, self.count)

    @property
    def mu(self) -> Any:
        """First moments, as in the optimizer's state."""
        return self.state.mu

    @property
    def nu(self) -> Any:
        """Second moments, as in the optimizer's state."""
        return self.state.nu

    def with_clipping(
        self, max_norm: ArrayLike, norm: ArrayLike | None = None, *, previous_norm: ArrayLike | None = None
    ) -> "FusedBlockState":
        """Returns the state for a next step that clips gradients by the global norm.

        Clipping by `norm` is exact. With `previous_norm`, the limit of each block or stacked layer is its share of
        `max_norm`. The share is the block's norm divided by the global norm, both of the last step. A block without
        gradients in the last step, as before the first one, may use all of `max_norm`.

        Args:
            max_norm: largest global norm, positive.
            norm: of all gradients of the next step, from `compute_grad_norm`.
            previous_norm: of all gradients of the last step, from `grad_norm_from_states`; 0 before the first.

        Raises:
            TypeError: not exactly one of `norm` and `previous_norm` is given.
            ValueError: `max_norm` is not positive.
        """
        if (norm is None) == (previous_norm is None):
            raise TypeError(
                "with_clipping needs either norm=, the gradient norm of the next step, or previous_norm=, that of the "
                "last step"
            )
        checks.check_positive("max_norm", max_norm)
        if norm is not None:
            return dataclasses.replace(self, grad_scale=clip_factor(max_norm, norm), max_norms=None)
        limit, previous_norm = jnp.asarray(max_norm, jnp.float32), jnp.asarray(previous_norm, jnp.float32)
        # The share is unknown if a norm overflowed.
        is_known = (self.squares != 0) & jnp.isfinite(self.squares) & jnp.isfinite(previous_norm)
        share = jnp.sqrt(self.squares) / previous_norm
        limits = limit * jnp.where(is_known, jnp.minimum(share, 1.0), 1.0)
        return dataclasses.replace(self, grad_scale=jnp.float32(1.0), max_norms=limits)

    def get_grad_scale(self, square_sum: Array, layer: ArrayLike | None = None) -> Array:
        """The factor of a block's gradients in this step, fp32 scalar.

        Args:
            square_sum: sum of squares of the gradients.
            layer: index of a stacked layer.
        """
        if self.max_norms is None:
            return self.grad_scale
        return clip_factor(self.max_norms if layer is None else self.max_norms[layer], jnp.sqrt(square_sum))


def clip_factor(max_norm: ArrayLike, norm: ArrayLike) -> Array:
    """The factor that clips gradients of a norm, fp32 scalar."""
    norm = jnp.asarray(norm, jnp.float32)
    return jnp.where(norm <= max_norm, jnp.float32(1.0), max_norm / norm)


def get_dtypes(state: Any) -> tuple[str, ...]:
    """The dtypes of a state's arrays, without the count."""
    return tuple(str(x.dtype) for x in jax.tree.leaves(state._replace(count=None)))


def as_float_leaves(state: Any) -> Any:
    """A state without its count, with integers as bits of a floating dtype and the axes of layers first."""
    state = state._replace(count=None)
    if fp8lm_adamw.is_fp8lm_state(state):  # amax of arrays is stacked along the first axis
        state = state._replace(largest=jax.tree.map(lambda x: jnp.moveaxis(x, 0, -1), state.largest))
    # An integer of two bytes becomes two elements, along a new last axis.
    integer = lambda x: jnp.issubdtype(x.dtype, jnp.integer)  # noqa: E731
    return jax.tree.map(lambda x: formats.bitcast(x, _BITS) if integer(x) else x, state)


def from_float_leaves(encoded_state: Any, dtypes: tuple[str, ...], count: ArrayLike) -> Any:
    """The state from the result of `as_float_leaves`, with a count."""
    leaves, structure = jax.tree.flatten(encoded_state)
    values = [x if str(x.dtype) == kind else formats.bitcast(x, kind) for x, kind in zip(leaves, dtypes, strict=True)]
    state = jax.tree.unflatten(structure, values)
    if fp8lm_adamw.is_fp8lm_state(state):
        state = state._replace(largest=jax.tree.map(lambda x: jnp.moveaxis(x, -1, 0), state.largest))
    return state._replace(count=jnp.asarray(count).astype(jnp.int32))


@functools.partial(jax.tree_util.register_dataclass, data_fields=["arrays"], meta_fields=["sources", "structure"])
@dataclasses.dataclass(frozen=True)
class _Residuals:
    """The residuals of a block, without arrays that are also among its arguments.

    Attributes:
        arrays: residuals of the call, or of each layer, stacked.
        sources: for each residual the number of the argument that it is, or None for the next of `arrays`.
    """

    arrays: Sequence[Array]
    sources: tuple[int | None, ...]
    structure: Any

    def make_backward(self, arguments: Sequence[Array]) -> Callable[..., Any]:
        saved_arrays = iter(self.arrays)
        leaves = [next(saved_arrays) if source is None else arguments[source] for source in self.sources]
        return jax.tree.unflatten(self.structure, leaves)


class FusedBackwardBlock:
    """A block with a backward pass that applies its optimizer's step; returned by `fused_backward`."""

    def __init__(self, block: Callable[..., Any], tx: FusedTransformation, key: Array | None) -> None:
        self._block, self._tx, self._key = block, tx, key
        self._call_block = jax.custom_vjp(lambda block_state, inputs: block(block_state.params, *inputs))
        self._call_block.defvjp(self._forward, self._backward)
        self._scan_layers = jax.custom_vjp(self._plain_scan)
        self._scan_layers.defvjp(self._scan_forward, self._scan_backward)

    def init(self, params: Any, name: str = "", *, has_layer_axis: bool = False) -> FusedBlockState:
        """The parameters of a block with a state of zeros.

        Args:
            params: tree of floating arrays.
            name: path of this tree among all parameters, as "layers/3". With it, codes equal those of one step over the
                whole tree. Blocks without names must not share names of parameters, or they share noise.
            has_layer_axis: for `scan`: the first axis of each parameter stacks the layers.

        Raises:
            ValueError: stacked parameters do not have the same number of layers.
            TypeError: a parameter is not of a floating dtype, or in one of Flax's boxes.
        """
        return self.restore(params, self._tx.init(params), name, has_layer_axis=has_layer_axis)

    def restore(
        self, params: Any, state: Any, name: str = "", *, has_layer_axis: bool = False, squares: ArrayLike = 0.0
    ) -> FusedBlockState:
        """Parameters with a state, from `FusedBlockState.state` or from steps outside of a block.

        Args:
            params, name, has_layer_axis: as of `init`.
            state: of the optimizer, of these parameters.
            squares: the old `FusedBlockState.squares`, for `with_clipping`; 0 if that is lost.

        Raises: as of `init`.
        """
        if any(map(flax_variables.is_box, jax.tree.leaves((params, state), is_leaf=flax_variables.is_box))):
            raise TypeError(
                "fused_backward expects arrays, not Flax variables or boxes; pass the pure values of nnx.state"
            )
        layers = _count_layers(params) if has_layer_axis else None
        count, factor, uses = (jnp.asarray(x, jnp.float32) for x in (state.count, 1.0, 1.0))
        squares = jnp.broadcast_to(jnp.asarray(squares, jnp.float32), () if layers is None else (layers,))
        return FusedBlockState(
            params, as_float_leaves(state), count, factor, squares, uses, None, get_dtypes(state), name, layers
        )

    def __call__(self, block_state: FusedBlockState, *inputs: Any) -> Any:
        """The block's result.

        Args:
            block_state: of `init` or of the last `value_and_step`; each may be used once in a call.
            inputs: of the block; trees of arrays, with gradients as usual.

        Raises:
            ValueError: the parameters are stacked.
        """
        if block_state.num_layers is not None:
            raise ValueError(
                f"{block_state.name or 'the parameters'} has {block_state.num_layers} stacked layers; call "
                "scan(block_state, x, ...)"
            )
        return self._call_block(block_state, inputs)

    def scan(self, block_state: FusedBlockState, x: Any, *shared: Any) -> Any:
        """The result of all layers, one after another: x = block(layer's parameters, x, *shared).

        `jax.lax.scan` would hold old and new parameters of all layers. Here the backward pass updates each layer of one
        stack in place; with `donate_argnums`, of the caller's.

        Args:
            block_state: of `init(..., has_layer_axis=True)`.
            x: tree of arrays; the block returns the same structure, shapes and dtypes.
            shared: arguments of all layers, such as positions; also differentiated.

        Raises:
            ValueError: the parameters are not stacked.
            TypeError: the block's result is not like `x`.
        """
        if block_state.num_layers is None:
            raise ValueError(
                f"{block_state.name or 'the parameters'} are not stacked; use init(..., has_layer_axis=True)"
            )
        result = jax.eval_shape(self._block, _take_layer(block_state.params, 0), x, *shared)
        if jax.tree.map(_shape_and_dtype, result) != jax.tree.map(_shape_and_dtype, jax.eval_shape(lambda: x)):
            raise TypeError(f"a block under scan must return an array like x, {x}, got {result}")
        return self._scan_layers(block_state, x, shared)

    def _forward(self, block_state: FusedBlockState, inputs: tuple[Any, ...]) -> tuple[Any, Any]:
        result, backward = jax.vjp(self._block, block_state.params, *inputs)
        return result, (block_state, backward)

    def _backward(
        self, residuals: tuple[FusedBlockState, Any], cotangent: Any
    ) -> tuple[FusedBlockState, tuple[Any, ...]]:
        block_state, backward = residuals
        gradients, *inputs = backward(cotangent)
        stored, squares = (block_state.params, block_state.encoded_state), sum_of_squares(gradients)
        if not block_state.is_norm_only:
            stored = self._step(block_state, gradients, *stored, squares)
        return _updated_state(block_state, *stored, squares), tuple(inputs)

    def _plain_scan(self, block_state: FusedBlockState, x: Any, shared: tuple[Any, ...]) -> Any:
        """The result of the stacked blocks, without updates in the backward pass."""
        return lax.scan(lambda x, params: (self._block(params, x, *shared), None), x, block_state.params)[0]

    def _scan_forward(self, block_state: FusedBlockState, x: Any, shared: tuple[Any, ...]) -> tuple[Any, Any]:
        residuals = self._find_residual_sources(_take_layer(block_state.params, 0), x, shared)

        def forward_layer(x: Any, i: Array) -> tuple[Any, list[Array]]:
            result, backward = jax.vjp(self._block, _take_layer(block_state.params, i), x, *shared)
            pairs = zip(jax.tree.leaves(backward), residuals.sources, strict=True)
            return result, [leaf for leaf, source in pairs if source is None]

        result, arrays = lax.scan(forward_layer, x, jnp.arange(block_state.num_layers))
        return result, (block_state, shared, dataclasses.replace(residuals, arrays=arrays))

    def _find_residual_sources(self, params: Any, x: Any, shared: tuple[Any, ...]) -> _Residuals:
        """The residuals of a layer that are its parameters or shared arguments, from the traced program."""
        structure: Any = None

        def call(params: Any, shared: tuple[Any, ...], x: Any) -> list[Array]:
            nonlocal structure
            leaves, structure = jax.tree.flatten(jax.vjp(self._block, params, x, *shared)[1])
            return leaves

        program = jax.make_jaxpr(call)(params, shared, x).jaxpr
        argument_numbers = {var: i for i, var in enumerate(program.invars[: len(jax.tree.leaves((params, shared)))])}
        sources = [argument_numbers.get(var) if isinstance(var, Var) else None for var in program.outvars]
        return _Residuals((), tuple(sources), structure)

    def _scan_backward(
        self, scan_residuals: tuple[FusedBlockState, tuple[Any, ...], _Residuals], cotangent: Any
    ) -> tuple[FusedBlockState, Any, Any]:
        block_state, shared, residuals = scan_residuals
        layers, keep_layer_axis = block_state.num_layers or 0, fp8lm_adamw.is_fp8lm_state(block_state.encoded_state)
        shared_leaves = jax.tree.leaves(shared)
        differentiable = [i for i, leaf in enumerate(shared_leaves) if jnp.issubdtype(leaf.dtype, jnp.inexact)]

        def backward_layer(number: Array, carry: Any) -> Any:
            (stacks, squares), dx, sums = carry
            i = layers - 1 - number
            params, encoded_state = _take_layer(stacks[0], i), _take_layer(stacks[1], i, keepdims=keep_layer_axis)
            layer_residuals = dataclasses.replace(residuals, arrays=_take_layer(residuals.arrays, i))
            gradients, dx, *shared_grads = layer_residuals.make_backward([*jax.tree.leaves(params), *shared_leaves])(dx)
            square_sum = sum_of_squares(gradients)
            if not block_state.is_norm_only:
                if keep_layer_axis:  # its scales depend on the number of stacked axes
                    gradients, params = jax.tree.map(lambda x: x[None], (gradients, params))
                stored = self._step(block_state, gradients, params, encoded_state, square_sum, i)
                stacks = jax.tree.map(functools.partial(_write_layer, i), stacks, stored)
            shared_grads = jax.tree.leaves(shared_grads)
            sums = [total + shared_grads[i] for total, i in zip(sums, differentiable, strict=True)]
            return (stacks, squares.at[i].set(square_sum)), dx, sums

        initial_carry = (
            ((block_state.params, block_state.encoded_state), jnp.zeros_like(block_state.squares)),
            cotangent,
            [jnp.zeros_like(shared_leaves[i]) for i in differentiable],
        )
        ((params, encoded_state), squares), dx, sums = lax.fori_loop(0, layers, backward_layer, initial_carry)
        sums_by_index = dict(zip(differentiable, sums, strict=True))
        shared_grads = [sums_by_index.get(i) for i in range(len(shared_leaves))]  # None is no gradient
        new_state = _updated_state(block_state, params, encoded_state, squares)
        return new_state, dx, jax.tree.unflatten(jax.tree.structure(shared), shared_grads)

    def _step(
        self,
        block_state: FusedBlockState,
        gradients: Any,
        params: Any,
        encoded_state: Any,
        squares: Array,
        layer: Array | None = None,
    ) -> tuple[Any, Any]:
        """The parameters and the encoded state of a block, or of one of its layers, after a step."""
        grad_scale, tree_slice = block_state.get_grad_scale(squares, layer), TreeSlice(block_state.name, layer)
        state = from_float_leaves(encoded_state, block_state.dtypes, block_state.count)
        key = self._key
        if key is not None:
            for number in (state.count, noise.param_seed(block_state.name), 0 if layer is None else layer):
                key = jax.random.fold_in(key, number)
        params, state = self._tx.step(gradients, state, params, key=key, grad_scale=grad_scale, tree_slice=tree_slice)
        return params, as_float_leaves(state)


def _count_layers(params: Any) -> int:
    """The number of stacked layers."""
    lengths = {leaf.shape[0] if leaf.shape else 0 for leaf in jax.tree.leaves(params)}
    if len(lengths) != 1 or 0 in lengths:
        raise ValueError(
            f"stacked parameters need the same number of layers along their first axes, got lengths {lengths}"
        )
    return int(lengths.pop())


def _take_layer(stacks: Any, i: ArrayLike, keepdims: bool = False) -> Any:
    return jax.tree.map(lambda stack: lax.dynamic_index_in_dim(stack, i, 0, keepdims=keepdims), stacks)


def _write_layer(i: Array, stack: Array, layer: Array) -> Array:
    return lax.dynamic_update_index_in_dim(stack, layer, i, 0)


def _shape_and_dtype(x: Any) -> tuple[Any, Any]:
    return x.shape, x.dtype


def sum_of_squares(gradients: Any) -> Array:
    """The sum of squares of a tree of gradients, fp32."""
    return sum((jnp.sum(jnp.square(g.astype(jnp.float32))) for g in jax.tree.leaves(gradients)), jnp.float32(0.0))


def _updated_state(block_state: FusedBlockState, params: Any, encoded_state: Any, squares: Array) -> FusedBlockState:
    count = block_state.count if block_state.is_norm_only else block_state.count + 1
    return dataclasses.replace(
        block_state, params=params, encoded_state=encoded_state, count=count, squares=squares, uses=jnp.float32(1.0)
    )


def fused_backward(
    block: Callable[..., Any], tx: FusedTransformation, *, key: Array | None = None
) -> FusedBackwardBlock:
    """Returns a block of a model that updates its parameters inside the backward pass.

    The optimizer step of a block runs as soon as its gradients are computed. Only the gradients of one block are in
    memory at a time. Results equal those of one `tx.step` over all parameters, including the noise of stochastic
    rounding, except for the last bits of fp32.

    Operations on all gradients at once are not possible. Steps with NaN cannot be skipped. Gradients of microbatches
    cannot be accumulated: `value_and_step` updates the parameters once per microbatch. For clipping by the global norm,
    use `FusedBlockState.with_clipping`. It uses the norm of the last step (`grad_norm_from_states`), or that of
    `compute_grad_norm`, which needs another backward pass.

    Args:
        block: `block(params, x, *others) -> result`, a differentiable function. It may have products of a recipe or a
            `jax.checkpoint`. It must not close over arrays that are differentiated.
        tx: `compressed_adamw`, `fp8lm_adamw` (with `layer_axes=1` for stacked layers), or `fp8jax.optimizer`, without
            `clip`, and with `track_weight_bounds=False` for `moss`.
        key: PRNG key, one for the whole training, for stochastic rounding of bf16 parameters, with noise of each step,
            name and layer. None rounds to nearest and loses small changes. A `master` of `tx` needs no key.

    Returns:
        A `FusedBackwardBlock`: `.init`, then `(block_state, x, ...)`, or `.scan(block_state, x, ...)` for stacked
        layers.

    Raises:
        TypeError: `tx`, such as `fp8jax.with_clipping` or `with_weight_bounds`, cannot update a part of the parameters.

    Examples:
        >>> import fp8jax, jax, jax.numpy as jnp
        >>> layer = lambda params, x: x + jnp.tanh(x @ params["w"])
        >>> block = fp8jax.fused_backward(layer, fp8jax.optimizer("coat", 3e-4))
        >>> layers = block.init({"w": jnp.zeros((4, 64, 64))}, "layers", has_layer_axis=True)
        >>> loss = lambda layers, head, x: jnp.mean((block.scan(layers, x) @ head) ** 2)
        >>> step = jax.jit(fp8jax.value_and_step(loss, argnums=(0, 1)), donate_argnums=0)
        >>> value, (layers, head_gradient) = step(layers, jnp.ones((64, 2)), jnp.ones((8, 64)))
        >>> int(layers.state.count)
        1

    References:
        Lv et al., Full Parameter Fine-tuning for Large Language Models with Limited Resources, 2023 (LOMO).
    """
    if not isinstance(tx, FusedTransformation) or "tree_slice" not in inspect.signature(tx.step).parameters:
        raise TypeError(
            "fused_backward expects compressed_adamw(...), fp8lm_adamw(...) or fp8jax.optimizer(...) without clip; "
            "with automatic weight scaling, set track_weight_bounds=False. Only these have a step for a part of the "
            f"parameters, not {type(tx).__name__}, which may come from fp8jax.with_clipping or with_weight_bounds"
        )
    return FusedBackwardBlock(block, tx, key)


def value_and_step(
    fn: Callable[..., Any], argnums: int | Sequence[int] = 0, has_aux: bool = False
) -> Callable[..., tuple[Any, Any]]:
    """Like `jax.value_and_grad`, but returns each `FusedBlockState` with updated parameters and moments.

    Args:
        fn: a function that returns a scalar, or with `has_aux` a pair of a scalar and any other result.
        argnums: the arguments to differentiate; they must include all that contain a `FusedBlockState`.
        has_aux: whether `fn` returns a pair.

    Returns:
        `(*args) -> (value, updates)`. The value is NaN if a `FusedBlockState` was used more than once, because its
        updates would have been added.

    Raises:
        ValueError: from a call: `fn` does not use a `FusedBlockState`, or one is in an argument that is not
            differentiated.
    """

    def call(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        argnums_tuple = (argnums,) if isinstance(argnums, int) else argnums
        diff_argnums = sorted(i % len(args) for i in argnums_tuple)
        constant_args = [x for i, x in enumerate(args) if i not in diff_argnums] + list(kwargs.values())
        if constant_states := _find_block_states(constant_args):
            raise ValueError(
                f"{_describe_params(constant_states[0])} are in a FusedBlockState, so their argument must be in "
                f"argnums={argnums}"
            )
        used_numbers: set[int] = set()

        def mark_and_call(*args: Any) -> Any:
            order = iter(range(len(_find_block_states([args[i] for i in diff_argnums]))))
            enter = lambda x: _mark_used(x, next(order), used_numbers) if isinstance(x, FusedBlockState) else x  # noqa: E731
            return fn(
                *(
                    jax.tree.map(enter, x, is_leaf=_is_block_state) if i in diff_argnums else x
                    for i, x in enumerate(args)
                ),
                **kwargs,
            )

        value, updates = jax.value_and_grad(mark_and_call, argnums, has_aux=has_aux)(*args)
        old_states, new_states = _find_block_states([args[i] for i in diff_argnums]), _find_block_states(updates)
        unused_states = [block_state for i, block_state in enumerate(old_states) if i not in used_numbers]
        if unused_states:
            raise ValueError(
                f"{_describe_params(unused_states[0])} are in a FusedBlockState that the function does not use; pass "
                "it to the function"
            )
        is_valid = functools.reduce(
            jnp.logical_and, [block_state.uses == 1 for block_state in new_states], jnp.bool_(True)
        )
        check = lambda value: jnp.where(is_valid, value, jnp.nan)  # noqa: E731
        updates = jax.tree.map(_reset_grad_scale, updates, is_leaf=_is_block_state)
        return ((check(value[0]), value[1]) if has_aux else check(value)), updates

    return call


def compute_grad_norm(
    fn: Callable[..., Any], argnums: int | Sequence[int] = 0, has_aux: bool = False
) -> Callable[..., Array]:
    """Returns a function that computes the global norm of the gradients of `value_and_step` and updates nothing.

    Args:
        fn, argnums, has_aux: as of `value_and_step`.

    Returns:
        `(*args) -> norm`, fp32 scalar. Under `jax.jit` it computes no new parameters.
    """
    step_fn = value_and_step(fn, argnums, has_aux)
    to_norm_only = lambda x: dataclasses.replace(x, is_norm_only=True) if isinstance(x, FusedBlockState) else x  # noqa: E731
    return lambda *args, **kwargs: grad_norm_from_states(
        step_fn(*jax.tree.map(to_norm_only, args, is_leaf=_is_block_state), **kwargs)[1]
    )


def grad_norm_from_states(updates: Any) -> Array:
    """The global norm of the gradients of a step, fp32.

    Args:
        updates: of `value_and_step`: gradients, and each `FusedBlockState` after the step, with its sum of squares.
    """
    leaves = jax.tree.leaves(updates, is_leaf=_is_block_state)
    squares = [jnp.sum(x.squares) if isinstance(x, FusedBlockState) else sum_of_squares(x) for x in leaves]
    return jnp.sqrt(sum(squares, jnp.float32(0.0)))


def _mark_used(block_state: FusedBlockState, number: int, used_numbers: set[int]) -> FusedBlockState:
    """The same state; `number` is added to `used_numbers` when its cotangent is traced."""

    @jax.custom_vjp
    def mark(block_state: FusedBlockState) -> FusedBlockState:
        return block_state

    def backward(_: None, cotangent: FusedBlockState) -> tuple[FusedBlockState]:
        used_numbers.add(number)
        return (cotangent,)

    mark.defvjp(lambda block_state: (block_state, None), backward)
    return mark(block_state)


def _reset_grad_scale(x: Any) -> Any:
    """A state after a step, without the scale and the limits of that step."""
    if isinstance(x, FusedBlockState):
        return dataclasses.replace(x, grad_scale=jnp.ones_like(x.grad_scale), max_norms=None)
    return x


_find_block_states = functools.partial(moments.find_nodes, kind=FusedBlockState)


def _is_block_state(x: Any) -> bool:
    return isinstance(x, FusedBlockState)


def _describe_params(block_state: FusedBlockState) -> str:
    return f"the parameters of {block_state.name or 'a block'}"
