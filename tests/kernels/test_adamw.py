"""The fused AdamW step without a GPU: its reference, the choice of the kernel, and the compiled program."""

import contextlib
import dataclasses
import functools
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fp8jax
from fp8jax.core import formats
from fp8jax.core.noise import round_stochastic
from fp8jax.core.qtensor import quantize
from fp8jax.ops.dispatch import choice as choices
from tests.kernels import adamw_cases
from tests.kernels.adamw_cases import ADAM, codes_that_differ, decoded, settled, spec, special, stored, tree
from tests.programs import triton_calls

FOLDER = pathlib.Path(__file__).resolve().parent
triton = pytest.mark.skipif(importlib.util.find_spec("jax_triton") is None, reason="jax-triton is not installed")


def test_the_reference_is_adamw_in_float64():
    # Without the rows that have NaN, Inf and values near fp32's largest.
    w, g, m, v = (np.delete(special((32, 500), seed), [5, 6, 10], axis=0) for seed in range(4))
    # Elements without gradients, with second moments of all magnitudes.
    g[-8:, ::3], m[-8:, ::3], v[:8, ::3] = 0, 0, np.abs(v[:8].max()) * np.geomspace(1e-3, 1, 167, dtype=np.float32)
    g[-4:, 1::3] = 0
    mu, nu = stored(m, "e4m3"), stored(v[::-1] ** 2, "e5m2", moment="nu")
    new, mu1, nu1 = jax.jit(functools.partial(adamw_cases.step, adam=ADAM, impl="xla"))(g, mu, nu, w)
    m64, v64 = 0.9 * decoded(mu) + 0.1 * g.astype(np.float64), 0.999 * decoded(nu) + 0.001 * g.astype(np.float64) ** 2
    d = m64 / (1 - 0.9**3) / (np.sqrt(v64 / (1 - 0.999**3)) + 1e-8)
    expected = w - 1e-3 * (d + 0.1 * w.astype(np.float64))
    # Rounding of the new weight; the change is exact to 1e-5 (1 - 0.999^3 in fp32 has an error of 2e-5).
    np.testing.assert_allclose(np.asarray(new), expected, rtol=2**-23, atol=np.abs(d).max() * 1e-3 * 1e-4)
    for q, values in zip((mu1, nu1), settled(g, m64, v64), strict=True):
        assert codes_that_differ(q, quantize(jnp.asarray(values.astype(np.float32)), q.spec)) < 2e-4


def test_stochastic_rounding_is_unbiased_and_leaves_what_bf16_holds():
    x = jnp.full((256, 512), 1 + 0.3 / 128, jnp.float32)
    words = jax.random.bits(jax.random.key(0), (64, 2), jnp.uint32)
    rounded = jax.vmap(lambda w: round_stochastic(x, w))(words).astype(jnp.float32)
    assert set(np.unique(rounded)) == {1.0, 1 + 1 / 128}
    up = np.asarray(rounded > 1)
    assert abs(up.mean() - 0.3) < 5 * np.sqrt(0.21 / up.size)
    by_place = up.mean(axis=0)
    assert abs(by_place.std() / np.sqrt(0.21 / len(words)) - 1) < 0.02
    eights = up.reshape(-1, 8).T
    pairs = (np.corrcoef(eights) - np.eye(8)).ravel().tolist()
    pairs.append(np.corrcoef(up[:-1].ravel(), up[1:].ravel())[0, 1])
    assert np.abs(pairs).max() < 0.04
    exact = jnp.asarray([0.0, -0.0, 1.5, -2.0, np.inf, -np.inf, np.nan], jnp.float32)
    for w in words[:8]:
        np.testing.assert_array_equal(round_stochastic(exact, w).astype(jnp.float32), exact)


