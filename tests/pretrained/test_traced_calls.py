"""Order of flattened images in subclassed models and custom layers, which a trace shows.

The expected outputs are PyTorch's formulas in NumPy, with the channels on the first axis.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from flattened_images import Chain, saved
from replicas import two_replicas
from stack_marks import IS_KERAS_2, needs_keras3
from traced_images import ROWS, C, F, G, Model, X, check, conv, flat, head, image, point

from tfwd.pretrained import Key, PlanError, load, plan

RNG = np.random.default_rng(1)
layers = keras.layers


class Compiled(Model):
    """A model whose `call` is a `tf.function`."""

    @tf.function(autograph=False)
    def call(self, x):
        return self.function(self, x)


class Named(Model):
    """A model with two arguments."""

    def call(self, x, other):
        return self.function(self, x, other)


class Shared(layers.Layer):
    """A custom layer that makes a `Flatten` layer in each call."""

    def __init__(self, *parts):
        super().__init__()
        self.parts = list(parts)

    def call(self, x):
        for part in self.parts:
            x = part(x)
        return self.parts[-1](x) if x.shape.rank > 9 else layers.Flatten()(x)


@pytest.mark.parametrize("kind", [Model, Compiled])
@pytest.mark.parametrize("size", [-1, 120])
def test_a_function_that_flattens(kind, size, tmp_path):
    def call(m, x):
        y = m.c(x)
        return m.f(tf.reshape(y, (-1, 120) if size == 120 else (tf.shape(y)[0], size)))

    model = kind(call, c=conv(), f=head())
    model.c.build((None, 4, 6, 3))  # Keras 3 does not build layers in a tf.function
    model.f.build((None, 120))
    check(model, flat(image()) @ F["f.weight"].T, tmp_path, C, F)


def test_features_that_are_joined(tmp_path):
    weight = {"f.weight": RNG.normal(size=(4, 122))}
    other = {"d.weight": RNG.normal(size=(2, 3))}
    model = Model(
        lambda m, x: m.f(tf.concat([layers.Flatten()(m.c(x)), m.d(x[:, 0, 0])], -1)),
        c=conv(),
        d=head(2, "d"),
        f=head(),
    )
    rows = np.concatenate([flat(image()), X[:, 0, 0] @ other["d.weight"].T], -1)
    check(model, rows @ weight["f.weight"].T, tmp_path, C, other, weight)


@pytest.mark.parametrize("is_layer", [True, False])
def test_features_that_become_an_image(is_layer, tmp_path):
    reshape = layers.Reshape((4, 6, -1))

    def call(m, x):
        made = m.g(x)
        return m.c(reshape(made) if is_layer else tf.reshape(made, (-1, 4, 6, 3)))

    model = Model(call, g=head(72, "g"), c=conv())
    expected = point((ROWS @ G["g.weight"].T).reshape(2, 3, 4, 6))
    check(model, np.moveaxis(expected, 1, -1), tmp_path, C, G, x=ROWS)


@needs_keras3("shape of a model that was built by hand")
def test_a_model_that_was_built_but_not_called(tmp_path):
    class Built(Model):
        def build(self, shape):
            self.c.build(shape)
            self.f.build((None, 120))
            self.built = True

    model = Built(lambda m, x: m.f(tf.reshape(m.c(x), (-1, 120))), c=conv(), f=head())
    model.build((None, 4, 6, 3))
    load(model, saved(tmp_path, C, F), mapping={"c": "c", "f": "f"})
    expected = flat(image()) @ F["f.weight"].T
    np.testing.assert_allclose(model(X), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("in_one", [True, False])
def test_frames_that_become_examples(in_one, tmp_path):
    frames = RNG.normal(size=(2, 3, 4, 6, 3)).astype("float32")

    def call(m, x):
        y = m.c(tf.reshape(x, (-1, 4, 6, 3)))
        if in_one:  # flattens each frame, and makes a sequence of the frames
            return m.r(m.f(tf.reshape(y, (-1, 3, 120))))
        return m.r(tf.reshape(m.f(tf.reshape(y, (-1, 120))), (-1, 3, 4)))

    recurrent = {"r.weight_ih_l0": RNG.normal(size=(2, 4)), "r.weight_hh_l0": np.zeros((2, 2))}
    r = layers.SimpleRNN(2, name="r", use_bias=False)
    model = Model(call, c=conv(), f=head(), r=r)
    rows = flat(image(frames.reshape(6, 4, 6, 3))) @ F["f.weight"].T
    last = np.tanh(rows.reshape(2, 3, 4)[:, -1] @ recurrent["r.weight_ih_l0"].T)
    model(frames)
    mapping = {"c": "c", "f": "f"}
    mapping |= {"(.*/)?r/(.*/)?kernel": "r.weight_ih_l0"}
    mapping |= {"(.*/)?r/(.*/)?recurrent_kernel": "r.weight_hh_l0"}
    load(model, saved(tmp_path, C, F, recurrent), mapping=mapping)
    np.testing.assert_allclose(model(frames), last, rtol=1e-4, atol=1e-4)


def test_two_inputs(tmp_path):
    weight = {"f.weight": RNG.normal(size=(4, 127))}
    expected = np.concatenate([flat(image()), ROWS], -1) @ weight["f.weight"].T

    def joined(m, x, other):
        return m.f(tf.concat([tf.reshape(m.c(x), (-1, 120)), other], -1))

    def of_dict(m, x):
        return joined(m, x["image"], x["b"])

    x = {"image": X, "b": ROWS}
    if IS_KERAS_2:  # Keras 3 stores only the shape of the first argument
        check(Named(joined, c=conv(), f=head()), expected, tmp_path, C, weight, x=(X, ROWS))
    check(Model(of_dict, c=conv(), f=head()), expected, tmp_path, C, weight, x=(x,))


@pytest.mark.parametrize("is_functional", [True, False])
def test_layers_in_layers(is_functional, tmp_path):
    block = Shared(Chain(conv(), layers.ReLU()), Chain(layers.Dropout(0.5)))
    model = Model(lambda m, x: m.f(m.b(x)), b=block, f=head())
    if is_functional:
        inputs = keras.Input((4, 6, 3))
        model = keras.Model(inputs, head()(block(inputs)))
    check(model, flat(np.maximum(image(), 0)) @ F["f.weight"].T, tmp_path, C, F)


def test_as_many_features_as_channels(tmp_path):
    """Checks a flattened image that has as many entries as an earlier layer has channels."""
    e = {"e.weight": RNG.normal(size=(24, 3, 1, 1))}
    c = {"c.weight": RNG.normal(size=(1, 24, 1, 1))}
    d = {"d.weight": RNG.normal(size=(2, 24, 1, 1))}
    f = {"f.weight": RNG.normal(size=(4, 48))}
    one = {name: layers.Conv2D(n, 1, use_bias=False, name=name) for name, n in (("c", 1), ("d", 2))}
    e_layer = layers.Conv2D(24, 1, use_bias=False, name="e")

    def call(m, x):
        wide = m.e(x)
        return m.f(tf.reshape(m.d(wide), (-1, 48))) + m.f2(tf.reshape(m.c(wide), (-1, 24)))

    model = Model(call, e=e_layer, f=head(), f2=head(name="f2"), **one)
    f2 = {"f2.weight": RNG.normal(size=(4, 24))}
    wide = np.einsum("nhwi,oi->nohw", X, e["e.weight"][:, :, 0, 0])
    rows = [np.einsum("nihw,oi->nohw", wide, w[:, :, 0, 0]) for w in (d["d.weight"], c["c.weight"])]
    expected = flat(rows[0]) @ f["f.weight"].T + flat(rows[1]) @ f2["f2.weight"].T
    check(model, expected, tmp_path, e, c, d, f, f2)


def shuffled(m, x):
    image = tf.reshape(m.c(x), (-1, 4, 6, 2, 2))
    return m.f(tf.reshape(tf.transpose(image, (0, 1, 2, 4, 3)), (-1, 96)))


def by_time(m, x):
    return m.f(tf.reshape(tf.transpose(m.c(x), (1, 0, 2, 3)), (4, -1)))


def in_a_loop(m, x):
    y = m.c(x)
    _, rows = tf.while_loop(lambda i, _: i < 2, lambda i, y: (i + 1, tf.reverse(y, [3])), (0, y))
    return m.f(tf.reshape(rows, (-1, 96)))


def beside_an_image(m, x):
    return tf.reshape(m.c(x), (-1, 96)) * m.f(x[:, 0, 0])


def an_image_without_convolution(m, x):
    return tf.reshape(m.f(x), (-1, 4, 6, 4))


def multiplied(m, x):
    return tf.matmul(tf.reshape(m.c(x), (-1, 96)), m.f.kernel)


REFUSED = {
    "a channel shuffle": (shuffled, 4),
    "examples on another axis": (by_time, 4),
    "a loop": (in_a_loop, 4),
    "outputs that are multiplied with an image": (beside_an_image, 96),
    "outputs that become an image without a convolution": (an_image_without_convolution, 96),
    "a kernel that an operation uses": (multiplied, 4),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_trace_that_does_not_prove_the_order(name, tmp_path):
    function, units = REFUSED[name]
    if function is an_image_without_convolution:
        model = Model(function, f=head(units))
        model(ROWS)
    else:
        model = Model(function, c=conv(4), f=head(units))
        if function is multiplied:
            model.f.build((None, 96))
        model(X)
    weight = RNG.normal(size=tuple(model.f.kernel.shape)[::-1])
    saved(tmp_path, {"f.weight": weight})
    with pytest.raises(PlanError, match="f/kernel': .*PyTorch flattens channels first"):
        load(model, tmp_path, mapping={"f": "f"}, allow_missing=".*")


class Counting(layers.Layer):
    """A layer that adds a loss and counts its calls in a variable."""

    def build(self, shape):
        self.count = self.add_weight(shape=(), initializer="zeros", trainable=False, name="count")

    def call(self, x):
        self.count.assign(self.count + 1.0)
        self.add_loss(tf.reduce_mean(x))
        return x


def with_states():
    parts = {"n": layers.BatchNormalization(), "k": Counting(), "p": layers.Dropout(0.5, seed=3)}

    def call(m, x):
        return m.f(tf.reshape(m.p(m.k(m.n(m.c(x)))), (-1, 120)))

    model = Model(call, c=conv(), f=head(), **parts)
    model.compile("sgd", "mse")
    model.fit(X, np.zeros((2, 4)), verbose=0)
    return model


def test_a_trace_changes_nothing(tmp_path):
    """Checks a model that was loaded against a model that got the same weights by hand."""
    loaded, by_hand = with_states(), with_states()
    by_hand.set_weights(loaded.get_weights())
    load(loaded, saved(tmp_path, C, F), mapping={"c": "c", "f": "f"}, allow_missing=".*")
    rows = F["f.weight"].reshape(4, 5, 24).swapaxes(1, 2).reshape(4, 120)
    by_hand.c.set_weights([np.transpose(C["c.weight"], (2, 3, 1, 0)), C["c.bias"]])
    by_hand.f.set_weights([rows.T])
    for model in (loaded, by_hand):
        model.fit(X, np.zeros((2, 4)), verbose=0)
    assert len(loaded.losses) == len(by_hand.losses)
    for one, other in zip(loaded.get_weights(), by_hand.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
    assert not tf.config.functions_run_eagerly()


class WithFeatures(keras.Model):
    """A model whose first call may leave its head without weights."""

    def __init__(self):
        super().__init__()
        self.c, self.f, self.flatten = conv(), head(), layers.Flatten()

    def call(self, x, features=False):
        found = self.c(x)
        return found if features else self.f(self.flatten(found))


@pytest.mark.filterwarnings("ignore:.build.* was called on layer")  # by Keras 3
def test_a_layer_without_weights_is_built(tmp_path):
    model = WithFeatures()
    model(X, features=True)
    plan(model, saved(tmp_path, C, F), mapping={"c": "c", "f": "f"}).apply()
    expected = flat(image()) @ F["f.weight"].T
    np.testing.assert_allclose(model(X), expected, rtol=1e-4, atol=1e-4)


def test_a_model_on_two_replicas(tmp_path):
    with two_replicas().scope():
        model = Model(lambda m, x: m.f(tf.reshape(m.c(x), (-1, 120))), c=conv(), f=head())
        model(X)
    check(model, flat(image()) @ F["f.weight"].T, tmp_path, C, F)


class Clip(keras.Model):
    """A model with a head for features, or for an image that is optional."""

    def __init__(self):
        super().__init__()
        self.g, self.c, self.f = head(120, "g"), conv(), head()

    def call(self, rows, image=None):
        features = self.g(rows)
        if image is not None:
            features = features + tf.reshape(self.c(image), (-1, 120))
        return self.f(features)


@pytest.mark.parametrize("is_first", [True, False])
def test_a_convolution_that_one_call_does_not_reach(is_first, tmp_path):
    model = Clip()
    model.c.build((None, 4, 6, 3))
    if is_first:
        model(ROWS, image=tf.constant(X))
    else:
        model(ROWS)
    saved(tmp_path, F)
    message = "f/kernel': .*PyTorch flattens channels first"
    if is_first and IS_KERAS_2:  # which stores all arguments, and shows the sum
        saved(tmp_path, {"g.weight": RNG.normal(size=(120, 7))})
        message = "g/kernel': .* combines the outputs with flattened features"
    with pytest.raises(PlanError, match=message):
        load(model, tmp_path, mapping={"f": "f", "g": "g"}, allow_missing=".*")


class Tied(layers.Dense):
    """A `Dense` layer with the kernel of another one."""

    def __init__(self, first, **kwargs):
        super().__init__(4, use_bias=False, **kwargs)
        self.first = first

    def build(self, shape):
        setattr(self, "kernel" if IS_KERAS_2 else "_kernel", self.first.kernel)
        self.bias = None
        self.built = True


@pytest.mark.parametrize("is_functional", [True, False])
def test_a_kernel_of_two_layers(is_functional, tmp_path):
    """Checks a kernel that one layer needs for a flattened image, and another for features."""
    one = head(4, "f")
    one.build((None, 120))
    other = Tied(one, name="other")
    if is_functional:
        inputs, rows = keras.Input((4, 6, 3)), keras.Input((120,))
        model = keras.Model([inputs, rows], [other(rows), one(layers.Flatten()(conv()(inputs)))])
    else:
        model = Model(lambda m, x: m.o(x[1]) + m.f(tf.reshape(m.c(x[0]), (-1, 120))))
        model.c, model.o, model.f = conv(), other, one
        model([X, np.ones((2, 120), "float32")])
    saved(tmp_path, F)
    with pytest.raises(PlanError, match="several layers use it on features in several orders"):
        load(model, tmp_path, mapping={"(other|f)/.*": "f.weight"}, allow_missing=".*")


def test_a_kernel_of_spectral_normalization(tmp_path):
    dense = layers.SpectralNormalization(layers.Dense(4, use_bias=False), name="f")
    model = keras.Sequential([keras.Input((4, 6, 3)), conv(), layers.Flatten(), dense])
    (kernel,) = (weight for weight in dense.weights if tuple(weight.shape) == (120, 4))
    saved(tmp_path, C, F)
    mapping = {"c": "c", "f/.*kernel": "f.weight"}
    load(model, tmp_path, mapping=mapping, allow_missing=".*")
    rows = F["f.weight"].reshape(4, 5, 24).swapaxes(1, 2).reshape(4, 120)
    np.testing.assert_allclose(np.asarray(kernel), rows.T, rtol=1e-6)


def test_the_mapping_says_that_outputs_have_pytorchs_order(tmp_path):
    reshape = layers.Reshape((4, 6, 3))
    model = keras.Sequential([keras.Input((7,)), head(72, "g"), reshape, conv()])
    saved(tmp_path, C, G)
    load(model, tmp_path, mapping={"c": "c", "g": Key("g", unflattened=())})
    made = np.moveaxis((ROWS @ G["g.weight"].T).reshape(2, 4, 6, 3), -1, 1)
    expected = np.moveaxis(point(made), 1, -1)
    np.testing.assert_allclose(model(ROWS), expected, rtol=1e-4, atol=1e-4)


class Remembers(keras.Model):
    """A model that keeps tensors of its last call in attributes."""

    def __init__(self):
        super().__init__()
        self.f = layers.Dense(4, use_bias=False, name="f")
        self.state, self.seen = None, []

    def build(self, shape):
        self.f.build(shape)
        self.built = True

    def call(self, x):
        before = tf.zeros_like(x) if self.state is None else self.state
        self.state = self.f(x + before)
        self.seen.append(self.state)
        self.last = self.state
        return self.state


def test_attributes_that_a_call_sets(tmp_path):
    """Checks that the trace leaves no symbolic tensor behind: the next call works."""
    model, x = Remembers(), RNG.normal(size=(2, 4)).astype("float32")
    weight = RNG.normal(size=(4, 4))
    model(x)
    model.state = None
    del model.last
    load(model, saved(tmp_path, {"f.weight": weight}), mapping={"f": "f"})
    assert not hasattr(model, "last")
    assert len(model.seen) == 1
    np.testing.assert_allclose(model(x), x @ weight.T, rtol=1e-4, atol=1e-4)
