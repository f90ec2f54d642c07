"""Plans of whole models, compared with measurements, and the simulation of gradient sums."""

import dataclasses

import numpy as np
import pytest

import fp8jax
from experiments import plan
from experiments.models import sizes
from experiments.papers import fp8_lm_gradients as figure
from experiments.papers import fp8_lm_reductions

# GB on an H200, of the compiled step of `1b`, 8 x 2048 tokens, layers unrolled: `experiments.bench step`.
# The constants of the planner come from a bf16 program of two layers, not from these numbers.
MEASURED = {"te_current": 30.35, "deepseek": 30.22, "moss": 30.12, "int8_block": 30.12, "fp8_lm_two_phase": 24.80}
# XLA leaves gaps between arrays, which a plan does not include. The plan is within 0.2 % of the arrays that are live at
# once in the compiled program, 30.12 and 18.87 GB.
WITH_GAPS = {"bf16": (35.20, 30.12), "coat": (20.08, 18.87), "coat_fast": (20.08, 18.87), "fast": (20.03, 18.87)}


def planned(name):
    """Returns GB of arrays. Recipes without a context rematerialize all but products and attention, as in training."""
    recipe = fp8jax.recipes.get(name)
    actual = plan.of(sizes.get("1b", 32_000), recipe, {}, 8 * 2048, recompute=not recipe.context.residual)
    return sum(size for part, size in actual.memory.items() if part not in ("runtime", "gaps")) / 1e9


@pytest.mark.parametrize("name", MEASURED)
def test_planned_memory_is_within_2_percent_of_what_was_measured(name):
    assert planned(name) == pytest.approx(MEASURED[name], rel=0.02)


# GB on two H200s, of `1b` with 8 x 2048 tokens per GPU, measured after the constants were set from one GPU.
ON_TWO = {
    ("fast", "data"): 19.52, ("fast", "fsdp"): 16.27,
    ("coat", "data"): 19.96, ("coat_fast", "data"): 19.90, ("te_current", "data"): 30.66,
    ("fp8_lm_two_phase", "data"): 25.01,
    ("bf16", "data"): 35.30, ("coat", "fsdp"): 16.47, ("coat_fast", "fsdp"): 16.51, ("te_current", "fsdp"): 24.03,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "axis"),
    [
        pytest.param(*case, marks=() if case[0] in ("coat", "te_current", "fp8_lm_two_phase") else pytest.mark.slow)
        for case in ON_TWO
    ],
)
def test_planned_memory_of_two_gpus_is_within_5_percent_of_what_was_measured_later(name, axis):
    """Without bf16 over "fsdp": XLA leaves fewer gaps than on one GPU (25.41 GB, not 28.63)."""
    recipe = fp8jax.recipes.get(name)
    step = plan.of(sizes.get("1b", 32_000), recipe, {axis: 2}, 8 * 2048, recompute=name == "bf16")
    assert (step.total - step.memory["runtime"]) / 1e9 == pytest.approx(ON_TWO[name, axis], rel=0.05)


@pytest.mark.parametrize(("batch", "measured"), [(4, 41.78), (10, 73.04)])
def test_planned_memory_of_7b_over_two_gpus_is_within_2_percent_of_what_was_measured_later(batch, measured):
    """Plans of bf16 and fp8_lm_two_phase, whose gaps hold no 8-bit arrays, are 6 % too low: 79.88 and 54.35 GB."""
    step = plan.of(sizes.get("7b", 32_000), fp8jax.recipes.coat(), {"fsdp": 2}, batch * 2048)
    assert (step.total - step.memory["runtime"]) / 1e9 == pytest.approx(measured, rel=0.02)


@pytest.mark.parametrize("name", WITH_GAPS)
def test_planned_memory_is_that_of_arrays_that_live_at_once(name):
    measured, alive = WITH_GAPS[name]
    assert planned(name) == pytest.approx(alive, rel=0.002)
    assert 0.85 * measured < planned(name) < measured