@pytest.mark.parametrize("shape", [(6, 64), (5, 7), (2, 3, 5), (9,), ()], ids=str)
def test_noise_goes_by_the_position_in_the_flat_array(shape):
    """Noise is half of a multiple of a 32-bit hash of index // 8, computed here with Python integers."""
    words, x = np.array([12345, 0xDEADBEEF], np.uint32), np.float32(1 + 1 / 512)
    actual = np.asarray(round_stochastic(jnp.full(shape, x), words)).astype(np.float32).ravel()

    def noise(index):
        h = ((index >> 3) * 0x9E3779B9 + int(words[0])) & 0xFFFFFFFF
        h = ((h ^ (h >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
        h = ((h ^ (h >> 15) ^ int(words[1])) * 0x846CA68B) & 0xFFFFFFFF
        h ^= h >> 16
        h = (h * (1 + 0x9708B674 * ((index >> 1) & 3))) & 0xFFFFFFFF
        return h >> 16 if index & 1 else h & 0xFFFF

    bits = int(x.view(np.uint32))
    expected = [np.uint32((bits + noise(i)) & 0xFFFF0000).view(np.float32) for i in range(actual.size)]
    np.testing.assert_array_equal(actual, expected)


def chosen(grads, mu, nu, params=None, *, impl="auto", platform="cuda"):
    """Returns the implementation of the step of each parameter, by path, as recorded during tracing."""
    with (
        choices.target(capability=90) if platform == "cuda" else contextlib.nullcontext(),
        choices.record_choices() as recorded,
    ):
        jax.eval_shape(lambda *trees: adamw_cases.step(*trees, ADAM, impl=impl), grads, mu, nu, params)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(grads)]
    return {path: choice for path, (name, choice) in zip(paths, recorded, strict=True) if name == "adamw"}


@triton
@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"size": 48}, "group_size 48 is not a power of two"),
        ({"mu": "fp32", "nu": "fp32"}, "no moment is quantized"),
        ({"mu": "int8"}, "stored in int8"),
        ({"grad": jnp.float8_e5m2}, "the gradient has dtype float8_e5m2"),
        ({"weight": jnp.float8_e5m2}, "the weight has dtype float8_e5m2"),
    ],
    ids=lambda x: str(x)[:30],
)
def test_auto_falls_back_with_a_reason_and_an_explicit_kernel_raises_it(settings, reason):
    leaf = tree(**settings)
    (choice,) = chosen(*leaf, platform="cuda").values()
    assert choice.impl == "xla"
    assert reason in choice.reason
    if "no moment" not in reason:
        with pytest.raises(ValueError, match=reason):
            adamw_cases.step(*leaf, ADAM, impl="triton")


@triton
def test_what_is_chosen_is_told_by_parameter():
    g, mu, nu, w = tree()
    plain = (jnp.ones(4), jnp.zeros(4), jnp.zeros(4), jnp.ones(4))
    trees = [{"w": a, "b": b} for a, b in zip((g, mu, nu, w), plain, strict=True)]
    by_path = chosen(*trees, platform="cuda")
    assert {path: choice.impl for path, choice in by_path.items()} == {"['w']": "triton", "['b']": "xla"}
    assert all(choice.impl == "xla" for choice in chosen(*trees, platform="cpu").values())
    assert "asked for" in chosen(*trees, impl="xla", platform="cuda")["['w']"].reason
    with pytest.raises(ValueError, match="unknown impl 'mosaic'"):
        chosen(*trees, impl="mosaic")


@triton
def test_an_explicit_kernel_does_not_run_on_cpu():
    with pytest.raises((NotImplementedError, ValueError), match="platform"):
        jax.jit(functools.partial(adamw_cases.step, adam=ADAM, impl="triton"))(*tree())


def test_a_key_without_bf16_parameters_is_refused():
    with pytest.raises(ValueError, match="there are none"):
        adamw_cases.step(*tree(), ADAM, key=jax.random.key(0))


def test_a_key_makes_training_of_bf16_weights_follow_fp32_on_average():
    """Changes are a tenth of bf16's step: rounding to nearest loses them, stochastic rounding keeps them on average."""
    tx = fp8jax.compressed_adamw(1e-4, weight_decay=0.0, group_size=128)
    w = {"w": jnp.ones((64, 256), jnp.bfloat16)}
    g = {"w": jnp.ones((64, 256), jnp.bfloat16)}
    ends = {}
    for name in ("nearest", "stochastic"):
        state, params = tx.init(w), w
        step = jax.jit(tx.step)
        for i in range(20):
            extra = {"key": jax.random.key(i)} if name == "stochastic" else {}
            params, state = step(g, state, params, **extra)
        ends[name] = float(params["w"].astype(jnp.float32).mean())
    assert ends["nearest"] == 1.0
    np.testing.assert_allclose(ends["stochastic"], 1 - 20e-4, atol=1e-4)


