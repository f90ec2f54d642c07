"""Errors of each preset's tensors: the layer with the largest, invalid settings, and models with named layers."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fp8jax
from experiments.errors import UserError
from experiments.papers import parity_runs, recipe_errors
from experiments.papers.parity_runs import PlainSetting

TINY = PlainSetting(dim=32, layers=3, heads=2, mlp_dim=48, length=16, batch=4, steps=10, warmup=2)
LOSSES = [4.0, 3.0, 2.0, 2.0]


def write_file(folder, preset, losses, statistics, **changes):
    content = {"commit": "abc", "date": "2026-11-29", "device": "d", "text": "t", "parameters": 7, "losses": losses,
               "setting": dataclasses.asdict(TINY), "statistics": statistics}  # fmt: skip
    (folder / "parity_recipe_errors_small").mkdir(parents=True, exist_ok=True)
    (folder / "parity_recipe_errors_small" / f"{preset}.json").write_text(json.dumps(content | changes))


def test_the_page_names_the_coarsest_layer_of_the_second_half_of_the_run(tmp_path):
    statistics = {"blocks/0/q/x/snr_db": [5.0, 5.0, 31.0, 33.0], "blocks/1/q/x/snr_db": [40.0, 40.0, 30.0, 20.0],
                  "blocks/1/q/dy/snr_db": [25.0] * 4, "blocks/1/q/x/fallback_rate": [0.2] * 4}  # fmt: skip
    write_file(tmp_path, "bf16", LOSSES, {})
    write_file(tmp_path, "coat", [4.0, 3.0, 2.02, 2.06], statistics)
    recipe_errors.write(tmp_path, "small")
    written = json.loads((tmp_path / "d" / "recipe_errors_small.json").read_text())
    values = {(row["case"], row["metric"]): row["value"] for row in written["rows"]}
    assert values == pytest.approx({
        ("coat", "loss"): 2.0, ("coat", "x"): 25.0, ("coat", "inputs: blocks/1/q"): 25.0,
        ("coat", "dy"): 25.0, ("coat", "gradients of outputs: blocks/1/q"): 25.0,
    })  # fmt: skip
    assert (tmp_path / "d" / "recipe_errors_small.png").exists()
    write_file(tmp_path, "coat", LOSSES, statistics, text="u")
    with pytest.raises(UserError, match="differ in text"):
        recipe_errors.write(tmp_path, "small")


def test_windows_leave_out_steps_that_fill_none():
    assert recipe_errors.windows([*range(5), 10, 10, 10, 10, 0, 99], np.mean) == [2.0, 8.0]


def test_blocks_that_a_recipe_leaves_in_16_bits_have_no_statistics():
    """Traced, not run."""
    run, _, _ = parity_runs.plain_programs(fp8jax.recipes.nvfp4(), TINY, is_observed=True, generator="rbg")
    starts = jnp.zeros((TINY.steps, TINY.batch), jnp.int32)
    _, losses, actual = jax.eval_shape(run, jnp.int32(0), jnp.zeros(1000, jnp.uint8), starts)
    assert {layer.split("/")[1] for layer, roles in actual.items() if "x" in roles} == {"1"}
    assert losses.shape == actual["blocks/1/up"]["x"]["snr_db"].shape == (TINY.steps,)


def test_experts_of_a_users_model_keep_a_scaling_state_each():
    setting = dataclasses.replace(TINY, layers=1, experts=4, experts_per_token=2)
    run, validate, _ = parity_runs.plain_programs(fp8jax.recipes.int8_fallback(), setting)
    starts = jnp.zeros((setting.steps, setting.batch), jnp.int32)
    state, _ = jax.eval_shape(run, jnp.int32(0), jnp.zeros(1000, jnp.uint8), starts)
    shapes = [x.shape for x in jax.tree.leaves(state.network)]
    assert (4,) in shapes
    assert jax.eval_shape(validate, state, jnp.zeros((2, 4, 17), jnp.int32)).shape == (2,)
