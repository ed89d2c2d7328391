"""Kernels behind or before an image in an order that the model does not prove: always an error.

A custom `call` proves nothing if it cannot be traced, as in this file.

For each model there are two PyTorch models with the same layers and other orders of the features.
A plan must therefore be refused. A mapping with the order is accepted.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from flattened_images import Calls, Chain, saved, sequential, touch

from tfwd.pretrained import Key, PlanError, load

RNG = np.random.default_rng(1)
layers = keras.layers


def conv(filters=5, **kwargs):
    return layers.Conv1D(filters, 1, name="c", **kwargs)


def conv2(filters=5):
    return layers.Conv2D(filters, 1, name="c")


def head(units=4):
    return layers.Dense(units, name="f", use_bias=False)


class Subclassed(keras.Model):
    """A model without a graph, that calls a function with its layers."""

    def __init__(self, function, *shape, built=True, **parts):
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)
        if built:
            self(tf.zeros((2, *shape)))

    def call(self, x):
        touch(x)
        return self.function(self, x)


def model(shape, function):
    inputs = keras.Input(shape)
    return keras.Model(inputs, function(inputs))


def called_twice():
    inputs, features = keras.Input((8, 3)), keras.Input((40,))
    dense = head()
    on_image = dense(layers.Flatten()(conv()(inputs)))
    return keras.Model([inputs, features], [dense(features), on_image])


def recurrent_layer_called_twice():
    inputs, features = keras.Input((8, 3)), keras.Input((1, 40))
    rnn = layers.SimpleRNN(4, name="f", use_bias=False)
    steps = layers.Reshape((1, 40))(layers.Flatten()(conv()(inputs)))
    return keras.Model([inputs, features], [rnn(features), rnn(steps)])


def with_pooled_features_as_image(dims):
    pool = getattr(layers, f"GlobalAveragePooling{dims}D")()
    first = getattr(layers, f"Conv{dims}D")(24, 1, name="f", use_bias=False)
    last = getattr(layers, f"Conv{dims}D")(2, 1, name="c")
    middle = (4, 3)[: dims - 1]
    return sequential(
        *(keras.Input((*(4,) * dims, 3)), first, pool),
        *(layers.Reshape((24 // (2 * int(np.prod(middle))), *middle, 2)), last),
    )


def sum_of(first, second, shape=(8, 5)):
    def function(inputs):
        return head()(layers.Flatten()(layers.Add(name="s")([first(inputs), second(inputs)])))

    return model(shape, function)


def residual(layer):
    inputs = keras.Input((8, 3))
    image = conv()(inputs)
    return keras.Model(inputs, head()(layers.Flatten()(layers.Add()([image, layer(image)]))))


def lambda_layer(function, shape, name="r"):
    return layers.Lambda(function, output_shape=shape, name=name)


def attention_on(x):
    return layers.MultiHeadAttention(1, 5, name="a")(x, x)


def features_to_image(*between, shape=(8, 3)):
    return sequential(
        *(keras.Input((5,)), layers.Dense(24, name="f", use_bias=False), layers.Reshape(shape)),
        *(*between, conv() if len(shape) == 2 else conv2()),
    )


def flat(*between, shape=(8, 3), last=None):
    return sequential(
        *(keras.Input(shape), conv() if len(shape) == 2 else conv2(), layers.Flatten()),
        *(*between, last or head()),
    )


# Each model has a layer "f", the order of whose weights is not known.
MODELS = {
    "a layer called twice": called_twice,
    "a recurrent layer called twice": recurrent_layer_called_twice,
    "a convolution on flattened features": lambda: flat(
        layers.Reshape((1, 40)), last=layers.Conv1D(4, 1, name="f", use_bias=False)
    ),
    "an image of features": lambda: flat(
        layers.Reshape((1, 1, 40)), last=layers.Conv2D(4, 1, name="f", use_bias=False)
    ),
    "rows of an image": lambda: sequential(
        *(keras.Input((4, 6, 3)), conv2(), layers.Reshape((4, 30))),
        layers.Conv1D(4, 1, name="f", use_bias=False),
    ),
    "flattened rows": lambda: sequential(
        *(keras.Input((4, 6, 3)), conv2(), layers.TimeDistributed(layers.Flatten())),
        layers.Conv1D(4, 1, name="f", use_bias=False),
    ),
    "running sums": lambda: flat(lambda_layer(lambda x: tf.cumsum(x, -1), (40,))),
    "a rolled axis": lambda: flat(lambda_layer(lambda x: tf.roll(x, 1, -1), (40,))),
    "pooled features as a sequence": lambda: with_pooled_features_as_image(1),
    "pooled features as an image": lambda: with_pooled_features_as_image(2),
    "normalized inputs": lambda: sequential(
        keras.Input((8, 3)), layers.BatchNormalization(name="n"), layers.Flatten(), head()
    ),
    "merged positions of an input": lambda: sequential(
        keras.Input((4, 6, 3)), layers.Reshape((24, 3)), layers.Flatten(), head()
    ),
    "merged channels of an input": lambda: sequential(
        keras.Input((4, 6, 3)), layers.Reshape((4, 18)), layers.SimpleRNN(4, name="f")
    ),
    "a sum with a sequence": lambda: sum_of(
        conv(), lambda x: layers.SimpleRNN(5, return_sequences=True)(x)
    ),
    "a sum with attention": lambda: sum_of(conv(), attention_on),
    "a sum with a layer on the channels": lambda: residual(layers.Dense(5)),
    "attention on an image": lambda: model(
        (4, 6, 3),
        lambda x: head()(layers.Flatten()(attention_on(layers.Reshape((24, 5))(conv2()(x))))),
    ),
    "an added axis": lambda: sequential(
        *(keras.Input((8, 3)), conv(), layers.Reshape((8, 5, 1)), layers.Conv2D(2, 1)),
        *(layers.Flatten(), head()),
    ),
    "a custom layer on a sequence": lambda: sequential(
        *(keras.Input((8,)), layers.Embedding(9, 5), Chain(layers.Conv1D(5, 1))),
        *(layers.Flatten(), head()),
    ),
    "repeated outputs": lambda: features_to_image(
        lambda_layer(lambda x: tf.repeat(x, 2, 1), (16, 3))
    ),
    "a subclassed model that joins features": lambda: Subclassed(
        lambda m, x: m.f(m.j([m.flat(m.c(x)), m.d(x[:, 0])])),
        *(8, 3),
        c=conv(),
        flat=layers.Flatten(),
        j=layers.Concatenate(),
        d=layers.Dense(2),
        f=head(),
    ),
    "a subclassed model with a recurrent layer": lambda: Subclassed(
        lambda m, x: m.f(m.r(m.c(x))),
        *(4, 6, 3),
        c=conv2(),
        r=layers.Reshape((4, 30)),
        f=layers.SimpleRNN(4, name="f"),
    ),
    "a subclassed model that makes an image": lambda: Subclassed(
        lambda m, x: m.c(m.r(m.f(x))),
        *(5,),
        f=head(72),
        r=layers.Reshape((4, 6, -1)),
        c=conv2(),
    ),
    "a subclassed model that flattens twice": lambda: Subclassed(
        lambda m, x: m.f(m.flat(m.c(x))) + m.g(m.flat(m.c(x)[:, ::2])),
        *(8, 3),
        c=conv(),
        flat=layers.Flatten(),
        g=layers.Dense(4),
        f=head(),
    ),
    "a subclassed model that flattens twice in another order": lambda: Subclassed(
        lambda m, x: m.g(m.flat(m.c(x)[:, ::2])) + m.f(m.flat(m.c(x))),
        *(8, 3),
        c=conv(),
        flat=layers.Flatten(),
        g=layers.Dense(4),
        f=head(),
    ),
    "a subclassed model that flattens with a function": lambda: Subclassed(
        lambda m, x: m.f(tf.reshape(m.c(x), (-1, 40))), *(8, 3), c=conv(), f=head()
    ),
}


# Further models, which were found by comparison with PyTorch's modules.
MODELS |= {
    "pooling of a sequence": lambda: sequential(
        *(keras.Input((8,)), layers.Embedding(9, 5), layers.MaxPooling1D(2)),
        *(layers.Flatten(), head()),
    ),
    "padding of an input": lambda: sequential(
        keras.Input((8, 3)), layers.ZeroPadding1D(1), layers.Flatten(), head()
    ),
    "a layer on the channels of an image with one channel": lambda: sequential(
        keras.Input((8, 3)), conv(1), layers.Dense(5), layers.Flatten(), head()
    ),
    "a gate on a sequence": lambda: model(
        (8,),
        lambda ids: head()(
            layers.Flatten()(layers.Multiply()([(e := layers.Embedding(9, 5)(ids)), conv(1)(e)]))
        ),
    ),
    "a function that merges rows": lambda: sequential(
        *(keras.Input((4, 6, 3)), conv2()),
        *(
            lambda_layer(lambda x: tf.reshape(x, (-1, 4, 30)), (4, 30)),
            layers.SimpleRNN(4, name="f"),
        ),
    ),
    "patches of an input": lambda: sequential(
        keras.Input((4, 4, 3)),
        lambda_layer(lambda x: tf.nn.space_to_depth(x, 2), (2, 2, 12)),
        *(layers.Reshape((4, 12)), head()),
    ),
    "channels that become positions": lambda: sequential(
        *(keras.Input((2, 3, 3)), layers.Conv2D(8, 1, name="f", use_bias=False)),
        *(lambda_layer(lambda x: tf.nn.depth_to_space(x, 2), (4, 6, 2)), conv2()),
    ),
    "a function that makes an image": lambda: sequential(
        *(keras.Input((5,)), layers.Dense(72, name="f", use_bias=False)),
        lambda_layer(lambda x: tf.reshape(x, (-1, 4, 6, 3)), (4, 6, 3)),
    ),
    "a product with flattened features": lambda: keras.Model(
        [(a := keras.Input((4, 6, 3))), (b := keras.Input((7,)))],
        layers.Dot(1)([layers.Flatten()(conv2(2)(a)), head(48)(b)]),
    ),
    "outputs that are added to an image": lambda: keras.Model(
        [(a := keras.Input((8, 3))), (b := keras.Input((7,)))],
        layers.Add()([conv()(a), layers.Reshape((8, 5))(head(40)(b))]),
    ),
    "outputs that are joined with an image": lambda: keras.Model(
        [(a := keras.Input((8, 3))), (b := keras.Input((7,)))],
        layers.Concatenate()([conv()(a), layers.Reshape((8, 5))(head(40)(b))]),
    ),
    "outputs that become a pooled sequence": lambda: sequential(
        *(keras.Input((5,)), head(40), layers.Reshape((8, 5)), layers.GlobalAveragePooling1D()),
    ),
    "an image that is also a sequence": lambda: model(
        (8, 3),
        lambda x: layers.Add()(
            [
                head()(layers.Flatten()(image := conv()(x))),
                layers.SimpleRNN(4)(image),
            ]
        ),
    ),
    "an input that is also a sequence": lambda: model(
        (8, 3),
        lambda x: layers.Concatenate()(
            [
                head()(layers.Flatten()(layers.ReLU()(x))),
                layers.GlobalMaxPooling1D()(conv()(x)),
                layers.SimpleRNN(4)(x),
            ]
        ),
    ),
    "a subclassed model whose kernel is square": lambda: Subclassed(
        lambda m, x: m.f(tf.reshape(m.c(x), (-1, 40))), *(8, 3), c=conv(), f=head(40)
    ),
    "a subclassed model that makes an image with a function": lambda: Subclassed(
        lambda m, x: m.c(tf.reshape(m.f(x), (-1, 8, 9))), *(5,), f=head(72), c=conv()
    ),
    "a subclassed model on images without convolutions": lambda: Subclassed(
        lambda m, x: m.f(tf.reshape(x, (-1, 72))), *(4, 6, 3), f=head()
    ),
    "a model in a custom layer": lambda: model(
        (8, 3),
        lambda x: Chain(sequential(keras.Input((8, 3)), conv(), layers.Flatten()), head())(x),
    ),
}


def of_image_and_vector(function):
    """Returns a model that combines a flattened image with an input of as many features."""
    inputs, vector = keras.Input((4, 6, 3)), keras.Input((48,))
    image = layers.Conv2D(2, 1, name="f", use_bias=False)(inputs)
    return keras.Model([inputs, vector], function(layers.Flatten()(image), vector))


def joined(first, second):
    return layers.Concatenate()([first, second])


MODELS |= {
    "features that become an image before a layer on its channels": lambda: sequential(
        keras.Input((5,)), head(72), layers.Reshape((4, 6, 3)), layers.Dense(2)
    ),
    "slopes of rows": lambda: sequential(
        keras.Input((4, 4, 3)), conv2(4), layers.PReLU(shared_axes=[2, 3], name="f")
    ),
    "a product with an input": lambda: of_image_and_vector(lambda a, b: layers.Dot(1)([a, b])),
    "a gate of an input": lambda: of_image_and_vector(lambda a, b: layers.Multiply()([a, b])),
    "a product of features that are joined in two orders": lambda: of_image_and_vector(
        lambda a, b: layers.Dot(1)([joined(a, b), joined(b, a)])
    ),
}


class BuiltByHand(Subclassed):
    """A model with a `build` of its own, which is not called on tensors."""

    def build(self, shape):
        self.c.build(shape)
        self.f.build((None, 40))
        self.built = True


def built_by_hand():
    parts = {"c": conv(), "flat": layers.Flatten(), "f": head()}
    made = BuiltByHand(lambda m, x: m.f(m.flat(m.c(x))), built=False, **parts)
    made.build((None, 8, 3))
    return made


MODELS["a subclassed model that was not called"] = built_by_hand


def kernel_of(made):
    """Returns the first weight of the layer "f", and the key of PyTorch's tensor."""
    found = [layer for layer in made._flatten_layers() if layer.name == "f"]
    key = "f.weight_ih_l0" if isinstance(found[0], layers.RNN) else "f.weight"
    return found[0].weights[0], key


