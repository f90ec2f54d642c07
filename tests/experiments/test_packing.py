"""Packed rows: the attention and the loss of each document are independent of the others."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import fp8jax
from experiments.errors import UserError
from experiments.models.llama import Llama, LlamaConfig
from experiments.text import data, packing
from experiments.text.packing import Document
from experiments.train.losses import cross_entropy
from experiments.train.task import Task
from tests.distance import relative
from tests.rows import slow

SHAPE = LlamaConfig(vocab=40, dim=32, layers=2, heads=4, kv_heads=2, mlp_dim=48)
EXACT = dataclasses.replace(fp8jax.recipes.bf16(), weights=fp8jax.recipes.Weights("fp32", "fp32"))


def documents(count=30, longest=14, seed=0):
    rng = np.random.default_rng(seed)
    sizes = rng.integers(3, longest, count)
    return [Document(rng.integers(1, 40, n).astype(np.int32), (rng.random(n) < 0.5).astype(np.int8)) for n in sizes]


def found(rows):
    """Returns the documents in rows, with their answers, from their tokens."""
    pieces = {}
    for tokens, answers, segments in rows:
        for number in range(1, segments.max() + 1):
            is_document = segments == number
            assert (np.diff(np.flatnonzero(is_document)) == 1).all()
            pieces[tuple(tokens[is_document])] = answers[is_document]
    return pieces


def test_each_document_is_whole_in_one_row_of_one_split():
    corpus = documents()
    packed = packing.pack(corpus, 0.2, 20, keep_whole=True)
    train, valid = found(packed.train), found(packed.valid)
    assert not set(train) & set(valid)
    expected = {tuple(d.ids): d.answers for d in corpus if d.answers[1:].any()}
    both = train | valid
    assert both.keys() == expected.keys()
    for ids, answers in both.items():
        assert answers[0] == 0
        np.testing.assert_array_equal(answers[1:], expected[ids][1:])
    size = sum(map(len, valid)) / sum(map(len, both))
    assert 0.15 < size < 0.35
    assert packed.filled > 0.85
    assert packed.left_out == len(corpus) - len(expected)
    assert (packed.train[:, 1][packed.train[:, 2] == 0] == 0).all()
    assert packed.answers == sum(a.sum() for a in train.values())


def test_rows_are_filled_to_their_ends_and_splits_are_as_large_as_asked():
    rng = np.random.default_rng(0)
    corpus = [Document(rng.integers(0, 40, 5), np.ones(5, np.int8)) for _ in range(8)]  # 0 is a valid token
    for share, train in ((0.5, 4), (0.75, 2), (0.99, 1)):
        packed = packing.pack(corpus, share, 9, keep_whole=True)
        assert (len(packed.train), len(packed.valid)) == (-(-train // 2), -(-(8 - train) // 2))
        assert packed.filled == (1.0 if train % 2 == 0 else 0.5)


def test_long_documents_are_cut_or_go_on():
    ones = lambda n: Document(np.arange(n) % 39 + 1, np.ones(n, np.int8))  # noqa: E731
    long = [ones(25), ones(10), *documents(6)]
    cut, going = (packing.pack(long, 0.01, 9, keep_whole=keep_whole) for keep_whole in (True, False))
    assert cut.cut == going.cut == sum(len(d.ids) > 10 for d in long)
    # A single last token has no context.
    alone = packing.pack([ones(21)], 0.01, 9, keep_whole=False)
    assert (alone.documents, alone.left_out) == (2, 0)
    sizes = [sorted(len(p) for p in found(np.concatenate([x.train, x.valid]))) for x in (cut, going)]
    assert max(sizes[0]) == max(sizes[1]) == 10
    assert sum(sizes[1]) >= sum(sizes[0]) + 15


def test_the_order_of_documents_and_their_copies_do_not_matter():
    corpus = documents()
    one, other = (packing.pack(d, 0.2, 20, keep_whole=True) for d in (corpus, [*corpus[::-1], corpus[3]]))
    assert one.fingerprint == other.fingerprint
    changed = [Document(corpus[0].ids, 1 - corpus[0].answers), *corpus[1:]]
    assert packing.pack(changed, 0.2, 20, keep_whole=True).fingerprint != one.fingerprint
    for part in ("train", "valid"):
        assert dataclasses.replace(one, **{part: getattr(one, part)[::-1]}).fingerprint != one.fingerprint


def test_fingerprints_tell_where_splits_end_and_what_arrays_are():
    x = np.arange(8, dtype=np.uint16)
    variants = [(x, x[:0]), (x[:4], x[4:]), (x.reshape(2, 4), x[:0]), (x.view(np.int16), x[:0])]
    assert len({packing.fingerprint_of(*splits) for splits in variants}) == len(variants)


def test_where_too_many_rows_are_open_the_oldest_one_is_closed():
    ids = np.arange(10, dtype=np.int32)
    pieces = [Document(ids[:size], np.ones(size, np.int8)) for size in [*[6] * (packing.OPEN_ROWS + 1), 4]]
    assert packing._packed(pieces, 10)[:, 2].max(axis=1).tolist() == [1, 2, *[1] * (packing.OPEN_ROWS - 1)]


def test_a_copy_of_a_document_is_packed_once():
    given = documents(12)
    copies = [Document(document.ids.copy(), document.answers.copy()) for document in given[:5]]
    once, twice = (packing.pack(d, 0.2, 20, keep_whole=True) for d in (given, [*given, *copies]))
    assert once.fingerprint == twice.fingerprint
    for rows in (twice.train, twice.valid):
        ids = [tuple(row[0, row[2] == n]) for row in rows for n in range(1, row[2].max() + 1)]
        assert len(ids) == len(set(ids))


def by_itself(run, row, here):
    """Returns the logits of a document in its own padded row, so that one program serves all lengths."""
    ids = np.zeros((1, row.shape[-1]), row.dtype)
    ids[0, : here.sum()] = row[0, here]
    return np.asarray(run(ids))[0, : here.sum()]


@pytest.mark.parametrize("window", [slow(None), 4])
def test_no_token_sees_another_document(window):
    packed = packing.pack(documents(), 0.2, 20, keep_whole=True)
    rows = packed.train[:2]
    config = dataclasses.replace(SHAPE, window=window)
    model = Llama(config, dtype=jnp.float32, rngs=nnx.Rngs(0))
    run = functools.partial(nnx.jit(lambda model, *tokens: model(*tokens)), model)
    together, crossing = np.asarray(run(rows[:, 0], rows[:, 2])), np.asarray(run(rows[:, 0]))
    different = 0
    for row, logits, without in zip(rows, together, crossing, strict=True):
        for number in range(1, row[2].max() + 1):
            is_document = row[2] == number
            alone = by_itself(run, row, is_document)
            assert relative(logits[is_document], alone) < 2e-5
            different += relative(without[is_document], alone) > 1e-3
    assert different > 1


def task(**settings):
    return Task(SHAPE, optax.sgd(1.0), EXACT, remat=False, seed=0, **settings)


def test_the_loss_is_the_mean_over_answers_and_gradients_are_its():
    rows = packing.pack(documents(), 0.2, 20, keep_whole=True).train[:2]
    each = task()
    state, loss = jax.jit(each.init)(), jax.jit(each.loss)
    params, total, count = state.params, 0.0, 0
    run = jax.jit(lambda ids: each.model(params, {})(ids))
    for row in rows:
        for number in range(1, row[2].max() + 1):
            is_document = row[2] == number
            ids, answers = row[0][is_document], row[1][is_document]
            logits = np.float64(by_itself(run, row, is_document)[:-1])
            losses = np.log(np.exp(logits).sum(-1)) - logits[np.arange(len(ids) - 1), ids[1:]]
            total, count = total + (losses * answers[1:]).sum(), count + answers[1:].sum()
    assert float(loss(params, {}, rows)) == pytest.approx(total / count, rel=1e-5)
    # Tokens that are no answers, and padding, contribute only as context of answers.
    filled = rows.copy()
    filled[:, 0][filled[:, 2] == 0] = 7
    assert float(loss(params, {}, filled)) == pytest.approx(total / count, rel=1e-5)
    none = rows.copy()
    none[:, 1] = 0  # there is nothing to learn
    for chunked in (False, True):
        # Over devices, some of which may have no answer, it is the mean over all answers.
        own = lambda part, chunked=chunked: cross_entropy(each.model(params, {}), part, chunked, ("x",))  # noqa: E731
        run = jax.jit(jax.vmap(own, axis_name="x"))
        for more, expected in ((rows, total / count), (none, 0)):
            parts = run(np.concatenate([more, none[:1]])[:, None])
            np.testing.assert_allclose(np.mean(parts), expected, rtol=1e-5)
    state, _ = jax.jit(each.step)(state, rows)
    expected = jax.jit(jax.grad(each.loss))(params, {}, rows)
    assert relative(jax.tree.map(lambda a, b: a - b, params, state.params), expected) < 1e-4


def test_microbatches_take_rows_whole():
    rows = packing.pack(documents(), 0.2, 20, keep_whole=True).train[:4]
    parts = task(microbatches=2)
    params, alone = jax.jit(parts.init)().params, jax.jit(parts.loss)
    loss = jax.jit(parts.gradients)(params, {}, jnp.asarray(rows))[0]["loss"]
    halves = [float(alone(params, {}, rows[i : i + 2])) for i in (0, 2)]
    assert float(loss) == pytest.approx(np.mean(halves), rel=1e-5)


def test_batches_of_rows_resume_exactly():
    packed = packing.pack(documents(), 0.2, 20, keep_whole=True)
    batches = data.train_batches(packed.train, 20, 2, seed=3)
    first = [next(batches) for _ in range(3)]
    state = batches.get_state()
    rest = [next(batches) for _ in range(6)]
    again = data.train_batches(packed.train, 20, 2, seed=3)
    again.set_state(state)
    for one, other in zip(rest, [next(again) for _ in range(6)], strict=True):
        np.testing.assert_array_equal(one, other)
    assert first[0].shape == (2, 3, 21)
    assert data.valid_batches(packed.valid, 20, 2, 2).shape[2:] == (3, 21)


def test_bad_input_is_refused():
    one = documents(1)
    with pytest.raises(UserError, match="1 different documents; pass at least one for training and one for validation"):
        packing.pack(one * 3, 0.2, 20, keep_whole=True)
    silent = [Document(d.ids, 0 * d.answers) for d in documents()]
    with pytest.raises(UserError, match="--seq-len 20: no document of a split has an answer"):
        packing.pack(silent, 0.2, 20, keep_whole=True)
    learned = Llama(dataclasses.replace(SHAPE, learned_positions=32), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"segments need rotary \(relative\) positions"):
        learned(jnp.zeros((1, 8), jnp.int32), jnp.ones((1, 8), jnp.int32))
