"""`Context`: the part of a `Recipe` that defines what norms and activations save for the backward pass."""

import dataclasses
import functools
from typing import Literal

from fp8jax.core.spec import QuantSpec, check_booleans

AMAXES = ("exact", "bound")


@dataclasses.dataclass(frozen=True)
class Context:
    """Storage of the inputs that norms and (gated) activations save for the backward pass.

    Forward results and gradients stay in the model's dtype (COAT, section 5.2 and G.5). An operation that saves codes
    can be differentiated only once.

    The bounds of `amax="bound"` may exceed the amax by up to `fp8jax.core.scaling.max_slack_binades`. If one is
    looser, or a sampled one is exceeded, the exact amax defines the scale, and a second pass writes the codes.

    - Norm: sqrt(channels) times the largest scale, plus the largest bias. It counts as looser if one channel's scale is
      more than 8 times the geometric mean.
    - Activation: 4 times the amax of a sample, the first 32 of every 512 rows.
    - Cotangent of a recomputed activation in e5m2: a Cauchy-Schwarz bound. It uses the norms of the next layer's
      gradient and weight, and each row's largest gate and up. A sample of rows shows whether it is loose.

    Bounds need the whole recipe, because the operation writes the codes of the next layer's input. A result that is
    cast first is quantized again under the same scale. If no layer reads the codes, they waste one byte per element.
    The exact amax is used if the gradient is reshaped or has several readers, and for block scales and microscales.

    Attributes:
        residual: string form of the `QuantSpec` of the saved input, (..., channels), such as COAT's "e4m3:group16".
            Scales run along the channels and are stored in bf16. None saves what JAX saves. On a GPU it saves only the
            inputs if the next layer's input has FP8 scales per tensor or per row.
        recompute_activations: whether linear layers recompute their inputs from the saved inputs of norms and
            activations: the norm's input, gate and up. If False, the activated gate and each linear layer's codes are
            saved, too, as in COAT.
        amax: source of the per-tensor scales of the results. "exact" is the amax, one more pass for kernels. "bound" is
            an upper bound of the amax, under which nothing finite saturates.

    Raises:
        ValueError: a spec is malformed or not applicable here, or another field is unknown or has nothing to apply to.
    """

    residual: str | None = None
    recompute_activations: bool = False
    amax: Literal["exact", "bound"] = "exact"

    def __post_init__(self) -> None:
        check_booleans(self, "recompute_activations", prefix="context.")
        if self.amax not in AMAXES:
            raise ValueError(f"unknown context.amax {self.amax!r}; it is one of {', '.join(AMAXES)}")
        if self.residual is None:
            if self.amax != "exact":
                raise ValueError(f"context.amax {self.amax!r} needs a format: give context.residual, as e4m3:group16")
            if self.recompute_activations:
                raise ValueError(
                    "context.recompute_activations=True needs a format: give context.residual, such as e4m3:group16"
                )
            return
        spec = QuantSpec.parse(self.residual)
        if spec.granularity == "channel" or spec.axis != -1 or spec.layer_axes:
            raise ValueError(f"context.residual {self.residual!r} must have scales along the channels, its last axis")
        if spec.rounding != "nearest":
            raise ValueError(
                f"context.residual {self.residual!r} would need a key in every layer; leave out '+stochastic'"
            )

    @functools.cached_property
    def spec(self) -> QuantSpec | None:
        """The `QuantSpec` of saved inputs; None if they are saved as they are."""
        if self.residual is None:
            return None
        return dataclasses.replace(QuantSpec.parse(self.residual), scale_format="bf16")
