"""The comparison of training runs: its statistics, what it says of sound and damaged recipes, and the runs."""

import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from scipy import stats

import fp8jax
from experiments.errors import UserError
from experiments.papers import parity_runs, training_parity
from experiments.papers.parity_runs import ParityArm, Setting
from experiments.papers.training_parity import BASE, TRAINING, VALIDATION
from experiments.results import record
from experiments.train.config import check_same, flatten_fields, with_new_names
from fp8jax.ops.products.linear import linear

ROOT = pathlib.Path(__file__).parents[2]
TINY = Setting(
    dim=32, layers=1, heads=2, mlp_dim=48, length=16, batch=4, steps=20, warmup=2, valid=8, valid_fraction=0.2
)


def losses(differences, seeds=8, noise=0.001, common=0.02):
    """Runs whose arms differ from bf16 by shares of the loss, with noise of the arm and much more of the seed."""
    rng = np.random.default_rng(0)
    base = 1 + common * rng.normal(size=seeds)
    runs = {}
    for name, by in ({BASE: 0} | differences).items():
        values = base * (1 + by + (0 if name == BASE else noise * rng.normal(size=seeds)))
        runs[name] = {s: {TRAINING: float(v), VALIDATION: float(v) + 0.1} for s, v in enumerate(values)}
    return runs


def test_sound_arms_pass_a_damaged_one_fails_and_between_them_nothing_is_said():
    found = losses({"coat": 0.0005, "worse": 0.005, "better": -0.02, "control": 0.02})
    verdicts = training_parity.judge(found, paired=True)
    assert verdicts == {"coat": "within", "worse": "undecided", "better": "outside", "control": "outside"}
    # What a damaged arm's seeds differ by says nothing of the others' noise.
    wild = {s: {m: x * (1 + s / 10) for m, x in run.items()} for s, run in found["control"].items()}
    of, beside = (training_parity.differences(f, TRAINING, paired=True) for f in (found, found | {"control": wild}))
    assert beside["coat"].half == of["coat"].half
    assert beside["control"].half > 20 * of["control"].half
    # Compared with the mean of all seeds less can be told: these differ by far more than the limit.
    unpaired = training_parity.judge(found, paired=False)
    assert (unpaired["coat"], unpaired["worse"]) == ("undecided", "undecided")
    one = {name: dict(list(runs.items())[: 8 if name == BASE else 1]) for name, runs in found.items()}
    assert set(training_parity.judge(one, paired=False).values()) == {"not judged"}


def test_an_arm_must_hold_in_training_and_in_validation():
    found = losses({"coat": 0.0})
    for run in found["coat"].values():
        run[VALIDATION] *= 1.03
    assert training_parity.judge(found, paired=True) == {"coat": "outside"}


def test_differences_are_from_the_mean_of_seeds_with_students_interval():
    found = {BASE: dict(enumerate([1.0, 1.02, 0.98])), "coat": dict(enumerate([1.01, 1.05]))}
    found = {name: {s: {TRAINING: x} for s, x in runs.items()} for name, runs in found.items()}
    of = training_parity.differences(found, TRAINING, paired=False)["coat"]
    assert of.value == pytest.approx(0.03)
    coat = np.array([1.01, 1.05]) / 1.03
    noise = np.sqrt((np.var([1.0, 1.02, 0.98]) * 3 + np.var(coat) * 2) / 3)
    noise = max(noise, np.std(coat, ddof=1))
    assert of.half == pytest.approx(stats.t.ppf(0.975, 3) * noise * np.sqrt(1 / 2 + 1 / 3))
    of = training_parity.differences(found, TRAINING, paired=True)["coat"]
    assert of.value == pytest.approx(2.06 / 2.02 - 1)
    inside = np.array([1.01 / 1.0, 1.05 / 1.02])
    inside /= inside.mean()
    assert of.half == pytest.approx(stats.t.ppf(0.975, 1) * np.std(inside, ddof=1) / np.sqrt(2))
    del found["coat"][1]
    of = training_parity.differences(found, TRAINING, paired=True)["coat"]
    assert (of.seeds, of.half, of.verdict) == (1, np.inf, "not judged")


