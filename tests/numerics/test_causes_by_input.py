"""Causes in models with several inputs: an input that the layer does not read is no cause.

The oracle is the input itself. If a layer does not read an input, then the report on the layer's
output must be the same for all values of this input.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from non_finite_reports import Elementwise, names, report_of
from replicas import two_replicas
from stack_marks import quick_rows

layers = keras.layers


def inputs():
    return {name: keras.Input((3,), name=name) for name in "ab"}


def relu(name):
    identity = {"kernel_initializer": "identity", "bias_initializer": "zeros"}
    return layers.Dense(3, "relu", name=name, **identity)


def log(name="log"):
    return Elementwise(tf.math.log, name=name)


def joined(given, left, right):
    outputs = layers.Dense(1, name="o")(layers.Concatenate()([left, right]))
    return keras.Model(given, outputs, name="model")


def after_layers():
    given = inputs()
    left = log()(layers.Rescaling(1.0, name="left")(given["a"]))
    return joined(given, left, relu("right")(given["b"]))


def after_the_batch():
    """The tensor just before 'log' is the other input's layer."""
    given = inputs()
    right = relu("right")(given["b"])
    return joined(given, log()(given["a"]), right)


def at_once():
    """The tensor just before 'log' is the other input."""
    given = inputs()
    return joined(given, log()(given["a"]), given["b"])


def of_a_shape():
    """The layer reads only the shape of the other input."""
    given = inputs()

    class Shaped(layers.Layer):
        def call(self, a, b):
            return tf.math.log(tf.reshape(a, tf.shape(b))) + tf.zeros_like(b)

    return joined(given, Shaped(name="log")(given["a"], given["b"]), relu("right")(given["b"]))


def nested():
    """The nested model reads both inputs, and its layer 'log' only one."""
    given = inputs()
    inner = after_layers()
    return keras.Model(given, layers.Dense(1, name="last")(inner(given)))


class Subclassed(keras.Model):
    """A model with code between its layers."""

    def __init__(self):
        super().__init__()
        self.right, self.log, self.last = relu("right"), log(), layers.Dense(1, name="last")

    def call(self, x):
        right = self.right(x["b"])
        left = self.log(1.0 * x["a"])
        return self.last(tf.concat([left, right], -1))


MODELS = {
    "layers": after_layers,
    "layer": after_the_batch,
    "batch": at_once,
    "shape": of_a_shape,
    "nested": nested,
    "subclassed": Subclassed,
}


def batch(b):
    """Returns positive inputs with negative numbers in row 5 of `a`, and `b` in row 5 of `b`."""
    x = {name: np.random.default_rng(0).uniform(1, 2, (8, 3)).astype("float32") for name in "ab"}
    x["a"][5], x["b"][5] = (-3.0, 1.0, -2.0), b
    return x


def report_in(mode, make, x):
    how = {"eager": {"run_eagerly": True}, "jit": {"jit_compile": True}}.get(mode, {})
    strategy = two_replicas() if mode == "replicas" else tf.distribute.get_strategy()
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = make()
        return report_of(model, x, np.ones((8, 1), "float32"), **how)


ROWS = [(kind, mode) for kind in MODELS for mode in ("eager", "graph")]
ROWS += [(kind, mode) for kind in ("layers", "subclassed") for mode in ("jit", "replicas")]


@quick_rows("*-eager", "layers-graph", "subclassed-graph")
@pytest.mark.parametrize(("kind", "mode"), ROWS)
def test_an_input_that_the_layer_does_not_read(kind, mode):
    zeros = report_in(mode, MODELS[kind], batch(0.0))
    others = report_in(mode, MODELS[kind], batch((1.0, 1.5, 1.25)))
    assert zeros.where.endswith("log")
    assert names(zeros) == ["a function outside its domain"]
    assert zeros.causes == others.causes
    assert "from -3 to" in zeros.causes[0].evidence
    assert "'x['b']" not in zeros.causes[0].evidence
    assert "'right" not in zeros.causes[0].evidence


