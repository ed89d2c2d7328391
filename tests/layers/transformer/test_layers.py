"""Layers of transformers against their formulas in NumPy, and as Keras layers among others."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from scipy import special
from stack_marks import extended

import tfwd
from tfwd import _keras, gradients, optimizers, parametrizations
from tfwd.layers import transformer as T

RNG = np.random.default_rng(0)
SIZES = {"num_heads": 2, "hidden_size": 8, "intermediate_size": 12}


def value(variable):
    return np.asarray(tf.convert_to_tensor(variable), np.float64)


def filled(layer):
    """Returns the layer with random weights, including biases and normalizations."""
    for variable in layer.weights:
        start = value(variable)
        variable.assign(start + 0.3 * RNG.normal(size=start.shape))
    return layer


def product(layer, x):
    return x @ value(layer.kernel) + (value(layer.bias) if layer.use_bias else 0)


def normal(layer, x):
    mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) / np.sqrt(variance + layer.epsilon) * value(layer.gamma) + value(layer.beta)


def attended(layer, x, context, seen=None, bias=0.0):
    """Returns attention, computed for one example, one head and one query at a time."""
    q, k, v = product(layer.query, x), product(layer.key, context), product(layer.value, context)
    size = layer.head_size
    joined = np.zeros((*x.shape[:2], layer.num_heads * size))
    bias = np.broadcast_to(bias, (len(x), layer.num_heads, x.shape[1], context.shape[1]))
    for b in range(len(x)):
        for h in range(layer.num_heads):
            part = slice(h * size, (h + 1) * size)
            for i in range(x.shape[1]):
                scores = k[b, :, part] @ q[b, i, part] / (np.sqrt(size) if layer.scale else 1)
                scores = scores + bias[b, h, i]
                weights = np.exp(scores - scores.max())
                if seen is not None:
                    weights = weights * seen[b, i]
                joined[b, i, part] = weights / weights.sum() @ v[b, :, part]
    return product(layer.output_dense, joined)


def gelu(x):
    return x * 0.5 * (1 + special.erf(x / np.sqrt(2)))


def of_layer(layer, x, seen=None):
    a = normal(layer.attention_norm, x + attended(layer.attention, x, x, seen))
    between = gelu(product(layer.intermediate, a))
    return normal(layer.output_norm, a + product(layer.output_dense, between))


def texts(batch=3, places=5, width=8):
    return RNG.normal(size=(batch, places, width))


MASK = np.array([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 0, 0, 0, 0]])


def seen_by_all(mask, queries):
    return np.repeat(mask[:, None], queries, axis=1)


@pytest.mark.parametrize("scale", [True, False])
@pytest.mark.parametrize("use_bias", [True, False])
def test_attention_is_its_formula(scale, use_bias):
    layer = T.Attention(2, 3, 7, use_bias=use_bias, scale=scale, dtype="float64")
    x, context = texts(places=4), texts()
    layer(x, context)
    filled(layer)
    bias = RNG.normal(size=(1, 2, 4, 5))
    found = layer(x, context, context_mask=MASK, position_bias=bias)
    expected = attended(layer, x, context, seen_by_all(MASK, 4), bias)
    np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-12)
    assert found.shape == (3, 4, 7)


def test_self_attention_sees_what_the_mask_says_of_each_place():
    layer = T.SelfAttention(2, 4, 8, dtype="float64")
    x = texts()
    layer(x)
    filled(layer)
    before = np.tril(np.ones((5, 5)))[None].repeat(3, 0)
    np.testing.assert_allclose(
        layer(x, mask=before), attended(layer, x, x, before), rtol=1e-10, atol=1e-12
    )
    np.testing.assert_allclose(layer(x), attended(layer, x, x), rtol=1e-10, atol=1e-12)


def test_where_nothing_is_seen_all_weighs_the_same():
    layer = T.SelfAttention(2, 4, 8)
    x = texts(batch=1).astype("float32")
    found = layer(x, mask=np.zeros((1, 5)))
    mean = product(layer.output_dense, product(layer.value, x).mean(1, keepdims=True))
    np.testing.assert_allclose(found, mean.repeat(5, 1), rtol=1e-4, atol=1e-5)


def test_a_layer_and_a_stack_are_their_formulas():
    stack = T.TransformerStack(2, **SIZES, return_all=True, dtype="float64")
    x = texts()
    stack(x)
    filled(stack)
    seen = seen_by_all(MASK, 5)
    states = [x]
    for layer in stack.layers:
        states.append(of_layer(layer, states[-1], seen))
    for ours, theirs in zip(stack(x, mask=MASK), states, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-11)


def test_layers_that_are_shared():
    stack = T.TransformerStack(4, **SIZES, num_shared=2, dtype="float64")
    x = texts()
    stack(x)
    filled(stack)
    first, second = stack.layers
    expected = of_layer(second, of_layer(second, of_layer(first, of_layer(first, x))))
    np.testing.assert_allclose(stack(x), expected, rtol=1e-9, atol=1e-11)


def test_embeddings_are_their_formula():
    layer = T.Embeddings(
        20, 6, max_length=9, embedding_size=4, padding_id=1, padding_position=1, dtype="float64"
    )
    ids, types = np.array([[5, 6, 7, 1], [8, 1, 1, 1]]), np.array([[0, 0, 1, 0]] * 2)
    layer(ids)
    filled(layer)
    places = np.array([[2, 3, 4, 1], [2, 1, 1, 1]])
    tables = layer.words, layer.positions, layer.types
    total = sum(
        value(table.embeddings)[i] for table, i in zip(tables, (ids, places, types), strict=True)
    )
    expected = product(layer.projection, normal(layer.layer_norm, total))
    found = layer(ids, token_type_ids=types)
    np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-12)
    np.testing.assert_array_equal(_keras.layers.get_mask(found), ids != 1)
    other = layer(ids, token_type_ids=types, position_ids=np.array([[0, 1, 2, 3]] * 2))
    assert not np.allclose(other, expected)
    with pytest.raises(ValueError, match="has positions for 7 tokens: .* have 8"):
        layer(np.ones((1, 8), int))


def test_relative_positions_are_t5s_buckets():
    """Checks T5's buckets by their definition, one distance at a time."""

    def bucket(distance, count, most, both):
        if both:
            count //= 2
            start, distance = (count if distance > 0 else 0), abs(distance)
        else:
            start, distance = 0, max(-distance, 0)
        exact = count // 2
        if distance < exact:
            return start + distance
        steps = np.log(distance / exact) / np.log(most / exact) * (count - exact)
        return start + min(exact + int(np.float32(steps)), count - 1)

    for both in (True, False):
        layer = T.RelativePositions(2, 32, 128, bidirectional=both)
        x, y = tf.zeros([1, 150, 1]), tf.zeros([1, 140, 1])
        found = layer(x, y).numpy()
        table = value(layer.buckets.embeddings)
        for i in (0, 3, 75, 149):
            for j in range(140):
                number = bucket(j - i, 32, 128, both)
                np.testing.assert_allclose(found[0, :, i, j], table[number], rtol=1e-6)


