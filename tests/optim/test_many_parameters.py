"""Many parameters: equal ones share one traced function, and on a CPU one compiled function."""

import contextlib
import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

import fp8jax
from tests.rows import slow

MAKE = {
    "compressed_adamw": functools.partial(fp8jax.compressed_adamw, 1e-2, min_size=512),
    "fp8lm_adamw": functools.partial(fp8jax.fp8lm_adamw, 1e-2, min_size=512, master_rounding="stochastic"),
    "fp8lm_adamw, groups": functools.partial(fp8jax.fp8lm_adamw, 1e-2, min_size=512, group_size=128),
    "compress_state": lambda: fp8jax.compress_state(optax.adamw(1e-2, b2=0.95), min_size=512),
}
forms = pytest.mark.parametrize(
    ("name", "form"), [("compressed_adamw", "step"), ("fp8lm_adamw", "update"), ("compress_state", "update")]
)


def params(count):
    """Parameters of two shapes, the second in bf16, and small ones."""
    keys = iter(jax.random.split(jax.random.key(0), 3 * count))
    tree = {f"a{i}": jax.random.normal(next(keys), (4, 256)) for i in range(count)}
    tree |= {f"b{i}": jax.random.normal(next(keys), (8, 128)).astype(jnp.bfloat16) for i in range(count)}
    return tree | {f"c{i}": jax.random.normal(next(keys), (5,)) for i in range(count)}


def lowered(tx, form, p):
    state = tx.init(p)
    return jax.jit(getattr(tx, form), donate_argnums=(1,)).lower(p, state, p), state


def one_device():
    """A context in which programs are traced for one of the eight devices."""
    return jax.set_mesh(jax.make_mesh((1,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1]))


@forms
def test_a_program_of_many_has_one_body_for_each_kind(name, form):
    tx = MAKE[name]()
    texts = [lowered(tx, form, params(count))[0].as_text() for count in (4, 12)]
    bodies = [len(re.findall(r"func.func private @_call_body", text)) for text in texts]
    assert bodies[0] == bodies[1] > 0
    # Each parameter adds its arguments, its results and a call.
    assert texts[1].count("\n") < 1.6 * texts[0].count("\n")


@pytest.mark.parametrize(("context", "bodies"), [(contextlib.nullcontext, 3), (one_device, 1)])
def test_parameters_of_as_many_groups_share_a_body_on_one_device(context, bodies):
    p = {str(shape): jnp.ones(shape) for shape in ((4, 256), (2, 512), (2, 2, 256))}
    with context():
        text = lowered(MAKE["compressed_adamw"](), "step", p)[0].as_text()
    assert text.count("func.func private @_call_body") == bodies


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("compressed_adamw", "step"),
        ("fp8lm_adamw, groups", "update"),
        slow("fp8lm_adamw", "update"),
        slow("compress_state", "update"),
    ],
)
def test_a_function_of_parameters_gives_each_its_own_step_in_its_own_memory(name, form):
    tx, p = MAKE[name](), params(4)
    grads = jax.tree.map(lambda x: x * jnp.linspace(0.1, 1, x.shape[-1]).astype(x.dtype), p)
    calls, texts = [], []
    for context in (contextlib.nullcontext, one_device):
        with context():
            program, state = lowered(tx, form, p)
            program = program.compile()
            size = sum(x.nbytes for x in jax.tree.leaves(state))
            assert program.memory_analysis().alias_size_in_bytes >= 0.99 * size
            texts.append(program.as_text())
            result, state = program(grads, state, p)
            calls.append(jax.device_get((result, program(grads, state, result if form == "step" else p))))
    assert [text.count(" call(") >= 8 for text in texts] == [False, True]
    expected, actual = calls
    chex.assert_trees_all_equal_shapes_and_dtypes(actual, expected)
    for a, b in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
        if a.dtype.itemsize == 1:
            # Sums run in another order: a code at a tie may be the next one.
            assert np.mean(a.view(np.uint8) != b.view(np.uint8)) <= 0.01
        else:
            np.testing.assert_allclose(np.float64(a), np.float64(b), rtol=2.0**-8, atol=1e-5)
