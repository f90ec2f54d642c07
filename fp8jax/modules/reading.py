"""What a model makes of the results of its layers, and of what these read, from its program; knows nothing of Flax.

A layer whose result is what the model returns is an output head; one whose result goes into softmax, top_k or argmax
chooses: it is a head or a router. Their errors go straight into the loss, or send tokens elsewhere, and both are small.
"""

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core

_TAG, _INPUT, _PART = "fp8jax layer ", "fp8jax input of ", "fp8jax part "
PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot_general", "ragged_dot", "scaled_dot", "pallas_call")
_CHOICES = {"top_k": "top_k", "approx_top_k": "top_k", "argmax": "argmax", "argmin": "argmin", "sort": "sort"}
# What a result stays a result under: casts, layouts, parts of it, and functions of one value that soften or scale it.
_SAME = (
    *("convert_element_type", "reduce_precision", "copy", "name", "sharding_constraint", "layout_constraint"),
    *("reshard", "mesh_cast", "pvary", "pcast", "stop_gradient", "reshape", "transpose", "squeeze", "expand_dims"),
    *("broadcast_in_dim", "slice", "dynamic_slice", "gather", "rev", "pad", "concatenate", "split", "select_n"),
    *("neg", "tanh", "logistic", "clamp", "mul", "div", "add", "sub", "max", "min"),
)
_SCALINGS = ("mul", "div", "add", "sub")
LAYOUTS = ("convert_element_type", "transpose", "reshape", "squeeze", "expand_dims", "broadcast_in_dim", "copy", "name")

# With what says where it lies a value is the same one.
_PLACED = (*LAYOUTS, "sharding_constraint", "layout_constraint", "reshard", "mesh_cast", "pvary", "pcast")


@dataclasses.dataclass(frozen=True)
class ReadValue:
    """What is known of a value of a program.

    Attributes:
        results: the layers whose result it is, up to casts, layouts, a bias, scaling and the like.
        above: the layers that it is computed from.
        matrix: the parameter that it is, up to casts and layouts.
        data: it depends on more than parameters and constants.
        how: "largest", the largest of a result, or "less", a result less its largest, as in softmax.
        stage: how far it is on the way to a norm of the last axis, one of `_stage`.
        parts: the parts that return it, up to casts and layouts.
    """

    results: frozenset[str] = frozenset()
    above: frozenset[str] = frozenset()
    matrix: str | None = None
    data: bool = False
    how: str | None = None
    stage: str | None = None
    parts: frozenset[str] = frozenset()


@dataclasses.dataclass
class Reading:
    """What a program does with the results of layers and with matrices.

    Attributes:
        gates: layers whose result goes into a choice, with its name.
        products: layers whose result some later product is computed from.
        multiplied: parameters that products take, up to casts and layouts, with data; by their names.
        results: the dtype and shape of what each layer returns.
        normed: layers that read a norm which no part with a mark returns.
        norms: parts that return a norm.
        readers: the layers that read what a part returns, and the dtype they find it in; "" is a product of no layer.
    """

    gates: dict[str, str] = dataclasses.field(default_factory=dict)
    products: set[str] = dataclasses.field(default_factory=set)
    multiplied: set[str] = dataclasses.field(default_factory=set)
    results: dict[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    normed: set[str] = dataclasses.field(default_factory=set)
    norms: set[str] = dataclasses.field(default_factory=set)
    readers: dict[str, dict[str, str]] = dataclasses.field(default_factory=dict)


def tag(path: str, y: Array) -> Array:
    """Marks the result of a layer, for `read`."""
    marked: Array = checkpoint_name(y, _TAG + path)
    return marked


def tag_input(path: str, x: Array) -> Array:
    """Marks what a layer reads."""
    marked: Array = checkpoint_name(x, _INPUT + path)
    return marked


def tag_part(path: str, y: Any) -> Any:
    """Marks the result of a module that is no layer, if it is one array."""
    return checkpoint_name(y, _PART + path) if isinstance(y, Array) else y


def heads(closed: Any, parameters: Sequence[str | None], wanted: Iterable[str]) -> tuple[dict[str, str], Reading]:
    """The layers of a model whose results are outputs or choices, with the reason.

    A result that has the shape of a floating input is no output: who quantizes a part of a model, such as a perceptron
    whose last layer returns to the width of its input, wants that layer, too. And where only outputs would be left,
    none is: the module is a part, such as projections that are returned, or one layer.

    Args:
        closed: the program of a call, in which `tag` has marked results.
        parameters: for each input of it the name of the parameter that it is, None for data.
        wanted: the layers that would be quantized otherwise.
    """
    jaxpr, reading = closed.jaxpr, Reading()
    known = [ReadValue(matrix=name, data=name is None) for name in parameters]
    shapes = {v.aval.shape for v, name in zip(jaxpr.invars, parameters, strict=True) if name is None and _floats(v)}
    outputs = _run(jaxpr, [ReadValue() for _ in jaxpr.constvars], known, reading)
    reasons = {path: f"a router, gate or head: {how} reads its result" for path, how in reading.gates.items()}
    results = [value.results for value in outputs if value.how != "largest"]
    returned = frozenset[str]().union(*results) - reading.products - reasons.keys()
    returned = frozenset(path for path in returned if reading.results[path] not in shapes)
    if set(wanted) - reasons.keys() - returned:
        reasons |= dict.fromkeys(sorted(returned), "an output head: the model returns its result")
    return reasons, reading


def _floats(v: Any) -> bool:
    return bool(jax.numpy.issubdtype(v.aval.dtype, jax.numpy.floating))


def _run(jaxpr: Any, consts: Sequence[ReadValue], inputs: Sequence[ReadValue], reading: Reading) -> list[ReadValue]:
    """What is known of the outputs of a program."""
    known: dict[Any, ReadValue] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *inputs], strict=True))

    def look(atom: Any) -> ReadValue:
        return ReadValue() if isinstance(atom, core.Literal) else known[atom]

    for eqn in jaxpr.eqns:
        results = _apply(eqn, [look(v) for v in eqn.invars], reading)
        known |= dict(zip(eqn.outvars, results, strict=True))
    return [look(v) for v in jaxpr.outvars]


