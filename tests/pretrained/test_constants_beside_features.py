"""Constants and tables beside the features of an image, and calls that cannot be traced.

PyTorch has the features in another order than the table, or may have. Each model is refused.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from flattened_images import saved
from stack_marks import needs_keras3
from traced_images import ROWS, C, Model, X, conv, head

from tfwd.pretrained import Key, PlanError, load

RNG = np.random.default_rng(1)
layers = keras.layers
SIZE = 120  # features of the flattened convolution


def flat(x):
    return tf.reshape(x, (-1, SIZE))


def table():
    return layers.Embedding(SIZE, 5, name="e")


def prototypes(m, x):
    """Distances to a table: the axis of its rows is new."""
    return tf.reduce_sum((flat(m.c(x))[:, None] - m.p(tf.range(3))[None]) ** 2, -1)


def stacked(m, x):
    rows = flat(m.c(x))
    other = tf.tile(m.p(tf.constant([0])), (tf.shape(rows)[0], 1))
    return m.f(tf.reduce_mean(tf.stack([rows, other], 1), 1))


def joined_as_tokens(m, x):
    rows = flat(m.c(x))[:, None]
    other = tf.tile(m.p(tf.constant([[0]])), (tf.shape(x)[0], 1, 1))
    return m.f(tf.reduce_mean(tf.concat([rows, other], 1), 1))


def largest_entries(m, x):
    return m.e(tf.math.top_k(flat(m.c(x)), 3).indices)


def chosen_by_one_hot(m, x):
    return tf.one_hot(tf.argmax(flat(m.c(x)), -1), SIZE) @ m.e(tf.range(SIZE))


PARTS = {
    prototypes: {"p": layers.Embedding(3, SIZE, name="p")},
    stacked: {"p": layers.Embedding(1, SIZE, name="p"), "f": head()},
    joined_as_tokens: {"p": layers.Embedding(1, SIZE, name="p"), "f": head()},
    largest_entries: {"e": table()},
    chosen_by_one_hot: {"e": table()},
}


@pytest.mark.parametrize("function", list(PARTS), ids=lambda function: function.__name__)
def test_a_table_beside_a_flattened_image(function, tmp_path):
    parts = {
        name: type(layer).from_config(layer.get_config()) for name, layer in PARTS[function].items()
    }
    model = Model(function, c=conv(), **parts)
    model(X)
    shapes = {"p": (3 if function is prototypes else 1, SIZE), "f": (4, SIZE), "e": (SIZE, 5)}
    weights = {f"{name}.weight": RNG.normal(size=shapes[name]) for name in parts}
    with pytest.raises(PlanError, match="PyTorch flattens channels first"):
        load(model, saved(tmp_path, C, weights), mapping={name: name for name in ("c", *parts)})


def test_a_class_token_before_a_sequence(tmp_path):
    """PyTorch's model may have the channels of the tokens first or last."""

    def function(m, x):
        tokens = m.c(x)
        first = tf.tile(m.p(tf.constant([[0]])), (tf.shape(x)[0], 1, 1))
        return m.f(tf.reshape(tf.concat([first, tokens], 1), (-1, 125)))

    p = layers.Embedding(1, 5, name="p")
    model = Model(function, c=layers.Conv1D(5, 1, name="c"), p=p, f=head())
    model(X.reshape(2, 24, 3))
    weights = {"c.weight": RNG.normal(size=(5, 3, 1)), "c.bias": np.zeros(5)}
    weights |= {"p.weight": RNG.normal(size=(1, 5)), "f.weight": RNG.normal(size=(4, 125))}
    with pytest.raises(PlanError, match="adds positions to an image or a sequence"):
        load(model, saved(tmp_path, weights), mapping={name: name for name in "cpf"})