def test_the_interval_holds_the_true_difference_as_often_as_it_says():
    rng, hits = np.random.default_rng(1), 0
    for _ in range(400):
        base = 1 + 0.02 * rng.normal(size=4)
        runs = {BASE: base} | {str(i): base * (1.003 + 0.002 * rng.normal(size=4)) for i in range(2)}
        found = {name: {s: {TRAINING: x} for s, x in enumerate(values)} for name, values in runs.items()}
        of = training_parity.differences(found, TRAINING, paired=True)["0"]
        hits += abs(of.value - 0.003) <= of.half
    assert 0.92 <= hits / 400 <= 0.99


def test_a_control_that_passes_is_told(tmp_path):
    run = {"losses": [1.0] * 20, "valid_loss": 1.0, "seconds": 1.0}
    setting = dataclasses.asdict(TINY)

    def content(by):
        runs = {str(s): run | {"valid_loss": 1 + s / 50 + by + s % 2 / 1e4} for s in range(4)}
        return {"setting": setting, "device": "d", "date": "2026-01-01", "parameters": 1, "moments": 8.0,
                "runs": runs}  # fmt: skip

    (tmp_path / "parity").mkdir()
    for by, told in ((0.0, True), (0.05, False)):
        for name, shift in ((BASE, 0), ("coat", 0), ("control", by)):
            (tmp_path / "parity" / f"{name}.json").write_text(json.dumps(content(shift)))
        assert training_parity.main(["--judge", "--results", str(tmp_path)]) == 0
        assert (tmp_path / "d" / "training_parity.png").exists()
        notes = json.loads((tmp_path / "d" / "training_parity.json").read_text())["notes"]
        assert any("The control is not told from a sound arm" in note for note in notes) == told


def test_runs_of_a_larger_model_stand_in_a_table_of_their_own(tmp_path):
    for folder, arms in (
        ("parity", {BASE: 1.0, "coat": 1.0, "an arm of before": 1.0}),
        ("parity_65m", {BASE: 1.0, "moss": 1.03}),
    ):
        (tmp_path / folder).mkdir()
        for name, loss in arms.items():
            runs = {str(s): {"losses": [loss + s / 50] * 20, "valid_loss": loss + s / 50} for s in range(2)}
            content = {"setting": dataclasses.asdict(TINY), "device": "d", "date": "2026-01-01", "parameters": 7,
                       "moments": 2.0, "commit": f"{name}1"}  # fmt: skip
            (tmp_path / folder / f"{name}.json").write_text(json.dumps(content | {"runs": runs}))
    assert training_parity.main(["--judge", "--results", str(tmp_path)]) == 0
    content = json.loads((tmp_path / "d" / "training_parity.json").read_text())
    # Each row is of the runs of its arm, and says so.
    assert {(row["case"], row["commit"], row["device"]) for row in content["rows"]} == {
        (name, f"{name}1", "d") for name in (BASE, "coat", "an arm of before", "moss")
    }
    tables = {}
    for row in content["rows"]:
        tables.setdefault(row["table"], set()).add(row["case"])
    small = {BASE, "coat", "an arm of before"}
    assert tables == {training_parity.TABLES["13m"]: small, training_parity.TABLES["65m"]: {BASE, "moss"}}
    assert any(note.startswith("Larger: a Llama of 7 parameters") for note in content["notes"])
    assert any(note.startswith("moss: training loss +2.9") and "outside" in note for note in content["notes"])
    assert training_parity.SIZES["65m"][1].tokens == 301_465_600


def test_what_is_left_to_train_is_told(corpus, tmp_path, capsys, monkeypatch):
    for size, (folder, _) in training_parity.SIZES.items():
        monkeypatch.setitem(training_parity.SIZES, size, (folder, TINY))
    argv = ["--data", str(corpus), "--arms", "bf16", "coat", "--results", str(tmp_path)]
    assert training_parity.main([*argv, "--limit", "0"]) == 1
    assert "not finished: bf16, coat; give the same command again" in capsys.readouterr().out
    assert list(tmp_path.glob("*.json")) == []
    assert training_parity.main([*argv, "--data", str(tmp_path / "missing")]) == 2
    assert "no such file or folder" in capsys.readouterr().err


