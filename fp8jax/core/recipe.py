"""`Recipe`: what every tensor of a training run is stored and computed in, as independent frozen parts."""

import dataclasses
import functools
from collections.abc import Iterable
from typing import Literal

from fp8jax.core import formats, masters
from fp8jax.core.masters import Master
from fp8jax.core.scaling import NAMES, Current, Scaling, Stateful, find_scaling
from fp8jax.core.spec import TRANSPOSABLE, QuantSpec, check_booleans, check_choice, check_expand
from fp8jax.core.tables import sentence, table

FORMS = ("two_phase", "one_phase")
_UNQUANTIZED = ("bf16", "fp32")


@dataclasses.dataclass(frozen=True)
class Comm:
    """How the gradients of data-parallel replicas are reduced.

    Attributes:
        gradients: format on the wire. A `QuantSpec` in string form, of granularity "tensor" or "group" ("e4m3",
            "e4m3:group128", "int8"). Or "bf16" or "fp32", for sums of that dtype. None leaves the reduction to XLA,
            which sums gradients in their own dtype.
        form: form of an 8-bit reduction. "two_phase" sends codes to the device that sums them in fp32, quantizes the
            means again, and gathers those codes. "one_phase" lets NCCL add the codes themselves (FP8-LM, section 2.1).
            Each addition then rounds to 8 bits and saturates; it needs GPUs of compute capability 9.0.
        auto_scale: use FP8-LM's factor mu, which keeps one-phase sums in range (equation 3); it has state.

    Raises:
        ValueError: a format or granularity that cannot be reduced, an unknown form, or settings that contradict each
            other.
    """

    gradients: str | None = None
    form: str = "two_phase"
    auto_scale: bool = False

    def __post_init__(self) -> None:
        check_choice("comm.form", self.form, FORMS)
        one_phase = self.form == "one_phase"
        spec = self.spec
        if spec is None:
            if one_phase or self.auto_scale:
                raise ValueError(
                    f"comm.form {self.form!r} and auto_scale={self.auto_scale} require 8-bit gradients, but "
                    f"comm.gradients is {self.gradients!r}. Set comm.gradients='e4m3', or omit both"
                )
            return
        if not formats.get(spec.format).is_matmul_format:
            raise ValueError(
                f"comm.gradients {self.gradients!r} is not an 8-bit wire format; use 'e4m3', 'e5m2' or 'int8'"
            )
        if spec.granularity not in ("tensor", "group") or spec.axis != -1 or spec.expand:
            raise ValueError(
                f"comm.gradients {self.gradients!r} is not supported. Use a spec with one scale per tensor or per "
                "group of the last axis, without expansion, such as 'e4m3' or 'e4m3:group128'"
            )
        if spec.rounding != "nearest" or spec.scale_format != "fp32":
            raise ValueError(f"comm.gradients {self.gradients!r} must round to nearest and have fp32 scales")
        if one_phase and not formats.get(spec.format).is_float:
            raise ValueError(f"comm.form 'one_phase' sums codes, and sums of {spec.format} wrap around; use 'e4m3'")
        if self.auto_scale and not one_phase:
            raise ValueError(
                "comm.auto_scale applies only to comm.form 'one_phase', whose sums can saturate; omit it, or set "
                "form='one_phase'"
            )

    @property
    def spec(self) -> QuantSpec | None:
        """The `QuantSpec` of the gradients; None if they are not quantized."""
        return None if self.gradients is None or self.gradients in _UNQUANTIZED else QuantSpec.parse(self.gradients)


SCALED_MASTER = "fp16"


