"""Finds softmax cross-entropy of an output head by its values, in any spelling."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.lax import GatherScatterMode

from fp8jax.rewrite import biases
from fp8jax.rewrite.graph import Graph, Node, Value, canonical_value, is_order_preserving, search, strip_layout
from fp8jax.rewrite.primitives import CASTS, IDENTITY_PRIMITIVES, RESHAPES
from fp8jax.rewrite.probes import NoMatchError, evaluate

_NUM_ROWS = 8
_MAX_VALUES = 64  # more than any loss computes from logits
_TOLERANCE = 1e-6


class LossForm(NamedTuple):
    """The softmax cross-entropy of a matmul's result. With lse = logsumexp(z), a token with logits z has the loss

        scale (lse - (1 - label_smoothing) z[label] - label_smoothing mean(z) + z_loss lse^2).

    Attributes:
        labels: integers, one for each token.
        out_of_range: the loss of labels outside of the vocabulary: "nan", "zero", "clip" for that of the nearest label,
            or "unknown".
        scale, label_smoothing, z_loss: numbers.
        bias: the parameter that is added to the matmul's result; or None.
        span: the first index and the end, along each axis, of the tokens that have a loss; None for all tokens.
        total: the node that sums the losses of all tokens; None if the program reads logits or losses elsewhere.
        weights: the values that multiply the losses before the sum, each with the shape of the losses there.
        masks: conditions, each with that shape and the index of the case in which a loss counts.
    """

    labels: Value
    out_of_range: str
    scale: float
    label_smoothing: float
    z_loss: float
    bias: Value | None = None
    span: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    total: Node | None = None
    weights: tuple[tuple[Value, tuple[int, ...]], ...] = ()
    masks: tuple[tuple[Value, tuple[int, ...], int], ...] = ()

    @property
    def operands(self) -> list[Value]:
        """The values that the sum of all losses reads, without the matmul's."""
        return [
            *(v for v in (self.labels, self.bias) if v is not None),
            *(value for value, _ in self.weights),
            *(mask for mask, *_ in self.masks),
        ]


def find(graph: Graph, node: Node, side: int, counts: Mapping[Value, int]) -> LossForm | None:
    """The loss of a matmul of data and a matrix, whose outputs are the vocabulary; None if there is none.

    Args:
        side: which operand the matrix is. If it is the left, its outputs are moved to the last axis after the matmul.
        counts: as of `count_readers`.
    """
    readers = dict[Value, list[Node]]()
    for each in graph.walk():
        if any(counts.get(result) for result in each.results):
            for operand in dict.fromkeys(each.operands):
                readers.setdefault(operand, []).append(each)

    def sole_reader(value: Value) -> Node | None:
        found = readers.get(value, ())
        return found[0] if len(found) == 1 and value not in graph.outputs else None

    if side == 0:
        rank, transpose = node.results[0].aval.ndim, sole_reader(node.results[0])
        if transpose is None or transpose.kind != "transpose":
            return None
        if tuple(transpose.eqn.params["permutation"]) != (*range(1, rank), 0):
            return None
        node = transpose
    bias, span = biases.find(node, 1, sole_reader(node.results[0])), None
    logits = (node if bias is None else bias.sum).results[0]
    while (reader := sole_reader(logits)) is not None and (reader.kind in CASTS or _is_slice_of_tokens(reader)):
        if reader.kind == "slice":
            if span is not None:
                break
            span = tuple(reader.eqn.params["start_indices"][:-1]), tuple(reader.eqn.params["limit_indices"][:-1])
        logits = reader.results[0]
    probe, found = _Probe(logits), None
    for each in graph.walk():
        if probe.dependent.isdisjoint(each.operands):
            continue
        probe.dependent.update(each.results)
        if len(probe.dependent) > _MAX_VALUES:
            break
        # The sum over all tokens may be that over the vocabulary, too.
        is_total = each.kind == "reduce_sum" and not each.results[0].shape
        losses = each.operands[0] if is_total else each.results[0]
        form = probe.match(losses) if is_total or losses.aval.size == probe.num_tokens else None
        if form is not None:
            form = form._replace(bias=None if bias is None else bias.value, span=span)
            found = _with_total(form, losses, probe.dependent, readers, graph.outputs)
            if found.total is not None:
                break
    return found