@pytest.fixture(scope="module")
def text(corpus):
    return parity_runs.read_text([str(corpus)], TINY)


def test_arms_of_a_seed_start_alike_and_read_the_same_text(text, tmp_path):
    np.testing.assert_array_equal(text.starts(3, TINY), text.starts(3, TINY))
    assert (text.starts(3, TINY) != text.starts(4, TINY)).any()
    runs = {}
    for name, recipe in ((BASE, fp8jax.recipes.bf16()), ("moments", fp8jax.recipes.coat_optimizer())):
        parity_runs.train_arm(name, ParityArm(recipe), [0, 1], text, TINY, tmp_path / "file.json")
        runs[name] = json.loads((tmp_path / "file.json").rename(tmp_path / name).read_text())["runs"]
    first = {name: [of["losses"][0] for of in seeds.values()] for name, seeds in runs.items()}
    # A step's loss is of the weights before it: moments stored otherwise change little of the first ten.
    np.testing.assert_allclose(first["moments"], first[BASE], rtol=2e-3)
    assert first["moments"] != first[BASE]
    assert abs(first[BASE][0] - first[BASE][1]) > 1e-4
    assert all(of["losses"][1] < of["losses"][0] for seeds in runs.values() for of in seeds.values())


def test_a_damaged_forward_product_is_trained_and_validated_with(text, tmp_path, monkeypatch):
    """Traced, not run: damage reaches every product of the step and of validation."""
    bits = []
    coarse = parity_runs.coarse
    monkeypatch.setattr(parity_runs, "coarse", lambda q, lost: (bits.append(lost), coarse(q, lost))[1])
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
    train = lambda seeds, setting=TINY, **how: parity_runs.train_arm("bf16", arm, seeds, text, setting, path, **how)  # noqa: E731
    train([0, 1], room=lambda took: took == 0)
    kept = json.loads(path.read_text())
    assert list(kept["runs"]) == ["0"]
    assert kept["runs"]["0"]["commit"] == record.commit()
    train([0, 1])
    again = json.loads(path.read_text())
    assert list(again["runs"]) == ["0", "1"]
    assert again["runs"]["0"] == kept["runs"]["0"]
    with pytest.raises(UserError, match="another setting: delete it"):
        train([2], dataclasses.replace(TINY, lr=1e-4))
    # A recipe that has changed is another one; of a file from before recipes were written nothing is known.
    assert again["recipe"]["optimizer.mu"] == "fp32"
    path.write_text(json.dumps(again | {"recipe": again["recipe"] | {"optimizer.mu": "e4m3"}}))
    with pytest.raises(UserError, match="another recipe: delete it"):
        train([2])
    path.write_text(json.dumps({key: value for key, value in again.items() if key != "recipe"}))
    train([0, 1])


@pytest.mark.parametrize("steps", [1, 100, 2000])
def test_files_name_fields_of_recipes_as_they_were_called_then(steps):
    name = f"moss_interval_{steps}"
    stored = json.loads((ROOT / "results" / "parity_intervals" / f"{name}.json").read_text())["recipe"]
    assert stored["linear.interval"] == str(steps)
    assert parity_runs.read_settings(stored) == parity_runs.settings(training_parity.ARMS[name].recipe)


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
    told = {name: parity_runs.settings(of) for name, of in (("coat", coat), ("coat_fast", fast))}
    assert told["coat_fast"].items() - told["coat"].items() == {("context.amax", "bound")}
    head = parity_runs.settings(dataclasses.replace(coat, head=fp8jax.recipes.HEAD))
    assert {name.partition(".")[0] for name in head.keys() - told["coat"].keys()} == {"head"}
    assert parity_runs.settings(fp8jax.Recipe("plain")) == {}