def test_a_decoder_does_not_look_ahead():
    t5 = T.T5(20, 2, 2, 3, 8, 12)
    ids = np.array([[5, 6, 7]])
    a, b = np.array([[0, 8, 9, 10]]), np.array([[0, 8, 11, 12]])
    t5(ids, a)
    filled(t5)
    one, other = t5(ids, a).numpy(), t5(ids, b).numpy()
    np.testing.assert_allclose(one[:, :2], other[:, :2], rtol=1e-5, atol=1e-6)
    assert not np.allclose(one[:, 2], other[:, 2])
    np.testing.assert_array_equal(t5.shifted(tf.constant([[8, 9, 1]])), [[0, 8, 9]])


def test_labels_that_losses_leave_out_are_padding_for_the_decoder():
    """Checks labels that losses ignore, as in Hugging Face's `_shift_right`."""
    labels = np.array([[8, 9, 1, -100, -100], [7, 1, -100, -100, -100]])
    t5 = T.T5(20, 1, 2, 3, 8, 12, padding_id=3)
    np.testing.assert_array_equal(t5.shifted(labels), [[0, 8, 9, 1, 3], [0, 7, 1, 3, 3]])
    t5 = T.T5(20, 1, 2, 3, 8, 12, padding_id=None)
    np.testing.assert_array_equal(t5.shifted(tf.constant(labels[:1]), 5), [[5, 8, 9, 1, 5]])


