"""A whole Llama-2-7B trained on one card: its memory and its speed, with the optimizer inside the backward pass.

All parameters are trained, with masters in fp32; layers run in a loop and compute all but their inputs again. An arm is
a recipe; ", released" updates each layer inside the backward pass (`fp8jax.release`), others hold all gradients first.
", bf16 weights" has no fp32 masters: layers' weights are bf16 and rounded stochastically. "coat_optimizer" has products
in bf16 and moments in 8 bits, "bf16" moments in fp32. "memory" is what the compiled program needs, its arguments
included; what does not fit is not run.
"""

import argparse
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "true")
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.96")

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

import fp8jax
from experiments.bench import timing
from experiments.models import sizes
from experiments.models.llama import Block
from experiments.models.rope import rope_tables
from experiments.models.shape import LlamaConfig

RELEASED, NARROW, VOCAB, RATE = ", released", ", bf16 weights", 32_000, 1e-4
BASE = f"coat_optimizer{RELEASED}"
ARMS = (BASE, f"coat{RELEASED}", f"coat_fast{RELEASED}{NARROW}", "coat", "bf16", f"bf16{RELEASED}")
DRY = LlamaConfig(vocab=64, dim=64, layers=2, heads=2, kv_heads=2, mlp_dim=128)


class CardArm:
    """A recipe's step over a whole model, and the state that it updates."""

    def __init__(self, name: str, model: LlamaConfig, batch: int, length: int) -> None:
        recipe, *how = name.split(", ")
        released, narrow = RELEASED[2:] in how, NARROW[2:] in how
        self.dtype = jnp.bfloat16 if narrow else jnp.float32
        self.config, self.count = model, batch * length
        self.tx = fp8jax.optimizer(recipe, RATE, b2=0.95, weight_decay=0.1)
        layer = jax.checkpoint(self._layer(recipe))
        self.block = fp8jax.release(layer, self.tx, key=jax.random.key(2) if narrow else None) if released else None
        self.tables = rope_tables(length, model.head_dim, model.rope_theta, model.rope_scaling)
        self.tokens = jax.random.randint(jax.random.key(1), (batch, length + 1), 0, model.vocab, jnp.int32)
        self._plain = layer
        self.begin = jax.jit(self._begun)
        step = self._released_step if released else self._plain_step
        self.build = timing.lowered(step, jax.eval_shape(self._begun), self.tokens, donate_argnums=0)
        self.state: Any = None

    def _layer(self, recipe: str) -> Callable[..., jax.Array]:
        """A layer as a function of its parameters, whose products are the recipe's."""
        kinds: dict[str, Any] = {"dtype": jnp.bfloat16, "param_dtype": self.dtype}
        graph, self.shapes = nnx.split(nnx.eval_shape(lambda: Block(self.config, rngs=nnx.Rngs(0), **kinds)))

        def layer(params: Any, x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
            return nnx.merge(graph, jax.tree.unflatten(jax.tree.structure(self.shapes), jax.tree.leaves(params)))(
                x, cos, sin
            )

        quantized = fp8jax.recipes.get(recipe).linear.quantized
        return fp8jax.transform(layer, recipe) if quantized else layer

    def _begun(self) -> Any:
        """The first state, from a generator that compiles fast."""
        config, key = self.config, jax.random.key(0, impl="rbg")

        def drawn(i: int, *shape: int) -> jax.Array:
            normal = 0.02 * jax.random.normal(jax.random.fold_in(key, i), shape)
            return normal if len(shape) > 1 else jnp.ones(shape)

        leaves = nnx.to_pure_dict(self.shapes)
        flat, structure = jax.tree.flatten(leaves)
        stack = [
            (jnp.ones((config.layers, *x.shape)) if x.ndim < 2 else drawn(i, config.layers, *x.shape)).astype(x.dtype)
            for i, x in enumerate(flat)
        ]
        layers = jax.tree.unflatten(structure, stack)
        size = config.dim
        rest = {
            "embed": drawn(101, config.vocab, size),
            "norm": drawn(102, size),
            "head": drawn(103, size, config.vocab),
        }
        if self.block is not None:
            return self.block.init(layers, "layers", stacked=True), (rest, self.tx.init(rest))
        params = {"layers": layers, **rest}
        return params, self.tx.init(params)

    def _loss(self, decode: Callable[[jax.Array], jax.Array], rest: Any, tokens: jax.Array) -> jax.Array:
        table, head = (rest[name].astype(jnp.bfloat16) for name in ("embed", "head"))
        x = decode(table[tokens[:, :-1].reshape(-1)])
        x = fp8jax.rms_norm(x, rest["norm"], recipe="bf16")
        return fp8jax.linear_cross_entropy(x, head, tokens[:, 1:].reshape(-1))

    def _released_step(self, state: Any, tokens: jax.Array) -> Any:
        block, (layers, (rest, rest_state)) = self.block, state
        assert block is not None

        def loss(layers: Any, rest: Any) -> jax.Array:
            return self._loss(lambda x: block.scan(layers, x, *self.tables), rest, tokens)

        value, (layers, grads) = fp8jax.value_and_updates(loss, argnums=(0, 1))(layers, rest)
        return (layers, self.tx.step(grads, rest_state, rest)), value

    def _plain_step(self, state: Any, tokens: jax.Array) -> Any:
        params, moments = state

        def loss(params: Any) -> jax.Array:
            one = lambda x, layer: (self._plain(layer, x, *self.tables), None)  # noqa: E731
            return self._loss(lambda x: lax.scan(one, x, params["layers"])[0], params, tokens)

        value, grads = jax.value_and_grad(loss)(params)
        return self.tx.step(grads, moments, params), value

    @functools.cached_property
    def program(self) -> Any:
        """The compiled step."""
        return self.build()

    @property
    def needs(self) -> float:
        """GB of the program and its arguments."""
        sizes_of = self.program.memory_analysis()
        parts = (sizes_of.argument_size_in_bytes, sizes_of.output_size_in_bytes, sizes_of.temp_size_in_bytes)
        return float(sum(parts) - sizes_of.alias_size_in_bytes) / 1e9

    def __call__(self) -> Any:
        if self.state is None:
            self.state = self.begin()
        self.state, value = self.program(self.state, self.tokens)
        return value

    def stop(self) -> None:
        """Frees the state."""
        jax.tree.map(lambda x: x.delete(), self.state)
        self.state = None


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="release", description=__doc__)
    parser.add_argument("--model", choices=sizes.NAMES, default="7b")
    parser.add_argument("--arm", nargs="+", default=list(ARMS))
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3, help="of a round, untimed and then as many timed")
    parser.add_argument("--out", type=Path, default=Path("results"))
    options = parser.parse_args(argv)
    timing.need_gpu()
    model, length = sizes.get(options.model, VOCAB), options.length
    if timing.dry():
        model, length = DRY, 32
    case = f"{options.model}, {options.batch} x {length} tokens"
    room = (jax.devices()[0].memory_stats() or {}).get("bytes_limit", float("inf")) / 1e9
    arms, needs = dict[str, CardArm](), dict[str, float]()
    for name in options.arm:
        arm = CardArm(name, model, options.batch, length)
        needs[name] = arm.needs
        print(f"  {name}: {needs[name]:.1f} GB{'' if needs[name] < room else ', does not fit'}", flush=True)
        if needs[name] >= room:
            continue
        arms[name] = arm
        print(f"    loss {float(arm()):.4f}", flush=True)
        arm.stop()
    calls: dict[str, Callable[..., Any]] = {**arms}
    times = timing.in_turns(calls, options.rounds, dict.fromkeys(arms, options.steps), lambda name: arms[name].stop())
    table = [
        timing.row(case, name, "memory", size, "GB", options.arm[0], needs[options.arm[0]] / size)
        for name, size in needs.items()
    ]
    base = times.get(options.arm[0])
    for name, taken in times.items():
        spread = taken.quartiles(lambda t: 1e3 * t)
        table.append(timing.row(case, name, "step", 1e3 * taken, "ms", options.arm[0], base and base / taken, spread))
        table.append(timing.row(case, name, "tokens", arms[name].count / taken, "tokens/s"))
    notes = [" ".join(part.split()) for part in (__doc__ or "").split("\n\n")[1:]]
    timing.write("release", "A Llama of 7 billion parameters on one card", table, notes, {}, options.out)