def _apply(eqn: Any, inputs: list[ReadValue], reading: Reading) -> list[ReadValue]:
    name, params = eqn.primitive.name, eqn.params
    if name == "scan":
        if "ft_in" in params:  # JAX 0.11
            consts, carry, _ = (len(part) for part in params["ft_in"].unpack())
        else:
            consts, carry = params["num_consts"], params["num_carry"]
        return _loop(params["jaxpr"], inputs, consts, carry, reading)
    if name == "while":
        first = params["cond_nconsts"]
        return _loop(params["body_jaxpr"], inputs[first:], params["body_nconsts"], len(eqn.outvars), reading)
    if name == "cond":
        each = [_inner(branch, inputs[1:], reading) for branch in params["branches"]]
        return [functools.reduce(_join, values) for values in zip(*each, strict=True)]
    inner = _program(params, len(inputs))
    if inner is not None and name != "pallas_call":
        results = _inner(inner, inputs, reading)
        # What has a backward pass of its own is written for it.
        return [dataclasses.replace(v, stage=None) for v in results] if name == "custom_vjp_call" else results
    above = frozenset[str]().union(*(v.above for v in inputs))
    data = any(v.data for v in inputs)
    if name == "name" and params["name"].startswith(_TAG):
        path = params["name"].removeprefix(_TAG)
        reading.results[path] = eqn.outvars[0].aval.shape
        return [ReadValue(frozenset([path]), above | {path}, data=True)]
    if name == "name" and params["name"].startswith(_INPUT):
        path = params["name"].removeprefix(_INPUT)
        reading.normed |= {path} if inputs[0].stage == "norm" else set()
        _read(eqn.invars[0], inputs[0], path, reading)
        return [dataclasses.replace(inputs[0], parts=frozenset())]
    if name == "name" and params["name"].startswith(_PART):
        path, stage = params["name"].removeprefix(_PART), inputs[0].stage
        reading.norms |= {path} if stage == "norm" else set()
        stage = None if stage == "norm" else stage
        return [dataclasses.replace(inputs[0], stage=stage, parts=inputs[0].parts | {path})]
    if name in PRODUCTS:
        for v, value in zip(eqn.invars, inputs, strict=True):
            _read(v, value, "", reading)
        reading.products |= above
        if data:
            reading.multiplied |= {v.matrix for v in inputs if v.matrix is not None}
    for path in inputs[0].results if inputs and inputs[0].how != "largest" else ():
        if name in _CHOICES or (name == "exp" and inputs[0].how == "less"):
            reading.gates.setdefault(path, _CHOICES.get(name, "softmax"))
    parts = inputs[0].parts if name in _PLACED else frozenset[str]()
    value = dataclasses.replace(_value(name, inputs), above=above, data=data, stage=_stage(eqn, inputs), parts=parts)
    if name == "optimization_barrier":
        return inputs
    return [value for _ in eqn.outvars]


def _read(v: Any, value: ReadValue, reader: str, reading: Reading) -> None:
    """Notes that a layer reads a value."""
    for part in value.parts:
        reading.readers.setdefault(part, {})[reader] = str(v.aval.dtype)


