"""`QTensor`, the pytree of a quantized tensor, and the functions that quantize to it."""

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import NamedSharding
from jax.typing import DTypeLike

from fp8jax.core import blocks, derivatives, encoding, expansion, formats
from fp8jax.core.encoding import QTensorLeaves
from fp8jax.core.spec import QuantSpec


@dataclasses.dataclass(frozen=True, eq=False)
class ShortBlocks:
    """Lengths of the last blocks along the axes that groups and square blocks divide; 0 for a whole one.

    Static in the tree of a `QTensor`. Two trees differ if both lengths are known and differ.

    Attributes:
        lengths: one per such axis; None if unknown, as for leaves without shapes.
    """

    lengths: tuple[int, ...] | None = None

    @classmethod
    def from_shape(cls, shape: Any, spec: QuantSpec) -> "ShortBlocks":
        """The lengths of the last blocks of codes of this shape; unknown for leaves without a shape."""
        axes = {"group": (spec.axis,), "block": (-2, -1)}.get(spec.granularity)
        if axes is None or not isinstance(shape, tuple) or not all(-len(shape) <= axis < len(shape) for axis in axes):
            return cls()
        sizes = [shape[axis] for axis in axes]
        if not all(isinstance(n, (int, np.integer)) for n in sizes):
            return cls()
        return cls(tuple(int(n) % (spec.group_size or 1) for n in sizes))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ShortBlocks):
            return NotImplemented
        return self.lengths is None or other.lengths is None or self.lengths == other.lengths

    def __hash__(self) -> int:
        return 0


# Version of the storage. Saved states load for ever (tests/data holds one): to change the meaning of an array,
# increment this and keep reading the old version.
VERSION = 1
# Version of packed codes, which no optimizer state has. Version 1 interleaved the five bytes of four codes.
PACKED_VERSION = 2
# Metadata arrays in alphabetical order. Orbax restores dicts without a target, whose leaves have that order too.
METADATA_FIELDS = ("expansion", "microscale", "scale")
METADATA_KEYS = tuple(jax.tree_util.GetAttrKey(name) for name in METADATA_FIELDS)


