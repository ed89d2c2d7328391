"""Reports of whole trainings with a planted defect: their content, and what they omit."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from non_finite_reports import Times, dense, names, own_output, report_of
from planted_nan_models import data
from stack_marks import IS_KERAS_2, extended, quick_rows

import tfwd
from tfwd.callbacks import FiniteCheck
from tfwd.numerics import NonFiniteError
from tfwd.parametrizations import Dropout

layers = keras.layers


class Mix(layers.Layer):
    """Attention whose inner mask leaves no key to queries with a large element."""

    def call(self, inputs, mask=None):
        scores = inputs @ tf.transpose(inputs, [0, 2, 1])
        kept = tf.reduce_max(tf.abs(inputs), -1, keepdims=True) < 50
        return tf.nn.softmax(tf.where(kept, scores, -np.inf)) @ inputs


class Scores(layers.Layer):
    """The scores of such attention. Its softmax is in another layer."""

    def call(self, inputs):
        kept = tf.reduce_max(tf.abs(inputs), -1, keepdims=True) < 50
        return tf.where(kept, inputs @ tf.transpose(inputs, [0, 2, 1]), -np.inf)


class Shares(layers.Layer):
    def call(self, inputs):
        return tf.nn.softmax(inputs)


def texts():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(8, 5, 4)).astype("float32")
    x[3, 2, 1], x[5, 4, 0], x[5, 1, 2] = 60, 70, 80
    return x, rng.normal(size=(8, 1)).astype("float32")


@extended
def test_single_queries_to_which_no_key_is_left():
    x, y = texts()
    model = keras.Sequential(
        [layers.Input((5, 4)), Mix(name="mix"), layers.Flatten(), layers.Dense(1)]
    )
    report = report_of(model, x, y)
    assert names(report) == ["a softmax whose inputs are all -infinity"]
    said = report.causes[0].evidence
    assert "at query 2 of row 3, query 1 of row 5, query 4 of row 5, and finite elsew" in said
    scores = [layers.Input((5, 4)), Scores(name="a"), Shares(name="b")]
    report = report_of(keras.Sequential([*scores, layers.Flatten(), layers.Dense(1)]), x, y)
    assert report.first.frame.name == "a"
    assert names(report) == ["a softmax whose inputs are all -infinity"]


@extended
def test_vectors_of_zeros_are_no_queries():
    """Checks vectors of zeros: a norm of 0 makes NaN of whole vectors too."""
    x, y = texts()
    x[3, 2] = 0.0
    norm = layers.Lambda(lambda v: v / tf.sqrt(tf.reduce_sum(v * v, -1, keepdims=True)))
    model = keras.Sequential([layers.Input((5, 4)), norm, layers.Flatten(), layers.Dense(1)])
    report = report_of(model, x, y)
    assert "a softmax whose inputs are all -infinity" not in names(report)


class Own(keras.Model):
    """A model that computes the loss in its training step."""

    def __init__(self):
        super().__init__()
        self.score = layers.Dense(1, name="score", bias_initializer=keras.initializers.Constant(-9))

    def call(self, inputs):
        return self.score(inputs)

    def train_step(self, batch):
        x, y = batch
        weights = [tfwd._keras.variables.tf_variable(v) for v in self.trainable_variables]
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(y * tf.math.log(self(x, training=True)))
        gradients = tape.gradient(loss, weights)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss}


@pytest.mark.parametrize("loss", [None, "mse"])
def test_a_loss_of_a_custom_training_step(loss):
    """Checks that the report speaks of the step's own loss, not of the compiled loss."""
    x, y = data(1)
    model = Own()
    outputs = np.asarray(model(x))
    report = report_of(model, x, y, loss=loss)
    assert str(report).startswith("loss: NaN")
    (cause,) = report.causes
    assert "The loss is computed in a custom train_step" in cause.evidence
    assert f"'score, output' {outputs.min():.3g} to {outputs.max():.3g}" in cause.evidence
    assert f"'y, data' {y.min():.3g} to {y.max():.3g}" in cause.evidence
    assert "tf.debugging.enable_check_numerics()" in cause.advice
    assert "self.compute_loss" in cause.advice


@pytest.mark.skipif(not IS_KERAS_2, reason="Keras 3 has no ragged outputs")
def test_a_loss_of_a_ragged_output():
    """Its examples are not known, although the model has Keras's own training step."""

    class Logarithm(keras.losses.Loss):
        def call(self, y, p):
            return tf.reduce_mean(tf.math.log(p.to_tensor()))

    inputs = layers.Input((None, 1), ragged=True)
    head = layers.TimeDistributed(layers.Dense(1, kernel_initializer="ones"))
    x = tf.ragged.constant([[[0.1], [0.2]], [[0.3]], [[0.0], [0.4]]], ragged_rank=1)
    (cause,) = report_of(keras.Model(inputs, head(inputs)), x, x, Logarithm()).causes
    assert "The loss is computed from outputs that are not dense tensors" in cause.evidence
    assert "compute_loss" not in cause.advice


