"""Low-rank adapters in a Llama with frozen weights stored as 8-bit codes: `--lora-rank`.

Linear layers of blocks become `AdaptedLinear`. All other parameters become `BaseVariable`. Only adapters have
gradients, optimizer states and checkpoints. The base is created from given parameters or from the seed. It is an
argument of a step, but not among its results.
"""

import dataclasses
import functools
import re
import zlib
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import fp8jax
from experiments.errors import UserError
from experiments.models.llama import Llama
from experiments.train.config import Lora
from fp8jax.ops.products.linear import key_from_data
from fp8jax.ops.products.lora import apply_adapter

LAYERS = "layers"
# The paths of a Llama's projections and their names in the files of peft.
PEFT_NAMES = {
    "layers/attention/q": "model.layers.{}.self_attn.q_proj",
    "layers/attention/k": "model.layers.{}.self_attn.k_proj",
    "layers/attention/v": "model.layers.{}.self_attn.v_proj",
    "layers/attention/out": "model.layers.{}.self_attn.o_proj",
    "layers/mlp/gate": "model.layers.{}.mlp.gate_proj",
    "layers/mlp/up": "model.layers.{}.mlp.up_proj",
    "layers/mlp/down": "model.layers.{}.mlp.down_proj",
}


class BaseVariable(nnx.Variable):
    """A frozen array of the base. It is neither a parameter nor a state that a step changes."""


class AdaptedLinear(nnx.Module):
    """x w + scale (x a) b, with frozen `w`. Layers that the targets do not match have no adapter.

    Args:
        linear: the layer that it replaces.
        path: path of that layer, such as "layers/mlp/up".
        lora: settings of adapters.
        recipe: recipe of the matmuls with the base.
        rngs: generators of the adapter's initial values.
    """

    def __init__(self, linear: nnx.Linear, path: str, lora: Lora, recipe: fp8jax.Recipe, rngs: nnx.Rngs) -> None:
        kernel = linear.kernel[...]
        self.dtype = linear.dtype or kernel.dtype
        self.linear, self.dropout, self.alpha = recipe.linear, lora.lora_dropout, lora.lora_alpha
        self.deterministic, self.salt = False, zlib.crc32(path.encode())
        weight = kernel.astype(self.dtype) if lora.base == "bf16" else fp8jax.freeze(kernel, lora.base)
        leaves, self.tree = jax.tree.flatten(weight)
        self.held = nnx.List([BaseVariable(leaf) for leaf in leaves])
        self.bias = None if linear.bias is None else BaseVariable(linear.bias[...])
        self.adapts = bool(re.fullmatch(lora.lora_targets, path))
        if self.adapts:
            adapter = fp8jax.lora.init_adapter(rngs.params(), kernel.shape, lora.lora_rank, lora.lora_alpha)
            self.lora_a, self.lora_b = nnx.LoRAParam(adapter.a), nnx.LoRAParam(adapter.b)

    @property
    def weight(self) -> jax.Array | fp8jax.FrozenWeight:
        """The frozen weight."""
        weight: Any = jax.tree.unflatten(self.tree, [leaf[...] for leaf in self.held])
        return weight

    @property
    def adapter(self) -> fp8jax.lora.Adapter:
        return fp8jax.lora.Adapter(self.lora_a[...], self.lora_b[...], self.alpha)

    def __call__(self, x: jax.Array, out_sharding: Any = None) -> jax.Array:
        x, w = x.astype(self.dtype), self.weight
        if self.linear.is_quantized or isinstance(w, fp8jax.FrozenWeight):
            key = key_from_data(x) if self.linear.is_stochastic else None
            y = fp8jax.linear(x, w, recipe=self.linear, key=key, out_sharding=out_sharding)
        else:
            y = jnp.matmul(x, w, out_sharding=out_sharding)
        if self.bias is not None:
            y = y + self.bias[...].astype(y.dtype)
        if not self.adapts:
            return y
        dropout = 0.0 if self.deterministic else self.dropout
        # The key comes from the data, so that a step can be repeated exactly. Layers have independent noise.
        key = jax.random.fold_in(key_from_data(x), self.salt) if dropout else None
        return y + apply_adapter(x, self.adapter, dropout, key)


def base_recipe(recipe: fp8jax.Recipe, lora: Lora) -> fp8jax.Recipe:
    """Returns the parts of a recipe that apply to frozen weights: matmuls and optimizer states.

    Frozen weights have fixed scales. Contexts are left out, because blocks are rematerialized.

    Raises:
        UserError: the recipe's scaling has a state in each layer, or only one of recipe and base has integer codes.
    """
    linear = recipe.linear if recipe.linear.w_scaling is None else dataclasses.replace(recipe.linear, w_scaling=None)
    if any(part.collects_stats for part in linear.stateful_strategies.values()):
        raise UserError(
            f"--lora-rank: {recipe.name} has {linear.scaling} scaling, which keeps a state in each layer; use a "
            "recipe with current scaling, such as te_current, fast or int8_block"
        )
    codes = [linear.spec(name) for name in ("x", "dy")]
    if lora.base != "bf16":
        base_format = fp8jax.QuantSpec.parse(lora.base).format
        for spec in codes:
            if spec is not None and _floating(spec.format) != _floating(base_format):
                raise UserError(
                    f"--base {lora.base}: {recipe.name} multiplies {spec.format}, and a product cannot mix "
                    f"floating-point and integer codes. Use --base {spec.format}, or --recipe bf16"
                )
    return dataclasses.replace(recipe, linear=linear, context=fp8jax.recipes.Context())


