"""Attention that a model computes with TensorFlow's operations, between layers with weights.

The expected outputs are PyTorch's formulas in NumPy, with the channels of images on the first axis.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from flattened_images import saved
from traced_images import C, Model, check, conv, dense_layers, head, image, linear

from tfwd.pretrained import PlanError, load

RNG = np.random.default_rng(1)
layers = keras.layers


def softmax(x):
    powers = np.exp(x - x.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def attended(q, k, v, heads):
    """Returns attention with several heads, on NumPy's arrays or TensorFlow's tensors."""
    parts = [part.reshape(2, -1, heads, part.shape[-1] // heads) for part in (q, k, v)]
    q, k, v = (part.transpose(0, 2, 1, 3) for part in parts)
    mixed = softmax(q @ k.transpose(0, 1, 3, 2) / np.sqrt(q.shape[-1])) @ v
    return mixed.transpose(0, 2, 1, 3).reshape(2, -1, heads * v.shape[-1])


def attention(m, x, heads, size):
    def divided(rows):
        return tf.transpose(tf.reshape(rows, (-1, x.shape[1], heads, size)), (0, 2, 1, 3))

    q, k, v = divided(m.q(x)), divided(m.k(x)), divided(m.v(x))
    scores = tf.nn.softmax(tf.matmul(q, k, transpose_b=True) / size**0.5)
    mixed = tf.transpose(tf.matmul(scores, v), (0, 2, 1, 3))
    return m.o(tf.reshape(mixed, (-1, x.shape[1], heads * size)))


def tokens():
    """Returns the pixels of PyTorch's image as a sequence, [examples, positions, channels]."""
    return np.moveaxis(image(), 1, -1).reshape(2, 24, 5)


def test_attention_of_a_vision_transformer(tmp_path):
    """Checks attention on the patches of an image, whose heads are merged before a layer."""
    sizes = {"q": (6, 5), "k": (6, 5), "v": (6, 5), "o": (5, 6), "f": (4, 5)}
    made, weights = dense_layers(**sizes)

    def call(m, x):
        patches = tf.reshape(m.c(x), (-1, 24, 5))
        return m.f(tf.reduce_mean(patches + attention(m, patches, 2, 3), 1))

    x = tokens()
    rows = attended(linear("q", x, weights), linear("k", x, weights), linear("v", x, weights), 2)
    expected = linear("f", (x + linear("o", rows, weights)).mean(1), weights)
    check(Model(call, c=conv(), **made), expected, tmp_path, C, weights)


# How models of transformers get queries, keys and values, [examples, heads, steps, head size],
# from one tensor [examples, steps, 3, heads, head size].
PACKED = {
    "slices": lambda x: [tf.transpose(x, (2, 0, 3, 1, 4))[i] for i in range(3)],
    "unstack": lambda x: tf.unstack(tf.transpose(x, (2, 0, 3, 1, 4))),
    "unstack of an inner axis": lambda x: [
        tf.transpose(part, (0, 2, 1, 3)) for part in tf.unstack(x, axis=2)
    ],
}


@pytest.mark.parametrize("packed", PACKED)
def test_attention_that_a_model_computes(packed, tmp_path):
    """Checks attention with 2 heads of size 4 on 4 steps, so that axes have equal sizes."""
    weights = {"q.weight": RNG.normal(size=(24, 7)), "o.weight": RNG.normal(size=(8, 8))}

    def call(m, x):
        queries, keys, values = PACKED[packed](tf.reshape(m.q(x), (-1, 4, 3, 2, 4)))
        scores = tf.nn.softmax(tf.matmul(queries, keys, transpose_b=True))
        return m.o(tf.reshape(tf.transpose(scores @ values, (0, 2, 1, 3)), (-1, 4, 8)))

    x = RNG.normal(size=(2, 4, 7)).astype("float32")
    q, k, v = np.einsum("ntc,ahdc->anhtd", x, weights["q.weight"].reshape(3, 2, 4, 7))
    scores = np.exp(np.einsum("nhtd,nhsd->nhts", q, k))
    scores /= scores.sum(-1, keepdims=True)
    mixed = np.einsum("nhts,nhsd,ohd->nto", scores, v, weights["o.weight"].reshape(8, 2, 4))
    model = Model(call, q=head(24, "q"), o=head(8, "o"))
    check(model, mixed, tmp_path, weights, x=x)


