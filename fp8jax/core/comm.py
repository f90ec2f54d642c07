"""`Comm`: the part of a `Recipe` that defines the format of gradients between devices."""

import dataclasses

from fp8jax.core import formats
from fp8jax.core.spec import QuantSpec

FORMS = ("two_phase", "one_phase")
_PLAIN = ("bf16", "fp32")


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
        if self.form not in FORMS:
            raise ValueError(f"unknown comm.form {self.form!r}; it is one of {', '.join(FORMS)}")
        one_phase = self.form == "one_phase"
        spec = self.spec
        if spec is None:
            if one_phase or self.auto_scale:
                raise ValueError(
                    f"comm.form {self.form!r} and auto_scale={self.auto_scale} are of 8-bit gradients, but "
                    f"comm.gradients is {self.gradients!r}; give 'e4m3', or leave both out"
                )
            return
        if not formats.get(spec.format).is_matmul_format:
            raise ValueError(f"comm.gradients {self.gradients!r}: codes that travel are of 'e4m3', 'e5m2' or 'int8'")
        if spec.granularity not in ("tensor", "group") or spec.axis != -1 or spec.expand:
            raise ValueError(
                f"comm.gradients {self.gradients!r}: scales are shared by a tensor or by groups of its last axis, "
                "without expansion, as 'e4m3' or 'e4m3:group128'"
            )
        if spec.rounding != "nearest" or spec.scale_format != "fp32":
            raise ValueError(f"comm.gradients {self.gradients!r} must round to nearest and have fp32 scales")
        if one_phase and not formats.get(spec.format).is_float:
            raise ValueError(f"comm.form 'one_phase' adds codes, and sums of {spec.format} wrap around; take 'e4m3'")
        if self.auto_scale and not one_phase:
            raise ValueError("comm.auto_scale is for sums that may saturate, of form 'one_phase'; two phases never do")

    @property
    def spec(self) -> QuantSpec | None:
        """The `QuantSpec` of the gradients; None if they are not quantized."""
        return None if self.gradients is None or self.gradients in _PLAIN else QuantSpec.parse(self.gradients)
