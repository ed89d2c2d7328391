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
