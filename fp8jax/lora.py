"""Low-rank adapters on frozen weights in 8 bits.

    base = fp8jax.lora.freeze(params, "e4m3:block128", targets=r".*/kernel")       # one byte per parameter
    adapters = fp8jax.lora.init(key, base, rank=16, alpha=32, targets=r".*/(q|v)/kernel")
    y = fp8jax.lora.linear(x, base["q"]["kernel"], adapters["q/kernel"], recipe="te_current")
    params = fp8jax.lora.merge(base, adapters, jnp.bfloat16)

`adapt` combines both into parameters for a model that has no code for adapters:

    fast = fp8jax.transform(loss, "te_current")
    grads = jax.grad(lambda adapters: fast(fp8jax.lora.adapt(base, adapters), batch))(adapters)

Differentiate with respect to `adapters`, and pass only these to the optimizer.
"""

from fp8jax.ops.products.lora import AdaptedWeight, Adapter, adapt, init_adapter, merge_adapter
from fp8jax.ops.products.lora import freeze_weights as freeze
from fp8jax.ops.products.lora import init_adapters as init
from fp8jax.ops.products.lora import lora_linear as linear
from fp8jax.ops.products.lora import merge_adapters as merge
from fp8jax.ops.products.peft_files import load, save

__all__ = [
    "AdaptedWeight",
    "Adapter",
    "adapt",
    "freeze",
    "init",
    "init_adapter",
    "linear",
    "load",
    "merge",
    "merge_adapter",
    "save",
]


def __dir__() -> list[str]:
    return __all__