def _value(name: str, inputs: list[ReadValue]) -> ReadValue:
    """What an operation makes of a result or a matrix."""
    if name in LAYOUTS and inputs[0].matrix is not None:
        return inputs[0]
    if name == "reduce_max":
        return ReadValue(inputs[0].results, how="largest")
    if name == "sub" and inputs[1].how == "largest" and inputs[0].results == inputs[1].results:
        return ReadValue(inputs[0].results, how="less")
    if name not in _SAME:
        return ReadValue()
    # The condition of a choice between values and the places of a part may be data.
    operands = {"select_n": inputs[1:], "gather": inputs[:1], "dynamic_slice": inputs[:1]}.get(name, inputs)
    joined = functools.reduce(_join, operands)
    several = sum(bool(v.results) for v in operands) > 1
    clipped = name in ("max", "min") and joined.how != "largest"
    return ReadValue() if clipped or (several and name in _SCALINGS) else joined


def _stage(eqn: Any, inputs: list[ReadValue]) -> str | None:
    """How far a value is on the way from x to x * rsqrt(mean(x**2) + eps): "square", "sum" of squares along the last
    axis, "mean", its "root", the "inverse" of that, "norm".

    Scales and biases are parameters or constants. A mean may be less another one squared, as in a variance.
    """
    name, first, last = eqn.primitive.name, inputs[0] if inputs else ReadValue(), inputs[-1] if inputs else ReadValue()
    if name in LAYOUTS:
        return first.stage
    twice = len(inputs) == 2 and eqn.invars[0] is eqn.invars[1]
    if name == "square" or (name == "integer_pow" and eqn.params["y"] == 2) or (name == "mul" and twice):
        return "square" if first.data else None
    if name == "reduce_sum" and first.stage == "square":
        return "sum" if tuple(eqn.params["axes"]) == (eqn.invars[0].aval.ndim - 1,) else None
    if name in ("sqrt", "rsqrt", "pow") and first.stage == "mean":
        inverse = name == "rsqrt" or (name == "pow" and getattr(eqn.invars[1], "val", 0) == -0.5)
        return "inverse" if inverse else "root" if name == "sqrt" else None
    if name == "div" and last.stage == "root":
        return "norm" if first.data else "inverse"
    if name == "sub" and first.stage == "mean":
        return "mean"
    steps = {
        "sum": {"mul": "mean", "div": "mean"},
        "mean": dict.fromkeys(("add", "mul", "div", "max", "select_n"), "mean"),
        "inverse": {"mul": "inverse"},
        "norm": dict.fromkeys(("add", "sub", "mul", "div"), "norm"),
    }
    # The condition of a choice is no value.
    values = inputs[name == "select_n" :]
    staged, others = [v for v in values if v.stage], [v for v in values if not v.stage]
    if len(staged) != 1:
        return None
    stage, data = staged[0].stage or "", any(v.data for v in others)
    if stage == "inverse" and name == "mul" and data:
        return "norm"
    return None if data else steps.get(stage, {}).get(name)


def _join(a: ReadValue, b: ReadValue) -> ReadValue:
    """What is known of a value that may be either of two, or is computed from both."""
    other = [v for v in (a, b) if v.data and not v.results]
    results = frozenset[str]() if other else a.results | b.results
    hows = {v.how for v in (a, b) if v.results}
    how = hows.pop() if len(hows) == 1 and results else None
    return ReadValue(
        results,
        a.above | b.above,
        a.matrix if a.matrix == b.matrix else None,
        a.data or b.data,
        how,
        a.stage if a.stage == b.stage else None,
    )


def _inner(program: Any, inputs: list[ReadValue], reading: Reading) -> list[ReadValue]:
    jaxpr = getattr(program, "jaxpr", program)
    return _run(jaxpr, [ReadValue() for _ in jaxpr.constvars], inputs, reading)


def _loop(program: Any, inputs: list[ReadValue], consts: int, carries: int, reading: Reading) -> list[ReadValue]:
    fixed, carry, rest = inputs[:consts], inputs[consts : consts + carries], inputs[consts + carries :]
    while True:
        outputs = _inner(program, [*fixed, *carry, *rest], reading)
        joined = [_join(a, b) for a, b in zip(carry, outputs[:carries], strict=True)]
        if joined == carry:
            return outputs
        carry = joined


def _program(params: Mapping[str, Any], inputs: int) -> Any:
    """The program that an operation runs on its own operands, if it does."""
    for value in params.values():
        jaxpr = getattr(value, "jaxpr", value)
        if hasattr(jaxpr, "eqns") and len(jaxpr.invars) == inputs:
            return value
    return None
