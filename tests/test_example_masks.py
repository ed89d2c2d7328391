"""Masks for each example: their generator, and the product with them."""

import math
import struct

import numpy as np
import pytest
import tensorflow as tf
from stack_marks import SLOW_ON_KERAS_2, quick_rows

from tfwd._random import example_masks, masks_and_normals
from tfwd._random.example_masks import Letters

pytestmark = SLOW_ON_KERAS_2

SEED = tf.constant([5, 6])
RATE = 0.3
KEEP = round(0.7 * 65536) / 65536
DENSE, POSITIONS = Letters("bi", "io", "bo"), Letters("bti", "io", "bto")


def test_masks_are_xxh32_of_the_examples_seeds() -> None:
    xxhash = pytest.importorskip("xxhash")
    copies = example_masks.dropped(tf.ones([3, 4]), RATE, SEED, 3).numpy()
    for example, seed in enumerate(example_masks.example_seeds(SEED, 3).numpy()):
        key, tail = (int(word) & 0xFFFFFFFF for word in seed)
        words = [
            xxhash.xxh32_intdigest(struct.pack("<II", i, tail), seed=key) >> 16 for i in range(12)
        ]
        expected = np.where(np.array(words) < KEEP * 65536, 1 / KEEP, 0.0).reshape(3, 4)
        np.testing.assert_allclose(copies[example], expected, rtol=1e-6)


def test_an_examples_mask_does_not_depend_on_the_size_of_the_batch() -> None:
    few = example_masks.dropped(tf.ones([5, 4]), RATE, SEED, 2)
    many = example_masks.dropped(tf.ones([5, 4]), RATE, SEED, tf.constant(7))
    np.testing.assert_array_equal(few, many[:2])


def test_rate_and_independence() -> None:
    kept = example_masks.dropped(tf.ones([40, 50]), RATE, SEED, 100).numpy() > 0
    assert abs(kept.mean() - KEEP) < 5 * math.sqrt(KEEP * (1 - KEEP) / kept.size)
    flat = kept.reshape(100, -1).astype(np.float64) - KEEP
    flat /= math.sqrt(KEEP * (1 - KEEP))
    products = flat @ flat.T / flat.shape[1]
    between = products[~np.eye(100, dtype=bool)]
    assert abs(between).max() < 6 / math.sqrt(flat.shape[1])
    assert abs(between.mean()) < 5 / math.sqrt(flat.shape[1] * between.size / 2)


SHAPES = {
    "dense": (DENSE, (7, 5), (5, 3)),
    "one example": (DENSE, (1, 5), (5, 3)),
    "positions": (POSITIONS, (7, 4, 5), (5, 3)),
    "two inner axes": (Letters("btij", "ijo", "bto"), (5, 4, 2, 3), (2, 3, 4)),
    "a kernel per position": (Letters("bti", "tio", "bto"), (5, 4, 3), (4, 3, 2)),
}
MODES = {
    "eager": lambda f, specs: f,
    "graph": lambda f, specs: tf.function(f),
    "any batch": lambda f, specs: tf.function(f, input_signature=specs),
    "xla": lambda f, specs: tf.function(f, jit_compile=True),
}
TOLERANCE = {"float32": 1e-5, "float64": 1e-12, "bfloat16": 3e-2}


def by_hand(letters: Letters, x, w, masks, g):
    """Returns outputs and gradients, in a loop over the examples in float64."""
    i, k, o = letters.inputs[1:], letters.kernel, letters.outputs[1:]
    outputs, of_x, of_w = [], [], np.zeros_like(w)
    for one, mask, upstream in zip(x, masks, g, strict=True):
        outputs.append(np.einsum(f"{i},{k}->{o}", one, w * mask))
        of_x.append(np.einsum(f"{o},{k}->{i}", upstream, w * mask))
        of_w += np.einsum(f"{i},{o}->{k}", one, upstream) * mask
    return np.stack(outputs), np.stack(of_x), of_w


