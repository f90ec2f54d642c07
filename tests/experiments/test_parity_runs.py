"""Training runs of `parity`: paired seeds, damaged products, rounded operands, and files of runs."""

import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import fp8jax
from experiments.errors import UserError
from experiments.papers import parity, parity_runs
from experiments.papers.parity import BASE
from experiments.papers.parity_runs import FixedBatch, ParityArm, Setting
from experiments.results import record
from experiments.train.config import check_same, flatten_fields, with_new_names
from fp8jax.ops.products.linear import linear

ROOT = pathlib.Path(__file__).parents[2]
TINY = Setting(
    dim=32, layers=1, heads=2, mlp_dim=48, length=16, batch=4, steps=20, warmup=2, valid=8, valid_fraction=0.2
)


@pytest.fixture(scope="module")
def text(corpus):
    return parity_runs.read_text([str(corpus)], TINY)


@pytest.mark.slow
def test_arms_of_a_seed_start_alike_and_read_the_same_text(text, tmp_path):
    np.testing.assert_array_equal(text.starts(3, TINY), text.starts(3, TINY))
    assert (text.starts(3, TINY) != text.starts(4, TINY)).any()
    runs = {}
    for name, recipe in ((BASE, fp8jax.recipes.bf16()), ("moments", fp8jax.recipes.coat_optimizer())):
        parity_runs.train_arm(name, ParityArm(recipe), [0, 1], TINY, tmp_path / "file.json", text=text)
        runs[name] = json.loads((tmp_path / "file.json").rename(tmp_path / name).read_text())["runs"]
    first = {name: [of["losses"][0] for of in seeds.values()] for name, seeds in runs.items()}
    # A step's loss is that of the weights before it: another storage of moments changes the first ten little.
    np.testing.assert_allclose(first["moments"], first[BASE], rtol=2e-3)
    assert first["moments"] != first[BASE]
    assert abs(first[BASE][0] - first[BASE][1]) > 1e-4
    assert all(of["losses"][1] < of["losses"][0] for seeds in runs.values() for of in seeds.values())


def test_a_damaged_forward_product_is_trained_and_validated_with(text, tmp_path, monkeypatch):
    """Traced, not run: damage affects every product of the step and of validation."""
    bits = []
    coarse = parity_runs.drop_low_bits
    monkeypatch.setattr(parity_runs, "drop_low_bits", lambda q, lost: (bits.append(lost), coarse(q, lost))[1])
    for product, validated in (("forward", True), ("wgrad", False)):
        run, validate, _ = parity_runs.programs(ParityArm(fp8jax.recipes.te_current(), product, 2), TINY)
        state, _ = jax.eval_shape(run, jnp.int32(0), text.train, text.starts(0, TINY))
        assert set(bits) == {2}
        bits.clear()
        jax.eval_shape(validate, state, text.valid)
        assert bool(bits) == validated
        bits.clear()


def test_runs_are_kept_one_by_one_and_only_with_their_like(text, tmp_path):
    path, arm = tmp_path / "bf16.json", ParityArm(fp8jax.recipes.bf16())

    def train(seeds, setting=TINY, has_time=lambda _: True):
        parity_runs.train_arm("bf16", arm, seeds, setting, path, text=text, has_time=has_time)

    train([0, 1], has_time=lambda took: took == 0)
    content = json.loads(path.read_text())
    assert list(content["runs"]) == ["0"]
    assert content["runs"]["0"]["commit"] == record.commit()
    train([0, 1])
    again = json.loads(path.read_text())
    assert list(again["runs"]) == ["0", "1"]
    assert again["runs"]["0"] == content["runs"]["0"]
    with pytest.raises(UserError, match="another setting; delete it"):
        train([2], dataclasses.replace(TINY, lr=1e-4))
    # A changed recipe is another one. Files from before recipes were written are accepted.
    assert again["recipe"]["optimizer.mu"] == "fp32"
    path.write_text(json.dumps(again | {"recipe": again["recipe"] | {"optimizer.mu": "e4m3"}}))
    with pytest.raises(UserError, match="another recipe; delete it"):
        train([2])
    path.write_text(json.dumps({key: value for key, value in again.items() if key != "recipe"}))
    train([0, 1])


@pytest.mark.parametrize("steps", [1, 100, 2000])
def test_files_name_fields_of_recipes_as_they_were_called_then(steps):
    name = f"moss_interval_{steps}"
    stored = json.loads((ROOT / "results" / "parity_intervals" / f"{name}.json").read_text())["recipe"]
    assert stored["linear.interval"] == str(steps)
    assert parity_runs.read_settings(stored) == parity_runs.settings(parity.ARMS[name].recipe)


OLDER_VALUES = {
    "linear.skip_unprofitable": ("select", {False: "all", True: "gains"}),
    "head.skip_unprofitable": ("select", {False: "all", True: "gains"}),
    "context.recompute_activations": ("mode", {False: "faithful", True: "lean"}),
    "context.amax": ("scales", {"exact": "largest", "bound": "bound"}),
}