class SaturatedAdversary(keras.Model):
    """A discriminator that is sure of all examples, and calls its last layer again afterwards."""

    def __init__(self):
        super().__init__()
        self.generator = layers.Dense(6, name="generator")
        self.judge = layers.Dense(1, "sigmoid", name="judge", kernel_initializer="zeros")
        self.judge.bias_initializer = keras.initializers.Constant(50)
        self.rates = [keras.optimizers.SGD(), keras.optimizers.SGD()]

    def call(self, inputs):
        return self.judge(self.generator(inputs))

    def train_step(self, batch):
        x, _ = batch
        with tf.GradientTape(persistent=True) as tape:
            fake = tf.reduce_mean(tf.math.log(1 - self(x, training=True)))
            loss = -tf.reduce_mean(tf.math.log(self.judge(x))) - fake
        aims = (self.judge, loss), (self.generator, fake)
        for rate, (part, aim) in zip(self.rates, aims, strict=True):
            gradients = tape.gradient(aim, part.trainable_weights)
            rate.apply_gradients(zip(gradients, part.trainable_weights, strict=True))
        self.judge(self.generator(x))
        return {"loss": loss}


@quick_rows("False")
@pytest.mark.parametrize("jit_compile", [False, True])
def test_a_logarithm_of_0_in_an_adversarial_training_step(jit_compile):
    """Checks that calls after the loss are no evidence, and that each call before it is."""
    x, y = data(1)
    model = SaturatedAdversary()
    model(x)
    report = report_of(model, x, y, loss=None, jit_compile=jit_compile)
    (cause,) = report.causes
    for call in ("'judge, output'", "'judge (call 2), output'"):
        assert f"{call} reaches 1 exactly, where a logarithm is infinite" in cause.evidence
    assert "(call 3)" not in cause.evidence
    assert "clip the argument of a logarithm" in cause.advice


def logarithm(y_true, y_pred):
    return -tf.reduce_sum(y_true * tf.math.log(y_pred), -1)


@quick_rows("False")
@pytest.mark.parametrize("named", [False, True])
def test_the_output_whose_loss_it_is(named):
    """Checks the output of the bad loss.

    The other output has labels and predictions that would be suspicious there.
    """
    x, y = data(1)
    inputs = layers.Input((6,))
    one = layers.Dense(1, name="one")(inputs)
    two = layers.Dense(3, activation="softmax", name="two")(inputs)
    outputs = {"one": one, "two": two} if named else [one, two]
    model = keras.Model(inputs, outputs)
    model.get_layer("two").set_weights([np.zeros((6, 3)), np.array([0.0, 0.0, -500.0])])
    classes = np.eye(3, dtype="float32")[[0, 1, 0, 1, 0, 2, 0, 1]]
    labels = {"one": y, "two": classes} if named else [y, classes]
    losses = {"one": "mse", "two": logarithm} if named else ["mse", logarithm]
    # 0 * log(0) is NaN in each row; in which the class is 2 it is infinite.
    report = report_of(model, x, labels, loss=losses)
    assert report.sentence.startswith("loss 'logarithm' of output 'two':")
    (cause,) = report.causes
    assert "the loss 'logarithm' of output 'two' is" in cause.evidence
    assert "column 2 of the predictions is 0" in cause.evidence
    assert "negative" not in cause.evidence
    assert "y[0]" not in cause.evidence


@extended
def test_the_row_of_one_of_several_outputs():
    x, y = data(1)
    inputs = layers.Input((6,))
    keep = keras.initializers.Constant(1.0)
    two = layers.Dense(1, kernel_initializer=keep, activation="relu", name="two")(inputs)
    model = keras.Model(inputs, [layers.Dense(1, name="one")(inputs), two])
    x = np.abs(x)
    x[5] = 0.0
    report = report_of(model, x, [y, np.ones_like(y)], loss=["mse", logarithm])
    assert report.sentence.startswith("loss 'logarithm' of output 'two': +Inf")
    assert "its non-finite values are in row 5 of the batch" in report.causes[0].evidence


