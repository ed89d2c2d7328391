"""Finds the weights of a model that no gradient reaches."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfwd import _keras
from tfwd._keras import losses as _keras_losses
from tfwd.numerics.checked_step import assign_all, tracked

NO_GRADIENT, ZEROS = "no gradient", "a gradient of zeros"


def unused(model: keras.Model, x: Any, y: Any = None, loss: Any = None) -> dict[str, str]:
    """Finds the trainable weights that no gradient reaches, or that only get zeros.

    The model is called once with `training=True` on the examples. The gradient of its loss is
    computed, including regularizers. Then the states of the model are restored.

    Args:
        model: a built model.
        x: a batch of inputs, as `fit` takes it.
        y: the labels, as `fit` takes them. Default None. Without labels, the loss is the sum of the
            squares of all outputs, also if the model has its own `compute_loss`.
        loss: the argument of `compile`: a Keras loss, its name, a function `(y_true, y_pred) ->
            values`, or a list or a dict of these, one for each output. `None` in it marks an output
            without a loss. Default None, for the loss and the loss_weights that the model was
            compiled with, or for the model's own `compute_loss`.

    Returns:
        A dict from a weight's path to its problem: "no gradient", or "a gradient of zeros".
        Optimizers and decoupled weight decay skip weights with "no gradient".

    Raises:
        TypeError: If `model` is not a Keras model.
        ValueError: If the model is not built, or has no loss although there are labels.

    Example:
    >>> import keras, tensorflow as tf
    >>> from tfwd.numerics import unused
    >>> class TwoHeads(keras.Model):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.head, self.other = keras.layers.Dense(1), keras.layers.Dense(1, name="other")
    ...     def call(self, inputs):
    ...         self.other(inputs)
    ...         return self.head(inputs)
    >>> model = TwoHeads()
    >>> _ = model(tf.ones([3, 2]))
    >>> [(path.split("/")[-2:], what) for path, what in unused(model, tf.ones([3, 2])).items()]
    [(['other', 'kernel'], 'no gradient'), (['other', 'bias'], 'no gradient')]
    """
    if not isinstance(model, keras.Model):
        raise TypeError(f"unused(): model={model!r}: give a Keras model")
    if not model.built:
        raise ValueError(
            f"model '{model.name}' is not built, and has no weights yet: call it on a batch first"
        )
    loss_weights = None
    has_own_loss = not _keras.is_of_keras(type(model), "compute_loss")
    if loss is None and y is not None and not has_own_loss:
        loss, loss_weights = _keras_losses.compiled_loss(model)[:2]
        if loss is None:
            raise ValueError(
                f"model '{model.name}' has no loss: compile it with a loss, or pass unused(loss=..)"
            )
    updated = set(map(id, _sources(model)))
    kept = [(v, v.numpy()) for v in tracked(model) if id(v) not in updated]
    try:
        with tf.GradientTape() as tape:
            outputs = model(x, training=True)
            value = _objective(model, x, y, outputs, loss, loss_weights)
        gradients = tape.gradient(value, _sources(model))  # the call may have built inner models
    finally:
        assign_all(kept)
    problems = {}
    variables = _keras.variables.trainable_variables(model)
    for variable, gradient in zip(variables, gradients, strict=True):
        if gradient is None:
            problems[_keras.variables.path(variable)] = NO_GRADIENT
        elif not bool(tf.reduce_any(tf.convert_to_tensor(gradient) != 0)):
            problems[_keras.variables.path(variable)] = ZEROS
    return problems


def _sources(model: keras.Model) -> list[tf.Variable]:
    """Returns the trainable variables of a model that exist so far, as TensorFlow's variables."""
    return list(map(_keras.variables.tf_variable, _keras.variables.trainable_variables(model)))


def _objective(
    model: keras.Model, x: Any, y: Any, outputs: Any, loss: Any, loss_weights: Any
) -> tf.Tensor:
    labels = tf.nest.map_structure(lambda v: v if v is None else tf.convert_to_tensor(v), y)
    if y is not None and loss is None:
        return model.compute_loss(x=x, y=labels, y_pred=outputs)
    if y is None:
        flat = [output for output in tf.nest.flatten(outputs) if output is not None]
        numbers = [output for output in flat if output.dtype != tf.string]
        numbers = [tf.abs(o) if o.dtype.is_complex else o for o in numbers]
        values = [tf.reduce_sum(tf.cast(o, tf.float32) ** 2) for o in numbers]
    else:
        value = _keras_losses.loss_as_compiled(model, loss, loss_weights)(labels, outputs)
        values = [tf.zeros([]) if value is None else tf.reduce_mean(value)]
    return tf.add_n([tf.cast(value, tf.float32) for value in (*values, *model.losses)])