class Mean(layers.Layer):
    """Mean of `a` with the weights `b`. It is 0/0 in a row whose weights are all 0."""

    def call(self, a, b):
        b = tf.cast(b, a.dtype)
        return tf.reduce_sum(a * b, -1, keepdims=True) / tf.reduce_sum(b, -1, keepdims=True)


@quick_rows("float32-eager", "int64-eager", "int64-graph")
@pytest.mark.parametrize(
    ("dtype", "mode"),
    [(dtype, mode) for dtype in ("float32", "int64") for mode in ("eager", "graph", "replicas")],
)
def test_an_input_that_the_layer_reads(dtype, mode):
    def model():
        given = {"a": keras.Input((3,), name="a"), "b": keras.Input((3,), dtype=dtype, name="b")}
        hidden = layers.Rescaling(1.0, name="hidden")(given["a"])
        return keras.Model(given, layers.Dense(1)(Mean(name="mean")(hidden, given["b"])))

    x = batch(0.0)
    x["b"] = x["b"].astype(dtype)
    report = report_in(mode, model, x)
    assert report.where == "layer mean"
    row = 1 if mode == "replicas" else 5
    seen = f"in row {row} of the batch, "
    assert seen in report.causes[0].evidence
    assert "only there all elements of 'x['b']' are 0" in report.causes[0].evidence


def test_ids_that_the_layer_does_not_read():
    """The ids are all 0 only in the bad row, as padding is."""

    def model():
        given = inputs() | {"b": keras.Input((3,), dtype="int64", name="b")}
        right = layers.Flatten()(layers.Embedding(9, 2, name="right")(given["b"]))
        return joined(given, log("attend")(given["a"]), right)

    x = batch(0.0)
    x["b"] = x["b"].astype("int64")
    report = report_in("graph", model, x)
    assert report.where == "layer attend"
    assert not any("x['b']" in cause.evidence for cause in report.causes)


def test_a_large_input_that_the_layer_does_not_read():
    report = report_in("graph", after_layers, batch(5e3))
    assert names(report) == ["a function outside its domain"]
    assert "5e+03" not in report.causes[0].evidence


def two_inputs(function, name="computed"):
    given = {letter: keras.Input((6,), name=letter) for letter in "ab"}
    computed = Elementwise(lambda pair: function(*pair), name=name)([given["a"], given["b"]])
    return keras.Model(given, layers.Dense(1)(computed))


def rows(value=1.5):
    return np.random.default_rng(1).uniform(value, value + 1, (8, 6)).astype("float32")


LABELS = np.ones((8, 1), "float32")


def test_one_element_is_no_division_of_a_row_by_its_sum():
    """If a row were divided by its sum of 0, all its elements would be NaN."""
    a, b = rows(), rows()
    a[3, 2], b[3] = -1, 0
    model = two_inputs(lambda a, b: tf.math.log(a) + b)
    assert names(report_of(model, {"a": a, "b": b}, LABELS)) == ["a function outside its domain"]


def test_a_mask_beside_rows_that_are_not_masked():
    a, mask = rows(), np.ones((8, 6), "float32")
    mask[3], mask[6, 2:] = 0, 0
    model = two_inputs(lambda a, b: tf.nn.softmax(tf.where(b > 0, a, -np.inf)), "attend")
    (cause,) = report_of(model, {"a": a, "b": mask}, LABELS).causes
    assert cause.name == "a softmax whose inputs are all -infinity"
    assert "row 3 of the batch, and only there all elements of 'x['b']' are 0" in cause.evidence


def test_a_masked_mean_of_padding():
    """A user's layer whose code names no softmax has no softmax."""

    class MaskedMean(layers.Layer):
        def call(self, pair):
            features, ids = pair
            mask = tf.cast(tf.not_equal(ids, 0), tf.float32)[..., None]
            return tf.reduce_sum(features * mask, 1) / tf.reduce_sum(mask, 1)

    ids = keras.Input((5,), dtype="int32")
    mean = MaskedMean(name="mask_mean")([layers.Embedding(9, 4)(ids), ids])
    words = np.arange(40).reshape(8, 5) % 8 + 1
    words[4], words[2, 3:] = 0, 0
    (cause,) = report_of(keras.Model(ids, layers.Dense(1)(mean)), words, LABELS).causes
    assert cause.name == "0/0 or a function outside its domain"
    assert "in row 4 of the batch" in cause.evidence