def test_files_name_values_of_recipes_as_they_were_called_then():
    recipe = fp8jax.recipes.for_shapes("coat_fast")
    now = parity_runs.settings(dataclasses.replace(recipe, head=recipe.linear))
    older = {name: value for name, value in now.items() if name not in OLDER_VALUES}
    older |= {"linear.select": "gains", "head.select": "gains", "context.mode": "lean", "context.scales": "bound"}
    assert len(older) == len(now)
    assert parity_runs.read_settings(older) == parity_runs.read_settings(now) == now


@pytest.mark.parametrize("name", ["bf16", "coat", "coat_fast", "auto"])
def test_a_run_of_older_values_of_fields_is_continued(name, tmp_path):
    recipe = flatten_fields("recipe", fp8jax.recipes.for_shapes(name) if name == "bf16" else fp8jax.recipes.get(name))
    older = dict(recipe)
    for key, (field, values) in OLDER_VALUES.items():
        older[f"recipe.{key.partition('.')[0]}.{field}"] = values[older.pop(f"recipe.{key}")]
    check_same(older, recipe, tmp_path)
    check_same(recipe, recipe, tmp_path)
    with pytest.raises(UserError, match=r"recipe\.context\.amax was 'bound', now 'exact'"):
        check_same(older | {"recipe.context.scales": "bound"}, recipe | {"recipe.context.amax": "exact"}, tmp_path)


def test_a_run_of_older_names_of_fields_is_continued(tmp_path):
    moss = flatten_fields("recipe", fp8jax.recipes.moss())
    names = {"amax_history_length": "history", "weight_amax_interval": "interval", "x_residual": "saved"}
    names |= {"fallback_fraction_range": "fallback_rates", "threshold_update_factor": "fallback_factor"}
    names |= {"residual": "saved"}
    older = {".".join(names.get(part, part) for part in key.split(".")): value for key, value in moss.items()}
    assert len(older) == len(moss)
    assert {"recipe.head.interval", "recipe.context.saved"} <= older.keys()
    older |= {"recipe.linear.joins": False, "recipe.head.fuse_parallel_matmuls": "False"}
    check_same(older, moss, tmp_path)
    assert with_new_names(older) == moss
    assert with_new_names({"recipe.linear.joins": True}) == {"recipe.linear.joins": True}
    with pytest.raises(UserError, match=r"recipe\.linear\.weight_amax_interval was 7, now 500"):
        check_same(older | {"recipe.linear.interval": 7}, moss, tmp_path)


def test_each_part_of_a_recipe_tells_what_it_sets():
    coat, fast = fp8jax.recipes.coat(), fp8jax.recipes.coat_fast()
    settings_of = {name: parity_runs.settings(of) for name, of in (("coat", coat), ("coat_fast", fast))}
    assert settings_of["coat_fast"].items() - settings_of["coat"].items() == {("context.amax", "bound")}
    head = parity_runs.settings(dataclasses.replace(coat, head=fp8jax.recipes.HEAD))
    assert {name.partition(".")[0] for name in head.keys() - settings_of["coat"].keys()} == {"head"}
    assert parity_runs.settings(fp8jax.Recipe("plain")) == {}


@pytest.mark.parametrize(("product", "grad"), [("forward", False), ("dgrad", True), ("wgrad", True)])
def test_damage_is_done_to_one_product_alone(product, grad):
    x, w, dy = (jax.random.normal(jax.random.key(i), s) for i, s in enumerate([(16, 32), (32, 48), (16, 48)]))

    def three(arm):
        with parity_runs.damaged(arm):
            y, vjp_fn = jax.vjp(lambda x, w: linear(x, w, recipe=recipe), x, w)
            return dict(zip(("forward", "dgrad", "wgrad"), (y, *vjp_fn(dy)), strict=True))

    recipe = fp8jax.recipes.te_current()
    plain, hurt = three(ParityArm(recipe)), three(ParityArm(recipe, product, 2))
    for name, value in plain.items():
        same = np.array_equal(value, hurt[name])
        assert same == (name != product), name
    error = np.linalg.norm(plain[product] - hurt[product]) / np.linalg.norm(plain[product])
    assert 0.02 < error < 0.4


def test_damage_that_meets_no_product_is_refused():
    with (
        pytest.raises(RuntimeError, match="no wgrad product of codes, so no operand was changed"),
        parity_runs.damaged(ParityArm(fp8jax.recipes.bf16(), "wgrad", 2)),
    ):
        jnp.ones(3)


