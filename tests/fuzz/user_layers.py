"""Custom layers for the random models, as users would write them."""

import keras
import tensorflow as tf

WIDTH = 4


class Late(keras.layers.Layer):
    """A layer that makes one weight in `build`. Its call builds its Dense."""

    def __init__(self, rank, **kwargs):
        super().__init__(**kwargs)
        self.rank = rank
        self.dense = keras.layers.Dense(WIDTH, activation="tanh", name="inner")
        self.supports_masking = True

    def build(self, input_shape):
        shape = (WIDTH,) * self.rank
        self.scale = self.add_weight(shape=shape, initializer="glorot_uniform", name="scale")
        self.built = True

    def call(self, inputs):
        scale = tf.convert_to_tensor(self.scale)
        scaled = tf.matmul(inputs, scale) if self.rank == 2 else inputs * scale
        return scaled + self.dense(inputs)


class Gate(keras.layers.Layer):
    """A layer with two inputs. Keras passes a mask for each by the name of its argument."""

    def build(self, *args, **kwargs):
        self.kernel = self.add_weight(shape=(WIDTH, WIDTH), name="kernel")
        self.built = True

    def call(self, left, right, left_mask=None, right_mask=None):
        gate = tf.sigmoid(tf.matmul(right, tf.convert_to_tensor(self.kernel)))
        for mask, factor in ((left_mask, 0.5), (right_mask, 0.25)):
            if mask is not None:
                shown = tf.cast(tf.convert_to_tensor(mask), gate.dtype)
                gate = gate * (factor + shown)[:, :, None]
        return left * gate


class Sums(keras.layers.Layer):
    """A layer that reads its mask, adds a loss, and counts in a non-trainable variable."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.supports_masking = True

    def build(self, input_shape):
        self.kernel = self.add_weight(shape=(WIDTH, WIDTH), name="kernel")
        self.count = self.add_weight(shape=(), initializer="zeros", trainable=False, name="count")
        self.built = True

    def call(self, inputs, mask=None):
        self.count.assign(self.count + 1.0)
        outputs = tf.matmul(inputs, tf.convert_to_tensor(self.kernel))
        self.add_loss(0.1 * tf.reduce_mean(tf.square(outputs)))
        if mask is not None:
            outputs *= 0.5 + tf.cast(tf.convert_to_tensor(mask), outputs.dtype)[:, :, None]
        return outputs


class Twice(keras.layers.Layer):
    """A layer that calls its layers one after the other, the first one twice."""

    def __init__(self, layers, **kwargs):
        super().__init__(**kwargs)
        self.held = list(layers)

    def call(self, inputs):
        for layer in [self.held[0], *self.held]:
            inputs = layer(inputs)
        return inputs


class Block(keras.Model):
    """A subclassed model of layers that are called one after the other."""

    def __init__(self, layers, **kwargs):
        super().__init__(**kwargs)
        self.held = list(layers)

    def call(self, inputs, training=None):
        for layer in self.held:
            inputs = layer(inputs, training=training)
        return inputs


class Reader(keras.layers.Layer):
    """A layer that gets a tensor by an attribute, not by an argument."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.supports_masking = True

    def build(self, input_shape):
        self.kernel = self.add_weight(shape=(WIDTH, WIDTH), name="kernel")
        self.built = True

    def call(self, inputs):
        return tf.matmul(inputs, tf.convert_to_tensor(self.kernel)) * self.context


class Tells(keras.layers.Layer):
    """A layer that gives a `Reader` its tensor before it calls it."""

    def __init__(self, reader, **kwargs):
        super().__init__(**kwargs)
        self.reader = reader

    def call(self, left, right):
        innermost = self.reader
        while not isinstance(innermost, Reader):
            innermost = innermost.layer
        vars(innermost)["context"] = right
        return self.reader(left)


class OwnCall(keras.layers.Embedding):
    """An embedding that does more than Keras's, with the `call` of Keras."""

    def __call__(self, *args, **kwargs):
        return 3.0 * super().__call__(*args, **kwargs)


def own_cell(layer):
    """Returns a recurrent layer with a cell whose `call` is replaced on the instance."""
    before = layer.cell.call

    def call(*args, **kwargs):
        output, states = before(*args, **kwargs)
        return 2.0 * output, states

    layer.cell.call = call
    return layer


def doubled(layer):
    """Returns a layer whose `call` is replaced on the instance."""
    before = layer.call

    def call(*args, **kwargs):
        return tf.nest.map_structure(lambda t: 2.0 * t, before(*args, **kwargs))

    layer.call = call
    return layer


def compiled(model):
    """Returns a model that was compiled before it became a part of another."""
    model.compile(optimizer="sgd", loss="mse")
    return model
