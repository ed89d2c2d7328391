"""Reports on models in which a plausible cause is wrong, and the true cause is known."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from non_finite_reports import Elementwise, names, report_of
from replicas import two_replicas
from stack_marks import IS_KERAS_2

from tfwd.callbacks import FiniteCheck
from tfwd.numerics import NonFiniteError

layers = keras.layers
DOMAIN = "a function outside its domain"


class RNNImageHead(Elementwise):
    """A layer of images whose name looks like a recurrent layer's name."""


def data(shape=(4,), size=8):
    rng = np.random.default_rng(0)
    return rng.normal(size=(size, *shape)).astype("float32"), rng.normal(size=(size, 1)).astype("f")


class ParallelCode(keras.Model):
    """A function outside its domain in code after 'b'. 'a' is a parallel layer, called later."""

    def __init__(self, function, **initial):
        super().__init__()
        self.function = function
        self.b = layers.Dense(3, activation="relu", name="b", **initial)
        self.a = layers.Dense(3, activation="sigmoid", name="a")
        self.joined, self.last = layers.Concatenate(name="joined"), layers.Dense(1)

    def call(self, x):
        b, a = self.b(x), self.a(x)
        return self.last(self.joined([a, self.function(b)]))


@pytest.mark.parametrize("eager", [False, True], ids=["graph", "eager"])
def test_code_after_a_parallel_layer(eager):
    model = ParallelCode(lambda b: tf.math.log(b - 1e9))
    report = report_of(model, *data(), run_eagerly=eager)
    assert names(report) == [DOMAIN]
    assert "The code between 'b, output' and 'joined, input' makes NaN" in report.causes[0].evidence


def test_a_logarithm_of_zeros_is_no_mask():
    model = ParallelCode(tf.math.log, kernel_initializer="zeros")
    report = report_of(model, *data())
    assert names(report) == [DOMAIN]
    assert "'b, output' are from 0 to 0" in report.causes[0].evidence


def test_logarithms_of_zeros_in_one_row_before_a_dense_layer():
    @tf.function
    def some_zeros(x):
        rows = tf.range(tf.shape(x)[0])[:, tf.newaxis]
        return tf.math.log(tf.where(rows == 3, 0.0, tf.abs(x) + 1.0))

    model = keras.Sequential([keras.Input((4,)), Elementwise(some_zeros), layers.Dense(1)])
    assert names(report_of(model, *data())) == [DOMAIN]


def test_a_layer_that_is_only_named_after_attention():
    hidden = layers.Dense(3, name="hidden")
    root = Elementwise(tf.sqrt, name="attention_gate")
    model = keras.Sequential([keras.Input((4,)), hidden, root, layers.Dense(1)])
    assert names(report_of(model, *data())) == [DOMAIN]


def test_attention_whose_scores_overflow():
    x, y = data((5, 4))
    inputs = keras.Input((5, 4))
    hidden = layers.MultiHeadAttention(2, 3, name="attention")(inputs, inputs)
    model = keras.Model(inputs, layers.Dense(1)(layers.Flatten()(hidden)))
    assert "a softmax whose inputs are all -infinity" not in names(report_of(model, x * 1e25, y))


def test_nan_in_the_input_of_a_softmax():
    root = Elementwise(tf.math.log, name="log")
    inputs = keras.Input((4,))

    class Between(keras.Model):
        def __init__(self):
            super().__init__()
            self.hidden, self.softmax = layers.Dense(3, name="hidden"), layers.Softmax(name="s")
            self.last = layers.Dense(1)

        def call(self, x):
            return self.last(self.softmax(tf.math.log(self.hidden(x))))

    report = report_of(Between(), *data())
    assert report.sentence.startswith("layer 's': forward input") and names(report) == [DOMAIN]
    model = keras.Model(inputs, layers.Dense(1)(root(layers.Dense(3)(inputs))))
    assert report_of(model, *data()).where == "layer log"


def test_a_sample_weight_of_a_whole_number_that_is_no_class():
    x, _ = data(size=4)
    y = np.array([[7.0], [3.0], [12.0], [5.0]], "float32")
    weight = np.array([1.0, np.nan, 1.0, 1.0], "float32")
    model = keras.Sequential([keras.Input((4,)), layers.Dense(1)])
    report = report_of(model, x, y, sample_weight=weight)
    assert names(report) == ["NaN or infinity in the sample_weight"]