def test_an_image_of_booleans(tmp_path):
    inputs = keras.Input((4, 6, 3), dtype="bool")
    numbers = layers.Lambda(lambda x: tf.cast(x, "float32"), output_shape=(4, 6, 3))(inputs)
    model = keras.Model(inputs, head()(layers.Flatten()(numbers)))
    file = saved(tmp_path, {"f.weight": RNG.normal(size=(4, 72))})
    with pytest.raises(PlanError, match=r"the axes of \(4, 6, 3\), its input"):
        load(model, file, mapping={"f": "f"})


def rows_of(x):
    return tf.reshape(x, (-1, 72))


def with_branch(m, x):
    if x.numpy().mean() > -9.0:  # a call with symbolic tensors fails here
        x = 2 * x
    return m.f(rows_of(x))


def test_a_helper_that_reshapes(tmp_path):
    model = Model(with_branch, f=head())
    model(X)
    file = saved(tmp_path, {"f.weight": RNG.normal(size=(4, 72))})
    with pytest.raises(PlanError, match="'f/kernel'"):
        load(model, file, mapping={"f": "f"})


def test_an_image_that_is_called_a_mask(tmp_path):
    class Masked(keras.Model):
        def __init__(self):
            super().__init__()
            self.f, self.g = head(), head(4, "g")

        def call(self, x, seg_mask):
            return self.g(x) + self.f(rows_of(seg_mask))

    model = Masked()
    model(ROWS, seg_mask=X)
    weights = {"f.weight": RNG.normal(size=(4, 72)), "g.weight": RNG.normal(size=(4, 7))}
    with pytest.raises(PlanError, match="'f/kernel'"):
        load(model, saved(tmp_path, weights), mapping={"f": "f", "g": "g"})


def test_patches_of_an_image_of_one_channel(tmp_path):
    def function(m, x):
        patches = tf.image.extract_patches(
            x[..., :1], [1, 2, 3, 1], [1, 2, 3, 1], [1, 1, 1, 1], "VALID"
        )
        return m.f(tf.reshape(patches, (-1, 24)))

    model = Model(function, f=head())
    model(X)
    file = saved(tmp_path, {"f.weight": RNG.normal(size=(4, 24))})
    with pytest.raises(PlanError, match="'f/kernel'"):
        load(model, file, mapping={"f": "f"})


@pytest.mark.parametrize("part", [slice(None), slice(1, 5)])
def test_a_sequence_that_is_flattened_beside_a_convolution(part, tmp_path):
    """PyTorch's model may take it as [channels, steps], or permute it for the convolution."""
    inputs = keras.Input((6, 4))
    mean = layers.GlobalAveragePooling1D()(layers.Conv1D(5, 3, name="c", use_bias=False)(inputs))
    rows = layers.Flatten()(inputs[:, part])
    model = keras.Model(inputs, head()(layers.Concatenate()([mean, rows])))
    weights = {"c.weight": RNG.normal(size=(5, 4, 3))}
    weights["f.weight"] = RNG.normal(size=(4, 5 + rows.shape[1]))
    with pytest.raises(PlanError, match="permutes its input"):
        load(model, saved(tmp_path, weights), mapping={"c": "c", "f": "f"})


def test_joined_features_before_an_einsum_with_the_outputs_first(tmp_path):
    first, second = keras.Input((4, 6, 3)), keras.Input((7,))
    rows = layers.Concatenate()([layers.Flatten()(conv()(first)), second])
    einsum = layers.EinsumDense("bi,oi->bo", SIZE + 7, name="o")
    model = keras.Model([first, second], einsum(rows))
    file = saved(tmp_path, C, {"o.weight": RNG.normal(size=(SIZE + 7, SIZE + 7))})
    with pytest.raises(PlanError, match="'o/kernel': several tensors are joined before an einsum"):
        load(model, file, mapping={"c": "c", "o": "o"})


