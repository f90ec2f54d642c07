"""The API reference: a page for each public name, made of its signature, its docstring and its example."""

import ast
import collections
import dataclasses
import inspect
import pathlib
import re
import textwrap
from collections.abc import Iterator
from typing import Any

import fp8jax
from fp8jax.optim.compressed_adamw import FusedTransformation
from fp8jax.optim.fused_backward import FusedBackwardBlock
from fp8jax.rewrite.explanation import Explanation
from fp8jax.rewrite.transform import Transformed

from . import names

ROOT = pathlib.Path(__file__).parents[2]
# What these return has methods that users call.
RETURNED = {
    "fp8jax.transform": Transformed,
    "fp8jax.compressed_adamw": FusedTransformation,
    "fp8jax.explain": Explanation,
    "fp8jax.fused_backward": FusedBackwardBlock,
}
# What the first page of the reference lists: the names that most users need, then all others by task.
FIRST = """
    nnx.quantize nnx.Optimizer nnx.value_and_grad linen.quantize transform optimizer compressed_adamw compress_state
    Rule explain"""
TASKS = {
    "Quantize a model": """
        nnx.quantize nnx.unquantize linen.quantize linen.unquantize linen.make_dot_general_cls transform
        filter_transform Rule GroupedProduct explain UnquantizedWarning MissingKernelsWarning""",
    "Find the cause of a bad loss": "telemetry nnx.telemetry find_faults Fault suggest nnx.suggest Suggestion",
    "Train a Flax model": """
        nnx.Optimizer nnx.value_and_grad nnx.grad linen.TrainState nnx.quantize_weights
        nnx.QuantizedWeightVariable""",
    "Optimizers with 8-bit states": """
        compressed_adamw scale_by_compressed_adam compress_state fp8lm_adamw optimizer with_clipping
        clip_by_global_norm skip_bad_steps get_bad_steps convert_state state_bytes""",
    "Master weights and the optimizer in the backward pass": """
        master_weights split_master_weights params_from_master fused_backward FusedBlockState value_and_step
        compute_grad_norm grad_norm_from_states""",
    "Recipes": """
        Recipe recipes.Recipe recipes.Linear recipes.Context recipes.Optimizer recipes.Weights recipes.Comm
        recipes.HEAD recipes.get recipes.NAMES recipes.for_device recipes.for_shapes recipes.device
        recipes.Device recipes.DEVICES""",
    "Presets": " ".join(f"recipes.{name}" for name in fp8jax.recipes.NAMES),
    "Scaling states": """
        nnx.end_step nnx.advance_scaling nnx.ScalingVariable nnx.GradientStatistic
        nnx.update_weight_amax_bounds nnx.reset_weight_amax_bounds linen.end_step linen.advance_scaling
        linen.update_weight_amax_bounds linen.reset_weight_amax_bounds track_weight_amax with_weight_bounds
        max_adam_step get_weight_amax_bounds reset_weight_amax_bounds init_scaling update_scaling weight_scale""",
    "Layers and losses": """
        linear scaled_linear dot_general einsum ragged_dot scaled_ragged_dot rms_norm layer_norm glu activation
        norm_linear glu_linear attention_output linear_cross_entropy quantize_weight QuantizedWeight""",
    "Rematerialization": "save_quantized checkpoint_policies.with_products CHECKPOINT_NAMES",
    "LoRA and frozen weights": """
        freeze FrozenWeight nnx.lora nnx.adapters nnx.merge_lora nnx.FrozenParam lora.init lora.linear
        lora.adapt lora.freeze lora.merge lora.save lora.load lora.Adapter lora.AdaptedWeight
        lora.init_adapter lora.merge_adapter""",
    "Several devices": """
        dist.all_reduce_gradients dist.reduce_scatter_gradients dist.init_factors dist.Factors
        dist.gather_weights dist.gather_quantized dist.fsdp_gather_weight dist.regather_policy
        dist.gather_linear dist.gather_sequence dist.scatter_sequence dist.sequence_collectives
        dist.TokenExchange dist.TokenGather dist.expert_collectives dist.partition dist.Partition dist.slices dist.plan
        dist.Plan""",
    "Quantized tensors and formats": """
        quantize QuantSpec QTensor formats.get formats.ALL formats.Format formats.E4M3 formats.E5M2 formats.E2M1
        formats.INT8 formats.INT10 formats.E8M0 formats.DE8 formats.UDE8 formats.FP16 formats.BF16
        formats.FP32""",
}
_SECTIONS = {"Args": "param", "Attributes": "attribute", "Returns": "returns", "Raises": "raises", "Yields": "yields"}
_PLAIN = {"Warns": "Warns", "Examples": "Examples", "Example": "Examples", "References": "References"}