@pytest.mark.skipif(IS_KERAS_2, reason="a mean over no examples is not NaN there")
def test_a_replica_without_examples():
    strategy = two_replicas()
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((4,)), layers.Dense(5), layers.BatchNormalization(), layers.Dense(1)]
        )
        x, y = data(size=9)  # the last batch has one example
        report = report_of(model, x, y)
    assert "replica 1" in report.sentence and names(report) == ["a batch without examples"]


def test_a_gradient_of_a_weight_is_not_called_a_layer():
    @tf.custom_gradient
    def bad_gradient(x, kernel):
        return x @ kernel, lambda upstream: (upstream @ tf.transpose(kernel), kernel * np.inf)

    class Custom(layers.Layer):
        def build(self, shape):
            self.kernel = self.add_weight(shape=(4, 1), name="kernel", initializer="ones")

        def call(self, x):
            return bad_gradient(x, tf.convert_to_tensor(self.kernel))

    model = keras.Sequential([keras.Input((4,)), Custom(name="custom")])
    (cause,) = report_of(model, *data()).causes
    assert "the gradient of weight 'custom/kernel' is not" in cause.evidence.replace(
        "sequential/", ""
    )


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_time_steps_of_images_whose_last_output_is_returned(dropout):
    """With dropout the outputs at all steps are unknown. The second axis is the height."""
    x = np.ones((8, 3, 4, 4, 1), "float32")
    x[2, 2, 3, 1] = 1e38  # time step 2, in image row 3
    layer = layers.ConvLSTM2D(
        2, 1, activation="relu", kernel_initializer="ones", dropout=dropout, name="images"
    )
    model = keras.Sequential([keras.Input(x.shape[1:]), layer, layers.Flatten(), layers.Dense(1)])
    report = report_of(model, x, data()[1])
    assert "time step 3" not in str(report)


def test_a_class_that_is_only_named_after_a_recurrent_layer():
    x, y = data((4, 5, 3))
    x[1, 3, 2, 1] = 200.0
    head = RNNImageHead(tf.exp, name="head")
    model = keras.Sequential([keras.Input((4, 5, 3)), head, layers.Flatten(), layers.Dense(1)])
    report = report_of(model, x, y)
    assert report.where == "layer head" and names(report) == [DOMAIN]
    assert "time step" not in report.sentence


@pytest.mark.skipif(not IS_KERAS_2, reason="Keras 3 has no time_major")
def test_the_second_axis_is_the_batch():
    x = np.ones((6, 8, 4), "float32") * 1e37
    layer = layers.SimpleRNN(
        4, activation="relu", time_major=True, return_sequences=True, recurrent_initializer="ones"
    )
    model = keras.Sequential([keras.Input((8, 4)), layer, layers.Dense(1)])
    report = report_of(model, x, np.ones((6, 8, 1), "float32"))
    assert "time step" not in report.sentence


def fitted_report(model, x, y):
    with pytest.raises(NonFiniteError) as caught:
        model.fit(x, y, batch_size=1024, shuffle=False, verbose=0, callbacks=[FiniteCheck()])
    return caught.value.report


def two_outputs(loss, size, **compiled):
    inputs = keras.Input((4,))
    p, q = layers.Dense(1, name="p")(inputs), layers.Dense(1, name="q")(inputs)
    model = keras.Model(inputs, {"p": p, "q": q})
    model.compile("sgd", {"p": "mse", "q": loss}, jit_compile=False, **compiled)
    x, y = data(size=size)
    return model, x, y


def log_of_prediction(y_true, y_pred):
    return tf.reduce_mean(tf.math.log(y_pred), -1)


def standardized(y_true, y_pred):
    """A loss that needs the whole batch: for one example, the deviation is 0."""
    centered = y_pred - tf.reduce_mean(y_pred)
    return tf.reduce_mean((centered / tf.math.reduce_std(y_pred) - y_true) ** 2, -1)


def test_the_bad_loss_of_a_large_batch():
    model, x, y = two_outputs(log_of_prediction, 1024)
    report = fitted_report(model, x, {"p": y, "q": y})
    assert report.sentence.startswith("loss 'log_of_prediction' of output 'q'")
    assert "the loss 'log_of_prediction' of output 'q'" in report.causes[0].evidence


def test_a_loss_that_needs_the_whole_batch():
    inputs = keras.Input((4,))
    p = layers.Dense(1, name="p")(inputs)
    q = layers.Dense(1, name="q", kernel_initializer="zeros")(inputs)
    model = keras.Model(inputs, {"p": p, "q": q})
    model.compile("sgd", {"p": standardized, "q": standardized}, jit_compile=False)
    x, y = data()
    assert fitted_report(model, x, {"p": y, "q": y}).first.frame.outputs == ("q",)


