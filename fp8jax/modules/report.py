"""`explain`: what the rules make of a model, layer by layer, and what its program really multiplies."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx
from flax.traverse_util import flatten_dict

from fp8jax.core.recipe import Linear, Recipe, folding
from fp8jax.core.spec import QuantSpec
from fp8jax.modules import contexts, training
from fp8jax.modules import linen as linen_modules
from fp8jax.modules import nnx as nnx_modules
from fp8jax.modules.contexts import ContextEntry, Told
from fp8jax.modules.matrices import BRIDGED, Unknown, is_bridge, is_matrix, not_a_model
from fp8jax.modules.program import Program, abstract, inspect, mean_square, split_abstract
from fp8jax.modules.reading import Reading
from fp8jax.rewrite.plan import Entry
from fp8jax.rewrite.rules import Ordered, Rule, Rules, choose, ordered

_EMBED = "the lookup of an embedding, and its use as a head (attend), are left alone"
_TIED = "an embedding that a product takes, too: a tied output head; both are left alone"
_ATTENTION = "the products of attention itself, QK and AV, are left alone; its projections are layers of their own"
_CONVOLUTION = "convolutions are left alone"
_REASONS: tuple[tuple[tuple[type, ...], str], ...] = (
    ((nnx.Embed, nn.Embed), _EMBED),
    ((nnx.MultiHeadAttention, nn.MultiHeadDotProductAttention), _ATTENTION),
    ((nnx.Conv, nnx.ConvTranspose, nn.Conv, nn.ConvTranspose, nn.ConvLocal), _CONVOLUTION),
)
_UNKNOWN = "no layer of Flax: its own products are left as they are written, unless its class is in layers=[{}]"


@dataclasses.dataclass(frozen=True)
class Layer:
    """What becomes of a layer.

    Attributes:
        path: its place in the model and, joined by "/", in the tree of its parameters.
        kind: name of its class.
        kernel: shape of its kernel or embedding, stacked layers included; None if it has none.
        linear: what its products compute in; None where it is left alone.
        reason: the rule that matched, or why it is left alone.
        dtype: what it computes in where nothing is quantized; None if its inputs say.
    """

    path: str
    kind: str
    kernel: tuple[int, ...] | None
    linear: Linear | None
    reason: str
    dtype: str | None = None

    @property
    def products(self) -> dict[str, str]:
        """What the forward, dgrad and wgrad product multiply; empty where the layer is left alone."""
        if self.linear is None:
            return {}
        plain = self.dtype or "as written"
        return {
            name: f"{left or plain} x {right or plain}" if left or right else plain
            for name, (left, right) in self.linear.taken().items()
        }

    @property
    def saved(self) -> tuple[str, float | None]:
        """What is kept of the input for the backward pass, and its bytes an element, None where unknown."""
        spec = self.linear.kept() if self.linear else None
        if spec is not None:
            return str(spec), spec.bytes_per_element
        return self.dtype or "as written", float(jnp.dtype(self.dtype).itemsize) if self.dtype else None

    @property
    def spans_tokens(self) -> str | None:
        """The spec of the forward input if a scale of it is shared by tokens, which lets later ones change earlier."""
        spec = self.linear.spec("x") if self.linear else None
        return str(spec) if spec is not None and _spans_tokens(spec) else None


@dataclasses.dataclass(frozen=True)
class Report:
    """What `explain` found; `str(report)` is a table.

    Attributes:
        layers: the linear layers, embeddings, convolutions and attentions of the model, and whatever else has matrices.
        program: the products of a forward and backward pass; None without sample inputs.
        parts: norms, activations and attentions, where the rules say what these keep.
        notes: what should be looked at: output heads and routers that are quantized, and matrices that are not known.
    """

    layers: tuple[Layer, ...]
    program: Program | None = None
    parts: tuple[ContextEntry, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def quantized(self) -> tuple[Layer, ...]:
        return tuple(layer for layer in self.layers if layer.linear is not None)

    @property
    def skipped(self) -> tuple[Layer, ...]:
        return tuple(layer for layer in self.layers if layer.linear is None)

    @property
    def leaks(self) -> tuple[Layer, ...]:
        """Layers that let the values of later tokens into the scales of earlier ones."""
        return tuple(layer for layer in self.layers if layer.spans_tokens)

    def __str__(self) -> str:
        head = ("layer", "kind", "kernel", "forward", "dgrad", "wgrad", "saved input", "bytes/element", "chosen by")
        rows: list[tuple[str, ...]] = [head]
        for layer in self.quantized:
            saved, size = layer.saved
            size_text = "?" if size is None else f"{size:.4g}"
            rows.append((*_name(layer), *layer.products.values(), saved, size_text, layer.reason))
        skipped: list[tuple[str, ...]] = [("left alone", "kind", "kernel", "why")]
        skipped += [(*_name(layer), layer.reason) for layer in self.skipped]
        parts = [_table(rows)]
        if self.leaks:
            specs = ", ".join(sorted({str(layer.spans_tokens) for layer in self.leaks}))
            parts.append(
                f"scales that span tokens: the inputs of {len(self.leaks)} layers ({specs}). Later tokens change the"
                " scales of earlier ones: evaluate token by token, or take a granularity of tokens or groups."
            )
        folds = dict.fromkeys(spec for layer in self.quantized if layer.linear for spec in layer.linear.folds)
        parts += [folding(folds)] if folds else []
        if any(part.context is not None and part.context.lean for part in self.parts):
            parts.append(
                "saved inputs: quantized layers that read the result of a lean norm or activation (below) keep none."
            )
        if self.parts:
            lines = [(p.path or "-", p.kind, p.computes or "-", p.keeps, p.reason) for p in self.parts]
            parts.append(_table([("norm, activation or attention", "kind", "computes", "keeps", "chosen by"), *lines]))
        if len(skipped) > 1:
            parts.append(_table(skipped))
        parts += [f"note: {note}" for note in self.notes]
        return "\n\n".join([*parts, *([str(self.program)] if self.program else [])])


def explain(model: Any, rules: Rules, *sample: Any, layers: Iterable[type] = (), **keywords: Any) -> Report:
    """What the rules make of a model: what each layer computes in and saves, and what is left alone and why.

    With sample inputs also the products really in the program of a loss (the mean square of the outputs) and its
    gradient, as JAX traced it and as XLA compiled it for the default device. No training state is changed.

    Args:
        model: an NNX or Linen model, as `fp8jax.nnx.quantize` and `fp8jax.linen.quantize` take it.
        rules: as they take them.
        sample: arguments of a call of the model, arrays or `jax.ShapeDtypeStruct`. A Linen model needs them, because
            its layers are known only while it runs; so are activations between the layers of an NNX model, and what
            reads their results.
        layers: classes of your own that are layers, too, as `quantize` takes them.
        keywords: keyword arguments of the call, such as `train=False`.

    Returns:
        A `Report`; print it.

    Raises:
        TypeError: the model is of neither kind, or a Linen model comes without sample inputs.
        ValueError: as `quantize`.
    """
    if isinstance(model, nnx.Module):
        if isinstance(type(model), nnx_modules.QuantizedMeta) and not isinstance(rules, _RULES):
            return _explain_quantized(model, (rules, *sample), keywords)
        return _explain_nnx(model, ordered(rules, layers), sample, keywords)
    if isinstance(model, nn.Module):
        return _explain_linen(model, ordered(rules, layers), sample, keywords)
    raise TypeError(not_a_model("explain takes an NNX or Linen module", model))


_RULES = (str, Recipe, Linear, Rule, list, tuple, Ordered)


def _explain_nnx(model: nnx.Module, rules: Ordered, sample: Any, keywords: Any) -> Report:
    quantized = nnx_modules.quantize(model, rules)
    modules = nnx_modules.modules(quantized)
    if not sample and not keywords:
        layers, parts = _chosen_nnx(modules, rules)
        hint = "activations and attention between layers are known in a call: give explain sample inputs"
        return Report(layers, None, parts, (hint,) if rules.contexts else ())
    return _explain_quantized(quantized, sample, keywords)


def _explain_quantized(quantized: nnx.Module, sample: Any, keywords: Any) -> Report:
    settings = nnx_modules.settings_of(quantized)
    assert settings is not None
    modules, rules = nnx_modules.modules(quantized), settings.rules
    with training.inspected():
        entries = _entries_nnx(quantized, sample, keywords)
        program = _nnx_program(quantized, sample, keywords)
    layers = tuple(_layer_nnx(modules, entry) for entry in entries if entry.product)
    known = {layer.path for layer in layers}
    layers += tuple(layer for layer in _others_nnx(modules, rules) if layer.path not in known)
    parts = tuple(_part_nnx(modules, entry) for entry in entries if not entry.product or entry.kept)
    return Report(tuple({(x.path, x.kernel): x for x in reversed(layers)}.values())[::-1], program, parts)


def _entries_nnx(model: nnx.Module, sample: Any, keywords: Any) -> tuple[Entry, ...]:
    graph, state = nnx.split(model)
    arrays, rebuild = split_abstract((sample, keywords))
    found: list[Entry] = []

    def call(state: Any, arrays: list[Any]) -> None:
        args, kwargs = rebuild(arrays)
        found.extend(nnx_modules.explanation(nnx.merge(graph, state, copy=True), args, kwargs).entries)

    jax.eval_shape(call, jax.tree.map(abstract, state), arrays)
    return tuple(found)


def _holder(modules: dict[str, Any], path: str) -> Any:
    """The module that a layer is, or that holds the parameter at a path."""
    while path not in modules and path:
        path = path.rpartition("/")[0]
    return modules.get(path)


def _layer_nnx(modules: dict[str, Any], entry: Entry) -> Layer:
    module = _holder(modules, entry.path)
    linear = entry.choice.linear if entry.taken and entry.choice is not None else None
    reason = entry.reason if entry.choice is not None else f"{entry.reason}, at {entry.line}"
    reason = next((text for kinds, text in _REASONS if isinstance(module, kinds)), reason)
    return Layer(entry.path, type(module).__name__, entry.shape, linear, reason, _dtype(module))


def _dtype(module: Any) -> str | None:
    dtype = getattr(module, "dtype", None) or getattr(module, "param_dtype", None)
    return str(jnp.dtype(dtype)) if dtype else None


def _chosen_nnx(modules: dict[str, Any], rules: Ordered) -> tuple[tuple[Layer, ...], tuple[ContextEntry, ...]]:
    """What the rules say of the paths of a model; what its program adds is not known."""
    layers, parts = list[Layer](), list[ContextEntry]()
    matrices, norms = nnx_modules.candidates(modules, rules)
    for path, (holder, name) in matrices.items():
        shown, *also = nnx_modules.names(matrices, path)
        choice = rules.choice(shown, also=also)
        shape = tuple(nnx_modules.params(modules[holder])[name].shape)
        layers.append(
            Layer(shown, type(modules[holder]).__name__, shape, choice.linear, choice.reason, _dtype(modules[holder]))
        )
    for path in norms if rules.contexts else ():
        choice = rules.choice(path)
        context = choice.context if choice.context.saved else None
        parts.append(ContextEntry(path, type(modules[path]).__name__, "norm", context, choice.reason))
    known = {layer.path for layer in layers}
    return (*layers, *(x for x in _others_nnx(modules, rules) if x.path not in known)), tuple(parts)


def _others_nnx(modules: dict[str, Any], rules: Ordered) -> Iterator[Layer]:
    for path, module in modules.items():
        matrix = _nnx_kernel(path, module)
        shape = None if matrix is None else tuple(matrix.shape)
        reason = next((text for kinds, text in _REASONS if isinstance(module, kinds)), None)
        if reason is None and isinstance(module, nnx_modules.LAYERS):
            reason = f"{rules.choice(path).reason}; no product of it is in this call"
        if reason is not None:
            yield Layer(path, type(module).__name__, shape, None, reason)


def _part_nnx(modules: dict[str, Any], entry: Entry) -> ContextEntry:
    module, choice = modules.get(entry.path), entry.choice
    assert choice is not None
    if entry.kept:
        holder, _, name = entry.path.rpartition("/")
        kind = type(_holder(modules, holder)).__name__
        return ContextEntry(holder, kind, None, choice.context, choice.reason, (name,))
    norm = entry.kind in ("RMSNorm", "LayerNorm")
    kind = entry.kind if module is None or not norm else type(module).__name__
    context = choice.context if choice.context.saved else None
    computes = "norm" if norm else entry.kind
    return ContextEntry(entry.path, kind, computes, context, choice.reason, (), entry.readers, entry.alone)


def _explain_linen(model: nn.Module, rules: Ordered, sample: Any, keywords: Any) -> Report:
    if not sample and not keywords:
        raise TypeError("a Linen model has layers only while it runs: give explain sample inputs too")
    copy, known = linen_modules.quantize(model, rules), (*linen_modules.LAYERS, *rules.layers)
    arrays, rebuild = split_abstract((sample, keywords))

    def init(module: nn.Module, arrays: list[Any]) -> Any:
        args, kwargs = rebuild(arrays)
        # A model may have an `init` and an `apply` of its own, which take something else.
        return nn.Module.init(module, jax.random.key(0), *args, **kwargs)

    submodules, told, variables = linen_modules.trace(functools.partial(init, model), known, arrays)
    params = flatten_dict(variables.get("params", {}))
    with linen_modules.listening() as roots:
        # The copy's own variables: delayed scaling adds some.
        variables = nn.meta.unbox(jax.eval_shape(functools.partial(init, copy), arrays))
        program = _linen_program(copy, variables, sample, keywords)
    # Of the last call: it has parameters.
    root = roots[-1]
    layers = _layers(submodules, rules, functools.partial(_linen_kernel, params), root.heads, root.reading)
    parts = contexts.plan(submodules, rules, Told(told, {}), heads=root.heads, reading=root.reading)
    return Report(layers, program, parts, _notes(layers, rules, {}, root.unknown))


def _notes(layers: tuple[Layer, ...], rules: Ordered, read: dict[str, str], unknown: Unknown) -> tuple[str, ...]:
    """What should be looked at: heads that are quantized, and modules that are not known."""
    asked = [layer.path for layer in layers if layer.linear is not None and layer.reason == "the recipe"]
    notes = [
        f"{path} is {read[path]}; it is quantized, because nnx.quantize does not run the model: give "
        f"[fp8jax.Rule({path!r}, None), recipe] to leave it alone"
        for path in asked
        if path in read
    ]
    left = unknown.share(rules, sum(math.prod(x.kernel) for x in layers if x.linear is not None and x.kernel))
    return tuple([*notes, left] if left else notes)


def _layers(
    submodules: dict[str, Any],
    rules: Ordered,
    kernel: Callable[[str, Any], Any],
    heads: dict[str, str],
    reading: Reading,
) -> tuple[Layer, ...]:
    known = (*nnx_modules.LAYERS, *linen_modules.LAYERS, *rules.layers)
    paths = [path for path, module in submodules.items() if isinstance(module, known)]
    chosen = choose([*paths, *contexts.norm_paths(submodules, rules)], rules, heads, submodules)
    layers = []
    for path, module in submodules.items():
        matrix = kernel(path, module)
        shape = None if matrix is None else tuple(matrix.shape)
        described = (path, type(module).__name__, shape)
        if isinstance(module, known):
            choice = chosen[path]
            layers.append(Layer(*described, choice.linear, choice.reason, _dtype(module)))
            continue
        reason = next((text for kinds, text in _REASONS if isinstance(module, kinds)), None)
        if reason == _EMBED and f"{path}/embedding" in reading.multiplied:
            reason = _TIED
        if is_bridge(module):
            reason = f"a bridge, whose layers are not known. {BRIDGED}"
        if reason is None and shape is not None and not type(module).__module__.startswith("flax."):
            reason = _UNKNOWN.format(type(module).__name__)
        if reason is not None:
            layers.append(Layer(*described, None, reason))
    return tuple(layers)


def _nnx_kernel(path: str, module: Any) -> Any:
    return _matrix({name: v for name, v in vars(module).items() if isinstance(v, nnx.Param)})


def _linen_kernel(params: dict[tuple[str, ...], Any], path: str, module: Any) -> Any:
    return _matrix({names[-1]: leaf for names, leaf in params.items() if "/".join(names[:-1]) == path})


def _matrix(params: dict[str, Any]) -> Any:
    """The kernel or embedding among the parameters of a module, or else its largest matrix; None if it has none."""
    named = [params[name] for name in ("kernel", "embedding") if name in params]
    own = sorted((leaf for name, leaf in params.items() if is_matrix(name, leaf.shape)), key=lambda leaf: -leaf.size)
    return next((leaf for leaf in [*named, *own] if leaf.ndim >= 2), None)


def _nnx_program(model: nnx.Module, sample: Any, keywords: Any) -> Program:
    graph, params, rest = nnx.split(model, nnx.Param, ...)  # type: ignore[misc]
    arrays, rebuild = split_abstract((sample, keywords))

    def loss(params: Any, rest: Any, arrays: list[Any]) -> jax.Array:
        args, kwargs = rebuild(arrays)
        return mean_square(nnx.merge(graph, params, rest, copy=True)(*args, **kwargs))  # type: ignore[operator]

    return inspect(jax.grad(loss), *jax.tree.map(abstract, (params, rest, arrays)))


def _linen_program(model: nn.Module, variables: Any, sample: Any, keywords: Any) -> Program:
    state = {name: values for name, values in variables.items() if name != "params"}
    arrays, rebuild = split_abstract((sample, keywords))

    def loss(params: Any, state: Any, arrays: list[Any]) -> jax.Array:
        args, kwargs = rebuild(arrays)
        rngs = {"params": jax.random.key(0)}
        variables = {"params": params, **state}
        y, _ = nn.Module.apply(model, variables, *args, rngs=rngs, mutable=list(state), **kwargs)
        return mean_square(y)

    return inspect(jax.grad(loss), variables["params"], state, arrays)


def _spans_tokens(spec: QuantSpec) -> bool:
    """Whether one scale of a matrix (tokens, inputs) holds for several rows."""
    return spec.level1 != "none" and spec.block_shape((2, 2))[0] > 1


def _name(layer: Layer) -> tuple[str, str, str]:
    return layer.path or "-", layer.kind, str(layer.kernel or "-").replace(" ", "")


def _table(rows: list[tuple[str, ...]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join(lines)