class Counting(keras.Model):
    """A model whose call needs numbers, so that it cannot be traced."""

    def __init__(self, is_decoder):
        super().__init__()
        self.is_decoder = is_decoder
        self.d = head(60 if is_decoder else 4, "d")

    def call(self, x):
        count = len(x.numpy())
        if self.is_decoder:
            return tf.reshape(self.d(x), (count, 4, 3, 5))
        return self.d(tf.reshape(x, (count, 72)))


@pytest.mark.parametrize("is_decoder", [False, True])
def test_a_reshape_in_a_call_that_cannot_be_traced(is_decoder, tmp_path):
    model = Counting(is_decoder)
    model.run_eagerly = True
    x = tf.constant(ROWS if is_decoder else X)
    model.d.build(x.shape if is_decoder else (None, 72))
    model(x)
    shape = (60, 7) if is_decoder else (4, 72)
    file = saved(tmp_path, {"d.weight": RNG.normal(size=shape)})
    with pytest.raises(PlanError, match="'d/kernel'"):
        load(model, file, mapping={"d": "d"})


@pytest.mark.filterwarnings("ignore")  # Keras warns of a call that it cannot trace
def test_a_recurrent_convolution_in_a_call_that_cannot_be_traced(tmp_path):
    """Checks that a kernel with four axes beside a hidden reshape is no error by itself."""

    class Recurrent(keras.Model):
        def __init__(self):
            super().__init__()
            self.r = layers.ConvLSTM2D(2, 1, name="r")
            self.d = head(4, "d")

        def call(self, x):
            return self.d(tf.reshape(self.r(x), (len(x.numpy()), 48)))

    model = Recurrent()
    model.run_eagerly = True
    x = tf.ones((2, 3, 4, 6, 3))
    model.r(x), model.d(tf.ones((2, 48)))
    model(x)
    file = saved(tmp_path, {"d.weight": RNG.normal(size=(4, 48))})
    with pytest.raises(PlanError, match="'d/kernel'"):
        load(model, file, mapping={"d": "d"}, allow_missing="r/.*")


@needs_keras3("calls with two arguments whose shapes Keras does not keep")
def test_a_decoder_of_two_arguments(tmp_path):
    class Conditional(keras.Model):
        def __init__(self):
            super().__init__()
            self.d = head(60, "d")

        def call(self, x, number):
            return tf.reshape(self.d(x) * tf.cast(number[:, None], "float32"), (-1, 4, 3, 5))

    model = Conditional()
    model(ROWS, tf.constant([1, 2]))
    file = saved(tmp_path, {"d.weight": RNG.normal(size=(60, 7))})
    with pytest.raises(PlanError, match="Conditional, which tfwd does not trace, names a reshape"):
        load(model, file, mapping={"d": "d"})


class Gain(layers.Layer):
    """A layer with a weight per feature."""

    def build(self, shape):
        self.scale = self.add_weight(name="scale", shape=shape[1:])

    def call(self, x):
        return x * self.scale


def test_a_parameter_of_pytorch_with_a_name_of_keras(tmp_path):
    def function(m, x):
        return m.g(flat(m.c(x)))

    model = Model(function, c=conv(), g=Gain(name="g"))
    model(X)
    file = saved(tmp_path, C, {"g.scale": RNG.normal(size=SIZE)})
    with pytest.raises(PlanError, match=r"'g.scale' ends as in Keras, but '.*' in the same file"):
        load(model, file, mapping={"c": "c", "g/scale": "g.scale"})
    load(model, file, mapping={"c": "c", "g/scale": Key("g.scale", transposed=False)})


def test_a_normalization_of_pytorch_with_names_of_keras(tmp_path):
    def function(m, x):
        return m.n(flat(m.c(x)))

    model = Model(function, c=conv(), n=layers.LayerNormalization(name="n"))
    model(X)
    norm = {"n.gamma": RNG.normal(size=SIZE), "n.beta": RNG.normal(size=SIZE)}
    with pytest.raises(PlanError, match="'n.gamma' ends as in Keras"):
        load(model, saved(tmp_path, C, norm), mapping={"c": "c", "n": "n"})