def test_the_decoder_starts_with_the_id_of_the_config():
    """As in Hugging Face's `_shift_right`."""
    sizes = {"vocab_size": 20, "d_model": 8, "d_kv": 4, "d_ff": 12, "num_layers": 1, "num_heads": 2}
    config = {"model_type": "t5", **sizes, "pad_token_id": 3}
    labels = np.array([[8, 9, -100], [7, 1, 6]])
    t5 = T.T5.from_config({**config, "decoder_start_token_id": 2})
    np.testing.assert_array_equal(t5.shifted(labels), [[2, 8, 9], [2, 7, 1]])
    np.testing.assert_array_equal(t5.shifted(labels, 4), [[4, 8, 9], [4, 7, 1]])
    again = T.T5.from_config(t5.get_config())
    np.testing.assert_array_equal(again.shifted(labels), [[2, 8, 9], [2, 7, 1]])
    with pytest.raises(ValueError, match="has no start_id, because its config has no decoder_st"):
        T.T5.from_config({**config, "decoder_start_token_id": None}).shifted(labels)


@pytest.mark.parametrize(
    "numbers", [(3, 9, True), (1, 9, False), (32, 8, True), (32, 16, False), (32, -1, False)]
)
def test_distances_that_have_no_bucket(numbers):
    buckets, distance, both = numbers
    with pytest.raises(ValueError, match=f"num_buckets={buckets}, max_distance={distance}: pass"):
        T.RelativePositions(2, buckets, distance, both)


def bert(**further):
    sizes = {**SIZES, "max_length": 8}
    return T.Bert(20, num_layers=2, **{**sizes, **further})


IDS = np.array([[5, 6, 7, 0], [8, 9, 0, 0]])


def test_padding_changes_nothing():
    layer = bert()
    longer = layer(IDS).numpy()
    shorter = layer(IDS[:, :3]).numpy()
    np.testing.assert_allclose(longer[0, :3], shorter[0], rtol=1e-5, atol=1e-6)
    other = layer(IDS, mask=np.ones((2, 4))).numpy()
    assert not np.allclose(longer[1, :2], other[1, :2])


def test_dropout_is_for_training():
    layer = bert(dropout=0.5, attention_dropout=0.5)
    np.testing.assert_array_equal(layer(IDS), layer(IDS, training=False))
    assert not np.allclose(layer(IDS, training=True), layer(IDS, training=True))


def classifier(kind, layer):
    if kind == "functional":
        inputs = keras.Input((4,), dtype="int32")
        pooled = keras.layers.GlobalAveragePooling1D()(layer(inputs))
        return keras.Model(inputs, keras.layers.Dense(2)(pooled))
    if kind == "sequential":
        pooled = keras.layers.GlobalAveragePooling1D()
        inputs = keras.Input((4,), dtype="int32")
        return keras.Sequential([inputs, layer, pooled, keras.layers.Dense(2)])

    class Classifier(keras.Model):
        def __init__(self):
            super().__init__()
            self.bert, self.head = layer, keras.layers.Dense(2)

        def call(self, ids):
            return self.head(self.bert(ids)[:, 0])

    return Classifier()


@pytest.mark.parametrize(
    ("kind", "jit_compile"),
    [
        ("functional", False),
        pytest.param("sequential", True, marks=pytest.mark.slow),
        pytest.param("subclassed", False, marks=pytest.mark.slow),
    ],
)
def test_models_of_every_kind_are_trained(kind, jit_compile):
    keras.utils.set_random_seed(1)
    model = classifier(kind, bert(dropout=0.1))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss, jit_compile=jit_compile)
    x = RNG.integers(1, 20, (32, 4))
    model(x)
    before = model.get_weights()
    history = model.fit(x, x[:, 0] > 9, epochs=12, verbose=0).history["loss"]
    assert history[-1] < 0.85 * history[0]
    same = [np.array_equal(w, b) for w, b in zip(model.get_weights(), before, strict=True)]
    assert not any(same)


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16", "float16"])
def test_half_precision(policy):
    layer = bert(dtype=policy)
    found = layer(IDS)
    assert found.dtype.name == policy.removeprefix("mixed_")
    wide = bert()
    wide(IDS)
    wide.set_weights([np.asarray(w) for w in layer.get_weights()])
    np.testing.assert_allclose(tf.cast(found, tf.float32), wide(IDS), atol=0.05)


def test_patterns_reach_the_kernels_of_attention():
    model = classifier("functional", bert())
    dropped = tfwd.parametrize(model, {"attention/.*/kernel": parametrizations.Dropout(0.5)})
    x = tf.constant(IDS)
    np.testing.assert_array_equal(dropped(x), model(x))
    assert not np.allclose(dropped(x, training=True), model(x))
    (wrapped,) = [one for one in dropped.layers if type(one).__name__ == "Parametrized"]
    assert len(wrapped.targeted) == 8 if hasattr(wrapped, "targeted") else True