def signature(value: Any) -> str:
    """The parameters of a function or class as its source writes them."""
    value = inspect.unwrap(value)
    try:
        node = ast.parse(textwrap.dedent(inspect.getsource(value))).body[0]
    except (OSError, TypeError, SyntaxError):
        return "()"
    if isinstance(node, ast.ClassDef):
        fields = [part for part in node.body if isinstance(part, ast.AnnAssign)]
        made = [part for part in node.body if isinstance(part, ast.FunctionDef) and part.name == "__init__"]
        if made:
            return _arguments(made[0], drop=1)
        if dataclasses.is_dataclass(value) or issubclass(value, tuple):
            return f"({', '.join(ast.unparse(field) for field in fields)})"
        return "()"
    if not isinstance(node, ast.FunctionDef):
        return "()"
    return _arguments(node)


def _arguments(node: ast.FunctionDef, drop: int = 0) -> str:
    node.args.args = node.args.args[drop:]
    # How fp8jax's own layers tell functions where values come from; of no use to a caller.
    for i, argument in reversed(list(enumerate(node.args.kwonlyargs))):
        if argument.arg == "input_facts":
            del node.args.kwonlyargs[i], node.args.kw_defaults[i]
    if not node.args.kwonlyargs:
        node.args.kw_defaults = []
    returned = f" -> {ast.unparse(node.returns)}" if node.returns is not None and not drop else ""
    return f"({ast.unparse(node.args)}){returned}"


def markdown(docstring: str, known: set[str], here: str) -> str:
    """A docstring of this project as Markdown: its sections as fields, its doctests as code, its names as links."""
    blocks = re.split(r"^(\w+(?:, \w+)*):(?= as |$)(.*)$", docstring, flags=re.MULTILINE)
    text = [_linked(_code(blocks[0]), known, here)]
    for title, rest, body in zip(blocks[1::3], blocks[2::3], blocks[3::3], strict=True):
        first = title.split(", ")[0]
        if first not in _SECTIONS and first not in _PLAIN:
            text.append(_linked(_code(f"{title}:{rest}{body}"), known, here))
        elif rest:
            text.append(f"*{title}*:{_linked(rest, known, here)}{_linked(_code(body), known, here)}")
        elif first in ("Args", "Attributes", "Raises"):
            text.append("\n".join(_fields(_SECTIONS[first], textwrap.dedent(body), known, here)))
        elif first in _SECTIONS:
            inside = " ".join(_linked(textwrap.dedent(body), known, here).split())
            text.append(f":{_SECTIONS[first]}: {inside}")
        else:
            text.append(f"**{_PLAIN[first]}**\n\n{_code(textwrap.dedent(body))}")
    return "\n\n".join(part.strip("\n") for part in text if part.strip())


def _fields(kind: str, body: str, known: set[str], here: str) -> Iterator[str]:
    for entry in re.split(r"\n(?=\S)", body.strip("\n")):
        name, colon, told = entry.partition(":")
        if colon and kind == "param":  # `input_facts` is no argument of a user's: see `_arguments`
            name = ", ".join(one for one in name.split(", ") if one != "input_facts")
            if not name:
                continue
        if not colon:
            yield f":{kind}: {' '.join(_linked(entry, known, here).split())}"
            continue
        listed = name.split(", ") if kind == "raises" else [name]
        words = " ".join(_linked(told, known, here).split())
        if kind == "attribute":
            yield f":param {name}: {words}"
        else:
            yield from (f":{kind} {one}: {words}" for one in listed)


def _code(text: str) -> str:
    """Doctests in fences."""
    return re.sub(
        r"((?:^[ ]*(?:>>>|\.\.\.).*\n?(?:^[ ]*[^\s>.].*\n?)*)+)",
        lambda found: f"```pycon\n{textwrap.dedent(found[0]).rstrip()}\n```\n",
        text,
        flags=re.MULTILINE,
    )


def _linked(text: str, known: set[str], here: str) -> str:
    def link(found: re.Match[str]) -> str:
        path = found[1] if found[1].startswith("fp8jax.") else f"{here.rpartition('.')[0]}.{found[1]}"
        if path in known and path != here:
            return f"{{py:obj}}`{found[1]} <{path}>`"
        return found[0]

    return re.sub(r"(?<!`)`([\w.]+)`(?!`)", link, text)