@dataclasses.dataclass(frozen=True)
class Weights:
    """Storage of the parameters.

    Attributes:
        master: what the optimizer updates, one of `fp8jax.core.masters.NAMES` or "fp16". "fp32", "bf16" (rounded to
            nearest) and "bf16+stochastic" are the parameters. "bf16+int8" (24 bits), "bf16+int16" (32 bits, fp32) and
            the like are a high part and a remainder; the high part is the parameter and the working copy. "fp16" has a
            scale per tensor and lies in the optimizer's state (`fp8jax.fp8lm_adamw`); the parameters are working
            copies.
        compute: format of the working copy that layers compute with: "fp32", "bf16", or the high part's.

    Raises:
        ValueError: an unknown format, or a working copy wider than the master.
    """

    master: str = "fp32"
    compute: str = "bf16"

    def __post_init__(self) -> None:
        allowed = (
            "fp32",
            "bf16",
            *(["fp16"] if self.split_master and self.split_master.param_format.name == "fp16" else []),
        )
        for field, names in (("master", (*masters.NAMES, SCALED_MASTER)), ("compute", allowed)):
            if getattr(self, field) not in names:
                raise ValueError(f"weights.{field} {getattr(self, field)!r} is not one of {', '.join(names)}")
        if formats.get(self.compute).dtype.itemsize > formats.get(self.master.partition("+")[0]).dtype.itemsize:
            raise ValueError(f"weights.compute {self.compute!r} is wider than the master weights, {self.master!r}")
        if self.split_master and self.split_master.param_format.name == "fp16" and self.compute == "bf16":
            raise ValueError(f"weights.compute 'bf16' is not the high part of {self.master!r}; use 'fp16'")

    @property
    def split_master(self) -> Master | None:
        """The master with a remainder; None if there is none."""
        master = Master(self.master) if self.master in masters.NAMES else None
        return master if master and master.remainder else None

    @property
    def param_format(self) -> str:
        """Format of the parameters that the caller of the optimizer stores."""
        return self.compute if self.master == SCALED_MASTER else self.master.partition("+")[0]

    @property
    def bytes_per_element(self) -> float:
        """Bytes of a master weight, remainder included."""
        return 2.0 if self.master == SCALED_MASTER else Master(self.master).bytes_per_element


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
        check_choice("context.amax", self.amax, AMAXES)
        if self.residual is None:
            if self.amax != "exact":
                raise ValueError(
                    f"context.amax {self.amax!r} needs a format; set context.residual, such as 'e4m3:group16'"
                )
            if self.recompute_activations:
                raise ValueError(
                    "context.recompute_activations=True needs a format; set context.residual, such as 'e4m3:group16'"
                )
            return
        spec = QuantSpec.parse(self.residual)
        if spec.granularity == "channel" or spec.axis != -1 or spec.layer_axes:
            raise ValueError(f"context.residual {self.residual!r} must have scales along the channels, its last axis")
        if spec.rounding != "nearest":
            raise ValueError(
                f"context.residual {self.residual!r} would need a PRNG key in every layer; omit '+stochastic'"
            )

    @functools.cached_property
    def spec(self) -> QuantSpec | None:
        """The `QuantSpec` of saved inputs; None if they are saved unquantized."""
        if self.residual is None:
            return None
        return dataclasses.replace(QuantSpec.parse(self.residual), scale_format="bf16")


