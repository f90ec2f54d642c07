"""`Context`: what norms and activations keep for the backward pass, as part of a recipe."""

import dataclasses
import functools

from fp8jax.core.spec import QuantSpec

MODES = ("faithful", "lean")
SCALES = ("largest", "bound")


@dataclasses.dataclass(frozen=True)
class Context:
    """What non-linear operations (norms, gated and plain activations) keep of their inputs for the backward pass.

    What they compute forward, and their gradients, stay in the model's own dtype (COAT, section 5.2 and G.5). An
    operation that keeps codes can be differentiated once.

    Attributes:
        residual: string form of the `QuantSpec` of what is kept, (..., channels), with scales along the channels and
            stored in bf16, such as COAT's "e4m3:group16"; None keeps what JAX keeps, or on a GPU, before layers whose
            inputs have an FP8 scale a tensor or a row, the inputs alone.
        mode: "faithful" keeps all that COAT keeps: the input of a norm, gate, up, and the activated gate; linear layers
            keep their own codes. "lean" keeps only what cannot be computed again cheaply: the input of a norm, gate and
            up; linear layers that read their results compute them again from those.
        scales: where the scales come from of what these operations make, as linear layers quantize it per tensor: its
            "largest" magnitude, for which kernels take a pass over it; or a "bound" on that, which saves the pass.
            Nothing finite saturates. A bound lies at most 6 binades above the largest magnitude in e4m3 and 12 in e5m2,
            of 15 and 30 binades of normal numbers (`fp8jax.core.scaling.max_slack_binades`): if it is looser, the
            largest magnitude gives the scale, and a second pass the codes. A norm's result is at most the root of the
            channels times its largest scale, plus its largest bias. The bound counts as looser if one channel's scale
            is more than 8 times the geometric mean of all. An activation's is taken to be at most four times the
            largest of every 16th 32 rows; where it is larger, that gives the scale, and a second pass the codes. In
            both the operation makes the codes at once: as the layers of its recipe want them, so it takes the whole
            recipe (of its context alone it is the largest). What is cast before it is read is quantized anew, under the
            same scale; and where no layer reads it that quantizes so, codes are made for nothing: a byte an element.
            Lean, of an activation's e5m2 cotangents by the inequality of Cauchy and Schwarz, from the norms of the next
            layer's gradient and weight and the largest gate and up of each row; a sample of rows shows whether that is
            loose. It is the largest where the gradient does not come back directly (it is reshaped, or has several
            readers), and where what is kept has scales of blocks or microscales.

    Raises:
        ValueError: a spec is malformed or of no use here, or a mode is unknown or has nothing to apply to.
    """

    residual: str | None = None
    mode: str = "faithful"
    scales: str = "largest"

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"unknown context.mode {self.mode!r}; it is one of {', '.join(MODES)}")
        if self.scales not in SCALES:
            raise ValueError(f"unknown context.scales {self.scales!r}; it is one of {', '.join(SCALES)}")
        if self.residual is None:
            if self.scales != "largest":
                raise ValueError(
                    f"context.scales {self.scales!r} needs a format: give context.residual, as e4m3:group16"
                )
            if self.mode != "faithful":
                raise ValueError(
                    f"context.mode {self.mode!r} needs a format: give context.residual, such as e4m3:group16"
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
        """How an input is kept; None as it is."""
        if self.residual is None:
            return None
        return dataclasses.replace(QuantSpec.parse(self.residual), scale_format="bf16")

    @property
    def lean(self) -> bool:
        return self.mode == "lean"