QTensorStatic = tuple[QuantSpec, int | None, ShortBlocks]


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True)
class QTensor:
    """A quantized tensor: codes, the scales of their blocks, and optional expansion exponents or microscales.

    Let M be the largest value of the format, and s, k and m the scale, exponent and microscale of an element's block. A
    code c decodes to

        sign(c) * (s * M) * (|c| / M)^(1 / k) * m

    which is c * s without expansion (k = 1) and microscaling (m = 1). `validate` checks these invariants:

    - `codes` has the logical shape and the format's dtype. int10 and e2m1 are packed: uint8, five bytes for four codes
      or one byte for two along `spec.axis`, whose logical length is `length`;
    - `scale` and `expansion` have the rank of `codes` and one entry per block (`spec.block_shape`), `microscale` one
      per group (`spec.micro_shape`), counted from the start of each dimension of the global shape;
    - scales are positive and of dtype `spec.scale_format`; a block of zeros has scale 1;
    - `expansion` is None unless `spec.expand`; otherwise bf16 in [1/16, 16];
    - `microscale` is None unless there are two levels of scales; else bytes of `spec.microscale_format`, E8M0 for "mx"
      and e4m3 for "nv" and "nvblock". uint8, unlike an E8M0 dtype, has a zero and survives `zeros_like`;
    - no two leaves share a buffer;
    - the last block along an axis is as short as when the codes were computed (`short_blocks`).

    Non-finite inputs stay visible and do not affect the statistics of their block. NaN becomes the format's NaN, Inf
    its Inf, or NaN if it has none. If a format has neither (integers, code books, e2m1), the scale of the block becomes
    NaN, with two levels the microscale. The same holds for a negative value in an unsigned format.

    The path of the leaf with the codes is `storage_key`, such as "codes:e4m3:group128+expand:v1". Libraries that save
    trees by path (Orbax, Flax's serialization, a flat dict) then raise an error that names both keys if the template
    has other storage. To convert a state, restore it into a template of the same kind, dequantize, and quantize again.

    Maps over a state and a tree with one leaf per parameter must treat QTensors as leaves, as in
    `optax.tree.map_params` with a tree of shardings: pass `is_leaf=lambda x: isinstance(x, QTensor)`. `shardings`
    returns the shardings of the arrays.

    `jax.tree.map` applies a function to codes and scales alike. The result decodes correctly if the function moves
    whole blocks, as indexing of a leading axis does. It decodes wrongly, without an error, after these functions:

    - `jnp.roll`, `jnp.sort` or a permutation along an axis with blocks;
    - `jnp.flip` along such an axis if the last block is short;
    - arithmetic, such as `lambda a: 0.9 * a`.

    Apply them to the result of `dequantize`.

    Attributes:
        codes: array of the logical shape (int10, e2m1: packed).
        scale: one value per block.
        expansion: one exponent per block, or None.
        microscale: one byte per group, or None.
        spec: the static `QuantSpec`.
        length: static logical length of the packed axis, or None.
        short_blocks: static lengths of the last blocks, set when a tree is rebuilt, else derived from the codes. Codes
            of two QTensors, concatenated along an axis, decode wrongly if a block other than the last is short.
            `dequantize` and `validate` raise in that case.
    """

    codes: Array
    scale: Array
    expansion: Array | None
    microscale: Array | None
    spec: QuantSpec
    length: int | None = None
    short_blocks: ShortBlocks | None = dataclasses.field(default=None, init=False, repr=False, compare=False)

    def tree_flatten(self) -> tuple[tuple[Any, ...], QTensorStatic]:
        static = self.spec, self.length, self._short_blocks()
        return (self.codes, *(getattr(self, name) for name in METADATA_FIELDS)), static

    def tree_flatten_with_keys(self) -> tuple[tuple[tuple[Any, Any], ...], QTensorStatic]:
        children, static = self.tree_flatten()
        return tuple(zip((jax.tree_util.DictKey(self.storage_key), *METADATA_KEYS), children, strict=True)), static

    @classmethod
    def tree_unflatten(cls, static: QTensorStatic, children: Iterable[Any]) -> "QTensor":
        (spec, length, short_blocks), (codes, *metadata) = static, children
        _check_leaf_order(spec, (codes, *metadata))
        q = cls(codes, **dict(zip(METADATA_FIELDS, metadata, strict=True)), spec=spec, length=length)
        object.__setattr__(q, "short_blocks", short_blocks)
        return q

    def _short_blocks(self) -> ShortBlocks:
        if self.short_blocks is not None:
            return self.short_blocks
        # Inside jax.shard_map a shard may have its own blocks.
        manual = bool(jax.sharding.get_abstract_mesh().manual_axes)
        return ShortBlocks() if manual else ShortBlocks.from_shape(getattr(self.codes, "shape", None), self.spec)

    def with_codes(self, codes: Any) -> "QTensor":
        """A copy with other codes for the same blocks, such as their bytes."""
        _, static = self.tree_flatten()
        return self.tree_unflatten(static, (codes, *(getattr(self, name) for name in METADATA_FIELDS)))

    @property
    def storage_key(self) -> str:
        """A string with everything that affects decoding: format, blocks, expansion, packed length and storage version.

        It does not include rounding mode, exponent rule or `flush_to_zero`: they do not affect decoding.
        """
        return storage_key(self.spec, self.length)

    @property
    def shape(self) -> tuple[int, ...]:
        if self.length is None:
            return self.codes.shape
        axis = self.spec.axis % self.codes.ndim
        return (*self.codes.shape[:axis], self.length, *self.codes.shape[axis + 1 :])

    @property
    def nbytes(self) -> int:
        """Bytes of codes and metadata; also of an abstract QTensor."""
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(self))

    @property
    def _leaves(self) -> QTensorLeaves:
        return QTensorLeaves(self.codes, self.scale, self.expansion, self.microscale)

    def dequantize(self, dtype: DTypeLike = jnp.float32) -> Array:
        """The decoded values, computed in fp32 and cast to `dtype`.

        Raises:
            ValueError: as for `check_blocks`.
        """
        self.check_blocks()
        names = [name for name, part in self._leaves._asdict().items() if part is not None]

        def decode(*arrays: Array) -> tuple[Array]:
            return (encoding.decode(QTensorLeaves(**dict(zip(names, arrays, strict=True))), self.shape, self.spec),)

        arrays = [getattr(self, name) for name in names]
        (values,) = blocks.on_logical_array(decode, *arrays, out_shapes=[self.shape])
        return derivatives.check_differentiable_dtypes("dequantize", values.astype(dtype), values)

    def shardings(self, sharding: NamedSharding) -> "QTensor":
        """The shardings of arrays for codes with `sharding`: replicated on axes that do not divide the block count."""
        mesh = sharding.mesh

        def sharding_of(array: Array) -> NamedSharding:
            return NamedSharding(mesh, blocks.block_partition_spec(sharding.spec, array.shape, dict(mesh.shape)))

        return jax.tree.map(sharding_of, self)

    def check_blocks(self) -> None:
        """Checks that the blocks have not moved since the codes were computed; works for an abstract QTensor, too.

        Raises:
            ValueError: the codes were cast, or the arrays were concatenated, sliced or stacked one by one along an axis
                with blocks.
        """
        dtype = _dtypes(self.spec)[0]
        if self.codes.dtype != dtype:
            raise ValueError(
                f"codes of {self.spec} have dtype {self.codes.dtype}, not {dtype}: the arrays of a QTensor were cast "
                "one by one. Cast the result of dequantize() instead"
            )
        short_blocks, expected = ShortBlocks.from_shape(self.codes.shape, self.spec), self.spec.leaf_shapes(self.shape)
        shapes = {name: getattr(self, name).shape for name in expected if getattr(self, name) is not None}
        wrong = {
            name: shape
            for name, shape in shapes.items()
            if not _is_compatible_shape(shape, expected[name], name == "codes")
        }
        if not wrong and self._short_blocks() == short_blocks:
            return
        raise ValueError(
            f"blocks of {self.spec} do not fit codes of shape {self.codes.shape}"
            + "".join(f"; {name} has shape {shape}, not {expected[name]}" for name, shape in wrong.items())
            + ("" if wrong else f"; last blocks had lengths {self._short_blocks().lengths}, not {short_blocks.lengths}")
            + ". The arrays of a QTensor were concatenated, sliced or stacked one by one. Apply the operation to the "
            "result of dequantize(), slice at multiples of the block, or use an axis without blocks. Decode a stack "
            "with jax.vmap"
        )

    def validate(self) -> None:
        """Checks the invariants in the class docstring on concrete arrays.

        Raises:
            ValueError: an invariant does not hold; the message names it.
        """
        fmt, spec = formats.get(self.spec.format), self.spec
        dtypes = dict(zip(("codes", *METADATA_FIELDS), _dtypes(spec), strict=True))
        expected = {name: (shape, dtypes[name]) for name, shape in self.spec.leaf_shapes(self.shape).items()}
        for name, array in self._leaves._asdict().items():
            if (array is not None) != (name in expected):
                raise ValueError(f"{name} is {'missing' if array is None else 'there'}, but the spec is {spec}")
            if array is not None and (array.shape, array.dtype) != expected[name]:
                shape, dtype = expected[name]
                raise ValueError(f"{name} is {array.dtype}{list(array.shape)}, not {dtype}{list(shape)}")
        self.check_blocks()
        scale = np.asarray(self.scale, np.float32)
        if not (np.isfinite(scale) & (scale > 0) | np.isnan(scale) & (fmt.inf is None)).all():
            raise ValueError("scales must be positive and finite")
        if self.expansion is not None:
            k = np.asarray(self.expansion, np.float32)
            if not ((k >= expansion.MIN_EXPONENT) & (k <= expansion.MAX_EXPONENT)).all():
                raise ValueError(
                    f"expansion exponents must lie in [{expansion.MIN_EXPONENT}, {expansion.MAX_EXPONENT}]"
                )