NU_ROUNDINGS = ("auto", "nearest", "stochastic")


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """Storage of Adam's moments; the fields are arguments of `fp8jax.compressed_adamw`.

    Attributes:
        mu: format of the first moment: an 8-bit float format, "bf16" or "fp32".
        nu: format of the second moment: the same, or "fp16" with a scale.
        group_size: elements along the last axis that share a scale. None is one scale per tensor (with fp16 master
            weights), or no moment with a scale.
        expand: dynamic range expansion of the 8-bit moments: True, False, or "coat" (`QuantSpec.expand`).
        nu_rounding: rounding of an 8-bit or bf16 second moment: "nearest", "stochastic", or "auto", which depends on
            b2.

    Raises:
        ValueError: an unknown format, an unsigned first moment, an invalid group size, or contradictory settings.
    """

    mu: str = "e4m3"
    nu: str = "e4m3"
    group_size: int | None = 128
    expand: bool | str = True
    nu_rounding: str = "auto"

    def __post_init__(self) -> None:
        check_expand(self.expand)
        if not formats.get(self.mu).is_signed:
            raise ValueError(f"mu {self.mu!r} is unsigned, but first moments are signed; use 'de8' or 'e4m3'")
        check_choice("nu_rounding", self.nu_rounding, NU_ROUNDINGS)
        if self.nu_rounding == "stochastic" and self.nu == "fp32":
            raise ValueError(
                "nu_rounding 'stochastic' requires an 8-bit or bf16 nu, but nu is 'fp32'; use nu_rounding='auto'"
            )
        compressed = [m for m in (self.mu, self.nu) if formats.get(m).needs_scale]
        for moment in compressed:
            if formats.get(moment).bits not in (8, 16):
                raise ValueError(
                    f"{moment!r} codes have {formats.get(moment).bits} bits; use a format with 8 or 16 bits"
                )
        size = self.group_size
        if compressed and size is None and self.expand:
            raise ValueError("optimizer.expand=True needs groups; set optimizer.group_size, or expand=False")
        if compressed and size is not None and (not size >= 1 or size // 1 != size):
            raise ValueError(f"optimizer.group_size must be a positive integer, not {size!r}")
        if not compressed and (self.expand or self.group_size is not None):
            raise ValueError(
                f"group_size={self.group_size}, expand={self.expand} require 8-bit moments, but mu is {self.mu!r} and "
                f"nu is {self.nu!r}; set group_size=None and expand=False"
            )

    def spec(self, moment: str) -> QuantSpec | None:
        """The `QuantSpec` of "mu" or "nu"; None if the moment is stored by a cast."""
        name = getattr(self, moment)
        if not formats.get(name).needs_scale:
            return None
        granularity = "tensor" if self.group_size is None else "group"
        return QuantSpec(name, granularity, self.group_size, expand=self.expand, flush_to_zero=moment != "nu")


_XLA_COMM, _FP32_WEIGHTS, _DEFAULT_OPTIMIZER, _NO_CONTEXT = Comm(), Weights(), Optimizer(), Context()

SAME = "same"
OPERANDS = ("x", "w", "dy")
# Lengths of a Hadamard transformation.
ROTATIONS = (16, 32, 64, 128)
# The field whose spec "same" refers to.
_SOURCES = {"w_dgrad": "w", "dy_wgrad": "dy", "x_residual": "x", "x_wgrad": "x_residual"}


@dataclasses.dataclass(frozen=True)
class Linear:
    """Formats of the three products of a linear layer y = x @ w, and of its saved input.

    Each operand is the string form of a `QuantSpec`, or None for bf16. It describes the matrix with the contraction
    along its last axis, which is the axis of groups and tokens. "same" uses the codes of the forward operand,
    transposed; it needs scales that survive a transpose ("tensor", "block"). "mx" operands with an outer scale fold
    their powers of two into the codes, which leaves one scale per row. For wgrad both operands may be "same" and "mx",
    or one of them "tensor" (`fp8jax.ops.quantization.microscaling`).

    Attributes:
        x: input in the forward product, (tokens, inputs).
        w: weight in the forward product, (outputs, inputs).
        dy: gradient of the output in dgrad, (tokens, outputs).
        w_dgrad: weight in dgrad, (inputs, outputs).
        x_wgrad: input in wgrad, (inputs, tokens).
        dy_wgrad: gradient of the output in wgrad, (outputs, tokens).
        x_residual: saved input, (tokens, inputs): "same" for the forward operand's codes, None for the input itself, or
            another spec.
        scaling: source of per-tensor scales: any of `fp8jax.core.scaling.NAMES`. "current": the tensor's amax.
            "two_stage": its amax through bf16 maxima of groups (COAT's group scaling). "delayed": the amax of the last
            `amax_history_length` steps, stored in the state of `fp8jax.scaled_linear`.
        w_scaling: the same for the weight; None uses `scaling`. "automatic" uses the upper bound that
            `fp8jax.track_weight_amax` maintains, or the weight's amax if the layer has none.
        amax_history_length: steps in the history of delayed scaling.
        margin: powers of two that a delayed scale leaves above the amax.
        fallback_fraction_range: for scaling "threshold", the target range of the fraction of input blocks that fall
            back to 16 bits in the forward product.
        threshold_update_factor: factor by which the threshold changes per step to reach that range.
        weight_amax_interval: steps between measurements of a weight in automatic scaling.
        fast_accumulation: products ("forward", "dgrad", "wgrad") that may accumulate with the fewer bits of Hopper's
            FP8 tensor cores. The others promote sums to fp32, as Transformer Engine's backward pass does.
        rotation: length of the randomized Hadamard transformation of both operands of wgrad along their tokens, one of
            `ROTATIONS` (arXiv 2509.25149, section 4.2, has 16); None for none. The codes of wgrad are then made from
            transformed values, and "same" names their spec alone. `x_residual=None` with a named `x_wgrad` transforms
            the input itself, not the values of its saved codes.
        skip_unprofitable: whether models quantize only the layers that get faster (`fp8jax.recipes.for_shapes`).

    Raises:
        ValueError: a spec is malformed, or settings contradict each other.
    """

    x: str | None = None
    w: str | None = None
    dy: str | None = None
    w_dgrad: str | None = SAME
    x_wgrad: str | None = SAME
    dy_wgrad: str | None = SAME
    x_residual: str | None = SAME
    scaling: str = "current"
    w_scaling: str | None = None
    amax_history_length: int = 1024
    margin: int = 0
    fallback_fraction_range: tuple[float, float] = (0.1, 0.3)
    threshold_update_factor: float = 1.3
    weight_amax_interval: int = 500
    fast_accumulation: tuple[str, ...] = ("forward",)
    rotation: int | None = None
    skip_unprofitable: bool = False

    def __post_init__(self) -> None:
        for field in (*OPERANDS, *_SOURCES):
            text = getattr(self, field)
            if text is None or (text == SAME and field not in ("x", "w", "dy")):
                continue
            spec = QuantSpec.parse(text)
            is_operand = formats.get(spec.format).is_matmul_format or spec.is_block_scaled
            if field != "x_residual" and (not is_operand or spec.expand):
                raise ValueError(
                    f"linear.{field} {text!r} is not supported as a matmul operand; use an 8-bit format without "
                    "expansion, or 'e2m1:nv16'"
                )
            if field in ("x", "w", "w_dgrad", "x_wgrad") and spec.rounding == "stochastic":
                raise ValueError(
                    f"linear.{field} {text!r}: stochastic rounding is supported only for gradients and residuals; "
                    "omit '+stochastic'"
                )
            if spec.granularity == "channel" or spec.axis != -1 or spec.layer_axes:
                raise ValueError(f"linear.{field} {text!r} must have scales along the contraction, its last axis")
        for product, (a, b) in self.products().items():
            if (a is None) != (b is None):
                raise ValueError(
                    f"linear: the {product} product has one quantized operand, {a or b}; quantize both or neither"
                )
            if a and b and formats.get(a.format).is_float != formats.get(b.format).is_float:
                raise ValueError(
                    f"linear: the {product} product mixes integer and floating-point operands, {a} and {b}; use one "
                    "kind for both"
                )
            if a and b and formats.get(a.format).is_fp4 != formats.get(b.format).is_fp4:
                raise ValueError(
                    f"linear: the {product} product mixes 4-bit and 8-bit operands, {a} and {b}; use the same width "
                    "for both"
                )
        self._check_rotation()
        sources = {
            "w_dgrad": self.w,
            "dy_wgrad": self.dy,
            "x_wgrad": self.x if self.x_residual == SAME else self.x_residual,
        }
        shared = self._check_shares_token_scales(sources["x_wgrad"])
        for field, source in sources.items():
            if field != "w_dgrad" and (shared or self.rotation):
                continue
            if getattr(self, field) == SAME and source and QuantSpec.parse(source).granularity not in TRANSPOSABLE:
                raise ValueError(
                    f"linear.{field} cannot be the same as {source!r}, whose scales cannot be transposed; pass a spec"
                )
        check_choice("linear.scaling", self.scaling, NAMES)
        if self.w_scaling is not None:
            check_choice("linear.w_scaling", self.w_scaling, NAMES)
        self._check_stateful_strategies()
        if unknown := set(self.fast_accumulation) - set(self.products()):
            names = ", ".join(self.products())
            raise ValueError(f"linear.fast_accumulation contains unknown products: {sorted(unknown)}. Use {names}")
        check_booleans(self, "skip_unprofitable", prefix="linear.")
        for field in ("amax_history_length", "weight_amax_interval"):
            if getattr(self, field) < 1:
                raise ValueError(f"linear.{field} must be positive, not {getattr(self, field)}")

    def _check_rotation(self) -> None:
        """Raises ValueError for a rotation of unknown length, or that wgrad has no use for."""
        if self.rotation is None:
            return
        if self.rotation not in ROTATIONS:
            raise ValueError(f"linear.rotation {self.rotation!r} is not one of {', '.join(map(str, ROTATIONS))}")
        for field in ("x_wgrad", "dy_wgrad"):
            spec = self.spec(field)
            if spec is None or spec.is_folded:
                raise ValueError(
                    f"linear.rotation={self.rotation} transforms the quantized operands of wgrad, but linear.{field} "
                    f"is {getattr(self, field)!r} ({spec}). Pass a quantized spec that does not fold, such as "
                    "'e4m3:token', or set rotation=None"
                )

    def _check_stateful_strategies(self) -> None:
        """Raises ValueError for specs that the stateful scaling of their operand does not support."""
        operands_by_scaling: dict[str, list[str]] = {}
        for operand in self.stateful_strategies:
            operands_by_scaling.setdefault(self.scaling_name(operand), []).append(operand)
        for name, operands in operands_by_scaling.items():
            listed = " and ".join([", ".join(operands[:-1]), operands[-1]] if len(operands) > 1 else operands)
            specs, strategy = [self.spec(operand) for operand in operands], self.stateful_strategies[operands[0]]
            if any(spec is not None and spec.granularity not in strategy.granularities for spec in specs):
                per = " or ".join(map(repr, strategy.granularities))
                raise ValueError(
                    f"{name} scaling is per {strategy.granularities[0]}; use granularity {per} for {listed}"
                )
            if None in specs:
                raise ValueError(f"{name} scaling needs {listed} quantized")
            if strategy.is_threshold and any(spec is not None and spec.format != "int8" for spec in specs):
                raise ValueError(f"{name} scaling requires int8 blocks, got linear.{listed} {getattr(self, listed)!r}")
            if strategy.is_threshold and (self.spec("w") != self.spec("x") or self.x_residual is None):
                raise ValueError(
                    f"{name} scaling needs the same blocks for x and w and a quantized x_residual, got x={self.x!r}, "
                    f"w={self.w!r}, x_residual={self.x_residual!r}"
                )

    def scaling_name(self, operand: str) -> str:
        """The name of the scaling of "x", "w" or "dy"."""
        return self.w_scaling if operand == "w" and self.w_scaling is not None else self.scaling

    @functools.cached_property
    def _strategies(self) -> dict[str, Scaling]:
        return {operand: find_scaling(self.scaling_name(operand), self, operand) for operand in OPERANDS}

    def strategy(self, operand: str) -> Scaling:
        """The scaling of "x", "w" or "dy"."""
        return self._strategies[operand]

    def stateless_strategy(self, operand: str) -> Scaling:
        """The scaling of an operand in calls without a state; `Current` if its own scaling is stateful."""
        strategy = self.strategy(operand)
        return Current() if isinstance(strategy, Stateful) else strategy

    @property
    def needs_weight_bounds(self) -> bool:
        """Whether the weight's scale comes from the optimizer: see `fp8jax.track_weight_amax`."""
        return not all(part.collects_stats for part in self.stateful_strategies.values())

    @functools.cached_property
    def stateful_strategies(self) -> dict[str, Stateful]:
        """The stateful scalings, by operand."""
        return {operand: part for operand, part in self._strategies.items() if isinstance(part, Stateful)}

    def _check_shares_token_scales(self, context: str | None) -> bool:
        """Whether wgrad reuses microscaled codes, so that their token scales must be shared between its operands."""
        if not self.x_wgrad == self.dy_wgrad == SAME or context is None or self.dy is None:
            return False
        specs = QuantSpec.parse(context), QuantSpec.parse(self.dy)
        if not any(s.is_folded for s in specs) or not all(s.is_folded or s.granularity == "tensor" for s in specs):
            return False
        if any(not formats.get(s.format).is_float or s.rounding != "nearest" for s in specs):
            return False
        if (
            specs[0].is_folded
            and specs[0].outer_scale == "token"
            and not (specs[1].is_folded and specs[1].outer_scale == "token")
        ):
            raise ValueError(
                f"linear.x_wgrad cannot be the same as {context!r} with dy {self.dy!r}: a per-token fp32 scale cannot "
                "be folded into exponents. Use a dy spec with an outer scale per token, such as 'e4m3:mx32+token', or "
                "pass a spec for linear.x_wgrad"
            )
        return True

    @functools.cached_property
    def shares_token_scales(self) -> bool:
        """Whether wgrad divides token scales between its operands (`fp8jax.ops.quantization.microscaling`)."""
        specs = self.spec("x_wgrad"), self.spec("dy_wgrad")
        return self.x_wgrad == self.dy_wgrad == SAME and any(s is not None and s.is_folded for s in specs)

    @property
    def folded_specs(self) -> tuple[str, ...]:
        """The two-level specs (MOSS) that are folded into rows. No product reads them unfolded."""
        specs = [self.spec("x_residual"), *(spec for pair in self.products().values() for spec in pair)]
        return tuple(dict.fromkeys(str(spec) for spec in specs if spec is not None and spec.is_folded))

    def matmul_operands(self) -> dict[str, tuple[QuantSpec | None, QuantSpec | None]]:
        """The operands of the three products as they are multiplied; `products` returns them as requested."""
        operands = {
            name: tuple(spec if spec is None else spec.folded_spec for spec in pair)
            for name, pair in self.products().items()
        }
        if self.shares_token_scales:
            operands["wgrad"] = tuple(spec and QuantSpec(spec.format) for spec in operands["wgrad"])
        return operands  # type: ignore[return-value]

    def residual_spec(self) -> QuantSpec | None:
        """The spec of the saved input; None for the input itself."""
        spec = self.spec("x_residual")
        return None if spec is None else spec.folded_spec

    @functools.cached_property
    def is_quantized(self) -> bool:
        """Whether any product is quantized."""
        return any(operand is not None for pair in self.products().values() for operand in pair)

    @functools.cached_property
    def is_stochastic(self) -> bool:
        """Whether any operand rounds stochastically, which needs a key."""
        specs = [self.spec("x_residual"), *(operand for pair in self.products().values() for operand in pair)]
        return any(spec is not None and spec.rounding == "stochastic" for spec in specs)

    @functools.cached_property
    def _specs(self) -> dict[str, QuantSpec | None]:
        texts = {field: getattr(self, field) for field in (*OPERANDS, *_SOURCES)}
        specs = {field: text and QuantSpec.parse(text) for field, text in texts.items() if text != SAME}
        for field in [field for field in _SOURCES if field not in specs]:
            specs[field] = specs[_SOURCES[field]]
        if self.rotation and self.x_wgrad == SAME and (spec := specs["x_wgrad"]) is not None:
            specs["x_wgrad"] = dataclasses.replace(spec, rounding="nearest")  # no key is saved
        return specs

    def spec(self, field: str) -> QuantSpec | None:
        """The spec in a field, such as "x", "x_residual" or "w_dgrad", with "same" resolved; None for bf16."""
        return self._specs[field]

    def quantized_spec(self, field: str) -> QuantSpec:
        """`spec` of a field that is quantized."""
        spec = self._specs[field]
        assert spec is not None, f"linear.{field} is not quantized"
        return spec

    def products(self) -> dict[str, tuple[QuantSpec | None, QuantSpec | None]]:
        """The operands of the three products."""
        return {
            "forward": (self.spec("x"), self.spec("w")),
            "dgrad": (self.spec("dy"), self.spec("w_dgrad")),
            "wgrad": (self.spec("x_wgrad"), self.spec("dy_wgrad")),
        }


RECOMPUTED = "recomputed"


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The formats of a training run, in independent parts that can be combined with `dataclasses.replace`.

    Attributes:
        name: name in logs and tables.
        weights: storage of the parameters.
        optimizer: storage of the optimizer's moments.
        linear: operands of the products of linear layers.
        context: what non-linear operations save for the backward pass.
        comm: format of gradients between devices.
        head: operands of the products of output heads; by default they stay in 16 bits. A head with
            `fp8jax.linear_cross_entropy` as its loss then follows `linear`.
        unquantized_blocks: numbers of blocks, at the start and at the end of a model, with products in 16 bits. A
            layer's block is the first number in its path, as 3 in "layers/3/mlp/up". A `jax.lax.scan` over a whole
            stack of layers, as in a scanned model, is split at its first and last blocks. Layers of other loops, and
            those without a number, have no block. Rules that name a layer come first.
    """

    name: str
    weights: Weights = _FP32_WEIGHTS
    optimizer: Optimizer = _DEFAULT_OPTIMIZER
    linear: Linear = Linear()
    context: Context = _NO_CONTEXT
    comm: Comm = _XLA_COMM
    head: Linear = Linear()
    unquantized_blocks: tuple[int, int] = (0, 0)

    def __post_init__(self) -> None:
        counts = self.unquantized_blocks
        if not (isinstance(counts, tuple) and len(counts) == 2 and all(type(n) is int and n >= 0 for n in counts)):
            raise ValueError(f"unquantized_blocks must be two block counts, such as (1, 1), got {counts!r}")
        for field in dataclasses.fields(self)[1:-1]:
            if not isinstance(getattr(self, field.name), field.type):  # type: ignore[arg-type]
                name = field.type.__name__  # type: ignore[union-attr]
                hint = ", such as fp8jax.recipes.HEAD" if field.name == "head" else ""
                raise TypeError(f"{field.name} must be of type {name}{hint}, not {getattr(self, field.name)!r}")
        scaled = [m for m in ("mu", "nu") if self.optimizer.spec(m) is not None and self.optimizer.group_size is None]
        master, fp8lm_advice = self.weights.master, "Optimizer(mu='e4m3', nu='fp16', group_size=None, expand=False)"
        is_fp8lm = len(scaled) == 2 and self.optimizer.nu == SCALED_MASTER and self.optimizer.mu in ("e4m3", "e5m2")
        if scaled and (not is_fp8lm or master in ("fp32", "bf16")):
            raise ValueError(
                f"optimizer.group_size=None stores {' and '.join(scaled)} with one scale per tensor, which requires "
                f"{fp8lm_advice} and weights.master 'fp16' (FP8-LM) or split master weights, not {self.optimizer} and "
                f"{master!r}; set optimizer.group_size"
            )
        if master == SCALED_MASTER and not is_fp8lm:
            raise ValueError(f"weights.master 'fp16' requires {fp8lm_advice}, not {self.optimizer}")

    @property
    def has_per_tensor_moments(self) -> bool:
        """Whether moments have one scale per tensor, as in FP8-LM (`fp8jax.fp8lm_adamw`)."""
        return self.optimizer.group_size is None and self.optimizer.spec("mu") is not None

    def plan(self) -> list[tuple[str, str, str, float]]:
        """The storage plan: (role, stored in, computed in, bytes per element), metadata of full groups included."""
        weights = self.weights
        stored: list[tuple[str, str | QuantSpec, str]] = [
            ("master weight", weights.master, "fp32"),
            ("working weight", weights.compute, weights.compute),
            ("gradient", weights.param_format, weights.compute),
            ("first moment", self.optimizer.spec("mu") or self.optimizer.mu, "fp32"),
            ("second moment", self.optimizer.spec("nu") or self.optimizer.nu, "fp32"),
        ]
        for prefix, part in (("", self.linear), ("head's ", self.head)):
            for product, operands in part.matmul_operands().items() if not prefix or part.is_quantized else ():
                names = {"forward": ("x", "w"), "dgrad": ("dy", "w"), "wgrad": ("x", "dy")}[product]
                for name, spec in zip(names, operands, strict=True):
                    computed = spec.format if spec else weights.compute
                    stored.append((f"{prefix}{product} {name}", spec or weights.compute, computed))
        stored.append(("saved linear input", self.linear.residual_spec() or weights.compute, "-"))
        stored.append(("saved non-linear input", self.context.spec or weights.compute, weights.compute))
        if self.comm.gradients is not None:
            stored.append(("gradient between devices", self.comm.spec or self.comm.gradients, "fp32"))
        if self.context.recompute_activations:
            stored.append(("linear input from a norm or activation", RECOMPUTED, weights.compute))
        return [self._with_residuals(role, str(kind), computed, self._bytes(kind)) for role, kind, computed in stored]

    def _bytes(self, stored: str | QuantSpec) -> float:
        if stored == RECOMPUTED:
            return 0.0
        if stored == self.weights.master:
            return self.weights.bytes_per_element
        return formats.get(stored).bytes_per_element if isinstance(stored, str) else stored.bytes_per_element

    def _with_residuals(self, role: str, stored: str, computed: str, size: float) -> tuple[str, str, str, float]:
        """A row of the plan; for an input with fallback, with the largest fraction of residual blocks."""
        strategy = self.linear.stateful_strategies.get("x")
        if role != "forward x" or strategy is None or not strategy.is_threshold:
            return role, stored, computed, size
        lowest, highest = self.linear.fallback_fraction_range
        return role, f"{stored}, {100 * lowest:g} to {100 * highest:g} % twice", computed, size * (1 + highest)

    def explain(self) -> str:
        """The storage plan as a table in text."""
        rows = [(role, stored, computed, f"{size:.4g}") for role, stored, computed, size in self.plan()]
        rows.insert(0, ("role", "stored in", "computed in", "bytes/element"))
        scaling_text = ""
        if self.linear.is_quantized:
            scaling_text = f", {self.linear.scaling} scaling"
            scaling_text += f", weights {self.linear.w_scaling}" if self.linear.w_scaling else ""
        folds = [sentence(describe_folding(self.linear.folded_specs))] if self.linear.folded_specs else []
        return "\n".join([f"recipe {self.name}{scaling_text}", table(rows, names=1), *folds])


def describe_folding(specs: Iterable[str]) -> str:
    """A sentence for tables about operands with these specs, which fold."""
    return (
        f"microscales are folded into row scales: operands with spec {' and '.join(specs)} are multiplied and saved "
        "with one fp32 scale per row (in the weight gradient, one per tensor). No microscaled product runs unless a "
        "spec has the option 'exact'"
    )
