"""Recipes compared with bf16 by seed: statistics, errors, and processes that share one folder."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

import fp8jax
from experiments.papers import parity, parity_runs
from experiments.papers.parity import BASE, CONTROL, STUDIES, TRAINING, VALIDATION
from experiments.train import lock
from tests.experiments.test_parity_runs import TINY

STUDY = STUDIES["recipes"]
BESIDE_COAT = STUDY.pairs[0][0]


def found(differences, seeds=5, noise=0.0005):
    rng = np.random.default_rng(0)
    base = 1 + 0.02 * rng.normal(size=seeds)
    arms = {}
    for name, by in ({BASE: 0.0} | differences).items():
        values = base * (1 + by + (noise * rng.normal(size=seeds) if name != BASE else 0))
        arms[name] = {s: {TRAINING: v, VALIDATION: 2 * v} for s, v in enumerate(values)}
    return arms


def test_gaps_are_paired_with_students_t_of_the_seeds():
    runs = found({"coat": 0.001})
    ours, base = ({s: run[TRAINING] for s, run in runs[name].items()} for name in ("coat", BASE))
    gap = parity.gap(ours, base, 0.99)
    x, y = np.array(list(ours.values())), np.array(list(base.values()))
    expected = stats.ttest_1samp(x / y - 1, 0)
    assert gap.p == pytest.approx(expected.pvalue)
    assert (gap.value - gap.half, gap.value + gap.half) == pytest.approx(tuple(expected.confidence_interval(0.99)))
    # Seeds that one of the two lacks are ignored. One seed has no variance.
    assert parity.gap(ours | {7: 99.0}, base, 0.99) == gap
    assert parity.gap({0: 1.0}, base, 0.99) == (
        (pytest.approx(1 / base[0] - 1),),
        pytest.approx(1 / base[0] - 1),
        None,
        None,
    )
    assert parity.gap({7: 1.0}, base, 0.99) is None
    assert parity.gap(base, base, 0.99).p == 1


def test_holms_procedure_holds_the_error_of_all_recipes_together():
    # Holm (1979): the smallest is multiplied by 4, the next by 3; an adjusted p is never below that of a smaller one.
    assert parity.holm({"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.005}, 4) == pytest.approx(
        {"d": 0.02, "a": 0.03, "c": 0.06, "b": 0.06}
    )
    assert parity.holm({"a": 0.9, "b": 0.8}, 2) == {"a": 1.0, "b": 1.0}
    # Two of ten stated comparisons: each counts as one of ten.
    assert parity.holm({"a": 0.01, "b": 0.001}, 10) == pytest.approx({"b": 0.01, "a": 0.09})
    rng, wrong = np.random.default_rng(2), 0
    for _ in range(400):
        p = {i: float(stats.ttest_1samp(rng.normal(size=5), 0).pvalue) for i in range(5)}
        wrong += any(x < parity.FAMILY_ERROR for x in parity.holm(p, 5).values())
    assert wrong / 400 < 0.08


def test_arms_are_compared_with_bf16_and_pairs_with_each_other():
    gaps = parity.compare(STUDY, runs := found({"coat": 0.01, "coat_fast": 0.03, CONTROL: 0.02}))
    values = {name: {s: run[TRAINING] for s, run in of.items()} for name, of in runs.items()}
    # Each interval has 99.5 %: those of five recipes and two losses hold together with 95 %.
    plain = parity.gap(values["coat"], values[BASE], 0.995)
    assert gaps["coat", TRAINING][:3] == plain[:3]
    assert gaps["coat", TRAINING].p >= 5 * plain.p  # Holm's, for ten tests
    # An arm that is no recipe does not count as a test.
    assert gaps[CONTROL, TRAINING] == parity.gap(values[CONTROL], values[BASE], 0.995)
    assert gaps[BESIDE_COAT, TRAINING] == parity.gap(values["coat_fast"], values["coat"], 0.995)
    alone = dataclasses.replace(STUDY, family=False)
    assert parity.compare(alone, runs)["coat", TRAINING] == parity.gap(values["coat"], values[BASE], 0.95)


def written(folder, text="t", device="d", **losses):
    (folder / STUDY.folder).mkdir(exist_ok=True, parents=True)
    rng = np.random.default_rng(3)
    for name, by in losses.items():
        runs = {str(s): {"losses": [1 + by + s / 50] * 20, "valid_loss": 1 + by + s / 50 + 1e-4 * rng.normal(),
                         "commit": "c1"} for s in STUDY.seeds_of(name)}  # fmt: skip
        content = {"setting": dataclasses.asdict(TINY), "text": text, "device": device, "date": "2026-01-01",
                   "parameters": 7, "moments": 2.0, "replicas": 1 + (name == "fp8_lm"), "runs": runs}  # fmt: skip
        STUDY.path_of(folder, name).write_text(json.dumps(content))


def test_the_page_has_what_was_stated_and_a_mix_is_refused(tmp_path, capsys):
    assert parity.main(["--judge", "--results", str(tmp_path)]) == 2
    assert "has no runs with bf16 and another arm" in capsys.readouterr().err
    written(tmp_path, bf16=0.0, coat=0.0, coat_fast=0.03, fp8_lm=0.001)
    assert parity.main(["--judge", "--results", str(tmp_path)]) == 0
    content = json.loads((tmp_path / "d" / "recipe_parity.json").read_text())
    values = {tuple(row["pivot"]): row["value"] for row in content["rows"]}
    assert values["coat_fast", "training loss: % above"] == pytest.approx(2.76, abs=0.02)
    assert values[BESIDE_COAT, "training loss: % above"] == pytest.approx(2.9, abs=0.1)
    assert [values[name, "seeds"] for name in (BASE, "coat", "coat_fast", "fp8_lm")] == [10, 5, 10, 5]
    assert {row["commit"] for row in content["rows"]} == {"c1"}
    notes = " ".join(content["notes"])
    assert "coat, coat_fast, fast, int8_fallback, fp8_lm, 5 seeds each (10 of bf16 and coat_fast)." in notes
    assert "Confidence intervals of 99.50% each" in notes
    assert "fp8_lm ran on 2 devices" in notes
    assert (tmp_path / "d" / "recipe_parity.png").exists()
    for change in ({"text": "u"}, {"device": "e"}):
        written(tmp_path, coat=0.0, **change)
        assert parity.main(["--judge", "--results", str(tmp_path)]) == 2
        assert (
            f"have different values of {next(iter(change))}, {next(iter(change.values()))} and"
            in capsys.readouterr().err
        )


def test_an_arm_that_another_process_trains_is_left_to_it(corpus, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(STUDIES, "recipes", dataclasses.replace(STUDY, setting=TINY))
    path = STUDY.path_of(tmp_path, "coat")
    path.parent.mkdir(parents=True)
    argv = ["--data", str(corpus), "--arms", "coat", "--results", str(tmp_path)]
    with lock.hold(path):
        assert parity.main(argv) == 2
    assert "is being trained by process" in capsys.readouterr().err
    assert parity.main([*argv, "--limit", "0"]) == 1
    assert "not finished: coat" in capsys.readouterr().out


def test_ablations_change_sums_alone():
    for name, base, products in (
        ("coat, fast accumulation", fp8jax.recipes.coat(), ("forward", "dgrad", "wgrad")),
        ("coat_fast, fast dgrad", fp8jax.recipes.coat_fast(), ("forward", "dgrad")),
    ):
        changed = parity.ARMS[name].recipe
        assert changed == dataclasses.replace(base, linear=dataclasses.replace(base.linear, fast_accumulation=products))


def test_pages_of_the_runs_that_are_there_give_the_rows_of_their_results_files(tmp_path):
    """Uses results/: changed statistics would change the figures of README and docs/."""
    root = Path(__file__).parents[2] / "results"
    for name, page in (("recipes", "h100/recipe_parity"), ("intervals", "h100/recipe_parity_intervals"),
                       ("fixed_batch", "h200/fixed_batch"), ("block_scaled", "h200/recipe_parity_block_scaled"),
                       ("block_scaled_medium", "h200/recipe_parity_block_scaled_medium"),
                       ("experts", "h200/recipe_parity_experts"), ("head", "h200/recipe_parity_head")):  # fmt: skip
        study = STUDIES[name]
        runs, _ = parity.read(study, root)
        ours = {tuple(r.pivot): r.value for r in parity.rows(study, runs, parity.compare(study, runs))}
        theirs = {tuple(r["pivot"]): r["value"] for r in json.loads((root / f"{page}.json").read_text())["rows"]}
        assert ours == pytest.approx(theirs), name


RUN = """
import dataclasses, sys
from experiments.papers import parity
from tests.experiments.test_parity_runs import TINY
parity.STUDIES["recipes"] = dataclasses.replace(parity.STUDIES["recipes"], setting=TINY, seeds=2)
sys.exit(parity.main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_processes_fill_one_folder_and_gradients_travel_between_two_devices(corpus, tmp_path):
    root = Path(__file__).parents[2]
    env = os.environ | {"PYTHONPATH": str(root), "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    shared = ["--data", str(corpus), "--results", str(tmp_path)]
    for arm in (BASE, "fp8_lm"):
        completed = subprocess.run([sys.executable, "-c", RUN, "--arms", arm, *shared], env=env, capture_output=True,
                              text=True, timeout=300)  # fmt: skip
        assert completed.returncode == 0, completed.stderr
    files = {name: json.loads(STUDY.path_of(tmp_path, name).read_text()) for name in (BASE, "fp8_lm")}
    assert [of["replicas"] for of in files.values()] == [1, 2]
    assert len({of["text"] for of in files.values()}) == 1
    first = {name: of["runs"]["0"]["losses"] for name, of in files.items()}
    np.testing.assert_allclose(first["fp8_lm"], first[BASE], rtol=0.05)
    assert first["fp8_lm"] != first[BASE]
    assert parity.main(["--judge", "--results", str(tmp_path)]) == 0
    text = parity_runs.read_text([str(corpus)], TINY)
    assert files[BASE]["text"] == text.fingerprint


def test_studies_name_arms_that_there_are_and_take_no_others(capsys):
    for name, study in STUDIES.items():
        assert {*study.recipes, *study.other_arms, *(arm for pair in study.pairs for arm in pair[1:])} < {*parity.ARMS}
        with pytest.raises(SystemExit):
            parity.main(["--study", name, "--arms", "coat", "no_such"])
        assert "'no_such' in this study; there are 'bf16'" in capsys.readouterr().err
    # COAT's Table 13 has the optimizer alone, and the activations alone.
    assert {"coat_optimizer", "coat_activations", CONTROL} < set(STUDY.other_arms)
    intervals = [parity.ARMS[name].recipe.linear.weight_amax_interval for name in STUDIES["intervals"].recipes]
    assert intervals == [1, 100, 500, 2000]
    assert len({study.folder for study in STUDIES.values()}) == len({s.page for s in STUDIES.values()}) == len(STUDIES)
