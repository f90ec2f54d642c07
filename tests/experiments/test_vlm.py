"""The vision-language model: its images, its attention, its quantization with `coat`, and equal learning."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import fp8jax
from experiments.models.llama import LlamaConfig
from tests.experiments.vlm import COLOURS, VLM, WORDS, ViTConfig, caption_loss, pairs

VISION = ViTConfig(image=16, patch=4, dim=32, layers=2, heads=2, mlp_dim=64)
TEXT = LlamaConfig(vocab=len(WORDS), dim=32, layers=2, heads=2, kv_heads=1, mlp_dim=64)
COAT = fp8jax.recipes.coat()
FAITHFUL = dataclasses.replace(COAT, context=fp8jax.recipes.Context("e4m3:group16"))


@functools.cache
def make(dtype=jnp.bfloat16) -> VLM:
    return VLM(VISION, TEXT, dtype=dtype, rngs=nnx.Rngs(0))


def test_captions_say_what_is_on_the_pictures():
    images, captions = pairs(0, 200)
    assert (images.shape, images.dtype) == ((200, 16, 16, 3), np.float32)
    assert (captions.shape, captions.dtype) == ((200, 7), np.int32)
    recorded = set()
    for image, caption in zip(images, captions, strict=True):
        dot, a, colour, shape, at, down, right = (WORDS[word] for word in caption)
        assert (dot, a, at) == (".", "a", "at")
        bright = image.max(-1) > 0.5
        row, column = np.argwhere(bright).mean(0)
        assert (down, right) == (("top", "bottom")[int(row > 7.5)], ("left", "right")[int(column > 7.5)])
        np.testing.assert_array_equal(np.round(image[bright].mean(0)), COLOURS[colour])
        # A square fills its box, a disc most of it, a cross less than two thirds.
        box = bright[np.ix_(bright.any(1), bright.any(0))]
        assert shape == ("square" if box.mean() > 0.97 else "disc" if box.mean() > 0.62 else "cross"), box
        recorded.add((colour, shape, down, right))
    assert len(recorded) > 40
    for same, other in ((0, True), (1, False)):
        assert np.array_equal(pairs(same, 200)[0], images) is other


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("layers", 0, "layers must be positive, got 0"),
        ("patch", 5, "image 16 is not divisible by patch 5"),
        ("heads", 3, "dim 32 is not divisible by heads 3"),
    ],
)
def test_impossible_vision_towers_are_errors_that_name_the_value(field, value, message):
    with pytest.raises(ValueError, match=message):
        VLM(dataclasses.replace(VISION, **{field: value}), TEXT, rngs=nnx.Rngs(0))


def test_patches_see_one_another_and_text_sees_its_image_and_what_is_before_it():
    model = make(dtype=jnp.float32)
    run = nnx.jit(lambda model, images, captions: (model.vision(images), model(images, captions)))
    images, captions = pairs(0, 2)
    tower, logits = run(model, images, captions)
    assert (tower.shape, logits.shape) == ((2, VISION.patches, VISION.dim), (2, 7, len(WORDS)))
    corner, later = images.copy(), captions.copy()
    corner[1, -1, -1], later[:, 4] = 3, 0
    for before, after in zip((tower, logits), run(model, corner, captions), strict=True):
        moved = np.abs(np.asarray(after - before)).max(-1)
        assert moved[0].max() < 1e-6 < 1e-4 < moved[1].min()
    moved = np.abs(np.asarray(run(model, images, later)[1] - logits)).max(-1)
    assert moved[:, :4].max() < 1e-6 < 1e-4 < moved[:, 4:].min()


@pytest.mark.parametrize("recipe", [COAT, pytest.param(FAITHFUL, marks=pytest.mark.slow)], ids=["lean", "faithful"])
def test_coat_knows_every_part_and_changes_no_parameter(recipe):
    model = make()
    report = fp8jax.explain(model, recipe, *map(jnp.asarray, pairs(0, 2)))
    swiglu, mlp = "silu(gate) * up", "gelu_tanh(x)"
    assert {part.path: part.kind for part in report.context_entries} == {
        **dict.fromkeys(("vision/norm", "vision/layers/attention_norm", "vision/layers/mlp_norm"), "LayerNorm"),
        # The last one's result is sliced before the head reads it.
        **dict.fromkeys(("decoder/layers/attention_norm", "decoder/layers/mlp_norm"), "RMSNorm"),
        **{"vision/layers/mlp/down": mlp, "projector/down": mlp, "decoder/layers/mlp/down": swiglu},
    }
    assert all(part.context == recipe.context for part in report.context_entries)
    alone = {layer.path for layer in report.skipped_layers if layer.kind in ("Linear", "LinearGeneral")}
    assert alone == {"vision/embed_patch", "decoder/head"}
    assert len(report.quantized_layers) == 6 + 2 + 7
    quantized = fp8jax.nnx.quantize(model, recipe)
    before, after = (dict(nnx.to_flat_state(nnx.state(m))) for m in (model, quantized))
    assert before.keys() == after.keys()
    for path in before:
        np.testing.assert_array_equal(before[path][...], after[path][...])


def trained(recipe: fp8jax.Recipe | None) -> tuple[float, float, float]:
    """Returns the loss of held-out pairs before and after training, and that of images with other captions."""
    model = make() if recipe is None else fp8jax.nnx.quantize(make(), recipe)
    graph, params = nnx.split(model, nnx.Param)
    tx = optax.adamw(3e-3, b2=0.99)
    if recipe is not None:
        tx = fp8jax.compressed_adamw(3e-3, b2=0.99, **dataclasses.asdict(recipe.optimizer))

    @functools.partial(jax.jit, compiler_options={"xla_llvm_disable_expensive_passes": True})
    def step(params, state, images, captions):
        loss, gradient = jax.value_and_grad(lambda p: caption_loss(nnx.merge(graph, p), images, captions))(params)
        updates, state = tx.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, loss

    state = tx.init(params)
    held_out = [pairs(1_000 + i, 32) for i in range(4)]

    def evaluate(roll: int = 0) -> float:
        return float(np.mean([step(params, state, x, np.roll(captions, roll, 0))[2] for x, captions in held_out]))

    before = evaluate()
    for i in range(90):
        params, state, _ = step(params, state, *pairs(i, 32))
    return before, evaluate(), evaluate(roll=1)


@pytest.mark.slow
def test_it_learns_to_read_pictures_it_has_not_seen_in_bf16_and_with_coat():
    plain, coat = trained(None), trained(COAT)
    # Without the image, a model guesses colour, shape and position, in six words.
    blind = (np.log(len(COLOURS)) + np.log(3) + 2 * np.log(2)) / 6
    for before, after, mismatched in (plain, coat):
        assert before > 0.9 * np.log(len(WORDS))
        assert after < 0.75 * blind < blind < mismatched
    np.testing.assert_allclose(coat, plain, rtol=0.02)
