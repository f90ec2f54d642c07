"""Fine-tuning by Tunix in FP8 with an 8-bit optimizer: python examples/tunix_sft.py [recipe] [steps]

Tunix's Qwen3 and its trainer are as they come (`pip install google-tunix`): the trainer is given a quantized model and
our optimizer. A question is a sum, and the loss is of the answer's digits alone.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tunix.models.qwen3.model import ModelConfig, Qwen3
from tunix.sft.hooks import TrainingHooks
from tunix.sft.peft_trainer import PeftTrainer, TrainingConfig

import fp8jax

LENGTH, BATCH = 12, 64
CONFIG = ModelConfig(
    num_layers=2,
    vocab_size=128,
    embed_dim=128,
    hidden_dim=256,
    num_heads=4,
    head_dim=32,
    num_kv_heads=2,
    rope_theta=10_000,
    norm_eps=1e-6,
)


class Losses(TrainingHooks):
    """Keeps the loss of each step."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_step_end(self, trainer: PeftTrainer, step: int, loss: float, step_time: float) -> None:
        self.values.append(float(loss))

    on_train_start = on_train_end = on_train_step_start = on_eval_step_start = lambda self, *args: None
    on_eval_step_end = lambda self, *args: None  # noqa: E731


def batches(steps: int):
    """Sums such as "27+54=81", as ASCII, and where the answer is."""
    draw = np.random.default_rng(0)
    for _ in range(steps):
        pairs = draw.integers(10, 50, (BATCH, 2))
        lines = [f"{a}+{b}={a + b}" for a, b in pairs]
        tokens = np.array([list(line.ljust(LENGTH).encode()) for line in lines], np.int32)
        yield {"tokens": tokens, "answer": np.arange(LENGTH) >= np.argmax(tokens == ord("="), 1)[:, None]}


def inputs(batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """What the trainer's own loss takes."""
    places = jnp.broadcast_to(jnp.arange(LENGTH), batch["tokens"].shape)
    causal = jnp.broadcast_to(jnp.tril(jnp.ones((LENGTH, LENGTH), bool)), (BATCH, LENGTH, LENGTH))
    mask = batch["answer"] & (batch["tokens"] != ord(" "))
    return {"input_tokens": batch["tokens"], "input_mask": mask, "positions": places, "attention_mask": causal}


def main(recipe: str = "coat", steps: int = 200) -> list[float]:
    model = Qwen3(CONFIG, rngs=nnx.Rngs(0))
    if recipe != "bf16":
        model = fp8jax.nnx.quantize(model, recipe)
    config = TrainingConfig(eval_every_n_steps=steps + 1, max_steps=steps, pbar_description=None)
    trainer = PeftTrainer(model, fp8jax.optimizer(recipe, 3e-3, clip=1.0), config)
    losses = Losses()
    trainer.with_gen_model_input_fn(inputs).with_training_hooks(losses)
    trainer.train(batches(steps))
    state = fp8jax.state_bytes(trainer.optimizer.opt_state)
    print(f"{recipe}: loss {losses.values[0]:.3f} to {losses.values[-1]:.3f}; {state}")
    return losses.values


if __name__ == "__main__":
    main(*sys.argv[1:2], *map(int, sys.argv[2:3]))
