"""A GPU on which no kernel runs: the reason, the warning, the results of models, and the output of `explain`."""

import pathlib
import sys
import tomllib
import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from packaging.requirements import Requirement

import fp8jax
from fp8jax.ops.dispatch import choice
from tests.programs import dots

ROOT = pathlib.Path(__file__).resolve().parents[2]
WIDTH = 256
P = {"scale": jnp.ones(WIDTH), "up": jnp.ones((WIDTH, 512)) / 99, "down": jnp.ones((512, WIDTH)) / 99}
X = jax.random.normal(jax.random.key(0), (16, WIDTH), jnp.bfloat16)
FP8 = ("float8_e4m3fn", "float8_e4m3fn")


def mlp(p, x):
    y = x.astype(jnp.float32)
    y = (y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-6)).astype(x.dtype) * p["scale"].astype(x.dtype)
    return x + jax.nn.silu(y @ p["up"].astype(x.dtype)) @ p["down"].astype(x.dtype)


def forget():
    choice._missing_triton.cache_clear()
    choice._broken_triton.cache_clear()


@pytest.fixture
def blocked(monkeypatch):
    """Makes the import of Triton's kernels fail, as without jax-triton."""
    monkeypatch.setitem(sys.modules, "pallas_kernels.dispatch.call_triton", None)
    for name in (
        "nonlinear.quantize_recomputed_triton",
        "quantization.quantize_triton",
        "optimizers.adamw_triton",
        "optimizers.fp8lm_triton",
    ):
        monkeypatch.setitem(sys.modules, f"pallas_kernels.{name}", None)
    forget()
    with choice.target(capability=90):
        yield
    forget()


@pytest.fixture
def present(monkeypatch):
    """Makes the dispatch believe that every kernel can run."""
    monkeypatch.setattr(choice, "_missing_triton", lambda kernel, capability, fp8: None)
    with choice.target(capability=90):
        yield


def test_the_line_to_type_has_the_bounds_of_the_package():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extra in ("cuda12", "cuda13"):
        requirements = [Requirement(text) for text in extras[extra]]
        requirements = [r for r in requirements if r.name != "jax" and (r.marker is None or r.marker.evaluate())]
        expected = {(r.name, r.specifier) for r in requirements}
        assert {(r.name, r.specifier) for r in map(Requirement, choice.REQUIREMENTS)} == expected


def test_the_reason_and_the_remedy(blocked):
    assert choice.missing_kernels_reason().startswith("jax-triton cannot be imported (ModuleNotFoundError")
    assert 'Run: pip install "jax-triton>=0.3.1,<0.5"' in choice.missing_kernels_advice()
    with choice.target(kernels=False):  # requested: contexts follow, without a warning
        assert choice.keeps_nonlinear_unchanged()
        assert choice.missing_kernels_advice() is None


def test_a_gpu_that_is_too_old_is_told_no_package():
    with choice.target(capability=70):
        assert (
            "because the GPU has compute capability 70, and Triton's kernels need 75" in choice.missing_kernels_advice()
        )
        assert "pip" not in choice.missing_kernels_advice()


def test_a_kernel_that_does_not_exist_raises():
    """Otherwise XLA would be used silently."""
    with (
        choice.target(capability=90),
        pytest.raises(ModuleNotFoundError, match=r"pallas_kernels\.quantization\.misspelt"),
    ):
        choice.missing_triton("quantization.misspelt_triton")


def test_elsewhere_nothing_is_missing():
    assert choice.missing_kernels_reason() is None
    assert choice.missing_kernels_advice() is None
    assert not choice.keeps_nonlinear_unchanged()