def page(name: names.Name, example: names.Example, known: set[str]) -> str:
    """The page of a name."""
    value, path = name.value, name.path
    doc = inspect.getdoc(value) or ""
    lines = [f"# {path}", ""]
    if inspect.isclass(value) or callable(value):
        kind = "class" if inspect.isclass(value) else "function"
        alias = [":no-index:"] if path == "fp8jax.recipes.Recipe" else []  # as fp8jax.Recipe
        lines += [f"`````{{py:{kind}}} {path}{signature(value)}", *alias, "", markdown(doc, known, path)]
        shown = value if inspect.isclass(value) else RETURNED.get(path)
        methods = list(_methods(shown)) if shown is not None and shown.__module__.startswith("fp8jax") else []
        lines += ["`````", ""]
        if methods and shown is not None:
            lines += ["## Methods" if shown is value else f"## Methods of what it returns: {shown.__name__}", ""]
            for method, of in methods:
                # The first line of a docstring says it; the class's own page in the source says more.
                lines += [f"`````{{py:method}} {path}.{method}{of}", "", markdown(_doc(shown, method), known, path)]
                lines += ["`````", ""]
    else:
        lines += [f"`````{{py:data}} {path}", "", example.words or _described(value), "`````", ""]
        example = example._replace(words="")
    lines += ["## Example", "", example.words, "", f"```python\n{example.code.strip()}\n```", ""]
    if place := _place(value):
        lines += [f"Defined in `{place}`.", ""]
    if name.space == "fp8jax.recipes" and name.name in fp8jax.recipes.NAMES:
        lines += [f"{{doc}}`The recipe's page </recipes/{name.name}>` has its formulas, costs and measurements.", ""]
    return "\n".join(lines)


def _doc(cls: type, method: str) -> str:
    return inspect.getdoc(inspect.getattr_static(cls, method)) or inspect.getdoc(getattr(cls, method)) or ""


def _methods(cls: type) -> Iterator[tuple[str, str]]:
    for name, value in vars(cls).items():
        if name.startswith("_") or name in ("tree_flatten", "tree_unflatten"):
            continue
        plain = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
        if inspect.isfunction(plain) and inspect.getdoc(plain):
            node = ast.parse(textwrap.dedent(inspect.getsource(plain))).body[0]
            assert isinstance(node, ast.FunctionDef)
            yield name, _arguments(node, drop=0 if isinstance(value, staticmethod) else 1)


def _described(value: Any) -> str:
    if dataclasses.is_dataclass(value):
        rows = [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
        shown = [(key, "-" if got is None else got if len(str(got)) < 60 else "a table") for key, got in rows]
        return "\n".join(["| | |", "|---|---|", *(f"| {key} | {got} |" for key, got in shown)])
    return "A constant."


def _place(value: Any) -> str | None:
    try:
        return str(pathlib.Path(inspect.getsourcefile(inspect.unwrap(value)) or "").resolve().relative_to(ROOT))
    except (TypeError, ValueError):
        return None


def written() -> dict[str, str]:
    """All pages of the API reference, by path in docs/.

    Raises:
        ValueError: a public name has no example.
    """
    listed, told = names.public(), names.examples()
    lacking = sorted({name.path for name in listed} - set(told))
    if lacking:
        raise ValueError(f"public names without an example in docs/examples: {', '.join(lacking)}")
    known = {name.path for name in listed}
    pages = {f"api/{name.path}.md": page(name, told[name.path], known) for name in listed}
    for space, module in names.SPACES.items():
        words = (module.__doc__ or "").split("\n\n")[0]
        own = [name for name in listed if name.space == space]
        rows = [f"| {{doc}}`{name.name} <{name.path}>` | {_first(name)} |" for name in own]
        tree = ["```{toctree}", ":hidden:", "", *(f"{name.name} <{name.path}>" for name in own), "```"]
        pages[f"api/{space}.md"] = "\n".join([f"# {space}", "", words, "", "| | |", "|---|---|", *rows, "", *tree, ""])
    pages["api/index.md"] = _index(listed)
    return pages


def _index(listed: list[names.Name]) -> str:
    """The first page of the reference: names by task.

    Raises:
        ValueError: a public name has no task or several, or a task names what is not public.
    """
    paths = {name.path: name for name in listed}
    counts = collections.Counter(f"fp8jax.{path}" for text in TASKS.values() for path in text.split())
    if wrong := sorted(path for path in paths.keys() | counts.keys() if counts[path] != 1 or path not in paths):
        raise ValueError(
            f"not in exactly one group of TASKS in docs/generate/api.py, or not public: {', '.join(wrong)}"
        )
    lines = [
        "# API reference",
        "",
        "Each name has a page with its arguments, errors, source and an example that runs.",
        "",
    ]
    for task, text in {"Ten names to start with": FIRST, **TASKS}.items():
        group = [f"fp8jax.{path}" for path in text.split()]
        rows = [f"| {{doc}}`{path} <{path}>` | {_first(paths[path])} |" for path in group]
        lines += [f"## {task}", "", "| | |", "|---|---|", *rows, ""]
    links = ", ".join(f"{{doc}}`{space}`" for space in names.SPACES)
    tree = ["```{toctree}", ":hidden:", "", *names.SPACES, "```"]
    return "\n".join([*lines, "## By module", "", f"{links}.", "", *tree, ""])


def _first(name: names.Name) -> str:
    if not (inspect.isclass(name.value) or callable(name.value)):
        words = names.examples()[name.path].words.split("\n\n")[0] or "A number format."
        return " ".join(words.split()).replace("|", "\\|")
    line = (inspect.getdoc(name.value) or "").split("\n\n")[0]
    return " ".join(line.split()).replace("|", "\\|")