def test_heads_in_windows(tmp_path):
    """Checks attention with two heads in windows of a normalized image, as in Swin."""
    sizes = {"q": (4, 5), "k": (4, 5), "v": (4, 5), "o": (6, 4), "f": (4, 6)}
    made, weights = dense_layers(**sizes)

    def call(m, x):
        h = m.n(m.c(x))
        windows = tf.transpose(tf.reshape(h, (-1, 2, 2, 3, 2, 5)), (0, 1, 3, 2, 4, 5))
        rows = attention(m, tf.reshape(windows, (-1, 4, 5)), 2, 2)
        windows = tf.reshape(rows, (-1, 2, 3, 2, 2, 6))
        joined = tf.reshape(tf.transpose(windows, (0, 1, 3, 2, 4, 5)), (-1, 4, 6, 6))
        return m.f(tf.reduce_max(joined, (1, 2)))

    norm = {"n.weight": RNG.normal(size=5), "n.bias": RNG.normal(size=5)}
    h = np.moveaxis(image(), 1, -1)
    h = (h - h.mean(-1, keepdims=True)) / np.sqrt(h.var(-1, keepdims=True) + 1e-3)
    h = h * norm["n.weight"] + norm["n.bias"]
    windows = h.reshape(2, 2, 2, 3, 2, 5).transpose(0, 1, 3, 2, 4, 5).reshape(12, 4, 5)
    parts = [linear(name, windows, weights).reshape(12, 4, 2, 2) for name in "qkv"]
    q, k, v = (part.transpose(0, 2, 1, 3) for part in parts)
    mixed = softmax(q @ k.transpose(0, 1, 3, 2) / np.sqrt(2)) @ v
    rows = linear("o", mixed.transpose(0, 2, 1, 3).reshape(12, 4, 4), weights)
    expected = linear("f", rows.reshape(2, 24, 6).max(1), weights)
    model = Model(call, c=conv(), n=layers.LayerNormalization(name="n"), **made)
    check(model, expected, tmp_path, C, norm, weights)


def test_attention_on_an_image_beside_the_image_is_refused(tmp_path):
    """PyTorch's model may add the image to the attention with the channels last or first."""
    inputs = keras.Input((24, 3))
    steps = layers.Conv1D(5, 1, name="c")(inputs)
    both = layers.Add()([steps, layers.Attention()([steps, steps])])
    model = keras.Model(inputs, head()(layers.Flatten()(both)))
    weights = {**C, "c.weight": C["c.weight"][..., 0], "f.weight": RNG.normal(size=(4, 120))}
    with pytest.raises(PlanError, match="'f/kernel': .*PyTorch flattens channels first"):
        load(model, saved(tmp_path, weights), mapping={"c": "c", "f": "f"})


def turned_halves(x):
    return np.concatenate([-x[..., 2:], x[..., :2]], -1)


def turned_neighbours(x):
    return np.stack([-x[..., 1::2], x[..., ::2]], -1).reshape(x.shape)


# Ways to turn the pairs of entries of a head [examples, steps, heads, 4] by 90 degrees, and the
# same in NumPy. The pairs are the two halves, or neighbours.
TURNS = {
    "halves, joined": (lambda x: tf.concat([-x[..., 2:], x[..., :2]], -1), turned_halves),
    "halves, stacked": (
        lambda x: tf.reshape(tf.stack([-x[..., 2:], x[..., :2]], -2), tf.shape(x)),
        turned_halves,
    ),
    "neighbours": (
        lambda x: tf.reshape(tf.stack([-x[..., 1::2], x[..., ::2]], -1), tf.shape(x)),
        turned_neighbours,
    ),
}