@pytest.mark.parametrize(("product", "grad"), [("forward", False), ("dgrad", True), ("wgrad", True)])
def test_damage_is_done_to_one_product_alone(product, grad):
    x, w, dy = (jax.random.normal(jax.random.key(i), s) for i, s in enumerate([(16, 32), (32, 48), (16, 48)]))

    def three(arm):
        with parity_runs.damaged(arm):
            y, back = jax.vjp(lambda x, w: linear(x, w, recipe=recipe), x, w)
            return dict(zip(("forward", "dgrad", "wgrad"), (y, *back(dy)), strict=True))

    recipe = fp8jax.recipes.te_current()
    plain, hurt = three(ParityArm(recipe)), three(ParityArm(recipe, product, 2))
    for name, value in plain.items():
        same = np.array_equal(value, hurt[name])
        assert same == (name != product), name
    error = np.linalg.norm(plain[product] - hurt[product]) / np.linalg.norm(plain[product])
    assert 0.02 < error < 0.4


def test_damage_that_meets_no_product_is_refused():
    with (
        pytest.raises(RuntimeError, match="no wgrad product of codes: nothing was damaged"),
        parity_runs.damaged(ParityArm(fp8jax.recipes.bf16(), "wgrad", 2)),
    ):
        jnp.ones(3)


@pytest.mark.parametrize(("name", "dtype", "lost"), [("e4m3", jnp.float8_e4m3fn, 2), ("e5m2", jnp.float8_e5m2, 2)])
def test_coarse_codes_are_the_nearest_of_fewer_bits(name, dtype, lost):
    codes = np.arange(256, dtype=np.uint8).view(dtype)
    codes = codes[np.isfinite(codes.astype(np.float32))]
    q = fp8jax.QTensor(jnp.asarray(codes)[None], jnp.ones((1, 1)), None, None, fp8jax.QuantSpec(name))
    got = np.asarray(parity_runs.coarse(q, lost).codes, np.float64)[0]
    bits = ml_dtypes.finfo(dtype).nmant - lost
    x = codes.astype(np.float64)
    step = 2.0 ** (np.floor(np.log2(np.abs(np.where(x == 0, 1, x)))) - bits)
    top = 2.0 ** np.floor(np.log2(float(ml_dtypes.finfo(dtype).max))) * (2 - 2.0**-bits)
    want = np.clip(np.round(x / step) * step, -top, top)
    np.testing.assert_array_equal(np.abs(got - x), np.abs(want - x))  # of two that are as near either will do
    np.testing.assert_array_equal(got, np.clip(np.round(got / step) * step, -top, top))
    with pytest.raises(ValueError, match="mantissa bits to lose"):
        parity_runs.coarse(q, 4)


@pytest.mark.slow
def test_masters_in_16_bits_and_released_layers_train_as_fp32_masters(tmp_path):
    """Three seeds of a tiny model: losses within 1 % of those of fp32 masters."""
    setting = dataclasses.replace(TINY, dim=64, layers=2, mlp_dim=96, length=32, batch=8, steps=200, lr=3e-4, warmup=10)
    text = parity_runs.read_text([], setting)
    arms = {BASE: training_parity.ARMS[BASE]}
    arms |= {
        name: training_parity.ARMS[name]
        for name in ("master_bf16_int8", "master_bf16_stochastic", "released_by_shares")
    }
    found = {}
    for name, arm in arms.items():
        run, validate, _ = parity_runs.programs(arm, setting)
        ends = []
        for seed in range(3):
            state, curve = run(jnp.int32(seed), text.train, text.starts(seed, setting))
            ends.append([float(np.mean(curve[-20:])), float(np.mean(validate(state, text.valid)))])
        found[name] = np.array(ends)
    off = {name: np.abs(ends / found[BASE] - 1).max(0) for name, ends in found.items()}
    for name in ("master_bf16_int8", "master_bf16_stochastic", "released_by_shares"):
        assert off[name].max() < 0.01, off
