"""AdamW with moments stored in 8 bits, as an optax transformation (COAT, sections 4.1 and 4.2)."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from fp8jax.core import formats
from fp8jax.core.recipe import Optimizer
from fp8jax.core.spec import check_expand
from fp8jax.ops.dispatch.choice import check_impl
from fp8jax.ops.optimizers.adamw import ADAMW
from fp8jax.ops.optimizers.leaf import Adam
from fp8jax.ops.optimizers.step import step_tree
from fp8jax.optim import checks, master_weights, moments
from fp8jax.optim.fused import FusedTransformation, StepOptions, fused_transformation

# NumPy integers, because optax.inject_hyperparams traces Python integers.
GROUP_SIZE = np.int32(128)
MIN_SIZE = np.int32(4096)
# From this b2 on, "auto" rounds second moments stochastically (results/second_moment.json).
STOCHASTIC_MIN_B2 = 0.98

ScalarOrSchedule: TypeAlias = float | Array | optax.Schedule


class CompressedAdamState(NamedTuple):
    """State of `compressed_adamw` and `scale_by_compressed_adam`.

    Attributes:
        count: steps taken, int32 scalar.
        mu: first moments: the tree of the parameters with a `QTensor` or an array for each.
        nu: second moments, likewise.
    """

    count: Array  # type: ignore[assignment]  # optax calls it so; tuple.count is shadowed
    mu: optax.Updates
    nu: optax.Updates


class MasterAdamState(NamedTuple):
    """State of `compressed_adamw` with a `master` that has remainders.

    Attributes:
        count, mu, nu: as of `CompressedAdamState`.
        remainder: the tree of the parameters with the int8 or int16 remainder of each that has one, None for others.
    """

    count: Array  # type: ignore[assignment]
    mu: optax.Updates
    nu: optax.Updates
    remainder: Any


def scale_by_compressed_adam(
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    eps_root: float = 0.0,
    *,
    mu: str = "e4m3",
    nu: str = "e4m3",
    group_size: int | np.integer = GROUP_SIZE,
    expand: bool | str = True,
    nu_rounding: str = "auto",
    min_size: int | np.integer = MIN_SIZE,
    impl: str = "auto",
    nesterov: bool = False,
    mu_dtype: None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Rescales gradients by Adam, with moments stored in 8 bits.

    It is `optax.scale_by_adam` with another storage: each step decodes the moments, updates them in fp32, and encodes
    them. Moments are quantized in groups along the last axis, in place, with dynamic range expansion. Moments stay in
    fp32 if the parameter has fewer than `min_size` elements, or a last axis so short that scales would need 10 % of the
    codes. This depends on their global shape only.

    Args:
        b1, b2, eps, eps_root: as of `optax.scale_by_adam`.
        mu, nu, group_size, expand, nu_rounding, min_size, impl, nesterov, mu_dtype: as of `compressed_adamw`.

    Returns:
        A transformation with state `CompressedAdamState`. Updates have the dtype of the parameters if they are passed
        to `update`, else that of the gradients.

    Raises:
        ValueError: an argument is out of range or unknown; or at `update`, a gradient does not have the shape of its
            parameter.
        TypeError: `mu_dtype` is given; or at `init`, a parameter is not of a floating dtype or has 8 bits; or at
            `update`, a gradient is complex.

    Examples:
        >>> import fp8jax, jax.numpy as jnp, optax
        >>> tx = optax.chain(fp8jax.scale_by_compressed_adam(b2=0.95), optax.scale_by_learning_rate(1e-3))
        >>> params = {"w": jnp.ones((64, 128))}
        >>> updates, state = tx.update(params, tx.init(params), params)
        >>> state[0].mu["w"].codes.dtype
        dtype(float8_e4m3fn)

    References:
        Xi et al., COAT: Compressing Optimizer States and Activation for Memory-Efficient FP8 Training, ICLR 2025.
    """
    tx = compressed_adamw(
        *(-1.0, b1, b2, eps, eps_root),
        weight_decay=0.0,
        mask=False,
        mu=mu,
        nu=nu,
        group_size=group_size,
        expand=expand,
        nu_rounding=nu_rounding,
        min_size=min_size,
        impl=impl,
        nesterov=nesterov,
        mu_dtype=mu_dtype,
    )

    def update_fn(
        updates: optax.Updates, state: CompressedAdamState, params: optax.Params | None = None, **extra_args: Any
    ) -> tuple[optax.Updates, CompressedAdamState]:
        del extra_args
        # Without parameters, updates have the dtype of the gradients. No value of these is read.
        return tx.update(updates, state, updates if params is None else params)

    return optax.GradientTransformationExtraArgs(tx.init, update_fn)