def in_torch(kernel):
    """Returns the shape of PyTorch's tensor: outputs, inputs, positions."""
    if kernel.shape[1:] == (1, 1):  # slopes of a PReLU
        return (kernel.shape[0],)
    *positions, inputs, outputs = kernel.shape
    return (outputs, inputs, *positions)


@pytest.mark.parametrize("name", MODELS)
def test_an_order_that_is_not_proven(name, tmp_path, monkeypatch):
    made = MODELS[name]()
    monkeypatch.setattr(Calls, "need_numbers", True)
    kernel, key = kernel_of(made)
    saved(tmp_path, {key: RNG.normal(size=in_torch(kernel))})
    mapping = {r"(.*/)?f/(.*/)?(kernel|alpha)": key}
    with pytest.raises(PlanError, match="PyTorch flattens channels first"):
        load(made, tmp_path, mapping=mapping, allow_missing=".*")


X = RNG.normal(size=(2, 8, 3))
CONV = {"c.weight": RNG.normal(size=(5, 3, 1)), "c.bias": RNG.normal(size=5)}
LINEAR = {"f.weight": RNG.normal(size=(4, 40))}


def convolved():
    """Returns PyTorch's Conv1d of width 1, [examples, channels, length]."""
    return np.einsum("nti,oi->not", X, CONV["c.weight"][:, :, 0]) + CONV["c.bias"][:, None]