def _is_compatible_shape(shape: tuple[Any, ...], expected: tuple[Any, ...], must_match: bool) -> bool:
    """Whether a shape has the expected entries; unless `must_match`, 1 is compatible with any length."""
    if not all(isinstance(n, int) for n in (*shape, *expected)):
        return True  # symbolic dimensions (jax.export)
    if len(shape) != len(expected):
        return False
    return all(n == w or (n == 1 and not must_match) for n, w in zip(shape, expected, strict=True))


@functools.cache
def _dtypes(spec: QuantSpec) -> tuple[np.dtype | None, ...]:
    """The dtypes of the leaves; None for absent ones."""
    fmt = formats.get(spec.format)
    codes = np.dtype(np.uint8) if spec.is_packed else fmt.dtype
    exponents = expansion.DTYPE if spec.expand else None
    bytes_ = np.dtype(np.uint8) if spec.has_microscales else None
    return codes, exponents, bytes_, formats.get(spec.scale_format).dtype


def _check_leaf_order(spec: QuantSpec, leaves: tuple[Any, ...]) -> None:
    """Raises ValueError if `leaves` are the arrays of a QTensor of `spec` in another order.

    Leaves of other dtypes pass: a mapped tree may have shardings or Python objects as leaves.
    """
    expected, actual = _dtypes(spec), tuple(getattr(leaf, "dtype", None) for leaf in leaves)
    if actual == expected or sorted(map(str, actual)) != sorted(map(str, expected)):
        return
    names = ("codes", *METADATA_FIELDS)
    listed = ", ".join(f"{name} {dtype}" for name, dtype in zip(names, expected, strict=True) if dtype is not None)
    raise ValueError(
        f"leaves of dtypes {', '.join(str(dtype) for dtype in actual if dtype is not None)} do not have the order of a "
        f"QTensor with spec {spec}: {listed}. Restore into a template, such as jax.eval_shape(tx.init, params)"
    )