class Joined(layers.Layer):
    """A layer that applies a function to all of its inputs."""

    def __init__(self, function, width, **kwargs):
        super().__init__(**kwargs)
        self.function, self.width = function, width

    def call(self, inputs):
        return self.function(inputs)

    def compute_output_shape(self, shapes):
        return (None, self.width)


def logarithms(other):
    """Returns a model with the logarithm of one input, times a function of another."""
    first, second = keras.Input((6,), name="a"), keras.Input((6,), name="b")
    made = Joined(lambda x: tf.math.log(x[0]) * x[1], 6, name="logs")([first, other(second)])
    return keras.Model({"a": first, "b": second}, layers.Dense(1)(made))


@pytest.mark.parametrize("several", [True, False])
def test_a_constant_in_good_rows_too_is_no_cause(several):
    """Checks a mask of ones, which most rows have, beside one negative number or a row of them."""
    rng = np.random.default_rng(0)
    x = {"a": rng.uniform(1, 2, (8, 6)).astype("float32"), "b": np.ones((8, 6), "float32")}
    x["a"][3, : 6 if several else 1] *= -1
    x["b"][6, 3:] = 0
    report = report_of(logarithms(lambda b: b), x, np.ones((8, 1), "float32"))
    assert names(report) == [DOMAIN]


def test_zeros_in_good_rows_too_are_no_cause():
    rng = np.random.default_rng(0)
    x = {name: rng.uniform(1, 2, (8, 6)).astype("float32") for name in "ab"}
    x["a"][3] *= -1
    dead = layers.Dense(6, "relu", bias_initializer=keras.initializers.Constant(-100.0))
    report = report_of(logarithms(dead), x, np.ones((8, 1), "float32"))
    assert names(report) == [DOMAIN]


def test_sample_weights_of_zero_beside_a_bad_label():
    x, y = data()
    y = np.abs(y) + 3
    y[5] = -4

    def roots(labels, predictions):
        return tf.reduce_mean(tf.sqrt(labels - 2) + predictions**2, -1)

    report = report_of(
        keras.Sequential([keras.Input((4,)), layers.Dense(1)]),
        x,
        y,
        roots,
        sample_weight=np.zeros(8),
    )
    assert names(report) == ["the loss function"]


def test_padding_beside_one_bad_element():
    """Checks a row of padding with one NaN element: a softmax would make all of them NaN."""
    ids, price = keras.Input((5,), dtype="int32", name="ids"), keras.Input((1,), name="price")
    mean = layers.GlobalAveragePooling1D()(layers.Embedding(9, 6)(ids))
    join = Joined(lambda x: tf.concat([x[0], tf.math.log(x[1])], -1), 7, name="join")
    model = keras.Model({"ids": ids, "price": price}, layers.Dense(1)(join([mean, price])))
    rng = np.random.default_rng(0)
    x = {"ids": rng.integers(1, 9, (8, 5)), "price": np.ones((8, 1), "float32")}
    x["ids"][4], x["price"][4] = 0, -2
    report = report_of(model, x, np.ones((8, 1), "float32"))
    assert "a softmax whose inputs are all -infinity" not in names(report)


class Spectrum(layers.Layer):
    """A layer whose outputs are complex."""

    def call(self, x):
        return tf.signal.stft(x, 16, 8)


class OfSpectrum(keras.Model):
    """A model with complex numbers between its layers."""

    def __init__(self):
        super().__init__()
        self.spectrum, self.last = Spectrum(name="spectrum"), layers.Dense(1)

    def call(self, x):
        return self.last(tf.math.log1p(tf.math.abs(self.spectrum(x))[:, 0]))


@pytest.mark.parametrize("eager", [False, True], ids=["graph", "eager"])
def test_complex_numbers(eager):
    x, y = data((64,), 16)
    bad = x.copy()
    bad[9, 3] = np.nan
    model, plain = OfSpectrum(), OfSpectrum()
    for one in (model, plain):
        one(x)
        one.compile("sgd", "mse", run_eagerly=eager)
    plain.set_weights(model.get_weights())
    options = {"batch_size": 8, "shuffle": False, "verbose": 0}
    with pytest.warns(UserWarning, match="skipped a step"):
        model.fit(bad, y, callbacks=[FiniteCheck("skip")], **options)
    plain.fit(x[:8], y[:8], **options)
    for ours, theirs in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    with pytest.raises(NonFiniteError, match="row 1"):
        model.fit(bad, y, callbacks=[FiniteCheck()], **options)