@pytest.fixture(params=["one block", "several blocks"])
def blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Computes with one plain block, or with several compiled ones."""
    if request.param == "several blocks":
        monkeypatch.setattr(example_masks, "BLOCK", 40)
        monkeypatch.setattr(masks_and_normals, "SMALL", 0)
    example_masks._traced.cache_clear()
    yield request.param
    example_masks._traced.cache_clear()


@quick_rows("*-dense-*-float64", "*-eager-float32", "*positions-any batch-bfloat16")
@quick_rows("*-graph-float64")
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", SHAPES)
def test_outputs_and_gradients_equal_a_loop_over_the_examples(kind, mode, dtype, blocks) -> None:
    letters, of_x, of_w = SHAPES[kind]
    rng = np.random.default_rng(0)
    x, w = (tf.constant(rng.normal(size=shape), dtype) for shape in (of_x, of_w))

    def step(x: tf.Tensor, w: tf.Tensor) -> tuple[tf.Tensor, ...]:
        with tf.GradientTape(persistent=True) as tape:
            tape.watch([x, w])
            y = example_masks.product(letters, x, w, RATE, SEED)
            loss = tf.reduce_sum(y * tf.sin(y))
        return y, tape.gradient(loss, y), *tape.gradient(loss, [x, w])

    specs = [tf.TensorSpec([None] * len(of_x), dtype), tf.TensorSpec(of_w, dtype)]
    y, g, *gradients = MODES[mode](step, specs)(x, w)
    wide = [tf.cast(t, tf.float64).numpy() for t in (x, w, g)]
    masks = example_masks.dropped(tf.ones(of_w, tf.float64), RATE, SEED, of_x[0]).numpy()
    expected = by_hand(letters, wide[0], wide[1], masks, wide[2])
    for found, by_loop in zip((y, *gradients), expected, strict=True):
        assert found.dtype == dtype
        scale = abs(by_loop).max()
        np.testing.assert_allclose(
            tf.cast(found, tf.float64), by_loop, rtol=0, atol=TOLERANCE[dtype] * scale
        )


@quick_rows("several blocks-graph", "one block-eager")
@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_second_derivatives(mode: str, blocks: str) -> None:
    rng = np.random.default_rng(0)
    x, w = (tf.constant(rng.normal(size=shape)) for shape in ((5, 4), (4, 3)))
    kernels = example_masks.dropped(tf.ones([4, 3], tf.float64), RATE, SEED, 5)

    def penalty(function, x: tf.Tensor, w: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as outer:
            outer.watch([x, w])
            with tf.GradientTape() as inner:
                inner.watch([x, w])
                loss = tf.reduce_sum(tf.sin(function(x, w)))
            total = tf.add_n([tf.reduce_sum(g**3) for g in inner.gradient(loss, [x, w])])
        return outer.gradient(total, [x, w])

    def ours(x: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
        return example_masks.product(DENSE, x, w, RATE, SEED)

    def plain(x: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
        return tf.einsum("bi,bio->bo", x, kernels * w)

    run = tf.function(penalty) if mode == "graph" else penalty
    for found, expected in zip(run(ours, x, w), penalty(plain, x, w), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-10)


def test_an_empty_batch() -> None:
    for mode in ("eager", "any batch"):
        spec = [tf.TensorSpec([None, 5], tf.float32)]
        run = MODES[mode](
            lambda x: example_masks.product(DENSE, x, tf.ones([5, 3]), RATE, SEED), spec
        )
        assert run(tf.zeros([0, 5])).shape == [0, 3]


@pytest.mark.parametrize("batch", [6, 60])
def test_backward_stores_its_arguments_alone(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts what forward hands to backward: no mask, and no kernel of an example."""
    monkeypatch.setattr(masks_and_normals, "SMALL", 0)
    x, w = tf.ones([batch, 32]), tf.ones([32, 32])

    def stored(function) -> int:
        concrete = tf.function(function).get_concrete_function(x, w)
        forward, _ = concrete._delayed_rewrite_functions.forward_backward()
        return sum(t.shape.num_elements() for t in list(forward.graph.outputs)[1:])

    naive = stored(
        lambda x, w: tf.einsum(
            "bi,bio->bo", x, tf.nn.dropout(tf.tile(w[tf.newaxis], [batch, 1, 1]), RATE)
        )
    )
    ours = stored(lambda x, w: example_masks.product(DENSE, x, w, RATE, SEED))
    assert ours <= 2 * (32 * 32 + 32 * batch) + 10  # the arguments, under two names
    assert naive >= 32 * 32 * batch  # so that this test can see them