@functools.cache
def storage_key(spec: QuantSpec, length: int | None = None) -> str:
    """`QTensor.storage_key` for a spec."""
    details = {"axis": spec.axis, "stacked": spec.layer_axes, "length": length}
    defaults = {"axis": -1, "stacked": 0, "length": None}
    options = [f"{name}{value}" for name, value in details.items() if value != defaults[name]]
    if spec.scale_format != "fp32":
        options.append(f"{spec.scale_format}scales")
    spec_text = str(dataclasses.replace(spec, rounding="nearest", expand=bool(spec.expand), exponent_rounding="down"))
    return f"codes:{'+'.join([spec_text, *options])}:v{PACKED_VERSION if spec.is_packed else VERSION}"


def quantize(x: Array, spec: QuantSpec | str, *, key: Array | None = None) -> QTensor:
    """Quantizes a tensor with scales from its own amax.

    Args:
        x: array of a floating dtype, any shape. fp32 subnormals count as zeros.
        spec: a `QuantSpec` or its string form.
        key: PRNG key, required for stochastic rounding and an error otherwise.

    Returns:
        A `QTensor`, sharded as `x`.

    Raises:
        TypeError: `x` is not of a floating dtype.
        ValueError: the spec is malformed or does not fit the shape; the key is missing or not needed; or the codes are
            differentiated, whose gradient would be 0 (`fp8jax.save_quantized` passes gradients).
    """
    return quantize_with_scale(x, spec, None, key=key)


def quantize_stochastic(x: Array, like: QTensor, seed: Array) -> QTensor:
    """Quantizes with the spec of `like` and stochastic rounding, by counter-based noise.

    Args:
        x: array of a floating dtype, of the shape of `like`.
        like: the QTensor to replace. Its blocks keep their exponents where they can
            (`expansion.exponents_with_hysteresis`).
        seed: two uint32 words, new at every call (`fp8jax.core.noise`).

    Returns:
        A `QTensor` with the spec of `like`; its codes do not depend on the mesh. Without `flush_to_zero`, non-zero
        values stay non-zero.
    """
    spec = dataclasses.replace(like.spec, rounding="stochastic")
    quantized = quantize_with_scale(x, spec, None, seed=seed, previous=like.expansion)
    return dataclasses.replace(quantized, spec=like.spec)


