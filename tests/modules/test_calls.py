"""Calls of modules as functions: leaves, static settings, and the paths that rules match."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from fp8jax.core.formats import ALL
from fp8jax.modules.calls import (
    CallLeaf,
    LayerNames,
    Results,
    is_array,
    merge_leaves,
    partition_leaves,
    static_fingerprint,
    transform_call,
)
from fp8jax.rewrite.rules import as_rule_set

ONE = np.ones(2, np.float32)


@pytest.mark.parametrize(
    ("x", "plain"),
    [
        *((np.ones(2, dtype), True) for dtype in (bool, np.int8, np.float64, np.complex64, ml_dtypes.bfloat16)),
        *((np.ones(2).astype(dtype), False) for dtype in ("U3", "S3", object)),
        (np.array(["2026-01-01"], "M8[D]"), False),
        (np.array([3], "m8[D]"), False),
        (jnp.ones(2), True),
        (jax.random.key(0), True),
        (jax.ShapeDtypeStruct((2,), jnp.float32), True),
        *((x, False) for x in (1, 1.0, True, "a", None, ALL)),
    ],
    ids=lambda x: str(getattr(x, "dtype", x))[:20],
)
def test_arrays_are_told_from_settings(x, plain):
    assert is_array(x) == plain


LEAVES = (
    CallLeaf("array"), CallLeaf("parameter", "b/w"), CallLeaf("setting", True), CallLeaf("argument", num_arrays=2),
    CallLeaf("parameter", "a/w"), CallLeaf("argument"), CallLeaf("array", num_arrays=3),
)  # fmt: skip


def test_leaves_are_parted_and_joined_again_in_their_order():
    values = ["state", "wb", True, "x", "wa", "y", "more"]
    params, rest = partition_leaves(LEAVES, values)
    assert params == {"b/w": "wb", "a/w": "wa"}
    assert rest == ["state", "x", "y", "more"]
    assert merge_leaves(LEAVES, iter(rest), params) == values
    left = (CallLeaf("passthrough", 1), CallLeaf("array"), CallLeaf("setting", 7), CallLeaf("passthrough", 0))
    assert merge_leaves(left, iter(["new"]), input_leaves=["first", "second"]) == ["second", "new", 7, "first"]


def test_a_call_says_which_of_its_inputs_are_arguments_and_how_many_outputs_results():
    """The program's first inputs are parameters. Each leaf has as many inputs as it has arrays."""

    def method(): ...

    call = transform_call(
        lambda leaves: Results([], None, (), 0),
        method,
        LEAVES,
        as_rule_set("te_current"),
        names=LayerNames("", []),
        requires_product=False,
        checks_rules=True,
        state_axes={},
    )
    caller = call._make_call_info(Results([ONE] * 5, None, (), 2))
    # a/w, b/w, an array, two arrays of an argument, an argument, three arrays.
    assert sorted(caller.argument_indices) == [3, 4, 5]
    assert (caller.num_results, caller.requires_product, caller.state_axes) == (2, False, {})
    assert call.__name__ == "method"


class Setting:
    def __init__(self, value):
        self.value = value


class ByValue(Setting):
    def __eq__(self, other):
        return self.value == other.value

    def __hash__(self):
        return 0


def test_settings_that_compare_as_equal_are_told_apart():
    assert static_fingerprint(1) == static_fingerprint(1)
    assert static_fingerprint(1) != static_fingerprint(True)
    assert static_fingerprint(1) != static_fingerprint(1.0)
    setting = Setting(1)
    before = static_fingerprint(setting, "a")
    assert before == static_fingerprint(setting, "a")
    setting.value = 2
    assert before != static_fingerprint(setting, "a")
    setting.more, setting.value = 3, 1
    assert before != static_fingerprint(setting, "a")
    with pytest.raises(TypeError, match="unhashable"):
        static_fingerprint(Setting([1]))
    # Functions, and arguments that are compared by value, are not searched.
    assert static_fingerprint(ByValue([1])) == static_fingerprint(ByValue([2]))
    function = lambda x: x  # noqa: E731
    function.of = [1]
    assert static_fingerprint(function) == static_fingerprint(lambda x: x)


def test_a_matrix_is_named_by_itself_only_beside_others():
    paths = ("one/kernel", "one/embedding", "two/w1", "two/w2", "w", "three/gate", "three/up", "three/down")
    shapes = [("one/bias", (4,)), *((path, (4, 4)) for path in paths)]
    names = LayerNames("", shapes)
    assert names("one/kernel") == ("one",)
    assert names("one/bias") == ("one",)
    assert names("two/w2") == ("two/w2", "two")
    assert names("three/up") == ("three/up", "three")
    assert names("w") == ("",)
    names = LayerNames("model/layer", shapes)
    assert names("one/kernel") == ("model/layer/one",)
    assert names("two/w1") == ("model/layer/two/w1", "model/layer/two")
    assert names("w") == ("model/layer",)
