"""`fp8jax.telemetry`: a function that also returns the statistics of its quantized tensors.

The function is traced with observations (`fp8jax.ops.autodiff.observations`). An interpreter of its jaxpr returns their
operands as further outputs, through calls, scans, checkpoints, conds and meshes.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend.core import Literal

from fp8jax.core import derivatives
from fp8jax.ops.autodiff import observations
from fp8jax.ops.autodiff.observations import OBSERVE, Observation
from fp8jax.ops.dispatch.choice import cast_varying_over, varying_axes
from fp8jax.rewrite import primitives
from fp8jax.rewrite.primitives import Equation, SubJaxpr

# By layer and role: the name of each statistic, its position in the array of all, and the sizes of stacked layers.
_Index = tuple[tuple[str, tuple[tuple[str, tuple[tuple[str, int, tuple[int, ...]], ...]], ...]], ...]


@functools.partial(jax.tree_util.register_dataclass, data_fields=["array"], meta_fields=["index"])
@dataclasses.dataclass(frozen=True, eq=False)
class Telemetry(Mapping[str, Mapping[str, Mapping[str, Any]]]):
    """Statistics by the path of a layer, the role of a tensor, and name: a pytree of one array.

        statistics["layers/mlp/up"]["x"]["snr_db"]

    Reading a layer outside of a traced function copies the array to the host once. Values are then NumPy arrays.

    Attributes:
        array: fp32 (..., n), all statistics. Leading axes are those of `jax.vmap` and of loops around
            `fp8jax.telemetry`; each statistic has them, too.
        index: the position of each statistic in `array`.
    """

    array: Any
    index: _Index = dataclasses.field(repr=False)

    def __getitem__(self, layer: str) -> dict[str, dict[str, Any]]:
        if isinstance(self.array, jax.ShapeDtypeStruct):
            abstract: Any = jax.eval_shape(lambda array: dataclasses.replace(self, array=array)[layer], self.array)
            return abstract
        array = self.array if isinstance(self.array, jax.core.Tracer) else np.asarray(self.array)

        def read(start: int, shape: tuple[int, ...]) -> Any:
            return array[..., start : start + math.prod(shape)].reshape(array.shape[:-1] + shape)

        roles = dict(self.index)[layer]
        return {role: {name: read(start, shape) for name, start, shape in stats} for role, stats in roles}

    def __iter__(self) -> Iterator[str]:
        return (layer for layer, _ in self.index)

    def __len__(self) -> int:
        return len(self.index)


_DIFFERENTIATED = (
    "fp8jax.telemetry cannot be differentiated. Use fp8jax.telemetry(jax.value_and_grad(loss_fn)), or the telemetry "
    "of the whole step"
)


def telemetry(fn: Callable) -> Callable[..., tuple[Any, Telemetry]]:
    """A function that returns the results of `fn` and the statistics of the quantized tensors in it.

        step_with_telemetry = jax.jit(fp8jax.telemetry(train_step))
        (params, opt_state, loss), statistics = step_with_telemetry(params, opt_state, batch)
        print(statistics["layers/mlp/up"]["x"]["snr_db"])

    The results are those of `fn`. The program of `fn` itself does not change: call either of the two in a step. `fn`
    may contain transformed functions, quantized Flax models and our operations, in `jax.grad`, scans, checkpoints,
    meshes and loops over microbatches. The roles of tensors:
        x, w, dy: operands of a quantized product; dy is the gradient of its result.
        context: the input that a norm or an activation saves for the backward pass.
        m, v: the first moment of an optimizer in 8 bits, and any other moment, by the parameter's path.
        update: the change of a parameter by `fp8jax.compressed_adamw` or `fp8lm_adamw`, by its path.
        gradient: a sum of gradients in 8 bits with a factor.

    Stacked layers in a scan of a transformed function have a value each. Iterations of other loops, microbatches,
    devices and products of one weight share one value, as do layers of equal paths in several functions.
    `fp8jax.ragged_dot` of two arrays along their tokens is not observed. If `jax.vmap` batches the condition of a while
    loop, its iterations are observed until the first member of the batch ends.

    The statistics, fp32:
        snr_db: signal-to-noise ratio of the codes in decibels.
        saturated: share of values above the largest one that their scale can represent.
        lost: share of nonzero values that decode to zero.
        nonfinite: share of values that are NaN or Inf; the other statistics leave these out.
        amax: largest magnitude.
        bits: width of a code, the smallest one if tensors of several formats share a value.
        range_ratio: largest magnitude over the largest one that its scale can represent. Far below 1, a scale is stale.
        scale_spread: binary logarithm of the ratio between the largest and the smallest scale.
        fallback_rate, fallback_threshold: share of blocks in 16 bits, and the amax above which a block is.
        expansion, expansion_spread: mean of the exponents of groups, and the largest minus the smallest.
        update_ratio: norm of a parameter's change over the norm of the parameter.
        factor: mu, the factor of gradients before they are summed in 8 bits.

    Args:
        fn: any function that `jax.jit` can compile. Arrays are traced; other leaves of the arguments are settings.

    Returns:
        A function with the arguments of `fn`. It returns the results, and a `Mapping` by layer, role and name. A value
        has the axes of stacked layers. The mapping is a pytree of one array, which one transfer copies to the host.

    Raises:
        ValueError: from a call that is differentiated.
    """

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> tuple[Any, Telemetry]:
        leaves, structure = jax.tree.flatten((args, kwargs))
        traced = [i for i, x in enumerate(leaves) if isinstance(x, (jax.Array, np.ndarray, np.generic))]
        results: list[Any] = []

        def flat(arrays: Sequence[Any]) -> list[Array]:
            merged = list(leaves)
            for i, x in zip(traced, arrays, strict=True):
                merged[i] = x
            args, kwargs = jax.tree.unflatten(structure, merged)
            results[:] = jax.tree.flatten(fn(*args, **kwargs))
            return [x for x in results[0] if isinstance(x, jax.Array)]

        arrays = derivatives.error_if_differentiated(_DIFFERENTIATED, [leaves[i] for i in traced])
        with observations.is_observing(True):
            program = jax.make_jaxpr(flat)(arrays)
            whole = SubJaxpr(program.jaxpr, program.consts, range(0))
            outputs, observed = _run(whole, arrays)
        output_iter = iter(outputs)
        results[0] = [next(output_iter) if isinstance(x, jax.Array) else x for x in results[0]]
        return jax.tree.unflatten(results[1], results[0]), _summarize(_find_observations(whole), observed)

    return call


class _Expected(NamedTuple):
    """An observation in a jaxpr.

    Attributes:
        params: of its equation.
        sizes: of the scans and meshes around it in the jaxpr, outermost first.
    """

    params: dict[str, Any]
    sizes: tuple[int, ...] = ()

    @property
    def neutral(self) -> Array:
        """The values without an observation, (*sizes, statistics)."""
        return Observation.neutral(self.params["names"], self.sizes).values


def _find_observations(program: SubJaxpr) -> list[_Expected]:
    """The observations in a jaxpr that can be returned, in the order of `_run`."""
    found = []
    for eqn in program.jaxpr.eqns:
        if eqn.primitive is OBSERVE:
            found.append(_Expected(eqn.params))
        else:
            info = primitives.loop_info(eqn)
            sizes = () if info is None else (info.size,)
            inner = [each for body in primitives.sub_jaxprs(eqn) for each in _find_observations(body)]
            found += [each._replace(sizes=(*sizes, *each.sizes)) for each in inner]
    return found


def _run(program: SubJaxpr, inputs: Sequence[Any]) -> tuple[list[Any], list[Array]]:
    """The outputs of a jaxpr, and the values of the observations in it, each (*sizes, statistics)."""
    values: dict[Any, Any] = dict(zip(program.jaxpr.constvars, program.consts, strict=True))
    values |= zip(program.jaxpr.invars, inputs, strict=True)
    observed: list[Array] = []

    def value_of(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else values[atom]

    for eqn in program.jaxpr.eqns:
        operands = [value_of(atom) for atom in eqn.invars]
        expected = [*map(_find_observations, primitives.sub_jaxprs(eqn))]
        if eqn.primitive is OBSERVE:
            # Readers of the result wait for the statistics, so that XLA does not keep the observed arrays for later.
            *results, statistics = lax.optimization_barrier(operands)
            observed.append(statistics)
        elif any(expected):
            with primitives.equation_context(eqn, str(eqn.source_info.name_stack)):
                results, inner = _run_nested(eqn, operands, expected)
            observed += inner
        else:
            results = Equation(eqn, "")(operands)
        values |= zip(eqn.outvars, results, strict=True)
    return [value_of(atom) for atom in program.jaxpr.outvars], observed


def _run_nested(
    eqn: Any, operands: list[Any], expected: Sequence[Sequence[_Expected]]
) -> tuple[list[Any], list[Array]]:
    """`_run` of an equation with observations in its jaxprs, those `expected` in each."""
    programs = primitives.sub_jaxprs(eqn)
    if primitives.runs_once(eqn):
        return _run(programs[0], primitives.separate_recomputation(eqn, operands))
    if eqn.primitive.name == "while":
        return _run_while(eqn, operands, expected[0])

    def run_body(index: int, inputs: Sequence[Any], *_: Any) -> list[Any]:
        outputs, observed = _run(programs[index], inputs)
        others = [[each.neutral for each in branch] for branch in expected]
        return [*outputs, *(x for i, branch in enumerate(others) for x in (observed if i == index else branch))]

    bodies = [functools.partial(run_body, i) for i in range(len(programs))]
    results = primitives.rebind_control_flow(eqn, operands, bodies, num_extra_outputs=sum(map(len, expected)))
    count = len(eqn.outvars)
    return results[:count], results[count:]


def _run_while(eqn: Any, operands: list[Any], expected: Sequence[_Expected]) -> tuple[list[Any], list[Array]]:
    """`_run_nested` of a while loop: its carry has the merged values of the iterations so far."""
    (program,) = primitives.sub_jaxprs(eqn)

    def body(inputs: list[Any], merged: list[Array]) -> tuple[list[Any], list[Array]]:
        results, observed = _run(program, inputs)
        names = [each.params["names"] for each in expected]
        pairs = zip(map(Observation, names, merged), map(Observation, names, observed), strict=True)
        return results, [x.merge(y).values for x, y in pairs]

    neutral = cast_varying_over([each.neutral for each in expected], varying_axes(operands))
    return primitives.run_while(eqn, operands, body, neutral)


def _summarize(expected: Sequence[_Expected], observed: Sequence[Array]) -> Telemetry:
    """The statistics by layer and role, those of one tensor merged."""
    merged: dict[tuple[str, str], dict[int, Observation]] = {}
    for each, values in zip(expected, observed, strict=True):
        layer_scope = each.params["layer_scope"]
        axes = (*[None] * (values.ndim - 1 - len(layer_scope.layer_axes)), *layer_scope.layer_axes)
        found = Observation(each.params["names"], values).reduce([i for i, start in enumerate(axes) if start is None])
        start = next((start for start in axes if start is not None), 0)
        parts = merged.setdefault((layer_scope.layer, each.params["role"]), {})
        parts[start] = parts[start].merge(found) if start in parts else found
    tensors = {key: _concatenate(parts) for key, parts in sorted(merged.items())}
    # Tensors of a kind are summarized at once: operations on single numbers would take long to compile.
    kinds: dict[tuple[Any, ...], list[tuple[str, str]]] = {}
    for key, tensor in tensors.items():
        kinds.setdefault((tensor.names, tensor.shape), []).append(key)
    arrays, size = [jnp.zeros(0, jnp.float32)], 0
    index: dict[str, dict[str, list[Any]]] = {layer: {} for layer, _ in tensors}
    for (names, shape), keys in kinds.items():
        stacked = Observation(names, jnp.stack([tensors[key].values for key in keys]))
        for name, array in observations.summarize(stacked).items():
            for layer, role in keys:
                index[layer].setdefault(role, []).append((name, size, shape))
                size += math.prod(shape)
            arrays.append(array.ravel())
    layers = (
        (layer, tuple((role, tuple(sorted(statistics))) for role, statistics in sorted(roles.items())))
        for layer, roles in index.items()
    )
    return Telemetry(jnp.concatenate(arrays), tuple(layers))


def _concatenate(parts: Mapping[int, Observation]) -> Observation:
    """The statistics of the parts of a split loop, by their first layers. If loops share a layer, all are merged."""
    starts = sorted(parts)
    observed = [parts[start] for start in starts]
    ends = [start + x.shape[0] if x.shape else math.inf for start, x in zip(starts, observed, strict=True)]
    is_split = all(end <= start for end, start in zip(ends, starts[1:], strict=False))
    if len(parts) == 1 or (is_split and len({(x.shape[1:], x.names) for x in observed}) == 1):
        return observed[0]._replace(values=jnp.concatenate([x.values for x in observed]))
    return functools.reduce(Observation.merge, (x.reduce() for x in observed))


class Fault(NamedTuple):
    """A tensor with statistics that its format, with a scale for this tensor, does not explain.

    Attributes:
        layer, role: of the tensor, as in `fp8jax.telemetry`.
        indices: of the layer in a stack, such as (3,); () without a stack. In a loop that `Recipe.unquantized_blocks`
            splits, they count from the first quantized block.
        statistic, value: the one that is out of bounds: "nonfinite", "saturated", "snr_db" or "lost".
    """

    layer: str
    role: str
    indices: tuple[int, ...]
    statistic: str
    value: float

    @property
    def reason(self) -> str:
        """The statistic and its value, in words."""
        if self.statistic == "snr_db":
            return f"SNR {self.value:.1f} dB"
        names = {"nonfinite": "NaN or Inf", "saturated": "saturated", "lost": "lost to zero"}
        return f"{self.value:.2%} of values {names[self.statistic]}"

    def __str__(self) -> str:
        indices = f"[{', '.join(map(str, self.indices))}]" if self.indices else ""
        return f"{self.layer}{indices} {self.role}: {self.reason}"


# The bounds of statistics, most serious first, and whether a value beyond it is above the bound. e5m2 has about 25 dB,
# e2m1 with scales of 16 elements 20 dB, and 17 dB if it is rounded stochastically.
_BOUNDS = {"nonfinite": (0.0, True), "saturated": (0.01, True), "snr_db": (20.0, False), "lost": (0.5, True)}
_MIN_SNR_OF_4_BITS = 12.0
# Small gradients and first moments are lost without a large error.
_MAY_BE_LOST = ("dy", "m")


def find_faults(statistics: Telemetry) -> list[Fault]:
    """The tensors with NaN or Inf, 1 % of values saturated, an SNR below 20 dB (12 dB in 4 bits), or half of them lost.

        for fault in fp8jax.find_faults(statistics):
            print(f"step {step}: {fault}")

    Args:
        statistics: the second result of a function of `fp8jax.telemetry`, concrete.

    Returns:
        A `Fault` for each such tensor, the most serious first. NaN and Inf spread: those of operands are before those
        of gradients, and the fewest first. Lost values of "dy" and "m" do not count.

    Raises:
        TypeError: `statistics` is not a mapping, or is traced.
    """
    if not isinstance(statistics, Mapping):
        raise TypeError(
            "find_faults expects the statistics, the second result of a function that fp8jax.telemetry returned, got "
            f"{type(statistics).__name__}"
        )
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(statistics)):
        raise TypeError("find_faults reads values; call it outside of jax.jit, with the result of the compiled step")
    faults = []
    for layer, roles in statistics.items():
        for role, values in roles.items():
            names = [name for name in _BOUNDS if name in values and not (name == "lost" and role in _MAY_BE_LOST)]
            columns = {name: np.asarray(values[name]) for name in names}
            shape = next((column.shape for column in columns.values()), (0,))
            bits = np.asarray(values.get("bits", np.full(shape, 8)))
            for index in np.ndindex(*shape):
                pairs = [(name, float(columns[name][index])) for name in names]
                first = next((pair for pair in pairs if _is_out_of_bounds(*pair, float(bits[index]))), None)
                faults += [] if first is None else [Fault(layer, role, index, *first)]
    return sorted(faults, key=_severity)


def _severity(fault: Fault) -> tuple[int, bool, float]:
    """A key that sorts faults, the most serious first."""
    if fault.statistic == "nonfinite":
        return 0, fault.role not in ("x", "w"), fault.value
    return list(_BOUNDS).index(fault.statistic), False, -abs(fault.value)


def _is_out_of_bounds(name: str, value: float, bits: float) -> bool:
    bound, is_upper = _BOUNDS[name]
    bound = _MIN_SNR_OF_4_BITS if name == "snr_db" and bits <= 4 else bound
    return value > bound if is_upper else value < bound
