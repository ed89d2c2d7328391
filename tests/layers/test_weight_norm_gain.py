"""`WeightNorm(gain=True)`: a trainable gain, and folding it into the weight."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from stack_marks import IS_KERAS_2, quick_rows

import tfwd
from tfwd import _keras, layers
from tfwd import parametrizations as P

K = keras.layers
NORM = P.WeightNorm(gain=True)
X = tf.constant(np.sin(1.0 + np.arange(30.0)).reshape(6, 5), tf.float32)


def dense(units: int = 3, **options) -> keras.Layer:
    """Returns a built layer with a kernel and a bias that are no zeros."""
    layer = K.Dense(units, bias_initializer="ones", **options)
    layer(X)
    return layer


def normalized(kernel: np.ndarray, gain: np.ndarray) -> np.ndarray:
    return gain * kernel / np.sqrt(np.sum(kernel**2, axis=0))


def arrays(layer: keras.Layer) -> list[np.ndarray]:
    return [np.asarray(tf.convert_to_tensor(v)) for v in layer.weights]


def trained(optimizer: str = "sgd") -> keras.Model:
    """Returns a model with gains in two layers, after two steps."""
    plain = keras.Sequential([keras.Input((5,)), K.Dense(4, "relu"), K.Dense(1)])
    chain = P.Chain([NORM, P.Dropout(0.4)])
    model = tfwd.parametrize(plain, {"kernel": chain}, seed=1)
    model.compile(optimizer, "mse")
    model.fit(X, tf.ones([6, 1]), batch_size=3, verbose=0)
    return model


def test_the_gain_is_a_weight_that_changes_nothing_at_first() -> None:
    inner = dense()
    layer = layers.Parametrized(inner, {"kernel": NORM})
    assert [tuple(w.shape) for w in layer.weights] == [(5, 3), (3,), (3,)]
    assert layer.weights[:2] == inner.weights and len(layer.trainable_weights) == 3
    assert _keras.variables.name(layer.weights[2]) == "kernel_gain"
    for training in (False, True):
        np.testing.assert_allclose(layer(X, training=training), inner(X), rtol=1e-6, atol=1e-6)
    kernel, bias, gain = arrays(layer)
    np.testing.assert_allclose(gain, np.sqrt((kernel**2).sum(0)), rtol=1e-6)
    layer.weights[2].assign([2.0, -1.0, 0.0])
    expected = X @ normalized(kernel, np.array([2.0, -1.0, 0.0], "float32")) + bias
    np.testing.assert_allclose(layer(X), expected, rtol=1e-5, atol=1e-6)
    assert len(layers.Parametrized(dense(), {"kernel": P.WeightNorm()}).weights) == 2


@pytest.mark.parametrize("axis", [0, -1])
def test_another_axis_and_mixed_precision(axis: int) -> None:
    inner = dense(dtype="mixed_float16")
    layer = layers.Parametrized(inner, {"kernel": P.WeightNorm(axis, gain=True)})
    assert tuple(layer.weights[2].shape) == ((5,) if axis == 0 else (3,))
    assert layer.weights[2].dtype == "float32"
    found, expected = (tf.cast(call(X), tf.float32) for call in (layer, inner))
    np.testing.assert_allclose(found, expected, rtol=0.02, atol=0.02)


def _by_formula(kernel: np.ndarray, gain: np.ndarray, g: np.ndarray) -> tuple:
    """Returns the gradients of kernel and gain as in equation 3 of Salimans and Kingma."""
    norm = np.sqrt((kernel**2).sum(0))
    of_gain = (g * kernel).sum(0) / norm
    return gain / norm * g - gain * of_gain / norm**2 * kernel, of_gain


@quick_rows(
    "small-inside-xla",
    "large-around-graph",
    "small-chain-eager",
    "large-alone-eager",
    "small-alone-graph",
    "large-chain-graph",
)
@pytest.mark.parametrize("run", ["eager", "graph", "xla"])
@pytest.mark.parametrize("form", ["alone", "chain", "inside", "around"])
def test_gradients_equal_the_papers_formula(form: str, run: str, size: str) -> None:
    inner, drop = dense(), P.Dropout(0.4)
    if form == "alone":
        layer = layers.Parametrized(inner, {"kernel": NORM}, seed=1)
    elif form == "chain":
        layer = layers.Parametrized(inner, {"kernel": P.Chain([NORM, drop])}, seed=1)
    elif form == "inside":
        normed = layers.Parametrized(inner, {"kernel": NORM})
        layer = layers.Parametrized(normed, {"kernel": drop}, seed=1)
    else:
        dropped = layers.Parametrized(inner, {"kernel": drop}, seed=1)
        layer = layers.Parametrized(dropped, {"kernel": NORM})
    layer(X)
    kernel, bias, gain = layer.weights
    gain.assign([2.0, -1.0, 0.5])
    sources = [_keras.variables.tf_variable(v) for v in (kernel, gain)]

    def step(x: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            y = layer(x, training=True)
            loss = tf.reduce_sum(y**2)
        return [y, *tape.gradient(loss, sources)]

    function = {"eager": step, "graph": tf.function(step)}.get(run)
    y, of_kernel, of_gain = (function or tf.function(step, jit_compile=True))(X)
    raw, used = np.asarray(kernel, "float64"), np.asarray(gain, "float64")
    effective = layer.effective_weights(0)["kernel"].numpy()
    np.testing.assert_allclose(y, X @ effective + bias, rtol=1e-5, atol=1e-5)
    upstream = X.numpy().T @ (2 * y.numpy())  # for the weight that the layer computes with
    if form == "around":  # the mask comes first: the norm is of the dropped kernel
        mask = (effective != 0) / (1 - drop.rate)
        expected = _by_formula(raw * mask, used, upstream)
        expected = expected[0] * mask, expected[1]
    else:
        mask = effective / normalized(raw, used)
        expected = _by_formula(raw, used, upstream * mask)
    np.testing.assert_allclose(of_kernel, expected[0], rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(of_gain, expected[1], rtol=1e-3, atol=1e-4)


def test_training_equals_training_by_hand() -> None:
    layer = layers.Parametrized(dense(1, use_bias=False), {"kernel": NORM})
    kernel, gain = (a.astype("float64") for a in arrays(layer))
    model = keras.Sequential([keras.Input((5,)), layer])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    model.fit(X, tf.ones([6, 1]), batch_size=6, epochs=3, verbose=0)
    x = X.numpy().astype("float64")
    for _ in range(3):
        residual = x @ normalized(kernel, gain) - 1
        steps = _by_formula(kernel, gain, x.T @ (2 * residual / 6))
        kernel, gain = kernel - 0.1 * steps[0], gain - 0.1 * steps[1]
    for found, expected in zip(arrays(layer), (kernel, gain), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4)


@quick_rows("keras", "checkpoint")
@pytest.mark.parametrize("way", ["keras", "weights", "checkpoint"])
def test_gains_are_saved(way: str, tmp_path) -> None:
    model = trained("adam")
    if way == "keras":
        model.save(tmp_path / "model.keras")
        again = keras.models.load_model(tmp_path / "model.keras")
    else:
        again = keras.models.clone_model(model)
        assert not np.array_equal(arrays(again)[2], arrays(model)[2])
    if way == "weights":
        model.save_weights(tmp_path / "model.weights.h5")
        again.load_weights(tmp_path / "model.weights.h5")
    if way == "checkpoint":
        path = tf.train.Checkpoint(model=model).save(str(tmp_path / "model"))
        tf.train.Checkpoint(model=again).restore(path).assert_existing_objects_matched()
    for found, expected in zip(arrays(again), arrays(model), strict=True):
        np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(again(X), model(X))


@pytest.mark.skipif(IS_KERAS_2, reason="Keras 2 compares the number of weights itself")
def test_a_file_without_gains_is_an_error(tmp_path) -> None:
    def model(gain: bool) -> keras.Model:
        norm = {"kernel": P.WeightNorm(gain=gain)}
        return keras.Sequential([keras.Input((5,)), layers.Parametrized(K.Dense(3), norm)])

    model(False).save_weights(tmp_path / "model.weights.h5")
    with pytest.raises(ValueError, match="does not have the weights kernel_gain"):
        model(True).load_weights(tmp_path / "model.weights.h5")


def test_fold_returns_a_plain_copy() -> None:
    model = trained()
    with pytest.raises(ValueError, match="in evaluation.* tfwd.unwrap\\(model, fold=True\\)"):
        tfwd.unwrap(model)
    before, outputs = arrays(model), model(X).numpy()
    plain = tfwd.unwrap(model, fold=True)
    assert [type(layer) for layer in plain.layers] == [K.Dense, K.Dense]
    assert [layer.name for layer in plain.layers] == [layer.layer.name for layer in model.layers]
    np.testing.assert_allclose(plain(X), outputs, rtol=1e-6, atol=1e-6)
    kernel, bias, gain = before[:3]
    np.testing.assert_allclose(arrays(plain)[0], normalized(kernel, gain), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(arrays(plain)[1], bias)
    for weight in plain.weights:  # the copy is not the model's
        weight.assign(tf.zeros(weight.shape))
    for found, expected in zip(arrays(model), before, strict=True):
        np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(model(X), outputs)


def test_fold_copies_only_the_layers_that_need_it() -> None:
    shared = K.Dense(5, "tanh")
    inputs = keras.Input((5,))
    norm = layers.Parametrized(shared, {"kernel": NORM})
    noisy = layers.VariationalNoise(K.Dense(2), 0.1)
    model = keras.Model(inputs, noisy(norm(norm(shared(inputs)))))
    norm.weights[2].assign(2 * tf.ones([5]))
    plain = tfwd.unwrap(model, fold=True)
    np.testing.assert_allclose(plain(X), model(X), rtol=1e-5, atol=1e-6)
    found = {id(weight) for weight in plain.weights}
    assert {id(w) for w in (*shared.weights, *noisy.weights)} < found  # used bare, and not folded
    assert len(plain.weights) == 6  # the copy is one layer for both calls


@pytest.mark.parametrize("nested", [True, False])
def test_fold_with_another_wrapper(nested: bool) -> None:
    inner = dense()
    if nested:
        noisy = layers.VariationalNoise(inner, 0.1)
        layer = layers.Parametrized(noisy, {"kernel": NORM})
    else:
        layer = layers.VariationalNoise(layers.Parametrized(inner, {"kernel": NORM}), 0.1)
    layer(X)
    layer.weights[2].assign([2.0, -1.0, 0.5])
    plain = tfwd.unwrap(layer, fold=True)
    assert type(plain) is K.Dense and plain is not inner
    np.testing.assert_allclose(plain(X), layer(X), rtol=1e-5, atol=1e-6)


@keras.saving.register_keras_serializable("test_weight_norm_gain")
class Subclassed(keras.Model):
    """A model with a wrapper among its attributes, and another in a list."""

    def __init__(self, wrap: bool = True, **kwargs) -> None:
        super().__init__(**kwargs)
        self.wrap = wrap
        self.hidden, last = K.Dense(5, "tanh", name="hidden"), K.Dense(2, name="last")
        if wrap:
            last = layers.Parametrized(last, {"kernel": NORM})
        self.outs = [K.Dense(5, name="first"), last]

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        x = self.hidden(inputs)
        for layer in self.outs:
            x = layer(x)
        return x

    def get_config(self) -> dict:
        return {**super().get_config(), "wrap": self.wrap}


def test_fold_inside_a_subclassed_model() -> None:
    model = Subclassed()
    model(X)
    model.outs[1].weights[2].assign([2.0, -1.0])
    plain = tfwd.unwrap(model, fold=True)
    assert type(plain) is Subclassed and type(plain.outs[1]) is K.Dense
    np.testing.assert_allclose(plain(X), model(X), rtol=1e-5, atol=1e-6)
    assert plain.hidden is model.hidden and len(plain.weights) == 6


def test_fold_of_a_wrapped_subclassed_model() -> None:
    inner = Subclassed(wrap=False)
    inner(X)
    model = tfwd.parametrize(inner, {"last/kernel": NORM})
    model(X)
    model.weights[6].assign([2.0, -1.0])
    plain = tfwd.unwrap(model, fold=True)
    assert type(plain) is Subclassed and len(plain.weights) == 6
    np.testing.assert_allclose(plain(X), model(X), rtol=1e-5, atol=1e-6)
    assert not {id(w) for w in plain.weights} & {id(w) for w in inner.weights}


def test_what_cannot_be_folded_is_an_error() -> None:
    unbuilt = layers.Parametrized(K.Dense(3), {"kernel": NORM})
    with pytest.raises(ValueError, match="has no weights to fold yet"):
        tfwd.unwrap(unbuilt, fold=True)
    twice = layers.Parametrized(
        layers.Parametrized(dense(), {"kernel": NORM}), {"kernel": P.WeightNorm(0)}
    )
    twice(X)
    with pytest.raises(ValueError, match="'kernel' .* cannot be folded.* use one wrapper"):
        tfwd.unwrap(twice, fold=True)

    class Unknown(K.Dense):
        def __init__(self, size: int) -> None:
            super().__init__(size)

    layer = Unknown(3)
    layer(X)
    with pytest.raises(ValueError, match="type Unknown cannot be copied .* get_config"):
        tfwd.unwrap(layers.Parametrized(layer, {"kernel": NORM}), fold=True)


def test_a_gain_follows_weights_that_are_loaded(tmp_path) -> None:
    model = keras.Sequential([keras.Input((5,)), layers.Parametrized(K.Dense(3), {"kernel": NORM})])
    kernel = np.cos(np.arange(15.0)).reshape(5, 3).astype("float32")
    inner = model.layers[0].layer
    np.savez(tmp_path / "weights.npz", kernel=kernel, bias=np.ones(3, "float32"))
    tfwd.pretrained.load(inner, tmp_path / "weights.npz")
    np.testing.assert_allclose(model(X), X @ kernel + 1, rtol=1e-5, atol=1e-6)
    inner.set_weights([2 * kernel, np.zeros(3)])
    np.testing.assert_allclose(model(X), X @ kernel, rtol=1e-5, atol=1e-6)  # the old length
    tfwd.reset_references(model)
    np.testing.assert_allclose(model(X), 2 * X @ kernel, rtol=1e-5, atol=1e-6)
    weights = arrays(model)
    model.layers[0].set_weights([kernel, np.zeros(3), 3 * weights[2]])
    np.testing.assert_array_equal(arrays(model)[2], 3 * weights[2])


def test_gains_of_weights_that_the_first_call_creates() -> None:
    class Late(K.Layer):
        """A layer of layers that its first call builds."""

        def __init__(self) -> None:
            super().__init__()
            self.hidden, self.out = K.Dense(4, "relu"), K.Dense(1)

        def call(self, inputs: tf.Tensor) -> tf.Tensor:
            return self.out(self.hidden(inputs))

    layer = layers.Parametrized(Late(), {"kernel": NORM})
    first = tf.function(lambda x: layer(x, training=True))(X)
    np.testing.assert_allclose(first, layer.layer(X), rtol=1e-5, atol=1e-6)
    assert [tuple(w.shape) for w in layer.weights] == [(5, 4), (4,), (4, 1), (1,), (4,), (1,)]


@keras.saving.register_keras_serializable("test_weight_norm_gain")
class Scaled(P.Parametrization):
    """A custom parametrization with a trainable scale."""

    stochastic = False
    has_reference = trains_reference = True

    def __init__(self) -> None:
        self._scale: tf.Tensor | None = None

    def first_reference(self, weight: tf.Tensor) -> tf.Tensor:
        return tf.ones([], weight.dtype)

    def towards_tensor(self, reference: tf.Tensor) -> "Scaled":
        copy = Scaled()
        copy._scale = reference
        return copy

    def __call__(self, weight: tf.Tensor, seed: tf.Tensor | None = None) -> tf.Tensor:
        return weight * self._scale


def test_a_custom_parametrization_with_a_trainable_weight(tmp_path) -> None:
    layer = layers.Parametrized(K.Dense(3, use_bias=False), {"kernel": P.Chain([Scaled(), NORM])})
    model = keras.Sequential([keras.Input((5,)), layer])
    assert [tuple(w.shape) for w in model.weights] == [(5, 3), (), (3,)]
    model.weights[1].assign(-2.0)
    kernel, _, gain = arrays(model)
    np.testing.assert_allclose(model(X), X @ normalized(-2 * kernel, gain), rtol=1e-5, atol=1e-6)
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(again(X), model(X))


@quick_rows("True")
@pytest.mark.parametrize("training", [False, True])
def test_gradient_moments_of_gains(training: bool) -> None:
    model = trained()
    y = tf.ones([6, 1])
    calls = [layer.calls for layer in model.layers]
    found = tfwd.gradients.moments(model, X, y, "mse", training=training)
    sources = [_keras.variables.tf_variable(v) for v in model.trainable_variables]
    each = []
    for example in range(6):
        for layer, count in zip(model.layers, calls, strict=True):
            layer.draws.state.assign([int(layer.draws.state[0]), count])
        with tf.GradientTape() as tape:
            error = model(X[example : example + 1], training=training) - 1.0
            loss = tf.reduce_sum(error**2)
        each.append(tape.gradient(loss, sources))
    for index, mean in enumerate(found.mean):
        rows = np.stack([one[index] for one in each])
        np.testing.assert_allclose(mean, rows.mean(0), rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(
            found.mean_square[index], (rows**2).mean(0), rtol=1e-4, atol=1e-6
        )