@triton
@pytest.mark.parametrize("axes", [(None, "x"), ("x", None), ("y", "x"), (None, ("x", "y"))], ids=str)
def test_under_an_explicit_mesh_each_device_updates_its_part(axes):
    """XLA computes the reference on a CPU. The last mesh splits groups, so the kernel's operands are gathered."""
    leaf = tree((16, 512))
    expected = jax.jit(functools.partial(adamw_cases.step, adam=ADAM, impl="xla"))(*leaf)
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)

    def place(x):
        columns = axes[1] if x.shape[-1] == 512 or axes[1] == "x" else None
        return jax.sharding.reshard(x, jax.P(axes[0], columns))

    with jax.set_mesh(mesh), choices.target(capability=90):
        placed = jax.tree.map(place, leaf)
        (choice,) = chosen(*placed, platform="cuda").values()
        assert choice.impl == "triton", choice
        program = jax.jit(functools.partial(adamw_cases.step, adam=ADAM))
        assert "triton_kernel_call" in str(program.trace(*placed).jaxpr)
        actual = program(*placed)
    np.testing.assert_allclose(np.asarray(actual[0]), np.asarray(expected[0]), rtol=1e-6, atol=1e-9)
    assert codes_that_differ(actual[1], expected[1]) == codes_that_differ(actual[2], expected[2]) == 0


@triton
def test_sharded_parameters_take_the_kernel():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    leaf = jax.device_put(tree((64, 1024)), jax.NamedSharding(mesh, jax.P("x")))
    (choice,) = chosen(*leaf, platform="cuda").values()
    assert choice.impl == "triton"


@triton
def test_a_mapped_step_is_traced_as_one_kernel():
    leaf = jax.tree.map(lambda x: jnp.stack([x, x]), tree((8, 256)))
    program = jax.jit(jax.vmap(functools.partial(adamw_cases.step, adam=ADAM)))
    with choices.target(capability=90):
        assert str(program.trace(*leaf).jaxpr).count("triton_kernel_call[") == 1
        actual, expected = program(*leaf), jax.jit(functools.partial(adamw_cases.step, adam=ADAM))(*tree((8, 256)))
    np.testing.assert_allclose(actual[0][1], expected[0], rtol=1e-6)


@triton
@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_the_table_has_log2_of_every_code(name):
    from pallas_kernels.optimizers.adamw_triton import log2_code_magnitudes
    from tests.kernels.adamw_codes import magnitudes

    table = log2_code_magnitudes(formats.get(name).dtype)
    assert table.dtype == np.float32
    with np.errstate(divide="ignore"):
        np.testing.assert_allclose(table, np.log2(magnitudes(name)), rtol=2**-24)
    assert table[0] == table[128] == -np.inf


@triton
@pytest.mark.parametrize("factor", [None, 0.25])
@pytest.mark.parametrize("step", [1, 3])
def test_the_scalars_of_both_kinds_of_tiles_give_one_change(step, factor):
    """Float64 values from the docstring of `AdamWScalars`, for a scalar gradient, moments and weight."""
    from pallas_kernels.optimizers.adamw_triton import AdamWScalars

    rate, decay, b1, b2, eps, eps_root, max_direction = 3e-3, 0.1, 0.9, 0.95, 1e-3, 1e-2, 2.0
    c1, c2, g, mu, nu, w = 1 - b1**step, 1 - b2**step, 0.5, 0.2, 0.04, 0.7
    scalars = AdamWScalars(
        rate, decay, b1, 1 - b1, b2, 1 - b2, c1, c2, eps, eps_root, factor, None, max_direction, 0.25
    )
    actual = np.asarray(scalars.to_vector(jnp.array([5, 6], jnp.uint32)), np.float64)
    scaled = g * (1 if factor is None else factor)
    m, v = b1 * mu + (1 - b1) * scaled, b2 * nu + (1 - b2) * scaled**2
    direction = m / c1 / (np.sqrt(v / c2 + eps_root) + eps)
    expected = -rate * (direction + decay * w)
    # General tiles: moments as stored, the gradient times the factor.
    values = actual[:8]
    root = np.sqrt(v + values[6])
    careful = m / (root - values[7])
    assert values[0] * (careful + values[1] * w) == pytest.approx(expected, rel=1e-6)
    # Fast tiles: m / (1 - b1) and v / (1 - b2), to which the gradient is added unscaled.
    values = actual[8:]
    m, v = g + values[6] * mu, g**2 + values[7] * nu
    ordinary = m / (np.sqrt(v + values[10]) + values[3])
    assert values[0] * (ordinary + values[1] * w) == pytest.approx(expected, rel=1e-6)
    np.testing.assert_allclose(values[8:10], [1 / values[4], 1 / values[5]], rtol=1e-6)
    assert values[11] == np.inf  # with eps inside of the root, no eps is small
    # Undoing one step of decay: both bias-corrected second moments are equal.
    expected_decay = 1 / b2 if step == 1 else c2 / (1 - b2 ** (step - 1)) / b2
    assert actual[20] == pytest.approx(expected_decay, rel=1e-4)
    gate = [] if factor is None else [factor, 1]
    np.testing.assert_allclose(actual[21 : 21 + len(gate)], gate)
    longest = actual[21 + len(gate) :][:2]
    np.testing.assert_allclose(longest / [careful, ordinary], max_direction / direction, rtol=1e-5)
    words = np.asarray(scalars.to_vector(jnp.array([5, 6], jnp.uint32)))[-3:-1].view(np.uint32)
    assert (words.tolist(), actual[-1], len(actual)) == ([5, 6], 0.25, 26 + len(gate))
    changes = {"rate": 1e6, "weight_decay": 1e6, "eps": np.inf, "one_minus_b2": 2.0**-61, "grad_scale": np.inf}
    for name, value in changes.items():  # no tile is fast if finite numbers may become NaN
        without_fast_tiles = scalars._replace(**({"rate": 1e-20} | {name: jnp.float32(value)}))
        without_fast_tiles = np.asarray(without_fast_tiles.to_vector())
        assert np.isfinite(actual[16])
        assert without_fast_tiles[16] == np.inf, name
    vector = np.asarray(scalars._replace(eps_root=0.0).to_vector())
    assert vector[19] == pytest.approx((128 * vector[11]) ** 2, rel=1e-6)
    assert vector[6] == np.finfo(np.float32).tiny
    assert np.isfinite(np.asarray(scalars._replace(b2=0.0, one_minus_b2=1.0, correction2=1.0).to_vector())[20])


