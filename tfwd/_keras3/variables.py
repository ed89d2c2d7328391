"""Variables of Keras 3: their values, names and dtypes, and the `tf.Variable` of each."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

in_stateless_scope = keras.src.backend.in_stateless_scope


def is_variable(value: Any) -> bool:
    """Returns True if it is a variable of layers."""
    return isinstance(value, keras.Variable)


def original(variable: keras.Variable) -> keras.Variable:
    """Returns the variable itself. On Keras 2 a substitution replaces it by a stand-in."""
    return variable


def weights(layer: Any) -> list[Any]:
    """Returns the weights of a layer that are variables. On Keras 3, all are variables."""
    return list(layer.weights)


def trainable_variables(layer: Any) -> list[Any]:
    """Returns the trainable variables of a layer. A model that is not built has no variables."""
    return list(layer.trainable_variables)


def all_variables(model: keras.Model) -> list[Any]:
    """Returns the weights of a model, its metrics' variables, and the states of its generators."""
    return list(model.variables)


def value(variable: keras.Variable) -> tf.Tensor:
    """Returns the variable's current value in its own dtype, even in an autocast scope."""
    if variable._value is not None and not in_stateless_scope():
        return tf.convert_to_tensor(variable._value)
    with keras.src.backend.AutocastScope(None):
        return tf.convert_to_tensor(variable.value)


def constant(variable: keras.Variable) -> tf.Tensor:
    """Returns the value of an untrained variable. No tape records the read."""
    return value(variable)


def read(variable: keras.Variable) -> tf.Tensor:
    """Returns the variable's current value in the dtype in which a layer reads it."""
    return tf.convert_to_tensor(variable.value)


def cast_as_read(variable: Any, rows: tf.Tensor) -> tf.Tensor:
    """Returns a part of a variable's value in the dtype in which an embedding reads it."""
    return variable._maybe_autocast(rows)


def assign(variable: keras.Variable, value: Any) -> None:
    """Assigns a tensor to a variable of the same shape, cast to its dtype, as a layer does."""
    if in_stateless_scope():
        variable.assign(value)
    else:
        variable._value.assign(tf.cast(value, variable._value.dtype))


def tf_variables(variable: keras.Variable) -> list[tf.Variable]:
    """Returns the `tf.Variable` of a Keras variable, and its copies on replicas."""
    return [variable._value, *getattr(variable._value, "values", ())]


def tf_variable(variable: keras.Variable) -> tf.Variable:
    """Returns the `tf.Variable` of a Keras variable, which TensorFlow's checkpoints can track."""
    return variable._value if isinstance(variable, keras.Variable) else variable


def path(variable: Any) -> str:
    """Returns the path of a variable: the names of its layers and its own name, joined by `/`."""
    return getattr(variable, "path", None) or str(variable.name).partition(":")[0]


def name(variable: keras.Variable) -> str:
    """Returns the variable's own name in its layer."""
    return variable.name


def dtype_name(variable: keras.Variable) -> str:
    """Returns the name of the dtype in which a variable is stored."""
    held = getattr(variable, "_dtype", None) or variable.dtype
    return keras.backend.standardize_dtype(held)


def paths(layer: keras.Layer) -> list[str]:
    """Returns the path of each of a built layer's weights, in their order."""
    return [variable.path for variable in layer.weights]


def name_scope(name: str) -> Any:
    """Returns a context in which the paths of new variables begin with a name."""
    return keras.name_scope(name)
