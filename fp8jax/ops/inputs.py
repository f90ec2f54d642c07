"""What products read: an input with what is known of it, and where its codes come from."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jax import Array, lax

from fp8jax.core.qtensor import QTensor
from fp8jax.core.recipe import Linear
from fp8jax.ops import fallback, fused
from fp8jax.ops.fallback import FallbackTensor
from fp8jax.ops.operand import FallbackBlocks, Source, choose_input_source, input_side, make_codes
from fp8jax.ops.saveable import INPUT, with_checkpoint_name
from fp8jax.ops.saved import ALREADY_SAVED, NO_INPUT_FACTS, InputFacts, derive_key, to_bytes


class Input(NamedTuple):
    """What a product reads, and what is known of it.

    Attributes:
        matrix: (tokens, inputs); where it is no view of `source`, the first axes may be several.
        source: the user's array that it is made of, by which products that share an input are known; None for itself.
        view: whether `source` is (..., inputs), so that gradients flow to it; it may have other axes.
        known: what the caller knows of `source`.
    """

    matrix: Array
    source: Array | None = None
    is_view: bool = True
    input_facts: InputFacts = NO_INPUT_FACTS

    @property
    def source_or_matrix(self) -> Array:
        """The array by which it is known."""
        return self.matrix if self.source is None else self.source

    @property
    def value(self) -> Array:
        """The array that gradients flow to."""
        return self.source_or_matrix if self.is_view else self.matrix


def input_source(x: Input, recipe: Linear, key: Array | None, scale: Array | None = None) -> Source:
    """Where the codes of an input come from, for `multiply`; arguments as of `product`, `scale` as of its `scales`."""
    side, source, matrix = input_side(recipe), x.source_or_matrix, fused.to_matrix(x.matrix)
    facts = x.input_facts.facts
    if facts.recompute_rule is not None and facts.recompute_rule[0] == ALREADY_SAVED:
        facts = facts._replace(again=(ALREADY_SAVED, source))
    fused_output = facts.fused_output if x.is_view and source.shape[-1] == matrix.shape[-1] else None
    facts = facts._replace(part=fused_output and fused_output.cast(matrix.dtype))
    # Layers whose scales come from states of their own share codes under that of the first one.
    strategy, given_scale = side.strategy if scale is None else recipe.strategy("x"), scale
    scale = facts.scale_for(recipe) if scale is None else scale
    subkey = None if side.residual is None else derive_key(key, side.residual, "saved")

    def get_or_compute(make: Callable[[], Any]) -> Any:
        dependencies = scale if given_scale is None else None, None if subkey is None else key
        return x.input_facts.get_or_compute((side.residual, strategy, matrix.shape), make, *dependencies)

    return choose_input_source(matrix, side, key=subkey, scale=scale, facts=facts, get_or_compute=get_or_compute)


def gradient_key(recipe: Linear, key: Array | None, uses: Sequence[str] = ("dy", "dy_wgrad")) -> Array | None:
    """The key for codes of the output's gradient in these uses; None where they are rounded to nearest.

    Raises:
        ValueError: they are not, and there is no key.
    """
    stochastic_specs = [s for use in uses if (s := recipe.spec(use)) is not None and s.rounding == "stochastic"]
    return derive_key(key, stochastic_specs[0], "dy") if stochastic_specs else None


def fallback_input_source(
    x: Array,
    recipe: Linear,
    key: Array | None,
    source: Array,
    threshold: Array,
    input_facts: InputFacts = NO_INPUT_FACTS,
) -> tuple[Array, FallbackBlocks]:
    """As `input_source`, of an input in blocks, of which those fall back that exceed a threshold, fp32 scalar.

    Raises:
        ValueError: the recipe rounds what it saves stochastically, and there is no key.
    """
    side = input_side(recipe)
    spec, residual_spec = side.forward, side.residual
    assert spec is not None
    assert residual_spec is not None
    subkey = derive_key(key, residual_spec, "saved")
    quantizer = functools.partial(fallback.quantize, *lax.stop_gradient((x,)), spec, lax.stop_gradient(threshold))
    fallback_tensors: list[FallbackTensor] = []

    def make_residual() -> QTensor:
        pair, codes = quantizer(key=subkey if residual_spec == fallback.with_stochastic_rounding(spec) else None)
        fallback_tensors.append(pair)
        if residual_spec == spec:
            return to_bytes(pair.base)
        return make_codes(x, residual_spec, side.strategy, key=subkey) if codes is None else to_bytes(codes)

    use = side.residual, side.strategy, x.shape
    codes = input_facts.get_or_compute(
        use, lambda: with_checkpoint_name(make_residual(), INPUT), None, None if subkey is None else key
    )
    # Another product of this input may have made what is saved; thresholds are each layer's own.
    return source, FallbackBlocks(fallback_tensors[0] if fallback_tensors else quantizer()[0], codes)