@extended
def test_labels_out_of_range_belong_to_their_output():
    """Checks labels of the first output that are no classes: only the second has a sparse loss."""
    x, y = data(1)
    inputs = layers.Input((6,))
    model = keras.Model(inputs, [layers.Dense(1)(inputs), layers.Dense(3, name="two")(inputs)])
    sparse = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    bad = np.array([0, 1, 2, 0, 1, 7, 0, 1])
    x[0, 0] = np.nan
    # (A CPU refuses such labels in a graph, and not under XLA.)
    report = report_of(model, x, [100 * y, bad], loss=["mse", sparse], jit_compile=True)
    assert "NaN or infinity in the input" in names(report)
    (cause,) = [cause for cause in report.causes if cause.name == "a label out of range"]
    assert "'y[1]' has the label 7 in row 5 of the batch" in cause.evidence
    assert "output 'two' has 3 classes" in cause.evidence


@quick_rows("class_weight")
@pytest.mark.parametrize("by", ["class_weight", "sample_weight"])
def test_an_infinite_class_weight(by):
    x, _ = data(1)
    y = np.array([0, 1, 2, 0, 1, 2, 0, 1])
    model = dense(units=3)
    if by == "class_weight":
        given = {"class_weight": {0: 1.0, 1: 1.0, 2: np.inf}}
    else:
        weights = np.ones(8, "float32")
        weights[2] = np.inf  # and not the other example of the class
        given = {"sample_weight": weights}
    report = report_of(model, x, y, keras.losses.SparseCategoricalCrossentropy(True), **given)
    (cause,) = report.causes
    assert ("in all examples of class 2, and in no others" in cause.evidence) == (by[0] == "c")
    assert ("class_weight" in cause.name) == (by[0] == "c")


def test_data_beyond_float16():
    x, y = data(1)
    x[2, 1] = 1e6
    keras.config.set_dtype_policy("mixed_float16")
    report = report_of(dense(layers.Dense(1, dtype="float32", name="last")), x, y)
    assert names(report)[0] == "an overflow of float16"
    assert "'x' reaches 1e+06. The largest float16 is 65504" in report.causes[0].evidence
    assert "scale the data" in report.causes[0].advice


class ShiftedScores(layers.Layer):
    """Attention with a number that is added to the scores of masked keys."""

    def __init__(self, added):
        super().__init__(name="attention")
        self.added = added

    def call(self, inputs):
        masked = tf.cast(inputs[:, tf.newaxis, :, 0] < 0, inputs.dtype)
        scores = inputs @ tf.transpose(inputs, [0, 2, 1]) / 4
        return tf.nn.softmax(scores + masked * tf.cast(self.added, inputs.dtype)) @ inputs


def test_a_mask_beyond_float16():
    x = np.random.default_rng(0).normal(size=(8, 5, 4)).astype("float32")
    keras.config.set_dtype_policy("mixed_float16")

    def attention(added):
        return keras.Sequential([ShiftedScores(added), layers.Flatten(), layers.Dense(1)])

    report = report_of(attention(-1e9), x, x[:, 0, :1])
    assert report.first.frame.name == "attention"
    assert "a constant beyond 65504 is infinity" in report.causes[0].advice
    advised = float(report.causes[0].advice.split("use ")[1].split()[0].rstrip(".;)"))
    model = attention(advised)
    model.compile("sgd", "mse")
    assert np.isfinite(model.fit(x, x[:, 0, :1], verbose=0).history["loss"][0])


def test_an_update_that_overflows_says_rate_and_gradient():
    x, y = 100 * np.ones((8, 6), "float32"), np.zeros((8, 1), "float32")
    model = dense()
    kernel = np.full((6, 1), 1.0)
    model.layers[0].set_weights([kernel, np.zeros(1)])
    report = report_of(model, x, y, optimizer=keras.optimizers.SGD(3e38))
    (cause,) = report.causes
    # d/dw mean((100 * 6)^2) = 2 * 600 * 100
    assert "The learning rate is 3e+38. The largest gradient is 1.2e+05" in cause.evidence
    assert cause.evidence.endswith("dense/kernel'.")


class Shrinks(keras.constraints.Constraint):
    def __call__(self, weight):
        return weight / tf.norm(weight - weight)


@quick_rows("constraint0")
@pytest.mark.parametrize("constraint", [Shrinks(), lambda weight: weight / tf.norm(0.0 * weight)])
def test_a_constraint_that_divides_by_zero(constraint):
    """Checks that the step is undone, and that the report names the constraint."""
    x, y = data(1)
    model = dense(layers.Dense(1, kernel_constraint=constraint, name="last"))
    before = model.get_weights()
    report = report_of(model, x, y, optimizer="adam")
    assert (report.step, report.first.frame.kind) == (1, "update")
    (cause,) = report.causes
    name = "Shrinks" if isinstance(constraint, Shrinks) else "<lambda>"
    assert f"has the constraint '{name}', which is applied after the update" in cause.evidence
    for ours, theirs in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@quick_rows("False")
