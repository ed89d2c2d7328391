"""`unused`: weights without a gradient, against models in which they are known."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfwd.numerics import unused

layers = keras.layers
X = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")
Y = X[:, :1]


class Sided(keras.Model):
    """A model with a layer that it calls and does not use, and one with dead units only."""

    def __init__(self):
        super().__init__()
        self.main = layers.Dense(3, name="main")
        self.side = layers.Dense(2, name="side")
        self.dead = layers.Dense(
            3, activation="relu", bias_initializer=keras.initializers.Constant(-1e6), name="dead"
        )
        self.last = layers.Dense(1, name="last")

    def call(self, inputs):
        self.side(inputs)
        hidden = self.main(inputs)
        return self.last(hidden + self.dead(hidden))


def ends(found):
    return {"/".join(path.split("/")[-2:]): what for path, what in found.items()}


def test_which_weights():
    model = Sided()
    model(X)
    model.compile("sgd", "mse")
    expected = {
        "side/kernel": "no gradient",
        "side/bias": "no gradient",
        "dead/kernel": "a gradient of zeros",
        "dead/bias": "a gradient of zeros",
    }
    assert ends(unused(model, X, Y)) == expected
    assert ends(unused(model, X)) == expected
    assert ends(unused(model, X, Y, keras.losses.MeanAbsoluteError())) == expected
    assert ends(unused(model, X, Y, lambda y, p: (y - p) ** 2)) == expected


def test_a_regulariser_reaches_what_the_loss_does_not():
    inputs = layers.Input((4,))
    outputs = layers.Dense(1, kernel_regularizer="l2", name="last")(inputs)
    model = keras.Model(inputs, outputs)
    assert ends(unused(model, X, Y, lambda y, p: 0.0 * p)) == {"last/bias": "a gradient of zeros"}


@pytest.mark.parametrize("named", [False, True])
def test_several_outputs(named):
    inputs = layers.Input((4,))
    one = layers.Dense(1, name="one")(inputs)
    two = layers.Dense(1, name="two")(inputs)
    if named:
        model = keras.Model(inputs, {"a": one, "b": two})
        model.compile("sgd", {"a": "mse", "b": "mae"})
        y = {"a": Y, "b": Y}
    else:
        model = keras.Model(inputs, [one, two])
        model.compile("sgd", ["mse", "mae"])
        y = [Y, Y]
    assert unused(model, X, y) == {}


def two_outputs(named, subclass=False):
    """Returns two heads on a layer; each may be without a loss."""
    if subclass:

        class Heads(keras.Model):
            def __init__(self):
                super().__init__()
                self.body = layers.Dense(3, name="body")
                self.one, self.two = layers.Dense(1, name="one"), layers.Dense(1, name="two")

            def call(self, inputs):
                body = self.body(inputs)
                one, two = self.one(body), self.two(body)
                return {"one": one, "two": two} if named else [one, two]

        model = Heads()
        model(X)
        return model
    inputs = layers.Input((4,))
    body = layers.Dense(3, name="body")(inputs)
    one, two = (layers.Dense(1, name=name)(body) for name in ("one", "two"))
    return keras.Model(inputs, {"one": one, "two": two} if named else [one, two])


ONE, TWO, NEITHER = {"one"}, {"two"}, set()
LOSSES = {  # and which heads are without a gradient then
    "list": (["mse", None], [Y, Y], TWO),
    "list, labels None": ([None, keras.losses.MeanSquaredError()], [None, Y], ONE),
    "list of functions": ([None, lambda y, p: (y - p) ** 2], [Y, Y], ONE),
    "tuple": (("mse", None), (Y, Y), TWO),
    "one for all": ("mse", [Y, Y], NEITHER),
    "dict": ({"one": "mse", "two": None}, {"one": Y, "two": Y}, TWO),
    "dict, one key": ({"two": keras.losses.Huber()}, {"two": Y}, ONE),
}


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
@pytest.mark.parametrize("subclass", [False, True])
@pytest.mark.parametrize("case", LOSSES)
def test_an_output_without_a_loss(case, subclass):
    """Checks that a head without a loss does not change, as in `fit` itself."""
    loss, y, without = LOSSES[case]
    model = two_outputs("dict" in case, subclass)
    wanted = {f"{head}/{part}": "no gradient" for head in without for part in ("kernel", "bias")}
    assert ends(unused(model, X, y, loss)) == wanted
    model.compile("sgd", loss, run_eagerly=True)
    before = {head: model.get_layer(head).kernel.numpy() for head in ("one", "two")}
    try:
        model.train_on_batch(X, y)
    except (ValueError, KeyError, AttributeError):  # this release of Keras does not accept it
        return
    for head, kernel in before.items():
        stays = np.array_equal(kernel, model.get_layer(head).kernel.numpy())
        assert stays == (head in without)
    assert ends(unused(model, X, y)) == wanted


def test_nothing_is_changed():
    model = keras.Sequential(
        [layers.Input((4,)), layers.BatchNormalization(), layers.Dropout(0.5), layers.Dense(1)]
    )
    model.compile("adam", "mse")
    before = [v.numpy() for v in model.variables]
    assert unused(model, X, Y) == {}
    for variable, value in zip(model.variables, before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)


def test_errors():
    with pytest.raises(ValueError, match="is not built"):
        unused(keras.Sequential([layers.Dense(1)]), X)
    model = keras.Sequential([layers.Input((4,)), layers.Dense(1)])
    with pytest.raises(ValueError, match="has no loss: compile it with a loss"):
        unused(model, X, Y)


def test_the_loss_weights_of_compile():
    inputs = layers.Input((4,))
    outputs = {"p": layers.Dense(1, name="p")(inputs), "q": layers.Dense(1, name="q")(inputs)}
    model = keras.Model(inputs, outputs)
    model.compile("sgd", {"p": "mse", "q": "mse"}, loss_weights={"p": 1.0, "q": 0.0})
    zeros = {"q/kernel": "a gradient of zeros", "q/bias": "a gradient of zeros"}
    assert ends(unused(model, X, {"p": Y, "q": Y})) == zeros
    assert ends(unused(model, X, {"p": Y, "q": Y}, {"p": "mse", "q": "mse"})) == {}


class WithOwnLoss(keras.Model):
    """A model whose loss uses an output that `compile` gives no loss."""

    def __init__(self):
        super().__init__()
        self.first = keras.layers.Dense(2, name="first")
        self.second = keras.layers.Dense(2, name="second")
        self.third = keras.layers.Dense(2, name="third")

    def call(self, x):
        return self.first(x), self.second(x), self.third(x)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, **kwargs):
        return tf.reduce_mean((y_pred[0] - y) ** 2) + tf.reduce_mean((y_pred[1] - 1.0) ** 2)


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
@pytest.mark.parametrize("loss", [None, ["mse", None, "mse"]])
def test_a_loss_of_the_models_own(loss):
    """Checks the weights against those that Keras's `fit` changes."""
    x, y = np.ones((4, 3), "float32"), np.zeros((4, 2), "float32")
    model = WithOwnLoss()
    model(x)
    model.compile("sgd", loss)
    before = model.get_weights()
    found = unused(model, x, y)
    model.fit(x, y, verbose=0)
    after = zip(before, model.get_weights(), strict=True)
    changed = [bool((one != other).any()) for one, other in after]
    assert changed == [True, True, True, True, False, False]
    assert [path.split("/")[-2] for path in found] == ["third", "third"]


class WithOtherOutputs(Sided):
    """A model that also returns complex numbers, texts and nothing."""

    def call(self, inputs):
        outputs = super().call(inputs)
        waves = tf.complex(tf.zeros_like(outputs), self.side(inputs)[:, :1])
        return {"numbers": outputs, "waves": waves, "texts": tf.constant(["a"]), "nothing": None}


def test_outputs_that_are_no_real_numbers():
    model = WithOtherOutputs()
    model(X)
    zeros = "a gradient of zeros"
    assert ends(unused(model, X)) == {"dead/kernel": zeros, "dead/bias": zeros}
