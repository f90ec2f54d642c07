"""`LlamaConfig`: the configuration of Llamas and related models."""

import dataclasses

from experiments.models.rope import RopeScaling


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """The shape of a Llama. `validate` rejects invalid combinations.

    Attributes:
        vocab: rows of the embedding table.
        dim: width of the residual stream.
        layers: number of blocks.
        heads: query heads; `dim / heads` channels each.
        kv_heads: key and value heads, shared by `heads / kv_heads` query heads each.
        mlp_dim: width inside the SwiGLU, of each expert.
        tied: whether the output head is the transposed embedding table.
        rope_theta: base of the rotary frequencies.
        norm_eps: added to the mean square in RMSNorm, to the variance in LayerNorm.
        norm: "rms", with a scale; "layer", with neither scale nor bias; or "layer_bias", with both.
        norm_after: whether norms apply to the outputs of attention and MLP, before they are added, instead of their
            inputs.
        qk_norm: RMSNorm of queries and keys before their rotation: "" for none, "head" for one of each head's
            channels, "width" for one over all heads.
        channels: channels of a head; None for `dim / heads`.
        bias: layers with a bias: "" for none, "qkv", or "all" except the head.
        mlp: "swiglu", or "gelu" without a gate, by its tanh formula.
        experts: MLPs of a layer; a router selects some of them for each token. 0 for one MLP and no router.
        experts_per_token: number of experts per token.
        normalize_choices: whether the weights of a token's experts are normalized to a sum of 1.
        window: size of the attention window, including the position itself; None for no limit.
        rope_scaling: scaling of the rotary frequencies, or None.
        learned_positions: rows of a table of learned positions, instead of rotary positions; 0 for none.
    """

    vocab: int
    dim: int
    layers: int
    heads: int
    kv_heads: int
    mlp_dim: int
    tied: bool = False
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    norm: str = "rms"
    norm_after: bool = False
    qk_norm: str = ""
    channels: int | None = None
    bias: str = ""
    mlp: str = "swiglu"
    experts: int = 0
    experts_per_token: int = 0
    normalize_choices: bool = True
    window: int | None = None
    rope_scaling: RopeScaling | None = None
    learned_positions: int = 0

    @property
    def head_dim(self) -> int:
        """Channels of one head."""
        return self.dim // self.heads if self.channels is None else self.channels

    def validate(self) -> None:
        """Raises ValueError with the first invalid value."""
        for name in ("vocab", "dim", "layers", "heads", "kv_heads", "mlp_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("channels", "window"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1 or None, got {getattr(self, name)}")
        if self.channels is None and self.dim % self.heads:
            raise ValueError(f"dim {self.dim} is not divisible by heads {self.heads}")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads {self.heads} is not divisible by kv_heads {self.kv_heads}")
        if self.head_dim % 2 and not self.learned_positions:
            raise ValueError(f"rotary positions need an even head size, got {self.head_dim}")
        if self.learned_positions < 0:
            raise ValueError(f"learned_positions must be at least 0, got {self.learned_positions}")
        self._validate_experts()
        for name, supported in _SUPPORTED.items():
            if getattr(self, name) not in supported:
                raise ValueError(f"{name} must be {' or '.join(supported)}, got {getattr(self, name)!r}")
        if self.rope_scaling is not None:
            self.rope_scaling.validate()

    def _validate_experts(self) -> None:
        if self.experts < 0 or self.experts == 1:
            raise ValueError(f"experts must be 0, for one MLP, or at least 2, got {self.experts}")
        most = self.experts
        if not min(1, most) <= self.experts_per_token <= most:
            raise ValueError(
                f"experts_per_token must be from {min(1, most)} to experts {most}, got {self.experts_per_token}"
            )
        if self.experts and (self.norm != "rms" or self.norm_after):
            raise ValueError(
                f"experts need an RMSNorm before them, got norm {self.norm!r}, norm_after {self.norm_after}"
            )
        if self.experts and (self.mlp != "swiglu" or self.bias == "all"):
            raise ValueError(f"experts are SwiGLUs without biases, got mlp {self.mlp!r} and bias {self.bias!r}")


_SUPPORTED = {
    "norm": ("rms", "layer", "layer_bias"),
    "qk_norm": ("", "head", "width"),
    "bias": ("", "qkv", "all"),
    "mlp": ("swiglu", "gelu"),
}