# The compiled kernel, without a GPU. Instructions are counted in the assembly of Triton's PTX.

CONFIGURATIONS = {
    "fp32 weights": ({"shape": (512, 1024), "weight": "float32"}, 53, 9),
    "bf16 weights, stochastic": ({"shape": (512, 1024), "weight": "bfloat16", "stochastic": True}, 47, 8.5),
    "bf16 weights and second moment, stochastic": (
        {"shape": (512, 1024), "weight": "bfloat16", "stochastic": True, "stochastic_nu": True},
        58,
        8.5,
    ),
    "update": ({"shape": (512, 1024), "weight": "float32", "form": "update"}, 53, 9),
    "no expansion": ({"shape": (512, 1024), "weight": "float32", "expand": False}, 54, 2),
    "e5m2": ({"shape": (512, 1024), "weight": "float32", "nu": "e5m2"}, 53, 9),
    "bf16 second moment": ({"shape": (512, 1024), "weight": "float32", "nu": "bf16"}, 54, 6),
    "short last group": ({"shape": (512, 1000), "weight": "float32"}, 72, 10),
    "unaligned rows": ({"shape": (33, 1001), "weight": "float32"}, 115, 12),
    "groups of 16": ({"shape": (512, 1024), "weight": "float32", "size": 16}, 49, 9),
    "groups of 1024": ({"shape": (512, 2048), "weight": "float32", "size": 1024}, 54, 8.5),
    "bf16 weights": ({"shape": (512, 1024), "weight": "bfloat16"}, 44, 8.5),
    "bf16 update": ({"shape": (512, 1024), "weight": "bfloat16", "form": "update"}, 44, 8.5),
    "stochastic second moment": ({"shape": (512, 1024), "weight": "float32", "stochastic_nu": True}, 64, 9),
    "fp32 weights, gated": ({"shape": (512, 1024), "weight": "float32", "gated": True}, 53, 9),
    "bf16 weights, gated": ({"shape": (512, 1024), "weight": "bfloat16", "gated": True}, 44, 8.5),
    "fp32 weights, gated and cut": ({"shape": (512, 1024), "weight": "float32", "gated": True, "cut": True}, 54, 9),
    "bf16 weights, gated and cut": ({"shape": (512, 1024), "weight": "bfloat16", "gated": True, "cut": True}, 45, 8.5),
    "bf16 weights, all of it": (
        {
            "shape": (512, 1024),
            "weight": "bfloat16",
            "stochastic": True,
            "stochastic_nu": True,
            "gated": True,
            "cut": True,
        },
        59,
        8.5,
    ),
}