@pytest.mark.parametrize(("name", "dtype", "lost"), [("e4m3", jnp.float8_e4m3fn, 2), ("e5m2", jnp.float8_e5m2, 2)])
def test_coarse_codes_are_the_nearest_of_fewer_bits(name, dtype, lost):
    codes = np.arange(256, dtype=np.uint8).view(dtype)
    codes = codes[np.isfinite(codes.astype(np.float32))]
    q = fp8jax.QTensor(jnp.asarray(codes)[None], jnp.ones((1, 1)), None, None, fp8jax.QuantSpec(name))
    actual = np.asarray(parity_runs.drop_low_bits(q, lost).codes, np.float64)[0]
    bits = ml_dtypes.finfo(dtype).nmant - lost
    x = codes.astype(np.float64)
    step = 2.0 ** (np.floor(np.log2(np.abs(np.where(x == 0, 1, x)))) - bits)
    top = 2.0 ** np.floor(np.log2(float(ml_dtypes.finfo(dtype).max))) * (2 - 2.0**-bits)
    expected = np.clip(np.round(x / step) * step, -top, top)
    np.testing.assert_array_equal(np.abs(actual - x), np.abs(expected - x))  # either of two equally near values
    np.testing.assert_array_equal(actual, np.clip(np.round(actual / step) * step, -top, top))
    with pytest.raises(ValueError, match="mantissa bits to lose"):
        parity_runs.drop_low_bits(q, 4)


@pytest.mark.slow
def test_masters_in_16_bits_and_released_layers_train_as_fp32_masters(tmp_path):
    """Three seeds of a tiny model: losses within 1 % of those of fp32 masters."""
    setting = dataclasses.replace(TINY, dim=64, layers=2, mlp_dim=96, length=32, batch=8, steps=200, lr=3e-4, warmup=10)
    text = parity_runs.read_text([], setting)
    arms = {BASE: parity.ARMS[BASE]}
    arms |= {name: parity.ARMS[name] for name in ("master_bf16_int8", "master_bf16_stochastic", "released_by_shares")}
    results = {}
    for name, arm in arms.items():
        run, validate, _ = parity_runs.programs(arm, setting)
        ends = []
        for seed in range(3):
            state, curve = run(jnp.int32(seed), text.train, text.starts(seed, setting))
            ends.append([float(np.mean(curve[-20:])), float(np.mean(validate(state, text.valid)))])
        results[name] = np.array(ends)
    off = {name: np.abs(ends / results[BASE] - 1).max(0) for name, ends in results.items()}
    for name in ("master_bf16_int8", "master_bf16_stochastic", "released_by_shares"):
        assert off[name].max() < 0.01, off


def coded(x, dtype):
    """Returns the decoded values of per-tensor codes, in float64."""
    x = np.asarray(x, np.float64)
    scale = np.abs(x).max() / float(ml_dtypes.finfo(dtype).max)
    return (x / scale).astype(np.float32).astype(dtype).astype(np.float64) * scale


@pytest.mark.parametrize("operand", ["x", "w", "dy"])
def test_one_operand_alone_is_rounded(operand):
    rng = np.random.default_rng(0)
    arrays = {"x": rng.normal(size=(6, 32)), "w": rng.normal(size=(32, 8)), "dy": rng.normal(size=(6, 8))}
    arrays = {name: jnp.asarray(a, jnp.float32) for name, a in arrays.items()}
    name, dtype = ("e5m2", ml_dtypes.float8_e5m2) if operand == "dy" else ("e4m3", ml_dtypes.float8_e4m3fn)
    multiply = parity_runs.product_of(parity_runs.Rounding(**{operand: name}))
    y, vjp_fn = jax.vjp(multiply, arrays["x"], arrays["w"])
    exact = {name: np.asarray(a, np.float64) for name, a in arrays.items()}
    exact[operand] = coded(exact[operand], dtype)
    expected = exact["x"] @ exact["w"], exact["dy"] @ exact["w"].T, exact["x"].T @ exact["dy"]
    for actual, right in zip((y, *vjp_fn(arrays["dy"])), expected, strict=True):
        assert np.linalg.norm(np.asarray(actual) - right) < 1e-3 * np.linalg.norm(right)


TINY_BATCH = FixedBatch(64, 64, 2, 4, 2, 128, batch=2, length=32, steps=6)


def test_a_seed_has_one_start_in_all_arms_and_learns_the_batch():
    losses = {}
    for name in ("bf16", "dy alone in e5m2"):
        run = parity_runs.fixed_batch_run(parity.ARMS[name], TINY_BATCH)
        losses[name] = [run(seed) for seed in (0, 1)]
    first = [[run[0] for run in runs] for runs in losses.values()]
    assert first[0] == first[1]  # the forward pass of this arm rounds nothing
    assert first[0][0] != first[0][1]
    assert all(run[-1] < run[0] - 0.5 for runs in losses.values() for run in runs)
    assert losses["bf16"][0][-1] != losses["dy alone in e5m2"][0][-1]


def test_older_files_of_the_fixed_batch_are_continued(tmp_path, monkeypatch):
    path = tmp_path / "coat.json"
    old = {"arm": "coat", "device": jax.devices()[0].device_kind, "commit": "abc", "losses": {"0": [4.0, 2.0]}}
    path.write_text(json.dumps(old))
    monkeypatch.setattr(parity_runs, "fixed_batch_run", lambda arm, setting: lambda seed: [3.0, float(seed)])
    parity_runs.train_arm("coat", parity.ARMS["coat"], range(3), TINY_BATCH, path)
    runs = parity_runs.runs_of(json.loads(path.read_text()))
    assert [run["losses"] for run in runs.values()] == [[4.0, 2.0], [3.0, 1.0], [3.0, 2.0]]
    assert runs["0"]["commit"] == "abc"
