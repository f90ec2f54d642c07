"""What products read: an input with what is known of it, and where its codes come from."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jax import Array, lax

from fp8jax.core.qtensor import QTensor
from fp8jax.core.recipe import Linear
from fp8jax.ops import fallback, fused
from fp8jax.ops.fallback import Pair
from fp8jax.ops.operand import Blocks, Source, input_side, make_codes, of_input
from fp8jax.ops.saveable import INPUT, named
from fp8jax.ops.saved import BLANK, ITSELF, Known, key_for, to_bytes


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
    view: bool = True
    known: Known = BLANK

    @property
    def named(self) -> Array:
        """The array by which it is known."""
        return self.matrix if self.source is None else self.source

    @property
    def value(self) -> Array:
        """The array that gradients flow to."""
        return self.named if self.view else self.matrix


def input_source(x: Input, recipe: Linear, key: Array | None, scale: Array | None = None) -> Source:
    """Where the codes of an input come from, for `multiply`; arguments as of `product`, `scale` as of its `scales`."""
    side, source, matrix = input_side(recipe), x.named, fused.matrix(x.matrix)
    origin = x.known.origin
    if origin.again is not None and origin.again[0] == ITSELF:
        origin = origin._replace(again=(ITSELF, source))
    part = origin.part if x.view and source.shape[-1] == matrix.shape[-1] else None
    origin = origin._replace(part=part and part.cast(matrix.dtype))
    # Layers whose scales come from states of their own share codes under that of the first one.
    strategy, fixed = side.strategy if scale is None else recipe.strategy("x"), scale
    scale = origin.scale_for(recipe) if scale is None else scale
    subkey = None if side.saved is None else key_for(key, side.saved, "saved")

    def share(make: Callable[[], Any]) -> Any:
        others = scale if fixed is None else None, None if subkey is None else key
        return x.known.share((side.saved, strategy, matrix.shape), make, *others)

    return of_input(matrix, side, key=subkey, scale=scale, origin=origin, share=share)


def gradient_key(recipe: Linear, key: Array | None, uses: Sequence[str] = ("dy", "dy_wgrad")) -> Array | None:
    """The key for codes of the output's gradient in these uses; None where they are rounded to nearest.

    Raises:
        ValueError: they are not, and there is no key.
    """
    noisy = [s for use in uses if (s := recipe.spec(use)) is not None and s.rounding == "stochastic"]
    return key_for(key, noisy[0], "dy") if noisy else None


def fall_back(
    x: Array, recipe: Linear, key: Array | None, source: Array, threshold: Array, known: Known = BLANK
) -> tuple[Array, Blocks]:
    """As `input_source`, of an input in blocks, of which those fall back that exceed a threshold, fp32 scalar.

    Raises:
        ValueError: the recipe rounds what it saves stochastically, and there is no key.
    """
    side = input_side(recipe)
    spec, saved = side.forward, side.saved
    assert spec is not None
    assert saved is not None
    subkey = key_for(key, saved, "saved")
    quantizer = functools.partial(fallback.quantize, *lax.stop_gradient((x,)), spec, lax.stop_gradient(threshold))
    pairs: list[Pair] = []

    def make() -> QTensor:
        pair, codes = quantizer(key=subkey if saved == fallback.stochastic(spec) else None)
        pairs.append(pair)
        if saved == spec:
            return to_bytes(pair.base)
        return make_codes(x, saved, side.strategy, key=subkey) if codes is None else to_bytes(codes)

    use = side.saved, side.strategy, x.shape
    codes = known.share(use, lambda: named(make(), INPUT), None, None if subkey is None else key)
    # Another product of this input may have made what is saved; thresholds are each layer's own.
    return source, Blocks(pairs[0] if pairs else quantizer()[0], codes)