def test_zeros_that_are_no_mask():
    report = report_of(two_inputs(lambda a, b: a / a + b), {"a": 0 * rows(), "b": rows()}, LABELS)
    assert names(report) == ["0/0 or a function outside its domain"]


def scaled(factor, name):
    return Elementwise(lambda x: factor * x, name=name)


def dense():
    return layers.Dense(6, kernel_initializer="identity")


def siamese(bad, given):
    """Returns the outputs of a layer 'log' that is called on 'good' and on 'bad'."""
    given = [dense()(one) for one in given]
    shared = Elementwise(lambda x: tf.math.log(x + 1.5), name="log")
    branches = [scaled(1.0, "good")(given[0]), scaled(3.0, "bad")(given[1])]
    both = [shared(one) for one in (branches[::-1] if bad == "first" else branches)]
    return layers.Dense(1)(layers.Subtract()(both))


@pytest.mark.parametrize("bad", ["first", "last"])
def test_a_shared_layer_of_two_inputs(bad):
    given = [keras.Input((6,), name=name) for name in "ab"]
    x = {name: rows(-1.0) for name in "ab"}
    (cause,) = report_of(keras.Model(given, siamese(bad, given)), x, LABELS).causes
    assert cause.name == "a function outside its domain"
    assert "The values of 'bad, output' are from -" in cause.evidence
    assert "'good" not in cause.evidence


@pytest.mark.parametrize("bad", ["first", "last"])
def test_a_shared_layer_of_one_input(bad):
    """The report does not know which call took which tensor, so it names both."""
    given = keras.Input((6,))
    (cause,) = report_of(keras.Model(given, siamese(bad, [given] * 2)), rows(-1.0), LABELS).causes
    assert cause.name == "a function outside its domain"
    assert "'log' is called 2 times. Its inputs include '" in cause.evidence
    for name in ("good", "bad"):
        assert f"'{name}, output' from -" in cause.evidence
    assert "The values of" not in cause.evidence


def test_a_shared_layer_in_a_chain():
    """The last call takes the tensor between both calls."""
    given, root = keras.Input((6,)), Elementwise(tf.sqrt, name="root")
    outputs = layers.Dense(1)(root(scaled(-1.0, "minus")(root(dense()(given)))))
    report = report_of(keras.Model(given, outputs), rows(), LABELS)
    assert report.first.frame.call == 2
    assert "The values of 'minus, output' are from -" in report.causes[0].evidence


def test_a_shared_layer_whose_inputs_are_not_known():
    """No gradient is computed before the first weight. Its path would show the inputs."""
    given, root = keras.Input((6,)), Elementwise(tf.sqrt, name="root")
    branches = [root(scaled(factor, f"times{i}")(given)) for i, factor in enumerate((-1.0, 1.0))]
    outputs = layers.Dense(1)(layers.Subtract()(branches))
    (cause,) = report_of(keras.Model(given, outputs), rows(), LABELS).causes
    assert "the input of this call is not known" in cause.evidence
    assert "'times" not in cause.evidence


def test_zeros_that_another_call_takes():
    """A tensor of zeros is no cause if another call of the shared layer may have taken it."""
    given, shared = keras.Input((6,)), Elementwise(lambda x: tf.math.log(x + 1.5), name="log")
    branches = [
        scaled(factor, name)(dense()(given)) for factor, name in ((-3.0, "bad"), (0.0, "0"))
    ]
    outputs = layers.Dense(1)(layers.Subtract()([shared(one) for one in branches]))
    report = report_of(keras.Model(given, outputs), rows(), LABELS)
    assert names(report) == ["a function outside its domain"]