def test_decay_passes_over_normalizations_and_biases():
    layer = bert()
    layer(IDS)
    optimizer = optimizers.DecoupledWeightDecay(
        keras.optimizers.SGD(0.1), 0.5, exclude=[".*LayerNorm/.*", "bias"]
    )
    before = {id(w): value(w) for w in layer.trainable_variables}
    pairs = [(tf.zeros_like(tf.convert_to_tensor(w)), w) for w in layer.trainable_variables]
    optimizer.apply_gradients(pairs)
    kept = [
        path
        for path, w in zip(_keras.variables.paths(layer), layer.trainable_variables, strict=True)
        if np.array_equal(value(w), before[id(w)])
    ]
    assert kept and all("LayerNorm" in path or path.endswith("bias") for path in kept)
    assert len(kept) == len(layer.trainable_variables) - 3 - 2 * 6


@extended
def test_gradient_moments_equal_brute_force():
    keras.utils.set_random_seed(2)
    model = classifier("functional", bert())
    x, y = RNG.integers(1, 20, (5, 4)), RNG.integers(0, 2, 5)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    moments = gradients.moments(model, x, y, loss)
    sources = [_keras.variables.tf_variable(v) for v in model.trainable_variables]
    total = [np.zeros(v.shape) for v in sources]
    for i in range(5):
        with tf.GradientTape() as tape:
            nats = loss(y[i : i + 1], model(x[i : i + 1], training=True))
        for sum_, gradient in zip(total, tape.gradient(nats, sources), strict=True):
            sum_ += tf.convert_to_tensor(gradient).numpy() ** 2
    for ours, theirs in zip(moments.mean_square, total, strict=True):
        np.testing.assert_allclose(np.asarray(ours), theirs / 5, rtol=1e-3, atol=1e-9)


def two_streams(connections):
    stacks = T.TransformerStack(2, **SIZES), T.TransformerStack(1, **SIZES)
    return T.BiModalEncoder(*stacks, connections=connections)


def of_connection(layer, x, context, seen):
    a = normal(layer.attention_norm, x + attended(layer.attention, x, context, seen))
    return normal(
        layer.output_norm, a + product(layer.output_dense, gelu(product(layer.intermediate, a)))
    )


def test_two_streams_are_their_formula():
    text = T.TransformerStack(2, **SIZES, dtype="float64")
    image = T.TransformerStack(1, 1, 6, 10, dtype="float64")
    both = T.BiModalEncoder(text, image, connections=[(1, 1)], dtype="float64")
    x, y = texts(), texts(places=4, width=6)
    both(x, y)
    filled(both)
    seen, other = seen_by_all(MASK, 5), np.ones((3, 5, 4))
    (to_image, to_text), (one, two) = both.looks[0], text.layers
    a, b = of_layer(one, x, seen), of_layer(image.layers[0], y)
    a, b = of_connection(to_image, a, b, other), of_connection(to_text, b, a, seen_by_all(MASK, 4))
    found = both(x, y, first_mask=MASK)
    np.testing.assert_allclose(found[0], of_layer(two, a, seen), rtol=1e-9, atol=1e-11)
    np.testing.assert_allclose(found[1], b, rtol=1e-9, atol=1e-11)
    again = T.BiModalEncoder.from_config(both.get_config())
    again(x, y)
    assert [w.shape for w in again.weights] == [w.shape for w in both.weights]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: T.SelfAttention(0, 4, 8), "num_heads=0: expected a positive integer"),
        (lambda: T.TransformerLayer(3, 8, 12), "num_heads=3 does not divide hidden_size=8"),
        (lambda: T.TransformerStack(0, **SIZES), "num_layers=0, num_shared=None"),
        (lambda: T.TransformerStack(2, **SIZES, num_shared=3), "num_layers=2, num_shared=3"),
        (lambda: two_streams([(2, 1), (1, 1)]), r"connection \(1, 1\) after \(2, 1\): the stacks"),
        (lambda: two_streams([(3, 1)]), r"connection \(3, 1\) after \(0, 0\): .* 2 and 1 layers"),
        (lambda: T.TransformerLayer(2, 8, 12, activation="gelu2"), "activation='gelu2' is unknown"),
    ],
)
def test_wrong_arguments(make, message):
    with pytest.raises(ValueError, match=message):
        make()