def check(made, expected, x=X):
    got = made(tf.constant(x, "float32"), training=False)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)


def test_the_mapping_gives_the_order(tmp_path):
    made = MODELS["a subclassed model that flattens with a function"]()
    saved(tmp_path, CONV, LINEAR)
    load(made, tmp_path, mapping={"c": "c", "f": Key("f", flattened=(5, 8))})
    check(made, convolved().reshape(2, -1) @ LINEAR["f.weight"].T)


def test_features_that_become_the_same_image_again(tmp_path):
    point = {"p.weight": RNG.normal(size=(2, 5, 1)), "p.bias": RNG.normal(size=2)}
    made = sequential(
        *(keras.Input((8, 3)), conv(), layers.Flatten(), layers.ReLU(), layers.Reshape((8, 5))),
        layers.Conv1D(2, 1, name="p"),
    )
    load(made, saved(tmp_path, CONV, point), mapping={"c": "c", "p": "p"})
    image = np.maximum(convolved(), 0)
    image = np.einsum("nit,oi->not", image, point["p.weight"][:, :, 0]) + point["p.bias"][:, None]
    check(made, image.swapaxes(1, 2))


@pytest.mark.parametrize("shape", [(8, 1, 5), (1, 8, 5)])
def test_an_added_axis_of_positions(shape, tmp_path):
    """Checks a sequence that becomes an image of one row or column, which PyTorch unsqueezes."""
    point = {"p.weight": RNG.normal(size=(5, 5, 1, 1)), "p.bias": RNG.normal(size=5)}
    made = sequential(
        *(keras.Input((8, 3)), conv(), layers.Reshape(shape), layers.Conv2D(5, 1, name="p")),
        *(layers.Flatten(), head()),
    )
    load(made, saved(tmp_path, CONV, point, LINEAR), mapping={"c": "c", "p": "p", "f": "f"})
    image = np.einsum("nit,oi->not", convolved(), point["p.weight"][:, :, 0, 0])
    rows = (image + point["p.bias"][:, None]).reshape(2, -1)
    check(made, rows @ LINEAR["f.weight"].T)