def _floating(name: str) -> bool:
    return bool(fp8jax.formats.get(name).is_float)


def adapt(model: Llama, lora: Lora, recipe: fp8jax.Recipe, rngs: nnx.Rngs) -> Llama:
    """Returns a model with adapters, with all other weights stored as `lora.base`. The model may be abstract.

    Raises:
        UserError: the targets match no layer, the rank is too large, or codes of recipe and base are incompatible.
    """
    adapters_by_path = [
        ("/".join(map(str, path)), m) for path, m in nnx.iter_modules(model) if isinstance(m, nnx.Linear)
    ]
    layers = {path: m for path, m in adapters_by_path if path.startswith(LAYERS)}
    if not any(re.fullmatch(lora.lora_targets, path) for path in layers):
        raise UserError(f"--lora-targets {lora.lora_targets!r} matches none of the layers {', '.join(sorted(layers))}")
    for path, layer in sorted(layers.items()):
        *parents, name = path.split("/")
        parent: Any = model
        for step in parents:
            parent = getattr(parent, step)
        try:
            setattr(parent, name, AdaptedLinear(layer, path, lora, recipe, rngs))
        except ValueError as error:
            raise UserError(f"--lora-rank, --base: {path}: {error}") from None
    for module_path, module in list(nnx.iter_modules(model)):
        for name, variable in list(vars(module).items()):
            if isinstance(variable, nnx.Param) and not isinstance(variable, nnx.LoRAParam):
                value = variable[...]
                matrix = value.ndim - module_path[:1].count(LAYERS) >= 2
                dtype = fp8jax.formats.get(recipe.weights.compute).dtype if matrix else value.dtype
                setattr(module, name, BaseVariable(value.astype(dtype)))
    return model


def merged(model: Llama) -> dict[str, jax.Array]:
    """Returns the weights of adapted layers with adapters added, by path: fp32 (layers, inputs, outputs)."""
    weights = {}
    for path, layer in nnx.iter_modules(model):
        if isinstance(layer, AdaptedLinear):
            w: Any = layer.weight
            values = w.dequantize() if isinstance(w, fp8jax.FrozenWeight) else w.astype(jnp.float32)
            merged = fp8jax.lora.merge_adapter(values, layer.adapter) if layer.adapts else values
            weights["/".join(map(str, path))] = merged
    return weights


def by_path(params: Any, alpha: float) -> dict[str, fp8jax.lora.Adapter]:
    """Returns the adapters of a training state, by the path of their layer."""
    adapters_by_path: dict[str, fp8jax.lora.Adapter] = {}

    def collect(tree: Any, path: tuple[str, ...]) -> None:
        if "lora_a" in tree:
            adapters_by_path["/".join(path)] = fp8jax.lora.Adapter(tree["lora_a"], tree["lora_b"], alpha)
            return
        for name, inner in tree.items():
            collect(inner, (*path, name))

    collect(params, ())
    return adapters_by_path


def values_of(params: Any) -> Any:
    """Returns parameters as arrays, with zeros instead of codes. `with_codes` inserts the codes later."""
    return jax.tree.map(
        lambda x: jnp.zeros(x.shape, jnp.bfloat16) if isinstance(x, fp8jax.FrozenWeight) else x, params, is_leaf=_frozen
    )


def with_codes(base: Any, params: Any, lora: Lora) -> Any:
    """Returns a base with the codes of the given parameters.

    Raises:
        UserError: their spec differs from that of the base.
    """
    for path, w in jax.tree_util.tree_leaves_with_path(params, is_leaf=_frozen):
        if not _frozen(w):
            continue
        *layer, _ = (key.key for key in path)
        if lora.base == "bf16" or w.codes.spec != fp8jax.QuantSpec.parse(lora.base):
            raise UserError(
                f"--base {lora.base}: the checkpoint contains codes with spec {w.codes.spec}; use --base {w.codes.spec}"
            )
        branch: Any = {"held": dict(enumerate(jax.tree.leaves(w)))}
        bias = {k: v for k, v in functools.reduce(lambda tree, step: tree[step], layer, base).items() if k == "bias"}
        for step in reversed(layer):
            branch, bias = {step: branch | bias}, {}
        base = joined(difference(base, branch), branch)
    return base


def _frozen(x: Any) -> bool:
    return isinstance(x, fp8jax.FrozenWeight)


def joined(first: Any, second: Any) -> Any:
    """Merges two nested dicts."""
    result = dict(first)
    for name, value in second.items():
        result[name] = joined(result[name], value) if name in result else value
    return result


def difference(merged: Any, removed: Any) -> Any:
    """Returns a nested dict without the leaves of another one, and without empty dicts."""
    remaining = {}
    for name, value in merged.items():
        if name not in removed:
            remaining[name] = value
        elif isinstance(value, dict) and (inner := difference(value, removed[name])):
            remaining[name] = inner
    return remaining
