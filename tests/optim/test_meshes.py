"""The effect of a mesh on an optimizer's state: none for whole groups, rarely one code for groups that it splits."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

import fp8jax
from tests.rows import few

STEPS = 4
MADE = {
    "compressed_adamw": lambda **kwargs: fp8jax.compressed_adamw(1e-3, **kwargs),
    "lion": lambda **kwargs: fp8jax.compress_state(optax.lion(1e-3), **kwargs),
    "adafactor": lambda **kwargs: fp8jax.compress_state(optax.adafactor(1e-3, factored=False), **kwargs),
    "fp8lm_adamw": lambda expand: fp8jax.fp8lm_adamw(1e-3, group_size=128),
}
# Over 4 devices along the last axis, 1,024 columns are two full groups each; with 1,000, three groups are split.
CASES = [(name, width, expand) for name in MADE for width in (1024, 1000) for expand in (True, False)]


def states(tx, width, kind, cut):
    """Returns the states of some steps, moments as (codes, scales, exponents), with an axis sharded or not."""
    mesh = jax.make_mesh((4,), ("x",), axis_types=(kind,), devices=jax.devices()[:4])
    rng = np.random.default_rng(0)
    with jax.set_mesh(mesh):
        where = jax.NamedSharding(mesh, jax.P(None, "x") if cut else jax.P())
        put = lambda: jax.device_put(jnp.asarray(rng.normal(size=(16, width)), jnp.float32), where)  # noqa: E731
        params, gradients = {"w": put()}, [{"w": put()} for _ in range(STEPS)]
        state, update, results = jax.jit(tx.init)(params), jax.jit(tx.update), []
        for grads in gradients:
            _, state = update(grads, state, params)
            results.append(jax.tree.map(np.asarray, state))
    return results


@pytest.mark.parametrize("kind", [AxisType.Auto, pytest.param(AxisType.Explicit, marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize(
    ("name", "width", "expand"), few(CASES, ("compressed_adamw", 1024, True), ("lion", 1000, True))
)
def test_a_mesh_changes_no_code_of_whole_groups_and_few_of_cut_ones(name, width, expand, kind):
    tx = MADE[name](expand=expand)
    one, many = (states(tx, width, kind, cut) for cut in (False, True))
    if width == 1024 or not expand or name == "fp8lm_adamw":
        for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(many), strict=True):
            np.testing.assert_array_equal(a.view(f"u{a.dtype.itemsize}"), b.view(f"u{b.dtype.itemsize}"))
        return
    is_quantized = lambda x: isinstance(x, fp8jax.QTensor)  # noqa: E731
    for a, b in zip(*(jax.tree.leaves(x, is_leaf=is_quantized) for x in (one, many)), strict=True):
        if not is_quantized(a):
            np.testing.assert_array_equal(a, b)
            continue
        x, y = (q.codes.view(np.int8).astype(int) for q in (a, b))
        assert np.mean(x != y) < 2e-3
        assert np.abs(x - y).max() <= 1
        np.testing.assert_allclose(a.scale, b.scale, rtol=2.0**-3)