def angles(steps, turn):
    """Returns the angle of each entry of a head of size 4 at each step, [steps, 4]."""
    found = steps[:, None] * np.array([1.0, 0.01])
    return (
        np.repeat(found, 2, -1) if turn is turned_neighbours else np.concatenate([found, found], -1)
    )


@pytest.mark.parametrize("way", TURNS)
def test_rotary_embeddings(way, tmp_path):
    """Checks attention with 2 heads of size 4 whose queries and keys are turned at each step.

    The table of angles depends on the shape of the queries, and not on their entries.
    """
    made = {name: layers.EinsumDense("btm,mhd->bthd", (None, 2, 4), name=name) for name in "qkv"}
    made["o"] = layers.EinsumDense("bthd,hdo->bto", (None, 6), name="o")
    sizes = {"q": (8, 5), "k": (8, 5), "v": (8, 5), "o": (6, 8)}
    weights = {f"{name}.weight": RNG.normal(size=size) for name, size in sizes.items()}
    turn, in_numpy = TURNS[way]

    def turned(x):
        steps = tf.range(tf.cast(tf.shape(x)[1], tf.float32))
        table = tf.stack([steps, 0.01 * steps], 1)
        table = tf.stack([table, table], -1 if in_numpy is turned_neighbours else -2)
        table = tf.reshape(table, (tf.shape(x)[1], 4))[:, None]
        return x * tf.cos(table) + turn(x) * tf.sin(table)

    def call(m, x):
        scores = tf.nn.softmax(tf.einsum("nthd,nshd->nhts", turned(m.q(x)), turned(m.k(x))))
        return m.o(tf.einsum("nhts,nshd->nthd", scores, m.v(x)))

    x = RNG.normal(size=(2, 4, 5)).astype("float32")
    q, k, v = (linear(name, x, weights).reshape(2, 4, 2, 4) for name in "qkv")
    table = angles(np.arange(4), in_numpy)[:, None]
    q, k = (each * np.cos(table) + in_numpy(each) * np.sin(table) for each in (q, k))
    scores = softmax(np.einsum("nthd,nshd->nhts", q, k))
    mixed = np.einsum("nhts,nshd->nthd", scores, v).reshape(2, 4, 8)
    check(Model(call, **made), linear("o", mixed, weights), tmp_path, weights, x=x)


def test_a_mask_that_is_repeated_for_each_head(tmp_path):
    """Checks a mask of steps, and a causal mask that is made like the scores, as in GPT-2."""
    made = {name: layers.EinsumDense("btm,mhd->bthd", (None, 2, 4), name=name) for name in "qkv"}
    made["o"] = layers.EinsumDense("bthd,hdo->bto", (None, 6), name="o")
    sizes = {"q": (8, 5), "k": (8, 5), "v": (8, 5), "o": (6, 8)}
    weights = {f"{name}.weight": RNG.normal(size=size) for name, size in sizes.items()}

    def call(m, x):
        scores = tf.einsum("nthd,nshd->nhts", m.q(x), m.k(x))
        is_known = tf.reduce_any(x != 0, -1)[:, None, None]
        causal = tf.linalg.band_part(tf.ones_like(scores, tf.float32), -1, 0) > 0
        mask = tf.logical_and(tf.ones_like(scores, tf.bool), is_known)
        scores = tf.nn.softmax(tf.where(tf.logical_and(causal, mask), scores, -1e9))
        return m.o(tf.einsum("nhts,nshd->nthd", scores, m.v(x)))

    x = RNG.normal(size=(2, 4, 5)).astype("float32")
    x[1, 2] = 0
    q, k, v = (linear(name, x, weights).reshape(2, 4, 2, 4) for name in "qkv")
    scores = np.einsum("nthd,nshd->nhts", q, k)
    mask = np.tril(np.ones((4, 4))) * (x != 0).any(-1)[:, None, None]
    mixed = np.einsum("nhts,nshd->nthd", softmax(np.where(mask > 0, scores, -1e9)), v)
    expected = linear("o", mixed.reshape(2, 4, 8), weights)
    check(Model(call, **made), expected, tmp_path, weights, x=x)