def test_the_command_plans_a_model_that_fits_no_machine_here(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert plan.main(["--model", "175b", "--recipe", "fp8_lm_two_phase", "--mesh", "fsdp=32"]) == 0
    printed = capsys.readouterr().out
    assert "each of 32 devices" in printed
    assert max(map(len, printed.splitlines())) <= 80
    assert "all-gather         u8" in printed
    assert plan.main(["--model", "1e9"]) == 2
    assert "unknown model size '1e9'" in capsys.readouterr().err
    for flag in ("--batch", "--length", "--microbatches"):
        assert plan.main(["--model", "5m", flag, "0"]) == 2
        assert capsys.readouterr().err == f"error: {flag} must be at least 1, got 0\n"
    assert plan.main(["--model", "7b", "--mesh", "fsdp=2", "--partition", "slices"]) == 2
    assert "use --mesh data=2 or more" in capsys.readouterr().err


def test_a_plan_without_kernels_is_refused(capsys, monkeypatch):
    """Without jax-triton, a trace for a GPU has the residuals of XLA, several times as many."""
    monkeypatch.setattr(plan.choice, "missing_kernels_reason", lambda: "jax-triton cannot be imported")
    assert plan.main(["--model", "5m", "--recipe", "coat"]) == 2
    error = capsys.readouterr().err
    assert "jax-triton cannot be imported" in error
    assert "pip install '.[cuda13]'" in error
    assert plan.main(["--model", "5m", "--recipe", "bf16"]) == 0


def test_every_option_of_the_command_arrives(capsys, monkeypatch):
    """`of` gets the options, and the tokens of a microbatch on a device. Its plan is printed."""
    requests, real = [], plan.of
    monkeypatch.setattr(plan, "saved_per_token", lambda llama, recipe, recompute, *shared: 1000.0 + recompute)
    monkeypatch.setattr(plan, "of", lambda *args, **how: requests.append((args, how)) or real(*args, **how))
    flags = "--model llama-1b --recipe fast --mesh data=2,fsdp=4,tensor=2 --batch 3 --length 100 --vocab 999"
    for more, how in (
        ("", {"microbatches": 1, "recompute": False, "partition": "", "expert_capacity": 0.0}),
        (
            " --microbatches 5 --recompute --partition slices --expert-capacity 2",
            {"microbatches": 5, "recompute": True, "partition": "slices", "expert_capacity": 2.0},
        ),
    ):
        assert plan.main((flags + more).split()) == 0
        args = sizes.get("1b", 999), fp8jax.recipes.fast(), {"data": 2, "fsdp": 4, "tensor": 2, "expert": 1}, 300
        assert requests.pop() == (args, how)
        assert real(*args, **how).table() in capsys.readouterr().out


def test_a_plan_of_a_model_counts_its_layers_tokens_and_logits(monkeypatch):
    """1,000 bytes per token of a layer. The loss has six bytes per logit, and the head's input twice."""
    monkeypatch.setattr(plan, "saved_per_token", lambda llama, recipe, recompute, *shared: 1000.0 + recompute)
    llama, tokens = sizes.get("5m", 512), 64 * 512
    layer = 2 * llama.dim * (llama.dim + llama.kv_heads * llama.head_dim) + 3 * llama.dim * llama.mlp_dim
    layer += 2 * llama.dim  # its norms
    count = llama.layers * layer + 2 * 512 * llama.dim + llama.dim
    actual = plan.of(llama, fp8jax.recipes.te_current(), {"data": 1, "fsdp": 1}, tokens)
    memory = dict(actual.memory)
    head = 2 * 512 * llama.dim
    logits = tokens * (6 * 512 + 4 * llama.dim) + head
    assert memory.pop("runtime") == 0.6e9
    assert memory == {
        "parameters": 4 * count, "first moments": 4 * count, "second moments": 4 * count,
        "activations": 1000.0 * tokens * llama.layers, "logits": logits,
    }  # fmt: skip
    again = plan.of(llama, fp8jax.recipes.bf16(), {"data": 1, "fsdp": 2}, tokens, microbatches=2, recompute=True)
    saved_bytes = 1001.0 * tokens * llama.layers
    memory = dict(again.memory)
    assert memory.pop("runtime") == 1.5e9
    assert memory == {
        **dict.fromkeys(("parameters", "first moments", "second moments", "sums of gradients"), 2 * count),
        "activations": saved_bytes, "logits": logits, "gathered weights": 2 * layer,
        "gaps": pytest.approx(0.3 * (saved_bytes + logits)),
    }  # fmt: skip
    assert "gaps" not in plan.of(llama, fp8jax.recipes.bf16(), {}, tokens).memory
    gaps = plan.of(llama, fp8jax.recipes.coat(), {}, tokens).memory["gaps"]
    assert gaps == pytest.approx(0.1 * (1000.0 * tokens * llama.layers + logits))


@pytest.fixture
def counted(monkeypatch):
    """Records the arguments of the planner for one device, for a model whose layer saves 1,000 bytes per token."""
    real, plan_calls = plan.plan, []
    monkeypatch.setattr(plan, "saved_per_token", lambda llama, recipe, recompute, *shared: 1000.0)
    monkeypatch.setattr(plan, "plan", lambda *args, **how: plan_calls.append(how) or real(*args, **how))
    return plan_calls


def test_a_head_in_8_bits_is_taken_in_chunks_with_a_gradient_in_fp32(counted):
    """Here in one chunk."""
    llama, te = sizes.get("5m", 512), fp8jax.recipes.te_current()
    for recipe in (te, dataclasses.replace(te, head=fp8jax.recipes.HEAD)):
        plan.of(llama, recipe, {}, 256)
    assert counted[1]["logits"] - counted[0]["logits"] == 4 * 512 * llama.dim


@pytest.mark.parametrize(
    ("recipe", "recompute", "gathered"),
    [
        ("te_current", False, 1),
        ("te_current", True, 1),
        ("bf16", False, 1),
        # Inputs of products that are read again are gathered again.
        ("bf16", True, 2),
        ("switchback", True, 2),  # which saves no codes of them
        ("jetfire", True, 2),  # whose noise depends on them
    ],
)
def test_devices_that_share_sequences_send_activations_twice_a_layer_and_microbatch(
    recipe, recompute, gathered, counted, monkeypatch
):
    requests, llama = [], sizes.get("5m", 512)
    monkeypatch.setattr(
        fp8jax.dist, "sequence_collectives", lambda *args, **how: requests.append((args[:3], how)) or []
    )
    plan.of(llama, fp8jax.recipes.get(recipe), {"tensor": 2}, 256, microbatches=3, recompute=recompute)
    assert requests == [((512, llama.dim, 2), {"times": 2 * llama.layers * 3, "forward_gathers": gathered})]
    layer = 2 * llama.dim * (llama.dim + llama.kv_heads * llama.head_dim) + 3 * llama.dim * llama.mlp_dim
    assert counted[0]["activations"] == 1000.0 * 512 * llama.layers
    assert counted[0]["unsharded"] == layer + 2 * llama.dim, "of a layer in 16 bits, half"
    with pytest.raises(ValueError, match="heads"):
        plan.of(llama, fp8jax.recipes.get(recipe), {"tensor": 7}, 256)


def test_sums_of_codes_are_simulated_as_nccl_was_seen_to_make_them():
    """In e4m3, 16 + 3.5 is 20 and 400 + 400 is 448."""
    scaled = np.array([[16.0, 400.0, 448.0], [3.5, 400.0, 0.0]], np.float32)
    actual = figure.after(scaled)
    np.testing.assert_array_equal(2 * actual.mean, [20, 448, 448])
    assert actual.overflow == pytest.approx(2 / 3)
    np.testing.assert_array_equal(2 * figure.before(scaled).mean, [20, 768, 448])  # 200 is rounded to 192
    assert figure.before(scaled).overflow == 0


def test_two_phases_do_not_lose_with_the_number_of_replicas_and_sums_of_codes_do():
    rng = np.random.default_rng(0)
    g = (rng.standard_normal((256, 512)) + 0.3 * rng.standard_normal((1, 512))).astype(np.float32)
    snr = {(name, n): figure.compare(g[:n], form)[0] for name, form in figure.FORMS.items() for n in (4, 256)}
    assert snr[figure.OURS, 256] > snr[figure.OURS, 4] - 1
    for name in list(figure.FORMS)[:3]:
        assert snr[name, 256] < snr[name, 4] - 10
        assert snr[name, 256] < snr[figure.OURS, 256] - 10
    assert snr["auto-scale (equation 3)", 256] >= max(snr[name, 256] for name in list(figure.FORMS)[:2])
    small = np.full((4, 3), 1e-6, np.float32) * np.array([[1, 1, 1e6]], np.float32)
    assert figure.compare(small, figure.two_phases)[1] == pytest.approx(2 / 3)


def test_the_model_in_numpy_makes_of_gradients_what_the_library_does():
    """Two phases with any number of devices; one phase with two, whose one addition is rounded once on a CPU too."""
    rng = np.random.default_rng(1)
    gradients = {
        name: (rng.standard_normal((8, 512)) * np.exp(2 * rng.standard_normal((1, 512)))).astype(np.float32)
        for name in "ab"
    }
    for form, model in figure.FORMS.items():
        count = 8 if "two phases" in form else 2
        parts = {name: g[:count] for name, g in gradients.items()}
        actual = fp8_lm_reductions.reduced(parts, form)
        for name, g in parts.items():
            expected = model(g)
            # Only one of them rounds scales to fp32, which may change a code.
            assert np.mean(np.isclose(actual[name].mean, expected.mean, rtol=1e-5, atol=1e-12)) > 0.99, form
            assert actual[name].overflow == pytest.approx(expected.overflow, abs=1 / 512), form
            assert figure.errors_of(g, actual[name])[0] == pytest.approx(figure.errors_of(g, expected)[0], abs=0.1), (
                form
            )


def test_figures_of_the_library_stand_beside_those_of_the_model():
    g = {"a": np.random.default_rng(2).standard_normal((4, 256)).astype(np.float32)}
    rows = fp8_lm_reductions.measure(g, [2])
    actual = {(row.pivot[0], row.metric, row.impl): row.value for row in rows}
    assert len(actual) == len(figure.FORMS) * len(figure.METRICS) * 2
    snr = figure.compare(g["a"][:2], figure.two_phases)[0]
    assert actual[figure.OURS, "SNR", "NumPy"] == pytest.approx(snr)
    assert actual[figure.OURS, "SNR", "fp8jax.dist"] == pytest.approx(snr, abs=0.2)
    over = actual["post-scale (equation 2)", "overflow", "fp8jax.dist"]
    assert over == pytest.approx(100 * figure.after(g["a"][:2]).overflow, abs=0.5)
    assert over > 0