@pytest.mark.parametrize("named", [False, True])
def test_infinite_loss_weights(named):
    x, y = data(1)
    inputs = layers.Input((6,))
    outputs = [layers.Dense(1, name=name)(inputs) for name in ("one", "two")]
    model = keras.Model(inputs, outputs)
    weights = {"one": 1.0, "two": float("inf")} if named else [1.0, float("inf")]
    model.compile("sgd", ["mse", "mse"], loss_weights=weights)
    with pytest.raises(NonFiniteError) as caught:
        model.fit(x, [y, y], verbose=0, callbacks=[FiniteCheck()])
    (cause,) = caught.value.report.causes
    assert cause.name == "NaN or infinity in the loss_weights"
    where = "output 'two'" if named else "output 1"
    assert cause.evidence.endswith(f"The loss_weights of compile are not: inf for {where}.")


def test_a_fractional_power_of_a_negative_number():
    x, y = data(1)
    model = keras.Sequential([layers.Input((6,)), layers.Lambda(lambda v: v**0.5), layers.Dense(1)])
    assert "a fractional power" in report_of(model, x, y).causes[0].advice


def test_spectral_normalization_cannot_be_parametrized():
    model = keras.Sequential(
        [layers.Input((6,)), layers.SpectralNormalization(layers.Dense(3)), layers.Dense(1)]
    )
    with pytest.raises(ValueError, match="a SpectralNormalization assigns to it in each training"):
        tfwd.parametrize(model, {".*/kernel": Dropout(0.5)})
    wrapped = tfwd.parametrize(model, {".*bias": Dropout(0.5)}, seed=1)
    assert wrapped(data(1)[0], training=True).shape == (8, 1)


@extended
def test_a_message_per_output_is_for_those_that_are_bad():
    """Checks two non-finite outputs of three, each with its own row."""
    x, y = data(1)
    x = np.abs(x)
    inputs = layers.Input((6,))
    keep = {"kernel_initializer": keras.initializers.Constant(1.0), "activation": "relu"}
    parts = [layers.Lambda(lambda v, i=i: v[:, i : i + 1])(inputs) for i in (0, 1)]
    heads = [layers.Dense(1, name=f"h{i}", **keep)(part) for i, part in enumerate(parts)]
    model = keras.Model(inputs, [layers.Dense(1, name="fine")(inputs), *heads])
    x[2, 0] = x[6, 1] = 0.0
    ones = np.ones_like(y)
    report = report_of(model, x, [y, ones, ones], loss=["mse", logarithm, logarithm])
    assert report.sentence.startswith("loss 'logarithm' and 'logarithm' of outputs 'h0' and 'h1'")
    first, second = report.causes
    assert "output 'h0' is not: its non-finite values are in row 2" in first.evidence
    assert "output 'h1' is not: its non-finite values are in row 6" in second.evidence


@pytest.mark.parametrize(("growth", "every"), [(2, 1), (2, 4), (32, 1)])
def test_growth_is_counted_in_steps(growth, every):
    """The gradient is growth**i in step i, counted from 0. The square of 32**13 is infinite."""
    x = np.repeat(float(growth) ** np.arange(25), 2)[:, None].astype("float32")
    x[-2:] = np.inf
    model = keras.Sequential([layers.Input((1,)), Times(name="times")])
    model.compile(keras.optimizers.SGD(0.0), own_output)
    check = FiniteCheck(every_n_steps=every, exclude=["x", "y"])
    with pytest.raises(NonFiniteError) as caught:
        model.fit(x, x, batch_size=2, shuffle=False, verbose=0, callbacks=[check])
    (cause,) = caught.value.report.causes
    assert cause.name == "exploding gradients"
    last = growth ** (23 if every == 1 else 20)
    assert f"by a factor of {growth} per step, to {last:.3g}." in cause.evidence


def test_a_later_fit_can_diverge_by_earlier_steps():
    """Each fit makes one step with a learning rate that is much too large."""
    keras.utils.set_random_seed(1)
    model = dense(layers.Dense(16, name="second"), layers.Dense(1, name="last"))
    model.compile(keras.optimizers.SGD(20.0), "mse")
    x, y = np.ones([4, 6], "float32"), np.ones([4, 1], "float32")
    with pytest.raises(NonFiniteError) as caught:
        for _ in range(50):
            model.fit(x, y, verbose=0, callbacks=[FiniteCheck()])
    assert int(model.optimizer.iterations) > 0
    assert "exploding gradients" in names(caught.value.report)
    assert "This is the first step of the training" not in str(caught.value.report)