def lower(
    shape, weight, size=128, mu="e4m3", nu="e4m3", expand=True, form="step", stochastic=False, stochastic_nu=False,
    gated=False, cut=False,
):  # fmt: skip
    """Lowers one step for a GPU of compute capability 9.0, in its own process."""

    def moment(name, role):
        how = spec(name, size, expand, role)
        if how is None:
            return jax.ShapeDtypeStruct(shape, formats.get(name).dtype)
        return jax.eval_shape(lambda: quantize(jnp.zeros(shape), how))

    args = (
        jax.ShapeDtypeStruct(shape, jnp.bfloat16),
        moment(mu, "mu"),
        moment(nu, "nu"),
        jax.ShapeDtypeStruct(shape, jnp.dtype(weight)),
    )
    options = {"key": jax.random.key(0)} if stochastic else {}
    adam = dataclasses.replace(ADAM, grad_scale=jnp.float32(0.5), apply_if=jnp.array(True)) if gated else ADAM
    adam = dataclasses.replace(adam, max_direction=jnp.float32(1.2)) if cut else adam
    make = getattr(adamw_cases, form)
    run = functools.partial(make, adam=adam, impl="triton", stochastic_nu=stochastic_nu, **options)
    return jax.jit(run, donate_argnums=(1, 2, 3)).trace(*args).lower(lowering_platforms=("cuda",))


def count_instructions(name):
    """Returns instructions and special-function instructions per parameter, spills and registers.

    It counts the shortest path from the start to an end on which everything is stored: that of fast tiles.
    """
    import jax_triton.triton_lib as triton_lib
    import triton as triton_package

    settings, _, _ = CONFIGURATIONS[name]
    compiled = []
    original = triton_lib.compile_ttir_to_ptx_inplace
    triton_lib.compile_ttir_to_ptx_inplace = lambda *a, **k: compiled.append(original(*a, **k)) or compiled[-1]
    text = lower(**settings).as_text()
    triton_lib.compile_ttir_to_ptx_inplace = original
    assert triton_calls(text)
    tools = pathlib.Path(triton_package.__file__).parent / "backends" / "nvidia" / "bin"
    work = pathlib.Path(os.environ["WORK"])
    # Triton names the PTX version that this machine's driver supports, not that of its own assembler.
    (work / "k.ptx").write_text(re.sub(r"\.version [\d.]+", ".version 8.7", compiled[-1].binary))
    printed = subprocess.run(
        [tools / "ptxas", "-v", "-arch=sm_90a", "k.ptx", "-o", "k.cubin"],
        cwd=work,
        check=True,
        capture_output=True,
        text=True,
    ).stderr
    sass = subprocess.run(
        [tools / "nvdisasm", "-c", "k.cubin"], cwd=work, check=True, capture_output=True, text=True
    ).stdout
    names = shortest_way(sass)
    spills = len(re.findall(r"\bLDL\b", sass))
    elements = 32 if settings.get("size") == 1024 or settings["weight"] == "bfloat16" else 16
    special_functions = sum(x.startswith("MUFU") for x in names)
    registers = int(re.search(r"Used (\d+) registers", printed)[1])
    return [len(names) / elements, special_functions / elements, spills, registers]


def count_all(names):
    """Prints the counts of each case."""
    print(json.dumps({name: count_instructions(name) for name in names}))


def shortest_way(sass):
    """Returns the instructions of the shortest path through a program that stores codes, scales and the result."""
    lines, labels = [], {}
    for line in sass.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line):
            labels[label[1]] = len(lines)
        if actual := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(@!?U?P\d+ )?\s*([A-Z][A-Z0-9_.]+)(.*)", line):
            lines.append(actual.groups())
    ways, open_ways = [], [(0, ())]
    while open_ways:
        line_number, names = open_ways.pop()
        while line_number < len(lines):
            predicate, name, rest = lines[line_number]
            names, line_number = (*names, name), line_number + 1
            if name == "EXIT" and not predicate:
                ways.append(names)
                break
            if name == "BRA":
                target = labels[re.search(r"\.L_x_\d+", rest)[0]]
                if target >= line_number:
                    open_ways.append((target, names))
                if not predicate:
                    break
    # A loop is entered once: the path with the most stores stores everything.
    return max(ways, key=lambda way: (sum(name.startswith("STG") for name in way), -len(way)))