def compressed_adamw(
    learning_rate: ScalarOrSchedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    eps_root: float = 0.0,
    weight_decay: float = 1e-4,
    mask: Any | Callable[[optax.Params], Any] | None = None,
    *,
    mu: str = "e4m3",
    nu: str = "e4m3",
    group_size: int | np.integer = GROUP_SIZE,
    expand: bool | str = True,
    nu_rounding: str = "auto",
    master: str | None = None,
    min_size: int | np.integer = MIN_SIZE,
    impl: str = "auto",
    nesterov: bool = False,
    mu_dtype: None = None,
) -> FusedTransformation:
    r"""AdamW with moments stored in 8 bits: about 2.1 bytes per parameter instead of 8.

    It is `optax.adamw` with another storage of the moments. With `mu="fp32"`, `nu="fp32"` and fp32 parameters the
    results of both are bitwise equal.

    **Second moments.** With b2 = 0.999 a second moment changes by 0.1 % per step, and the codes of e4m3 are 3 to 12 %
    apart. With rounding to nearest it stalls. Stochastic rounding is unbiased at every step and scatters around the
    fp32 moment (results/second_moment.json). Its noise is a hash of the step count, the path of the parameter in the
    tree, and the position of the element in the global array. Inside `jax.shard_map` it is the position in the local
    array. It needs no key, and a restart continues with the same bits. A mesh changes codes only if it splits groups.
    The rounding is not part of the state and may change between steps.

    **Dead elements.** The exponent of a group comes from its smallest magnitude. The exponent therefore ignores
    elements that no longer matter, such as a dead unit or a pruned column (`fp8jax.ops.optimizers.leaf`). Elements with
    gradients are not affected, except that rare gradients count as if they came every 45 steps.

    **Small decays.** First moments with expansion are rounded to nearest. If b1 is above 0.98 or an array, they are
    rounded with noise that depends on the step, so that they decay without a gradient.

    **Gradients.** A NaN or Inf gradient makes its moments NaN, as in optax. To skip these steps, wrap the
    transformation in `optax.apply_if_finite`. With `master`, this needs fp32 gradients. Finite gradients are clipped to
    2^62 (4.6e18), because their squares would overflow fp32.

    **Changed parameters.** The caller may change a parameter between steps. Its master is then the changed value plus
    the old remainder. `compress_state(chain, master=...)` keeps the masters of a whole chain. Under
    `optax.inject_hyperparams`, name `group_size` and `min_size` in `static_args` if you pass them.

    Args:
        learning_rate: step size, or a schedule of the number of steps taken.
        b1: decay of the first moment, in [0, 1).
        b2: decay of the second moment, in [0, 1).
        eps: added to the root of the second moment; not negative.
        eps_root: added to the second moment under the root; not negative.
        weight_decay: strength of the decoupled weight decay, multiplied by the learning rate.
        mask: tree of booleans with the structure of the parameters, or a function of the parameters that returns one:
            the parameters that decay. None decays all.
        mu: storage of the first moment: an 8-bit float format ("e4m3", "e5m2"), or "bf16" or "fp32", which are cast.
        nu: storage of the second moment, as for `mu`.
        group_size: elements along the last axis that share a scale and an exponent.
        expand: dynamic range expansion; without it a group is scaled by its amax alone. "coat" uses the paper's
            exponents (`QuantSpec.expand`), in plain JAX: impl "triton" raises, and "auto" falls back. In its groups,
            elements without gradients reduce the range of the others, as in the paper.
        nu_rounding: how codes or bf16 of the second moment are rounded: "nearest"; "stochastic", which follows slow
            changes; or "auto", which is stochastic if b2 is at least 0.98, or an array, as in
            `optax.inject_hyperparams`.
        master: which weights the optimizer updates. None: the parameters. "bf16+stochastic": bf16 parameters, rounded
            stochastically without a key. "bf16+int8", "bf16+int16", "fp16+int8", "fp16+int16": 16-bit parameters with
            masters of 24 or 32 bits; the state contains the remainders (`fp8jax.master_weights`). fp32 parameters are
            their own masters.
        min_size: smallest size of a parameter, in elements, with quantized moments.
        impl: "xla"; "triton", the fused kernel for quantized parameters on CUDA; or "auto", the kernel where it can
            run. `fp8jax.ops.dispatch.choice.record_choices` records the choice for each parameter. If the arrays of a
            jitted program are on two automatic meshes of GPUs, JAX cannot run kernels: use "xla".
        nesterov: use NAdam's updates, as `optax.adamw(nesterov=True)` does. XLA computes them: impl "triton" raises.
        mu_dtype: not supported, an error. Use `mu` instead: "bf16" for `jnp.bfloat16`, "fp32" for float32.

    Returns:
        A transformation with `step(grads, state, params) -> (params, state)`, which updates the parameters in place.
        Its state is `CompressedAdamState`, or `MasterAdamState` with remainders. Updates have the dtype of the
        parameters. With `master`, updates of 16-bit parameters are in fp32 and must be added unchanged, because the
        remainders are computed with them.

    Raises:
        ValueError: an argument is out of range or unknown; or at `update`, a gradient does not have the shape of its
            parameter, or no parameters are given.
        TypeError: `mu_dtype` is given; or at `init`, a parameter is not of a floating dtype or has 8 bits; or at
            `update`, a gradient is complex.

    Examples:
        >>> import fp8jax, jax.numpy as jnp, optax
        >>> tx = optax.chain(optax.clip_by_global_norm(1.0), fp8jax.compressed_adamw(3e-4, weight_decay=0.1))
        >>> params = {"w": jnp.ones((64, 128))}
        >>> state = tx.init(params)
        >>> updates, state = tx.update(params, state, params)
        >>> params = optax.apply_updates(params, updates)
        >>> fp8jax.state_bytes(state)["nu"] / params["w"].size
        1.046875

    References:
        Xi et al., COAT: Compressing Optimizer States and Activation for Memory-Efficient FP8 Training, ICLR 2025;
        Loshchilov and Hutter, Decoupled Weight Decay Regularization, ICLR 2019.
    """
    checks.check_adamw(learning_rate, b1, b2, eps, eps_root, weight_decay)
    check_impl(impl)
    check_expand(expand)
    master_format = master_weights.parse_master(master)
    static_group_size = moments.to_static_integer("group_size", group_size)
    static_min_size = moments.to_static_integer("min_size", min_size)
    is_compressed = any([formats.get(name).needs_scale for name in (mu, nu)])
    # `init` raises for a traced size.
    storage = Optimizer(
        mu, nu, (static_group_size or 1) if is_compressed else None, expand if is_compressed else False, nu_rounding
    )
    specs = {"mu": storage.spec("mu") or formats.get(mu), "nu": storage.spec("nu") or formats.get(nu)}
    if mu_dtype is not None:
        raise TypeError(
            f"mu_dtype={mu_dtype} is an argument of optax, which mu replaces. Pass mu='bf16' or mu='fp32', or for 8 "
            "bits mu='e4m3' (the default) or mu='e5m2'"
        )
    if impl == "triton" and nesterov:
        raise ValueError("impl 'triton' does not support nesterov=True; use impl='auto' or 'xla'")
    if impl == "triton" and not is_compressed:
        raise ValueError(f"impl 'triton' supports only 8-bit moments, but mu is {mu!r} and nu is {nu!r}")

    def init_fn(params: optax.Params) -> CompressedAdamState | MasterAdamState:
        _, size = moments.require_static(static_group_size, static_min_size)
        checks.check_params(params)
        mus, nus = (jax.tree.map(lambda p: moments.zeros(p, spec, size), params) for spec in specs.values())  # noqa: B023
        state = _make_state(jnp.zeros([], jnp.int32), mus, nus, master_weights.init_remainders(params, master_format))
        return moments.replicate_scalars(state, params)

    def update_fn(
        grads: optax.Updates,
        state: CompressedAdamState | MasterAdamState,
        params: optax.Params | None,
        options: StepOptions,
    ) -> tuple[Any, CompressedAdamState | MasterAdamState]:
        if params is None:
            raise ValueError("compressed_adamw needs the parameters: call update(grads, state, params)")
        if options.key is not None and master_format is not None:
            raise ValueError(
                f"master {master!r} does not use a key: its rounding is exact or derived from a hash of the step; "
                "omit key"
            )
        if options.in_place and options.max_direction is not None and master_format and master_format.is_stochastic:
            raise ValueError(
                f"master {master!r} can round weights away from zero, which fp8jax.with_weight_bounds does not track. "
                "Use master='bf16+int8', or chain fp8jax.track_weight_amax() without a limit, which measures updates"
            )
        if options.max_direction is not None and nesterov:
            raise ValueError(
                "fp8jax.with_weight_bounds does not support nesterov=True, whose updates can be larger. Chain "
                "fp8jax.track_weight_amax() without a limit after this optimizer; it measures updates"
            )
        checks.check_state(state, MasterAdamState if master_format and master_format.remainder else CompressedAdamState)
        checks.check_gradients(grads, state.mu)
        if static_group_size is not None and static_min_size is not None:
            for name, spec in specs.items():
                for path, x in jax.tree_util.tree_leaves_with_path(getattr(state, name), is_leaf=moments.is_quantized):
                    is_quantized = moments.should_quantize(x.shape, storage.spec(name), static_min_size)
                    checks.check_storage(name, path, x, spec, is_quantized)
        remainder, decays = getattr(state, "remainder", None), moments.resolve_tree(mask, params)
        count = optax.safe_increment(state.count)
        rate = learning_rate(state.count) if callable(learning_rate) else learning_rate
        scalars = options.grad_scale, options.apply_if, options.max_direction
        new = step_tree(
            ADAMW,
            Adam(b1, b2, eps, eps_root, count, rate, weight_decay, *scalars, nesterov),
            grads,
            master_weights.join_remainders(params, remainder, master_format),
            state.mu,
            state.nu,
            decays=True if decays is None else decays,
            in_place=options.in_place,
            impl=impl,
            key=options.key,
            stochastic_weights=master_format is not None and master_format.is_stochastic,
            stochastic_nu=nu != "fp32" and rounds_stochastically(nu_rounding, b2),
            tree_slice=options.tree_slice,
        )
        if options.apply_if is not None:
            count = jnp.where(options.apply_if, count, state.count)
        result, new_remainder = (new.weight, None) if remainder is None else master_weights.split_tree(new.weight)
        return result, _make_state(count, new.mu, new.nu, new_remainder)

    return fused_transformation(init_fn, update_fn)


def _make_state(count: Array, mu: Any, nu: Any, remainder: Any) -> CompressedAdamState | MasterAdamState:
    return CompressedAdamState(count, mu, nu) if remainder is None else MasterAdamState(count, mu, nu, remainder)


def rounds_stochastically(nu_rounding: str, b2: Any) -> bool:
    """Whether a second moment with this decay is rounded stochastically.

    The value of an array is unknown, so "auto" rounds stochastically for an array, which has little effect on accuracy
    at any b2.
    """
    if nu_rounding == "auto":
        return isinstance(b2, Array) or b2 >= STOCHASTIC_MIN_B2
    return nu_rounding == "stochastic"