def quantize_decaying(x: Array, like: QTensor, dither: Array, seed: Array) -> QTensor:
    """Quantizes a decaying average with the spec of `like`, so that errors average out over time and elements.

    Rounding follows `dither`, with a separate phase per element. Values are unbiased, their powers are not. Blocks keep
    their exponents where they can (`expansion.decaying_exponents_with_hysteresis`), because a new exponent rounds each
    value again.

    Args:
        x: array of a floating dtype, of the shape of `like`.
        like: the QTensor to replace; its spec rounds to nearest.
        dither: from `fp8jax.core.noise.decay_dither`.
        seed: two uint32 words, the same at every call.

    Returns:
        A `QTensor` with the spec of `like`; its phases do not depend on the mesh.
    """
    return _quantize(x, like.spec, dither=dither, seed=seed, previous=like.expansion)


def quantize_with_scale(
    x: Array,
    spec: QuantSpec | str,
    scale: Array | None,
    *,
    key: Array | None = None,
    seed: Array | None = None,
    previous: Array | None = None,
    dither: Array | None = None,
) -> QTensor:
    """`quantize` with given scales, for delayed and automatic scaling; values beyond their range saturate.

    Args:
        x: array of a floating dtype.
        spec: a `QuantSpec` or its string form; neither microscaled nor expanded if scales are given.
        scale: positive fp32 scales, broadcastable against the block counts of `x`, or None to compute them from `x`.
            Subnormals and 0 count as the smallest normal number.
        key: PRNG key for stochastic rounding.
        seed: replaces the key, as for `quantize_stochastic`.
        previous: exponents for blocks to keep where they can.
        dither: from `fp8jax.core.noise.decay_dither`, for a moment that rounds to nearest, so that its decay is not
            lost.

    Raises:
        TypeError, ValueError: as for `quantize`; or scales are given for two levels or expansion.
    """
    spec = QuantSpec.parse(spec)
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"cannot quantize an array of dtype {x.dtype}; cast it to a floating dtype first")
    if (key is not None or seed is not None) != (spec.rounding == "stochastic"):
        need = "needs a key" if spec.rounding == "stochastic" else "takes no key"
        raise ValueError(f"rounding {spec.rounding!r} {need}")
    if scale is not None and (spec.expand or spec.has_microscales):
        raise ValueError(f"{spec} computes its scales from the tensor. To pass scales, use another granularity")
    return _quantize(x, spec, scale=scale, key=key, seed=seed, previous=previous, dither=dither)


def _quantize(
    x: Array,
    spec: QuantSpec,
    *,
    scale: Array | None = None,
    key: Array | None = None,
    dither: Array | None = None,
    seed: Array | None = None,
    previous: Array | None = None,
) -> QTensor:
    out_shapes = spec.leaf_shapes(x.shape)

    def encode(x: Array, *optional: Array | None) -> tuple[Array, ...]:
        scale, key, dither, seed, previous = optional
        leaves = encoding.encode(x, spec, scale=scale, key=key, seed=seed, previous=previous, dither=dither)
        return tuple(getattr(leaves, name) for name in out_shapes)

    arrays = blocks.on_logical_array(
        encode, x, scale, key, dither, seed, previous, out_shapes=list(out_shapes.values())
    )
    length = x.shape[spec.axis] if spec.is_packed else None
    return QTensor(**QTensorLeaves(**dict(zip(out_shapes, arrays, strict=True)))._asdict(), spec=spec, length=length)


def to_bytes(q: QTensor) -> QTensor:
    """A quantized tensor without gradients, its codes as bytes."""
    q = jax.tree.map(jax.lax.stop_gradient, q)
    return q.with_codes(_cast_bytes(q.codes, jnp.uint8))


def from_bytes(q: QTensor) -> QTensor:
    """The inverse of `to_bytes`."""
    dtype = jnp.uint8 if q.spec.is_packed else formats.get(q.spec.format).dtype
    return q.with_codes(_cast_bytes(q.codes, dtype))


def _cast_bytes(codes: Array, dtype: DTypeLike) -> Array:
    """Codes of 4 or 8 bits as another dtype of one byte; wider codes unchanged."""
    if codes.dtype.itemsize > 1:
        return codes
    if _bits(codes.dtype) == 4:
        return formats.bitcast(codes, jnp.uint4).astype(dtype)
    return formats.bitcast(codes.astype(jnp.uint4) if _bits(dtype) == 4 else codes, dtype)


def _bits(dtype: DTypeLike) -> int:
    return int((jnp.finfo if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo)(dtype).bits)