def of_nnx(recipe):
    class Mlp(nnx.Module):
        def __init__(self):
            self.norm, self.up = nnx.RMSNorm(WIDTH, rngs=nnx.Rngs(0)), nnx.Linear(WIDTH, 512, rngs=nnx.Rngs(0))
            self.down = nnx.Linear(512, WIDTH, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return x + self.down(nnx.silu(self.up(self.norm(x))))

    return fp8jax.nnx.quantize(Mlp(), recipe), (X,)


def of_linen(recipe):
    class Mlp(nn.Module):
        @nn.compact
        def __call__(self, x):
            return x + nn.Dense(WIDTH)(nn.silu(nn.Dense(512)(nn.RMSNorm()(x))))

    params = jax.tree.map(lambda s: jnp.ones(s.shape, s.dtype), jax.eval_shape(Mlp().init, jax.random.key(0), X))
    return fp8jax.linen.quantize(Mlp(), recipe).apply, (params, X)


def of_function(recipe):
    return fp8jax.transform(mlp, recipe), (P, X)


def of_adamw(recipe):
    tx = fp8jax.compressed_adamw(1e-3, impl="xla" if recipe == "bf16" else "auto")
    return tx.update, (P, tx.init(P), P)


def of_step(recipe):
    tx = fp8jax.optimizer(recipe, 1e-3)
    return tx.step, (P, tx.init(P), P)


def of_fp8lm(recipe):
    tx = fp8jax.fp8lm_adamw(1e-3, impl="xla" if recipe == "bf16" else "auto")
    return tx.update, (P, tx.init(P), P)


BUILDERS = [of_nnx, of_linen, of_function, of_adamw, of_step, of_fp8lm]


def warned(call, args, times=2):
    """Returns the warnings of several traces of a call."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(times):
            jax.eval_shape(lambda *args: call(*args), *args)
    return [w for w in caught if issubclass(w.category, fp8jax.MissingKernelsWarning)]


@pytest.mark.parametrize("build", BUILDERS)
def test_each_model_and_optimizer_warns_at_the_users_line(build, blocked):
    for _ in range(2):  # earlier warnings have no effect
        (one,) = warned(*build("coat"))
        assert one.filename == __file__
        assert "jax-triton cannot be imported" in str(one.message)
    assert warned(*build("bf16")) == []
    with choice.target(kernels=False):
        assert warned(*build("coat")) == []


@pytest.mark.parametrize("build", BUILDERS)
def test_nobody_is_warned_on_a_cpu(build):
    assert warned(*build("coat")) == []


@pytest.mark.filterwarnings("ignore::fp8jax.MissingKernelsWarning")
@pytest.mark.parametrize("recipe", ["coat", "coat_fast", "fast", "te_current", "int8_fallback"])
def test_norms_and_activations_stay_as_written_without_kernels(recipe, blocked):
    fast = fp8jax.transform(mlp, recipe)
    explained = fast.explain(P, X)
    assert {(entry.path, entry.kind) for entry in explained.entries} == {("up", "dot_general"), ("down", "dot_general")}
    assert "the Triton kernels of fp8jax cannot run on this GPU" in str(explained).replace("\n", " ")
    if recipe.startswith("coat"):
        assert dots(fast, P, X).count(FP8) == 2


@pytest.mark.parametrize("recipe", ["coat", "coat_fast", "fast", "te_current", "int8_fallback"])
def test_kernels_take_norms_and_activations(recipe, present):
    explained = fp8jax.transform(mlp, recipe).explain(P, X)
    kinds = {entry.kind for entry in explained.entries}
    assert {"RMSNorm", "silu(x)"} <= kinds
    assert "Triton kernels of fp8jax cannot run" not in str(explained)


def test_a_cpu_keeps_contexts():
    kinds = {entry.kind for entry in fp8jax.transform(mlp, "coat").explain(P, X).entries}
    assert {"RMSNorm", "silu(x)"} <= kinds


@pytest.mark.filterwarnings("ignore::fp8jax.MissingKernelsWarning")
def test_explain_of_a_flax_model_says_it(blocked, monkeypatch):
    from fp8jax.modules import explain

    monkeypatch.setattr(explain, "inspect_program", lambda *args: None)  # this machine compiles for no GPU
    model, args = of_nnx("coat")
    assert "jax-triton>=0.3.1,<0.5" in str(fp8jax.explain(model, *args))
    linen = nn.Dense(WIDTH)
    assert "jax-triton>=0.3.1,<0.5" in str(fp8jax.explain(linen, "coat", X))


def test_the_training_program_says_it(blocked):
    from experiments.train import cli

    with choice.record_choices() as heard:
        choice.record_choice("adamw", choice.Choice("xla", "not the fused kernel"))
    lines = cli.computed_by(heard, ["codes"])
    assert lines[0].startswith("WARNING: the Triton kernels of fp8jax cannot run on this GPU")
    assert lines[1:] == ["adamw by xla: not the fused kernel", "saved codes"]
    assert not any("WARNING" in line for line in cli.computed_by([], []))