def in_own_process(call, tmp_path):
    """Returns the output of a function of this file, in a process whose JAX is configured for absent GPUs."""
    if importlib.util.find_spec("jax_cuda13_plugin") is None:
        pytest.skip("lowering for CUDA needs: pip install --no-deps jax-cuda13-plugin jax-cuda13-pjrt (jax's version)")
    root = FOLDER.parents[1]
    paths = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    env = os.environ | {"PYTHONPATH": paths, "WORK": str(tmp_path), "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
    env["JAX_PLATFORMS"] = "cuda,cpu" if call.startswith("memory") else "cpu"
    completed = subprocess.run(
        [sys.executable, "-c", f"from tests.kernels import test_adamw; test_adamw.{call}"],
        env=env,
        capture_output=True,
        text=True,
    )
    assert completed.returncode == 0, completed.stderr[-3000:]
    return json.loads(completed.stdout.splitlines()[-1])


@pytest.mark.slow
@triton
@pytest.mark.parametrize("which", [slice(2), pytest.param(slice(2, None), marks=pytest.mark.slow)], ids=["few", "rest"])
def test_lowers_for_hopper_within_an_instruction_budget(which, tmp_path):
    names = list(CONFIGURATIONS)[which]
    actual = in_own_process(f"count_all({names!r})", tmp_path)
    assert list(actual) == names
    for name, counted in actual.items():
        settings, instructions, special_functions = CONFIGURATIONS[name]
        assert counted[0] <= instructions, name
        assert counted[1] <= special_functions, name
        assert counted[2] == 0, f"registers spill to memory: {name}"
        if settings["weight"] == "bfloat16":
            # The pinned Triton allows 12 warps at a time, Triton 3.9 (222 registers) 8.
            max_instructions = 168 if importlib.metadata.version("triton").startswith("3.6.") else 240
            assert counted[3] <= max_instructions, f"{counted[3]} registers: too few warps at a time: {name}"


def memory(form):
    """Prints bytes of temporaries and of the state, and numbers of operations, of a step compiled for an H200."""
    from jax.experimental import topologies

    config = (FOLDER / "h200.txtpb").read_text()
    description = topologies.get_topology_desc(platform="cuda", target_config=config, topology="1x1x1")
    mesh = jax.sharding.Mesh(np.array(description.devices), ("device",))
    where = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    tx = fp8jax.compressed_adamw(1e-3, weight_decay=0.1, impl="triton")
    params = {
        "a": jax.ShapeDtypeStruct((4096, 4096), jnp.float32),
        "b": jax.ShapeDtypeStruct((4096, 1000), jnp.float32),
        "c": jax.ShapeDtypeStruct((4096, 1024), jnp.bfloat16),
        "d": jax.ShapeDtypeStruct((4096, 2048), jnp.bfloat16),
    }
    grads = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, jnp.bfloat16), params)
    state = jax.eval_shape(tx.init, params)
    place = functools.partial(jax.tree.map, lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=where))
    # Called as in a training program, which skips steps with gradients that are not finite.
    if form == "step":
        tx = fp8jax.with_clipping(1.0, tx)
        state = jax.eval_shape(tx.init, params)
    step = lambda grads, state, params, ok: tx.step(grads, state, params, apply_if=ok)  # noqa: E731
    run = jax.jit(step, donate_argnums=(1, 2)) if form == "step" else jax.jit(tx.update, donate_argnums=1)
    flag = (jax.ShapeDtypeStruct((), jnp.bool_),) if form == "step" else ()
    compiled = run.trace(*map(place, (grads, state, params, *flag))).lower().compile()
    calls = triton_calls(compiled.as_text())
    entry = compiled.as_text().split("ENTRY")[1]
    others = [len(re.findall(rf"= {of} {name}\(", entry)) for of, name in ((r"\w+\[\d\S+", "copy"), (r"\S+", "fusion"))]
    state_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
    print(json.dumps([compiled.memory_analysis().temp_size_in_bytes, state_bytes, calls, *others]))


@triton
@pytest.mark.parametrize("form", ["step", pytest.param("update", marks=pytest.mark.slow)])
def test_no_temporaries_where_state_is_donated(form, tmp_path):
    temporaries, state, calls, copies, fusions = in_own_process(f"memory({form!r})", tmp_path)
    assert calls == 4
    norms = 12 if form == "step" else 0  # three fusions for each
    assert fusions <= 2 + norms, "scalars and tables are not made for each parameter"
    assert temporaries <= 0.01 * state
    assert copies == 0