class _Probe:
    """Values computed from random logits of a few tokens."""

    def __init__(self, logits: Value) -> None:
        self.num_tokens, self.dependent = math.prod(logits.shape[:-1]), {logits}
        self._random, self._vocabulary = np.random.default_rng(0), logits.shape[-1]
        self._z = 2 * self._random.normal(size=(_NUM_ROWS, self._vocabulary))
        self._label_ids = self._random.integers(0, self._vocabulary, _NUM_ROWS)
        self._arrays: dict[Value, Any] = {logits: self._z}
        self._labels: Value | None = None
        self._out_of_range = "nan"
        self._subtracted: dict[Value, Any] = {}

    def match(self, value: Value) -> LossForm | None:
        """The loss of each token that a value is; None if it is another function."""
        try:
            array = self._evaluate(value)
        except NoMatchError:
            return None
        if self._labels is None or np.shape(array) != (_NUM_ROWS, value.aval.size // self.num_tokens):
            return None
        losses = np.sum(array, -1)
        z, lse = self._z, np.log(np.sum(np.exp(self._z), -1))
        label_logit = z[np.arange(_NUM_ROWS), self._label_ids]
        terms = np.stack([lse - label_logit, label_logit - z.mean(-1), lse**2], -1)
        valid, out_of_range = slice(None), self._out_of_range
        if out_of_range == "zero":  # the last label is out of range
            valid, out_of_range = slice(-1), "zero" if abs(losses[-1]) < _TOLERANCE else "unknown"
        factors, *_ = np.linalg.lstsq(terms[valid], losses[valid])
        scale, smoothing, z_loss = np.where(np.abs(factors) > _TOLERANCE * abs(factors[0]), factors, 0).tolist()
        error = np.max(np.abs((terms @ factors - losses)[valid]))
        if not scale or error > _TOLERANCE * abs(scale) or not 0 <= smoothing / scale <= 1 or z_loss / scale < 0:
            return None
        return LossForm(self._labels, out_of_range, scale, smoothing / scale, z_loss / scale)

    def _evaluate(self, value: Value) -> Any:
        return evaluate(value, self._arrays, self._leaf)

    def _leaf(self, value: Value) -> Any:
        node = value.node
        if node is None or node.operation is not None:
            raise NoMatchError
        operands = node.operands
        if node.kind == "eq":
            return self._one_hot(node)
        if value not in self.dependent:
            raise NoMatchError
        is_of_token = value.aval.size == self.num_tokens
        is_max = node.kind == "reduce_max" and tuple(node.eqn.params["axes"]) == (operands[0].aval.ndim - 1,)
        if is_of_token and (is_max or node.kind == "stop_gradient"):
            # The loss does not depend on what is subtracted before exponentials, so its gradient does not either.
            key = canonical_value(operands[0])
            return self._subtracted.setdefault(key, self._random.normal(size=(_NUM_ROWS, 1)))
        if node.kind in IDENTITY_PRIMITIVES and len(operands) == 1:
            return self._evaluate(operands[0])
        if node.kind in ("log", "abs"):
            return getattr(np, node.kind)(self._evaluate(operands[0]))
        if node.kind == "max" and _constant(operands[0]) == -np.inf:
            return self._evaluate(operands[1])
        if node.kind == "select_n" and operands[0].kind == "is_finite":
            return self._evaluate(operands[2])
        if node.kind == "select_n":
            return np.where(self._evaluate(operands[0]) == 1, *map(self._evaluate, operands[:0:-1]))
        if node.kind == "gather":
            return self._label_element(node)
        if node.kind in RESHAPES and is_order_preserving(node):
            array = self._evaluate(operands[0])
            if np.shape(array) == (_NUM_ROWS, 1) or value.shape[-1:] == operands[0].shape[-1:]:
                return array
        raise NoMatchError

    def _label_element(self, node: Node) -> Any:
        """The elements of labels: `jnp.take_along_axis(x, labels, -1)`, `x[labels]` in a vmap, `x[arange, labels]`."""
        (x, indices), params, last = node.operands, node.eqn.params, node.operands[0].aval.ndim - 1
        array, numbers = self._evaluate(x), params["dimension_numbers"]
        if tuple(params["slice_sizes"]) == x.shape:  # the whole array
            return array
        columns = [] if indices.kind != "concatenate" or indices.node is None else indices.node.operands
        if len(columns) == 2 and numbers.start_index_map == (0, 1) and last == 1:
            is_label, indices = _is_range(columns[0], self.num_tokens), columns[1]
        else:
            axes = numbers.operand_batching_dims
            batched_size = math.prod(x.shape[axis] for axis in axes)  # axes of length 1 are sliced
            is_in_order = tuple(axes) == tuple(sorted(axes)) and last not in axes
            is_in_order = is_in_order and tuple(numbers.start_indices_batching_dims) == tuple(range(len(axes)))
            is_label = is_in_order and batched_size == self.num_tokens and numbers.start_index_map == (last,)
        is_label = is_label and math.prod(params["slice_sizes"]) == 1
        if params["mode"] == GatherScatterMode.FILL_OR_DROP:
            is_label = is_label and (params["fill_value"] is None or np.isnan(params["fill_value"]))
        else:
            self._out_of_range = "clip"
        if not is_label:
            raise NoMatchError
        self._set_labels(indices)
        return array[np.arange(_NUM_ROWS), self._label_ids][:, None]

    def _one_hot(self, node: Node) -> Any:
        """A mask of the labels that equal the entries of the vocabulary; all False in the last row."""
        size = self._vocabulary
        entries = [i for i, value in enumerate(node.operands) if value.shape[-1:] == (size,) and _is_range(value, size)]
        if len(entries) != 1:
            raise NoMatchError
        labels, lead = node.operands[1 - entries[0]], node.results[0].shape[:-1]
        if labels.kind == "broadcast_in_dim" and labels.node is not None:
            (source,), axes = labels.node.operands, labels.node.eqn.params["broadcast_dimensions"]
            labels = source if tuple(axes) == tuple(range(source.aval.ndim)) else labels
        if labels.shape not in (lead, (*lead, 1)):
            raise NoMatchError
        self._set_labels(labels)
        self._out_of_range = "zero"
        is_label = np.arange(self._vocabulary) == self._label_ids[:, None]
        return is_label & (np.arange(_NUM_ROWS) < _NUM_ROWS - 1)[:, None]

    def _set_labels(self, labels: Value) -> None:
        labels = canonical_value(labels)
        is_new = self._labels is None
        if (
            not (is_new or labels is self._labels)
            or labels in self.dependent
            or labels.aval.size != self.num_tokens
            or not jnp.issubdtype(labels.dtype, jnp.integer)
        ):
            raise NoMatchError
        self._labels = labels


def _constant(value: Value) -> Any:
    """The number that all elements of a value equal; None if unknown."""
    return strip_layout(value, IDENTITY_PRIMITIVES).constant


def _is_slice_of_tokens(node: Node) -> bool:
    """Whether a node slices an array, but not along its last axis."""
    if node.kind != "slice":
        return False
    params, size = node.eqn.params, node.operands[0].shape[-1]
    has_strides = params["strides"] is not None and any(stride != 1 for stride in params["strides"])
    return not has_strides and (params["start_indices"][-1], params["limit_indices"][-1]) == (0, size)


def _is_range(value: Value, size: int) -> bool:
    """Whether a value is `arange(size)` along its last axis, in all rows."""
    while value.kind in (*CASTS, *RESHAPES) and value.node is not None:
        (source,) = value.node.operands
        is_last_axis = value.node.eqn.params.get("broadcast_dimensions", ())[-1:] == (value.aval.ndim - 1,)
        if source.aval.size != value.aval.size and not is_last_axis:
            return False
        value = source
    if value.kind == "select_n" and value.node is not None and value.node.operands[0].kind == "lt":
        return _is_range(value.node.operands[1], size)  # negative indices count from the end
    if value.shape[-1:] != (size,) or value.aval.size != size:
        return False
    if value.node is not None:
        return value.kind == "iota" and value.node.eqn.params["dimension"] == value.aval.ndim - 1
    return value.array is not None and bool(np.array_equal(np.ravel(value.array), np.arange(size)))


def _with_total(
    form: LossForm,
    losses: Value,
    dependent: set[Value],
    readers: Mapping[Value, Sequence[Node]],
    outputs: Sequence[Value],
) -> LossForm:
    """The form with the sum over all tokens and the weights in it, if nothing else reads what the sum needs."""
    inner_values = search([losses], lambda v: [] if v.node is None else [o for o in v.node.operands if o in dependent])
    if form.out_of_range == "unknown":
        return form
    inner_set = {*inner_values}
    for value in inner_values[1:]:
        if value in outputs or any(reader.results[0] not in inner_set for reader in readers.get(value, ())):
            return form
    scale, weights, masks, value = form.scale, list[Any](), list[Any](), losses
    while len(readers.get(value, ())) == 1 and value not in outputs:
        (node,) = readers[value]
        others = [operand for operand in node.operands if operand is not value]
        if node.kind == "reduce_sum" and not node.results[0].shape:
            return form._replace(scale=scale, total=node, weights=tuple(weights), masks=tuple(masks))
        if node.results[0].aval.size != value.aval.size:
            break  # a factor repeats the losses
        if node.kind == "neg":
            scale = -scale
        elif node.kind == "mul" and len(others) == 1 and _constant(others[0]) is not None:
            scale *= _constant(others[0])
        elif node.kind == "div" and _constant(node.operands[1]):
            scale /= _constant(node.operands[1])
        elif node.kind == "mul" and len(others) == 1 and not others[0].depends_on_params:
            weights.append((others[0], value.shape))
        elif (
            node.kind == "select_n"
            and len(others) == 2
            and _constant(others[1]) == 0
            and others[1].shape == value.shape
        ):
            masks.append((others[0], value.shape, node.operands.index(value) - 1))
        elif node.kind not in (*CASTS, *RESHAPES, *IDENTITY_PRIMITIVES):
            break
        value = node.results[0]
    return form
