"""Policies of `jax.checkpoint`: 8-bit matmuls are saved where JAX's own would be, and recomputed elsewhere."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fp8jax
from fp8jax.ops.dispatch import choice
from tests.programs import count, dots, residuals
from tests.rows import slow

WIDTH, INNER, TOKENS = 32, 64, 16
X = jax.random.normal(jax.random.key(1), (TOKENS, WIDTH), jnp.bfloat16)
P = {
    name: 0.2 * jax.random.normal(jax.random.key(i), shape)
    for i, (name, shape) in enumerate({"gate": (WIDTH, INNER), "up": (WIDTH, INNER), "down": (INNER, WIDTH)}.items())
}
POLICIES = jax.checkpoint_policies
FORWARD = ("float8_e4m3fn", "float8_e4m3fn")


def block(p, x):
    h = x.astype(jnp.float32)
    y = (h * jax.lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + 1e-6)).astype(x.dtype)
    w = {name: a.astype(x.dtype) for name, a in p.items()}
    return x + (jax.nn.silu(y @ w["gate"]) * (y @ w["up"])) @ w["down"]


def loss(fn):
    return lambda p, x: jnp.sum(jnp.sin(fn(p, x).astype(jnp.float32)))


def kernels(fn):
    """Returns the number of matmuls in a GPU program."""
    with choice.target(capability=90):
        return count(fn, "mosaic_call", P, X)


def counted(policy, recipe="coat", on_gpu=False):
    """Returns the number of forward matmuls in the program of a gradient, and that gradient."""
    inner = block if policy == "none" else jax.checkpoint(block, policy=policy)
    fast = fp8jax.transform(lambda p, x: inner(p, x), recipe)  # traced again
    grads = jax.grad(loss(fast))
    if on_gpu:
        return kernels(grads), grads, fast
    return dots(grads, P, X).count(FORWARD), grads, fast


@pytest.mark.parametrize(
    ("recipe", "on_gpu"), [("coat", False), ("te_current", True), slow("coat", True), slow("te_current", False)]
)
def test_products_are_computed_once_where_dots_are_kept_and_twice_elsewhere(recipe, on_gpu):
    """On a GPU a matmul is a branch, which JAX's policies do not inspect; the count is the same."""
    once, expected, _ = counted("none", recipe, on_gpu)
    for policy in (POLICIES.dots_saveable, POLICIES.dots_with_no_batch_dims_saveable, POLICIES.everything_saveable):
        actual, grads, _ = counted(policy, recipe, on_gpu)
        assert actual == once
        if policy is POLICIES.dots_saveable and not on_gpu:
            for a, b in zip(jax.tree.leaves(grads(P, X)), jax.tree.leaves(expected(P, X)), strict=True):
                np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    for policy in (None, POLICIES.nothing_saveable, POLICIES.save_only_these_names("other")):
        # The last product's result is not read again.
        assert counted(policy, recipe, on_gpu)[0] == once + 2


def test_kept_bytes_are_codes_where_the_backward_pass_reads_codes():
    """Gate and up as codes with group scales, instead of 2 bytes per element."""
    names = {(dtype, shape) for dtype, shape in residuals(counted(POLICIES.dots_saveable)[2], P, X)}
    assert ("bfloat16", (TOKENS, INNER)) not in names
    assert ("uint8", (TOKENS, INNER)) in names
    unquantized = residuals(jax.checkpoint(block, policy=POLICIES.dots_saveable), P, X)
    assert ("bfloat16", (TOKENS, INNER)) in unquantized


def test_functions_take_the_policy():
    layer = functools.partial(fp8jax.linear, recipe="te_current")
    two = lambda p, x: layer(jnp.sin(layer(x, p["gate"])), p["down"])  # noqa: E731

    def computed(policy):
        return kernels(jax.grad(loss(jax.checkpoint(lambda p, x: two(p, x), policy=policy))))

    with_products, once = fp8jax.checkpoint_policies.with_products, kernels(jax.grad(loss(lambda p, x: two(p, x))))
    assert once == 6
    assert computed(with_products(POLICIES.dots_saveable)) == once
    # JAX's own policy does not look into kernels: this is what it misses.
    assert computed(POLICIES.dots_saveable) == computed(with_products(POLICIES.nothing_saveable)) == once + 1


def test_answers_are_the_policys_own_and_equal_ones_are_one():
    with_products = fp8jax.checkpoint_policies.with_products
    policy = with_products(POLICIES.offload_dot_with_no_batch_dims("device", "pinned_host"))
    name, kind = jax.make_jaxpr(lambda x: jax.ad_checkpoint.checkpoint_name(x, "fp8jax_product"))(X).eqns[0], X.aval
    moved = policy(name.primitive, kind, name="fp8jax_product")
    assert (moved.src, moved.dst) == ("device", "pinned_host")
    assert type(policy(name.primitive, kind, name="theirs")).__name__ == "RecomputeType"
    names = [*fp8jax.CHECKPOINT_NAMES, "fp8jax_product", "fp8jax_product_aux", "fp8jax_guard"]
    dots, own = map(with_products, (POLICIES.dots_saveable, POLICIES.save_only_these_names("fp8jax_norm")))
    assert all(dots(name.primitive, kind, name=one) is True for one in names)
    assert [one for one in names if own(name.primitive, kind, name=one) is True] == ["fp8jax_norm"]
    # The policy is called for a product with this result.
    requests = []

    def nothing(primitive, *kinds, preferred_element_type=None, **_):
        requests.append((primitive.name, kinds, preferred_element_type))

    wide = kind.update(dtype=jnp.float32)
    with_products(lambda *kinds, **how: bool(nothing(*kinds, **how)))(name.primitive, wide, name="fp8jax_product")
    assert requests == [("name", (wide,), None), ("dot_general", (wide, wide), jnp.float32)]
    assert with_products(POLICIES.dots_saveable) == with_products(with_products(POLICIES.dots_saveable))
    assert hash(with_products(POLICIES.dots_saveable)) == hash(with_products(POLICIES.dots_saveable))
    assert with_products(None) is None
    with pytest.raises(TypeError, match="expects a policy such as"):
        with_products("dots_saveable")


def test_explain_tells_of_products_that_are_computed_again():
    text = str(counted(None)[2].explain(P, X))
    assert "3 of 3 matmuls are recomputed in the backward pass" in text
    for policy in ("none", POLICIES.dots_saveable):
        assert "recomputed in the backward pass" not in str(counted(policy)[2].explain(P, X))