def test_a_sum_with_the_input(tmp_path):
    """Checks a convolution beside its input, which therefore has the order of an image too."""
    square = {"c.weight": RNG.normal(size=(3, 3, 1, 1)), "c.bias": RNG.normal(size=3)}
    linear = {"f.weight": RNG.normal(size=(4, 24))}
    inputs = keras.Input((4, 2, 3))
    image = layers.Add()([inputs, conv2(3)(inputs)])
    made = keras.Model(inputs, head()(layers.Flatten()(image)))
    load(made, saved(tmp_path, square, linear), mapping={"c": "c", "f": "f"})
    x = RNG.normal(size=(2, 4, 2, 3))
    image = np.einsum("nhwi,oi->nohw", x, square["c.weight"][:, :, 0, 0])
    image = image + square["c.bias"][:, None, None] + np.moveaxis(x, -1, 1)
    check(made, image.reshape(2, -1) @ linear["f.weight"].T, x)


def test_a_subclassed_model_with_pooling(tmp_path):
    """Checks kernels on the channels of another layer, whose order is the same in PyTorch."""
    linear = {"d.weight": RNG.normal(size=(6, 5)), "f.weight": RNG.normal(size=(4, 6))}
    made = Subclassed(
        lambda m, x: m.f(m.d(m.pool(m.c(x)))),
        *(8, 3),
        c=conv(),
        pool=layers.GlobalMaxPooling1D(),
        d=layers.Dense(6, use_bias=False, name="d"),
        f=head(),
    )
    load(made, saved(tmp_path, CONV, linear), mapping={"c": "c", "d": "d", "f": "f"})
    check(made, convolved().max(2) @ linear["d.weight"].T @ linear["f.weight"].T)
